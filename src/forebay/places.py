"""Where the bytes of history lie: what the name of a store in a descriptor means in this process.

`local:<directory id>` stands for the shard directories of one data directory, `loads:<directory id>` for what bulk
loads put into one, anything else for the store of the settings. `Places` opens segments, for an owner and for the
tasks of Spark; `Stores` opens the stores themselves, for tools that look at objects. Both open when a caller asks.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol, TypeVar

from forebay.blobs import BlobMissing, BlobStore, Denied, DirectoryStore, open_store
from forebay.blobs.objects.options import OPEN
from forebay.bulk import SharedStore
from forebay.catalog.shard import names_store
from forebay.clock import Clock
from forebay.directory import LOADS as LOADS_NAME
from forebay.directory import LogDirectory, NoDirectory
from forebay.disk import Disk
from forebay.errors import ForebayError, Unavailable
from forebay.format.metadata.descriptor import SegmentDescriptor
from forebay.history import Objects
from forebay.manifests import ManifestReader
from forebay.metadata import MetadataStore
from forebay.meter import LogMeter
from forebay.sealed import ByteSource, SealedSegment
from forebay.settings import Settings, StoreSettings
from forebay.wal.files import SealedFile

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOCAL = "local:"
LOADS = "loads:"
PROBE_SECONDS_MAX = 5.0
"""How long opening waits for each answer of the store of history. Before the first export it is tried with patience."""


def open_places(
    directory: LogDirectory | NoDirectory,
    settings: Settings,
    disk: Disk,
    clock: Clock,
    meter: LogMeter,
    *,
    probed_for: MetadataStore | None = None,
) -> Places:
    """Where history lies. With `probed_for`, which has the catalog, the store is tried, and `Denied` comes out."""
    store, name = history_store(settings, disk, clock)
    places = Places(
        disk=disk,
        clock=clock,
        directory=directory,
        holder=directory.id,
        store=store,
        store_name=name,
        read_ahead_bytes=settings.store.read_ahead_bytes,
        meter=meter,
        is_named=lambda: probed_for is not None and names_store(probed_for, name, prefix=settings.metadata.prefix),
    )
    if probed_for is not None:
        try:
            places.probe(seconds_max=PROBE_SECONDS_MAX)
        except Unavailable as error:
            if isinstance(error, Denied):
                places.close()
                raise
            logger.warning("history is not exported for now, appends go on: %s", error)
        except BaseException:
            places.close()
            raise
    return places


def history_store(settings: Settings, disk: Disk, clock: Clock) -> tuple[BlobStore | None, str]:
    """The store of history and what the catalog calls it. It is asked nothing, and no directory is made yet."""
    if settings.is_shared and not settings.store.is_directory:
        return open_store(settings.store, disk=disk, clock=clock), settings.store.name
    root = settings.store.root if settings.is_shared else settings.storage.handoff_root
    return (None, "") if root is None else (DirectoryStore(root, disk=disk, clock=clock), "directory")


def shared_place(settings: Settings, name: str) -> SharedStore | None:
    """The store of these settings for other processes, if it is shared. Nothing that may be a secret is in it."""
    if not settings.is_shared or settings.store.root is None:
        return None
    shown = OPEN | {"allow_http"}
    options = {
        option: str(value)
        for option, value in settings.store.options.items()
        if option in shown and "@" not in str(value)
    }
    mode: Literal["shared_fs", "object_store"] = "shared_fs" if settings.store.is_directory else "object_store"
    return SharedStore(name=name, mode=mode, backend=settings.store.backend, root=settings.store.root, options=options)


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

    @property
    def by_name(self) -> Mapping[str, BlobStore]:
        """The same by the names that descriptors have for them."""
        return self._stores

    def for_new_objects(self, *, is_shared: bool) -> tuple[BlobStore, str]:
        """Where new objects of history go, and what descriptors call it: the data directory, unless it is shared."""
        if not is_shared:
            return self.loads.open(), self.loads_name
        assert self.store is not None
        return self.store, self.store_name

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

    def knows(self, store: str) -> bool:
        """Whether this is the name of a store whose objects are read here."""
        return store == self._local or store in self._stores

    def has_files(self, store: str) -> bool:
        """Whether this is the name of the shard directories, where the log lies beside history."""
        return store == self._local

    def range(self, store: str, key: str, start: int, stop: int, etag: str | None = None) -> bytes:
        """The bytes `[start, stop)` of an object in a store that is known here; fewer at its end.

        `BlobMissing` and `BlobChanged` as a store says them.
        """
        if store != self._local:
            return self.store_of(store).get_range(key, start, stop, etag=etag)
        try:
            with contextlib.closing(self._disk.open(f"{self._directory.shards}/{key}")) as file:
                return bytes(file.read_at(stop - start, start))
        except FileNotFoundError as error:
            raise BlobMissing(f"{key} is not there any more") from error

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


class Home(Protocol):
    """Which data directory it is, and where it lies."""

    @property
    def path(self) -> str: ...

    @property
    def id(self) -> str: ...


class Stores:
    """The stores that descriptors name, each opened when it is first asked for. Creates none."""

    def __init__(self, directory: Home, settings: Settings, *, disk: Disk, clock: Clock) -> None:
        self._directory = directory
        self._here = local_name(directory.id)
        self._settings = settings
        self._disk = disk
        self.clock = clock
        self._opened: dict[str, BlobStore | ForebayError] = {}

    def is_here(self, name: str) -> bool:
        """Whether what lies in this store lies in the data directory itself."""
        return name == self._here

    def is_elsewhere(self, name: str) -> bool:
        """Whether it lies in another data directory, which only its owner can look into."""
        return name.startswith((LOCAL, LOADS)) and name not in (self._here, loads_name(self._directory.id))

    def holds_elsewhere(self, holder: str) -> bool:
        """Whether this holder of a log is another data directory."""
        return holder != self._directory.id

    def of(self, name: str) -> BlobStore:
        """The store. Raises the same each time if it cannot be opened: no caller waits for it twice."""
        if name not in self._opened:
            try:
                self._opened[name] = self._open(name)
            except ForebayError as error:
                self._opened[name] = error
        found = self._opened[name]
        if isinstance(found, ForebayError):
            raise found
        return found

    def give_up(self, name: str, error: ForebayError) -> None:
        """The store does not answer: every caller gets that error from now on."""
        self._opened[name] = error

    def close(self) -> None:
        """Give back what is held."""
        for store in self._opened.values():
            if not isinstance(store, ForebayError):
                store.close()

    def _open(self, name: str) -> BlobStore:
        settings = self._settings
        if name == loads_name(self._directory.id):
            return DirectoryStore(f"{self._directory.path}/{LOADS_NAME}", disk=self._disk, clock=self.clock)
        known = settings.store.name if settings.is_shared else "directory"
        root = settings.store.root if settings.is_shared else settings.storage.handoff_root
        if name != known or not root:
            raise Unavailable(f"{name} is not the store of these settings: give those with which it was written")
        if name != "directory":
            return open_store(settings.store, disk=self._disk, clock=self.clock)
        # Not opened, which would make what is missing.
        store = DirectoryStore(root, disk=self._disk, clock=self.clock)
        if not store.is_begun():
            raise Unavailable(f"{root} is no store: mount it, or correct the settings that name it")
        return store
