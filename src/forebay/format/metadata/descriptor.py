"""Descriptors: what the metadata store says of a shard and of each piece of its history. Knows no store.

Stored with `value`. A descriptor has all that a reader needs to plan without opening the object, in
at most 4 KiB.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

import msgspec

from forebay.format.control.frames import Floor, reason_of
from forebay.format.files.segment import index_name
from forebay.format.index.sections import Footer, FrameEntries, find_offset
from forebay.records import Gap

DESCRIPTOR_BYTES_MAX: Final = 4096
SPARSE_ENTRIES_MAX: Final = 64
DAMAGED_RANGES_MAX: Final = 16
SPARSE_RECORDS_MIN: Final = 1000


class DescriptorKind(enum.StrEnum):
    """What stands behind a descriptor."""

    FRAMES = "frames"
    PARQUET = "parquet"
    GAP = "gap"
    MANIFEST = "manifest"


class Status(enum.StrEnum):
    """How far a segment has come."""

    SEALED = "sealed"
    EXPORTED = "exported"
    COMPACTED = "compacted"


class Phase(enum.StrEnum):
    """What may happen to a shard."""

    OPEN = "open"
    SEALING = "sealing"
    SEALED = "sealed"
    DELETING = "deleting"


class LoadStatus(enum.StrEnum):
    """How far a bulk load has come. Committed and abandoned are final."""

    OFFERED = "offered"
    COMMITTED = "committed"
    ABANDONED = "abandoned"


class LoadStanding(msgspec.Struct, frozen=True, kw_only=True):
    """What readers need to know of a bulk load; the value says more."""

    status: LoadStatus
    topic_id: str


class SparseEntry(msgspec.Struct, frozen=True, array_like=True):
    """A place to start reading: how far behind the segment's start an offset lies, and its byte."""

    records: int
    position: int


