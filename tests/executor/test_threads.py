"""Threads that do what the schedule says: real threads at gates, time by hand."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextvars import ContextVar

import pytest

from forebay import Closed, Unavailable
from forebay.executor import Executor, WorkClass, threads
from forebay.testing.simulated.clock import ManualClock
from tests.support.waiting import PATIENCE, until

WORK = WorkClass(name="work", threads=4, slow_s=1.0)
WAIT_S = 30.0


class GatedExecutor:
    """An executor on a clock that is turned by hand, and work that hangs until it is let go."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.executor = Executor("tested", self.clock)
        self.go_on = threading.Event()
        self.began: list[object] = []

    def hang(self, key: str, caller: str = "", wait_s: float | None = None) -> Future[str]:
        return self.executor.start(WORK, key, lambda: self._work(key, is_held=True), caller=caller, wait_s=wait_s)

    def do(self, key: str, caller: str = "", wait_s: float | None = None) -> Future[str]:
        return self.executor.start(WORK, key, lambda: self._work(key, is_held=False), caller=caller, wait_s=wait_s)

    def _work(self, key: str, *, is_held: bool) -> str:
        self.began.append(key)
        assert not is_held or self.go_on.wait(PATIENCE)
        return key

    def hang_all(self) -> list[Future[str]]:
        """All threads of the class hang, each at a key of its own."""
        hanging = [self.hang(f"hung{number}") for number in range(WORK.threads)]
        until(lambda: len(self.began) == WORK.threads)
        return hanging

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)


@pytest.fixture
def rig() -> Iterator[GatedExecutor]:
    found = GatedExecutor()
    yield found
    found.go_on.set()
    assert found.executor.stop(PATIENCE)


def test_a_call_is_answered_and_what_it_raises_is_its_answer(rig: GatedExecutor) -> None:
    assert rig.do("k").result(PATIENCE) == "k"

    def fail(error: BaseException) -> Callable[[], None]:
        def work() -> None:
            raise error

        return work

    for error in (Unavailable("no"), ZeroDivisionError(), SystemExit(3), KeyboardInterrupt()):
        with pytest.raises(type(error)) as raised:
            rig.executor.start(WORK, "k", fail(error)).result(PATIENCE)
        assert raised.value is error
    assert rig.do("k").result(PATIENCE) == "k"


def test_calls_that_hang_at_one_key_hold_up_no_other(rig: GatedExecutor) -> None:
    hanging = [rig.hang("hung") for _ in range(20)]
    assert [rig.do(f"k{number}").result(PATIENCE) for number in range(20)] == [f"k{number}" for number in range(20)]
    assert rig.began.count("hung") == WORK.share
    rig.go_on.set()
    assert [each.result(PATIENCE) for each in hanging] == ["hung"] * 20


def test_a_burst_of_calls_begins_no_more_threads_than_its_class_has(rig: GatedExecutor) -> None:
    before = threading.active_count()
    hanging = [rig.hang(f"k{number}") for number in range(100)]
    until(lambda: len(rig.began) == WORK.threads)
    assert threading.active_count() <= before + WORK.threads + 1, "one more keeps the time"
    rig.go_on.set()
    assert [each.result(PATIENCE) for each in hanging] == [f"k{number}" for number in range(100)]


def test_when_all_threads_hang_others_take_their_place(rig: GatedExecutor, caplog: pytest.LogCaptureFixture) -> None:
    hanging = rig.hang_all()
    waiting = rig.do("other")
    rig.pass_time(WORK.slow_s)
    assert waiting.result(PATIENCE) == "other"
    assert rig.executor.given_up == WORK.threads
    assert "no answer for more than 1 s at hung0 (work)" in caplog.text
    # Their keys wait in line behind others, and are served when nothing else is to be done.
    assert not rig.hang("hung0").done()
    assert rig.do("again").result(PATIENCE) == "again"
    rig.go_on.set()
    assert [each.result(PATIENCE) for each in hanging] == [f"hung{number}" for number in range(WORK.threads)]
    until(lambda: rig.executor.given_up == 0)
    assert rig.do("hung0").result(PATIENCE) == "hung0"


def test_a_call_that_has_not_begun_by_its_deadline_is_refused_and_not_done(rig: GatedExecutor) -> None:
    hanging = [rig.hang("hung")]
    until(lambda: len(rig.began) == 1)
    waiting = rig.do("hung", wait_s=WAIT_S)
    patient = rig.do("hung")
    rig.pass_time(WAIT_S)
    with pytest.raises(Unavailable, match="calls at hung do not come back"):
        waiting.result(PATIENCE)
    rig.go_on.set()
    assert [each.result(PATIENCE) for each in (*hanging, patient)] == ["hung", "hung"]
    assert rig.began == ["hung", "hung"]


