"""Rows on their way into segments: where each goes, what is refused, and that none is lost or moved on the way."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import Invalid
from forebay.partitioning import partition_of_key
from forebay.records import Record
from forebay.spark.writing.rows import Part, check_columns, parts_of
from forebay.spark.writing.staging import WAITING_BYTES_MAX, StagedSegment, StoreWriter, Task, stage
from forebay.testing.simulated.blobs import SimulatedBlobs
from forebay.testing.simulated.clock import ManualClock
from tests.history.loads import opened, walked

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
SCHEMA = pa.schema(
    [
        ("value", pa.binary()),
        ("key", pa.binary()),
        ("tag", pa.string()),
        ("headers", HEADERS),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("partition", pa.int32()),
    ]
)
TOPIC_ID = "ab" * 16
KEYS = st.none() | st.binary(max_size=12)


def _rows(keys: list[bytes | None], partitions: list[int | None]) -> pa.RecordBatch:
    values = [b"%d" % number for number in range(len(keys))]
    schema = pa.schema([SCHEMA.field(name) for name in ("value", "key", "partition")])
    return pa.record_batch([pa.array(values), pa.array(keys, pa.binary()), pa.array(partitions, pa.int32())], schema)


def _values(parts: list[Part]) -> dict[int, list[bytes]]:
    return {part.partition: part.rows.column("value").to_pylist() for part in parts}


@given(st.lists(st.tuples(KEYS, st.none() | st.integers(0, 2)), min_size=1, max_size=40), st.integers(0, 5), st.data())
def test_each_row_goes_where_an_append_would_put_it(
    drawn: list[tuple[bytes | None, int | None]], turn: int, data: st.DataObject
) -> None:
    rows = _rows([key for key, _ in drawn], [partition for _, partition in drawn])
    first = data.draw(st.integers(0, len(drawn) - 1))
    expected = defaultdict(list)
    for number, (key, partition) in list(enumerate(drawn))[first:]:
        by_key = turn % 3 if key is None else partition_of_key(key, 3)
        expected[by_key if partition is None else partition].append(b"%d" % number)

    assert _values(list(parts_of(rows.slice(first), 3, turn))) == expected


@pytest.mark.parametrize("kind", [pa.string(), pa.large_binary(), pa.large_string()])
def test_keys_of_any_type_hash_by_their_bytes(kind: pa.DataType) -> None:
    keys = [f"key-{number}é" for number in range(50)]
    rows = pa.record_batch(
        [pa.array(keys, kind) if "string" in str(kind) else pa.array(keys).cast(kind)] * 2, ["key", "value"]
    )

    for part in parts_of(rows, 7, 0):
        found = part.rows.column("key").to_pylist()
        assert {partition_of_key(k.encode() if isinstance(k, str) else k, 7) for k in found} == {part.partition}


@pytest.mark.parametrize(
    ("column", "kind", "value", "message"),
    [
        ("partition", pa.int32(), 3, "holds 3: the topic has 0 to 2; null leaves the choice"),
        ("partition", pa.int32(), -1, "holds -1: the topic has 0 to 2"),
        ("tag", pa.string(), "", "a tag has 0 bytes; allowed: 1 to 1024"),
        ("tag", pa.string(), "é" * 513, "a tag has 1026 bytes"),
        ("headers", HEADERS, [{"key": "k", "value": b""}] * 1001, "a record has 1001 headers; allowed: 1000"),
        ("timestamp", pa.int64(), 2**63 - 1, "a timestamp is 9223372036854775807; allowed"),
    ],
)
def test_rows_that_no_topic_takes_are_refused(column: str, kind: pa.DataType, value: Any, message: str) -> None:
    rows = pa.record_batch([pa.array([b"v"] * 3), pa.array([None, value, None], kind)], ["value", column])

    with pytest.raises(Invalid, match=message):
        _staged(_task(partitions=3), [rows])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"key": "binary"}, 'there is no column "value", only key: make one'),
        ({}, "only none at all"),
        ({"value": "binary", "topic": "string"}, r'one write goes into one topic.*\.drop\("topic"\)'),
        ({"value": "binary", "offset": "bigint"}, r'gives new offsets.*\.drop\("offset"\)'),
        ({"value": "binary", "colour": "string"}, 'a column "colour" cannot be written: the columns are value, key'),
        ({"value": "int"}, 'column "value" is int: it must be binary or string; cast it'),
        ({"value": "binary", "partition": "bigint"}, 'column "partition" is bigint: it must be int'),
        ({"value": "binary", "timestamp": "bigint"}, 'column "timestamp" is bigint: it must be timestamp'),
        ({"value": "binary", "headers": "map<string,binary>"}, 'column "headers" is map'),
    ],
)
def test_columns_that_cannot_be_written_are_refused_by_name(columns: dict[str, str], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        check_columns(list(columns.items()))


def test_a_column_that_comes_twice_is_refused() -> None:
    with pytest.raises(Invalid, match='two columns "value"'):
        check_columns([("value", "binary"), ("value", "binary")])


def _task(number: int = 0, partitions: int = 2, zstd_level: int | None = None) -> Task:
    return Task(
        load_id="load", topic_id=TOPIC_ID, partitions=partitions, zstd_level=zstd_level, number=number, attempt=7
    )


def _staged(
    task: Task,
    rows: list[pa.RecordBatch],
    blobs: SimulatedBlobs | None = None,
    clock: ManualClock | None = None,
    bytes_max: int = WAITING_BYTES_MAX,
) -> list[StagedSegment]:
    return stage(StoreWriter(blobs or SimulatedBlobs(), task, clock or ManualClock()), task, rows, bytes_max=bytes_max)


def _stored(blobs: SimulatedBlobs, staged: list[StagedSegment]) -> dict[int, list[Record]]:
    found: dict[int, list[Record]] = defaultdict(list)
    for partition, segment in ((one.partition, one.segment) for one in staged):
        content, index = blobs.contents[segment.object_key], blobs.contents[segment.index_key]
        found[partition] += walked(opened(content, index, 0, segment.records), 0)[0]
    return found


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.tuples(KEYS, KEYS), min_size=0, max_size=30), max_size=8),
    st.sampled_from([1, 300, 10**9]),
    st.sampled_from([None, 1]),
)
def test_segments_hold_all_rows_in_order_however_little_memory_there_is(
    batches: list[list[tuple[bytes | None, bytes | None]]], bytes_max: int, zstd_level: int | None
) -> None:
    blobs, clock = SimulatedBlobs(), ManualClock()
    schema = pa.schema([SCHEMA.field("value"), SCHEMA.field("key")])
    rows = [
        pa.record_batch(
            [pa.array([v for v, _ in batch], pa.binary()), pa.array([k for _, k in batch], pa.binary())], schema
        )
        for batch in batches
    ]

    staged = _staged(_task(zstd_level=zstd_level), rows, blobs, clock, bytes_max)

    expected: dict[int, list[tuple[bytes | None, bytes | None]]] = defaultdict(list)
    for turn, batch in enumerate(batches):
        for value, key in batch:
            expected[turn % 2 if key is None else partition_of_key(key, 2)].append((value, key))
    stored = _stored(blobs, staged)
    assert {p: [(r.value, r.key) for r in records] for p, records in stored.items()} == expected
    assert all("/loads/load/0-7-" in one.segment.object_key for one in staged)


def test_every_column_is_kept() -> None:
    blobs, clock = SimulatedBlobs(), ManualClock()
    headers = [[{"key": "a", "value": b"1"}, {"key": "a", "value": None}], [], None]
    columns = [
        [b"v", None, b""],
        [b"k", None, b""],
        ["eu", None, "é"],
        headers,
        [1_700_000_000_123_456, None, 0],
        [1, 1, 1],
    ]
    rows = pa.record_batch([pa.array(c, field.type) for c, field in zip(columns, SCHEMA, strict=True)], SCHEMA)

    (records,) = _stored(blobs, _staged(_task(), [rows], blobs, clock)).values()

    assert [(r.value, r.key, r.tag, r.headers, r.timestamp) for r in records] == [
        (b"v", b"k", "eu", (("a", b"1"), ("a", None)), 1_700_000_000_123),
        (None, None, None, (), clock.now_ms()),
        (b"", b"", "é", (), 0),
    ]


def test_a_record_that_no_frame_takes_is_refused() -> None:
    rows = pa.record_batch([pa.array([b"v", b"x" * (64 * 1024 * 1024)])], ["value"])

    with pytest.raises(Invalid, match=r"a record of \d+ bytes is larger than \d+: leave it out"):
        _staged(_task(), [rows])


def test_small_tasks_spread_rows_without_keys() -> None:
    rows = pa.record_batch([pa.array([b"v"])], ["value"])

    staged = [_staged(_task(number), [rows])[0] for number in range(4)]

    assert [one.partition for one in staged] == [0, 1, 0, 1]
