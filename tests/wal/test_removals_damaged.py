"""Damaged bytes in the file that records deletes and floors: one bad place never brings a record back."""

from __future__ import annotations

import itertools
from typing import Final

import pytest

from forebay.errors import ForebayError
from forebay.format.checksum import salted
from forebay.format.control.frames import Floor
from forebay.format.control.offsets import OffsetSet
from forebay.format.files.segment import HEADER_BYTES, SegmentHeader, decode_header
from forebay.format.frame.head import HEAD_SIZE, FrameHead
from forebay.format.frame.scan import scan_frames
from forebay.inspection.findings import Report, Severity
from forebay.inspection.segments import SegmentExam
from forebay.records import Reason
from forebay.sealed import FRAME_BYTES_LIMIT
from forebay.testing.simulated.disk import ROOMY, SimulatedDisk
from forebay.testing.simulated.trace import Image, Trace
from forebay.topics import Durability
from forebay.wal.recovery.survey import CHECKPOINT_NAME
from forebay.wal.removals import KINDS, Removals
from tests.ledger import Ledger
from tests.support.soak import sampled
from tests.wal.removals import delete, move_floor
from tests.wal.rig import DIRECTORY, Rig, Simulated, simulated

FLIPS: Final = (0x01, 0xFF)
DELETED: Final = {1, 3, 4, 7}
FLOOR: Final = Floor(1, 1, Reason.CAP)


def _image(*, restated: bool, closed: bool) -> tuple[Image, int]:
    """A shard in which records ended, and the file that says so."""
    rig = Rig(simulated(), Durability.FSYNC).open()
    rig.append(5)
    delete(rig, 1, 3)
    move_floor(rig, 1, 1)
    if restated:
        rig.wal.rotate()
    rig.append(3)
    delete(rig, 4)
    rig.append()
    delete(rig, 7)
    if closed:
        rig.shard.upkeep.close()
    volume = rig.disk.volume
    newest = max(name for name in rig.disk.list_directory(DIRECTORY) if name.endswith(".seg"))
    return volume.image(), volume.find(f"{DIRECTORY}/{newest}")


@pytest.mark.slow
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("restated", [False, True])
def test_one_damaged_place_brings_back_no_deleted_record(*, restated: bool, closed: bool, ledger: Ledger) -> None:
    """I23, I24: every record is there or named as damaged, and what ended has ended."""
    image, inode = _image(restated=restated, closed=closed)
    content = image.files[inode]
    reported = [range(at, stop) for at, stop, head in _places(image, inode) if head.kind in KINDS]
    broken: list[str] = []
    flips = itertools.product(range(len(content)), FLIPS)
    for place, flip in sampled(flips, one_in=len(FLIPS), seed=f"{restated} {closed}"):
        damaged = content[:place] + bytes([content[place] ^ flip]) + content[place + 1 :]
        changed = Image(files={**image.files, inode: damaged}, directories=image.directories)
        disk = SimulatedDisk.restored(changed, Trace(start=changed), free=ROOMY, next_inode=1_000)
        try:
            rig = Rig(disk, Durability.FSYNC, epoch=5).open()
            found = rig.wal.writer.removals
        except ForebayError:
            ledger.count("damaged bytes where deletes stand", outcome="named error")
            continue
        ledger.count("damaged bytes where deletes stand", outcome="intact")
        # Of another frame whose head is damaged it is not known that it was no delete.
        alarmed = bool(rig.shard.decision.undone) and any(place in frame for frame in reported)
        if (set(found.deletes), found.floor) != (DELETED, FLOOR) or alarmed:
            broken.append(f"flip {flip:02x} at byte {place} of {len(content)}: {set(found.deletes)}, {found.floor}")
    assert broken[:10] == []


def _places(image: Image, inode: int) -> list[tuple[int, int, FrameHead]]:
    """Every frame of a file: its byte, the byte behind it, its head."""
    content = image.files[inode]
    header = decode_header(content[:HEADER_BYTES])
    assert isinstance(header, SegmentHeader)
    scan = scan_frames(content, HEADER_BYTES, salted(header.salt), FRAME_BYTES_LIMIT)
    return [(at, at + head.length, head) for at, head in zip(scan.positions, scan.heads, strict=True)]


def _without(image: Image, inode: int, *places: int) -> SimulatedDisk:
    """The disk with a flipped byte in the payload of each of these frames."""
    content = bytearray(image.files[inode])
    for place in places:
        content[place + HEAD_SIZE] ^= 0xFF
    changed = Image(files={**image.files, inode: bytes(content)}, directories=image.directories)
    return SimulatedDisk.restored(changed, Trace(start=changed), free=ROOMY, next_inode=1_000)


def _opened(image: Image, inode: int) -> Simulated:
    return Rig(_without(image, inode), Durability.FSYNC, epoch=5).open()


