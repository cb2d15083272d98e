"""Manifests: long lists in one immutable object, for which one small value in the metadata store then stands.

An object is named by the hash of its bytes and is believed only if it still has that hash. A catalog manifest
lists consecutive descriptors; one descriptor of kind `manifest` takes their place in the catalog.
Knows stores and descriptors; knows nothing of logs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from forebay.blobs import BlobStore
from forebay.catalog import no_gap, no_overlap
from forebay.errors import Corrupt, Invalid
from forebay.format.checksum import content_hash
from forebay.format.metadata.descriptor import (
    DescriptorKind,
    SegmentDescriptor,
    Status,
    StoredObject,
    object_descriptor,
)
from forebay.format.metadata.value import decode_value, encode_value
from forebay.locks import Rank, RankedLock

SUFFIX = ".manifest"
BYTES_MAX = 64 * 1024 * 1024
"""Of one manifest: some 16,000 descriptors of full size."""
CHUNK_BYTES = 4 * 1024 * 1024
REMEMBERED = 4

T = TypeVar("T", bound=msgspec.Struct)


class ManifestRef(msgspec.Struct, frozen=True, kw_only=True):
    """Where a manifest lies and what it must hold."""

    object_key: str
    bytes: int
    content_hash: str
    etag: str | None = None


class CatalogManifest(msgspec.Struct, frozen=True):
    """What a catalog manifest holds: consecutive descriptors of one shard."""

    descriptors: tuple[SegmentDescriptor, ...]


def store_value(store: BlobStore, prefix: str, value: msgspec.Struct) -> ManifestRef:
    """Store a value under `prefix`, named by its content. Harmless when repeated."""
    content = encode_value(value)
    if len(content) > BYTES_MAX:
        raise Invalid(f"a manifest of {len(content)} bytes is larger than {BYTES_MAX}: list less in one")
    digest = content_hash([content]).hex()
    pieces = (content[place : place + CHUNK_BYTES] for place in range(0, len(content), CHUNK_BYTES))
    stat = store.upload(f"{prefix}{digest}{SUFFIX}", pieces)
    return ManifestRef(object_key=stat.key, bytes=len(content), content_hash=digest, etag=stat.etag)


def load_value(store: BlobStore, ref: ManifestRef, kind: type[T]) -> T:
    """The value that was stored; `Corrupt` if the object does not hold it any more."""
    if ref.bytes > BYTES_MAX:
        raise Corrupt(f"{ref.object_key} is said to have {ref.bytes} bytes, a manifest has at most {BYTES_MAX}")
    # A process that stored it again may have given it another etag: its hash alone counts.
    content = b"".join(store.read(ref.object_key, 0, ref.bytes))
    found = content_hash([content]).hex()
    if found != ref.content_hash:
        raise Corrupt(f"{ref.object_key} is damaged: its {len(content)} bytes have the hash {found}")
    return decode_value(content, kind)[0]


def write(
    store: BlobStore, prefix: str, descriptors: Sequence[SegmentDescriptor], *, store_name: str, created_at: int
) -> SegmentDescriptor:
    """Store consecutive descriptors of a shard as a manifest; the descriptor that may now take their place.

    `store_name` is what descriptors call the store. Raises `Invalid` if they are none, or not consecutive.
    """
    if not descriptors or any(piece.kind is DescriptorKind.MANIFEST for piece in descriptors):
        raise Invalid("a manifest lists at least one segment or gap, and no other manifest")
    first, last = descriptors[0], descriptors[-1]
    flaw = no_overlap(descriptors) or no_gap(first.start, descriptors, last.end)
    if flaw is not None or any(piece.topic_id != first.topic_id for piece in descriptors):
        raise Invalid(f"a manifest lists consecutive pieces of one shard: {flaw or 'these are of several topics'}")
    ref = store_value(store, prefix, CatalogManifest(tuple(descriptors)))
    filled = [piece for piece in descriptors if piece.records]
    stored = StoredObject(
        store=store_name,
        object_key=ref.object_key,
        etag=ref.etag,
        bytes=ref.bytes,
        content_hash=ref.content_hash,
        records=sum(piece.records for piece in filled),
        live_records=sum(piece.live_records for piece in filled),
        time_min=min((piece.time_min for piece in filled), default=0),
        time_max=max((piece.time_max for piece in filled), default=0),
    )
    return object_descriptor(
        DescriptorKind.MANIFEST,
        stored,
        topic_id=first.topic_id,
        start=first.start,
        end=last.end,
        epoch=max(piece.epoch for piece in descriptors),
        leader=last.leader,
        status=Status.EXPORTED,
        created_at=created_at,
    )


class ManifestReader:
    """Opens manifests for a `ShardCatalog`; the latest few are remembered. Safe for concurrent use."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._lock = RankedLock(Rank.LEAF, "history.manifests")
        self._remembered: OrderedDict[str, tuple[SegmentDescriptor, ...]] = OrderedDict()

    def __call__(self, descriptor: SegmentDescriptor) -> Sequence[SegmentDescriptor]:
        """The descriptors that this one stands for; `Corrupt` if they are not what was written."""
        with self._lock:
            found = self._remembered.pop(descriptor.content_hash, None)
        if found is None:
            found = load_value(self._store, _ref_of(descriptor), CatalogManifest).descriptors
        if not found or (found[0].start, found[-1].end) != (descriptor.start, descriptor.end):
            raise Corrupt(f"{descriptor.object_key} does not list the pieces of [{descriptor.start}, {descriptor.end})")
        with self._lock:
            self._remembered[descriptor.content_hash] = found
            while len(self._remembered) > REMEMBERED:
                self._remembered.popitem(last=False)
        return found


def _ref_of(descriptor: SegmentDescriptor) -> ManifestRef:
    return ManifestRef(
        object_key=descriptor.object_key,
        bytes=descriptor.bytes,
        content_hash=descriptor.content_hash,
        etag=descriptor.etag,
    )
