"""What remains of erased records in the database of engine `rocksdb`, and the purging that removes it.

RocksDB keeps removed rows until it compacts the files that have them, and says of no file what it holds. So the
database counts as a place where they may be, until it has been purged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from forebay.disk import Disk
from forebay.engines.rocksdb.engine import RocksEngine
from forebay.engines.rocksdb.layout import Keys
from forebay.storage.erasure.answer import ErasureCommands, Remnant
from forebay.storage.erasure.search import has_bytes
from forebay.storage.usage import Tier, bytes_below
from forebay.topics import ShardRef

MANIFEST = "MANIFEST-"


class DatabaseErasure:
    """One shard of engine `rocksdb`; see `ShardErasure`. For one thread."""

    def __init__(self, ref: ShardRef, engine: RocksEngine, path: str, disk: Disk) -> None:
        """`path` is the directory of the database."""
        self._ref = ref
        self._engine = engine
        self._path = path
        self._disk = disk
        self._is_purged = False

    def remains(self, key: bytes) -> list[Remnant]:
        """See `ShardErasure`: all of the database, or, once it was purged, lists of files that name the key."""
        commands = ErasureCommands(self._ref.spec.name, key)
        if not self._is_purged:
            size, until = bytes_below(self._disk, self._path), "RocksDB compacts the files that have them"
            return [self._left(self._path, size, until, commands.rewrite)]
        until = "the data directory is opened again: RocksDB then begins a new list of its files"
        return [self._left(path, size, until, commands.rewrite) for path, size in self._naming(key)]

    def rewrite(self, key: bytes) -> None:
        """See `ShardErasure`."""
        self._engine.purge(self._ref)
        self._is_purged = True

    def _naming(self, key: bytes) -> Iterator[tuple[str, int]]:
        """Lists of the database's files with the key in them, as the bound of a file that is gone: path and size."""
        row = Keys(self._ref.spec.topic_id, self._ref.partition).of_key(key)
        for name in self._disk.list_directory(self._path):
            if name.startswith(MANIFEST):
                path = f"{self._path}/{name}"
                with contextlib.suppress(FileNotFoundError), contextlib.closing(self._disk.open(path)) as file:
                    if has_bytes(file, file.size(), row):
                        yield path, file.size()

    def _left(self, place: str, size: int, until: str, command: str) -> Remnant:
        partition = self._ref.partition
        return Remnant(partition=partition, tier=Tier.DATABASE, place=place, bytes=size, until=until, command=command)
