"""One shard with everything around its history: a simulated disk, a store, metadata, an exporter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

from forebay.appends.ticket import Ticket
from forebay.blobs import BlobStore
from forebay.blobs.directory import DirectoryStore
from forebay.catalog import ShardCatalog, ShardKeys
from forebay.cleanup.collector import Collector, Scope
from forebay.export import Exporter, Origin
from forebay.format.columns.rows import Columns, encode_columns
from forebay.format.metadata.descriptor import ShardState
from forebay.format.metadata.value import encode_value
from forebay.history import History, Objects
from forebay.metadata import MemoryMetadata, MetadataStore, Put
from forebay.records import Gap
from forebay.settings import WalSettings
from forebay.shard import SegmentShard
from forebay.testing.checks.history import AppendAnswered, AppendOutcome, Begun
from forebay.testing.checks.history import ShardEvents as Acked
from forebay.testing.checks.moves import RecordingMetadata
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.disk import SimulatedDisk
from forebay.topics import Durability, ShardRef, TopicName, TopicSpec

TOPIC: Final = "ab" * 16
KEYS: Final = ShardKeys("shop", "orders", 0, "/forebay")
DIRECTORY: Final = "/data/shard"
GRACE_S: Final = 3600
SETTINGS: Final = WalSettings(reserve_records_min=64, free_bytes_min=0)


class ShardEnvironment:
    """A shard that lies open in one epoch, and what it is exported with."""

    def __init__(
        self, *, durability: str = "fsync", blobs: BlobStore | None = None, clock: ManualClock | None = None
    ) -> None:
        self.disk = SimulatedDisk(directories=["/data", "/store"])
        self.clock = clock or ManualClock(seed=1)
        self.metadata = RecordingMetadata(MemoryMetadata())
        self.durability = durability
        self.epoch = 1
        self.appended: dict[int, bytes] = {}
        """What was acknowledged, by offset."""
        self.own(epoch=1)
        self.store = blobs or DirectoryStore("/store", disk=self.disk, clock=self.clock).open()
        self.shard = self._opened()

    def own(self, epoch: int) -> None:
        """From now on `epoch` owns the shard."""
        state = ShardState(incarnation=TOPIC, epoch=epoch, holder="me", holder_since=1)
        self.metadata.transaction([], [Put(KEYS.state, encode_value(state))])

    def reopen(self) -> None:
        """As if the process had died; the shard is recovered in the next epoch."""
        self.epoch += 1
        self.own(self.epoch)
        self.shard = self._opened()

    def _opened(self) -> SegmentShard:
        spec = TopicSpec.create(TopicName("shop", "orders"), topic_id=TOPIC, created_at=0, durability=self.durability)
        before = ShardState(incarnation=TOPIC, epoch=self.epoch - 1, holder="me", holder_since=1)
        return SegmentShard.open(
            ShardRef(spec, 0),
            DIRECTORY,
            SETTINGS,
            disk=self.disk,
            clock=self.clock,
            before=before if self.epoch > 1 else None,
            epoch=self.epoch,
            holder="me",
        )

    def append(self, count: int) -> None:
        first = self.shard.offsets().next
        values = [b"value %d" % offset for offset in range(first, first + count)]
        columns = encode_columns(Columns(values=values, timestamps=[1_000 + o for o in range(first, first + count)]))
        self.shard.acknowledge(self.shard.stage_many(columns, None, Ticket()))
        self.shard.commit()
        self.appended.update(enumerate(values, start=first))

    def seal(self) -> None:
        self.shard.rotate()
        self.shard.upkeep.seal_rotated()

    def catalog(self, metadata: MetadataStore | None = None) -> ShardCatalog:
        return ShardCatalog(metadata or self.metadata, KEYS, TOPIC, clock=ManualClock())

    def exporter(self, *, epoch: int | None = None, catalog: ShardCatalog | None = None) -> Exporter:
        origin = Origin(TOPIC, 0, epoch or self.epoch, "me", "directory")
        return Exporter(origin, catalog or self.catalog(), self.store, disk=self.disk, clock=self.clock)

    def export(self, *, epoch: int | None = None) -> int:
        return self.exporter(epoch=epoch).export(self.shard.wal.files)

    def scope(
        self,
        exporter: Exporter | None = None,
        *,
        catalog: ShardCatalog | None = None,
        is_compacting: Callable[[], bool] = lambda: False,
    ) -> Scope:
        """What the owner collects: the objects of the shard, by this exporter and this catalog."""
        used = exporter or self.exporter()
        return Scope(
            store=self.store,
            prefix=used.origin.prefix,
            catalog=catalog or self.catalog(),
            is_compacting=is_compacting,
            unexported=lambda: used.unexported(self.shard.wal.files),
            epoch=used.origin.epoch,
        )

    def collect(self, exporter: Exporter | None = None, *, catalog: ShardCatalog | None = None) -> list[str]:
        """Collect as an owner does that has just come; the keys of what was removed."""
        return Collector(self.clock, GRACE_S).collect(self.scope(exporter, catalog=catalog))

    def acked(self) -> Acked:
        """The same as a history of callers, each record an append of its own."""
        acked = Acked(Durability.FSYNC)
        for offset, value in self.appended.items():
            acked.add(Begun(offset, (value,)))
            acked.add(AppendAnswered(offset, AppendOutcome.ACKED, offset))
        return acked

    def local_files(self) -> dict[str, bytes]:
        """Every file of the shard's log."""
        files: dict[str, bytes] = {}
        for name in self.disk.list_directory(DIRECTORY):
            file = self.disk.open(f"{DIRECTORY}/{name}")
            files[name] = file.read_at(file.size(), 0)
        return files

    def keys(self) -> set[str]:
        """What the store holds."""
        return {stat.key for stat in self.store.list()}


@contextlib.contextmanager
def history_of(environment: ShardEnvironment) -> Iterator[History]:
    """The history as a reader sees it."""
    objects = Objects(environment.store, read_ahead_bytes=512)
    try:
        yield History(environment.catalog(), objects.segment)
    finally:
        objects.close()


def stream(history: History, offset: int = 0) -> list[tuple[int, bytes | None] | Gap]:
    """Records and gaps in order."""
    found: list[tuple[int, bytes | None] | Gap] = []
    while (page := history.read(offset, 100)).next > offset:
        found += [(record.offset, record.value) for batch in page.batches for record in batch.records(0)]
        found += page.events
        offset = page.next
    return sorted(found, key=lambda piece: piece[0])


def expected(start: int, stop: int) -> list[tuple[int, bytes | None] | Gap]:
    """What `ShardEnvironment.append` put at these offsets."""
    return [(offset, b"value %d" % offset) for offset in range(start, stop)]
