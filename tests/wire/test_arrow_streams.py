"""Arrow bodies: every layout is stored right or refused by column and type; none costs more than the limits."""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import Invalid, TooLarge
from forebay.format.columns.rows import ColumnBytes
from forebay.format.frame.batch import batch_of, encode_arrow
from forebay.wire import bodies
from forebay.wire.arrow_streams import MESSAGES_MAX, measure, write_stream
from forebay.wire.limits import BodyLimits

LIMITS = BodyLimits(bytes_max=1024 * 1024, records_max=10_000)
NOW = 1_700_000_000_000
VALUES = [b"a", b"", None, b"longer than twelve bytes", b"a"]
TEXTS = ["a", "", None, "longer than twelve bytes", "a"]
TAGS = ["a", "b", None, "longer than twelve bytes", "a"]
PAIRS = [[("n", b"1"), ("n", None)], [], None, [("m", b"2")], []]
UNION = pa.UnionArray.from_dense(pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array([b"a"])])
PAIR = pa.struct([("key", pa.string()), ("value", pa.binary())])


def stream(batches: list[pa.RecordBatch], compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def batch(**columns: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def flat(columns: ColumnBytes) -> tuple[object, ...]:
    return columns._replace(parts=[b"".join(columns.parts)])


def stored(body: bytes, limits: BodyLimits = LIMITS) -> list[tuple[object, ...]]:
    """What the log would hold of a body, row by row: value, key, tag, headers, timestamp.

    Straight from the buffers of the stream, where that is possible, it is the same to the last byte.
    """
    columns = encode_arrow(bodies.decode_arrow(body, limits), NOW)
    plain = bodies.decode_plain_arrow(body, limits, NOW)
    assert plain is None or flat(plain) == flat(columns)
    found = batch_of(columns, base=0, epoch=1, appended_at=0)
    return [(one.value, one.key, one.tag, one.headers, one.timestamp) for one in found.records(0)]


def _run_ends(kind: pa.DataType) -> pa.Array:
    return pa.RunEndEncodedArray.from_arrays([2, 3, 5], pa.array(["x", None, "y"], kind))


@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
@pytest.mark.parametrize(
    "kind",
    [
        pa.binary(), pa.large_binary(), pa.binary_view(), pa.string(), pa.large_string(), pa.string_view(),
        pa.dictionary(pa.int8(), pa.binary()), pa.dictionary(pa.uint32(), pa.string()),
    ],
    ids=str,
)  # fmt: skip
def test_every_layout_of_bytes_is_stored(kind: pa.DataType, compression: str | None) -> None:
    of = kind.value_type if pa.types.is_dictionary(kind) else kind
    given_values = VALUES if "binary" in str(of) else TEXTS
    value = (
        pa.array(given_values, of).dictionary_encode().cast(kind) if of is not kind else pa.array(given_values, kind)
    )
    rows = stored(stream([batch(value=value, key=value)], compression))

    assert [(row[0], row[1]) for row in rows] == list(zip(VALUES, VALUES, strict=True))


def test_runs_and_fixed_widths_are_stored() -> None:
    rows = stored(stream([batch(value=_run_ends(pa.string()), key=pa.array([b"ab"] * 5, pa.binary(2)))]))

    assert [row[:2] for row in rows] == [(value, b"ab") for value in (b"x", b"x", None, b"y", b"y")]


def test_slices_are_stored_alone() -> None:
    whole = batch(value=pa.array(VALUES), tag=pa.array(TAGS), headers=pa.array(PAIRS, pa.list_(PAIR)))

    assert stored(stream([whole.slice(3, 2)])) == [
        (VALUES[3], None, TAGS[3], (("m", b"2"),), NOW),
        (VALUES[4], None, TAGS[4], (), NOW),
    ]


@pytest.mark.parametrize("kind", [pa.list_(PAIR), pa.large_list(PAIR), pa.map_(pa.string(), pa.binary())], ids=str)
def test_headers_are_lists_or_maps(kind: pa.DataType) -> None:
    rows = stored(stream([batch(value=pa.array(VALUES), headers=pa.array(PAIRS, kind))]))

    assert [row[3] for row in rows] == [tuple(pairs or ()) for pairs in PAIRS]


def test_headers_of_a_fixed_number_are_stored() -> None:
    pairs = pa.array([[("n", b"1")]] * 5, pa.list_(PAIR, 1))

    assert [row[3] for row in stored(stream([batch(value=pa.array(VALUES), headers=pairs)]))] == [(("n", b"1"),)] * 5


@pytest.mark.parametrize(
    ("kind", "given_time", "found"),
    [
        (pa.int64(), 5, 5), (pa.uint8(), 5, 5), (pa.timestamp("ms"), 5, 5), (pa.timestamp("s", "UTC"), 5, 5000),
        (pa.timestamp("ns", "Europe/Berlin"), -1, -1), (pa.timestamp("us"), 5999, 5), (pa.null(), None, NOW),
    ],
    ids=str,
)  # fmt: skip
def test_times_of_every_unit_are_milliseconds(kind: pa.DataType, given_time: int | None, found: int) -> None:
    body = stream([batch(value=pa.array([b"a"]), timestamp=pa.array([given_time], kind))])

    assert stored(body)[0][4] == found


def test_many_batches_are_one_even_with_dictionaries_of_their_own() -> None:
    def part(texts: list[str | None]) -> pa.RecordBatch:
        return batch(value=pa.array(texts, pa.string()).dictionary_encode(), key=pa.array(texts, pa.string()))

    body = stream([part(["a", "b"]), part([]), part(["c", None, "a"])])

    assert [row[0] for row in stored(body)] == [b"a", b"b", b"c", None, b"a"]


def test_columns_that_readers_get_are_accepted_and_others_may_be_missing() -> None:
    whole = batch(
        value=pa.array([b"a"]), partition=pa.array([3], pa.int32()), offset=pa.array([9]), topic=pa.array(["a/b"])
    )

    assert stored(stream([whole])) == [(b"a", None, None, (), NOW)]


@pytest.mark.parametrize("rows", [[], [pa.RecordBatch.from_pydict({"value": pa.array([], pa.binary())})]])
def test_a_stream_without_rows_is_a_batch_without_rows(rows: list[pa.RecordBatch]) -> None:
    body = write_stream([(one, None) for one in rows], pa.schema([("value", pa.binary())]))

    assert bodies.decode_arrow(body, LIMITS).num_rows == 0


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"key": pa.array([b"a"])}, "no column 'value'"),
        ({"value": pa.array([b"a"]), "colour": pa.array([1])}, "unknown column 'colour'"),
        ({"value": pa.array([1])}, "column 'value' is int64"),
        ({"value": pa.array([1.5])}, "column 'value' is double"),
        ({"value": pa.array([b"a"]), "tag": pa.array([b"a"])}, "column 'tag' is binary"),
        ({"value": pa.array([b"a"]), "tag": pa.array([1]).dictionary_encode()}, "column 'tag' is int64"),
        ({"value": pa.array([b"a"]), "timestamp": pa.array(["now"])}, "column 'timestamp' is string"),
        ({"value": pa.array([b"a"]), "timestamp": pa.array([1.5])}, "column 'timestamp' is double"),
        ({"value": pa.array([[b"a"]])}, r"column 'value' is list<"),
        ({"value": pa.array([{"a": 1}])}, r"column 'value' is struct<"),
        ({"value": pa.array([[b"a"]], pa.list_view(pa.binary()))}, r"column 'value' is list_view<"),
        ({"value": pa.array([b"a"]), "headers": pa.array([[1]])}, r"column 'headers' is list<"),
        ({"value": pa.array([b"a"]), "headers": pa.array(["a"])}, r"column 'headers' is string"),
        (
            {"value": pa.array([b"a"]), "headers": pa.array([[(None, b"")]], pa.list_(PAIR))},
            "a header has no name",
        ),
        ({"value": UNION}, "column 'value' is dense_union"),
        (
            {"value": pa.array([b"a"]), "headers": pa.RunEndEncodedArray.from_arrays([1], pa.array([["a"]]))},
            "column 'headers' is run_end_encoded",
        ),
    ],
)  # fmt: skip
def test_other_columns_are_refused_by_name_and_type(columns: dict[str, pa.Array], said: str) -> None:
    with pytest.raises(Invalid, match=said):
        stored(stream([batch(**columns)]))


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())],
    ids=str,
)
@pytest.mark.parametrize("tag", ["", "ä" * 513])
def test_a_tag_that_no_record_may_have_is_refused(kind: pa.DataType, tag: str) -> None:
    of = kind.value_type if pa.types.is_dictionary(kind) else kind
    tags = pa.array(["eu", None, tag], of)
    tags = tags.dictionary_encode() if of is not kind else tags

    with pytest.raises(Invalid, match=f"a tag has {len(tag.encode())} bytes"):
        stored(stream([batch(value=pa.array([b"a"] * 3), tag=tags)]))


