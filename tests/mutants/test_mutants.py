"""Deliberate breaks of the log: for each the checks must name the promise that it breaks.

A check that stays silent here would stay silent when someone makes the same mistake.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, Final

import msgspec
import pytest

import forebay.disk.writing
import forebay.format.control.frames
import forebay.format.frame.batch
import forebay.format.frame.encoding
import forebay.format.frame.head
import forebay.wal.retention
import forebay.wal.scan
import forebay.wal.writer
from forebay.appends.producer_window import ProducerWindow
from forebay.appends.queue import AppendQueue
from forebay.disk import Disk, File
from forebay.errors import Fenced, ForebayError, Unavailable
from forebay.format.control.frames import State
from forebay.format.frame.batch import RAW_BYTES_MAX
from forebay.records import OFFSET_MAX, Bytes, Gap, Reason
from forebay.testing.checks.history import Healed, Troubled
from forebay.testing.checks.invariants import (
    Violation,
    acks_follow_syncs,
    check_log,
    damage_is_reported,
    names_follow_bytes,
    promises_follow_syncs,
)
from forebay.testing.simulated.crashes import explore
from forebay.testing.simulated.damage import CrashDamage
from forebay.testing.simulated.disk import SimulatedDisk
from forebay.topics import DURABILITY_POLICIES, Durability, DurabilityPolicy
from forebay.wal.files import SealedFile
from forebay.wal.log import Wal
from forebay.wal.recovery.resume import Start
from forebay.wal.recovery.survey import CHECKPOINT_NAME
from forebay.wal.retention import drop_file
from forebay.wal.scan import LogScan
from forebay.wal.tail import LIVE_NAME
from forebay.wal.walk import Unreadable
from forebay.wal.writer import SyncTarget, Writer
from tests.ledger import Ledger
from tests.mutants.breach import Breach
from tests.wal.bombs import READERS, mined, stays_packed
from tests.wal.checks import TAKEN, Recoveries, lost_owners_acknowledge_nothing
from tests.wal.rig import DIRECTORY, SMALL, BareRig, Rig, Simulated, simulated
from tests.wal.scenarios import fail_next, inside_next

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # far more than needed: a shared machine may be busy

FSYNC, DISK, MEMORY = Durability.FSYNC, Durability.DISK, Durability.MEMORY
DAMAGES: Final = (CrashDamage.KILLED, CrashDamage.OLD, CrashDamage.CUT, CrashDamage.WHOLE)


def _run_crashing(durability: Durability, run: Callable[[Simulated], None]) -> list[Violation]:
    """A run, its trace, and the crashes at each of its steps."""
    rig = Rig(simulated(), durability).open()
    run(rig)
    trace = rig.disk.trace
    violations = [*names_follow_bytes(trace), *promises_follow_syncs(trace), *check_log(rig.history(), rig.reading())]
    if durability is FSYNC:
        violations += acks_follow_syncs(trace)
    recoveries = Recoveries(durability)
    for state in explore(trace, damages=DAMAGES, states_max=3, names_max=3):
        try:
            violations += recoveries.violations(state)
        except (ForebayError, AssertionError, OSError) as error:
            violations.append(Violation("recovery", f"{type(error).__name__}: {error}"))
    return violations


def _appends(rig: Simulated) -> None:
    rig.append()
    rig.append(2)
    rig.see()
    rig.wal.rotate()
    rig.append()


def _many_appends(rig: Simulated) -> None:
    for _ in range(7):
        rig.append(3)
        rig.see()


def _produces(rig: Simulated) -> None:
    rig.append(producing=(1, 0))
    rig.append(producing=(1, 1))
    rig.wal.rotate()
    rig.append(producing=(1, 2))


def _reopens(rig: Simulated) -> None:
    rig.append(2)
    rig.shard.upkeep.close()
    rig.open()
    rig.append()
    rig.see()


def _meets_a_short_write(rig: Simulated) -> None:
    rig.append()
    rig.disk.shorten_at(rig.disk.calls_reached, 30)
    rig.append(size=50)
    rig.append()


def _meets_a_failing_sync(rig: Simulated) -> None:
    rig.append()
    fail_next(rig, "sync", errno.EIO)
    rig.append()
    rig.append()


def _meets_a_failing_background_sync(rig: Simulated) -> None:
    rig.append(2)
    fail_next(rig, "sync", errno.EIO)
    for _ in range(3):
        rig.clock.advance(2)
        rig.shard.upkeep.maintain()
        rig.promise()
    rig.append()


def _flip_without_the_files_beside(durability: Durability) -> list[Violation]:
    """One bit of the first of several synced records; `live` and `checkpoint` are missing, so only the log shows."""
    rig = Rig(simulated(), durability).open()
    for _ in range(4):
        rig.append()
    rig.shard.upkeep.close()
    _overwrite(rig, rig.wal.files.all[0].path, _first_record(rig) + 60)
    for name in (LIVE_NAME, CHECKPOINT_NAME):
        rig.disk.unlink(f"{DIRECTORY}/{name}")
    again = Rig(rig.disk, durability, epoch=rig.epoch).open()
    history = rig.history()
    return [*check_log(history, again.reading()), *damage_is_reported(history, again.reading(), 4)]


def _flip_below_the_mark(durability: Durability) -> list[Violation]:
    """One bit of the first of several synced records, before the shard is opened again."""
    rig = Rig(simulated(), durability).open()
    for _ in range(4):
        rig.append()
    _overwrite(rig, rig.wal.files.all[0].path, _first_record(rig) + 60)
    again = Rig(rig.disk, durability, epoch=rig.epoch).open()
    history = rig.history()
    return [*check_log(history, again.reading()), *damage_is_reported(history, again.reading(), 4)]


def _flip_an_offset(durability: Durability) -> list[Violation]:
    """One bit of the offset of a record, under a reader whose cache is empty."""
    rig = Rig(simulated(), durability).open()
    for _ in range(4):
        rig.append()
    active = rig.wal.writer.active
    assert active is not None
    # The record behind the first one, of the same size.
    (first,) = rig.wal.tail.cache.frames_from(0, 1)
    rig.wal.tail.cache.clear()
    _overwrite(rig, active.path, _first_record(rig) + len(first.data))
    history = rig.history()
    return [*check_log(history, rig.reading()), *damage_is_reported(history, rig.reading(), 4)]


def _append_after_a_take_over(durability: Durability) -> list[Violation]:
    """The lease ends, another directory goes on at the reserved end, and only then the old owner writes."""
    rig = BareRig(simulated(), durability).begin(reserve=lambda _: 16)
    rig.lease = False
    rig.append()
    start = Start(next_offset=16, gap=Gap(0, 16, Reason.LOST))
    other = BareRig(simulated(), durability, epoch=1).begin(start)
    return check_log(rig.history(), other.reading_from(0))


def _taken_over_inside_the_sync(durability: Durability) -> list[Violation]:
    """The lease ends, and another owner has the shard, while the append waits for the disk."""
    rig = BareRig(simulated(), durability).begin(reserve=lambda _: 16)
    rig.append()

    def taken_over() -> None:
        rig.lease = False
        rig.disk.note(TAKEN)

    inside_next(rig.disk, "sync", taken_over)
    rig.append()
    return list(lost_owners_acknowledge_nothing(rig.disk.trace.notes()))


def _read_a_bomb() -> list[Violation]:
    """A small frame that says truly that it unpacks beyond the limit."""
    with pytest.MonkeyPatch.context() as patch:
        return list(stays_packed(mined(FSYNC, patch), READERS["cold"]))


def _retain_what_is_covered(durability: Durability) -> list[Violation]:
    """Local copies are freed while history covers only some of them."""
    rig = BareRig(simulated(), durability).begin()
    rig.fill(3)
    now_ms, now, covered_end = rig.clock.now_ms(), rig.clock.monotonic(), 6
    files = rig.wal.files
    for file in forebay.wal.retention.expired(
        files, covered_end, now_ms=now_ms, now=now, time_s=0, bytes_max=0, grace_s=0
    ):
        assert isinstance(file, SealedFile)
        drop_file(rig.disk, files, file)
    begins = files.begins
    assert begins is not None
    gone = f"offsets [{covered_end}, {begins}) have no copy left"
    return [Violation("I17", gone)] if begins > covered_end else []


def _first_record(rig: Simulated) -> int:
    position = rig.wal.files.all[0].index.position_of(0)  # type: ignore[union-attr]
    assert isinstance(position, int)
    return position


def _overwrite(rig: Simulated, path: str, position: int) -> None:
    file = rig.disk.open(path, writable=True)
    file.write_at(bytes([file.read_at(1, position)[0] ^ 2]), position)


# The breaks.


def _ack_before_sync(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(DURABILITY_POLICIES, FSYNC, DurabilityPolicy())


def _no_directory_sync(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedDisk, "sync_directory", lambda disk, path: None)


def _checksum_without_header(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(forebay.format.frame.head, "PACK_FIRST", lambda base, length: b"")
    patch.setattr(forebay.format.frame.encoding, "PACK_FIRST", lambda base, length: b"")


def _reservation_not_persisted(patch: pytest.MonkeyPatch) -> None:
    def forget(state: State, **fields: Any) -> list[bytes]:
        return forebay.format.control.frames.encode_state(_without_reservation(state), **fields)

    patch.setattr(forebay.wal.writer, "encode_state", forget)


def _without_reservation(state: State) -> State:
    return State(
        reserved_end=0,
        previous_end=state.previous_end,
        earliest=0,
        evict_floor=0,
        identity=state.identity,
        window=state.window,
        restated=state.restated,
    )


def _cut_below_the_mark(patch: pytest.MonkeyPatch) -> None:
    def always_torn(scan: LogScan, place: Unreadable, proof: int) -> bool:
        scan.torn_bytes = scan.size - place.byte
        return False

    patch.setattr(LogScan, "_steps_over", always_torn)


def _short_write_counts(patch: pytest.MonkeyPatch) -> None:
    def once(file: File, data: Bytes, position: int) -> None:
        file.write_at(data, position)

    patch.setattr(forebay.wal.writer, "write_all", once)
    patch.setattr(forebay.wal.writer, "write_rest", lambda *_: None)


def _sync_again(patch: pytest.MonkeyPatch) -> None:
    sync = Writer.sync

    def twice(writer: Writer) -> None:
        try:
            sync(writer)
        except OSError:
            sync(writer)
            writer.in_doubt = False

    patch.setattr(Writer, "sync", twice)


def _window_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(forebay.wal.scan, "runs_of", lambda *_: [])
    patch.setattr(ProducerWindow, "extend", lambda *_: None)


def _renamed_before_synced(patch: pytest.MonkeyPatch) -> None:
    def replace_file(disk: Disk, path: str, data: Bytes) -> None:
        file = disk.create(path + ".tmp")
        forebay.disk.writing.write_all(file, data, 0)
        disk.rename(path + ".tmp", path)
        disk.sync_directory(path.rpartition("/")[0])

    patch.setattr(forebay.wal.writer, "replace_file", replace_file)


def _clean_mark_stays(patch: pytest.MonkeyPatch) -> None:
    resume = Writer.resume

    def forgetful(writer: Writer, *arguments: Any) -> None:
        resume(writer, *arguments)
        writer._reopened_clean = False

    patch.setattr(Writer, "resume", forgetful)


def _no_lease_check(patch: pytest.MonkeyPatch) -> None:
    begun = Wal.__init__

    def unasked(wal: Wal, *arguments: Any, **named: Any) -> None:
        begun(wal, *arguments, **named | {"still_owner": None})

    patch.setattr(Wal, "__init__", unasked)


def _lease_asked_before_the_sync(patch: pytest.MonkeyPatch) -> None:
    commit = Wal._commit

    def asked_first(wal: Wal) -> None:
        still_owner, wal.still_owner = wal.still_owner, None
        try:
            if still_owner is not None and not still_owner():
                wal._fail(Fenced("the lease has ended"))
            else:
                commit(wal)
        finally:
            wal.still_owner = still_owner

    patch.setattr(Wal, "_commit", asked_first)
    patch.setattr(Writer, "write_one", lambda *_: None)  # every append takes this way


def _background_sync_tried_again(patch: pytest.MonkeyPatch) -> None:
    def try_later(wal: Wal, target: SyncTarget, error: OSError) -> None:
        wal.dirty_since = wal.writer.clock.monotonic()
        wal.writer.end_background_sync(target)

    patch.setattr(Wal, "fail_background_sync", try_later)


def _stored_size_limited(patch: pytest.MonkeyPatch) -> None:
    whole = forebay.format.frame.batch.decompress

    def unpacked(buffer: Bytes, start: int, stop: int) -> bytes:
        with pytest.MonkeyPatch.context() as inside:
            if stop - start <= RAW_BYTES_MAX:
                inside.setattr(forebay.format.frame.batch, "RAW_BYTES_MAX", OFFSET_MAX)
            return whole(buffer, start, stop)

    patch.setattr(forebay.format.frame.batch, "decompress", unpacked)


def _marks_not_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LogScan, "_durable_behind", lambda *_: 0)


def _retention_beyond_coverage(patch: pytest.MonkeyPatch) -> None:
    expired = forebay.wal.retention.expired
    patch.setattr(forebay.wal.retention, "expired", lambda files, _, **limits: expired(files, OFFSET_MAX, **limits))


def _queue_dropped(patch: pytest.MonkeyPatch) -> None:
    """A commit that could not write fails everything that waits, also what is acknowledged."""
    fail = AppendQueue.fail

    def fail_all(
        queue: AppendQueue,
        written: ForebayError,
        queued: ForebayError,
        next_offset: int,
        *,
        kept_end: int | None = None,
    ) -> None:
        fail(queue, written, queued, next_offset)

    patch.setattr(AppendQueue, "fail", fail_all)


def _flush_says_done(patch: pytest.MonkeyPatch) -> None:
    """A flush that looks at the file alone, not at what waits in memory."""
    flush = Wal.flush

    def lying(wal: Wal) -> None:
        try:
            flush(wal)
        except Unavailable:
            if wal.stall is None:
                raise

    patch.setattr(Wal, "flush", lying)


def _waits_for_the_disk(trouble: Callable[[Simulated], None]) -> list[Violation]:
    """Class memory acknowledges, and the disk cannot take it for a while."""
    settings = msgspec.structs.replace(SMALL, free_bytes_min=10_000)
    rig = Rig(simulated(), MEMORY, settings=settings).open()
    rig.append()
    trouble(rig)
    rig.append(2)
    rig.append(producing=(1, 0))
    rig.note(Troubled())
    try:
        rig.flush()
    except Unavailable:
        rig.note(Troubled())
    waiting = check_log(rig.history(), rig.reading())
    rig.disk.free = 1 << 30
    rig.flush()
    rig.note(Healed())
    return [*waiting, *check_log(rig.history(), rig.reading())]


def _fills(rig: Simulated) -> None:
    rig.disk.free = 5_000
    rig.clock.advance(1)


def _fails_once(rig: Simulated) -> None:
    fail_next(rig, "write", errno.EIO)


def _recovery_reserves(patch: pytest.MonkeyPatch) -> None:
    """A file that recovery begins reserves offsets, as one does that is begun for an append."""
    create = Writer.create
    patch.setattr(Writer, "create", lambda writer, start, *, reserving=True: create(writer, start, reserving=True))


def _meets_a_failing_flush(rig: Simulated) -> None:
    rig.append(2)
    fail_next(rig, "sync", errno.EIO)
    with pytest.raises(Unavailable, match="EIO"):
        rig.flush()
    rig.append()


MUTANTS: Final = (
    Breach("ack before fsync", _ack_before_sync, lambda: _run_crashing(FSYNC, _appends), "I13"),
    Breach("ack before fsync, by its loss", _ack_before_sync, lambda: _run_crashing(FSYNC, _appends), "I1"),
    Breach("no directory fsync", _no_directory_sync, lambda: _run_crashing(FSYNC, _appends), "I14"),
    Breach("checksum without header", _checksum_without_header, lambda: _flip_an_offset(FSYNC), "I12"),
    Breach("reservation not persisted", _reservation_not_persisted, lambda: _run_crashing(DISK, _many_appends), "I4"),
    Breach("cut below the durable mark", _cut_below_the_mark, lambda: _flip_below_the_mark(FSYNC), "I12"),
    Breach("short write taken as whole", _short_write_counts, lambda: _run_crashing(FSYNC, _meets_a_short_write), "I1"),
    Breach("fsync error retried", _sync_again, lambda: _run_crashing(FSYNC, _meets_a_failing_sync), "I1"),
    Breach("dedupe window forgotten", _window_forgotten, lambda: _run_crashing(FSYNC, _produces), "I26"),
    Breach("queue dropped on a full disk", _queue_dropped, lambda: _waits_for_the_disk(_fills), "I2"),
    Breach("queue dropped by a failed write", _queue_dropped, lambda: _waits_for_the_disk(_fails_once), "I2"),
    Breach("flush says done for what waits", _flush_says_done, lambda: _waits_for_the_disk(_fills), "I2"),
    Breach("renamed before synced", _renamed_before_synced, lambda: _run_crashing(FSYNC, _appends), "I14"),
    Breach("no lease check before the ack", _no_lease_check, lambda: _append_after_a_take_over(FSYNC), "I1"),
    Breach("retention beyond coverage", _retention_beyond_coverage, lambda: _retain_what_is_covered(FSYNC), "I17"),
    Breach(
        "lease asked before the fsync", _lease_asked_before_the_sync, lambda: _taken_over_inside_the_sync(FSYNC), "I20"
    ),
    Breach(
        "failed background sync tried again",
        _background_sync_tried_again,
        lambda: _run_crashing(DISK, _meets_a_failing_background_sync),
        "I13",
    ),
    *[
        Breach(
            f"durable marks not believed, {invariant}",
            _marks_not_believed,
            lambda: _flip_without_the_files_beside(FSYNC),
            invariant,
        )
        for invariant in ("I1", "I4", "I12")
    ],
    Breach("limit of a frame compared with its stored size", _stored_size_limited, _read_a_bomb, "I30"),
    Breach("recovery reserves", _recovery_reserves, lambda: _run_crashing(MEMORY, _meets_a_failing_flush), "I11"),
    Breach("clean mark outlives later records", _clean_mark_stays, lambda: _run_crashing(DISK, _reopens), "I4"),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_checks_name_the_promise_that_a_break_breaks(
    mutant: Breach, monkeypatch: pytest.MonkeyPatch, ledger: Ledger
) -> None:
    mutant.check_sound()
    mutant.check_caught(monkeypatch, ledger)
