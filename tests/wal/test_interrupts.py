"""An exception at every line of a commit: nobody waits for ever, what was acknowledged stays, the log goes on."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import pytest

from forebay.appends.queue import QueuedRecord
from forebay.appends.ticket import Ticket
from forebay.errors import Unavailable
from forebay.storage.acks import Ack
from forebay.testing.checks.history import AppendOutcome, Healed, Troubled
from forebay.testing.checks.invariants import Violation, check_log, healthy_or_read_only
from forebay.testing.simulated.crashes import crash_states
from forebay.testing.simulated.damage import CrashDamage
from forebay.topics import Durability
from tests.ledger import Ledger
from tests.support.soak import SOAK
from tests.wal.rig import Rig, Simulated, after, simulated

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # far more than needed: a shared machine may be busy

ROOMS: Final = tuple(f"{os.sep}forebay{os.sep}{room}{os.sep}" for room in ("appends", "wal"))
LINES_MAX: Final = 2_000
EVERY: Final = 1 if SOAK else 2
"""In a normal run the one durability class is interrupted at odd lines of a commit, the other at even ones."""


class Interruption:
    """Raises at the n-th line that the log executes.

    Leaving a `with` block reports its first line once more, at a moment when no signal is delivered: between
    the end of the block and the call that releases the lock. So those lines are not counted, nor is a line that says
    `try` and does nothing: no signal is delivered there either.
    """

    def __init__(self, line: int, error: type[BaseException]) -> None:
        self.struck = False
        self._left = line
        self._error = error

    def __call__(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if not any(room in frame.f_code.co_filename for room in ROOMS):
            return None
        if event == "line" and not self.struck:
            source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            self._left -= not source.startswith(("with ", "try:"))
            if self._left == 0:
                self.struck = True
                raise self._error(f"{frame.f_code.co_qualname}: {source}")
        return self


def _plain(rig: Simulated) -> None:
    rig.append()


def _nothing(_: Simulated) -> None:
    """The first commit makes the first file."""


def _full_file(rig: Simulated) -> None:
    rig.append(size=4096)


def _used_up(rig: Simulated) -> None:
    rig.append(7)


BEFORE: Final = {"grows": _plain, "first file": _nothing, "rotates": _full_file, "reserves": _used_up}


@pytest.mark.parametrize(
    ("durability", "error"), [(Durability.FSYNC, KeyboardInterrupt), (Durability.DISK, MemoryError)]
)
@pytest.mark.parametrize("before", BEFORE)
def test_an_exception_at_any_line_of_a_commit_leaves_no_waiter_and_loses_no_ack(
    before: str, error: type[BaseException], durability: Durability, ledger: Ledger
) -> None:
    broken: list[str] = []
    first = 1 if SOAK or durability is Durability.FSYNC else 2
    for line in range(first, LINES_MAX, EVERY):
        interruption = Interruption(line, error)
        violations = _commit_through(BEFORE[before], interruption, durability)
        if not interruption.struck:
            break
        ledger.count("interrupted lines", commit=before, error=error.__name__)
        broken += [f"line {line}: {violation}" for violation in violations]
    else:
        pytest.fail("a commit has more lines than expected")
    assert broken[:10] == []


def _commit_through(
    before: Callable[[Simulated], None], interruption: Interruption, durability: Durability
) -> list[Violation]:
    rig = Rig(simulated(), durability).open()
    before(rig)
    staged = [rig.stage(), rig.stage(3, producing=(1, 0)), rig.stage(producing=(2, 0)), rig.stage(3, producing=(1, 0))]
    traced(rig.wal.commit, interruption)
    for attempt, ticket in staged:
        # Settled by the commit, or still queued: then whoever waits commits for itself, as here.
        rig.hear(attempt, ticket)
        assert isinstance(ticket, Ticket) and ticket.done
    rig.note(Troubled())
    violations = check_log(rig.history(), rig.see())
    rig.clock.advance(2)
    rig.shard.upkeep.maintain()
    rig.note(Healed())
    works = [rig.append(), rig.append(3, producing=(1, 0)), rig.append(producing=(2, 0)), rig.append(producing=(1, 1))]
    healthy = works == [AppendOutcome.ACKED] * 4
    violations += healthy_or_read_only(rig.wal.failure, appends_work=healthy)
    return [*violations, *check_log(rig.history(), rig.see()), *_after_crashes(rig, durability)]


def _after_crashes(rig: Simulated, durability: Durability) -> list[Violation]:
    violations: list[Violation] = []
    for state in crash_states(rig.disk.trace, damages=(CrashDamage.KILLED, CrashDamage.OLD), states_max=1, names_max=2):
        again = after(state, durability).open()
        violations += check_log(again.history(), again.reading())
    return violations


def traced(step: Callable[[], object], interruption: Interruption) -> None:
    previous = sys.gettrace()
    sys.settrace(interruption)
    try:
        step()
    except (KeyboardInterrupt, MemoryError):
        pass
    finally:
        sys.settrace(previous)


def test_an_exception_at_any_line_of_a_commit_loses_no_callback_and_calls_none_twice() -> None:
    for line in range(1, LINES_MAX):
        rig = Rig(simulated(), Durability.DISK).open()
        rig.append()
        acks, heard = [Ack(0) for _ in range(3)], []
        for ack in acks:
            rig.wal.stage_one(_entry()._replace(ticket=ack), 1)
            ack.add_callback(lambda told: heard.append(told))  # noqa: B023, PLW0108 - read before the next round
        interruption = Interruption(line, KeyboardInterrupt)
        traced(rig.wal.commit, interruption)
        for _ in range(2):
            rig.shard.upkeep.maintain()
        rig.wal.commit()

        assert heard == acks, f"line {line}"
        if not interruption.struck:
            return
    pytest.fail("a commit has more lines than expected")


@pytest.mark.parametrize(
    ("durability", "error"), [(Durability.FSYNC, KeyboardInterrupt), (Durability.DISK, MemoryError)]
)
def test_an_exception_at_any_line_of_a_lone_append_loses_no_ack_and_the_log_goes_on(
    error: type[BaseException], durability: Durability, ledger: Ledger
) -> None:
    broken: list[str] = []
    for line in range(1, LINES_MAX):
        rig = Rig(simulated(), durability).open()
        rig.append()
        rig.append()
        interruption = Interruption(line, error)
        traced(rig.append_one, interruption)
        attempt, ticket = rig.stage()
        rig.hear(attempt, ticket)
        rig.note(Troubled())
        violations = check_log(rig.history(), rig.see())
        rig.clock.advance(2)
        rig.shard.upkeep.maintain()
        rig.note(Healed())
        healthy = [rig.append(), rig.append(), rig.append(3)] == [AppendOutcome.ACKED] * 3
        violations += healthy_or_read_only(rig.wal.failure, appends_work=healthy)
        violations += [*check_log(rig.history(), rig.see()), *_after_crashes(rig, durability)]
        broken += [f"line {line}: {violation}" for violation in violations]
        if not interruption.struck:
            break
        ledger.count("interrupted lines", commit="alone", error=error.__name__)
    else:
        pytest.fail("an append has more lines than expected")
    assert broken[:10] == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_exception_at_any_line_of_a_healing_leaves_a_log_that_the_next_one_heals(
    error: type[BaseException], ledger: Ledger
) -> None:
    """The log counted as healed while its queue still refused appends, until it was opened again."""
    broken: list[str] = []
    for line in range(1, LINES_MAX):
        rig = Rig(simulated(), Durability.DISK).open()
        rig.append()
        rig.stage()
        with pytest.raises(KeyboardInterrupt):
            _traced_at(rig, "write_all", KeyboardInterrupt)
        rig.note(Troubled())
        interruption = Interruption(line, error)
        traced(rig.wal.heal, interruption)
        rig.clock.advance(2)
        rig.shard.upkeep.maintain()
        rig.note(Healed())
        healthy = [rig.append(), rig.append(3)] == [AppendOutcome.ACKED] * 2
        violations = [*check_log(rig.history(), rig.see())]
        broken += [f"line {line}: {violation}" for violation in violations]
        broken += [] if healthy and rig.wal.failure is None else [f"line {line}: {rig.wal.failure}"]
        if not interruption.struck:
            break
        ledger.count("interrupted lines", commit="healing", error=error.__name__)
    else:
        pytest.fail("a healing has more lines than expected")
    assert broken[:10] == []


def test_a_lone_append_does_not_pass_through_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(simulated(), Durability.DISK).open()
    rig.append()

    with monkeypatch.context() as patch:
        patch.setattr(type(rig.wal.queue), "stage_one", None)
        assert rig.append() is AppendOutcome.ACKED

    _, ticket = rig.stage()
    assert rig.append() is AppendOutcome.ACKED, "behind one that waits it is queued"
    assert isinstance(ticket, Ticket) and ticket.done, "and written together with that one"
    assert rig.wal.counters.commits == 3


def test_ctrl_c_in_a_commit_reaches_the_caller_and_the_log_recovers_by_itself() -> None:
    rig = Rig(simulated(), Durability.FSYNC).open()
    rig.append()
    attempt, ticket = rig.stage()

    with pytest.raises(KeyboardInterrupt):
        _traced_at(rig, "write_all", KeyboardInterrupt)

    assert rig.hear(attempt, ticket) is AppendOutcome.INDETERMINATE
    assert "KeyboardInterrupt" in str(rig.wal.failure)
    with pytest.raises(Unavailable, match="read-only"):
        rig.wal.queue.stage_one(_entry(), 1)
    rig.shard.upkeep.maintain()
    assert rig.wal.failure is None
    assert rig.append() is AppendOutcome.ACKED


def _entry() -> QueuedRecord:
    return QueuedRecord(b"x", None, None, (), 0, None, Ticket())


def _traced_at(rig: Simulated, function: str, error: type[BaseException]) -> None:
    """Commit; raise inside the named function, behind its first line."""

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if (
            frame.f_code.co_qualname == function
            and event == "line"
            and frame.f_lineno > frame.f_code.co_firstlineno + 2
        ):
            raise error
        return trace

    sys.settrace(trace)
    try:
        rig.wal.commit()
    finally:
        sys.settrace(None)


def test_an_exception_at_any_line_of_a_healing_leaves_a_log_that_the_next_healing_opens(ledger: Ledger) -> None:
    for line in range(1, LINES_MAX):
        rig = Rig(simulated(), Durability.DISK).open()
        rig.append()
        with pytest.raises(KeyboardInterrupt):
            rig.stage()
            _traced_at(rig, "write_all", KeyboardInterrupt)
        interruption = Interruption(line, KeyboardInterrupt)
        traced(rig.wal.heal, interruption)

        rig.shard.upkeep.maintain()

        assert rig.wal.failure is None, f"line {line}"
        assert rig.append() is AppendOutcome.ACKED, f"line {line}"
        assert list(check_log(rig.history(), rig.see())) == [], f"line {line}"
        if not interruption.struck:
            return
        ledger.count("interrupted lines", commit="heals", error="KeyboardInterrupt")
    pytest.fail("a healing has more lines than expected")