@pytest.mark.parametrize("kind", [pa.list_(PAIR), pa.large_list(PAIR), pa.map_(pa.string(), pa.binary())], ids=str)
def test_more_headers_than_a_record_may_have_are_refused(kind: pa.DataType) -> None:
    headers = pa.array([[], [("n", b"")] * 1001], kind)

    with pytest.raises(Invalid, match="1001 headers; allowed: 1000"):
        stored(stream([batch(value=pa.array([b"a"] * 2), headers=headers)]))


def test_a_column_named_twice_is_refused() -> None:
    twice = pa.RecordBatch.from_arrays([pa.array([b"a"]), pa.array([b"b"])], names=["value", "value"])

    with pytest.raises(Invalid, match="used twice"):
        stored(stream([twice]))


# Streams that are taken as they are


TIMES = (pa.int64(), pa.timestamp("ms"), pa.timestamp("ms", "UTC"))


@pytest.mark.parametrize("kind", TIMES, ids=str)
def test_the_buffers_of_a_plain_stream_are_stored_as_they_are(kind: pa.DataType) -> None:
    values, keys = [b"a", b"", b"longer than twelve bytes"], [b"k", b"key", b""]
    rows = batch(timestamp=pa.array([3, 1, 2], kind), key=pa.array(keys), value=pa.array(values))
    ended = stream([rows])
    for body in (ended, ended[:-8], stream([rows.slice(1)]), stream([rows.select(["value"])])):
        assert bodies.decode_plain_arrow(body, LIMITS, NOW) is not None
        assert stored(body)
    assert stored(ended) == [(v, k, None, (), t) for v, k, t in zip(values, keys, (3, 1, 2), strict=True)]
    assert [row[4] for row in stored(stream([rows.select(["value"])]))] == [NOW] * 3


