"""kill -9 of a streaming query, driver and executor: from its checkpoint it goes on with exactly the rows."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import SparkSession

from tests.ledger import Ledger
from tests.spark.mixed import Mixed
from tests.spark.stream_child import ChildOrders, run, running, sunk
from tests.support.environments import directories
from tests.support.processes import hear
from tests.support.soak import SOAK

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(3600 if SOAK else 600)]

KILLED_IN = (0, 1, 2) if SOAK else (1,)
"""The micro-batches in which drivers are killed."""


@pytest.fixture
def mixed(tmp_path: Path) -> Iterator[Mixed]:
    made = Mixed(directories.shared_fs(tmp_path))
    made.every_tier()
    yield made
    made.close()


@pytest.fixture
def orders(tmp_path: Path, mixed: Mixed) -> ChildOrders:
    (tmp_path / "sink").mkdir()
    options = {**mixed.options, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "4000"}
    return ChildOrders(options=options, checkpoint=str(tmp_path / "checkpoint"), sink=str(tmp_path / "sink"))


def _expected(mixed: Mixed) -> list[list[Any]]:
    def shown(value: bytes | None) -> str | None:
        return None if value is None else value.hex().upper()

    return [[row["partition"], row["offset"], shown(row["key"]), shown(row["value"]), row["tag"]] for row in mixed.rows]


def _rows(sink: str) -> list[Any]:
    return sorted((row for rows in sunk(Path(sink)).values() for row in rows), key=lambda row: row[:2])


def test_driver_killed_before_and_after_its_sink_has_a_batch(
    spark: SparkSession, mixed: Mixed, orders: ChildOrders, ledger: Ledger
) -> None:
    """The owner goes on meanwhile, and moves into other tiers what the killed query had planned to read."""
    before: dict[int, list[Any]] = {}
    for batch in KILLED_IN:
        with running(msgspec.structs.replace(orders, wait_in=batch, wait_before_sink=True)) as child:
            assert hear(child) == "before"
        ledger.count("kills", of="driver before its sink")
        assert list(sunk(Path(orders.sink))) == list(range(batch))
        mixed.export()
        mixed.compact()

        with running(msgspec.structs.replace(orders, wait_in=batch)) as child:
            assert hear(child) == "after"
        ledger.count("kills", of="driver before Spark's commit")
        now = sunk(Path(orders.sink))
        assert list(now) == list(range(batch + 1))
        assert {known: now[known] for known in before} == before
        before = now
    for partition in range(2):
        mixed.filled.many(100, partition)
    run(spark, orders)

    after = sunk(Path(orders.sink))
    assert {batch: after[batch] for batch in before} == before, "a batch that is run again has the same rows"
    assert _rows(orders.sink) == _expected(mixed)


def test_executor_killed_in_the_middle_of_a_task(
    mixed: Mixed, orders: ChildOrders, tmp_path: Path, ledger: Ledger
) -> None:
    """On a cluster of two executors, each a process of its own; the first has given rows of the task already."""
    held = tmp_path / "executor"
    os.mkfifo(held)  # read once the task has written to it
    options = {**orders.options, "minPartitions": "4", "maxOffsetsPerTrigger": "100000"}
    on_cluster = msgspec.structs.replace(orders, options=options, master="local-cluster[2,1,1024]", hold_task=str(held))
    with running(on_cluster) as child:
        os.kill(int(held.read_text()), signal.SIGKILL)
        ledger.count("kills", of="executor in a task")
        assert hear(child) == "ended"

    assert _rows(orders.sink) == _expected(mixed)
