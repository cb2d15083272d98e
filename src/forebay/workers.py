"""Background threads: a worker has a name, a step and an interval, and shows how it fares.

Knows nothing of what the steps do. A worker has no thread before it is first needed. An exception in a step is logged,
counted and shown, and the worker goes on. A step that hangs does not end the work: another thread takes it over, and
the one that hung ends when it comes back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Generic, NamedTuple, Protocol, TypeVar

from forebay.clock import Clock
from forebay.errors import ForebayError
from forebay.locks import Rank, RankedCondition, RankedRLock, condition_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

STUCK_SECONDS = 5.0
"""After so long at one thing a thread counts as stuck, and another takes the work over."""
STUCK_MAX = 4
"""So many stuck threads a worker may leave behind; with one more it waits until one of them comes back."""
FRESH_MAX = 32
"""So many threads of a pool work at most in the place of those that are stuck."""
STUCK_NAMED = 5
"""So many of the things that threads are stuck at are named in a log line."""
NOTICE_SECONDS = 1.0
"""A thread that waits until others have left a shard looks so often whether they have."""
STOP_SECONDS = 10.0
"""So long a closing log waits for a step that is under way, a store that does not answer included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """How a background worker fares."""

    name: str
    steps: int
    """How many steps have ended."""
    stepped_at: int | None
    """When the last of them ended, in milliseconds since 1970; `None` before the first."""
    seconds: float
    """How long the last of them took."""
    running_s: float | None
    """For how long the present step has been at one thing, usually one shard; `None` between two steps."""
    stuck: int
    """Threads that have not come back from a step that others have taken over."""
    failures: int
    """How many steps, or parts of one, have failed."""
    error: str | None
    """What the newest failure was."""


