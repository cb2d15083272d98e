"""Batches that are not waited for: what the acknowledgement says of each partition, in every engine."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import forebay
from forebay import (
    Ack,
    BatchAck,
    Closed,
    Full,
    Indeterminate,
    Invalid,
    OffsetRange,
    Storage,
    Topic,
    Unavailable,
    Unsupported,
)
from forebay.appends.queue import Paused, QueueFull
from forebay.engines import OwnedShard
from forebay.partitioning import partition_of_key
from forebay.storage.acks import Share
from forebay.testing.inside import inside
from tests.storage.rig import QUICK, WatchedDisk, quick, values, wal_of
from tests.support.waiting import PATIENCE, until

KINDS = {
    "ephemeral": {"durability": "ephemeral"},
    "memory": {"durability": "memory"},
    "disk": {"durability": "disk"},
    "fsync": {"durability": "fsync"},
    "rocksdb": {"engine": "rocksdb"},
}
KEYS = [b"key-%d" % number for number in range(40)]
KEY_OF = {partition_of_key(key, 2): key for key in KEYS}
"""A key of each of two partitions."""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> dict[str, str]:
    return KINDS[request.param]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Storage]:
    with forebay.open(tmp_path / "log", QUICK) as log:
        yield log


def _batch(numbers: range) -> pa.RecordBatch:
    return pa.record_batch({"value": [b"%d" % n for n in numbers], "key": [KEYS[n % 40] for n in numbers]})


def _queued(topic: Topic, how: str, numbers: range) -> BatchAck:
    if how == "arrow":
        return topic.append_arrow_nowait(_batch(numbers))
    return topic.append_many_nowait([b"%d" % n for n in numbers], keys=[KEYS[n % 40] for n in numbers])


@pytest.mark.parametrize("how", ["many", "arrow"])
def test_a_batch_is_asked_awaited_or_calls_back_and_names_a_range_for_each_partition(
    log: Storage, kind: dict[str, Any], how: str
) -> None:
    topic = log.create_topic("t", partitions=3, **kind)
    called: list[BatchAck] = []

    async def awaited() -> tuple[OffsetRange, ...]:
        return await _queued(topic, how, range(40, 80))

    first = _queued(topic, how, range(40))
    ranges = first.result(PATIENCE)
    later = asyncio.run(awaited())
    first.add_callback(called.append)

    assert (first.done, first.count, called, first.failures) == (True, 40, [first], {})
    assert first.ranges == ranges and {found.first for found in ranges} == {0}
    assert sorted(found._replace(first=found.count) for found in ranges) == sorted(later)
    offsets = first.offsets()
    for number, offset in enumerate(offsets):
        place = partition_of_key(KEYS[number], 3)
        assert offset is not None
        [record] = topic.read(offset, stop=offset + 1, partition=place)
        assert (record.value, record.key) == (b"%d" % number, KEYS[number])


def test_a_batch_without_keys_is_one_range(log: Storage, kind: dict[str, Any]) -> None:
    topic = log.create_topic("t", partitions=2, **kind)

    acks = [topic.append_many_nowait([b"a", b"b"]) for _ in range(4)]

    assert [ack.result(PATIENCE) for ack in acks] == [
        (OffsetRange(0, 0, 2),),
        (OffsetRange(1, 0, 2),),
        (OffsetRange(0, 2, 2),),
        (OffsetRange(1, 2, 2),),
    ]
    assert acks[3].offsets() == range(2, 4)
    assert topic.append_many_nowait([b"c"], partition=1).result(PATIENCE) == ((1, 4, 1),)


def test_a_batch_of_no_records_is_acknowledged_at_once(log: Storage) -> None:
    topic = log.create_topic("t")

    for ack in (
        topic.append_many_nowait([]),
        topic.append_arrow_nowait(pa.record_batch({"value": pa.array([], "binary")})),
    ):
        assert (ack.done, ack.result(), list(ack.offsets()), ack.count) == (True, (), [], 0)


def test_batches_of_two_threads_each_stand_once(log: Storage, kind: dict[str, Any]) -> None:
    topic = log.create_topic("t", partitions=2, **kind)
    acks: list[BatchAck] = []

    def append(first: int) -> None:
        acks.extend(_queued(topic, "arrow", range(start, start + 40)) for start in range(first, first + 400, 40))

    threads = [threading.Thread(target=append, args=(first,)) for first in (0, 400)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    ends = [ack.result(PATIENCE) for ack in acks]
    assert sum(found.count for ranges in ends for found in ranges) == 800
    assert sorted(record.value or b"" for record in topic.read()) == sorted(b"%d" % n for n in range(800))


@settings(max_examples=50)
@given(
    st.lists(st.none() | st.binary(max_size=9), min_size=1, max_size=40),
    st.integers(1, 5),
    st.sampled_from(["binary", "large_binary", "dictionary", "sliced"]),
)
def test_rows_of_a_record_batch_go_where_the_same_records_go_one_by_one(
    keys: list[bytes | None], partitions: int, shape: str
) -> None:
    column: pa.Array = pa.array(keys, pa.large_binary() if shape == "large_binary" else pa.binary())
    if shape == "dictionary":
        column = column.dictionary_encode()
    if shape == "sliced":
        column = pa.concat_arrays([pa.array([b"before", None], pa.binary()), column])[2:]
    found = [b"%d" % number for number in range(len(keys))]
    with forebay.open(":memory:") as log:
        plain, arrow = (
            log.create_topic("plain", partitions=partitions),
            log.create_topic("arrow", partitions=partitions),
        )

        offsets = plain.append_many(found, keys=keys)
        ack = arrow.append_arrow_nowait(pa.record_batch({"key": column, "value": found}))

        assert list(ack.offsets()) == list(offsets)
        for partition in range(partitions):
            expected = [(record.value, record.key) for record in plain.read(partition=partition)]
            assert [(record.value, record.key) for record in arrow.read(partition=partition)] == expected


def test_keys_of_text_choose_the_partition_by_their_bytes(log: Storage) -> None:
    """A text key was refused where a topic had several partitions, and taken where it had one."""
    topic = log.create_topic("t", partitions=2)

    for key in KEY_OF.values():
        topic.append_arrow(pa.record_batch({"value": [key], "key": [key.decode()]}))

    assert {place: values(topic.read(partition=place)) for place in (0, 1)} == {p: [k] for p, k in KEY_OF.items()}
    with pytest.raises(Invalid, match="column 'key' is int64"):
        _ = topic.append_arrow_nowait(pa.record_batch({"value": [b"v"], "key": [1]}))


def _both(topic: Topic, keyed: str = "many") -> BatchAck:
    if keyed == "arrow":
        return topic.append_arrow_nowait(
            pa.record_batch({"value": [b"zero", b"one", b"zero"], "key": [KEY_OF[0], KEY_OF[1], KEY_OF[0]]})
        )
    return topic.append_many_nowait([b"zero", b"one", b"zero"], keys=[KEY_OF[0], KEY_OF[1], KEY_OF[0]])


def _filled(log: Storage, partitions: range) -> list[Ack]:
    """Four records wait in each of the partitions, and no thread was asked to write them."""
    handle = log.topic("t")
    inside(handle).leave_queued()
    return [handle.append_nowait(b"full", partition=partition) for partition in partitions for _ in range(4)]


@pytest.mark.parametrize("keyed", ["many", "arrow"])
def test_where_one_partition_has_no_room_the_others_stand_and_the_ack_says_so(tmp_path: Path, keyed: str) -> None:
    with Storage.open(str(tmp_path / "log"), quick(queue_records_max=4)) as log:
        topic = log.create_topic("t", partitions=2)
        called: list[BatchAck] = []
        filling = _filled(log, range(1, 2))

        ack = _both(topic, keyed)
        ack.add_callback(called.append)
        until(lambda: called)

        assert (ack.done, called, ack.ranges) == (True, [ack], ((0, 0, 2),))
        assert list(ack.offsets()) == [0, None, 1]
        assert list(ack.failures) == [1] and isinstance(ack.failures[1], QueueFull)
        with pytest.raises(
            Indeterminate,
            match=r"2 records are appended \(partition 0: offsets 0 to 1\), the rest is not \(partition 1: ",
        ):
            ack.result()
        with pytest.raises(Indeterminate, match="repeat only what is missing"):
            asyncio.run(_awaited(ack))

        # Room again: what is missing is repeated.
        topic.flush()
        assert [one.result(PATIENCE) for one in filling] == [0, 1, 2, 3]
        assert topic.append_many_nowait([b"one"], keys=[KEY_OF[1]]).result(PATIENCE) == ((1, 4, 1),)
        assert values(topic.read()) == [b"zero", b"zero", *[b"full"] * 4, b"one"]


def test_where_no_partition_has_room_the_call_is_refused_and_nothing_is_done(tmp_path: Path) -> None:
    with Storage.open(str(tmp_path / "log"), quick(queue_records_max=4)) as log:
        topic = log.create_topic("t", partitions=2)
        filling = _filled(log, range(2))

        with pytest.raises(QueueFull, match="the queue is full"):
            _ = _both(topic)
        with pytest.raises(QueueFull):
            _ = topic.append_many_nowait([b"v"], partition=0)
        topic.flush()

        assert [ack.result(PATIENCE) for ack in filling] == [0, 1, 2, 3] * 2
        assert _both(topic).result(PATIENCE) == ((0, 4, 2), (1, 4, 1))


@pytest.mark.parametrize("kind", [KINDS["disk"], KINDS["ephemeral"], KINDS["rocksdb"]])
def test_a_partition_at_its_cap_fails_alone(log: Storage, kind: dict[str, Any]) -> None:
    topic = log.create_topic("t", partitions=2, cap_records=2, on_full="reject_new", **kind)
    topic.append_many([b"a", b"b"], partition=1)

    ack = _both(topic)
    with pytest.raises(Indeterminate, match="2 records are appended"):
        ack.result(PATIENCE)

    assert isinstance(ack.failures[1], Full)
    assert values(topic.read(partition=0)) == [b"zero"] * 2
    with pytest.raises(Full):
        _ = topic.append_many_nowait([b"one"], keys=[KEY_OF[1]])


def test_a_partition_that_fails_in_its_write_is_in_doubt_and_the_others_stand(tmp_path: Path) -> None:
    disk = WatchedDisk()
    # No mark of what is durable is written meanwhile: one that fails first would fail the append as not written.
    with Storage.open(str(tmp_path / "log"), quick(mark_interval_ms=60_000), disk=disk) as log:
        topic = log.create_topic("t", partitions=2)
        for partition in (0, 1):
            topic.append(b"before", partition=partition)
        directory = os.path.basename(wal_of(topic, 1).writer.place.directory)

        def fail(op: str, path: str) -> None:
            if op == "write" and path.endswith(".seg") and f"/{directory}/" in path:
                raise OSError(5, "broken")

        disk.meet = fail
        ack = _both(topic)
        with pytest.raises(Indeterminate, match=r"2 records are appended \(partition 0: .*\), the rest is in doubt"):
            ack.result(PATIENCE)

        assert ack.ranges == (OffsetRange(0, 1, 2),)
        assert isinstance(ack.failures[1], Indeterminate)
        disk.meet = lambda op, path: None


def test_where_one_partition_refuses_and_the_other_is_in_doubt_the_whole_is_in_doubt(tmp_path: Path) -> None:
    """It said that nothing was done, by the error of the partition that came first."""
    disk = WatchedDisk()
    # No mark of what is durable is written meanwhile: one that fails first would fail the append as not written.
    with Storage.open(str(tmp_path / "log"), quick(mark_interval_ms=60_000), disk=disk) as log:
        topic = log.create_topic("t", partitions=2)
        for partition in (0, 1):
            topic.append(b"before", partition=partition)
        directory = os.path.basename(wal_of(topic, 1).writer.place.directory)

        def fail(op: str, path: str) -> None:
            if op == "write" and path.endswith(".seg") and f"/{directory}/" in path:
                raise OSError(5, "broken")

        wal_of(topic, 0).hold(Unavailable("held"))
        disk.meet = fail
        ack = _both(topic)
        with pytest.raises(Indeterminate):
            ack.result(PATIENCE)
        assert isinstance(ack.failures[0], Unavailable) and isinstance(ack.failures[1], Indeterminate)
        disk.meet = lambda op, path: None
        until(lambda: wal_of(topic, 1).failure is None)
        disk.meet = fail
        with pytest.raises(Indeterminate):
            topic.append_many([b"zero", b"one"], keys=[KEY_OF[0], KEY_OF[1]])
        disk.meet = lambda op, path: None


def test_too_much_for_one_frame_is_refused_before_any_partition_gets_its_share(tmp_path: Path) -> None:
    with Storage.open(str(tmp_path / "log"), quick(frame_bytes_max=65_536)) as log:
        topic = log.create_topic("t", partitions=2)
        large = [b"small", b"x" * 66_000]
        with pytest.raises(Invalid, match="frame_bytes_max"):
            _ = topic.append_many_nowait(large, keys=[KEY_OF[0], KEY_OF[1]])
        with pytest.raises(Invalid, match="frame_bytes_max"):
            _ = topic.append_arrow_nowait(pa.record_batch({"value": large, "key": [KEY_OF[0], KEY_OF[1]]}))

        assert [topic.offsets(place).next for place in (0, 1)] == [0, 0]


def test_a_repeated_idempotent_batch_has_its_first_range(log: Storage, kind: dict[str, Any]) -> None:
    topic = log.create_topic("t", partitions=2, **kind)

    acks = [topic.append_many_nowait([b"a", b"b"], producer=9, sequence=0) for _ in range(3)]
    acks.append(topic.append_arrow_nowait(pa.record_batch({"value": [b"a", b"b"]}), producer=9, sequence=0))

    [place] = {ack.result(PATIENCE)[0].partition for ack in acks}
    assert {ack.result() for ack in acks} == {((place, 0, 2),)}
    assert values(topic.read()) == [b"a", b"b"]


def test_a_repeated_batch_over_partitions_has_its_first_ranges(log: Storage, kind: dict[str, Any]) -> None:
    topic = log.create_topic("t", partitions=2, **kind)
    rows = pa.record_batch({"value": [b"a", b"b"], "key": [KEY_OF[0], KEY_OF[1]]})

    acks = [
        topic.append_many_nowait([b"a", b"b"], keys=[KEY_OF[0], KEY_OF[1]], producer=9, sequence=6) for _ in range(3)
    ]
    acks.append(topic.append_arrow_nowait(rows, producer=9, sequence=6))

    assert {ack.result(PATIENCE) for ack in acks} == {((0, 0, 1), (1, 0, 1))}
    assert sorted(record.value or b"" for record in topic.read()) == [b"a", b"b"]
    with pytest.raises(Invalid, match="the records fall into 2"):
        _ = topic.append_arrow_nowait(rows, producer=9, sequence=7, previous=6)


def test_closing_answers_the_acks_that_are_outstanding(tmp_path: Path, kind: dict[str, Any]) -> None:
    log = forebay.open(tmp_path / "log", QUICK)
    topic = log.create_topic("t", partitions=2, **kind)
    inside(topic).leave_queued()
    acks = [_both(topic) for _ in range(3)]

    log.close()

    assert [ack.result(PATIENCE) for ack in acks] == [((0, 2 * n, 2), (1, n, 1)) for n in range(3)]
    with pytest.raises(Closed):
        _ = _both(topic)


def test_a_batch_queued_before_a_fork_is_answered_in_the_parent_alone(log: Storage) -> None:
    topic = log.create_topic("t", partitions=2)
    inside(topic).leave_queued()
    done, waiting = topic.append_many_nowait([]), _both(topic)
    reading, writing = os.pipe()

    child = os.fork()
    if child == 0:
        try:
            waiting.result(PATIENCE)
        except Closed as error:
            os.write(writing, f"{done.result()} {error}".encode())
        try:
            asyncio.run(asyncio.wait_for(_awaited(waiting), PATIENCE))
        except Closed as error:
            os.write(writing, f"; awaited: {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as answer:
        told = answer.read()
    assert "() this append was queued before a fork" in told
    assert "awaited: this append was queued before a fork" in told

    topic.flush()
    assert waiting.result(PATIENCE) == ((0, 0, 2), (1, 0, 1))


def test_a_log_opened_read_only_refuses_batches_in_words(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log:
        log.create_topic("t")
    with forebay.open(tmp_path / "log", QUICK, read_only=True) as log:
        topic = log.topic("t")
        with pytest.raises(Unsupported, match="read-only"):
            _ = topic.append_many_nowait([b"v"])
        with pytest.raises(Unsupported, match="read-only"):
            _ = topic.append_arrow_nowait(_batch(range(2)))


def test_the_callback_of_a_batch_may_append_and_wait_for_it(log: Storage) -> None:
    topic = log.create_topic("t", partitions=2)
    seen: list[object] = []

    _both(topic).add_callback(lambda ack: seen.append((ack.ranges, topic.append(b"inside", partition=0))))

    until(lambda: seen)
    assert seen == [(((0, 0, 2), (1, 0, 1)), 2)]


def test_while_a_load_is_attached_a_batch_is_refused_and_goes_through_afterwards(log: Storage) -> None:
    topic = log.create_topic("t", partitions=2)
    topic.append(b"before", partition=1)
    wal = wal_of(topic, 1)
    wal.queue.pause(Paused("a load is being attached"))

    ack = _both(topic)
    with pytest.raises(Indeterminate, match="a load is being attached"):
        ack.result(PATIENCE)
    with pytest.raises(Unavailable, match="a load is being attached"):
        _ = topic.append_many_nowait([b"v"], partition=1)
    wal.queue.resume()

    assert topic.append_many_nowait([b"v"], partition=1).result(PATIENCE) == ((1, 1, 1),)


def test_a_batch_follows_its_partition_to_a_shard_that_was_opened_again(log: Storage) -> None:
    topic = log.create_topic("t", partitions=2)
    assert _both(topic).result(PATIENCE) == ((0, 0, 2), (1, 0, 1))
    shard = inside(topic).segment(1)
    own, given = topic.appender._own, [shard]

    def stale(partition: int) -> OwnedShard:
        return given.pop() if partition == 1 and given else own(partition)

    inside(log).engine.retire(shard.ref)
    topic.appender._own = stale

    assert _both(topic).result(PATIENCE) == ((0, 2, 2), (1, 1, 1))


def test_an_interrupt_between_two_partitions_leaves_none_queued_for_good(
    log: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is queued is committed, though the call was interrupted (Ctrl-C) before it could return."""
    topic = log.create_topic("t", partitions=2)
    for partition in (0, 1):
        topic.append(b"before", partition=partition)
    shard = inside(topic).segment(1)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shard, "stage_many", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _ = _both(topic)

    until(lambda: wal_of(topic, 0).queue.is_empty)
    assert values(topic.read()) == [b"before", b"zero", b"zero", b"before"]


def test_two_threads_that_answer_the_last_shares_wake_each_waiter_and_callback_once() -> None:
    for _ in range(200):
        ack = BatchAck("t", [Share(number, 1, [number]) for number in range(2)])
        called: list[BatchAck] = []
        ack.add_callback(called.append)
        for number, ticket in enumerate(ack.tickets):
            ticket.offset = number
        threads = [threading.Thread(target=ticket.finish) for ticket in ack.tickets]

        for thread in threads:
            thread.start()
        found = ack.result(PATIENCE)
        for thread in threads:
            thread.join()

        assert found == ((0, 0, 1), (1, 1, 1))
        assert called == [ack]


async def _awaited(ack: BatchAck) -> tuple[OffsetRange, ...]:
    return await ack
