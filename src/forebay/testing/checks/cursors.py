"""What readers were answered about their cursors, in order, and whether it holds.

I25 cursors are monotonic, and at least once: nothing is passed over that was not handed out
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from forebay.testing.checks.invariants import Violation


class StoredCursor(NamedTuple):
    """One reader's place in one partition of one incarnation of a topic."""

    reader: str
    partition: int
    incarnation: str


class Handed(NamedTuple):
    """The records `[start, stop)`, gaps included, were handed to the reader."""

    cursor: StoredCursor
    start: int
    stop: int


class Acked(NamedTuple):
    """The reader acknowledged everything below `wanted`; by the answer it stands at `stands`, `None`: an error."""

    cursor: StoredCursor
    wanted: int
    stands: int | None


class Found(NamedTuple):
    """A caller looked where the cursor stands; 0 if there is none."""

    cursor: StoredCursor
    offset: int


class Reset(NamedTuple):
    """The cursor was set to a place on request; `done` if the answer came."""

    cursor: StoredCursor
    offset: int
    done: bool


Event = Handed | Acked | Found | Reset


@dataclass(slots=True)
class _Known:
    lowest: int = 0
    """It cannot stand below: this was promised."""
    highest: int = 0
    """It cannot stand above: no reader asked for more."""
    handed: int | None = None
    """The end of what was handed out, if anything was."""


def cursors_hold(events: Iterable[Event]) -> Iterator[Violation]:
    """I25, over everything that readers asked and were answered, in the order in which the answers came."""
    known: dict[StoredCursor, _Known] = {}
    for event in events:
        place = known.setdefault(event.cursor, _Known())
        match event:
            case Acked(cursor, wanted, stands):
                place.highest = max(place.highest, wanted)
                if stands is not None:
                    if stands < wanted:
                        yield Violation("I25", f"{cursor} acknowledged {wanted} and stands at {stands}")
                    yield from _looked(cursor, place, stands)
            case Found(cursor, offset):
                yield from _looked(cursor, place, offset)
            case Handed(cursor, start, stop):
                if start > (place.handed or 0):
                    yield Violation("I25", f"{cursor} was handed {start} though {place.handed or 0} never came")
                place.handed = max(place.handed or 0, stop)
            case Reset(_, offset, done):
                place.lowest = offset if done else min(place.lowest, offset)
                place.highest = offset if done else max(place.highest, offset)
                # A reader that sets a cursor forward passes over what lies between on purpose.
                place.handed = None if place.handed is None else max(place.handed, offset)


def _looked(cursor: StoredCursor, place: _Known, offset: int) -> Iterator[Violation]:
    if offset < place.lowest:
        yield Violation("I25", f"{cursor} stood at {place.lowest} and went back to {offset}")
    if offset > place.highest:
        yield Violation("I25", f"{cursor} stands at {offset}, but no reader acknowledged more than {place.highest}")
    if place.handed is not None and offset > place.handed:
        yield Violation(
            "I25", f"{cursor} stands at {offset}, but what lies from {place.handed} on was never handed out"
        )
    place.lowest = max(place.lowest, offset)
