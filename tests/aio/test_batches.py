"""Batches in an event loop: no thread each, so one that waits holds up neither another topic nor the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import forebay
from forebay import Indeterminate, Invalid, Topic, Unavailable, Unsupported
from forebay.aio import AsyncLog, AsyncTopic
from forebay.aio.workers import OPEN, SHARD
from forebay.appends.queue import Paused, QueueFull
from forebay.clock import Clock
from forebay.engines import memory
from forebay.engines.registry import Registry
from forebay.format.frame.batch import Batch
from forebay.metadata import MetadataStore
from forebay.pages import LOOP_BYTES_MAX
from forebay.partitioning import partition_of_key
from forebay.shard import SegmentShard
from forebay.shard.eviction import ByteCount
from forebay.shard.ownership import Wanted, reserve_in_state
from forebay.storage.append import Appender
from forebay.testing.inside import inside
from forebay.topics import ShardRef
from tests.aio.test_aio import Held, collected, run
from tests.storage.rig import QUICK, quick, values
from tests.storage.test_batch_acks import KEY_OF, KEYS, KINDS
from tests.support.waiting import PATIENCE


async def _append(topic: AsyncTopic, how: str, found: list[bytes], keys: list[bytes] | None = None) -> list[int]:
    if how == "arrow":
        columns = {"value": found} if keys is None else {"value": found, "key": keys}
        return list(await topic.append_arrow(pa.record_batch(columns)))
    return list(await topic.append_many(found, keys=keys))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["many", "arrow"])
def test_batches_of_many_tasks_stand_once_each_at_the_offsets_they_are_given(
    tmp_path: Path, kind: str, how: str
) -> None:
    async def use(log: AsyncLog) -> None:
        topic = await log.create_topic("t", partitions=3, **KINDS[kind])  # type: ignore[arg-type]
        batches = [[b"%d" % n for n in range(start, start + 20)] for start in range(0, 400, 20)]

        found = await asyncio.gather(*(_append(topic, how, batch, KEYS[:20]) for batch in batches))

        for batch, offsets in zip(batches, found, strict=True):
            for value, key, offset in zip(batch, KEYS, offsets, strict=False):
                place = partition_of_key(key, 3)
                assert values(await collected(topic.read(offset, stop=offset + 1, partition=place))) == [value]
        assert len(await collected(topic.read())) == 400

    run(tmp_path / "log", use)


def test_batches_of_many_tasks_share_their_syncs(tmp_path: Path) -> None:
    """A batch held a thread until it was synced: no more than four could share a sync."""

    async def use(log: AsyncLog) -> None:
        topic = await log.create_topic("t", durability="fsync")
        await topic.append(b"first")
        wal = inside(topic).wal()
        with wal.committing:
            tasks = [asyncio.create_task(topic.append_many([b"v"] * 10)) for _ in range(100)]
            await asyncio.sleep(0)
            assert wal.queue.next == 1_001
            before = wal.counters.fsyncs
        await asyncio.gather(*tasks)
        assert wal.counters.fsyncs - before == 1

    run(tmp_path / "log", use)


@pytest.mark.slow
def test_batches_that_wait_for_room_hold_up_no_other_topic(tmp_path: Path) -> None:
    """As many batches as there were threads for them stopped the appends of every topic."""

    async def use(log: AsyncLog) -> None:
        stuck = [await log.create_topic(f"stuck-{number}") for number in range(2 * OPEN.threads)]
        other = await log.create_topic("other", partitions=2)
        for topic in stuck:
            await topic.append(b"first")
            inside(topic).wal().queue.pause(Paused("a load is being attached"))
        waiting = [asyncio.create_task(_append(topic, how, [b"v"])) for topic in stuck for how in ("many", "arrow")]
        await asyncio.sleep(0)

        assert await other.append_many([b"a", b"b"], keys=[KEY_OF[0], KEY_OF[1]]) == [0, 0]
        assert await other.append_arrow(pa.record_batch({"value": [b"c"]}), partition=0) == [1]
        assert await other.append(b"d", partition=0) == 2
        assert not any(task.done() for task in waiting)
        for topic in stuck:
            inside(topic).wal().queue.resume()

        assert sorted(await asyncio.gather(*waiting)) == [[1]] * len(stuck) + [[2]] * len(stuck)

    run(tmp_path / "log", use, quick(append_timeout_ms=60_000))


def test_openings_that_hang_hold_up_neither_open_topics_nor_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, acquire = threading.Event(), Topic.acquire

    def slow(of: Topic, partition: int | None = None) -> None:
        if of.name.endswith("/slow"):
            assert gate.wait(60)
        acquire(of, partition)

    async def use(log: AsyncLog) -> None:
        slow_topic = await log.create_topic("slow", partitions=2 * OPEN.threads)
        other = await log.create_topic("other")
        await other.append(b"first")
        monkeypatch.setattr(Topic, "acquire", slow)
        waiting = [
            asyncio.create_task(slow_topic.append_many([b"v"], partition=partition))
            for partition in range(2 * OPEN.threads)
        ]
        await asyncio.sleep(0)

        assert await other.append_many([b"v", b"w"]) == range(1, 3)
        assert values(await collected(other.read())) == [b"first", b"v", b"w"]
        gate.set()
        assert await asyncio.gather(*waiting) == [range(1)] * (2 * OPEN.threads)

    run(tmp_path / "log", use)


def test_a_full_queue_makes_batches_wait_and_refuses_them_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)

    async def use(log: AsyncLog) -> None:
        topic = await log.create_topic("t")
        await topic.append(b"before")
        held.hold(topic)
        first = asyncio.create_task(topic.append_many([b"stuck"] * 2))
        await asyncio.get_running_loop().run_in_executor(None, held.stuck.wait, 60)
        waiting = asyncio.create_task(topic.append_many([b"waits"] * 3))
        await asyncio.sleep(0)

        with pytest.raises(QueueFull, match="the queue is full"):
            _ = await topic.append_many_nowait([b"refused"])
        with pytest.raises(QueueFull):
            _ = await topic.append_nowait(b"refused")
        with pytest.raises(QueueFull):
            _ = await topic.append_arrow_nowait(pa.record_batch({"value": [b"refused"]}))
        with pytest.raises(Unavailable, match=r"waited 1500 ms \(wal.append_timeout_ms\): 3 records"):
            await topic.append_many([b"refused"])
        late = [asyncio.create_task(topic.append_many([b"late"] * 2)) for _ in range(5)]
        await asyncio.sleep(0)
        held.go_on.set()

        assert (await first, await waiting) == (range(1, 3), range(3, 6))
        assert sorted(found[0] for found in await asyncio.gather(*late)) == list(range(6, 16, 2))
        assert b"refused" not in values(await collected(topic.read()))

    run(tmp_path / "log", use, quick(queue_records_max=3, append_timeout_ms=1500, flush_interval_ms=60_000))


def test_a_batch_that_is_cancelled_while_it_waits_for_room_never_appears(tmp_path: Path) -> None:
    async def use(log: AsyncLog) -> None:
        topic = await log.create_topic("t", partitions=2)
        for partition in (0, 1):
            await topic.append(b"before", partition=partition)
        queue = inside(topic).wal(1).queue
        queue.pause(Paused("a load is being attached"))
        task = asyncio.create_task(topic.append_many([b"zero", b"one"], keys=[KEY_OF[0], KEY_OF[1]]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        queue.resume()

        assert await topic.append_many([b"after"], partition=1) == range(1, 2)
        assert values(await collected(topic.read(partition=1))) == [b"before", b"after"]
        # Each partition by itself: the other share was queued before.
        assert values(await collected(topic.read(partition=0))) == [b"before", b"zero"]

    run(tmp_path / "log", use)


def test_a_batch_that_is_cancelled_once_it_is_queued_appears_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)

    async def use(log: AsyncLog) -> None:
        topic = await log.create_topic("t")
        await topic.append(b"before")
        held.hold(topic)
        cancelled = asyncio.create_task(topic.append_many([b"cancelled"] * 2))
        await asyncio.get_running_loop().run_in_executor(None, held.stuck.wait, 60)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        held.go_on.set()

        assert await topic.append_many([b"after"]) == range(3, 4)
        assert values(await collected(topic.read())) == [b"before", *[b"cancelled"] * 2, b"after"]

    run(tmp_path / "log", use)


def test_where_one_partition_has_no_room_in_time_the_others_stand(tmp_path: Path) -> None:
    async def use(log: AsyncLog) -> None:
        topic = await log.create_topic("t", partitions=2)
        await topic.append(b"before", partition=1)
        queue = inside(topic).wal(1).queue
        queue.pause(Paused("a load is being attached"))

        with pytest.raises(
            Indeterminate, match=r"1 records are appended \(partition 0: offsets 0 to 0\), the rest is not"
        ):
            await topic.append_many([b"zero", b"one"], keys=[KEY_OF[0], KEY_OF[1]])
        ack = await topic.append_many_nowait([b"one", b"zero"], keys=[KEY_OF[1], KEY_OF[0]])
        with pytest.raises(Indeterminate):
            await ack
        assert (ack.ranges, list(ack.offsets()), list(ack.failures)) == (((0, 1, 1),), [None, 1], [1])
        with pytest.raises(Unavailable, match="waited 50 ms"):
            await topic.append_many([b"one"], partition=1)
        queue.resume()

    run(tmp_path / "log", use, quick(append_timeout_ms=50))


def test_an_ack_is_there_once_the_records_are_queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)

    async def use(log: AsyncLog) -> None:
        topic = await log.create_topic("t")
        await topic.append(b"before")
        held.hold(topic)
        acks = [await topic.append_many_nowait([b"v"] * 2) for _ in range(3)]
        acks.append(await topic.append_arrow_nowait(pa.record_batch({"value": [b"w"]})))
        one = await topic.append_nowait(b"x")
        assert not any(ack.done for ack in acks) and not one.done
        held.go_on.set()

        assert [await ack for ack in acks] == [((0, 1, 2),), ((0, 3, 2),), ((0, 5, 2),), ((0, 7, 1),)]
        assert await one == 8

    run(tmp_path / "log", use)


@pytest.mark.parametrize("durability", ["disk", "ephemeral"])
def test_a_batch_never_acquires_a_shard_in_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    threads: list[threading.Thread] = []
    plain = Registry.open

    def watched(registry: Registry[Any], ref: ShardRef, opening: Callable[[ShardRef], object]) -> object:
        def opened(ref: ShardRef) -> object:
            threads.append(threading.current_thread())
            return opening(ref)

        return plain(registry, ref, opened)

    monkeypatch.setattr(Registry, "open", watched)

    async def use(log: AsyncLog) -> None:
        topic = await log.create_topic("t", durability=durability, partitions=2)
        within = inside(log)
        for given_up in range(3):
            acked = await asyncio.gather(
                *(topic.append_many([b"a", b"b"], keys=[KEY_OF[0], KEY_OF[1]]) for _ in range(10)),
                topic.append_many([b"c"], partition=0),
            )
            assert sorted(found[0] for found in acked) == list(range(given_up * 11, given_up * 11 + 11))
            for shard in within.shards():
                if isinstance(shard, SegmentShard):
                    within.engine.retire(shard.ref)

    run(tmp_path / "log", use)

    assert threads
    assert threading.main_thread() not in threads


@pytest.mark.parametrize("how", ["one", "many"])
def test_metadata_is_asked_for_offsets_by_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A metadata store that does not answer stopped the loop, where a shard in memory ran out of reserved offsets."""
    threads: list[threading.Thread] = []

    def reserving(metadata: MetadataStore, shard: Wanted, epoch: int, *, clock: Clock) -> Callable[[int], int]:
        return _watched(reserve_in_state(metadata, shard, epoch, clock=clock), threads)  # type: ignore[return-value]

    monkeypatch.setattr(memory, "reserve_in_state", reserving)

    async def use(log: AsyncLog) -> None:
        topic = await log.create_topic("t", durability="ephemeral")
        for number in range(30):
            assert await (topic.append(b"v") if how == "one" else topic.append_many([b"v"], partition=0)) in (
                number,
                range(number, number + 1),
            )

    run(tmp_path / "log", use, quick(reserve_records_min=10))

    assert len(threads) >= 2 and threading.main_thread() not in threads


