"""The event loop of a blocking client: whoever waits in it learns that it has ended."""

from __future__ import annotations

import asyncio
import threading

import pytest

from forebay.client.loops import LoopThread
from forebay.errors import Closed, Indeterminate


async def nothing() -> None:
    """Nothing to close."""


def test_those_who_wait_get_closed_or_what_their_call_says_of_it() -> None:
    loop = LoopThread("log", nothing)
    begun = threading.Semaphore(0)
    raised: dict[str, BaseException] = {}

    async def wait() -> None:
        begun.release()
        await asyncio.Event().wait()

    async def change() -> None:
        begun.release()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise Indeterminate("it may be done") from None

    def call(name: str, work: object) -> None:
        try:
            loop.call(work)  # type: ignore[arg-type]
        except BaseException as error:  # noqa: BLE001 - looked at below
            raised[name] = error

    threads = [threading.Thread(target=call, args=each) for each in (("wait", wait), ("change", change))]
    for thread in threads:
        thread.start()
        assert begun.acquire(timeout=60)
    loop.end()
    for thread in threads:
        thread.join(60)

    assert {name: type(error) for name, error in raised.items()} == {"wait": Closed, "change": Indeterminate}
    with pytest.raises(Closed):
        loop.call(nothing)


def test_calls_that_come_while_the_loop_ends_do_not_wait_for_ever() -> None:
    for _ in range(20):
        loop = LoopThread("log", nothing)
        outcomes: list[type] = []

        def call(loop: LoopThread = loop, outcomes: list[type] = outcomes) -> None:
            while True:
                try:
                    loop.call(nothing)
                except Closed:
                    outcomes.append(Closed)
                    return

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        loop.end()
        for thread in threads:
            thread.join(60)
        assert outcomes == [Closed] * 4
