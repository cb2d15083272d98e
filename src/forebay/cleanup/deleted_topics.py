"""Removes what deleted topics leave: files, objects, recorded states, cursors, and what comes to light later.

The steps of one deletion, each of which may be repeated after a crash: record in every shard's state that it is being
deleted, so that no owner adds to it; stop the work on its shards here; note what other directories and late uploads may
still bring; wait until owners elsewhere have stopped; remove local files, then objects, then states, loads, cursors and
subscriptions; end the deletion. Objects that landed late, and files in other directories, go later, by the notes. Knows
the metadata store; engines come in as functions.

An owner elsewhere follows the definitions of topics. Once it finds its topic deleted it stops, and says so in the state
of the shard: it takes its session out (`owner_stopped`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from forebay.catalog import StoredState, read_state
from forebay.catalog.entries import decode_entry, read_or_log, readable
from forebay.catalog.transact import Done, Write, transact
from forebay.cleanup.objects import ObjectCleanup
from forebay.cleanup.tables import tables_of
from forebay.clock import Clock
from forebay.errors import Corrupt, ForebayError, Unavailable, UnsupportedFormat
from forebay.format.metadata.descriptor import Phase, ShardState
from forebay.format.metadata.keys import deleted_key, deletions_prefix, late_key, shard_of_state, state_key, topic_key
from forebay.format.metadata.value import encode_value
from forebay.loads.book import LoadBook
from forebay.metadata import (
    Absent,
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

OWNER_SECONDS: Final = 2.0
"""So long a deletion waits for owners elsewhere that live. They look for changes every `definitions.FOLLOW_SECONDS`."""
POLL_SECONDS: Final = 0.02


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
        """Topics whose deletion has begun and not ended. A note that cannot be read is logged and left out."""
        return [spec for _, spec in readable(self._metadata.range(deletions_prefix(prefix=self._prefix)), TopicSpec)]

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
            known = decode_entry(entry, LateObjects)[0] if entry is not None else late
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
        """Deleted topics whose objects are to be looked for once more. A note that cannot be read is left out."""
        return [late for _, late in readable(self._metadata.range(late_key("", prefix=self._prefix)), LateObjects)]

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
        known, unknown = decode_entry(entry, LateObjects)
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
        objects of others, but for owners of these topics elsewhere: on return those that live and answer have stopped.
        Without, for the background, all that no other thread is at.
        """
        left, has_failed = [], False
        patience_s = 0.0 if name is None else OWNER_SECONDS
        for spec in self.notes.deleting():
            # Where there are no objects nothing takes long, and no worker comes by later.
            if name not in (None, spec.name) and self._objects is not None:
                continue
            with self._at_work.at(spec.topic_id) as is_free:
                if not is_free and name is None:
                    left.append(spec)
                elif not self._is_finished(spec, patience_s):
                    left.append(spec)
                    has_failed = True
        self._is_behind = has_failed or (self._is_behind and name is not None)
        return [spec for spec in left if name in (None, spec.name)]

    def _is_finished(self, spec: TopicSpec, patience_s: float) -> bool:
        try:
            self._finish(spec, patience_s)
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

    def owner_stopped(self, ref: ShardRef) -> None:
        """This process owned the shard, whose topic another has deleted, and acknowledges nothing more: record that.

        Also where the deletion has not got to this shard yet: then its state says from now on that it is being deleted.
        A deletion may have been over before this process made the state; then nothing else was recorded since, and the
        state goes again.
        """
        metadata, prefix, spec = self._metadata, self._settings.metadata.prefix, ref.spec
        key = state_key(spec.namespace, spec.topic, ref.partition, prefix=prefix)
        notes = [kind(spec.topic_id, prefix=prefix) for kind in (deleted_key, late_key)]

        def read() -> tuple[StoredState | None, bool]:
            return read_state(metadata, key), any(metadata.get(note) is not None for note in notes)

        def stopped(found: tuple[StoredState | None, bool]) -> Write[None] | Done[None]:
            stored, is_noted = found
            if stored is None or (stored.state.incarnation, stored.state.holder) != (spec.topic_id, self._holder):
                return Done(None)
            unchanged = [RevisionIs(key, stored.revision)]
            if stored.state.phase is Phase.DELETING or is_noted:
                state = _deleting(stored.state, owner=None)
                put = Put(key, encode_value(state, unknown=stored.unknown))
                return Done(None) if state == stored.state else Write(unchanged, [put], None)
            # Only then: a definition that is missing without any note of a deletion is no reason to forget history.
            is_all = len(metadata.range(key.removesuffix("state"), limit=2)) == 1
            return Write(unchanged, [Delete(key)], None) if is_all else Done(None)

        what = f"{ref}: that its owner has stopped is not recorded"
        transact(metadata, read, stopped, what=what, clock=self._clock)

    def forget_left_over(self, ref: ShardRef, incarnation: str) -> None:
        """Forget a state of an earlier topic of this name, unless its deletion is under way: that will do it.

        By a note that cannot be read none is. A process that found the topic just before it was deleted may have made
        the state after the deletion was over.
        """
        prefix = self._settings.metadata.prefix
        note = self._metadata.get(deleted_key(incarnation, prefix=prefix))
        if note is None or read_or_log(note, TopicSpec) is None:
            key = state_key(ref.spec.namespace, ref.spec.topic, ref.partition, prefix=prefix)
            mark_deleting(self._metadata, key, incarnation, self._clock)
            forget_shard(self._metadata, key, incarnation, self._clock)

    def _await_owners(self, spec: TopicSpec, states: Mapping[str, ShardState | None], seconds: float) -> None:
        """Return once every owner of these shards in another directory has stopped or is gone, or the time is up."""
        deadline = self._clock.monotonic() + seconds
        left = {key: state for key, state in states.items() if state is not None and self._is_owned_elsewhere(state)}
        while left:
            key, state = next(iter(left.items()))
            if self._clock.monotonic() >= deadline:
                logger.warning(
                    "%s is deleted, but its owner in directory %s lives and has not said that it has stopped: it stops "
                    "once it can read the metadata store, at the latest when its session ends",
                    spec.name,
                    state.holder,
                )
                return
            self._clock.sleep(POLL_SECONDS)
            stored = read_state(self._metadata, key)
            if (
                stored is None
                or stored.state.incarnation != spec.topic_id
                or not self._is_owned_elsewhere(stored.state)
            ):
                del left[key]

    def _is_owned_elsewhere(self, state: ShardState) -> bool:
        """Whether another directory has the shard open, as far as is recorded: its session lives."""
        if state.owner is None or state.holder == self._holder:
            return False
        return self._metadata.session_alive(state.owner)

    def _finish(self, spec: TopicSpec, patience_s: float) -> None:
        metadata, prefix = self._metadata, self._settings.metadata.prefix
        refs = refs_of(spec)
        keys = [state_key(spec.namespace, spec.topic, ref.partition, prefix=prefix) for ref in refs]
        states: dict[str, ShardState | None] = {}
        for ref, key in zip(refs, keys, strict=True):
            # First, so that no owner anywhere can add to what is being removed.
            try:
                states[key] = mark_deleting(metadata, key, spec.topic_id, self._clock)
            except (Corrupt, UnsupportedFormat):
                self._forget_unreadable(spec, key)
                states[key] = None
            self._stop_work(ref)
        # Before the states that say it are gone.
        late = self._late(spec, [state for state in states.values() if state is not None])
        if late is not None:
            self.notes.note_late(late)
        if patience_s:
            self._await_owners(spec, states, patience_s)
        for ref in refs:
            self._delete_shard(ref)
            # Again: a thread that found the topic before its deletion may have opened the shard since.
            self._stop_work(ref)
        if self._objects is not None and spec.engine is Engine.SEGMENT:
            self._objects.clear_topic(spec.topic_id, spec.partitions)
        for key in keys:
            forget_shard(metadata, key, spec.topic_id, self._clock)
        LoadBook(metadata, prefix, self._clock).forget_topic(spec.topic_id)
        ProgressStore(metadata, prefix, self._clock).forget_topic(spec.namespace, spec.topic, spec.topic_id)
        SubscriptionStore(metadata, prefix, self._clock).forget_topic(spec)
        tables_of(metadata, prefix, spec, self._clock).forget()
        noted = {found.topic_id: found for found in self.notes.late_objects()} if late is None else {}
        self.notes.end_deletion(spec, late or noted.get(spec.topic_id))
        self._forget_topic(spec)

    def _forget_unreadable(self, spec: TopicSpec, key: str) -> None:
        """Remove a state that cannot be read, and its catalog: no topic of this name is defined that it could be of.

        An owner anywhere finds it gone at its next commit, and stops. Files in other directories are not known of.
        """
        entry = self._metadata.get(key)
        if entry is None:
            return
        no_other = Absent(topic_key(spec.namespace, spec.topic, prefix=self._settings.metadata.prefix))
        unchanged = RevisionIs(key, entry.mod_revision)
        if not self._metadata.transaction([unchanged, no_other], [DeleteRange(key.removesuffix("state"))]).succeeded:
            raise Unavailable(f"{key} cannot be read, and may be of another topic {spec.name} by now")

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


