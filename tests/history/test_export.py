"""From sealed files to history and back: exported once, verified, catalogued, read as one stream."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

import pytest

from forebay.blobs.directory import DirectoryStore
from forebay.catalog import ShardCatalog, ShardKeys
from forebay.errors import Corrupt, Fenced, ForebayError
from forebay.export import Exporter, Origin
from forebay.format.batch import Columns, encode_columns
from forebay.format.descriptor import ShardState
from forebay.format.value import encode_value
from forebay.history import History, Objects
from forebay.metadata import MemoryMetadata, MetadataStore, Put
from forebay.records import Gap, Reason
from forebay.settings import WalSettings
from forebay.shard import SegmentShard, ShardRef
from forebay.testing.clock import ManualClock
from forebay.testing.disk import SimulatedDisk
from forebay.testing.faults import Match
from forebay.testing.metadata import Fault, FaultyMetadata
from forebay.topics import TopicName, TopicSpec
from forebay.wal.staging import Ticket
from tests.ledger import Ledger

TOPIC = "ab" * 16
KEYS = ShardKeys("shop", "orders", 0, "/forebay")
DIRECTORY = "/data/shard"
SETTINGS = WalSettings(reserve_records_min=64, free_bytes_min=0)


class House:
    """One shard with everything around it, on a simulated disk."""

    def __init__(self, metadata: MetadataStore | None = None, *, durability: str = "fsync") -> None:
        self.disk = SimulatedDisk(directories=["/data", "/store"])
        self.clock = ManualClock(1_700_000_000_000, seed=1)
        self.memory = MemoryMetadata()
        self.metadata = metadata or self.memory
        self.durability = durability
        self.own(epoch=1)
        self.store = DirectoryStore("/store", disk=self.disk, clock=self.clock).open()
        self.shard = self.opened(epoch=1)

    def own(self, epoch: int) -> None:
        state = ShardState(incarnation=TOPIC, epoch=epoch, holder="me", holder_since=1)
        self.memory.transaction([], [Put(KEYS.state, encode_value(state))])

    def opened(self, epoch: int) -> SegmentShard:
        spec = TopicSpec.create(TopicName("shop", "orders"), topic_id=TOPIC, created_at=0, durability=self.durability)
        before = ShardState(incarnation=TOPIC, epoch=epoch - 1, holder="me", holder_since=1) if epoch > 1 else None
        return SegmentShard.open(
            ShardRef(spec, 0),
            DIRECTORY,
            SETTINGS,
            disk=self.disk,
            clock=self.clock,
            before=before,
            epoch=epoch,
            holder="me",
        )

    def append(self, count: int) -> None:
        first = self.shard.offsets().next
        values = [b"value %d" % offset for offset in range(first, first + count)]
        columns = encode_columns(Columns(values=values, timestamps=[1_000 + o for o in range(first, first + count)]))
        self.shard.settle(self.shard.stage_many(columns, None, Ticket()))

    def seal(self) -> None:
        self.shard.rotate()
        self.shard.upkeep.seal_rotated()

    def catalog(self, metadata: MetadataStore | None = None) -> ShardCatalog:
        return ShardCatalog(metadata or self.metadata, KEYS, TOPIC)

    def exporter(self, epoch: int = 1, metadata: MetadataStore | None = None) -> Exporter:
        origin = Origin(TOPIC, 0, epoch, "me", "directory")
        return Exporter(origin, self.catalog(metadata), self.store, disk=self.disk, clock=self.clock)

    def export(self, epoch: int = 1) -> int:
        return self.exporter(epoch).export(self.shard.wal.files)


@contextlib.contextmanager
def history_of(house: House) -> Iterator[History]:
    objects = Objects(house.store, block_bytes=256, blocks_ahead=2)
    try:
        yield History(house.catalog(house.memory), objects.segment)
    finally:
        objects.close()


def stream(history: History, offset: int = 0) -> list[tuple[int, bytes | None] | Gap]:
    found: list[tuple[int, bytes | None] | Gap] = []
    while (page := history.read(offset, 100)).next > offset:
        found += [(record.offset, record.value) for batch in page.batches for record in batch.records(0)]
        found += page.events
        offset = page.next
    return sorted(found, key=lambda piece: piece[0])


def expected(start: int, stop: int) -> list[tuple[int, bytes | None] | Gap]:
    return [(offset, b"value %d" % offset) for offset in range(start, stop)]


def test_exported_history_reads_as_what_was_appended() -> None:
    house = House()
    for _ in range(3):
        house.append(40)
        house.seal()

    exported = house.export()

    assert exported == 3
    with history_of(house) as history:
        assert stream(history) == expected(0, 120)
        assert stream(history, 77) == expected(77, 120)
        assert history.offset_at_time(1_050) == 50
        assert history.offset_at_time(9_999) is None


def test_only_sealed_files_are_exported_and_each_once() -> None:
    house = House()
    house.append(10)
    assert house.export() == 0
    house.seal()
    house.append(5)

    assert house.export() == 1
    assert house.export() == 0

    assert house.catalog().frontier().next == 10
    assert house.exporter().lag(house.shard.wal.files).files == 0


def test_a_gap_in_the_log_becomes_a_gap_in_history() -> None:
    house = House(durability="memory")
    house.append(10)
    house.shard.commit()
    house.shard.flush()
    house.shard = house.opened(epoch=2)
    house.own(epoch=2)
    house.append(5)
    house.shard.commit()
    house.seal()
    start = house.shard.offsets().next - 5

    house.export(epoch=2)

    with history_of(house) as history:
        assert stream(history) == [*expected(0, 10), Gap(10, start, Reason.LOST), *expected(start, start + 5)]


def test_a_file_that_changed_since_it_was_sealed_is_not_exported() -> None:
    house = House()
    house.append(40)
    house.seal()
    path = house.shard.wal.files.all[0].path
    file = house.disk.open(path, writable=True)
    file.write_at(b"!", 200)

    with pytest.raises(Corrupt, match="not exported"):
        house.export()

    assert house.catalog().frontier().next == 0
    assert list(house.store.list()) == []


def test_a_zombie_exports_nothing_into_the_history() -> None:
    house = House()
    house.append(10)
    house.seal()
    house.own(epoch=2)

    with pytest.raises(Fenced):
        house.export(epoch=1)

    assert house.catalog().frontier().next == 0


def test_orphans_are_swept_after_grace_and_never_what_the_catalog_names() -> None:
    house = House()
    house.append(10)
    house.seal()
    house.export()
    house.store.put_if_absent(f"{TOPIC}_0/1-{'0' * 32}.seg", b"left behind")
    named = {stat.key for stat in house.store.list()}

    house.clock.advance(60)
    assert house.exporter().sweep(grace_s=3600) == []
    house.clock.jump(7_200_000)
    swept = house.exporter().sweep(grace_s=3600)

    assert swept == [f"{TOPIC}_0/1-{'0' * 32}.seg"]
    assert {stat.key for stat in house.store.list()} == named - set(swept)
    with history_of(house) as history:
        assert stream(history) == expected(0, 10)


def test_a_missing_object_is_a_named_error() -> None:
    house = House()
    house.append(10)
    house.seal()
    house.export()
    for stat in list(house.store.list()):
        house.store.delete(stat.key)

    with history_of(house) as history, pytest.raises(ForebayError, match=TOPIC):
        stream(history)


@pytest.mark.parametrize("fault", list(Fault))
def test_a_metadata_fault_at_any_step_of_an_export_leaves_no_hole_and_no_double(fault: Fault, ledger: Ledger) -> None:
    for step in range(3):
        house = House()
        for _ in range(3):
            house.append(10)
            house.seal()
        faulty = FaultyMetadata(house.memory)
        faulty.inject(fault, after=step)
        exporter = house.exporter(metadata=faulty)

        for _ in range(4):
            with contextlib.suppress(ForebayError):
                exporter.export(house.shard.wal.files)
        faulty.land()

        with history_of(house) as history:
            assert stream(history) == expected(0, 30)
        assert len(list(house.store.list())) == 6
        ledger.count("export faults", fault=fault.value)


def test_a_crash_at_any_step_of_an_export_converges(ledger: Ledger) -> None:
    """The disk fails from some call on, as if the process had died there; a new process exports again."""
    reached = _calls_of_an_export()
    for step in range(reached):
        house = House()
        house.append(10)
        house.seal()
        first = house.disk.calls_reached + step
        house.disk.fail_when(_from(first), errno.EIO, times=None)
        with contextlib.suppress(ForebayError, OSError):
            house.export()
        house.disk.heal()

        house.export()

        with history_of(house) as history:
            assert stream(history) == expected(0, 10)
        ledger.count("export crashes")


def _calls_of_an_export() -> int:
    house = House()
    house.append(10)
    house.seal()
    before = house.disk.calls_reached
    house.export()
    return house.disk.calls_reached - before


def _from(first: int) -> Match:
    return lambda call: call.index >= first
