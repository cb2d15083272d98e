"""What a shard is given to work with: its topic, the metadata store, and the places where its history lies.

`Places` alone knows what the name of a store in a descriptor means in this process: `local:<directory id>` stands for
the shard directories of one data directory, `loads:<directory id>` for what bulk loads put into one, anything else for
the store of the settings. It opens a segment only when a caller asks for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from forebay.blobs import BlobStore, DirectoryStore
from forebay.catalog import ShardCatalog, ShardKeys
from forebay.clock import Clock
from forebay.disk import Disk
from forebay.errors import Unavailable
from forebay.export import Origin
from forebay.format.metadata.descriptor import SegmentDescriptor
from forebay.history import Objects
from forebay.manifests import ManifestReader
from forebay.metadata import MetadataStore
from forebay.meter import LogMeter
from forebay.sealed import ByteSource, SealedSegment
from forebay.settings import Settings, StoreSettings
from forebay.topics import TopicSpec, shard_id
from forebay.wal.files import SealedFile

if TYPE_CHECKING:
    from forebay.wal.bounds import MemoryBounds

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOCAL = "local:"
LOADS = "loads:"


def local_name(holder: str) -> str:
    """What descriptors call the files of a data directory."""
    return f"{LOCAL}{holder}"


def loads_name(holder: str) -> str:
    """What descriptors call the store for bulk loads in a data directory."""
    return f"{LOADS}{holder}"


def home_of_loads(name: str) -> str | None:
    """The data directory that the store of this name lies in, if it is one for bulk loads into a directory."""
    return name.removeprefix(LOADS) if name.startswith(LOADS) else None


def is_local(descriptor: SegmentDescriptor) -> bool:
    """Whether the segment is a log file in some data directory."""
    return descriptor.store.startswith(LOCAL)


def is_private(descriptor: SegmentDescriptor) -> bool:
    """Whether it lies in some data directory, where no other can be relied on to read it."""
    return descriptor.store.startswith((LOCAL, LOADS))


class Directory(Protocol):
    """Where a data directory keeps things."""

    @property
    def shards(self) -> str:
        """The directories of the shards."""

    @property
    def loads(self) -> str:
        """What bulk loads bring."""


class Places:
    """Opens the segments of history. One per process; safe for concurrent use."""

    def __init__(
        self,
        *,
        disk: Disk,
        clock: Clock,
        directory: Directory,
        holder: str,
        store: BlobStore | None,
        store_name: str,
        read_ahead_bytes: int = StoreSettings().read_ahead_bytes,
        meter: LogMeter | None = None,
        is_named: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_named` says whether the catalog names objects in the store. Exports and reads are counted by `meter`."""
        self.meter = meter if meter is not None else LogMeter(clock)
        self.store = store
        self.store_name = store_name
        self.clock = clock
        self.loads = DirectoryStore(directory.loads, disk=disk, clock=clock)
        """For bulk loads into this data directory; `open` it before anything is put there."""
        self.loads_name = loads_name(holder)
        self._disk = disk
        self._directory = directory
        self._local = local_name(holder)
        self._probed = store is None
        self._is_named = is_named
        self._stores: dict[str, BlobStore] = {self.loads_name: self.loads}
        if store is not None:
            self._stores[store_name] = store
        self._objects = {
            name: Objects(known, read_ahead_bytes=read_ahead_bytes, meter=self.meter)
            for name, known in self._stores.items()
        }
        self._manifests = {name: ManifestReader(known) for name, known in self._stores.items()}

    def manifest(self, descriptor: SegmentDescriptor) -> Sequence[SegmentDescriptor]:
        """What a manifest of the catalog lists."""
        return self._known(descriptor, self._manifests)(descriptor)

    @property
    def stores(self) -> list[BlobStore]:
        """Every store that objects of this directory's topics may lie in."""
        return list(self._stores.values())

    def store_of(self, name: str) -> BlobStore:
        """The store of this name; `Unavailable` if it is none of those that are known here."""
        if name not in self._stores:
            raise Unavailable(f"{name} is no store of these settings: open it with those that it was written with")
        return self._stores[name]

    def segment(self, descriptor: SegmentDescriptor) -> SealedSegment:
        """The segment that a descriptor names."""
        if descriptor.store == self._local:
            return self.file(descriptor)
        return self._known(descriptor, self._objects).segment(descriptor)

    def file(self, descriptor: SegmentDescriptor) -> SealedFile:
        """The file in this directory that a descriptor names, at the offsets that its own header says."""
        if descriptor.store == self.loads_name:
            path, start = f"{self._directory.loads}/{descriptor.object_key}", descriptor.header_start or 0
            return SealedFile(self._disk, path, start, start + descriptor.end - descriptor.start)
        if descriptor.store != self._local:
            raise Unavailable(
                f"offsets [{descriptor.start}, {descriptor.end}) lie in {descriptor.store}, another data directory: "
                "seal the topic there first"
            )
        return SealedFile(self._disk, self._path(descriptor), descriptor.start, descriptor.end)

    def source(self, descriptor: SegmentDescriptor) -> ByteSource:
        """Its bytes."""
        if descriptor.store == self._local:
            return self._disk.open(self._path(descriptor))
        return self._known(descriptor, self._objects).source(descriptor)

    def probe(self, *, seconds_max: float | None = None) -> None:
        """See once, before anything is exported, that the store keeps its promises; `Unsupported` if it does not."""
        if not self._probed:
            assert self.store is not None
            self._refuse_empty_mount(self.store)
            for note in self.store.probe(seconds_max=seconds_max).notes:
                logger.warning("%s: %s", self.store.name, note)
            self._probed = True

    def check_begun(self) -> None:
        """Raise `Unavailable` where there is no store: what it holds is not gone because a mount is away."""
        if isinstance(self.store, DirectoryStore) and not self.store.is_begun():
            raise Unavailable(f"{self.store.name} is no store: mount it, or correct the settings that name it")

    def _refuse_empty_mount(self, store: BlobStore) -> None:
        """Raise `Unavailable` rather than begin a second store in the place of one that holds history."""
        if isinstance(store, DirectoryStore) and not store.is_begun() and self._is_named():
            raise Unavailable(
                f"{store.name} is empty, and the catalog names history in it: mount it, or correct the settings that "
                "name it"
            )

    def close(self) -> None:
        """Give back what is held, the store too."""
        for objects in self._objects.values():
            objects.close()
        for store in self.stores:
            store.close()

    def _path(self, descriptor: SegmentDescriptor) -> str:
        return f"{self._directory.shards}/{descriptor.object_key}"

    def _known(self, descriptor: SegmentDescriptor, readers: Mapping[str, T]) -> T:
        reader = readers.get(descriptor.store)
        if reader is None:
            here = self.store_name if self.store is not None else "none"
            raise Unavailable(
                f"offsets [{descriptor.start}, {descriptor.end}) lie in {descriptor.store} as {descriptor.object_key}, "
                f"and the store of these settings is {here}: open it with the settings that it was written with"
            )
        return reader


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
