"""The public names of `forebay.spark` are one flat, sorted list; their signatures and their old paths stay."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import types
from typing import Final

import pytest

import forebay.spark

_ENDS: Final = "dry_run: bool = False, progress: JobProgress | None = None) -> JobReport"
_JOB: Final = "(spark: SparkSession, location: Location, "
_TOPICS: Final = "topics: Sequence[str] = (), *, "
_FRAME: Final = (
    "(spark: SparkSession, topic: str | TopicName, *, where: str | None = None, "
    "columns: str | Sequence[str] | None = None, **options: str) -> DataFrame"
)
SIGNATURES: Final = {
    "Files": "(*, paths: tuple[str, ...], kind: str = parquet, options: Mapping[str, str] = <factory>) -> None",
    "Frame": "(frame: DataFrame) -> None",
    "Location.at_broker": (
        "(url: str, *, token_env: str | None = None, token_file: str | None = None, verify: str | None = None)"
        " -> Location"
    ),
    "Location.of": "(path: str | Path, settings: str | Path | None = None) -> Location",
    "Location.parse": "(options: Mapping[str, str], environment: Mapping[str, str] | None = None) -> Location",
    "Rules": (
        "(*, target_bytes: int = 268435456, segments_min: int = 4, settle_ms: int = 60000, dead_share: float = 0.0)"
    ),
    "Table": "(*, location: Location, name: str) -> None",
    "backfill": (
        f"{_JOB}topic: str, source: Source, *, columns: Mapping[str, str] | None = None, order_by: Sequence[str] = (), "
        f"backfill_id: str | None = None, files_each: int | None = None, attach_seconds: float = 120.0, {_ENDS}"
    ),
    "compact": f"{_JOB}{_TOPICS}rules: Rules | None = None, wait_s: float = 0.0, {_ENDS}",
    "lake": (
        f"{_JOB}topic: str, *, table: str | None = None, table_format: str = iceberg, directory: str | None = None, "
        "format: str = json, "
        "schema: str | None = None, where: str | None = None, "
        f"commit_records: int = 5000000, fail_on_data_loss: bool = True, {_ENDS}"
    ),
    "migrate": f"{_JOB}to: Location, {_TOPICS}remove_old: bool = False, {_ENDS}",
    "open_catalog": "(location: Location) -> Catalog",
    "pipelines.plan": "(file: str, location: Mapping[str, str] | None = None) -> Outline",
    "pipelines.run": "(spark: SparkSession, file: str, location: Mapping[str, str] | None = None) -> RunReport",
    "profile": (
        f"{_JOB}{_TOPICS}where: str | None = None, columns: str | Sequence[str] | None = None, "
        f"html: str | None = None, resume: str | None = None, {_ENDS}"
    ),
    "read": _FRAME,
    "register": "(location: Location, topic: str, *, table_format: str = iceberg, dry_run: bool = False) -> JobReport",
    "reindex": f"{_JOB}{_TOPICS}{_ENDS}",
    "scrub": f"{_JOB}{_TOPICS}quick: bool = False, repair: bool = False, notes: str | None = None, {_ENDS}",
    "session": (
        "(app_name: str = forebay, *, master: str | None = None, "
        "settings: Mapping[str, str] | None = None) -> SparkSession"
    ),
    "table": _FRAME,
    "write": "(frame: DataFrame, topic: str | TopicName, **options: str) -> StreamingQuery | None",
}
MADE_BY_OTHERS: Final = {"ForebayDataSource", "JobReport"}
"""Classes that Spark, or a job, makes: a program names them only."""
OLD_PATHS: Final = {
    "forebay.compacting.planning:Rules": "Rules",
    "forebay.spark.iceberg:open_catalog": "open_catalog",
    "forebay.spark.jobs.backfill:run": "backfill",
    "forebay.spark.jobs.compaction:run": "compact",
    "forebay.spark.jobs.lake:run": "lake",
    "forebay.spark.jobs.migrate:run": "migrate",
    "forebay.spark.jobs.profile:run": "profile",
    "forebay.spark.jobs.reindex:run": "reindex",
    "forebay.spark.jobs.scrub:run": "scrub",
    "forebay.spark.jobs.sources:Files": "Files",
    "forebay.spark.jobs.sources:Frame": "Frame",
    "forebay.spark.jobs.sources:Table": "Table",
    "forebay.spark.location:Location": "Location",
    "forebay.spark.registering:run": "register",
    "forebay.spark.source:ForebayDataSource": "ForebayDataSource",
    "pyspark_forebay:DefaultSource": "ForebayDataSource",
}
"""Where programs, following earlier docs, import from."""
_ANY_ORDER: Final = """
import importlib, pkgutil, types
import forebay.spark
for module in pkgutil.walk_packages(forebay.spark.__path__, "forebay.spark."):
    importlib.import_module(module.name)
found = [name for name in forebay.spark.__all__ if isinstance(getattr(forebay.spark, name), types.ModuleType)]
print(found)
"""

_NAMED_ALONE: Final = """
import sys
import forebay.spark
print([name for name in sys.modules if name.startswith(("forebay.", "pyspark", "pyarrow"))])
"""


def test_public_names_are_sorted() -> None:
    assert list(forebay.spark.__all__) == sorted(forebay.spark.__all__)


def test_public_names_are_what_is_visible() -> None:
    visible = {name for name in dir(forebay.spark) if not name.startswith("_") and name != "annotations"}
    modules = {name for name in visible if isinstance(getattr(forebay.spark, name), types.ModuleType)}

    assert visible - modules | {"pipelines"} == set(forebay.spark.__all__)


def test_every_public_name_has_its_signature() -> None:
    found = {name: _signature(name) for name in SIGNATURES}

    assert found == SIGNATURES
    assert {name.partition(".")[0] for name in SIGNATURES} | MADE_BY_OTHERS == set(forebay.spark.__all__)


def _signature(name: str) -> str:
    found: object = forebay.spark
    for part in name.split("."):
        found = getattr(found, part)
    assert callable(found)
    return str(inspect.signature(found)).replace("'", "")


@pytest.mark.parametrize("old", OLD_PATHS)
def test_an_old_path_leads_to_the_same_thing(old: str) -> None:
    module, _, name = old.partition(":")

    assert getattr(importlib.import_module(module), name) is getattr(forebay.spark, OLD_PATHS[old])


@pytest.mark.slow
def test_a_name_means_the_same_whatever_was_imported_before() -> None:
    """A module of the name of a public function takes its place as soon as it is imported."""
    reported = subprocess.run([sys.executable, "-c", _ANY_ORDER], capture_output=True, text=True, check=True)

    assert reported.stdout.splitlines() == ["['pipelines']"]


def test_the_surface_alone_loads_no_room_but_what_keeps_workers_quiet() -> None:
    """Every Python worker of Spark passes it on its way to one module."""
    reported = subprocess.run([sys.executable, "-c", _NAMED_ALONE], capture_output=True, text=True, check=True)

    assert reported.stdout.splitlines() == ["['forebay.spark.start', 'forebay.spark.start.quiet', 'forebay.spark']"]
