"""Where engines with look-ups keep their state under test: topics may have limits, and time is turned by hand."""

from __future__ import annotations

from forebay.appends.ticket import Ticket
from forebay.clock import Clock, SystemClock
from forebay.disk import Disk, SystemDisk
from forebay.engines import ByName, MemoryEngine
from forebay.engines.rocksdb import RocksEngine
from forebay.metadata import MemoryMetadata, MetadataStore
from forebay.settings import Settings
from forebay.shard import SegmentShard
from forebay.testing.simulated.clock import ManualClock
from forebay.topics import ShardRef, TopicName, TopicSpec
from tests.engines.homes import SETTINGS, TOPIC_ID, Owners, SegmentHome, by_name


def limited_spec(engine: str, durability: str, **limits: int | str | None) -> TopicSpec:
    """A topic on an engine, with limits."""
    name = TopicName("shop", "orders")
    return TopicSpec.create(
        name,
        topic_id=TOPIC_ID,
        created_at=0,
        partitions=4,
        engine=engine,
        durability=durability,
        **limits,  # type: ignore[arg-type]
    )


class LookupMemoryHome:
    """The memory engine: only the metadata store lasts."""

    forgets = True

    def __init__(
        self, settings: Settings = SETTINGS, *, clock: ManualClock | None = None, metadata: MetadataStore | None = None
    ) -> None:
        self.clock = clock or ManualClock()
        self.metadata = metadata or MemoryMetadata()
        self._settings = settings
        self._owners = Owners(self.metadata)

    def open(self) -> ByName[MemoryEngine]:
        owner_session = self._owners.next()
        engine = MemoryEngine(self._settings, clock=self.clock, metadata=self.metadata, owner_session=owner_session)
        return by_name(engine, self.metadata)

    def ref(self, partition: int = 0, **limits: int | str | None) -> ShardRef:
        return ShardRef(limited_spec("memory", "ephemeral", **limits), partition)


class RocksHome:
    """The RocksDB engine in a directory of the machine."""

    forgets = False

    def __init__(
        self,
        path: str,
        durability: str = "disk",
        *,
        settings: Settings = SETTINGS,
        clock: ManualClock | None = None,
        waiting: Clock | None = None,
        metadata: MetadataStore | None = None,
    ) -> None:
        self.clock = clock or ManualClock()
        self.metadata = metadata or MemoryMetadata()
        self.path = path
        self.disk = SystemDisk()
        self._waiting = waiting
        self._durability = durability
        self._settings = settings
        self._owners = Owners(self.metadata)

    def open(self) -> ByName[RocksEngine]:
        engine = RocksEngine(
            self.path,
            self._settings,
            disk=self.disk,
            clock=self._waiting or self.clock,
            metadata=self.metadata,
            owner_session=self._owners.next(),
        )
        return by_name(engine, self.metadata)

    def ref(self, partition: int = 0, **limits: int | str | None) -> ShardRef:
        return ShardRef(limited_spec("rocksdb", self._durability, **limits), partition)


class LookupSegmentHome(SegmentHome):
    """The segment engine in a directory, of the machine if no other disk is given."""

    def __init__(
        self,
        path: str,
        durability: str,
        *,
        settings: Settings = SETTINGS,
        disk: Disk | None = None,
        metadata: MetadataStore | None = None,
    ) -> None:
        self.clock = ManualClock()
        super().__init__(disk or SystemDisk(), path, durability, settings=settings, clock=self.clock, metadata=metadata)

    def _opened(self, shard: SegmentShard) -> None:
        super()._opened(shard)
        acknowledge = shard.acknowledge

        def acknowledged(ticket: Ticket) -> int:
            offset = acknowledge(ticket)
            self.settled(shard)
            return offset

        shard.acknowledge = acknowledged  # type: ignore[method-assign]  # the owner of these tests is one thread

    def settled(self, shard: SegmentShard) -> None:
        """What time would do to class `memory`: no thread is here for it."""
        if self._durability == "memory":
            shard.commit()

    def ref(self, partition: int = 0, **limits: int | str | None) -> ShardRef:
        return ShardRef(limited_spec("segment", self._durability, **limits), partition)


class RestlessHome(LookupSegmentHome):
    """The same, but each append is sealed and made history before the next: all is read from sealed files."""

    def settled(self, shard: SegmentShard) -> None:
        shard.rotate()
        shard.upkeep.seal_rotated()
        shard.history.catch_up()


def rocks_home(path: str, durability: str) -> RocksHome:
    """One whose clock goes by itself."""
    return RocksHome(path, durability, waiting=SystemClock())
