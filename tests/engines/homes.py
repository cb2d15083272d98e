"""Where the engines under test keep their state: on the machine's disk or a simulated one, beside a metadata store."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from forebay.blobs import DirectoryStore
from forebay.clock import Clock, SystemClock
from forebay.directory import FORMAT, LogDirectory, Marker
from forebay.disk import Disk, make_directories
from forebay.engines import ByName, MemoryEngine, SegmentEngine, StorageEngine
from forebay.metadata import MemoryMetadata, MetadataStore
from forebay.places import Places
from forebay.progress import ProgressStore
from forebay.settings import Settings
from forebay.shard import SegmentShard
from forebay.shard.ownership import OwnerSession
from forebay.testing.simulated.clock import ManualClock
from forebay.topics import ShardRef, TopicName, TopicSpec

E = TypeVar("E", bound=StorageEngine)
TOPIC_ID = "0123456789abcdef0123456789abcdef"
SETTINGS = Settings.load(
    overrides={
        "wal": {"producer_appends_max": 16, "free_bytes_min": 0, "rotate_bytes_max": 65_536, "cache_bytes_max": 16_384}
    }
)


def spec_of(durability: str, partitions: int = 4) -> TopicSpec:
    """The topic whose partitions are the shards."""
    name = TopicName("shop", "orders")
    return TopicSpec.create(name, topic_id=TOPIC_ID, created_at=0, partitions=partitions, durability=durability)


def by_name(engine: E, metadata: MetadataStore) -> ByName[E]:
    """The operations by shard name, with the offsets of groups in this metadata store."""
    return ByName(engine, ProgressStore(metadata, SETTINGS.metadata.prefix, ManualClock()))


class Owners:
    """One owner after the other, each with a session of its own."""

    def __init__(self, metadata: MetadataStore) -> None:
        self._metadata = metadata
        self._last: OwnerSession | None = None

    def next(self) -> OwnerSession:
        if self._last is not None:
            self._last.session.close()
        self._last = OwnerSession(self._metadata, 30.0, "here")
        return self._last


class MemoryHome:
    """Engines in memory: only the metadata store lasts."""

    forgets = True

    def __init__(self, settings: Settings = SETTINGS, metadata: MetadataStore | None = None) -> None:
        self.metadata = metadata or MemoryMetadata()
        self._settings = settings
        self._owners = Owners(self.metadata)

    def open(self) -> ByName[MemoryEngine]:
        owner_session = self._owners.next()
        engine = MemoryEngine(self._settings, clock=SystemClock(), metadata=self.metadata, owner_session=owner_session)
        return by_name(engine, self.metadata)

    def ref(self, partition: int = 0) -> ShardRef:
        return ShardRef(spec_of("ephemeral"), partition)


class SegmentHome:
    """Engines on a disk, without threads: `shards` are there to be maintained by hand."""

    forgets = False

    def __init__(
        self,
        disk: Disk,
        root: str,
        durability: str,
        *,
        settings: Settings = SETTINGS,
        clock: Clock | None = None,
        metadata: MetadataStore | None = None,
        on_dirty: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.metadata = metadata or MemoryMetadata()
        self.shards: list[SegmentShard] = []
        self._on_dirty = on_dirty
        self._disk = disk
        self._root = root
        self._durability = durability
        self._settings = settings
        self._clock = clock or SystemClock()
        self._owners = Owners(self.metadata)
        make_directories(disk, f"{root}/shards")

    def open(self) -> ByName[SegmentEngine]:
        self.shards.clear()
        engine = SegmentEngine(
            f"{self._root}/shards",
            self._settings,
            disk=self._disk,
            clock=self._clock,
            metadata=self.metadata,
            owner_session=self._owners.next(),
            places=self.places(),
            on_open=self._opened,
            on_dirty=self._on_dirty,
        )
        return by_name(engine, self.metadata)

    def _opened(self, shard: SegmentShard) -> None:
        """A shard that the engine has opened, before its first use."""
        self.shards.append(shard)

    def places(self) -> Places:
        """Where history lies: beside the log, or in a store of its own if the settings share it."""
        store = None
        if self._settings.is_shared:
            store = DirectoryStore(f"{self._root}/store", disk=self._disk, clock=self._clock).open()
        return Places(
            disk=self._disk,
            clock=self._clock,
            directory=LogDirectory(self._root, Marker(FORMAT, "here"), None),
            holder="here",
            store=store,
            store_name=self._settings.store.name if store else "",
        )

    def ref(self, partition: int = 0) -> ShardRef:
        return ShardRef(spec_of(self._durability), partition)
