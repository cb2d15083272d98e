"""What all shards of a process may hold in memory together: the newest records for readers, and appends that wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forebay.appends.budget import RECOUNT_REFUSALS, STEP_BYTES, QueueBudget
from forebay.appends.producer_window import ProducerWindow
from forebay.appends.queue import AppendQueue, Producing, QueuedRecord, QueueFull
from forebay.appends.ticket import Ticket
from forebay.clock import SystemClock
from forebay.errors import Closed, Conflict, Unavailable
from forebay.format.columns.rows import Columns, encode_columns
from forebay.format.frame.batch import encode_data_frame
from forebay.meter import ShardCounts
from forebay.settings import Settings, WalSettings
from forebay.storage import Storage, Topic
from forebay.testing.inside import inside
from forebay.wal.tail import FRAME_COST, NOTED_BYTES, CacheBudget, CachedFrame, TailCache
from tests.storage.rig import QUICK, values

MIB = 1 << 20


def _settings(**runtime: object) -> Settings:
    return Settings.load(overrides={**QUICK, "runtime": {**QUICK["runtime"], **runtime}})


def _frame(base: int, size: int = 1000) -> CachedFrame:
    columns = encode_columns(Columns(values=[b"x" * size], timestamps=[base]))
    data = encode_data_frame(
        salt_crc=0, base=base, epoch=1, durable=0, appended_at=0, runs=[], columns=columns, zstd_level=None
    )
    return CachedFrame(base, base + 1, data)


@contextmanager
def _held(lock: threading.Lock | threading.RLock) -> Iterator[None]:
    """Another thread has the lock meanwhile."""
    entered, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            entered.set()
            assert go_on.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert entered.wait(60)
    try:
        yield
    finally:
        go_on.set()
        holder.join(60)


class _HeldWorker:
    """A budget whose worker steps only when the test says so."""

    def __init__(self, bytes_max: int) -> None:
        self.budget = CacheBudget(bytes_max, SystemClock())
        self.budget.worker.halt()

    def cache(self, frames: int = 0, size: int = 1000) -> TailCache:
        cache = TailCache(MIB, self.budget, ShardCounts())
        for base in range(frames):
            cache.add([_frame(base, size)])
        return cache

    def step(self) -> None:
        # Halted, a worker has no thread: this one steps in its place.
        self.budget.evict()


# Caches


def test_the_caches_read_least_recently_give_up_theirs() -> None:
    held = _HeldWorker(64 * 1024)
    unread, old, new = held.cache(15), held.cache(15), held.cache(15)
    old.note_read()
    new.note_read()
    full = new.bytes

    newest = held.cache(20)
    newest.note_read()
    assert held.budget.is_full
    held.step()

    assert unread.bytes < full, "never read, so it goes first"
    assert old.bytes == new.bytes == full
    held.budget.bytes_max = 52 * 1024
    held.step()
    assert unread.bytes == 0
    assert 0 < old.bytes < full
    assert new.bytes == full
    assert not held.budget.is_full
    assert held.budget.bytes <= held.budget.bytes_max
    assert held.budget.evicted_bytes > 0


def test_a_cache_of_one_shard_gives_up_its_oldest_frames_and_no_more_than_needed() -> None:
    held = _HeldWorker(64 * 1024)
    cache = held.cache(60)

    held.step()

    target = held.budget.bytes_max - held.budget.bytes_max // 16
    assert target - 2 * (1000 + FRAME_COST) <= cache.cost <= target
    assert cache.frames_from(0, 1) == []
    assert [frame.base for frame in cache.frames_from(59, 1)] == [59]


def test_until_caches_gave_up_frames_none_grows_but_by_its_newest_frame() -> None:
    held = _HeldWorker(64 * 1024)
    full = held.cache(60)
    assert held.budget.is_full
    before = full.bytes

    for base in range(60, 200):
        full.add([_frame(base)])
    late = held.cache(100)

    assert full.bytes <= before
    assert [frame.base for frame in full.frames_from(199, 1)] == [199]
    assert late.bytes <= len(_frame(0).data)
    assert held.budget.bytes <= before + 200 * FRAME_COST


@pytest.mark.slow
def test_the_cost_of_python_objects_counts_so_that_small_frames_are_bounded_too() -> None:
    held = _HeldWorker(MIB)

    cache = held.cache(3000, size=1)
    held.step()

    assert cache.cost <= MIB
    assert len(cache.read_cached_since(0)[0]) < MIB // FRAME_COST


def test_what_an_interrupted_note_left_out_is_counted_with_the_next_eviction() -> None:
    held = _HeldWorker(64 * 1024)
    cache = held.cache(30)
    held.budget.noted += 10 * MIB

    held.budget.evict()

    assert not held.budget.is_full
    assert cache.frames_from(0, 1) != []


def test_a_cache_that_is_gone_or_cleared_no_longer_counts() -> None:
    held = _HeldWorker(MIB)
    cleared, gone = held.cache(20), held.cache(20)
    cleared.clear()
    del gone

    assert held.budget.bytes == 0


def test_an_append_does_not_wait_for_the_cache_of_another_shard(tmp_path: Path) -> None:
    """The shrinking of a stranger's cache is the worker's, which alone waits for its lock."""
    with Storage.open(str(tmp_path / "log"), _settings(cache_bytes_max=MIB)) as log:
        busy, other = log.create_topic("busy"), log.create_topic("other")
        busy.append_many([b"x" * 1000] * 900)
        with _held(inside(busy).wal().tail.cache.lock):
            for _ in range(20):
                other.append_many([b"y" * 1000] * 100)

            assert inside(log).bounds.caches.is_full
        assert values(other.read())[-1] == b"y" * 1000


@pytest.mark.proves("I27", "I37")
def test_many_topics_stay_within_the_cache_of_the_process_and_all_is_read(tmp_path: Path) -> None:
    with Storage.open(str(tmp_path / "log"), _settings(cache_bytes_max=MIB)) as log:
        topics = [log.create_topic(f"t{n}") for n in range(20)]
        caches = inside(log).bounds.caches
        for round_ in range(10):
            for topic in topics:
                topic.append_many([b"%d" % round_ * 500] * 30)
        # In this thread too: its worker may not have come to it yet.
        caches.evict()

        newest = sum(len(inside(topic).wal().tail.cache.read_cached_since(0)[0]) for topic in topics)
        assert caches.bytes <= MIB + NOTED_BYTES * len(topics)
        assert 0 < newest < 200
        for topic in topics:
            assert len(list(topic.read())) == 300


# Queues


def _queue(budget: QueueBudget) -> AppendQueue:
    return AppendQueue(0, ProducerWindow(10, 10), WalSettings(), budget)


def _stage(queue: AppendQueue, size: int) -> Ticket:
    return queue.stage_one(QueuedRecord(b"v", None, None, (), 0, None, Ticket()), size)


def test_queues_share_one_budget_and_an_empty_one_takes_an_append_of_any_size() -> None:
    budget = QueueBudget(10 * STEP_BYTES)
    first, second = _queue(budget), _queue(budget)
    for _ in range(10):
        _stage(first, STEP_BYTES)

    _stage(second, 100)
    with pytest.raises(QueueFull, match=r"1 records wait .* runtime.queue_bytes_max \(40960 bytes\)"):
        _stage(second, 100)
    third = _queue(budget)
    _stage(third, 50 * STEP_BYTES)

    assert budget.bytes == 60 * STEP_BYTES
    assert budget.refusals == 1


def test_what_is_taken_counts_until_it_is_answered() -> None:
    budget = QueueBudget(4 * STEP_BYTES)
    first, second = _queue(budget), _queue(budget)
    for _ in range(4):
        _stage(first, STEP_BYTES)
    first.take()
    _stage(second, 10)
    with pytest.raises(QueueFull):
        _stage(second, 10)

    first.acknowledge()

    assert budget.bytes == 0
    assert _stage(second, 10).offset == 1


@pytest.mark.parametrize("is_taken", [True, False])
def test_what_fails_gives_its_share_back(*, is_taken: bool) -> None:
    budget = QueueBudget(4 * STEP_BYTES)
    queue = _queue(budget)
    for _ in range(3):
        _stage(queue, STEP_BYTES)
    if is_taken:
        queue.take()
        _stage(queue, 10)
        _stage(queue, 10)

    queue.fail(Closed("gone"), Closed("gone"), 0)

    assert budget.bytes == 0


def test_a_batch_that_waits_alone_counts_though_it_is_taken_in_any_case() -> None:
    budget = QueueBudget(2 * STEP_BYTES)
    columns = encode_columns(Columns(values=[b"x" * 10_000], timestamps=[0]))
    first, second = _queue(budget), _queue(budget)

    first.stage_many(columns, None, Ticket())
    second.stage_many(columns, None, Ticket())

    assert budget.bytes == 2 * columns.size
    with pytest.raises(QueueFull):
        second.stage_many(columns, None, Ticket())


def test_a_share_that_an_interrupt_left_uncounted_is_found_again() -> None:
    budget = QueueBudget(4 * STEP_BYTES)
    queue = _queue(budget)
    _stage(queue, 10)
    budget.used = 4 * STEP_BYTES

    assert _stage(queue, 10).offset == 1

    budget.used = budget.bytes_max
    budget.refusals = 1
    for _ in range(RECOUNT_REFUSALS - 1):
        with pytest.raises(QueueFull):
            _stage(queue, STEP_BYTES)
    assert _stage(queue, STEP_BYTES).offset == 2


def test_a_queue_that_ended_leaves_nothing_in_the_budget() -> None:
    budget = QueueBudget(4 * STEP_BYTES)
    queue = _queue(budget)
    _stage(queue, STEP_BYTES)
    _stage(queue, STEP_BYTES)

    del queue

    assert budget.bytes == 0


def test_repeats_and_conflicts_take_nothing_of_the_budget() -> None:
    """They were charged before they were recognised, each time again, and no commit gave it back."""
    budget = QueueBudget(20 * STEP_BYTES)
    queue = _queue(budget)
    columns = encode_columns(Columns(values=[b"x" * 3 * STEP_BYTES], timestamps=[0]))
    queue.stage_many(columns, Producing(1, 0), Ticket())
    queue.take()
    queue.acknowledge()

    for _ in range(10):
        repeated = queue.stage_many(columns, Producing(1, 0), Ticket())
        assert (repeated.done, repeated.offset) == (True, 0)
        record = QueuedRecord(b"x" * 2 * STEP_BYTES, None, None, (), 0, Producing(1, 9), Ticket())
        with pytest.raises(Conflict):
            queue.stage_one(record, 2 * STEP_BYTES)
        queue.take()

    assert (budget.bytes, budget.used) == (0, 0)


def test_a_repeat_needs_no_room_in_the_queue() -> None:
    queue = _queue(QueueBudget(STEP_BYTES))
    original = queue.stage_one(QueuedRecord(b"v", None, None, (), 0, Producing(1, 0), Ticket()), 10)
    _stage(queue, STEP_BYTES - 10)
    with pytest.raises(QueueFull):
        _stage(queue, 10)

    repeated = queue.stage_one(QueuedRecord(b"v", None, None, (), 0, Producing(1, 0), Ticket()), 10)
    queue.take()
    queue.acknowledge()

    assert (original.offset, repeated.offset, repeated.done) == (0, 0, True)


@contextmanager
def _backlog(log: Storage, engine: str) -> Iterator[Topic]:
    """A topic whose appends wait and fill the budget of the process."""
    topic = log.create_topic("backlog", engine=engine)
    topic.append(b"opened")
    inside(topic).leave_queued()
    acks = [topic.append_nowait(b"x" * 10_000)]
    for size in (10_000, 100):
        with pytest.raises(QueueFull, match=r"runtime.queue_bytes_max"):
            while True:
                acks.append(topic.append_nowait(b"x" * size))
    yield topic
    inside(topic).shard().commit()
    assert [ack.result(60) for ack in acks] == list(range(1, len(acks) + 1))


@pytest.mark.parametrize("engine", ["segment", "rocksdb"])
def test_a_backlog_of_one_topic_does_not_stop_another(tmp_path: Path, engine: str) -> None:
    settings = _settings(queue_bytes_max=65_536)
    with Storage.open(str(tmp_path / "log"), settings) as log, _backlog(log, engine) as backlog:
        other = log.create_topic("other")
        assert [other.append(b"%d" % n) for n in range(20)] == list(range(20))
        assert list(other.append_many([b"many"] * 100)) == list(range(20, 120))

        inside(other).leave_queued()
        queued = other.append_nowait(b"one")
        with pytest.raises(QueueFull):
            _ = other.append_nowait(b"two")
        # An append that waits writes what waits in its own shard, and comes in.
        assert other.append(b"two") == 121
        assert queued.result(60) == 120
        assert inside(log).bounds.queues.bytes >= 50_000
        assert len(list(backlog.read())) == 1
        del queued
    assert inside(log).bounds.queues.bytes == 0


@pytest.mark.proves("I27")
def test_an_append_that_finds_the_process_full_is_refused_in_time(tmp_path: Path) -> None:
    settings = Settings.load(
        overrides={
            "wal": {**QUICK["wal"], "append_timeout_ms": 50},
            "runtime": {**QUICK["runtime"], "queue_bytes_max": 65_536},
        }
    )
    with Storage.open(str(tmp_path / "log"), settings) as log, _backlog(log, "segment"):
        other = log.create_topic("other")
        other.append(b"opened")
        inside(other).leave_queued()
        with _held(inside(other).group().lock):
            queued = other.append_nowait(b"one")
            with pytest.raises(Unavailable, match=r"waited 50 ms .* runtime.queue_bytes_max"):
                other.append(b"two")
        inside(other).shard().commit()
        assert queued.result(60) == 1
