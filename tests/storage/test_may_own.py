"""The gate that a log is opened with: asked wherever a shard would be acquired, and never under a lock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import forebay
import forebay.aio
from forebay import Moved, ShardRef, Storage, Topic
from forebay.testing.inside import inside
from tests.looking import EXPORTED, TOPIC, UNUSED, VALUES, begin_owner, end_owner, recorded, settings_of
from tests.storage.rig import quick, values
from tests.storage.test_looking import LOOKS, LOOKS_OF_A_LOG
from tests.storage.test_workers import Gate
from tests.support.waiting import PATIENCE


def nothing(ref: ShardRef) -> bool:
    return False


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where an owner was killed that has left three exported records and two that are on its disk alone."""
    root = tmp_path_factory.mktemp("root")
    end_owner(begin_owner(root, "die"))
    yield root


def append_soon(topic: Topic) -> object:
    return topic.append_nowait(b"v").result(PATIENCE)


WRITES: dict[str, Callable[[Topic], object]] = {
    "append": lambda topic: topic.append(b"v"),
    "append_many": lambda topic: topic.append_many([b"v"]),
    "append_nowait": append_soon,
    "delete_by_key": lambda topic: topic.delete_by_key(b"k"),
    "delete_before": lambda topic: topic.delete_before(1),
    "acquire": lambda topic: topic.acquire(),
}


@pytest.mark.parametrize("write", WRITES)
def test_what_the_gate_refuses_is_not_acquired_by_a_write(root: Path, write: str) -> None:
    before = recorded(root), recorded(root, UNUSED)

    with forebay.open(root / "a", settings_of(root), may_own=nothing) as log:
        for name in (TOPIC, UNUSED):
            with pytest.raises(Moved, match="may not be owned here"):
                WRITES[write](log.topic(name))

    assert (recorded(root), recorded(root, UNUSED)) == before


@pytest.mark.parametrize("look", LOOKS)
def test_what_the_gate_refuses_is_not_acquired_by_a_look_even_in_its_own_directory(root: Path, look: str) -> None:
    before = recorded(root), recorded(root, UNUSED)

    with forebay.open(root / "a", settings_of(root), may_own=nothing) as log:
        for name in (TOPIC, UNUSED):
            LOOKS[look](log.topic(name))

    assert (recorded(root), recorded(root, UNUSED)) == before


@pytest.mark.parametrize("look", [*LOOKS_OF_A_LOG, "run_retention", "clean-up in the background"])
def test_what_the_gate_refuses_is_not_acquired_by_the_log_itself(root: Path, look: str) -> None:
    before = recorded(root), recorded(root, UNUSED)
    more: dict[str, Callable[[Storage], object]] = {
        "run_retention": lambda log: log.run_retention(),
        "clean-up in the background": lambda log: inside(log).workers.cleanup.step(),
    }

    with forebay.open(root / "a", settings_of(root), may_own=nothing) as log:
        (LOOKS_OF_A_LOG | more)[look](log)
        assert inside(log).shards() == []

    assert (recorded(root), recorded(root, UNUSED)) == before


def test_what_the_gate_refuses_is_read_as_far_as_history_goes(root: Path) -> None:
    with forebay.open(root / "a", settings_of(root), may_own=nothing) as log:
        assert values(log.topic(TOPIC).read()) == list(VALUES[:EXPORTED])
        assert log.topic(TOPIC).epoch() == 0


