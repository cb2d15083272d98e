"""What is stored of a window: which bytes, at what cost, and that consumers go on while they are made."""

from __future__ import annotations

import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from forebay.format.control.offsets import OffsetSet, encode_bitmap
from forebay.progress import ACKED_BYTES_MAX, AckedAbove, Progress
from forebay.subscriptions import cursor as stored_cursors
from forebay.subscriptions.cursor import acked_of, progress_of, window_of
from forebay.subscriptions.dispatch import Dispatch
from forebay.subscriptions.window import Window, WindowLimits
from forebay.testing.simulated.clock import ManualClock
from forebay.topics import SubscriptionSpec, TopicSpec
from tests.support.steps import steps_of
from tests.support.waiting import PATIENCE

TOPIC = TopicSpec(namespace="shop", topic="orders", topic_id="0" * 32, partitions=1)
SPEC = SubscriptionSpec.create(TOPIC, "billing", subscription_id="1" * 32, created_at=0, window_records_max=10_000_000)


def window_with(count: int, acked: range) -> Window:
    """A window of so many records, all delivered, of which these are acknowledged."""
    window = Window(0, WindowLimits(records_max=count))
    window.offer(0, [(0, count)], count)
    window.take(1, count, 0)
    window.ack(1, acked)
    return window


def above(progress: Progress) -> AckedAbove:
    assert not isinstance(progress.acked, msgspec.UnsetType)
    return progress.acked


@pytest.mark.parametrize("step", [1, 2])
def test_a_cursor_is_stored_in_as_many_steps_whatever_is_acknowledged_above_it(step: int) -> None:
    small, large = (window_with(count, range(1, count, step)) for count in (8_000, 200_000))

    def stored(window: Window) -> int:
        return steps_of(lambda: progress_of(window.copied(), SPEC, 1))

    assert stored(large) <= 1.2 * stored(small)
    assert steps_of(large.acked_count) == steps_of(small.acked_count)
    progress = progress_of(large.copied(), SPEC, 1)
    assert steps_of(lambda: acked_of(progress)) < 1_000


def test_ranges_are_found_by_their_edges_and_not_by_a_number_for_each_offset() -> None:
    count = 200_000
    copied = window_with(count, range(1, count)).copied()
    tracemalloc.start()
    try:
        starts, stops = copied.acked_ranges()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert (starts.tolist(), stops.tolist()) == ([1], [count])
    assert peak < 4 * count, "a few bytes of each offset"


def test_consumers_go_on_while_the_bytes_of_a_cursor_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch = Dispatch(SPEC, ManualClock())
    window = Window(0, WindowLimits(records_max=100))
    window.offer(0, [(0, 100)], 100)
    served = dispatch.serve(0, window, 1, 0)
    consumer = dispatch.attach("c", 100)
    dispatch.claim(consumer, 50)
    dispatch.ack(consumer, {0: [3, 4]})
    begun, go_on = threading.Event(), threading.Event()

    def gated(bitmap: BitMap) -> bytes:
        begun.set()
        assert go_on.wait(PATIENCE)
        return encode_bitmap(bitmap)

    monkeypatch.setattr(stored_cursors, "encode_bitmap", gated)
    with ThreadPoolExecutor() as pool:
        try:
            asked = pool.submit(served.progress)
            assert begun.wait(PATIENCE)
            # Everything that takes the lock, while the thread that writes cursors is at its work.
            pool.submit(dispatch.ack, consumer, {0: [0, 1, 7]}).result(PATIENCE)
            pool.submit(dispatch.claim, consumer, 10).result(PATIENCE)
            assert pool.submit(dispatch.standing).result(PATIENCE)[0].cursor == 2
            pool.submit(dispatch.adopt, msgspec.structs.replace(SPEC, is_paused=True)).result(PATIENCE)
            pool.submit(dispatch.unserve).result(PATIENCE)
        finally:
            go_on.set()
        before = asked.result(PATIENCE)

    assert (before.offset, list(acked_of(before))) == (0, [3, 4]), "it is of the moment when it was asked for"
    after = served.progress()
    assert (after.offset, list(acked_of(after))) == (2, [3, 4, 7])


@given(st.sets(st.integers(1, 300)), st.sets(st.integers(0, 200_000), max_size=20))
def test_the_stored_bytes_are_those_of_the_offsets_one_by_one(acked: set[int], known: set[int]) -> None:
    window = Window(0, WindowLimits(records_max=301), acked=OffsetSet.of(known))
    window.offer(0, [(0, 301)], 301)
    window.take(1, 301, 0)
    window.ack(1, sorted(acked))

    progress = progress_of(window.copied(), SPEC, 1)

    done = sorted(at for at in {*acked, *known} if at >= window.cursor)
    assert above(progress).bitmap == encode_bitmap(BitMap([at - window.cursor for at in done]))
    assert list(acked_of(progress)) == list(window.acked()) == done
    assert window.acked_count() == len(done)
    assert list(window_of(SPEC, progress).acked()) == done


def test_of_ranges_that_do_not_fit_the_lowest_are_stored() -> None:
    scattered = window_with(300_000, range(1, 300_000, 3))
    paired = Window(0, WindowLimits(), acked=OffsetSet.of(at for at in range(1, 30_000) if at % 3))

    for window in (scattered, paired):
        progress = progress_of(window.copied(), SPEC, 1)
        assert len(above(progress).bitmap) <= ACKED_BYTES_MAX
        kept = acked_of(progress).offsets()
        assert len(kept) > 900
        assert np.array_equal(kept, window.acked().offsets()[: len(kept)])


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 10), st.integers(0, 40))
def test_those_delivered_most_often_are_stored_and_of_these_the_first(tried: list[int], count: int, end: int) -> None:
    attempts = {7 + place: number for place, number in enumerate(tried) if number}
    window = Window(7, WindowLimits(records_max=100), attempts=attempts)
    window.offer(7, [(7, 7 + end)], 7 + end)

    most = sorted(attempts.items(), key=lambda item: (-item[1], item[0]))[:count]
    assert window.attempts(count) == dict(sorted(most))