def test_a_call_that_waits_behind_others_of_its_caller_is_refused_too(rig: GatedExecutor) -> None:
    hanging = rig.hang("first", "a")
    until(lambda: len(rig.began) == 1)
    waiting = rig.do("second", "a", wait_s=0.5)
    rig.pass_time(0.5)
    with pytest.raises(Unavailable, match="others take that long"):
        waiting.result(PATIENCE)
    rig.go_on.set()
    assert hanging.result(PATIENCE) == "first"


def test_a_call_that_is_cancelled_while_it_waits_is_not_done(rig: GatedExecutor) -> None:
    hanging = rig.hang("k", "a")
    until(lambda: len(rig.began) == 1)
    waiting = rig.do("k", "a")
    assert rig.executor.waiting(WORK, "a") == 1
    assert waiting.cancel()
    assert rig.executor.waiting(WORK, "a") == 0
    assert not hanging.cancel(), "it has begun"
    rig.go_on.set()
    assert hanging.result(PATIENCE) == "k"
    assert rig.do("k", "a").result(PATIENCE) == "k"
    with pytest.raises(CancelledError):
        waiting.result(PATIENCE)
    assert rig.began == ["k", "k"]


def test_beyond_the_limit_calls_at_places_that_hang_are_refused_at_once(caplog: pytest.LogCaptureFixture) -> None:
    rig = GatedExecutor()
    rig.executor = Executor("tested", rig.clock, given_up_max=WORK.threads)
    try:
        rig.hang_all()
        waiting = rig.do("other")
        assert not rig.executor.is_degraded
        rig.pass_time(WORK.slow_s)
        assert waiting.result(PATIENCE) == "other"
        assert rig.executor.is_degraded
        with pytest.raises(Unavailable, match="calls at hung1 do not come back, and 4 threads wait"):
            rig.do("hung1").result(PATIENCE)
        assert rig.do("other").result(PATIENCE) == "other"
        until(lambda: "4 threads do not come back" in caplog.text)
    finally:
        rig.go_on.set()
        assert rig.executor.stop(PATIENCE)
    assert not rig.executor.is_degraded


def test_the_end_answers_those_that_wait_and_waits_for_those_that_have_begun(rig: GatedExecutor) -> None:
    hanging, waiting = rig.hang_all(), rig.do("k")
    rig.executor.halt()
    with pytest.raises(Closed):
        waiting.result(PATIENCE)
    with pytest.raises(Closed):
        rig.do("k")
    assert not rig.executor.stop(0.0), "they hang"
    rig.go_on.set()
    assert rig.executor.stop(PATIENCE)
    assert all(each.done() for each in hanging), "what has begun is answered"


def test_a_call_that_stops_its_executor_does_not_wait_for_itself(rig: GatedExecutor) -> None:
    assert rig.executor.start(WORK, "k", lambda: rig.executor.stop(PATIENCE)).result(PATIENCE)


def test_threads_without_work_end_and_others_begin_when_there_is_some(
    rig: GatedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "IDLE_SECONDS", 0.0)
    for _ in range(50):
        assert rig.do("k").result(PATIENCE) == "k"
    until(lambda: not any(thread.name == "tested" for thread in threading.enumerate()))
    assert rig.do("k").result(PATIENCE) == "k"


def test_a_machine_without_threads_leaves_the_call_to_the_next_one(
    rig: GatedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    waiting = rig.do("first")
    monkeypatch.setattr(threading.Thread, "start", begin)
    assert rig.do("second").result(PATIENCE) == "second"
    assert waiting.result(PATIENCE) == "first"


def test_many_threads_call_at_once_and_all_are_answered(rig: GatedExecutor) -> None:
    answers: list[list[str]] = [[] for _ in range(8)]

    def call(found: list[str], caller: str) -> None:
        found += [rig.do(f"k{number % 5}", caller).result(PATIENCE) for number in range(100)]

    callers = [threading.Thread(target=call, args=(found, f"c{n}")) for n, found in enumerate(answers)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(PATIENCE)
    assert answers == [[f"k{number % 5}" for number in range(100)]] * 8


def test_nothing_of_a_call_is_kept_once_it_is_answered(rig: GatedExecutor) -> None:
    class Kept:
        """What work, answer or error may hold."""

    def answer() -> weakref.ref[Kept]:
        kept = Kept()
        rig.executor.start(WORK, "k", lambda: kept).result(PATIENCE)
        return weakref.ref(kept)

    def fail() -> weakref.ref[Kept]:
        kept = Kept()

        def work() -> None:
            raise Unavailable("no", shard=kept)

        with pytest.raises(Unavailable):
            rig.executor.start(WORK, "k", work).result(PATIENCE)
        return weakref.ref(kept)

    gc.disable()
    try:
        gone = answer(), fail()
        rig.do("k").result(PATIENCE)
        until(lambda: gone[0]() is None, 10)
    finally:
        gc.enable()
    gc.collect()
    assert gone[1]() is None


def test_calls_do_not_see_the_context_of_those_who_ask(rig: GatedExecutor) -> None:
    seen = ContextVar("seen", default="default")
    seen.set("mine")
    assert rig.executor.start(WORK, "k", seen.get).result(PATIENCE) == "default"
