"""Pipeline files to try: a sound one, and the same with a change."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from forebay.spark.pipelines.checking import check_pipeline
from forebay.spark.pipelines.document import Flawed
from forebay.spark.pipelines.model import Pipeline
from forebay.spark.pipelines.parsing import load_pipeline

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


def flaws_of(directory: Path, text: str) -> list[str]:
    """What is wrong with it, without the directory before the file."""
    try:
        pipeline_of(directory, text)
    except Flawed as error:
        return [flaw.removeprefix(f"{directory}/") for flaw in error.flaws]
    return []