def _deleting(state: ShardState, *, owner: str | None) -> ShardState:
    """The state of a shard whose topic is being deleted; `owner` is the session that has not stopped yet, if any."""
    epoch = state.epoch if state.phase is Phase.DELETING else state.epoch + 1
    return msgspec.structs.replace(state, phase=Phase.DELETING, epoch=epoch, owner=owner, target=None)


def mark_deleting(metadata: MetadataStore, key: str, incarnation: str, clock: Clock) -> ShardState | None:
    """On return no owner, present or future, can change this shard's history any more; its state, if it has one.

    The owner stays recorded until it has stopped, see `Deletions.owner_stopped`.
    """

    def deleting(stored: StoredState | None) -> Write[ShardState | None] | Done[ShardState | None]:
        if stored is None or stored.state.incarnation != incarnation:
            return Done(None)
        if stored.state.phase is Phase.DELETING:
            return Done(stored.state)
        state = _deleting(stored.state, owner=stored.state.owner)
        put = Put(key, encode_value(state, unknown=stored.unknown))
        return Write([RevisionIs(key, stored.revision)], [put], state)

    what = f"{shard_of_state(key)}: its deletion is not recorded"
    return transact(metadata, lambda: read_state(metadata, key), deleting, what=what, clock=clock)


def forget_shard(metadata: MetadataStore, key: str, incarnation: str, clock: Clock) -> None:
    """Remove the state and the catalog of a deleted shard, unless the name belongs to a new topic already.

    Its last owner may write meanwhile that it has stopped (`Deletions.owner_stopped`): then the look is repeated.
    """

    def forgotten(stored: StoredState | None) -> Write[None] | Done[None]:
        if stored is None or stored.state.incarnation != incarnation:
            return Done(None)
        return Write([RevisionIs(key, stored.revision)], [DeleteRange(key.removesuffix("state"))], None)

    what = f"{shard_of_state(key)}: what is recorded of a deleted shard is not removed"
    transact(metadata, lambda: read_state(metadata, key), forgotten, what=what, clock=clock)
