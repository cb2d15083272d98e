"""Removes what deleted topics leave: files, objects, recorded states, cursors, and what comes to light later.

The steps of one deletion, each of which may be repeated after a crash: record in every shard's state that it is being
deleted, so that no owner adds to it; stop the work on its shards here; note what other directories and late uploads may
still bring; remove local files, then objects, then states, loads, cursors and subscriptions; end the deletion. Objects
that landed late, and files in other directories, go later, by the notes. Knows the metadata store; engines come in as
functions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import msgspec

from forebay.catalog import StoredState, read_state
from forebay.catalog.transact import Done, Write, transact
from forebay.cleanup.objects import ObjectCleanup
from forebay.clock import Clock
from forebay.errors import ForebayError, Unavailable
from forebay.format.metadata.descriptor import Phase, ShardState
from forebay.format.metadata.keys import deleted_key, late_key, shard_of_state, state_key
from forebay.format.metadata.value import decode_value, encode_value
from forebay.loads.book import LoadBook
from forebay.metadata import (
    Compare,
    Delete,
    DeleteRange,
    Entry,
    Exists,
    MetadataStore,
    Operation,
    Put,
    RevisionIs,
)
from forebay.progress import ProgressStore
from forebay.settings import Settings
from forebay.subscriptions.definitions import SubscriptionStore
from forebay.topics import Engine, ShardRef, TopicName, TopicSpec, refs_of, shard_id
from forebay.workers import AtWork

logger = logging.getLogger(__name__)


class LateObjects(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A deleted topic of which something may still come to light.

    Its objects are looked for once more from `swept_from` (ms) on; 0 once they were. `holders` are directories that
    had shards of it and have not removed their files yet.
    """

    topic_id: str
    partitions: int
    swept_from: int
    holders: tuple[str, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to be looked for."""
        return not (self.swept_from or self.holders)

    @property
    def shard_ids(self) -> set[str]:
        """The ids of its shards."""
        return {shard_id(self.topic_id, number) for number in range(self.partitions)}


class KeepsTopics(Protocol):
    """An engine that keeps what it has of a topic elsewhere than in a directory per shard."""

    def remove_topic(self, topic_id: str, partitions: int) -> None:
        """On return nothing of the topic is left in it."""


class DeletionNotes:
    """Which topics are being deleted, and of which deleted topics something may still come to light."""

    def __init__(self, metadata: MetadataStore, prefix: str, clock: Clock) -> None:
        self._metadata = metadata
        self._prefix = prefix
        self._clock = clock

    def deleting(self) -> list[TopicSpec]:
        """Topics whose deletion has begun and not ended."""
        entries = self._metadata.range(f"{self._prefix}/deleted/")
        return [decode_value(entry.value, TopicSpec)[0] for entry in entries]

    def note_late(self, late: LateObjects) -> None:
        """Record what may still have something of a topic that is being deleted. What is recorded already stays."""
        self._note(late, [])

    def end_deletion(self, spec: TopicSpec, late: LateObjects | None) -> None:
        """Everything of the topic that is within reach is gone: forget that it was being deleted.

        With `late` it stays noted what may be found later.
        """
        deleted = Delete(deleted_key(spec.topic_id, prefix=self._prefix))
        if late is None:
            self._metadata.transaction([], [deleted])
        else:
            self._note(late, [deleted])

    def _note(self, late: LateObjects, operations: Sequence[Operation]) -> None:
        """Note it beside what is noted already, while the topic is being deleted."""
        key = late_key(late.topic_id, prefix=self._prefix)
        deleted = deleted_key(late.topic_id, prefix=self._prefix)

        def noted(entries: tuple[Entry | None, Entry | None]) -> Write[None] | Done[None]:
            deletion, entry = entries
            if deletion is None:
                return Done(None)
            known = decode_value(entry.value, LateObjects)[0] if entry is not None else late
            holders = tuple(sorted({*known.holders, *late.holders}))
            value = msgspec.structs.replace(late, swept_from=max(known.swept_from, late.swept_from), holders=holders)
            # Compared, so that one whose answer was lost cannot bring the note back when that was seen to already.
            compares: list[Compare] = [
                Exists(deleted),
                RevisionIs(key, entry.mod_revision if entry is not None else 0),
            ]
            return Write(compares, [Put(key, encode_value(value)), *operations], None)

        def found() -> tuple[Entry | None, Entry | None]:
            return self._metadata.get(deleted), self._metadata.get(key)

        what = f"the note on the deleted topic {late.topic_id} is not written"
        transact(self._metadata, found, noted, what=what, clock=self._clock)

    def late_objects(self) -> list[LateObjects]:
        """Deleted topics whose objects are to be looked for once more."""
        entries = self._metadata.range(late_key("", prefix=self._prefix))
        return [decode_value(entry.value, LateObjects)[0] for entry in entries]

    def late_swept(self, late: LateObjects) -> None:
        """Its objects were looked for once more."""
        self._change_late(late, lambda known: msgspec.structs.replace(known, swept_from=0))

    def late_removed(self, late: LateObjects, holder: str) -> None:
        """This directory has nothing of the topic any more."""

        def without(known: LateObjects) -> LateObjects:
            return msgspec.structs.replace(known, holders=tuple(other for other in known.holders if other != holder))

        self._change_late(late, without)

    def _change_late(self, late: LateObjects, change: Callable[[LateObjects], LateObjects]) -> None:
        """Try once: what does not succeed now is due again at the next look."""
        key = late_key(late.topic_id, prefix=self._prefix)
        entry = self._metadata.get(key)
        if entry is None:
            return
        known, unknown = decode_value(entry.value, LateObjects)
        noted = change(known)
        operation = Delete(key) if noted.is_over else Put(key, encode_value(noted, unknown=unknown))
        self._metadata.transaction([RevisionIs(key, entry.mod_revision)], [operation])


class Deletions:
    """Finishes deletions that were begun, here or by a process that has died. Each step may be repeated."""

    def __init__(
        self,
        metadata: MetadataStore,
        settings: Settings,
        clock: Clock,
        *,
        holder: str,
        objects: ObjectCleanup | None,
        drop: Callable[[ShardRef], bool],
        delete_shard: Callable[[ShardRef], None],
        forget_topic: Callable[[TopicSpec], None],
    ) -> None:
        """`holder` is this data directory, or the log in memory; `objects` removes from the stores of a directory.

        `drop` has no more work on a shard begin and says whether none is under way, without waiting. `delete_shard`
        removes what an engine keeps of a shard here, `forget_topic` what this process keeps by a topic's id or name.
        """
        self.notes = DeletionNotes(metadata, settings.metadata.prefix, clock)
        self._metadata = metadata
        self._settings = settings
        self._clock = clock
        self._holder = holder
        self._objects = objects
        self._drop = drop
        self._delete_shard = delete_shard
        self._forget_topic = forget_topic
        self._is_behind = False
        self._at_work = AtWork()
        """The ids of topics whose deletion a thread finishes now."""

    @property
    def is_behind(self) -> bool:
        """Whether a `finish` of this process has failed at something, so that it is worth trying again soon."""
        return self._is_behind

    def finish(self, name: TopicName | None = None) -> list[TopicSpec]:
        """Remove what deleted topics left; those of which something is left, which is logged and tried again later.

        With `name`, for a caller that creates or deletes a topic, only topics of that name: it does not wait for the
        objects of others. Without, for the background, all that no other thread is at.
        """
        left, has_failed = [], False
        for spec in self.notes.deleting():
            # Where there are no objects nothing takes long, and no worker comes by later.
            if name not in (None, spec.name) and self._objects is not None:
                continue
            with self._at_work.at(spec.topic_id) as is_free:
                if not is_free and name is None:
                    left.append(spec)
                elif not self._is_finished(spec):
                    left.append(spec)
                    has_failed = True
        self._is_behind = has_failed or (self._is_behind and name is not None)
        return [spec for spec in left if name in (None, spec.name)]

    def _is_finished(self, spec: TopicSpec) -> bool:
        try:
            self._finish(spec)
        except (OSError, ForebayError) as error:
            logger.warning("%s is deleted, but not all of it could be removed yet: %s", spec.name, error)
            return False
        return True

    def sweep_late(self) -> None:
        """Remove objects of deleted topics that landed late, once their grace is over."""
        objects = self._objects
        if objects is None or not objects.has_store:
            return
        for late in self.notes.late_objects():
            if late.swept_from and late.swept_from <= self._clock.now_ms():
                objects.check_begun()
                objects.clear_topic(late.topic_id, late.partitions)
                self.notes.late_swept(late)

    def clear_here(
        self, late: LateObjects, engines: Sequence[KeepsTopics], local: Callable[[], Collection[str]]
    ) -> None:
        """Remove what this directory has of a topic that another one has deleted, and note that nothing is left.

        `local` gives the ids of the shards that have files here or are open. While one of the topic is among them, it
        stays noted that this directory may have something. Nothing is done if it is not noted at all.
        """
        if self._holder not in late.holders:
            return
        for engine in engines:
            engine.remove_topic(late.topic_id, late.partitions)
        if self._objects is not None:
            self._objects.check_begun()
            self._objects.clear_topic(late.topic_id, late.partitions)
        if late.shard_ids.isdisjoint(local()):
            self.notes.late_removed(late, self._holder)

    def _finish(self, spec: TopicSpec) -> None:
        metadata, prefix = self._metadata, self._settings.metadata.prefix
        refs = refs_of(spec)
        keys = [state_key(spec.namespace, spec.topic, ref.partition, prefix=prefix) for ref in refs]
        states = []
        for ref, key in zip(refs, keys, strict=True):
            # First, so that no owner anywhere can add to what is being removed.
            states.append(mark_deleting(metadata, key, spec.topic_id, self._clock))
            self._stop_work(ref)
        # Before the states that say it are gone.
        late = self._late(spec, [state for state in states if state is not None])
        if late is not None:
            self.notes.note_late(late)
        for ref in refs:
            self._delete_shard(ref)
            # Again: a thread that found the topic before its deletion may have opened the shard since.
            self._stop_work(ref)
        if self._objects is not None and spec.engine is Engine.SEGMENT:
            self._objects.clear_topic(spec.topic_id, spec.partitions)
        for key in keys:
            forget_shard(metadata, key, spec.topic_id)
        LoadBook(metadata, prefix, self._clock).forget_topic(spec.topic_id)
        ProgressStore(metadata, prefix, self._clock).forget_topic(spec.namespace, spec.topic, spec.topic_id)
        SubscriptionStore(metadata, prefix, self._clock).forget_topic(spec)
        noted = {found.topic_id: found for found in self.notes.late_objects()} if late is None else {}
        self.notes.end_deletion(spec, late or noted.get(spec.topic_id))
        self._forget_topic(spec)

    def _stop_work(self, ref: ShardRef) -> None:
        """Have no more work on the shard begin in the background; `Unavailable` if some is under way."""
        if not self._drop(ref):
            raise Unavailable(f"{ref} is still worked on in the background")

    def _late(self, spec: TopicSpec, states: Sequence[ShardState]) -> LateObjects | None:
        """What may be found later, if anything: an object that was on its way, and files in other directories."""
        holders = set[str]().union(*(state.holders for state in states)) - {self._holder}
        has_store = self._objects is not None and self._objects.has_store
        if not (has_store or holders):
            return None
        grace_ms = self._settings.export.orphan_grace_s * 1000
        return LateObjects(
            topic_id=spec.topic_id,
            partitions=spec.partitions,
            # Where this directory knows none, each holder looks into the store that it knows.
            swept_from=self._clock.now_ms() + grace_ms if has_store else 0,
            holders=tuple(sorted(holders)),
        )


def mark_deleting(metadata: MetadataStore, key: str, incarnation: str, clock: Clock) -> ShardState | None:
    """On return no owner, present or future, can change this shard's history any more; its state, if it has one."""

    def deleting(stored: StoredState | None) -> Write[ShardState | None] | Done[ShardState | None]:
        if stored is None or stored.state.incarnation != incarnation:
            return Done(None)
        if stored.state.phase is Phase.DELETING:
            return Done(stored.state)
        state = msgspec.structs.replace(
            stored.state, phase=Phase.DELETING, epoch=stored.state.epoch + 1, owner=None, target=None
        )
        put = Put(key, encode_value(state, unknown=stored.unknown))
        return Write([RevisionIs(key, stored.revision)], [put], state)

    what = f"{shard_of_state(key)}: its deletion is not recorded"
    return transact(metadata, lambda: read_state(metadata, key), deleting, what=what, clock=clock)


def forget_shard(metadata: MetadataStore, key: str, incarnation: str) -> None:
    """Remove the state and the catalog of a deleted shard, unless the name belongs to a new topic already."""
    stored = read_state(metadata, key)
    if stored is not None and stored.state.incarnation == incarnation:
        metadata.transaction([RevisionIs(key, stored.revision)], [DeleteRange(key.removesuffix("state"))])
