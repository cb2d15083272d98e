"""Make the archive of classes that the tests' JVMs share: `python -m tests.support.archive`.

A Spark session does once what tests do, reads, writes and streams, and its JVM puts the classes that it has loaded into
a file as it ends. Where this goes wrong tests run without the file, only slower.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Final

from pyspark import SparkContext

import forebay
from forebay.spark.start.session import running, session
from tests.support import jvm

_END_SECONDS: Final = 300


def main() -> None:
    fresh = jvm.ARCHIVE.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    os.environ |= jvm.ENVIRONMENT
    os.environ["SPARK_SUBMIT_OPTS"] = f'{jvm.SMALL} "-XX:ArchiveClassesAtExit={fresh}" -Xlog:cds*=off'
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        try:
            _use_spark(Path(directory))
        finally:
            _end_jvm()
            if fresh.exists():
                fresh.replace(jvm.ARCHIVE)


def _use_spark(directory: Path) -> None:
    """Start Spark, and read, write and stream a topic and files."""
    place = {"path": str(directory / "data"), "wal.free_bytes_min": "0"}
    with forebay.open(str(directory / "data"), {"wal": {"free_bytes_min": 0}}) as log:
        log.create_topic("from").append_many([b"1", b"2"])
        log.create_topic("to")
    spark = session("an archive of classes", master="local[2]", settings={"spark.sql.shuffle.partitions": "1"})
    rows = spark.read.format("forebay").options(topic="from", **place).load()
    rows.groupBy("partition").count().write.parquet(f"{directory}/files")
    spark.read.parquet(f"{directory}/files").createOrReplaceTempView("counted")
    spark.sql("SELECT * FROM counted JOIN range(3) ON id = partition ORDER BY id").collect()
    stream = spark.readStream.format("forebay").options(topic="from", startingOffsets="earliest", **place).load()
    writer = stream.select("value").writeStream.format("forebay").options(topic="to", **place)
    writer.option("checkpointLocation", f"{directory}/state").trigger(availableNow=True).start().awaitTermination()


def _end_jvm() -> None:
    """Let Spark's JVM end, and wait until it has written the archive."""
    spark, gateway = running(), SparkContext._gateway
    if spark is not None:
        spark.stop()
    if gateway is not None:
        gateway.shutdown()
        gateway.proc.stdin.close()  # the JVM ends with it
        gateway.proc.wait(_END_SECONDS)


if __name__ == "__main__":
    main()
