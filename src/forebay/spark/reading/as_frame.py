"""`forebay.spark.read`: a topic as one DataFrame by the source, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forebay.spark.reading.where import parse_where
from forebay.topics import TopicName

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read(
    spark: SparkSession,
    topic: str | TopicName,
    *,
    where: str | None = None,
    columns: str | Sequence[str] | None = None,
    **options: str,
) -> DataFrame:
    """The topic as it is now, read by `spark.read.format("forebay")`.

    `where` chooses rows and `columns`, a list of names or one text with commas, what is shown of them, before anything
    reaches Spark. Say where the topic is as for the source: `path`, or `settings`, or `store` and `metadata`, or
    `broker`; settings with a dot go into `**{…}`. Every other option of the source may be given too. Raises `Invalid`
    for a `where` that cannot be applied.
    """
    from forebay.spark.reading.pushing import push_options

    if where is not None:
        parse_where(where)
    chosen = {**options, **chosen_options(where, columns), "topic": str(topic)}
    return spark.read.format("forebay").options(**{**push_options(spark), **chosen}).load()


def chosen_options(where: str | None, columns: str | Sequence[str] | None) -> dict[str, str]:
    """The options of the source that choose rows and columns; without those that are `None`."""
    listed = columns if columns is None or isinstance(columns, str) else ",".join(columns)
    return {name: text for name, text in (("where", where), ("columns", listed)) if text is not None}
