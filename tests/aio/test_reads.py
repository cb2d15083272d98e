"""The threads that read for an event loop: callers take turns, none has all of them, and each has a line of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from forebay import Closed, Throttled
from forebay.aio.reads import READERS, READERS_EACH_MAX, UNNAMED, ReadThreads
from tests.support.waiting import PATIENCE

WAITING_MAX = 3


class Reads:
    """Read threads, and reads that hang until they are let go."""

    def __init__(self) -> None:
        self.threads = ReadThreads(WAITING_MAX)
        self.go_on = threading.Event()
        self.order: list[str] = []

    def hang(self, who: str) -> asyncio.Future[str]:
        return self.threads.start(lambda: self._read(who, wait=True), who)

    def read(self, who: str) -> asyncio.Future[str]:
        return self.threads.start(lambda: self._read(who, wait=False), who)

    def _read(self, who: str, *, wait: bool) -> str:
        self.order.append(who)
        assert not wait or self.go_on.wait(PATIENCE)
        return who


def run(use: Callable[[Reads], Awaitable[None]]) -> None:
    async def whole() -> None:
        reads = Reads()
        try:
            async with asyncio.timeout(PATIENCE):
                await use(reads)
        finally:
            reads.go_on.set()
            reads.threads.end()

    asyncio.run(whole())


def test_a_caller_whose_reads_hang_leaves_threads_for_others() -> None:
    async def use(reads: Reads) -> None:
        hanging = [reads.hang("a") for _ in range(READERS_EACH_MAX + 1)]
        assert await reads.read("b") == "b"
        assert reads.order.count("a") == READERS_EACH_MAX < READERS
        reads.go_on.set()
        assert await asyncio.gather(*hanging) == ["a"] * len(hanging)

    run(use)


def test_a_caller_with_a_full_line_is_refused_and_others_are_not() -> None:
    async def use(reads: Reads) -> None:
        hanging = [reads.hang("a") for _ in range(READERS_EACH_MAX + WAITING_MAX)]
        with pytest.raises(Throttled, match="reads of a wait") as refused:
            await reads.read("a")
        assert refused.value.retry_after_s
        assert await reads.read("b") == "b"
        # One whose caller has gone makes room.
        hanging[-1].cancel()
        late = reads.read("a")
        reads.go_on.set()
        assert await late == "a"

    run(use)


def test_callers_without_a_name_wait_for_as_long_as_it_takes() -> None:
    async def use(reads: Reads) -> None:
        hanging = [reads.hang(UNNAMED) for _ in range(READERS + 2 * WAITING_MAX)]
        reads.go_on.set()
        assert len(await asyncio.gather(*hanging)) == len(hanging)

    run(use)


def test_waiting_callers_take_turns() -> None:
    async def use(reads: Reads) -> None:
        one = threading.Event()
        hanging = [reads.hang(f"{number % 2}") for number in range(READERS - 1)]
        last = reads.threads.start(one.wait, "one")
        waiting = [reads.read(who) for who in ("a", "a", "b", "c")]
        one.set()
        await asyncio.gather(*waiting)
        assert reads.order[READERS - 1 :] == ["a", "b", "c", "a"]
        reads.go_on.set()
        await asyncio.gather(last, *hanging)

    run(use)


def test_a_read_that_was_cancelled_while_it_waited_is_not_made() -> None:
    async def use(reads: Reads) -> None:
        hanging = [reads.hang("a") for _ in range(READERS_EACH_MAX)]
        waiting = reads.hang("a")
        waiting.cancel()
        reads.go_on.set()
        await asyncio.gather(*hanging)
        assert await reads.read("a") == "a"
        assert reads.order.count("a") == READERS_EACH_MAX + 1

    run(use)


def test_what_a_read_raises_is_its_answer_and_the_thread_is_free_again() -> None:
    async def use(reads: Reads) -> None:
        def fail() -> None:
            raise Closed("no")

        for _ in range(READERS + 1):
            with pytest.raises(Closed):
                await reads.threads.start(fail, "a")
        assert await reads.read("a") == "a"

    run(use)


def test_the_end_answers_those_that_wait() -> None:
    async def use(reads: Reads) -> None:
        hanging = [reads.hang("a") for _ in range(READERS_EACH_MAX)]
        waiting = reads.read("a")
        reads.threads.end()
        with pytest.raises(Closed):
            await waiting
        reads.go_on.set()
        assert await asyncio.gather(*hanging) == ["a"] * READERS_EACH_MAX, "what has begun is answered"

    run(use)
