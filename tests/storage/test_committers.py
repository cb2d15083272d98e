"""What is queued without a thread that waits is written, whatever hangs in other shards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import forebay.shard.segment
from forebay import Settings, Storage, Topic
from forebay.clock import Clock, SystemClock
from forebay.metadata import MetadataStore
from forebay.meter import Metric
from forebay.shard.ownership import Wanted, reserve_in_state
from forebay.storage.background import commit
from forebay.testing.simulated.clock import ManualClock
from forebay.workers import ItemPool, ServeMany
from tests.storage.rig import QUICK, WatchedDisk, wal_of
from tests.storage.test_workers import Gate
from tests.support.waiting import PATIENCE, until

COMMITTERS = 2
ROTATE_BYTES = 4096


class CommitterEnvironment:
    """A log with two committers, and topics that are to hang at a gate, at one step of a commit."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = Gate()
        self.disk = WatchedDisk()
        self.hanging: set[str] = set()
        """The names, as keys of metadata have them, of topics whose reservations hang."""
        self._wrap_reservations(monkeypatch)
        self.log = Storage.open(str(tmp_path / "log"), _settings(tmp_path), disk=self.disk)

    def topic(self, name: str, durability: str = "fsync") -> Topic:
        """A topic that was used before."""
        topic = self.log.create_topic(name, durability=durability)
        topic.append(b"before")
        return topic

    def hang(self, kind: str, topics: list[Topic]) -> None:
        """From now on a commit of any of these topics hangs, in a thread of the log."""
        ids = [topic.spec.topic_id for topic in topics]
        if kind == "metadata":
            for topic in topics:
                writer = wal_of(topic).writer
                topic.append_many([b"v"] * (writer.reserved_end - writer.end))
            self.hanging |= {f"/{topic.spec.topic}/" for topic in topics}
            return
        if kind == "rotation":
            for topic in topics:
                topic.append(bytes(ROTATE_BYTES))
        met = {"write": "write", "sync": "sync", "rotation": "create"}[kind]

        def meet(call: str, path: str) -> None:
            if call == met and ".seg" in path and any(found in path for found in ids):
                self._wait_in_background()

        self.disk.meet = meet

    def _wait_in_background(self) -> None:
        if threading.current_thread().name.startswith("forebay-"):
            self.gate.wait()

    def _wrap_reservations(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = reserve_in_state

        def gated(store: MetadataStore, shard: Wanted, epoch: int, *, clock: Clock) -> Callable[[int], int]:
            reserve = real(store, shard, epoch, clock=clock)

            def slowly(end: int) -> int:
                if any(name in shard.key for name in self.hanging):
                    self._wait_in_background()
                return reserve(end)

            return slowly

        monkeypatch.setattr(forebay.shard.segment, "reserve_in_state", gated)


def _settings(tmp_path: Path) -> Settings:
    return Settings.load(
        overrides={
            "wal": {**QUICK["wal"], "reserve_records_min": 8, "rotate_bytes_max": ROTATE_BYTES},
            "runtime": {"committers": COMMITTERS, "maintenance_interval_ms": 60_000},
            "storage": {"mode": "shared_fs"},
            "store": {"root": f"{tmp_path}/store"},
            "metadata": {"path": f"{tmp_path}/meta.sqlite"},
            "export": {"at_close_seconds_max": 0},
        }
    )


@pytest.mark.parametrize(
    ("kind", "durability"),
    [(kind, "fsync") for kind in ("write", "sync", "metadata", "rotation")]
    + [(kind, "disk") for kind in ("write", "metadata", "rotation")],
)
def test_a_commit_that_hangs_keeps_no_other_shard_waiting(
    kind: str, durability: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "STUCK_SECONDS", 1e9)  # no thread is begun in the place of one that hangs
    environment = CommitterEnvironment(tmp_path, monkeypatch)
    with environment.log:
        a, b = environment.topic("a", durability), environment.topic("b", durability)
        environment.hang(kind, [a])
        stuck = a.append_nowait(b"stuck")
        with environment.gate.reached_here():
            offsets = [b.append_nowait(b"v").result(PATIENCE) for _ in range(6)]
            assert not stuck.done

        assert offsets == list(range(1, 7))
        assert stuck.result(PATIENCE) > 0


@pytest.mark.parametrize("kind", ["metadata", "rotation"])
def test_however_many_shards_wait_for_metadata_or_a_file_no_committer_does(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "STUCK_SECONDS", 1e9)
    environment = CommitterEnvironment(tmp_path, monkeypatch)
    with environment.log:
        slow, b = [environment.topic(f"slow{number}") for number in range(2 * COMMITTERS + 1)], environment.topic("b")
        environment.hang(kind, slow)
        stuck = [topic.append_nowait(b"stuck") for topic in slow]
        with environment.gate.reached_here():
            assert b.append_nowait(b"v").result(PATIENCE) == 1
            assert not any(ack.done for ack in stuck)

        assert all(ack.result(PATIENCE) > 0 for ack in stuck)


def test_where_all_committers_hang_others_take_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "STUCK_SECONDS", 0.01)
    environment = CommitterEnvironment(tmp_path, monkeypatch)
    with environment.log:
        slow, b = [environment.topic(f"slow{number}") for number in range(COMMITTERS)], environment.topic("b")
        environment.hang("write", slow)
        stuck = [topic.append_nowait(b"stuck") for topic in slow]
        with environment.gate.reached_here():
            until(
                lambda: (
                    {worker.name: worker.stuck for worker in environment.log.workers()}["forebay-syncing-committer"]
                    == 2
                )
            )
            assert b.append_nowait(b"v").result(PATIENCE) == 1

        assert all(ack.result(PATIENCE) == 1 for ack in stuck)