def test_a_shard_in_memory_whose_lock_is_held_holds_up_no_other_topic(tmp_path: Path) -> None:
    """A thread that appends to it may wait for metadata."""

    async def use(log: AsyncLog) -> None:
        held, other = await log.create_topic("held", durability="ephemeral"), await log.create_topic("other")
        await held.append(b"first")
        taken, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            with inside(held).held_memory():
                taken.set()
                assert go_on.wait(60)

        holding = threading.Thread(target=hold)
        holding.start()
        await asyncio.to_thread(taken.wait)
        waiting = [asyncio.create_task(held.append(b"v")) for _ in range(3)]
        releasing = threading.Timer(5, go_on.set)
        releasing.start()
        await asyncio.sleep(0)

        assert await other.append(b"v") == 0
        assert not go_on.is_set()
        releasing.cancel()
        go_on.set()
        assert await asyncio.gather(*waiting) == [1, 2, 3]
        holding.join()

    run(tmp_path / "log", use)


def test_what_a_capped_topic_holds_is_counted_by_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting reads every file of the shard."""
    threads: list[threading.Thread] = []
    with forebay.open(tmp_path / "log", QUICK) as log:
        log.create_topic("t", cap_bytes=1_000_000, on_full="reject_new").append_many([b"v"] * 100)
    monkeypatch.setattr(ByteCount, "count", _watched(ByteCount.count, threads))

    async def use(log: AsyncLog) -> None:
        topic = await log.topic("t")
        assert [await topic.append(b"w") for _ in range(3)] == [100, 101, 102]
        assert await topic.append_many([b"x"]) == range(103, 104)

    run(tmp_path / "log", use)

    assert threads and threading.main_thread() not in threads


def _watched(call: Callable[..., object], threads: list[threading.Thread]) -> Callable[..., object]:
    """The call, noting by which thread it is made."""

    def watched(*given: object, **named: object) -> object:
        threads.append(threading.current_thread())
        return call(*given, **named)

    return watched


def test_many_records_are_encoded_by_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop would stand still for them."""
    count = 2_001
    threads: list[threading.Thread] = []

    monkeypatch.setattr(Appender, "prepare_many", _watched(Appender.prepare_many, threads))
    monkeypatch.setattr(Appender, "prepare_arrow", _watched(Appender.prepare_arrow, threads))

    async def use(log: AsyncLog) -> None:
        topic = await log.create_topic("t", partitions=2)
        for how in ("many", "arrow"):
            offsets = await _append(topic, how, [b"v"] * count, (KEYS * 51)[:count])
            assert len(offsets) == count
        with pytest.raises(Invalid, match="values is None"):
            await topic.append_many(None)  # type: ignore[arg-type]
        with pytest.raises(Invalid, match="not a pyarrow.RecordBatch"):
            await topic.append_arrow([b"v"])
        assert len(await collected(topic.read())) == 2 * count
        assert len(threads) == 2 and threading.main_thread() not in threads

    run(tmp_path / "log", use)


