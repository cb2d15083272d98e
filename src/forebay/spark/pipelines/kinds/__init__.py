"""The kinds of sources and sinks, each in a file of its own: to add one is to write its file and to name it here.

For a word of the file that several kinds have, `format` chooses; the first of them is the default.
"""

from __future__ import annotations

from typing import Final

from forebay.spark.pipelines.kinds.delta import DeltaSink, DeltaSource
from forebay.spark.pipelines.kinds.files import FileSource
from forebay.spark.pipelines.kinds.iceberg import IcebergSink, IcebergSource
from forebay.spark.pipelines.kinds.parquet import ParquetSink, ParquetSource
from forebay.spark.pipelines.kinds.protocol import PipelineSink, PipelineSource
from forebay.spark.pipelines.kinds.topic import TopicSink, TopicSource

SOURCES: Final[tuple[type[PipelineSource], ...]] = (TopicSource, ParquetSource, IcebergSource, DeltaSource, FileSource)
SINKS: Final[tuple[type[PipelineSink], ...]] = (TopicSink, ParquetSink, IcebergSink, DeltaSink)
