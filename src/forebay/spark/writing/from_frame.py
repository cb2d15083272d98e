"""`forebay.spark.write`: the rows of a DataFrame into a topic, in one call, from any thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from forebay.spark.start.session import context_of
from forebay.topics import TopicName

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


def write(frame: DataFrame, topic: str | TopicName, **options: str) -> StreamingQuery | None:
    """Append the rows of a frame to a topic, as `frame.write.format("forebay")` does: all of them, or none.

    A streaming frame is written by `writeStream`, and the query, which has begun, is returned: give it a
    `checkpointLocation`. Say where the topic is as for the source: `path`, or `settings`, or `store` and `metadata`, or
    `broker`; settings with a dot go into `**{…}`. Unlike Spark's own call, this one may be made in any thread.
    """
    chosen = {**options, "topic": str(topic)}
    with _active(frame.sparkSession):
        if frame.isStreaming:
            return frame.writeStream.format("forebay").options(**chosen).start()
        frame.write.format("forebay").options(**chosen).mode("append").save()
    return None


@contextlib.contextmanager
def _active(spark: SparkSession) -> Iterator[None]:
    """Have the JVM's thread of the caller know its session: by that, and nothing else, Spark looks up what writes.

    Only the thread that made the session has one from the start. A session of a Spark Connect server needs none.
    """
    if context_of(spark) is None:
        yield
        return
    sessions = spark._get_j_spark_session_class(spark._jvm)
    before = sessions.getActiveSession()
    sessions.setActiveSession(spark._jsparkSession)
    try:
        yield
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()
