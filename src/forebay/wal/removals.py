"""Deletes and floors in a shard's log: written, restated by every new file, read back, and missed where damaged.

They stand in control frames, which use up no offset, so a lost one leaves no gap in the sequence. Each change is
therefore written twice, all of its frames and then all of them again: most damaged places lose nothing. Knows frames,
nothing of the log that writes them (`Wal.remove`), of the records that ended, nor of history.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from forebay.format.control.frames import (
    NO_FLOOR,
    Floor,
    decode_delete,
    decode_floor,
    decode_mark,
    encode_delete,
    encode_floor,
    higher,
)
from forebay.format.control.offsets import OffsetSet
from forebay.format.frame.head import HEAD_SIZE, HEADER_SIZE, FrameHead, Kind
from forebay.format.frame.scan import Scan
from forebay.records import Bytes

KINDS = (Kind.DELETE, Kind.FLOOR)
MARK_BYTES = HEAD_SIZE + 8
"""The smallest frame; one with a delete or a floor is larger."""
RUN_MAX = 512
"""So many frames behind the place are looked at."""
COPIES_MAX = 64
"""So many frames one change has at most, as far as copies are looked for."""

_LENGTH = slice(8, 12)
_KIND = 17

Copy: TypeAlias = tuple[int, int]
"""A frame of deletes or floors: its length, and a hash of its bytes."""


class Removals:
    """Deletes that only the log knows of, and the floors. Both only grow, but for deletes that history has taken."""

    __slots__ = ("deletes", "floor")

    def __init__(self, deletes: OffsetSet | None = None, floor: Floor = NO_FLOOR) -> None:
        self.deletes = deletes if deletes is not None else OffsetSet()
        self.floor = floor

    @property
    def is_some(self) -> bool:
        """Whether there are any."""
        return bool(len(self.deletes)) or self.floor != NO_FLOOR

    def add(self, others: Removals) -> None:
        """These hold too."""
        self.deletes = self.deletes | others.deletes
        self.floor = higher(self.floor, others.floor)

    def take(self, head: FrameHead, buffer: bytes, position: int) -> None:
        """Note what the whole frame of one of `KINDS` at `position` says."""
        if head.kind == Kind.DELETE:
            self.deletes = self.deletes | decode_delete(buffer, position, head)
        else:
            self.floor = higher(self.floor, decode_floor(buffer, position, head))

    def frames(self, frame_bytes_max: int, stamp: dict[str, int]) -> list[bytes]:
        """Frames that say all of it, twice; none where nothing has ended.

        Where a damaged frame had no records, no missing offset shows what it said.
        """
        frames = encode_delete(self.deletes, frame_bytes_max=frame_bytes_max, **stamp)
        if self.floor != NO_FLOOR:
            frames.append(encode_floor(self.floor, **stamp))
        return [*frames, *frames]


class Blind(NamedTuple):
    """A place where a delete or a floor may have stood that no other frame repeats.

    `proven` says that the place had been durable: something acknowledged may be lost.
    """

    byte: int
    bytes: int
    offset: int
    proven: bool


class UnpairedCopies:
    """The deletes and floors at the end of what was walked, as far as their second copy has not come yet."""

    def __init__(self) -> None:
        self.copies: list[Copy] = []

    def take(self, head: FrameHead, buffer: Bytes, position: int) -> None:
        """The next whole frame."""
        if head.kind not in KINDS:
            self.copies.clear()
            return
        copies = self.copies
        copies.append(copy_of(head, buffer, position))
        for n in range(1, len(copies) // 2 + 1):
            if copies[-1 - n] == copies[-1] and copies[-2 * n : -n] == copies[-n:]:
                del copies[-2 * n :]
                return


def copy_of(head: FrameHead, buffer: Bytes, position: int) -> Copy:
    """What a frame is compared by."""
    return head.length, hash(bytes(buffer[position : position + head.length]))


def is_recorded_elsewhere(before: Sequence[Copy], buffer: Bytes, behind: Scan) -> bool:
    """Whether everything in a damaged place, at the start of `buffer`, is recorded elsewhere or was no delete.

    `before` is what `UnpairedCopies` has, `behind` are the frames from the next whole one on.
    """
    lost = behind.positions[0]
    if lost <= MARK_BYTES:
        return True
    length = int.from_bytes(buffer[_LENGTH], "little") + HEADER_SIZE
    if length == lost and buffer[_KIND] not in KINDS:
        return True
    return lost <= sum(length for length, _ in [*before, *_unpaired(_run(buffer, behind))])


def has_clean_mark(buffer: Bytes, behind: Scan) -> bool:
    """Whether the log was closed in order behind the place: all before that is durable."""
    frames = zip(behind.heads, behind.positions, strict=True)
    return any(head.kind == Kind.MARK and decode_mark(buffer, position, head) for head, position in frames)


def _run(buffer: Bytes, behind: Scan) -> list[Copy]:
    run: list[Copy] = []
    for head, position in zip(behind.heads[:RUN_MAX], behind.positions[:RUN_MAX], strict=True):
        if head.kind not in KINDS:
            break
        run.append(copy_of(head, buffer, position))
    return run


def _unpaired(run: list[Copy]) -> list[Copy]:
    """The copies at the front whose other copy is not behind them."""
    return next(run[:first] for first in range(len(run) + 1) if _is_paired(run, first))


def _is_paired(run: list[Copy], first: int) -> bool:
    """Whether from there on each change stands twice."""
    while first < len(run):
        most = min(COPIES_MAX, (len(run) - first) // 2)
        halves = (n for n in range(1, most + 1) if run[first : first + n] == run[first + n : first + 2 * n])
        found = next(halves, None)
        if found is None:
            return False
        first += 2 * found
    return True
