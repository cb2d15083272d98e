"""The same topic as a Spark table."""

from __future__ import annotations

import time
from dataclasses import dataclass

from pyspark.sql import functions as sql

from forebay.spark import session


@dataclass(frozen=True)
class Revenue:
    """Orders and their worth, in all and by country."""

    orders: int
    cents: int
    rows: list[tuple[str, int, float]]
    seconds: float


def revenue_by_country(path: str) -> Revenue:
    """Read the whole topic and aggregate it."""
    spark = session("forebay-demo")
    try:
        begun = time.perf_counter()
        orders = (
            spark.read.format("forebay")
            .option("path", path)
            .option("topic", "shop/orders")
            .option("columns", "value,tag")
            .load()
        )
        cents = sql.get_json_object(sql.col("value").cast("string"), "$.cents").cast("long")
        table = orders.groupBy("tag").agg(sql.count("*").alias("orders"), sql.sum(cents).alias("cents")).orderBy("tag")
        rows = [(row["tag"], row["orders"], row["cents"]) for row in table.collect()]
        seconds = time.perf_counter() - begun
    finally:
        spark.stop()
    return Revenue(
        orders=sum(count for _, count, _ in rows),
        cents=sum(worth for _, _, worth in rows),
        rows=[(country, count, worth / 100) for country, count, worth in rows],
        seconds=seconds,
    )
