"""What an owner makes of history that was compacted: its bytes are not those of the local files any more.

A local file that a Parquet segment covers is a copy like any other. Knows the catalog's pieces, files and stores.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import msgspec

from forebay.blobs import BlobStore
from forebay.errors import Corrupt
from forebay.format.checksum import ContentHash
from forebay.format.descriptor import DescriptorKind, SegmentDescriptor
from forebay.format.segment import index_name


def covering(pieces: Sequence[SegmentDescriptor], start: int, end: int) -> SegmentDescriptor | None:
    """The Parquet segment that holds what is left of `[start, end)`, if there is one; pieces are in order."""
    place = bisect_right(pieces, start, key=lambda piece: piece.start) - 1
    found = pieces[place] if place >= 0 else None
    if found is None or found.kind is not DescriptorKind.PARQUET or found.end < end:
        return None
    return found


def is_there(store: BlobStore, piece: SegmentDescriptor) -> bool:
    """Whether the store has the object of a segment, as it was catalogued, and its index."""
    found, index = store.stat(piece.object_key), store.stat(piece.index_object)
    is_same = found is not None and (found.size, found.etag) == (piece.bytes, piece.etag)
    return is_same and index is not None and index.size == piece.index_bytes


def copied(
    descriptor: SegmentDescriptor, origin: BlobStore, store: BlobStore, store_name: str, *, created_at: int
) -> SegmentDescriptor:
    """Put a copy of a Parquet segment into another store; the descriptor of that copy. Harmless when repeated.

    From `created_at` on history names the copy: so long what was copied stays for those who read it.
    """
    key = descriptor.object_key
    stat = store.upload(key, _verified(origin, descriptor))
    store.upload(index_name(key), [origin.get_range(descriptor.index_object, 0, descriptor.index_bytes)])
    return msgspec.structs.replace(descriptor, store=store_name, etag=stat.etag, index_key=None, created_at=created_at)


def _verified(store: BlobStore, descriptor: SegmentDescriptor) -> Iterator[bytes]:
    """Its bytes; raises before the end if they have changed: damage must not become the only copy."""
    digest = ContentHash()
    for chunk in store.read(descriptor.object_key, 0, descriptor.bytes, etag=descriptor.etag):
        digest.update(chunk)
        yield chunk
    if digest.digest().hex() != descriptor.content_hash:
        raise Corrupt(f'{descriptor.object_key} is not what was written: not copied; run "forebay verify"')
