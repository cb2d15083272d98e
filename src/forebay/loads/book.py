"""Bulk loads as the metadata store knows them: offered once, then committed or given up, for ever.

While a load is not over, notes below `offers/` say where each partition's part was attached; each is written in
the very transaction that attaches it. A streaming query's batch is recorded in the very transaction that commits its
load, compared with the batch before. Knows the metadata store alone.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import msgspec

from forebay.bulk import BackfillPlan, BackfillState
from forebay.catalog import ShardCatalog
from forebay.catalog.entries import decode_entry, read_or_log
from forebay.catalog.transact import Done, Write, transact
from forebay.clock import Clock
from forebay.errors import Conflict, Invalid, UnknownLoad, UnknownTopic
from forebay.format.metadata.descriptor import LoadStatus, SegmentDescriptor, gap_descriptor
from forebay.format.metadata.keys import (
    attached_key,
    backfill_key,
    load_key,
    offer_key,
    offers_prefix,
    sink_key,
    topic_key,
)
from forebay.format.metadata.value import Unknown, encode_value
from forebay.loads.prepare import Load
from forebay.manifests import ManifestRef
from forebay.metadata import Absent, Compare, Delete, DeleteRange, Exists, MetadataStore, Operation, Put, RevisionIs
from forebay.records import Gap, Reason
from forebay.topics import TopicSpec

logger = logging.getLogger(__name__)

PAGE_KEYS = 100
LOOKED_MAX = 10_000
"""Loads of all topics that one page of a list looks at."""
BACKFILL_ID_MAX = 64
UNREADABLE_LOAD = "restore the metadata store from a backup, or abandon it while it is not over"
UNREADABLE_SINK = "restore the metadata store from a backup, or begin with a new checkpoint location"
UNREADABLE_BACKFILL = "restore the metadata store from a backup, or give the backfill another id"
NEVER_OFFERED = ManifestRef(object_key="", bytes=0, content_hash="")


class AttachedPart(msgspec.Struct, frozen=True):
    """The offsets that one partition's part of a load was given."""

    start: int
    end: int


class StoredLoad(NamedTuple):
    """A load as found, with what is needed to change it."""

    load: Load
    unknown: Unknown
    revision: int


