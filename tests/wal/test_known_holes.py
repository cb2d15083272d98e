"""Weaknesses of earlier systems in logs, their recovery and local reading: each is closed here, by name."""

from __future__ import annotations

import threading
from typing import Final

import msgspec
import pytest

from forebay.records import Gap, Reason
from forebay.settings import WalSettings
from forebay.testing.checks.history import AppendOutcome, Reading
from forebay.testing.checks.invariants import bounded, check_log
from forebay.testing.simulated.crashes import crash_states
from forebay.testing.simulated.damage import CrashDamage
from forebay.testing.simulated.trace import Sync
from forebay.topics import Durability
from forebay.wal.files import LogFile, SealedFile
from tests.wal.rig import DIRECTORY, SMALL, Rig, Simulated, after, simulated

FSYNC, DISK, MEMORY = Durability.FSYNC, Durability.DISK, Durability.MEMORY
LARGE: Final = msgspec.structs.replace(SMALL, rotate_bytes_max=1 << 20, reserve_records_min=10_000)


def _open(durability: Durability = FSYNC, settings: WalSettings = SMALL) -> Simulated:
    return Rig(simulated(), durability, settings=settings).open()


def _reopen(rig: Simulated) -> Simulated:
    """The process was killed; another one opens the shard."""
    return Rig(rig.disk, rig.durability, epoch=rig.epoch, settings=rig.settings).open()


def _offsets(reading: Reading) -> list[int]:
    return [offset for offset, _ in reading.records]


def _newest(rig: Simulated) -> str:
    return f"{DIRECTORY}/{max(name for name in rig.disk.list_directory(DIRECTORY) if name.endswith('.seg'))}"


def test_every_fsync_append_is_synced_before_it_returns() -> None:
    rig = _open()
    for _ in range(3):
        syncs = sum(isinstance(step, Sync) for step in rig.disk.trace.operations)

        rig.append()

        assert sum(isinstance(step, Sync) for step in rig.disk.trace.operations) > syncs


@pytest.mark.parametrize("durability", [FSYNC, DISK, MEMORY])
def test_a_restart_never_begins_at_offset_0_again(durability: Durability) -> None:
    rig = _open(durability)
    rig.append(3)

    for state in crash_states(rig.disk.trace):
        again = after(state, durability).open()
        again.append()

        assert again.wal.head > 3


def test_a_torn_tail_is_cut_so_that_later_appends_are_reachable() -> None:
    rig = _open()
    rig.append()
    file = rig.disk.open(_newest(rig), writable=True)
    file.write_at(b"half a frame", file.size())

    again = _reopen(rig)
    again.append()
    last = _reopen(again)

    assert again.shard.decision.torn_bytes == 12
    assert _offsets(last.reading()) == [0, 1]
    assert any("aside" in call.path for call in rig.disk.calls), "what is cut is kept"


def test_160_zero_bytes_are_not_ten_records() -> None:
    rig = _open()
    rig.append()
    file = rig.disk.open(_newest(rig), writable=True)
    file.write_at(bytes(160), file.size())

    again = _reopen(rig)

    assert _offsets(again.reading()) == [0]
    assert again.shard.decision.torn_bytes == 160


def test_2000_messages_appended_at_once_are_readable_from_0() -> None:
    rig = _open(settings=LARGE)
    rig.append(2000, size=100)

    for reader in (rig, _reopen(rig)):
        assert _offsets(reader.reading()) == list(range(2000))
        assert _offsets(reader.reading(bytes_max=1)) == list(range(2000))


def test_one_flipped_bit_in_mid_log_does_not_cut_the_acknowledged_records_behind_it() -> None:
    rig = _open()
    for _ in range(5):
        rig.append()
    file = rig.disk.open(_newest(rig), writable=True)
    place = file.size() // 2
    file.write_at(bytes([file.read_at(1, place)[0] ^ 1]), place)

    again = _reopen(rig)
    reading = again.reading()

    assert [gap.reason for gap in reading.gaps] == [Reason.DAMAGED]
    assert len(reading.records) == 4 and _offsets(reading)[-1] == 4
    assert again.shard.decision.damage == tuple(reading.gaps)
    assert again.shard.decision.torn_bytes == 0


