"""Records in JSON, JSON lines and raw bodies: right, or refused with the place of what is wrong."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import Invalid, TooLarge, Unsupported
from forebay.records import TIMESTAMP_MAX, Headers
from forebay.wire.bodies import (
    MediaType,
    decode_json,
    decode_ndjson,
    decode_raw,
    encode_json,
    encode_ndjson,
)
from forebay.wire.items import RecordColumns
from forebay.wire.limits import BodyLimits

NOW = 1_700_000_000_000
LIMITS = BodyLimits(bytes_max=1024 * 1024, records_max=1000)
CONTENT = st.none() | st.binary(max_size=20) | st.text(max_size=10).map(str.encode)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)


@st.composite
def columns(draw: st.DrawFn) -> RecordColumns:
    count = draw(st.integers(0, 5))

    def column(of: st.SearchStrategy[object]) -> list[object]:
        return draw(st.lists(of, min_size=count, max_size=count))

    keys = column(CONTENT)
    tags = column(st.none() | TEXT.filter(bool))
    headers = column(st.lists(st.tuples(TEXT, CONTENT), max_size=3).map(tuple))
    stamps = column(st.integers(-TIMESTAMP_MAX, TIMESTAMP_MAX))
    partitions = column(st.none() | st.integers(0, 9))
    return RecordColumns(
        values=column(CONTENT),  # type: ignore[arg-type]
        keys=keys if any(key is not None for key in keys) else None,  # type: ignore[arg-type]
        tags=tags if any(tags) else None,  # type: ignore[arg-type]
        headers=headers if any(headers) else None,  # type: ignore[arg-type]
        timestamps=draw(st.sampled_from([stamps, None])) if count else None,  # type: ignore[arg-type]
        partitions=partitions if any(number is not None for number in partitions) else None,  # type: ignore[arg-type]
    )


@given(columns())
def test_json_comes_back_as_it_was(given_columns: RecordColumns) -> None:
    assert decode_json(encode_json(given_columns), LIMITS, NOW) == given_columns


@given(columns())
def test_json_lines_come_back_as_they_were(given_columns: RecordColumns) -> None:
    assert decode_ndjson(encode_ndjson(given_columns), LIMITS, NOW) == given_columns


@pytest.mark.parametrize(
    ("body", "values"),
    [
        (b"", []),
        (b"\n", []),
        (b"\n\r\n \n", []),
        (b'{"value":"a"}', [b"a"]),
        (b'{"value":"a"}\r\n\r\n{"value":"b"}\r\n', [b"a", b"b"]),
        (b'{"value":"a\\nb"}\n\n\n{"value":"\xe2\x80\xa8"}', [b"a\nb", "\u2028".encode()]),
    ],
)
def test_lines_end_as_they_may(body: bytes, values: list[bytes]) -> None:
    assert decode_ndjson(body, LIMITS, NOW).values == values


@pytest.mark.parametrize("body", [b'{"records":[{"value":"a"}]}', b'[{"value":"a"}]', b' [ { "value" : "a" } ] '])
def test_records_stand_in_an_object_or_alone(body: bytes) -> None:
    assert decode_json(body, LIMITS, NOW) == RecordColumns([b"a"])


@pytest.mark.parametrize(
    ("third", "said"),
    [
        (b'{"value":7}', '"value".*not a text'),
        (b'{"value":"\\ud800"}', "JSON"),
        (b'{"value":"\xff"}', "JSON"),
        (b'{"value":NaN}', "JSON"),
        (b'{"valeu":"x"}', "unknown field 'valeu'"),
        (b'{"value":"x","tag":""}', "tag has 0 bytes"),
        (b'{"value":"x","value_b64":""}', "both"),
        (b'{"key":"x"}', "neither"),
        (b'{"gap":{"partition":0,"start":1,"stop":2,"reason":"lost"}}', "gap"),
        (b'{"value":"x","timestamp":' + b"9" * 5000 + b"}", "whole number"),
        (b'{"value":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not a text"),
    ],
)
def test_the_third_record_is_named(third: bytes, said: str) -> None:
    good = b'{"value":"x"}'

    with pytest.raises(Invalid, match=f"line 4.*{said}"):
        decode_ndjson(b"\n".join([good, b"", good, third, good]), LIMITS, NOW)
    with pytest.raises(Invalid, match=said) as refused:
        decode_json(b'{"records":[' + b",".join([good, good, third]) + b"]}", LIMITS, NOW)
    assert said == "JSON" or "records[2]" in str(refused.value)


@pytest.mark.parametrize(
    "body", [b"", b"7", b'"a"', b"null", b"{}", b'{"value":"a"}', b'{"records":7}', b'{"records":[7]}']
)
def test_a_body_of_another_shape_is_refused_in_words(body: bytes) -> None:
    with pytest.raises(Invalid, match="body|records"):
        decode_json(body, LIMITS, NOW)


@pytest.mark.parametrize("opening", [b"[", b'{"records":', b'{"a":', b'[{"headers":'])
def test_depth_is_refused(opening: bytes) -> None:
    for decode in (decode_json, decode_ndjson):
        with pytest.raises(Invalid):
            decode(opening * 20_000, LIMITS, NOW)


@given(
    st.binary(max_size=60) | st.text(st.sampled_from('{}[]":,\\ualue_b64recods \n019.e-'), max_size=60).map(str.encode)
)
def test_noise_is_invalid_and_nothing_else(body: bytes) -> None:
    for decode in (decode_json, decode_ndjson):
        try:
            decode(body, LIMITS, NOW)
        except Invalid:
            continue


def test_limits_are_kept() -> None:
    few = BodyLimits(bytes_max=100, records_max=3)

    assert decode_ndjson(b'{"value":""}\n' * 3, few, NOW).values == [b""] * 3
    for body, limit in ((b'{"value":""}\n' * 4, 3), (b"\n" * 4, 3), (b'{"value":""}' * 4, 3), (b" " * 101, 100)):
        with pytest.raises(TooLarge) as refused:
            decode_ndjson(body, few, NOW)
        assert refused.value.limit == limit
    for body, limit in ((b'[{"value":""},{"value":""},{"value":""},{"value":""}]', 3), (b" " * 101, 100)):
        with pytest.raises(TooLarge) as refused:
            decode_json(body, few, NOW)
        assert refused.value.limit == limit


@pytest.mark.parametrize("decode", [decode_json, decode_ndjson])
def test_memory_is_what_the_page_says(decode: object) -> None:
    """The smallest records take the most beside their bytes."""
    lines = [b'{"value":""}'] * 40_000
    body = b"[" + b",".join(lines) + b"]" if decode is decode_json else b"\n".join(lines)
    limits = BodyLimits(len(body), len(lines))
    tracemalloc.start()
    try:
        assert len(decode(body, limits, NOW).values) == len(lines)  # type: ignore[operator]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 16 * len(body)


@given(st.binary(max_size=20), TEXT, TEXT.filter(bool), st.integers(-TIMESTAMP_MAX, TIMESTAMP_MAX))
def test_a_raw_body_is_one_record(body: bytes, key: str, tag: str, timestamp: int) -> None:
    found = decode_raw(body, LIMITS, key=key, tag=tag, timestamp=str(timestamp), headers=["a=1", "a=b=c", "b", "c="])
    headers: Headers = (("a", b"1"), ("a", b"b=c"), ("b", None), ("c", b""))

    assert found == RecordColumns([body], [key.encode()], [tag], [headers], [timestamp])
    assert decode_raw(body, LIMITS) == RecordColumns([body])


def test_a_raw_body_may_have_a_key_of_any_bytes() -> None:
    assert decode_raw(b"", LIMITS, key_b64="/w==").keys == [b"\xff"]


@pytest.mark.parametrize(
    ("given_texts", "said"),
    [
        ({"key": "a", "key_b64": "/w=="}, "both name a key"),
        ({"key_b64": "%"}, "key_b64 is not base64"),
        ({"tag": ""}, "tag has 0 bytes"),
        ({"tag": "ä" * 600}, "tag has 1200 bytes"),
        *(({"timestamp": text}, "timestamp is") for text in ("", "now", "1.5", "1e3", "--1", "²", "٣", "9" * 30, "+1")),
        ({"headers": ["a"] * 1001}, "1001 headers"),
    ],
)
def test_what_is_wrong_with_the_texts_of_a_raw_body_is_named(given_texts: dict[str, str], said: str) -> None:
    with pytest.raises(Invalid, match=said):
        decode_raw(b"", LIMITS, **given_texts)


def test_a_raw_body_is_limited() -> None:
    with pytest.raises(TooLarge):
        decode_raw(bytes(101), BodyLimits(100, 1))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("application/json; charset=utf-8", MediaType.JSON),
        (" Application/JSON ", MediaType.JSON),
        ("application/x-ndjson", MediaType.NDJSON),
        ("application/ndjson", MediaType.NDJSON),
        ("application/jsonl", MediaType.NDJSON),
        ("application/vnd.apache.arrow.stream", MediaType.ARROW),
        ("application/vnd.forebay.frames", MediaType.FRAMES),
        ("application/octet-stream", MediaType.RAW),
        ("text/plain; charset=utf-8", MediaType.RAW),
    ],
)
def test_media_types_are_read_without_their_parameters(text: str, found: MediaType) -> None:
    assert MediaType.parse(text) is found


@pytest.mark.parametrize("text", ["", "application/xml", "*/*", "application/vnd.apache.arrow.file", "a" * 10_000])
def test_other_media_types_are_not_offered(text: str) -> None:
    with pytest.raises(Unsupported) as refused:
        MediaType.parse(text)

    assert len(str(refused.value)) < 400
