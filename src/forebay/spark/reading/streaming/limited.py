"""The stream for a Spark that says how much a micro-batch may bring."""

from __future__ import annotations

from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from forebay.spark.reading.streaming.offsets import Json, StreamOffsets
from forebay.spark.reading.streaming.reader import TopicStreamReader


class LimitedStreamReader(TopicStreamReader, SupportsTriggerAvailableNow):
    """A micro-batch brings no more than the options say."""

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """The limit of the options; where both are given, `latestOffset` keeps to both."""
        if self._options.offsets_max is not None:
            return ReadMaxRows(self._options.offsets_max)
        if self._options.bytes_max is not None:
            return ReadMaxBytes(self._options.bytes_max)
        return ReadAllAvailable()

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
