"""Pipelines declared in YAML: topics and files in, SQL between, topics and tables out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from forebay.spark.pipelines.outline import Outline
    from forebay.spark.pipelines.progress import RunReport

__all__ = ["plan", "run"]


def plan(file: str, location: Mapping[str, str] | None = None) -> Outline:
    """What the pipeline in a file would do if it ran now, without Spark. Raises `Invalid` with the line of all flaws.

    `location` says where topics are, by the options of `spark.read`; else the file does.
    """
    from forebay.spark.pipelines.file.parsing import load_pipeline
    from forebay.spark.pipelines.outline import outline

    return outline(load_pipeline(file), location)


def run(spark: SparkSession, file: str, location: Mapping[str, str] | None = None) -> RunReport:
    """Check the pipeline in a file, and run it in a session beside the given one, to its end."""
    from forebay.spark.pipelines.file.parsing import load_pipeline
    from forebay.spark.pipelines.outline import outline
    from forebay.spark.pipelines.running import Running

    pipeline = load_pipeline(file)
    return Running(pipeline=pipeline, place=outline(pipeline, location).location).run(spark)