@pytest.mark.parametrize(
    "body",
    [
        stream([batch(value=pa.array([b"a", None]))]),
        stream([batch(value=pa.array(["a"]))]),
        stream([batch(value=pa.array([b"a"]), tag=pa.array(["a"]))]),
        stream([batch(value=pa.array([b"a"]), timestamp=pa.array([1], pa.timestamp("us")))]),
        stream([batch(value=pa.array([b"a"]))] * 2),
        stream([batch(value=pa.array([b"a"]))], "zstd"),
        stream([batch(value=pa.array([], pa.binary()))]),
        stream([batch(value=pa.array([b"a"])).replace_schema_metadata({"m": "x" * 5000})]),
        b"",
    ],
    ids=["null", "text", "tag", "microseconds", "two batches", "compressed", "no rows", "long schema", "nothing"],
)
def test_other_streams_are_read_by_arrow(body: bytes) -> None:
    assert bodies.decode_plain_arrow(body, LIMITS, NOW) is None


def test_a_plain_stream_keeps_to_the_limits() -> None:
    body = stream([batch(value=pa.array([b"aaaa"] * 100))])
    for limits in (BodyLimits(1024 * 1024, 99), BodyLimits(len(body) - 1, 1000)):
        with pytest.raises(TooLarge):
            bodies.decode_plain_arrow(body, limits, NOW)


