"""The stream as Spark asks for it. One object lives for the whole run of a query, in a process beside the driver."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from forebay.clock import SystemClock
from forebay.spark.reading.options import ReadOptions
from forebay.spark.reading.streaming.offsets import Json, StreamOffsets
from forebay.spark.reading.streaming.stream import TopicStream
from forebay.spark.reading.task import read_split
from forebay.spark.reading.view import Viewer


class ForebayStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`spark.readStream.format("forebay")`. Pickled to the executors, which only read: without what it has open."""

    def __init__(self, options: ReadOptions, columns: tuple[str, ...]) -> None:
        self._options = options
        self._columns = columns
        self._viewer: Viewer | None = None
        self._stream: TopicStream | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_viewer": None, "_stream": None}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """The limit of the options; where both are given, `latestOffset` keeps to both."""
        if self._options.offsets_max is not None:
            return ReadMaxRows(self._options.offsets_max)
        if self._options.bytes_max is not None:
            return ReadMaxBytes(self._options.bytes_max)
        return ReadAllAvailable()

    def initialOffset(self) -> Json:  # noqa: N802 - Spark's name
        """Where a query without a checkpoint begins."""
        return self._opened().initial().to_json()

    def latestOffset(self, start: Json, limit: ReadLimit) -> Json:  # noqa: N802 - Spark's name
        """Where the next micro-batch ends."""
        limited = not isinstance(limit, ReadAllAvailable)
        return self._opened().latest(StreamOffsets.parse(start), limited=limited).to_json()

    def reportLatestOffset(self) -> Json:  # noqa: N802 - Spark's name
        """Where the topics end: by which the query's progress shows its lag."""
        return self._opened().newest().to_json()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """The query ends where its topics end now."""
        self._opened().fix_target()

    def partitions(self, start: Json, end: Json) -> list[InputPartition]:
        """The tasks of a micro-batch."""
        splits = self._opened().splits(StreamOffsets.parse(start), StreamOffsets.parse(end), self._columns)
        return [InputPartition(split) for split in splits]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of a task; where there is nothing to read, Spark may make one task without a split."""
        return iter(()) if partition.value is None else read_split(partition.value)

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
