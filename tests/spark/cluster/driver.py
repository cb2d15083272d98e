"""A Spark driver in a process of its own, started by spark-submit: `… tests/spark/cluster/driver.py <orders as JSON>`.

It reads a topic as a batch, has all of its history examined, copies it by one bulk load, copies it again by a streaming
query, and puts the rows that it saw into a file, for the test to compare.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from pyspark.sql import DataFrame, SparkSession

from forebay.spark import read
from forebay.spark.jobs import scrub
from forebay.spark.place.location import Location
from forebay.spark.start.java import find_java
from forebay.spark.start.session import REMOTE, session
from tests.spark.stream_child import SETTINGS

ROOT: Final = Path(__file__).parents[3]
COLUMNS: Final = ("partition", "key", "value", "tag", "headers", "timestamp")


class DriverOrders(msgspec.Struct, frozen=True, kw_only=True):
    """What a driver is to do."""

    master: str
    read: dict[str, str]
    """The options of the reads."""
    seen: str
    """The file for the rows of the batch."""
    checkpoint: str
    loaded: dict[str, str] = {}
    """The options of the bulk load; without any there is none."""
    streamed: dict[str, str] = {}
    """The options of the streaming sink; without any the stream goes into files."""
    streamed_files: str = ""
    settings: dict[str, str] = {}
    """Spark's."""

    def run(self, environment: Mapping[str, str]) -> None:
        """Run the driver to its end; its last words if it fails."""
        command = [*self._launcher(), __file__, msgspec.json.encode(self).decode()]
        java = {"JAVA_HOME": str(find_java(environment))}
        around = {**environment, **java, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}
        ended = subprocess.run(command, cwd=ROOT, env=around, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr[-8000:]

    def _launcher(self) -> list[str]:
        if self.master.startswith(REMOTE):
            return [sys.executable]  # a client of Spark Connect is a program like any other
        settings = {**SETTINGS, **self.settings}
        words = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
        return [str(Path(sys.executable).with_name("spark-submit")), "--master", self.master, *words]


def rows_of(frame: DataFrame) -> list[list[Any]]:
    """Rows as JSON can show them, by partition and offset."""
    shown = frame.selectExpr(
        "partition",
        "offset",
        "hex(key)",
        "hex(value)",
        "tag",
        "to_json(headers) headers",
        "unix_millis(timestamp) timestamp",
    )
    return sorted((list(row) for row in shown.collect()), key=lambda row: row[:2])


def _drive(spark: SparkSession, orders: DriverOrders) -> None:
    frame = spark.read.format("forebay").options(**orders.read).load()
    rows = rows_of(frame)
    Path(orders.seen).write_text(json.dumps(rows))
    place = {name: text for name, text in orders.read.items() if name != "topic"}
    some = read(spark, orders.read["topic"], where="offset BETWEEN 2 AND 4 AND partition = 0", **place)
    assert rows_of(some) == [row for row in rows if row[0] == 0 and 2 <= row[1] <= 4] != []
    scrubbed = scrub.run(spark, Location.parse(orders.read), [orders.read["topic"]])
    assert scrubbed.is_clean and scrubbed.figures["sound"], scrubbed.lines()
    if orders.loaded:
        frame.select(*COLUMNS).write.format("forebay").mode("append").options(**orders.loaded).save()
    stream = spark.readStream.format("forebay").options(startingOffsets="earliest", **orders.read).load()
    if orders.streamed:
        writer = stream.select(*COLUMNS).writeStream.format("forebay").options(**orders.streamed)
    else:
        writer = stream.writeStream.format("parquet").option("path", orders.streamed_files)
    query = writer.option("checkpointLocation", orders.checkpoint).trigger(availableNow=True).start()
    assert query.awaitTermination(600)
    if orders.streamed_files:
        assert rows_of(spark.read.parquet(orders.streamed_files)) == rows


if __name__ == "__main__":
    given = msgspec.json.decode(sys.argv[1], type=DriverOrders)
    remote = given.master if given.master.startswith(REMOTE) else None
    running = session("forebay driver", master=remote)  # else the master of spark-submit
    _drive(running, given)
    running.stop()
