"""Pages as answers: each format carries the same records, gaps and marks, and a damaged answer is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from forebay.errors import Unavailable, UnsupportedFormat
from forebay.format.columns.arrow import ARROW_SCHEMA
from forebay.format.columns.rows import Columns, encode_columns
from forebay.format.frame.batch import Batch, batch_of
from forebay.records import Gap, Headers, Reason, RecordPage
from forebay.wire.answers import (
    MERGED_ROWS,
    ArrowPage,
    BatchPage,
    PageMarks,
    batch_page_items,
    decode_page_arrow,
    decode_page_frames,
    decode_page_json,
    decode_page_ndjson,
    encode_page_arrow,
    encode_page_frames,
    encode_page_json,
    encode_page_ndjson,
)
from forebay.wire.items import item_of
from forebay.wire.limits import BodyLimits

PARTITION = 3
LIMITS = BodyLimits(1024 * 1024, 100_000)
CONTENT = st.none() | st.binary(max_size=20) | st.text(max_size=10).map(str.encode)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
HEADERS = st.lists(st.tuples(TEXT, CONTENT), max_size=3).map(tuple)
ROW = st.tuples(CONTENT, CONTENT, st.none() | TEXT.filter(bool), HEADERS, st.integers(-(2**62), 2**62))
Row = tuple[bytes | None, bytes | None, str | None, Headers, int]


def batch(base: int, rows: list[Row]) -> Batch:
    values, keys, tags, headers, stamps = zip(*rows, strict=True)
    return batch_of(encode_columns(Columns(values, stamps, keys, tags, headers)), base=base, epoch=1, appended_at=0)


@st.composite
def pages(draw: st.DrawFn) -> BatchPage:
    """Batches and gaps one behind the other, with silent jumps where records were deleted."""
    offset = draw(st.integers(0, 2**40))
    batches: list[Batch] = []
    gaps: list[Gap] = []
    for _ in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(["batch", "batch", "gap", "deleted"]))
        if kind == "batch":
            batches.append(batch(offset, draw(st.lists(ROW, min_size=1, max_size=4))))
            offset = batches[-1].end
        else:
            stop = offset + draw(st.integers(1, 1000))
            if kind == "gap":
                gaps.append(Gap(offset, stop, draw(st.sampled_from(Reason))))
            offset = stop
    head = offset + draw(st.integers(0, 9))
    return BatchPage(PARTITION, batches, gaps, PageMarks(offset, head, draw(st.integers(0, offset)), 0))


def read_arrow(body: bytes, marks: PageMarks) -> ArrowPage:
    return decode_page_arrow(body, marks, LIMITS)


def table(batches: Sequence[pa.RecordBatch]) -> pa.Table:
    return pa.Table.from_batches(batches, ARROW_SCHEMA).combine_chunks()


@settings(max_examples=50)
@given(pages())
def test_every_format_carries_the_same_page(page: BatchPage) -> None:
    expected = page.records()
    items = batch_page_items(page)

    assert decode_page_json(encode_page_json(items, page.marks)) == expected
    assert decode_page_ndjson(encode_page_ndjson(items), page.marks) == expected
    assert decode_page_frames(encode_page_frames(page)).records() == expected
    found = read_arrow(encode_page_arrow(page), page.marks)
    assert (found.gaps, found.marks) == (page.gaps, page.marks)
    assert table(found.batches).equals(table([one.to_arrow(PARTITION) for one in page.batches]))


@settings(max_examples=50)
@given(pages())
def test_items_are_the_same_from_batches_and_from_records(page: BatchPage) -> None:
    one_by_one = [item_of(record) for record in page.records().records]

    assert one_by_one == [item for item in batch_page_items(page) if item.gap is UNSET]


@settings(max_examples=50)
@given(pages())
def test_items_stand_in_order(page: BatchPage) -> None:
    items = [json.loads(line) for line in encode_page_ndjson(batch_page_items(page)).splitlines()]
    places = [item["gap"]["start"] if "gap" in item else item["offset"] for item in items]

    assert all(one < other for one, other in pairwise(places))


def test_the_json_of_a_page_is_the_one_of_the_contract() -> None:
    page = BatchPage(0, [batch(7, [(b"a", None, None, (), 5)])], [Gap(8, 9, Reason.TTL)], PageMarks(9, 12, 2, 1))

    assert json.loads(encode_page_json(batch_page_items(page), page.marks)) == {
        "records": [
            {"partition": 0, "offset": 7, "timestamp": 5, "value": "a"},
            {"gap": {"partition": 0, "start": 8, "stop": 9, "reason": "ttl"}},
        ],
        "next": 9, "head": 12, "earliest": 2, "evict_floor": 1, "caught_up": False,
    }  # fmt: skip


def test_the_standing_is_carried_by_headers() -> None:
    marks = PageMarks(9, 12, 2, 1)

    assert marks.headers() == {
        "forebay-next": "9", "forebay-head": "12", "forebay-earliest": "2", "forebay-evict-floor": "1",
        "forebay-caught-up": "false",
    }  # fmt: skip
    assert PageMarks.of_headers({**marks.headers(), "date": "today"}) == marks
    assert PageMarks(12, 12, 0, 0).headers()["forebay-caught-up"] == "true"


@pytest.mark.parametrize("headers", [{}, {"forebay-next": "x", "forebay-head": "1"}])
def test_an_answer_without_its_standing_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(Unavailable):
        PageMarks.of_headers(headers)


def test_small_batches_travel_together_and_large_ones_as_they_are() -> None:
    single = [batch(offset, [(b"a", None, None, (), 5)]) for offset in range(200)]
    large = batch(200, [(b"a", b"k", "t", (), 5)] * MERGED_ROWS)
    apart = [batch(10_000, [(b"b", None, None, (), 5)]), batch(10_002, [(b"c", None, None, (), 5)])]
    page = BatchPage(0, [*single, large, *apart], [], PageMarks(10_003, 10_003, 0, 0))

    assert [one.count for one in decode_page_frames(encode_page_frames(page)).batches] == [200, MERGED_ROWS, 1, 1]
    assert [one.num_rows for one in read_arrow(encode_page_arrow(page), page.marks).batches] == [
        200, MERGED_ROWS, 1, 1,
    ]  # fmt: skip
    assert decode_page_frames(encode_page_frames(page)).records() == page.records()


def test_parts_of_batches_are_sent_alone() -> None:
    whole = batch(0, [(b"%d" % n, b"k", "t", (("a", b"%d" % n),), n) for n in range(500)])
    page = BatchPage(0, [whole.slice(100, 103)], [], PageMarks(103, 500, 0, 0))
    body = encode_page_frames(page)

    assert decode_page_frames(body).records() == page.records()
    assert len(body) < 400


# Answers that are not sound


PAGE = BatchPage(
    0,
    [batch(7, [(b"a", b"k", "t", (), 5), (None, None, None, (), 6)])],
    [Gap(9, 11, Reason.LOST)],
    PageMarks(11, 12, 2, 1),
)
FRAMES = encode_page_frames(PAGE)


def test_frames_cut_anywhere_are_refused() -> None:
    for end in range(len(FRAMES)):
        with pytest.raises(Unavailable):
            decode_page_frames(FRAMES[:end])
    with pytest.raises(Unavailable):
        decode_page_frames(FRAMES + bytes(8))


def test_frames_with_any_byte_changed_are_refused() -> None:
    for place in range(len(FRAMES)):
        body = bytearray(FRAMES)
        body[place] ^= 0x40
        with pytest.raises((Unavailable, UnsupportedFormat)):
            decode_page_frames(bytes(body))


Reading = Callable[[bytes], RecordPage | ArrowPage]
READS: list[Reading] = [
    decode_page_json,
    lambda body: decode_page_ndjson(body, PAGE.marks),
    lambda body: read_arrow(body, PAGE.marks),
]


@pytest.mark.parametrize("read", READS, ids=["json", "ndjson", "arrow"])
@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        b"{",
        b"[" * 100_000,
        b"\xff",
        b'{"value":"a"}',
        b'{"gap":{"partition":0,"start":0,"stop":1,"reason":"?"}}',
    ],
)
def test_an_answer_of_another_server_is_refused(read: Reading, body: bytes) -> None:
    with pytest.raises(Unavailable):
        read(body)


def test_fields_of_a_newer_broker_do_not_matter_in_a_page() -> None:
    body = encode_page_json(batch_page_items(PAGE), PAGE.marks)

    assert decode_page_json(body[:-1] + b',"colour":"blue"}') == PAGE.records()