def test_a_reservation_is_not_lost_by_a_rotation() -> None:
    rig = _open(DISK)
    rig.append(7)
    rig.append()
    reserved = rig.wal.writer.reserved_end

    rig.wal.rotate()

    state = next(crash_states(rig.disk.trace, damages=(CrashDamage.OLD,)))
    again = after(state, DISK).open()
    assert again.wal.offsets().next >= reserved


def test_a_lost_tail_is_never_read_silently() -> None:
    """Given `disk` records that a power cut took; when more are appended; then a reader meets the gap by name."""
    rig = _open(DISK)
    rig.append(2)
    rig.flush()
    rig.append(2)
    state = next(crash_states(rig.disk.trace, damages=(CrashDamage.OLD,)))

    again = after(state, DISK).open()
    again.append()
    reading = again.reading()

    assert reading.gaps == [Gap(2, 8, Reason.LOST)]
    assert _offsets(reading) == [0, 1, 8]


def test_recovery_reads_no_byte_of_sealed_segments() -> None:
    rig = _open()
    for _ in range(4):
        rig.append(3, size=200)
        rig.wal.rotate()
    rig.shard.upkeep.seal_rotated()
    rig.append()
    rig.shard.upkeep.close()
    sealed = {file.path for file in rig.wal.files.all if isinstance(file, SealedFile)}
    before = rig.disk.calls_reached

    again = _reopen(rig)

    assert len(sealed) == 4
    opened = {call.path for call in rig.disk.calls[before:] if call.kind in ("open", "read")}
    assert not opened & sealed
    assert not {path for path in opened if path.endswith(".idx")}
    assert _offsets(again.reading()) == list(range(13))


def test_opening_after_a_clean_stop_writes_nothing() -> None:
    rig = _open()
    rig.append()
    rig.shard.upkeep.close()
    operations = len(rig.disk.trace)

    again = _reopen(rig)
    again.shard.upkeep.close()

    assert again.shard.decision.clean
    written = [type(step).__name__ for step in rig.disk.trace.operations[operations:]]
    assert set(written) <= {"SyncDirectory"}


def test_a_slow_reader_falls_back_to_files_and_holds_nothing_up() -> None:
    rig = _open(settings=msgspec.structs.replace(SMALL, rotate_bytes_max=1 << 20))
    limits = {"cache": rig.settings.cache_bytes_max, "queue": rig.settings.queue_bytes_max}
    for _ in range(200):
        rig.append(size=100)
        assert list(bounded({"cache": rig.wal.tail.cache.bytes, "queue": rig.wal.queue.bytes}, limits)) == []

    assert rig.wal.tail.cache.frames_from(0, 1) == []
    assert _offsets(rig.reading()) == list(range(200))


def test_a_waiting_reader_is_woken_and_pulls_by_offset() -> None:
    rig = _open()
    woken = threading.Event()
    rig.wal.tail.wakers.add(woken.set)

    rig.append(3)

    assert woken.is_set()
    assert rig.wal.wait(2, timeout=0)
    assert not rig.wal.wait(3, timeout=0)


def test_a_waker_that_fails_fails_no_other() -> None:
    rig = _open()

    def fail() -> None:
        raise RuntimeError("the loop is closed")

    rig.wal.tail.wakers.add(fail)

    assert rig.append() is AppendOutcome.ACKED
    assert rig.wal.failure is None


def test_a_reader_in_mid_file_goes_on_when_the_file_is_re_framed_under_it() -> None:
    rig = _open()
    for _ in range(6):
        rig.append(size=50)
    rig.wal.rotate()
    rig.append()
    rig.wal.tail.cache.clear()
    page = rig.read(0, bytes_max=1)
    plan = rig.wal.files.all

    rig.shard.upkeep.seal_rotated()
    rig.disk.release_idle()

    assert isinstance(plan[0], LogFile) and isinstance(rig.wal.files.all[0], SealedFile)
    rest = rig.read(page.next)
    assert rest.batches[0].base == page.next
    assert _offsets(rig.reading()) == list(range(7))