PLAIN = stream([batch(value=pa.array([b"a", b"bc", b""]), key=pa.array([b"k"] * 3), timestamp=pa.array([1, 2, 3]))])


@settings(max_examples=500)
@given(st.integers(0, len(PLAIN) - 1), st.integers(0, 255), st.integers(0, len(PLAIN) - 1), st.integers(0, 255))
def test_any_two_bytes_of_a_plain_stream_may_be_wrong(first: int, one: int, second: int, other: int) -> None:
    body = bytearray(PLAIN)
    body[first], body[second] = one, other

    plain = bodies.decode_plain_arrow(bytes(body), LIMITS, NOW)
    if plain is not None:
        batch_of(plain, base=0, epoch=1, appended_at=0).records(0)
    try:
        stored(bytes(body))
    except Invalid:
        return


def test_a_plain_stream_that_is_cut_is_not_taken() -> None:
    for body in (PLAIN, stream([batch(value=pa.array([b"a", b"longer than twelve bytes"]))])):
        ends = set(range(len(body))) - {len(body) - 8}
        assert [end for end in ends if bodies.decode_plain_arrow(body[:end], LIMITS, NOW) is not None] == []


# Streams that are not sound


GOOD = stream([batch(value=pa.array(VALUES), key=pa.array(TEXTS), headers=pa.array(PAIRS, pa.list_(PAIR)))])


def test_a_stream_cut_inside_a_message_is_refused() -> None:
    ends = set(range(len(GOOD))) - {len(GOOD) - 8}  # whole but for its end mark, which writers may leave out

    for end in ends:
        try:
            found = bodies.decode_arrow(GOOD[:end], LIMITS)
        except Invalid:
            continue
        assert found.num_rows == 0, end  # cut behind the schema


@pytest.mark.parametrize("trailing", [b"x", bytes(8), GOOD], ids=["byte", "zeros", "stream"])
def test_what_follows_the_end_is_refused(trailing: bytes) -> None:
    with pytest.raises(Invalid, match="follow the end"):
        bodies.decode_arrow(GOOD + trailing, LIMITS)


def test_a_file_is_not_a_stream() -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, pa.schema([("value", pa.binary())])):
        pass

    with pytest.raises(Invalid, match="not a file"):
        bodies.decode_arrow(sink.getvalue().to_pybytes(), LIMITS)


@settings(max_examples=300)
@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255), st.integers(0, len(GOOD) - 1), st.integers(0, 255))
def test_any_two_bytes_may_be_wrong(first: int, one: int, second: int, other: int) -> None:
    body = bytearray(GOOD)
    body[first], body[second] = one, other

    try:
        stored(bytes(body))
    except Invalid:
        return


@settings(max_examples=100)
@given(st.binary(max_size=200))
def test_noise_is_invalid_and_nothing_else(noise: bytes) -> None:
    for body in (noise, b"\xff\xff\xff\xff" + noise, GOOD[:100] + noise):
        try:
            bodies.decode_arrow(body, LIMITS)
        except Invalid:
            continue


def test_offsets_that_go_backwards_are_refused() -> None:
    offsets, content = pa.py_buffer(struct.pack("<4i", 0, 5, 2, 6)), pa.py_buffer(b"abcdef")
    wrong = pa.Array.from_buffers(pa.binary(), 3, [None, offsets, content])

    with pytest.raises(Invalid, match="not a sound Arrow"):
        stored(stream([batch(value=wrong)]))


def test_a_text_that_is_no_utf8_is_refused() -> None:
    wrong = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(struct.pack("<2i", 0, 1)), pa.py_buffer(b"\xff")])

    with pytest.raises(Invalid, match="UTF8"):
        stored(stream([batch(value=pa.array([b"a"]), tag=wrong)]))


