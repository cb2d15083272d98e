"""Parquet segments: what went in comes out, by page, by time, by key and by tag; damage is told, never served."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Final

import hypothesis
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import strategies as st

from forebay.blobs import Stat
from forebay.columnar import HeldGroups, ParquetSegment
from forebay.errors import Corrupt, Unsupported
from forebay.format.columns.rows import Row, encode_rows
from forebay.format.control.offsets import OffsetSet
from forebay.format.files.segment import index_name
from forebay.format.frame.batch import batch_of
from forebay.format.index.hashing import hash_bytes, hash_text
from forebay.format.index.sections import SectionKind
from forebay.format.parquet import file as parquet_format
from forebay.format.parquet.file import SCHEMA, TIME_MAX, ParquetFacts, encode_parquet, rows_of
from forebay.format.parquet.rowgroups import RowGroup, walk
from forebay.history import SPOT, Objects
from forebay.records import Bytes, Gap, Reason, Record
from forebay.testing.simulated.blobs import SimulatedBlobs
from tests.columnar.golden_files import GOLDEN, NAMES
from tests.columnar.rows import FACTS, KEY, LOST, SPARSE, Appended, expected, in_memory, opened, seen, stored
from tests.format.samples import HEADERS
from tests.support.soak import SOAK

STEP: Final = 1 if SOAK else 37
TIME: Final = st.integers(-TIME_MAX, TIME_MAX)
KEYS: Final = st.none() | st.sampled_from([b"", b"a", b"bb"]) | st.binary(max_size=4)
TAGS: Final = st.none() | st.sampled_from(["", "eu", "us"])
ROW: Final[st.SearchStrategy[Row]] = st.tuples(st.none() | st.binary(max_size=20), KEYS, TAGS, HEADERS, TIME)


@pytest.fixture
def store() -> SimulatedBlobs:
    return SimulatedBlobs()


@contextlib.contextmanager
def segment_of(
    store: SimulatedBlobs, appends: list[Appended], start: int, end: int, *gaps: Gap
) -> Iterator[ParquetSegment]:
    objects = Objects(store, read_ahead_bytes=512)
    try:
        yield opened(objects, stored(store, appends, start, end, gaps))
    finally:
        objects.close()


@st.composite
def drawn(draw: st.DrawFn) -> tuple[list[Appended], int, int]:
    """Appends with holes between them, and the range of a segment around them."""
    start = draw(st.integers(0, 2**40))
    at, appends = start, []
    for rows in draw(st.lists(st.lists(ROW, min_size=1, max_size=6), max_size=8)):
        at += draw(st.sampled_from([0, 0, 1, 5]))
        appends.append(Appended(at, rows, at=draw(st.integers(0, 3)), epoch=draw(st.integers(1, 2))))
        at += len(rows)
    return appends, start, at + draw(st.integers(0 if at > start else 1, 3))


@pytest.mark.slow
@pytest.mark.timeout(900)  # far more than needed: a soak tries every byte
@hypothesis.settings(max_examples=1_000 if SOAK else 20)
@hypothesis.given(drawn(), st.sampled_from([1, 30, 1 << 20]), st.sampled_from([1, 100, 1 << 20]))
def test_rows_come_back_as_they_were_with_holes_between_them(
    made: tuple[list[Appended], int, int], page_bytes: int, group_bytes: int
) -> None:
    appends, start, end = made
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet_format, "GROUP_BYTES", group_bytes)
        with segment_of(SimulatedBlobs(), appends, start, end) as segment:
            assert seen(segment, start, page_bytes) == expected(appends, start, end)
            _look_up(segment, [record for append in appends for record in append.records()], start, end)
            wanted = {offset: (append.at, append.epoch) for append in appends for offset in _offsets(append)}
            found: dict[int, tuple[int, int]] = {}
            for batch in segment.read(start, 1 << 20).batches:
                at = [part.at for part in batch.appended() for _ in range(part.records)]
                found.update(zip(range(batch.base, batch.end), ((time, batch.epoch) for time in at), strict=True))
            assert found == wanted


def _offsets(append: Appended) -> range:
    return range(append.base, append.end)


def _look_up(segment: ParquetSegment, records: list[Record], start: int, end: int) -> None:
    by_key, by_tag = SectionKind.KEY_POSTINGS, SectionKind.TAG_POSTINGS
    for timestamp in {record.timestamp for record in records} | {0, TIME_MAX}:
        wanted = next((record.offset for record in records if record.timestamp >= timestamp), None)
        assert segment.offset_at_time(timestamp) == wanted
    for key in {record.key for record in records if record.key is not None}:
        found = [int(o) for piece in segment.find(by_key, hash_bytes(key)) for o in piece]
        assert found == [record.offset for record in records if record.key == key]
        newest = next(iter(segment.find_backwards(by_key, hash_bytes(key))))
        assert int(newest[-1]) == found[-1]
    for tag in {record.tag for record in records if record.tag is not None}:
        found = [int(o) for piece in segment.find(by_tag, hash_text(tag)) for o in piece]
        assert found == [record.offset for record in records if record.tag == tag]
    assert segment.held(start, end) == OffsetSet.of([record.offset for record in records])
    for record in records:
        assert segment.read_one(record.offset).batches[0].records(0) == [record]


def test_holes_keep_their_reasons_and_a_spot_reads_one_record(store: SimulatedBlobs) -> None:
    with segment_of(store, SPARSE, 10, 25, LOST) as segment:
        assert seen(segment, 10, 1 << 20) == expected(SPARSE, 10, 25, [LOST])
        assert seen(segment, 17, SPOT) == expected(SPARSE, 17, 25, [LOST])
        assert segment.read(22, SPOT).events == [Gap(22, 25, Reason.DELETED)]
        assert segment.held(0, 100) == OffsetSet.of([12, 14, 15, 20])


def test_totals_are_those_of_the_records(store: SimulatedBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_format, "GROUP_BYTES", 1)
    with segment_of(store, SPARSE, 10, 25) as segment:
        totals = segment.totals()
        batches = [append.batch() for append in SPARSE]
        assert totals is not None
        # A row each: the second append has two.
        sizes = np.concatenate([batch.sizes() for batch in batches])
        assert totals.tolist() == np.cumsum(sizes).tolist()


def test_columns_are_read_alone(store: SimulatedBlobs) -> None:
    stored(store, SPARSE, 10, 25)
    content = store.contents[KEY]
    segment, source = in_memory(content, store.contents[index_name(KEY)], 10, 25)

    (table,) = segment.tables(10, 25, ["offset", "producer"])
    (values,) = segment.tables(13, 20, ["value", "timestamp", "headers"])

    assert table.to_pydict() == {"offset": [12, 14, 15, 20], "producer": [-2, None, None, 9]}
    assert values.column("value").to_pylist() == [None, b""]
    assert 0 < source.read < len(content) // 4


def test_other_engines_read_it_as_plain_parquet(store: SimulatedBlobs) -> None:
    with segment_of(store, SPARSE, 10, 25):
        content = store.contents[KEY]
        table = pq.read_table(pa.BufferReader(content))

    assert table.schema.equals(SCHEMA)
    assert table.column("offset").to_pylist() == [12, 14, 15, 20]
    column = pq.read_metadata(pa.BufferReader(content)).row_group(0).column(2)
    assert column.bloom_filter_offset and column.statistics.has_min_max and column.compression == "ZSTD"


@pytest.mark.parametrize("repeats", [1, 9, 10, 90])
def test_keys_have_a_dictionary_only_where_they_repeat(repeats: int) -> None:
    """Who looks for one key reads the whole dictionary first: Spark took longer than for the records."""
    rows = [(b"v", b"key-%d" % (number // repeats), None, (), number) for number in range(90)]
    batch = batch_of(encode_rows(rows), base=0, epoch=1, appended_at=0)
    facts = ParquetFacts(topic_id="t", partition=0, start=0, end=90, epoch=1)

    content = b"".join(encode_parquet([pa.Table.from_batches([rows_of(batch, 0)])], lambda: facts))

    column = pq.read_metadata(pa.BufferReader(content)).row_group(0).column(2)
    assert column.path_in_schema == "key" and column.has_dictionary_page == (repeats >= 10)


def test_time_that_parquet_cannot_hold_is_refused() -> None:
    batch = batch_of(encode_rows([(b"v", None, None, (), TIME_MAX + 1)]), base=0, epoch=1, appended_at=0)

    with pytest.raises(Unsupported, match="time that Parquet cannot hold"):
        rows_of(batch, 0)


@pytest.mark.slow
@pytest.mark.timeout(900)  # far more than needed: a soak tries every byte
def test_flipped_bit_is_told_and_never_served(store: SimulatedBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_format, "GROUP_BYTES", 1)
    appends = [Appended(10, [(b"value %d" % n, b"k%d" % (n % 3), "t", (), 1_000 + n) for n in range(3)])]
    stored(store, appends, 10, 13)
    content, index = store.contents[KEY], store.contents[index_name(KEY)]
    wanted = {record.offset: record for record in expected(appends, 10, 13) if isinstance(record, Record)}
    verdicts = set()
    for place in range(0, len(content), STEP):
        verdicts.add(_verdict(_flipped(content, place), index, wanted))
    assert verdicts == {"intact", "damaged"}
    for place in range(0, len(index), STEP):
        verdicts.add(_verdict(content, _flipped(index, place), wanted))
    assert verdicts == {"intact", "damaged", "corrupt"}


def _flipped(content: bytes, place: int) -> bytes:
    broken = bytearray(content)
    broken[place] ^= 1 << (place % 8)
    return bytes(broken)


def _verdict(content: bytes, index: bytes, wanted: dict[int, Record]) -> str:
    segment, _ = in_memory(content, index, 10, 13)
    try:
        found = seen(segment, 10, 1 << 20)
    except Corrupt:
        return "corrupt"
    damaged = [gap for gap in found if isinstance(gap, Gap)]
    assert {gap.reason for gap in damaged} <= {Reason.DAMAGED}
    assert all(wanted[record.offset] == record for record in found if isinstance(record, Record))
    return "damaged" if damaged else "intact"


class _Forgetful(SimulatedBlobs):
    """Keeps the first object that it is given, whatever comes later under its name."""

    def upload(self, key: str, source: Iterable[Bytes]) -> Stat:
        content = b"".join(bytes(piece) for piece in source)
        return self.put_if_absent(key, content).stat


def test_store_that_keeps_other_bytes_is_found_out() -> None:
    store = _Forgetful()
    stored(store, SPARSE[:2], 10, 25)

    with pytest.raises(Corrupt, match="does not hold the rows that were written"):
        stored(store, SPARSE, 10, 25)


@pytest.mark.parametrize("name", NAMES)
def test_golden_segment_reads_as_it_was_written(name: str) -> None:
    content, index = (GOLDEN / name).read_bytes(), (GOLDEN / index_name(name)).read_bytes()
    segment, _ = in_memory(content, index, 10, 25)

    walked = walk(lambda length, position: content[position : position + length], len(content), "golden")

    assert seen(segment, 10, 1 << 20) == expected(SPARSE, 10, 25, [LOST])
    assert walked.content == index, "an index is worked out from the bytes alone, for ever the same"
    assert walked.facts == FACTS
    assert segment.window() == FACTS.window


def test_row_groups_follow_each_other_in_the_file(store: SimulatedBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_format, "GROUP_BYTES", 1)
    with segment_of(store, SPARSE, 10, 25) as segment:
        entries = segment.index().entries
        assert all(a["position"] + a["length"] == b["position"] for a, b in pairwise(entries))
        assert entries["count"].tolist() == [1, 1, 1, 1]


def test_decoded_row_groups_are_bounded_whatever_the_number_of_segments(store: SimulatedBlobs) -> None:
    objects = Objects(store, read_ahead_bytes=512)
    segments = [
        opened(objects, stored(store, SPARSE, 10, 25, key=KEY.replace("one", f"{number}"))) for number in range(5)
    ]
    (one,) = [RowGroup(table) for table in segments[0].tables(10, 25)]
    held = HeldGroups(2 * one.bytes)

    for segment in segments:
        held.put(segment, 0, one)
    held.put(segments[3], 1, one)

    assert [held.get(segment, 0) is one for segment in segments] == [False, False, False, False, True]
    assert held.get(segments[3], 1) is one
    held.forget(segments[4])
    held.put(segments[0], 0, one)
    assert held.get(segments[3], 1) is one and held.get(segments[0], 0) is one
    objects.close()
