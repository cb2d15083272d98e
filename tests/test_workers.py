"""Background workers: a step that fails, hangs or is stopped, wakes during a step, items; time by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from forebay import workers
from forebay.errors import Unavailable
from forebay.testing.clock import ManualClock
from forebay.workers import Background, ItemWorker, Worker
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