# Small streams that become large


def test_what_a_stream_becomes_is_measured_before_it_is_read() -> None:
    plain = stream([batch(value=pa.array([bytes(100_000)] * 3))])
    packed = stream([batch(value=pa.array([bytes(100_000)] * 3))], "zstd")

    assert measure(plain).rows == measure(packed).rows == 3
    assert 300_000 < measure(plain).bytes < 301_000
    assert len(packed) < 2000 and measure(packed).bytes > 300_000


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_compressed_buffers_are_limited_by_what_they_become(compression: str) -> None:
    bomb = stream([batch(value=pa.array([bytes(64 * 1024 * 1024)]))], compression)
    before = pa.total_allocated_bytes()

    with pytest.raises(TooLarge):
        bodies.decode_arrow(bomb, LIMITS)
    assert pa.total_allocated_bytes() - before < LIMITS.bytes_max


def test_a_buffer_that_claims_to_become_huge_is_refused() -> None:
    body = bytearray(stream([batch(value=pa.array([bytes(1000)]))], "zstd"))
    claim = struct.pack("<q", 1000)
    place = bytes(body).rindex(claim)
    body[place : place + 8] = struct.pack("<q", 2**60)

    with pytest.raises(TooLarge):
        bodies.decode_arrow(bytes(body), LIMITS)


def _huge_columns() -> dict[str, dict[str, pa.Array]]:
    large, rows = b"x" * 100_000, 5000
    small = pa.array([b""] * rows)
    index = pa.array(np.zeros(rows, dtype=np.int8))
    runs = pa.RunEndEncodedArray.from_arrays([rows], pa.array([large]))
    view = struct.pack("<i4sii", len(large), b"xxxx", 0, 0)
    views = pa.Array.from_buffers(
        pa.binary_view(), rows, [None, pa.py_buffer(view * rows), pa.py_buffer(large)]
    )  # fmt: skip
    nothing = pa.struct([("key", pa.null()), ("value", pa.null())])
    wide = pa.Array.from_buffers(pa.list_(nothing, 1_000_000), 2, [None], children=[
        pa.Array.from_buffers(nothing, 2_000_000, [None], children=[pa.nulls(2_000_000), pa.nulls(2_000_000)])
    ])  # fmt: skip
    return {
        "dictionary": {"value": pa.DictionaryArray.from_arrays(index, pa.array([large]))},
        "key": {"value": small, "key": pa.DictionaryArray.from_arrays(index, pa.array([large]))},
        "tag": {"value": small, "tag": pa.DictionaryArray.from_arrays(index, pa.array([large.decode()]))},
        "runs": {"value": runs},
        "views": {"value": views},
        "wide lists of nothing": {"value": pa.array([b"", b""]), "headers": wide},
    }


@pytest.mark.parametrize(("name", "columns"), _huge_columns().items(), ids=list(_huge_columns()))
def test_entries_that_repeat_are_counted(name: str, columns: dict[str, pa.Array]) -> None:
    body = stream([batch(**columns)])
    assert len(body) < LIMITS.bytes_max
    before = pa.total_allocated_bytes()

    with pytest.raises(TooLarge):
        stored(body)
    assert pa.total_allocated_bytes() - before < LIMITS.bytes_max


def test_rows_without_bytes_are_limited() -> None:
    with pytest.raises(TooLarge, match="records in one body"):
        bodies.decode_arrow(stream([batch(value=pa.nulls(LIMITS.records_max + 1))]), LIMITS)


def test_messages_are_limited() -> None:
    schema = pa.schema([("value", pa.binary())])
    empty = pa.RecordBatch.from_pydict({"value": pa.array([], pa.binary())})

    with pytest.raises(TooLarge, match="messages"):
        bodies.decode_arrow(write_stream([(empty, None)] * MESSAGES_MAX, schema), BodyLimits(64 * 1024 * 1024, 10))
