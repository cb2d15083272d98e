"""The threads that read for an event loop: callers take turns, none has all of them, and each has a line of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from forebay import Closed, Throttled, Unavailable
from forebay.aio.workers import ANONYMOUS, READ, UNNAMED, Workers
from tests.support.waiting import PATIENCE, async_until

WAITING_MAX = 3


class Reads:
    """Threads, and reads that hang until they are let go, each at a key of its own."""

    def __init__(self, wait_s: float | None) -> None:
        self.workers = Workers(reads_waiting_max=WAITING_MAX, commits_each_turn=False, room_s=0.0, wait_s=wait_s)
        self.go_on = threading.Event()
        self.order: list[str] = []
        self._keys = 0

    def hang(self, who: str, key: str | None = None) -> asyncio.Future[str]:
        return self._start(who, key, wait=True)

    def read(self, who: str, key: str | None = None) -> asyncio.Future[str]:
        return self._start(who, key, wait=False)

    def _start(self, who: str, key: str | None, *, wait: bool) -> asyncio.Future[str]:
        self._keys += 1
        return self.workers.start_reading(key or f"key {self._keys}", lambda: self._read(who, wait=wait), who)

    def _read(self, who: str, *, wait: bool) -> str:
        self.order.append(who)
        assert not wait or self.go_on.wait(PATIENCE)
        return who


def run(use: Callable[[Reads], Awaitable[None]], wait_s: float | None = None) -> None:
    async def whole() -> None:
        reads = Reads(wait_s)
        try:
            async with asyncio.timeout(PATIENCE):
                await use(reads)
        finally:
            reads.go_on.set()
            reads.workers.end()

    asyncio.run(whole())


def test_a_caller_whose_reads_hang_leaves_threads_for_others() -> None:
    async def use(reads: Reads) -> None:
        hanging = [reads.hang("a") for _ in range(READ.share + 1)]
        assert await reads.read("b") == "b"
        await async_until(lambda: reads.order.count("a") == READ.share < READ.threads)
        reads.go_on.set()
        assert await asyncio.gather(*hanging) == ["a"] * len(hanging)

    run(use)


def test_reads_that_hang_at_one_place_hold_up_no_read_elsewhere_of_the_same_caller() -> None:
    async def use(reads: Reads) -> None:
        hanging = [reads.hang(ANONYMOUS, "hung") for _ in range(READ.key_max + WAITING_MAX)]
        with pytest.raises(Throttled):
            await reads.read(ANONYMOUS)
        hanging += [reads.hang(UNNAMED, "hung") for _ in range(READ.threads)]
        assert await reads.read(UNNAMED) == UNNAMED
        reads.go_on.set()
        await asyncio.gather(*hanging)

    run(use)


def test_a_caller_with_a_full_line_is_refused_and_others_are_not() -> None:
    async def use(reads: Reads) -> None:
        hanging = [reads.hang("a") for _ in range(READ.share)]
        await async_until(lambda: len(reads.order) == READ.share)
        hanging += [reads.hang("a") for _ in range(WAITING_MAX)]
        with pytest.raises(Throttled, match="reads of a wait") as refused:
            await reads.read("a")
        assert refused.value.retry_after_s
        assert await reads.read("b") == "b"
        # One whose caller has gone makes room.
        hanging[-1].cancel()
        await asyncio.wait(hanging[-1:])
        late = reads.read("a")
        reads.go_on.set()
        assert await late == "a"

    run(use)


def test_callers_without_a_name_wait_for_as_long_as_it_takes() -> None:
    async def use(reads: Reads) -> None:
        hanging = [reads.hang(UNNAMED, "hung") for _ in range(READ.threads + 2 * WAITING_MAX)]
        await async_until(lambda: len(reads.order) == READ.key_max)
        with pytest.raises(Unavailable):
            await reads.read("a", "hung")
        reads.go_on.set()
        assert len(await asyncio.gather(*hanging)) == len(hanging)

    run(use, wait_s=0.01)


def test_waiting_callers_take_turns() -> None:
    async def use(reads: Reads) -> None:
        one = threading.Event()
        hanging = [reads.hang(f"{number % 4}") for number in range(READ.threads - 1)]
        last = reads.workers.start_reading("one", one.wait, "one")
        await async_until(lambda: len(reads.order) == READ.threads - 1)
        waiting = [reads.read(who) for who in ("a", "a", "b", "c")]
        one.set()
        await asyncio.gather(*waiting)
        assert reads.order[READ.threads - 1 :] == ["a", "b", "c", "a"]
        reads.go_on.set()
        await asyncio.gather(last, *hanging)

    run(use)


def test_a_read_that_was_cancelled_while_it_waited_is_not_made() -> None:
    async def use(reads: Reads) -> None:
        hanging = [reads.hang("a") for _ in range(READ.share)]
        await async_until(lambda: len(reads.order) == READ.share)
        waiting = reads.hang("a")
        waiting.cancel()
        await asyncio.wait([waiting])
        reads.go_on.set()
        await asyncio.gather(*hanging)
        assert await reads.read("a") == "a"
        assert reads.order.count("a") == READ.share + 1

    run(use)


def test_what_a_read_raises_is_its_answer_and_the_thread_is_free_again() -> None:
    async def use(reads: Reads) -> None:
        def fail() -> None:
            raise Closed("no")

        for _ in range(READ.threads + 1):
            with pytest.raises(Closed):
                await reads.workers.start_reading("key", fail, "a")
        assert await reads.read("a") == "a"

    run(use)


def test_the_end_answers_those_that_wait() -> None:
    async def use(reads: Reads) -> None:
        hanging = [reads.hang("a") for _ in range(READ.share)]
        await async_until(lambda: len(reads.order) == READ.share)
        waiting = reads.read("a")
        reads.workers.end()
        with pytest.raises(Closed):
            await waiting
        with pytest.raises(Closed):
            await reads.read("a")
        reads.go_on.set()
        assert await asyncio.gather(*hanging) == ["a"] * READ.share, "what has begun is answered"

    run(use)