class Worker:
    """One background thread with a name, a step and an interval.

    The thread begins with the first `start` or `wake`. It steps `delay_s` after each `wake`, so that several count as
    one, and every `interval_s` without one. Nothing here waits for a step but `stop`.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], None],
        *,
        clock: Clock,
        interval_s: float | None = None,
        delay_s: float = 0.0,
        stuck_s: float | None = None,
    ) -> None:
        self.name = name
        self._step = step
        self._clock = clock
        self._interval_s = interval_s
        self._delay_s = delay_s
        self._stuck_s = stuck_s
        self.changed = RankedCondition(Rank.LEAF, "workers.changed")
        """Its lock. A step may keep what it takes its work from under it."""
        self._threads: list[threading.Thread] = []
        """The one that works comes last; those before it are stuck."""
        self._is_woken = self._is_stopped = False
        self._began: float | None = None
        """When the thread that works began what it is at."""
        self._steps = self._failures = 0
        self._stepped_at: int | None = None
        self._seconds = 0.0
        self._error: str | None = None

    def start(self) -> None:
        """Have the thread run from now on."""
        with self.changed:
            self._start()

    def wake(self) -> None:
        """Step soon. A wake during a step brings another step."""
        if self._is_woken:
            self.relieve()
            return
        with self.changed:
            self._start()
            self.changed.notify_all()
            # Last: an interrupt (Ctrl-C) before this leaves the worker as it was, and the next call wakes it.
            self._is_woken = True
        self.relieve()

    def goes_on(self) -> bool:
        """For a step, between two shards: whether to do the next one. It shows that the thread is not stuck.

        False once the worker is stopped, and in a thread that was stuck and whose work another has taken over.
        A caller that runs the step in a thread of its own goes on.
        """
        with self.changed:
            if self._is_at_work():
                self._began = self._clock.monotonic()
                return not self._is_stopped
            return threading.current_thread() not in self._threads

    def relieve(self) -> None:
        """Have another thread take the work over if the present one is stuck. Called by other threads, waits never."""
        if not self._is_stuck():
            return
        with self.changed:
            if self._is_stuck() and len(self._threads) <= STUCK_MAX and not self._is_stopped:
                logger.warning("%s has not come back for a while: another thread goes on with its work", self.name)
                # The step that hangs leaves work behind, and what asked for that does not ask again.
                self._is_woken = True
                self._begun()

    def note_failure(self, error: BaseException) -> None:
        """Count and show a failure that the step itself has logged."""
        with self.changed:
            self._failures += 1
            self._error = f"{type(error).__name__}: {error}"

    def status(self) -> WorkerStatus:
        """How it fares now."""
        with self.changed:
            return WorkerStatus(
                name=self.name,
                steps=self._steps,
                stepped_at=self._stepped_at,
                seconds=self._seconds,
                running_s=None if self._began is None else self._clock.monotonic() - self._began,
                stuck=max(0, len(self._threads) - 1),
                failures=self._failures,
                error=self._error,
            )

    def halt(self) -> None:
        """Begin no more steps, for ever. Does not wait for the present one."""
        with self.changed:
            self._is_stopped = True
            self.changed.notify_all()

    def stop(self, seconds_max: float = STOP_SECONDS) -> bool:
        """Halt, and wait so long for the present step; whether it has ended. A step that calls this does not wait."""
        self.halt()
        with self.changed:
            threads = list(self._threads)
        return _have_ended(threads, self.name, self._clock, seconds_max)

    def is_inside(self) -> bool:
        """Whether the calling thread holds the lock of this worker: a signal handler may have interrupted it there."""
        return bool(self.changed._is_owned())  # type: ignore[attr-defined]

    def _start(self) -> None:
        if not self._threads and not self._is_stopped:
            self._begun()

    def _begun(self) -> None:
        """Begin a thread that works from now on.

        An exception in between (Ctrl-C) may leave a thread behind that is not listed yet: it lists itself, unless
        another was begun meanwhile, and then it ends.
        """
        before = len(self._threads)
        thread = threading.Thread(target=self._run, args=(before,), name=self.name, daemon=True)
        thread.start()
        self._list(thread, before)

    def _list(self, thread: threading.Thread, before: int) -> None:
        """The thread that works is this one, if none was listed since there were `before`."""
        if thread not in self._threads and len(self._threads) == before:
            self._threads.append(thread)
            self._began = None

    def _is_at_work(self) -> bool:
        return bool(self._threads) and self._threads[-1] is threading.current_thread()

    def _is_stuck(self) -> bool:
        began, stuck_s = self._began, STUCK_SECONDS if self._stuck_s is None else self._stuck_s
        return began is not None and self._clock.monotonic() - began >= stuck_s

    def _run(self, before: int) -> None:
        with self.changed:
            self._list(threading.current_thread(), before)
        while self._is_due():
            began = self._clock.monotonic()
            try:
                self._step()
            except ForebayError as error:
                logger.warning("%s: %s", self.name, error)
                self.note_failure(error)
            except BaseException as error:
                # Also what is no `Exception`, as a callback may raise it: the worker serves others, and goes on.
                logger.exception("%s failed, and goes on", self.name)
                self.note_failure(error)
            with self.changed:
                self._steps += 1
                self._stepped_at = self._clock.now_ms()
                self._seconds = self._clock.monotonic() - began
                if self._is_at_work():
                    self._began = None
                self.changed.notify_all()
        with self.changed:
            if threading.current_thread() in self._threads and not self._is_stopped:
                self._threads.remove(threading.current_thread())

    def _is_due(self) -> bool:
        """Wait until the next step is due; false if the calling thread is to end."""
        with self.changed:
            if self._is_at_work():
                self.changed.wait_for(lambda: self._is_woken or self._is_stopped, self._interval_s)
            if self._delay_s and self._is_at_work():
                self.changed.wait_for(lambda: self._is_stopped, self._delay_s)
            if self._is_stopped or not self._is_at_work():
                return False
            # Before the step: what is asked for from here on is not lost.
            self._is_woken = False
            self._began = self._clock.monotonic()
            return True


class ItemWorker(Generic[T]):
    """A worker that does one thing for each item that it is asked for; an item asked for twice is served once.

    No item is served by two threads at a time. What fails is logged, and the next item is served.
    """

    def __init__(self, name: str, serve: Callable[[T], None], *, clock: Clock, delay_s: float = 0.0) -> None:
        self.worker = Worker(name, self.step, clock=clock, delay_s=delay_s)
        self._serve = serve
        self._asked: dict[T, None] = {}
        self._serving: set[T] = set()

    def ask(self, item: T) -> None:
        """Serve the item soon; if it is being served, once more after that."""
        if item in self._asked:
            self.worker.relieve()
            return
        with self.worker.changed:
            self.worker.wake()
            # Last: an item that is in here is served, also if an interrupt (Ctrl-C) comes now.
            self._asked[item] = None

    def step(self) -> None:
        """Serve each item that was asked for before, in that order. Called by the worker's thread, and by tests."""
        for item in list(self._asked):
            if not self.worker.goes_on():
                return
            if self._is_taken(item):
                try:
                    self._serve_guarded(item)
                finally:
                    self._leave(item)

    def _is_taken(self, item: T) -> bool:
        """Whether the calling thread is to serve the item: it waits still, and no other thread serves it."""
        with self.worker.changed:
            if item not in self._asked or item in self._serving:
                return False
            self._serving.add(item)
            # Before it is served: an `ask` from here on asks for another time.
            del self._asked[item]
            return True

    def _leave(self, item: T) -> None:
        with self.worker.changed:
            self._serving.discard(item)
            if item in self._asked:
                self.worker.wake()

    def _serve_guarded(self, item: T) -> None:
        try:
            self._serve(item)
        except ForebayError as error:
            logger.warning("%s: %s", self.worker.name, error)
            self.worker.note_failure(error)
        except BaseException as error:
            # Also what is no `Exception`, as a callback may raise it: the thread serves others, and goes on.
            logger.exception("%s failed", self.worker.name)
            self.worker.note_failure(error)


