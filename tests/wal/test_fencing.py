"""A log that has lost its shard acknowledges nothing more; one that is held takes nothing new and loses nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forebay.appends.ticket import Ticket
from forebay.disk.system import SystemDisk
from forebay.errors import Closed, Fenced, ForebayError, Indeterminate, Moved, Unavailable
from forebay.testing.checks.history import AppendAnswered, AppendOutcome, Begun, Event, ShardEvents
from forebay.testing.checks.invariants import check_log
from forebay.topics import Durability
from forebay.wal.log import LogPhase, LogState
from forebay.wal.recovery.resume import Start
from forebay.wal.upkeep import AT_ONCE
from tests.wal.checks import TAKEN, lost_owners_acknowledge_nothing
from tests.wal.rig import SMALL, Bare, BareRig, Rig, simulated, stage
from tests.wal.scenarios import fail_next, inside_next

DISK, FSYNC, MEMORY = Durability.DISK, Durability.FSYNC, Durability.MEMORY
HELD = Moved("shop/orders[0] moves to another owner: try there")


def _begun(
    durability: Durability,
    reserve: Callable[[int], int] | None = None,
    on_dirty: Callable[[], None] = lambda: None,
) -> Bare:
    return BareRig(simulated(), durability).begin(reserve=reserve, on_dirty=on_dirty)


def _ticket(rig: Bare) -> Ticket:
    _, ticket = rig.stage()
    assert isinstance(ticket, Ticket)
    return ticket


@pytest.mark.parametrize("durability", [FSYNC, DISK])
def test_a_lease_that_lapses_between_write_and_ack_leaves_the_append_undecided(durability: Durability) -> None:
    heard: list[str | None] = []
    rig = _begun(durability, on_dirty=lambda: heard.append(rig.wal.fenced))
    rig.append()
    heard.clear()
    rig.lease = False

    with pytest.raises(Indeterminate, match="had to stop.*lease ended"):
        rig.wal.acknowledge(_ticket(rig))

    assert rig.wal.fenced is not None and "lease" in rig.wal.fenced
    assert rig.wal.failure == rig.wal.fenced
    assert heard == [rig.wal.fenced]
    assert rig.append() is AppendOutcome.REFUSED
    assert [value for _, value in rig.see().records] == [b"a0.0"]
    assert rig.wal.wait(1, timeout=0) is False


@pytest.mark.parametrize(("durability", "step"), [(FSYNC, "write"), (FSYNC, "sync"), (DISK, "write")])
@pytest.mark.proves("I20")
def test_a_lease_that_lapses_inside_a_step_of_the_commit_leaves_the_append_undecided(
    durability: Durability, step: str
) -> None:
    rig = _begun(durability)
    rig.append()

    def taken_over() -> None:
        rig.lease = False
        rig.disk.note(TAKEN)

    inside_next(rig.disk, step, taken_over)

    assert rig.append() is AppendOutcome.INDETERMINATE
    assert list(lost_owners_acknowledge_nothing(rig.disk.trace.notes())) == []
    assert [value for _, value in rig.see().records] == [b"a0.0"]


def test_an_append_is_not_acknowledged_in_the_queue_either_once_the_lease_has_lapsed() -> None:
    rig = _begun(MEMORY)
    rig.wal.acknowledge(_ticket(rig))
    rig.wal.commit()
    queued = _ticket(rig)
    assert rig.wal.is_held_queued(queued) and not queued.done
    rig.lease = False

    late = _ticket(rig)
    assert not rig.wal.is_held_queued(late)
    with pytest.raises(Indeterminate, match="had to stop.*lease ended"):
        rig.wal.acknowledge(late)

    assert rig.wal.fenced is not None
    assert [value for _, value in rig.see().records] == [b"a0.0"]


def test_a_fenced_log_stays_so_even_when_the_lease_is_back() -> None:
    rig = _begun(FSYNC)
    rig.append()
    rig.lease = False
    rig.append()
    rig.lease = True

    assert rig.wal.heal() is False
    rig.upkeep.maintain()
    for refused in (rig.wal.flush, rig.wal.rotate, lambda: rig.wal.skip_to_history(50)):
        with pytest.raises(Fenced, match="open the topic again"):
            refused()
    with pytest.raises(Fenced):
        stage(rig.wal, [b"later"], None, 0)
    assert not rig.upkeep.is_busy


def test_a_fenced_log_shows_other_processes_nothing_any_more() -> None:
    """A sync that began before the log was fenced ends after it: the directory may be another owner's by then."""
    rig = _begun(DISK)
    rig.append()
    target = rig.wal.begin_background_sync()
    assert target is not None
    rig.wal.fence("a newer epoch")
    writes = len(rig.disk.trace)

    rig.wal.end_background_sync(target)

    assert len(rig.disk.trace) == writes


