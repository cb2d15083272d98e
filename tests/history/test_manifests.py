"""Catalog manifests: thousands of descriptors in one object, swapped in at once and read as if nothing had happened."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from forebay import manifests
from forebay.catalog import ShardCatalog, ShardKeys
from forebay.clock import SystemClock
from forebay.errors import Corrupt, Invalid, Unavailable
from forebay.format.columns.rows import encode_rows
from forebay.format.metadata.descriptor import (
    SPARSE_ENTRIES_MAX,
    DescriptorKind,
    LoadStanding,
    LoadStatus,
    SegmentDescriptor,
    ShardState,
    SparseEntry,
    Status,
    gap_descriptor,
)
from forebay.format.metadata.keys import load_key
from forebay.format.metadata.value import encode_value
from forebay.history import History, Objects
from forebay.loads.prepare import LoadPlace, descriptors_of, manifest_of, write_segment
from forebay.manifests import ManifestReader, write
from forebay.metadata import DeleteRange, Entry, MemoryMetadata, MetadataStore, Put
from forebay.metadata.etcd import EtcdMetadata
from forebay.records import Gap, Reason, Record
from forebay.settings import MetadataSettings
from forebay.testing.simulated.blobs import SimulatedBlobs
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.metadata import Fault, FaultyMetadata
from tests.ledger import Ledger
from tests.support.etcd import running

TOPIC = "ab" * 16
KEYS = ShardKeys("shop", "orders", 0, "/forebay")
PREFIX = f"{TOPIC}_0/"
MANY = 5_000


def piece(start: int, end: int, content: str = "", *, sparse: tuple[SparseEntry, ...] = ()) -> SegmentDescriptor:
    return SegmentDescriptor(
        kind=DescriptorKind.FRAMES,
        topic_id=TOPIC,
        start=start,
        end=end,
        epoch=1,
        records=end - start,
        time_min=start,
        time_max=end,
        content_hash=content or f"{start:032x}",
        object_key=f"{PREFIX}{start}.seg",
        sparse=sparse,
    )


def swapped(blobs: SimulatedBlobs, descriptors: Sequence[SegmentDescriptor]) -> SegmentDescriptor:
    return write(blobs, PREFIX, descriptors, store_name="store", created_at=5)


def catalog_of(metadata: MetadataStore, blobs: SimulatedBlobs | None = None) -> ShardCatalog:
    metadata.transaction([], [Put(KEYS.state, encode_value(ShardState(incarnation=TOPIC, epoch=1)))])
    return ShardCatalog(metadata, KEYS, TOPIC, manifest=ManifestReader(blobs or SimulatedBlobs()), clock=ManualClock())


def filled(catalog: ShardCatalog, count: int, sparse: tuple[SparseEntry, ...] = ()) -> list[SegmentDescriptor]:
    added = [piece(start, start + 10, sparse=sparse) for start in range(0, count * 10, 10)]
    for first in range(0, count, 90):
        catalog.extend(1, added[first : first + 90])
    return added


def standing(metadata: MetadataStore) -> list[str]:
    return [entry.key.rpartition("/")[2] for entry in metadata.range(KEYS.segments)]


class Meddled(FaultyMetadata):
    """A store where something else happens right after the n-th read of a range."""

    def __init__(self, inner: MetadataStore, after: int, meddle: Callable[[], object]) -> None:
        super().__init__(inner)
        self._after = after
        self._meddle = meddle

    def range(self, prefix: str, *, start_after: str | None = None, limit: int | None = None) -> list[Entry]:
        found = super().range(prefix, start_after=start_after, limit=limit)
        if self.calls["range"] == self._after:
            self._meddle()
        return found


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdMetadata]:
    """A store on three real members."""
    directory: Path = tmp_path_factory.mktemp("etcd")
    with running(directory, 3) as cluster:
        settings = MetadataSettings(backend="etcd", endpoints=cluster.endpoints, lease_margin_s=1)
        store = EtcdMetadata.open(settings, clock=SystemClock())
        yield store
        store.close()


@pytest.mark.slow
@pytest.mark.xdist_group("etcd")
def test_five_thousand_descriptors_become_one_on_a_real_cluster(etcd: EtcdMetadata, ledger: Ledger) -> None:
    clock, blobs = SystemClock(), SimulatedBlobs()
    catalog = catalog_of(etcd, blobs)
    full_size = tuple(SparseEntry(n * 10_000, n * 2**20) for n in range(SPARSE_ENTRIES_MAX))
    added = filled(catalog, MANY, full_size)
    before = catalog.frontier().cur.generation
    started = clock.monotonic()

    assert catalog.replace(catalog.pieces(), swapped(blobs, added))

    ledger.count("swap of 5,000 descriptors on etcd, ms", n=round(1_000 * (clock.monotonic() - started)))
    started = clock.monotonic()
    assert catalog.descriptors() == added
    ledger.count("read of 5,000 descriptors by manifest, ms", n=round(1_000 * (clock.monotonic() - started)))
    assert standing(etcd) == [f"{0:020d}", "cur"]
    assert catalog.frontier().cur.generation == before + 1
    catalog.extend(1, [piece(MANY * 10, MANY * 10 + 1)])
    assert catalog.frontier().next == MANY * 10 + 1
    ledger.count("descriptors swapped for a manifest", n=MANY, store="etcd, three members")


def test_a_history_is_read_through_its_manifest() -> None:
    blobs, metadata = SimulatedBlobs(), MemoryMetadata()
    catalog = catalog_of(metadata, blobs)
    gap = gap_descriptor(Gap(60, 70, Reason.LOST), topic_id=TOPIC, epoch=1, created_at=1)
    additions = [*_segments(blobs, 0, 3), gap, *_segments(blobs, 70, 3)]
    catalog.extend(1, additions)
    catalog.replace(catalog.pieces()[1:6], swapped(blobs, additions[1:6]))
    catalog.extend(1, _segments(blobs, 130, 1))
    committed = LoadStanding(status=LoadStatus.COMMITTED, topic_id=TOPIC)
    metadata.transaction([], [Put(load_key("load"), encode_value(committed))])
    objects = Objects(blobs)

    found, gaps = _walked(History(catalog, objects.segment))

    assert [record.offset for record in found] == [*range(60), *range(70, 150)]
    assert [record.value for record in found] == [b"%d" % record.offset for record in found]
    assert gaps == [Gap(60, 70, Reason.LOST)]
    assert History(catalog, objects.segment).offset_at_time(1_077) == 77
    assert len(catalog.pieces()) == 4
    objects.close()


def _segments(blobs: SimulatedBlobs, start: int, count: int) -> list[SegmentDescriptor]:
    """Segments of twenty records each, as a load brings them."""
    prepared = []
    for first in range(start, start + 20 * count, 20):
        rows = [(b"%d" % number, None, None, (), 1_000 + number) for number in range(first, first + 20)]
        place = LoadPlace("load", TOPIC, 0)
        segment = write_segment(blobs, place, "0", [encode_rows(rows)], clock=ManualClock(seed=first))
        assert segment is not None
        prepared.append((0, segment))
    manifest = manifest_of("load", TOPIC, prepared)
    return descriptors_of(manifest, 0, start, epoch=1, store="store", leader="me", created_at=1)


def _walked(history: History) -> tuple[list[Record], list[Gap]]:
    offset, records, gaps = 0, list[Record](), list[Gap]()
    while (page := history.read(offset, 100)).next > offset:
        records += [record for batch in page.batches for record in batch.records(0)]
        gaps += page.events
        offset = page.next
    return records, gaps


def test_the_manifest_says_what_its_pieces_say_together() -> None:
    gap = gap_descriptor(Gap(20, 25, Reason.LOST), topic_id=TOPIC, epoch=7, created_at=1)

    found = swapped(SimulatedBlobs(), [piece(0, 10), piece(10, 20), gap, piece(25, 30)])

    assert (found.start, found.end, found.records, found.live_records) == (0, 30, 25, 0)
    assert (found.time_min, found.time_max, found.epoch, found.status) == (0, 30, 7, Status.EXPORTED)
    assert found.object_key == f"{PREFIX}{found.content_hash}.manifest"


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([], id="none"),
        pytest.param([piece(0, 10), piece(11, 20)], id="a hole"),
        pytest.param([piece(0, 10), piece(9, 20)], id="an overlap"),
        pytest.param([piece(0, 10), msgspec.structs.replace(piece(10, 20), topic_id="cd" * 16)], id="two topics"),
        pytest.param([msgspec.structs.replace(piece(0, 10), kind=DescriptorKind.MANIFEST)], id="a manifest"),
    ],
)
def test_what_is_no_run_of_one_shard_is_refused(pieces: list[SegmentDescriptor]) -> None:
    blobs = SimulatedBlobs()

    with pytest.raises(Invalid, match="a manifest lists"):
        swapped(blobs, pieces)

    assert blobs.contents == {}


def test_a_manifest_that_grew_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "BYTES_MAX", 1_000)

    with pytest.raises(Invalid, match="list less in one"):
        swapped(SimulatedBlobs(), [piece(start, start + 1) for start in range(10)])


def test_a_manifest_that_changed_or_is_of_another_range_is_refused(ledger: Ledger) -> None:
    blobs = SimulatedBlobs()
    descriptor = swapped(blobs, [piece(0, 10), piece(10, 20)])
    content = blobs.contents[descriptor.object_key]
    unmarked = msgspec.structs.replace(descriptor, etag=None)
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        blobs.upload(descriptor.object_key, [bytes(damaged)])
        with pytest.raises(Corrupt, match="is damaged"):
            ManifestReader(blobs)(unmarked)
    blobs.upload(descriptor.object_key, [content])

    with pytest.raises(Corrupt, match="does not list the pieces of"):
        ManifestReader(blobs)(msgspec.structs.replace(descriptor, end=21))
    ledger.count("bit flips", n=len(content), artefact="catalog manifest")


def test_the_latest_few_manifests_are_read_once() -> None:
    blobs = SimulatedBlobs()
    descriptors = [swapped(blobs, [piece(start, start + 1)]) for start in range(manifests.REMEMBERED + 1)]
    reader = ManifestReader(blobs)

    def reads() -> int:
        return sum(call.method == "read" for call in blobs.calls)

    for descriptor in (*descriptors, *descriptors[1:]):
        assert reader(descriptor)[0].start == descriptor.start
    assert reads() == len(descriptors)
    reader(descriptors[0])
    assert reads() == len(descriptors) + 1


@pytest.mark.slow
@pytest.mark.parametrize("fault", list(Fault))
def test_a_sweep_interrupted_anywhere_converges(fault: Fault, ledger: Ledger) -> None:
    steps = 0
    while True:
        metadata, blobs = MemoryMetadata(), SimulatedBlobs()
        catalog = catalog_of(metadata, blobs)
        added = filled(catalog, 400)
        faulty = FaultyMetadata(metadata)
        weak = ShardCatalog(faulty, KEYS, TOPIC, manifest=ManifestReader(blobs), clock=ManualClock())
        faulty.inject(fault, after=steps)
        done = False
        with contextlib.suppress(Unavailable):
            done = weak.replace(weak.pieces(), swapped(blobs, added))
        reached = faulty.calls["transaction"]
        if not done:
            assert catalog.replace(catalog.pieces(), swapped(blobs, added))
        assert catalog.descriptors() == added
        faulty.land()
        catalog.sweep_hidden()
        assert catalog.descriptors() == added
        assert standing(metadata) == [f"{0:020d}", "cur"]
        assert catalog.sweep_hidden() == 0
        ledger.count("interrupted swaps", fault=fault.value)
        steps += 1
        if reached < steps:
            return


def test_what_is_added_while_a_sweep_runs_stays() -> None:
    for moment in (1, 2, 3):
        metadata, blobs = MemoryMetadata(), SimulatedBlobs()
        catalog = catalog_of(metadata, blobs)
        added = filled(catalog, 20)
        late = piece(200, 210)
        meddled = Meddled(metadata, moment, partial(catalog.extend, 1, [late]))

        assert ShardCatalog(meddled, KEYS, TOPIC, clock=ManualClock()).replace(catalog.pieces(), swapped(blobs, added))

        expected = [*added, late] if meddled.calls["range"] >= moment else added
        assert catalog.descriptors() == expected


def test_a_sweep_worked_out_for_a_topic_that_was_created_again_meanwhile_removes_nothing_of_it() -> None:
    metadata = MemoryMetadata()
    catalog = catalog_of(metadata)
    filled(catalog, 20)
    metadata.transaction([], [Put(KEYS.segment(0), encode_value(piece(0, 150, "large")))])

    def created_anew() -> None:
        metadata.transaction([], [DeleteRange(KEYS.segments)])
        filled(catalog, 10)

    removed = ShardCatalog(Meddled(metadata, 1, created_anew), KEYS, TOPIC, clock=ManualClock()).sweep_hidden()

    assert removed == 0
    assert [found.start for found in catalog.descriptors()] == list(range(0, 100, 10))


def test_whichever_caller_reads_while_descriptors_are_swapped_and_swept_sees_all_of_history() -> None:
    for moment in (1, 2):
        metadata, blobs = MemoryMetadata(), SimulatedBlobs()
        catalog = catalog_of(metadata, blobs)
        added = filled(catalog, 1_200)
        swap = swapped(blobs, added)
        meddled = Meddled(metadata, moment, partial(catalog.replace, catalog.pieces(), swap))

        found = ShardCatalog(meddled, KEYS, TOPIC, manifest=ManifestReader(blobs), clock=ManualClock()).descriptors()

        assert found == added


def test_a_manifest_that_is_replaced_and_removed_while_it_is_opened_is_looked_for_again() -> None:
    """The catalog named another one by then: that its object is gone is no damage."""
    metadata, blobs = MemoryMetadata(), SimulatedBlobs()
    catalog = catalog_of(metadata, blobs)
    added = filled(catalog, 5)
    first = swapped(blobs, added)
    assert catalog.replace(catalog.pieces(), first)
    second = write(blobs, f"{PREFIX}again/", added, store_name="store", created_at=6)

    def replaced() -> None:
        assert catalog.replace(catalog.pieces(), second)
        blobs.delete(first.object_key)

    meddled = Meddled(metadata, 1, replaced)

    assert (
        ShardCatalog(meddled, KEYS, TOPIC, manifest=ManifestReader(blobs), clock=ManualClock()).descriptors() == added
    )


def test_a_swap_worked_out_before_another_one_in_its_middle_is_not_made() -> None:
    metadata, blobs = MemoryMetadata(), SimulatedBlobs()
    catalog = catalog_of(metadata, blobs)
    added = filled(catalog, 5)
    seen = catalog.pieces()
    better = piece(20, 40, "better")
    assert catalog.replace(seen[2:4], better)

    assert not catalog.replace(seen, swapped(blobs, added))

    assert catalog.descriptors() == [added[0], added[1], better, added[4]]


def test_the_end_of_history_names_a_descriptor_that_stands() -> None:
    metadata, blobs = MemoryMetadata(), SimulatedBlobs()
    catalog = catalog_of(metadata, blobs)
    added = filled(catalog, 5)

    assert catalog.replace(catalog.pieces()[:2], swapped(blobs, added[:2]))
    assert catalog.frontier().cur.start == 40
    assert catalog.replace(catalog.pieces()[1:], swapped(blobs, added[2:]))

    assert catalog.frontier().cur.start == 20
    assert all(after.start == before.end for before, after in pairwise(catalog.descriptors()))


def test_the_same_bytes_in_another_place_do_replace_a_segment() -> None:
    metadata = MemoryMetadata()
    catalog = catalog_of(metadata)
    filled(catalog, 2)
    moved = msgspec.structs.replace(piece(0, 10), store="shared", status=Status.EXPORTED)

    assert catalog.replace(catalog.pieces()[:1], moved)
    assert catalog.replace(catalog.pieces()[:1], moved)

    assert catalog.descriptors()[0] == moved
    assert catalog.frontier().cur.generation == 1
