"""Streams over the partitions of a topic: up to an end, or following what is appended.

Records are always pulled by offset; a waker only says that a look is worth it, so one that is missed costs nothing. A
stream survives an error: a caller that asks it again goes on behind the gap that was reported.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from types import TracebackType
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, Self, TypeAlias, TypeVar

from forebay.clock import Clock
from forebay.engines import ReadShard
from forebay.format.frame.batch import Batch
from forebay.pages import Page
from forebay.reading import Cursor, in_order
from forebay.records import Gap, Record

if TYPE_CHECKING:
    import pyarrow as pa

STOP_CHECK_SECONDS = 0.1
REST = 4
"""Where a reader has to poll, the pause is so many times what a look takes: many empty partitions are looked at more
rarely than one."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Shown: TypeAlias = Callable[[Batch, int], Iterable[T]]
"""What a caller gets for a batch of a partition: its records, or one Arrow batch."""


def as_records(batch: Batch, partition: int) -> Iterator[Record]:
    """A batch as its records."""
    return batch.each_record(partition)


def as_arrow(batch: Batch, partition: int) -> Sequence[pa.RecordBatch]:
    """A batch as one Arrow batch."""
    return (batch.to_arrow(partition),)


class PageSource(Protocol[T_co]):
    """Where a stream gets its pages from."""

    def next_page(self) -> Iterator[T_co] | None:
        """The rows that come next, made as they are taken; `None` at the end."""

    def close(self) -> None:
        """Nothing more will be asked for."""


class Stream(Generic[T]):
    """An iterator that may be left and entered again, also after an error, and goes on where it was.

    For one thread at a time. Holds no more than one page, of which it makes the rows of one batch at a time.
    """

    def __init__(self, source: PageSource[T], check_open: Callable[[], None]) -> None:
        """`check_open` raises `Closed` once the log is closed. A loop over rows asks it before each page alone."""
        self._source = source
        self._check_open: Callable[[], None] | None = check_open
        """Until the stream itself is closed."""
        self._rows: Iterator[T] = iter(())

    def __iter__(self) -> Iterator[T]:
        # Without a step of Python for each row.
        return chain.from_iterable(self._pages())

    def __next__(self) -> T:
        if self._check_open is not None:
            self._check_open()
        for row in self._rows:
            return row
        return next(iter(self))

    def _pages(self) -> Iterator[Iterator[T]]:
        while True:
            # An iterator of the stream's own: a loop that is left in the middle of a page skips nothing.
            yield self._rows
            if self._check_open is not None:
                self._check_open()
            rows = self._source.next_page()
            if rows is None:
                return
            self._rows = rows

    def next_page(self) -> list[T]:
        """The rest of the present page, or the next one; empty at the end."""
        if self._check_open is not None:
            self._check_open()
        while not (page := list(self._rows)) and (rows := self._source.next_page()) is not None:
            self._rows = rows
        return page

    def close(self) -> None:
        """End the stream; harmless when repeated."""
        self._check_open = None
        self._source.close()
        self._rows = iter(())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Bounded(Generic[T]):
    """Partition after partition, each up to its end."""

    def __init__(self, parts: Sequence[tuple[Cursor[ReadShard], int]], shown: Shown[T]) -> None:
        self._parts = list(parts)
        self._shown = shown

    def next_page(self) -> Iterator[T] | None:
        """See `PageSource`."""
        while self._parts:
            cursor, end = self._parts[0]
            batches = cursor.pull(end)
            if batches:
                return chain.from_iterable(map(self._shown, batches, repeat(cursor.partition)))
            self._parts.pop(0)
        return None

    def close(self) -> None:
        """See `PageSource`."""
        self._parts.clear()


class LookupSpan(NamedTuple):
    """The offsets of a partition that a look-up goes through. From 0 on, it also reports what was evicted."""

    partition: int
    start: int
    stop: int


class LookupPages:
    """The pages of a look-up, partition after partition; each up to where the partition ended at first."""

    def __init__(
        self,
        spans: Sequence[LookupSpan],
        look_up: Callable[[int, int], Page],
        report: Callable[[int, Gap], None],
        *,
        limit: int | None,
        one: bool = False,
    ) -> None:
        self._spans = list(spans)
        self._look_up = look_up
        self._report = report
        self._left = limit
        self._one = one
        self._found: deque[tuple[int, Gap | Batch]] = deque()
        """What was found and not given yet, with its partition."""

    def next_page(self) -> Iterator[Record] | None:
        """See `PageSource`."""
        while (self._found or self._spans) and self._left != 0:
            if not self._found:
                self._look()
            records: list[Record] = []
            while self._found and (not records or isinstance(self._found[0][1], Batch)):
                place, piece = self._found.popleft()
                if isinstance(piece, Gap):
                    self._report(place, piece)
                else:
                    records += piece.records(place)
            if records:
                if self._left is not None:
                    records = records[: self._left]
                    self._left -= len(records)
                return iter(records)
        return None

    def _look(self) -> None:
        """Ask for the next page."""
        place, start, stop = self._spans[0]
        page = self._look_up(place, start)
        if not self._one:
            # The newest record may have been appended meanwhile, and is the answer all the same; others are not.
            page = page.clipped(stop)
        self._found.extend((place, piece) for piece in _found_in_order(page, newest=self._one))
        if page.next >= stop or page.next <= start:
            # The end of the partition, or a bulk load that is not committed yet: `read` ends there, too.
            self._spans.pop(0)
        else:
            self._spans[0] = LookupSpan(place, page.next, stop)
        if self._one and page.batches:
            self._spans.clear()

    def close(self) -> None:
        """See `PageSource`."""
        self._spans.clear()
        self._found.clear()


