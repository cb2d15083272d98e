"""Pipeline files to try: a sound one, and the same with a change; and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import forebay
from forebay.spark.pipelines.file.checking import check_pipeline
from forebay.spark.pipelines.file.document import Flawed
from forebay.spark.pipelines.file.model import Pipeline
from forebay.spark.pipelines.file.parsing import load_pipeline
from forebay.spark.pipelines.outline import outline
from forebay.spark.pipelines.progress import SinkProgress
from forebay.spark.pipelines.running import Running
from forebay.spark.pipelines.views import build, own_session
from tests.spark.topics import SETTINGS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SOUND: Final = """\
name: revenue
mode: streaming
trigger: availableNow
checkpoint: state
location:
  path: data
sources:
  - name: orders
    topic: shop/orders
    format: json
    schema: |
      order_id STRING,
      amount DECIMAL(10, 2), at TIMESTAMP
    watermark: {column: at, delay: 10 minutes}
  - name: shops
    files: shops.csv
    format: csv
    schema: shop STRING, country STRING
steps:
  - name: named
    sql: SELECT * FROM orders JOIN shops USING (shop)
  - name: revenue
    sql: |
      SELECT window(at, '1 minute') AS minute,
             sum(amount) AS revenue
      FROM named
      GROUP BY 1
sinks:
  - name: by_topic
    from: revenue
    topic: shop/revenue
    key: minute.start
  - name: by_table
    from: revenue
    table: out/revenue
"""
BATCH: Final = SOUND.replace("mode: streaming\ntrigger: availableNow\ncheckpoint: state\n", "mode: batch\n")


def pipeline_of(directory: Path, text: str) -> Pipeline:
    """The pipeline that this text declares, checked as far as the file goes."""
    file = directory / "p.yml"
    file.write_text(text)
    pipeline = load_pipeline(str(file))
    check_pipeline(pipeline)
    return pipeline


def flaws_of(directory: Path, text: str, look: Callable[[Pipeline], object] = lambda pipeline: None) -> list[str]:
    """What is wrong with it, or what `look` finds so, without the directory before the file."""
    try:
        look(pipeline_of(directory, text))
    except Flawed as error:
        return [flaw.removeprefix(f"{directory}/") for flaw in error.flaws]
    return []


def running_of(pipeline: Pipeline, on_progress: Callable[[Sequence[SinkProgress]], None] | None = None) -> Running:
    """A run of the pipeline at its own location."""
    return Running(pipeline=pipeline, place=outline(pipeline).location, on_progress=on_progress)


def built(spark: SparkSession, home: Path, pipeline: Pipeline) -> SparkSession:
    """A session in which Spark has checked the pipeline over the topics of this directory; it reads no row."""
    with own_session(spark, {}) as session:
        build(session, pipeline, {"path": f"{home}/data"})
        return session


def records_of(home: Path, topic: str) -> list[forebay.Record]:
    """All that a topic of this directory holds, by partition."""
    with forebay.open(str(home / "data"), SETTINGS, read_only=True) as log:
        handle = log.topic(topic)
        return [record for number in range(handle.partitions) for record in handle.read(0, partition=number)]