def test_two_processes_write_their_shards_of_a_topic_and_read_those_of_the_other(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    with (
        forebay.open(tmp_path / "a", settings, may_own=lambda ref: ref.partition == 0) as a,
        forebay.open(tmp_path / "b", settings, may_own=lambda ref: ref.partition == 1) as b,
    ):
        logs = [a, b]
        topics = [a.create_topic("t", partitions=2), b.topic("t")]
        for mine, topic in enumerate(topics):
            assert topic.append(b"of %d" % mine, partition=mine) == 0
            with pytest.raises(Moved):
                topic.append(b"no", partition=1 - mine)
        for mine, topic in enumerate(topics):
            shard = inside(topic).segment(mine)
            shard.rotate()
            shard.upkeep.seal_rotated()
            shard.history.catch_up()

        for mine, topic in enumerate(topics):
            assert values(topic.read(partition=1 - mine)) == [b"of %d" % (1 - mine)]
            assert topic.offsets(1 - mine).next == 1
            assert topic.append(b"more", partition=mine) == 1
            assert [shard.ref.partition for shard in inside(logs[mine]).shards()] == [mine]


def test_no_lock_is_held_while_the_gate_is_asked(tmp_path: Path) -> None:
    gate = Gate()

    def slow(ref: ShardRef) -> bool:
        if ref.spec.topic == "a":
            gate.wait()
        return True

    with forebay.open(tmp_path / "log", quick(), may_own=slow) as log, ThreadPoolExecutor(2) as threads:
        a, b = log.create_topic("a"), log.create_topic("b")
        calls: list[Future[Any]] = [threads.submit(a.append, b"v"), threads.submit(a.offsets)]
        with gate.reached_here():
            assert b.append(b"v") == 0
            lock = inside(log).engine.registry.lock(a.spec.topic_id, 0)
            assert lock.acquire(blocking=False)
            lock.release()
        for call in calls:
            call.result(PATIENCE)


def test_a_topic_in_memory_does_not_go_on_in_a_new_session_if_the_gate_refuses_it(tmp_path: Path) -> None:
    allowed = [True]
    with forebay.open(tmp_path / "log", quick(), may_own=lambda ref: allowed[0]) as log:
        topic = log.create_topic("t", durability="ephemeral")
        topic.append(b"v")
        inside(log).lose_session()
        allowed[0] = False

        with pytest.raises(Moved, match="may not be owned here"):
            topic.append(b"v")

        assert inside(log).shards() == []
        allowed[0] = True
        assert topic.append(b"v") > 0, "offsets that were reserved are not given out again"


@pytest.mark.parametrize("engine", ["rocksdb", "memory"])
def test_a_shard_without_history_that_the_gate_refuses_is_refused_to_readers_too(tmp_path: Path, engine: str) -> None:
    """An empty answer would say that there are no records."""
    allowed = [True]
    with forebay.open(tmp_path / "log", quick(), may_own=lambda ref: allowed[0]) as log:
        topic = log.create_topic("t", engine=engine, partitions=2)
        topic.append(b"v", partition=0)
        opened = inside(topic).shard(0)
        log_engine = inside(log).rocksdb if engine == "rocksdb" else inside(log).memory
        log_engine.registry.drop(opened)  # type: ignore[arg-type]
        allowed[0] = False

        with pytest.raises(Moved, match="may not be owned here"):
            topic.offsets(0)
        assert topic.offsets(1).next == 0, "it was never used"
        allowed[0] = True


def test_the_gate_holds_in_an_event_loop_too(root: Path) -> None:
    before = recorded(root)

    async def main() -> None:
        async with forebay.aio.open(root / "a", settings_of(root), may_own=nothing) as log:
            topic = await log.topic(TOPIC)
            assert [record.value async for record in topic.read()] == list(VALUES[:EXPORTED])
            with pytest.raises(Moved, match="may not be owned here"):
                await topic.append(b"v")

    asyncio.run(main())

    assert recorded(root) == before


def test_a_shard_that_is_open_is_sealed_exported_and_retained_after_the_gate_refuses_it(tmp_path: Path) -> None:
    """To give a shard up, a process first refuses it, so that nothing acquires it again, and then seals it."""
    allowed = [True]
    with forebay.open(tmp_path / "log", settings_of(tmp_path), may_own=lambda ref: allowed[0]) as log:
        topic = log.create_topic("t")
        topic.append(b"v")
        allowed[0] = False

        log.export_topic("t")
        log.alter_topic("t", cap_records=10)
        assert log.run_retention("t").evicted == 0
        (state,) = log.seal_topic("t")

        assert state.next_offset == 1
        with pytest.raises(Moved):
            topic.append(b"v")
