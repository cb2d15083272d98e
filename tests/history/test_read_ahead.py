"""Reading ahead: the bytes asked for, fetched once where a reader goes through in order, and few of them held."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.blobs.blocks import RUNS_MAX, Budget, ReadAhead
from forebay.errors import Closed, Unavailable
from forebay.history import FIRST_BYTES
from forebay.testing.inside import inside
from tests.support.waiting import until

BLOCK_BYTES = 4 * FIRST_BYTES
PAGE_BYTES = FIRST_BYTES // 2
CONTENT = np.arange(10 * BLOCK_BYTES // 4, dtype=">u4").tobytes()


class Fetches:
    """An object whose ranges are fetched; remembers which were."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.asked: list[tuple[int, int]] = []
        self.failing = 0

    def range(self, start: int, stop: int) -> bytes:
        self.asked.append((start, stop))
        if self.failing:
            self.failing -= 1
            raise Unavailable("the store is away")
        return self.content[start:stop]

    @property
    def bytes(self) -> int:
        return sum(stop - start for start, stop in self.asked)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def over(fetches: Fetches, pool: ThreadPoolExecutor, block_bytes: int = BLOCK_BYTES) -> ReadAhead:
    return ReadAhead(fetches.range, len(fetches.content), pool=pool, block_bytes=block_bytes, blocks_ahead=2)


def settled(pool: ThreadPoolExecutor) -> None:
    """Wait until everything asked for has been fetched."""
    for done in [pool.submit(int) for _ in range(8)]:
        done.result()


@given(st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 2_200)), max_size=30))
def test_reads_in_any_order_give_the_bytes_asked_for(reads: list[tuple[int, int]]) -> None:
    with ThreadPoolExecutor(2) as pool:
        source = over(Fetches(CONTENT[:2_000]), pool, block_bytes=64)

        for position, length in reads:
            assert source.read_at(length, position) == CONTENT[:2_000][position : position + length]


def test_a_read_somewhere_fetches_what_it_asks_for_and_no_more(pool: ThreadPoolExecutor) -> None:
    fetches = Fetches(CONTENT)

    over(fetches, pool).read_at(1_000, 70_000)
    settled(pool)

    assert fetches.asked == [(70_000, 71_000)]


def test_a_reader_that_goes_on_finds_the_next_blocks_fetched(pool: ThreadPoolExecutor) -> None:
    fetches = Fetches(CONTENT)
    source = over(fetches, pool)
    source.read_at(PAGE_BYTES, 0)

    source.read_at(PAGE_BYTES, PAGE_BYTES)
    settled(pool)

    assert max(stop for _, stop in fetches.asked) >= 2 * PAGE_BYTES + FIRST_BYTES
    before = list(fetches.asked)
    source.read_at(PAGE_BYTES, 2 * PAGE_BYTES)
    settled(pool)
    assert all(start >= 2 * PAGE_BYTES + FIRST_BYTES for start, _ in fetches.asked[len(before) :])


@pytest.mark.parametrize("readers", [1, 2, RUNS_MAX])
def test_each_reader_in_order_fetches_each_byte_once_in_large_blocks(readers: int, pool: ThreadPoolExecutor) -> None:
    fetches = Fetches(CONTENT)
    source = over(fetches, pool)
    share = len(CONTENT) // readers

    for step in range(0, share, PAGE_BYTES):
        for reader in range(readers):
            position = reader * share + step
            length = min(PAGE_BYTES, share - step)
            assert source.read_at(length, position) == CONTENT[position : position + length]

    settled(pool)
    # A reader may have fetched ahead into what the next reader began with.
    assert fetches.bytes <= len(CONTENT) + (readers - 1) * 3 * BLOCK_BYTES
    assert len(fetches.asked) < len(CONTENT) // BLOCK_BYTES + 8 * readers


def test_a_failed_fetch_is_reported_and_asked_for_again(pool: ThreadPoolExecutor) -> None:
    fetches = Fetches(CONTENT)
    source = over(fetches, pool)
    source.read_at(PAGE_BYTES, 0)
    fetches.failing = 3

    with pytest.raises(Unavailable):
        source.read_at(PAGE_BYTES, PAGE_BYTES)
    settled(pool)
    fetches.failing = 0

    assert source.read_at(PAGE_BYTES, PAGE_BYTES) == CONTENT[PAGE_BYTES : 2 * PAGE_BYTES]


def test_whichever_caller_reads_when_the_threads_have_ended_learns_that_it_is_closed(pool: ThreadPoolExecutor) -> None:
    source, busy, over_now = over(Fetches(CONTENT), pool), threading.Barrier(3), threading.Event()
    for _ in range(2):
        pool.submit(lambda: (busy.wait(30), over_now.wait(30)))
    busy.wait(30)
    with ThreadPoolExecutor(1) as readers:
        # No thread is free, so that nothing of it is fetched before the end.
        reading = readers.submit(source.read_at, PAGE_BYTES, 0)
        until(lambda: pool._work_queue.qsize() == 1)
        pool.shutdown(wait=False, cancel_futures=True)
        with pytest.raises(Closed, match="open it again"):
            reading.result(30)
    over_now.set()
    with pytest.raises(Closed, match="open it again"):
        source.read_at(PAGE_BYTES, 0)


def test_a_machine_without_room_for_a_thread_has_closed_nothing(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    source = over(Fetches(CONTENT), pool)
    with monkeypatch.context() as machine:
        machine.setattr(threading.Thread, "start", full)
        with pytest.raises(Unavailable, match="can't start new thread.*try again"):
            source.read_at(PAGE_BYTES, 0)

    assert source.read_at(PAGE_BYTES, 0) == CONTENT[:PAGE_BYTES]


def test_few_blocks_are_held_and_none_after_the_end(pool: ThreadPoolExecutor) -> None:
    source = over(Fetches(CONTENT), pool)
    most = 0

    for position in range(0, len(CONTENT), PAGE_BYTES):
        source.read_at(PAGE_BYTES, position)
        most = max(most, inside(source).blocks)
    at_the_end = inside(source).runs
    for position in range(0, len(CONTENT) - BLOCK_BYTES, BLOCK_BYTES):
        source.read_at(100, position)

    assert 2 < most <= 4
    assert at_the_end == 0
    assert inside(source).runs == RUNS_MAX


def test_all_readers_together_hold_no_more_than_their_budget(pool: ThreadPoolExecutor) -> None:
    budget = Budget(3 * BLOCK_BYTES)
    objects = [Fetches(CONTENT) for _ in range(6)]
    readers = [
        ReadAhead(o.range, len(CONTENT), pool=pool, block_bytes=BLOCK_BYTES, blocks_ahead=2, budget=budget)
        for o in objects
    ]
    for reader in readers:
        for position in (0, 1_000, 2_000):
            assert reader.read_at(1_000, position) == CONTENT[position : position + 1_000]

    held = [inside(reader).held_bytes for reader in readers]
    assert 0 < sum(held) <= 3 * BLOCK_BYTES
    assert sum(held) == inside(readers[0]).budget_used
    for reader in readers:
        assert reader.read_at(1_000, 3_000) == CONTENT[3_000:4_000]
        reader.close()
    assert inside(readers[0]).budget_used == 0