def test_a_fenced_log_never_takes_appends_again() -> None:
    rig = _begun(DISK)
    rig.append()
    rig.wal.fence("a newer epoch")

    with pytest.raises(AssertionError, match="FENCED cannot become OPEN"):
        rig.wal._become(LogPhase.OPEN, None, None)
    assert rig.wal.heal() is False
    assert rig.wal.state == LogState(LogPhase.FENCED, "a newer epoch", is_fenced=True)


def test_closing_a_fenced_log_writes_nothing_and_gives_files_back() -> None:
    rig = _begun(DISK)
    rig.append()
    rig.wal.rotate()
    rig.append()
    rig.wal.fence("a newer epoch")
    writes = len(rig.disk.trace)

    rig.upkeep.close()

    assert len(rig.disk.trace) == writes
    assert rig.wal.closed
    with pytest.raises(Fenced):
        stage(rig.wal, [b"later"], None, 0)
    with pytest.raises(Closed):
        rig.wal.read(0)
    facts = rig.surveyed()
    assert not facts.clean
    assert facts.end == 2


def test_what_waits_when_the_log_is_fenced_from_outside_was_not_written() -> None:
    rig = _begun(DISK)
    rig.append()
    waiting = [_ticket(rig) for _ in range(3)]

    rig.wal.fence("epoch 2 has the shard")
    rig.wal.fence("another reason")

    for ticket in waiting:
        with pytest.raises(Fenced, match="epoch 2 has the shard"):
            rig.wal.acknowledge(ticket)
    assert rig.wal.fenced == "epoch 2 has the shard"
    assert len(rig.reading().records) == 1


def test_a_log_that_failed_may_be_fenced_too_and_does_not_heal_then() -> None:
    rig = _begun(FSYNC)
    rig.append()
    fail_next(rig, "sync", 5)
    assert rig.append() is AppendOutcome.INDETERMINATE

    rig.wal.fence("epoch 2 has the shard")

    assert rig.wal.heal() is False
    with pytest.raises(Fenced):
        rig.wal.flush()


def test_a_reservation_that_finds_another_owner_fences_before_a_byte_is_written() -> None:
    """Nothing was written, so nothing is undecided; with too few offsets left the first append asks."""

    def refused(_: int) -> int:
        raise Fenced("shop/orders[0] has a newer owner than epoch 1")

    rig = _begun(FSYNC, reserve=refused)
    files = rig.disk.list_directory(rig.directory)

    with pytest.raises(Fenced, match="newer owner"):
        rig.wal.acknowledge(_ticket(rig))

    assert rig.wal.fenced is not None
    assert rig.disk.list_directory(rig.directory) == files


def test_a_reservation_out_of_reach_refuses_and_fences_nothing() -> None:
    answers: list[int | ForebayError] = [8, Unavailable("the metadata store does not answer"), 40]

    def reserve(_: int) -> int:
        answer = answers.pop(0)
        if isinstance(answer, ForebayError):
            raise answer
        return answer

    rig = _begun(FSYNC, reserve=reserve)
    assert rig.append(8) is AppendOutcome.ACKED
    assert rig.append() is AppendOutcome.REFUSED
    assert rig.wal.failure is None
    assert rig.append() is AppendOutcome.ACKED
    assert check_log(rig.history(), rig.reading()) == []


def test_more_is_reserved_outside_at_half_use_and_never_taken_back() -> None:
    asked: list[int] = []

    def reserve(end: int) -> int:
        asked.append(end)
        return end

    rig = BareRig(simulated(), DISK).begin(reserve=reserve, reserved_end=8)
    rig.append()
    assert not rig.wal.writer.wants_reservation
    rig.append(4)
    assert rig.wal.writer.wants_reservation
    assert asked == []

    rig.wal.writer.reserve_ahead()
    rig.wal.writer.note_reserved(3)

    assert len(asked) == 1
    assert rig.wal.writer.reserved_end == asked[0] >= 13
    rig.wal.rotate()
    rig.append(3)
    assert rig.wal.writer.reserved_end == asked[0]
    assert not BareRig(simulated(), DISK).begin().wal.writer.wants_reservation


def test_the_background_is_asked_as_soon_as_a_reservation_outside_runs_short() -> None:
    asked: list[float] = []
    rig = BareRig(simulated(), DISK)
    rig.begin(reserve=lambda end: end, reserved_end=8, on_dirty=lambda: asked.append(rig.upkeep.due_at))
    rig.append()
    asked.clear()
    rig.append(3)
    assert asked == []

    rig.append()

    assert asked == [AT_ONCE]


