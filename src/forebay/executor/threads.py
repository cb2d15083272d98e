"""The threads that do what a schedule says.

A thread begins when it is first needed, does calls of any class, and ends after a while without one. One more thread
keeps the time while calls wait: it refuses those that are late, and has others take the place of threads that do not
come back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Hashable
from concurrent.futures import Future
from typing import Any, Final, Generic, Protocol, TypeVar

from forebay.errors import Closed, ForebayError, Unavailable
from forebay.executor.schedule import GIVEN_UP_MAX, KeyedJob, Schedule, WorkClass
from forebay.locks import Rank, RankedRLock, condition_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

IDLE_SECONDS: Final = 30.0
"""A thread that has had nothing to do for so long ends."""
LOOK_SECONDS: Final = 0.1
"""While calls wait, the thread that keeps the time looks so often at deadlines and at calls that are slow."""


class Time(Protocol):
    """The part of a clock that is needed here."""

    def monotonic(self) -> float:
        """Seconds that never go back."""


class _Call(KeyedJob, Future[T], Generic[T]):
    """A job with its work, which is its own answer. One that is cancelled before it begins leaves its line."""

    def __init__(
        self,
        kind: WorkClass,
        key: Hashable,
        caller: str,
        deadline: float | None,
        work: Callable[[], T],
        withdraw: Callable[[_Call[Any]], None],
    ) -> None:
        KeyedJob.__init__(self, kind=kind, key=key, caller=caller, deadline=deadline)
        Future.__init__(self)
        self.work = work
        self._withdraw = withdraw

    def cancel(self) -> bool:
        is_cancelled = super().cancel()
        if is_cancelled:
            self._withdraw(self)
        return is_cancelled

    def refuse(self, error: ForebayError) -> None:
        """Answer with an error, without doing the work."""
        if self.set_running_or_notify_cancel():
            self.set_exception(error)


class Executor:
    """Does calls in threads, by class of work, key and caller: see `Schedule`. Safe for concurrent use.

    The lock is a leaf, held for single steps.
    """

    def __init__(
        self, name: str, clock: Time, *, crowds: Collection[str] = ("",), given_up_max: int = GIVEN_UP_MAX
    ) -> None:
        """`name` is what its threads are called; for the rest see `Schedule`."""
        self.name = name
        self._clock = clock
        self._schedule: Schedule[_Call[Any]] = Schedule(crowds=crowds, given_up_max=given_up_max)
        self._lock = RankedRLock(Rank.LEAF, "executor.calls")
        self._asked = condition_of(self._lock)
        """What threads without a call wait for."""
        self._timing = condition_of(self._lock)
        """What the thread that keeps the time waits for while no call waits."""
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        """Threads that wait for a call."""
        self._is_coming = False
        """Whether a thread was begun or woken that has not looked for a call since: it wakes the next one."""
        self._timekeeper: threading.Thread | None = None
        self.done = 0
        """How many calls have come back."""
        self._is_ended = False
        self._has_said_degraded = False

    def start(
        self,
        kind: WorkClass,
        key: Hashable,
        work: Callable[[], T],
        *,
        caller: str = "",
        wait_s: float | None = None,
    ) -> Future[T]:
        """Do the work in a thread when it is its turn; its answer, or its error.

        If it has not begun after `wait_s` seconds it is not done any more, and the answer is `Unavailable`. Nor is work
        done whose answer is cancelled before it begins. Raises `Closed` once the executor has ended.
        """
        deadline = None if wait_s is None else self._clock.monotonic() + wait_s
        call = _Call(kind, key, caller, deadline, work, self._withdraw)
        with self._lock:
            if self._is_ended:
                raise Closed("this log is closed")
            try:
                # What is added is done, also if an interrupt (Ctrl-C) comes now: each later look for a call finds it.
                self._schedule.add(call)
            except Unavailable as error:
                refusal = error
            else:
                self._rouse()
                return call
        call.refuse(refusal)
        return call

    def waiting(self, kind: WorkClass, caller: str) -> int:
        """How many calls of a caller wait for a thread."""
        with self._lock:
            return self._schedule.waiting(kind, caller)

    def suspects(self) -> list[Hashable]:
        """What the threads that do not come back wait for."""
        with self._lock:
            return self._schedule.suspects()

    @property
    def given_up(self) -> int:
        """Threads that have not come back from a call for longer than its class allows, and no longer count."""
        return self._schedule.given_up

    @property
    def is_degraded(self) -> bool:
        """Whether so many threads do not come back that no further one is left to calls at the same places."""
        return self._schedule.is_degraded

    def halt(self) -> None:
        """Begin no more calls, for ever: those that wait are answered with `Closed`. Waits for none under way."""
        with self._lock:
            self._is_ended = True
            waiting = self._schedule.refuse_all()
            self._asked.notify_all()
            self._timing.notify_all()
        for call in waiting:
            call.refuse(Closed("this log is closed"))

    def stop(self, seconds_max: float) -> bool:
        """Halt, and wait so long for the calls under way; whether they have ended. One of them does not wait."""
        self.halt()
        with self._lock:
            threads = [thread for thread in self._threads if thread is not threading.current_thread()]
        deadline = self._clock.monotonic() + seconds_max
        for thread in threads:
            thread.join(max(0.0, deadline - self._clock.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _withdraw(self, call: _Call[Any]) -> None:
        with self._lock:
            self._schedule.withdraw(call)

    def _rouse(self) -> None:
        """Have a thread look for a call if one may begin, or keep the time if calls wait. The caller holds the lock.

        An exception in between (Ctrl-C) may leave a thread behind that is not listed yet: it lists itself.
        """
        if self._is_ended or self._is_coming:
            return
        if self._schedule.can_take():
            if self._idle:
                self._asked.notify()
                self._is_coming = True
            else:
                self._is_coming = self._begun(self._run, self.name) is not None
        elif self._schedule.has_waiting():
            if self._timekeeper is None:
                self._timekeeper = self._begun(self._keep_time, f"{self.name}-time")
            self._timing.notify()

    def _begun(self, target: Callable[[], None], name: str) -> threading.Thread | None:
        """A thread that has begun. Without one, what waits is done by the next that comes back."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            logger.warning("%s: no further thread can be begun: %s", self.name, error)
            return None
        return thread

    def _run(self) -> None:
        with self._lock:
            self._threads.add(threading.current_thread())
        while (call := self._next()) is not None:
            self._do(call)
            # Nothing of it is kept while the thread waits for the next one.
            del call

    def _next(self) -> _Call[Any] | None:
        """The call that the calling thread is to do, waited for; `None` if the thread is to end."""
        with self._lock:
            while not self._is_ended:
                self._is_coming = False
                call = self._schedule.take(self._clock.monotonic())
                # Another one that may begin now has woken no thread.
                self._rouse()
                if call is not None:
                    return call
                self._idle += 1
                is_asked = self._asked.wait(IDLE_SECONDS)
                self._idle -= 1
                if not is_asked and not self._is_coming:
                    break
            self._threads.discard(threading.current_thread())
            return None

    def _do(self, call: _Call[Any]) -> None:
        """Do the work, whose outcome is the answer, whatever it is. The thread counts as free before that."""
        work, call.work = call.work, _nothing
        if not call.set_running_or_notify_cancel():
            self._end(call)
            return
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            self._end(call)
            call.set_exception(error)
            # The error knows this frame, and the call the error.
            del call, work
        else:
            self._end(call)
            call.set_result(result)

    def _end(self, call: _Call[Any]) -> None:
        with self._lock:
            self._schedule.end(call)
            self.done += 1

    def _keep_time(self) -> None:
        """The thread that keeps the time, until the end."""
        while True:
            with self._lock:
                if self._is_ended:
                    return
                self._timing.wait(LOOK_SECONDS if self._schedule.has_waiting() else None)
            self.look()

    def look(self) -> None:
        """Refuse the calls that are late, and have other threads take the place of those that do not come back."""
        now = self._clock.monotonic()
        with self._lock:
            slow = self._schedule.give_up_slow(now)
            late = [(call, self._refusal(call)) for call in self._schedule.refuse_late(now)]
            self._rouse()
            is_degraded, has_said = self._schedule.is_degraded, self._has_said_degraded
            self._has_said_degraded = is_degraded
        for call in slow:
            logger.warning(
                "%s: no answer for more than %g s at %s (%s): another thread goes on with the others; look at the disk "
                "or the store if this goes on",
                self.name, call.kind.slow_s, call.key, call.kind.name,
            )  # fmt: skip
        if is_degraded and not has_said:
            logger.error("%s: %d threads do not come back: calls at such places are refused", self.name, self.given_up)
        for call, error in late:
            call.refuse(error)

    def _refusal(self, call: _Call[Any]) -> Unavailable:
        is_suspect = self._schedule.is_suspect(call)
        why = f"calls at {call.key} do not come back" if is_suspect else "others take that long"
        return Unavailable(
            f"no thread was free for this call ({call.kind.name}) in time, for {why}: nothing was done; try again, "
            "and look at the disk or the store if this goes on"
        )


def _nothing() -> None:
    """The work of a call that was begun."""