def test_a_re_framing_that_fails_after_its_rename_is_followed_by_readers_and_finished_later() -> None:
    """From a review: the handle of the old file was stale for ever, so reads failed and it was never sealed."""
    rig = _open()
    for _ in range(6):
        rig.append(size=50)
    rig.wal.rotate()
    rig.append()
    rig.disk.fail_when(lambda call: call.kind == "sync_directory", 5, times=1)

    rig.shard.upkeep.seal_rotated()
    rig.disk.release_idle()
    rig.wal.tail.cache.clear()

    assert _offsets(rig.reading()) == list(range(7))
    rig.shard.upkeep.seal_rotated()
    assert isinstance(rig.wal.files.all[0], SealedFile)
    assert _offsets(rig.reading()) == list(range(7))


@pytest.mark.parametrize("left", [0, 70, 300, 350])
def test_a_file_cut_under_an_open_reader_gives_a_damaged_range_and_no_hang(left: int) -> None:
    rig = _open()
    for _ in range(4):
        rig.append(size=40)
    rig.wal.tail.cache.clear()
    rig.disk.open(_newest(rig), writable=True).truncate(left)

    reading = rig.reading()

    assert reading.end == 4
    assert reading.gaps and reading.gaps[-1].stop == 4
    assert {gap.reason for gap in reading.gaps} == {Reason.DAMAGED}


def test_an_overwritten_checkpoint_changes_no_fact() -> None:
    rig = _open()
    rig.append(3)
    rig.wal.rotate()
    rig.append()
    rig.shard.upkeep.close()
    whole = _reopen(rig).reading()
    rig.disk.unlink(f"{DIRECTORY}/checkpoint")

    assert _reopen(rig).reading() == whole


def test_time_look_up_is_exact_to_the_millisecond_and_out_of_order() -> None:
    rig = _open()
    start = rig.clock.now_ms()
    for step in (5, 3, 9, 1):
        rig.clock.jump(start + step - rig.clock.now_ms())
        rig.append()
    rig.wal.rotate()
    rig.append()
    answers = [rig.wal.offset_at_time(start + step) for step in (0, 4, 5, 6, 9, 10)]

    assert answers == [0, 0, 0, 2, 2, None]
    rig.shard.upkeep.seal_rotated()
    assert [rig.wal.offset_at_time(start + step) for step in (0, 4, 5, 6, 9, 10)] == answers
    assert [_reopen(rig).wal.offset_at_time(start + step) for step in (0, 4, 5, 6, 9, 10)] == answers


def test_replies_of_merged_writes_are_never_mixed_up() -> None:
    rig = _open()

    outcomes = rig.group(1, 3, 1, 2)

    assert outcomes == [AppendOutcome.ACKED] * 4
    assert check_log(rig.history(), rig.reading()) == []


def test_an_acknowledgement_callback_that_fails_fails_no_other_append() -> None:
    """From a review: the callback of an append on a closed event loop raised into the commit of everybody else."""
    rig = _open()
    (_, first), (attempt, second) = rig.stage(), rig.stage()

    def fail(_: object) -> None:
        raise RuntimeError("the loop is closed")

    first.callback = fail  # type: ignore[union-attr]

    assert rig.hear(attempt, second) is AppendOutcome.ACKED
    assert rig.wal.failure is None


def test_a_half_made_file_is_gone_before_the_present_one_grows() -> None:
    """From a review: a rotation that failed after its rename left a newer file, which voided later records."""
    rig = _open(DISK)
    rig.append(2)
    rig.disk.fail_when(lambda call: call.kind == "sync_directory", 5, times=1)
    with pytest.raises(Exception, match="no new log file"):
        rig.wal.rotate()

    rig.append(2)

    again = _reopen(rig)
    assert check_log(again.history(), again.reading()) == []
    assert _offsets(again.reading()) == [0, 1, 2, 3]
