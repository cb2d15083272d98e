"""What a location leads to, opened in this process: the directory, the places of history, the metadata store.

Everything is opened when first needed and given back together. Nothing here leaves the process. Knows nothing
of Spark.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from forebay.catalog import ShardCatalog, ShardKeys
from forebay.clock import Clock, SystemClock
from forebay.disk import SystemDisk
from forebay.errors import Invalid, Unavailable
from forebay.metadata import MetadataStore
from forebay.metadata.opening import open_metadata
from forebay.shard import ShardRef
from forebay.shard.places import Places
from forebay.spark.location import Location
from forebay.storage.building import history_store
from forebay.storage.definitions import Definitions
from forebay.storage.directory import LogDirectory, is_owned
from forebay.wal.follow import FollowedLog

logger = logging.getLogger(__name__)


class _Nowhere(NamedTuple):
    """The directory of a location that has none: no descriptor of history leads there."""

    shards: str = "/nonexistent"
    loads: str = "/nonexistent"


class Opened:
    """A location seen from this process. For one thread at a time; `close` it."""

    def __init__(self, location: Location, clock: Clock | None = None, *, read_only: bool = True) -> None:
        self.location = location
        self.read_only = read_only
        self.settings = location.settings()
        self.clock = clock or SystemClock()
        self.disk = SystemDisk(self.settings.runtime.descriptors_max)

    @cached_property
    def directory(self) -> LogDirectory | None:
        """The data directory, if the location has one; `Invalid` or `Unavailable` where it is not seen from here."""
        return LogDirectory.look(self.location.path, self.disk) if self.location.path is not None else None

    @property
    def holder(self) -> str:
        """The id of the data directory; empty without one."""
        return self.directory.id if self.directory is not None else ""

    @cached_property
    def places(self) -> Places:
        """Where the segments of history are."""
        store, name = history_store(self.settings, self.disk, self.clock, make=False)
        try:
            directory = self.directory
        except (Invalid, Unavailable) as error:
            if store is None:
                raise
            # History in a store is read by machines too that do not see the directory.
            logger.info("%s", error)
            directory = None
        return Places(
            disk=self.disk,
            clock=self.clock,
            directory=directory or _Nowhere(),
            holder=directory.id if directory is not None else "",
            store=store,
            store_name=name,
            read_ahead_bytes=self.settings.store.read_ahead_bytes,
        )

    @cached_property
    def metadata(self) -> MetadataStore:
        """The metadata store, to be read unless more was asked for."""
        configured = self.settings.metadata.path
        path = self.directory.metadata_at(configured) if self.directory is not None else configured or ""
        return open_metadata(self.settings.metadata, path, disk=self.disk, clock=self.clock, read_only=self.read_only)

    @property
    def definitions(self) -> Definitions:
        """What topics there are."""
        return Definitions(self.metadata, self.settings.metadata.prefix, self.clock)

    def catalog(self, ref: ShardRef) -> ShardCatalog:
        """The history of a partition as recorded."""
        keys = ShardKeys(ref.spec.namespace, ref.spec.topic, ref.partition, self.settings.metadata.prefix)
        return ShardCatalog(self.metadata, keys, ref.spec.topic_id, self.places.manifest)

    def log(self, shard: str) -> FollowedLog | None:
        """The local log of a shard, whoever owns it; `None` without a directory. The caller closes it."""
        directory = self.directory
        if directory is None:
            return None
        return FollowedLog(
            self.disk,
            self.clock,
            f"{directory.shards}/{shard}",
            self.settings.wal,
            lambda: is_owned(directory.path, self.disk),
        )

    def close(self) -> None:
        """Give everything back."""
        if "places" in vars(self):
            self.places.close()
        if "metadata" in vars(self):
            self.metadata.close()
        self.disk.close()


@contextlib.contextmanager
def opened(location: Location, *, read_only: bool = True) -> Iterator[Opened]:
    """The location, given back at the end; its metadata may be changed only if asked for."""
    with contextlib.closing(Opened(location, read_only=read_only)) as found:
        yield found
