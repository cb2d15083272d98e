"""A commit for an event loop: one write, or nothing at all where it would wait; an exception at any line of it."""

from __future__ import annotations

import linecache
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from forebay.appends.ticket import Ticket
from forebay.testing.crashes import crash_states
from forebay.testing.history import AppendOutcome, Troubled
from forebay.testing.invariants import check_log, healthy_or_read_only
from forebay.topics import Durability
from forebay.wal.log import Wal
from tests.ledger import Ledger
from tests.wal.rig import BareRig, Rig, Simulated, after, simulated
from tests.wal.test_interrupts import Interruption, traced

DISK = Durability.DISK
BYTES_MAX = 100_000


class InTurn(Interruption):
    """As that, but not at the line that gives the lock back: no signal comes between its `try` and the call."""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if frame.f_code is Wal.commit_at_once.__code__ and event == "line":
            source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            if source.startswith(("group.lock.release", "except RuntimeError", "pass", "finally")):
                return self
        return super().__call__(frame, event, argument)


def _is_free(rig: Simulated) -> bool:
    """Whether another thread can take the commit lock."""
    found: list[bool] = []

    def take() -> None:
        found.append(rig.wal.committing.acquire(timeout=10))
        if found[0]:
            rig.wal.committing.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return found == [True]


def test_what_waits_is_written_published_and_acknowledged_and_survives_a_crash_of_the_process() -> None:
    rig = Rig(simulated(), DISK).open()
    rig.append()
    staged = [rig.stage(), rig.stage(3, producing=(1, 0)), rig.stage()]
    commits = rig.wal.counters.commits

    assert rig.wal.commit_at_once(BYTES_MAX)
    assert rig.wal.counters.commits == commits + 1
    assert [rig.hear(attempt, ticket) for attempt, ticket in staged] == [AppendOutcome.ACKED] * 3
    assert rig.wal.head == 6
    for state in crash_states(rig.disk.trace, states_max=2, names_max=2):
        again = after(state, DISK).open()
        assert check_log(again.history(), again.reading()) == []
    assert rig.wal.commit_at_once(BYTES_MAX), "there is nothing to do"


@pytest.mark.parametrize("reason", ["class", "large", "first file", "full file", "background sync", "in use"])
def test_a_commit_that_would_wait_is_left(reason: str) -> None:
    rig = Rig(simulated(), Durability.FSYNC if reason == "class" else DISK).open()
    if reason != "first file":
        rig.append(size=4096 if reason == "full file" else 8)
    if reason == "background sync":
        assert rig.wal.begin_background_sync() is not None
    _, ticket = rig.stage()
    found: list[bool] = []
    limit = 1 if reason == "large" else BYTES_MAX
    if reason == "in use":
        with rig.wal.committing:
            thread = threading.Thread(target=lambda: found.append(rig.wal.commit_at_once(limit)))
            thread.start()
            thread.join()
    else:
        found.append(rig.wal.commit_at_once(limit))

    assert found == [False]
    assert isinstance(ticket, Ticket)
    assert not ticket.done
    assert _is_free(rig)


def test_what_is_queued_behind_the_look_waits_for_no_reservation(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: list[int] = []

    def reserve(end: int) -> int:
        reserved.append(end)
        return end

    rig = BareRig(simulated(), DISK).begin(reserve=reserve)
    rig.append()
    rig.stage(rig.wal.writer.reserved_end)
    monkeypatch.setattr(rig.wal.writer, "waits_before", lambda end: False)
    reserved.clear()

    assert not rig.wal.commit_at_once(BYTES_MAX)
    assert reserved == []
    monkeypatch.undo()
    assert rig.append() is AppendOutcome.ACKED, "with a reservation, by a commit of its own"


def test_a_lease_that_has_ended_leaves_the_append_undecided() -> None:
    rig = BareRig(simulated(), DISK).begin()
    rig.append()
    attempt, ticket = rig.stage()
    rig.lease = False
    rig.wal.commit_at_once(BYTES_MAX)

    assert rig.hear(attempt, ticket) is AppendOutcome.INDETERMINATE
    assert rig.wal.fenced is not None and rig.wal.head == 1


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_exception_at_any_line_leaves_no_waiter_and_no_lock(error: type[BaseException], ledger: Ledger) -> None:
    broken: list[str] = []
    for line in range(1, 1_000):
        rig = Rig(simulated(), DISK).open()
        rig.append()
        staged = [rig.stage(), rig.stage(3, producing=(1, 0))]
        interruption = InTurn(line, error)
        traced(lambda rig=rig: rig.wal.commit_at_once(BYTES_MAX), interruption)  # type: ignore[misc]
        assert _is_free(rig), f"line {line}"
        rig.wal.commit()
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
        ledger.count("interrupted lines", commit="at once", error=error.__name__)
    else:
        pytest.fail("a commit has more lines than expected")
    assert broken[:10] == []
