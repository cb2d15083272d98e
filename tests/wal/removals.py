"""Deletes and floors on a rig: each is noted before it begins and when it is acknowledged, and compared afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from forebay.errors import ForebayError
from forebay.format.control.frames import NO_FLOOR, Floor
from forebay.format.control.offsets import OffsetSet
from forebay.records import Reason
from forebay.testing.checks.invariants import Violation
from forebay.testing.simulated.damage import CrashDamage
from forebay.testing.simulated.trace import Note
from forebay.topics import Durability
from forebay.wal.removals import Removals
from tests.wal.rig import Simulated

NOTE: Final = "removal"


class Removal(NamedTuple):
    """A delete, or a move of the floors, begun or acknowledged."""

    number: int
    acked: bool
    offsets: tuple[int, ...] = ()
    floor: Floor = NO_FLOOR
    durable: bool = False


def delete(rig: Simulated, *offsets: int) -> bool:
    """Delete these offsets; true if it was acknowledged."""
    return _removed(rig, offsets, NO_FLOOR)


def move_floor(rig: Simulated, earliest: int, evict_floor: int = 0) -> bool:
    """Move the floors; true if that was acknowledged."""
    return _removed(rig, (), Floor(earliest, evict_floor, Reason.CAP if evict_floor else None))


def flush(rig: Simulated) -> None:
    """Make everything durable and note that it is."""
    rig.flush()
    rig.disk.note(NOTE, None)


def _removed(rig: Simulated, offsets: tuple[int, ...], floor: Floor) -> bool:
    number = len(rig.disk.trace)
    rig.disk.note(NOTE, Removal(number, False, offsets, floor))
    try:
        rig.wal.remove(Removals(OffsetSet.of(offsets), floor))
    except ForebayError:
        return False
    rig.disk.note(NOTE, Removal(number, True, offsets, floor, rig.durability is Durability.FSYNC))
    return True


def check_removals(notes: tuple[Note, ...], durability: Durability, found: Removals, end: int) -> Iterator[Violation]:
    """I23 and I24: what was promised to be gone is, nothing else is, and floors have not gone back."""
    begun, promised, floors = set[int](), set[int](), [NO_FLOOR]
    least = NO_FLOOR
    for removal in _promises(notes, durability, begun, floors):
        promised |= set(removal.offsets)
        least = Floor(
            max(least.earliest, removal.floor.earliest), max(least.evict_floor, removal.floor.evict_floor), None
        )
    gone = set(found.deletes)
    if promised - gone:
        yield Violation("I23", f"deleted for good, and back: {sorted(promised - gone)}")
    if gone - begun:
        yield Violation("I23", f"nobody deleted {sorted(gone - begun)}")
    if gone and max(gone) >= end:
        yield Violation("I23", f"offset {max(gone)} is deleted before it is given out: the log ends at {end}")
    if found.floor.earliest < least.earliest or found.floor.evict_floor < least.evict_floor:
        yield Violation("I24", f"the floors were at {least}, and are back at {found.floor}")
    if found.floor.earliest > max(floor.earliest for floor in floors):
        yield Violation("I24", f"nobody moved the floor to {found.floor}")


def _promises(
    notes: tuple[Note, ...], durability: Durability, begun: set[int], floors: list[Floor]
) -> Iterator[Removal]:
    """The removals that must still hold; fills in what was begun at all."""
    acked: list[Removal] = []
    for note in notes:
        if note.kind == "crash":
            killed = note.payload == CrashDamage.KILLED.value and durability is not Durability.MEMORY
            acked = [removal for removal in acked if removal.durable or killed]
        elif note.kind == NOTE and isinstance(note.payload, Removal):
            begun |= set(note.payload.offsets)
            floors.append(note.payload.floor)
            if note.payload.acked:
                acked.append(note.payload)
        elif note.kind == NOTE:
            acked = [removal._replace(durable=True) for removal in acked]
    return iter(acked)
