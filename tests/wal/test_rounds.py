"""A commit in two halves, with a sync of the whole file system in between: crashes, failures, an exception anywhere."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from forebay.appends.ticket import Ticket
from forebay.testing.checks.history import AppendOutcome, Troubled
from forebay.testing.checks.invariants import Violation, check_log, healthy_or_read_only
from forebay.testing.simulated.crashes import crash_states
from forebay.topics import Durability
from forebay.wal.log import Wal
from tests.ledger import Ledger
from tests.wal.rig import DIRECTORY, BareRig, Rig, Simulated, after, simulated
from tests.wal.test_interrupts import Interruption, traced

FSYNC = Durability.FSYNC
LOST = OSError(errno.EIO, "EIO: a page was not written")


class InRound(Interruption):
    """As that, but not at the lines of the two halves themselves: a background worker runs them, which no signal meets.

    What they call may well fail at any line, as for want of memory.
    """

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if frame.f_code in (Wal.begin_commit.__code__, Wal.end_commit.__code__):
            return None
        return super().__call__(frame, event, argument)


def _round(rig: Simulated, failure: OSError | None = None) -> None:
    """As a committer does it for many logs."""
    written = rig.wal.begin_commit()
    if written is None:
        return
    outcome: OSError | None = OSError(errno.EINTR, "a sync was interrupted")
    try:
        if failure is None:
            rig.disk.sync_filesystem(DIRECTORY)
        outcome = failure
    finally:
        rig.wal.end_commit(written, outcome)
    rig.wal.group.call_back()


def _in_any_crash(rig: Simulated) -> list[Violation]:
    violations: list[Violation] = []
    for state in crash_states(rig.disk.trace, states_max=2, names_max=2):
        again = after(state, FSYNC).open()
        violations += check_log(again.history(), again.reading())
    return violations


@pytest.mark.parametrize("failure", [None, LOST])
def test_what_is_acknowledged_after_a_round_survives_every_crash(failure: OSError | None, ledger: Ledger) -> None:
    rig = Rig(simulated(), FSYNC).open()
    rig.append()
    staged = [rig.stage(), rig.stage(3, producing=(1, 0)), rig.stage(producing=(1, 1))]
    _round(rig, failure)
    outcomes = [rig.hear(attempt, ticket) for attempt, ticket in staged]

    expected = AppendOutcome.ACKED if failure is None else AppendOutcome.INDETERMINATE
    assert outcomes == [expected] * 3
    assert (rig.wal.head, rig.wal.offsets().durable) == ((6, 6) if failure is None else (1, 1))
    rig.note(Troubled())
    if failure is not None:
        assert rig.wal.heal()
    assert rig.append() is AppendOutcome.ACKED
    ledger.count("rounds", outcome=expected.name)
    assert [*check_log(rig.history(), rig.see()), *_in_any_crash(rig)] == []


def test_between_its_halves_no_other_thread_changes_the_log() -> None:
    rig = Rig(simulated(), FSYNC).open()
    rig.append()
    _, ticket = rig.stage()
    written = rig.wal.begin_commit()
    assert written is not None
    tried = [False]
    other = threading.Thread(target=lambda: tried.append(rig.wal.committing.acquire(timeout=0.05)))
    other.start()
    other.join()

    assert tried == [False, False]
    assert (rig.wal.head, rig.wal.offsets().durable) == (1, 1)
    rig.disk.sync_filesystem(DIRECTORY)
    rig.wal.end_commit(written, None)
    assert isinstance(ticket, Ticket) and ticket.done
    assert rig.append() is AppendOutcome.ACKED


def test_a_lease_that_ends_between_the_halves_leaves_the_append_undecided() -> None:
    rig = BareRig(simulated(), FSYNC).begin()
    rig.append()
    attempt, ticket = rig.stage()
    written = rig.wal.begin_commit()
    assert written is not None
    rig.disk.sync_filesystem(DIRECTORY)
    rig.lease = False
    rig.wal.end_commit(written, None)

    assert rig.hear(attempt, ticket) is AppendOutcome.INDETERMINATE
    assert rig.wal.fenced is not None and rig.wal.head == 1


@pytest.mark.parametrize("reason", ["nothing waits", "first file", "full file", "background sync", "in use"])
def test_a_log_that_has_to_wait_for_something_takes_no_part(reason: str) -> None:
    rig = Rig(simulated(), FSYNC).open()
    if reason != "first file":
        rig.append(size=4096 if reason == "full file" else 8)
    if reason == "background sync":
        with rig.wal.committing:
            assert rig.wal.attempt(rig.wal.writer.mark) is None
        assert rig.wal.begin_background_sync() is not None
    if reason != "nothing waits":
        rig.stage()
    begun: list[object] = []
    if reason == "in use":
        with rig.wal.committing:
            thread = threading.Thread(target=lambda: begun.append(rig.wal.begin_commit()))
            thread.start()
            thread.join()
    else:
        begun.append(rig.wal.begin_commit())

    assert begun == [None]
    free = threading.Thread(target=lambda: begun.append(rig.wal.committing.acquire(timeout=1)))
    free.start()
    free.join()
    assert begun == [None, True], "the lock is free"


def test_what_is_queued_behind_the_look_waits_for_no_reservation_in_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: list[int] = []

    def reserve(end: int) -> int:
        reserved.append(end)
        return end

    rig = BareRig(simulated(), FSYNC).begin(reserve=reserve)
    rig.append()
    rig.stage(rig.wal.writer.reserved_end)
    monkeypatch.setattr(rig.wal.writer, "waits_before", lambda end: False)
    reserved.clear()

    assert rig.wal.begin_commit() is None
    assert reserved == []
    monkeypatch.undo()
    assert rig.append() is AppendOutcome.ACKED, "with a reservation, by a commit of its own"
    assert reserved != []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_exception_at_any_line_of_a_round_leaves_no_waiter_and_loses_no_ack(ledger: Ledger) -> None:
    broken: list[str] = []
    for line in range(1, 1_000):
        rig = Rig(simulated(), FSYNC).open()
        rig.append()
        staged = [rig.stage(), rig.stage(3, producing=(1, 0))]
        interruption = InRound(line, MemoryError)
        traced(lambda rig=rig: _round(rig), interruption)  # type: ignore[misc]
        for attempt, ticket in staged:
            rig.hear(attempt, ticket)
            assert isinstance(ticket, Ticket) and ticket.done
        rig.note(Troubled())
        rig.clock.advance(2)
        rig.shard.upkeep.maintain()
        healthy = [rig.append(), rig.append(3, producing=(1, 0))] == [AppendOutcome.ACKED] * 2
        violations = [
            *healthy_or_read_only(rig.wal.failure, appends_work=healthy),
            *check_log(rig.history(), rig.see()),
        ]
        broken += [f"line {line}: {violation}" for violation in violations]
        if not interruption.struck:
            break
        ledger.count("interrupted lines", commit="round", error="MemoryError")
    else:
        pytest.fail("a round has more lines than expected")
    assert broken[:10] == []
