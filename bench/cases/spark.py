"""Topics in Spark beside plain files: whole scans, filters, streams, bulk loads, and the bytes that history takes.

One session reads the same rows from everybody in turn. Times are turned into rows of the topic per second, so that a
filter that reads less of it is quicker, whoever does it.
"""

# ruff: noqa: PLC0415 - Spark is loaded by this case alone

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forebay
from bench import payload
from bench.plan import Figures, Plan
from bench.results import Limit, Result, at_least, at_most, result
from forebay.compacting.planning import Rules

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TOPIC = "bench/t"
BEGUN_S = 1_700_000_000
RECORDS_PER_S = 1_000
KEYS = 100_000
TASKS = 8
STREAM_BATCHES = 5
SMALL_BATCHES = 12
SMALL_RECORDS = 1_000
PLAIN, ZSTD, JSON = "parquet", "parquet zstd", "json lines"
SOURCE, NARROW, TABLE = "forebay", "forebay, columns named", "forebay table"
AT_ONCE = Rules(settle_ms=0, segments_min=1)
EVENT_KINDS = ("view", "add to cart", "order", "refund")


def run(plan: Plan) -> Iterator[Result]:
    """All figures of the case."""
    from forebay.spark import session

    settings = {"spark.driver.memory": "4g", "spark.sql.shuffle.partitions": str(TASKS)}
    # Else Spark writes times as INT96, which have no statistics to filter by.
    settings["spark.sql.parquet.outputTimestampType"] = "TIMESTAMP_MICROS"
    spark = session("bench", settings=settings)
    place = plan.shared("spark", lambda path: _make(spark, path, plan.sizes.spark_records))
    yield from _scans(plan, spark, place)
    yield from _streams(plan, spark, place)
    yield from _loads(plan, spark)
    yield from _sizes(plan, spark)


def _rows(spark: SparkSession, count: int) -> DataFrame:
    """The records, in the order of their offsets, as everybody stores them."""
    return spark.range(0, count, 1, TASKS).selectExpr(
        f"cast(concat('key-', lpad(cast(id * 7919 % {KEYS} as string), 9, '0')) as binary) as key",
        f"cast(substr(sha2(cast(id as string), 512), 1, {payload.VALUE_BYTES}) as binary) as value",
        f"'{TOPIC}' as topic",
        "0 as partition",
        "id as offset",
        f"timestamp_seconds({BEGUN_S} + id / {RECORDS_PER_S}) as timestamp",
        "cast(null as array<struct<key:string,value:binary>>) as headers",
        "concat('tag-', cast(id % 10 as string)) as tag",
    )


def _make(spark: SparkSession, place: Path, count: int) -> None:
    """The same rows for everybody; what compaction made of the topic lies beside the topic as it was."""
    from forebay.spark import Location, compact

    rows = _rows(spark, count)
    with_bloom = {"parquet.bloom.filter.enabled#key": "true", "parquet.bloom.filter.expected.ndv#key": str(KEYS)}
    rows.write.options(compression="none", **with_bloom).parquet(str(place / PLAIN))
    rows.write.options(compression="zstd", **with_bloom).parquet(str(place / ZSTD))
    rows.selectExpr("string(key) as key", "string(value) as value", "offset", "timestamp", "tag").write.json(
        str(place / JSON)
    )
    for directory in ("frames", "compacted"):
        with forebay.open(str(place / directory)) as log:
            log.create_topic(TOPIC)
        _load(rows, place / directory)
    compact(spark, Location.of(place / "compacted"), [TOPIC], rules=AT_ONCE)


def _load(rows: DataFrame, place: Path) -> None:
    kept = rows.select("key", "value", "tag", "timestamp")
    kept.write.format("forebay").option("path", str(place)).option("topic", TOPIC).mode("append").save()


@dataclass(frozen=True)
class Query:
    """What is asked, which columns it needs, what comes out for `count` rows, which aims it has, and which rows it is
    about: Forebay is given that as `where`, the others as a filter.
    """

    name: str
    columns: str
    ask: Callable[[DataFrame], DataFrame]
    answer: int
    aims: tuple[tuple[str, Limit], ...] = ()
    where: str | None = None


