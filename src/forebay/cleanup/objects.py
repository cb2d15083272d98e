"""Removes the objects of topics that nothing needs any more: of open shards, of others, of loads, of deleted topics.

Says for each of these which store and which prefix are looked at and where the facts come from; the collector decides.
Knows shards, their stores and bulk loads; knows no engines and no threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import ParamSpec

from forebay.blobs import BlobStore
from forebay.catalog import ShardCatalog, ShardKeys
from forebay.cleanup.collector import Collector, Judgement, Scope
from forebay.cleanup.tables import TableObjects, tables_of
from forebay.clock import Clock
from forebay.errors import Corrupt, ForebayError, UnsupportedFormat
from forebay.format.files.segment import COMPACTED
from forebay.format.metadata.descriptor import LoadStatus, SegmentDescriptor
from forebay.loads.book import LoadBook, never_offered
from forebay.loads.forget import EndedLoad, ended_loads, forget_unnamed, named_in
from forebay.loads.prepare import Load
from forebay.metadata import MetadataStore
from forebay.places import Places, is_private
from forebay.settings import Settings
from forebay.shard import SegmentShard
from forebay.topics import ShardRef, TopicSpec, refs_of, shard_id

logger = logging.getLogger(__name__)

P = ParamSpec("P")


class ObjectCleanup:
    """Collects the objects of topics, as far as this process knows the stores. One per process."""

    def __init__(self, metadata: MetadataStore, settings: Settings, places: Places, clock: Clock) -> None:
        self._metadata = metadata
        self._settings = settings
        self._places = places
        self._clock = clock
        self._prefix = settings.metadata.prefix
        self._book = LoadBook(metadata, self._prefix, clock)
        self.collector = Collector(clock, settings.export.orphan_grace_s)

    def collect_owned(self, shard: SegmentShard) -> list[str]:
        """Remove objects of a shard that this process owns; the keys. Exports of the shard wait meanwhile.

        Looks into the store of history, into the data directory, where compaction puts what it makes if there is no
        other place, and into the store where topics are handed over.
        """
        history, places = shard.history, self._places
        owned = replace(
            self._scope(shard.ref, places.loads, f"{shard.ref.id}/"), epoch=shard.epoch, unexported=history.unexported
        )
        removed: list[str] = []
        with history.exports_paused():
            if self._settings.is_shared and places.store is not None:
                removed += self.collector.collect(replace(owned, store=places.store))
            private = replace(owned, prefix=f"{owned.prefix}{COMPACTED}", is_there=is_private)
            removed += self.collector.collect(private)
            if not self._settings.is_shared and places.store is not None:
                # What is private still is not needed there.
                handed_over = replace(owned, store=places.store, is_there=lambda piece: not is_private(piece))
                removed += self.collector.collect(handed_over)
        return removed

    def judged(
        self, shard: SegmentShard, store: BlobStore, keys: Collection[str], is_compacting: Callable[[], bool] | None
    ) -> Judgement:
        """Why objects of an owned shard that hold erased records are kept, graces apart; see `Collector.look_at`."""
        return {
            key: why
            for scope in self._erased_in(shard, store, is_compacting)
            for key, why in self.collector.look_at(scope, keys).items()
        }

    def table_formats(self, shard: SegmentShard) -> tuple[str, ...]:
        """The formats of the tables that name objects of the shard's topic; empty where that was not written down."""
        return self._tables(shard.ref).formats()

    def remove_at_once(
        self, shard: SegmentShard, store: BlobStore, keys: Collection[str], is_compacting: Callable[[], bool]
    ) -> list[str]:
        """Remove objects of an owned shard that hold erased records, unless more than a grace keeps them; the keys.

        The caller holds the lease to compact the shard, which `is_compacting` checks. Exports of the shard wait.
        """
        with shard.history.exports_paused():
            return [
                key
                for scope in self._erased_in(shard, store, is_compacting)
                for key in self.collector.remove_at_once(scope, keys)
            ]

    def _erased_in(
        self, shard: SegmentShard, store: BlobStore, is_compacting: Callable[[], bool] | None
    ) -> list[Scope]:
        """Where objects of a shard lie in a store: by its id, and of partition 0 by that of the topic, for loads."""
        ref = shard.ref
        names = [ref.id, ref.spec.topic_id] if ref.partition == 0 else [ref.id]
        return [
            replace(
                self._scope(ref, store, f"{name}/", is_compacting),
                epoch=shard.epoch,
                unexported=shard.history.unexported,
                loads_over=self._known_over,
                is_there=lambda piece: self._places.by_name.get(piece.store) is store,
            )
            for name in names
        ]

    def collect_private(self, ref: ShardRef, is_compacting: Callable[[], bool] | None = None) -> list[str]:
        """Remove Parquet segments of the data directory that history does not name there any more; their keys.

        For a shard that is not open here. `is_compacting` says whether a compaction may name them yet; by default the
        lease says it.
        """
        scope = self._scope(ref, self._places.loads, f"{ref.id}/{COMPACTED}", is_compacting)
        return self.collector.collect(replace(scope, is_there=is_private))

    def collect_shared(self, ref: ShardRef, is_compacting: Callable[[], bool] | None = None) -> list[str]:
        """The same in the store of history: what compaction replaced, and what it made and never named."""
        if self._places.store is None:
            return []
        scope = self._scope(ref, self._places.store, f"{ref.id}/", is_compacting)
        return self.collector.collect(replace(scope, is_elsewhere=self._is_elsewhere))

    def collect_loads(
        self, ref: ShardRef, store: BlobStore, is_compacting: Callable[[], bool] | None = None
    ) -> list[str]:
        """Remove what bulk loads that are over brought into a store for a shard, unless it is needed; the keys.

        A load that was never offered is given up first: the time to offer it is over.
        """
        names = [ref.id, ref.spec.topic_id] if ref.partition == 0 else [ref.id]
        removed: list[str] = []
        for name in names:
            scope = self._scope(ref, store, f"{name}/loads/", is_compacting)
            removed += self.collector.collect(replace(scope, loads_over=lambda load_ids: self._over(ref, load_ids)))
        return removed

    def collect_directory(self, topics: Callable[[], Sequence[TopicSpec]], owned: Collection[str]) -> None:
        """Collect what the shards that are not open here, and bulk loads, have left in the stores of a data directory.

        `topics` are all that are defined, `owned` the ids of the shards that are open here. What fails for one shard
        is logged, and keeps no other from its turn. Loads that no history names any more are forgotten.
        """
        ended = ended_loads(self._metadata, self._prefix)
        here = {stat.key.partition("/")[0] for stat in self._places.loads.list()}
        # Read after the list: a process that puts an object there knows its topic.
        specs = topics()
        for ref in [ref for spec in specs for ref in refs_of(spec)]:
            if {ref.id, ref.spec.topic_id} & here:
                attempt(self.collect_loads, ref, self._places.loads)
            if ref.id in here and ref.id not in owned:
                attempt(self.collect_private, ref)
            if self._settings.is_shared and self._places.store is not None and ref.id in owned:
                attempt(self.collect_loads, ref, self._places.store)
        known = {name for spec in specs for name in (spec.topic_id, *(ref.id for ref in refs_of(spec)))}
        for name in here - known:
            # Of a topic that was deleted where it was then.
            self.collector.clear(self._places.loads, f"{name}/", at_once=False)
        for topic_id, loads in ended.items():
            refs = [ref for spec in specs if spec.topic_id == topic_id for ref in refs_of(spec)]
            if not refs or refs[0].id in owned:
                attempt(self._forget, loads, refs)

    @property
    def has_store(self) -> bool:
        """Whether the settings name a store beside the data directory."""
        return self._places.store is not None

    def check_begun(self) -> None:
        """Raise `Unavailable` if the store is not there: what it holds is not gone because a mount is away."""
        self._places.check_begun()

    def clear_topic(self, topic_id: str, partitions: int) -> None:
        """Remove every object of a topic whose deletion is recorded, in all stores that are known here."""
        names = [*(shard_id(topic_id, partition) for partition in range(partitions)), topic_id]
        for store in self._places.stores:
            for name in names:
                self.collector.clear(store, f"{name}/", at_once=True)

    def _forget(self, ended: Sequence[EndedLoad], refs: Sequence[ShardRef]) -> None:
        named = {load_id for ref in refs for load_id in named_in(self._catalog(ref))}
        now_ms = self._clock.now_ms()
        before_ms = now_ms - int(self._settings.export.orphan_grace_s * 1000)
        forget_unnamed(self._metadata, self._prefix, ended, named, now_ms=now_ms, before_ms=before_ms)

    def _scope(
        self, ref: ShardRef, store: BlobStore, prefix: str, is_compacting: Callable[[], bool] | None = None
    ) -> Scope:
        catalog = self._catalog(ref)
        return Scope(
            store=store,
            prefix=prefix,
            catalog=catalog,
            is_compacting=is_compacting or (lambda: self._metadata.get(catalog.keys.compactor) is not None),
            tabled=lambda: self._tabled(ref),
        )

    def _catalog(self, ref: ShardRef) -> ShardCatalog:
        keys = ShardKeys(ref.spec.namespace, ref.spec.topic, ref.partition, self._prefix)
        return ShardCatalog(self._metadata, keys, ref.spec.topic_id, self._places.manifest, clock=self._clock)

    def _tabled(self, ref: ShardRef) -> Collection[str]:
        shared = self._places.store if self._settings.is_shared else None
        return self._tables(ref).objects(shared or self._places.loads)

    def _tables(self, ref: ShardRef) -> TableObjects:
        return tables_of(self._metadata, self._prefix, ref.spec, self._clock)

    def _known_over(self, load_ids: Collection[str]) -> set[str]:
        """Those of the loads that are over. One that was never offered may be in the making: it is not given up."""
        return {load_id for load_id in load_ids if self._is_over(load_id, None)}

    def _over(self, ref: ShardRef, load_ids: Collection[str]) -> set[str]:
        unknown_as = never_offered(ref.spec, created_at=self._clock.now_ms())
        return {load_id for load_id in load_ids if self._is_over(load_id, unknown_as)}

    def _is_over(self, load_id: str, unknown_as: Load | None) -> bool:
        """Whether a load is over; one that is not known is given up as `unknown_as`, if that is given.

        One that cannot be read is not over: what it brought stays.
        """
        try:
            stored = self._book.find(load_id)
            if stored is None:
                if unknown_as is None:
                    return False
                return self._book.give_up(load_id, unknown_as=unknown_as).status is LoadStatus.ABANDONED
        except (Corrupt, UnsupportedFormat) as error:
            logger.warning("what load %s brought is kept: %s", load_id, error)
            return False
        return stored.load.status is not LoadStatus.OFFERED

    def _is_elsewhere(self, piece: SegmentDescriptor) -> bool:
        return piece.gap is None and not is_private(piece) and piece.store != self._places.store_name


def attempt(work: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Do one of many things that are due. What fails is logged, and is due again in the next round."""
    try:
        work(*args, **kwargs)
    except (ForebayError, OSError) as error:
        logger.warning("will be tried again: %s", error)
