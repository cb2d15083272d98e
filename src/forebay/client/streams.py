"""Streams of records from a broker: pages up to an end, look-ups, and topics that are followed live.

Records are always asked for by offset, so that a lost answer or connection repeats and skips nothing. For one event
loop; a stream is for one task at a time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Final, Generic, Protocol, Self, TypeAlias, TypeVar

from msgspec import UNSET

from forebay.client.topics import TopicCalls
from forebay.client.transport import CallAttempts, HttpCall, RefusedCall
from forebay.errors import ForebayError, Unavailable
from forebay.format.frame.batch import Batch
from forebay.pages import Page
from forebay.reading import in_order, report_gap
from forebay.records import EARLIEST, OFFSET_MAX, Gap, OnGap, Record, Start
from forebay.surface.blocking import PAGE_RECORDS
from forebay.wire.answers import BatchPage
from forebay.wire.errors import decode_error
from forebay.wire.events import ERROR_EVENT, EventDecoder, ServerEvent
from forebay.wire.items import LINE_DECODER, record_of
from forebay.wire.watching import WatchPosition, decode_event_id, encode_event_id

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Shown: TypeAlias = Callable[[Batch, int], Sequence[T]]
"""What a caller gets for a batch of a partition: its records, or one Arrow batch."""

Begin: TypeAlias = Callable[[], Awaitable[Start]]
"""Says where to start, when the stream begins: a reader asks for its place then."""

EVENT_STREAM: Final = "text/event-stream"
WATCH_PATH: Final = "/v1/watch"
STATUS_INTERNAL: Final = 500


class RemoteSource(Protocol[T_co]):
    """Where a stream gets its rows from."""

    def check_open(self) -> None:
        """`Closed` once the log is closed."""

    async def begin(self) -> None:
        """Decide where the stream starts and ends; harmless when repeated."""

    async def next_page(self) -> Sequence[T_co]:
        """What comes next; empty at the end."""

    async def close(self) -> None:
        """Nothing more will be asked for."""


class AsyncRemoteStream(Generic[T]):
    """An asynchronous iterator that may be left and entered again, also after an error. For one task at a time."""

    def __init__(self, source: RemoteSource[T]) -> None:
        self._source = source
        self._rows: Iterator[T] = iter(())
        self._is_closed = False

    def check_open(self) -> None:
        """`Closed` once the log is closed, unless the stream itself was closed."""
        if not self._is_closed:
            self._source.check_open()

    async def begin(self) -> None:
        """Decide where the stream starts, before the first row is asked for."""
        await self._source.begin()

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        self.check_open()
        for row in self._rows:
            return row
        for row in await self.next_page():
            return row
        raise StopAsyncIteration

    async def next_page(self) -> Iterator[T]:
        """The rest of the present page, or the next one, also for `__anext__`; empty at the end."""
        if not self._is_closed:
            await self._source.begin()
            self._rows = iter(await self._source.next_page())
        return self._rows

    async def aclose(self) -> None:
        """End the stream; harmless when repeated."""
        self._is_closed = True
        self._rows = iter(())
        await self._source.close()

    async def __aenter__(self) -> Self:
        await self._source.begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class BoundedSource(Generic[T]):
    """Partition after partition, each up to its end as it was at first."""

    def __init__(
        self,
        topic: TopicCalls,
        begin: Begin,
        shown: Shown[T],
        *,
        stop: int | None,
        partition: int | None,
        on_gap: OnGap | None,
    ) -> None:
        self._topic = topic
        self._begin = begin
        self._shown = shown
        self._stop = stop
        self._partition = partition
        self._on_gap = on_gap
        self._parts: deque[list[int]] | None = None
        """Partition, next offset and end of what is left to read."""

    def check_open(self) -> None:
        """See `RemoteSource`."""
        self._topic.transport.check_open()

    async def begin(self) -> None:
        """See `RemoteSource`."""
        if self._parts is not None:
            return
        start = await self._begin()
        await self._topic.refresh()
        parts: deque[list[int]] = deque()
        ends = await self._topic.read_ends(self._topic.chosen(start, self._partition, self._stop))
        for number, (offsets, end) in ends.items():
            first = await self._topic.first(number, start, offsets)
            parts.append([number, first, end if self._stop is None else min(end, self._stop)])
        self._parts = parts

    async def next_page(self) -> Sequence[T]:
        """See `RemoteSource`."""
        parts = self._parts
        assert parts is not None, "begun"
        while parts:
            number, offset, end = parts[0]
            if offset >= end:
                parts.popleft()
                continue
            page = _page_of(await self._topic.page(number, offset)).clipped(end)
            if page.next == offset:
                parts.popleft()
                continue
            batches = self._taken(parts[0], page)
            if batches:
                return [row for batch in batches for row in self._shown(batch, number)]
        return ()

    def _taken(self, part: list[int], page: Page) -> list[Batch]:
        """The records before the first gap, or behind the one that the page begins with."""
        batches: list[Batch] = []
        for piece in in_order(page):
            if isinstance(piece, Gap):
                if batches:
                    return batches
                part[1] = piece.stop
                report_gap(self._topic.name, self._on_gap, part[0], piece)
            else:
                batches.append(piece)
                part[1] = piece.end
        part[1] = page.next
        return batches

    async def close(self) -> None:
        """See `RemoteSource`."""
        self._parts = deque()


class LookupSource:
    """What a key or a tag has, partition after partition, each up to where it ended at first."""

    def __init__(
        self,
        topic: TopicCalls,
        query: Mapping[str, str],
        places: Callable[[], Sequence[int]],
        start: Start,
        *,
        limit: int | None,
        is_newest: bool,
        on_gap: OnGap | None,
    ) -> None:
        """`places` says where to look once the topic is known as it is now. `is_newest`: one record is the answer."""
        self._topic = topic
        self._query = query
        self._places = places
        self._start = start
        self._left = limit
        self._is_newest = is_newest
        self._on_gap = on_gap
        self._spans: deque[list[int]] | None = None
        """Partition, next offset and end of what is left to look through."""

    def check_open(self) -> None:
        """See `RemoteSource`."""
        self._topic.transport.check_open()

    async def begin(self) -> None:
        """See `RemoteSource`."""
        if self._spans is not None:
            return
        await self._topic.refresh()
        is_whole = not isinstance(self._start, Mapping) and self._start == EARLIEST
        spans: deque[list[int]] = deque()
        ends = await self._topic.read_ends(self._places())
        for number, (offsets, end) in ends.items():
            first = 0 if is_whole else await self._topic.first(number, self._start, offsets)
            spans.append([number, first, end])
        self._spans = spans

    async def next_page(self) -> Sequence[Record]:
        """See `RemoteSource`."""
        spans = self._spans
        assert spans is not None, "begun"
        while spans and self._left != 0:
            number, offset, end = spans[0]
            if offset >= end:
                spans.popleft()
                continue
            wanted = PAGE_RECORDS if self._left is None else min(self._left, PAGE_RECORDS)
            page = await self._topic.looked_up(number, offset, {**self._query, "records_max": str(wanted)})
            spans[0][1] = max(page.next, offset + 1)
            for gap in page.gaps:
                report_gap(self._topic.name, self._on_gap, number, gap)
            records = [record for record in page.records if self._is_newest or record.offset < end]
            if records:
                if self._is_newest:
                    spans.clear()
                if self._left is not None:
                    self._left -= len(records)
                return records
        return ()

    async def close(self) -> None:
        """See `RemoteSource`."""
        self._spans = deque()


class FollowingSource:
    """The records of a topic from a start on, and then new ones as they come.

    What is there already is read by pages, as often as the stream is asked after it had ended; then one connection
    brings what comes (server-sent events). A connection that is lost is made again from the place that was reached.
    Nothing is read ahead of what the caller takes but what the connection itself holds.
    """

    def __init__(
        self, topic: TopicCalls, begin: Begin, *, partition: int | None, timeout: float | None, on_gap: OnGap | None
    ) -> None:
        self._topic = topic
        self._begin = begin
        self._partition = partition
        self._timeout = timeout
        self._on_gap = on_gap
        self._next: dict[int, int] | None = None
        """The next offset of each partition that is followed."""
        self._is_whole = False
        """Whether partitions that are added are followed, too."""
        self._is_live = False
        """Whether what was there has been read, and the connection brings what follows."""
        self._watch: _Watch | None = None
        self._found: deque[tuple[int, Record | Gap]] = deque()
        """What the connection has brought and the caller has not got yet, with its partition."""

    def check_open(self) -> None:
        """See `RemoteSource`."""
        self._topic.transport.check_open()

    async def begin(self) -> None:
        """See `RemoteSource`."""
        if self._next is not None:
            return
        start = await self._begin()
        await self._topic.refresh()
        places: dict[int, int] = {}
        for number in self._topic.chosen(start, self._partition):
            offsets = await self._topic.offsets(number)
            places[number] = min(await self._topic.first(number, start, offsets), offsets.next)
        self._is_whole = self._partition is None and not isinstance(start, Mapping)
        self._next = places

    async def next_page(self) -> Sequence[Record]:
        """See `RemoteSource`."""
        if not self._is_live:
            records = await self._there_already()
            if records:
                return records
            self._is_live = True
        since = asyncio.get_running_loop().time()
        while True:
            records = self._taken()
            if records:
                return records
            if not await self._more(since):
                self._is_live = False
                return ()

    async def close(self) -> None:
        """See `RemoteSource`."""
        watch, self._watch = self._watch, None
        self._found.clear()
        if watch is not None:
            await watch.close()

    async def _there_already(self) -> list[Record]:
        """What is there of the first partition that has something."""
        assert self._next is not None, "begun"
        for number in self._next:
            while True:
                page = await self._topic.page(number, self._next[number])
                is_last = page.marks.caught_up or page.marks.next == self._next[number]
                for piece in in_order(_page_of(page)):
                    shown = [piece] if isinstance(piece, Gap) else piece.records(number)
                    self._found.extend((number, row) for row in shown)
                records = self._taken()
                self._next[number] = max(self._next[number], page.marks.next if not self._found else 0)
                if records:
                    return records
                if is_last:
                    break
        return []

    def _taken(self) -> list[Record]:
        """The records before the next gap, or behind it; what was seen already is left out."""
        assert self._next is not None, "begun"
        records: list[Record] = []
        while self._found:
            number, piece = self._found[0]
            stop = piece.stop if isinstance(piece, Gap) else piece.offset + 1
            if stop <= self._next.get(number, 0) or not self._is_followed(number):
                self._found.popleft()
            elif isinstance(piece, Record):
                self._found.popleft()
                self._next[number] = stop
                records.append(piece)
            elif records:
                return records
            else:
                self._found.popleft()
                self._next[number] = stop
                report_gap(self._topic.name, self._on_gap, number, piece)
        return records

    def _is_followed(self, number: int) -> bool:
        assert self._next is not None, "begun"
        return self._is_whole or number in self._next

    async def _more(self, since: float) -> bool:
        """Wait until the connection has brought something; false if the time is up."""
        loop = asyncio.get_running_loop()
        if self._watch is None:
            self._watch = _Watch(self._topic)
        assert self._next is not None, "begun"
        while True:
            left = None if self._timeout is None else max(0.0, since + self._timeout - loop.time())
            events = await self._watch.events(self._next, left)
            if events is None:
                return False
            for event in events:
                item = LINE_DECODER.decode(event.text)
                if item.gap is not UNSET:
                    self._found.append((item.gap.partition, item.gap.gap()))
                else:
                    record = record_of(item)
                    self._found.append((record.partition, record))
            if self._found:
                return True
            for number, offset in self._watch.places.items():
                # Nothing is left of what came before this place; pages may have led further.
                if self._is_followed(number):
                    self._next[number] = max(offset, self._next.get(number, 0))


class _Watch:
    """One connection after the other that brings the events of a topic."""

    def __init__(self, topic: TopicCalls) -> None:
        self._topic = topic
        self._held = AsyncExitStack()
        self._pieces: AsyncIterator[bytes] | None = None
        self._decoder = EventDecoder()
        self._coming: asyncio.Task[bytes] | None = None
        """The next piece. Kept while its caller waits no more, so that nothing is skipped."""
        self._attempts: CallAttempts | None = None
        self.places: dict[int, int] = {}
        """Where the newest id of the connection says that it stands."""

    async def events(self, after: Mapping[int, int], seconds: float | None) -> list[ServerEvent] | None:
        """What came behind the places `after`; perhaps nothing but other places. `None` if the time is up."""
        try:
            if self._pieces is None:
                await self._connect(after)
            piece = await self._piece(seconds)
            if piece is None:
                return None
            events = self._decoder.feed(piece)
            self._note_places()
            self._attempts = None
            for event in events:
                if event.event == ERROR_EVENT:
                    raise RefusedCall(decode_error(STATUS_INTERNAL, event.text), None)
            return events
        except (ForebayError, RefusedCall) as failure:
            await self._lose()
            if self._attempts is None:
                self._attempts = self._topic.transport.attempts(self._call(after))
            await asyncio.sleep(self._attempts.pause_after(failure))
            return None if seconds == 0 else []

    async def close(self) -> None:
        """End the connection."""
        await self._lose()

    async def _piece(self, seconds: float | None) -> bytes | None:
        assert self._pieces is not None, "connected"
        if self._coming is None:
            self._coming = asyncio.ensure_future(_next_of(self._pieces))
            # The caller may never ask again: then its error is not worth a line in the log.
            self._coming.add_done_callback(lambda done: done.cancelled() or done.exception())
        done, _ = await asyncio.wait((self._coming,), timeout=seconds)
        if not done:
            return None
        coming, self._coming = self._coming, None
        return coming.result()

    async def _connect(self, after: Mapping[int, int]) -> None:
        self._decoder = EventDecoder()
        self.places = dict(after)
        self._pieces = await self._held.enter_async_context(self._topic.transport.stream(self._call(after)))

    async def _lose(self) -> None:
        coming, self._coming = self._coming, None
        self._pieces = None
        if coming is not None:
            coming.cancel()
            await asyncio.wait((coming,))
        await self._held.aclose()

    def _call(self, after: Mapping[int, int]) -> HttpCall:
        # A place behind the end stands for the end: partitions that are not followed bring only what comes.
        offsets = [after.get(number, OFFSET_MAX) for number in range(self._topic.spec.partitions)]
        place = encode_event_id([self._topic.name], [WatchPosition.of(self._topic.spec.topic_id, offsets)])
        return HttpCall(
            method="GET",
            path=WATCH_PATH,
            query={"topic": self._topic.name},
            accept=EVENT_STREAM,
            headers={"last-event-id": place},
        )

    def _note_places(self) -> None:
        if self._decoder.event_id:
            (position,) = decode_event_id(self._decoder.event_id, [self._topic.name])
            self.places = dict(enumerate(position.offsets))


async def _next_of(pieces: AsyncIterator[bytes]) -> bytes:
    try:
        return await anext(pieces)
    except StopAsyncIteration:
        raise Unavailable("the broker has ended the stream") from None


def _page_of(page: BatchPage) -> Page:
    return Page(list(page.batches), list(page.gaps), page.marks.next)
