"""Threads that run one at a time: at each gate and each lock it is drawn which of them goes on.

The same seed gives the same run. What a thread does between two gates is not interrupted, so a test puts a gate where a
real thread would wait or may be overtaken: inside each slow step, and before each lock is taken (`BatonLock`).
"""

from __future__ import annotations

import random  # noqa: TID251  # seeded: the same run again
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self

from tests.support.waiting import PATIENCE

SLOW: Final = (0, 5, 60)
"""How many gates others may pass while a thread stands at one."""


class _Actor:
    """One thread, and what it waits for."""

    def __init__(self, number: int, run: Callable[[], None]) -> None:
        self.number = number
        self.run = run
        self.may_go = threading.Lock()
        self.may_go.acquire()
        self.at: str | None = None
        """The gate that it stands at."""
        self.waits_for: BatonLock | None = None
        self.until = 0
        """It goes on no earlier than so many gates, unless no other can."""


class Baton:
    """Runs threads, one of them at a time."""

    def __init__(self, chance: random.Random, *, at_gates: float, at_locks: float) -> None:
        """How often another thread may go on where one comes to a gate, and where one comes to a lock."""
        self._chance = chance
        self._at_gates = at_gates
        self._at_locks = at_locks
        self._left: list[_Actor] = []
        self._gates = 0
        self._running: _Actor | None = None
        self._is_over = threading.Event()
        self._errors: list[BaseException] = []

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        """Run these, each in a thread of its own, until all have ended; raises what the first of them has raised."""
        self._left = [_Actor(number, call) for number, call in enumerate(calls)]
        threads = [threading.Thread(target=self._act, args=(actor,), daemon=True) for actor in self._left]
        for thread in threads:
            thread.start()
        self._go(self._chance.choice(self._left))
        assert self._is_over.wait(PATIENCE), "the threads of a schedule do not end"
        for error in self._errors:
            raise error
        for thread in threads:
            thread.join(PATIENCE)

    def gate(self, what: str, *, is_long: bool = False) -> None:
        """A slow step: it takes some time, and another thread may go on. Without effect where no schedule runs."""
        self._gates += 1
        if self._running is not None and (is_long or self._chance.random() < self._at_gates):
            self._running.at = what
            self._running.until = self._gates + self._chance.choice(SLOW)
            self._switch()

    def before_lock(self) -> None:
        """A lock is taken next."""
        if self._running is not None and self._chance.random() < self._at_locks:
            self._switch()

    def wait_for(self, lock: BatonLock) -> None:
        """Another thread has this lock."""
        actor = self._running
        assert actor is not None, "a lock is held that nobody is there to release"
        actor.waits_for = lock
        self._switch()
        actor.waits_for = None

    @property
    def parked(self) -> list[str]:
        """The gates that threads stand at."""
        return [actor.at for actor in self._left if actor.at is not None and actor is not self._running]

    @property
    def number(self) -> int:
        """Of the thread that runs; -1 outside of a schedule."""
        return -1 if self._running is None else self._running.number

    def _act(self, actor: _Actor) -> None:
        actor.may_go.acquire()
        try:
            actor.run()
        except BaseException as error:  # noqa: BLE001  # raised by `run`
            self._errors.append(error)
        self._left.remove(actor)
        self._running = None
        if self._errors or not self._left:
            self._is_over.set()
        else:
            self._go(self._next())

    def _switch(self) -> None:
        actor, other = self._running, self._next()
        assert actor is not None
        if other is not actor:
            self._go(other)
            actor.may_go.acquire()
        actor.at = None

    def _next(self) -> _Actor:
        able = [actor for actor in self._left if actor.waits_for is None or actor.waits_for.holder is None]
        assert able, "every thread waits for a lock that another one holds"
        return self._chance.choice([actor for actor in able if actor.until <= self._gates] or able)

    def _go(self, actor: _Actor) -> None:
        self._running = actor
        actor.may_go.release()


class BatonLock:
    """A lock of threads that a baton runs."""

    def __init__(self, baton: Baton) -> None:
        self._baton = baton
        self.holder: int | None = None

    def __enter__(self) -> Self:
        self._baton.before_lock()
        while self.holder is not None:
            assert self.holder != self._baton.number, "a thread takes a lock that it holds"
            self._baton.wait_for(self)
        self.holder = self._baton.number
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.holder = None
