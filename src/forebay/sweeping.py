"""Objects of a shard that nobody needs are removed, by whoever may do it, in one order for all.

A sweep lists objects, asks whether somebody compacts, reads the catalog, asks what else is needed, and then removes.
Who begins later writes under names that were not listed; who has ended by then has named in the catalog what it wrote,
or never will; who names an object in a table sees first that history still does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from forebay.blobs import BlobStore
from forebay.catalog import ShardCatalog
from forebay.catalog.replaced import Replaced
from forebay.clock import Clock
from forebay.format.descriptor import SegmentDescriptor
from forebay.format.segment import COMPACTED, index_name, is_segment

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What a sweep goes by."""

    clock: Clock
    grace_s: float
    """So old an object must be; and so long history must not have named it."""
    replaced: Replaced
    compacting: Callable[[], bool]
    """Whether somebody compacts the shard: what it has written may be named yet."""
    others: Callable[[], Collection[str]]
    """What is needed though history does not name it, as by tables; with each segment its index."""
    may_go: Callable[[str], bool] = lambda key: True
    """Whether an object that is not needed is the business of who sweeps."""
    is_there: Callable[[SegmentDescriptor], bool] = lambda piece: True
    """Whether a segment of history may lie in the store that is swept; copies elsewhere have the same names."""


def sweep(store: BlobStore, prefix: str, catalog: ShardCatalog, by: Sweep) -> list[str]:
    """Remove the objects below `prefix` that are older than the grace and that nobody needs; their keys."""
    before_ms = by.clock.now_ms() - int(by.grace_s * 1000)
    found = [stat.key for stat in store.list(prefix) if stat.modified_ms < before_ms]
    if not found:
        return []
    spared = f"/{COMPACTED}" if by.compacting() else None
    standing = [piece.descriptor for piece in catalog.pieces()]
    # Read last: what a manifest lists is named here, though it came in between.
    pieces = catalog.descriptors()
    needed = keys_of([*standing, *pieces], by.is_there)
    others = by.others()
    needed |= set(others) | {index_name(key) for key in others if is_segment(key)}
    unneeded = [key for key in found if key not in needed and (spared is None or spared not in key) and by.may_go(key)]
    swept = by.replaced.long_ago(unneeded, pieces, by.grace_s)
    for key in swept:
        store.delete(key)
        logger.info("%s: removed the orphan object %s", catalog.keys, key)
    return swept


def named_by(catalog: ShardCatalog, is_there: Callable[[SegmentDescriptor], bool] = lambda piece: True) -> set[str]:
    """Every object that a history names, of the segments that are where it is asked about."""
    return keys_of([*(piece.descriptor for piece in catalog.pieces()), *catalog.descriptors()], is_there)


def keys_of(
    pieces: Sequence[SegmentDescriptor], is_there: Callable[[SegmentDescriptor], bool] = lambda piece: True
) -> set[str]:
    """The objects that these descriptors name, with indexes."""
    named = [piece for piece in pieces if piece.object_key and is_there(piece)]
    indexes = {piece.index_object for piece in named if is_segment(piece.object_key)}
    return {piece.object_key for piece in named} | indexes
