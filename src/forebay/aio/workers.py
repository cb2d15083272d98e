"""The threads behind an asynchronous log, and what wakes its tasks from other threads."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import Final, ParamSpec, Self, TypeVar

from forebay.clock import SystemClock
from forebay.errors import Throttled
from forebay.executor import Executor, WorkClass
from forebay.live import Feeds
from forebay.storage import Topic
from forebay.workers import STUCK_NAMED, WorkerStatus

T = TypeVar("T")
P = ParamSpec("P")

CONTROL: Final = WorkClass(name="control", threads=8, slow_s=1.0, per_key=8)
"""Calls that ask the metadata store or memory, and nothing else: none of them may touch the disk of a shard."""
LOOK: Final = WorkClass(name="look", threads=8, slow_s=1.0)
"""As `control`, of one topic or group: where the metadata store hangs for its keys, others are answered."""
SHARD: Final = WorkClass(name="shard", threads=8, slow_s=1.0)
"""Calls at the shards of a topic that are over soon: offsets, flushes, places of readers, subscriptions."""
DEFINE: Final = WorkClass(name="define", threads=8, slow_s=1.0)
"""Topics are created, altered and deleted: not behind other calls at their shards, which a deletion ends."""
OPEN: Final = WorkClass(name="open", threads=8, slow_s=1.0)
"""Shards are opened."""
READ: Final = WorkClass(name="read", threads=16, slow_s=2.0)
"""Files and history are read."""
DELETE: Final = WorkClass(name="delete", threads=8, slow_s=1.0)
"""Records are deleted."""
LOAD: Final = WorkClass(name="load", threads=8, slow_s=2.0, per_key=4)
"""Segments of bulk loads are staged, offered and attached."""
JOB: Final = WorkClass(name="job", threads=8, slow_s=2.0)
"""Whole topics are copied, exported, sealed."""
ENCODE: Final = WorkClass(name="encode", threads=2, slow_s=math.inf, per_key=2)
"""What only computes: more threads would wait for the interpreter."""

METADATA: Final = "the metadata store"
"""What calls of the class `control` may wait for."""
COMPUTING: Final = "computing"
UNNAMED: Final = ""
"""All callers without a name: their reads wait for as long as it takes."""
ANONYMOUS: Final = "anonymous"
"""All callers of a server that asks for no token."""
CALLER: ContextVar[str] = ContextVar("forebay_caller", default=UNNAMED)
"""For whom a server calls in this task. Reads name theirs themselves: some of them many callers share."""
RETRY_SECONDS: Final = 1.0
CLOSE_SECONDS: Final = 1.0
"""So long a log that was closed waits for calls that have not come back."""
LOOK_SECONDS = 0.5
"""A task that waits for room in a queue looks again after this time, although no publication woke it."""


class Workers:
    """The threads for calls that may touch the disk or ask others, by what such a call may wait for: see `executor`.

    Each call has a class and a key. A disk that stops answering for one topic holds up calls at that topic alone.
    """

    def __init__(
        self, *, reads_waiting_max: int, commits_each_turn: bool, room_s: float, wait_s: float | None = None
    ) -> None:
        """`reads_waiting_max` reads of one caller with a name may wait for a thread.

        A call that has not begun after `wait_s` seconds is refused; without it calls wait for as long as it takes.
        """
        self.commits_each_turn = commits_each_turn
        """Whether commits are asked for at the end of each turn of the loop: see `turns`."""
        self.room_s = room_s
        """How long an append that does not wait for its outcome waits for room in a full queue."""
        self._reads_waiting_max = reads_waiting_max
        self._wait_s = wait_s
        self._executor = Executor("forebay-aio", SystemClock(), crowds=(UNNAMED, ANONYMOUS))
        self._feeds: Feeds | None = None

    @property
    def feeds(self) -> Feeds:
        """What is followed in the event loop of the log. For calls in that loop."""
        if self._feeds is None:
            self._feeds = Feeds(self.start_reading)
        return self._feeds

    @property
    def is_degraded(self) -> bool:
        """See `Executor.is_degraded`."""
        return self._executor.is_degraded

    def status(self) -> WorkerStatus:
        """How the threads fare, as background workers show it: those that do not come back count as stuck."""
        suspects = ", ".join(map(str, self._executor.suspects()[:STUCK_NAMED]))
        error = f"no answer at {suspects}" if suspects else None
        if self.is_degraded:
            error = f"{error}; no further thread is left to calls like these: they are refused"
        return WorkerStatus(
            name=self._executor.name,
            steps=self._executor.done,
            stepped_at=None,
            seconds=0.0,
            running_s=None,
            stuck=self._executor.given_up,
            failures=0,
            error=error,
        )

    def start(
        self, kind: WorkClass, key: Hashable, call: Callable[[], T], *, is_patient: bool = False
    ) -> asyncio.Future[T]:
        """Begin a call of this class in a thread; `key` is what it may wait for.

        Cancelling what waits for it does not stop it once it has begun. A patient one waits for as long as it takes.
        """
        return self._start(kind, key, call, CALLER.get(), None if is_patient else self._wait_s)

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a call comes to that asks memory, or the metadata store about many topics, and nothing else."""
        return await self.start(CONTROL, METADATA, partial(call, *args, **kwargs))

    async def ask_about(self, key: Hashable, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a call comes to that asks the metadata store about one topic or group, and nothing else."""
        return await self.start(LOOK, key, partial(call, *args, **kwargs))

    async def run_at(self, key: Hashable, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a call at the shards of a topic comes to."""
        return await self.start(SHARD, key, partial(call, *args, **kwargs))

    def start_reading(self, key: Hashable, call: Callable[[], T], who: str = UNNAMED) -> asyncio.Future[T]:
        """As `start`, for a call that reads files or history: callers take turns. `Throttled` for one with too many."""
        if who == UNNAMED:
            return self._start(READ, key, call, who, None)
        waiting = self._executor.waiting(READ, who)
        if waiting >= self._reads_waiting_max:
            raise Throttled(
                f"{waiting} reads of {who} wait for a disk or a store, and no more may "
                f"(server.reads_waiting_per_principal_max): try again in {RETRY_SECONDS:.3g} s",
                limit="server.reads_waiting_per_principal_max",
                retry_after_s=RETRY_SECONDS,
            )
        return self._start(READ, key, call, who, self._wait_s)

    async def run_job(self, key: Hashable, call: Callable[[], T]) -> T:
        """What a call comes to that goes over a whole topic."""
        return await self.start(JOB, key, call)

    def start_opening(
        self, key: Hashable, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """As `start`, for a call that opens a shard."""
        return self.start(OPEN, key, partial(call, *args, **kwargs))

    def start_encoding(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """As `start`, for a call that only computes: it waits for others of its kind alone."""
        return self._start(ENCODE, COMPUTING, call, UNNAMED, None)

    def start_closing(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Close the log in a thread of its own: it waits for no other call, but ends them."""
        closer = ThreadPoolExecutor(1, thread_name_prefix="forebay-aio-close")
        closing = asyncio.get_running_loop().run_in_executor(closer, self._closed, call)
        closer.shutdown(wait=False)
        closing.add_done_callback(_take_note)
        return closing

    def end(self) -> None:
        """Begin no more calls: those that wait are answered with `Closed`."""
        self._executor.halt()

    def _closed(self, call: Callable[[], T]) -> T:
        """Close the log, and see that what was under way is answered."""
        try:
            return call()
        finally:
            self._executor.stop(CLOSE_SECONDS)

    def _start(
        self, kind: WorkClass, key: Hashable, call: Callable[[], T], caller: str, wait_s: float | None
    ) -> asyncio.Future[T]:
        begun = self._executor.start(kind, key, call, caller=caller, wait_s=wait_s)
        started = asyncio.wrap_future(begun)
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
