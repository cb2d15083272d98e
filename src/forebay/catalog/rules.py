"""The rules of a history, as pure predicates: each says what is wrong, or nothing.

Checked before every transaction, and by tests on whatever a store holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from forebay.format.metadata.descriptor import SegmentDescriptor


def no_gap(start: int, pieces: Sequence[SegmentDescriptor], end: int) -> str | None:
    """`[start, end)` is covered without anything missing; a named gap counts as covered."""
    expected = start
    for piece in pieces:
        if piece.start > expected:
            return f"[{expected}, {piece.start}) is covered by nothing"
        expected = max(expected, piece.end)
    return f"[{expected}, {end}) is covered by nothing" if expected < end else None


def no_overlap(pieces: Sequence[SegmentDescriptor]) -> str | None:
    """No offset is covered twice, every piece covers something, and they stand in order."""
    for piece in pieces:
        if piece.end <= piece.start:
            return f"the piece at {piece.start} ends at {piece.end} and covers nothing"
    for before, after in pairwise(pieces):
        if after.start < before.end:
            return f"[{after.start}, {min(before.end, after.end)}) is covered twice or out of order"
    return None


def never_backwards(frontier: int, pieces: Sequence[SegmentDescriptor]) -> str | None:
    """What is added lies at or behind the end of what is there."""
    lowest = min((piece.start for piece in pieces), default=frontier)
    return f"offset {lowest} lies before the frontier {frontier}" if lowest < frontier else None
