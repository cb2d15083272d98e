"""Ctrl-C where a thread is begun, or a turn or a lock is taken: no caller after it finds them taken and left undone."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

import pytest

from forebay.appends import group_commit
from forebay.appends.budget import QueueBudget
from forebay.appends.group_commit import GroupCommit
from forebay.appends.producer_window import ProducerWindow
from forebay.appends.queue import AppendQueue
from forebay.appends.ticket import Ticket
from forebay.appends.waiting import is_inside
from forebay.clock import SystemClock
from forebay.locks import Rank, RankedRLock, check_order, condition_of
from forebay.settings import WalSettings
from forebay.workers import ItemWorker, Worker

real_start = threading.Thread.start


def before(thread: threading.Thread) -> None:
    raise KeyboardInterrupt


def after(thread: threading.Thread) -> None:
    real_start(thread)
    raise KeyboardInterrupt


@pytest.mark.parametrize("strike", [before, after])
def test_a_start_that_was_interrupted_is_made_up_for_and_one_thread_works(
    monkeypatch: pytest.MonkeyPatch, strike: Callable[[threading.Thread], None]
) -> None:
    begun: list[threading.Thread] = []
    gate, reached = threading.Event(), threading.Event()

    def work() -> None:
        begun.append(threading.current_thread())
        reached.set()
        gate.wait()

    worker = Worker("tested", work, clock=SystemClock())
    monkeypatch.setattr(threading.Thread, "start", strike)
    with pytest.raises(KeyboardInterrupt):
        worker.wake()
    monkeypatch.undo()

    worker.wake()
    assert reached.wait(60)
    for _ in range(3):
        worker.start()
    gate.set()
    assert worker.stop()

    assert len(begun) == 1


def test_who_asks_after_an_interrupted_start_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    served = threading.Event()
    worker: ItemWorker[str] = ItemWorker("tested", lambda _: served.set(), clock=SystemClock())
    monkeypatch.setattr(threading.Thread, "start", before)
    with pytest.raises(KeyboardInterrupt):
        worker.ask("me")
    monkeypatch.undo()

    worker.ask("me")

    assert served.wait(60)
    assert worker.worker.stop()


class StruckClaims(dict[None, object]):
    """The claim of a group commit; the first thread that takes one is struck at that step of its way."""

    def __init__(self, step: str) -> None:
        self._step: str | None = step

    def setdefault(self, key: None, append: object) -> object:  # type: ignore[override]
        found = super().setdefault(key, append)
        self._strike("claim")
        return found

    def pop(self, key: None, *default: None) -> object:  # type: ignore[override]
        self._strike("begin")
        return super().pop(key, *default)

    def _strike(self, step: str) -> None:
        if self._step == step:
            self._step = None
            raise KeyboardInterrupt


class Appends:
    """Acknowledges what waits; the first thread that leads is struck at a step of its way."""

    def __init__(self, step: str) -> None:
        self.group = GroupCommit(
            "tested", AppendQueue(0, ProducerWindow(1, 1), WalSettings(), QueueBudget(1 << 30)), self._commit
        )
        self.group.claims = StruckClaims(step)
        self.waiting: list[Ticket] = []

    def append(self) -> int:
        ticket = Ticket()
        self.waiting.append(ticket)
        return self.group.wait(ticket)

    def _commit(self) -> None:
        for ticket in self.waiting:
            ticket.offset = 0
            ticket.finish()


@pytest.mark.parametrize("step", ["claim", "begin"])
def test_the_turn_of_an_interrupted_append_is_free_at_once(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Its followers waited for a second each, and one that was interrupted meanwhile left the turn taken again."""
    queue = Appends(step)
    with pytest.raises(KeyboardInterrupt):
        queue.append()

    monkeypatch.setattr(group_commit, "followed", lambda _: pytest.fail("it waits for a leader that is gone"))

    assert queue.append() == 0


@pytest.mark.parametrize("checked", [False, True])
def test_an_interrupt_at_any_instant_leaves_the_lock_of_a_condition_free(checked: bool) -> None:  # noqa: FBT001
    """Python's own condition keeps its lock in about every third of these."""
    check_order(on=checked)
    lock = RankedRLock(Rank.LEAF, "tested")
    condition = condition_of(lock)
    struck = 0

    def strike(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before_that = signal.signal(signal.SIGALRM, strike)
    try:
        while struck < 1000:
            try:
                signal.setitimer(signal.ITIMER_REAL, (10 + struck % 97) / 1_000_000)
                while True:
                    with condition:
                        condition.notify_all()
            except KeyboardInterrupt:
                struck += 1
            assert not is_inside(lock)(), f"interrupt {struck} left it taken"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before_that)