def _queries(count: int) -> list[Query]:
    scans = ((SOURCE, at_least(0.5, PLAIN)), (NARROW, at_least(0.65, PLAIN)), (TABLE, at_least(0.9, PLAIN)))
    filters = ((SOURCE, at_least(1, PLAIN)), (TABLE, at_least(0.9, PLAIN)))
    key = b"key-%09d" % (7919 % KEYS)
    with_key = len(range(1, count, KEYS))

    def times(share: float) -> tuple[str, int]:
        rows = max(1, int(count * share))
        first = count // 2
        micros = [BEGUN_S * 1_000_000 + at * 1_000_000 // RECORDS_PER_S for at in (first, first + rows)]
        begin, end = (f"timestamp_micros({at})" for at in micros)
        return f"timestamp >= {begin} and timestamp < {end}", rows

    found = [
        Query("count", "offset", lambda rows: rows.selectExpr("count(*)"), count),
        Query(
            "sum of lengths",
            "value",
            lambda rows: rows.selectExpr("sum(length(value))"),
            count * payload.VALUE_BYTES,
            scans,
        ),
        Query(
            "one key",
            "key,offset",
            lambda rows: rows.selectExpr("count(offset)"),
            with_key,
            filters,
            f"key = X'{key.hex()}'",
        ),
        Query(
            "one offset",
            "offset",
            lambda rows: rows.selectExpr("count(offset)"),
            1,
            filters,
            f"offset = {count // 3}",
        ),
    ]
    for share in (0.001, 0.1):
        condition, rows = times(share)
        found.append(
            Query(
                f"{share:.1%} by time",
                "timestamp,value",
                lambda rows: rows.selectExpr("sum(length(value))"),
                rows * payload.VALUE_BYTES,
                filters,
                condition,
            )
        )
    group = Query(
        "group by key",
        "key",
        lambda rows: rows.groupBy("key").count().selectExpr("count(*)"),
        min(count, KEYS),
    )
    return [*found, group]


def _frames(spark: SparkSession, place: Path, query: Query) -> dict[str, Callable[[], DataFrame]]:
    """How everybody is read, and is told which rows are wanted."""
    from forebay.spark import read, table

    frames, where = str(place / "frames"), query.where
    chosen = {} if where is None else {"where": where}

    def filtered(rows: DataFrame) -> DataFrame:
        return rows if where is None else rows.where(where)

    types = "key string, value string, offset bigint, timestamp timestamp, tag string"
    return {
        SOURCE: lambda: read(spark, TOPIC, where=where, path=frames),
        NARROW: lambda: read(spark, TOPIC, where=where, columns=query.columns, path=frames),
        TABLE: lambda: table(spark, TOPIC, path=str(place / "compacted"), **chosen),
        PLAIN: lambda: filtered(spark.read.parquet(str(place / PLAIN))),
        ZSTD: lambda: filtered(spark.read.parquet(str(place / ZSTD))),
        JSON: lambda: filtered(spark.read.schema(types).json(str(place / JSON))),
    }


def _scans(plan: Plan, spark: SparkSession, place: Path) -> Iterator[Result]:
    count = plan.sizes.spark_records
    for query in _queries(count):
        frames = _frames(spark, place, query)
        if query.name == "one key":
            del frames[JSON]  # its keys are no bytes
        figures = plan.compare({name: _timed(make, query, count) for name, make in frames.items()})
        rates = {name: found["rows"] for name, found in figures.items()}
        for name in (SOURCE, NARROW, TABLE):
            peers = {peer: rates[peer] for peer in (PLAIN, ZSTD, JSON) if peer in rates}
            limits = [limit for whose, limit in query.aims if whose == name]
            yield result("spark", f"{query.name} of {count:,} rows, {name}", "rows/s", rates[name], peers, limits)


def _timed(make: Callable[[], DataFrame], query: Query, count: int) -> Callable[[], Figures]:
    def timed() -> Figures:
        begun = time.perf_counter()
        (row,) = query.ask(make()).collect()
        seconds = time.perf_counter() - begun
        payload.check_count(query.name, query.answer, row[0])
        return {"rows": count / seconds}

    return timed


def _streams(plan: Plan, spark: SparkSession, place: Path) -> Iterator[Result]:
    count = plan.sizes.spark_records
    large = _streamed(plan, spark, place, -(-count // STREAM_BATCHES))
    rows = sum(progress["numInputRows"] for progress in large)
    payload.check_count("the stream", count, rows)
    busy = sum(progress["durationMs"]["addBatch"] for progress in large) / 1000
    yield result("spark", f"stream of {count:,} rows in {STREAM_BATCHES} batches, while reading", "rows/s", rows / busy)
    small = _streamed(plan, spark, place, SMALL_RECORDS, batches=SMALL_BATCHES)
    took = statistics.median(progress["durationMs"]["triggerExecution"] for progress in small[1:])
    yield result("spark", f"batch of {SMALL_RECORDS:,} rows of a stream, p50", "ms", took)


def _streamed(plan: Plan, spark: SparkSession, place: Path, size: int, batches: int | None = None) -> list[Any]:
    """The progress of each batch that had rows; the topic is read to its end, or for so many batches."""
    source = spark.readStream.format("forebay").options(path=str(place / "frames"), topic=TOPIC)
    stream = source.options(startingOffsets="earliest", maxOffsetsPerTrigger=str(size)).load()
    writer = stream.writeStream.format("noop").option("checkpointLocation", str(plan.fresh()))
    if batches is None:
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
    else:
        query = writer.start()
        while query.isActive and len(query.recentProgress) < batches:
            time.sleep(0.05)
        query.stop()
    return [progress for progress in query.recentProgress if progress["numInputRows"]]


def _loads(plan: Plan, spark: SparkSession) -> Iterator[Result]:
    count = plan.sizes.spark_records
    rows = _rows(spark, count)

    def ours() -> Figures:
        place = plan.fresh()
        with forebay.open(str(place)) as log:
            log.create_topic(TOPIC)
        begun = time.perf_counter()
        _load(rows, place)
        seconds = time.perf_counter() - begun
        with forebay.open(str(place), read_only=True) as log:
            payload.check_count("the load", count, log.topic(TOPIC).offsets().next)
        return {"rows": count / seconds}

    def theirs() -> Figures:
        place = plan.fresh() / "rows"
        begun = time.perf_counter()
        rows.select("key", "value", "tag", "timestamp").write.parquet(str(place))
        return {"rows": count / (time.perf_counter() - begun)}

    found = plan.compare({"forebay": ours, "parquet": theirs})
    peers = {"parquet": found["parquet"]["rows"]}
    limits = [at_least(0.5, "parquet")]
    yield result("spark", f"bulk load of {count:,} rows", "rows/s", found["forebay"]["rows"], peers, limits)


def _sizes(plan: Plan, spark: SparkSession) -> Iterator[Result]:
    """What events as shops send them take: as frames, as compressed frames, and compacted."""
    from forebay.spark import Location, compact

    count = min(plan.sizes.spark_records, 500_000)
    events = [_event(number) for number in range(count)]
    taken: dict[str, int] = {}
    for name, compression in (("frames", "none"), ("zstd frames", "zstd"), ("compacted", "none")):
        place = plan.fresh()
        with forebay.open(str(place)) as log:
            topic = log.create_topic(TOPIC, compression=compression)
            for first in range(0, count, payload.BATCH):
                part = events[first : first + payload.BATCH]
                topic.append_many([value for _, value in part], keys=[key for key, _ in part])
            topic.rotate()
            log.export_topic(TOPIC)
        if name == "compacted":
            compact(spark, Location.of(place), [TOPIC], rules=AT_ONCE)
            taken[name] = sum(file.stat().st_size for file in place.rglob("*.parquet"))
        else:
            taken[name] = sum(file.stat().st_size for file in place.rglob("*.seg"))
    peers = {name: float(size) for name, size in taken.items() if name != "compacted"}
    metric = f"{count:,} JSON events, compacted"
    yield result("spark", metric, "bytes", float(taken["compacted"]), peers, [at_most(0.4, "frames")])


def _event(number: int) -> tuple[bytes, bytes]:
    """A key and a value: an event of a shop, each unlike the others in what is unlike in life."""
    customer = number * 7919 % 50_000
    event = {
        "event_id": f"{number * 2654435761 % 2**32:08x}-{number:012d}",
        "kind": EVENT_KINDS[number % 7 % len(EVENT_KINDS)],
        "customer": f"customer-{customer:06d}",
        "at": datetime.fromtimestamp(BEGUN_S + number / 20, UTC).isoformat(timespec="milliseconds"),
        "amount": round((number * 37 % 99_991) / 100, 2),
        "currency": "EUR",
        "items": [{"sku": f"sku-{number * 31 % 9_973:05d}", "count": number % 3 + 1}],
    }
    return str(customer).encode(), json.dumps(event).encode()
