"""The id of an event carries every position of a watch, and is refused where it belongs to another one."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import Invalid, UnsupportedFormat
from forebay.records import OFFSET_MAX
from forebay.wire.watching import (
    ID_CHARACTERS_MAX,
    WATCHED_PARTITIONS_MAX,
    WATCHED_TOPICS_MAX,
    WatchPosition,
    check_watch,
    decode_event_id,
    encode_event_id,
)

TOPIC_ID = st.text("0123456789abcdef", min_size=32, max_size=32)
WATCHED = st.builds(WatchPosition.of, TOPIC_ID, st.lists(st.integers(0, OFFSET_MAX), max_size=4))
ID = "0123456789abcdef" * 2
OTHER_ID = "f" * 32
NAMES = ["shop/orders", "shop/carts"]
HERE = [WatchPosition.of(ID, [0, 127, 128]), WatchPosition.of(OTHER_ID, [OFFSET_MAX])]


@given(st.lists(WATCHED, min_size=1, max_size=5))
def test_positions_come_back_as_they_were(watched: list[WatchPosition]) -> None:
    names = [f"a/t{number}" for number in range(len(watched))]
    text = encode_event_id(names, watched)

    assert decode_event_id(text, names) == watched
    assert re.fullmatch(r"1\.[A-Za-z0-9_-]+", text)


def test_the_largest_watch_fits() -> None:
    names = [f"{'n' * 100}/{number:0100}" for number in range(WATCHED_TOPICS_MAX)]
    each = WATCHED_PARTITIONS_MAX // WATCHED_TOPICS_MAX
    watched = [WatchPosition.of(ID, [OFFSET_MAX] * each)] * WATCHED_TOPICS_MAX
    text = encode_event_id(names, watched)

    assert decode_event_id(text, names) == watched
    assert len(text) < ID_CHARACTERS_MAX
    usual = [WatchPosition.of(ID, [2**35 - 1] * WATCHED_PARTITIONS_MAX)]
    assert len(encode_event_id(["a/b"], usual)) < 7 * 1024


@pytest.mark.parametrize(("topics", "partitions"), [(0, 0), (257, 257), (1, 1025)])
def test_a_larger_watch_is_refused(topics: int, partitions: int) -> None:
    with pytest.raises(Invalid, match="open several"):
        check_watch(topics, partitions)


@pytest.mark.parametrize(
    "names", [[], NAMES[:1], NAMES[::-1], [*NAMES, "a/b"], ["shop/orders", "shop/cart"], ["shop/orders\nshop/carts"]]
)
def test_an_id_of_another_list_is_refused(names: list[str]) -> None:
    with pytest.raises(Invalid, match="other topics"):
        decode_event_id(encode_event_id(NAMES, HERE), names)


def test_a_topic_that_was_created_again_is_seen() -> None:
    found = decode_event_id(encode_event_id(NAMES, HERE), NAMES)

    assert [topic.is_of(ID) for topic in found] == [True, False]


def test_a_version_that_is_not_known_is_named() -> None:
    with pytest.raises(UnsupportedFormat, match="'2'"):
        decode_event_id("2.AAAA", NAMES)


def test_an_id_with_any_character_changed_or_cut_is_refused() -> None:
    text = encode_event_id(NAMES, HERE)

    for place in range(2, len(text) - 1):
        changed = "A" if text[place] != "A" else "B"
        for wrong in (text[:place], text[:place] + changed + text[place + 1 :]):
            with pytest.raises(Invalid):
                decode_event_id(wrong, NAMES)


@pytest.mark.parametrize("text", ["", "1", "1.", "1.%%%%", "1.é", "x" * 100_000, "1." + "A" * 100_000, "17", "\x00"])
def test_a_text_that_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(Invalid) as refused:
        decode_event_id(text, NAMES)

    assert len(str(refused.value)) < 200
