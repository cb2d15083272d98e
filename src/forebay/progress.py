"""How far readers have come: cursors in the metadata store, apart from any owner, so that they survive a move.

A cursor says "everything below this offset is done". It belongs to one incarnation of a topic and never goes
back by itself. Knows the metadata store alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from forebay.catalog.transact import Done, Write, transact
from forebay.clock import Clock
from forebay.errors import Conflict, Invalid, UnknownTopic
from forebay.format.metadata.keys import progress_key, topic_key
from forebay.format.metadata.value import Unknown, decode_value, encode_value
from forebay.metadata import Delete, Entry, MetadataStore, Operation, Put, RevisionIs
from forebay.metadata.seam import OPERATIONS_MAX
from forebay.records import OFFSET_MAX
from forebay.topics import TopicSpec

READER_CHARACTERS_MAX = 100
NOTE_BYTES_MAX = 4096

_READER = re.compile(r"[A-Za-z0-9._-]+")


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """One reader's place in one partition: it has done everything below `offset`. `epoch` is the owner it read from."""

    offset: int
    incarnation: str
    epoch: int = 0
    note: str = ""
    """Whatever the reader wants to find again beside its place."""


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
    unknown: Unknown
    revision: int


class ProgressStore:
    """Cursors of all readers. Safe for concurrent use by threads and processes."""

    def __init__(self, store: MetadataStore, prefix: str, clock: Clock) -> None:
        self._store = store
        self._prefix = prefix
        self._clock = clock

    def get(self, name: ReaderName, partition: int, incarnation: str) -> Progress | None:
        """The cursor, if there is one for this incarnation of the topic."""
        stored = self._stored(self._key(name, partition))
        if stored is None or stored.progress.incarnation != incarnation:
            return None
        return stored.progress

    def ack_up_to(self, name: ReaderName, cursors: Mapping[int, Progress], *, defined: bool = False) -> dict[int, int]:
        """Move cursors forward; where each partition stands on return. All are durable, in as few transactions as fit.

        One that is further already stays where it is: a late or repeated acknowledgement does no harm. With `defined`
        a cursor is made only in a topic that the metadata store defines, else `UnknownTopic`: the deletion of the
        topic has removed its cursors, and would not remove this one.
        """
        standing: dict[int, int] = {}
        pending = dict(cursors)
        while pending:
            part = dict(list(pending.items())[: OPERATIONS_MAX // 2])
            standing |= self._move(name, part, defined=defined)
            for partition in part:
                del pending[partition]
        return standing

    def reset(self, name: ReaderName, partition: int, progress: Progress, *, defined: bool = False) -> None:
        """Set the cursor to a place, also an earlier one. It never undoes what is acknowledged after it.

        For `defined` see `ack_up_to`.
        """
        check_progress(progress)
        key = self._key(name, partition)

        def change(stored: _Stored | None) -> Write[None] | Done[None]:
            if stored is not None and stored.progress == progress:
                return Done(None)
            guards = self._guards(name, key, stored, progress, defined=defined)
            return Write(guards, [_put(key, stored, progress)], None)

        transact(self._store, lambda: self._stored(key), change, what=_not_moved(name), clock=self._clock)

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

        transact(self._store, lambda: self._stored(key), change, what=_not_moved(name), clock=self._clock)

    def places(self, reader: str | None = None) -> list[tuple[str, str, int]]:
        """Every (namespace, topic, partition) where this reader, or any, has a cursor."""
        return [(ns, topic, partition) for ns, topic, name, partition in self._all() if reader in (None, name)]

    def names(self) -> list[str]:
        """The names of all readers that have a cursor anywhere."""
        return sorted({name for _, _, name, _ in self._all()})

    def _all(self) -> list[tuple[str, str, str, int]]:
        prefix = f"{self._prefix}/progress/"
        parts = [entry.key.removeprefix(prefix).split("/") for entry in self._store.range(prefix)]
        return sorted((namespace, topic, name, int(partition)) for namespace, topic, name, partition in parts)

    def readers(self, namespace: str, topic: str) -> list[str]:
        """The names of all readers that have a cursor in the topic."""
        prefix = f"{self._prefix}/progress/{namespace}/{topic}/"
        return sorted({entry.key.removeprefix(prefix).split("/")[0] for entry in self._store.range(prefix)})

    def forget(self, name: ReaderName, partitions: int) -> None:
        """Remove every cursor of a reader."""
        keys = [self._key(name, partition) for partition in range(partitions)]
        for first in range(0, len(keys), OPERATIONS_MAX):
            self._remove(name, keys[first : first + OPERATIONS_MAX])

    def forget_topic(self, namespace: str, topic: str, incarnation: str) -> None:
        """Remove every cursor of a topic that was deleted; those of a new one of its name stay."""
        entries = self._store.range(f"{self._prefix}/progress/{namespace}/{topic}/")
        stale = [e for e in entries if decode_value(e.value, Progress)[0].incarnation == incarnation]
        for first in range(0, len(stale), OPERATIONS_MAX // 2):
            part = stale[first : first + OPERATIONS_MAX // 2]
            compares = [RevisionIs(entry.key, entry.mod_revision) for entry in part]
            self._store.transaction(compares, [Delete(entry.key) for entry in part])

    def _remove(self, name: ReaderName, keys: Sequence[str]) -> None:
        def read() -> list[Entry]:
            return [entry for key in keys if (entry := self._store.get(key)) is not None]

        def change(entries: list[Entry]) -> Write[None] | Done[None]:
            compares = [RevisionIs(entry.key, entry.mod_revision) for entry in entries]
            return Write(compares, [Delete(entry.key) for entry in entries], None) if entries else Done(None)

        what = f"not every cursor of {name.reader} is removed"
        transact(self._store, read, change, what=what, clock=self._clock)

    def _move(self, name: ReaderName, cursors: Mapping[int, Progress], *, defined: bool) -> dict[int, int]:
        for progress in cursors.values():
            check_progress(progress)

        def read() -> dict[int, _Stored | None]:
            return {partition: self._stored(self._key(name, partition)) for partition in cursors}

        def change(found: dict[int, _Stored | None]) -> Write[dict[int, int]] | Done[dict[int, int]]:
            compares, puts = list[RevisionIs](), list[Operation]()
            standing: dict[int, int] = {}
            for partition, progress in cursors.items():
                key, stored = self._key(name, partition), found[partition]
                standing[partition] = progress.offset
                if stored is not None and not moves_on(stored.progress, progress):
                    standing[partition] = stored.progress.offset
                    continue
                compares += self._guards(name, key, stored, progress, defined=defined)
                puts.append(_put(key, stored, progress))
            return Write(compares, puts, standing) if puts else Done(standing)

        return transact(self._store, read, change, what=_not_moved(name), clock=self._clock)

    def _guards(
        self, name: ReaderName, key: str, stored: _Stored | None, wanted: Progress, *, defined: bool = False
    ) -> list[RevisionIs]:
        """What must still hold when the cursor changes; `UnknownTopic` if it would go to a topic that was deleted."""
        compares = [RevisionIs(key, stored.revision if stored is not None else 0)]
        is_first = stored is None or stored.progress.incarnation != wanted.incarnation
        if is_first and (defined or stored is not None):
            topic = topic_key(name.namespace, name.topic, prefix=self._prefix)
            entry = self._store.get(topic)
            if entry is None and defined:
                raise UnknownTopic(
                    f"{name.namespace}/{name.topic} was deleted: {name.reader} has no place in it",
                    topic=f"{name.namespace}/{name.topic}",
                )
            if entry is not None and decode_value(entry.value, TopicSpec)[0].topic_id != wanted.incarnation:
                raise UnknownTopic(
                    f"{name.namespace}/{name.topic} was deleted and created again: "
                    f"what {name.reader} read of the one before does not count for it",
                    topic=f"{name.namespace}/{name.topic}",
                )
            compares.append(RevisionIs(topic, entry.mod_revision if entry is not None else 0))
        return compares

    def _stored(self, key: str) -> _Stored | None:
        entry = self._store.get(key)
        if entry is None:
            return None
        progress, unknown = decode_value(entry.value, Progress)
        return _Stored(progress, unknown, entry.mod_revision)

    def _key(self, name: ReaderName, partition: int) -> str:
        return progress_key(name.namespace, name.topic, name.reader, partition, prefix=self._prefix)


def _put(key: str, stored: _Stored | None, progress: Progress) -> Put:
    return Put(key, encode_value(progress, unknown=stored.unknown if stored is not None else None))


def _not_moved(name: ReaderName) -> str:
    return f"cursors of {name.reader} in {name.namespace}/{name.topic} are not moved"


def moves_on(stands: Progress, wanted: Progress) -> bool:
    """Whether the cursor goes forward: further, or into another incarnation of the topic."""
    return stands.incarnation != wanted.incarnation or wanted.offset > stands.offset


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
