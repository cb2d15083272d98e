"""What a shard is part of: its topic, the metadata store, and the places of its history."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from forebay.catalog import ShardCatalog, ShardKeys
from forebay.export import Origin
from forebay.metadata import MetadataStore
from forebay.settings import Settings
from forebay.shard.places import Places, local_name
from forebay.topics import TopicSpec, shard_id


class ShardRef(NamedTuple):
    """One partition of a topic."""

    spec: TopicSpec
    partition: int

    @property
    def id(self) -> str:
        """The name of the shard, of its directory and its objects."""
        return shard_id(self.spec.topic_id, self.partition)

    def __str__(self) -> str:
        return f"{self.spec.namespace}/{self.spec.topic}[{self.partition}]"


def refs_of(spec: TopicSpec) -> list[ShardRef]:
    """The shards of a topic."""
    return [ShardRef(spec, partition) for partition in range(spec.partitions)]


class ShardContext(NamedTuple):
    """What a shard is part of: the metadata store, the places of history, and the process that may act as its owner."""

    metadata: MetadataStore
    settings: Settings
    places: Places
    holder: str
    still_owner: Callable[[], bool]

    def keys(self, ref: ShardRef) -> ShardKeys:
        """Where the facts of a shard stand."""
        return ShardKeys(ref.spec.namespace, ref.spec.topic, ref.partition, self.settings.metadata.prefix)

    def catalog(self, ref: ShardRef) -> ShardCatalog:
        """The history of a shard as recorded."""
        return ShardCatalog(self.metadata, self.keys(ref), ref.spec.topic_id, self.places.manifest)

    def origin(self, ref: ShardRef, epoch: int) -> Origin:
        """As whose history files are catalogued."""
        store = self.places.store_name if self.settings.is_shared else local_name(self.holder)
        return Origin(ref.spec.topic_id, ref.partition, epoch, self.holder, store)
