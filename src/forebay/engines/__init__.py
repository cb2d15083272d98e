"""Engines: where the records of a topic are kept. All answer the same questions in the same way."""

from forebay.engines.following import FollowingEngine
from forebay.engines.memory import MemoryEngine, MemoryShard
from forebay.engines.seam import NewRecord, OpenShard, ShardStatus, StorageEngine
from forebay.engines.segment import SegmentEngine

__all__ = [
    "FollowingEngine",
    "MemoryEngine",
    "MemoryShard",
    "NewRecord",
    "OpenShard",
    "SegmentEngine",
    "ShardStatus",
    "StorageEngine",
]
