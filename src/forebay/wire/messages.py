"""What requests and answers of the HTTP API hold, besides records: one struct for each, for server and client alike.

The names are those of the command line's JSON. An answer may get more fields in later versions, so the client ignores
those it does not know. A request with an unknown field is refused: the server cannot do what it does not understand.
"""

from __future__ import annotations

from typing import Annotated, Final, Self

import msgspec
from msgspec import UNSET, Meta, UnsetType

from forebay.bulk import MOST, BulkLoad, LoadBatch, LoadSegment
from forebay.records import CommitAck, GroupOffset, Offsets
from forebay.topics import PARTITIONS_MAX, Cleanup, Durability, Engine, OnFull, OnOwnerLoss, TopicDispatch, TopicSpec
from forebay.wire.items import GapItem

LOAD_TIMEOUT_MAX_MS = 366 * 86_400_000
Limit = Annotated[int, Meta(ge=1)] | None
Partitions = Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": PARTITIONS_MAX})]
"""Documented here; the topic itself refuses what is wrong, and names what is allowed."""
Compression = Annotated[str, Meta(extra_json_schema={"pattern": "^(none|zstd(:([1-9]|1[0-9]))?)$"})]


TOPIC_ID_HEADER: Final = "forebay-topic-id"
"""Of a request: the id of the topic that it means. There may be another one of that name by now."""


