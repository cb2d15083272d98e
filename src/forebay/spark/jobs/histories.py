"""The history of topics at a location, opened in this process: metadata, catalogs, and the stores of the objects."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Self

from forebay.blobs import BlobStore, DirectoryStore, open_store
from forebay.catalog import ShardCatalog, ShardKeys
from forebay.clock import SystemClock
from forebay.disk import SystemDisk
from forebay.errors import Unavailable, Unsupported
from forebay.format.descriptor import SegmentDescriptor
from forebay.inspection.directory import ShardPlace
from forebay.inspection.recorded import ShardHistory
from forebay.inspection.stores import Home, Stores
from forebay.manifests import ManifestReader
from forebay.metadata.opening import open_metadata
from forebay.settings import StoreSettings
from forebay.shard.places import local_name
from forebay.spark.location import Location
from forebay.storage.definitions import Definitions
from forebay.storage.directory import LogDirectory
from forebay.topics import Engine, TopicName, TopicSpec, shard_id


class _Nowhere(NamedTuple):
    """Where there is no data directory."""

    path: str = ""
    id: str = ""


class JobStores(Stores):
    """The stores that descriptors name, the files of the data directory among them."""

    def __init__(
        self, location: Location, *, disk: SystemDisk, clock: SystemClock, also: StoreSettings | None = None
    ) -> None:
        self.directory = LogDirectory.look(location.path, disk) if location.path is not None else None
        self._files = (disk, clock)
        self._also = also
        home: Home = self.directory if self.directory is not None else _Nowhere()
        super().__init__(home, location.settings(), disk=disk, clock=clock)

    def _open(self, name: str) -> BlobStore:
        if self.directory is not None and name == local_name(self.directory.id):
            disk, clock = self._files
            return DirectoryStore(self.directory.shards, disk=disk, clock=clock)
        try:
            return super()._open(name)
        except Unavailable:
            if self._also is None or name != self._also.name:
                raise
            return open_store(self._also, disk=self._files[0], clock=self._files[1])


class Histories:
    """What a location knows of its topics. A context; on the driver, or in a task that needs more than objects."""

    def __init__(self, location: Location, *, read_only: bool = True, also: StoreSettings | None = None) -> None:
        """`also` is a store that descriptors may name besides those of the location."""
        self.location = location
        self.settings = location.settings()
        self.clock = SystemClock()
        self.disk = SystemDisk(self.settings.runtime.descriptors_max)
        self.stores = JobStores(location, disk=self.disk, clock=self.clock, also=also)
        self.directory = self.stores.directory
        path = self.settings.metadata.path or (self.directory.metadata_path if self.directory is not None else "")
        self.metadata = open_metadata(
            self.settings.metadata, path, disk=self.disk, clock=self.clock, read_only=read_only
        )
        self.definitions = Definitions(self.metadata, self.settings.metadata.prefix, self.clock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.metadata.close()
        self.stores.close()
        self.disk.close()

    def topics(self, names: Sequence[str]) -> list[TopicSpec]:
        """The topics of these names, or all that have files if none is named; `UnknownTopic`, `Unsupported`."""
        if not names:
            return [spec for spec in self.definitions.all() if spec.engine is Engine.SEGMENT]
        specs = [self.definitions.get(TopicName.parse(name)) for name in names]
        for spec in specs:
            if spec.engine is not Engine.SEGMENT:
                raise Unsupported(f'{spec.name} lives on engine "{spec.engine}" and has no history: leave it out')
        return specs

    def keys(self, spec: TopicSpec, partition: int) -> ShardKeys:
        """Where the facts of a shard stand."""
        return ShardKeys(spec.namespace, spec.topic, partition, self.settings.metadata.prefix)

    def catalog(self, spec: TopicSpec, partition: int) -> ShardCatalog:
        """The history of a shard as recorded; manifests are opened."""
        return ShardCatalog(self.metadata, self.keys(spec, partition), spec.topic_id, self.manifest)

    def manifest(self, descriptor: SegmentDescriptor) -> Sequence[SegmentDescriptor]:
        """What a manifest lists."""
        return ManifestReader(self.stores.of(descriptor.store))(descriptor)

    def place(self, spec: TopicSpec, partition: int) -> ShardPlace:
        """Whose a shard is; its directory only where there is a data directory."""
        shard = shard_id(spec.topic_id, partition)
        directory = f"{self.directory.shards}/{shard}" if self.directory is not None else ""
        return ShardPlace(shard, f"{spec.name}[{partition}]", directory, spec, partition)

    def history(self, spec: TopicSpec, partition: int) -> ShardHistory:
        """The same for an examination."""
        return ShardHistory(self.metadata, self.stores, self.keys(spec, partition), spec.topic_id)