def test_few_large_records_are_encoded_and_read_by_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records were counted, and not their bytes: the loop stood still for them."""
    large = b"v" * (LOOP_BYTES_MAX // 2)
    threads: list[threading.Thread] = []
    reading: list[threading.Thread] = []
    monkeypatch.setattr(Appender, "prepare_many", _watched(Appender.prepare_many, threads))
    monkeypatch.setattr(Appender, "prepare_arrow", _watched(Appender.prepare_arrow, threads))
    monkeypatch.setattr(Batch, "records", _watched(Batch.records, reading))

    async def use(log: AsyncLog) -> None:
        topic = await log.create_topic("t")
        for how in ("many", "arrow"):
            for found in ([b"v"], [large] * 3):
                await _append(topic, how, found)
        await topic.append_many([b"v"], keys=[large * 3])
        is_main = [thread is threading.main_thread() for thread in threads]
        assert is_main == [True, False, True, False, False]

        assert topic.read_cached(0, 1) is None
        assert [len(record.value or b"") for record in (await topic.page(0, 1, bytes_max=1)).records] == [
            len(large)
        ] * 3
        assert len((await topic.page(0, 0, bytes_max=1)).records) == 1
        assert [thread is threading.main_thread() for thread in reading] == [False, True]

    run(tmp_path / "log", use)


@pytest.mark.parametrize("how", ["many", "arrow"])
def test_readers_that_hang_hold_up_no_large_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """It waited for a thread to encode it, behind as many calls as there were threads."""
    gate = threading.Event()

    async def use(log: AsyncLog) -> None:
        topic, read = await log.create_topic("t"), Topic.offsets
        monkeypatch.setattr(Topic, "offsets", lambda *given: gate.wait(2 * PATIENCE) and read(*given))
        hanging = [asyncio.create_task(topic.offsets()) for _ in range(SHARD.threads)]
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(PATIENCE):
                assert len(await _append(topic, how, [b"v"] * 2_001)) == 2_001
        finally:
            gate.set()
        await asyncio.gather(*hanging)

    run(tmp_path / "log", use)


@pytest.mark.parametrize("keys", [None, KEYS])
def test_an_append_that_may_be_split_is_in_order_and_whole(tmp_path: Path, keys: list[bytes] | None) -> None:
    async def use(log: AsyncLog) -> None:
        topic = await log.create_topic("t", partitions=2)
        found = [b"%04d" % number + b"x" * 4_000 for number in range(40)]
        partition = 0 if keys is None else None
        with pytest.raises(Invalid, match="frame_bytes_max"):
            await topic.append_many(found, keys=keys, partition=partition)

        offsets = await topic.append_many(found, keys=keys, partition=partition, atomic=False)

        assert sorted(values(await collected(topic.read()))) == found  # type: ignore[type-var]
        for number, offset in enumerate(offsets):
            place = 0 if keys is None else partition_of_key(keys[number], 2)
            assert values(await collected(topic.read(offset, stop=offset + 1, partition=place))) == [found[number]]
        with pytest.raises(Invalid, match="names exactly one"):
            await topic.append_many(found, atomic=False, producer=1, sequence=0)

    run(tmp_path / "log", use, quick(frame_bytes_max=65_536))


def test_a_split_append_that_is_refused_half_way_says_what_is_in(tmp_path: Path) -> None:
    async def use(log: AsyncLog) -> None:
        topic = await log.create_topic("t")
        queue = inside(topic).wal().queue
        taken = queue.take

        def once(end_max: int | None = None) -> None:
            taken(end_max)
            if queue.taken:
                queue.pause(Paused("a load is being attached"))

        queue.take = once  # type: ignore[method-assign]
        with pytest.raises(Indeterminate, match=r"(\d+) records are appended \(partition 0: offsets 0 to "):
            await topic.append_many([b"x" * 4_000] * 40, atomic=False)
        queue.take = taken  # type: ignore[method-assign]
        queue.resume()

    run(tmp_path / "log", use, quick(frame_bytes_max=65_536, append_timeout_ms=50))


def test_a_log_opened_read_only_refuses_batches_in_words(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log:
        log.create_topic("t")

    async def whole() -> None:
        async with forebay.aio.open(tmp_path / "log", QUICK, read_only=True) as log:
            topic = await log.topic("t")
            for call in (topic.append_many([b"v"]), topic.append_many_nowait([b"v"]), topic.append(b"v")):
                with pytest.raises(Unsupported, match="read-only"):
                    await call

    asyncio.run(whole())


def test_batches_work_in_memory() -> None:
    async def use(log: AsyncLog) -> None:
        topic = await log.create_topic("t", partitions=2)
        assert await topic.append_many([b"a", b"b"], keys=[KEY_OF[0], KEY_OF[1]]) == [0, 0]
        assert await (await topic.append_many_nowait([b"c"], partition=1)) == ((1, 1, 1),)
        assert await topic.append_many([]) == []

    run(":memory:", use)
