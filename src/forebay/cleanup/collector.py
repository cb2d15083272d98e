"""What is left of the history of a shard that is not open here: objects that were replaced, or copied elsewhere.

An owner sweeps its own shard and knows what it has still to export. Whoever else sweeps takes only what no owner,
should one come meanwhile, can ever name again. Knows the catalog, the stores and bulk loads; knows no log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from forebay.blobs import BlobMissing, BlobStore
from forebay.catalog.replaced import Replaced
from forebay.catalog.shard import ShardCatalog
from forebay.clock import Clock
from forebay.format.descriptor import LoadStatus, SegmentDescriptor
from forebay.format.segment import (
    COMPACTED,
    HEADER_BYTES,
    INDEX_SUFFIX,
    SEGMENT_SUFFIX,
    SegmentHeader,
    decode_header,
)
from forebay.loads.book import LoadBook, never_offered
from forebay.loads.prepare import Load
from forebay.metadata import MetadataStore
from forebay.settings import Settings
from forebay.shard.places import Places, is_private
from forebay.shard.surroundings import ShardRef
from forebay.sweeping import Sweep, named_by, sweep
from forebay.tabled import Tabled

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """The objects of one shard that is not open here."""

    ref: ShardRef
    catalog: ShardCatalog
    metadata: MetadataStore
    settings: Settings
    places: Places
    clock: Clock
    replaced: Replaced

    def sweep_private(self, compacting: Callable[[], bool] | None = None) -> list[str]:
        """Remove Parquet segments of the data directory that history does not name there any more; their keys.

        `compacting` says whether somebody may yet name what lies there; unless told, the lease is looked at.
        """
        by = replace(self._by(compacting), is_there=is_private)
        return sweep(self.places.loads, f"{self.ref.id}/{COMPACTED}", self.catalog, by)

    def sweep_shared(self, compacting: Callable[[], bool] | None = None) -> list[str]:
        """The same for the store of the settings: what compaction replaced there, and what it made and never named."""
        store, pieces = self.places.store, self.catalog.descriptors()
        # In a store that only other settings know, these may be the copies of what is named there.
        if store is None or any(self._is_elsewhere(piece) for piece in pieces):
            return []
        by = replace(self._by(compacting), may_go=partial(self._is_past, store, pieces))
        return sweep(store, f"{self.ref.id}/", self.catalog, by)

    def sweep_loads(self, store: BlobStore) -> list[str]:
        """Remove what bulk loads that are over brought into a store and nobody needs any more; the keys."""
        now_ms, grace_s = self.clock.now_ms(), self.settings.export.orphan_grace_s
        book, by = LoadBook(self.metadata, self.settings.metadata.prefix), LoadSweep(now_ms, grace_s, self.replaced)
        prefixes = [f"{self.ref.id}/loads/"]
        if self.ref.partition == 0:
            prefixes.append(f"{self.ref.spec.topic_id}/loads/")
        unknown_as = never_offered(self.ref.spec, created_at=now_ms)
        swept: list[str] = []
        for prefix in prefixes:
            swept += sweep_loads(store, prefix, book, self.catalog, unknown_as=unknown_as, by=by)
        return swept

    def _by(self, compacting: Callable[[], bool] | None) -> Sweep:
        return Sweep(
            clock=self.clock,
            grace_s=self.settings.export.orphan_grace_s,
            replaced=self.replaced,
            compacting=compacting or self._is_leased,
            others=self._tabled,
        )

    def _is_leased(self) -> bool:
        return self.metadata.get(self.catalog.keys.compactor) is not None

    def _tabled(self) -> Collection[str]:
        spec, shared = self.ref.spec, self.places.store if self.settings.is_shared else None
        tabled = Tabled(self.metadata, self.settings.metadata.prefix, spec.namespace, spec.topic, spec.topic_id)
        return tabled.objects(shared or self.places.loads)

    def _is_elsewhere(self, piece: SegmentDescriptor) -> bool:
        return piece.gap is None and not is_private(piece) and piece.store != self.places.store_name

    def _is_past(self, store: BlobStore, pieces: list[SegmentDescriptor], key: str) -> bool:
        """Whether nobody can name the object again: only compactors name what they made, owners what is new."""
        name = key.removeprefix(f"{self.ref.id}/")
        if name.startswith(COMPACTED):
            return True
        if name.endswith(INDEX_SUFFIX):
            key = key.removesuffix(INDEX_SUFFIX) + SEGMENT_SUFFIX
        # A file of some directory is put into the store when its topic moves; one of a load does not say for where.
        if "/" in name or not key.endswith(SEGMENT_SUFFIX) or any(map(is_private, pieces)):
            return False
        try:
            header = decode_header(store.get_range(key, 0, HEADER_BYTES))
        except BlobMissing:
            return False
        if not isinstance(header, SegmentHeader) or header.partition != self.ref.partition or not pieces:
            return False
        return header.topic_id == self.ref.spec.topic_id and header.start < pieces[-1].end


class LoadSweep(NamedTuple):
    """What a sweep goes by: how old objects must be, and since when history has not named them."""

    now_ms: int
    grace_s: float
    replaced: Replaced


def sweep_loads(
    store: BlobStore, prefix: str, book: LoadBook, catalog: ShardCatalog, *, unknown_as: Load, by: LoadSweep
) -> list[str]:
    """Remove objects of loads below `prefix` that are older than the grace and that nobody needs; their keys.

    All are needed while the load is offered, afterwards those that the catalog names or has named within the grace.
    What was never offered is given up first: whoever brings it must have offered it by then.
    """
    found: dict[str, list[str]] = {}
    before_ms = by.now_ms - int(by.grace_s * 1000)
    for stat in store.list(prefix):
        load_id, _, name = stat.key.removeprefix(prefix).partition("/")
        if name and stat.modified_ms < before_ms:
            found.setdefault(load_id, []).append(stat.key)
    over = [load_id for load_id in found if _is_over(book, load_id, unknown_as)]
    # Read after that: nothing of a load that is over can be named any more, unless it is named here.
    if not over:
        return []
    needed = named_by(catalog)
    unneeded = [key for load_id in over for key in found[load_id] if key not in needed]
    swept = by.replaced.long_ago(unneeded, catalog.descriptors(), by.grace_s)
    for key in swept:
        store.delete(key)
        logger.info("%s: removed %s of a load that is over", catalog.keys, key)
    return swept


def _is_over(book: LoadBook, load_id: str, unknown_as: Load) -> bool:
    stored = book.find(load_id)
    if stored is None:
        return book.give_up(load_id, unknown_as=unknown_as).status is LoadStatus.ABANDONED
    return stored.load.status is not LoadStatus.OFFERED
