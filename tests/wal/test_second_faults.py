"""Ctrl-C while a log handles a failure, or right behind a publication: no append is left without an answer."""

from __future__ import annotations

import errno
import threading
from typing import Any

import pytest

from forebay.appends.queue import AppendQueue
from forebay.appends.ticket import Ticket
from forebay.errors import DataLoss, Fenced, Indeterminate
from forebay.testing.checks.history import AppendOutcome, Troubled
from forebay.testing.checks.invariants import check_log
from forebay.topics import Durability
from forebay.wal.log import LogPhase, Wal
from forebay.wal.tail import LiveFile
from forebay.wal.writer import ActiveFile
from tests.support.waiting import PATIENCE
from tests.wal.rig import BareRig, Rig, Simulated, simulated
from tests.wal.scenarios import fail_next

DISK, FSYNC = Durability.DISK, Durability.FSYNC


def _interrupted(patch: pytest.MonkeyPatch, owner: type, method: str, times: int = 1) -> None:
    """Raise at the next calls of the method, in place of it."""
    whole, left = getattr(owner, method), [times]

    def strikes(*arguments: Any, **named: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise KeyboardInterrupt
        return whole(*arguments, **named)

    patch.setattr(owner, method, strikes)


def _staged(rig: Simulated) -> tuple[int, Ticket]:
    attempt, ticket = rig.stage()
    assert isinstance(ticket, Ticket)
    return attempt, ticket


@pytest.mark.parametrize("fault", ["write", "sync"])
@pytest.mark.parametrize(("owner", "method"), [(Wal, "_fail"), (Wal, "_become"), (Wal, "show"), (AppendQueue, "fail")])
def test_an_append_whose_failing_is_interrupted_is_answered_by_the_next_commit(
    monkeypatch: pytest.MonkeyPatch, fault: str, owner: type, method: str
) -> None:
    rig = Rig(simulated(), FSYNC).open()
    rig.append()
    attempt, ticket = _staged(rig)
    fail_next(rig, fault, errno.EIO)
    with monkeypatch.context() as patch:
        _interrupted(patch, owner, method)
        with pytest.raises(KeyboardInterrupt):
            rig.wal.commit()

    rig.wal.commit()

    assert ticket.done and isinstance(ticket.error, Indeterminate)
    assert rig.wal.state.phase is LogPhase.FAILED
    assert rig.hear(attempt, ticket) is AppendOutcome.INDETERMINATE
    rig.note(Troubled())
    assert rig.wal.heal()
    assert rig.append() is AppendOutcome.ACKED
    assert check_log(rig.history(), rig.reading()) == []


def test_a_step_behind_an_interrupted_failing_does_not_trust_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports a lost write once: a flush that succeeds then would promise what is not there."""
    rig = Rig(simulated(), DISK).open()
    rig.append()
    fail_next(rig, "sync", errno.EIO)
    with monkeypatch.context() as patch:
        _interrupted(patch, Wal, "_fail")
        with pytest.raises(KeyboardInterrupt), rig.wal.committing:
            rig.wal.attempt(rig.wal.writer.sync)

    with rig.wal.committing:
        assert rig.wal.attempt(rig.wal.writer.sync) is not None

    assert rig.wal.state.phase is LogPhase.FAILED
    rig.flush()  # the records are in a copy of the file now
    assert rig.wal.offsets().durable == 1


def test_an_append_whose_acknowledging_is_interrupted_twice_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(simulated(), FSYNC).open()
    rig.append()
    attempt, ticket = _staged(rig)
    with monkeypatch.context() as patch:
        _interrupted(patch, AppendQueue, "acknowledge", times=2)
        with pytest.raises(KeyboardInterrupt):
            rig.wal.commit()

    rig.wal.commit()

    assert ticket.done and ticket.result() == 1
    assert rig.hear(attempt, ticket) is AppendOutcome.ACKED
    assert rig.wal.state.phase is LogPhase.OPEN
    assert rig.append() is AppendOutcome.ACKED
    assert check_log(rig.history(), rig.reading()) == []


def test_an_append_whose_fencing_is_interrupted_is_answered_and_the_log_stays_fenced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = BareRig(simulated(), FSYNC).begin()
    rig.append()
    _, ticket = _staged(rig)
    rig.lease = False
    with monkeypatch.context() as patch:
        _interrupted(patch, AppendQueue, "fail")
        with pytest.raises(KeyboardInterrupt):
            rig.wal.commit()
    reason = rig.wal.fenced

    rig.wal.commit()

    assert ticket.done and isinstance(ticket.error, Indeterminate)
    assert reason is not None and rig.wal.fenced == reason
    with pytest.raises(Fenced):
        rig.wal.check_writable()


def test_ctrl_c_while_other_processes_are_shown_a_commit_leaves_the_log_writable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The records are published by then: to take them for lost would copy the whole file."""
    rig = Rig(simulated(), DISK).open()
    rig.append()
    attempt, ticket = _staged(rig)
    with monkeypatch.context() as patch:
        _interrupted(patch, LiveFile, "publish")
        with pytest.raises(KeyboardInterrupt):
            rig.wal.commit()

    assert rig.wal.state.phase is LogPhase.OPEN
    assert rig.hear(attempt, ticket) is AppendOutcome.ACKED
    assert rig.append() is AppendOutcome.ACKED
    assert [offset for offset, _ in rig.reading().records] == [0, 1, 2]


def test_what_was_not_published_is_not_read_from_memory_before_it_is_written_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Class memory has acknowledged them: they are written again, at their offsets, and a repeat finds them."""
    rig = Rig(simulated(), Durability.MEMORY).open()
    rig.append()
    attempt, ticket = rig.stage(3, producing=(1, 0))
    with monkeypatch.context() as patch:
        _interrupted(patch, ActiveFile, "publish")
        with pytest.raises(KeyboardInterrupt):
            rig.wal.commit()
    rig.hear(attempt, ticket)
    assert [offset for offset, _ in rig.reading().records] == [0]
    assert rig.wal.heal()

    assert rig.append(3, producing=(1, 0)) is AppendOutcome.ACKED

    assert check_log(rig.history(), rig.see()) == []
    assert [offset for offset, _ in rig.reading().records] == [0, 1, 2, 3]


def test_a_log_whose_closing_was_interrupted_lets_no_reader_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(simulated(), DISK).open()
    rig.append()
    with monkeypatch.context() as patch:
        _interrupted(patch, LiveFile, "close")
        with pytest.raises(KeyboardInterrupt):
            rig.wal.close()

    rig.wal.close()

    waiting = threading.Thread(target=lambda: rig.wal.wait(1, timeout=None), daemon=True)
    waiting.start()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()


@pytest.mark.parametrize("durability", [FSYNC, DISK, Durability.MEMORY])
def test_a_log_that_ctrl_c_stops_while_it_skips_to_history_never_writes_an_old_offset_behind_it(
    monkeypatch: pytest.MonkeyPatch, durability: Durability
) -> None:
    """Appends were acknowledged and written as offset 1 into the file of offset 50, which no opening could read."""
    rig = Rig(simulated(), durability).open()
    rig.append()
    rig.wal.commit()
    with monkeypatch.context() as patch:
        _interrupted(patch, AppendQueue, "restart_at")
        with pytest.raises(KeyboardInterrupt):
            rig.wal.skip_to_history(50)

    rig.stage()
    rig.wal.commit()
    rig.stage()
    rig.wal.commit()

    assert rig.wal.head == 51
    page = rig.wal.read(50)
    assert page is not None and page.next == 51
    if durability is Durability.MEMORY:
        # It was acknowledged at an offset that history has, so it could not be written.
        with pytest.raises(DataLoss, match=r"\[1, 2\)"):
            rig.wal.close()
    rig.wal.close()
    assert Rig(rig.disk, durability, epoch=rig.epoch).open().wal.head == 51
