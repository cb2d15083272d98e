"""Something ends while a follower is held inside a step: it gets each live record of its topic once, or an error.

A gate holds the thread that reads for a stream, a watcher or a long poll, or the poll itself. Meanwhile the topic is
deleted, or created again, records are deleted, partitions are added, the shard goes to another epoch, the log is closed
or the caller is cancelled. The model: no record of another topic, none that was deleted before the step went on, none
twice, none left out; and where the topic or the log is gone, the error that says so.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

import forebay
from forebay import EARLIEST, Closed, ForebayError, Record, UnknownTopic
from forebay.aio import AsyncStream
from forebay.format.frame.batch import Batch
from forebay.live import WatchedTopic, Watcher, poll, polling
from forebay.pages import Page
from forebay.shard import SegmentShard
from forebay.shard.tiers import Tiers
from forebay.storage import Storage, Topic
from tests.ledger import Ledger
from tests.live.test_watchers import Room, room
from tests.storage.rig import quick, wal_of
from tests.support.gates import StepGate
from tests.support.soak import sampled
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.slow

FIRST: Final = 4
"""So many records there are before anything is followed."""


class Got(NamedTuple):
    """One record that a follower was given."""

    partition: int
    offset: int
    value: bytes | None


class Follower:
    """Reads a topic from its first record on, in a thread of its own, until it is stopped or gets an error."""

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.got: list[Got] = []
        self.error: ForebayError | None = None
        self.stopped = threading.Event()

    def run(self) -> None:
        try:
            self.read()
        except ForebayError as error:
            self.error = error

    def read(self) -> None:
        for record in self.topic.follow(EARLIEST, stop=self.stopped):
            self.take([record])

    def take(self, records: Sequence[Record]) -> None:
        self.got += [Got(record.partition, record.offset, record.value) for record in records]

    def cancel(self) -> None:
        """Break off what is waited for; the follower asks again."""

    def stop(self) -> None:
        self.stopped.set()


class TaskFollower(Follower, ABC):
    """As `Follower`, by tasks of an event loop, which may be cancelled and ask again."""

    def __init__(self, topic: Topic) -> None:
        super().__init__(topic)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.task: asyncio.Task[None] | None = None

    def read(self) -> None:
        asyncio.run(self.whole())

    async def whole(self) -> None:
        async with room() as here:
            self.loop = asyncio.get_running_loop()
            await self.begin(here)
            while not self.stopped.is_set():
                self.task = asyncio.create_task(self.ask(here))
                with suppress(asyncio.CancelledError):
                    await self.task

    @abstractmethod
    async def begin(self, here: Room) -> None:
        """What comes before the first question."""

    @abstractmethod
    async def ask(self, here: Room) -> None:
        """Take what there is, and what comes, until cancelled."""

    def cancel(self) -> None:
        assert self.loop is not None
        assert self.task is not None
        self.loop.call_soon_threadsafe(self.task.cancel)

    def stop(self) -> None:
        super().stop()
        if self.task is not None and self.error is None:
            with suppress(RuntimeError):  # it has ended
                self.cancel()


class StreamFollower(TaskFollower):
    """A watcher, as `AsyncTopic.follow` and a watch over HTTP use it."""

    async def begin(self, here: Room) -> None:
        self.stream = here.watch(self.topic)

    async def ask(self, here: Room) -> None:
        async for record in self.stream:
            self.take([record])


class PollFollower(TaskFollower):
    """Long polls, one after the other, of each partition in turn."""

    async def begin(self, here: Room) -> None:
        self.nexts: dict[int, int] = {}

    async def ask(self, here: Room) -> None:
        while True:
            for partition in range(self.topic.partitions):
                offset = self.nexts.get(partition, 0)
                wait = 0.05 if self.topic.partitions > 1 else PATIENCE
                page = await poll(here.feeds, self.topic, partition, offset, Batch.records, wait_seconds=wait)
                self.take(page.rows)
                self.nexts[partition] = page.next


class ReaderFollower(Follower):
    """A named reader."""

    def read(self) -> None:
        for record in self.topic.reader("r").follow(stop=self.stopped):
            self.take([record])


class ReaderTask(StreamFollower):
    """A named reader in an event loop, as `AsyncReader.follow` does it."""

    async def begin(self, here: Room) -> None:
        watched = WatchedTopic(self.topic, self.topic.reader("r").following, Batch.records)
        self.stream = AsyncStream(Watcher(here.feeds, [watched]), self.topic.check_open)


class FollowStep(NamedTuple):
    """A step of a follower: where the gate is, and whether it holds what was asked for or what was found."""

    owner: Any
    name: str
    when: str

    def __str__(self) -> str:
        return f"{self.when} {self.name}"

    def guard(self, patched: pytest.MonkeyPatch, gate: StepGate) -> None:
        whole: Callable[..., Any] = getattr(self.owner, self.name)

        def held(*arguments: Any, **options: Any) -> Any:
            if self.when == "before":
                gate.hold()
            answer = whole(*arguments, **options)
            if self.when == "after" and _is_something(answer):
                gate.hold()
            return answer

        async def task_held(*arguments: Any, **options: Any) -> Any:
            if self.when == "before":
                await gate.hold_task()
            answer = await whole(*arguments, **options)
            if self.when == "after":
                await gate.hold_task()
            return answer

        patched.setattr(self.owner, self.name, task_held if asyncio.iscoroutinefunction(whole) else held)


def _is_something(answer: Any) -> bool:
    """Whether what was found is worth to be held: a page with records, or what is no page."""
    page = answer[-1] if isinstance(answer, tuple) else answer
    return not isinstance(page, Page) or bool(page.batches)


WHEN: Final = ("before", "after")
READ: Final = [FollowStep(Tiers, "read", when) for when in WHEN]
BEGIN: Final = [FollowStep(Topic, "following", when) for when in WHEN]
SHARED: Final = [FollowStep(Topic, "shard_page", when) for when in WHEN]
STEPS: Final[dict[type[Follower], list[FollowStep]]] = {
    Follower: [*READ],
    StreamFollower: [*READ, *SHARED, *BEGIN],
    PollFollower: [*READ, *SHARED, *[FollowStep(polling, "_reach", when) for when in WHEN]],
}
READERS: Final[dict[type[Follower], list[FollowStep]]] = {
    ReaderFollower: [*READ],
    ReaderTask: [*READ, *SHARED, *BEGIN],
}
"""Those that have a place which is stored."""


@dataclass
class Play:
    """A follower of a topic that is held inside a step, and what must come of it."""

    log: Storage
    topic: Topic
    follower: Follower
    gate: StepGate
    ended: set[int] = field(default_factory=set)
    """Offsets of partition 0 that were deleted before the step went on."""
    first: int = 0
    """Where the topic begins."""
    number: int = 0

    def append(self, count: int = 1, partition: int = 0) -> None:
        values = [b"old-%d" % number for number in range(self.number, self.number + count)]
        self.topic.append_many(values, partition=partition)
        self.number += count

    def lose(self) -> None:
        """The owner's lease has ended; the next append opens the shard again, in another epoch."""
        wal = wal_of(self.topic)
        wal.fence("the lease has ended")
        until(lambda: wal.closed)
        self.append()

    def delete(self) -> None:
        """End a record that is on its way to the follower."""
        offset = self.first + len(self.follower.got) + 1
        assert self.topic.delete_by_offset(offset, offset + 1) == 1
        self.ended.add(offset)

    def gets_all(self) -> None:
        """The follower gets what is left, and each record once and in order."""
        self.append(2)
        wanted = [Got(each.partition, each.offset, each.value) for each in self.topic.read()]
        seen = list(self.follower.got)
        until(lambda: self.follower.error is not None or set(wanted) <= set(self.follower.got))
        assert self.follower.error is None
        for partition in range(self.topic.partitions):
            got = [each for each in self.follower.got if each.partition == partition]
            # What it had before the deletion it keeps.
            expected = {each for each in [*wanted, *seen] if each.partition == partition}
            assert got == sorted(expected), "a record is missing, doubled, or out of order"
            assert not self.ended & {each.offset for each in got if partition == 0}, "a deleted record was given"

    def ends(self, *errors: type[ForebayError]) -> None:
        """The follower gets an error that says why, and no record that it must not see."""
        until(lambda: self.follower.error is not None)
        assert isinstance(self.follower.error, errors)
        offsets = [each.offset for each in self.follower.got]
        assert offsets == list(range(self.first, self.first + len(offsets))), (
            "a record is missing, doubled, or out of order"
        )
        assert all(each.value is not None and each.value.startswith(b"old-") for each in self.follower.got)


