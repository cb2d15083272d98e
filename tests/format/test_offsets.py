"""Sets of offsets behave like Python's sets, at the edges of windows too."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from forebay.errors import Corrupt
from forebay.format.control.offsets import WINDOW, OffsetSet, decode_bitmap, encode_bitmap

_OFFSET = st.integers(0, 20) | st.integers(WINDOW - 10, WINDOW + 10) | st.integers(2**40 - 5, 2**40 + 5)
_OFFSETS = st.sets(_OFFSET, max_size=30)


@given(_OFFSETS, _OFFSETS, _OFFSET, _OFFSET)
def test_set_of_offsets_is_like_a_set(left: set[int], right: set[int], start: int, stop: int) -> None:
    one, other = OffsetSet.of(left), OffsetSet.of(right)

    assert list(one) == sorted(left) and len(one) == len(left) and bool(one) == bool(left)
    assert one | other == OffsetSet.of(left | right)
    assert one - other == OffsetSet.of(left - right)
    assert (one == other) is (left == right)
    assert (start in one) is (start in left)
    inside = {offset for offset in left if start <= offset < stop}
    assert one.clipped(start, stop) == OffsetSet.of(inside)
    assert one.count_in(start, stop) == len(inside)


@given(_OFFSETS, _OFFSET, st.integers(0, 40))
def test_mask_says_of_each_offset_whether_it_is_there(offsets: set[int], start: int, count: int) -> None:
    mask = OffsetSet.of(offsets).mask(start, count)

    assert mask.tolist() == [offset in offsets for offset in range(start, start + count)]


@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, 0), (5, 5), (7, 3), (0, 1), (3, WINDOW), (0, WINDOW + 1), (WINDOW - 1, 3 * WINDOW + 1), (2**40, 2**40 + 9)],
)
def test_range_holds_all_its_offsets(start: int, stop: int) -> None:
    found = OffsetSet.of_range(start, stop)

    assert found == OffsetSet.of(np.arange(start, stop))
    assert len(found) == max(0, stop - start)


def test_windows_come_in_order_with_offsets_counted_from_their_start() -> None:
    found = OffsetSet.of([3 * WINDOW + 4, 1, WINDOW, 2])

    assert [(start, list(bitmap)) for start, bitmap in found.windows()] == [
        (0, [1, 2]),
        (WINDOW, [0]),
        (3 * WINDOW, [4]),
    ]


def test_set_that_others_were_made_of_stays_as_it_was() -> None:
    first, second = OffsetSet.of([1, 2]), OffsetSet.of([2, 3, WINDOW])
    joined = first | second

    assert joined - second == OffsetSet.of([1])
    assert (list(first), list(second), list(joined)) == ([1, 2], [2, 3, WINDOW], [1, 2, 3, WINDOW])


@given(st.lists(st.integers(0, 70_000), max_size=40), st.integers(0, 60_000), st.integers(0, 9_000))
def test_equal_sets_are_stored_as_the_same_bytes_however_they_came_about(
    offsets: list[int], start: int, length: int
) -> None:
    stop = start + length
    at_once = OffsetSet.of([*offsets, *range(start, stop)])
    piecemeal = OffsetSet.of_range(start, stop)
    for offset in offsets:
        piecemeal |= OffsetSet.of([offset])
    with_detour = (at_once | OffsetSet.of_range(0, 80_000)) - (OffsetSet.of_range(0, 80_000) - at_once)

    assert at_once == piecemeal == with_detour
    stored = [[encode_bitmap(bitmap) for _, bitmap in each.windows()] for each in (at_once, piecemeal, with_detour)]
    assert stored[0] == stored[1] == stored[2]


def test_range_put_together_from_single_offsets_is_stored_as_a_range() -> None:
    pieces = OffsetSet.of(range(0, 9000, 2)) | OffsetSet.of(range(1, 9000, 2))

    assert [encode_bitmap(bitmap) for _, bitmap in pieces.windows()] == [
        bytes.fromhex("3b300000 01 0000 2723 0100 0000 2723")
    ]


@given(st.sets(st.integers(0, WINDOW - 1), max_size=30), st.binary(min_size=1, max_size=9))
def test_bitmap_is_read_back_from_exactly_its_bytes(places: set[int], noise: bytes) -> None:
    stored = encode_bitmap(BitMap(places))

    assert set(decode_bitmap(stored, len(places))) == places
    for wrong, count in ((stored + noise, len(places)), (stored[:-1], len(places)), (stored, len(places) + 1)):
        with pytest.raises(Corrupt):
            decode_bitmap(wrong, count)


@given(st.binary(max_size=200), st.integers(0, 40))
def test_noise_is_no_bitmap_or_a_sound_one(noise: bytes, count: int) -> None:
    for stored in (noise, encode_bitmap(BitMap([1]))[:4] + noise, encode_bitmap(BitMap(range(99)))[:4] + noise):
        try:
            found = decode_bitmap(stored, count)
        except Corrupt:
            continue
        assert len(list(found)) == count
