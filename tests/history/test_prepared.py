"""Segments of bulk loads: written before their place is known, read at the place they get."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from unittest import mock

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.appends.queue import record_bytes
from forebay.catalog import ShardCatalog, ShardKeys
from forebay.disk import replace_file
from forebay.errors import Corrupt, ForebayError, Invalid
from forebay.format.checksum import content_hash
from forebay.format.columns.arrow import ARROW_SCHEMA, encode_stored
from forebay.format.columns.rows import ColumnBytes, Row, encode_rows
from forebay.format.frame.head import HEAD_SIZE
from forebay.format.index.hashing import hash_bytes
from forebay.format.index.sections import SectionKind, encode_index
from forebay.format.metadata.descriptor import DESCRIPTOR_BYTES_MAX, LoadStanding, LoadStatus, ShardState
from forebay.format.metadata.keys import load_key
from forebay.format.metadata.value import decode_value, encode_value
from forebay.history import History, Objects
from forebay.inspection.segments import log_file
from forebay.loads import prepare
from forebay.loads.book import SinkState
from forebay.loads.prepare import (
    FRAME_BYTES,
    Load,
    LoadedShard,
    LoadManifest,
    Prepared,
    PreparedSegment,
    Sink,
    descriptors_of,
    manifest_of,
    offer_of,
    read_manifest,
    write_manifest,
    write_segment,
)
from forebay.manifests import CatalogManifest, ManifestRef
from forebay.metadata import MemoryMetadata, Put
from forebay.metadata.seam import TRANSACTION_BYTES_MAX
from forebay.records import Gap, Reason, Record
from forebay.sealed import StoredSegment
from forebay.testing.simulated.blobs import Fault, SimulatedBlobs
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.disk import SimulatedDisk
from forebay.wal.sealing import index_of
from tests.format.samples import FULL_ROWS, ONE_ROW, ROWS
from tests.history.loads import (
    GOLDEN,
    HEADER,
    PLACE,
    TOPIC,
    Memory,
    artefacts,
    expected,
    opened,
    prepared_bytes,
    walked,
)
from tests.ledger import Ledger

pytestmark = pytest.mark.slow

KEYS = ShardKeys("shop", "orders", 0, "/forebay")
_ARTEFACTS = artefacts()


def numbered(start: int, stop: int, size: int = 8) -> list[Row]:
    return [(b"%0*d" % (size, number), None, None, (), 1_000 + number) for number in range(start, stop)]


def written(store: SimulatedBlobs, *batches: Sequence[Row], seed: int = 1) -> Prepared:
    clock = ManualClock(seed=seed)
    segment = write_segment(store, PLACE, "0-0", [encode_rows(rows) for rows in batches], clock=clock)
    assert segment is not None
    return segment


@given(st.lists(ROWS, min_size=1, max_size=6), st.integers(0, 2**40), st.integers(48, 600), st.data())
def test_what_was_prepared_is_read_at_its_place_from_any_offset_on(
    batches: list[list[Row]], start: int, frame_bytes: int, chosen: st.DataObject
) -> None:
    rows = [row for batch in batches for row in batch]
    with mock.patch.object(prepare, "FRAME_BYTES", frame_bytes):
        content, index = prepared_bytes(batches)
    segment = opened(content, index, start, len(rows))
    offset = chosen.draw(st.integers(start, start + len(rows) - 1))

    records, gaps = walked(segment, offset, chosen.draw(st.sampled_from([1, 300, 10**6])))

    assert records == expected(rows, start)[offset - start :]
    assert gaps == []


@given(st.lists(ROWS, min_size=1, max_size=6), st.integers(0, 2**40), st.integers(48, 600))
def test_what_was_prepared_is_looked_up_by_its_index_alone(batches: list[list[Row]], start: int, size: int) -> None:
    rows = [row for batch in batches for row in batch]
    with mock.patch.object(prepare, "FRAME_BYTES", size):
        content, index = prepared_bytes(batches)
    unread = opened(b"", index, start, len(rows))

    found = looked_up(unread, rows)

    assert found == places_of(rows, start)
    assert index == sealed_index(content, len(rows))
    totals = unread.totals()
    assert totals is not None
    assert totals[-1] == sum(record_bytes(value, key, tag, headers) for value, key, tag, headers, _ in rows)


@given(ROWS, st.data())
def test_record_batches_are_prepared_as_their_rows_are(rows: list[Row], chosen: st.DataObject) -> None:
    values, keys, tags, headers, times = zip(*rows, strict=True)
    pairs = [[{"key": name, "value": value} for name, value in row] or None for row in headers]
    columns = {"value": values, "key": keys, "tag": tags, "headers": pairs, "timestamp": times}
    types = {**{name: ARROW_SCHEMA.field(name).type for name in columns}, "timestamp": pa.int64()}
    whole = pa.RecordBatch.from_pydict({name: pa.array(column, types[name]) for name, column in columns.items()})
    cut = chosen.draw(st.integers(0, len(rows)))
    batches = [part for part in (whole[:cut], whole[cut:]) if part.num_rows]
    segment = PreparedSegment(HEADER)

    content = b"".join(segment.chunks(encode_stored(batch) for batch in batches))

    assert (content, segment.index()[0]) == prepared_bytes([rows])


def looked_up(segment: StoredSegment, rows: Sequence[Row]) -> dict[tuple[SectionKind, bytes], list[int]]:
    """Where the segment says that each key and tag of these rows is, and one of each that none has."""
    sought = {*entries_of(rows), (SectionKind.KEY_POSTINGS, b"none of them"), (SectionKind.TAG_POSTINGS, b"none")}
    return {
        (kind, entry): [offset for piece in segment.find(kind, hash_bytes(entry)) for offset in piece.tolist()]
        for kind, entry in sought
    }


def entries_of(rows: Sequence[Row]) -> Iterator[tuple[SectionKind, bytes]]:
    for _, key, tag, _, _ in rows:
        if key is not None:
            yield SectionKind.KEY_POSTINGS, key
        if tag is not None:
            yield SectionKind.TAG_POSTINGS, tag.encode()


def places_of(rows: Sequence[Row], start: int) -> dict[tuple[SectionKind, bytes], list[int]]:
    """Where each key and tag is, and that what none has is nowhere."""
    found: dict[tuple[SectionKind, bytes], list[int]] = {
        (SectionKind.KEY_POSTINGS, b"none of them"): [],
        (SectionKind.TAG_POSTINGS, b"none"): [],
    }
    for offset, row in enumerate(rows, start):
        for entry in entries_of([row]):
            found.setdefault(entry, []).append(offset)
    return found


def sealed_index(content: bytes, records: int) -> bytes:
    """The index that sealing would write for the same bytes in a file."""
    disk = SimulatedDisk()
    replace_file(disk, "/a.seg", content)
    with contextlib.closing(disk.open("/a.seg")) as file:
        return index_of(log_file(file, HEADER, end=records, limit=len(content)))[0]


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(0, 1_000), st.integers(-1, 51), st.integers(1, 9)
)
def test_a_time_is_found_at_the_moved_offset(times: list[int], start: int, wanted: int, batch: int) -> None:
    rows: list[Row] = [(b"v", None, None, (), time) for time in times]
    with mock.patch.object(prepare, "FRAME_BYTES", 100):
        content, index = prepared_bytes([rows[first : first + batch] for first in range(0, len(rows), batch)])

    found = opened(content, index, start, len(rows)).offset_at_time(wanted)

    assert found == next((start + place for place, time in enumerate(times) if time >= wanted), None)


def test_gaps_of_a_segment_move_with_it() -> None:
    segment = PreparedSegment(HEADER)
    content = b"".join(segment.chunks([encode_rows(numbered(0, 3))]))
    _, footer, entries = segment.index()
    ending = msgspec.structs.replace(footer, end=9)
    index = encode_index(ending, entries, [Gap(3, 9, Reason.SKIPPED)])

    records, gaps = walked(opened(content, index, 100, 9), 101)

    assert [record.offset for record in records] == [101, 102]
    assert gaps == [Gap(103, 109, Reason.SKIPPED)]


def test_an_index_of_other_offsets_is_refused() -> None:
    content, index = prepared_bytes([numbered(0, 3)])
    unmoved = StoredSegment("a.seg", 100, 103, source=lambda: Memory(content), index=lambda: Memory(index))

    with pytest.raises(Corrupt, match=r"a.seg is of \[0, 3\), which does not cover \[100, 103\)"):
        unmoved.read(100, 1)


def test_a_whole_frame_at_the_place_of_another_is_damage() -> None:
    segment = PreparedSegment(HEADER)
    with mock.patch.object(prepare, "FRAME_BYTES", 200):
        head, *frames = segment.chunks([encode_rows(numbered(0, 5)), encode_rows(numbered(5, 10))])
    index = segment.index()[0]

    records, gaps = walked(opened(b"".join([head, *frames[::-1]]), index, 40, 10), 40)

    assert (records, gaps) == ([], [Gap(40, 45, Reason.DAMAGED), Gap(45, 50, Reason.DAMAGED)])


def test_no_flipped_bit_gives_another_record(ledger: Ledger) -> None:
    rows = [*FULL_ROWS, *numbered(3, 6)]
    with mock.patch.object(prepare, "FRAME_BYTES", 300):
        content, index = prepared_bytes([FULL_ROWS, numbered(3, 6)])
    whole = expected(rows, 40)
    outcomes = {"named": 0, "damaged": 0, "named by a look-up": 0}

    for place in range((len(content) + len(index)) * 8):
        flipped = bytearray(content + index)
        flipped[place // 8] ^= 1 << place % 8
        segment = opened(bytes(flipped[: len(content)]), bytes(flipped[len(content) :]), 40, len(rows))
        try:
            records, gaps = walked(segment, 40)
        except ForebayError:
            outcomes["named"] += 1
            continue
        if not gaps:
            assert records == whole, place
            with pytest.raises(Corrupt, match="section"):
                looked_up(segment, rows), segment.totals()
            outcomes["named by a look-up"] += 1
            continue
        missing = {offset for gap in gaps for offset in range(gap.start, gap.stop)}
        assert records == [record for record in whole if record.offset not in missing], place
        assert {gap.reason for gap in gaps} == {Reason.DAMAGED}, place
        outcomes["damaged"] += 1

    assert all(outcomes.values())
    for outcome, count in outcomes.items():
        ledger.count("bit flips", n=count, artefact="prepared segment and index", outcome=outcome)


def test_frames_are_large_and_never_larger_than_one_mebibyte() -> None:
    rng = [1, 900, 30_000, 7]
    small = [encode_rows(numbered(n, n + 1, rng[n % 4])) for n in range(2_000)]
    large = encode_rows(numbered(0, 9_000, 1_000))
    alone = encode_rows([(bytes(3 * FRAME_BYTES), None, None, (), 0)])
    segment = PreparedSegment(HEADER)

    chunks = list(segment.chunks([*small, large, alone, *small[:3]]))

    sizes = [len(chunk) for chunk in chunks[1:]]
    assert [size for size in sizes if size > FRAME_BYTES] == [3 * FRAME_BYTES + HEAD_SIZE + 16]
    assert sum(size < FRAME_BYTES // 2 for size in sizes) <= 3
    assert segment.index()[1].records == 2_000 + 9_000 + 1 + 3


def test_records_are_held_only_until_their_frame_is_full() -> None:
    pulled = 0

    def batches() -> Iterator[ColumnBytes]:
        nonlocal pulled
        for number in range(200):
            pulled += 1
            yield encode_rows(numbered(number * 100, number * 100 + 100, 1_000))

    given_out = 0
    for chunk in PreparedSegment(HEADER).chunks(batches()):
        given_out += len(chunk)
        assert pulled * 100 * 1_000 - given_out < 2 * FRAME_BYTES


def test_a_record_that_no_reader_would_take_is_refused_and_nothing_is_stored() -> None:
    store = SimulatedBlobs()
    with mock.patch.object(prepare, "RECORD_BYTES_MAX", 2 * FRAME_BYTES), pytest.raises(Invalid, match="larger than"):
        written(store, numbered(0, 10), [(bytes(3 * FRAME_BYTES), None, None, (), 0)])

    assert store.contents == {}


def test_a_task_without_records_stores_nothing() -> None:
    store = SimulatedBlobs()

    assert write_segment(store, PLACE, "0-0", [], clock=ManualClock()) is None
    assert store.contents == {}


def test_two_attempts_of_one_task_never_share_a_name() -> None:
    store = SimulatedBlobs()

    first, second = written(store, numbered(0, 5), seed=1), written(store, numbered(0, 5), seed=2)

    assert first.object_key != second.object_key
    assert first.object_key.startswith(f"{TOPIC}_0/loads/load-7/0-0-")
    assert len(store.contents) == 4


FAULTS = [Fault.FAIL_BEFORE, Fault.FAIL_AFTER, Fault.LATE, Fault.DUPLICATE]


@pytest.mark.parametrize(
    ("method", "fault"),
    [*[("upload", fault) for fault in (*FAULTS, Fault.BROKEN)], *[("put_if_absent", fault) for fault in FAULTS]],
)
def test_an_attempt_repeated_after_a_fault_is_whole(fault: Fault, method: str, ledger: Ledger) -> None:
    store = SimulatedBlobs()
    store.inject(fault, method=method)
    clock = ManualClock(seed=3)
    segment = None
    while segment is None:
        try:
            segment = write_segment(store, PLACE, "0-0", [encode_rows(numbered(0, 50))], clock=clock)
        except ForebayError:
            continue
    store.land()

    content, index = store.contents[segment.object_key], store.contents[segment.index_key]
    records, gaps = walked(opened(content, index, 7, 50), 7)
    assert (records, gaps) == (expected(numbered(0, 50), 7), [])
    ledger.count("prepared segments through faults", fault=fault.value, method=method)


def loaded() -> tuple[SimulatedBlobs, LoadManifest, ManifestRef]:
    store = SimulatedBlobs()
    sizes = [(0, 0, 30), (1, 0, 5), (0, 30, 90)]
    segments = [
        (partition, written(store, numbered(start, stop), seed=place))
        for place, (partition, start, stop) in enumerate(sizes)
    ]
    manifest = manifest_of("load-7", TOPIC, segments)
    return store, manifest, write_manifest(store, manifest)


def test_a_load_is_found_again_by_its_manifest() -> None:
    store, manifest, ref = loaded()

    assert read_manifest(store, ref) == manifest
    assert [(shard.partition, shard.records) for shard in manifest.shards] == [(0, 90), (1, 5)]
    assert write_manifest(store, manifest) == ref


def test_a_manifest_that_changed_is_refused(ledger: Ledger) -> None:
    _, _, ref = loaded()
    store, key, content = SimulatedBlobs(), "a.manifest", _ARTEFACTS["load.manifest"]
    sample = ManifestRef(object_key=key, bytes=len(content), content_hash=content_hash([content]).hex())
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        store.upload(key, [bytes(damaged)])
        with pytest.raises(Corrupt, match=f"{key} is damaged"):
            read_manifest(store, sample)
    store.upload(key, [content])
    assert read_manifest(store, sample).load_id == "load-7"
    with pytest.raises(Corrupt, match="at most"):
        read_manifest(store, msgspec.structs.replace(ref, bytes=2**40))
    ledger.count("bit flips", n=len(content), artefact="load manifest")


def test_descriptors_of_a_load_stand_one_behind_the_other_and_the_history_reads_them() -> None:
    store, manifest, _ = loaded()
    metadata = MemoryMetadata()
    metadata.transaction([], [Put(KEYS.state, encode_value(ShardState(incarnation=TOPIC, epoch=4)))])
    standing = LoadStanding(status=LoadStatus.COMMITTED, topic_id=TOPIC)
    metadata.transaction([], [Put(load_key("load-7"), encode_value(standing))])
    catalog = ShardCatalog(metadata, KEYS, TOPIC, clock=ManualClock())
    first = descriptors_of(manifest, 1, 0, epoch=4, store="s", leader="me", created_at=9)
    second = descriptors_of(manifest, 0, 5, epoch=4, store="s", leader="me", created_at=9)
    catalog.extend(4, first)
    catalog.extend(4, second)
    objects = Objects(store)
    history = History(catalog, objects.segment)

    found: list[Record] = []
    while (page := history.read(len(found), 100)).next > len(found):
        assert page.events == []
        found += [record for batch in page.batches for record in batch.records(0)]

    assert [(piece.start, piece.end) for piece in second] == [(5, 35), (35, 95)]
    assert {(piece.header_start, piece.load_id) for piece in (*first, *second)} == {(0, "load-7")}
    assert found == expected([*numbered(0, 5), *numbered(0, 90)], 0)
    assert history.offset_at_time(1_050) == 55
    assert descriptors_of(manifest, 7, 0, epoch=4, store="s", leader="me", created_at=9) == []
    objects.close()


def test_a_load_of_a_thousand_partitions_fits_a_transaction_and_its_descriptors_their_limit() -> None:
    segment = written(SimulatedBlobs(), *[numbered(n, n + 1_000, 1_000) for n in range(0, 100_000, 1_000)])
    manifest = manifest_of("load-7", TOPIC, [(partition, segment) for partition in range(1_000)])
    ref = write_manifest(SimulatedBlobs(), manifest)
    load = offer_of(manifest, ref, namespace="n" * 100, topic="t" * 100, store="s3 bucket/prefix", created_at=1)
    shards = tuple(msgspec.structs.replace(shard, start=2**62) for shard in load.shards)
    stored = encode_value(msgspec.structs.replace(load, status=LoadStatus.COMMITTED, shards=shards))

    (described,) = descriptors_of(manifest, 9, 2**61, epoch=4, store="s3 bucket/prefix", leader="me", created_at=9)

    assert len(stored) < TRANSACTION_BYTES_MAX // 4
    assert decode_value(stored, Load)[0].shards[999].end == 2**62 + 100_000
    assert LoadedShard(partition=0, records=5).end is None
    assert len(segment.sparse) == 64
    assert len(encode_value(described)) < DESCRIPTOR_BYTES_MAX


@pytest.mark.parametrize("name", _ARTEFACTS)
def test_golden_bytes_are_still_written_the_same(name: str) -> None:
    assert _ARTEFACTS[name] == (GOLDEN / name).read_bytes()
    assert {path.name for path in GOLDEN.iterdir()} == set(_ARTEFACTS)


@pytest.mark.parametrize("name", ["prepared.idx", "prepared-lookups.idx"])
def test_golden_segments_are_read_and_looked_up(name: str) -> None:
    rows = [*FULL_ROWS, *ONE_ROW]
    content, index = (GOLDEN / "prepared.seg").read_bytes(), (GOLDEN / name).read_bytes()

    segment = opened(content, index, 9, 4)

    assert walked(segment, 9) == (expected(rows, 9), [])
    assert looked_up(segment, rows) == places_of(rows, 9)
    assert (segment.totals() is None) == (name == "prepared.idx")


def test_golden_files_are_read() -> None:
    load = decode_value((GOLDEN / "load.json").read_bytes(), Load)[0]
    manifest = decode_value((GOLDEN / "load.manifest").read_bytes(), LoadManifest)[0]
    listed = decode_value((GOLDEN / "catalog.manifest").read_bytes(), CatalogManifest)[0].descriptors

    batch = decode_value((GOLDEN / "load-batch.json").read_bytes(), Load)[0]
    sink = decode_value((GOLDEN / "sink.json").read_bytes(), SinkState)[0]

    assert (load.status, load.manifest.bytes) == ("offered", (GOLDEN / "load.manifest").stat().st_size)
    assert (load.sink, batch.sink) == (None, Sink(query_id="8c2e", batch_id=3))
    assert (sink.batch_id, sink.load_id, sink.offered) == (2, "load-6", "load-7")
    assert [(shard.partition, shard.records) for shard in manifest.shards] == [(0, 3), (2, 3)]
    assert [(piece.kind, piece.start, piece.end) for piece in listed] == [("frames", 42, 45), ("gap", 45, 50)]
