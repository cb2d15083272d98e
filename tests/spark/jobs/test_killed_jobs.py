"""kill -9 of lake and migrate while tasks of a Spark stage run: the next run ends with exactly the rows."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import forebay
from forebay.spark.place.location import Location
from forebay.spark.tables.catalog import look_up_table
from forebay.spark.tables.upkeep import named_files
from tests.ledger import Ledger
from tests.spark.jobs.killed_job import TOPIC, run
from tests.spark.topics import SETTINGS
from tests.support.soak import SOAK

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(3600 if SOAK else 600)]

ROOT: Final = Path(__file__).parents[3]
PARTITIONS: Final = 4
Row = tuple[int, int, bytes | None]


def _filled(data: Path) -> Counter[Row]:
    with forebay.open(str(data), SETTINGS) as log:
        topic = log.create_topic(TOPIC, partitions=PARTITIONS)
        for first in (0, 50, 100):
            for partition in range(PARTITIONS):
                topic.append_many([b"%d" % number for number in range(first, first + 50)], partition=partition)
            topic.rotate()
        log.seal_topic(TOPIC)
    return _records(data, SETTINGS)


def _records(data: Path, settings: Any) -> Counter[Row]:
    with forebay.open(str(data), settings, read_only=True) as log:
        topic = log.topic(TOPIC)
        return Counter(
            (partition, record.offset, record.value)
            for partition in range(PARTITIONS)
            for record in topic.read(0, partition=partition)
        )


def _killed(job: str, moment: str, tasks: int, directory: Path, target: str, ledger: Ledger) -> None:
    """Run the job in a process of its own that dies then."""
    words = [job, moment, str(tasks), str(directory), target]
    child = [sys.executable, "-m", "tests.spark.jobs.killed_job", *words]
    # In a group of its own: all of it dies together, and no other process.
    ended = subprocess.run(child, cwd=ROOT, start_new_session=True, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-2000:]
    assert len(list((directory / f"tasks-{moment}-{tasks}").iterdir())) >= tasks
    ledger.count("kills", of=f"{job} in a stage")


MOMENTS: Final = (("begun", 1), ("begun", 2), ("done", 1), ("done", 2), ("done", 5), ("begun", 7))
"""A stage has two to four tasks with rows, and there are four of them, one for each commit."""
LAKES: Final = (
    [(kind, *when) for kind in ("table", "directory") for when in MOMENTS] if SOAK else [("table", "done", 2)]
)


@pytest.mark.parametrize(("kind", "moment", "tasks"), LAKES)
def test_lake(
    spark: SparkSession,
    tmp_path: Path,
    ledger: Ledger,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    moment: str,
    tasks: int,
) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    expected = _filled(data)
    target = "table" if kind == "table" else str(out)

    _killed("lake", moment, tasks, tmp_path, target, ledger)
    run(spark, "lake", data, target)
    left = _unnamed(data, out, kind)
    monkeypatch.setenv("FOREBAY_TABLE__ORPHAN_GRACE_S", "0")
    report = run(spark, "lake", data, target)

    assert left or moment == "begun", "tasks of the killed run had written something"
    assert _unnamed(data, out, kind) == set()
    assert report.figures["offsets"] == 0
    columns = ["_partition", "_offset", "value"]
    table = look_up_table(Location.of(data), "shop.raw")
    rows = table.scan().to_arrow() if table is not None else pq.read_table(str(out / "data"))
    found = Counter(tuple(row.values()) for row in rows.select(columns).to_pylist())
    assert found == expected


def _unnamed(data: Path, out: Path, kind: str) -> set[str]:
    """Parquet files that no commit names."""
    if kind == "directory":
        return {path.name for path in (out / "_staged").rglob("*.parquet")}
    named = {
        name.rpartition("/")[2]
        for table in (look_up_table(Location.of(data), name) for name in ("shop.raw", "shop.raw_bad"))
        if table is not None
        for name in named_files(table)
    }
    return {path.name for path in (data / "tables").rglob("*.parquet")} - named


MIGRATIONS: Final = (("begun", 1), ("done", 1), ("begun", 5), ("done", 4), ("done", 8)) if SOAK else (("done", 4),)


def test_migrate(spark: SparkSession, tmp_path: Path, ledger: Ledger) -> None:
    data, new = tmp_path / "data", tmp_path / "new.yaml"
    expected = _filled(data)
    new.write_text(
        f"storage: {{mode: shared_fs}}\nstore: {{root: {tmp_path / 'new'}}}\nwal: {{free_bytes_min: 0}}\n"
        f"metadata: {{path: {data / 'metadata.sqlite'}}}\n"
    )

    for moment, tasks in MIGRATIONS:
        _killed("migrate", moment, tasks, tmp_path, str(new), ledger)
        assert _records(data, SETTINGS) == expected, "until the switch everything is read from the old store"
    report = run(spark, "migrate", data, str(new))

    assert report.is_clean, report.lines()
    assert report.figures["there_before"] >= 3, "what was copied is not copied twice"
    assert report.figures["there_before"] + report.figures.get("copied", 0) == 3 * PARTITIONS
    for file in (data / "shards").rglob("*.seg"):
        file.rename(file.with_suffix(".gone"))
    assert _records(data, Location.of(data, new).settings()) == expected
