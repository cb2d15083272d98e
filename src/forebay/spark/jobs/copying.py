"""One object from one store into another, verified by its hash on both sides. What a task of `migrate` does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec

from forebay.blobs import BlobMissing, BlobStore, open_store
from forebay.errors import Corrupt
from forebay.format.checksum import ContentHash, content_hash
from forebay.format.files.segment import index_name
from forebay.format.frame.head import Verdict
from forebay.format.index import sections as index_format
from forebay.format.metadata.descriptor import DescriptorKind, SegmentDescriptor
from forebay.spark.place.location import Location
from forebay.spark.place.opening import opened


class Errand(msgspec.Struct, frozen=True, array_like=True):
    """An object to be copied, and the key it will have."""

    topic: str
    partition: int
    descriptor: SegmentDescriptor
    key: str
    keeps_index: bool
    """Whether the catalog will go on naming the index as it does; else it has the name of the object."""

    @property
    def bytes(self) -> int:
        return self.descriptor.bytes


class CopiedObjects(msgspec.Struct, frozen=True, array_like=True):
    """What the other store has now."""

    etag: str | None
    bytes: int
    was_there: bool


def copy(old: Location, new: Location, errand: Errand) -> CopiedObjects:
    """On return the new store has the object and its index, both as they were catalogued.

    Raises `Corrupt` if the old object is not what was catalogued: damage is not brought along.
    """
    store = new.settings().store
    with opened(old, also=store) as found:
        source = found.stores.of(errand.descriptor.store)
        with contextlib.closing(open_store(store, disk=found.disk, clock=found.clock)) as target:
            copied = _object(source, target, errand)
            if has_index(errand.descriptor):
                _index(source, target, errand)
            return copied


def has_index(descriptor: SegmentDescriptor) -> bool:
    """Whether an index lies beside the object."""
    return descriptor.kind in (DescriptorKind.FRAMES, DescriptorKind.PARQUET) and descriptor.index_bytes > 0


def _object(source: BlobStore, target: BlobStore, errand: Errand) -> CopiedObjects:
    descriptor = errand.descriptor
    there = target.stat(errand.key)
    if there is not None and there.size == descriptor.bytes and _hash(target, errand) == descriptor.content_hash:
        return CopiedObjects(there.etag, there.size, True)
    stat = target.upload(errand.key, _verified(source, descriptor))
    found = _hash(target, errand)
    if found != descriptor.content_hash:
        raise Corrupt(f"{target.name}: {errand.key} has the hash {found} once it is stored, not that of its source")
    return CopiedObjects(stat.etag, stat.size, False)


def _verified(source: BlobStore, descriptor: SegmentDescriptor) -> Iterator[bytes]:
    """The bytes of the object; raises before the end if they are not those that were catalogued."""
    digest = ContentHash()
    for chunk in source.read(descriptor.object_key, 0, descriptor.bytes, etag=descriptor.etag):
        digest.update(chunk)
        yield chunk
    if digest.digest().hex() != descriptor.content_hash:
        raise Corrupt(
            f"{source.name}: {descriptor.object_key} is not what was catalogued (hash {digest.digest().hex()}): it was "
            'not copied; run "forebay history scrub"'
        )


def _hash(target: BlobStore, errand: Errand) -> str:
    try:
        return content_hash(target.read(errand.key, 0, errand.descriptor.bytes)).hex()
    except BlobMissing:
        return ""


def _index(source: BlobStore, target: BlobStore, errand: Errand) -> None:
    name = errand.descriptor.index_object
    key = name if errand.keeps_index else index_name(errand.key)
    if _fits(target, key, errand.descriptor) is not None:
        return
    content = _fits(source, name, errand.descriptor)
    if content is None:
        raise Corrupt(f'{source.name}: {name} is not the index of its segment: run "forebay history reindex" first')
    target.upload(key, [content])


def _fits(store: BlobStore, key: str, descriptor: SegmentDescriptor) -> bytes | None:
    """The index, if it is the one that was catalogued."""
    try:
        content = store.get_range(key, 0, descriptor.index_bytes + 1)
    except BlobMissing:
        return None
    footer = index_format.decode_footer(content)
    if isinstance(footer, Verdict) or footer.content_hash.hex() != descriptor.content_hash:
        return None
    return content if len(content) == descriptor.index_bytes else None
