"""Readers beside an owner while one of them hangs in its disk: the others of the same shard go on, whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from forebay import Closed, Storage, Topic, Unavailable
from forebay.engines import readonly
from forebay.engines.readonly import FollowedShard
from forebay.settings import Settings
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from tests.storage.rig import QUICK, WatchedDisk, quick, values
from tests.support.waiting import PATIENCE, until

RARELY = quick(mark_interval_ms=600_000, sync_interval_ms=600_000, rotate_bytes_max=2**30)


class Gate:
    """Holds one thread inside its first read of a log file; all others pass."""

    def __init__(self, disk: WatchedDisk) -> None:
        self._disk = disk
        self._held: int | None = None
        self.reached, self.opened = threading.Event(), threading.Event()

    @contextmanager
    def holding(self, work: Callable[[], object]) -> Iterator[Future[object]]:
        """`work` in a thread that hangs, until this ends."""

        def run() -> object:
            self._held = threading.get_ident()
            return work()

        self._disk.meet = self._meet
        with ThreadPoolExecutor(1) as threads:
            try:
                slow = threads.submit(run)
                until(lambda: self.reached.is_set() or slow.done())
                assert not slow.done(), slow.result()
                yield slow
            finally:
                self.opened.set()

    def _meet(self, kind: str, path: str) -> None:
        if kind == "read" and ".seg" in path and threading.get_ident() == self._held and not self.reached.is_set():
            self.reached.set()
            assert self.opened.wait(PATIENCE)


@pytest.fixture
def disk() -> WatchedDisk:
    return WatchedDisk()


@pytest.fixture
def gate(disk: WatchedDisk) -> Gate:
    return Gate(disk)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Storage]:
    with Storage.open(tmp_path / "log", RARELY) as log:
        topic = log.create_topic("t")
        for number in range(6):
            topic.append(b"%d" % number, key=b"k%d" % (number % 2), tag="a", timestamp=1_000 + number)
        yield log


@pytest.fixture
def owner(log: Storage) -> Topic:
    return log.topic("t")


@pytest.fixture
def beside(tmp_path: Path, owner: Topic, disk: WatchedDisk, clock: ManualClock) -> Iterator[Topic]:
    with Storage.open(tmp_path / "log", RARELY, read_only=True, disk=disk, clock=clock) as log:
        yield log.topic("t")


def followed(topic: Topic) -> FollowedShard:
    shard = inside(topic).read_shard(0)
    assert isinstance(shard, FollowedShard)
    return shard


def answers(topic: Topic) -> object:
    """What every call says that a reader makes, in a thread of its own so that a test ends if one hangs."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(
            lambda: [
                values(topic.read()),
                values(topic.read_by_key(b"k1", history=True)),
                values(topic.read_by_tag("a")),
                topic.offset_at_time(1_003),
                topic.offsets().next,
                topic.lag_end(0),
                followed(topic).wait(topic.offsets().next - 1, 0),
                followed(topic).end_at_most(),
            ]
        ).result(PATIENCE)


@pytest.mark.parametrize(
    "call",
    [
        lambda topic: values(topic.read()),
        lambda topic: values(topic.read_by_tag("a")),
        lambda topic: values(topic.read_by_key(b"k1", history=True)) and [b"%d" % n for n in range(6)],
    ],
    ids=["read", "read_by_tag", "read_by_key"],
)
def test_a_reader_that_hangs_holds_up_no_other_of_its_shard(
    owner: Topic, beside: Topic, gate: Gate, clock: ManualClock, call: Callable[[Topic], list[bytes]]
) -> None:
    expected = answers(beside)
    inside(followed(beside)).log.list_again()
    with gate.holding(lambda: call(beside)) as slow:
        assert answers(beside) == expected

        # What the owner does meanwhile is seen by the others: appends, deletes, new files.
        owner.append(b"6", key=b"k0", tag="a", timestamp=1_006)
        owner.delete_by_offset(1, 2)
        owner.rotate()
        inside(owner).segment(0).upkeep.seal_rotated()
        owner.append(b"7", key=b"k1", tag="a", timestamp=1_007)
        clock.advance(2)
        assert values(beside.read()) == [b"0", b"2", b"3", b"4", b"5", b"6", b"7"]
        assert values(beside.read_by_key(b"k1", history=True)) == [b"3", b"5", b"7"]
        assert beside.offsets().next == 8
        assert not slow.done()

    got = slow.result(PATIENCE)
    assert isinstance(got, list) and got[0] == b"0" and set(got) >= {b"%d" % n for n in (0, 2, 3, 4, 5)}
    assert values(beside.read()) == [b"0", b"2", b"3", b"4", b"5", b"6", b"7"]
    assert inside(followed(beside)).views == 2


