"""The rules of eviction against a model that looks at every record by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as effort

from forebay.errors import Full
from forebay.records import Reason
from forebay.shard.limits import Evicted, Holding, Limits, Stretch, plan


class Piece(NamedTuple):
    """A stretch to be made."""

    sizes: list[int]
    live: bool
    appended_at: int | None


pieces = st.lists(
    st.builds(
        Piece,
        st.lists(st.integers(16, 40), min_size=1, max_size=6),
        st.booleans(),
        st.none() | st.integers(0, 30),
    ).map(lambda piece: piece if piece.appended_at is not None else Piece([0] * len(piece.sizes), False, None)),
    max_size=8,
)
limits = st.builds(
    Limits,
    st.none() | st.integers(1, 30),
    st.none() | st.integers(1, 600),
    st.none() | st.integers(1, 20),
    st.booleans(),
    st.sampled_from([1, 10, 50, 99, 100]),
)


def stretches_of(start: int, given: list[Piece]) -> Iterator[Stretch]:
    """What an engine would show."""
    for sizes, live, appended_at in given:
        array = np.array(sizes, np.int64)
        yield Stretch(start, start + len(sizes), live, appended_at, sum(sizes), array.copy)
        start += len(sizes)


def model(limits: Limits, start: int, given: list[Piece], now_ms: int) -> tuple[int, int, int, Reason | None, bool]:
    """Floor, live records ended, bytes, reason, and whether time was held back, one record at a time."""
    records = [(size, piece.live, piece.appended_at) for piece in given for size in piece.sizes]
    head, at = start + len(records), 0
    ended = size = 0
    reason: Reason | None = None
    total = sum(record[0] for record in records)

    def go(why: Reason) -> None:
        nonlocal at, ended, size, reason
        size += records[at][0]
        ended += records[at][1]
        at += 1
        reason = why

    while not limits.rejects and at < len(records):
        too_many = limits.cap_records is not None and start + at < head - limits.cap_records
        too_large = limits.cap_bytes is not None and total - size > limits.cap_bytes and at < len(records) - 1
        if not too_many and not too_large:
            break
        go(Reason.CAP)
    left = sum(record[1] for record in records[at:])
    allowed = max(1, left * limits.share_percent // 100)
    while limits.ttl_ms is not None and at < len(records):
        _, live, appended_at = records[at]
        if appended_at is not None and appended_at + limits.ttl_ms > now_ms:
            break
        if live and not allowed:
            return start + at, ended, size, reason, True
        allowed -= live
        go(Reason.TTL)
    return start + at, ended, size, reason, False


@given(limits, st.integers(0, 50), pieces, st.integers(0, 60))
@effort(max_examples=600)
def test_a_pass_ends_exactly_the_records_of_the_model(
    limits: Limits, start: int, given: list[Piece], now_ms: int
) -> None:
    count = sum(len(piece.sizes) for piece in given)
    live = sum(len(piece.sizes) for piece in given if piece.live)
    holding = Holding(start, start, start + count, live, sum(sum(piece.sizes) for piece in given))

    floor, evicted = plan(limits, holding, lambda: stretches_of(start, given), now_ms)

    expected = model(limits, start, given, now_ms)
    assert (floor, *evicted[1:]) == expected
    assert evicted.floor == floor


def test_nothing_is_looked_at_where_nothing_can_go() -> None:
    def never() -> Iterator[Stretch]:
        raise AssertionError("looked")

    for limits in (Limits(), Limits(cap_records=10, cap_bytes=100), Limits(cap_records=1, rejects=True)):
        assert plan(limits, Holding(3, 5, 15, 10, 100), never, 0) == (5, Evicted(3))


def test_room_is_asked_for_only_where_new_records_are_rejected() -> None:
    Limits(cap_records=1, cap_bytes=1).check_room("t", 5, 5)
    Limits(cap_records=5, cap_bytes=5, rejects=True).check_room("t", 5, 5)
    with pytest.raises(Full, match="would hold 6, above cap_records 5"):
        Limits(cap_records=5, rejects=True).check_room("t", 6, 0)
    with pytest.raises(Full, match="would hold 6, above cap_bytes 5"):
        Limits(cap_bytes=5, rejects=True).check_room("t", 0, 6)
