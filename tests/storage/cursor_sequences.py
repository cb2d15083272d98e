"""Every short sequence of what members of a group do to its cursor: durable and cached commits, flushes, resets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from forebay.format.metadata.keys import topic_key
from forebay.format.metadata.value import encode_value
from forebay.metadata import MemoryMetadata, Put
from forebay.progress import Progress, ProgressStore, ReaderName
from forebay.settings import ProgressSettings
from forebay.storage.cursors import Cursors
from forebay.testing.checks.cursors import Acked, Event, Found, Reset, StoredCursor, cursors_hold
from forebay.testing.checks.invariants import Violation
from forebay.testing.simulated.clock import ManualClock
from forebay.topics import TopicSpec

NAME: Final = ReaderName("shop", "orders", "billing")
CURSOR: Final = StoredCursor("billing", 0, "0" * 32)
SPEC: Final = TopicSpec(namespace="shop", topic="orders", topic_id=CURSOR.incarnation, partitions=1)
STEPS_MAX: Final = 3


class GroupMember:
    """A process of the group. Nothing is written in the background: a flush is a step of its own."""

    def __init__(self) -> None:
        metadata = MemoryMetadata()
        metadata.transaction([], [Put(topic_key("shop", "orders", prefix="/forebay"), encode_value(SPEC))])
        self.store = ProgressStore(metadata, "/forebay", ManualClock())
        settings = ProgressSettings(flush_interval_ms=600_000, flush_records_min=1_000_000)
        self.cursors = Cursors(self.store, settings, ManualClock())
        self.cursors.worker.stop()
        self.events: list[Event] = []

    def durable(self, offset: int) -> None:
        """Of this member: its answer counts what is cached here."""
        self.events.append(Acked(CURSOR, offset, self.cursors.commit(NAME, 0, _at(offset), ack="durable")))

    def durable_elsewhere(self, offset: int) -> None:
        """Of another member: what is cached here it cannot know, so its answer is not compared with that."""
        self.store.ack_up_to(NAME, {0: _at(offset)})
        self.events.append(Acked(CURSOR, offset, None))

    def cached(self, offset: int) -> None:
        self.events.append(Acked(CURSOR, offset, self.cursors.commit(NAME, 0, _at(offset), ack="cached")))

    def flush(self, _: int) -> None:
        self.cursors.flush()

    def reset(self, offset: int) -> None:
        self.cursors.reset(NAME, 0, _at(offset))
        self.events.append(Reset(CURSOR, offset, done=True))

    def look(self) -> None:
        found = self.cursors.at(NAME.reader, SPEC, 0)
        self.events.append(Found(CURSOR, found.offset if found is not None else 0))


def _at(offset: int) -> Progress:
    return Progress(offset=offset, incarnation=CURSOR.incarnation)


Step: TypeAlias = tuple[Callable[[GroupMember, int], None], int]
STEPS: Final[tuple[Step, ...]] = (
    (GroupMember.durable, 4),
    (GroupMember.durable_elsewhere, 4),
    (GroupMember.durable_elsewhere, 8),
    (GroupMember.cached, 4),
    (GroupMember.cached, 6),
    (GroupMember.cached, 8),
    (GroupMember.flush, 0),
    (GroupMember.reset, 2),
)


def broken_by_some_sequence() -> Iterator[Violation]:
    """I25 after each step of every sequence; the first that breaks it ends the search."""
    for steps in itertools.product(STEPS, repeat=STEPS_MAX):
        member = GroupMember()
        for step, offset in steps:
            step(member, offset)
            member.look()
        broken = list(cursors_hold(member.events))
        if broken:
            yield from broken
            return