def test_what_the_state_has_reserved_counts_and_not_what_the_log_once_noted() -> None:
    rig = BareRig(simulated(), DISK).begin(reserve=lambda end: end, reserved_end=100)
    rig.append(3)
    rig.wal.flush()

    again = BareRig(rig.disk, DISK, epoch=1).begin(reserve=lambda end: end, reserved_end=40)

    assert again.wal.writer.reserved_end == 40
    assert again.append(60) is AppendOutcome.ACKED
    assert again.wal.writer.reserved_end >= 63


def test_a_held_log_commits_what_is_queued_and_refuses_the_rest_with_the_given_error() -> None:
    rig = _begun(DISK)
    rig.append()
    queued = _ticket(rig)

    rig.wal.hold(HELD)
    with pytest.raises(Moved, match="moves to another owner"):
        stage(rig.wal, [b"later"], None, 0)
    assert rig.wal.acknowledge(queued) == 1
    assert rig.wal.offsets().next == 2

    rig.wal.release()
    assert rig.append() is AppendOutcome.ACKED


def test_a_log_that_fails_while_it_is_held_stays_refused_when_it_is_let_go() -> None:
    rig = _begun(FSYNC)
    rig.append()
    queued = _ticket(rig)
    rig.wal.hold(HELD)
    fail_next(rig, "sync", 5)
    with pytest.raises(Indeterminate):
        rig.wal.acknowledge(queued)

    rig.wal.release()
    with pytest.raises(Unavailable, match="read-only"):
        stage(rig.wal, [b"later"], None, 0)

    rig.wal.hold(HELD)
    assert rig.wal.heal()
    with pytest.raises(Moved):
        stage(rig.wal, [b"later"], None, 0)
    rig.wal.release()
    assert rig.append() is AppendOutcome.ACKED


def _appender(rig: BareRig[SystemDisk], name: int, events: list[Event], ended: threading.Event) -> None:
    """Append until asked to end; whatever is refused was not written."""
    number = 0
    while not ended.is_set():
        attempt, values = name * 1_000_000 + number, (f"{name}.{number}".encode(),)
        number += 1
        reported = AppendAnswered(attempt, AppendOutcome.REFUSED)
        events.append(Begun(attempt, values, str(name)))
        try:
            reported = AppendAnswered(
                attempt, AppendOutcome.ACKED, rig.wal.acknowledge(stage(rig.wal, values, None, number))
            )
        except Indeterminate:
            reported = AppendAnswered(attempt, AppendOutcome.INDETERMINATE)
        except (Moved, Fenced):
            ended.wait(0.0002)
        events.append(reported)


def test_holding_and_fencing_among_threads_loses_and_invents_nothing(tmp_path: Path) -> None:
    rig = BareRig(SystemDisk(), DISK, settings=SMALL, directory=str(tmp_path / "shard")).begin()
    ended = threading.Event()
    events: list[list[Event]] = [[] for _ in range(3)]

    with ThreadPoolExecutor(max_workers=3) as pool:
        appenders = [pool.submit(_appender, rig, name, events[name], ended) for name in range(3)]
        try:
            for _ in range(30):
                rig.clock.sleep(0)
                rig.wal.hold(HELD)
                rig.wal.commit()
                still = rig.wal.offsets().next
                assert rig.wal.queue.is_empty
                rig.wal.rotate()
                assert rig.wal.offsets().next == rig.wal.head == still
                rig.wal.release()
                while rig.wal.head == still:
                    ended.wait(0.0005)
            rig.wal.fence("epoch 2 has the shard")
        finally:
            ended.set()
        for appender in appenders:
            appender.result()

    history = ShardEvents(DISK, [event for reported in events for event in reported])
    assert check_log(history, rig.reading()) == []
    assert history.acked and history.with_outcome(AppendOutcome.REFUSED)


def test_a_new_owner_begins_with_the_window_it_was_given_and_an_old_one_with_its_own() -> None:
    first = _begun(FSYNC)
    first.append(2, producing=(7, 0))
    window = first.surveyed().window
    assert window.last_sequence(7) == 0

    taken = BareRig(simulated(), FSYNC, epoch=1).begin(Start(next_offset=2), window=window)

    assert taken.append(2, producing=(7, 0)) is AppendOutcome.ACKED
    assert taken.wal.offsets().next == 2
    assert taken.append(producing=(7, 1)) is AppendOutcome.ACKED
    again = BareRig(taken.disk, FSYNC, epoch=2).begin(window=Rig(simulated(), FSYNC).open().wal.writer.window)
    assert again.wal.writer.window.last_sequence(7) == 1