def _found_in_order(page: Page, *, newest: bool) -> Iterator[Gap | Batch]:
    """What was found; of a look-up for the newest record, first the ranges above it that cannot be read."""
    return iter([*page.events, *page.batches]) if newest else in_order(page)


class Added(NamedTuple):
    """How a stream over all partitions of a topic goes on in those that the topic gets meanwhile."""

    partitions: Callable[[], int]
    """How many the topic has now."""
    begin: Callable[[int], Cursor[ReadShard]]
    """Begins in a partition; may open its shard."""


class Following(Generic[T]):
    """All partitions in turn, without an end. Gives what is there now; how to wait for more is the caller's affair."""

    def __init__(self, cursors: Sequence[Cursor[ReadShard]], shown: Shown[T], added: Added | None = None) -> None:
        """With `added`, the cursors are those of all partitions, in order."""
        self.cursors = list(cursors)
        self._shown = shown
        self._added = added
        self._turn = 0
        self._wired: dict[int, ReadShard] = {}
        """By partition, the shard that calls the waker of this stream."""

    @property
    def poll_seconds(self) -> float | None:
        """How often to look where not every shard calls its wakers; `None` where all do."""
        found = (cursor.source.poll_seconds for cursor in self.cursors)
        return min((seconds for seconds in found if seconds is not None), default=None)

    def next_page(self) -> Iterator[T] | None:
        """What there is of the next partition that has something; `None` if none has. Never waits for an append."""
        if self.has_grown:
            self.grow()
        for _ in self.cursors:
            cursor = self.cursors[self._turn]
            self._turn = (self._turn + 1) % len(self.cursors)
            batches = cursor.pull()
            if batches:
                return chain.from_iterable(map(self._shown, batches, repeat(cursor.partition)))
        return None

    @property
    def has_grown(self) -> bool:
        """Whether the topic has partitions that are not followed yet."""
        return self._added is not None and self._added.partitions() > len(self.cursors)

    def grow(self) -> None:
        """Follow every partition that was added, from its first record on. May open shards; raises as that does."""
        while self._added is not None and self._added.partitions() > len(self.cursors):
            self.cursors.append(self._added.begin(len(self.cursors)))

    def listen(self, waker: Callable[[], None]) -> bool:
        """Have `waker` called after each publication in the shards that are read now; true if some did not do so yet.

        Then the caller looks again before it waits: records that came before this call woke no waker.
        """
        changed = [cursor for cursor in self.cursors if self._wired.get(cursor.partition) is not cursor.source]
        for cursor in changed:
            before = self._wired.get(cursor.partition)
            if before is not None:
                before.wakers.discard(waker)
            # Noted first: an interrupt in between leaves a shard that `leave` visits in vain.
            self._wired[cursor.partition] = cursor.source
            cursor.source.wakers.add(waker)
        return bool(changed)

    def leave(self, waker: Callable[[], None]) -> None:
        """Have no shard call `waker` any more."""
        for shard in self._wired.values():
            shard.wakers.discard(waker)
        self._wired.clear()


class Waiting(Generic[T]):
    """A `Following` for a thread that may sleep: ends when nothing came for a time, or its caller stops it."""

    def __init__(
        self, following: Following[T], timeout: float | None, stop: threading.Event | None, *, clock: Clock
    ) -> None:
        self._following = following
        self._clock = clock
        self._timeout = timeout
        self._stop = stop
        self._closed = False
        self._woken = threading.Event()
        self._leave = weakref.finalize(self, following.leave, self._woken.set)
        following.listen(self._woken.set)

    def next_page(self) -> Iterator[T] | None:
        """See `PageSource`."""
        began = self._clock.monotonic()
        while not self._closed and (self._stop is None or not self._stop.is_set()):
            self._woken.clear()
            looked = self._clock.monotonic()
            page = self._following.next_page()
            now = self._clock.monotonic()
            left = STOP_CHECK_SECONDS if self._timeout is None else began + self._timeout - now
            if page is not None or left <= 0:
                return page
            if self._following.listen(self._woken.set):
                continue
            poll = self._following.poll_seconds
            pause = STOP_CHECK_SECONDS if poll is None else max(poll, REST * (now - looked))
            self._woken.wait(min(left, pause, STOP_CHECK_SECONDS))
        return None

    def close(self) -> None:
        """See `PageSource`."""
        self._closed = True
        self._leave()


def wake(shards: Sequence[ReadShard], waker: Callable[[], None]) -> Callable[[], None]:
    """Call `waker` after each publication in one of the shards, until the result is called."""
    for shard in shards:
        shard.wakers.add(waker)

    def leave() -> None:
        for shard in shards:
            shard.wakers.discard(waker)

    return leave
