"""`forebay.spark.read`: a topic as one DataFrame by the source, in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.spark.where import parse_where

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read(
    spark: SparkSession, topic: str, *, where: str | None = None, columns: str | None = None, **options: str
) -> DataFrame:
    """The topic as it is now, read by `spark.read.format("forebay")`.

    `where` chooses rows and `columns`, names with commas, what is shown of them, before anything reaches Spark. Say
    where the topic is as for the source: `path`, or `settings`, or `store` and `metadata`; settings with a dot go into
    `**{…}`. Every other option of the source may be given too. Raises `Invalid` for a `where` that cannot be applied.
    """
    from forebay.spark.pushing import push_options

    if where is not None:
        parse_where(where)
    chosen = {name: text for name, text in (("where", where), ("columns", columns)) if text is not None}
    reader = spark.read.format("forebay").options(**{**push_options(spark), **options, **chosen, "topic": topic})
    return reader.load()
