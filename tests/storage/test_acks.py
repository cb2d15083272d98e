"""Acknowledgements that nobody blocks for: each callback once, each waiter woken, many with one call."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import Any

import pytest

from forebay.appends.callbacks import Answered, call_back
from forebay.errors import Indeterminate, Invalid, Unavailable
from forebay.storage.acks import Ack
from tests.support.waiting import PATIENCE


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


def test_acks_of_one_round_wake_their_loop_once_when_the_round_is_over() -> None:
    """The first of them woke it: it ran in the middle of the round, for one task."""
    round_over: list[str] = []

    async def everyone() -> None:
        due: deque[Answered] = deque()
        acks = [Ack(0) for _ in range(100)]
        acks[50].add_callback(lambda _: round_over.append("callback"))
        waiting = [asyncio.ensure_future(_awaited(ack)) for ack in acks]
        await asyncio.sleep(0)
        for ack in acks:
            ack.finish(None, due)
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)

        assert len(due) == 2, "one call into the loop, and the callback behind it"
        call_back(due)
        await asyncio.gather(*waiting)

    asyncio.run(everyone())

    assert round_over == ["callback"]


def test_a_round_that_is_not_over_holds_up_no_task_of_another() -> None:
    """A closing shard answers its last appends and then syncs: tasks that waited for other topics waited for that."""

    async def both() -> None:
        slow, quick = Ack(0), Ack(0)
        waiting = [asyncio.ensure_future(_awaited(ack)) for ack in (slow, quick)]
        await asyncio.sleep(0)
        slow_round: deque[Answered] = deque()
        quick_round: deque[Answered] = deque()

        slow.finish(None, slow_round)
        quick.finish(None, quick_round)
        call_back(quick_round)
        await asyncio.wait_for(waiting[1], PATIENCE)

        call_back(slow_round)
        await asyncio.gather(*waiting)

    asyncio.run(both())


def test_an_interrupt_while_waiters_are_woken_leaves_none_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that answers is interrupted (Ctrl-C) and repeats it; later rounds of the loop wake their tasks too."""

    class Interrupted(deque[Answered]):
        def appendleft(self, _: Answered) -> None:
            raise KeyboardInterrupt

    async def all_of_them() -> None:
        loop, due = asyncio.get_running_loop(), deque[Answered]()
        first, second = Ack(0), Ack(0)
        waiting = [asyncio.ensure_future(_awaited(ack)) for ack in (first, second)]
        await asyncio.sleep(0)

        with pytest.raises(KeyboardInterrupt):
            first.finish(None, Interrupted())
        first.finish(None, due)
        with monkeypatch.context() as patched:
            patched.setattr(loop, "call_soon_threadsafe", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                call_back(due)
        call_back(due)
        await asyncio.wait_for(waiting[0], PATIENCE)
        second.finish(None, due)
        call_back(due)
        await asyncio.wait_for(waiting[1], PATIENCE)

    asyncio.run(all_of_them())


def test_a_thread_interrupted_while_it_waits_does_not_stop_the_one_that_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An interrupt (Ctrl-C) in a condition of Python's own may leave it locked for ever."""
    ack = Ack(0)

    def locked(condition: Any) -> bool:
        condition.acquire()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises((KeyboardInterrupt, Indeterminate)):
        patched.setattr("threading.Condition.__enter__", locked)
        ack.result(0.001)
    answering = threading.Thread(target=ack.finish, daemon=True)
    answering.start()
    answering.join(PATIENCE)

    assert not answering.is_alive()


def test_an_append_answered_inside_a_callback_wakes_its_task_at_once() -> None:
    """The callback may wait for what that task does."""

    async def both() -> None:
        outer, inner = Ack(0), Ack(0)
        waiting = asyncio.ensure_future(_awaited(inner))
        await asyncio.sleep(0)
        woken = threading.Event()
        waiting.add_done_callback(lambda _: woken.set())

        def work(_: Ack) -> None:
            inner.finish(None, deque())
            assert woken.wait(PATIENCE)

        outer.add_callback(work)
        due: deque[Answered] = deque()
        outer.finish(None, due)
        await asyncio.get_running_loop().run_in_executor(None, call_back, due)
        await waiting

    asyncio.run(both())


def test_a_loop_that_is_closed_does_no_harm_to_the_thread_that_answers(caplog: pytest.LogCaptureFixture) -> None:
    left: list[Ack] = [Ack(0), Ack(0)]

    async def leave() -> None:
        _ = [asyncio.ensure_future(_awaited(ack)) for ack in left]
        await asyncio.sleep(0)

    asyncio.run(leave())
    due: deque[Answered] = deque()
    for ack in left:
        ack.finish(None, due)
    call_back(due)

    assert not due
    assert caplog.text.count("event loop that waited for appends is closed") == 1


def test_many_waiters_of_one_ack_are_all_woken() -> None:
    """Threads, tasks of two loops, and two tasks of one."""
    ack, found = Ack(0), list[int]()

    async def tasks() -> None:
        found.extend(await asyncio.gather(_awaited(ack), _awaited(ack)))

    threads = [threading.Thread(target=lambda: found.append(ack.result(PATIENCE))) for _ in range(2)]
    threads += [threading.Thread(target=lambda: asyncio.run(tasks())) for _ in range(2)]
    for thread in threads:
        thread.start()
    ack.offset = 5
    ack.finish()
    for thread in threads:
        thread.join()

    assert found == [5] * 6


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


def _interrupted(*_: object) -> asyncio.Handle:
    raise KeyboardInterrupt


async def _awaited(ack: Ack) -> int:
    return await ack


def _settle(acks: list[Ack]) -> None:
    for number, ack in enumerate(acks):
        ack.offset = number
        ack.finish(Unavailable("not written") if number % 10 == 0 else None)
