"""What data directories of a simulation share, and a process that has one of them.

All lie on one simulated disk. Its trace notes what the metadata store committed, so that every crash state can be
paired with the metadata of that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from forebay.blobs import BlobStore
from forebay.blobs.directory import DirectoryStore
from forebay.cleanup.deleted_topics import Deletions
from forebay.cleanup.objects import ObjectCleanup
from forebay.definitions import Definitions
from forebay.directory import FORMAT, LogDirectory, Marker
from forebay.engines import MemoryEngine, RocksEngine, SegmentEngine
from forebay.engines.directory import Engines
from forebay.loads.service import AloneWith, Loads
from forebay.metadata import MemoryMetadata, MetadataStore
from forebay.places import Places
from forebay.settings import Settings
from forebay.shard import SegmentShard, ShardContext
from forebay.shard.ownership import OwnerSession
from forebay.storage.owner import ROCKSDB
from forebay.testing.checks.moves import Operations, RecordingMetadata
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.disk import SimulatedDisk
from forebay.testing.simulated.metadata import FaultyMetadata
from forebay.testing.simulated.trace import Note
from forebay.topics import ShardRef, TopicName

NAME: Final = TopicName("shop", "orders")
TOPIC_ID: Final = "ab" * 16
STORE: Final = "/store"
GRACE_S: Final = 3600
_COMMITTED: Final = "metadata"


class SimulatedEnvironment:
    """Everything that directories share."""

    def __init__(
        self,
        settings: Settings,
        *,
        disk: SimulatedDisk,
        metadata: MemoryMetadata | None,
        blobs: BlobStore | None,
        seed: int,
    ) -> None:
        """`metadata` is left of an earlier life on this disk; `blobs` is a store of history that is no directory."""
        self.settings = settings
        self.disk = disk
        self.clock = ManualClock(seed=seed)
        self.inner = metadata or MemoryMetadata()
        self.metadata = RecordingMetadata(self.inner, on_commit=self._committed)
        self.faulty = FaultyMetadata(self.metadata)
        """What processes go through, unless the caller says otherwise."""
        self.blobs = blobs

    def store(self) -> BlobStore:
        """A handle on the store of history."""
        return self.blobs or DirectoryStore(STORE, disk=self.disk, clock=self.clock).open()

    def files(self) -> dict[str, bytes]:
        """Everything on the disk, without a call that could fail or count."""
        return files_of(self.disk)

    @property
    def committed(self) -> list[Operations]:
        """Every transaction that succeeded, those before a crash included."""
        return committed_in(self.disk.trace.notes())

    def _committed(self, operations: Operations) -> None:
        self.disk.note(_COMMITTED, operations)


T = TypeVar("T")


def at_once(shard: SegmentShard, work: Callable[[SegmentShard], T]) -> T:
    """Nothing else works on a shard where nothing runs in the background."""
    return work(shard)


class SimulatedOwner:
    """One process with one data directory. Nothing runs in the background."""

    def __init__(
        self,
        environment: SimulatedEnvironment,
        name: str,
        metadata: MetadataStore,
        store: BlobStore,
        *,
        on_open: Callable[[SegmentShard], None],
    ) -> None:
        self.name = name
        self._environment = environment
        self.metadata = metadata
        settings = environment.settings
        self.places = Places(
            disk=environment.disk,
            clock=environment.clock,
            directory=LogDirectory(f"/{name}", Marker(FORMAT, name), None),
            holder=name,
            store=store,
            store_name=settings.store.name if settings.is_shared else "directory",
        )
        self.owner_session = OwnerSession(metadata, settings.metadata.lease_ttl_s, name)
        self.engine = SegmentEngine(
            f"/{name}/shards",
            settings,
            disk=environment.disk,
            clock=environment.clock,
            metadata=metadata,
            owner_session=self.owner_session,
            places=self.places,
            on_open=on_open,
            on_dirty=lambda _: None,
        )
        self.cleanup = ObjectCleanup(metadata, settings, self.places, environment.clock)
        self.definitions = Definitions(metadata, settings.metadata.prefix, environment.clock)
        self.engines = Engines(
            segment=self.engine,
            memory=MemoryEngine(settings, clock=environment.clock, metadata=metadata, owner_session=self.owner_session),
            rocksdb=RocksEngine(
                f"/{name}/{ROCKSDB}",
                settings,
                disk=environment.disk,
                clock=environment.clock,
                metadata=metadata,
                owner_session=self.owner_session,
            ),
        )

    @property
    def _context(self) -> ShardContext:
        return ShardContext(self.metadata, self._environment.settings, self.places, self.name, lambda: False)

    def deletions_by(self, drop: Callable[[ShardRef], bool]) -> Deletions:
        """What finishes deletions here; `drop` stops the work on a shard."""
        return Deletions(
            self.metadata,
            self._environment.settings,
            self._environment.clock,
            holder=self.name,
            objects=self.cleanup,
            drop=drop,
            delete_shard=self.engine.delete_shard,
            forget_topic=lambda spec: None,
        )

    def loads_by(self, alone_with: AloneWith | None = None) -> Loads:
        """The bulk loads that concern this directory."""
        return Loads(
            self._context,
            self._environment.clock,
            topic=self.definitions.get,
            shards=self.engine.shards,
            own=self.engine.open_shard,
            alone_with=alone_with or at_once,
        )

    def collect_directory(self) -> None:
        """Collect what loads and shards that are not open here have left."""
        self.cleanup.collect_directory(self.definitions.all, {shard.ref.id for shard in self.engine.shards()})


def committed_in(notes: Iterable[Note]) -> list[Operations]:
    """The transactions that a trace records."""
    return [note.payload for note in notes if note.kind == _COMMITTED]  # type: ignore[misc]  # only `SimulatedEnvironment` notes these


def files_of(disk: SimulatedDisk) -> dict[str, bytes]:
    """Everything on a disk by its path, without a call that could fail or count."""
    image = disk.volume.image()
    found: dict[str, bytes] = {}
    waiting = [("", 1)]
    while waiting:
        path, directory = waiting.pop()
        for name, inode in image.directories[directory].items():
            if inode in image.directories:
                waiting.append((f"{path}/{name}", inode))
            else:
                found[f"{path}/{name}"] = image.files[inode]
    return found
