"""A streaming query in a process of its own, to be killed: `python -m tests.spark.stream_child <orders as JSON>`.

Its sink puts each micro-batch into a file of its own. The child says where it is, a line at a time, and waits there.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession

from forebay.spark.start.session import session
from tests.support.jvm import SOON_UP
from tests.support.processes import Child

ROOT: Final = Path(__file__).parents[2]
SETTINGS: Final = {
    "spark.driver.memory": "512m",
    "spark.sql.shuffle.partitions": "1",
    "spark.executor.extraJavaOptions": SOON_UP,
}
"""Small, for a process that does not live long."""


class ChildOrders(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is to do."""

    options: dict[str, str]
    """Of the stream."""
    checkpoint: str
    sink: str
    """The directory for the files of the sink."""
    master: str = "local[2]"
    wait_in: int | None = None
    """The micro-batch to wait in for ever."""
    wait_before_sink: bool = False
    """Before the sink has it; else after that, when Spark does not know of it yet."""
    hold_task: str | None = None
    """A named pipe: the first attempt at the first task writes the executor's process id there, and waits for ever."""

    def start(self) -> Child:
        """Start the child, with a process group of its own."""
        command = [sys.executable, "-m", "tests.spark.stream_child", msgspec.json.encode(self).decode()]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True)


@contextlib.contextmanager
def running(orders: ChildOrders) -> Iterator[Child]:
    """A child, and its end: kill -9 of the driver, of its JVM and of all that they started."""
    child = orders.start()
    try:
        yield child
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def run(spark: SparkSession, orders: ChildOrders) -> None:
    """Everything that is there now, from the checkpoint into the sink."""
    held = orders.hold_task

    def hold(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        if held is not None and context is not None and context.partitionId() == 0 and context.attemptNumber() == 0:
            executor = psutil.Process().parents()[1].pid  # above the daemon that forks Python workers
            for batch in batches:
                yield batch
                Path(held).write_text(str(executor))
                threading.Event().wait()
        yield from batches

    def put(frame: DataFrame, batch: int) -> None:
        if batch == orders.wait_in and orders.wait_before_sink:
            _stay("before")
        shown = frame.selectExpr("partition", "offset", "hex(key) key", "hex(value) value", "tag")
        rows = shown.mapInArrow(hold, shown.schema) if held is not None else shown
        text = json.dumps(sorted(tuple(row) for row in rows.collect()))
        fresh = Path(orders.sink) / f"{batch}.new"
        fresh.write_text(text)
        fresh.replace(Path(orders.sink) / f"{batch}.json")
        if batch == orders.wait_in:
            _stay("after")

    stream = spark.readStream.format("forebay").options(**orders.options).load()
    writer = stream.writeStream.option("checkpointLocation", orders.checkpoint).foreachBatch(put)
    query = writer.trigger(availableNow=True).start()
    try:
        assert query.awaitTermination(600)
    finally:
        query.stop()


def _stay(where: str) -> None:
    print(where, flush=True)  # noqa: T201 - the parent receives it
    threading.Event().wait()


def sunk(sink: Path) -> dict[int, list[Any]]:
    """What the sink has: rows by micro-batch."""
    return {int(file.stem): json.loads(file.read_text()) for file in sorted(sink.glob("*.json"))}


if __name__ == "__main__":
    given = msgspec.json.decode(sys.argv[1], type=ChildOrders)
    run(session("forebay stream", master=given.master, settings=SETTINGS), given)
    print("ended", flush=True)  # noqa: T201 - the parent receives it
