"""Shards of a log that are opened, given up and deleted at once: one that hangs delays its own users alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import Settings, Storage, UnknownTopic
from forebay.engines import SegmentEngine
from forebay.engines.registry import ShardedEngine
from forebay.metadata import Compare, MetadataStore, Operation, Outcome, Put
from forebay.shard import SegmentShard
from forebay.testing.inside import inside
from forebay.topics import ShardRef
from tests.storage.rig import QUICK, WatchedDisk, in_thread, is_free, quick, values
from tests.storage.test_workers import Gate
from tests.support.waiting import PATIENCE

FAILOVER = 50


def gate_metadata(log: Storage, topic_id: str, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Every transaction that changes a shard of this topic stays at the gate."""
    gate = Gate()

    def meet(puts: list[Put]) -> None:
        if any(put.key.endswith("/state") and topic_id.encode() in put.value for put in puts):
            gate.wait()

    before_each(inside(log).metadata, meet, monkeypatch)
    return gate


def before_each(store: MetadataStore, meet: Callable[[list[Put]], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `meet` with what each transaction writes, before it does."""
    plain = store.transaction

    def transaction(compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        meet([operation for operation in operations if isinstance(operation, Put)])
        return plain(compares, operations)

    monkeypatch.setattr(store, "transaction", transaction)


@pytest.fixture(params=["metadata", "disk"])
def hanging(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Storage, Gate]]:
    """A log with a record in each of the topics a and b, opened again; the first use of a stays at the gate."""
    with forebay.open(tmp_path / "log", QUICK) as log:
        ids = {name: log.create_topic(name).spec.topic_id for name in "ab"}
        for name in ids:
            log.topic(name).append(b"0")
    disk = WatchedDisk()
    with Storage.open(tmp_path / "log", quick(), disk=disk) as log:
        if request.param == "metadata":
            gate = gate_metadata(log, ids["a"], monkeypatch)
        else:
            gate = Gate()
            disk.meet = lambda kind, path: gate.wait() if ids["a"] in path else None
        try:
            yield log, gate
        finally:
            gate.open()


def test_a_shard_is_used_closed_and_deleted_while_another_hangs_in_its_opening(hanging: tuple[Storage, Gate]) -> None:
    log, gate = hanging
    a, b = log.topic("a"), log.topic("b")
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(a.append, b"1")
        with gate.reached_here():
            assert b.append(b"1") == 1
            assert values(b.read()) == [b"0", b"1"]
            inside(log).engine.retire(ShardRef(b.spec, 0))
            assert b.append(b"2") == 2
            log.delete_topic("b")
            with pytest.raises(UnknownTopic):
                b.append(b"3")
            assert log.create_topic("c").append(b"0") == 0
            assert not first.done()
        assert first.result(PATIENCE) == 1


def test_recovering_all_shards_holds_up_no_other(hanging: tuple[Storage, Gate]) -> None:
    """A shard that is opened by `recover` at that moment is not acquired twice: its appends go on."""
    log, gate = hanging
    b = log.topic("b")
    with ThreadPoolExecutor(1) as threads:
        recovered = threads.submit(log.recover)
        with gate.reached_here():
            assert b.append(b"1") == 1
            epoch = b.epoch()
        recovered.result(PATIENCE)
    assert b.append(b"2") == 2 and b.epoch() == epoch
    assert values(log.topic("a").read()) == [b"0"]


def test_threads_that_use_a_shard_for_the_first_time_at_once_recover_it_once(hanging: tuple[Storage, Gate]) -> None:
    log, gate = hanging
    a = log.topic("a")
    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(a.append, b"v") for _ in range(4)] + [
            threads.submit(lambda: a.offsets().next) for _ in range(4)
        ]
        with gate.reached_here():
            pass
        found = [call.result(PATIENCE) for call in calls]
    assert sorted(found[:4]) == [1, 2, 3, 4]
    assert a.epoch() == 2, "each opening takes an epoch"


def test_a_topic_deleted_while_its_shard_is_opened_leaves_nothing(hanging: tuple[Storage, Gate]) -> None:
    log, gate = hanging
    a = log.topic("a")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(a.append, b"1")
        with gate.reached_here():
            deleted = threads.submit(log.delete_topic, "a")
            while "a" in {spec.topic for spec in log.topics()}:
                pass
        deleted.result(PATIENCE)
        error = first.exception(PATIENCE)
    assert error is None or isinstance(error, forebay.ForebayError)
    with pytest.raises(UnknownTopic):
        a.append(b"2")
    assert not Path(inside(log).engine.directory_of(ShardRef(a.spec, 0))).exists()
    assert [entry.key for entry in inside(log).metadata.range("") if a.spec.topic_id.encode() in entry.value] == []


def test_no_worker_keeps_a_shard_that_was_opened_while_its_topic_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deletion stopped the work on the shard before the shard was open: two workers kept it for ever."""
    gate, deleting, opened = Gate(), threading.Event(), list[SegmentShard]()
    opening, removing = SegmentShard.open, SegmentEngine.delete_shard

    def open_slowly(*args: Any, **named: Any) -> SegmentShard:
        opened.append(opening(*args, **named))
        gate.wait()
        return opened[-1]

    def remove(engine: SegmentEngine, ref: ShardRef) -> None:
        deleting.set()
        removing(engine, ref)

    with Storage.open(tmp_path / "log", quick()) as log, ThreadPoolExecutor(2) as threads:
        topic = log.create_topic("a")
        monkeypatch.setattr(SegmentShard, "open", open_slowly)
        monkeypatch.setattr(SegmentEngine, "delete_shard", remove)
        first = threads.submit(topic.append, b"1")
        with gate.reached_here():
            deleted = threads.submit(log.delete_topic, "a")
            assert deleting.wait(PATIENCE)
        deleted.result(PATIENCE)
        first.exception(PATIENCE)
        workers = inside(log).workers
        assert not workers.sync.watches(opened[0]) and not workers.history.watches(opened[0])


@pytest.mark.slow
def test_the_failover_of_many_shards_is_not_serial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings.load(
        overrides={
            **QUICK,
            "metadata": {"path": str(tmp_path / "metadata.db")},
            "storage": {"mode": "shared_fs"},
            "store": {"root": str(tmp_path / "store")},
        }
    )
    with Storage.open(tmp_path / "a", settings) as a:
        topic = a.create_topic("t", partitions=FAILOVER)
        for partition in range(FAILOVER):
            topic.append(b"v", partition=partition)
    with Storage.open(tmp_path / "b", settings) as b, ThreadPoolExecutor(FAILOVER) as threads:
        topic, all_at_once = b.topic("t"), threading.Barrier(FAILOVER)

        def meet(puts: list[Put]) -> None:
            if any(put.key.endswith("/state") and b'"epoch":2' in put.value for put in puts):
                all_at_once.wait(PATIENCE)

        before_each(inside(b).metadata, meet, monkeypatch)
        calls = [threads.submit(topic.append, b"w", partition=partition) for partition in range(FAILOVER)]
        assert [call.result(PATIENCE) for call in calls] == [1] * FAILOVER
        monkeypatch.undo()


def test_readers_of_what_is_recorded_go_on_in_the_shard_that_is_opened_at_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look and the opening take one lock: no reader is left behind in what was recorded before."""
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic, gate = log.create_topic("t"), Gate()
        whole = SegmentEngine.may_own

        def slow(engine: SegmentEngine, ref: ShardRef) -> bool:
            found = whole(engine, ref)
            gate.wait()
            return found

        monkeypatch.setattr(SegmentEngine, "may_own", slow)
        with ThreadPoolExecutor(2) as threads:
            following = threads.submit(topic.following, forebay.EARLIEST)
            with gate.reached_here():
                appended = threads.submit(topic.append, b"v")
                assert inside(log).shards() == []
            stream = following.result(PATIENCE)
            appended.result(PATIENCE)
        assert values(list(stream.next_page() or ())) == [b"v"]


@pytest.mark.parametrize("engine", ["segment", "rocksdb", "memory"])
@pytest.mark.parametrize("ending", ["delete", "close"])
def test_wakers_of_a_shard_that_ends_are_called_when_its_lock_is_free(tmp_path: Path, engine: str, ending: str) -> None:
    """A waker is a function of the user's: one that takes long would hold up every thread that asks for the shard."""
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = log.create_topic("t", engine=engine, durability="ephemeral" if engine == "memory" else "disk")
        topic.append(b"v")
        own, seen = inside(log), list[bool]()
        engines: dict[str, ShardedEngine[Any]] = {"segment": own.engine, "rocksdb": own.rocksdb, "memory": own.memory}
        lock = engines[engine].registry.lock(topic.spec.topic_id, 0)
        topic.on_published(lambda: seen.append(in_thread(partial(is_free, lock))))

        if ending == "delete":
            log.delete_topic("t")
        else:
            log.close()
        assert seen and all(seen)
