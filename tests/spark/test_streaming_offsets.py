"""Offsets of a stream: what is written is read back, equal ones are equal texts, anything else is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import Conflict, Invalid, UnsupportedFormat
from forebay.records import OFFSET_MAX
from forebay.spark.reading.streaming.offsets import Place, Point, StreamOffsets, TopicPoints

pytestmark = pytest.mark.slow

_NAMES = st.from_regex(r"[A-Za-z0-9_-]{1,10}/[A-Za-z0-9_-]{1,10}", fullmatch=True)
_IDS = st.from_regex(r"[0-9a-f]{32}", fullmatch=True)
_POINTS = st.builds(Point, st.integers(0, OFFSET_MAX), st.integers(0, 2**40))
_TOPICS = st.builds(TopicPoints, _IDS, st.dictionaries(st.integers(0, 1023), _POINTS, max_size=5))
_OFFSETS = st.builds(StreamOffsets, st.dictionaries(_NAMES, _TOPICS, max_size=4))

_ID = "0123456789abcdef" * 2


def _stored(**changes: Any) -> dict[str, Any]:
    topic = {"id": _ID, "partitions": {"0": {"offset": 5, "epoch": 2}}}
    return {"version": 1, "topics": {"shop/orders": topic}, **changes}


@given(_OFFSETS)
def test_offsets_come_back_from_their_text(offsets: StreamOffsets) -> None:
    text = json.dumps(offsets.to_json())

    assert StreamOffsets.parse(json.loads(text)) == offsets


@given(_OFFSETS, st.randoms(use_true_random=False))
def test_equal_offsets_are_equal_texts(offsets: StreamOffsets, chance: Any) -> None:
    names = list(offsets.topics)
    chance.shuffle(names)
    shuffled = {}
    for name in names:
        topic = offsets.topics[name]
        partitions = list(topic.points)
        chance.shuffle(partitions)
        shuffled[name] = TopicPoints(topic.topic_id, {number: topic.points[number] for number in partitions})

    assert json.dumps(StreamOffsets(shuffled).to_json()) == json.dumps(offsets.to_json())


def test_text_is_as_documented() -> None:
    offsets = StreamOffsets({"shop/orders": TopicPoints(_ID, {10: Point(7, 1), 2: Point(23, 4)})})

    assert json.dumps(offsets.to_json()) == (
        '{"version": 1, "topics": {"shop/orders": {"id": "0123456789abcdef0123456789abcdef", '
        '"partitions": {"2": {"offset": 23, "epoch": 4}, "10": {"offset": 7, "epoch": 1}}}}}'
    )
    assert offsets.at(Place("shop/orders", 2)) == Point(23, 4)
    assert offsets.at(Place("shop/orders", 3)) is None
    assert offsets.at(Place("shop/other", 2)) is None


@pytest.mark.parametrize(
    "stored",
    [
        {},
        [],
        {"offset": 5},
        _stored(version=0),
        _stored(version="1"),
        _stored(topics={"a/b/c": {"id": _ID, "partitions": {}}}),
        _stored(topics={"shop/orders": {"id": "short", "partitions": {}}}),
        _stored(topics={"shop/orders": {"id": _ID, "partitions": {"-1": {"offset": 0, "epoch": 0}}}}),
        _stored(topics={"shop/orders": {"id": _ID, "partitions": {"1024": {"offset": 0, "epoch": 0}}}}),
        _stored(topics={"shop/orders": {"id": _ID, "partitions": {"00": {"offset": 0, "epoch": 0}}}}),
        _stored(topics={"shop/orders": {"id": _ID, "partitions": {"0": {"offset": -1, "epoch": 0}}}}),
        _stored(topics={"shop/orders": {"id": _ID, "partitions": {"0": {"offset": 2**63, "epoch": 0}}}}),
        _stored(topics={"shop/orders": {"id": _ID, "partitions": {"0": {"offset": 1}}}}),
    ],
)
def test_what_is_not_ours_is_refused_by_name(stored: Any) -> None:
    with pytest.raises(Invalid, match="holds no offsets of Forebay .*: begin again with a new checkpointLocation"):
        StreamOffsets.parse(stored)


def test_offsets_of_a_later_version_are_left_to_it() -> None:
    with pytest.raises(UnsupportedFormat, match="offsets of version 2, known here is 1: upgrade Forebay"):
        StreamOffsets.parse(_stored(version=2, topics="of another form"))


def test_topic_created_again_is_recognised_by_its_id() -> None:
    offsets = StreamOffsets.parse(_stored())

    offsets.check_lives({"shop/orders": _ID, "shop/other": "f" * 32})
    offsets.check_lives({})  # a topic that is gone is another matter
    with pytest.raises(Conflict, match=f"shop/orders was deleted and created again: .*{_ID}.*ffff.*: begin again with"):
        offsets.check_lives({"shop/orders": "f" * 32})
