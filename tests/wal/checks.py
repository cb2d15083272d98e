"""What is checked on the disk that a crash left behind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from forebay.testing.crashes import CrashState
from forebay.testing.history import AppendAnswered, AppendOutcome
from forebay.testing.invariants import Violation, check_log, no_crash_is_damage, readings_agree, recovery_is_stable
from forebay.testing.trace import Note
from forebay.topics import Durability
from tests.wal.rig import Rig, Simulated, after


def recover_and_go_on(state: CrashState, durability: Durability) -> list[Violation]:
    """Recover twice, append, repeat what producers may repeat, recover again."""
    rig = after(state, durability).open()
    first = rig.reading()
    violations = [*check_log(rig.history(), first), *no_crash_is_damage(first)]
    violations += readings_agree(first, rig.reading(bytes_max=1))
    again = Rig(rig.disk, durability, epoch=rig.epoch).open()
    violations += recovery_is_stable(first, again.reading())
    assert again.append() is AppendOutcome.ACKED
    assert again.append(2) is AppendOutcome.ACKED
    _repeat(again)
    again.flush()
    violations += check_log(again.history(), again.see())
    last = Rig(rig.disk, durability, epoch=again.epoch).open()
    violations += check_log(last.history(), last.reading())
    return violations


def _repeat(rig: Simulated) -> None:
    """Every producer repeats its newest append that anyone learned of."""
    newest: dict[int, tuple[int, int]] = {}
    for append in rig.history().appends.values():
        producing = append.begun.producing
        if producing is not None and append.outcome is AppendOutcome.ACKED:
            newest[producing[0]] = (producing[1], len(append.begun.values))
    for producer, (sequence, count) in newest.items():
        rig.append(count, producing=(producer, sequence))


TAKEN: Final = "taken over"
"""A note in a trace: from here on another owner has the shard."""


def lost_owners_acknowledge_nothing(notes: Iterable[Note]) -> Iterator[Violation]:
    """I20: once another owner has the shard, the one before it acknowledges nothing, whenever the append began."""
    taken = False
    for note in notes:
        taken = taken or note.kind == TAKEN
        if taken and isinstance(note.payload, AppendAnswered) and note.payload.outcome is AppendOutcome.ACKED:
            yield Violation("I20", f"append {note.payload.attempt} was acknowledged after another had the shard")
