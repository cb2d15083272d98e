"""Cursors: how far readers and groups have come in the partitions of topics.

A cursor says "everything below this offset is done". It lies in the metadata store, apart from any owner, so that
restarts and moves keep it; what was read and not acknowledged is read again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

from forebay.clock import Clock
from forebay.engines.operations import check_offset
from forebay.errors import Closed, ForebayError, Invalid, UnknownTopic
from forebay.locks import Rank, RankedCondition, RankedLock
from forebay.partitioning import check_partition
from forebay.progress import Progress, ProgressStore, ReaderName, check_progress
from forebay.reading import OnGap
from forebay.records import EARLIEST, Position, Record
from forebay.settings import ProgressSettings
from forebay.storage.checks import StoredOffset, checked_partition
from forebay.storage.streams import Following, Stream
from forebay.topics import TopicName, TopicSpec
from forebay.workers import Worker

if TYPE_CHECKING:
    from forebay.storage.topic import Topic

logger = logging.getLogger(__name__)

CommitAck = Literal["durable", "cached"]


class CachedCommits:
    """Places on their way into the progress store. Safe for concurrent use."""

    def __init__(self, store: ProgressStore, settings: ProgressSettings, clock: Clock) -> None:
        self._store = store
        self._settings = settings
        self._changed = RankedCondition(Rank.LEAF, "storage.cached_commits")
        self._writing = RankedLock(Rank.ROUND, "storage.commit_flush")
        self._pending: dict[tuple[ReaderName, int], Progress] = {}
        self._durable: dict[tuple[ReaderName, int], int] = {}
        """Where each stands in the store, as far as it was written here."""
        delay_s = settings.flush_interval_ms / 1000
        self.worker = Worker("forebay-commits", self._write_pending, clock=clock, delay_s=delay_s)

    def commit(self, name: ReaderName, partition: int, progress: Progress) -> int:
        """Note a place; where it stands on return, in memory. It never goes back, nor behind what is stored.

        Called by the committing thread; reads the metadata store before it takes the lock.
        """
        place = (name, partition)
        stored = self._store.get(name, partition, progress.incarnation)
        if stored is not None and stored.offset >= progress.offset:
            return self._further(stored, self.get(name, partition, progress.incarnation)).offset
        with self._changed:
            known = self._pending.get(place)
            if known is not None and known.incarnation == progress.incarnation and known.offset >= progress.offset:
                return known.offset
            self._pending[place] = progress
            moved = progress.offset - self._durable.get(place, 0)
        self.worker.wake()
        if moved >= self._settings.flush_records_min:
            self.flush()
        return progress.offset

    def found(self, name: ReaderName, partition: int, incarnation: str) -> Progress | None:
        """The place as stored, or as noted last if that is further."""
        stored = self._store.get(name, partition, incarnation)
        noted = self.get(name, partition, incarnation)
        return noted if stored is None else self._further(stored, noted)

    @staticmethod
    def _further(stored: Progress, noted: Progress | None) -> Progress:
        return noted if noted is not None and noted.offset > stored.offset else stored

    def get(self, name: ReaderName, partition: int, incarnation: str) -> Progress | None:
        """The place as noted last, if it is not in the store yet."""
        found = self._pending.get((name, partition))
        return found if found is not None and found.incarnation == incarnation else None

    def flush(self) -> None:
        """On return everything noted before is in the store, or logged as belonging to a topic that is no more."""
        with self._writing:
            pending = dict(self._pending)
            readers: dict[ReaderName, dict[int, Progress]] = {}
            for (name, partition), progress in pending.items():
                readers.setdefault(name, {})[partition] = progress
            for name, cursors in readers.items():
                self._write(name, cursors)

    def forget(self, name: ReaderName) -> None:
        """What is noted of this reader does not count any more."""
        with self._writing, self._changed:
            for place in [place for place in self._pending if place[0] == name]:
                del self._pending[place]
            self._durable = {place: offset for place, offset in self._durable.items() if place[0] != name}

    def forget_topic(self, namespace: str, topic: str) -> None:
        """A topic of this name was deleted: drop where its readers stood.

        What is noted stays: it may belong to a later topic of the name, and the next flush drops the rest.
        """
        with self._writing, self._changed:
            for place in [place for place in self._durable if place[0][:2] == (namespace, topic)]:
                del self._durable[place]

    def end(self) -> None:
        """Write what is left, and stop."""
        self.worker.stop()
        self.flush()

    def abandon(self) -> None:
        """In a forked child: the thread is not there, and the parent writes what it noted."""
        self.worker.abandon()
        self._changed = RankedCondition(Rank.LEAF, "storage.cached_commits")
        self._writing = RankedLock(Rank.ROUND, "storage.commit_flush")
        self._pending.clear()

    def _write(self, name: ReaderName, cursors: dict[int, Progress]) -> None:
        try:
            standing = self._store.ack_up_to(name, cursors)
        except UnknownTopic as error:
            logger.warning("%s", error)
            standing = {}
        with self._changed:
            for partition, progress in cursors.items():
                if partition in standing:
                    self._durable[name, partition] = standing[partition]
                if self._pending.get((name, partition)) is progress:
                    del self._pending[name, partition]

    def _write_pending(self) -> None:
        """The step of the background worker: what is not written is tried again after the same interval."""
        try:
            self.flush()
        finally:
            if self._pending:
                self.worker.wake()


class Reader:
    """One reader of one topic. Made by `Topic.reader`; safe for concurrent use by threads and processes."""

    def __init__(self, topic: Topic, name: str, store: ProgressStore) -> None:
        self.topic = topic
        self._name = ReaderName.of(topic.spec.namespace, topic.spec.topic, name)
        self._store = store

    @property
    def name(self) -> str:
        """What it is called."""
        return self._name.reader

    def offset(self, partition: int = 0) -> int | None:
        """Everything below is done; `None` before the first acknowledgement."""
        found = self._progress(partition)
        return found.offset if found is not None else None

    def note(self, partition: int = 0) -> str:
        """What was noted beside the place."""
        found = self._progress(partition)
        return found.note if found is not None else ""

    def ack(self, record: Record, note: str = "") -> int:
        """This record, and all before it in its partition, are done; see `ack_up_to`."""
        return self.ack_up_to(record.offset + 1, record.partition, note)

    def ack_up_to(self, offset: int, partition: int = 0, note: str = "") -> int:
        """Everything below `offset` is done; where the partition stands on return, durably.

        A place that is further already stays where it is, so a late or repeated call does no harm.
        """
        return self._store.ack_up_to(self._name, {partition: self.place(offset, partition, note)})[partition]

    def reset(self, position: Position | int = EARLIEST, partition: int = 0, note: str = "") -> int:
        """Set the place, also to an earlier one; the offset it stands for now."""
        offset = self.topic.resolve(position, partition)
        self._store.reset(self._name, partition, self.place(offset, partition, note))
        return offset

    def forget(self) -> None:
        """Remove every place of this reader."""
        self._store.forget(self._name, self.topic.partitions)

    def read(
        self, *, start: Position = EARLIEST, partition: int | None = None, on_gap: OnGap | None = None
    ) -> Stream[Record]:
        """What is not done yet, up to the end as it is now; from `start` where nothing was acknowledged."""
        return self.topic.read(self._places(start), partition=partition, on_gap=on_gap)

    def follow(
        self,
        *,
        start: Position = EARLIEST,
        partition: int | None = None,
        timeout: float | None = None,
        stop: threading.Event | None = None,
        on_gap: OnGap | None = None,
    ) -> Stream[Record]:
        """What is not done yet, and then new records as they come; see `Topic.follow`."""
        return self.topic.follow(self._places(start), partition=partition, timeout=timeout, stop=stop, on_gap=on_gap)

    def following(
        self, *, start: Position = EARLIEST, partition: int | None = None, on_gap: OnGap | None = None
    ) -> Following[Record]:
        """What `follow` asks again and again, for callers who wait in their own way."""
        return self.topic.following(self._places(start), partition=partition, on_gap=on_gap)

    def _places(self, start: Position) -> dict[int, Position | int]:
        places: dict[int, Position | int] = {}
        for partition in range(self.topic.partitions):
            done = self.offset(partition)
            places[partition] = start if done is None else StoredOffset(done)
        return places

    def _progress(self, partition: int) -> Progress | None:
        check_partition(checked_partition(partition), self.topic.partitions)
        return self._store.get(self._name, partition, self.topic.spec.topic_id)

    def place(self, offset: int, partition: int, note: str) -> Progress:
        """What is recorded for this place; `Invalid` if the partition has not come so far."""
        check_offset(offset)
        end = self.topic.offsets(partition).next
        if offset > end:
            raise Invalid(f"{self.topic.name}[{partition}] ends at {end}: nothing up to {offset} can be done yet")
        epoch = self.topic.epoch(partition)
        progress = Progress(offset=offset, incarnation=self.topic.spec.topic_id, epoch=epoch, note=note)
        check_progress(progress)
        return progress


class GroupOffset(NamedTuple):
    """Where a group stands in a partition: everything below `offset` is done, `lag` records are not.

    `end` and `lag` are `None` where this process cannot ask the partition how far it has come; `failure` says why.
    """

    topic: str
    partition: int
    offset: int
    end: int | None
    note: str
    failure: str | None = None

    @property
    def lag(self) -> int | None:
        return None if self.end is None else max(0, self.end - self.offset)


class Group:
    """One consumer group. Made by `Storage.group`; safe for concurrent use by threads and processes."""

    def __init__(
        self,
        name: str,
        topic: Callable[[str | TopicName], Topic],
        definition: Callable[[str | TopicName], TopicSpec],
        store: ProgressStore,
        commits: CachedCommits,
    ) -> None:
        ReaderName.of("default", "any", name)
        self.name = name
        self._topic = topic
        self._definition = definition
        self._store = store
        self._commits = commits

    def commit(
        self,
        topic: str | TopicName,
        offset: int,
        partition: int = 0,
        *,
        note: str = "",
        ack: CommitAck = "durable",
        expected: int | None = None,
    ) -> int:
        """Everything below `offset` is done; where the group stands on return.

        A group that is further already stays there. With `expected` it moves only from that very place, else
        `Conflict`: of two members that commit at once, one is told. `ack="durable"` returns when it is in the
        metadata store; `ack="cached"` at once, and a crash may take the last `progress.flush_interval_ms` of it.
        """
        if ack not in ("durable", "cached"):
            raise Invalid(f'ack is {ack!r:.40}; use "durable" or "cached"')
        handle = self._topic(topic)
        name, progress = self._place(handle, offset, partition, note)
        if ack == "cached":
            if expected is not None:
                raise Invalid('expected needs ack="durable": only the metadata store knows where all members stand')
            return self._commits.commit(name, partition, progress)
        if expected is None:
            return self._store.ack_up_to(name, {partition: progress})[partition]
        check_offset(expected)
        self._store.move_from(name, partition, expected, progress)
        return offset

    def fetch(self, topic: str | TopicName, partition: int = 0) -> int | None:
        """Everything below is done; `None` if the group has never committed there."""
        found = self._found(self._definition(topic), partition)
        return found.offset if found is not None else None

    def note(self, topic: str | TopicName, partition: int = 0) -> str:
        """What was noted with the last commit."""
        found = self._found(self._definition(topic), partition)
        return found.note if found is not None else ""

    def offsets(self) -> list[GroupOffset]:
        """Where the group stands in every topic that it has committed in, and how far each has come.

        A partition that cannot be asked here, as one in the memory of another process, keeps no other from being
        shown: its `end` is `None`, and `failure` says why.
        """
        self._commits.flush()
        found = []
        for namespace, topic, partition in self._store.places(self.name):
            try:
                spec = self._definition(TopicName(namespace, topic))
                # Committed in an earlier topic of that name, if it has no such partition.
                progress = self._found(spec, partition) if partition < spec.partitions else None
                if progress is not None:
                    end, failure = self._end(spec, partition)
                    found.append(
                        GroupOffset(f"{namespace}/{topic}", partition, progress.offset, end, progress.note, failure)
                    )
            except UnknownTopic:
                continue
        return found

    def _end(self, spec: TopicSpec, partition: int) -> tuple[int | None, str | None]:
        """How far the partition has come, or why this process cannot say it."""
        try:
            return self._topic(spec.name).offsets(partition).next, None
        except (Closed, UnknownTopic):
            raise
        except ForebayError as error:
            return None, str(error)

    def reset(self, topic: str | TopicName, position: Position | int, partition: int | None = None) -> dict[int, int]:
        """Set the group's place in a partition, or in all of them, also to an earlier one; where each stands now."""
        handle = self._topic(topic)
        partitions = range(handle.partitions) if partition is None else [checked_partition(partition)]
        self._commits.forget(self._name(handle.spec))
        standing = {}
        for number in partitions:
            offset = handle.resolve(position, number)
            name, progress = self._place(handle, offset, number, "")
            self._store.reset(name, number, progress)
            standing[number] = offset
        return standing

    def delete(self) -> int:
        """Forget every place of the group; how many there were."""
        places = self._store.places(self.name)
        for namespace, topic in sorted({(namespace, topic) for namespace, topic, _ in places}):
            name = ReaderName(namespace, topic, self.name)
            self._commits.forget(name)
            self._store.forget(name, 1 + max(p for n, t, p in places if (n, t) == (namespace, topic)))
        return len(places)

    def _name(self, spec: TopicSpec) -> ReaderName:
        return ReaderName(spec.namespace, spec.topic, self.name)

    def _found(self, spec: TopicSpec, partition: int) -> Progress | None:
        check_partition(checked_partition(partition), spec.partitions)
        return self._commits.found(self._name(spec), partition, spec.topic_id)

    def _place(self, topic: Topic, offset: int, partition: int, note: str) -> tuple[ReaderName, Progress]:
        return self._name(topic.spec), topic.reader(self.name).place(offset, partition, note)
