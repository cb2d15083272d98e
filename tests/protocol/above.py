"""A whole log on a simulated disk, for crashes of what lies above the log: routers, dead letters and their replay.

The trace of the disk notes what the metadata store committed, so that every crash state is paired with the metadata of
that moment, and what callers were told: a promise is judged by what was acknowledged before the crash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final

import pytest

import forebay
from forebay import EARLIEST
from forebay.metadata import MemoryMetadata
from forebay.routers import Routers
from forebay.settings import Settings
from forebay.storage import Storage, Topic
from forebay.testing.checks.invariants import Violation
from forebay.testing.checks.moves import Operations, RecordingMetadata, replayed
from forebay.testing.inside import metadata_instead
from forebay.testing.simulated.crashes import CrashState, explore
from forebay.testing.simulated.damage import CrashDamage
from forebay.testing.simulated.disk import SimulatedDisk
from tests.support.waiting import until

SETTINGS: Final = Settings.load(
    overrides={
        # Nothing is synced unless a caller asks for it: what is not, a power loss takes.
        "wal": {"sync_interval_ms": 600_000, "flush_interval_ms": 1},
        "progress": {"flush_interval_ms": 10},
    }
)
CLASSES: Final = [
    ("memory", "memory"),
    ("memory", "fsync"),
    ("disk", "disk"),
    ("disk", "memory"),
    ("fsync", "disk"),
    ("fsync", "memory"),
]
"""Durability classes: of the topic where records come from, and of the one where they go."""
DAMAGES: Final = (CrashDamage.KILLED, CrashDamage.OLD, CrashDamage.CUT, CrashDamage.WHOLE)
BEGUN: Final = "begun"
_COMMITTED: Final = "metadata"
Values = list[bytes | None]


@contextmanager
def opened(disk: SimulatedDisk, metadata: MemoryMetadata) -> Iterator[Storage]:
    """The log on this disk, by this metadata store; every transaction is noted in the trace of the disk."""

    def committed(operations: Operations) -> None:
        disk.note(_COMMITTED, operations)

    with metadata_instead(RecordingMetadata(metadata, on_commit=committed)):
        log = Storage.open("/log", SETTINGS, disk=disk)
    with log:
        yield log


def after_crash(state: CrashState) -> tuple[SimulatedDisk, MemoryMetadata]:
    """What the next process finds: the disk, and the metadata of the moment of the crash."""
    transactions: list[Operations] = [note.payload for note in state.notes if note.kind == _COMMITTED]  # type: ignore[misc]  # by `opened`
    return state.disk(), replayed(transactions)


def crashes(disk: SimulatedDisk) -> Iterator[CrashState]:
    """Every crash after the scenario has begun."""
    for state in explore(disk.trace, damages=DAMAGES, states_max=2, names_max=2):
        if any(note.kind == BEGUN for note in state.notes):
            yield state


def kills(disk: SimulatedDisk) -> Iterator[CrashState]:
    """A kill after every change of the disk and after every transaction of the metadata store, once it has begun."""
    noted = 0
    for state in explore(disk.trace, damages=(CrashDamage.KILLED,), states_max=1, names_max=1):
        notes = state.notes
        for count in range(noted, len(notes) + 1):
            if any(note.kind == BEGUN for note in notes[:count]):
                yield replace(state, notes=notes[:count])
        noted = len(notes)


def told(state: CrashState, kind: str) -> list[object]:
    """What callers had been told, or had begun, of a kind before the crash."""
    return [note.payload for note in state.notes if note.kind == kind]


def values(topic: Topic) -> Values:
    """What can be read, of all partitions."""
    return [record.value for record in topic.read(on_gap=lambda *_: None)]


class RoutedScenario:
    """Records are routed, and the rule is changed between them."""

    name = "routers"

    def run(self, disk: SimulatedDisk, classes: tuple[str, str]) -> None:
        with opened(disk, MemoryMetadata()) as log, pytest.MonkeyPatch.context() as patched:
            hasten(patched)
            source = log.create_topic("a", durability=classes[0])
            target = log.create_topic("b", partitions=2, durability=classes[1])
            routers = Routers(log)
            routers.create("r", sources=["a"], destination="b", start=EARLIEST, tags=["x"])
            disk.note(BEGUN)
            with routers.running():
                for number in range(3):
                    self._append(disk, source, number)
                until(lambda: len(values(target)) == 3)
                target.flush()
                until(lambda: source.reader(routers.get("r").reader).offset() == 6)
                self._append(disk, source, 3)
                until(lambda: len(values(target)) == 4)
                disk.note("altering")
                routers.alter("r", tags=["y"])
                disk.note("altered")
                for number in (4, 5):
                    self._append(disk, source, number)
                until(lambda: b"y5" in values(target))

    @staticmethod
    def _append(disk: SimulatedDisk, source: Topic, number: int) -> None:
        for tag in "xy":
            value = f"{tag}{number}".encode()
            source.append(value, tag=tag, key=b"k%d" % number)
            disk.note("acked", value)

    def check(self, state: CrashState) -> Iterator[Violation]:
        """Each record of the source is judged by one rule and arrives once at most; none is missing or doubled."""
        with opened(*after_crash(state)) as log, pytest.MonkeyPatch.context() as patched:
            hasten(patched)
            source, target = log.topic("a"), log.topic("b")
            alive, routers = list(source.read(on_gap=lambda *_: None)), Routers(log)
            done = source.reader(routers.get("r").reader).offset() or 0
            with routers.running():
                for tag in "xy":
                    source.append(b"end", tag=tag, key=b"k")
                until(lambda: b"end" in values(target))
            found = Counter(value for value in values(target) if value != b"end")
        yield from _doubled("routed", found)
        for record in alive:
            value = record.value or b""
            must = self._must(state, value, is_done=record.offset < done)
            if must is not None and must is not (value in found):
                yield Violation("routed", f"{value!r} is {'missing' if must else 'not wanted'}: {state}")

    @staticmethod
    def _must(state: CrashState, value: bytes, *, is_done: bool) -> bool | None:
        """Whether the record must have arrived; `None` where either rule may have judged it.

        `is_done` says that it lies below the cursor. What lies there was routed before the rule was changed.
        """
        if not told(state, "altering") or (is_done and value <= b"x3"):
            return value.startswith(b"x")
        is_before = int(value[1:]) < 4
        return None if is_before or not told(state, "altered") else value.startswith(b"y")


class LettersScenario:
    """Consumers refuse some records, which become dead letters, and acknowledge others."""

    name = "dead letters"

    def run(self, disk: SimulatedDisk, classes: tuple[str, str]) -> None:
        with opened(disk, MemoryMetadata()) as log:
            source = log.create_topic("a", durability=classes[0])
            log.create_topic("dead", partitions=2, durability=classes[1])
            subscription = _subscribe(source)
            disk.note(BEGUN)
            for first in (0, 6):
                for number in range(first, first + 6):
                    source.append(b"%d" % number, key=b"k%d" % number)
                until(partial(_has, source, first + 6))
                with subscription.consumer() as consumer:
                    while taken := consumer.take():
                        for one in taken:
                            if _is_poison(one.record.value):
                                consumer.nack(one, delay_ms=0)
                            else:
                                disk.note("acking", one.record.value)
                                consumer.ack(one)
            assert len(subscription.dead_letters().letters()) == 8

    def check(self, state: CrashState) -> Iterator[Violation]:
        """What the source has is acknowledged, delivered again, or a dead letter, and that once."""
        with opened(*after_crash(state)) as log:
            source, letters = log.topic("a"), log.topic("dead").dead_letters()
            alive, before = values(source), {letter.record.value for letter in letters.letters()}
            delivered: set[bytes | None] = set()
            with source.subscription("s").consumer() as consumer:
                while taken := consumer.take():
                    delivered.update(one.record.value for one in taken)
                    consumer.ack(*taken)
            found = Counter(letter.record.value for letter in letters.letters())
            unsealed = [letter for letter in letters.letters() if not letter.is_vouched]
        yield from _doubled("letters", found)
        for value in before & delivered:
            yield Violation("letters", f"{value!r} is a dead letter and is delivered again: {state}")
        for value in [value for value in alive if value not in {*found, *delivered, *told(state, "acking")}]:
            yield Violation("lost", f"{value!r} is neither delivered nor a dead letter: {state}")
        for letter in unsealed:
            yield Violation("letters", f"{letter.record.value!r} is not vouched for: {state}")


class ReplayScenario:
    """Dead letters are replayed into the topic that they come from."""

    name = "replay"

    def run(self, disk: SimulatedDisk, classes: tuple[str, str]) -> None:
        with opened(disk, MemoryMetadata()) as log:
            source = log.create_topic("a", partitions=2, durability=classes[0])
            log.create_topic("dead", durability=classes[1])
            subscription = _subscribe(source)
            for number in range(6):
                source.append(b"%d7" % number, partition=number % 2)
            source.flush()
            with subscription.consumer() as consumer:
                while taken := consumer.take():
                    consumer.nack(*taken, delay_ms=0)
            disk.note(BEGUN)
            assert subscription.dead_letters().replay() == 6
            disk.note("replayed")

    def check(self, state: CrashState) -> Iterator[Violation]:
        """Run again, each record is in the topic a second time, and no dead letter is left."""
        with opened(*after_crash(state)) as log:
            letters = log.topic("dead").dead_letters()
            before = [letter.record.value for letter in letters.letters()]
            letters.replay()
            found, left = Counter(values(log.topic("a"))), letters.letters()
        if told(state, "replayed") and before:
            yield Violation("replay", f"{before} are there although they were replayed: {state}")
        if left or found != Counter({b"%d7" % number: 2 for number in range(6)}):
            yield Violation("replay", f"{found} with {len(left)} left: {state}")


Scenario = RoutedScenario | LettersScenario | ReplayScenario
SCENARIOS: Final[dict[str, Callable[[], Scenario]]] = {
    scenario.name: scenario for scenario in (RoutedScenario, LettersScenario, ReplayScenario)
}


def _subscribe(source: Topic) -> forebay.Subscription:
    return source.subscribe("s", start=EARLIEST, deliveries_max=1, on_spent="dead_letter", dead_letter_topic="dead")


def _has(topic: Topic, count: int) -> bool:
    return len(values(topic)) == count


def _is_poison(value: bytes | None) -> bool:
    return int(value or b"") % 3 != 0


def hasten(patched: pytest.MonkeyPatch) -> None:
    """Routers look and store their cursors as often as they can: more moments at which a crash may come."""
    patched.setattr("forebay.routers.mover.WAIT_SECONDS", 0.01)
    patched.setattr("forebay.routers.mover.CURSOR_SECONDS", 0.0)
    patched.setattr("forebay.routers.running.PAUSE_SECONDS", 0.02)


def _doubled(promise: str, found: Counter[bytes | None]) -> Iterator[Violation]:
    for value, count in found.items():
        if count > 1:
            yield Violation(promise, f"{value!r} is there {count} times")
