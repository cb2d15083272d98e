"""A topic with a row at the first and last time of every segment and frame, and what a filter by time misses there."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from forebay.spark.place.opening import opened
from forebay.spark.reading.columns import SPARK_TYPES
from forebay.spark.reading.filters import Filters
from forebay.spark.reading.options import ReadOptions
from forebay.spark.reading.pieces import PieceReader
from forebay.spark.reading.plan import plan
from forebay.spark.reading.snapshot import Range, Snapshot, Split
from forebay.spark.reading.task import read_split
from forebay.spark.reading.view import load
from forebay.spark.reading.where import parse_where
from forebay.testing.checks.invariants import Violation
from tests.spark.mixed import Mixed
from tests.spark.topics import Row, rows_in
from tests.support.environments import directories


def splits_of(loaded: tuple[Snapshot, tuple[Range, ...]], filters: Filters) -> list[Split]:
    """The splits of a read with these filters."""
    return plan(*loaded, columns=tuple(SPARK_TYPES), filters=filters)


def read_rows(loaded: tuple[Snapshot, tuple[Range, ...]], filters: Filters) -> list[Row]:
    """The rows of a read with these filters."""
    return rows_in(batch for split in splits_of(loaded, filters) for batch in read_split(split))


def edged_topic(directory: Path) -> Mixed:
    """One partition without deletes: a Parquet segment, a segment and a sealed file of three frames each; a tail."""
    wal = msgspec.structs.replace(directories.WAL, reframe_bytes_min=0)
    edged = Mixed(directories.shared_fs(directory, wal=wal), partitions=1)
    for _ in range(2):
        edged.filled.many(30)
        edged.filled.many(20)
        edged.export()
    edged.compact()
    for export in (True, False):
        for _ in range(3):
            edged.filled.many(10)
        if export:
            edged.export()
        else:
            edged.filled.seal()
    edged.filled.many(5)
    return edged


def edges_of(snapshot: Snapshot) -> dict[int, set[int]]:
    """The first and the last time of each segment or file, and of each frame in its index, by where it starts."""
    moments: dict[int, set[int]] = {}
    (view,) = snapshot.shards
    with opened(snapshot.location) as found:
        for piece in view.pieces:
            reader = PieceReader(found, view.shard, view.pieces, str(view), lambda start, stop: [])
            with contextlib.closing(reader):
                segment = reader.segment(piece)
                entries = segment.index().entries if segment is not None else None
            own = moments.setdefault(piece.start, set())
            if piece.descriptor is not None:
                own |= {piece.descriptor.time_min, piece.descriptor.time_max}
            if entries is not None:
                own |= {*entries["time_min"].tolist(), *entries["time_max"].tolist()}
    return moments


_AROUND: Final[list[tuple[str, int, Callable[[int, int], bool]]]] = [
    ("=", 0, operator.eq),
    ("<", 0, operator.lt),
    ("<=", 0, operator.le),
    (">", 0, operator.gt),
    (">=", 0, operator.ge),
    ("<", 1, operator.le),
    (">", -1, operator.ge),
    ("=", 1, lambda stamp, moment: False),
]
"""How a time is compared, by how many microseconds the compared value lies behind a moment, and what passes."""


def misses_at_edges(edged: Mixed) -> list[Violation]:
    """For each first and last time, compared in every way, the reads that do not give the rows they should."""
    loaded = load(ReadOptions.parse(edged.options))
    found = []
    for moment in sorted(set[int]().union(*edges_of(loaded[0]).values())):
        for name, later, passes in _AROUND:
            condition = f"timestamp {name} timestamp_micros({moment * 1000 + later})"
            expected = [row for row in edged.rows if passes(row["timestamp"], moment)]
            if read_rows(loaded, parse_where(condition)) != expected:
                found.append(Violation("I6", condition))
    return found
