"""The acknowledgements of appends that were not waited for: await one, ask it, or give it a callback.

`Ack` is for one record, `BatchAck` for many. Knows tickets and event loops, nothing of shards.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from forebay.appends.callbacks import Answered, in_callback
from forebay.appends.ticket import Ticket
from forebay.appends.waiting import shut_gate
from forebay.arguments import checked_seconds
from forebay.disk.forks import FORKS
from forebay.errors import Closed, ForebayError, Indeterminate
from forebay.records import OffsetRange

logger = logging.getLogger(__name__)

Rows: TypeAlias = Sequence[int] | npt.NDArray[np.int64]
"""Places in the call that brought the records."""

PLACES_MAX = 20
"""How many ranges of offsets a message names."""


class AckWriter(Protocol):
    """What writes an append that is on its way."""

    def is_inside(self) -> bool:
        """Whether the calling thread itself is at writing: a signal handler that has interrupted it there."""


class Ack(Ticket):
    """One append on its way. Answered by another thread, once; callbacks run there, after the log's lock is released.

    Takes no lock: a waiter is first entered and `done` looked at afterwards, while answering turns `done` true first
    and looks for waiters afterwards. The thread that comes second sees the other's step, and a list gives each of its
    entries to one thread only.
    """

    __slots__ = ("_generation", "_waiters", "_writers", "partition")

    def __init__(self, partition: int) -> None:
        # As `Ticket` has them, without a call: of many tasks each makes one for each of its records.
        self.offset = -1
        self.count = 0
        self.done = False
        self.error = None
        self.callback = None
        self.followers = None
        self.partition = partition
        self._generation = FORKS.generation
        self._waiters: list[tuple[Wakeups, asyncio.Future[None]] | threading.Lock | AckCallback] = []
        self._writers: tuple[AckWriter, ...] = ()

    def finish(self, error: ForebayError | None = None, due: deque[Answered] | None = None) -> None:
        """See `Ticket`."""
        if self.followers is None and self.callback is None:
            # As `Ticket` does it, for the many that no repeat and no thread waits for.
            if not self.done:
                self.error = error
                self.done = True
        else:
            super().finish(error, due)
        if self._waiters:
            self._wake(due)

    def result(self, timeout: float | None = None) -> int:
        """Wait for the first offset of the append, or the error it failed with.

        `Indeterminate` if the time is up: the append is still on its way, and this may be asked again. In a
        callback at once: the thread that runs it may be the one that is to write. So too in a signal handler that has
        interrupted a write of the same shard, which goes on only when the handler has returned.
        """
        if timeout is not None:
            checked_seconds("timeout", timeout)
        if not self.done:
            self._refuse_in_child()
            if in_callback():
                raise Indeterminate("asked in the callback of an append, which cannot wait for another: add a callback")
            if any(writer.is_inside() for writer in self._writers):
                raise Indeterminate(
                    "asked inside a write of the same shard, as by a signal handler, which that write waits for: "
                    "the append is queued; ask again when the handler has returned"
                )
            gate = shut_gate()
            self._waiters.append(gate)
            if not self.done and not gate.acquire(timeout=-1 if timeout is None else timeout):
                raise Indeterminate(f"not acknowledged within {timeout} s: it may still be; ask again")
        return super().result()

    @property
    def ranges(self) -> tuple[OffsetRange, ...]:
        """The record, once it is acknowledged; see `BatchAck.ranges`."""
        return (OffsetRange(self.partition, self.offset, 1),) if self.done and self.error is None else ()

    def note_writer(self, writer: AckWriter) -> None:
        """The append is queued there: `result` does not wait in a thread that is at writing it.

        Called by the thread that queued, before it gives the ack away.
        """
        self._writers = (*self._writers, writer)

    def add_callback(self, callback: Callable[[Ack], None]) -> None:
        """Call `callback(ack)` when the outcome is known; at once if it is already.

        Called once, by the thread that wrote or one of the log's own, with no lock held: it may append, read,
        and close the log. Until it returns that thread writes nothing for others, so it should be quick; and it
        cannot wait for another ack: `result()` raises `Indeterminate` there. An exception in it is logged.
        """
        self._waiters.append(AckCallback(callback, self))
        if self.done:
            self._wake(None)

    def __await__(self) -> Generator[object, None, int]:
        if not self.done:
            self._refuse_in_child()
            wakeups = _wakeups()
            answered = wakeups.loop.create_future()
            self._waiters.append((wakeups, answered))
            if not self.done:
                yield from answered
        return self.offset if self.error is None else super().result()

    def _refuse_in_child(self) -> None:
        if self._generation != FORKS.generation:
            raise Closed("this append was queued before a fork, and only the parent gets its offset")

    def _wake(self, due: deque[Answered] | None) -> None:
        waiters = self._waiters
        while waiters:
            try:
                waiter = waiters[0]
                if isinstance(waiter, tuple):
                    wakeups, answered = waiter
                    wakeups.add(answered, due)
                elif isinstance(waiter, AckCallback):
                    if due is None:
                        waiter.call_back()
                    else:
                        due.append(waiter)
                else:
                    with contextlib.suppress(RuntimeError):  # released already
                        waiter.release()
                # Last: a thread that repeats this after an interrupt (Ctrl-C) finds the waiter, and twice is no harm.
                waiters.remove(waiter)
            except (IndexError, ValueError):
                continue  # another thread was quicker


class AckCallback:
    """A callback that a caller gave to an ack: called once, however many threads come to call it."""

    __slots__ = ("_ack", "_left")

    def __init__(self, callback: Callable[[Ack], None], ack: Ack) -> None:
        self._ack = ack
        self._left = [callback]

    def call_back(self) -> None:
        """See `Answered`."""
        try:
            callback = self._left.pop()
        except IndexError:
            return  # another thread was quicker
        try:
            callback(self._ack)
        except Exception:
            # The append is what it is; the callback's target may be gone (a closed event loop).
            logger.exception("the callback of an append failed")


class Share(NamedTuple):
    """How many records of one append go to a partition, and which they are; all of them if `rows` is `None`."""

    partition: int
    count: int  # type: ignore[assignment]
    rows: Rows | None


class _ShareTicket(Ticket):
    """The records of one partition on their way, as part of an append to several."""

    __slots__ = ("_batch",)

    def __init__(self, batch: BatchAck) -> None:
        super().__init__()
        self._batch: BatchAck | None = batch

    def finish(self, error: ForebayError | None = None, due: deque[Answered] | None = None) -> None:
        """See `Ticket`."""
        super().finish(error, due)
        batch = self._batch
        if batch is not None:
            batch.note_answered(due)
            self._batch = None


class BatchAck:
    """One append of many records on its way. Made by `append_many_nowait` and `append_arrow_nowait` of a topic.

    The records of one partition are appended all together or not at all, and each partition by itself: where one is
    refused, the others stand. `ranges` says what stands and `failures` what does not; `result()` and `await` give the
    ranges if all of it does, and raise otherwise.
    """

    __slots__ = ("_ack", "_name", "_shares", "tickets")

    def __init__(self, name: str, shares: Sequence[Share]) -> None:
        """`name` is that of the topic, for messages."""
        self._name = name
        self._shares = shares
        self._ack = Ack(shares[0].partition if shares else 0)
        self.tickets: list[Ticket] = [self._ack] if len(shares) == 1 else [_ShareTicket(self) for _ in shares]
        """What the shards answer, one for each share."""
        if not shares:
            self._ack.finish()

    @property
    def done(self) -> bool:
        """Whether the outcome is known in every partition."""
        return self._ack.done

    @property
    def count(self) -> int:
        """How many records it has."""
        return sum(share.count for share in self._shares)

    @property
    def ranges(self) -> tuple[OffsetRange, ...]:
        """What is acknowledged by now, a range for each partition."""
        return tuple(found for _, found in self._held())

    @property
    def failures(self) -> dict[int, ForebayError]:
        """The partitions that are known by now to have failed, and why.

        After `Indeterminate` the records of the partition may be there, after any other error they are not.
        """
        answered = zip(self._shares, self.tickets, strict=True)
        return {share.partition: ticket.error for share, ticket in answered if ticket.done and ticket.error is not None}

    @property
    def refusal(self) -> ForebayError | None:
        """Why nothing at all was queued, if so."""
        if any(ticket.error is None or ticket.offset >= 0 for ticket in self.tickets):
            return None
        return self._ack.error

    def offsets(self) -> Sequence[int | None]:
        """The offset of each record in the order given; `None` for one that is not acknowledged."""
        found = placed(self.count, self._held())
        return found if isinstance(found, range) else [None if offset < 0 else offset for offset in found]

    def records(self) -> Sequence[tuple[int, int | None]]:
        """The partition of each record in the order given, and its offset if it is acknowledged."""
        partitions = np.zeros(self.count, np.int64)
        for share in self._shares:
            partitions[slice(None) if share.rows is None else share.rows] = share.partition
        return list(zip(partitions.tolist(), self.offsets(), strict=True))

    def result(self, timeout: float | None = None) -> tuple[OffsetRange, ...]:
        """Wait until every partition has answered; the ranges, or the error if any has failed.

        The error is a partition's own if all have failed, `Indeterminate` if one of them has that, else an
        `Indeterminate` that names what stands. For the time and for callbacks see `Ack.result`.
        """
        self._ack.result(timeout)
        return self.ranges

    def note_writer(self, writer: AckWriter) -> None:
        """Records of it are queued there; see `Ack.note_writer`."""
        self._ack.note_writer(writer)

    def add_callback(self, callback: Callable[[BatchAck], None]) -> None:
        """Call `callback(ack)` when every partition has answered; see `Ack.add_callback`."""
        self._ack.add_callback(lambda _: callback(self))

    def __await__(self) -> Generator[object, None, tuple[OffsetRange, ...]]:
        yield from self._ack.__await__()
        return self.ranges

    def note_answered(self, due: deque[Answered] | None) -> None:
        """A share has its outcome. Called by the thread that answers it, maybe under a lock of the log.

        Two threads may see the last two outcomes: both then finish the whole, which counts once.
        """
        if all(ticket.done for ticket in self.tickets):
            self._ack.finish(self._failure(), due)

    def _failure(self) -> ForebayError | None:
        failures = self.failures
        return failure_of(self._name, self.ranges, failures) if failures else None

    def _held(self) -> list[tuple[Rows | None, OffsetRange]]:
        return [
            (share.rows, OffsetRange(share.partition, ticket.offset, share.count))
            for share, ticket in zip(self._shares, self.tickets, strict=True)
            if ticket.done and ticket.error is None
        ]


def placed(count: int, held: Iterable[tuple[Rows | None, OffsetRange]]) -> Sequence[int]:
    """The offset of each of `count` records in the order that the caller gave; -1 for one that has none."""
    offsets = np.full(count, -1, np.int64)
    for rows, (_, first, records) in held:
        if rows is None:
            return range(first, first + records)
        offsets[rows] = np.arange(first, first + records)
    found: list[int] = offsets.tolist()
    return found


def failure_of(name: str, held: Sequence[OffsetRange], failures: Mapping[int, ForebayError]) -> ForebayError:
    """The error of an append to the topic `name` that has failed in some partitions, or in all of them.

    Where nothing stands it is a partition's own, one in doubt before any other: those say that nothing was done.
    """
    if held:
        return mixed(name, held, failures)
    errors = failures.values()
    return next((error for error in errors if isinstance(error, Indeterminate)), next(iter(errors)))


def mixed(name: str, held: Sequence[OffsetRange], failures: Mapping[int, ForebayError]) -> Indeterminate:
    """The error of an append to the topic `name` of which some partitions hold their records and others do not."""
    count = sum(found.count for found in held)
    rest = "in doubt" if any(isinstance(error, Indeterminate) for error in failures.values()) else "not"
    partition, error = next(iter(failures.items()))
    return Indeterminate(
        f"{name}: {count} records are appended ({_places(held)}), the rest is {rest} "
        f"(partition {partition}: {error}): repeat only what is missing, or all of it "
        "with the same producer and sequence if it had them",
        topic=name,
    )


def _places(held: Sequence[OffsetRange]) -> str:
    """Which offsets of which partitions, neighbours together."""
    merged: list[OffsetRange] = []
    for found in held:
        last = merged[-1] if merged else None
        if last is not None and last.partition == found.partition and last.first + last.count == found.first:
            merged[-1] = last._replace(count=last.count + found.count)
        else:
            merged.append(found)
    named = [f"partition {partition}: offsets {first} to {first + count - 1}" for partition, first, count in merged]
    more = f" and {len(named) - PLACES_MAX} more" if len(named) > PLACES_MAX else ""
    return ", ".join(named[:PLACES_MAX]) + more


class Wakeups:
    """Futures of one event loop that are to be done: one call into the loop for all that come together.

    A call from another thread costs more than an append does, so there is at most one on its way. It is made when the
    thread that answers has answered all of its round and holds no lock. Rounds of several shards go on at a time, and
    none waits for another's end: each makes the call unless one is on its way.
    """

    __slots__ = ("_asked", "_due", "_entered", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._due: deque[asyncio.Future[None]] = deque()
        self._asked = False
        """A call into the loop is on its way."""
        self._entered: deque[Answered] | None = None
        """The round that this was entered in last, unless it was called since."""

    def add(self, future: asyncio.Future[None], due: deque[Answered] | None = None) -> None:
        """Have the future done soon, in its loop. For any thread; `due` takes what is to run when the round is over."""
        self._due.append(future)
        if self._asked:
            return
        if due is None or in_callback():
            self.call_back()
        elif self._entered is not due:
            try:
                # In this order: the call takes the mark away, so what finds the mark comes before the call.
                self._entered = due
                # Before the callbacks of users, which may take long.
                due.appendleft(self)
            except BaseException:
                # It may not have been entered (Ctrl-C).
                self._entered = None
                raise

    def call_back(self) -> None:
        """See `Answered`. Cut short (Ctrl-C), it stays in its round and is repeated."""
        self._entered = None
        if self._asked:
            return
        try:
            self._asked = True
            self.loop.call_soon_threadsafe(self._finish)
        except RuntimeError:
            # The appends are what they are; the loop was closed, and its tasks with it.
            logger.exception("the event loop that waited for appends is closed")
        except BaseException:
            self._asked = False
            raise

    def _finish(self) -> None:
        # In this order: what is added from here on either is found below or asks again.
        self._asked = False
        due = self._due
        while due:
            future = due.popleft()
            if not future.done():
                future.set_result(None)


class _Running(threading.local):
    """The wake-ups of the loop that this thread runs."""

    wakeups: Wakeups | None = None


_RUNNING = _Running()


def _wakeups() -> Wakeups:
    loop = asyncio.get_running_loop()
    found = _RUNNING.wakeups
    if found is None or found.loop is not loop:
        found = _RUNNING.wakeups = Wakeups(loop)
    return found
