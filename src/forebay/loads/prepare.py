"""Writes the segments of a bulk load straight into the store, before it is known which offsets they will get.

A segment of a load counts its offsets from 0; its descriptor says later where it begins. What one load brings is
listed in a manifest object, and `Load` is the metadata value that offers it. Bringing it into the history is not
done here. Knows stores and formats; knows nothing of logs or owners.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import msgspec

from forebay.blobs import BlobStore
from forebay.bulk import LoadSegment
from forebay.clock import Clock
from forebay.errors import Conflict, Invalid, Unsupported
from forebay.format.checksum import SALT_BYTES, ContentHash, crc32, salted
from forebay.format.columns.rows import ColumnBytes
from forebay.format.files.segment import SEGMENT_SUFFIX, SegmentHeader, encode_header, index_name
from forebay.format.frame.batch import RAW_BYTES_MAX, Batch, batch_of, encode_data_frame, merge
from forebay.format.frame.head import HEAD_SIZE
from forebay.format.index.lookups import LookupSections
from forebay.format.index.sections import Footer, FrameEntries, encode_index, frame_entries
from forebay.format.metadata.descriptor import (
    DescriptorKind,
    LoadStatus,
    SegmentDescriptor,
    SparseEntry,
    Status,
    StoredObject,
    object_descriptor,
    sparse_index,
)
from forebay.manifests import ManifestRef, load_value, store_value
from forebay.records import Bytes
from forebay.topics import Engine, TopicSpec, shard_id

FRAME_BYTES = 1024 * 1024
"""Frames are no larger, unless one record is."""
RECORD_BYTES_MAX = RAW_BYTES_MAX - HEAD_SIZE
"""Of one record with all its columns: no reader takes a larger frame."""


class LoadStore(NamedTuple):
    """Where the segments of a load are to be put, and what its descriptors call that store."""

    store: BlobStore
    name: str


class LoadPlace(NamedTuple):
    """Which load a segment is for, and which shard it will be part of."""

    load_id: str
    topic_id: str
    partition: int

    @property
    def prefix(self) -> str:
        """Where the segments lie in the store."""
        return f"{shard_id(self.topic_id, self.partition)}/loads/{self.load_id}/"


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """One finished segment of a load, with all that its descriptor will say of it."""

    object_key: str
    index_bytes: int
    bytes: int
    records: int
    time_min: int
    time_max: int
    appended_max: int
    content_hash: str
    etag: str | None
    sparse: tuple[SparseEntry, ...]

    @property
    def index_key(self) -> str:
        """The object that holds its index."""
        return index_name(self.object_key)


def segment_of(partition: int, prepared: Prepared) -> LoadSegment:
    """A segment that was written, as callers know it."""
    fields = {name: getattr(prepared, name) for name in prepared.__struct_fields__}
    sparse = tuple((entry.records, entry.position) for entry in prepared.sparse)
    return LoadSegment(partition=partition, **{**fields, "sparse": sparse})


def prepared_of(segment: LoadSegment) -> Prepared:
    """The same as manifests list it."""
    fields = {name: getattr(segment, name) for name in Prepared.__struct_fields__}
    return Prepared(**{**fields, "sparse": tuple(SparseEntry(*place) for place in segment.sparse)})


class ShardSegments(msgspec.Struct, frozen=True):
    """What a load brings for one partition, in order."""

    partition: int
    segments: tuple[Prepared, ...]

    @property
    def records(self) -> int:
        """How many offsets it will take."""
        return sum(segment.records for segment in self.segments)


class LoadManifest(msgspec.Struct, frozen=True, kw_only=True):
    """All that a load brings. Kept as an object, for it may be long."""

    load_id: str
    topic_id: str
    shards: tuple[ShardSegments, ...]


class LoadedShard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a load brings for one partition; `start` is known once the load is committed."""

    partition: int
    records: int
    start: int | None = None

    @property
    def end(self) -> int | None:
        """The offset after its last record."""
        return None if self.start is None else self.start + self.records


class Sink(msgspec.Struct, frozen=True, kw_only=True):
    """Which batch of a streaming query a load brings. Of each batch one load is committed, however often it runs."""

    query_id: str
    batch_id: int


