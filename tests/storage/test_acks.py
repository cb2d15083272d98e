"""Acknowledgements that nobody blocks for: each callback once, each waiter woken, many with one call."""

from __future__ import annotations

import asyncio
import threading

import pytest

from forebay.errors import Indeterminate, Invalid, Unavailable
from forebay.storage.acks import Ack


def test_each_callback_is_called_once_whenever_it_was_added() -> None:
    ack, heard = Ack(3), []

    ack.add_callback(lambda settled: heard.append(("early", settled.done)))
    ack.offset = 7
    ack.finish()
    ack.add_callback(lambda settled: heard.append(("late", settled.done)))

    assert heard == [("early", True), ("late", True)]
    assert (ack.result(), ack.partition) == (7, 3)


def test_a_callback_that_fails_keeps_no_other_from_being_called(caplog: pytest.LogCaptureFixture) -> None:
    ack = Ack(0)
    heard: list[Ack] = []

    ack.add_callback(lambda _: [].pop())
    ack.add_callback(heard.append)
    ack.finish()

    assert heard == [ack]
    assert "callback of an append failed" in caplog.text


def test_callbacks_added_while_another_thread_settles_are_called_once() -> None:
    for _ in range(200):
        ack = Ack(0)
        heard: list[Ack] = []
        settling = threading.Thread(target=ack.finish)

        settling.start()
        for _ in range(20):
            ack.add_callback(heard.append)
        settling.join()

        assert heard == [ack] * 20


def test_waiting_for_an_ack_that_does_not_come_ends_in_time() -> None:
    with pytest.raises(Indeterminate, match="may still be"):
        Ack(0).result(timeout=0.001)


def test_a_time_to_wait_that_is_no_number_is_refused() -> None:
    with pytest.raises(Invalid, match="timeout is '1'"):
        Ack(0).result("1")  # type: ignore[arg-type]


def test_every_coroutine_that_awaits_is_woken_with_its_outcome() -> None:
    acks = [Ack(0) for _ in range(500)]
    settling = threading.Thread(target=_settle, args=(acks,))

    async def outcome(ack: Ack) -> int | str:
        try:
            return await ack
        except Unavailable:
            return "failed"

    async def everyone() -> list[int | str]:
        waiting = [asyncio.ensure_future(outcome(ack)) for ack in acks]
        await asyncio.sleep(0)
        settling.start()
        return await asyncio.gather(*waiting)

    found = asyncio.run(everyone())
    settling.join()

    assert found == ["failed" if number % 10 == 0 else number for number in range(500)]


def test_acks_settled_together_cost_one_call_into_the_loop() -> None:
    calls = 0

    async def everyone() -> None:
        nonlocal calls
        loop = asyncio.get_running_loop()
        whole = loop.call_soon_threadsafe

        def counted(*arguments: object, **named: object) -> asyncio.Handle:
            nonlocal calls
            calls += 1
            return whole(*arguments, **named)  # type: ignore[arg-type]

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        acks = [Ack(0) for _ in range(100)]
        waiting = [asyncio.ensure_future(_awaited(ack)) for ack in acks]
        await asyncio.sleep(0)
        for ack in acks:
            ack.finish()
        await asyncio.gather(*waiting)

    asyncio.run(everyone())

    assert calls == 1


def test_a_loop_after_another_in_the_same_thread_is_woken_too() -> None:
    async def one() -> int:
        ack = Ack(0)
        ack.offset = 1
        threading.Thread(target=ack.finish).start()
        return await ack

    assert [asyncio.run(one()) for _ in range(3)] == [1, 1, 1]


def test_a_waiter_that_was_cancelled_is_no_harm_to_others() -> None:
    async def both() -> int:
        gone, kept = Ack(0), Ack(0)
        kept.offset = 5
        cancelled = asyncio.ensure_future(_awaited(gone))
        waiting = asyncio.ensure_future(_awaited(kept))
        await asyncio.sleep(0)
        cancelled.cancel()
        gone.finish()
        kept.finish()
        return await waiting

    assert asyncio.run(both()) == 5


async def _awaited(ack: Ack) -> int:
    return await ack


def _settle(acks: list[Ack]) -> None:
    for number, ack in enumerate(acks):
        ack.offset = number
        ack.finish(Unavailable("not written") if number % 10 == 0 else None)
