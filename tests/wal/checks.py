"""What is checked on the disk that a crash left behind."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

from forebay.testing.checks.history import NOTE, AppendAnswered, AppendOutcome, Reading, ReadSeen, ShardEvents
from forebay.testing.checks.invariants import (
    Violation,
    check_log,
    no_crash_is_damage,
    readings_agree,
    recovery_is_stable,
)
from forebay.testing.simulated.crashes import CrashState
from forebay.testing.simulated.trace import Note
from forebay.topics import Durability
from tests.support.soak import SOAK
from tests.wal.rig import DIRECTORY, Rig, after, history_of

T = TypeVar("T")
PIECES_ONE_IN: Final = 4
"""In a normal run so many disks are read once record by record: how a log is paged has little to do with crashes."""
Repeats: TypeAlias = tuple[tuple[int, int, int], ...]


class Aftermath(NamedTuple):
    """What a process reads that recovers from a crash, and what it appends and reads then."""

    first: Reading
    in_pieces: Reading
    second: Reading
    appended: tuple[Note, ...]
    seen: Reading
    last: Reading


class OncePerDisk(Generic[T]):
    """What follows from the files of a shard alone, worked out once for all crash states that left the same ones.

    Most crash states leave a disk that another one has left, too: callers had been answered more or less by then. What
    recovery makes of a disk cannot depend on that, so it is made once, and compared with the promises of each state.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, bytes, Hashable], T] = {}

    def get(self, state: CrashState, make: Callable[[], T], *, also: Hashable = None) -> T:
        """By the boot of the machine, the files of the shard, and what else `make` uses: recovery learns no more."""
        key = (state.boot, state.digest(below=DIRECTORY), also)
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


class Recoveries:
    """Recovers from crash states and checks every promise."""

    def __init__(self, durability: Durability) -> None:
        self._durability = durability
        self._known = OncePerDisk[Aftermath]()

    def violations(self, state: CrashState) -> list[Violation]:
        """Recover twice, append, repeat what producers may repeat, recover again."""
        notes = (*state.notes, Note("crash", state.damage.value))
        before = self._history(notes)
        repeats = _repeats(before)
        made = self._known.get(state, lambda: self._go_on(state, repeats), also=repeats)
        after_appends = (*notes, *made.appended)
        seen = ReadSeen(tuple((offset, value) for offset, value in made.seen.records if value is not None))
        return [
            *check_log(before, made.first),
            *no_crash_is_damage(made.first),
            *readings_agree(made.first, made.in_pieces),
            *recovery_is_stable(made.first, made.second),
            *check_log(self._history(after_appends), made.seen),
            *check_log(self._history((*after_appends, Note(NOTE, seen))), made.last),
        ]

    def _history(self, notes: Sequence[Note]) -> ShardEvents:
        return history_of(self._durability, notes)

    def _go_on(self, state: CrashState, repeats: Repeats) -> Aftermath:
        rig = after(state, self._durability).open()
        first = rig.reading()
        in_pieces = rig.reading(bytes_max=1) if SOAK or state.digest()[0] % PIECES_ONE_IN == 0 else first
        again = Rig(rig.disk, self._durability, epoch=rig.epoch).open()
        second, begun = again.reading(), len(rig.disk.trace)
        assert again.append() is AppendOutcome.ACKED
        assert again.append(2) is AppendOutcome.ACKED
        for producer, sequence, count in repeats:
            again.append(count, producing=(producer, sequence))
        again.flush()
        appended = tuple(step for step in rig.disk.trace.operations[begun:] if isinstance(step, Note))
        seen = again.reading()
        last = Rig(rig.disk, self._durability, epoch=again.epoch).open()
        return Aftermath(first, in_pieces, second, appended, seen, last.reading())


def recover_and_go_on(state: CrashState, durability: Durability) -> list[Violation]:
    """What is wrong with one state."""
    return Recoveries(durability).violations(state)


def _repeats(history: ShardEvents) -> Repeats:
    """The newest append of every producer that was acknowledged: producer, sequence and number of records."""
    newest: dict[int, tuple[int, int]] = {}
    for append in history.appends.values():
        producing = append.begun.producing
        if producing is not None and append.outcome is AppendOutcome.ACKED:
            newest[producing[0]] = (producing[1], len(append.begun.values))
    return tuple((producer, sequence, count) for producer, (sequence, count) in newest.items())


TAKEN: Final = "taken over"
"""A note in a trace: from here on another owner has the shard."""


def lost_owners_acknowledge_nothing(notes: Iterable[Note]) -> Iterator[Violation]:
    """I20: once another owner has the shard, the one before it acknowledges nothing, whenever the append began."""
    taken = False
    for note in notes:
        taken = taken or note.kind == TAKEN
        if taken and isinstance(note.payload, AppendAnswered) and note.payload.outcome is AppendOutcome.ACKED:
            yield Violation("I20", f"append {note.payload.attempt} was acknowledged after another had the shard")
