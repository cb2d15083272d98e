"""Named readers: their place is apart from any owner, only moves forward by itself, and survives restarts and moves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import forebay
import forebay.aio
from forebay import EARLIEST, LATEST, Invalid, Position
from forebay.progress import ReservedReader
from tests.storage.rig import QUICK


def _values(records: object) -> list[bytes | None]:
    return [record.value for record in records]  # type: ignore[attr-defined]


def test_a_following_reader_ends_when_its_event_is_set_and_goes_on_when_asked_again(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = log.create_topic("t")
        topic.append_many([b"a", b"b"])
        stop = threading.Event()
        stream = topic.reader("billing").follow(stop=stop)
        seen = []

        for record in stream:
            seen.append(record.value)
            if record.value == b"b":
                stop.set()

        assert seen == [b"a", b"b"]
        stop.clear()
        topic.append(b"c")
        assert next(stream).value == b"c"


def test_a_reader_goes_on_where_it_acknowledged(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = log.create_topic("t", partitions=2)
        for number in range(6):
            topic.append(b"%d" % number, partition=number % 2)
        billing = topic.reader("billing")
        assert billing.offset() is None
        for record in billing.read(partition=0):
            billing.ack(record, note=f"at {record.offset}")
            if record.offset == 1:
                break

    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = log.topic("t")
        billing = topic.reader("billing")
        assert (billing.offset(0), billing.note(0), billing.offset(1)) == (2, "at 1", None)
        assert _values(billing.read()) == [b"4", b"1", b"3", b"5"]
        assert _values(topic.reader("audit").read(partition=1)) == [b"1", b"3", b"5"]
        assert _values(billing.read(start=LATEST)) == [b"4"]
        topic.append(b"new", partition=0)
        assert _values(billing.follow(timeout=0.05)) == [b"4", b"new", b"1", b"3", b"5"]


def test_a_place_moves_forward_alone_and_back_only_when_asked(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = log.create_topic("t")
        topic.append_many([b"a", b"b", b"c"], timestamps=[10, 20, 30])
        reader = topic.reader("billing")
        assert reader.ack_up_to(2) == 2
        assert reader.ack_up_to(1) == 2
        assert reader.reset(Position.at_time(20)) == 1
        assert reader.offset() == 1
        assert reader.reset(EARLIEST) == 0
        assert reader.reset(LATEST) == 3
        with pytest.raises(forebay.Invalid, match=r"default/t\[0\] ends at 3: nothing up to 4 can be done yet"):
            reader.ack_up_to(4)
        reader.forget()
        assert reader.offset() is None


def test_a_new_topic_of_the_same_name_knows_no_old_places(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = log.create_topic("t")
        topic.append(b"v")
        topic.reader("billing").ack_up_to(1)
        log.delete_topic("t")
        assert log.create_topic("t").reader("billing").offset() is None


@pytest.mark.parametrize("name", ["", "a b", "..", "x" * 101, "ü", "a/b"])
def test_odd_names_are_refused(tmp_path: Path, name: str) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log, pytest.raises(forebay.Invalid, match="not a reader's name"):
        log.create_topic("t").reader(name)


@pytest.mark.parametrize("name", [f"router-{'0' * 16}", f"copy-{'0' * 32}", "forebay.replay", "forebay.later"])
def test_places_that_forebay_keeps_are_moved_by_no_caller(tmp_path: Path, name: str) -> None:
    with forebay.open(tmp_path) as log:
        topic = log.create_topic("shop/orders")
        topic.append(b"a")
        topic.reader(ReservedReader(name)).ack_up_to(1)
        reader, group = topic.reader(name), log.group(name)
        calls: list[Callable[[], object]] = [
            lambda: reader.ack_up_to(1),
            lambda: reader.ack(next(iter(topic.read()))),
            reader.reset,
            reader.forget,
            lambda: group.commit("shop/orders", 1, ack="cached"),
            lambda: group.commit("shop/orders", 0, expected=1),
            lambda: group.reset("shop/orders", EARLIEST),
            group.delete,
            lambda: topic.subscribe(name),
        ]
        for call in calls:
            with pytest.raises(Invalid, match="keeps for a router, a copy or a replay, and no caller moves it: take"):
                call()

        assert (reader.offset(), group.fetch("shop/orders")) == (1, 1), "it may be looked at"
        assert (log.groups(), log.reserved_readers()) == ([], [name])


def test_places_in_a_deleted_topic_are_forgotten(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log:
        for name in ("orders", "refunds"):
            topic = log.create_topic(name)
            topic.append(b"0")
            topic.reader(f"of-{name}").ack_up_to(1)

        log.delete_topic("orders")

        assert log.groups() == ["of-refunds"]


def test_places_may_be_given_for_each_partition(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = log.create_topic("t", partitions=3)
        for number in range(9):
            topic.append(b"%d" % number, partition=number % 3)
        assert _values(topic.read({2: 1, 0: LATEST})) == [b"5", b"8"]
        with pytest.raises(forebay.Invalid, match="partition"):
            topic.read({3: 0})


def test_a_reader_for_asyncio(tmp_path: Path) -> None:
    async def run() -> None:
        async with forebay.aio.open(tmp_path / "log", QUICK) as log:
            topic = await log.create_topic("t")
            for number in range(3):
                await topic.append(b"%d" % number)
            reader = topic.reader("billing")
            async for record in reader.read():
                await reader.ack(record)
                break
            assert await reader.offset() == 1
            assert [record.value async for record in reader.follow(timeout=0.05)] == [b"1", b"2"]
            assert await reader.reset() == 0
            assert await reader.ack_up_to(3, note="all") == 3
            assert await reader.note() == "all"
            await log.export_topic("t")
            assert (await topic.offsets()).exported == 3
            assert (await log.seal_topic("t"))[0].next_offset == 3
            await log.unseal_topic("t")
            assert await (await log.topic("t")).append(b"3") == 3
            await reader.forget()
            assert await reader.offset() is None

    asyncio.run(run())
