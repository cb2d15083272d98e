"""The queue of a client's appends: whatever ends a request, every append has an outcome, and the next is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from forebay.client.appends import SendQueue, SentAppend, SentRecords, one_record
from forebay.errors import Closed, ForebayError, Indeterminate
from forebay.testing.simulated.clock import ManualClock

Send = Callable[[SentRecords], Awaitable[SentAppend]]


def record(value: bytes, partition: int | None = None) -> SentRecords:
    return one_record(value, None, None, None, None, partition, None, None, None)


def queue_of(send: Send) -> SendQueue:
    return SendQueue(send, ManualClock(), lambda: 1)


def test_any_error_ends_the_appends_of_its_request_alone_and_the_rest_is_sent() -> None:
    """An error that is not Forebay's own left them without an outcome, and those behind them unsent."""
    sent: list[int | None] = []

    async def send(records: SentRecords) -> SentAppend:
        await asyncio.sleep(0)
        sent.append(records.partition)
        if records.partition == 1:
            raise RuntimeError("a library failed")
        return SentAppend((), range(records.rows))

    async def run() -> list[object]:
        queue = queue_of(send)
        answered = [queue.put(record(b"x", place)) for place in (0, 1, 1, 2)]
        await queue.drain()
        assert queue.is_idle and not len(queue) and queue.queued_bytes == 0
        assert all(future.done() for future in answered)
        again = queue.put(record(b"x", 3))
        await queue.drain()
        return await asyncio.gather(*answered, again, return_exceptions=True)

    outcomes = asyncio.run(run())

    assert sent == [0, 1, 2, 3]
    assert [isinstance(outcome, RuntimeError) for outcome in outcomes] == [False, True, True, False, False]


def test_a_drain_sends_what_a_task_that_was_ended_has_left() -> None:
    async def run() -> list[object]:
        gate, begun = asyncio.Event(), asyncio.Event()

        async def send(records: SentRecords) -> SentAppend:
            begun.set()
            await gate.wait()
            return SentAppend((), range(records.rows))

        queue, others = queue_of(send), asyncio.all_tasks()
        first = queue.put(record(b"a", 0))
        await begun.wait()
        second = queue.put(record(b"b", 1))
        (sending,) = asyncio.all_tasks() - others
        sending.cancel()
        outcomes = await asyncio.gather(first, second, return_exceptions=True)
        gate.set()
        third = queue.put(record(b"c", 2))
        await queue.drain()
        return [*outcomes, third.result()]

    first, second, third = asyncio.run(asyncio.wait_for(run(), 60))

    assert isinstance(first, Indeterminate), "it may have been sent"
    assert isinstance(second, Closed), "it was not"
    assert isinstance(third, SentAppend)


def test_an_append_whose_caller_gave_up_does_not_keep_others_from_their_outcome() -> None:
    async def send(records: SentRecords) -> SentAppend:
        return SentAppend((), range(records.rows))

    async def run() -> list[SentAppend | BaseException]:
        queue = queue_of(send)
        answered = [queue.put(record(b"x", 0)) for _ in range(3)]
        answered[1].cancel()
        await queue.drain()
        return await asyncio.gather(*answered, return_exceptions=True)

    outcomes = asyncio.run(run())

    assert [type(outcome) for outcome in outcomes] == [SentAppend, asyncio.CancelledError, SentAppend]


@pytest.mark.parametrize("error", [KeyError("x"), Indeterminate("x"), MemoryError()])
def test_a_drain_ends_however_often_requests_fail(error: Exception) -> None:
    async def send(_: SentRecords) -> SentAppend:
        raise error

    async def run() -> None:
        queue = queue_of(send)
        for _ in range(3):
            answered = queue.put(record(b"x"))
            await queue.drain()
            assert isinstance(answered.exception(), (KeyError, MemoryError, ForebayError))

    asyncio.run(run())