class SegmentDescriptor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One piece `[start, end)` of a shard's history. `bytes` and below are empty for a gap.

    The offset of a record is its frame's base − `header_start` + `start`; in segments born in the log
    `header_start` equals `start`. `producers` counts those whose repeats were recognised when it was catalogued.
    `source_bytes` is how many bytes of frames a Parquet segment was made of. `index_key` is where its index lies, if
    that was made again and is not beside the object. `damaged` are the first ranges that were damaged when it was
    sealed, and accepted; its index names them all.
    """

    kind: DescriptorKind
    topic_id: str
    start: int
    end: int
    epoch: int
    segment_id: str = ""
    reason: int = 0
    bytes: int = 0
    records: int = 0
    live_records: int = 0
    time_min: int = 0
    time_max: int = 0
    content_hash: str = ""
    store: str = ""
    object_key: str = ""
    etag: str | None = None
    object_version: str | None = None
    leader: str = ""
    status: Status = Status.SEALED
    created_at: int = 0
    completed: bool = True
    header_start: int | None = None
    index_bytes: int = 0
    load_id: str | None = None
    producers: int = 0
    source_bytes: int = 0
    sparse: tuple[SparseEntry, ...] = ()
    index_key: str | None = None
    damaged: tuple[tuple[int, int], ...] = ()

    @property
    def index_object(self) -> str:
        """The key of its index, which only segments have."""
        return self.index_key if self.index_key is not None else index_name(self.object_key)

    @property
    def is_born(self) -> bool:
        """Whether the segment, or the newest of what it was made from, was born in the log."""
        return self.kind in (DescriptorKind.FRAMES, DescriptorKind.PARQUET) and self.header_start is None

    @property
    def gap(self) -> Gap | None:
        """The gap that this descriptor names, if it names one."""
        return Gap(self.start, self.end, reason_of(self.reason)) if self.kind is DescriptorKind.GAP else None


class Cur(msgspec.Struct, frozen=True, kw_only=True):
    """The end of catalogued history: the newest descriptor starts at `start`, the next will at `next`.

    `generation` counts the changes to what lies before: a reader that remembers descriptors looks again when it moves.
    """

    start: int
    next: int
    epoch: int
    generation: int = 0


class AcceptedLoss(msgspec.Struct, frozen=True, kw_only=True):
    """A yes to a take-over: offsets `[start, stop)` that the directory `holder` had not exported are given up.

    `epoch` is the holder's last one; `by` says who accepted it, `at` when, in milliseconds since 1970 UTC.
    """

    start: int
    stop: int
    holder: str
    epoch: int
    by: str
    at: int


class ShardState(msgspec.Struct, frozen=True, kw_only=True):
    """Who owns a shard and how far its offsets go. `incarnation` is the topic id; `owner` a session.

    `holder` is the directory that has the local log, since epoch `holder_since`; `next_offset` is where the last
    seal ended. A sealed shard with a `target` is promised to the directory of that name. With `reserved_in_log` only
    the holder's log says how far its offsets went, and `reserved_end` does not. The floors are at least as far as
    they reach into history, `floor_reason` is why `evict_floor` moved last. `deletes` counts the changes to the
    deletion vectors; 0 if there are none. `unknown_below` is set only if appends of producers below that offset may be
    unknown to the owner, because of damage. `held_before` are the other directories that had the shard at any time,
    set only if there are some. `accepted_losses` are the newest take-overs that have given up records, oldest first,
    set only if there were some.
    """

    incarnation: str
    epoch: int = 0
    owner: str | None = None
    holder: str | None = None
    holder_since: int = 0
    phase: Phase = Phase.OPEN
    next_offset: int = 0
    reserved_end: int = 0
    sealed_by: str | None = None
    sealed_at: int | None = None
    target: str | None = None
    reserved_in_log: bool = False
    earliest: int = 0
    evict_floor: int = 0
    floor_reason: int = 0
    deletes: int = 0
    held_before: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    unknown_below: int | msgspec.UnsetType = msgspec.UNSET
    accepted_losses: tuple[AcceptedLoss, ...] | msgspec.UnsetType = msgspec.UNSET

    @property
    def losses(self) -> tuple[AcceptedLoss, ...]:
        """The take-overs that have given up records, oldest first."""
        return () if isinstance(self.accepted_losses, msgspec.UnsetType) else self.accepted_losses

    @property
    def producers_unknown_below(self) -> int:
        """Appends of producers below this offset may be unknown; 0 if none are."""
        return 0 if isinstance(self.unknown_below, msgspec.UnsetType) else self.unknown_below

    @property
    def holders(self) -> set[str]:
        """Every directory that has or had the shard, and may have files of it."""
        before = () if isinstance(self.held_before, msgspec.UnsetType) else self.held_before
        return {*before, *(() if self.holder is None else (self.holder,))}

    @property
    def floor(self) -> Floor:
        """The watermarks, as far as history must know them."""
        return Floor(self.earliest, self.evict_floor, reason_of(self.floor_reason) if self.floor_reason else None)


class StoredObject(NamedTuple):
    """An object of history as a descriptor names it: where it lies, and what it holds."""

    store: str
    object_key: str
    etag: str | None
    bytes: int
    content_hash: str
    records: int
    live_records: int
    time_min: int
    time_max: int

    @classmethod
    def of_segment(cls, footer: Footer, *, store: str, object_key: str, etag: str | None) -> StoredObject:
        """The segment that an index with this footer belongs to."""
        return cls(
            store=store,
            object_key=object_key,
            etag=etag,
            bytes=footer.segment_bytes,
            content_hash=footer.content_hash.hex(),
            records=footer.records,
            live_records=footer.records,
            time_min=footer.time_min,
            time_max=footer.time_max,
        )


def object_descriptor(
    kind: DescriptorKind,
    stored: StoredObject,
    *,
    topic_id: str,
    start: int,
    end: int,
    epoch: int,
    leader: str,
    status: Status,
    created_at: int,
    header_start: int | None = None,
    index_bytes: int = 0,
    load_id: str | None = None,
    producers: int = 0,
    source_bytes: int = 0,
    sparse: tuple[SparseEntry, ...] = (),
    damaged: tuple[tuple[int, int], ...] = (),
) -> SegmentDescriptor:
    """The descriptor of a segment or manifest that was stored; it is named by its content."""
    return SegmentDescriptor(
        kind=kind,
        topic_id=topic_id,
        segment_id=stored.content_hash,
        start=start,
        end=end,
        epoch=epoch,
        leader=leader,
        status=status,
        created_at=created_at,
        header_start=header_start,
        index_bytes=index_bytes,
        load_id=load_id,
        producers=producers,
        source_bytes=source_bytes,
        sparse=sparse,
        damaged=damaged,
        **stored._asdict(),
    )


def gap_descriptor(gap: Gap, *, topic_id: str, epoch: int, created_at: int) -> SegmentDescriptor:
    """The descriptor of offsets that hold no record."""
    return SegmentDescriptor(
        kind=DescriptorKind.GAP,
        topic_id=topic_id,
        start=gap.start,
        end=gap.stop,
        epoch=epoch,
        reason=int(gap.reason),
        created_at=created_at,
    )


def sparse_index(entries: FrameEntries, start: int) -> tuple[SparseEntry, ...]:
    """At most 64 frames of a segment, about every 1000 records or wider, the first one included."""
    if not len(entries):
        return ()
    first = int(entries["offset"][0])
    end = int(entries["offset"][-1]) + int(entries["count"][-1])
    step = max(SPARSE_RECORDS_MIN, -(-(end - first) // SPARSE_ENTRIES_MAX))
    places = sorted({min(find_offset(entries, offset), len(entries) - 1) for offset in range(first, end, step)})
    return tuple(_entry(entries, place, start) for place in places)


def _entry(entries: FrameEntries, place: int, start: int) -> SparseEntry:
    return SparseEntry(int(entries["offset"][place]) - start, int(entries["position"][place]))
