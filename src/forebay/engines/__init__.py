"""Engines: where the records of a topic are kept. All answer the same questions in the same way."""

from forebay.engines.by_name import ByName, NewRecord, ShardStatus
from forebay.engines.memory import MemoryEngine, MemoryShard
from forebay.engines.readonly import FollowingEngine
from forebay.engines.rocksdb import RocksEngine, RocksShard
from forebay.engines.seam import OwnedShard, ReadShard, StorageEngine
from forebay.engines.segment import SegmentEngine
from forebay.engines.unowned import UnownedShards

__all__ = [
    "ByName",
    "FollowingEngine",
    "MemoryEngine",
    "MemoryShard",
    "NewRecord",
    "OwnedShard",
    "ReadShard",
    "RocksEngine",
    "RocksShard",
    "SegmentEngine",
    "ShardStatus",
    "StorageEngine",
    "UnownedShards",
]