class ServeMany(NamedTuple, Generic[T]):
    """How a thread of a pool serves many items at once, where so many wait; up to `count_max` of them."""

    serve: Callable[[Sequence[T]], None]
    count_min: int
    count_max: int


class ItemPool(Generic[T]):
    """A few threads that do one thing for each item they are asked for; an item asked for twice is served once.

    Any free thread serves the item that has waited longest, and no item is served by two threads at a time: an item
    that hangs keeps one thread, and the others go on. Where all of them hang, as many more are begun. A thread begins
    when it is first needed. The lock is a leaf, held for single steps.

    With `patience_s` one thread does all the work while it gets on with it, which is quicker where the work is mostly
    the interpreter's: another one joins in when the first has been at one item for so long.

    With `many` a thread that finds enough items waiting serves them all in one call.
    """

    def __init__(
        self,
        name: str,
        serve: Callable[[T], None],
        *,
        clock: Clock,
        threads: int,
        patience_s: float = 0.0,
        stuck_s: float = STUCK_SECONDS,
        stuck_max: int = STUCK_MAX,
        many: ServeMany[T] | None = None,
        name_of: Callable[[T], str] = str,
    ) -> None:
        """A thread that is at its items for `stuck_s` counts as stuck, and another is begun in its place; for
        `stuck_max` of them at most. `name_of` is an item in the log's words.
        """
        self.name = name
        self._stuck_max = stuck_max
        self._name_of = name_of
        self._patience_s = patience_s
        self._stuck_s = stuck_s
        self._serve = serve
        self._many = many
        self._clock = clock
        self._threads_max = threads
        self._lock = RankedRLock(Rank.LEAF, "workers.pool")
        self._changed = condition_of(self._lock)
        self._patient = condition_of(self._lock)
        """What the one thread waits for that has an item to serve and sees another at work."""
        self._is_patient = False
        self._asked: dict[T, None] = {}
        self._serving: dict[T, float] = {}
        """Since when each of them is served."""
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        """Threads that wait, and that no `ask` has woken yet."""
        self._is_stopped = False
        self._steps = self._failures = 0
        self._stepped_at: int | None = None
        self._seconds = 0.0
        self._error: str | None = None

    def ask(self, item: T) -> None:
        """Serve the item soon; if it is being served, once more after that. Waits for nothing."""
        if item in self._asked:
            self.relieve()
            return
        with self._changed:
            if item not in self._serving and not (self._is_patient and self._serving):
                self._rouse()
            # Last: an item that is in here is served, also if an interrupt (Ctrl-C) comes now.
            self._asked[item] = None

    def relieve(self) -> None:
        """Begin another thread if all hang while items wait. Called by other threads, waits never."""
        if self._asked and not self._idle and self._stuck():
            with self._changed:
                self._rouse()

    def status(self) -> WorkerStatus:
        """How they fare now."""
        with self._changed:
            now = self._clock.monotonic()
            return WorkerStatus(
                name=self.name,
                steps=self._steps,
                stepped_at=self._stepped_at,
                seconds=self._seconds,
                running_s=max((now - since for since in self._serving.values()), default=None),
                stuck=self._stuck(),
                failures=self._failures,
                error=self._error,
            )

    def halt(self) -> None:
        """Serve no more items, for ever. Does not wait for those that are being served."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
            self._patient.notify_all()

    def stop(self, seconds_max: float = STOP_SECONDS) -> bool:
        """Halt, and wait so long for what is being served; whether that has ended. A thread of the pool does not wait
        for itself."""
        self.halt()
        with self._changed:
            threads = list(self._threads)
        return _have_ended(threads, self.name, self._clock, seconds_max)

    def is_inside(self) -> bool:
        """Whether the calling thread holds the lock: a signal handler may have interrupted it there."""
        return bool(self._changed._is_owned())  # type: ignore[attr-defined]

    def _rouse(self) -> None:
        """Have one more thread look for items. The caller holds the lock.

        An exception in between (Ctrl-C) may leave a thread behind that is not listed yet: it lists itself.
        """
        if self._idle:
            # In this order: a thread that waits and does not count as idle would never be woken again.
            self._changed.notify()
            self._idle -= 1
        elif len(self._threads) < self._fresh_max() + min(self._stuck(), self._stuck_max) and not self._is_stopped:
            thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            thread.start()
            self._threads.add(thread)

    def _fresh_max(self) -> int:
        """How many threads work beside those that are stuck: as many as those, so that their number doubles with each
        look as long as new ones get stuck, too, and what does not hang is soon served."""
        return max(self._threads_max, min(self._stuck(), FRESH_MAX))

    def _stuck(self) -> int:
        """How many threads have been at their items for too long: those that one thread serves began at once."""
        before = self._clock.monotonic() - self._stuck_s
        return len({since for since in tuple(self._serving.values()) if since <= before})

    def _run(self) -> None:
        with self._changed:
            self._threads.add(threading.current_thread())
            before = self._clock.monotonic() - self._stuck_s
            stuck = [item for item, since in self._serving.items() if since <= before]
        if stuck:
            named = ", ".join(map(self._name_of, stuck[:STUCK_NAMED]))
            logger.warning(
                "%s: no answer for more than %g s at %s%s: another thread goes on with the others; look at the disk or "
                "the store if this goes on",
                self.name, self._stuck_s, named, ", …" if len(stuck) > STUCK_NAMED else "",
            )  # fmt: skip
        served: list[T] = []
        while self._take(served):
            self._serve_guarded(served)

    def _take(self, served: list[T]) -> bool:
        """Leave the items that were served, and wait for others in their place that no other thread serves.

        False if the calling thread is to end.
        """
        with self._lock:
            while served:
                self._seconds = self._clock.monotonic() - self._serving.pop(served.pop())
                self._steps += 1
                self._stepped_at = self._clock.now_ms()
            while not self._is_stopped and len(self._threads) - self._stuck() <= self._fresh_max():
                items = self._next()
                if not items or (self._is_patient and self._patience_left() > 0):
                    self._idle += 1
                    self._changed.wait()
                elif (left := self._patience_left()) > 0:
                    self._is_patient = True
                    self._patient.wait(left)
                    self._is_patient = False
                else:
                    now = self._clock.monotonic()
                    for item in items:
                        # Before it is served: an `ask` from here on asks for another time.
                        del self._asked[item]
                        self._serving[item] = now
                        served.append(item)
                    # Items that are asked for while they are served wake no thread: this one may leave some of them.
                    # Where threads are stuck, those in their place are begun one by the other, not one at each look.
                    is_slow = bool(self._patience_s) and not self._is_patient
                    if self._asked and (len(items) > 1 or is_slow or self._stuck()):
                        self._rouse()
                    return True
            self._threads.discard(threading.current_thread())
            if self._asked:
                # Those that took over from this thread while it was stuck may all wait: no `ask` wakes one for these.
                self._rouse()
            return False

    def _next(self) -> list[T]:
        """What the calling thread is to serve, if anything: the item that has waited longest, or many of them."""
        waiting = (item for item in self._asked if item not in self._serving)
        if self._many is None:
            return list(islice(waiting, 1))
        found = list(islice(waiting, self._many.count_max))
        return found if len(found) >= self._many.count_min else found[:1]

    def _patience_left(self) -> float:
        """For how long the thread that began its item last is given to get on with the next one."""
        newest = max(self._serving.values(), default=None) if self._patience_s else None
        return 0.0 if newest is None else newest + self._patience_s - self._clock.monotonic()

    def _serve_guarded(self, items: list[T]) -> None:
        try:
            if self._many is not None and len(items) > 1:
                self._many.serve(list(items))
            else:
                self._serve(items[0])
        except BaseException as error:
            # Also what is no `Exception`, as a callback may raise it: the thread serves others, and goes on.
            if isinstance(error, ForebayError):
                logger.warning("%s: %s", self.name, error)
            else:
                logger.exception("%s failed", self.name)
            with self._changed:
                self._failures += 1
                self._error = f"{type(error).__name__}: {error}"


class RunsBehind(Protocol):
    """A worker of an open log, as its end and its status know it."""

    def status(self) -> WorkerStatus:
        """How it fares now."""

    def relieve(self) -> None:
        """Have another thread take over from one that is stuck. Waits for nothing."""

    def halt(self) -> None:
        """Begin nothing more, for ever. Does not wait for what is under way."""

    def stop(self) -> bool:
        """Halt, and wait for a limited time for what is under way; whether that has ended."""


class Background:
    """The workers of one open log."""

    def __init__(self) -> None:
        self._workers: list[RunsBehind] = []

    def add(self, *workers: RunsBehind) -> None:
        """Hold these too."""
        self._workers += workers

    def status(self) -> tuple[WorkerStatus, ...]:
        """How each of them fares."""
        return tuple(worker.status() for worker in self._workers)

    def relieve(self) -> None:
        """Have other threads take over from those that are stuck. Called by the steps of several workers."""
        for worker in self._workers:
            worker.relieve()

    def stop(self) -> None:
        """Stop them all, and wait for their present steps within the limit of each."""
        for worker in self._workers:
            worker.halt()
        for worker in self._workers:
            worker.stop()


class AtWork:
    """Which shards, or other things, the threads of one worker are at: one thread for each, and none waits for another.

    The lock is a leaf, held for single steps.
    """

    def __init__(self) -> None:
        self._changed = RankedCondition(Rank.LEAF, "workers.at_work")
        self._at: dict[str, int] = {}
        """The thread at each of them."""

    @contextmanager
    def at(self, key: str) -> Iterator[bool]:
        """Inside, no other thread is at the key; false, at once, if one is: then leave it alone."""
        if not self.is_free(key):
            yield False
            return
        with self._taken(key, is_waiting=False) as is_free:
            yield is_free

    @contextmanager
    def at_many(self, keys: Iterable[str]) -> Iterator[Set[str]]:
        """As `at`, for many at a fraction of its cost: gives out the keys that no thread is at, and leaves the others.

        Called by a background worker, which no interrupt (Ctrl-C) reaches.
        """
        with self._changed:
            free = dict.fromkeys((key for key in keys if self.is_free(key)), threading.get_ident())
            self._at |= free
        try:
            yield free.keys()
        finally:
            with self._changed:
                for key in free:
                    del self._at[key]
                self._changed.notify_all()

    @contextmanager
    def after_others(self, key: str) -> Iterator[None]:
        """As `at`, for a caller that may wait until the other thread has left. It holds no lock that thread needs."""
        with self._taken(key, is_waiting=True):
            yield

    def is_free(self, key: str) -> bool:
        """Whether no thread is at it, so that `at` would be true."""
        return key not in self._at

    def is_idle(self, key: str) -> bool:
        """Whether no other thread is at it. The calling thread may be, in a callback: it must not wait for itself."""
        return self._at.get(key, threading.get_ident()) == threading.get_ident()

    def wait_idle(self, key: str) -> None:
        """Return once no other thread is at it. The caller has seen to it that none begins."""
        with self._changed:
            self._wait(key)

    @contextmanager
    def _taken(self, key: str, *, is_waiting: bool) -> Iterator[bool]:
        """Be at the key, if no other thread is or after it has left. An interrupt (Ctrl-C) leaves no key taken."""
        this = threading.get_ident()
        was_here = self._at.get(key) == this
        try:
            with self._changed:
                if is_waiting:
                    self._wait(key)
                yielded = self.is_idle(key)
                if yielded:
                    self._at[key] = this
            yield yielded
        finally:
            # No call before the key is out: an interrupt that comes here is raised after that.
            if not was_here and key in self._at and self._at[key] == this:
                del self._at[key]
                with self._changed:
                    self._changed.notify_all()

    def _wait(self, key: str) -> None:
        # Looks again now and then: an interrupt may come between the leaving of a thread and its notice.
        while not self._changed.wait_for(lambda: self.is_idle(key), NOTICE_SECONDS):
            pass


def _have_ended(threads: Iterable[threading.Thread], name: str, clock: Clock, seconds_max: float) -> bool:
    """Wait so long for threads that take no more work; whether they have ended. The calling thread is left out."""
    deadline = clock.monotonic() + seconds_max
    others = [thread for thread in threads if thread is not threading.current_thread()]
    for thread in others:
        thread.join(max(0.0, deadline - clock.monotonic()))
    if any(thread.is_alive() for thread in others):
        logger.warning("%s is left in the middle of a step, which has not ended for %d s", name, seconds_max)
        return False
    return True
