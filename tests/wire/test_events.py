"""Streams of events come out as they went in, wherever they are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forebay.errors import Unavailable
from forebay.wire.events import HEARTBEAT, EventDecoder, ServerEvent, encode_event, encode_retry

NAME = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"), min_size=1, max_size=8)
IDENTITY = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n\0 "), max_size=8)
EVENT = st.tuples(st.binary(max_size=20), st.none() | NAME, st.none() | IDENTITY)
EVENTS = st.lists(EVENT, max_size=4)


def decoded(chunks: list[bytes]) -> list[ServerEvent]:
    decoder = EventDecoder()
    return [event for chunk in chunks for event in decoder.feed(chunk)]


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(stream), *(place % (len(stream) + 1) for place in places)})
    return [stream[start:stop] for start, stop in pairwise(edges)]


@settings(max_examples=60)
@example([(b" ", " ", None), (b"", "  named", None)], [])
@given(EVENTS, st.lists(st.integers(0, 1000), max_size=6))
def test_events_come_out_wherever_the_stream_is_cut(
    events: list[tuple[bytes, str | None, str | None]], places: list[int]
) -> None:
    stream = b"".join(encode_event(text, event=name, event_id=mark) + HEARTBEAT for text, name, mark in events)
    found = decoded(cut(stream, places))

    expected, last = [], ""
    for text, name, mark in events:
        last = last if mark is None else mark
        lines = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        expected.append(ServerEvent(name or "message", lines, last))
    assert found == expected
    assert decoded([bytes([byte]) for byte in stream]) == expected


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_lines_may_end_in_three_ways(end: bytes) -> None:
    stream = end.join(
        [b"\xef\xbb\xbf:hello", b"id: 7", b"event:gap", b"data: a", b"data", b"data:  b", b"", b"data:c", b"", b""]
    )
    expected = [ServerEvent("gap", b"a\n\n b", "7"), ServerEvent("message", b"c", "7")]

    assert decoded([stream]) == expected
    for place in range(len(stream)):
        assert decoded([stream[:place], b"", stream[place:]]) == expected
    assert decoded([bytes([byte]) for byte in stream]) == expected


def test_an_event_whose_end_has_not_come_is_not_given() -> None:
    decoder = EventDecoder("before")

    assert decoder.feed(b"id: after\ndata: a\n") == []
    assert decoder.event_id == "before"
    assert decoder.feed(b"\n") == [ServerEvent("message", b"a", "after")]
    assert decoder.event_id == "after"


def test_an_id_without_a_text_moves_on_in_silence() -> None:
    decoder = EventDecoder()

    assert decoder.feed(b"id: 9\n\n") == []
    assert decoder.event_id == "9"
    assert decoder.feed(b"id: a\0b\ndata:\n\n") == [ServerEvent("message", b"", "9")]


def test_the_broker_says_when_to_come_back() -> None:
    decoder = EventDecoder()
    decoder.feed(encode_retry(1500) + b"retry: soon\n\nretry: " + b"9" * 50 + b"\n\n")

    assert decoder.retry_ms == 1500


def test_what_is_not_known_is_ignored() -> None:
    assert decoded([b"colour: blue\ndata: a\nnonsense\n\n"]) == [ServerEvent("message", b"a", "")]


@pytest.mark.parametrize("chunk", [b"x" * 10, b"data: x\n", b"colour: blue\n"])
def test_an_event_without_an_end_is_refused(chunk: bytes) -> None:
    decoder = EventDecoder(bytes_max=1000)

    with pytest.raises(Unavailable, match="1000"):
        for _ in range(1000):
            decoder.feed(chunk)


def test_a_stream_of_heartbeats_and_events_has_no_limit() -> None:
    decoder = EventDecoder(bytes_max=100)
    found = [event for _ in range(500) for event in decoder.feed(HEARTBEAT + b":" * 50 + b"\n" + encode_event(b"a"))]

    assert len(found) == 500
