"""Every way a simulated disk may look after a crash: which names survived, and what is left of unsynced bytes.

    for state in explore(disk.trace):
        recovered = recover(state.disk())
        check(recovered, state.notes)

Knows traces, durability and damage; knows nothing of what is stored. A state is a value: `disk()`
makes a fresh disk of it each time. After a power cut everything on that disk is durable and the boot
is another; after a kill the page cache lives on, so what was unsynced is unsynced still, and the new
disk goes on with the old trace.
"""

from __future__ import annotations

import hashlib
import itertools
import random  # noqa: TID251  # seeded: the same states again
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from forebay.testing.simulated.damage import CrashDamage, DamagedFile, cuts
from forebay.testing.simulated.disk import ROOMY, SimulatedDisk
from forebay.testing.simulated.durability import DiskState, NameChange, Names, reachable, replay
from forebay.testing.simulated.trace import ROOT, Image, Note, Trace, TracedWrite

T = TypeVar("T")
Outcomes: TypeAlias = Mapping[int, Iterable[bytes]]

STATES_MAX = 32
"""How many states `crash_states` yields for one prefix and one kind of damage unless the caller says otherwise."""

NAMES_MAX = 16
"""How many subsets of the pending changes of names are tried; up to four changes that is all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashState:
    """The disk after one crash: `prefix` operations of the trace had been made, `notes` had been noted."""

    damage: CrashDamage
    prefix: int
    notes: tuple[Note, ...]
    detail: str
    image: Image
    paths: Sequence[tuple[str, int]]
    trace: Trace
    in_flight: TracedWrite | None
    next_inode: int

    def __str__(self) -> str:
        return f"{self.damage.value} after {self.prefix} operations ({self.detail})"

    def disk(self, *, free: int = ROOMY) -> SimulatedDisk:
        """A fresh disk in this state, with a process that has just begun: no handles, no locks."""
        history = self._killed() if self.damage is CrashDamage.KILLED else self._rebooted()
        return SimulatedDisk.restored(self.image, history, free=free, next_inode=self.next_inode)

    def files(self) -> dict[str, bytes]:
        """What is left, by path, without the directories."""
        files = self.image.files
        return {path: files[inode] for path, inode in self.paths if inode in files}

    @property
    def boot(self) -> str:
        """The name of the boot of the machine after this crash."""
        return self.trace.boot if self.damage is CrashDamage.KILLED else _next_boot(self.trace.boot)

    def digest(self, *, below: str = "") -> bytes:
        """A hash of the names and bytes that survived below a directory: equal for equal ones, whatever their past."""
        summed = hashlib.blake2b(digest_size=16)
        files = self.image.files
        for path, inode in self.paths:
            if not path.startswith(below):
                continue
            content = files.get(inode)
            summed.update(f"{path}\0{'' if content is None else len(content)}\0".encode("utf-8", "surrogateescape"))
            if content:
                summed.update(content)
        return summed.digest()

    def _killed(self) -> Trace:
        in_flight = [] if self.in_flight is None else [self.in_flight]
        operations = [*self.trace.operations[: self.prefix], *in_flight, Note("crash", self.damage.value)]
        return replace(self.trace, operations=operations, begins=len(operations))

    def _rebooted(self) -> Trace:
        notes = (*self.notes, Note("crash", self.damage.value))
        return Trace(start=self.image, earlier_notes=notes, boot=self.boot)


def crash_states(
    trace: Trace,
    at: int | None = None,
    *,
    damages: Sequence[CrashDamage] = tuple(CrashDamage),
    states_max: int | None = STATES_MAX,
    names_max: int = NAMES_MAX,
    seed: int = 0,
) -> Iterator[CrashState]:
    """The states after a crash when `at` operations had been made (default: all so far), each once per kind of damage.

    At most `states_max` per kind (`None`: all we know of), the most instructive first. The same arguments
    give the same states.
    """
    at = len(trace) if at is None else at
    model = DiskState(trace.start)
    for operation in trace.operations[:at]:
        model.apply(operation)
    yield from _Crash(trace, at, model, names_max, seed).states(damages, states_max)


def explore(
    trace: Trace,
    prefixes: Iterable[int] | None = None,
    *,
    damages: Sequence[CrashDamage] = tuple(CrashDamage),
    states_max: int | None = STATES_MAX,
    names_max: int = NAMES_MAX,
    seed: int = 0,
) -> Iterator[CrashState]:
    """The crash states of every prefix (default: of the present life), but none twice with the same notes."""
    model, applied = DiskState(trace.start), 0
    seen: set[tuple[bool, int, bytes]] = set()
    for at in sorted(set(trace.prefixes() if prefixes is None else prefixes)):
        for operation in trace.operations[applied:at]:
            model.apply(operation)
        applied = at
        for state in _Crash(trace, at, model, names_max, seed).states(damages, states_max):
            key = (state.damage is CrashDamage.KILLED, len(state.notes), state.digest())
            if key not in seen:
                seen.add(key)
                yield state


class _Names:
    """The names after a crash, if of the pending changes only some had happened."""

    def __init__(self, model: DiskState, happened: Sequence[NameChange]) -> None:
        names = model.names_after(happened)
        self.paths = sorted(reachable(names))
        inodes = {inode for _, inode in self.paths}
        self.directories: Names = {inode: names[inode] for inode in inodes | {ROOT} if inode in names}
        self.files = [inode for inode in inodes if inode not in names]
        self.detail = f"{len(happened)} of {len(model.pending)} changes of names"


class _Crash:
    """All crashes after one prefix of a trace."""

    def __init__(self, trace: Trace, at: int, model: DiskState, names_max: int, seed: int) -> None:
        self._trace = trace
        self._at = at
        self._notes = trace.notes(at)
        self._next_inode = model.next_inode
        self._seed = f"{seed}:{at}"
        chance = random.Random(self._seed)
        self._live = _Names(model, model.pending)
        self._names = [_Names(model, subset) for subset in _subsets(model.pending, names_max, chance)]
        self._durable = {inode: ledger.durable for inode, ledger in model.files.items()}
        self._open = {
            inode: DamagedFile(ledger.durable, ledger.changes)
            for inode, ledger in model.files.items()
            if ledger.changes
        }

    def states(self, damages: Sequence[CrashDamage], states_max: int | None) -> Iterator[CrashState]:
        for damage in damages:
            seen: set[bytes] = set()
            for state in self._killed() if damage is CrashDamage.KILLED else self._powerless(damage):
                if len(seen) == states_max:
                    break
                digest = state.digest()
                if digest not in seen:
                    seen.add(digest)
                    yield state

    def _killed(self) -> Iterator[CrashState]:
        contents = self._durable | {inode: file.whole for inode, file in self._open.items()}
        yield self._state(CrashDamage.KILLED, self._live, contents, "nothing in flight")
        flying = self._trace.operations[self._at] if self._at < len(self._trace) else None
        if isinstance(flying, TracedWrite):
            for length in cuts(flying):
                part = flying._replace(data=flying.data[:length])
                partly = contents | {flying.inode: replay(contents[flying.inode], [part])}
                detail = f"{length} of {len(flying.data)} bytes in flight"
                yield self._state(CrashDamage.KILLED, self._live, partly, detail, in_flight=part)

    def _powerless(self, damage: CrashDamage) -> Iterator[CrashState]:
        """Every second state has all names, so that a bound leaves room for damage to bytes and to names."""
        outcomes = {
            inode: _Remembered(file.outcomes(damage, random.Random(f"{self._seed}:{damage.name}:{inode}")))
            for inode, file in self._open.items()
        }
        every, *others = (self._of_names(damage, names, outcomes) for names in self._names)
        # With all names and all bytes it is as after a kill: where there is room for one, it shall be another.
        is_known = damage is CrashDamage.WHOLE or not self._open.keys() & set(self._live.files)
        # From prefix to prefix another one comes first: none of the changes, or a later one without those before it.
        turned = deque(others)
        turned.rotate(self._at)
        return _in_turn([_in_turn(turned), every] if is_known else [every, _in_turn(turned)])

    def _of_names(self, damage: CrashDamage, names: _Names, outcomes: Outcomes) -> Iterator[CrashState]:
        """With these names: all open files damaged, or one of them with the others whole or old."""
        victims = [inode for inode in names.files if inode in self._open]
        if not victims:
            untouched = [self._state(damage, names, self._durable, f"{names.detail}, no bytes at risk")]
            return iter(untouched if damage is CrashDamage.OLD else [])
        whole = {inode: self._open[inode].whole for inode in victims}
        old = {inode: self._open[inode].old for inode in victims}
        ways = [self._damaged(damage, names, victims, outcomes, whole)]
        if len(victims) > 1:
            ways += [self._damaged(damage, names, [one], outcomes, rest) for rest in (whole, old) for one in victims]
        return _in_turn(ways)

    def _damaged(
        self, damage: CrashDamage, names: _Names, victims: Sequence[int], outcomes: Outcomes, rest: Mapping[int, bytes]
    ) -> Iterator[CrashState]:
        detail = f"{names.detail}, inodes {victims} damaged"
        unhurt = [rest[inode] for inode in victims]
        for contents in _together([outcomes[inode] for inode in victims], unhurt):
            yield self._state(
                damage, names, {**self._durable, **rest, **dict(zip(victims, contents, strict=True))}, detail
            )

    def _state(
        self,
        damage: CrashDamage,
        names: _Names,
        contents: Mapping[int, bytes],
        detail: str,
        in_flight: TracedWrite | None = None,
    ) -> CrashState:
        return CrashState(
            damage=damage,
            prefix=self._at,
            notes=self._notes,
            detail=detail,
            image=Image(files={inode: contents[inode] for inode in names.files}, directories=names.directories),
            paths=names.paths,
            trace=self._trace,
            in_flight=in_flight,
            next_inode=self._next_inode,
        )


class _Remembered(Iterable[T]):
    """An iterator that may be walked several times and does its work once."""

    def __init__(self, source: Iterator[T]) -> None:
        self._source = source
        self._known: list[T] = []

    def __iter__(self) -> Iterator[T]:
        for position in itertools.count():
            if position == len(self._known):
                try:
                    self._known.append(next(self._source))
                except StopIteration:
                    return
            yield self._known[position]


def _in_turn(iterators: Iterable[Iterator[T]]) -> Iterator[T]:
    """One from each, again and again, until all are empty."""
    waiting = deque(iterators)
    while waiting:
        iterator = waiting.popleft()
        for item in iterator:
            yield item
            waiting.append(iterator)
            break


def _together(outcomes: Sequence[Iterable[bytes]], unhurt: Sequence[bytes]) -> Iterator[tuple[bytes, ...]]:
    """The first of each, the second of each, and so on; one that has no more stays as it was last."""
    iterators = [iter(outcome) for outcome in outcomes]
    latest = list(unhurt)
    while True:
        moved = False
        for place, iterator in enumerate(iterators):
            for content in itertools.islice(iterator, 1):
                latest[place], moved = content, True
        if not moved:
            return
        yield tuple(latest)


def _subsets(pending: Sequence[NameChange], names_max: int, chance: random.Random) -> list[list[NameChange]]:
    """Which of the pending changes may have happened: all of them first, none, and others up to `names_max`."""
    count = len(pending)
    masks = range((1 << count) - 1, -1, -1) if 1 << count <= names_max else _revealing_masks(count, names_max, chance)
    closed = dict.fromkeys(_with_required(mask, pending) for mask in masks)
    return [_chosen(mask, pending) for mask in itertools.islice(closed, names_max)]


def _revealing_masks(count: int, names_max: int, chance: random.Random) -> list[int]:
    everything = (1 << count) - 1
    single = [mask for place in range(count) for mask in (1 << place, everything & ~(1 << place), (1 << place) - 1)]
    chance.shuffle(single)
    return [everything, 0, *single, *(chance.getrandbits(count) for _ in range(names_max))]


def _with_required(mask: int, pending: Sequence[NameChange]) -> int:
    """A rename that happened needs the change that had put its file there."""
    for place in range(len(pending) - 1, -1, -1):
        required = pending[place].required()
        if mask >> place & 1 and required is not None:
            mask |= 1 << pending.index(required)
    return mask


def _chosen(mask: int, pending: Sequence[NameChange]) -> list[NameChange]:
    return [change for place, change in enumerate(pending) if mask >> place & 1]


def _next_boot(boot: str) -> str:
    name, _, number = boot.rpartition("-")
    return f"{name}-{int(number) + 1}" if name and number.isdecimal() else f"{boot}-2"
