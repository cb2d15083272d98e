"""What a shard is given to work with: the metadata store, the places where its history lies, its owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from forebay.catalog import ShardCatalog, ShardKeys
from forebay.export import Origin
from forebay.metadata import MetadataStore
from forebay.places import Places, local_name
from forebay.settings import Settings
from forebay.topics import ShardRef

if TYPE_CHECKING:
    from forebay.wal.bounds import MemoryBounds


class ShardContext(NamedTuple):
    """What a shard is part of: the metadata store, the places of history, and the process that may act as its owner."""

    metadata: MetadataStore
    settings: Settings
    places: Places
    holder: str
    still_owner: Callable[[], bool]
    bounds: MemoryBounds | None = None
    """What all shards of the process may hold in memory; `None` where none is opened to be written."""

    def keys(self, ref: ShardRef) -> ShardKeys:
        """Where the facts of a shard stand."""
        return ShardKeys(ref.spec.namespace, ref.spec.topic, ref.partition, self.settings.metadata.prefix)

    def catalog(self, ref: ShardRef) -> ShardCatalog:
        """The history of a shard as recorded."""
        places = self.places
        return ShardCatalog(self.metadata, self.keys(ref), ref.spec.topic_id, places.manifest, clock=places.clock)

    def origin(self, ref: ShardRef, epoch: int) -> Origin:
        """As whose history files are catalogued."""
        store = self.places.store_name if self.settings.is_shared else local_name(self.holder)
        return Origin(ref.spec.topic_id, ref.partition, epoch, self.holder, store)
