"""What class `memory` has acknowledged is in the queue until it is written: no error of a disk or store drops it."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import msgspec
import pytest

from forebay.appends.queue import QueueFull
from forebay.appends.ticket import Ticket
from forebay.errors import Closed, Conflict, DataLoss, Fenced, ForebayError, Moved, Unavailable
from forebay.records import Gap, Reason
from forebay.testing.checks.history import AppendOutcome, Crashed, Healed, Troubled
from forebay.testing.checks.invariants import Violation, check_log
from forebay.testing.simulated.faults import PlannedFault, plan_faults
from forebay.topics import Durability
from forebay.wal.log import LogPhase
from forebay.wal.upkeep import STALL_RETRY_MS
from tests.ledger import Ledger
from tests.support.soak import sampled
from tests.support.waiting import PATIENCE
from tests.wal.rig import SMALL, Bare, BareRig, Rig, Simulated, simulated
from tests.wal.scenarios import fail_next, inside_next

MEMORY: Final = Durability.MEMORY
ACKED, REFUSED = AppendOutcome.ACKED, AppendOutcome.REFUSED
FLOOR: Final = msgspec.structs.replace(SMALL, free_bytes_min=10_000, reserve_records_min=64)
LARGE: Final = msgspec.structs.replace(SMALL, reserve_records_min=64, rotate_bytes_max=1 << 20)


class Store:
    """The metadata store that reserves offsets, as far as it answers."""

    def __init__(self) -> None:
        self.is_away = False

    def reserve(self, end: int) -> int:
        if self.is_away:
            raise Unavailable("the metadata store does not answer")
        return end


def _open(settings: msgspec.Struct = LARGE) -> Simulated:
    """A shard with one written record: from here on appends are acknowledged in the queue."""
    rig = Rig(simulated(), MEMORY, settings=settings).open()  # type: ignore[arg-type]
    rig.append()
    return rig


def _reserved(store: Store) -> Bare:
    rig = BareRig(simulated(), MEMORY, settings=LARGE).begin(reserve=store.reserve)
    rig.append()
    return rig


def _offsets(rig: Simulated) -> list[int]:
    return [offset for offset, _ in rig.reading().records]


def _append(rig: Simulated) -> None:
    rig.append()


def _full(rig: Simulated, free: int = 5_000) -> None:
    rig.disk.free = free
    rig.clock.advance(1)


def _looks_for_room(rig: Simulated) -> int:
    return sum(call.kind == "free_bytes" for call in rig.disk.calls)


# A full disk


def test_what_was_acknowledged_waits_while_the_disk_is_full_and_is_written_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = _open(FLOOR)
    _full(rig)

    assert [rig.append(), rig.append(2), rig.append(producing=(7, 0))] == [ACKED] * 3
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"\[1, 5\).*wait in memory.*5000 bytes are free"):
            rig.flush()
    assert rig.shard.failure is not None and "[1, 5)" in rig.shard.failure
    assert _offsets(rig) == [0]
    warnings = [line.getMessage() for line in caplog.records if line.levelno >= logging.WARNING]
    assert len(warnings) == 1 and warnings[0].startswith("shop/orders[0]: offsets [1, 5) wait in memory")

    rig.disk.free = 1 << 30
    rig.flush()

    assert rig.shard.failure is None
    assert _offsets(rig) == list(range(5))
    assert rig.append(producing=(7, 0)) is ACKED
    assert rig.append(producing=(7, 1)) is ACKED
    assert check_log(rig.history(), rig.see()) == []


def test_the_background_writes_what_waited_without_being_asked_and_not_too_often() -> None:
    rig = _open(FLOOR)
    _full(rig)
    rig.append()
    rig.wal.commit()
    tried = _looks_for_room(rig)

    rig.shard.upkeep.maintain()
    assert _looks_for_room(rig) == tried
    rig.disk.free = 1 << 30
    assert rig.shard.upkeep.is_busy
    rig.clock.advance(STALL_RETRY_MS / 1000)
    rig.shard.upkeep.maintain()

    assert (rig.wal.head, rig.shard.failure) == (2, None)


def test_a_queue_that_is_full_refuses_and_drops_nothing_however_often_it_is_tried() -> None:
    rig = _open(msgspec.structs.replace(FLOOR, queue_records_max=4, reserve_records_min=1000))
    _full(rig)
    taken = 0

    for _ in range(5):
        for _ in range(20):
            taken += rig.append() is ACKED
            # Each attempt takes what waits, and more may come in meanwhile.
            inside_next(rig.disk, "free_bytes", lambda: _append(rig), suffix="")
            rig.wal.commit()

    assert taken <= 8
    rig.disk.free = 1 << 30
    rig.flush()
    assert len(_offsets(rig)) == rig.wal.offsets().next
    assert rig.append() is ACKED
    assert check_log(rig.history(), rig.see()) == []


def test_closing_writes_what_waits_below_the_reserve_of_the_disk() -> None:
    rig = _open(FLOOR)
    _full(rig)
    assert rig.append(3) is ACKED

    rig.shard.upkeep.close()

    assert _offsets(Rig(rig.disk, MEMORY, epoch=1).open()) == [0, 1, 2, 3]


def test_closing_names_what_it_could_not_write(caplog: pytest.LogCaptureFixture) -> None:
    rig = _open()
    rig.append(2)
    rig.append()
    rig.disk.fail_when(lambda call: call.kind in ("write", "create", "rename"), errno.ENOSPC, times=None)

    with pytest.raises(DataLoss, match=r"shop/orders\[0\].*\[1, 4\) were acknowledged and are lost") as raised:
        rig.shard.upkeep.close()

    assert (raised.value.start, raised.value.stop, raised.value.partition) == (1, 4, 0)
    assert rig.wal.closed and rig.shard.failure is not None
    assert any("[1, 4) were acknowledged and are lost" in line.getMessage() for line in caplog.records)
    rig.shard.upkeep.close()
    with pytest.raises(Closed):
        rig.flush()
    rig.disk.heal()
    again = Rig(rig.disk, MEMORY, epoch=1).open()
    assert again.reading().gaps[:1] == [] or again.reading().gaps[0].reason is Reason.LOST
    again.append()
    assert again.wal.head > 4


def test_deleting_a_topic_whose_records_wait_is_no_loss(caplog: pytest.LogCaptureFixture) -> None:
    rig = _open()
    rig.append(2)
    rig.disk.fail_when(lambda call: call.kind == "write", errno.EIO, times=None)

    rig.wal.close(deleting=True)

    assert rig.wal.closed
    assert not any("are lost" in line.getMessage() for line in caplog.records)


# A store that does not reserve


def test_the_record_that_waits_for_a_reservation_fails_alone() -> None:
    store = Store()
    rig = _reserved(store)
    store.is_away = True
    held = rig.wal.writer.reserved - 1

    assert [rig.append() for _ in range(held)] == [ACKED] * held
    assert rig.append() is REFUSED
    assert rig.append(2) is REFUSED

    assert rig.wal.failure is None and rig.wal.stall is None
    rig.flush()
    assert _offsets(rig) == list(range(held + 1))
    store.is_away = False
    assert rig.append() is ACKED
    assert _offsets(rig) == list(range(held + 2))
    assert check_log(rig.history(), rig.see()) == []


def test_of_records_that_share_a_frame_those_that_are_reserved_are_written() -> None:
    """They would be written as one frame; the reservation ends in the middle of it."""
    store = Store()
    rig = _reserved(store)
    store.is_away = True
    staged = [rig.stage() for _ in range(rig.wal.writer.reserved + 3)]
    reserved = rig.wal.writer.reserved

    outcomes = [rig.hear(attempt, ticket) for attempt, ticket in staged]

    assert outcomes == [ACKED] * (reserved - 1) + [REFUSED] * 4
    assert _offsets(rig) == list(range(reserved))
    assert check_log(rig.history(), rig.see()) == []


def test_offsets_that_are_reserved_beside_a_commit_that_fails_acknowledge_nothing_it_fails() -> None:
    """The background reserves more at the instant at which a commit gives up on what was not reserved."""
    store = Store()
    rig = _reserved(store)
    staged = [rig.stage() for _ in range(rig.wal.writer.reserved + 3)]
    reserved, fail = rig.wal.writer.reserved, rig.wal.queue.fail

    def failing(*args: ForebayError | int, **kept: int) -> None:
        rig.wal.writer.note_reserved(1_000)
        for attempt, ticket in staged[reserved:]:
            assert isinstance(ticket, Ticket), attempt
            assert not rig.wal.is_held_queued(ticket)
        fail(*args, **kept)  # type: ignore[arg-type]

    store.is_away = True
    rig.wal.queue.fail = failing  # type: ignore[method-assign, assignment]
    rig.wal.commit()

    outcomes = [rig.hear(attempt, ticket) for attempt, ticket in staged]
    assert outcomes == [ACKED] * (reserved - 1) + [REFUSED] * 4
    assert check_log(rig.history(), rig.see()) == []


# An error of the disk


@pytest.mark.parametrize("kind", ["write", "sync"])
def test_what_was_acknowledged_is_written_again_once_the_log_has_healed(kind: str) -> None:
    rig = _open()
    outcomes = [rig.append(), rig.append(3), rig.append(producing=(7, 0)), rig.append(2, producing=(8, 4))]
    assert outcomes[:3] == [ACKED] * 3
    fail_next(rig, kind, errno.EIO, taken=9 if kind == "write" else None)
    rig.wal.commit()
    if kind == "sync":
        rig.shard.upkeep.sync()
    assert rig.wal.state.phase is LogPhase.FAILED
    assert rig.append() is REFUSED
    rig.note(Troubled())

    assert rig.wal.heal()
    rig.note(Healed())

    rig.flush()
    assert _offsets(rig) == list(range(rig.wal.head)) and rig.reading().gaps == []
    assert rig.append(producing=(7, 0)) is ACKED
    assert rig.append(producing=(7, 1)) is ACKED
    assert check_log(rig.history(), rig.see()) == []
    again = Rig(rig.disk, MEMORY, epoch=1).open()
    assert check_log(rig.history(), again.reading()) == []


def test_an_idempotent_producer_goes_on_after_an_error_of_the_disk() -> None:
    rig = _open()
    for sequence in range(10):
        assert rig.append(producing=(7, sequence)) is ACKED
        if sequence == 4:
            rig.flush()
    fail_next(rig, "write", errno.EIO)

    rig.flush()

    assert rig.shard.last_sequence(7) == 9
    assert rig.append(producing=(7, 9)) is ACKED
    assert rig.append(producing=(7, 10)) is ACKED
    rig.flush()
    assert len(_offsets(rig)) == 12
    with pytest.raises(Conflict):
        raise rig.stage(producing=(7, 12))[1]  # type: ignore[misc]


def test_the_newest_sequence_of_a_producer_counts_while_its_append_waits() -> None:
    rig = _open(FLOOR)
    rig.append(producing=(7, 0))
    rig.flush()
    _full(rig)
    rig.append(producing=(7, 1))

    assert rig.shard.last_sequence(7) == 1


def test_the_next_offset_stays_behind_what_waits_while_the_log_is_read_only() -> None:
    rig = _open()
    rig.append(4)
    fail_next(rig, "write", errno.EIO)
    rig.wal.commit()

    assert (rig.wal.head, rig.wal.offsets().next) == (1, 5)
    assert rig.shard.published() == 5
    rig.wal.heal()
    assert (rig.wal.head, rig.wal.offsets().next) == (5, 5)


def test_a_loss_that_healing_finds_is_told_by_flush_and_by_close() -> None:
    """Of no class: what the failed file and memory both lack was acknowledged, and flush said that all is durable."""
    rig = Rig(simulated(), Durability.DISK, settings=LARGE).open()
    rig.append()
    rig.flush()
    for _ in range(4):
        rig.append(size=3000)
    held = rig.wal.tail.cache.next_frame(0)
    assert held is not None
    fail_next(rig, "sync", errno.EIO)
    with pytest.raises(Unavailable):
        rig.flush()
    active = rig.wal.writer.active
    assert active is not None
    rig.disk.discard_failed(active.path)

    with pytest.raises(DataLoss, match="acknowledged and are lost") as raised:
        rig.flush()

    assert (raised.value.start, raised.value.stop) == (1, held.base)
    rig.flush()
    with pytest.raises(DataLoss):
        rig.wal.close()


def test_an_owner_that_is_fenced_names_what_it_had_acknowledged(caplog: pytest.LogCaptureFixture) -> None:
    rig = BareRig(simulated(), MEMORY, settings=LARGE).begin()
    rig.append()
    rig.append(2)

    rig.wal.fence("another owner has it")

    assert any("[1, 3) were acknowledged and are lost" in line.getMessage() for line in caplog.records)
    with pytest.raises(Fenced):
        rig.wal.flush()
    with pytest.raises(DataLoss, match=r"\[1, 3\)"):
        rig.wal.close()


# Two errors at once, and at every call


def test_full_disk_and_lost_store_together_then_healed_then_closed() -> None:
    store = Store()
    settings = msgspec.structs.replace(FLOOR, rotate_bytes_max=1 << 20)
    rig = BareRig(simulated(), MEMORY, settings=settings).begin(reserve=store.reserve)
    rig.append()
    store.is_away = True
    _full(rig)
    held = rig.wal.writer.reserved - 1
    assert [rig.append(producing=(7, number)) for number in range(held)] == [ACKED] * held
    assert rig.append(producing=(7, held)) is REFUSED
    fail_next(rig, "write", errno.EIO)

    rig.disk.free = 1 << 30
    rig.note(Troubled())
    rig.wal.commit()
    assert rig.wal.state.phase is LogPhase.FAILED
    rig.flush()
    rig.note(Healed())

    assert _offsets(rig) == list(range(held + 1))
    assert check_log(rig.history(), rig.see()) == []
    store.is_away = False
    assert rig.append(producing=(7, held)) is ACKED
    rig.upkeep.close()
    assert _offsets(Rig(rig.disk, MEMORY, epoch=1).open()) == list(range(held + 2))


def _life(rig: Simulated) -> None:
    """Single records, batches and producers, with commits in between, beyond what is reserved and into new files."""
    for number in range(3):
        rig.append()
        rig.append(3, producing=(1, number))
        rig.append(producing=(2, number), size=30)
        rig.wal.commit()
        rig.append(2)
        _flush(rig)


def _flush(rig: Simulated) -> None:
    try:
        rig.flush()
    except Unavailable as error:
        assert str(error)


def _plan() -> Iterator[tuple[PlannedFault, PlannedFault | None]]:
    """One fault at every call, for once and for good; and two of them."""
    rig = _open(SMALL)
    reached = rig.disk.calls_reached
    _life(rig)
    calls = rig.disk.calls[reached:]
    once = list(plan_faults(calls))
    lasting = list(plan_faults(calls, short_writes=False, lasting=True))
    for fault in sampled(iter([*once, *lasting]), one_in=2, seed="memory"):
        yield fault, None
    for fault in sampled(iter(once), one_in=6, seed="two"):
        yield fault, once[(once.index(fault) * 7 + 11) % len(once)]


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["healed", "closed"])
@pytest.mark.proves("I2", "I10", "I28")
def test_an_error_at_any_call_of_the_disk_drops_nothing_that_was_acknowledged(ends: str, ledger: Ledger) -> None:
    broken: list[str] = []
    for first, second in _plan():
        faults = "one" if second is None else "two"
        ledger.count("faults of class memory", ends=ends, faults=faults)
        violations = _live_through(ends, first, second)
        if violations:
            ledger.violation("faults of class memory", ends=ends, faults=faults)
        broken += [f"{first} {second or ''}: {violation}" for violation in violations]
    assert broken[:10] == []


def _live_through(ends: str, first: PlannedFault, second: PlannedFault | None) -> list[Violation]:
    rig = _open(SMALL)
    rig.disk.plan(first)
    if second is not None:
        rig.disk.plan(second)
    _life(rig)
    if ends == "closed":
        rig.close()
        rig.disk.heal()
        return check_log(rig.history(), Rig(rig.disk, MEMORY, epoch=rig.epoch).open().reading())
    rig.disk.heal()
    rig.clock.advance(2)
    rig.shard.upkeep.maintain()
    rig.flush()
    violations = check_log(rig.history(), rig.see())
    if rig.append() is not ACKED:
        violations.append(Violation("I28", f"not healed: {rig.wal.failure}"))
    return violations


# What may happen while a step waits


class FileGate:
    """Holds the thread that next calls a method of the active file until it is let go."""

    def __init__(self, rig: Simulated, method: str) -> None:
        active = rig.wal.writer.active
        assert active is not None
        self.reached, self._go = threading.Event(), threading.Event()
        self._file, self._method, self._call = active.file, method, getattr(active.file, method)
        setattr(active.file, method, self._enter)

    def _enter(self, *args: object) -> object:
        setattr(self._file, self._method, self._call)
        self.reached.set()
        assert self._go.wait(PATIENCE)
        return self._call(*args)

    def open(self) -> None:
        self._go.set()


def _meanwhile_flush(rig: Simulated) -> None:
    rig.flush()


def _meanwhile_close(rig: Simulated) -> None:
    rig.close()


def _meanwhile_hold(rig: Simulated) -> None:
    """As a seal begins."""
    rig.wal.hold(Moved("it moves"))
    try:
        rig.flush()
    finally:
        rig.wal.release()


def _meanwhile_heal(rig: Simulated) -> None:
    rig.wal.heal()


@pytest.mark.parametrize("kind", ["write", "sync"])
@pytest.mark.parametrize("meanwhile", [_meanwhile_flush, _meanwhile_close, _meanwhile_hold, _meanwhile_heal])
def test_what_begins_while_a_write_is_about_to_fail_finds_all_that_was_acknowledged(
    kind: str, meanwhile: Callable[[Simulated], None]
) -> None:
    rig = _open()
    rig.append(3)
    rig.append(producing=(7, 0))
    gate = FileGate(rig, "write_at" if kind == "write" else "sync")
    fail_next(rig, kind, errno.EIO)
    step = rig.wal.commit if kind == "write" else lambda: _flush(rig)
    with ThreadPoolExecutor(2) as threads:
        stuck = threads.submit(step)
        assert gate.reached.wait(PATIENCE)
        # Staged while the write is under way: acknowledged, too.
        assert rig.append(2) is ACKED
        other: Future[None] = threads.submit(meanwhile, rig)
        gate.open()
        stuck.result(PATIENCE)
        other.result(PATIENCE)
    if rig.wal.closed:
        rig = Rig(rig.disk, MEMORY, epoch=rig.epoch).open()
    else:
        rig.wal.heal()
        rig.flush()

    assert check_log(rig.history(), rig.reading()) == []
    assert _offsets(rig) == list(range(7))


def test_an_append_that_waits_for_a_commit_that_fails_is_answered() -> None:
    """Reserved by then, it is acknowledged with the others: its thread would ask a read-only log for ever."""
    rig = _open(SMALL)
    staged = [rig.stage() for _ in range(SMALL.reserve_records_min + 4)]
    gate = FileGate(rig, "write_at")
    fail_next(rig, "write", errno.EIO)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(rig.wal.commit)
        assert gate.reached.wait(PATIENCE)
        last = threads.submit(rig.hear, *staged[-1])
        gate.open()
        first.result(PATIENCE)
        assert last.result(PATIENCE) is REFUSED
    for attempt, ticket in staged[:-1]:
        rig.hear(attempt, ticket)
    assert rig.wal.heal()

    assert check_log(rig.history(), rig.see()) == []


def test_a_full_queue_says_so_while_the_disk_is_full() -> None:
    rig = _open(msgspec.structs.replace(FLOOR, queue_records_max=2, reserve_records_min=1000))
    _full(rig)
    rig.append()
    rig.append()

    refused = rig.stage()[1]

    assert isinstance(refused, QueueFull)
    slept = rig.clock.monotonic()
    rig.shard.commit_within(1.0)
    assert rig.clock.monotonic() > slept, "else the append that waits for room keeps a processor busy"


def test_a_crash_still_takes_what_was_only_queued_and_gives_out_no_offset_twice() -> None:
    rig = _open(FLOOR)
    _full(rig)
    rig.append(3)
    rig.wal.commit()
    rig.note(Crashed(power=False))

    again = Rig(rig.disk, MEMORY, epoch=1).open()
    again.append()

    assert again.reading().gaps == [Gap(1, 64, Reason.LOST)]
    assert check_log(rig.history(), again.reading()) == []
