"""The engines of a data directory that this process owns, one of each kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from forebay.engines.memory import MemoryEngine
from forebay.engines.rocksdb import RocksEngine
from forebay.engines.seam import OwnedShard
from forebay.engines.segment import SegmentEngine
from forebay.topics import Engine, TopicSpec

OwnerEngine: TypeAlias = MemoryEngine | RocksEngine | SegmentEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """The engines of a data directory that this process owns."""

    segment: SegmentEngine
    rocksdb: RocksEngine
    memory: MemoryEngine

    def of(self, spec: TopicSpec) -> OwnerEngine:
        """Where the records of the topic are."""
        if spec.engine is Engine.MEMORY:
            return self.memory
        return self.rocksdb if spec.engine is Engine.ROCKSDB else self.segment

    def shards(self) -> list[OwnedShard]:
        """Every open shard."""
        return [*self.segment.shards(), *self.rocksdb.shards(), *self.memory.shards()]