Event = Callable[[Play], Iterator[None]]


def nothing(play: Play) -> Iterator[None]:
    yield
    play.gets_all()


def delete_topic(play: Play) -> Iterator[None]:
    play.log.delete_topic(play.topic.name)
    yield
    play.ends(UnknownTopic)


def create_again(play: Play) -> Iterator[None]:
    play.log.delete_topic(play.topic.name)
    again = play.log.create_topic(play.topic.name)
    again.append_many([b"new-%d" % number for number in range(20)])
    yield
    play.ends(UnknownTopic)


def delete_record(play: Play) -> Iterator[None]:
    play.delete()
    yield
    play.gets_all()


def delete_before(play: Play) -> Iterator[None]:
    offset = play.first + len(play.follower.got) + 1
    play.topic.delete_before(offset)
    play.ended.add(offset - 1)
    yield
    play.gets_all()


def add_partition(play: Play) -> Iterator[None]:
    play.log.alter_topic(play.topic.name, partitions=2)
    play.append(2, partition=1)
    yield
    play.gets_all()


def lose_shard(play: Play) -> Iterator[None]:
    play.lose()
    yield
    play.gets_all()


def lose_shard_and_delete_record(play: Play) -> Iterator[None]:
    play.lose()
    play.delete()
    yield
    play.gets_all()


