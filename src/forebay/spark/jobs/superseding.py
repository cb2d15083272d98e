"""Which records of a shard did a later one with their key supersede? Asked of every segment, put together by Spark.

Of each segment only the last record of each key is shuffled; what is superseded inside it is reported as it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import pyarrow as pa

from forebay.compacting.superseding import KEYS, Superseding, superseding
from forebay.decoders import unpacked
from forebay.format.control.offsets import OffsetSet
from forebay.format.metadata.descriptor import SegmentDescriptor
from forebay.format.metadata.vectors import DeletionVector, deleted_by, vectors_of
from forebay.spark.place.location import Location
from forebay.spark.place.opening import opened

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASKS_MAX: Final = 64
_FOUND: Final = "key binary, offset bigint, aged boolean, superseded binary"
_FOUND_SCHEMA: Final = pa.schema(
    [("key", pa.binary()), ("offset", pa.int64()), ("aged", pa.bool_()), ("superseded", pa.binary())]
)


class KeyUnit(msgspec.Struct, frozen=True, array_like=True):
    """One segment, to be looked through for keys."""

    segment: SegmentDescriptor
    ended: tuple[DeletionVector, ...]
    earliest: int
    appended_max: int


def looked_through(location: Location, unit: KeyUnit) -> Superseding:
    """What one segment says."""
    with opened(location) as found, closing(found.places.segment(unit.segment)) as segment:
        return superseding(segment, deleted_by(unit.ended), unit.earliest, unit.appended_max)


def superseded_by_spark(spark: SparkSession, location: Location, units: Sequence[KeyUnit]) -> OffsetSet:
    """The superseded records of the shard whose segments these are."""
    from pyspark.sql import functions as f

    if not units:
        return OffsetSet()
    rows = [(bytearray(msgspec.msgpack.encode(unit)),) for unit in units]
    frame = spark.createDataFrame(rows, "unit binary").repartition(min(len(units), TASKS_MAX))
    found = frame.mapInArrow(_reader(partial(looked_through, location)), _FOUND).cache()
    try:
        inside = found.where(f.col("superseded").isNotNull()).select("superseded").collect()
        keys = found.where(f.col("superseded").isNull())
        newest = keys.groupBy("key").agg(f.max("offset").alias("newest"))
        gone = keys.where("aged").join(newest, "key").where("offset < newest").select("offset")
        across = gone.mapInArrow(_packed, "superseded binary").collect()
    finally:
        found.unpersist()
    ended = OffsetSet()
    for row in [*inside, *across]:
        ended |= _unpacked(row["superseded"])
    return ended


def _reader(
    look: Callable[[KeyUnit], Superseding],
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for unit in batch.column(0).to_pylist():
                said = look(unpacked(unit, KeyUnit))
                newest = said.newest.select(KEYS.names).append_column(
                    "superseded", pa.nulls(len(said.newest), pa.binary())
                )
                yield from newest.cast(_FOUND_SCHEMA).to_batches()
                if len(said.superseded):
                    row = {"key": None, "offset": None, "aged": None, "superseded": _pack(said.superseded)}
                    yield pa.RecordBatch.from_pylist([row], schema=_FOUND_SCHEMA)

    return read


def _packed(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if batch.num_rows:
            packed = _pack(OffsetSet.of(batch.column(0).to_numpy()))
            yield pa.RecordBatch.from_pydict({"superseded": pa.array([packed], pa.binary())})


def _pack(offsets: OffsetSet) -> bytes:
    return msgspec.msgpack.encode(vectors_of(offsets, 1))


def _unpacked(packed: bytes) -> OffsetSet:
    return deleted_by(unpacked(packed, list[DeletionVector]))
