"""A log that was closed in order opens without a walk; whatever speaks against that makes the opening walk it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random  # noqa: TID251  # seeded: the same run again
from typing import Final

import msgspec
import pytest

from forebay.errors import Conflict, Corrupt
from forebay.format.files.checkpoint import Checkpoint, decode_checkpoint, encode_checkpoint
from forebay.format.files.segment import HEADER_BYTES
from forebay.records import Gap, Reason
from forebay.settings import WalSettings
from forebay.testing.checks.invariants import check_log
from forebay.testing.simulated.crashes import explore
from forebay.testing.simulated.disk import SimulatedDisk, SimulatedFile
from forebay.topics import Durability
from forebay.wal.recovery.survey import Survey, survey
from tests.wal.removals import delete, move_floor
from tests.wal.rig import DIRECTORY, Rig, Simulated, after, simulated

LARGE: Final = WalSettings(
    free_bytes_min=0, rotate_bytes_max=64 << 20, reserve_records_min=8, cache_bytes_max=4096, producer_appends_max=4
)
RECORDS: Final = 300
SIZE: Final = 4000


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes read so far, by the last part of the path."""
    counts: dict[str, int] = {}
    inner = SimulatedFile.read_at

    def read_at(self: SimulatedFile, length: int, position: int) -> bytes:
        data = inner(self, length, position)
        name = self.path.rpartition("/")[2]
        counts[name] = counts.get(name, 0) + len(data)
        return data

    monkeypatch.setattr(SimulatedFile, "read_at", read_at)
    return counts


