"""A topic as one DataFrame at nearly the speed of Parquet: Spark's own scan where history is Parquet, the source
`forebay` for the rest.

What lies in Parquet files from the earliest offset on is read by Spark itself, without what was deleted or evicted.
Where the first other piece begins, the source takes over, up to the end as it is now. Both show the same columns, and
the topic at one moment: the source looks for itself, and whether anything changed meanwhile is looked at afterwards.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa

from forebay.errors import DataLoss, Invalid
from forebay.format.control.offsets import OffsetSet
from forebay.format.metadata.descriptor import DescriptorKind
from forebay.records import Gap, Reason
from forebay.spark.place.addresses import FILE, address_of, literal
from forebay.spark.place.reading import opened_to_read
from forebay.spark.reading.as_frame import chosen_options
from forebay.spark.reading.columns import SPARK_TYPES
from forebay.spark.reading.filters import Condition, Filters
from forebay.spark.reading.options import FROM_EARLIEST, ReadOptions
from forebay.spark.reading.snapshot import ScanPiece, ShardView, Snapshot
from forebay.spark.reading.view import Viewer
from forebay.topics import TopicName

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from forebay.spark.place.broker import BrokerPlace
    from forebay.spark.place.opening import Opened


logger = logging.getLogger(__name__)

LOOKS_MAX: Final = 4
"""A topic that changes while it is looked at is looked at again, so often; then the source reads all of it."""
_STORED: Final = ("offset", "timestamp", "key", "value", "tag", "headers", "partition")
_LIMITS: Final = ("starting", "ending")
_COMPARED: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_OFFSETS: Final = pa.schema([pa.field("partition", pa.int32()), pa.field("offset", pa.int64())])


@dataclass(frozen=True, slots=True, kw_only=True)
class Native:
    """What Spark reads by itself of one partition: `[start, stop)` in these files, without what was deleted."""

    partition: int
    start: int
    stop: int
    files: tuple[str, ...]
    is_cut: bool
    """Whether the first file has records below `start`."""
    deleted: OffsetSet


def table(
    spark: SparkSession,
    topic: str | TopicName,
    *,
    where: str | None = None,
    columns: str | Sequence[str] | None = None,
    **options: str,
) -> DataFrame:
    """The whole topic as it is now, with the columns and options of `spark.read.format("forebay")`.

    Say where it is as for the source: `path`, or `settings`, or `store` and `metadata`, or `broker`; settings with a
    dot go into `**{…}`. `where` chooses rows and `columns`, a list of names or one text with commas, what is shown of
    them; both reach both parts. Filters on the DataFrame are Spark's own: they reach the Parquet files too, and what
    comes from the source after it was read.
    """
    options |= chosen_options(where, columns)
    for name in options:
        if name.lower().startswith(_LIMITS):
            raise Invalid(f'option "{name}" is for spark.read: choose by where, as in "offset >= 10", instead')
    wanted = ReadOptions.parse({**options, "topic": str(topic)})
    made = _Table(spark, wanted, options)
    with contextlib.closing(Viewer(wanted.location)) as viewer:
        for _ in range(LOOKS_MAX):
            found = made.at_one_moment(viewer)
            if found is not None:
                return found
    logger.warning("%s changed at each of %d looks: the source reads all of it", topic, LOOKS_MAX)
    return made.source({})


class _Table:
    """One call of `table`."""

    def __init__(self, spark: SparkSession, wanted: ReadOptions, options: Mapping[str, str]) -> None:
        from forebay.spark.reading.pushing import push_options

        self._spark = spark
        self._wanted = wanted
        self._options = {**push_options(spark), **options, "topic": str(wanted.topics.names[0])}

    def source(self, limits: Mapping[str, str]) -> DataFrame:
        """What the source reads between these limits."""
        return self._spark.read.format("forebay").options(**{**self._options, **limits}).load()

    def at_one_moment(self, viewer: Viewer) -> DataFrame | None:
        """Both parts as they were at one moment; `None` if records ended, or history was rewritten, while they were
        looked at. `Conflict` if the topic is another one by now.
        """
        from pyspark.errors import PySparkException

        wanted = self._wanted
        before = viewer.look(wanted.topics)
        with opened_to_read(before.location) as found:
            natives = [native_of(view, found, fail_on_data_loss=wanted.fail_on_data_loss) for view in before.shards]
        # The source looks for itself: that must be the topic that was looked at here.
        same = {"topicId": before.shards[0].topic_id}
        if not any(native.files for native in natives):
            return self.source(same)
        topics = replace(wanted.topics, topic_id=before.shards[0].topic_id)
        try:
            both = self._both(before.shards, natives, same)
        except PySparkException:
            # As when a file is gone by now, or the first offsets of the source were evicted.
            if _is_as_before(before, viewer.look(topics)):
                raise
            return None
        return both if _is_as_before(before, viewer.look(topics)) else None

    def _both(self, views: Sequence[ShardView], natives: Sequence[Native], same: Mapping[str, str]) -> DataFrame:
        """What Spark reads by itself, and what is left for the source."""
        shown = [_shown(column, self._options["topic"]) for column in self._wanted.columns]
        rows = _matching(_scanned(self._spark, natives), self._options["topic"], self._wanted.where)
        compacted = _without_deleted(self._spark, rows, natives).select(*shown)
        if all(native.stop == view.next for native, view in zip(natives, views, strict=True)):
            return compacted
        return compacted.unionByName(self.source({**same, **_limits(views, natives)}))


def _is_as_before(before: Snapshot, after: Snapshot) -> bool:
    """Whether nothing ended and nothing was rewritten in between: so a reader then saw the same rows."""
    if len(before.shards) != len(after.shards):
        return False
    pairs = zip(before.shards, after.shards, strict=True)
    return all(
        (old.earliest, old.generation, old.deleted) == (new.earliest, new.generation, new.deleted.clipped(0, old.next))
        for old, new in pairs
    )


def native_of(view: ShardView, found: Opened | BrokerPlace, *, fail_on_data_loss: bool) -> Native:
    """The longest run of a partition, from its earliest offset, that is Parquet in files, or gaps between them.

    Raises `DataLoss` for records that went missing in it, unless asked to go on.
    """
    files: list[str] = []
    stop, first = view.earliest, None
    for piece in view.pieces:
        address = _native_address(piece, found)
        if address is None and piece.gap is None:
            break
        if address is not None:
            files.append(address)
            first = first or piece.descriptor
        if fail_on_data_loss and view.is_durable:
            _refuse_loss(view, piece, found)
        stop = piece.stop
    return Native(
        partition=view.partition,
        start=view.earliest,
        stop=stop,
        files=tuple(files),
        is_cut=first is not None and first.start < view.earliest,
        deleted=view.deleted.clipped(view.earliest, stop),
    )


def _native_address(piece: ScanPiece, found: Opened | BrokerPlace) -> str | None:
    """Where Spark finds a piece by itself: a whole Parquet file."""
    descriptor = piece.descriptor
    if descriptor is None or descriptor.kind is not DescriptorKind.PARQUET or piece.stop != descriptor.end:
        return None
    address = address_of(found, descriptor)
    return address if address is not None and address.startswith(FILE) else None


def _refuse_loss(view: ShardView, piece: ScanPiece, found: Opened | BrokerPlace) -> None:
    for gap in _gaps(piece, found):
        lost = gap.stop - gap.start - view.deleted.count_in(gap.start, gap.stop)
        if gap.stop > view.earliest and lost and gap.reason in (Reason.LOST, Reason.DAMAGED):
            raise DataLoss(
                f"{view}: offsets {gap} cannot be read: set failOnDataLoss to false to go on without them; "
                '"forebay verify" says more',
                shard=view,
                start=gap.start,
                stop=gap.stop,
                reason=gap.reason.name.lower(),
            )


def _gaps(piece: ScanPiece, found: Opened | BrokerPlace) -> Sequence[Gap]:
    """The gaps that a piece names; one with a record for every offset is not opened for that."""
    descriptor = piece.descriptor
    assert descriptor is not None
    if piece.gap is not None:
        return [piece.gap]
    if descriptor.records == descriptor.end - descriptor.start:
        return []
    segment = found.places.segment(descriptor)
    try:
        return segment.index().gaps
    finally:
        segment.close()


def _limits(views: Sequence[ShardView], natives: Sequence[Native]) -> Mapping[str, str]:
    """What is left for the source, as its options say it."""
    starts = {str(one.partition): one.stop if one.files else FROM_EARLIEST for one in natives}
    ends = {str(view.partition): view.next for view in views}
    chosen = {"startingOffsets": starts, "endingOffsets": ends}
    return {name: msgspec.json.encode({views[0].topic: offsets}).decode() for name, offsets in chosen.items()}


def _scanned(spark: SparkSession, natives: Sequence[Native]) -> DataFrame:
    """The rows of all files, without those below the earliest offset."""
    from pyspark.sql import functions

    schema = ", ".join(f"`{name}` {SPARK_TYPES[name]}" for name in _STORED)
    files = [literal(file) for native in natives for file in native.files]
    rows = spark.read.schema(schema).parquet(*files)
    cut = [native for native in natives if native.is_cut]
    for native in cut:
        below = (functions.col("partition") == native.partition) & (functions.col("offset") < native.start)
        rows = rows.where(~below)
    return rows


def _matching(rows: DataFrame, topic: str, where: Filters) -> DataFrame:
    """The rows that meet the conditions, by filters of Spark's own. No file has the topic: it is one for all rows."""
    from pyspark.sql import functions

    for condition in where.conditions:
        own = condition.column == "topic"
        rows = rows.where(functions.lit(condition.passed_by(topic)) if own else _as_spark_asks(condition))
    return rows


