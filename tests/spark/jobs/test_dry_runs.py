"""A dry run of any job changes nothing: not a file, not a byte, not a directory, wherever one may look."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import forebay
from forebay.compacting.planning import Rules
from forebay.spark.jobs import compaction, register
from forebay.spark.place.location import Location
from tests.cli.rig import Outcome, Shell, flip

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]

PIPELINE = """
name: copy
location: {path: data}
sources: [{name: orders, topic: shop/orders, format: json, schema: id BIGINT}]
sinks:
  - {name: table, from: orders, table: out}
  - {name: iceberg, from: orders, table: shop.copied, format: iceberg}
  - {name: topic, from: orders, topic: shop/orders}
"""
JOBS = {
    "compact": "history compact shop/orders --older-than 0 --segments-min 1",
    "lake into a table": "table lake shop/orders --table shop.typed --schema id_BIGINT",
    "lake into a directory": "table lake shop/orders --to {home}/lake --schema id_BIGINT",
    "backfill": "history backfill shop/orders --from {home}/more.json --format json",
    "backfill from a table": "history backfill shop/orders --from-table shop.compacted",
    "migrate": "history migrate shop/orders --to {home}/new.yaml",
    "migrate and remove": "history migrate shop/orders --to {home}/new.yaml --remove-old",
    "reindex": "history reindex shop/orders",
    "register": "table register shop/orders",
    "register again": "table register shop/compacted",
    "scrub": "history scrub shop/orders --resume {home}/notes",
    "scrub and repair": "history scrub shop/orders --repair --resume {home}/sound",
    "profile": "history profile shop/orders --html {home}/page.html --resume {home}/counted",
    "run": "pipeline run {home}/p.yml",
}
OF_THE_STORE = ("compact", "migrate and remove", "reindex", "register", "scrub and repair")
"""These do other things where history lies in a store that is shared."""


def tree(home: Path) -> dict[str, bytes | None]:
    """Everything below a directory: files with their bytes, directories with nothing.

    Apart from what SQLite needs to share memory among readers, as long as it is empty.
    """
    found = [path for path in sorted(home.rglob("*")) if not _is_shared_memory(path)]
    return {str(path.relative_to(home)): path.read_bytes() if path.is_file() else None for path in found}


def _is_shared_memory(path: Path) -> bool:
    return path.name == "metadata.sqlite-shm" or (path.name == "metadata.sqlite-wal" and not path.stat().st_size)


@pytest.fixture(scope="module")
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Path:
    """A place where every job has something to do: small segments, damage, a topic that was compacted."""
    home = tmp_path_factory.mktemp(f"dry-{request.param}")
    shared = request.param == "shared"
    (home / "old.yaml").write_text(_settings(home / "store") if shared else "wal: {free_bytes_min: 0}\n")
    (home / "new.yaml").write_text(_settings(home / "new"))
    (home / "more.json").write_text('{"id": 100}\n')
    (home / "p.yml").write_text(PIPELINE)
    for name in ("sound", "counted"):
        (home / name).write_text("cut short")
    location = Location.of(home / "data", home / "old.yaml")
    with forebay.open(str(home / "data"), location.settings()) as log:
        for name in ("shop/orders", "shop/compacted"):
            topic = log.create_topic(name)
            for first in range(0, 60, 20):
                topic.append_many([b'{"id": %d}' % number for number in range(first, first + 20)], keys=[b"k"] * 20)
                topic.rotate()
            log.seal_topic(name)
    compaction.run(spark, location, ["shop/compacted"], rules=Rules(segments_min=1, settle_ms=0))
    return home


def _settings(root: Path) -> str:
    return f"wal: {{free_bytes_min: 0}}\nstorage: {{mode: shared_fs}}\nstore: {{root: {root}}}\n"


@pytest.mark.parametrize(
    ("home", "job"),
    [*(("local", job) for job in JOBS), *(("shared", job) for job in OF_THE_STORE)],
    indirect=["home"],
)
def test_a_dry_run_changes_nothing(home: Path, job: str) -> None:
    if job in ("register again", "backfill from a table"):
        register.run(Location.of(home / "data", home / "old.yaml"), "shop/compacted")
    words = [word.format(home=home).replace("id_BIGINT", "id BIGINT") for word in JOBS[job].split()]
    damaged = sorted(home.rglob("*.seg")) if job == "scrub and repair" else []
    for path in damaged:
        flip(path, -60)
    before = tree(home)

    ended = _dry(home, *words)

    after = tree(home)
    for path in damaged:
        flip(path, -60)
    assert ended.code == (6 if damaged else 0), ended.err
    assert before.keys() ^ after.keys() == set()
    assert [name for name in before if before[name] != after[name]] == []


def _dry(home: Path, *words: str) -> Outcome:
    return Shell(home / "data").run(*words, "--settings", str(home / "old.yaml"), "--dry-run")
