"""Faults in several files at once: what is left still proves which records had been durable, and it is believed.

One missing or old file beside another that is damaged is how a restored backup, a failing disk or a careless clean-up
looks. `live` and `checkpoint` only repeat what the log says, so without both of them the log's own durable marks count.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Final, NamedTuple

import pytest

from forebay.disk import write_all
from forebay.errors import ForebayError
from forebay.format.checksum import salted
from forebay.format.files.checkpoint import Checkpoint, decode_checkpoint
from forebay.format.files.live import Live, decode_live
from forebay.format.files.segment import HEADER_BYTES, SegmentHeader, decode_header
from forebay.format.frame.head import Kind
from forebay.format.frame.scan import scan_frames
from forebay.sealed import FRAME_BYTES_LIMIT
from forebay.testing.checks.history import ShardEvents
from forebay.testing.checks.invariants import Violation, check_log, damage_is_reported, nothing_fabricated
from forebay.topics import Durability
from tests.ledger import Ledger
from tests.support.soak import sampled
from tests.wal.rig import DIRECTORY, Rig, Simulated, simulated
from tests.wal.test_damage import Shard, judge, reading_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # far more than needed: a shared machine may be busy

ONE_IN: Final = 3
"""In a normal run one in so many pairs of faults is tried; in a soak run all."""
NEWEST: Final = "newest segment"
ROTATED: Final = "rotated segment"
SEALED: Final = "sealed segment"
INDEX: Final = "index"
LIVE: Final = "live"
CHECKPOINT: Final = "checkpoint"
SEGMENTS: Final = (SEALED, ROTATED, NEWEST)


class Frame(NamedTuple):
    """A frame of a segment: where it stands, and what it says."""

    start: int
    stop: int
    kind: int
    end: int
    durable: int


class Fault(NamedTuple):
    """One file as it is found."""

    what: str
    file: str
    content: bytes | None
    hits: int = 0
    """The first byte that is not as it was written."""
    cuts: bool = False
    """Nothing from there on is left."""


class Past(NamedTuple):
    """A shard whose process has ended, and the contents that some of its files had earlier."""

    shard: Shard
    earlier: dict[str, bytes]
    frames: dict[str, list[Frame]]
    end: int

    def content(self, file: str) -> bytes:
        return self.shard.image.files[self.shard.kinds[file]]


@cache
def past(durability: Durability, *, stopped: bool) -> Past:
    """Sealed, rotated and active segments, after a clean stop or as a killed process leaves them."""
    rig = Rig(simulated(), durability).open()
    for _ in range(3):
        rig.append(size=20)
    rig.append(2, producing=(1, 0))
    rig.wal.rotate()
    rig.append(2)
    rig.shard.upkeep.seal_rotated()
    volume = rig.disk.volume
    earlier = {name: _content(rig, name) for name in (LIVE, CHECKPOINT)}
    rig.wal.rotate()
    rig.append()
    rig.shard.upkeep.seal_rotated()
    rig.append(2)
    rig.wal.rotate()
    rig.append()
    rig.append(2)
    rig.append(producing=(1, 1))
    rig.flush()
    if stopped:
        rig.wal.close()
        # As a clean stop does, but for the rotated segment, which stays without its index.
        rig.shard.upkeep.write_checkpoint(clean=True)
    names = rig.disk.list_directory(DIRECTORY)
    segments = sorted(name for name in names if name.endswith(".seg"))
    indexes = sorted(name for name in names if name.endswith(".idx"))
    assert (len(segments), len(indexes)) == (4, 2), "two sealed, one rotated, one active"
    earlier[INDEX] = _content(rig, indexes[1])
    files = dict(zip((SEALED, "other sealed segment", ROTATED, NEWEST), segments, strict=True))
    files |= {INDEX: indexes[0], LIVE: LIVE, CHECKPOINT: CHECKPOINT}
    kinds = {kind: volume.find(f"{DIRECTORY}/{name}") for kind, name in files.items()}
    frames = {kind: _frames(_content(rig, files[kind])) for kind in SEGMENTS}
    return Past(Shard(rig.events, volume.image(), kinds), earlier, frames, rig.wal.head)


def _content(rig: Simulated, name: str) -> bytes:
    volume = rig.disk.volume
    return volume.image().files[volume.find(f"{DIRECTORY}/{name}")]


def _frames(content: bytes) -> list[Frame]:
    header = decode_header(content[:HEADER_BYTES])
    assert isinstance(header, SegmentHeader)
    scan = scan_frames(content, HEADER_BYTES, salted(header.salt), FRAME_BYTES_LIMIT)
    assert scan.stop == len(content)
    return [
        Frame(position, position + head.length, head.kind, head.end, head.durable)
        for head, position in zip(scan.heads, scan.positions, strict=True)
    ]


def beside(one: Past, file: str) -> list[Fault]:
    """A file beside the segments: as it was, missing, as it was earlier, with one bit flipped."""
    content = one.content(file)
    return [
        Fault("whole", file, content),
        Fault("missing", file, None),
        Fault("old", file, one.earlier[file]),
        Fault("flipped", file, _flipped(content, len(content) // 2)),
    ]


def of_segment(one: Past, file: str) -> Iterator[Fault]:
    """A segment with a bit flipped at telling places of each frame, cut inside each frame, or missing."""
    content = one.content(file)
    for place in (0, 20):
        yield Fault(f"flip at {place}", file, _flipped(content, place), place)
    for frame in one.frames[file]:
        for place in (frame.start, frame.start + 9, frame.stop - 1):
            yield Fault(f"flip at {place}", file, _flipped(content, place), frame.start)
        place = (frame.start + frame.stop) // 2
        yield Fault(f"cut at {place}", file, content[:place], frame.start, cuts=True)
    yield Fault("missing", file, None, cuts=True)


def _around(one: Past, segment: str) -> list[tuple[Fault, ...]]:
    """The states of the other files that a fault of `segment` meets: those that show something of this segment."""
    live, checkpoint = beside(one, LIVE), beside(one, CHECKPOINT)
    if segment != SEALED:
        return list(itertools.product(live, checkpoint))
    # The newest segment is whole, so `live` adds nothing: each of its states comes once.
    return [(*both, index) for both in zip(live, checkpoint, strict=True) for index in beside(one, INDEX)]


def _flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :]


def _proven(one: Past, faults: Sequence[Fault]) -> int:
    """Up to which offset something that is still whole says that the log had been durable."""
    proven = 0
    for fault in faults:
        if fault.content is not None:
            found = decode_live(fault.content) if fault.file == LIVE else decode_checkpoint(fault.content)
            proven = max(proven, found.durable if isinstance(found, Live | Checkpoint) else 0)
    hits = {fault.file: fault for fault in faults if fault.file in SEGMENTS}
    for file in SEGMENTS:
        proven = max([proven, *(frame.durable for frame in one.frames[file] if not _is_hit(frame, hits.get(file)))])
    return proven


def _is_hit(frame: Frame, fault: Fault | None) -> bool:
    if fault is None:
        return False
    return frame.start == fault.hits or (fault.cuts and frame.start > fault.hits)


def judge_together(one: Past, faults: Sequence[Fault], durability: Durability) -> tuple[str, list[Violation]]:
    """Open and read. Where nothing that is left proves the newest records, only what is proven must be reported."""
    changed = {one.shard.kinds[fault.file]: fault.content for fault in faults}
    proven = _proven(one, faults)
    unproven = [frame for frame in one.frames[NEWEST] if frame.kind == Kind.DATA and frame.end > proven]
    if not any(_is_hit(frame, fault) for frame in unproven for fault in faults if fault.file == NEWEST):
        return judge(one.shard, changed, durability)
    history = ShardEvents(durability, one.shard.events)
    try:
        rig = Rig(one.shard.disk(changed), durability, epoch=5).open()
        reading = reading_of(rig)
    except ForebayError as error:
        return "named error", [] if str(error) else [Violation("I12", "an error without a message")]
    violations = [*nothing_fabricated(history, reading), *damage_is_reported(history, reading, proven)]
    return "newest unproven", violations


CASES: Final = [
    pytest.param(durability, stopped, id=f"{durability.value}, {'stopped' if stopped else 'killed'}")
    for durability in (Durability.FSYNC, Durability.DISK)
    for stopped in (True, False)
]


@pytest.mark.parametrize(("durability", "stopped"), CASES)
@pytest.mark.parametrize("segment", SEGMENTS)
def test_a_damaged_segment_is_reported_whatever_else_is_missing(
    segment: str, durability: Durability, *, stopped: bool, ledger: Ledger
) -> None:
    """Every fault of a segment with every state of the files beside it."""
    one = past(durability, stopped=stopped)
    broken: list[str] = []
    together = itertools.product(of_segment(one, segment), _around(one, segment))
    for fault, rest in sampled(together, one_in=ONE_IN, seed=f"{segment} {durability} {stopped}"):
        outcome, violations = judge_together(one, [fault, *rest], durability)
        ledger.count("damaged together", file=segment, outcome=outcome)
        found = ", ".join(f"{each.file} {each.what}" for each in [fault, *rest])
        broken += [f"{found}: {violation}" for violation in violations]
    assert broken[:10] == []


@pytest.mark.parametrize(("durability", "stopped"), CASES)
@pytest.mark.parametrize("pair", list(itertools.combinations(SEGMENTS, 2)), ids=" and ".join)
def test_two_damaged_segments_are_both_reported(
    pair: tuple[str, str], durability: Durability, *, stopped: bool, ledger: Ledger
) -> None:
    """The first flip, cut and loss of each frame, without the files beside the log."""
    one = past(durability, stopped=stopped)
    gone = [Fault("missing", LIVE, None), Fault("missing", CHECKPOINT, None)]
    broken: list[str] = []
    both = itertools.product(*(list(of_segment(one, file))[::2] for file in pair))
    for first, second in sampled(both, one_in=ONE_IN, seed=f"{pair} {durability} {stopped}"):
        outcome, violations = judge_together(one, [first, second, *gone], durability)
        ledger.count("damaged together", file=" and ".join(pair), outcome=outcome)
        broken += [f"{first.file} {first.what}, {second.file} {second.what}: {violation}" for violation in violations]
    assert broken[:10] == []


def test_frames_that_the_next_file_has_voided_are_not_read() -> None:
    """I10: the next file says where the one before it ended; a failed append behind that place counts for nothing."""
    rig, longer = (Rig(simulated(), Durability.FSYNC).open() for _ in range(2))
    for _ in range(3):
        rig.append()
        longer.append()
    longer.append(2)
    rig.wal.rotate()
    rig.append()
    name = longer.disk.list_directory(DIRECTORY)[0]
    path = f"{DIRECTORY}/{name}"
    write_all(rig.disk.open(path, writable=True), _content(longer, name), 0)

    again = Rig(rig.disk, Durability.FSYNC, epoch=rig.epoch).open()

    assert [offset for offset, _ in again.reading().records] == [0, 1, 2, 3]
    assert check_log(rig.history(), again.reading()) == []
    assert [(file.start, file.end) for file in again.wal.files.all] == [(0, 3), (3, 4)]
