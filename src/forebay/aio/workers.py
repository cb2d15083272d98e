"""The threads behind an asynchronous log, and what wakes its tasks from other threads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from forebay.aio.reads import UNNAMED, ReadThreads
from forebay.errors import Closed
from forebay.live import Feeds
from forebay.storage import Topic

T = TypeVar("T")
P = ParamSpec("P")

WORKERS = 4
"""Threads for metadata and administration, for openings, and for long jobs: each of them has so many."""
ENCODERS = 2
"""Threads that only compute: more of them would wait for the interpreter."""
LOOK_SECONDS = 0.5
"""A task that waits for room in a queue looks again after this time, although no publication woke it."""


class Workers:
    """The threads for calls that may touch the disk or ask others, by what such a call may wait for.

    Reads of files and history, jobs over whole topics, the opening of shards and encoding have threads of their own:
    none of them keeps a call to the metadata store waiting.
    """

    def __init__(self, *, reads_waiting_max: int, commits_each_turn: bool, room_s: float) -> None:
        """`reads_waiting_max` reads of one caller with a name may wait for a thread."""
        self.commits_each_turn = commits_each_turn
        """Whether commits are asked for at the end of each turn of the loop: see `turns`."""
        self.room_s = room_s
        """How long an append that does not wait for its outcome waits for room in a full queue."""
        self._control = ThreadPoolExecutor(WORKERS, thread_name_prefix="forebay-aio")
        self._reads = ReadThreads(reads_waiting_max)
        self._jobs = ThreadPoolExecutor(WORKERS, thread_name_prefix="forebay-aio-job")
        self._openers = ThreadPoolExecutor(WORKERS, thread_name_prefix="forebay-aio-open")
        self._encoders = ThreadPoolExecutor(ENCODERS, thread_name_prefix="forebay-aio-encode")
        self._feeds: Feeds | None = None
        self._ended = False

    @property
    def feeds(self) -> Feeds:
        """What is followed in the event loop of the log. For calls in that loop."""
        if self._feeds is None:
            self._feeds = Feeds(self.start_reading)
        return self._feeds

    def start(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Begin the call in a thread. Cancelling what waits for it does not stop it."""
        return self._start(self._control, partial(call, *args, **kwargs))

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.start(call, *args, **kwargs)

    def start_reading(self, call: Callable[[], T], who: str = UNNAMED) -> asyncio.Future[T]:
        """As `start`, for a call that reads files or history: callers take turns. `Throttled` for one with too many."""
        self._check_open()
        started = self._reads.start(call, who)
        started.add_done_callback(_take_note)
        return started

    async def run_job(self, call: Callable[[], T]) -> T:
        """As `run`, for a call that goes over a whole topic."""
        return await self._start(self._jobs, call)

    def start_opening(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """As `start`, for a call that opens a shard: one that cannot be acquired keeps no other call waiting."""
        return self._start(self._openers, partial(call, *args, **kwargs))

    def start_encoding(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """As `start`, for a call that only computes: calls that wait for a disk or a store keep none of it waiting."""
        return self._start(self._encoders, call)

    def start_closing(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """As `start`, for the closing of the log, in a thread of its own: it waits for no other call, but ends them."""
        closer = ThreadPoolExecutor(1, thread_name_prefix="forebay-aio-close")
        closing = self._start(closer, call)
        closer.shutdown(wait=False)
        return closing

    def end(self) -> None:
        self._ended = True
        self._reads.end()
        for pool in (self._control, self._jobs, self._openers, self._encoders):
            pool.shutdown(wait=False)

    def _check_open(self) -> None:
        if self._ended:
            raise Closed("this log is closed")

    def _start(self, pool: ThreadPoolExecutor, call: Callable[[], T]) -> asyncio.Future[T]:
        self._check_open()
        started = asyncio.get_running_loop().run_in_executor(pool, call)
        started.add_done_callback(_take_note)
        return started


def _take_note(started: asyncio.Future[T]) -> None:
    """An error whose caller has gone is not worth a complaint of the event loop."""
    if not started.cancelled():
        started.exception()


class Published:
    """Lets tasks wait for the next publication in a topic, which is when its queue has room again."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.Future[None] | None = None
        """What all tasks wait for that wait now: one future, however often each looks again."""
        self._asked = False
        self._users = 0
        self._leave: Callable[[], None] | None = None

    def __enter__(self) -> Self:
        self._users += 1
        if self._leave is None:
            self._leave = self._topic.on_published(self._wake, open_only=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._users -= 1
        if self._users == 0 and self._leave is not None:
            self._leave()
            self._leave = None

    def next(self) -> asyncio.Future[None]:
        """Done at the next publication after this call."""
        if self._next is None:
            self._next = self._loop.create_future()
        return self._next

    def _wake(self) -> None:
        if not self._asked:
            self._asked = True
            wake_loop(self._loop, self._wake_waiting)

    def _wake_waiting(self) -> None:
        self._asked = False
        published, self._next = self._next, None
        if published is not None:
            published.set_result(None)


def wake_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Have `call` called in the loop; nothing if the loop has ended."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)
