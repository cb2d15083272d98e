"""How far readers have come: cursors in the metadata store, apart from any owner, so that they survive a move.

A cursor says "everything below this offset is done". It belongs to one incarnation of a topic and never goes
back by itself. Knows the metadata store alone.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from forebay.catalog.entries import decode_entry, read_or_log, readable
from forebay.catalog.transact import Done, Write, transact
from forebay.clock import Clock
from forebay.errors import (
    Conflict,
    Corrupt,
    ForebayError,
    Indeterminate,
    Invalid,
    Unavailable,
    UnknownSubscription,
    UnknownTopic,
)
from forebay.format.metadata.keys import all_progress_prefix, progress_key, subscription_key, topic_key
from forebay.format.metadata.value import Unknown, encode_value
from forebay.locks import Rank, RankedLock
from forebay.metadata import Absent, Delete, Entry, MetadataStore, Put, RevisionIs
from forebay.metadata.seam import OPERATIONS_MAX
from forebay.records import OFFSET_MAX, SpentReason
from forebay.topics import SubscriptionSpec, TopicSpec

READER_CHARACTERS_MAX = 100
NOTE_BYTES_MAX = 4096
ACKED_BYTES_MAX = 4096
"""What the offsets that are done above a cursor may take."""
ATTEMPTS_STORED_MAX = 64
"""Of so many records it is stored how often they were delivered."""
REMOVED_MAX = OPERATIONS_MAX - 1
"""Cursors removed in one transaction, which may compare a definition as well."""
MOVES_MAX = OPERATIONS_MAX // 2
"""Cursors moved in one transaction: each may compare its topic too."""
KNOWN_MAX = 100_000
"""Cursors whose place and revision a process remembers."""
FORGET_ATTEMPTS = 5
"""So often the cursors of a deleted topic are looked at again, if others still move them."""
PAGE_KEYS = 500
"""Cursors read at once where all are looked at."""

logger = logging.getLogger(__name__)

_READER = re.compile(r"[A-Za-z0-9._-]+")
_RESERVED = re.compile(r"router-[0-9a-f]{16}|copy-[0-9a-f]{32}|forebay\..*", re.DOTALL)


class AckedAbove(msgspec.Struct, frozen=True, kw_only=True):
    """Offsets that are done above a cursor: a roaring bitmap of `count` numbers, counted from `base`."""

    base: int
    count: int
    bitmap: bytes


class SpentNote(NamedTuple):
    """Why a record is spent, and what a consumer said last about it."""

    offset: int
    reason: SpentReason
    error: str | None = None


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """One reader's place in one partition: it has done everything below `offset`. `epoch` is the owner it read from.

    A subscription also has `acked`, what is done above, and `attempts`: how often records were delivered that are not
    done, as pairs of offset and number.
    """

    offset: int
    incarnation: str
    epoch: int = 0
    note: str = ""
    """Whatever the reader wants to find again beside its place."""
    acked: AckedAbove | msgspec.UnsetType = msgspec.UNSET
    attempts: tuple[tuple[int, int], ...] | msgspec.UnsetType = msgspec.UNSET
    run: str | msgspec.UnsetType = msgspec.UNSET
    """Drawn when a subscription with a dead-letter topic begins at a place: another one after each seek."""
    letters_to: str | msgspec.UnsetType = msgspec.UNSET
    """The dead-letter topic of the run; cursors of earlier versions do not say it."""
    spent: tuple[SpentNote, ...] | msgspec.UnsetType = msgspec.UNSET
    """Why records are spent that are not in the dead-letter topic yet."""
    subscription: str | msgspec.UnsetType = msgspec.UNSET
    """The id of the subscription whose cursor this is: a later one of its name goes by its own."""

    def is_of(self, subscription: str) -> bool:
        """Whether this may be the cursor of the subscription with this id; those of readers and groups have none."""
        return isinstance(self.subscription, msgspec.UnsetType) or self.subscription == subscription


class ReservedReader(str):
    """The name of a reader that is Forebay's own: of a router, a copy or a replay. Only such a name moves its cursors.

    A caller names readers by a plain `str`.
    """

    __slots__ = ()


class ReaderName(NamedTuple):
    """A reader (subscription or group) of one topic."""

    namespace: str
    topic: str
    reader: str

    @classmethod
    def of(cls, namespace: str, topic: str, reader: str) -> ReaderName:
        """Checked: 1 to 100 of A-Z a-z 0-9 . _ -"""
        named = isinstance(reader, str) and len(reader) <= READER_CHARACTERS_MAX and _READER.fullmatch(reader)
        if not named or reader in (".", ".."):
            raise Invalid(
                f"{reader!a:.120} is not a reader's name: use 1 to {READER_CHARACTERS_MAX} of A-Z a-z 0-9 . _ -"
            )
        return cls(namespace, topic, reader)


class _Stored(NamedTuple):
    progress: Progress
    unknown: Unknown | None
    revision: int


CursorPlace: TypeAlias = tuple[ReaderName, int]
"""A reader, and a partition of its topic."""


class FoundCursor(NamedTuple):
    """A cursor of a reader as it is stored."""

    namespace: str
    topic: str
    partition: int
    progress: Progress


class CursorEntry(NamedTuple):
    """A cursor of a reader by its key, whatever its value is."""

    namespace: str
    topic: str
    partition: int
    entry: Entry


class ReaderCursor(NamedTuple):
    """A cursor as it is stored, with the name of its reader."""

    namespace: str
    topic: str
    reader: str
    partition: int
    progress: Progress


class Advanced(NamedTuple):
    """What became of cursors that were to move forward: where each stands, or why it was not moved."""

    standing: dict[CursorPlace, int]
    failed: dict[CursorPlace, ForebayError]


class _Attempt(NamedTuple):
    """A transaction that moves cursors, and what it leaves out."""

    compares: list[RevisionIs]
    puts: list[Put]
    written: dict[CursorPlace, _Stored]
    """What it writes; the revision is that of the transaction."""
    advanced: Advanced
    """Cursors that stand further already, and those that cannot be moved."""


class _KnownCursors:
    """Cursors as this process last read or wrote them, so that a move forward needs no read. Safe for concurrent use.

    What is known may be outdated: every write compares the revision. The topics that came first are forgotten once
    there are more than `KNOWN_MAX` cursors.
    """

    def __init__(self) -> None:
        self._lock = RankedLock(Rank.LEAF, "progress.known")
        self._topics: dict[tuple[str, str], dict[tuple[str, int], _Stored | None]] = {}
        """By topic, so that a deleted one is forgotten at once; `None` for a cursor that is not there yet."""
        self._count = 0

    def get(self, place: CursorPlace) -> tuple[_Stored | None, bool]:
        """The cursor, and whether anything is known of it."""
        (namespace, topic, reader), partition = place
        cursors = self._topics.get((namespace, topic), {})
        at = (reader, partition)
        return cursors.get(at), at in cursors

    def put(self, place: CursorPlace, stored: _Stored | None) -> None:
        """Know this of a cursor, unless something later is known."""
        (namespace, topic, reader), partition = place
        with self._lock:
            cursors = self._topics.setdefault((namespace, topic), {})
            known = cursors.get((reader, partition))
            if known is not None and (stored is None or stored.revision < known.revision):
                return
            self._count += (reader, partition) not in cursors
            cursors[reader, partition] = stored
            while self._count > KNOWN_MAX:
                self._count -= len(self._topics.pop(next(iter(self._topics))))

    def drop(self, places: Iterable[CursorPlace]) -> None:
        """Know nothing of these any more: they are read before the next move."""
        with self._lock:
            for (namespace, topic, reader), partition in places:
                cursors = self._topics.get((namespace, topic))
                if cursors is not None and (reader, partition) in cursors:
                    del cursors[reader, partition]
                    self._count -= 1

    def drop_topic(self, namespace: str, topic: str) -> None:
        """Know nothing of the cursors in this topic any more."""
        with self._lock:
            self._count -= len(self._topics.pop((namespace, topic), ()))


class ProgressStore:
    """Cursors of all readers. Safe for concurrent use by threads and processes."""

    def __init__(self, store: MetadataStore, prefix: str, clock: Clock) -> None:
        self._store = store
        self._prefix = prefix
        self._clock = clock
        self._known = _KnownCursors()

    def get(self, name: ReaderName, partition: int, incarnation: str) -> Progress | None:
        """The cursor, if there is one for this incarnation of the topic."""
        stored = self._read((name, partition))
        if stored is None or stored.progress.incarnation != incarnation:
            return None
        return stored.progress

    def known(self, name: ReaderName, partition: int, incarnation: str) -> Progress | None:
        """The cursor as this process last read or wrote it, without a look into the store; `None` if it never did."""
        stored, _ = self._known.get((name, partition))
        return stored.progress if stored is not None and stored.progress.incarnation == incarnation else None

    def advance(self, moves: Mapping[CursorPlace, Progress]) -> Advanced:
        """Move up to `MOVES_MAX` cursors forward in one transaction; what became of each.

        One that is further already stays where it is. Cursors are made only in topics that the metadata store defines.
        A cursor that this process has read or written before is not read again. If another process has changed some of
        them, those are read and the others are written without a read. One that cannot be moved keeps no other from
        moving. Runs in the caller's thread, which waits for the store. Raises `Unavailable` or `Indeterminate` if the
        store does not answer: any of them may have moved then, and it may be repeated.
        """
        for progress in moves.values():
            check_progress(progress)
        advanced = Advanced({}, {})
        self._advance(moves, advanced)
        return advanced

    def ack_up_to(self, name: ReaderName, cursors: Mapping[int, Progress], *, defined: bool = False) -> dict[int, int]:
        """Move cursors forward; where each partition stands on return. All are durable, in as few transactions as fit.

        One that is further already stays where it is: a late or repeated acknowledgement does no harm. With `defined`
        a cursor is made only in a topic that the metadata store defines, else `UnknownTopic`: the deletion of the
        topic has removed its cursors, and would not remove this one.
        """
        for progress in cursors.values():
            check_progress(progress)
        advanced = Advanced({}, {})
        pending = [((name, partition), progress) for partition, progress in cursors.items()]
        for first in range(0, len(pending), MOVES_MAX):
            self._move(dict(pending[first : first + MOVES_MAX]), advanced, defined=defined)
            for error in advanced.failed.values():
                raise error
        return {partition: offset for (_, partition), offset in advanced.standing.items()}

    def reset(self, name: ReaderName, partition: int, progress: Progress, *, defined: bool = False) -> None:
        """Set the cursor to a place, also an earlier one. It never undoes what is acknowledged after it.

        For `defined` see `ack_up_to`.
        """
        check_progress(progress)
        key = self._key(name, partition)

        def change(stored: _Stored | None) -> Write[None] | Done[None]:
            if stored is not None and stored.progress == progress:
                return Done(None)
            if stored is not None:
                self._check_reset(name, partition, stored.progress, progress)
            guards = self._guards(name, key, stored, progress, defined=defined)
            return Write(guards, [_put(key, stored, progress)], None)

        what = _not_moved([(name, partition)])
        transact(self._store, lambda: self._stored(key), change, what=what, clock=self._clock)
        self._known.drop([(name, partition)])

    @staticmethod
    def _check_reset(name: ReaderName, partition: int, stands: Progress, wanted: Progress) -> None:
        """Raise unless the subscription is still the one that is moved, by the owner of the partition."""
        if stands.incarnation != wanted.incarnation or isinstance(wanted.subscription, msgspec.UnsetType):
            return
        if not stands.is_of(wanted.subscription):
            raise _deleted(name)
        if stands.epoch > wanted.epoch:
            topic = f"{name.namespace}/{name.topic}"
            raise Unavailable(
                f"{topic}[{partition}] has another owner by now: {name.reader} stays at {stands.offset}; seek there",
                topic=topic,
                partition=partition,
            )

    def move_from(
        self, name: ReaderName, partition: int, expected: int, progress: Progress, *, defined: bool = False
    ) -> None:
        """Move the cursor from exactly `expected` (0 if there is none yet); `Conflict` if it stands elsewhere.

        For `defined` see `ack_up_to`.
        """
        check_progress(progress)
        key = self._key(name, partition)
        is_first = True

        def change(stored: _Stored | None) -> Write[None] | Done[None]:
            nonlocal is_first
            current = stored is not None and stored.progress.incarnation == progress.incarnation
            stands = stored.progress.offset if stored is not None and current else 0
            if not is_first and stored is not None and stored.progress == progress:
                return Done(None)
            is_first = False
            if stands != expected:
                raise Conflict(
                    f"{name.reader} stands at {stands} in {name.namespace}/{name.topic}[{partition}], not {expected}: "
                    "another member has committed; fetch and go on from there",
                    topic=f"{name.namespace}/{name.topic}",
                    partition=partition,
                    expected=stands,
                )
            guards = self._guards(name, key, stored, progress, defined=defined)
            return Write(guards, [_put(key, stored, progress)], None)

        what = _not_moved([(name, partition)])
        transact(self._store, lambda: self._stored(key), change, what=what, clock=self._clock)
        self._known.drop([(name, partition)])

    def of(self, reader: str) -> Iterator[FoundCursor]:
        """Every cursor of this reader, topic by topic; those that cannot be read are logged and left out."""
        for namespace, topic, partition, entry in self.entries_of(reader):
            found = read_or_log(entry, Progress)
            if found is not None:
                yield FoundCursor(namespace, topic, partition, found[0])

    def entries_of(self, reader: str) -> Iterator[CursorEntry]:
        """Every cursor of this reader as it lies there, readable or not, topic by topic.

        Reads pages, and passes over the cursors of other readers.
        """
        after: str | None = None
        while page := self._store.range(self._all, start_after=after, limit=PAGE_KEYS):
            for entry in page:
                namespace, topic, name, partition = self._parts(entry.key)
                if name == reader:
                    yield CursorEntry(namespace, topic, int(partition), entry)
            last = page[-1].key
            namespace, topic, *_ = self._parts(last)
            wanted = f"{self._all}{namespace}/{topic}/{reader}"
            if last < f"{wanted}/":
                after = max(last, wanted)
            else:
                # Behind every reader of the topic: no name has a character behind this one.
                after = last if last.startswith(f"{wanted}/") else f"{self._all}{namespace}/{topic}/~"

    def every(self) -> Iterator[ReaderCursor]:
        """Every cursor of every reader, page by page; those that cannot be read are logged and left out."""
        after: str | None = None
        while page := self._store.range(self._all, start_after=after, limit=PAGE_KEYS):
            for entry, progress in readable(page, Progress):
                namespace, topic, reader, partition = self._parts(entry.key)
                yield ReaderCursor(namespace, topic, reader, int(partition), progress)
            after = page[-1].key

    def names(self, below: Iterable[str] = ("",)) -> list[str]:
        """The names of all readers that have a cursor in a topic whose name, and a slash, begins with one of `below`.

        Reads the cursors of those topics alone, in pages, and not every partition of each reader.
        """
        found: set[str] = set()
        for prefix in below:
            after: str | None = None
            while page := self._store.range(f"{self._all}{prefix}", start_after=after, limit=PAGE_KEYS):
                found.update(self._parts(entry.key)[2] for entry in page)
                # Behind every partition of the last reader: this character comes after all digits.
                after = f"{page[-1].key.rpartition('/')[0]}/:"
        return sorted(found)

    def readers(self, namespace: str, topic: str) -> list[str]:
        """The names of all readers that have a cursor in the topic."""
        prefix = f"{self._all}{namespace}/{topic}/"
        return sorted({entry.key.removeprefix(prefix).split("/")[0] for entry in self._store.range(prefix)})

    def forget(
        self, name: ReaderName, partitions: int, subscription: str | None = None, *, held: Sequence[RevisionIs] = ()
    ) -> None:
        """Remove every cursor of a reader; of a subscription with this id, those of a later one of its name stay.

        `held` must still hold when they go; else `Conflict`.
        """
        keys = [self._key(name, partition) for partition in range(partitions)]
        for first in range(0, len(keys), REMOVED_MAX):
            self._remove(name, keys[first : first + REMOVED_MAX], subscription, held)
        self._known.drop((name, partition) for partition in range(partitions))

    def outdate_topic(self, namespace: str, topic: str) -> None:
        """A topic was deleted: what this process knows of its cursors is outdated."""
        self._known.drop_topic(namespace, topic)

    def forget_topic(self, namespace: str, topic: str, incarnation: str) -> None:
        """Remove every cursor of a topic that was deleted; those of a new one of its name stay.

        One that cannot be read goes as well, unless there is a new one. `Unavailable` if another process keeps moving
        one of them.
        """
        no_new = Absent(topic_key(namespace, topic, prefix=self._prefix))
        for _ in range(FORGET_ATTEMPTS):
            entries = self._store.range(f"{self._all}{namespace}/{topic}/")
            stale = []
            for entry in entries:
                found = read_or_log(entry, Progress)
                if found is None:
                    unchanged = RevisionIs(entry.key, entry.mod_revision)
                    self._store.transaction([unchanged, no_new], [Delete(entry.key)])
                elif found[0].incarnation == incarnation:
                    stale.append(entry)
            is_done = True
            for first in range(0, len(stale), OPERATIONS_MAX // 2):
                part = stale[first : first + OPERATIONS_MAX // 2]
                compares = [RevisionIs(entry.key, entry.mod_revision) for entry in part]
                is_done &= self._store.transaction(compares, [Delete(entry.key) for entry in part]).succeeded
            if is_done:
                return
        raise Unavailable(f"{namespace}/{topic}: another process moves cursors of the deleted topic; try again")

    def _remove(
        self, name: ReaderName, keys: Sequence[str], subscription: str | None, held: Sequence[RevisionIs]
    ) -> None:
        def read() -> list[Entry]:
            for one in held:
                entry = self._store.get(one.key)
                if (0 if entry is None else entry.mod_revision) != one.mod_revision:
                    raise Conflict(f"{one.key} was changed at the same time: look at it again before deleting it")
            found = [entry for key in keys if (entry := self._store.get(key)) is not None]
            if subscription is None:
                return found
            return [entry for entry in found if _may_be_of(entry, subscription)]

        def change(entries: list[Entry]) -> Write[None] | Done[None]:
            compares = [RevisionIs(entry.key, entry.mod_revision) for entry in entries]
            return Write([*held, *compares], [Delete(entry.key) for entry in entries], None) if entries else Done(None)

        what = f"not every cursor of {name.reader} is removed"
        transact(self._store, read, change, what=what, clock=self._clock)

    def _advance(self, moves: Mapping[CursorPlace, Progress], advanced: Advanced) -> None:
        attempt = self._attempt(moves, self._known_or_read, defined=True)
        _add(advanced, attempt.advanced)
        if not attempt.puts:
            return
        left = {place: moves[place] for place in attempt.written}
        try:
            # Commit point: these readers stand there, and a cursor that another process has moved meanwhile stays.
            outcome = self._store.transaction(attempt.compares, attempt.puts)
        except Indeterminate:
            self._move(left, advanced, defined=True)
            return
        except Invalid as error:
            # Together they are more than the store takes at once: large notes.
            if len(left) == 1:
                advanced.failed.update(dict.fromkeys(left, error))
                return
            outcome = None
        if outcome is not None and outcome.succeeded:
            for place, written in attempt.written.items():
                self._known.put(place, written._replace(revision=outcome.revision))
                advanced.standing[place] = written.progress.offset
        elif len(left) == 1:
            self._move(left, advanced, defined=True)
        else:
            half = len(left) // 2
            self._advance(dict(list(left.items())[:half]), advanced)
            self._advance(dict(list(left.items())[half:]), advanced)

    def _move(self, moves: Mapping[CursorPlace, Progress], advanced: Advanced, *, defined: bool) -> None:
        """Move cursors forward by what is stored now, whatever is known of them."""

        def change(_: None) -> Write[_Attempt] | Done[_Attempt]:
            attempt = self._attempt(moves, self._stored_at, defined=defined)
            return Write(attempt.compares, attempt.puts, attempt) if attempt.puts else Done(attempt)

        self._known.drop(moves)
        what = _not_moved(list(moves))
        attempt = transact(self._store, lambda: None, change, what=what, clock=self._clock)
        _add(advanced, attempt.advanced)
        advanced.standing.update((place, written.progress.offset) for place, written in attempt.written.items())

    def _attempt(
        self,
        moves: Mapping[CursorPlace, Progress],
        find: Callable[[CursorPlace, Progress], _Stored | None],
        *,
        defined: bool,
    ) -> _Attempt:
        compares: dict[str, RevisionIs] = {}
        topics: dict[str, Entry | None] = {}
        attempt = _Attempt([], [], {}, Advanced({}, {}))
        for place, progress in moves.items():
            name, partition = place
            key = self._key(name, partition)
            try:
                stored = find(place, progress)
                if stored is not None and not moves_on(stored.progress, progress):
                    attempt.advanced.standing[place] = stored.progress.offset
                    continue
                guards = self._guards(name, key, stored, progress, defined=defined, topics=topics)
            except (Corrupt, Invalid, UnknownTopic, UnknownSubscription) as error:
                attempt.advanced.failed[place] = error
                continue
            compares.update((guard.key, guard) for guard in guards)
            attempt.puts.append(_put(key, stored, progress))
            attempt.written[place] = _Stored(progress, stored.unknown if stored is not None else None, 0)
        attempt.compares.extend(compares.values())
        return attempt

    def _known_or_read(self, place: CursorPlace, wanted: Progress) -> _Stored | None:
        """The cursor as it is known, or as it is stored where that would not be a move forward."""
        stored, is_known = self._known.get(place)
        if is_known and (stored is None or moves_on(stored.progress, wanted)):
            return stored
        return self._read(place)

    def _read(self, place: CursorPlace) -> _Stored | None:
        stored = self._stored(self._key(*place))
        self._known.put(place, stored)
        return stored

    def _stored_at(self, place: CursorPlace, _: Progress) -> _Stored | None:
        return self._stored(self._key(*place))

    def _guards(
        self,
        name: ReaderName,
        key: str,
        stored: _Stored | None,
        wanted: Progress,
        *,
        defined: bool = False,
        topics: dict[str, Entry | None] | None = None,
    ) -> list[RevisionIs]:
        """What must still hold when the cursor changes; `UnknownTopic` if it would go to a topic that was deleted.

        Each definition is read once for all cursors that share `topics`.
        """
        compares = [RevisionIs(key, stored.revision if stored is not None else 0)]
        is_first = stored is None or stored.progress.incarnation != wanted.incarnation
        if is_first and (defined or stored is not None):
            topic = topic_key(name.namespace, name.topic, prefix=self._prefix)
            topics = topics if topics is not None else {}
            if topic not in topics:
                topics[topic] = self._store.get(topic)
            entry = topics[topic]
            if entry is None and defined:
                raise UnknownTopic(
                    f"{name.namespace}/{name.topic} was deleted: {name.reader} has no place in it",
                    topic=f"{name.namespace}/{name.topic}",
                )
            if entry is not None and decode_entry(entry, TopicSpec)[0].topic_id != wanted.incarnation:
                raise UnknownTopic(
                    f"{name.namespace}/{name.topic} was deleted and created again: "
                    f"what {name.reader} read of the one before does not count for it",
                    topic=f"{name.namespace}/{name.topic}",
                )
            compares.append(RevisionIs(topic, entry.mod_revision if entry is not None else 0))
        if stored is None and not isinstance(wanted.subscription, msgspec.UnsetType):
            compares.append(self._subscribed(name, wanted.subscription))
        return compares

    def _subscribed(self, name: ReaderName, subscription: str) -> RevisionIs:
        """What must still hold where a subscription has no cursor yet: that it is defined; else `UnknownSubscription`.

        Its deletion has removed its cursors, and would not remove this one.
        """
        key = subscription_key(name.namespace, name.topic, name.reader, prefix=self._prefix)
        entry = self._store.get(key)
        if entry is None or decode_entry(entry, SubscriptionSpec)[0].subscription_id != subscription:
            raise _deleted(name)
        return RevisionIs(key, entry.mod_revision)

    def _stored(self, key: str) -> _Stored | None:
        entry = self._store.get(key)
        if entry is None:
            return None
        progress, unknown = decode_entry(entry, Progress)
        return _Stored(progress, unknown, entry.mod_revision)

    @property
    def _all(self) -> str:
        """Every cursor is below this key."""
        return all_progress_prefix(prefix=self._prefix)

    def _parts(self, key: str) -> list[str]:
        """Namespace, topic, reader and partition of a cursor."""
        return key.removeprefix(self._all).split("/")

    def _key(self, name: ReaderName, partition: int) -> str:
        return progress_key(name.namespace, name.topic, name.reader, partition, prefix=self._prefix)


def _may_be_of(entry: Entry, subscription: str) -> bool:
    """Whether the cursor is of the subscription with this id; one that cannot be read is of use to no other."""
    found = read_or_log(entry, Progress)
    return found is None or found[0].is_of(subscription)


def _put(key: str, stored: _Stored | None, progress: Progress) -> Put:
    return Put(key, encode_value(progress, unknown=stored.unknown if stored is not None else None))


def _not_moved(places: Sequence[CursorPlace]) -> str:
    name, partition = places[0]
    others = f" and {len(places) - 1} other cursors" if len(places) > 1 else ""
    return f"the cursor of {name.reader} in {name.namespace}/{name.topic}[{partition}]{others} did not move"


def _add(advanced: Advanced, found: Advanced) -> None:
    advanced.standing.update(found.standing)
    advanced.failed.update(found.failed)


def is_reserved(reader: str) -> bool:
    """Whether the name is one that Forebay keeps for the cursors of routers, of copies and of replays."""
    return _RESERVED.fullmatch(reader) is not None


def check_not_reserved(reader: str) -> None:
    """`Invalid` for a name that Forebay keeps, unless it is Forebay that gives it.

    A caller who could move such a cursor would make a router, a copy or a replay skip records, or repeat them.
    """
    if is_reserved(reader) and not isinstance(reader, ReservedReader):
        raise Invalid(
            f"{reader!r} is a place that Forebay keeps for a router, a copy or a replay, and no caller moves it: take "
            "another name; a router is paused, altered and deleted as a router"
        )


def moves_on(stands: Progress, wanted: Progress) -> bool:
    """Whether the cursor goes forward: further, or into another incarnation of the topic.

    That of a subscription is moved by the owner of its partition alone, never by one before it, nor for one that was
    deleted; at the same offset, what is done above and how often records were delivered is news, too.
    """
    if stands.incarnation != wanted.incarnation:
        return True
    if not is_same_subscription(stands, wanted):
        return False
    if isinstance(wanted.acked, msgspec.UnsetType):
        return wanted.offset > stands.offset
    if wanted.epoch < stands.epoch or wanted.offset < stands.offset:
        return False
    return _said(wanted) != _said(stands)


def is_same_subscription(stands: Progress, wanted: Progress) -> bool:
    """Whether a cursor that stands is that of the subscription for which another is to be stored, if for any."""
    return isinstance(wanted.subscription, msgspec.UnsetType) or stands.is_of(wanted.subscription)


def _deleted(name: ReaderName) -> UnknownSubscription:
    topic = f"{name.namespace}/{name.topic}"
    return UnknownSubscription(
        f"the subscription {name.reader} of {topic} was deleted: what was acknowledged in it counts no more; "
        "subscribe again",
        topic=topic,
    )


def _said(progress: Progress) -> tuple[object, ...]:
    """What the cursor of a subscription says beside its owner."""
    return progress.offset, progress.acked, progress.attempts, progress.run, progress.letters_to, progress.spent


def check_progress(progress: Progress) -> None:
    """Raise `Invalid` unless this can be stored."""
    if not 0 <= progress.offset <= OFFSET_MAX:
        raise Invalid(f"offset is {progress.offset}; allowed: 0 to {OFFSET_MAX}")
    if not isinstance(progress.note, str):
        raise Invalid(f"the note beside a cursor is {type(progress.note).__name__}, not str")
    try:
        size = len(progress.note.encode())
    except UnicodeEncodeError as error:
        raise Invalid(f"the note beside a cursor, {progress.note!a:.80}, cannot be written as UTF-8") from error
    if size > NOTE_BYTES_MAX:
        raise Invalid(f"the note beside a cursor has more than {NOTE_BYTES_MAX} bytes")