def written(durability: Durability = Durability.DISK) -> Simulated:
    """A shard with one file of more than a megabyte, closed in order."""
    rig = Rig(simulated(), durability, settings=LARGE).open()
    for number in range(RECORDS):
        rig.append(size=SIZE, producing=(7, number // 50) if number % 50 == 0 else None)
        rig.clock.advance(1)
    delete(rig, 3, 5)
    move_floor(rig, 2)
    rig.shard.upkeep.close()
    return rig


def newest(disk: SimulatedDisk) -> str:
    return f"{DIRECTORY}/{max(name for name in disk.list_directory(DIRECTORY) if name.endswith('.seg'))}"


def size_of(disk: SimulatedDisk, path: str) -> int:
    return disk.open(path).size()


def changed(disk: SimulatedDisk, path: str, change: Callable[[bytearray], object]) -> None:
    """Change the bytes of a file, as a failing disk or an operator does."""
    file = disk.open(path, writable=True)
    data = bytearray(file.read_at(file.size(), 0))
    change(data)
    file.truncate(0)
    file.write_at(bytes(data), 0)
    file.sync()


def flip(position: int) -> Callable[[bytearray], object]:
    def change(data: bytearray) -> None:
        data[position] ^= 0x10

    return change


@pytest.mark.parametrize("durability", [Durability.DISK, Durability.FSYNC, Durability.MEMORY])
def test_a_clean_stop_opens_without_a_walk_and_everything_is_there(
    read_bytes: dict[str, int], durability: Durability
) -> None:
    rig = written(durability)
    path = newest(rig.disk)
    known = rig.wal.writer.window.last_sequence(7)
    for _ in range(2):
        read_bytes.clear()
        rig.open()
        assert sum(read_bytes.values()) < 20_000 < size_of(rig.disk, path) // 50
        assert rig.shard.decision.clean and rig.shard.decision.exact and rig.wal.offsets().next == RECORDS

        assert rig.wal.writer.window.last_sequence(7) == known
        assert (rig.shard.deletes.floor.earliest, sorted(rig.shard.deletes.deleted)) == (2, [3, 5])
        rig.shard.upkeep.close()
    rig.open()
    reading = rig.reading()
    assert [offset for offset, _ in reading.records] == list(range(RECORDS)) and not reading.gaps
    for offset in (0, 17, RECORDS - 1):
        read_bytes.clear()
        page = rig.read(offset, 1)
        assert page.batches[0].base == offset
        assert sum(read_bytes.values()) < 300_000
    assert rig.shard.offset_at_time(rig.clock.now_ms() - 2000) == RECORDS - 2


def test_repeats_after_a_clean_stop_get_their_offset_and_older_ones_a_conflict(read_bytes: dict[str, int]) -> None:
    rig = written()
    read_bytes.clear()
    rig.open()
    assert sum(read_bytes.values()) < 20_000

    _, ticket = rig.stage(1, producing=(7, 5), size=SIZE)
    assert not isinstance(ticket, Exception) and rig.wal.acknowledge(ticket) == 250
    assert isinstance(rig.stage(1, producing=(7, 0), size=SIZE)[1], Conflict)
    assert rig.wal.offsets().next == RECORDS


def test_what_is_written_behind_a_clean_stop_is_walked_and_the_next_stop_is_clean_again(
    read_bytes: dict[str, int],
) -> None:
    rig = written()
    rig.open()
    rig.append(size=SIZE)
    path, disk = newest(rig.disk), rig.disk
    killed = next(iter(explore(disk.trace, [len(disk.trace.operations)], states_max=1))).disk()
    rig.shard.upkeep.close()

    for state, is_walked in ((killed, True), (disk, False)):
        read_bytes.clear()
        again = Rig(state, Durability.DISK, epoch=rig.epoch, settings=LARGE).open()
        assert (sum(read_bytes.values()) > size_of(state, path)) == is_walked
        assert again.wal.offsets().next >= RECORDS + (0 if is_walked else 1)
        assert len(again.reading().records) >= RECORDS


def facts_of(disk: SimulatedDisk, settings: WalSettings, *, trusting: bool) -> Survey:
    return survey(disk, DIRECTORY, settings, trusting=trusting)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_reported_is_what_a_walk_finds(seed: int) -> None:
    """Random lives, each ended in order or by a crash: an opening that trusts knows what one that walks does."""
    random = Random(seed)
    rig = Rig(simulated(), random.choice([Durability.DISK, Durability.FSYNC]), settings=LARGE)
    sequences = [0, 0, 0]
    for _ in range(4):
        rig.open()
        for _ in range(random.randrange(12)):
            match random.randrange(7):
                case 0 | 1 | 2:
                    rig.append(random.randrange(1, 4), size=random.choice([0, 100, 70_000]))
                case 3:
                    producer = random.randrange(3)
                    rig.append(producing=(producer + 1, sequences[producer]))
                    sequences[producer] += 1
                case 4 if rig.wal.head:
                    delete(rig, random.randrange(rig.wal.head))
                case 5 if rig.wal.head:
                    move_floor(rig, random.randrange(rig.wal.head))
                case 6 if random.random() < 0.3:
                    rig.wal.rotate()
        if random.random() < 0.5:
            rig.shard.upkeep.close()
        else:
            rig.disk.boot = f"boot-{random.random()}"
    rig.open().append()
    rig.shard.upkeep.close()

    reported, walked = (facts_of(rig.disk, LARGE, trusting=trusting) for trusting in (True, False))

    assert reported.last is not None and walked.last is not None
    assert reported.last.state is not None and reported.last.state.identity == "", "it was walked"
    assert (reported.end, reported.epoch, reported.clean, reported.damage) == (
        walked.end,
        walked.epoch,
        walked.clean,
        walked.damage,
    )
    assert (reported.begins, reported.reserved_end) == (walked.begins, walked.reserved_end)
    assert list(reported.window.entries()) == list(walked.window.entries())
    for name in ("frames", "gaps", "previous_end", "stop", "closed", "opened", "durable", "torn_bytes"):
        assert getattr(reported.last, name) == getattr(walked.last, name), name
    removals = [(last.removals.floor, sorted(last.removals.deletes)) for last in (reported.last, walked.last)]
    assert removals[0] == removals[1]
    thin, full = reported.last.index, walked.last.index
    for offset in range(reported.last.start, reported.end + 1):
        assert (thin.position_of(offset) or 0) <= (full.position_of(offset) or 0)


def _old_checkpoint(disk: SimulatedDisk) -> bytes:
    file = disk.open(f"{DIRECTORY}/checkpoint")
    return file.read_at(file.size(), 0)


def _grown(rig: Simulated) -> None:
    """Another life has appended, and a backup brought the checkpoint of the life before back."""
    stale = _old_checkpoint(rig.disk)
    rig.open().append(size=SIZE)
    rig.shard.upkeep.close()
    changed(rig.disk, f"{DIRECTORY}/checkpoint", lambda data: data.__setitem__(slice(None), stale))


def _without_last(rig: Simulated) -> None:
    """Written by a version that reported less."""
    found = decode_checkpoint(_old_checkpoint(rig.disk))
    assert isinstance(found, Checkpoint)
    older = encode_checkpoint(msgspec.structs.replace(found, last=msgspec.UNSET))
    changed(rig.disk, f"{DIRECTORY}/checkpoint", lambda data: data.__setitem__(slice(None), older))


def _unlinked(rig: Simulated) -> None:
    rig.disk.unlink(f"{DIRECTORY}/checkpoint")


def _damaged_checkpoint(rig: Simulated) -> None:
    changed(rig.disk, f"{DIRECTORY}/checkpoint", flip(40))


def _damaged_mark(rig: Simulated) -> None:
    changed(rig.disk, newest(rig.disk), flip(-3))


def _more_behind(rig: Simulated) -> None:
    changed(rig.disk, newest(rig.disk), lambda data: data.extend(bytes(24)))


def _shorter(rig: Simulated) -> None:
    changed(rig.disk, newest(rig.disk), lambda data: data.__delitem__(slice(-8, None)))


REFUSED: Final = [
    _grown,
    _without_last,
    _unlinked,
    _damaged_checkpoint,
    _damaged_mark,
    _more_behind,
    _shorter,
]


@pytest.mark.parametrize("spoil", REFUSED)
def test_what_speaks_against_a_clean_stop_makes_the_opening_walk(
    read_bytes: dict[str, int], spoil: Callable[[Simulated], None]
) -> None:
    rig = written()
    spoil(rig)
    read_bytes.clear()
    rig.open()

    assert read_bytes[newest(rig.disk).rpartition("/")[2]] > RECORDS * SIZE
    assert [offset for offset, _ in rig.reading().records][:RECORDS] == list(range(RECORDS))
    assert rig.wal.offsets().next >= RECORDS


@pytest.mark.parametrize("spoil", [None, *REFUSED])
def test_damage_in_a_closed_file_is_reported_beside_any_other_fault(spoil: Callable[[Simulated], None] | None) -> None:
    """Two faults at once: the records around the damage stay, no offset is given out twice, nothing is cut."""
    rig = written()
    place = size_of(rig.disk, newest(rig.disk)) // 2
    if spoil is not None:
        spoil(rig)
    changed(rig.disk, newest(rig.disk), flip(place))
    size = size_of(rig.disk, newest(rig.disk))
    rig.open()

    reading = rig.reading()
    lost = [offset for gap in reading.gaps for offset in range(gap.start, gap.stop) if offset < RECORDS]
    assert {gap.reason for gap in reading.gaps} <= {Reason.DAMAGED, Reason.LOST}
    assert sorted([*lost, *(offset for offset, _ in reading.records if offset < RECORDS)]) == list(range(RECORDS))
    assert 1 <= len(lost) <= 2
    assert rig.wal.offsets().next >= RECORDS
    assert size_of(rig.disk, newest(rig.disk)) >= size - 64
    rig.append(size=SIZE)
    assert rig.reading().records[-1][0] >= RECORDS


def test_a_closed_file_with_a_damaged_first_state_is_refused_at_once() -> None:
    """No later walk could use the file, so nothing more is written to it."""
    rig = written()
    changed(rig.disk, newest(rig.disk), flip(HEADER_BYTES + 60))

    with pytest.raises(Corrupt, match="no state frame"):
        rig.open()


def test_a_file_whose_damage_is_known_is_walked_at_each_opening(read_bytes: dict[str, int]) -> None:
    """So that each opening names the damage, and refuses producers whose appends it may have taken."""
    rig = written()
    changed(rig.disk, newest(rig.disk), flip(size_of(rig.disk, newest(rig.disk)) // 2))
    rig.disk.unlink(f"{DIRECTORY}/checkpoint")
    for _ in range(2):
        read_bytes.clear()
        rig.open()
        assert [gap.reason for gap in rig.shard.decision.damage] == [Reason.DAMAGED]
        assert rig.wal.writer.window.is_partial
        assert sum(read_bytes.values()) > RECORDS * SIZE
        rig.append(size=SIZE)
        rig.shard.upkeep.close()


def test_the_checkpoint_of_another_file_is_not_believed(read_bytes: dict[str, int]) -> None:
    """The name and the length fit, the salt does not."""
    rig, other = written(), Rig(simulated(), Durability.DISK, settings=LARGE, seed="other").open()
    for number in range(RECORDS):
        other.append(size=SIZE, producing=(7, number // 50) if number % 50 == 0 else None)
        other.clock.advance(1)
    delete(other, 3, 5)
    move_floor(other, 2)
    other.shard.upkeep.close()
    assert size_of(rig.disk, newest(rig.disk)) == size_of(other.disk, newest(other.disk))
    foreign = _old_checkpoint(other.disk)
    changed(rig.disk, f"{DIRECTORY}/checkpoint", lambda data: data.__setitem__(slice(None), foreign))

    read_bytes.clear()
    rig.open()

    assert sum(read_bytes.values()) > RECORDS * SIZE and len(rig.reading().records) == RECORDS


@pytest.mark.slow
@pytest.mark.parametrize("durability", [Durability.DISK, Durability.FSYNC])
def test_a_crash_in_the_life_behind_a_clean_stop_loses_nothing_promised(durability: Durability) -> None:
    rig = Rig(simulated(), durability).open()
    rig.append(2)
    rig.append(producing=(7, 0))
    delete(rig, 1)
    rig.shard.upkeep.close()
    rig.open()
    rig.append()
    rig.append(producing=(7, 1))
    rig.shard.upkeep.close()

    for state in explore(rig.disk.trace, list(rig.disk.trace.prefixes())[::5], states_max=2, names_max=2):
        recovered = after(state, durability).open()
        assert list(check_log(recovered.history(), recovered.reading())) == []
        recovered.shard.upkeep.close()
        again = after(state, durability, epoch=11).open()
        assert again.wal.offsets().next >= recovered.wal.offsets().next


def test_a_gap_behind_the_last_record_is_reported(read_bytes: dict[str, int]) -> None:
    """Offsets skipped after an unclean stop stay skipped, in a life that wrote no record, too."""
    rig = Rig(simulated(), Durability.DISK, settings=LARGE).open()
    rig.append(3, size=70_000)
    rig.disk.boot = "boot-2"
    rig.open()
    gap = rig.shard.decision.gap
    assert gap is not None
    rig.append(size=70_000)
    rig.shard.upkeep.close()

    for _ in range(2):
        read_bytes.clear()
        rig.open()
        assert read_bytes[newest(rig.disk).rpartition("/")[2]] < 10_000
        assert rig.wal.offsets().next == gap.stop + 1
        assert Gap(3, gap.stop, Reason.LOST) in rig.reading().gaps
        rig.shard.upkeep.close()
