"""The stream as Spark asks for it. One object lives for the whole run of a query, in a process beside the driver.

Spark before 4.3 does not say where a micro-batch begins when it asks where it ends, so that no limit can be kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pyarrow as pa
import pyspark
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from forebay.clock import SystemClock
from forebay.errors import Unsupported
from forebay.spark.reading.options import ReadOptions
from forebay.spark.reading.streaming.offsets import Json, StreamOffsets
from forebay.spark.reading.streaming.stream import TopicStream
from forebay.spark.reading.task import read_split
from forebay.spark.reading.view import Viewer


def stream_reader(options: ReadOptions, columns: tuple[str, ...]) -> TopicStreamReader:
    """The reader for the Spark that runs; `Unsupported` for a limit that it cannot keep."""
    if find_spec("pyspark.sql.streaming.datasource") is not None:
        from forebay.spark.reading.streaming.limited import LimitedStreamReader

        return LimitedStreamReader(options, columns)
    if options.offsets_max is not None or options.bytes_max is not None:
        raise Unsupported(
            f"Spark {pyspark.__version__} cannot limit a micro-batch of a Python source: leave out "
            "maxOffsetsPerTrigger and maxBytesPerTrigger, or use Spark 4.3"
        )
    return WholeStreamReader(options, columns)


class TopicStreamReader(DataSourceStreamReader):
    """`spark.readStream.format("forebay")`. Pickled to the executors, which only read: without what it has open."""

    def __init__(self, options: ReadOptions, columns: tuple[str, ...]) -> None:
        self._options = options
        self._columns = columns
        self._viewer: Viewer | None = None
        self._stream: TopicStream | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_viewer": None, "_stream": None}

    def initialOffset(self) -> Json:  # noqa: N802 - Spark's name
        """Where a query without a checkpoint begins."""
        return self._opened().initial().to_json()

    def partitions(self, start: Json, end: Json) -> list[InputPartition]:
        """The tasks of a micro-batch."""
        splits = self._opened().splits(StreamOffsets.parse(start), StreamOffsets.parse(end), self._columns)
        return [InputPartition(split) for split in splits]

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """The records of a task; where there is nothing to read, Spark may make one without a split or a partition."""
        return iter(()) if partition is None or partition.value is None else read_split(partition.value)

    def commit(self, end: Json) -> None:
        """Nothing: topics keep their records for as long as their limits say, read or not."""

    def stop(self) -> None:
        """The run has ended."""
        viewer, self._viewer, self._stream = self._viewer, None, None
        if viewer is not None:
            viewer.close()

    def _opened(self) -> TopicStream:
        if self._stream is None:
            self._viewer = Viewer(self._options.location)
            self._stream = TopicStream(self._options, self._viewer, SystemClock())
        return self._stream


class WholeStreamReader(TopicStreamReader):
    """For Spark before 4.3: a micro-batch ends where its topics end."""

    def latestOffset(self) -> Json:  # type: ignore[override]  # noqa: N802 - Spark's name, and the call of that Spark
        """Where the next micro-batch ends."""
        return self._opened().newest().to_json()
