"""A sync in the background and an answer about durability at the same time: the kernel reports a lost write once."""

from __future__ import annotations

import contextlib
import errno
import sys
import threading
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from forebay.errors import ForebayError, Unavailable
from forebay.testing.checks.history import AppendOutcome
from forebay.topics import Durability
from forebay.wal.upkeep import AT_ONCE, Upkeep
from forebay.wal.writer import BackgroundSync, SyncTarget
from tests.wal.rig import Rig, Simulated, simulated

PATIENCE = 60.0
DISK, FSYNC = Durability.DISK, Durability.FSYNC
LOST = OSError(errno.EIO, "EIO: a page was not written")


class Waiting:
    """Work in threads of its own that comes to wait for a background sync."""

    def __init__(self, rig: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
        self.outcomes: list[object] = []
        self._threads: list[threading.Thread] = []
        self._waiting = threading.Semaphore(0)
        wait, await_sync = BackgroundSync.wait, rig.wal.writer.wait_for_background_sync

        def waits(sync: BackgroundSync, seconds_max: float) -> None:
            self._waiting.release()
            wait(sync, seconds_max)

        def waits_outside(seconds_max: float) -> None:
            self._waiting.release()
            await_sync(seconds_max)

        monkeypatch.setattr(BackgroundSync, "wait", waits)
        monkeypatch.setattr(rig.wal.writer, "wait_for_background_sync", waits_outside)

    def begin(self, work: Callable[[], object]) -> None:
        """Return once the work waits for the sync."""

        def run() -> None:
            try:
                self.outcomes.append(work())
            except ForebayError as error:
                self.outcomes.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        self._threads.append(thread)
        assert self._waiting.acquire(timeout=PATIENCE), f"it did not wait: {self.outcomes}"

    def end(self) -> list[object]:
        """What came of it."""
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        return self.outcomes


def syncing(durability: Durability) -> tuple[Simulated, SyncTarget]:
    """Two records, of which a sync in the background has begun; of class `fsync`, of a mark behind them."""
    rig = Rig(simulated(), durability).open()
    rig.append(2)
    if durability is FSYNC:
        with rig.wal.committing:
            assert rig.wal.attempt(rig.wal.writer.mark) is None
    target = rig.wal.begin_background_sync()
    assert target is not None
    return rig, target


def test_a_background_sync_takes_a_few_hundred_bytes() -> None:
    """Each made a lock and a condition: a sync of 10,000 logs at once took tens of megabytes."""
    rig = Rig(simulated(), DISK).open()
    rig.append()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        target = rig.wal.begin_background_sync()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()

    assert target is not None
    assert taken < 500


@pytest.mark.parametrize("answer", ["flush", "rotate"])
@pytest.mark.parametrize("waiters", [1, 2])
def test_what_promises_durability_fails_with_a_sync_that_began_before(
    monkeypatch: pytest.MonkeyPatch, answer: str, waiters: int
) -> None:
    rig, target = syncing(DISK)
    waiting = Waiting(rig, monkeypatch)
    for _ in range(waiters):
        waiting.begin(getattr(rig.wal, answer))

    rig.wal.fail_background_sync(target, LOST)

    outcomes = waiting.end()
    assert [type(outcome) for outcome in outcomes] == [Unavailable] * waiters
    assert all("EIO" in str(outcome) for outcome in outcomes)
    assert rig.wal.offsets().durable == 0
    assert len(rig.wal.files.all) == 1
    rig.flush()  # the records are in a copy of the file now
    assert rig.wal.offsets().durable == 2


@pytest.mark.parametrize("answer", ["flush", "rotate"])
def test_what_promises_durability_goes_on_behind_a_sync_that_succeeds(
    monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    rig, target = syncing(DISK)
    waiting = Waiting(rig, monkeypatch)
    waiting.begin(getattr(rig.wal, answer))
    assert rig.append() is AppendOutcome.ACKED  # class `disk` does not wait
    waiting.begin(getattr(rig.wal, answer))

    target.active.file.sync()
    rig.wal.end_background_sync(target)

    assert waiting.end() == [None, None]
    assert rig.wal.offsets().durable == 3
    assert not rig.wal.writer.syncing


def test_an_append_of_class_fsync_is_not_acknowledged_if_a_sync_that_began_before_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig, target = syncing(FSYNC)
    waiting = Waiting(rig, monkeypatch)
    waiting.begin(rig.append)

    rig.wal.fail_background_sync(target, LOST)

    assert waiting.end() == [AppendOutcome.INDETERMINATE]
    assert (rig.wal.head, rig.wal.offsets().durable) == (2, 2)
    assert rig.wal.failure is not None and "EIO" in rig.wal.failure
    assert rig.wal.heal()
    assert rig.append() is AppendOutcome.ACKED
    assert len(rig.reading().records) == 3


def test_an_append_of_class_fsync_is_acknowledged_behind_a_sync_that_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, target = syncing(FSYNC)
    waiting = Waiting(rig, monkeypatch)
    waiting.begin(rig.append)

    target.active.file.sync()
    rig.wal.end_background_sync(target)

    assert waiting.end() == [AppendOutcome.ACKED]
    assert rig.wal.offsets().durable == 3


@pytest.mark.parametrize("error", [None, LOST])
def test_a_log_that_closes_waits_for_the_sync_and_is_clean_only_if_that_succeeds(
    monkeypatch: pytest.MonkeyPatch, error: OSError | None
) -> None:
    rig, target = syncing(DISK)
    waiting = Waiting(rig, monkeypatch)
    waiting.begin(rig.wal.close)

    if error is not None:
        rig.wal.fail_background_sync(target, error)
    else:
        target.active.file.sync()
        rig.wal.end_background_sync(target)

    assert waiting.end() == [None]
    assert (rig.wal.failure is not None) is (error is not None)
    assert rig.wal.writer.durable == (2 if error is None else 0)
    again = Rig(rig.disk, DISK, epoch=1).open()
    assert [offset for offset, _ in again.reading().records] == [0, 1]


def test_the_failure_of_a_sync_says_nothing_of_the_copy_that_replaced_its_file() -> None:
    rig, target = syncing(DISK)
    rig.wal.fail_file(target.active, LOST)
    assert rig.wal.heal()

    rig.flush()  # the copy is another file: there is nothing to wait for
    rig.wal.fail_background_sync(target, LOST)

    assert rig.wal.failure is None
    assert rig.append() is AppendOutcome.ACKED


def test_a_sync_that_does_not_return_is_not_waited_for_without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.wal.writer.SYNC_WAIT_SECONDS", 0.0)
    rig, _ = syncing(FSYNC)

    assert rig.append() is AppendOutcome.INDETERMINATE

    assert rig.wal.failure is not None and "has not returned" in rig.wal.failure


@pytest.mark.parametrize("outcome", ["succeeds", "fails"])
def test_a_sync_that_returns_late_says_nothing_of_one_that_began_on_another_file_since(
    monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    """A record was acknowledged as durable by the late one, and the failure of its own sync was forgotten."""
    rig, late = syncing(FSYNC)
    rig.wal.fail_file(late.active, LOST)
    assert rig.wal.heal()
    with rig.wal.committing:
        assert rig.wal.attempt(rig.wal.writer.mark) is None
    target = rig.wal.begin_background_sync()
    assert target is not None and target.active is not late.active
    waiting = Waiting(rig, monkeypatch)
    waiting.begin(rig.append)

    if outcome == "succeeds":
        rig.wal.end_background_sync(late)
    else:
        rig.wal.report_background_sync(late, LOST)
    assert waiting.outcomes == [], "its own sync has not returned"
    rig.wal.fail_background_sync(target, LOST)

    assert waiting.end() == [AppendOutcome.INDETERMINATE]
    assert rig.wal.failure is not None


def test_a_log_that_is_written_for_long_does_not_hold_up_the_thread_that_synced_it() -> None:
    rig, target = syncing(DISK)
    held, may_end = threading.Event(), threading.Event()

    def write_long() -> None:
        with rig.wal.committing:
            held.set()
            may_end.wait(PATIENCE)

    writing = threading.Thread(target=write_long)
    writing.start()
    assert held.wait(PATIENCE)

    rig.wal.end_background_sync(target)

    may_end.set()
    writing.join(PATIENCE)
    assert rig.wal.offsets().durable == 0
    assert rig.shard.upkeep.due_at == AT_ONCE, "the next round notes it"
    rig.wal.do_errands()
    assert rig.wal.offsets().durable == 2
    assert not rig.wal.writer.syncing


def test_a_sync_that_is_interrupted_at_any_line_is_not_under_way_for_ever() -> None:
    """The log was never synced again, and began no new file."""
    lines, is_struck = 0, True
    while is_struck:
        rig, left, is_struck = Rig(simulated(), DISK).open(), lines, False
        rig.append(2)

        def strike(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
            nonlocal left, is_struck
            if frame.f_code is not Upkeep.sync.__code__:
                return None
            if event == "line" and left == 0 and not is_struck:
                is_struck = True
                raise KeyboardInterrupt
            left -= event == "line"
            return strike

        previous = sys.gettrace()
        sys.settrace(strike)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                rig.shard.upkeep.sync()
        finally:
            sys.settrace(previous)
        if is_struck and left == 0 and rig.wal.writer.syncing:
            raise AssertionError(f"struck at line {lines} of the sync, it is under way for ever")
        lines += 1
    assert lines > 4
