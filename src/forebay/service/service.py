"""What a server does for its callers, once for every protocol: authorise, admit, place, do.

One method per operation. Each takes the principal first and raises what the caller has to know; a front-end only parses
and renders. For one event loop; nothing here blocks it: records are queued, pages come from memory or a thread.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar, Unpack

from forebay.aio.loads import AsyncLoads
from forebay.aio.log import AsyncLog
from forebay.aio.topic import AsyncTopic
from forebay.aio.workers import ANONYMOUS, CALLER
from forebay.bulk import BackfillPlan, BackfillState, BulkLoad, LoadSegment, LoadTarget, SharedStore
from forebay.catalog.entries import UnreadableValue
from forebay.errors import (
    Conflict,
    ForebayError,
    Invalid,
    Moved,
    PartitionOutcomes,
    Unauthenticated,
    Unavailable,
    UnknownTopic,
)
from forebay.format.columns.rows import ColumnBytes
from forebay.live import WatchedTopic, Watcher
from forebay.metadata import MetadataStore
from forebay.pages import Page
from forebay.progress import check_not_reserved
from forebay.records import CommitAck, GroupOffset, Offsets, Position
from forebay.routers import AsyncRouters
from forebay.service.deadletters import ServedDeadLetters
from forebay.service.placement import Nowhere, Placement, There
from forebay.service.principals import EVERY_TOPIC, AccessScope, Principal, check_may, listed, listed_ranges, may
from forebay.service.quotas import Quotas
from forebay.service.routers import RouterService
from forebay.service.subscriptions import ServedSubscriptions
from forebay.service.tokens import TokenBook
from forebay.shard import RecoveryDecision
from forebay.storage import Ack, BatchAck, Retained
from forebay.storage.copying import Copied
from forebay.storage.erasure.answer import Erasure, without_roots
from forebay.storage.recorded import RecordedShard
from forebay.storage.segments import SegmentPage
from forebay.storage.status import LogStatus, TopicStatus
from forebay.storage.usage import TierUsage
from forebay.storage.views import StoredRange
from forebay.topics import ShardRef, TopicChanges, TopicLimits, TopicName, TopicSpec
from forebay.views.snapshot import ShardView
from forebay.wire.items import RecordColumns
from forebay.wire.messages import LoadOffer

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

ANYONE: Final = Principal(name=ANONYMOUS, scopes=frozenset(AccessScope), prefixes=frozenset((EVERY_TOPIC,)))
"""Every caller of a server that asks for no token."""
COUNT_SECONDS: Final = 1.0
"""How long a count of all topics is believed: the limit on topics may be passed by what is created meanwhile."""
TOPICS_KEPT: Final = 100_000
"""Handles of topics that a server keeps for the next call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendRecords:
    """Records to be appended, decoded, and who produces them."""

    columns: RecordColumns | ColumnBytes | pa.RecordBatch
    partition: int | None = None
    """Where all of them go. Left out, they go where each says; else keys decide, and those without a key take turns."""
    producer: int | None = None
    sequence: int | None = None
    previous: int | None = None
    names_each: bool = False
    """Whether the error of an append that stands in part says what became of each record."""

    async def queue(self, topic: AsyncTopic) -> Ack | BatchAck:
        """Queue them; `Throttled` at once where there is no room."""
        columns = self.columns
        if isinstance(columns, RecordColumns):
            if (
                len(columns.values) == 1
                and columns.partitions is None
                and self.producer is None
                and self.sequence is None
                and self.previous is None
            ):
                return await self._queue_one(topic, columns)
            return await topic.append_named_nowait(
                columns.values,
                columns.partitions,
                keys=columns.keys,
                tags=columns.tags,
                headers=columns.headers,
                timestamps=columns.timestamps,
                partition=self.partition,
                producer=self.producer,
                sequence=self.sequence,
                previous=self.previous,
            )
        append = {
            "partition": self.partition,
            "producer": self.producer,
            "sequence": self.sequence,
            "previous": self.previous,
        }
        if isinstance(columns, ColumnBytes):
            return await topic.append_columns_nowait(columns, **append)
        return await topic.append_arrow_nowait(columns, **append)

    async def _queue_one(self, topic: AsyncTopic, columns: RecordColumns) -> Ack:
        """Queue the only record, which then shares a frame with those of other requests."""
        values, keys, tags, headers, timestamps, _ = columns
        return await topic.append_nowait(
            values[0],
            key=None if keys is None else keys[0],
            tag=None if tags is None else tags[0],
            headers=None if headers is None else headers[0],
            timestamp=None if timestamps is None else timestamps[0],
            partition=self.partition,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteRecords:
    """Which records of a topic to end: by one of key, tag, a range of offsets, or all before an offset."""

    partition: int | None = None
    key: bytes | None = None
    tag: str | None = None
    start: int | None = None
    stop: int | None = None
    before: int | None = None

    def __post_init__(self) -> None:
        given = [self.key is not None, self.tag is not None, self.before is not None, self.stop is not None]
        if sum(given) != 1 or (self.start is None) != (self.stop is None):
            raise Invalid("say which records to delete by one of: key, tag, before, or start and stop")

    async def apply(self, topic: AsyncTopic) -> int:
        """End them; how many."""
        if self.key is not None:
            return await topic.delete_by_key(self.key, partition=self.partition)
        if self.tag is not None:
            return await topic.delete_by_tag(self.tag, partition=self.partition)
        if self.before is not None:
            return await topic.delete_before(self.before, self.partition)
        assert self.start is not None, "checked"
        assert self.stop is not None, "checked"
        return await topic.delete_by_offset(self.start, self.stop, self.partition)


class TopicCount(NamedTuple):
    """How many topics there are, and how many of them a caller may know of."""

    at: float
    """When they were counted, by the time of the loop."""
    total: int
    below: int


class TopicCache:
    """Handles of topics by name, so that a call finds its topic without waiting. For one event loop."""

    def __init__(self, log: AsyncLog) -> None:
        self._log = log
        self._handles: dict[TopicName, AsyncTopic] = {}

    async def get(self, name: TopicName) -> AsyncTopic:
        """The topic that is named; `UnknownTopic` if there is none. Waits only for one that is not known here."""
        handle = self._handles.get(name)
        known = self._log.known_topic(name)
        if handle is not None and known is not None and known.topic_id == handle.spec.topic_id:
            return handle
        if name.topic_id is None:
            # Else what is kept may be right, and the name mean a topic that is gone.
            self._handles.pop(name, None)
        handle = await self._log.topic(name)
        self._handles[name] = handle
        if len(self._handles) > TOPICS_KEPT:
            del self._handles[next(iter(self._handles))]
        return handle

    def forget(self, name: TopicName) -> None:
        """The topic was deleted."""
        self._handles.pop(name, None)


class PartitionOffsets(NamedTuple):
    """The watermarks of a partition, and where a read ends in it."""

    partition: int
    offsets: Offsets
    end: int


class LookedAt(NamedTuple):
    """A topic as it lay at one moment, and the store of its history if others reach that."""

    spec: TopicSpec
    views: Sequence[ShardView]
    store: SharedStore | None


class Service:
    """Topics for callers with names and rights."""

    def __init__(
        self,
        log: AsyncLog,
        *,
        quotas: Quotas,
        placement: Placement,
        tokens: TokenBook | None,
        routers: AsyncRouters,
        on_deleted: Callable[[], None] = lambda: None,
    ) -> None:
        """Without `tokens` every caller may do everything. `on_deleted` is called for each topic that was deleted."""
        self._log = log
        self._on_deleted = on_deleted
        self.quotas = quotas
        self.routers = RouterService(routers)
        self._placement = placement
        self._tokens = tokens
        self._topics = TopicCache(log)
        self._counted: dict[frozenset[str], TopicCount] = {}
        """By the prefixes of callers, how many topics there were when they were counted last."""
        self.subscriptions = ServedSubscriptions(self.readable, self._topics.get, quotas)
        self.dead_letters = ServedDeadLetters(self.readable, self.subscriptions)
        self._attaching: dict[tuple[TopicName, str], asyncio.Future[BulkLoad]] = {}
        """Bulk loads that are being attached: a repeated call waits for the same attempt."""

    @property
    def metadata(self) -> MetadataStore:
        """The metadata store of the log."""
        return self._log.metadata

    # Callers

    def anonymous(self) -> Principal:
        """A caller that shows no token; `Unauthenticated` where one is asked for."""
        if self._tokens is not None:
            raise Unauthenticated("this server asks for a token: send it as Authorization: Bearer TOKEN")
        return ANYONE

    def authenticate(self, secret: str) -> Principal:
        """The caller that shows this token; `Unauthenticated` if it is not valid. Reads nothing but memory."""
        return ANYONE if self._tokens is None else self._tokens.principal(secret)

    @staticmethod
    def call_for(who: Principal) -> None:
        """What this task does from now on is done for this caller: callers take turns for threads."""
        CALLER.set(who.name)

    @property
    def is_degraded(self) -> bool:
        """Whether so many calls hang at some topics that further ones there are refused. Reads nothing but memory."""
        return self._log.is_degraded

    def rights_edition(self) -> object:
        """A value that is another one once the rights of callers may have changed. Reads nothing but memory."""
        return None if self._tokens is None else self._tokens.edition()

    def check_still(self, who: Principal, scope: AccessScope, names: Iterable[TopicName]) -> None:
        """Return if a caller that was let in before still has this right on these topics; else say why not."""
        if self._tokens is not None:
            present = self._tokens.present(who)
            for name in names:
                check_may(present, scope, name)

    # Topics

    async def create_topic(
        self,
        who: Principal,
        name: TopicName,
        *,
        exist_ok: bool = False,
        partitions: int = 1,
        durability: str | None = None,
        engine: str | None = None,
        compression: str = "none",
        **limits: Unpack[TopicLimits],
    ) -> tuple[TopicSpec, bool]:
        """Create a topic; its definition, and whether it is new."""
        check_may(who, AccessScope.ADMIN, name)
        before = await self._topic_id(name) if exist_ok else None
        if before is None:
            await self._check_room_for_topic(who)
        topic = await self._log.create_topic(
            name,
            partitions=partitions,
            durability=durability,
            engine=engine,
            compression=compression,
            exist_ok=exist_ok,
            **limits,
        )
        return topic.spec, topic.spec.topic_id != before

    async def _topic_id(self, name: TopicName) -> str | None:
        """The id of the topic of this name, if there is one."""
        try:
            return (await self._log.topic(name)).spec.topic_id
        except UnknownTopic:
            return None

    async def topic(self, who: Principal, name: TopicName) -> TopicSpec:
        """The definition of a topic."""
        self._check_any(who, name)
        return (await self._topics.get(name)).spec

    async def topics(
        self, who: Principal, prefix: str = "", *, after: TopicName | None = None, limit: int
    ) -> tuple[list[TopicSpec], TopicName | None]:
        """A page of the definitions that the caller may know of, and the name to go on after, if there are more."""
        found: list[TopicSpec] = []
        for covered in listed_ranges(who, prefix):
            if after is not None and covered.ends_before(str(after)):
                continue
            if covered.is_one:
                # In the order of names a topic stands before all others that begin as it does.
                first = await self._log.topics(covered.prefix, limit=1)
                found += [spec for spec in first if str(spec.name) == covered.prefix]
            else:
                found += await self._log.topics(covered.prefix, after=after, limit=limit - len(found))
            if len(found) == limit:
                return found, found[-1].name
        return found, None

    async def alter_topic(
        self, who: Principal, name: TopicName, *, allow_loss: bool = False, **changes: Unpack[TopicChanges]
    ) -> TopicSpec:
        """Change a topic; its definition on return."""
        check_may(who, AccessScope.ADMIN, name)
        return await self._log.alter_topic(name, allow_loss=allow_loss, **changes)

    async def delete_topic(self, who: Principal, name: TopicName) -> None:
        """Delete a topic with all its records."""
        check_may(who, AccessScope.ADMIN, name)
        await self._log.delete_topic(name)
        self._topics.forget(name)
        self._on_deleted()

    async def seal_topic(
        self, who: Principal, name: TopicName, *, target: str | None, accept_damage: bool
    ) -> list[RecordedShard]:
        """End the topic here in order: all of it is history, and the next owner goes on exactly there."""
        check_may(who, AccessScope.ADMIN, name)
        await self._log.check_held_here(name, target=target)
        await self._log.seal_topic(name, target=target, accept_damage=accept_damage)
        return await self._log.recorded(name)

    async def take_over(
        self, who: Principal, name: TopicName, partition: int, *, accept_loss: bool
    ) -> list[RecordedShard]:
        """Own a partition here whose owner is gone; with `accept_loss` what it has not exported is given up for good.

        A loss is recorded with the caller's name.
        """
        check_may(who, AccessScope.ADMIN, name)
        await self._log.take_over(name, partition, accept_loss=accept_loss, by=who.name if accept_loss else None)
        return [shard for shard in await self._log.recorded(name) if shard.partition == partition]

    async def unseal_topic(self, who: Principal, name: TopicName) -> list[RecordedShard]:
        """Take back a topic that was sealed here, unless another directory has it by now."""
        check_may(who, AccessScope.ADMIN, name)
        await self._log.check_not_arrived(name)
        await self._log.unseal_topic(name)
        return await self._log.recorded(name)

    async def export_topic(self, who: Principal, name: TopicName, *, accept_damage: bool) -> list[RecordedShard]:
        """On return everything appended before is history. A topic that is sealed is, and stays so."""
        check_may(who, AccessScope.ADMIN, name)
        await self._log.check_held_here(name)
        if not all(shard.is_sealed for shard in await self._log.recorded(name)):
            await self._log.export_topic(name, accept_damage=accept_damage)
        return await self._log.recorded(name)

    async def erase_key(self, who: Principal, name: TopicName, key: bytes, *, now: bool) -> Erasure:
        """Delete every record of a key, and say where their bytes lie; with `now` rewrite what has them."""
        check_may(who, AccessScope.DELETE, name)
        check_may(who, AccessScope.ADMIN, name)
        erased = await self._log.erase_key(name, key, now=now)
        settings = self._log.settings
        roots = [root for root in (self._log.path, settings.wal.dir, settings.store.root) if root is not None]
        return without_roots(erased, [root.rstrip("/") for root in roots])

    async def copy_topic(self, who: Principal, source: TopicName, target: TopicName) -> Copied:
        """Bring every record of one topic into another, each once."""
        check_may(who, AccessScope.READ, source)
        check_may(who, AccessScope.WRITE, target)
        return await self._log.copy_topic(source, target)

    async def flush_topic(self, who: Principal, name: TopicName) -> None:
        """On return everything appended before is durable."""
        check_may(who, AccessScope.WRITE, name)
        await (await self._topics.get(name)).flush()

    async def rotate_topic(self, who: Principal, name: TopicName) -> None:
        """Begin a new log file in each partition."""
        check_may(who, AccessScope.ADMIN, name)
        await (await self._topics.get(name)).rotate()

    async def retain_topic(self, who: Principal, name: TopicName) -> Retained:
        """Apply caps, times to live, key compaction and local retention now; what that removed."""
        check_may(who, AccessScope.ADMIN, name)
        return await self._log.run_retention(name)

    async def topic_status(self, who: Principal, name: TopicName) -> TopicStatus:
        """How the topic fares in this process."""
        self._check_any(who, name)
        return await (await self._topics.get(name)).status()

    async def segments(self, who: Principal, name: TopicName, partition: int, *, start: int, limit: int) -> SegmentPage:
        """What a partition is stored in. The names of objects are for those who look after the topic."""
        check_may(who, AccessScope.ADMIN, name)
        return await self._log.segments(name, partition, start=start, limit=limit)

    async def recovery(self, who: Principal, name: TopicName, partition: int) -> RecoveryDecision:
        """How a partition was recovered when it was opened."""
        self._check_any(who, name)
        return await (await self._topics.get(name)).recovery(partition)

    async def shards(self, who: Principal, name: TopicName) -> list[RecordedShard]:
        """The partitions of a topic as they are recorded, whichever process owns them."""
        check_may(who, AccessScope.ADMIN, name)
        return await self._log.recorded(name)

    def is_here(self, shard: RecordedShard) -> bool:
        """Whether the data directory of this broker has the partition."""
        return shard.state is not None and shard.state.holder == self._log.directory_id

    async def usage(self, who: Principal, name: TopicName | None) -> list[TierUsage]:
        """How many bytes each topic takes, tier by tier, or one topic alone."""
        check_may(who, AccessScope.ADMIN, name)
        return await self._log.usage(name)

    def is_open(self, ref: ShardRef) -> bool:
        """Whether this process owns the shard and has it open. Reads nothing but memory."""
        return self._log.is_open(ref)

    async def is_defined(self, spec: TopicSpec) -> bool:
        """Whether this very topic, and not another of its name, still exists. Waits for the metadata store."""
        try:
            topic = await self._log.topic(spec.name)
        except UnknownTopic:
            return False
        return topic.spec.topic_id == spec.topic_id

    async def unreadable_values(self) -> list[UnreadableValue]:
        """Stored values that this process has met and could not read. Waits for the metadata store if there are any."""
        return await self._log.unreadable_values()

    async def status(self, who: Principal) -> LogStatus:
        """How the whole log fares."""
        check_may(who, AccessScope.ADMIN, None)
        return await self._log.status()

    # Records

    def check_append(self, who: Principal, name: TopicName) -> None:
        """`Forbidden` unless the caller may append to the topic: asked before a body is read."""
        check_may(who, AccessScope.WRITE, name)

    async def append(self, who: Principal, name: TopicName, records: AppendRecords) -> Ack | BatchAck:
        """Append records, those of a partition together; on return every partition has acknowledged its share.

        An error of an append to several partitions has an `append_outcome`.
        """
        check_may(who, AccessScope.WRITE, name)
        topic = await self._topics.get(name)
        self._check_placed(topic, records.partition)
        ack = await records.queue(topic)
        try:
            await ack
        except ForebayError as error:
            if isinstance(ack, BatchAck) and len(ack.tickets) > 1:
                each = tuple(ack.records()) if records.names_each else ()
                raise error.with_outcome(PartitionOutcomes(ack.ranges, ack.failures, each)) from error
            raise
        return ack

    async def readable(self, who: Principal, name: TopicName, partition: int | None = None) -> AsyncTopic:
        """The topic, for a caller that may read it."""
        check_may(who, AccessScope.READ, name)
        topic = await self._topics.get(name)
        self._check_placed(topic, partition)
        return topic

    def watcher(self, sources: Sequence[WatchedTopic[T]], *, outbox_bytes_max: int) -> Watcher[T]:
        """Follows topics that `readable` gave. Pages of more than so many bytes do not wait for it in memory."""
        return self._log.watcher(sources, outbox_bytes_max=outbox_bytes_max)

    async def delete_records(self, who: Principal, name: TopicName, what: DeleteRecords) -> int:
        """End records of a topic; how many."""
        check_may(who, AccessScope.DELETE, name)
        topic = await self._topics.get(name)
        self._check_placed(topic, what.partition)
        return await what.apply(topic)

    async def offsets(self, who: Principal, name: TopicName, partition: int | None = None) -> list[PartitionOffsets]:
        """The watermarks of one partition, or of all, and where a read of these ends, at one look."""
        topic = await self.readable(who, name, partition)
        numbers = range(topic.partitions) if partition is None else (partition,)
        found = await asyncio.gather(*(topic.offsets(number) for number in numbers))
        ends = await topic.read_ends(numbers)
        return [PartitionOffsets(*each) for each in zip(numbers, found, ends, strict=True)]

    async def resolve(self, who: Principal, name: TopicName, partition: int, position: Position) -> int | None:
        """The offset that a position stands for; `None` for a time that no record has reached."""
        topic = await self.readable(who, name, partition)
        if position.kind == "time":
            return await topic.offset_at_time(position.value, partition, who=who.name)
        return await topic.resolve(position, partition, who=who.name)

    async def last_sequence(self, who: Principal, name: TopicName, producer: int, partition: int) -> int | None:
        """The newest acknowledged sequence of an idempotent producer; `None` if none is remembered."""
        check_may(who, AccessScope.WRITE, name)
        topic = await self._topics.get(name)
        self._check_placed(topic, partition)
        return await topic.last_sequence(producer, partition)

    # Bulk loads: owners in other brokers attach what is theirs, so each broker may take the offer

    async def load_target(self, who: Principal, name: TopicName, load_id: str) -> LoadTarget:
        """Where the segments of a load have to lie."""
        return await self._loads(who, name).target(load_id)

    async def stage_load(
        self, who: Principal, name: TopicName, load_id: str, rows: pa.RecordBatch, partition: int
    ) -> LoadSegment:
        """Write rows, at least one, as a segment of a load."""
        return (await self._loads(who, name).stage(load_id, rows, partition))[0]

    async def offer_load(self, who: Principal, name: TopicName, load_id: str, offer: LoadOffer) -> BulkLoad | None:
        """Offer a load; how far it is, or an earlier one that brings the same batch. `None` if the topic has that."""
        return await self._loads(who, name).offer(
            load_id,
            offer.segments,
            timeout=None if offer.timeout_ms is None else offer.timeout_ms / 1000,
            generation=offer.generation,
            batch=offer.batch,
        )

    async def load(self, who: Principal, name: TopicName, load_id: str) -> BulkLoad:
        """How far a load has come."""
        return await self._loads(who, name).get(load_id)

    async def load_page(
        self, who: Principal, name: TopicName, *, after: str | None, limit: int
    ) -> tuple[list[BulkLoad], str | None]:
        """A page of the loads into a topic, and the id to go on after, if there are more."""
        return await self._loads(who, name).page(after=after, limit=limit)

    def attach_load(self, who: Principal, name: TopicName, load_id: str) -> asyncio.Future[BulkLoad]:
        """Begin to attach a load, or join those who wait for that. It goes on although none of them waits any more."""
        loads = self._loads(who, name)
        running = self._attaching.get((name, load_id))
        if running is None:
            running = asyncio.ensure_future(loads.attach(load_id))
            self._attaching[name, load_id] = running
            running.add_done_callback(partial(self._attached, (name, load_id)))
        return running

    async def abandon_load(self, who: Principal, name: TopicName, load_id: str) -> BulkLoad:
        """Give a load up."""
        return await self._loads(who, name).abandon(load_id)

    async def backfill(self, who: Principal, name: TopicName, backfill_id: str) -> BackfillState:
        """How far a backfill has come."""
        return await self._loads(who, name).backfill(backfill_id)

    async def begin_backfill(
        self, who: Principal, name: TopicName, backfill_id: str, plan: BackfillPlan
    ) -> BackfillState:
        """Have the id of a backfill stand for what it brings."""
        return await self._loads(who, name).begin_backfill(backfill_id, plan)

    # Whole topics, read past the log

    def check_read(self, who: Principal, name: TopicName) -> None:
        """`Forbidden` unless the caller may read the topic."""
        check_may(who, AccessScope.READ, name)

    async def plannable(self, who: Principal, name: TopicName, topic_id: str | None = None) -> TopicSpec:
        """The definition of a topic that the caller may read; `Conflict` if the one of this id is no more."""
        spec = (await self.readable(who, name)).spec
        if topic_id not in (None, spec.topic_id):
            raise Conflict(f"{name} was deleted and created again since it was planned: load it again", topic=name)
        return spec

    async def look(self, who: Principal, name: TopicName) -> LookedAt:
        """Where the records of a topic lie now."""
        spec = await self.plannable(who, name)
        return LookedAt(spec, await self._log.look(spec, who=who.name), self._log.history_place)

    async def stored_page(
        self, who: Principal, spec: TopicSpec, partition: int, offset: int, bytes_max: int
    ) -> tuple[Page | None, int]:
        """A page of the log as it is stored, and where the log ends; see `TopicViews.page`."""
        check_may(who, AccessScope.READ, spec.name)
        return await self._log.stored_page(spec, partition, offset, bytes_max, who=who.name)

    async def stored_bytes(self, who: Principal, spec: TopicSpec, partition: int, wanted: StoredRange) -> bytes:
        """Bytes of an object of a partition; see `TopicViews.bytes`."""
        check_may(who, AccessScope.READ, spec.name)
        return await self._log.stored_bytes(spec, partition, wanted, who=who.name)

    # Groups

    async def groups(self, who: Principal, *, after: str | None = None, limit: int) -> tuple[list[str], str | None]:
        """A page of the names of groups that have a place in a topic which the caller may read.

        With the name to go on after, if there are more. Reads places in those topics alone.
        """
        if AccessScope.READ not in who.scopes:
            return [], None
        covered = [f"{one.prefix}/" if one.is_one else one.prefix for one in listed_ranges(who, "")]
        names = await self._log.groups_below(covered)
        first = 0 if after is None else bisect_right(names, after)
        page = names[first : first + limit]
        return page, page[-1] if first + limit < len(names) else None

    async def group_places(self, who: Principal, group: str) -> list[GroupOffset]:
        """Where a group stands, in the topics that the caller may read."""
        return await self._visible_places(who, group)

    async def commit(
        self,
        who: Principal,
        group: str,
        topic: TopicName,
        offset: int,
        partition: int,
        *,
        note: str,
        ack: CommitAck,
        expected: int | None,
    ) -> int:
        """Everything below `offset` is done; where the group stands on return."""
        check_not_reserved(group)
        check_may(who, AccessScope.READ, topic)
        return await self._log.group(group).commit(topic, offset, partition, note=note, ack=ack, expected=expected)

    async def fetch(self, who: Principal, group: str, topic: TopicName, partition: int) -> tuple[int | None, str]:
        """Where a group stands in a partition, if it has a place there, and what was noted with it."""
        check_may(who, AccessScope.READ, topic)
        found = self._log.group(group)
        return await found.fetch(topic, partition), await found.note(topic, partition)

    async def reset(
        self, who: Principal, group: str, topic: TopicName, position: Position, partition: int | None, note: str
    ) -> dict[int, int]:
        """Set a group, also to an earlier place; where it stands now in each partition."""
        check_not_reserved(group)
        check_may(who, AccessScope.READ, topic)
        handle = await self._topics.get(topic)
        reader = handle.reader(group)
        numbers = range(handle.partitions) if partition is None else (partition,)
        return {number: await reader.reset(position, number, note) for number in numbers}

    async def forget(self, who: Principal, group: str, topic: TopicName) -> None:
        """Forget every place of a group in one topic."""
        check_not_reserved(group)
        check_may(who, AccessScope.READ, topic)
        await (await self._topics.get(topic)).reader(group).forget()

    async def delete_group(self, who: Principal, group: str) -> int:
        """Forget every place of a group; how many. The caller needs the right on every topic that it has one in."""
        check_not_reserved(group)
        found = self._log.group(group)
        topics = {TopicName.parse(place.topic) for place in await found.offsets()}
        for topic in sorted(topics.union(await found.unreadable_in())):
            check_may(who, AccessScope.READ, topic)
        return await found.delete()

    # How

    def _loads(self, who: Principal, name: TopicName) -> AsyncLoads:
        check_may(who, AccessScope.WRITE, name)
        return self._log.loads_of(name)

    def _attached(self, key: tuple[TopicName, str], done: asyncio.Future[BulkLoad]) -> None:
        del self._attaching[key]
        if not done.cancelled():
            # An error that no caller waits for is not worth a complaint of the event loop.
            done.exception()

    async def _visible_places(self, who: Principal, group: str) -> list[GroupOffset]:
        places = await self._log.group(group).offsets()
        return [place for place in places if may(who, AccessScope.READ, TopicName.parse(place.topic))]

    async def _check_room_for_topic(self, who: Principal) -> None:
        """`Throttled` if there are as many topics as there may be. Topics are counted once a second at most."""
        now = asyncio.get_running_loop().time()
        fresh = {prefixes: each for prefixes, each in self._counted.items() if now - each.at <= COUNT_SECONDS}
        if who.prefixes not in fresh:
            fresh[who.prefixes] = await self._log.in_thread(partial(self._count_topics, who, now))
        self._counted = fresh
        counted = fresh[who.prefixes]
        self.quotas.check_topics(total=counted.total, below=counted.below)

    def _count_topics(self, who: Principal, now: float) -> TopicCount:
        """Count all topics. In a thread: there may be a hundred thousand of them."""
        names = [spec.name for spec in self._log.blocking.topics()]
        return TopicCount(now, len(names), len(listed(who, names)))

    def _check_any(self, who: Principal, name: TopicName) -> None:
        """`Forbidden` unless the caller has some right on the topic."""
        if not listed(who, (name,)):
            check_may(who, AccessScope.READ, name)

    def _check_placed(self, topic: AsyncTopic, partition: int | None) -> None:
        """Return if this broker serves the partition, or all of them; else say which one does."""
        numbers = range(topic.partitions) if partition is None else (partition,)
        for number in numbers:
            place = self._placement.of(ShardRef(topic.spec, number))
            if isinstance(place, There):
                raise Moved(
                    f"{topic.name}[{number}] is served by the broker at {place.url}: ask there",
                    topic=topic.name,
                    partition=number,
                    holder=place.broker,
                )
            if isinstance(place, Nowhere):
                raise Unavailable(f"{topic.name}[{number}] is served by no broker now: {place.why}", topic=topic.name)
