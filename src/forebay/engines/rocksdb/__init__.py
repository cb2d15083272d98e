"""The RocksDB engine: all shards of a data directory in one database, found by offset, key, tag and time."""

from forebay.engines.rocksdb.engine import RocksEngine
from forebay.engines.rocksdb.shard import RocksShard

__all__ = ["RocksEngine", "RocksShard"]
