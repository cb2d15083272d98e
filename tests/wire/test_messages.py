"""Requests and answers: both sides read what the other writes, and wrong requests are refused by field."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import msgspec
import pytest

from forebay.records import GroupOffset, Offsets
from forebay.topics import TopicName, TopicSpec
from forebay.wire import messages
from forebay.wire.messages import (
    AppendedRanges,
    Committing,
    GroupItem,
    OffsetRangeItem,
    OffsetsItem,
    Ready,
    TopicItem,
    TopicPatch,
    TopicPut,
)

SPEC = TopicSpec.create(
    TopicName.parse("shop/orders"),
    topic_id="0" * 32,
    created_at=5,
    partitions=4,
    durability="fsync",
    cap_records=9,
    on_full="reject_new",
).altered(partitions=8)
STRUCTS = [
    kind
    for kind in vars(messages).values()
    if inspect.isclass(kind) and issubclass(kind, msgspec.Struct) and kind.__module__ == messages.__name__
]


def test_a_definition_comes_back_as_it_was() -> None:
    sent = msgspec.json.encode(TopicItem.of(SPEC))

    assert msgspec.json.decode(sent, type=TopicItem).spec() == SPEC
    assert set(TopicItem.__struct_fields__) == {"name", *TopicSpec.__struct_fields__} - {"namespace", "topic"}


def test_ranges_are_those_of_the_contract() -> None:
    sent = msgspec.json.encode(AppendedRanges([OffsetRangeItem(0, 7, 3)]))

    assert sent == b'{"ranges":[{"partition":0,"first":7,"count":3}]}'


def test_watermarks_come_back_as_they_were() -> None:
    offsets = Offsets(1, 2, 3, 4, 5)
    sent = msgspec.json.encode(OffsetsItem.of(3, offsets))

    assert msgspec.json.decode(sent, type=OffsetsItem).offsets() == offsets


@pytest.mark.parametrize(
    "place", [GroupOffset("a/b", 1, 5, 9, "n"), GroupOffset("a/b", 1, 5, None, "", "its owner is another process")]
)
def test_places_come_back_as_they_were(place: GroupOffset) -> None:
    found = msgspec.json.decode(msgspec.json.encode(GroupItem.of(place)), type=GroupItem)

    assert (found.place(), found.lag) == (place, place.lag)


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        (b'{"colour":1}', TopicPut, "colour"),
        (b'{"partitions":"4"}', TopicPut, r"\$.partitions"),
        (b'{"durability":"eternal"}', TopicPut, r"\$.durability"),
        (b'{"cap_bytes":0}', TopicPatch, r"\$.cap_bytes"),
        (b'{"topic":"a","offset":-1}', Committing, r"\$.offset"),
        (b'{"topic":"a","offset":1,"ack":"maybe"}', Committing, r"\$.ack"),
        (b'{"topic":"a"}', Committing, "offset"),
    ],
)
def test_a_wrong_request_is_refused_by_field(body: bytes, kind: type[msgspec.Struct], said: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=said):
        msgspec.json.decode(body, type=kind)


def test_an_answer_of_a_newer_broker_is_read() -> None:
    body = b'{"ready":true,"replay_progress":1,"degraded":[],"colour":"blue"}'

    assert msgspec.json.decode(body, type=Ready).ready


def test_every_message_has_a_schema_and_a_place_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
    listed = set(re.findall(r"`(\w+)`", page.partition("## Requests and answers")[2].partition("\n## ")[0]))
    _, components = msgspec.json.schema_components(STRUCTS)

    assert {kind.__name__ for kind in STRUCTS} <= set(components)
    assert [kind.__name__ for kind in STRUCTS if kind.__name__ not in listed] == []