class TopicPut(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a topic is to be created. What is left out is as the server's defaults say: one partition, no limits.

    With `exist_ok` a topic that exists is fine if it has the options that are given; with others it is a conflict.
    """

    partitions: Partitions | UnsetType = UNSET
    """Left out: 1."""
    durability: Durability | UnsetType | None = UNSET
    engine: Engine | UnsetType | None = UNSET
    compression: Compression | UnsetType = UNSET
    """Left out: none."""
    cap_records: Limit | UnsetType = UNSET
    cap_bytes: Limit | UnsetType = UNSET
    ttl_ms: Limit | UnsetType = UNSET
    on_full: OnFull | UnsetType = UNSET
    """Left out: `discard_old`."""
    cleanup: Cleanup | UnsetType = UNSET
    """Left out: `delete`."""
    compact_lag_ms: int | UnsetType = UNSET
    dispatch: TopicDispatch | UnsetType = UNSET
    """Left out: `reliable`."""
    on_owner_loss: OnOwnerLoss | UnsetType = UNSET
    """Left out: `wait`, and `take_over` in the classes `memory` and `ephemeral`."""
    exist_ok: bool = False


class TopicPatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What to change in a topic; `null` takes a limit away."""

    partitions: Partitions | UnsetType = UNSET
    cap_records: Limit | UnsetType = UNSET
    cap_bytes: Limit | UnsetType = UNSET
    ttl_ms: Limit | UnsetType = UNSET
    on_full: OnFull | UnsetType = UNSET
    cleanup: Cleanup | UnsetType = UNSET
    compact_lag_ms: int | UnsetType = UNSET
    dispatch: TopicDispatch | UnsetType = UNSET
    on_owner_loss: OnOwnerLoss | UnsetType = UNSET
    allow_loss: bool = False
    """Whether records may end at once by the new limits."""


class TopicItem(msgspec.Struct, frozen=True, kw_only=True):
    """The definition of a topic."""

    name: str
    topic_id: str
    """Its incarnation: another one after the topic was deleted and created again."""
    partitions: int
    generation: int
    engine: Engine
    durability: Durability
    compression: str
    created_at: int
    cap_records: int | None
    cap_bytes: int | None
    ttl_ms: int | None
    on_full: OnFull
    cleanup: Cleanup
    compact_lag_ms: int
    dispatch: TopicDispatch
    earlier: tuple[int, ...]
    on_owner_loss: OnOwnerLoss | UnsetType = UNSET
    """Whether a partition whose owner is gone waits for it. A server of an older version does not say it."""

    @classmethod
    def of(cls, spec: TopicSpec) -> Self:
        """The definition as it is sent."""
        fields = msgspec.structs.asdict(spec)
        del fields["namespace"], fields["topic"]
        fields["on_owner_loss"] = spec.loss_policy
        return cls(name=str(spec.name), **fields)

    def spec(self) -> TopicSpec:
        """The definition that was sent."""
        fields = msgspec.structs.asdict(self)
        namespace, _, topic = fields.pop("name").partition("/")
        return TopicSpec(namespace=namespace, topic=topic, **fields)


class TopicList(msgspec.Struct, frozen=True):
    """Some topics, by name. With `after`, ask again for those behind that name; without, there are no more."""

    topics: list[TopicItem]
    after: str | None = None


class OffsetRangeItem(msgspec.Struct, frozen=True):
    """Records of one append in one partition: `count` of them, at consecutive offsets from `first` on."""

    partition: int
    first: int
    count: int


class AppendedRanges(msgspec.Struct, frozen=True):
    """Where the records of a request are now: a range for each partition that got some, in the order of the request."""

    ranges: list[OffsetRangeItem]
    offsets: list[int] | UnsetType = UNSET
    """The offset of each record in the order of the request: where that was asked for, and there are several ranges."""


class OffsetsItem(msgspec.Struct, frozen=True, kw_only=True):
    """The watermarks of one partition; `next` is the next offset to assign."""

    partition: int
    earliest: int
    evict_floor: int
    durable: int
    exported: int
    next: int
    end: int | UnsetType = UNSET
    """Where a read of the partitions of this answer ends now: with each bulk load in all of them, or in none."""

    @classmethod
    def of(cls, partition: int, offsets: Offsets, end: int | UnsetType = UNSET) -> Self:
        """The watermarks as they are sent."""
        return cls(partition=partition, end=end, **offsets._asdict())

    def offsets(self) -> Offsets:
        """The watermarks that were sent."""
        return Offsets(self.earliest, self.evict_floor, self.durable, self.exported, self.next)


class OffsetsPage(msgspec.Struct, frozen=True):
    """The watermarks of the partitions of a topic."""

    partitions: list[OffsetsItem]


class OffsetFound(msgspec.Struct, frozen=True, kw_only=True):
    """Where a position stands in a partition; `null` where a time has no record at or after it."""

    partition: int
    offset: int | None


class LastSequence(msgspec.Struct, frozen=True, kw_only=True):
    """The newest acknowledged sequence of an idempotent producer in a partition; `null` if none is remembered."""

    partition: int
    producer: int
    sequence: int | None


class Deleted(msgspec.Struct, frozen=True):
    """How many records a request has ended."""

    records: int


class Sealing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How to seal a topic."""

    target: str | None = None
    """The id of the data directory that alone may go on."""
    accept_damage: bool = False


class TakingOver(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How to own a partition whose owner is gone."""

    partition: Annotated[int, Meta(ge=0)] = 0
    accept_loss: bool = False
    """Whether records that its last holder has not exported may be given up for good."""


class Exporting(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How to make all of a topic history."""

    accept_damage: bool = False


class Erasing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which key to erase: as text, or in base64."""

    key: str | None = None
    key_b64: str | None = None
    now: bool = False
    """Whether files and objects that hold the records are rewritten, and removed, before the answer."""


class RemnantItem(msgspec.Struct, frozen=True, kw_only=True):
    """A file or object that holds bytes of erased records, or of which that cannot be excluded."""

    partition: int
    tier: str
    """`log`, `sealed`, `aside`, `history`, `database`, or `elsewhere` for a partition that another process has."""
    place: str
    bytes: int
    until: str
    """What ends it."""
    command: str
    """What an operator runs so that it goes."""


class CopyPlaceItem(msgspec.Struct, frozen=True, kw_only=True):
    """A topic that may have got copies of the records: erase the key there, too."""

    topic: str
    by: str
    """The router or subscription that sends records there."""
    command: str


class ErasedItem(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the records of a key."""

    topic: str
    deleted: int
    """How many records this request deleted."""
    remains: list[RemnantItem]
    """Everything that has bytes of deleted records of this key yet, also of those that were deleted before."""
    commands: list[str]
    """What is to be run, in this order, so that nothing remains."""
    copies: list[CopyPlaceItem]


class Copying(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where to copy the records of a topic to: a topic that exists."""

    target: str


class CopiedItem(msgspec.Struct, frozen=True):
    """What a copy did. It is complete if the counts of source and target are equal and no one else writes there."""

    copied: int
    """Records that were appended now."""
    source: int
    """Records in the source, up to where its copy ends."""
    target: int
    """Records in the target."""
    gaps: list[GapItem]
    """What the source has lost or evicted: there is nothing to copy."""


class RetainedItem(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of retention removed from the partitions of a topic."""

    evicted: int
    """Records that caps and times to live ended."""
    compacted: int
    """Records that a newer one of their key superseded."""
    files: int
    """Local files whose records history has, or that hold none any more."""


class LoadOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a bulk load brings: segments that lie in the store, those of each partition in their order."""

    segments: list[LoadSegment]
    timeout_ms: Annotated[int, Meta(ge=0, le=LOAD_TIMEOUT_MAX_MS)] | None = None
    """If it is not attached everywhere by then, it is given up; left out: never."""
    generation: int | None = None
    """That of the topic when the load was planned: `conflict` if it has other partitions now."""
    batch: LoadBatch | None = None
    """Of a streaming query: the topic gets each batch once."""


class BackfillPut(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a backfill brings. Its id stands for that for ever."""

    fingerprint: Annotated[str, Meta(max_length=200)]
    """Of the rows, another one if they are others; empty if that is not known."""
    loads: Annotated[int, Meta(ge=0, le=MOST)]
    """In how many loads they come, each offered as the batch of its number, from 0."""


class OfferedLoad(msgspec.Struct, frozen=True):
    """The load that brings what was offered: an earlier one, if that brings the same batch and is not over.

    `null` if the topic has the batch already.
    """

    load: BulkLoad | None


class LoadList(msgspec.Struct, frozen=True):
    """Some loads into a topic, by id. With `after`, ask again for those behind that id; without, there are no more."""

    loads: list[BulkLoad]
    after: str | None = None


class GroupPage(msgspec.Struct, frozen=True):
    """Some groups and readers that have a place in a topic, by name.

    With `after`, ask again for those behind that name; without, there are no more.
    """

    groups: list[str]
    after: str | None = None


class GroupItem(msgspec.Struct, frozen=True, kw_only=True):
    """Where a group stands in a partition: everything below `offset` is done, `lag` records are not."""

    topic: str
    partition: int
    offset: int
    end: int | None
    lag: int | None
    note: str
    failure: str | None = None

    @classmethod
    def of(cls, place: GroupOffset) -> Self:
        """The place as it is sent."""
        return cls(lag=place.lag, **place._asdict())

    def place(self) -> GroupOffset:
        """The place that was sent."""
        return GroupOffset(self.topic, self.partition, self.offset, self.end, self.note, self.failure)


class GroupPlaces(msgspec.Struct, frozen=True):
    """Where a group stands, in every partition that it has committed in."""

    group: str
    places: list[GroupItem]


class Committing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a group has done: everything below `offset`."""

    topic: str
    offset: Annotated[int, Meta(ge=0)]
    partition: Annotated[int, Meta(ge=0)] = 0
    note: str = ""
    ack: CommitAck = "durable"
    """`durable` once it is stored; `cached` at once, and stored a little later."""
    expected: int | None = None
    """Only from there: `conflict` if the group stands elsewhere."""


class Resetting(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where to set a group, also to an earlier place."""

    topic: str
    to: str
    """`earliest`, `latest`, an offset, or a time as `2031-05-06T00:00:00Z`."""
    partition: int | None = None
    """Left out: in every partition."""
    note: str = ""


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """Where a group stands in a partition; `null` if it has never committed there."""

    topic: str
    partition: int
    offset: int | None
    note: str = ""


class ResetPlaces(msgspec.Struct, frozen=True):
    """Where a group stands now in each partition of a topic."""

    topic: str
    offsets: dict[int, int]


class RecoveryItem(msgspec.Struct, frozen=True, kw_only=True):
    """How a partition was recovered when it was opened."""

    summary: str
    """All of it in words."""
    next_offset: int
    source: str
    """What decided the next offset."""
    exact: bool
    """Whether the end of the log is known to the record: no gap was needed."""
    clean: bool
    """Whether the stop before was in order."""
    gaps: list[GapItem]
    """Offsets that hold no record from then on: lost by the stop, or damaged."""
    torn_bytes: int
    """Bytes behind the last whole frame, never acknowledged, set aside."""


class ExportItem(msgspec.Struct, frozen=True, kw_only=True):
    """How far the history of a partition is behind its log."""

    exported: int
    """The end of history."""
    behind_files: int
    behind_records: int
    behind_bytes: int
    objects: int
    """What this broker has exported since it was started."""
    bytes: int
    errors: int
    error: str | None
    """Why the last attempt failed, if it did."""


class PartitionItem(msgspec.Struct, frozen=True, kw_only=True):
    """How a partition fares that the broker owns and has open."""

    topic: str
    partition: int
    engine: str
    durability: str
    epoch: int
    """Counts the owners of the partition."""
    recovery: RecoveryItem
    failure: str | None
    """Why it refuses appends, if it does."""
    offsets: OffsetsItem
    segments: int
    """Log files of the broker, the active one included."""
    cache_bytes: int
    export: ExportItem | None
    """`null` for engines without history."""


class PartitionList(msgspec.Struct, frozen=True):
    """The partitions that the broker has open, of one topic or of all."""

    partitions: list[PartitionItem]


class LossItem(msgspec.Struct, frozen=True, kw_only=True):
    """Offsets `[start, stop)` that a take-over has given up: the directory `holder` had not exported them."""

    start: int
    stop: int
    holder: str
    epoch: int
    """The last one of that directory."""
    by: str
    """Who accepted it."""
    at: int
    """Milliseconds since 1970 UTC."""


class ShardItem(msgspec.Struct, frozen=True, kw_only=True):
    """A partition as the metadata store knows it, whichever process owns it."""

    partition: int
    phase: str
    """`open`, `sealed`, …, or `new` for one that was never used."""
    epoch: int
    """Counts the owners of the partition."""
    holder: str | None
    """The id of the data directory that has its log files."""
    here: bool
    """Whether that is the directory of the broker."""
    exported: int
    """The end of its history."""
    next: int | None = None
    """Of a sealed one: where the next owner goes on."""
    sealed_by: str | None = None
    sealed_at: int | None = None
    target: str | None = None
    """Of a sealed one: the directory that alone may go on, if it is promised to one."""
    losses: list[LossItem] = []
    """The take-overs that have given up records, oldest first."""


class ShardList(msgspec.Struct, frozen=True):
    """The partitions of a topic."""

    shards: list[ShardItem]


class UsageItem(msgspec.Struct, frozen=True, kw_only=True):
    """What a topic takes in one tier; the database of engine `rocksdb` belongs to no single topic."""

    topic: str | None
    tier: str
    """`log`, `sealed`, `aside`, `history` or `database`."""
    files: int
    bytes: int


class UsageList(msgspec.Struct, frozen=True):
    """How many bytes topics take, by topic and tier."""

    usage: list[UsageItem]


class LocalSegmentItem(msgspec.Struct, frozen=True, kw_only=True):
    """A log file `[start, end)` on the disk of the broker."""

    start: int
    end: int
    bytes: int | None
    """`null` if its index cannot be read."""
    sealed: bool
    """Whether it is complete and has an index: it can become history."""


class HistorySegmentItem(msgspec.Struct, frozen=True, kw_only=True):
    """One piece `[start, end)` of the history of a partition; a gap has a reason and nothing that is stored."""

    kind: str
    """`frames`, `parquet`, `gap`, or `manifest` for a list of older pieces."""
    start: int
    end: int
    records: int
    bytes: int
    object: str | None
    """The key of the object in the store."""
    status: str
    time_min: int | None
    time_max: int | None
    created_at: int
    load_id: str | None
    """The bulk load that brought it."""
    gaps: list[GapItem]
    """The gap that it is, or the first ranges that were damaged when it was sealed."""


class SegmentList(msgspec.Struct, frozen=True, kw_only=True):
    """What a partition is stored in. With `next`, ask again with `start` set to it; without, there is no more."""

    partition: int
    local: list[LocalSegmentItem]
    """Log files of the broker, if it has the partition open."""
    history: list[HistorySegmentItem]
    next: int | None


class WorkerItem(msgspec.Struct, frozen=True, kw_only=True):
    """How a background worker fares."""

    name: str
    steps: int
    """How many steps have ended."""
    stepped_at: int | None
    """When the last of them ended, in milliseconds since 1970."""
    running_s: float | None
    """For how long the present step has been at one thing; `null` between two steps."""
    stuck: int
    """Threads that have not come back from a step that others have taken over."""
    failures: int
    error: str | None
    """What the newest failure was."""


class UnreadableItem(msgspec.Struct, frozen=True, kw_only=True):
    """A stored value that cannot be read: damaged, or written by a later version."""

    key: str
    message: str
    """Why, with the next step."""


class BrokerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How a broker fares: the partitions that it has open, and its background workers."""

    directory_id: str | None
    read_only: bool
    partitions: list[PartitionItem]
    workers: list[WorkerItem]
    unreadable: list[UnreadableItem] = []
    """Values in the metadata store that were passed over."""


class DegradedShard(msgspec.Struct, frozen=True):
    """A shard that could not be opened."""

    topic: str
    partition: int
    message: str


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the broker serves all routes."""

    ready: bool
    replay_progress: float
    degraded: list[DegradedShard] = []


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """That the broker lives, and how it is."""

    status: str
    """`starting`, `ok`, `degraded` or `ending`."""
    version: str
    uptime_s: float
