"""A record as JSON: the shape that the command line and HTTP share."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import Invalid
from forebay.format.columns.rows import Columns, encode_columns
from forebay.format.frame.batch import Batch, batch_of
from forebay.records import Gap, Headers, Reason, Record
from forebay.wire.items import (
    GapItem,
    RecordColumns,
    RecordItem,
    columns_items,
    columns_of,
    item_of,
    items_of,
    parse_item,
    plain_item,
    record_of,
)

NOW = 1_700_000_000_000
CONTENT = st.none() | st.binary(max_size=20) | st.text(max_size=10).map(str.encode)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
HEADERS = st.lists(st.tuples(TEXT, CONTENT), max_size=3).map(tuple)
TAG = st.none() | TEXT.filter(bool)
TIME = st.integers(-(2**62), 2**62)
ROW = st.tuples(CONTENT, CONTENT, TAG, HEADERS, TIME)
Row = tuple[bytes | None, bytes | None, str | None, Headers, int]


def record(row: Row, offset: int = 7, partition: int = 3) -> Record:
    value, key, tag, headers, timestamp = row
    return Record(partition, offset, timestamp, key, value, tag, headers)


def batch(rows: list[Row], base: int = 40) -> Batch:
    values, keys, tags, headers, stamps = zip(*rows, strict=True)
    return batch_of(encode_columns(Columns(values, stamps, keys, tags, headers)), base=base, epoch=1, appended_at=0)


def _sent(item: dict[str, object]) -> dict[str, object]:
    """Plain values as they come out of JSON."""
    found: dict[str, object] = json.loads(json.dumps(item))
    return found


def where(place: int) -> str:
    return f"record {place}"


@given(ROW)
def test_a_record_comes_back_as_it_was(row: Row) -> None:
    whole = record(row)
    sent = msgspec.json.encode(item_of(whole, "shop/orders"))

    assert record_of(msgspec.json.decode(sent, type=RecordItem)) == whole
    assert json.loads(sent) == {"topic": "shop/orders", **_sent(plain_item(whole))}


@given(st.lists(ROW, min_size=1, max_size=5))
def test_a_batch_is_written_as_its_records_are(rows: list[Row]) -> None:
    found = batch(rows)

    assert items_of(found, 3) == [item_of(one) for one in found.records(3)]


@given(st.lists(ROW, min_size=1, max_size=5))
def test_columns_to_be_appended_come_back_as_they_were(rows: list[Row]) -> None:
    values, keys, tags, headers, stamps = map(list, zip(*rows, strict=True))
    columns = RecordColumns(values, keys, tags, headers, stamps)
    lines = msgspec.json.encode(columns_items(columns))
    found = columns_of(msgspec.json.decode(lines, type=list[RecordItem]), NOW, where)

    assert found.values == values and found.timestamps == stamps
    assert (found.keys or [None] * len(rows)) == keys
    assert (found.tags or [None] * len(rows)) == tags
    assert (found.headers or [()] * len(rows)) == headers


@given(st.lists(ROW, min_size=1, max_size=5))
def test_one_by_one_and_all_at_once_are_read_alike(rows: list[Row]) -> None:
    lines = [msgspec.json.encode(item_of(record(row))) for row in rows]
    items = [parse_item(line, "line") for line in lines]
    whole = columns_of(items, NOW, where)
    single = [columns_of([item], NOW, where) for item in items]

    assert whole.values == [one.values[0] for one in single]
    assert (whole.keys or [None] * len(rows)) == [one.keys[0] if one.keys else None for one in single]


def test_the_shape_is_the_one_on_the_page() -> None:
    assert plain_item(record((b"paid", b"42", "eu", (("a", b"1"), ("b", None)), 5))) == {
        "partition": 3, "offset": 7, "timestamp": 5, "key": "42", "value": "paid", "tag": "eu",
        "headers": {"a": "1", "b": None},
    }  # fmt: skip
    assert _sent(plain_item(record((None, b"\xff", None, (("a", b"\xff"), ("a", b"")), 5)))) == {
        "partition": 3, "offset": 7, "timestamp": 5, "key_b64": "/w==", "value": None,
        "headers": [["a", {"b64": "/w=="}], ["a", ""]],
    }  # fmt: skip
    assert msgspec.to_builtins(RecordItem(gap=GapItem.of(3, Gap(8, 12, Reason.LOST)))) == {
        "gap": {"partition": 3, "start": 8, "stop": 12, "reason": "lost"}
    }


@pytest.mark.parametrize("reason", list(Reason))
def test_a_gap_comes_back_as_it_was(reason: Reason) -> None:
    assert GapItem.of(0, Gap(1, 2, reason)).gap() == Gap(1, 2, reason)


def test_a_reason_of_a_newer_broker_is_named() -> None:
    with pytest.raises(Invalid, match="'burnt'"):
        GapItem(0, 1, 2, "burnt").gap()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"", "here is not JSON"),
        (b"{nonsense", "here is not JSON"),
        (b'{"value":"1"} 2', "here is not JSON"),
        (b'{"value":NaN}', "here is not JSON"),
        (b'{"value":"\xff"}', "here is not JSON"),
        (b'{"value":"\xed\xa0\x80"}', "here is not JSON"),
        (b'{"value":"\\ud800"}', "here is not JSON"),
        (b'{"value":"\\udc00x"}', "here is not JSON"),
        (b'\xef\xbb\xbf{"value":""}', "here is not JSON"),
        (b"[]", "here is not a JSON object"),
        (b"[" * 100_000, "here is not a JSON object"),
        (b"7", "here is not a JSON object"),
        (b'{"valeu":"3"}', "here has an unknown field 'valeu'"),
        (b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "here has an unknown field 'x'"),
        (b'{"value":' + b"[" * 100_000, 'here: "value".*not a text'),
        (b'{"key":"3"}', 'here has neither "value" nor "value_b64"'),
        (b'{"value":"3","value_b64":"MQ=="}', 'here has both "value" and "value_b64"'),
        (b'{"value":null,"value_b64":null}', 'here has both "value" and "value_b64"'),
        (b'{"value":"","key":"3","key_b64":"MQ=="}', 'here has both "key" and "key_b64"'),
        (b'{"value_b64":"%"}', 'here: "value_b64" is not base64'),
        (b'{"value_b64":"MQ"}', 'here: "value_b64" is not base64'),
        (b'{"value":7}', 'here: "value".*not a text'),
        (b'{"value":{"a":1}}', 'here: "value".*write JSON as a text'),
        (b'{"value":"","headers":[1]}', 'here: "headers"'),
        (b'{"value":"","headers":[["a"]]}', 'here: "headers"'),
        (b'{"value":"","headers":{"a":1}}', 'here: "headers"'),
        (b'{"value":"","headers":{"a":{"b64":"%"}}}', 'here: "headers" is not base64'),
        (b'{"value":"","headers":{"a":{"b64":"","x":1}}}', 'here: "headers"'),
        (b'{"value":"","headers":{' + b",".join(b'"%d":""' % n for n in range(1001)) + b"}}", 'here: "headers".*1000'),
        (b'{"value":"","headers":[' + b",".join([b'["a",""]'] * 1001) + b"]}", 'here: "headers".*1000'),
        (b'{"value":"","timestamp":"now"}', 'here: "timestamp" is a whole number'),
        (b'{"value":"","timestamp":1e3}', 'here: "timestamp" is a whole number'),
        (b'{"value":"","timestamp":true}', 'here: "timestamp" is a whole number'),
        (b'{"value":"","timestamp":4611686018427387905}', 'here: "timestamp" is a whole number.*4611686018427387904'),
        (b'{"value":"","timestamp":' + b"9" * 100_000 + b"}", 'here: "timestamp" is a whole number'),
        (b'{"value":"","partition":"0"}', 'here: "partition" is a whole number'),
        (b'{"value":"","tag":7}', 'here: "tag" is a text'),
        (b'{"value":"","tag":""}', "here: tag has 0 bytes"),
        (b'{"value":"","tag":"' + "ä".encode() * 513 + b'"}', "here: tag has 1026 bytes; allowed: 1 to 1024"),
        (b'{"gap":{}}', "here is a gap"),
        (b'{"gap":{"partition":0,"start":1,"stop":2,"reason":"lost"}}', "here is a gap"),
    ],
)
def test_what_is_wrong_is_named(line: bytes, said: str) -> None:
    with pytest.raises(Invalid, match=said) as refused:
        parse_item(line, "here")

    assert len(str(refused.value)) < 400


def test_of_a_name_that_stands_twice_the_last_one_counts() -> None:
    item = parse_item(b'{"value":"a","value":"b","headers":{"x":"1","x":"2"}}', "here")

    assert (item.value, item.headers) == ("b", {"x": "2"})


def test_what_a_reader_gets_can_be_appended_as_it_is() -> None:
    line = b'{"topic":"a/b","partition":1,"offset":2,"timestamp":3,"key":null,"value":null,"tag":null,"headers":null}'

    assert columns_of([parse_item(line, "here")], NOW, where) == RecordColumns([None], timestamps=[3], partitions=[1])


def test_a_record_without_a_time_is_given_one_where_others_bring_theirs() -> None:
    items = [parse_item(line, "") for line in (b'{"value":"a","timestamp":5}', b'{"value":"b"}')]

    assert columns_of(items, NOW, where).timestamps == [5, NOW]
    assert columns_of(items[1:], NOW, where).timestamps is None


def test_the_record_that_is_wrong_is_named_among_many() -> None:
    good = RecordItem(value="a")

    for wrong in (RecordItem(), RecordItem(value="a", value_b64=b""), RecordItem(value="a", tag="")):
        with pytest.raises(Invalid, match="^record 2"):
            columns_of([good, good, wrong, good, wrong], NOW, where)