def _ended(rig: Simulated) -> tuple[Floor, list[int]]:
    return rig.shard.deletes.floor, sorted(rig.shard.deletes.deleted)


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("restated", [False, True])
def test_a_delete_of_which_both_copies_are_damaged_is_named(*, restated: bool, closed: bool, ledger: Ledger) -> None:
    """Never in silence: at the opening and by `verify`, once anything proves that it had been durable.

    The checkpoint of a clean stop records deletes, too: with it they hold, and only `verify` names the damage.
    """
    image, inode = _image(restated=restated, closed=closed)
    frames = _places(image, inode)
    reported = [(at, stop) for at, stop, head in frames if head.kind in KINDS]
    pairs = [(one, other) for one, other in itertools.pairwise(reported) if _same(image, inode, one, other)]
    assert len(pairs) >= 2
    for one, other in pairs:
        disk = _without(image, inode, one[0], other[0])
        ends = other[1] == frames[-1][1]
        is_proven = closed or any(head.durable > frames_end(frames, one[0]) for at, _, head in frames if at > other[0])

        exam = Report()
        file = disk.open(_newest(disk))
        header = decode_header(file.read_at(HEADER_BYTES, 0))
        assert isinstance(header, SegmentHeader)
        SegmentExam(disk, DIRECTORY, file.path.rpartition("/")[2], "t[0]", exam).log(
            file, header, size=file.size(), proof=0, published=False
        )
        file.close()
        if closed:
            trusting = Rig(_without(image, inode, one[0], other[0]), Durability.FSYNC, epoch=5).open()
            assert not trusting.shard.decision.undone and _ended(trusting) == _ended(_opened(image, inode))
            disk.unlink(f"{DIRECTORY}/{CHECKPOINT_NAME}")
        rig = Rig(disk, Durability.FSYNC, epoch=5).open()

        if ends:
            assert rig.shard.decision.torn_bytes, "nothing shows that it had been there: set aside"
            continue
        (place,) = rig.shard.decision.undone
        assert (place.byte, place.bytes, place.proven) == (one[0], other[1] - one[0], is_proven)
        assert f"damaged at byte {one[0]}: deletes that stood there are undone" in str(rig.shard.decision)
        errors = [finding.byte for finding in exam.findings if finding.severity is Severity.ERROR]
        assert errors == ([one[0]] if is_proven else [])
        assert [finding.byte for finding in exam.findings] == [one[0]]
        ledger.count("damaged bytes where deletes stand", outcome="named")


@pytest.mark.parametrize("which", [0, 1])
def test_of_changes_that_take_several_frames_one_copy_is_enough(which: int) -> None:
    """A delete and a floor in one change: both, and both again."""
    rig = Rig(simulated(), Durability.FSYNC).open()
    rig.append(5)
    rig.wal.remove(Removals(OffsetSet.of([1, 3]), Floor(1, 1, Reason.CAP)))
    delete(rig, 2)
    rig.append(3)
    volume = rig.disk.volume
    image, inode = volume.image(), volume.find(_newest(rig.disk))
    reported = [at for at, _, head in _places(image, inode) if head.kind in KINDS]
    assert len(reported) == 6

    half = reported[2 * which : 2 * which + 2]
    one = Rig(_without(image, inode, *half), Durability.FSYNC, epoch=5).open()
    both = Rig(_without(image, inode, *reported[1:4]), Durability.FSYNC, epoch=5).open()
    other = Rig(_without(image, inode, *reported[4:6]), Durability.FSYNC, epoch=5).open()

    assert one.shard.decision.undone == ()
    assert set(one.wal.writer.removals.deletes) == {1, 2, 3}
    assert [place.byte for place in both.shard.decision.undone] == [reported[1]]
    assert [place.byte for place in other.shard.decision.undone] == [reported[4]]


def test_a_copy_whose_other_is_damaged_hides_no_damage_behind_it() -> None:
    rig = Rig(simulated(), Durability.FSYNC).open()
    rig.append(5)
    for offset in (1, 2, 3):
        delete(rig, offset)
    rig.append(3)
    volume = rig.disk.volume
    image, inode = volume.image(), volume.find(_newest(rig.disk))
    reported = [at for at, _, head in _places(image, inode) if head.kind in KINDS]

    found = Rig(_without(image, inode, reported[0], *reported[4:6]), Durability.FSYNC, epoch=5).open()

    assert set(found.wal.writer.removals.deletes) == {1, 2}
    assert [place.byte for place in found.shard.decision.undone] == [reported[4]]


def _same(image: Image, inode: int, one: tuple[int, int], other: tuple[int, int]) -> bool:
    content = image.files[inode]
    return one[1] == other[0] and content[slice(*one)] == content[slice(*other)]


def frames_end(frames: list[tuple[int, int, FrameHead]], byte: int) -> int:
    """The offset that the log has reached at a byte."""
    return max((head.end for at, _, head in frames if at < byte), default=0)


def _newest(disk: SimulatedDisk) -> str:
    return f"{DIRECTORY}/{max(name for name in disk.list_directory(DIRECTORY) if name.endswith('.seg'))}"
