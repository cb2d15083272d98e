"""The swap: a new segment takes the place of those it was made from, in one transaction.

Done only while the compactor holds its lease, and only if nothing that was read has changed. The deletes that were
applied stay recorded: local copies of the log may still hold the records, and their owner needs to know.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from forebay import manifests
from forebay.blobs import BlobStore
from forebay.catalog import ShardCatalog
from forebay.catalog.shard import Piece
from forebay.compacting.merging import SegmentTarget
from forebay.errors import Corrupt
from forebay.format.files.segment import COMPACTED, index_name
from forebay.format.metadata.descriptor import SegmentDescriptor
from forebay.metadata import Compare
from forebay.topics import shard_id


def swap(
    catalog: ShardCatalog,
    old: Sequence[Piece],
    new: Sequence[SegmentDescriptor],
    target: SegmentTarget,
    *,
    partition: int,
    made: Collection[str],
    held: Sequence[Compare],
) -> bool:
    """Put the new descriptors in the place of the old pieces; false if those have changed.

    Several are listed in a manifest, which then stands for all. `made` are the keys of new objects. `held` is
    compared too: what says that this compactor is still the one. Harmless when repeated.
    """
    for piece in new:
        if piece.object_key in made:
            check_stored(target.store, piece)
    stands = new[0]
    if len(new) > 1:
        prefix = f"{shard_id(stands.topic_id, partition)}/{COMPACTED}"
        stands = manifests.write(target.store, prefix, new, store_name=target.name, created_at=target.created_at)
    return catalog.replace(old, stands, also=held)


def check_stored(store: BlobStore, piece: SegmentDescriptor) -> None:
    """What is named from now on is there, whole."""
    found, index = store.stat(piece.object_key), store.stat(index_name(piece.object_key))
    if found is None or (found.size, found.etag) != (piece.bytes, piece.etag):
        raise Corrupt(f"{piece.object_key} is not there as it was written: nothing is replaced by it; run it again")
    if index is None or index.size != piece.index_bytes:
        raise Corrupt(f"the index of {piece.object_key} is not there as it was written: run it again")
