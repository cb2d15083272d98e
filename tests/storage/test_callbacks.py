"""Callbacks of appends may use the log as anybody does; a signal handler in the middle of an append is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

import forebay
from forebay import Ack, BatchAck, Fenced, ForebayError, Full, Indeterminate, Storage, Topic, Unavailable
from forebay.appends.queue import QueuedRecord
from forebay.appends.ticket import Ticket
from forebay.catalog import read_state
from forebay.format.control.frames import Floor
from forebay.format.metadata.value import encode_value
from forebay.metadata import Put
from forebay.records import OffsetRange, Reason
from forebay.shard import SegmentShard
from forebay.testing.inside import inside
from forebay.wal.removals import Removals
from tests.storage.rig import QUICK, WatchedDisk, quick, values, wal_of
from tests.storage.test_workers import shared
from tests.support.waiting import PATIENCE, until

CLASSES = ("memory", "disk", "fsync")


def _heard(topic: Topic, work: Callable[[Ack], object], count: int = 1) -> list[object]:
    """What the callbacks of some appends, all queued before the first is written, returned or raised."""
    heard: list[object] = []

    def hear(ack: Ack) -> None:
        try:
            heard.append(work(ack))
        except ForebayError as error:
            heard.append(error)

    with wal_of(topic).committing:
        for ack in [topic.append_nowait(b"first") for _ in range(count)]:
            ack.add_callback(hear)
    until(lambda: len(heard) == count)
    return heard


@pytest.mark.parametrize("durability", CLASSES)
def test_a_callback_may_append_and_wait_for_it(tmp_path: Path, durability: str) -> None:
    """It ran under the log's lock: the shard was stuck for good."""
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = log.create_topic("t", durability=durability)
        assert _heard(topic, lambda _: topic.append(b"inside")) == [1]
        assert topic.append(b"after") == 2


