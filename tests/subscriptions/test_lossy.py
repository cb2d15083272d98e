"""Subscriptions of topics with dispatch `non_reliable`: writers never wait, memory is bounded, nothing is stored."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

import forebay
from forebay import aio
from forebay.storage.subscriptions import deliveries_of
from forebay.subscriptions.dispatch import PAGES_KEPT_MAX
from forebay.wal.log import Wal
from tests.support.waiting import PATIENCE

WINDOW = 100


def test_a_consumer_that_stalls_keeps_no_writer_waiting_and_costs_no_more_than_its_window() -> None:
    with forebay.open(":memory:") as log:
        topic = log.create_topic("ticker", dispatch="non_reliable")
        subscription = topic.subscribe("screen", mode="shared", window_records_max=WINDOW)
        with subscription.consumer("stalls") as stalls:
            for _ in range(20):
                topic.append_many([b"x" * 100] * 500)
                served = subscription.driver.dispatch.partitions[0]
                assert served.window.end - served.window.cursor <= WINDOW
                assert len(served.pages) <= PAGES_KEPT_MAX

            taken = stalls.take(1_000)

            assert len(taken) + stalls.lost == 20 * 500
            assert len(taken) <= WINDOW
            assert taken[-1].record.offset == 20 * 500 - 1


def test_what_several_consumers_get_and_what_is_lost_is_everything_once() -> None:
    count, found = 3_000, list[int]()
    with forebay.open(":memory:") as log:
        topic = log.create_topic("ticker", dispatch="non_reliable")
        subscription = topic.subscribe("screens", mode="shared", window_records_max=WINDOW)
        is_over = threading.Event()

        def watch() -> None:
            with subscription.consumer() as consumer:
                while not is_over.is_set():
                    found.extend(one.record.offset for one in consumer.take(7, wait_s=0.01))

        with subscription.consumer("first") as first:
            threads = [threading.Thread(target=watch) for _ in range(3)]
            for thread in threads:
                thread.start()
            for number in range(0, count, 10):
                topic.append_many([b"%d" % number] * 10)
            while found_and_lost(found, first) < count:
                found.extend(one.record.offset for one in first.take(7, wait_s=0.01))
            is_over.set()
            for thread in threads:
                thread.join(PATIENCE)

            assert len(found) == len(set(found)), "a record was delivered twice"
            assert len(found) + first.lost == count


def found_and_lost(found: list[int], consumer: forebay.Consumer) -> int:
    return len(found) + consumer.lost


def test_what_did_not_reach_its_consumer_is_lost_and_counted() -> None:
    with forebay.open(":memory:") as log:
        topic = log.create_topic("ticker", dispatch="non_reliable")
        subscription = topic.subscribe("screen")
        with subscription.consumer() as consumer:
            topic.append_many([b"1", b"2"])
            driver, number = subscription.driver, 1
            pulled = driver.pull(number, 10)
            driver.take_back(number, deliveries_of(pulled))

            assert consumer.take() == []
            assert consumer.lost == 2


def test_a_take_finds_what_was_appended_before_the_appends_waker_was_called() -> None:
    with forebay.open(":memory:") as log:
        topic = log.create_topic("ticker", dispatch="non_reliable")
        subscription = topic.subscribe("screen", window_records_max=4)
        with subscription.consumer() as consumer:
            topic.append_many([b"0", b"1", b"2"])
            assert len(consumer.take(1)) == 1
            topic.append_many([b"x"] * 10)
            subscription.driver.dispatch.partitions[0].has_news = False

            assert [one.record.offset for one in consumer.take()] == [9, 10, 11, 12]


def test_the_loop_of_a_consumer_does_not_write_what_is_queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In class `memory` appends are acknowledged in the queue: a thread writes them, and the take finds them."""
    writers = set[int]()
    commit = Wal.commit

    def noted(wal: Wal) -> None:
        writers.add(threading.get_ident())
        commit(wal)

    async def work() -> list[bytes | None]:
        async with aio.open(str(tmp_path / "data")) as log:
            topic = await log.create_topic("ticker", dispatch="non_reliable", durability="memory")
            subscription = await topic.subscribe("screen")
            found = list[bytes | None]()
            async with subscription.consumer() as consumer:
                monkeypatch.setattr(Wal, "commit", noted)
                for number in range(20):
                    await topic.append(b"%d" % number)
                    found += [one.record.value for one in await consumer.take(wait_s=PATIENCE)]
            return found

    assert asyncio.run(work()) == [b"%d" % number for number in range(20)]
    assert threading.get_ident() not in writers


def test_nothing_is_stored_but_the_definition(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as log:
        topic = log.create_topic("ticker", dispatch="non_reliable")
        with topic.subscribe("screen").consumer() as consumer:
            topic.append(b"1")
            assert len(consumer.take()) == 1
        assert log.metadata.range("/forebay/progress/") == []

    with forebay.open(tmp_path) as log:
        topic = log.topic("ticker")
        assert topic.spec.dispatch == "non_reliable"
        assert [spec.name for spec in topic.subscriptions()] == ["screen"]
        with topic.subscription("screen").consumer() as consumer:
            assert consumer.take() == []
