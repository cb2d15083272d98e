"""Cursors of readers while metadata fails, readers race, owners change: never back, nothing passed over."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from forebay.errors import ForebayError, Indeterminate, Unavailable, UnknownTopic
from forebay.format.metadata.keys import topic_key
from forebay.format.metadata.value import encode_value
from forebay.metadata import MemoryMetadata, Put
from forebay.progress import Progress, ProgressStore, ReaderName
from forebay.testing.checks.cursors import Acked, Event, Found, Handed, Reset, StoredCursor, cursors_hold
from forebay.testing.checks.history import read_everything
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.metadata import Fault, FaultyMetadata
from forebay.topics import TopicName, TopicSpec
from tests.ledger import Ledger
from tests.support.environments.shard import TOPIC, ShardEnvironment

NEXT_TOPIC: Final = "cd" * 16
BILLING: Final = ReaderName.of("shop", "orders", "billing")
PREFIX: Final = "/forebay"


class Desk:
    """Readers of one name, each with a store of its own, and all that they were answered."""

    def __init__(self, events: list[Event], store: ProgressStore, *, incarnation: str = TOPIC, epoch: int = 1) -> None:
        self.events = events
        self._store = store
        self._incarnation = incarnation
        self._epoch = epoch
        self.cursor = StoredCursor(BILLING.reader, 0, incarnation)

    def _at(self, offset: int) -> Progress:
        return Progress(offset=offset, incarnation=self._incarnation, epoch=self._epoch)

    def ack(self, offset: int) -> None:
        stands: int | None = None
        with contextlib.suppress(ForebayError):
            stands = self._store.ack_up_to(BILLING, {0: self._at(offset)})[0]
        self.events.append(Acked(self.cursor, offset, stands))

    def reset(self, offset: int) -> None:
        done = False
        with contextlib.suppress(ForebayError):
            self._store.reset(BILLING, 0, self._at(offset))
            done = True
        self.events.append(Reset(self.cursor, offset, done))

    def look(self) -> int:
        found = self._store.get(BILLING, 0, self._incarnation)
        offset = 0 if found is None else found.offset
        self.events.append(Found(self.cursor, offset))
        return offset


def _schedule(first: Desk, second: Desk) -> Iterator[Callable[[], object]]:
    """Two readers of one name, neither in step with the other."""
    yield lambda: first.ack(5)
    yield lambda: second.ack(3)
    yield lambda: second.ack(9)
    yield lambda: first.reset(2)
    yield lambda: first.ack(7)
    yield lambda: second.ack(14)
    yield lambda: first.ack(11)


def _run(fault: Fault | None, method: str, step: int, lands_after: int) -> tuple[list[Event], FaultyMetadata]:
    events: list[Event] = []
    memory = MemoryMetadata()
    faulty = FaultyMetadata(memory)
    if fault is not None:
        faulty.inject(fault, method=method, after=step)
    first, second = (Desk(events, ProgressStore(store, PREFIX, ManualClock())) for store in (faulty, memory))
    for number, action in enumerate(_schedule(first, second)):
        action()
        second.look()
        if number == lands_after:
            faulty.land()
            second.look()
    return events, faulty


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.proves("I25")
def test_a_fault_at_any_call_moves_no_cursor_back(fault: Fault, ledger: Ledger) -> None:
    calls = _run(None, "", 0, 0)[1].calls
    for method in ["transaction"] if fault is not Fault.FAIL_BEFORE else ["transaction", "get"]:
        for step in range(calls[method]):
            for lands_after in range(7):
                events, _ = _run(fault, method, step, lands_after)

                assert list(cursors_hold(events)) == []
                ledger.count("cursor faults", fault=fault.value, at=method)


def test_a_reset_that_lands_late_does_not_undo_what_was_acknowledged_since() -> None:
    memory = MemoryMetadata()
    faulty = FaultyMetadata(memory)
    faulty.inject(Fault.TIME_OUT, after=1, count=100)
    slow, quick = (Desk([], ProgressStore(store, PREFIX, ManualClock())) for store in (faulty, memory))
    slow.ack(14)
    slow.reset(2)
    quick.ack(20)

    faulty.land()

    assert quick.look() == 20


def test_a_reader_forgotten_late_keeps_what_it_acknowledged_since() -> None:
    memory = MemoryMetadata()
    faulty = FaultyMetadata(memory)
    quick = Desk([], ProgressStore(memory, PREFIX, ManualClock()))
    quick.ack(14)
    faulty.inject(Fault.TIME_OUT, count=100)
    with pytest.raises((Indeterminate, Unavailable)):
        ProgressStore(faulty, PREFIX, ManualClock()).forget(BILLING, partitions=1)
    quick.ack(20)

    faulty.land()

    assert quick.look() == 20


def test_a_reader_of_a_deleted_topic_does_not_take_the_cursor_of_the_new_one() -> None:
    memory = MemoryMetadata()
    progress = ProgressStore(memory, PREFIX, ManualClock())
    old = Desk([], progress)
    old.ack(14)
    spec = TopicSpec.create(TopicName("shop", "orders"), topic_id=NEXT_TOPIC, created_at=0)
    memory.transaction([], [Put(topic_key("shop", "orders", prefix=PREFIX), encode_value(spec))])
    new = Desk([], progress, incarnation=NEXT_TOPIC)
    new.ack(3)

    with pytest.raises(UnknownTopic, match="shop/orders"):
        progress.ack_up_to(BILLING, {0: Progress(offset=20, incarnation=TOPIC)})

    assert new.look() == 3


def test_a_reader_goes_on_at_its_cursor_when_the_owner_has_changed() -> None:
    events: list[Event] = []
    environment = ShardEnvironment()
    progress = ProgressStore(environment.metadata, PREFIX, ManualClock())
    environment.append(22)
    before = Desk(events, progress, epoch=1)
    _hand_out(before, environment, stop=22)
    before.ack(14)
    environment.seal()
    environment.export()

    environment.reopen()
    environment.append(5)
    after = Desk(events, progress, epoch=2)
    _hand_out(after, environment, stop=27)
    after.ack(27)
    before.ack(22)

    assert after.look() == 27
    assert [event.start for event in events if isinstance(event, Handed)] == [0, 14]
    assert list(cursors_hold(events)) == []


def _hand_out(desk: Desk, environment: ShardEnvironment, *, stop: int) -> None:
    """Everything from the cursor on, as the present owner shows it."""
    start = desk.look()
    reading = read_everything(lambda offset: environment.shard.read(offset, 1 << 20), stop, start)
    assert reading.records == [(offset, environment.appended[offset]) for offset in range(start, stop)]
    desk.events.append(Handed(desk.cursor, start, stop))
