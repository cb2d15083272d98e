"""Runs of lake that end themselves with kill -9, each at another step, and one that does not.

`python -m tests.spark.jobs.lake_child DATA TARGET STEP…` says as JSON what was appended; TARGET is `table`, `delta`
or a directory. Rows are read and parted here, without Spark, and each run is a fork of this process, to be quick.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import forebay
from forebay.spark.jobs import lake
from forebay.spark.place.location import Location
from forebay.spark.reading.filters import Filters
from forebay.spark.reading.plan import plan
from forebay.spark.reading.snapshot import Range, Snapshot
from forebay.spark.reading.task import read_split
from forebay.spark.tables.delta import DeltaLakeTable
from forebay.spark.tables.lake_directory import DirectoryTarget
from forebay.spark.tables.lake_table import TableTarget
from forebay.spark.values.decoding import SOURCE_COLUMNS, Parted, RawDecoding, parted
from tests.support.processes import die_at


class LocalFrame:
    """As much of a DataFrame as lake asks for with raw values, worked out here."""

    def __init__(self, batches: Iterable[pa.RecordBatch]) -> None:
        self._batches = batches

    def select(self, *columns: str) -> LocalFrame:
        return LocalFrame(batch.select(list(columns)) for batch in self._batches)

    def mapInArrow(  # noqa: N802 - Spark's name
        self, work: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]], schema: str
    ) -> LocalFrame:
        return LocalFrame(work(self._batches))

    def collect(self) -> list[dict[str, Any]]:
        return [row for batch in self._batches for row in batch.to_pylist()]


def local_frame(
    spark: object,
    snapshot: Snapshot,
    offsets: Mapping[int, tuple[int, int]],
    columns: tuple[str, ...],
    *,
    filters: Filters,
    **_: object,
) -> LocalFrame:
    ranges = [Range(partition, start, end) for partition, (start, end) in offsets.items()]
    splits = plan(snapshot, ranges, columns=columns, filters=filters)
    return LocalFrame(batch for split in splits for batch in read_split(split))


@dataclass(frozen=True)
class Halves:
    """Values that begin with "bad" are bad rows."""

    @property
    def schema(self) -> pa.Schema:
        return RawDecoding().schema

    def select(self, frame: Any) -> Any:
        return frame.select(*SOURCE_COLUMNS)

    def part(self, batch: pa.RecordBatch) -> Parted:
        errors = pc.if_else(pc.starts_with(batch.column("value"), b"bad"), "it says so", pa.scalar(None, pa.string()))
        return parted(batch, [batch.column("value")], errors, self.schema)


STEPS: dict[str, Callable[[], None]] = {
    "files written": lambda: die_at(lake.LakeRun, "write_files"),
    "before the manifest": lambda: die_at(DirectoryTarget, "create_once", before=True),
    "behind the manifest": lambda: die_at(DirectoryTarget, "create_once"),
    "files in place": lambda: die_at(DirectoryTarget, "place_files", call=1),
    "before the side table": lambda: die_at(TableTarget, "commit_table", before=True),
    "between the tables": lambda: die_at(TableTarget, "commit_table", call=1),
    "behind the table": lambda: die_at(TableTarget, "commit_table", call=2),
    "before Delta's commit": lambda: die_at(DeltaLakeTable, "attempt", before=True, call=2),
    "behind Delta's commit": lambda: die_at(DeltaLakeTable, "attempt"),
    "second commit": lambda: die_at(lake.LakeRun, "write_files", call=2),
}


def run(path: str, target: str) -> None:
    vars(lake)["frame_of"] = local_frame
    vars(lake)["decoding"] = lambda kind, schema: Halves()
    table = {"table": "shop.raw", "table_format": "delta" if target == "delta" else "iceberg"}
    place = table if target in ("table", "delta") else {"directory": target}
    lake.run(None, Location.of(Path(path)), "shop/orders", commit_records=100, **place)  # type: ignore[arg-type]


def append(path: str, step: str, count: int = 130) -> list[tuple[int, int, str]]:
    with forebay.open(path, {"wal": {"free_bytes_min": 0}}) as log:
        topic = log.create_topic("shop/orders", partitions=2, exist_ok=True)
        values = [f"{'bad' if number % 5 == 0 else 'good'} {step} {number}" for number in range(count)]
        offsets = [topic.append(value.encode(), partition=number % 2) for number, value in enumerate(values)]
    return [(number % 2, offsets[number], value) for number, value in enumerate(values)]


def main(path: str, target: str, *steps: str) -> None:
    appended: list[tuple[int, int, str]] = []
    if target == "table":
        for library in ("pyiceberg.catalog.sql", "pyiceberg.io.pyarrow"):
            importlib.import_module(library)  # else each fork does it, in most of its time
    for step in steps:
        appended += append(path, step)
        child = os.fork()
        if not child:
            STEPS[step]()
            run(path, target)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (step, status)
    run(path, target)
    sys.stdout.write(json.dumps(appended))


if __name__ == "__main__":
    main(*sys.argv[1:])