class Load(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A bulk load, as the metadata store knows it. Small even for a thousand partitions.

    One that is not attached everywhere by `expires_at` (ms) is given up. The owner of the data directory `directory`
    is asked to open partitions that have no holder. `unnamed_since` (ms) is when it was over and no history named it.
    """

    status: LoadStatus
    namespace: str
    topic: str
    topic_id: str
    store: str
    manifest: ManifestRef
    created_at: int
    shards: tuple[LoadedShard, ...]
    expires_at: int | None = None
    sink: Sink | None = None
    directory: str | None = None
    unnamed_since: int | None = None


class PreparedSegment:
    """The bytes of one segment in the making: `chunks` to their end, then `index`."""

    def __init__(self, header: SegmentHeader, *, zstd_level: int | None = None) -> None:
        self._header = header
        self._zstd_level = zstd_level
        self._salt_crc = salted(header.salt)
        self._rows: list[tuple[int, int, int, int, int, int]] = []
        self._lookups = LookupSections(header.start)
        self._next = header.start
        self._bytes = 0
        self._crc = 0
        self._digest = ContentHash()

    def chunks(self, batches: Iterable[ColumnBytes]) -> Iterator[Bytes]:
        """The segment of these records, frame by frame.

        Holds no more than one batch and one frame at a time, and for the index 12 bytes per key and per tag.
        """
        yield self._counted(encode_header(self._header))
        for columns in _frames_of(batches):
            frame = encode_data_frame(
                salt_crc=self._salt_crc,
                base=self._next,
                epoch=self._header.epoch,
                # The segment is durable as a whole or not there: what stands before a frame is.
                durable=self._next,
                appended_at=self._header.created,
                runs=(),
                columns=columns,
                zstd_level=self._zstd_level,
            )
            times = columns.time_min, columns.time_max
            self._rows.append((self._next, self._bytes, len(frame), columns.count, *times))
            self._lookups.add(batch_of(columns, base=self._next, epoch=0, appended_at=0))
            self._next += columns.count
            yield self._counted(frame)

    def index(self) -> tuple[bytes, Footer, FrameEntries]:
        """The index of all chunks so far, its footer and its entries; at least one record was written."""
        entries = frame_entries(self._rows)
        footer = Footer(
            epoch=self._header.epoch,
            epoch_max=self._header.epoch,
            start=self._header.start,
            end=self._next,
            frames=len(entries),
            records=self._next - self._header.start,
            time_min=int(entries["time_min"].min()),
            time_max=int(entries["time_max"].max()),
            appended_max=self._header.created,
            segment_bytes=self._bytes,
            segment_crc=self._crc,
            content_hash=self._digest.digest(),
        )
        return encode_index(footer, entries, [], self._lookups.sections()), footer, entries

    def _counted(self, chunk: Bytes) -> Bytes:
        self._bytes += len(chunk)
        self._crc = crc32(chunk, self._crc)
        self._digest.update(chunk)
        return chunk


def write_segment(
    store: BlobStore,
    place: LoadPlace,
    token: str,
    batches: Iterable[ColumnBytes],
    *,
    clock: Clock,
    zstd_level: int | None = None,
) -> Prepared | None:
    """Store these records as one segment of a load; `None` if there are none. On return it is durable.

    `token` names whose work the object is, such as a task and its attempt. Every call takes a name of its own, so
    that an attempt which was given up, or goes on unseen, never touches the object of another.
    """
    coming = iter(batches)
    first = next(coming, None)
    if first is None:
        return None
    salt = clock.random_bytes(SALT_BYTES)
    header = SegmentHeader(place.topic_id, place.partition, 0, 0, clock.now_ms(), salt)
    segment = PreparedSegment(header, zstd_level=zstd_level)
    stat = store.upload(f"{place.prefix}{token}-{salt.hex()}{SEGMENT_SUFFIX}", segment.chunks(chain([first], coming)))
    index, footer, entries = segment.index()
    store.put_if_absent(index_name(stat.key), index)
    return Prepared(
        object_key=stat.key,
        index_bytes=len(index),
        bytes=footer.segment_bytes,
        records=footer.records,
        time_min=footer.time_min,
        time_max=footer.time_max,
        appended_max=footer.appended_max,
        content_hash=footer.content_hash.hex(),
        etag=stat.etag,
        sparse=sparse_index(entries, footer.start),
    )


def _frames_of(batches: Iterable[ColumnBytes]) -> Iterator[ColumnBytes]:
    """The same records in pieces of about the size of a frame: small batches are joined, large ones cut."""
    waiting: list[Batch] = []
    size = 0
    for columns in batches:
        if waiting and HEAD_SIZE + size + columns.size > FRAME_BYTES:
            yield from _cut(merge(waiting))
            waiting, size = [], 0
        waiting.append(batch_of(columns, base=0, epoch=0, appended_at=0))
        size += columns.size
    if waiting:
        yield from _cut(merge(waiting))


def _cut(columns: ColumnBytes) -> Iterator[ColumnBytes]:
    """Even pieces, each within the size of a frame or of one record."""
    if HEAD_SIZE + columns.size <= FRAME_BYTES:
        yield columns
    elif columns.count == 1:
        if columns.size > RECORD_BYTES_MAX:
            raise Invalid(f"a record of {columns.size} bytes is larger than {RECORD_BYTES_MAX}: leave it out")
        yield columns
    else:
        batch = batch_of(columns, base=0, epoch=0, appended_at=0)
        # An eighth to spare: records differ in size, and a piece that is too large is cut again.
        pieces = max(2, -(-columns.size * 8 // (FRAME_BYTES * 7)))
        rows = max(1, -(-columns.count // pieces))
        for first in range(0, columns.count, rows):
            yield from _cut(batch.slice(first, first + rows).columns_bytes())


def manifest_of(load_id: str, topic_id: str, segments: Iterable[tuple[int, Prepared]]) -> LoadManifest:
    """The manifest of these segments, each with its partition; those of a partition stay in the order given."""
    shards: dict[int, list[Prepared]] = {}
    for partition, segment in segments:
        shards.setdefault(partition, []).append(segment)
    listed = tuple(ShardSegments(partition, tuple(shards[partition])) for partition in sorted(shards))
    return LoadManifest(load_id=load_id, topic_id=topic_id, shards=listed)


def write_manifest(store: BlobStore, manifest: LoadManifest) -> ManifestRef:
    """Store the manifest; on return it is durable. Harmless when repeated."""
    return store_value(store, f"{manifest.topic_id}/loads/{manifest.load_id}/", manifest)


def read_manifest(store: BlobStore, ref: ManifestRef) -> LoadManifest:
    """The manifest that was stored; `Corrupt` if the object is not what it was."""
    return load_value(store, ref, LoadManifest)


def offer_of(
    manifest: LoadManifest,
    ref: ManifestRef,
    *,
    namespace: str,
    topic: str,
    store: str,
    created_at: int,
    expires_at: int | None = None,
    sink: Sink | None = None,
    directory: str | None = None,
) -> Load:
    """The value that offers a load; `store` is what descriptors call the store of its objects."""
    return Load(
        status=LoadStatus.OFFERED,
        namespace=namespace,
        topic=topic,
        topic_id=manifest.topic_id,
        store=store,
        manifest=ref,
        created_at=created_at,
        shards=tuple(LoadedShard(partition=shard.partition, records=shard.records) for shard in manifest.shards),
        expires_at=expires_at,
        sink=sink,
        directory=directory,
    )


def ready_to_offer(
    place: LoadStore,
    spec: TopicSpec,
    manifest: LoadManifest,
    *,
    created_at: int,
    expires_at: int | None,
    sink: Sink | None = None,
    directory: str | None = None,
) -> Load:
    """Store the manifest of a load that fits the topic, and what offers it; `Conflict` if it does not fit."""
    if spec.engine is not Engine.SEGMENT:
        raise Unsupported(f"{spec.name} lives on the {spec.engine} engine: only topics with files take a load")
    if manifest.topic_id != spec.topic_id:
        raise Conflict(f"load {manifest.load_id} was prepared for another topic of the name {spec.name}")
    beyond = [shard.partition for shard in manifest.shards if not 0 <= shard.partition < spec.partitions]
    if beyond:
        raise Conflict(f"load {manifest.load_id} has records for partition {beyond[0]}, which {spec.name} has not")
    return offer_of(
        manifest,
        write_manifest(place.store, manifest),
        namespace=spec.namespace,
        topic=spec.topic,
        store=place.name,
        created_at=created_at,
        expires_at=expires_at,
        sink=sink,
        directory=directory,
    )


def descriptors_of(
    manifest: LoadManifest, partition: int, start: int, *, epoch: int, store: str, leader: str, created_at: int
) -> list[SegmentDescriptor]:
    """The segments that a load brings for one partition, one behind the other from `start`; perhaps none."""
    found: list[SegmentDescriptor] = []
    for shard in manifest.shards:
        for segment in shard.segments if shard.partition == partition else ():
            stored = StoredObject(
                store=store,
                object_key=segment.object_key,
                etag=segment.etag,
                bytes=segment.bytes,
                content_hash=segment.content_hash,
                records=segment.records,
                live_records=segment.records,
                time_min=segment.time_min,
                time_max=segment.time_max,
            )
            described = object_descriptor(
                DescriptorKind.FRAMES,
                stored,
                topic_id=manifest.topic_id,
                start=start,
                end=start + segment.records,
                epoch=epoch,
                leader=leader,
                status=Status.EXPORTED,
                created_at=created_at,
                header_start=0,
                index_bytes=segment.index_bytes,
                load_id=manifest.load_id,
                sparse=segment.sparse,
            )
            found.append(described)
            start = described.end
    return found
