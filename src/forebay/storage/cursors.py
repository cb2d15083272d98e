"""Cursors: how far readers, groups and subscriptions have come in the partitions of topics.

A cursor says "everything below this offset is done". It lies in the metadata store, apart from any owner, so that
restarts and moves keep it; what was read and not acknowledged is read again. `Cursors` knows them all, those that are
stored and those on their way. `Reader` moves the cursors of one topic, `Group` those of any topic by the reader of
its name there. Subscriptions (`storage.subscriptions`) go by the same `Cursors`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from forebay.arguments import StoredOffset, checked_partition
from forebay.catalog.entries import refused
from forebay.clock import Clock
from forebay.disk.forks import ForkGuard
from forebay.errors import Closed, Corrupt, ForebayError, Invalid, UnknownSubscription, UnknownTopic, UnsupportedFormat
from forebay.locks import Rank, RankedLock
from forebay.metadata import RevisionIs
from forebay.partitioning import check_partition
from forebay.progress import (
    MOVES_MAX,
    CursorEntry,
    CursorPlace,
    FoundCursor,
    Progress,
    ProgressStore,
    ReaderCursor,
    ReaderName,
    check_not_reserved,
    check_progress,
    moves_on,
)
from forebay.records import EARLIEST, CommitAck, GroupOffset, OnGap, Position, Record, check_offset
from forebay.settings import ProgressSettings
from forebay.storage.streams import Following, Stream
from forebay.topics import TopicName, TopicSpec
from forebay.workers import Worker

if TYPE_CHECKING:
    from forebay.storage.topic import Topic

logger = logging.getLogger(__name__)

_Place: TypeAlias = tuple[ReaderName, int, str]
"""A cursor: reader, partition, and the id of the topic, for a later topic may have the same name."""


class CursorSource(Protocol):
    """A cursor that moves often: it is asked where it stands when that is written."""

    def progress(self) -> Progress:
        """Where it stands now. Called by the thread that writes cursors."""


class Cursors:
    """The cursors of a log, stored and on their way. Safe for concurrent use.

    A cached commit is kept in memory. After `progress.flush_interval_ms` one worker, the flusher, writes those of all
    readers and groups together; one that is `progress.flush_records_min` ahead is written at once. If the process dies
    before, the group reads that much again; it skips nothing.
    """

    def __init__(self, store: ProgressStore, settings: ProgressSettings, clock: Clock) -> None:
        self._store = store
        self._settings = settings
        self._changing = RankedLock(Rank.LEAF, "storage.cached_commits")
        self._writing = RankedLock(Rank.ROUND, "storage.commit_flush")
        self._guard = ForkGuard()
        self._noted: dict[_Place, Progress] = {}
        """Commits that are not in the store yet, the furthest of each cursor."""
        self._moving: dict[_Place, CursorSource] = {}
        """Cursors that have moved and are asked where they stand once they are written."""
        self._asked: set[_Place] = set()
        """Cursors that a thread asks at present: they are not moving any more, and may not be noted yet."""
        self._is_ended = False
        """No commit is kept for later any more."""
        delay_s = settings.flush_interval_ms / 1000
        self.worker = Worker("forebay-commits", self._write_noted, clock=clock, delay_s=delay_s)

    def at(self, reader: str, spec: TopicSpec, partition: int) -> Progress | None:
        """The cursor as stored, or as committed last if that is further; `None` before the first commit."""
        self._guard.check("this log")
        check_partition(checked_partition(partition), spec.partitions)
        name = ReaderName(spec.namespace, spec.topic, reader)
        place = (name, partition, spec.topic_id)
        # In this order: one that is asked was moving before, and is noted afterwards.
        if place in self._moving or place in self._asked:
            with self._writing:
                self._ask(place)
        # In this order: what is not on its way any more is stored by the next look.
        noted = self._noted.get(place)
        return _further(self._store.get(name, partition, spec.topic_id), noted)

    def mark(self, name: ReaderName, partition: int, incarnation: str, source: CursorSource) -> bool:
        """A cursor has moved: this source is asked where it stands, in place of one before it.

        True if that is news: then the caller calls `write_soon`, once it holds no lock. Takes no lock and never waits;
        without effect once the log is closed.
        """
        place = (name, partition, incarnation)
        if self._is_ended or self._moving.get(place) is source:
            return False
        self._moving[place] = source
        return True

    def write_soon(self) -> None:
        """Have the cursors that have moved written, together with others. Never waits."""
        self.worker.wake()

    def write(self, name: ReaderName, incarnation: str) -> None:
        """On return all cursors of a reader or subscription in a topic are stored as they stood before."""
        self._guard.check("this log")
        self._flush(lambda place: place[0] == name and place[2] == incarnation)

    def commit(
        self, name: ReaderName, partition: int, progress: Progress, *, ack: CommitAck, expected: int | None = None
    ) -> int:
        """Move a cursor forward; where it stands on return. One that is further already stays there.

        With `expected` it moves only from that very place, else `Conflict`. Called by the committing thread, which
        holds no lock and waits for the metadata store.
        """
        self._guard.check("this log")
        if ack not in ("durable", "cached"):
            raise Invalid(f'ack is {ack!r:.40}; use "durable" or "cached"')
        if ack == "cached":
            if expected is not None:
                raise Invalid('expected needs ack="durable": only the metadata store knows where all members stand')
            return self._note(name, partition, progress)
        place = (name, partition, progress.incarnation)
        if expected is None:
            return self._commit(place, progress)
        check_offset(expected)
        # What was committed before counts, also where it is not stored yet.
        self._flush(lambda each: each == place)
        self._store.move_from(name, partition, expected, progress, defined=True)
        return progress.offset

    def reset(self, name: ReaderName, partition: int, progress: Progress) -> None:
        """Set a cursor, also to an earlier place. Commits that are on their way do not undo it."""
        self._guard.check("this log")
        with self._writing:
            self._moving.pop((name, partition, progress.incarnation), None)
            undone = self._noted_where(lambda place: place == (name, partition, progress.incarnation))
            self._store.reset(name, partition, progress, defined=True)
            self._drop(undone)

    def forget(
        self, name: ReaderName, partitions: int, subscription: str | None = None, *, held: Sequence[RevisionIs] = ()
    ) -> None:
        """Remove every cursor of a reader in these partitions, stored or on its way.

        Of a subscription with this id: cursors of a later one of its name stay. `held` must still hold then; else
        `Conflict`.
        """
        self._guard.check("this log")
        with self._writing:
            self._stop_asking(lambda place: place[0] == name)
            undone = self._noted_where(lambda place: place[0] == name)
            self._store.forget(name, partitions, subscription, held=held)
            self._drop(undone)

    def forget_topic(self, spec: TopicSpec) -> None:
        """A topic was deleted: commits in it are not written any more. Those in a later topic of its name are."""
        with self._writing:
            self._stop_asking(lambda place: place[2] == spec.topic_id)
            self._drop(self._noted_where(lambda place: place[2] == spec.topic_id))
        self._store.outdate_topic(spec.namespace, spec.topic)

    def of(self, reader: str) -> list[FoundCursor]:
        """Every cursor of this reader, in any topic."""
        self._guard.check("this log")
        self._flush(lambda place: place[0].reader == reader)
        return sorted(self._store.of(reader), key=lambda found: found[:3])

    def entries_of(self, reader: str) -> list[CursorEntry]:
        """Every cursor of this reader, in any topic, also those that cannot be read."""
        self._guard.check("this log")
        self._flush(lambda place: place[0].reader == reader)
        return list(self._store.entries_of(reader))

    def every(self) -> Iterator[ReaderCursor]:
        """Every cursor of every reader as it is stored; what is on its way is not waited for."""
        self._guard.check("this log")
        return self._store.every()

    def names(self, below: Sequence[str] = ("",)) -> list[str]:
        """The names of all readers that have a cursor, stored or on its way; Forebay's own are among them.

        `below` says in which topics: those whose name, and a slash, begins with one of these.
        """
        with contextlib.suppress(Corrupt, Invalid):
            # One that cannot be written keeps no other from being named.
            self.flush()
        # In this order: what is not on its way any more is stored by the next look.
        meant = tuple(below)
        noted = {name.reader for name, _, _ in self._unwritten() if f"{name.namespace}/{name.topic}/".startswith(meant)}
        return sorted(noted.union(self._store.names(below)))

    def flush(self) -> None:
        """On return every commit before is in the store, or logged as belonging to a topic that was deleted."""
        self._guard.check("this log")
        self._flush(lambda place: True)

    def end(self) -> None:
        """Write what is left, and stop. What cannot be written now is lost: the metadata store is closed next."""
        self.worker.stop()
        with self._changing:
            self._is_ended = True
        try:
            self.flush()
        finally:
            self._noted.clear()
            self._moving.clear()

    def _commit(self, place: _Place, progress: Progress) -> int:
        """Write a commit now; where the cursor stands on return. What is cached of the same cursor goes with it."""
        if place not in self._noted:
            return self._advance({place: progress})
        with self._writing:
            noted = self._noted.get(place)
            stands = self._advance({place: _further(progress, noted) or progress})
            if noted is not None:
                self._drop({place: noted})
            return stands

    def _note(self, name: ReaderName, partition: int, progress: Progress) -> int:
        """Keep a commit to be written later; where the cursor stands, as far as this process knows.

        Reads the metadata store only if the cursor is not known here, or would not move forward by what is known: an
        operator may have reset it elsewhere.
        """
        check_progress(progress)
        place = (name, partition, progress.incarnation)
        # In this order: what is not on its way any more is stored by the next look.
        before = self._noted.get(place)
        known = self._store.known(name, partition, progress.incarnation)
        ahead_of = _further(known, before)
        if ahead_of is None or ahead_of.offset >= progress.offset:
            known = self._store.get(name, partition, progress.incarnation)
            ahead_of = _further(known, before)
        with self._changing:
            if self._is_ended:
                raise Closed("this log is closed")
            ahead_of = _further(ahead_of, self._noted.get(place))
            if ahead_of is not None and ahead_of.offset >= progress.offset:
                return ahead_of.offset
            self._noted[place] = progress
        self.worker.wake()
        if progress.offset - (0 if known is None else known.offset) >= self._settings.flush_records_min:
            self._flush(lambda each: each == place)
        return progress.offset

    def _unwritten(self) -> list[_Place]:
        """Cursors that are not stored as they stand."""
        return list({**self._noted.copy(), **self._moving.copy()})

    def _ask(self, place: _Place) -> None:
        """Take in where a cursor stands that has moved. `_writing` is held: no older answer comes after a newer."""
        self._asked.add(place)
        try:
            source = self._moving.pop(place, None)
            if source is None:
                return
            try:
                progress = source.progress()
                with self._changing:
                    self._noted[place] = progress
            except BaseException:
                self._moving.setdefault(place, source)
                raise
        finally:
            self._asked.discard(place)

    def _stop_asking(self, is_meant: Callable[[_Place], bool]) -> None:
        for place in [place for place in self._moving.copy() if is_meant(place)]:
            self._moving.pop(place, None)

    def _noted_where(self, is_meant: Callable[[_Place], bool]) -> dict[_Place, Progress]:
        """Commits that are not stored yet."""
        return {place: noted for place, noted in self._noted.copy().items() if is_meant(place)}

    def _drop(self, noted: dict[_Place, Progress]) -> None:
        """Forget these commits; later ones of the same cursors stay. The caller holds `_writing`."""
        with self._changing:
            for place, progress in noted.items():
                if self._noted.get(place) is progress:
                    del self._noted[place]

    def _flush(self, is_meant: Callable[[_Place], bool]) -> None:
        """Write the commits of some cursors, many of them in each transaction.

        Runs in the flusher's thread, or in that of a caller who waits for it. A cursor that cannot be moved keeps no
        other from being written; its error is raised in the end, and it is tried again later.
        """
        failures: list[ForebayError] = []
        with self._writing:
            # Under the lock: while another thread asks where a cursor stands, it is neither moving nor noted.
            left = [place for place in self._unwritten() if is_meant(place)]
        while left:
            with self._writing:
                part, left = self._part(left)
                failures += self._write(part)
        for error in failures:
            raise error

    def _part(self, left: list[_Place]) -> tuple[dict[_Place, Progress], list[_Place]]:
        """The commits to be written next, each of another cursor, and those that come after them."""
        part: dict[_Place, Progress] = {}
        later: list[_Place] = []
        cursors: set[CursorPlace] = set()
        for number, place in enumerate(left):
            if len(part) == MOVES_MAX:
                later += left[number:]
                break
            self._ask(place)
            noted = self._noted.get(place)
            if noted is None:
                continue
            if place[:2] in cursors:
                # Of an earlier topic of that name: a transaction puts a key once.
                later.append(place)
                continue
            cursors.add(place[:2])
            part[place] = noted
        return part, later

    def _write(self, part: dict[_Place, Progress]) -> list[ForebayError]:
        """Write commits in one transaction, if no other process has moved one; what failed. `_writing` is held."""
        advanced = self._store.advance({(name, partition): noted for (name, partition, _), noted in part.items()})
        failures = []
        for place, noted in part.items():
            error = advanced.failed.get(place[:2])
            if isinstance(error, UnknownTopic | UnknownSubscription):
                logger.warning("a cached commit of %s is dropped: %s", place[0].reader, error)
            elif error is not None:
                failures.append(error)
                continue
            self._drop({place: noted})
        return failures

    def _advance(self, move: dict[_Place, Progress]) -> int:
        """Move one cursor forward; where it stands on return."""
        [((name, partition, _), progress)] = move.items()
        advanced = self._store.advance({(name, partition): progress})
        for error in advanced.failed.values():
            raise error
        return advanced.standing[name, partition]

    def _write_noted(self) -> None:
        """The step of the background worker: what is not written is tried again after the same interval."""
        try:
            self.flush()
        finally:
            if self._noted or self._moving:
                self.worker.wake()


def _further(stored: Progress | None, noted: Progress | None) -> Progress | None:
    if stored is None or (noted is not None and moves_on(stored, noted)):
        return noted
    return stored


class Reader:
    """One reader of one topic. Made by `Topic.reader`; safe for concurrent use by threads and processes."""

    def __init__(self, topic: Topic, name: str, cursors: Cursors) -> None:
        self.topic = topic
        self._name = ReaderName.of(topic.spec.namespace, topic.spec.topic, name)
        self._cursors = cursors

    @property
    def name(self) -> str:
        """What it is called."""
        return self._name.reader

    def progress(self, partition: int = 0) -> Progress | None:
        """The cursor with its note, of one moment; `None` before the first acknowledgement."""
        return self._cursors.at(self.name, self.topic.spec, partition)

    def offset(self, partition: int = 0) -> int | None:
        """Everything below is done; `None` before the first acknowledgement."""
        found = self._cursors.at(self.name, self.topic.spec, partition)
        return found.offset if found is not None else None

    def note(self, partition: int = 0) -> str:
        """What was noted beside the cursor."""
        found = self._cursors.at(self.name, self.topic.spec, partition)
        return found.note if found is not None else ""

    def ack(self, record: Record, note: str = "") -> int:
        """This record, and all before it in its partition, are done; see `ack_up_to`."""
        return self.ack_up_to(record.offset + 1, record.partition, note)

    def ack_up_to(
        self,
        offset: int,
        partition: int = 0,
        note: str = "",
        *,
        ack: CommitAck = "durable",
        expected: int | None = None,
    ) -> int:
        """Everything below `offset` is done; where the cursor stands on return, durably unless `ack` is `"cached"`.

        A cursor that is further already stays where it is, so a late or repeated call does no harm. For `ack` and
        `expected` see `Group.commit`.
        """
        check_not_reserved(self.name)
        progress = self._progress(offset, partition, note)
        return self._cursors.commit(self._name, partition, progress, ack=ack, expected=expected)

    def reset(self, position: Position | int = EARLIEST, partition: int = 0, note: str = "") -> int:
        """Set the cursor, also to an earlier place; the offset it stands for now."""
        check_not_reserved(self.name)
        offset = self.topic.resolve(position, partition)
        self._cursors.reset(self._name, partition, self._progress(offset, partition, note))
        return offset

    def forget(self) -> None:
        """Remove every cursor of this reader."""
        check_not_reserved(self.name)
        self._cursors.forget(self._name, self.topic.partitions)

    def read(
        self, *, start: Position = EARLIEST, partition: int | None = None, on_gap: OnGap | None = None
    ) -> Stream[Record]:
        """What is not done yet, up to the end as it is now; from `start` where nothing was acknowledged."""
        return self.topic.read(self._starts(start), partition=partition, on_gap=on_gap)

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
        return self.topic.waiting(self.following(start=start, partition=partition, on_gap=on_gap), timeout, stop)

    def following(
        self, *, start: Position = EARLIEST, partition: int | None = None, on_gap: OnGap | None = None
    ) -> Following[Record]:
        """What `follow` asks again and again, for callers who wait in their own way."""
        return self.topic.following(
            self._starts(start), partition=partition, on_gap=on_gap, start_of_added=self._start_of_added
        )

    def _start_of_added(self, partition: int) -> Position | int:
        """Where to begin in a partition that was added while the reader follows."""
        done = self.offset(partition)
        return EARLIEST if done is None else StoredOffset(done)

    def _starts(self, start: Position) -> dict[int, Position | int]:
        """Where to read on in each partition."""
        done = {partition: self.offset(partition) for partition in range(self.topic.partitions)}
        return {partition: start if at is None else StoredOffset(at) for partition, at in done.items()}

    def _progress(self, offset: int, partition: int, note: str) -> Progress:
        """What is stored for this place; `Invalid` if the partition has not come so far."""
        check_offset(offset)
        end = self.topic.offsets(partition).next
        if offset > end:
            raise Invalid(f"{self.topic.name}[{partition}] ends at {end}: nothing up to {offset} can be done yet")
        epoch = self.topic.epoch(partition)
        progress = Progress(offset=offset, incarnation=self.topic.spec.topic_id, epoch=epoch, note=note)
        check_progress(progress)
        return progress


class Group:
    """One consumer group: a reader of its name in every topic that it commits in.

    Made by `Storage.group`; safe for concurrent use by threads and processes.
    """

    def __init__(
        self,
        name: str,
        topic: Callable[[str | TopicName], Topic],
        definition: Callable[[str | TopicName], TopicSpec],
        cursors: Cursors,
    ) -> None:
        ReaderName.of("default", "any", name)
        self.name = name
        self._topic = topic
        self._definition = definition
        self._cursors = cursors

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
        `Conflict`: of two members that commit at once, one gets it. `ack="durable"` returns when it is in the
        metadata store; `ack="cached"` at once, and a crash may take the last `progress.flush_interval_ms` of it. The
        answer of a cached commit is what this process knows: where another member is further, its place stays.
        """
        return self._topic(topic).reader(self.name).ack_up_to(offset, partition, note, ack=ack, expected=expected)

    def fetch(self, topic: str | TopicName, partition: int = 0) -> int | None:
        """Everything below is done; `None` if the group has never committed there."""
        found = self._cursors.at(self.name, self._definition(topic), partition)
        return found.offset if found is not None else None

    def note(self, topic: str | TopicName, partition: int = 0) -> str:
        """What was noted with the last commit."""
        found = self._cursors.at(self.name, self._definition(topic), partition)
        return found.note if found is not None else ""

    def offsets(self) -> list[GroupOffset]:
        """Where the group stands in every topic that it has committed in, and how far each has come.

        A partition that cannot be asked here, as one in the memory of another process or of a topic whose definition
        cannot be read, keeps no other from being shown: its `end` is `None`, and `failure` says why.
        """
        found = []
        for namespace, topic, partition, progress in self._cursors.of(self.name):
            try:
                spec = self._definition(TopicName(namespace, topic))
                if progress.incarnation == spec.topic_id and partition < spec.partitions:
                    end, failure = self._end(spec, partition)
                    found.append(
                        GroupOffset(f"{namespace}/{topic}", partition, progress.offset, end, progress.note, failure)
                    )
            except UnknownTopic:
                continue
            except (Corrupt, UnsupportedFormat) as error:
                found.append(
                    GroupOffset(f"{namespace}/{topic}", partition, progress.offset, None, progress.note, str(error))
                )
        return found

    def unreadable_in(self) -> list[TopicName]:
        """The topics in which the group has a place that cannot be read. `offsets` leaves it out."""
        found = self._cursors.entries_of(self.name)
        places = [TopicName(one.namespace, one.topic) for one in found if refused(one.entry, Progress) is not None]
        return list(dict.fromkeys(places))

    def reset(self, topic: str | TopicName, position: Position | int, partition: int | None = None) -> dict[int, int]:
        """Set the group's cursor in a partition, or in all of them, also to an earlier place; where each stands now."""
        handle = self._topic(topic)
        partitions = range(handle.partitions) if partition is None else [checked_partition(partition)]
        reader = handle.reader(self.name)
        return {number: reader.reset(position, number) for number in partitions}

    def delete(self) -> int:
        """Forget every cursor of the group, also those that cannot be read; how many there were."""
        check_not_reserved(self.name)
        found = self._cursors.entries_of(self.name)
        partitions: dict[tuple[str, str], int] = {}
        for namespace, topic, partition, _ in found:
            partitions[namespace, topic] = max(partition + 1, partitions.get((namespace, topic), 0))
        for (namespace, topic), count in partitions.items():
            self._cursors.forget(ReaderName(namespace, topic, self.name), count)
        return len(found)

    def _end(self, spec: TopicSpec, partition: int) -> tuple[int | None, str | None]:
        """How far the partition has come, or why this process cannot say it."""
        try:
            return self._topic(spec.name).lag_end(partition), None
        except (Closed, UnknownTopic):
            raise
        except ForebayError as error:
            return None, str(error)