def lose_shard_twice(play: Play) -> Iterator[None]:
    play.lose()
    play.lose()
    yield
    play.gets_all()


def close_log(play: Play) -> Iterator[None]:
    with ThreadPoolExecutor(1) as threads:
        closing = threads.submit(play.log.close)
        yield
        closing.result(PATIENCE)
    play.ends(Closed)


def cancel_caller(play: Play) -> Iterator[None]:
    play.follower.cancel()
    yield
    play.gets_all()


def seek(play: Play) -> Iterator[None]:
    """The reader's place is set forward and back again: what is followed goes on, and the next one begins there."""
    reader = play.topic.reader("r")
    reader.ack_up_to(play.topic.offsets().next)
    place = reader.reset(EARLIEST)
    yield
    play.gets_all()
    assert reader.offset() == place
    assert [each.offset for each in reader.read()] == [each.offset for each in play.topic.read()]


EVENTS: Final[list[Event]] = [
    nothing,
    delete_topic,
    create_again,
    delete_record,
    delete_before,
    add_partition,
    lose_shard,
    lose_shard_and_delete_record,
    lose_shard_twice,
    close_log,
    cancel_caller,
]


@contextmanager
def playing(
    path: Path, face: type[Follower], step: FollowStep, patched: pytest.MonkeyPatch, *, at_end: bool
) -> Iterator[Play]:
    """A follower that is held inside the step, with records on their way: at the start, or where it has caught up."""
    # Every page is read by a thread, as where memory has none.
    patched.setattr(SegmentShard, "read_cached", lambda *_: None)
    patched.setattr("forebay.live.feeds.LOOK_SECONDS", 0.05)
    gate = StepGate()
    step.guard(patched, gate)
    with forebay.open(path, quick()) as log, ThreadPoolExecutor(1) as threads:
        topic = log.create_topic("t")
        play = Play(log, topic, face(topic), gate)
        if at_end:
            # What is read goes by what ended before, too.
            topic.append(b"deleted")
            topic.delete_by_offset(0, 1)
            play.first = 1
        play.append(FIRST)
        if not at_end:
            gate.armed.set()
        running = threads.submit(play.follower.run)
        try:
            if at_end:
                until(lambda: len(play.follower.got) == FIRST)
                gate.armed.set()
                play.append(FIRST)
            assert gate.reached.wait(PATIENCE)
            yield play
        finally:
            gate.released.set()
            play.follower.stop()
            running.result(PATIENCE)


def cases(face: type[Follower]) -> list[tuple[FollowStep, bool]]:
    """Where followers are held. Where one begins is decided once only."""
    return [
        (step, at_end) for step in (STEPS | READERS)[face] for at_end in (False, True) if not (at_end and step in BEGIN)
    ]


def play_one(path: Path, face: type[Follower], step: FollowStep, event: Event, *, at_end: bool) -> None:
    with pytest.MonkeyPatch.context() as patched, playing(path, face, step, patched, at_end=at_end) as play:
        rest = event(play)
        next(rest)
        play.gate.released.set()
        assert next(rest, None) is None, f"{face.__name__} {step}, then {event.__name__}"


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
@pytest.mark.parametrize("face", STEPS)
def test_a_follower_that_is_held_inside_a_step_gets_what_is_left_once_or_is_told(
    face: type[Follower], event: Event, tmp_path: Path, ledger: Ledger
) -> None:
    for number, (step, at_end) in enumerate(sampled(cases(face), one_in=2, seed=f"{face.__name__} {event.__name__}")):
        play_one(tmp_path / str(number), face, step, event, at_end=at_end)
        ledger.count("ends inside a step of a follower", event=event.__name__, step=str(step))


@pytest.mark.parametrize("face", READERS)
def test_a_place_that_is_set_while_its_reader_is_held_inside_a_step_stays_set(
    face: type[Follower], tmp_path: Path, ledger: Ledger
) -> None:
    for number, (step, at_end) in enumerate(cases(face)):
        play_one(tmp_path / str(number), face, step, seek, at_end=at_end)
        ledger.count("ends inside a step of a follower", event=seek.__name__, step=str(step))
