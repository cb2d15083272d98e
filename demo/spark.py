"""The same topics in Spark: read, put through a pipeline, compacted, and read again as a table."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from matplotlib.figure import Figure
from pyspark.sql import functions as sql

import forebay
from forebay.spark import Location, Rules, compact, table
from forebay.spark.pipelines.file.parsing import load_pipeline
from forebay.spark.pipelines.outline import outline
from forebay.spark.pipelines.running import Running

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

PIPELINE = Path(__file__).with_name("revenue.yml")
ORDERS = "shop/orders"
REVENUE = "shop/revenue"

Minutes: TypeAlias = dict[tuple[int, str], tuple[int, int]]
"""Orders and their worth in cents, by minute (ms) and country."""


@dataclass(frozen=True)
class Revenue:
    """Orders and their worth, in all and by country."""

    orders: int
    cents: int
    rows: list[tuple[str, int, float]]
    seconds: float


@dataclass(frozen=True)
class Piped:
    """What the pipeline made of the orders: the records of its topic, and the rows of its table."""

    topic: Minutes
    table: Minutes
    records: int
    seconds: float


@dataclass(frozen=True)
class Compacted:
    """What compaction made of the history, and the same aggregation over the result."""

    bytes_before: int
    bytes_after: int
    seconds: float
    minutes: Minutes
    reading_seconds: float


def revenue_by_country(spark: SparkSession, data: Path) -> Revenue:
    """Read the whole topic and aggregate it."""
    begun = time.perf_counter()
    source = spark.read.format("forebay").option("path", str(data)).option("topic", ORDERS)
    orders = source.option("columns", "value,tag").load()
    summed = orders.groupBy("tag").agg(sql.count("*").alias("orders"), sql.sum(_cents()).alias("cents")).orderBy("tag")
    rows = [(row["tag"], row["orders"], row["cents"]) for row in summed.collect()]
    return Revenue(
        orders=sum(count for _, count, _ in rows),
        cents=sum(worth for _, _, worth in rows),
        rows=[(country, count, worth / 100) for country, count, worth in rows],
        seconds=time.perf_counter() - begun,
    )


def run_pipeline(spark: SparkSession, data: Path) -> Piped:
    """Run the declared pipeline over what is there, as a stream that ends when it has all of it."""
    begun = time.perf_counter()
    with forebay.open(str(data)) as log:
        log.create_topic(REVENUE)
    declared = data.parent / PIPELINE.name
    shutil.copyfile(PIPELINE, declared)
    pipeline = load_pipeline(str(declared))
    Running(pipeline=pipeline, place=outline(pipeline).location).run(spark)
    seconds = time.perf_counter() - begun
    with forebay.open(str(data), read_only=True) as log:
        records = [json.loads(record.value or b"") for record in log.topic(REVENUE).read()]
    rows = spark.read.parquet(str(data.parent / "tables" / "revenue"))
    return Piped(
        topic={(_ms(row["minute"]), row["country"]): (row["orders"], row["cents"]) for row in records},
        table=_minutes(rows),
        records=len(records),
        seconds=seconds,
    )


def compact_and_ask(spark: SparkSession, data: Path) -> Compacted:
    """Compact the history of the orders, and do the pipeline's aggregation over the whole topic as a table."""
    with forebay.open(str(data)) as log:
        log.topic(ORDERS).rotate()
        log.export_topic(ORDERS)
    begun = time.perf_counter()
    report = compact(spark, Location.of(data), [ORDERS], rules=Rules(settle_ms=0, segments_min=1))
    compacted = time.perf_counter()
    orders = table(spark, ORDERS, path=str(data), columns="timestamp,tag,value")
    minute = sql.window("timestamp", "1 minute").getField("start").alias("minute")
    summed = orders.groupBy(minute, sql.col("tag").alias("country"))
    minutes = _minutes(summed.agg(sql.count("*").alias("orders"), sql.sum(_cents()).alias("cents")))
    return Compacted(
        bytes_before=_figure(report.figures, "bytes_before"),
        bytes_after=_figure(report.figures, "bytes"),
        seconds=compacted - begun,
        minutes=minutes,
        reading_seconds=time.perf_counter() - compacted,
    )


def plot(minutes: Minutes, path: Path) -> None:
    """Revenue by minute, a line for each country."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    first = min(minute for minute, _ in minutes)
    for country in sorted({country for _, country in minutes}):
        points = sorted((minute, cents) for (minute, whose), (_, cents) in minutes.items() if whose == country)
        axes.plot([(at - first) / 60_000 for at, _ in points], [cents / 100 for _, cents in points], label=country)
    axes.set(xlabel="minute", ylabel="EUR", title="Revenue by minute and country")
    axes.set_ylim(bottom=0)
    axes.legend(ncols=3)
    figure.savefig(path, dpi=120)


def _cents() -> Column:
    return sql.get_json_object(sql.col("value").cast("string"), "$.cents").cast("long")


def _minutes(rows: DataFrame) -> Minutes:
    found = rows.select(sql.unix_millis("minute").alias("at"), "country", "orders", "cents").collect()
    return {(row["at"], row["country"]): (row["orders"], row["cents"]) for row in found}


def _ms(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp() * 1000)


def _figure(figures: Mapping[str, object], name: str) -> int:
    found = figures[name]
    assert isinstance(found, int)
    return found
