"""Topics to read: records in every tier and shape, and what a plain computation says they are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pyarrow as pa
import pytest

import forebay
from forebay.appends.queue import QueuedRecord
from forebay.appends.ticket import Ticket
from forebay.clock import SystemClock
from forebay.disk import SystemDisk
from forebay.pages import Page
from forebay.records import Gap
from forebay.settings import WalSettings
from forebay.spark.reading.options import ReadOptions
from forebay.spark.reading.pieces import PieceReader
from forebay.spark.reading.plan import plan
from forebay.spark.reading.snapshot import Split
from forebay.spark.reading.view import load
from forebay.testing.inside import inside
from forebay.topics import TopicSpec, shard_id
from forebay.wal.recovery.resume import Start, resume
from forebay.wal.recovery.survey import survey
from forebay.wal.writer import ShardPlace

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Row: TypeAlias = dict[str, Any]
SETTINGS: Final[Mapping[str, object]] = {"wal": {"free_bytes_min": 0}}
TIME: Final = 1_700_000_000_123


class Filled:
    """A topic being filled, with a note of every row that it must show."""

    def __init__(self, log: forebay.Storage, name: str, *, partitions: int = 1, compression: str = "none") -> None:
        self.topic = log.create_topic(name, partitions=partitions, compression=compression)
        self.rows: list[Row] = []
        self._count = 0

    def many(self, count: int, partition: int = 0, size: int = 100) -> None:
        """One append of many records."""
        rows = [self._row(partition, size) for _ in range(count)]
        offsets = self.topic.append_many(
            [row["value"] for row in rows],
            keys=[row["key"] for row in rows],
            tags=[row["tag"] for row in rows],
            headers=[row["headers"] for row in rows],
            timestamps=[row["timestamp"] for row in rows],
            partition=partition,
        )
        self.rows += [{**row, "offset": offset} for row, offset in zip(rows, offsets, strict=True)]

    def singles(self, count: int, partition: int = 0) -> None:
        """As many appends of one record."""
        for _ in range(count):
            row = self._row(partition, 20)
            sent = {name: row[name] for name in ("key", "tag", "headers", "timestamp", "partition")}
            self.rows.append({**row, "offset": self.topic.append(row["value"], **sent)})

    def seal(self) -> None:
        """Rotate, and turn what was rotated into sealed files."""
        self.topic.rotate()
        for partition in range(self.topic.partitions):
            shard = inside(self.topic).segment(partition)
            shard.upkeep.seal_rotated()

    def every_tier(self) -> None:
        """Sealed large frames, sealed frames made of single appends, a rotated file, and the active one."""
        for partition in range(self.topic.partitions):
            self.many(3000, partition)
            self.many(2500, partition)
        self.seal()
        for partition in range(self.topic.partitions):
            self.singles(150, partition)
        self.seal()
        for partition in range(self.topic.partitions):
            self.many(60, partition)
            self.many(30, partition)
        self.topic.rotate()
        for partition in range(self.topic.partitions):
            self.singles(40, partition)
            self.many(2200, partition, size=10)
            self.singles(3, partition)

    def _row(self, partition: int, size: int) -> Row:
        number = self._count
        self._count += 1
        return {
            "key": None if number % 3 == 0 else b"key-%d" % (number % 17),
            "value": None if number % 11 == 0 else b"%d:" % number + b"x" * (number % size),
            "tag": None if number % 2 else f"tag-{number % 5}-é",
            "headers": [("name", b"%d" % number), ("none", None)] if number % 7 == 0 else [],
            "timestamp": TIME + number * 1001,
            "partition": partition,
        }


def rows_of(records: Iterator[forebay.Record]) -> list[Row]:
    """Records as rows."""
    return [
        {
            "key": record.key,
            "value": record.value,
            "tag": record.tag,
            "headers": list(record.headers),
            "timestamp": record.timestamp,
            "partition": record.partition,
            "offset": record.offset,
        }
        for record in records
    ]


def in_order(rows: list[Row]) -> list[Row]:
    """By partition and offset."""
    return sorted(rows, key=lambda row: (row["partition"], row["offset"]))


def lose_some(path: Path, name: str) -> None:
    """A process appends ten records of class `memory` and ends without a word; the next one finds offsets lost."""
    script = (
        "import os, sys, forebay\n"
        "log = forebay.open(sys.argv[1], {'wal': {'free_bytes_min': 0, 'reserve_records_min': 100}})\n"
        "topic = log.create_topic(sys.argv[2], durability='memory')\n"
        "topic.append_many([b'before'] * 10)\n"
        "topic.flush()\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(path), name], check=True)


def skip_offsets(path: Path, spec: TopicSpec, gap: Gap) -> None:
    """Open the closed log of a shard behind a gap, and put a record there."""
    disk, settings = SystemDisk(), WalSettings(free_bytes_min=0)
    directory = f"{path}/shards/{shard_id(spec.topic_id, 0)}"
    facts = survey(disk, directory, settings)
    place = ShardPlace(directory, spec.topic_id, 0, facts.epoch, str(spec.name))
    start = Start(next_offset=gap.stop, gap=gap)
    wal = resume(facts, start, place, settings, disk=disk, clock=SystemClock(), durability=spec.durability)
    entry = QueuedRecord(b"behind", None, None, (), TIME, None, Ticket())
    wal.acknowledge(wal.stage_one(entry, 100))
    wal.close()


def flip_a_bit(path: Path, marker: bytes) -> None:
    """Damage the last frame of one file that holds these bytes."""
    (victim,) = [file for file in path.rglob("*") if file.is_file() and marker in file.read_bytes()]
    content = bytearray(victim.read_bytes())
    content[content.index(marker)] ^= 1
    victim.write_bytes(content)


def splits_of(options: ReadOptions) -> list[Split]:
    """The tasks of a read, planned now."""
    snapshot, ranges = load(options)
    return plan(
        snapshot,
        ranges,
        columns=options.columns,
        partitions_min=options.partitions_min,
        fail_on_data_loss=options.fail_on_data_loss,
    )


def rows_in(batches: Iterable[pa.RecordBatch], topic: str = "shop/orders") -> list[Row]:
    """The rows that tasks gave, by partition and offset."""
    rows = []
    for batch in batches:
        batch.validate(full=True)
        stamps = batch.column("timestamp").cast(pa.int64()).to_pylist()
        for row, stamp in zip(batch.to_pylist(), stamps, strict=True):
            headers = [(pair["key"], pair["value"]) for pair in row["headers"] or ()]
            assert stamp % 1000 == 0
            rows.append({**row, "headers": headers, "timestamp": stamp // 1000})
            assert rows[-1].pop("topic") == topic
    return in_order(rows)


def spark_rows(frame: DataFrame, topic: str = "shop/orders") -> list[Row]:
    """The rows of a data frame, by partition and offset."""
    found = [row.asDict(recursive=True) for row in frame.collect()]
    for row in found:
        row["headers"] = [(pair["key"], pair["value"]) for pair in row["headers"] or ()]
        row["timestamp"] = round(row["timestamp"].astimezone(UTC).timestamp() * 1000)
        assert row.pop("topic") == topic
    return in_order(found)


def noted_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From here on, how many records each page had that tasks in this process read."""
    read: list[int] = []
    really = PieceReader.read

    def noted(reader: PieceReader, *given: Any) -> Page:
        page = really(reader, *given)
        read.append(sum(batch.count for batch in page.batches))
        return page

    monkeypatch.setattr(PieceReader, "read", noted)
    return read
