"""Background workers: a step that fails, hangs or is stopped, wakes during a step, items; time by hand."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from forebay import workers
from forebay.clock import SystemClock
from forebay.errors import Unavailable
from forebay.testing.simulated.clock import ManualClock
from forebay.workers import AtWork, Background, ItemPool, ItemWorker, Worker
from tests.support.waiting import PATIENCE, until


class Gate:
    """A step stands here until the test opens it."""

    def __init__(self) -> None:
        self.reached = threading.Semaphore(0)
        self._open = threading.Semaphore(0)

    def wait(self) -> None:
        self.reached.release()
        assert self._open.acquire(timeout=PATIENCE)

    def await_reached(self) -> None:
        assert self.reached.acquire(timeout=PATIENCE)

    def open(self) -> None:
        self._open.release()


def worker(step: Callable[[], None], clock: ManualClock | None = None, **timing: float) -> Worker:
    return Worker("tested", step, clock=clock or ManualClock(), **timing)


@pytest.mark.parametrize("error", [Unavailable("away"), ZeroDivisionError("a bug"), SystemExit(1)])
def test_a_step_that_raises_is_counted_and_shown_and_the_next_comes(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    left, done = [error], threading.Event()

    def step() -> None:
        if left:
            raise left.pop()
        done.set()

    tested = worker(step)
    tested.wake()
    until(lambda: tested.status().failures == 1)
    tested.wake()

    assert done.wait(PATIENCE)
    assert tested.stop()
    status = tested.status()
    assert (status.name, status.steps, status.failures) == ("tested", 2, 1)
    assert status.error == f"{type(error).__name__}: {error}"
    assert "tested" in caplog.text


def test_the_status_tells_when_the_last_step_ended_and_how_long_it_took() -> None:
    clock, gate = ManualClock(), Gate()
    tested = worker(gate.wait, clock)
    assert (tested.status().stepped_at, tested.status().running_s) == (None, None)

    tested.wake()
    gate.await_reached()
    clock.advance(3)
    assert tested.status().running_s == 3
    gate.open()
    assert tested.stop()

    status = tested.status()
    assert (status.stepped_at, status.seconds, status.running_s) == (clock.now_ms(), 3, None)


def test_a_worker_steps_every_interval_without_being_woken() -> None:
    steps = threading.Semaphore(0)
    tested = worker(steps.release, interval_s=0.001)
    tested.start()
    for _ in range(3):
        assert steps.acquire(timeout=PATIENCE)
    assert tested.stop()


def test_a_wake_during_a_step_is_not_lost() -> None:
    gate = Gate()
    tested = worker(gate.wait)
    for _ in range(3):
        tested.wake()
        gate.await_reached()
        tested.wake()
        gate.open()
        gate.await_reached()
        gate.open()
        until(lambda: tested.status().running_s is None)
    assert tested.stop()
    assert tested.status().steps == 6


def test_a_step_that_hangs_delays_no_other_worker_and_another_thread_goes_on_with_its_work() -> None:
    clock, gate, served = ManualClock(), Gate(), list[str]()
    waiting = ["hangs", "b", "c"]

    def step() -> None:
        while waiting and hanging.goes_on():
            name = waiting.pop(0)
            if name == "hangs":
                gate.wait()
            served.append(name)

    hanging, other = worker(step, clock), Worker("other", lambda: served.append("other"), clock=clock)
    background = Background()
    background.add(hanging, other)
    hanging.wake()
    gate.await_reached()
    other.wake()
    until(lambda: served == ["other"])
    hanging.wake()
    background.relieve()
    assert [status.stuck for status in background.status()] == [0, 0]

    clock.advance(workers.STUCK_SECONDS)
    background.relieve()
    until(lambda: served == ["other", "b", "c"])
    assert [status.stuck for status in background.status()] == [1, 0]
    waiting.append("d")
    gate.open()
    until(lambda: hanging.status().stuck == 0)
    assert served == ["other", "b", "c", "hangs"], "the thread that came back leaves the rest to the other"
    hanging.wake()
    until(lambda: served[-1] == "d")
    background.stop()


def test_no_more_threads_take_over_than_may_be_stuck() -> None:
    clock, gate = ManualClock(), Gate()
    tested = worker(gate.wait, clock)
    for _ in range(workers.STUCK_MAX + 1):
        tested.wake()
        gate.await_reached()
        clock.advance(workers.STUCK_SECONDS)
    for _ in range(3):
        tested.wake()
    assert tested.status().stuck == workers.STUCK_MAX

    for _ in range(workers.STUCK_MAX + 2):
        gate.open()
    assert tested.stop()


def test_a_stop_waits_for_the_present_step_but_not_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    tested = worker(gate.wait)
    tested.wake()
    gate.await_reached()
    tested.wake()

    assert not tested.stop(0.01)
    assert "tested is left in the middle of a step" in caplog.text
    gate.open()
    assert tested.stop()
    tested.wake()
    assert tested.status().steps == 1, "it never starts again"


def test_a_step_may_stop_its_own_worker() -> None:
    done = threading.Event()

    def step() -> None:
        assert tested.stop()
        done.set()

    tested = worker(step)
    tested.wake()
    assert done.wait(PATIENCE)
    assert tested.stop()


def test_an_item_asked_for_while_it_is_served_is_served_once_more_and_by_one_thread() -> None:
    gate, served = Gate(), list[str]()

    def serve(item: str) -> None:
        gate.wait()
        served.append(item)

    clock = ManualClock()
    tested: ItemWorker[str] = ItemWorker("tested", serve, clock=clock)
    tested.ask("a")
    gate.await_reached()
    for _ in range(3):
        tested.ask("a")
    clock.advance(workers.STUCK_SECONDS)
    tested.ask("b")
    gate.await_reached()  # by the thread that took over, which leaves "a" alone
    assert tested.worker.status().stuck == 1
    for _ in range(3):
        gate.open()

    until(lambda: len(served) == 3)
    assert sorted(served) == ["a", "a", "b"]
    assert tested.worker.stop()


def test_items_that_wait_behind_one_that_hangs_are_served_by_the_thread_that_takes_over() -> None:
    """They waited until an item came that was not asked for yet."""
    gate, served = Gate(), threading.Event()

    def serve(item: str) -> None:
        if item == "hangs":
            gate.wait()
        else:
            served.set()

    clock = ManualClock()
    tested: ItemWorker[str] = ItemWorker("tested", serve, clock=clock)
    with tested.worker.changed:
        tested.ask("hangs")
        tested.ask("waits")
    gate.await_reached()
    clock.advance(workers.STUCK_SECONDS)
    tested.worker.relieve()

    assert served.wait(PATIENCE)
    gate.open()
    assert tested.worker.stop()


def test_an_item_that_cannot_be_served_keeps_no_other_from_it() -> None:
    served = threading.Event()

    def serve(item: str) -> None:
        if item == "bad":
            raise Unavailable("away")
        served.set()

    tested: ItemWorker[str] = ItemWorker("tested", serve, clock=ManualClock())
    tested.ask("bad")
    tested.ask("good")

    assert served.wait(PATIENCE)
    assert tested.worker.status().error == "Unavailable: away"
    assert tested.worker.stop()


class Struck:
    """Raises `KeyboardInterrupt` at the n-th line of the module where Python looks for one: not between two calls."""

    def __init__(self, line: int) -> None:
        self.is_over = False
        self._left = line

    def __call__(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_filename != workers.__file__:
            return None
        if event == "line" and not self.is_over:
            source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            self._left -= not source.startswith(("with ", "if not was_here", "del "))
            if self._left == 0:
                self.is_over = True
                raise KeyboardInterrupt
        return self


def test_an_interrupt_at_any_line_leaves_no_shard_taken() -> None:
    """A caller that was interrupted as it began kept all background work from the shard, for ever."""
    for line in range(1, 100):
        at_work, struck = AtWork(), Struck(line)
        sys.settrace(struck)
        try:
            with at_work.after_others("a"), at_work.after_others("a"):
                pass
            with at_work.at("a"):
                pass
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert at_work.is_free("a"), line
        if not struck.is_over:
            assert line > 15, "every line was met"
            return


def test_many_shards_are_taken_at_once_but_for_those_that_a_thread_is_at() -> None:
    at_work, keys = AtWork(), ["a", "b", "c"]
    with at_work.at("b"):
        with at_work.at_many(keys) as free:
            assert free == {"a", "c"}
            assert not any(map(at_work.is_free, keys))

        assert [at_work.is_free(key) for key in keys] == [True, False, True]
    waiting = threading.Thread(target=at_work.wait_idle, args=("a",))
    with pytest.raises(ZeroDivisionError), at_work.at_many(keys):
        waiting.start()
        raise ZeroDivisionError

    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    assert all(map(at_work.is_free, keys))


def test_an_interrupt_at_any_line_of_an_ask_leaves_a_pool_that_serves() -> None:
    """The only thread of a pool counted as woken before it was: no later call woke it."""
    for line in range(1, 100):
        served: list[int] = []
        pool: ItemPool[int] = ItemPool("tested", served.append, clock=SystemClock(), threads=1)
        pool.ask(0)
        until(lambda pool=pool: pool.status().steps == 1)  # type: ignore[misc]
        struck = Struck(line)
        sys.settrace(struck)
        try:
            pool.ask(1)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        pool.ask(2)
        until(lambda served=served: 2 in served)  # type: ignore[misc]
        assert pool.stop()
        if not struck.is_over:
            assert line > 4, "every line was met"
            return