@pytest.mark.parametrize("durability", ["disk", "fsync"])
def test_many_shards_that_hang_keep_no_other_waiting_and_are_named(
    durability: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With more than twice as many hung shards as threads, four at least, all others of the class waited for ever."""
    monkeypatch.setattr(commit, "STUCK_SECONDS", 0.01)
    environment = CommitterEnvironment(tmp_path, monkeypatch)
    with environment.log:
        slow, b = [environment.topic(f"slow{n}", durability) for n in range(12)], environment.topic("b", durability)
        environment.hang("write", slow)
        stuck = [topic.append_nowait(b"stuck") for topic in slow]
        with environment.gate.reached_here():
            ack = b.append_nowait(b"v")
            # Each append has another look at what hangs, as every second one of the background workers does.
            until(lambda: b.append_nowait(b"again") is not None and ack.done)
            assert ack.result(PATIENCE) == 1
            worker = "forebay-committer" if durability == "disk" else "forebay-syncing-committer"
            until(lambda: _stuck(environment.log, worker) == 12)
        assert all(ack.result(PATIENCE) == 1 for ack in stuck)
    (first, *_) = [record for record in caplog.records if "no answer for more than" in record.getMessage()]
    assert worker in first.getMessage() and "default/slow" in first.getMessage()


def _stuck(log: Storage, worker: str) -> object:
    """What the metric says of a worker."""
    (found,) = [
        sample.value
        for sample in log.status().metrics
        if sample.metric is Metric.THREADS_STUCK and sample.labels == (("worker", worker),)
    ]
    return found


class Served:
    """Items that a pool has served; those in `slow` wait at the gate."""

    def __init__(
        self,
        threads: int,
        patience_s: float = 0.0,
        stuck_s: float = PATIENCE,
        many: ServeMany[int] | None = None,
    ) -> None:
        self.slow: set[int] = set()
        self.gate = Gate()
        self.items: list[int] = []
        self.threads: set[str] = set()
        self.pool: ItemPool[int] = ItemPool(
            "tested",
            self._serve,
            clock=SystemClock(),
            threads=threads,
            patience_s=patience_s,
            stuck_s=stuck_s,
            many=many,
        )

    def _serve(self, item: int) -> None:
        self.threads.add(str(threading.get_ident()))
        if item in self.slow:
            self.gate.wait()
        self.items.append(item)


def test_a_pool_serves_each_item_once_for_all_that_ask_and_again_if_asked_meanwhile() -> None:
    served = Served(threads=2)
    served.slow.add(1)
    served.pool.ask(1)
    with served.gate.reached_here():
        for _ in range(3):
            served.pool.ask(1)
        served.pool.ask(2)
        until(lambda: served.items == [2])
    until(lambda: served.items == [2, 1, 1])

    assert served.pool.status().steps >= 2
    assert served.pool.stop()


def test_what_a_thread_that_was_stuck_is_asked_for_again_is_served_by_those_in_its_place() -> None:
    served = Served(threads=1, stuck_s=0.01)
    served.slow.add(1)
    served.pool.ask(1)
    with served.gate.reached_here():
        until(lambda: served.pool.status().stuck == 1)
        served.pool.ask(2)
        until(lambda: served.items == [2] and served.pool.status().steps == 1)
        served.pool.ask(1)
    # The thread that was stuck ends, for another has its place: that one waits, and is to be woken for the item.
    until(lambda: served.items == [2, 1, 1])

    assert served.pool.stop()


class TickingClock(ManualClock):
    """Turned by hand, but for an instant at each look: no two threads begin at the same time."""

    def monotonic(self) -> float:
        self.advance(1e-6)
        return super().monotonic()


def test_threads_in_the_place_of_those_that_hang_double_with_each_look() -> None:
    """One more was begun at each look, or four in a second: an append behind 60 shards that hung waited 15 seconds."""
    clock, go_on = TickingClock(), threading.Event()
    hung, sound = range(60), 60
    begun: list[int] = []

    def serve(item: int) -> None:
        begun.append(item)
        assert item == sound or go_on.wait(PATIENCE)

    pool: ItemPool[int] = ItemPool("tested", serve, clock=clock, threads=4, stuck_s=1.0, stuck_max=64)
    try:
        for item in (*hung, sound):
            pool.ask(item)
        for count in (4, 8, 16, 32):
            until(lambda count=count: len(begun) == count)  # type: ignore[misc]
            clock.advance(2.0)
            pool.relieve()
        until(lambda: sound in begun)
    finally:
        go_on.set()
        assert pool.stop()


def test_a_pool_begins_no_more_threads_than_it_may_and_none_before_it_is_asked() -> None:
    served = Served(threads=3)
    assert served.pool.stop()
    assert served.threads == set()

    served = Served(threads=3)
    for item in range(200):
        served.pool.ask(item)
    until(lambda: sorted(served.items) == list(range(200)))

    assert 1 <= len(served.threads) <= 3
    assert served.pool.stop()


def test_one_thread_of_a_patient_pool_does_the_work_while_it_gets_on_with_it() -> None:
    served = Served(threads=3, patience_s=PATIENCE)
    served.slow.add(0)
    served.pool.ask(0)
    with served.gate.reached_here():
        for item in range(1, 50):
            served.pool.ask(item)
        assert served.items == []
    until(lambda: served.items == list(range(50)))

    assert len(served.threads) == 1
    assert served.pool.stop()


def test_another_thread_of_a_patient_pool_joins_in_when_the_first_takes_long() -> None:
    served = Served(threads=3, patience_s=0.001)
    served.slow |= {1, 2}
    for item in (1, 2, 3):
        served.pool.ask(item)
    with served.gate.reached_here():
        until(lambda: served.items == [3])
    until(lambda: sorted(served.items) == [1, 2, 3])

    assert served.pool.stop()


def test_a_pool_serves_many_that_wait_at_once_and_fewer_one_by_one() -> None:
    rounds: list[list[int]] = []
    served = Served(threads=2, many=ServeMany(lambda items: rounds.append(list(items)), 3, 4))
    served.slow |= {0, 1}
    for item in (0, 1):
        served.pool.ask(item)
    with served.gate.reached_here():
        until(lambda: served.pool.status().running_s is not None and len(served.threads) == 2)
        for item in range(2, 9):
            served.pool.ask(item)
            served.pool.ask(item)
    until(lambda: len(served.items) + sum(map(len, rounds)) == 9)

    assert sorted([*served.items, *(item for group in rounds for item in group)]) == list(range(9))
    assert rounds[0] == [2, 3, 4, 5]
    assert all(3 <= len(group) <= 4 for group in rounds)
    assert served.pool.stop()


def test_what_fails_in_a_pool_is_shown_and_the_next_item_is_served(caplog: pytest.LogCaptureFixture) -> None:
    served: list[int] = []

    def serve(item: int) -> None:
        if item == 1:
            raise SystemExit(1)
        served.append(item)

    pool: ItemPool[int] = ItemPool("tested", serve, clock=SystemClock(), threads=1)
    pool.ask(1)
    pool.ask(2)
    until(lambda: served == [2])

    status = pool.status()
    assert (status.failures, status.error) == (1, "SystemExit: 1")
    assert "tested failed" in caplog.text
    assert pool.stop()