class SinkState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far a streaming query has come in a topic.

    `batch_id` is the last batch that the topic has, `load_id` what brought it (`None` if it was empty). `offered` is
    the newest load of a later batch; what has become of it, the load itself says.
    """

    topic_id: str
    batch_id: int = -1
    load_id: str | None = None
    offered: str | None = None


class StoredSink(NamedTuple):
    """A sink as found, with what is needed to change it; revision 0 if it is not there yet."""

    state: SinkState
    unknown: Unknown | None
    key: str
    revision: int

    def changed(self, state: SinkState) -> tuple[Compare, Operation]:
        """What a transaction that changes it compares and writes."""
        return RevisionIs(self.key, self.revision), Put(self.key, encode_value(state, unknown=self.unknown))


class LoadBook:
    """All loads of a metadata store. Stateless: every call asks the store. Safe for concurrent use."""

    def __init__(self, metadata: MetadataStore, prefix: str, clock: Clock) -> None:
        self._metadata = metadata
        self._prefix = prefix
        self._clock = clock

    def key(self, load_id: str) -> str:
        """Where a load stands."""
        return load_key(load_id, prefix=self._prefix)

    def note(self, load_id: str, partition: int, part: AttachedPart) -> Put:
        """What a transaction that attaches a part writes down beside it."""
        return Put(attached_key(load_id, partition, prefix=self._prefix), encode_value(part))

    def find(self, load_id: str) -> StoredLoad | None:
        """The load; `None` only if the store says that there is none."""
        entry = self._metadata.get(self.key(load_id))
        if entry is None:
            return None
        load, unknown = decode_entry(entry, Load, UNREADABLE_LOAD)
        return StoredLoad(load, unknown, entry.mod_revision)

    def get(self, load_id: str) -> StoredLoad:
        """The load, which exists."""
        found = self.find(load_id)
        if found is None:
            raise UnknownLoad(f"there is no load {load_id}: offer it first")
        return found

    def page(self, topic_id: str, *, after: str | None, limit: int) -> tuple[list[tuple[str, Load]], str | None]:
        """Loads into a topic, by id, and the id to go on after if there may be more. Looks at `LOOKED_MAX` at most.

        Those that cannot be read are logged and left out.
        """
        found: list[tuple[str, Load]] = []
        prefix = self.key("")
        looked, last = 0, after
        while looked < LOOKED_MAX:
            start_after = None if last is None else self.key(last)
            entries = self._metadata.range(prefix, start_after=start_after, limit=PAGE_KEYS)
            for entry in entries:
                last = entry.key.removeprefix(prefix)
                load = read_or_log(entry, Load)
                if load is not None and load[0].topic_id == topic_id:
                    found.append((last, load[0]))
                    if len(found) == limit:
                        return found, last
            looked += len(entries)
            if len(entries) < PAGE_KEYS:
                return found, None
        return found, last

    def pending(self) -> dict[str, dict[int, AttachedPart]]:
        """Every load that is not over, with the partitions that it is attached to.

        One of which a part cannot be read is logged and left out: nothing is done for it meanwhile.
        """
        found: dict[str, dict[int, AttachedPart]] = {}
        unreadable: set[str] = set()
        for entry in self._metadata.range(offers_prefix(prefix=self._prefix)):
            load_id, _, what = entry.key.removeprefix(offers_prefix(prefix=self._prefix)).partition("/")
            parts = found.setdefault(load_id, {})
            if what.isdigit():
                part = read_or_log(entry, AttachedPart)
                if part is None:
                    unreadable.add(load_id)
                else:
                    parts[int(what)] = part[0]
        return {load_id: parts for load_id, parts in found.items() if load_id not in unreadable}

    def pending_ids(self) -> set[str]:
        """The ids of all loads that are not over."""
        below = offers_prefix(prefix=self._prefix)
        return {entry.key.removeprefix(below).partition("/")[0] for entry in self._metadata.range(below)}

    def attached(self, load_id: str) -> dict[int, AttachedPart]:
        """The partitions that a load which is not over is attached to."""
        below = offers_prefix(load_id, prefix=self._prefix)
        entries = {entry.key.removeprefix(below): entry for entry in self._metadata.range(below)}
        return {int(w): decode_entry(entry, AttachedPart)[0] for w, entry in entries.items() if w.isdigit()}

    def part(self, load_id: str, partition: int) -> AttachedPart | None:
        """Where a load which is not over is attached to one partition, if it is."""
        entry = self._metadata.get(attached_key(load_id, partition, prefix=self._prefix))
        return decode_entry(entry, AttachedPart)[0] if entry is not None else None

    def sink(self, load: Load) -> StoredSink:
        """How far the streaming query that the load is of has come in its topic."""
        assert load.sink is not None
        key = sink_key(load.sink.query_id, load.namespace, load.topic, prefix=self._prefix)
        entry = self._metadata.get(key)
        if entry is None:
            return StoredSink(SinkState(topic_id=load.topic_id), None, key, 0)
        state, unknown = decode_entry(entry, SinkState, UNREADABLE_SINK)
        return StoredSink(state, unknown, key, entry.mod_revision)

    def backfill(self, spec: TopicSpec, backfill_id: str) -> BackfillState:
        """How far a backfill has come in a topic; `Invalid` for what is no id of one."""
        _check_backfill_id(backfill_id)
        query_id = f"backfill-{backfill_id}-{spec.topic_id[:12]}"
        sink = self._metadata.get(sink_key(query_id, spec.namespace, spec.topic, prefix=self._prefix))
        entry = self._metadata.get(backfill_key(backfill_id, spec.topic_id, prefix=self._prefix))
        return BackfillState(
            query_id=query_id,
            done=0 if sink is None else decode_entry(sink, SinkState, UNREADABLE_BACKFILL)[0].batch_id + 1,
            plan=None if entry is None else decode_entry(entry, BackfillPlan, UNREADABLE_BACKFILL)[0],
        )

    def begin_backfill(self, spec: TopicSpec, backfill_id: str, plan: BackfillPlan) -> BackfillState:
        """From here on the id stands for these rows: `Conflict` if it does for others. Harmless when repeated."""
        _check_backfill_id(backfill_id)
        key = backfill_key(backfill_id, spec.topic_id, prefix=self._prefix)
        self._metadata.transaction([Absent(key)], [Put(key, encode_value(plan))])
        found = self.backfill(spec, backfill_id)
        if found.plan != plan:
            raise Conflict(
                f"backfill {backfill_id} into {spec.name} brings other rows, or the same ones cut otherwise: files, "
                "columns and files_each must be as they were; give a backfill of other rows another id",
                topic=spec.name,
            )
        return found

    def offer(self, load_id: str, load: Load) -> Load:
        """Let the owners of its partitions attach it. Harmless when repeated; an id is never used for another load."""
        _check_names(load_id, load)

        def change(found: StoredLoad | None) -> Write[Load] | Done[Load]:
            if found is None:
                return Write(*self._offered(load_id, load), load)
            if (found.load.topic_id, found.load.manifest.content_hash) != (load.topic_id, load.manifest.content_hash):
                raise Conflict(f"load {load_id} is {found.load.status} and brings something else: take another id")
            return Done(found.load)

        what = f"load {load_id} is not offered"
        return transact(self._metadata, lambda: self.find(load_id), change, what=what, clock=self._clock)

    def offer_batch(self, load_id: str, load: Load) -> str | None:
        """Offer what a batch of a streaming query brings, unless the topic has that batch by another: then `None`.

        Else the load that brings it: an earlier one of the same batch that is not over goes first, and this one is
        then never offered. A load without partitions only records its batch. Harmless when repeated.
        """
        _check_names(load_id, load)

        def change(sink: StoredSink) -> Write[str | None] | Done[str | None]:
            if self._is_recorded(sink.state, load):
                # Perhaps by this very load, offered by an attempt whose answer was lost.
                found = self.find(load_id)
                return Done(load_id if found is not None and found.load.status is LoadStatus.COMMITTED else None)
            standing = self._standing(sink.state, load)
            if standing is not None:
                return Done(standing)
            if not load.shards:
                # Commit point of an empty batch.
                compare, put = sink.changed(_recorded(load, None))
                return Write([compare], [put], None)
            compare, put = sink.changed(msgspec.structs.replace(sink.state, offered=load_id))
            compares, operations = self._offered(load_id, load)
            return Write([*compares, compare], [*operations, put], load_id)

        what = f"load {load_id} is not offered"
        return transact(self._metadata, lambda: self.sink(load), change, what=what, clock=self._clock)

    def _offered(self, load_id: str, load: Load) -> tuple[list[Compare], list[Operation]]:
        """What a transaction that offers it compares and writes."""
        topic = topic_key(load.namespace, load.topic, prefix=self._prefix)
        entry = self._metadata.get(topic)
        if entry is None or decode_entry(entry, TopicSpec)[0].topic_id != load.topic_id:
            raise UnknownTopic(
                f"load {load_id} is for a topic {load.namespace}/{load.topic} that is not there",
                topic=f"{load.namespace}/{load.topic}",
            )
        return (
            [Absent(self.key(load_id)), RevisionIs(topic, entry.mod_revision)],
            [Put(self.key(load_id), encode_value(load)), Put(offer_key(load_id, prefix=self._prefix), b"{}")],
        )

    def _is_recorded(self, state: SinkState, load: Load) -> bool:
        assert load.sink is not None
        if state.topic_id != load.topic_id:
            raise Conflict(
                f"{load.namespace}/{load.topic} was deleted and created again since streaming query "
                f"{load.sink.query_id} wrote batch {state.batch_id} into it: begin with a new checkpoint location"
            )
        return state.batch_id >= load.sink.batch_id

    def _standing(self, state: SinkState, load: Load) -> str | None:
        """The load that is offered for the same batch already."""
        stored = self.find(state.offered) if state.offered is not None else None
        if stored is None or stored.load.status is not LoadStatus.OFFERED:
            return None
        if stored.load.sink != load.sink:
            raise Conflict(
                f"load {state.offered} of {stored.load.sink} is under way, and {load.sink} cannot pass it: another "
                "driver runs the same query; stop one of them"
            )
        return state.offered

    def commit(self, load_id: str) -> Load:
        """Show the load to readers, if it is attached everywhere; the load as it stands then.

        One that brings a batch which the topic has already, or a topic of another id would have, is given up.
        """

        def change(found: StoredLoad) -> Write[tuple[Load, bool]] | Done[tuple[Load, bool]]:
            load, unknown, revision = found
            parts = self.attached(load_id) if load.status is LoadStatus.OFFERED else {}
            if load.status is not LoadStatus.OFFERED or {shard.partition for shard in load.shards} - parts.keys():
                return Done((load, False))
            shards = tuple(msgspec.structs.replace(s, start=parts[s.partition].start) for s in load.shards)
            committed = msgspec.structs.replace(load, status=LoadStatus.COMMITTED, shards=shards)
            compares: list[Compare] = [RevisionIs(self.key(load_id), revision)]
            operations: list[Operation] = [
                Put(self.key(load_id), encode_value(committed, unknown=unknown)),
                self._end(load_id),
            ]
            if load.sink is not None:
                sink = self.sink(load)
                if sink.state.topic_id != load.topic_id or sink.state.batch_id >= load.sink.batch_id:
                    try:
                        return Done((self.give_up(load_id), False))
                    except Conflict:
                        # This very load was committed between the two looks, by another that attached it.
                        return Done((self.get(load_id).load, False))
                compare, put = sink.changed(_recorded(load, load_id))
                compares.append(compare)
                operations.append(put)
            # Commit point: from here on every reader of every partition may see it, and its batch is recorded.
            return Write(compares, operations, (committed, True))

        what = f"load {load_id} is not committed"
        load, is_new = transact(self._metadata, lambda: self.get(load_id), change, what=what, clock=self._clock)
        if is_new:
            logger.info("load %s into %s/%s is committed", load_id, load.namespace, load.topic)
        return load

    def give_up(self, load_id: str, *, unknown_as: Load | None = None) -> Load:
        """From here on no part of it can be attached any more, and it is never committed; `Conflict` if it is.

        One that was never offered is recorded as `unknown_as`, so that no process can offer it later. If that names a
        topic, a load into another one is `UnknownLoad`.
        """

        def read() -> StoredLoad | None:
            return self.find(load_id) if unknown_as is not None else self.get(load_id)

        def change(found: StoredLoad | None) -> Write[tuple[Load, bool]] | Done[tuple[Load, bool]]:
            if found is not None and unknown_as is not None and unknown_as.topic_id not in ("", found.load.topic_id):
                raise UnknownLoad(f"there is no load {load_id} into {unknown_as.namespace}/{unknown_as.topic}")
            if found is not None and found.load.status is LoadStatus.COMMITTED:
                raise Conflict(f"load {load_id} is committed: it cannot be taken back any more")
            if found is not None and found.load.status is LoadStatus.ABANDONED:
                return Done((found.load, False))
            load = found.load if found is not None else unknown_as
            assert load is not None
            ended = msgspec.structs.replace(load, status=LoadStatus.ABANDONED)
            put = Put(self.key(load_id), encode_value(ended, unknown=found.unknown if found is not None else None))
            # Commit point: an attempt to attach or to commit that is under way compares the revision, and fails.
            return Write(
                [RevisionIs(self.key(load_id), found.revision if found is not None else 0)], [put], (ended, True)
            )

        what = f"load {load_id} is not given up"
        load, is_new = transact(self._metadata, read, change, what=what, clock=self._clock)
        if is_new:
            logger.warning("load %s into %s/%s is given up", load_id, load.namespace, load.topic)
        return load

    def give_up_unreadable(self, load_id: str, unknown_as: Load) -> Load:
        """Give up a load whose record cannot be read, as `give_up` does; it is recorded as `unknown_as`.

        `Corrupt` or `UnsupportedFormat` if it is over: then it may be committed, and readers see what it brought.
        """
        key, offer = self.key(load_id), offer_key(load_id, prefix=self._prefix)
        entry = self._metadata.get(key)
        ended = msgspec.structs.replace(unknown_as, status=LoadStatus.ABANDONED)
        compares: list[Compare] = [RevisionIs(key, 0 if entry is None else entry.mod_revision), Exists(offer)]
        # Commit point, as in `give_up`.
        if not self._metadata.transaction(compares, [Put(key, encode_value(ended))]).succeeded:
            return self.get(load_id).load
        logger.warning("load %s, whose record could not be read, is given up", load_id)
        return ended

    def end(self, load_id: str) -> None:
        """Nothing is left to be done for a load that was given up."""
        self._metadata.transaction([], [self._end(load_id)])

    def end_unknown(self, load_id: str) -> None:
        """Remove the notes on a load that is not recorded; one that is offered at this moment stays."""
        self._metadata.transaction([Absent(self.key(load_id))], [self._end(load_id)])

    def forget_topic(self, topic_id: str) -> None:
        """Remove the loads of a deleted topic that are not over, so that no owner looks for it any more.

        One that cannot be read stays: it may be of any topic. Those that are over stay until the sweep of a data
        directory finds that no history names them (`forget_unnamed`). So a deletion reads what is under way, and not
        every load of all topics.
        """
        for load_id in self.pending_ids():
            entry = self._metadata.get(self.key(load_id))
            found = None if entry is None else read_or_log(entry, Load)
            if found is not None and found[0].topic_id == topic_id:
                self._metadata.transaction([], [Delete(self.key(load_id)), self._end(load_id)])

    def _end(self, load_id: str) -> Operation:
        return DeleteRange(offers_prefix(load_id, prefix=self._prefix))


def _check_names(load_id: str, load: Load) -> None:
    for name in (load_id, *((load.sink.query_id,) if load.sink is not None else ())):
        if not name or "/" in name:
            raise Invalid(f"{name!r} is no name for a load or a query: it has at least one character, and no /")


def _check_backfill_id(text: str) -> None:
    if not 0 < len(text) <= BACKFILL_ID_MAX or not all(char.isalnum() or char in "-_." for char in text):
        raise Invalid(
            f"{text[:100]!r} is no id of a backfill: write letters, digits, '-', '_' and '.', at most {BACKFILL_ID_MAX}"
        )


def _recorded(load: Load, load_id: str | None) -> SinkState:
    """The sink once the topic has the batch that the load brings."""
    assert load.sink is not None
    return SinkState(topic_id=load.topic_id, batch_id=load.sink.batch_id, load_id=load_id)


def leave_gaps(catalog: ShardCatalog, load_id: str, *, created_at: int) -> None:
    """On return nothing of a load that was given up is in this history: gaps of reason `skipped` stand there."""

    def skipped(first: SegmentDescriptor, last: SegmentDescriptor) -> SegmentDescriptor:
        gap = Gap(first.start, last.end, Reason.SKIPPED)
        return gap_descriptor(gap, topic_id=first.topic_id, epoch=first.epoch, created_at=created_at)

    catalog.take_out(load_id, skipped)


def never_offered(spec: TopicSpec | None, *, created_at: int) -> Load:
    """What is recorded for a load that is given up before it was offered, so that no process can offer it later."""
    return Load(
        status=LoadStatus.ABANDONED,
        namespace=spec.namespace if spec is not None else "",
        topic=spec.topic if spec is not None else "",
        topic_id=spec.topic_id if spec is not None else "",
        store="",
        manifest=NEVER_OFFERED,
        created_at=created_at,
        shards=(),
    )