def test_a_thousand_callbacks_that_append_do_not_nest(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic, other = log.create_topic("t"), log.create_topic("other")
        second: list[int] = []

        def work(_: Ack) -> int:
            other.append_nowait(b"x").add_callback(lambda ack: second.append(ack.result()))
            other.append(b"y")
            return topic.append(b"inside")

        assert sorted(map(str, _heard(topic, work, 1000))) == sorted(map(str, range(1000, 2000)))
        until(lambda: len(second) == 1000)


@pytest.mark.parametrize("durability", CLASSES)
def test_a_callback_may_close_the_log_beside_another_closing(tmp_path: Path, durability: str) -> None:
    log = forebay.open(tmp_path / "log", QUICK)
    topic = log.create_topic("t", durability=durability)

    assert _heard(topic, lambda _: log.close(), 3) == [None] * 3
    log.close()

    with forebay.open(tmp_path / "log", QUICK) as log:
        assert values(log.topic("t").read()) == [b"first"] * 3


def test_a_callback_that_closes_while_the_closing_thread_waits_for_it_returns_at_once(tmp_path: Path) -> None:
    log = forebay.open(tmp_path / "log", QUICK)
    topic = log.create_topic("t")
    begun, returned = threading.Event(), threading.Event()

    def work(_: Ack) -> None:
        begun.set()
        until(lambda: inside(log).is_ended)
        log.close()
        returned.set()

    topic.append_nowait(b"v").add_callback(work)
    assert begun.wait(PATIENCE)
    log.close()

    assert returned.wait(PATIENCE)


def test_a_callback_may_delete_its_topic(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = log.create_topic("t", durability="memory")
        assert _heard(topic, lambda _: log.delete_topic("t")) == [None]
        assert log.topics() == []


def test_a_callback_cannot_wait_for_another_ack(tmp_path: Path) -> None:
    """The thread that ran it was the one that was to write."""
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic, other = log.create_topic("t"), log.create_topic("other")
        acks: list[Ack] = []

        def work(_: Ack) -> int:
            acks.append(other.append_nowait(b"v"))
            with wal_of(other).committing:
                return acks[0].result()

        [told] = _heard(topic, work)
        assert isinstance(told, Indeterminate)
        assert "add a callback" in str(told)
        assert acks[0].result(PATIENCE) == 0


def test_the_callback_of_a_refused_append_may_use_the_log(tmp_path: Path) -> None:
    disk = WatchedDisk()
    with Storage.open(str(tmp_path / "log"), quick(free_bytes_min=1), disk=disk) as log:
        topic = log.create_topic("t")
        disk.free = 0

        def work(ack: Ack) -> int:
            disk.free = None
            with pytest.raises(Unavailable):
                ack.result()
            return topic.append(b"instead")

        assert _heard(topic, work) == [0]


@pytest.mark.parametrize("lock", ["committing", "queue"])
def test_a_signal_that_comes_inside_an_append_is_refused_the_log(tmp_path: Path, lock: str) -> None:
    """A handler runs in the thread that it interrupts: here its work is done while that thread holds a lock."""
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = log.create_topic("t")
        topic.append(b"before")
        wal = wal_of(topic)
        works: list[Callable[[], object]] = [log.close, topic.flush, topic.rotate]
        with wal.committing if lock == "committing" else wal.queue.lock:
            for work in works if lock == "committing" else [log.close, lambda: topic.append(b"not in")]:
                with pytest.raises(Unavailable, match="inside an append of the same log"):
                    work()
            if lock == "committing":
                with pytest.raises(Indeterminate, match="queued behind"):
                    topic.append(b"queued")

        assert topic.append(b"after") == (2 if lock == "committing" else 1)
        assert b"not in" not in values(topic.read())


@pytest.mark.parametrize("engine", ["segment", "rocksdb"])
def test_a_signal_inside_a_write_is_not_kept_waiting_by_an_ack_of_the_same_shard(tmp_path: Path, engine: str) -> None:
    """The write that it has interrupted would wait for the handler, and the ack for that write."""
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = log.create_topic("t", engine=engine)
        topic.append(b"before")
        with inside(topic).group().lock:
            acks: list[Ack | BatchAck] = [topic.append_nowait(b"v"), topic.append_many_nowait([b"v", b"v"])]
            for ack in acks:
                with pytest.raises(Indeterminate, match="inside a write of the same shard"):
                    ack.result()

        assert acks[0].result(PATIENCE) == 1
        assert acks[1].result(PATIENCE) == (OffsetRange(0, 2, 2),)


def test_callbacks_left_by_an_interrupted_thread_are_called_by_the_upkeep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = log.create_topic("t")
        topic.append(b"before")
        wal, heard = wal_of(topic), []
        with wal.committing:
            topic.append_nowait(b"v").add_callback(lambda ack: heard.append(ack.result()))
            inside(topic).commit_alone()

        until(lambda: heard)
        assert heard == [1]
        assert not wal.queue.due


@pytest.mark.parametrize("ending", ["delete", "seal"])
def test_a_callback_may_use_a_topic_for_the_first_time_while_its_own_is_given_up(tmp_path: Path, ending: str) -> None:
    """Found by review: it ran under the engine's lock, which opening a shard takes."""
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic, other = log.create_topic("t"), log.create_topic("other")
        heard: list[int] = []
        shard = inside(topic).shard(0)
        inside(topic).leave_queued()
        topic.append_nowait(b"first").add_callback(lambda _: heard.append(other.append(b"inside")))
        assert not wal_of(topic).queue.is_empty

        if ending == "delete":
            log.delete_topic("t")
        else:
            inside(log).engine.retire(shard.ref)

        until(lambda: heard == [0])


def test_upkeep_calls_back_when_its_round_is_over(tmp_path: Path) -> None:
    """Found by review: a callback that opened a topic and a deletion that awaited the round waited for each other."""
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = log.create_topic("t")
        worker = inside(log).workers.sync.take_over()
        heard: list[bool] = []
        inside(topic).leave_queued()
        shard = inside(topic).segment(0)

        def delete(_: object) -> None:
            log.delete_topic("t")
            heard.append(True)

        topic.append_nowait(b"first").add_callback(delete)

        worker.ask(shard)
        shard.wal.queued_since = float("-inf")
        worker.step()

        until(lambda: heard)


def _full(log: Storage, engine: str) -> Topic:
    """A topic that takes two records and no more; one of them is in, by producer 1."""
    durability = {"segment": "memory", "rocksdb": "disk"}[engine]
    topic = log.create_topic("t", durability=durability, engine=engine, cap_records=2, on_full="reject_new")
    assert topic.append(b"first", producer=1, sequence=0) == 0
    inside(topic).leave_queued()
    return topic


@pytest.mark.parametrize("engine", ["segment", "rocksdb"])
def test_a_callback_may_append_where_an_append_at_a_cap_writes_what_waits(tmp_path: Path, engine: str) -> None:
    """To recognise a repeat it writes the queue: it did so under the lock of the caps, which the callback took."""
    heard: list[object] = []

    def work(topic: Topic) -> None:
        try:
            heard.append(_in_another_thread(lambda: topic.append(b"inside")))
        except Full as error:
            heard.append(error)

    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = _full(log, engine)
        if engine == "segment":
            # Of class memory a callback would be called at once: queued, by an append that is not in the queue alone.
            ack = Ack(0)
            inside(topic).queue(b"second", ack)
        else:
            ack = topic.append_nowait(b"second")
        ack.add_callback(lambda _: work(topic))
        repeated: list[int] = []
        thread = threading.Thread(
            target=lambda: repeated.append(topic.append(b"first", producer=1, sequence=0)), daemon=True
        )
        thread.start()

        until(lambda: heard and repeated)
        assert repeated == [0]
        assert isinstance(heard[0], Full)


def _overtake(log: Storage, shard: SegmentShard) -> None:
    """From now on the recorded state names another owner."""
    key = shard.history.catalog.keys.state
    stored = read_state(inside(log).metadata, key)
    assert stored is not None
    state = msgspec.structs.replace(stored.state, epoch=stored.state.epoch + 1, holder="elsewhere")
    inside(log).metadata.transaction([], [Put(key, encode_value(state))])


@pytest.mark.parametrize("act", ["delete", "delete_before", "evict", "export", "retain"])
def test_no_lock_of_the_shard_is_held_while_the_callbacks_of_a_lost_shard_run(tmp_path: Path, act: str) -> None:
    """Another owner is found in the middle of some work: what waits is refused, and the callbacks hear of it."""
    settings = shared(tmp_path)
    with Storage.open(tmp_path / "log", settings) as log:
        topic = log.create_topic("t", cap_records=4)
        for _ in range(3):
            topic.append(b"v")
            topic.rotate()
        shard = inside(topic).segment(0)
        if act != "export":
            log.export_topic("t")
        heard: list[dict[str, bool]] = []
        locks = inside(topic).locks()
        inside(topic).leave_queued()
        workers = inside(log).workers
        workers.history.forget(shard)
        workers.sync.forget(shard)
        for _ in range(3):
            ack = topic.append_nowait(b"waits")
            ack.add_callback(lambda _: heard.append({name: taken() for name, taken in locks.items()}))
        shard.wal.writer.removals.add(Removals(floor=Floor(1, 0, Reason.CAP)))  # for the work of "retain"
        shard.upkeep.seal_rotated()
        _overtake(log, shard)
        works: dict[str, Callable[[], object]] = {
            "delete": lambda: shard.deletes.delete_range(1, 2),
            "delete_before": lambda: shard.deletes.delete_before(2),
            "evict": lambda: shard.deletes.evict_below(2, Reason.CAP),
            "export": shard.history.catch_up,
            "retain": shard.history.retain,
        }

        with pytest.raises(Fenced):
            works[act]()

        assert heard == [dict.fromkeys(locks, False)] * 3
        workers.sync.watch(shard)


@pytest.mark.parametrize("engine", ["memory", "segment", "rocksdb"])
def test_a_waker_that_raises_fails_no_append_and_the_others_are_called(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, engine: str
) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = log.create_topic("t", engine=engine, durability="ephemeral" if engine == "memory" else None)
        topic.acquire()  # wakers are called once more when a shard comes to be owned
        called: list[bool] = []
        leave = [topic.on_published(lambda: 1 / 0), topic.on_published(lambda: called.append(True))]  # type: ignore[arg-type]

        assert topic.append(b"v") == 0
        assert topic.append_many([b"v", b"v"]) == range(1, 3)

        assert len(called) == 2
        assert "could not be woken" in caplog.text
        for end in leave:
            end()
        assert topic.append(b"v") == 3
        assert len(called) == 2


@pytest.mark.parametrize("engine", ["memory", "segment", "rocksdb"])
def test_a_waker_may_use_the_log(tmp_path: Path, engine: str) -> None:
    """It ran under the log's lock: an append of another topic by it could wait for a thread that waited for it."""
    with forebay.open(tmp_path / "log", QUICK) as log:
        durability = "ephemeral" if engine == "memory" else None
        topic = log.create_topic("t", engine=engine, durability=durability)
        topic.acquire()  # wakers are called once more when a shard comes to be owned
        seen: list[int] = []
        once: list[Callable[[], None]] = []

        def wake() -> None:
            once.pop()()
            seen.append(_in_another_thread(lambda: topic.append(b"inside")))

        once.append(topic.on_published(wake))
        assert topic.append(b"v") == 0
        assert seen == [1]


@pytest.mark.parametrize("engine", ["segment", "rocksdb"])
def test_no_publication_is_passed_over_while_two_threads_wake_readers(tmp_path: Path, engine: str) -> None:
    """Both woke for the same publication, and the second took the entry of the next one out when it was done."""
    idle = {"wal": QUICK["wal"], "runtime": {"maintenance_interval_ms": 60_000}}
    with forebay.open(tmp_path / "log", idle) as log:
        topic = log.create_topic("t", engine=engine)
        shard = inside(topic).shard(0)
        group = inside(topic).group()
        woken, gates, seen = threading.Semaphore(0), [threading.Event(), threading.Event()], list[int]()

        def wake() -> None:
            seen.append(topic.offsets().next)
            woken.release()
            if len(seen) <= len(gates):
                assert gates[len(seen) - 1].wait(PATIENCE)

        leave = topic.on_published(wake)
        threads = [threading.Thread(target=work) for work in (lambda: topic.append(b"v"), group.commit)]
        for thread in threads:
            thread.start()
            assert woken.acquire(timeout=PATIENCE)
        gates[0].set()
        threads[0].join(PATIENCE)
        with group.lock:
            ticket = shard.stage_one(QueuedRecord(b"v", None, None, (), 0, None, Ticket()), 1)
            inside(topic).commit_alone()
            gates[1].set()
            threads[1].join(PATIENCE)
        group.call_back()
        leave()

        assert (ticket.done, max(seen)) == (True, 2)


def _in_another_thread(work: Callable[[], int]) -> int:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(PATIENCE)
