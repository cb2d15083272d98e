"""The threads that read files and history for an event loop, shared by callers who take turns.

A read may hang for as long as a disk or a store does. So no caller has all the threads, the reads of each wait in a
line of their own, and a caller with a name is refused once its line is full: only its own reads are late.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from forebay.errors import Closed, Throttled

T = TypeVar("T")

READERS: Final = 8
READERS_EACH_MAX: Final = 6
"""So many of the threads one caller has at most."""
UNNAMED: Final = ""
"""All callers without a name: their reads wait for as long as it takes."""
RETRY_SECONDS: Final = 1.0


class _Read(NamedTuple):
    """A read that waits for a thread."""

    call: Callable[[], Any]
    answer: asyncio.Future[Any]


class ReadThreads:
    """Runs reads in threads. For one event loop: everything but the reads themselves runs there, without a lock."""

    def __init__(self, waiting_max: int) -> None:
        """`waiting_max` reads of one caller with a name may wait for a thread."""
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="forebay-aio-read")
        self._waiting_max = waiting_max
        self._free = READERS
        self._waiting: dict[str, deque[_Read]] = {}
        """By caller; the one whose turn is next comes first. None of them is empty."""
        self._under_way: Counter[str] = Counter()

    def start(self, call: Callable[[], T], who: str) -> asyncio.Future[T]:
        """Begin the call when it is its turn; `Throttled` if too many reads of this caller wait.

        Cancelling the answer does not stop a call that has begun.
        """
        line = self._waiting.get(who, deque())
        if len(line) >= self._waiting_max and who != UNNAMED:
            # Those whose callers have gone do not count.
            line = deque([read for read in line if not read.answer.done()])
            self._check_room(line, who)
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        line.append(_Read(call, answer))
        self._waiting[who] = line
        self._begin_next()
        return answer

    def end(self) -> None:
        """Begin no more reads: those that wait are answered with `Closed`."""
        self._pool.shutdown(wait=False)
        lines, self._waiting = self._waiting, {}
        for line in lines.values():
            for read in line:
                if not read.answer.done():
                    read.answer.set_exception(Closed("this log is closed"))

    def _check_room(self, line: deque[_Read], who: str) -> None:
        if len(line) >= self._waiting_max:
            raise Throttled(
                f"{len(line)} reads of {who} wait for a disk or a store, and no more may "
                f"(server.reads_waiting_per_principal_max): try again in {RETRY_SECONDS:.3g} s",
                limit="server.reads_waiting_per_principal_max",
                retry_after_s=RETRY_SECONDS,
            )

    def _begin_next(self) -> None:
        """Give the free threads to the callers whose turn it is."""
        turns = [who for who in self._waiting if self._under_way[who] < READERS_EACH_MAX]
        while self._free and turns:
            who = turns.pop(0)
            line = self._waiting.pop(who)
            call, answer = line.popleft()
            if not answer.done():
                self._free -= 1
                self._under_way[who] += 1
                begun = self._pool.submit(call)
                begun.add_done_callback(partial(self._note_ended, who, answer))
            if line:
                # Behind the others.
                self._waiting[who] = line
                if self._under_way[who] < READERS_EACH_MAX:
                    turns.append(who)

    def _note_ended(self, who: str, answer: asyncio.Future[T], ended: Future[T]) -> None:
        """The call has ended. In its thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            answer.get_loop().call_soon_threadsafe(self._take_answer, who, answer, ended)

    def _take_answer(self, who: str, answer: asyncio.Future[T], ended: Future[T]) -> None:
        self._free += 1
        self._under_way[who] -= 1
        if not self._under_way[who]:
            del self._under_way[who]
        if not answer.done():
            error = ended.exception()
            if error is None:
                answer.set_result(ended.result())
            else:
                answer.set_exception(error)
        self._begin_next()