def _as_spark_asks(condition: Condition) -> Column:
    from pyspark.sql import functions

    def literal(value: Any) -> Column:
        if condition.column == "timestamp":
            return functions.timestamp_micros(functions.lit(value))
        return functions.lit(value)

    column = functions.col(condition.column)
    match condition.name:
        case "is null":
            return column.isNull()
        case "is not null":
            return column.isNotNull()
        case "in":
            return column.isin(*map(literal, condition.value))
        case "starts with":
            return column.startswith(condition.value)
        case _:
            compared: Column = _COMPARED[condition.name](column, literal(condition.value))
            return compared


def _without_deleted(spark: SparkSession, rows: DataFrame, natives: Sequence[Native]) -> DataFrame:
    from pyspark.sql import functions

    parts = [part for native in natives for part in _offsets(native)]
    if not parts:
        return rows
    deleted = spark.createDataFrame(pa.Table.from_batches(parts, _OFFSETS))
    return rows.join(functions.broadcast(deleted), ["partition", "offset"], "left_anti")


def _offsets(native: Native) -> Iterator[pa.RecordBatch]:
    if len(native.deleted):
        offsets = pa.array(native.deleted, pa.int64())
        partitions = pa.repeat(pa.scalar(native.partition, pa.int32()), len(offsets))
        yield pa.RecordBatch.from_arrays([partitions, offsets], schema=_OFFSETS)


def _shown(name: str, topic: str) -> Column:
    """A column as the source shows it."""
    from pyspark.sql import functions

    if name == "topic":
        return functions.lit(topic).alias(name)
    column = functions.col(name)
    if name == "headers":
        # A record without headers has null there, as in Spark's Kafka source.
        return functions.when(functions.size(column) > 0, column).alias(name)
    return column
