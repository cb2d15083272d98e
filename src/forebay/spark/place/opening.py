"""What a location leads to, opened in this process: the directory, the places of history, the metadata store.

Everything is opened when first needed and given back together, and what only some callers open is imported then:
every task of Spark passes here. Nothing here leaves the process. Knows nothing of Spark.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from forebay.blobs import BlobMissing, BlobStore, DirectoryStore, open_store
from forebay.catalog import ShardCatalog, ShardKeys
from forebay.clock import Clock, SystemClock
from forebay.definitions import Definitions
from forebay.directory import LogDirectory, NoDirectory, is_owned
from forebay.disk import SystemDisk
from forebay.errors import Invalid, Unavailable, Unsupported
from forebay.format.metadata.descriptor import SegmentDescriptor
from forebay.manifests import ManifestReader
from forebay.metadata import MetadataStore
from forebay.metadata.open_store import open_metadata
from forebay.places import Places, Stores, history_store
from forebay.settings import Settings, StoreSettings
from forebay.spark.place.location import Location
from forebay.spark.place.reading import topics_with_history
from forebay.topics import ShardRef, TopicSpec

if TYPE_CHECKING:
    from forebay.loads.prepare import LoadStore
    from forebay.views.look import LoadsSeen, ViewedShard
    from forebay.views.snapshot import ShardView
    from forebay.wal.readonly import FollowedLog

logger = logging.getLogger(__name__)


class Opened:
    """A location seen from this process. For one thread at a time; `close` it."""

    def __init__(
        self,
        location: Location,
        clock: Clock | None = None,
        *,
        read_only: bool = True,
        also: StoreSettings | None = None,
    ) -> None:
        """`also` is a store that descriptors may name besides those of the location. `Unsupported` for a broker's."""
        if location.broker is not None:
            raise Unsupported(
                f"{location} gives records, and this needs the files themselves: do it where the data directory is, "
                "with its path, or where the store and the metadata are reached, with both"
            )
        self.location = location
        self.read_only = read_only
        self.settings = location.settings()
        self.clock = clock or SystemClock()
        self.disk = SystemDisk(self.settings.runtime.descriptors_max)
        self._also = also
        self._held = contextlib.ExitStack()
        self._held.callback(self.disk.close)

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
        home = self._home
        store, name = history_store(self.settings, self.disk, self.clock)
        places = Places(
            disk=self.disk,
            clock=self.clock,
            directory=home,
            holder=home.id,
            store=store,
            store_name=name,
            read_ahead_bytes=self.settings.store.read_ahead_bytes,
        )
        return self._held.enter_context(contextlib.closing(places))

    @cached_property
    def stores(self) -> Stores:
        """The stores that descriptors name, for those who look at objects as such."""
        stores = _NamedStores(self._home, self.settings, disk=self.disk, clock=self.clock, also=self._also)
        return self._held.enter_context(contextlib.closing(stores))

    @cached_property
    def metadata(self) -> MetadataStore:
        """The metadata store, to be read unless more was asked for."""
        settings, directory = self.settings.metadata, self.directory
        path = directory.metadata_at(settings.path) if directory is not None else settings.path or ""
        store = open_metadata(settings, path, disk=self.disk, clock=self.clock, read_only=self.read_only)
        return self._held.enter_context(contextlib.closing(store))

    @property
    def definitions(self) -> Definitions:
        """What topics there are."""
        return Definitions(self.metadata, self.settings.metadata.prefix, self.clock)

    def specs(self) -> Sequence[TopicSpec]:
        """The definitions of all topics."""
        return self.definitions.all()

    def topics(self, names: Sequence[str]) -> list[TopicSpec]:
        """The topics of these names, or all that have history if none is named; `UnknownTopic`, `Unsupported`."""
        definitions = self.definitions
        return topics_with_history(names, definitions.all, definitions.get)

    def catalog(self, ref: ShardRef) -> ShardCatalog:
        """The history of a partition as recorded; manifests are opened."""
        keys = ShardKeys(ref.spec.namespace, ref.spec.topic, ref.partition, self.settings.metadata.prefix)
        return ShardCatalog(self.metadata, keys, ref.spec.topic_id, self.manifest, clock=self.clock)

    def manifest(self, descriptor: SegmentDescriptor) -> Sequence[SegmentDescriptor]:
        """What a manifest of the catalog lists."""
        if self._also is None:
            return self.places.manifest(descriptor)
        try:
            return ManifestReader(self.stores.of(descriptor.store))(descriptor)
        except BlobMissing:
            if descriptor.store != self._also.name:
                raise
            # Two directories have one name: a run that was cut short has put it into the other.
            with contextlib.closing(open_store(self._also, disk=self.disk, clock=self.clock)) as other:
                return ManifestReader(other)(descriptor)

    def new_objects(self) -> LoadStore:
        """Where new objects of history go, and what descriptors call it."""
        from forebay.loads.prepare import LoadStore

        return LoadStore(*self.places.for_new_objects(is_shared=self.settings.is_shared))

    def log(self, shard: str) -> FollowedLog | None:
        """The local log of a shard, whichever process owns it; `None` without a directory. The caller closes it."""
        directory = self.directory
        if directory is None:
            return None
        from forebay.wal.readonly import FollowedLog

        return FollowedLog(
            self.disk,
            self.clock,
            f"{directory.shards}/{shard}",
            self.settings.wal,
            lambda: is_owned(directory.path, self.disk),
        )

    def viewed(self, ref: ShardRef, loads: LoadsSeen) -> ViewedShard:
        """A partition to be looked at; `close` it."""
        from forebay.views.look import ViewedShard

        return ViewedShard(ref, self.catalog(ref), self.log(ref.id), loads, holder=self.holder, disk=self.disk)

    def view(self, topic_id: str, topic: str, partition: int) -> ShardView | None:
        """The partition as it is now; `None` where the topic is gone."""
        from forebay.views.look import LoadsSeen

        specs = [spec for spec in self.definitions.all() if spec.topic_id == topic_id and str(spec.name) == topic]
        if not specs:
            return None
        with contextlib.closing(self.viewed(ShardRef(specs[0], partition), LoadsSeen())) as shard:
            return shard.look()

    def close(self) -> None:
        """Give everything back."""
        self._held.close()

    @cached_property
    def _home(self) -> LogDirectory | NoDirectory:
        """The data directory for those who read history."""
        try:
            return self.directory or NoDirectory()
        except (Invalid, Unavailable) as error:
            if not self.settings.is_shared and self.settings.storage.handoff_root is None:
                raise
            # History in a store is read by machines too that do not see the directory.
            logger.info("%s", error)
            return NoDirectory()


class _NamedStores(Stores):
    """The stores of a location, the files of its data directory among them, and one besides if there is one."""

    def __init__(
        self,
        home: LogDirectory | NoDirectory,
        settings: Settings,
        *,
        disk: SystemDisk,
        clock: Clock,
        also: StoreSettings | None,
    ) -> None:
        super().__init__(home, settings, disk=disk, clock=clock)
        self._files = DirectoryStore(home.shards, disk=disk, clock=clock)
        self._also = also

    def _open(self, name: str) -> BlobStore:
        if self.is_here(name):
            return self._files
        try:
            return super()._open(name)
        except Unavailable:
            if self._also is None or name != self._also.name:
                raise
            return open_store(self._also, disk=self._disk, clock=self.clock)


@contextlib.contextmanager
def opened(location: Location, *, read_only: bool = True, also: StoreSettings | None = None) -> Iterator[Opened]:
    """The location, given back at the end; its metadata may be changed only if asked for. `also`: see `Opened`."""
    with contextlib.closing(Opened(location, read_only=read_only, also=also)) as found:
        yield found