def test_a_reader_that_hangs_in_its_look_holds_up_no_other(owner: Topic, beside: Topic, gate: Gate) -> None:
    assert beside.offsets().next == 6
    owner.append(b"6", key=b"k0", tag="a", timestamp=1_006)

    with gate.holding(beside.offsets) as slow:  # it reads what is new of the file
        assert beside.offsets().next == 7
        assert values(beside.read())[-1] == b"6"
        assert not slow.done()

    assert beside.offsets().next == 7


def test_a_delete_that_one_reader_has_seen_every_other_has_seen(
    owner: Topic, beside: Topic, gate: Gate, clock: ManualClock
) -> None:
    assert len(values(beside.read())) == 6
    with gate.holding(lambda: values(beside.read())):
        assert len(values(beside.read())) == 6
        owner.delete_by_offset(4, 5)
        clock.advance(2)
        assert len(values(beside.read())) == 5
    # The view that hung is the newest to be given back; it has not looked since.
    assert inside(followed(beside)).views == 2
    assert len(values(beside.read())) == 5


def test_views_that_no_reader_needs_any_more_are_closed(beside: Topic, gate: Gate, clock: ManualClock) -> None:
    expected = answers(beside)
    with gate.holding(lambda: values(beside.read())) as slow:
        assert answers(beside) == expected
    slow.result(PATIENCE)
    assert inside(followed(beside)).views == 2

    clock.advance(readonly.UNUSED_SECONDS / 2)
    beside.offsets()
    clock.advance(readonly.UNUSED_SECONDS / 2 + 1)
    beside.offsets()

    assert inside(followed(beside)).views == 1
    assert answers(beside) == expected


def test_a_log_that_is_closed_while_a_reader_hangs_refuses_the_others_and_ends_with_it(
    tmp_path: Path, owner: Topic, disk: WatchedDisk, gate: Gate
) -> None:
    log = Storage.open(tmp_path / "log", RARELY, read_only=True, disk=disk)
    topic = log.topic("t")
    assert len(values(topic.read())) == 6
    shard = followed(topic)
    with gate.holding(lambda: shard.read(0)) as slow, ThreadPoolExecutor(1) as threads:
        closing = threads.submit(shard.end, "is closed")
        until(lambda: shard.is_over)
        for call in (lambda: shard.read(0), shard.offsets, lambda: shard.wait(0, None), shard.lag_end):
            with pytest.raises(Closed):
                call()
        assert not closing.done() and not slow.done()
        gate.opened.set()
        closing.result(PATIENCE)
        page = slow.result(PATIENCE)
    assert page is not None
    log.close()
    with pytest.raises(Closed):
        values(topic.read())


def test_a_shard_that_is_left_while_a_reader_hangs_is_closed_once_it_has_ended(beside: Topic, gate: Gate) -> None:
    assert len(values(beside.read())) == 6
    shard = followed(beside)
    with gate.holding(lambda: shard.read(0)) as slow:
        shard.refuse("has changed hands: ask for it again")
        assert not shard.end_if_idle()
        with pytest.raises(Closed, match="changed hands"):
            shard.read(0)
    slow.result(PATIENCE)
    assert shard.end_if_idle()


def test_a_topic_that_moves_while_a_reader_hangs_is_read_on_by_the_others(
    tmp_path: Path, disk: WatchedDisk, gate: Gate
) -> None:
    settings = Settings.load(
        overrides={
            "wal": {**QUICK["wal"], "reserve_records_min": 64},
            "metadata": {"path": f"{tmp_path}/shared.sqlite"},
            "storage": {"mode": "shared_fs"},
            "store": {"root": f"{tmp_path}/store"},
        }
    )

    def seen() -> list[bytes | None]:
        # While files are removed under its look a reader is told to try again.
        with suppress(Unavailable):
            return values(here.read())
        return []

    with Storage.open(tmp_path / "A", settings) as a, Storage.open(tmp_path / "B", settings) as b:
        a.create_topic("t").append_many([b"0", b"1"])
        with Storage.open(tmp_path / "A", settings, read_only=True, disk=disk) as log:
            here = log.topic("t")
            assert values(here.read()) == [b"0", b"1"]
            with gate.holding(seen) as slow:
                a.seal_topic("t")
                b.topic("t").append(b"2")
                b.export_topic("t")
                until(lambda: seen() == [b"0", b"1", b"2"])
                assert not slow.done()
            assert slow.result(PATIENCE) in ([], [b"0", b"1"], [b"0", b"1", b"2"])
            until(lambda: seen() == [b"0", b"1", b"2"])
            assert here.offsets().next == 3
