"""What a backfill reads: files of any kind that Spark knows, an Iceberg table, or a DataFrame of the caller's own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import unquote

from forebay.errors import Invalid
from forebay.spark.place.addresses import literal
from forebay.spark.place.location import Location
from forebay.spark.tables.catalog import look_up_table
from forebay.spark.tables.files import files_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_LOCAL: Final = "file:"
KINDS: Final = ("parquet", "json", "csv", "text", "orc")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The rows of a source at the moment when it was looked at."""

    fingerprint: str | None
    """Names these rows: another one if a file was added, taken away or replaced; `None` if that cannot be seen."""
    files: tuple[str, ...]
    frame: Callable[[tuple[str, ...]], DataFrame]
    """The rows of some of the files."""

    def slices(self, files_each: int | None) -> list[DataFrame]:
        """The rows, all together or so many files at a time, always cut in the same way."""
        if files_each is None:
            return [self.frame(self.files)]
        if self.fingerprint is None and not self.files:
            raise Invalid("only files are brought some at a time: leave files_each out")
        groups = (self.files[first : first + files_each] for first in range(0, len(self.files), files_each))
        return [self.frame(group) for group in groups]


class Source(Protocol):
    """Rows to be brought into a topic."""

    def look(self, spark: SparkSession) -> Seen:
        """The rows as they are now: what comes later is not among them."""


@dataclass(frozen=True, kw_only=True)
class Files:
    """Files of one kind, or directories of such."""

    paths: tuple[str, ...]
    kind: str = "parquet"
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise Invalid(f"files are of kind {', '.join(KINDS)}, not {self.kind!r}")
        if not self.paths:
            raise Invalid("a backfill from files names at least one")

    def look(self, spark: SparkSession) -> Seen:
        whole = self._frame(spark, self.paths)
        files = tuple(sorted(map(unquote, whole.inputFiles())))
        stamps = self._stamps(spark, files)
        facts = [self.kind, *(f"{k}={v}" for k, v in sorted(self.options.items()))]
        is_certain = all(stamps[name] for name in files)
        return Seen(
            fingerprint=_digest([*facts, *(f"{name} {stamps[name]}" for name in files)]) if is_certain else None,
            files=files,
            frame=lambda chosen: whole if chosen == files else self._frame(spark, tuple(map(literal, chosen))),
        )

    def _stamps(self, spark: SparkSession, files: Sequence[str]) -> Mapping[str, str]:
        """By which each file differs from another of its name: size and time. Empty where that cannot be seen."""
        here = {name: _stamp(name) for name in files if name.startswith(_LOCAL)}
        away = [name for name in files if name not in here]
        return {**here, **self._remote_stamps(spark, away)} if away else here

    def _remote_stamps(self, spark: SparkSession, files: Sequence[str]) -> Mapping[str, str]:
        """The same for files that Spark reaches and this process does not; no file is opened for it."""
        # Looked up recursively, folders named a=b do not become columns.
        reader = spark.read.options(**self.options).option("recursiveFileLookup", "true")
        facts = reader.format("binaryFile").load(list(map(literal, files)))
        rows = facts.selectExpr("path", "length", "unix_millis(modificationTime) AS modified_ms").collect()
        found = {row.path: f"{row.length} {row.modified_ms}" if row.modified_ms else "" for row in rows}
        if not found.keys() <= set(files):
            return dict.fromkeys(files, "")
        # Spark leaves files without content out.
        return {name: found.get(name, "no content") for name in files}

    def _frame(self, spark: SparkSession, paths: Sequence[str]) -> DataFrame:
        from pyspark.errors import AnalysisException

        reader = spark.read.options(**self.options)
        if len(self.paths) == 1 and Path(self.paths[0]).is_dir() and self.kind != "text":
            # So that columns in the names of folders are there also when single files are read.
            reader = reader.option("basePath", self.paths[0])
        if self.kind == "json" and "mode" not in {name.lower() for name in self.options}:
            reader = reader.option("mode", "FAILFAST")  # a line that is no JSON must not become a row of nulls
        try:
            return reader.format(self.kind).load(list(paths))
        except AnalysisException as error:
            raise Invalid(f"{', '.join(self.paths)} cannot be read as {self.kind}: {_first_line(error)}") from error


@dataclass(frozen=True, kw_only=True)
class Table:
    """An Iceberg table of the catalog in the settings, as it is now."""

    location: Location
    name: str

    def look(self, spark: SparkSession) -> Seen:
        table = look_up_table(self.location, self.name)
        if table is None:
            raise Invalid(f"there is no table {self.name} in the catalog of the settings")
        found = files_of(table)
        return Seen(
            fingerprint=_digest([self.name, *found.files]), files=found.files, frame=partial(found.frame, spark)
        )


@dataclass(frozen=True)
class Frame:
    """Rows that the caller has: only they know whether those are the same again."""

    frame: DataFrame

    def look(self, spark: SparkSession) -> Seen:
        return Seen(fingerprint=None, files=(), frame=self._whole)

    def _whole(self, _: tuple[str, ...]) -> DataFrame:
        return self.frame


def _stamp(address: str) -> str:
    """By what a file on this machine differs from another of its name; nothing if it is not seen from here."""
    path = Path(address.removeprefix("file://"))
    try:
        found = path.stat()
    except OSError:
        return ""
    return f"{found.st_size} {found.st_mtime_ns}"


def _digest(facts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
