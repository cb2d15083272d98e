"""Finds damaged control frames. They use up no offset, so a lost one leaves no gap in the sequence.

Deletes and floors are written twice, all frames of one change and then all of them again, so most such places lose
nothing. Knows frames; reads no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from forebay.format.control import decode_mark
from forebay.format.frame import HEAD_SIZE, HEADER_SIZE, FrameHead, Kind, Scan
from forebay.records import Bytes
from forebay.wal.removing import KINDS

MARK_BYTES = HEAD_SIZE + 8
"""The smallest frame; one that tells of a delete or a floor is larger."""
RUN_MAX = 512
"""So many frames behind the place are looked at."""
COPIES_MAX = 64
"""So many frames one change has at most, as far as copies are looked for."""

_LENGTH = slice(8, 12)
_KIND = 17

Copy: TypeAlias = tuple[int, int]
"""A frame that tells of deletes or floors: its length, and a hash of its bytes."""


class Blind(NamedTuple):
    """A place where a delete or a floor may have stood that is told nowhere else.

    `proven` says that the place had been durable: something acknowledged may be lost.
    """

    byte: int
    bytes: int
    offset: int
    proven: bool


class Told:
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


def is_told(before: Sequence[Copy], buffer: Bytes, behind: Scan) -> bool:
    """Whether everything in a damaged place, at the start of `buffer`, is told elsewhere or told of no delete.

    `before` is what `Told` has, `behind` are the frames from the next whole one on.
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
