"""Moves the records of one partition of a source into the destination of a router: each once, whatever crashes.

The destination remembers for the mover what has arrived: a mover is an idempotent producer whose sequence is the offset
in the source, and each append names the sequence before it in that partition. A mover that starts asks every partition
of the destination for the last sequence it has, reads the source from its cursor on and leaves out what has arrived.
The cursor is only a place to begin: everything below it is durable in the destination, or was in its memory if the
destination keeps records nowhere else.

By which rule and for how many partitions records are routed is noted beside the cursor, for a record that is routed
again must find the same place. A new rule, or a new number of partitions, takes effect at an offset that is stored
before the first record is routed by it.

The definition is read from the metadata store after each page of records, and before they are routed. So a rule that
was stored before one of them was appended is known, whichever process stored it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from forebay.aio.topic import AsyncTopic
from forebay.aio.workers import Workers
from forebay.appends.producer_window import NONE_BEFORE, ReservedProducer
from forebay.errors import Corrupt, TooLarge
from forebay.format.frame.batch import Batch
from forebay.live import CallKey, PolledPage, poll
from forebay.records import EARLIEST, Gap, Reason, Record
from forebay.routers.book import RouterBook, note_of, parse_note, reader_of
from forebay.routers.rules import RoutedRecords, routed
from forebay.routing import OnRefused, RouterRule, RouterSpec
from forebay.settings import Settings
from forebay.storage import Topic
from forebay.topics import Durability

logger = logging.getLogger(__name__)

WAIT_SECONDS: Final = 1.0
"""A mover that has no records to move goes over so often to a new rule, or to added partitions, that it knows of."""
HOLD_SECONDS: Final = 0.2
"""A mover whose router is paused or deleted asks so often for a resume, until its task is ended."""
END_SECONDS: Final = 5.0
"""So long a mover that is to end waits for the answers to its last appends."""
CURSOR_SECONDS: Final = 1.0
"""So often a mover that is busy stores how far it has come."""


@dataclass(slots=True)
class MoverCounts:
    """What a mover has done since its router was started in this process."""

    routed: int = 0
    left_out: int = 0
    """Records that the rule does not take."""
    lost: dict[Reason, int] = field(default_factory=dict)
    """Offsets that the source has no readable record for, by the reason."""
    too_large: int = 0
    """Records that the destination can never hold as the rule makes them, and that were skipped."""


class _Way(NamedTuple):
    """How records are routed: by a rule, into so many partitions."""

    version: int
    rule: RouterRule
    partitions: int


class _Sent(NamedTuple):
    """Records below `stop` have arrived in the destination; there they end at these offsets."""

    stop: int
    ends: dict[int, int]


class Mover:
    """Moves one partition of a source, in one event loop. Made for one run: after an error, make another."""

    def __init__(
        self,
        router: RouterSpec,
        source: Topic,
        destination: Topic,
        partition: int,
        *,
        book: RouterBook,
        workers: Workers,
        settings: Settings,
        counts: MoverCounts,
    ) -> None:
        self.router = router
        """The newest definition that is known here: see `adopt`."""
        self._book = book
        self._topic = source
        self._source = AsyncTopic(source, settings, workers)
        self._destination = AsyncTopic(destination, settings, workers)
        self._partition = partition
        self._reader = reader_of(router, source)
        self._producer = producer_of(router, source.spec.topic_id, partition)
        self._workers = workers
        self._key = CallKey.of(source, partition)
        self._counts = counts
        self._position = 0
        """Records below were read and have arrived, or are left out."""
        self._cursor = 0
        """Where this mover has put the cursor, or found it."""
        self._arrived: dict[int, int] = {}
        """By partition of the destination, the last offset of the source that it has got something from."""
        self._sent: deque[_Sent] = deque()
        """What has arrived since the cursor was stored."""
        self._noted_at = 0.0
        self._bytes_max = settings.wal.frame_bytes_max // 2
        """What one append has at most, if it has more than one record."""

    async def run(self) -> None:
        """Move records until it is cancelled. Raises what keeps it from going on; then nothing is lost or doubled."""
        way = await self._begin()
        while True:
            page = await poll(
                self._workers.feeds,
                self._topic,
                self._partition,
                self._position,
                Batch.records,
                wait_seconds=WAIT_SECONDS,
            )
            # Behind the wait: these records may have been appended after the router was altered, paused or deleted.
            if page.rows and not await self.look():
                await asyncio.sleep(HOLD_SECONDS)
                continue
            newest = self._newest()
            # Where an earlier run has come further than the cursor, records up to there went the old way.
            old_way_stop = max(self._arrived.values(), default=-1) + 1
            if newest != way and self._position >= old_way_stop:
                await self._switch(newest)
                way = newest
            await self._move(page if newest == way else _below(page, old_way_stop), way)
            if page.caught_up or self._seconds() - self._noted_at > CURSOR_SECONDS:
                await self.note_cursor(way)

    async def look(self) -> bool:
        """Read the definition from the metadata store; whether records may be moved by it now."""
        found = await self._workers.run(self._book.current, self.router)
        if found is None:
            return False
        self.adopt(found)
        return not found.is_paused

    def adopt(self, router: RouterSpec) -> None:
        """Go by this definition, unless a later rule is known. In the loop that moves records."""
        if router.version >= self.router.version:
            self.router = router

    async def _begin(self) -> _Way:
        """Find out how far an earlier run has come, and by which rule it went."""
        self._noted_at = self._seconds()
        # The cursor with its note first: the definition that is read after it has the rule that the note names.
        stored = await self._workers.run(self._reader.progress, self._partition)
        await self.look()
        if stored is None:
            # A partition that was added to the source: everything in it is new.
            way = self._newest()
            note = note_of(way.version, way.partitions)
            self._position = await self._workers.run_at(self._key, self._reader.reset, EARLIEST, self._partition, note)
        else:
            self._position = stored.offset
            way = self._way(*parse_note(stored.note))
        self._cursor = self._position
        for place in range(self._destination.partitions):
            last = await self._destination.last_sequence(self._producer, place)
            if last is not None:
                self._arrived[place] = last
        return way

    def _newest(self) -> _Way:
        """How a record that comes now is to be routed."""
        return self._way(self.router.version, self._destination.partitions)

    def _way(self, version: int, partitions: int) -> _Way:
        rule = self.router.rule_of(version)
        if rule is None:
            raise Corrupt(
                f"router {self.router.name} has no rule {version}, by which {self._source.name}[{self._partition}] was "
                "routed last: delete the router and create it again"
            )
        return _Way(version, rule, partitions)

    async def _switch(self, way: _Way) -> None:
        """Route the records from here on another way; `Conflict` if another process has moved the cursor."""
        await self._destination.flush()
        self._sent.clear()
        note = note_of(way.version, way.partitions)
        # Commit point: from here on, and after any crash, these records go the new way.
        moved = partial(self._reader.ack_up_to, self._position, self._partition, note, expected=self._cursor)
        await self._workers.run_at(self._key, moved)
        self._cursor = self._position

    async def _move(self, page: PolledPage[Record], way: _Way) -> None:
        """Append what the rule takes of a page, to all partitions at once, and wait until it has arrived."""
        parts, left_out, refused = routed(way.rule, page.rows, way.partitions, self._arrived, bytes_max=self._bytes_max)
        if refused and self._stops:
            # First what comes before it; nothing that comes behind it.
            await self._move(_below(page, refused[0]), way)
            await self.note_cursor(way)
            raise self._refusal(refused[0])
        appending = asyncio.gather(
            *(self._append_parts(place, appends, refused) for place, appends in parts.items()), return_exceptions=True
        )
        try:
            answers = await asyncio.shield(appending)
        except asyncio.CancelledError:
            # What is queued arrives all the same, and its answer needs this loop.
            await asyncio.wait([appending], timeout=END_SECONDS)
            raise
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        self._counts.left_out += left_out
        if refused:
            self._count_too_large(sorted(refused))
        for gap in page.gaps:
            self._count_gap(gap)
        if page.next > self._position:
            self._position = page.next
            ends = dict(answer for answer in answers if isinstance(answer, tuple))
            self._sent.append(_Sent(page.next, ends))

    async def _append_parts(
        self, place: int, parts: Iterable[RoutedRecords], refused: list[int]
    ) -> tuple[int, int] | None:
        """Append records to one partition of the destination, one append after the other; see `append_part`.

        Those that the destination can never hold are added to `refused`. `None` if it has taken none.
        """
        end = None
        for part in parts:
            try:
                end = await self.append_part(place, part)
            except TooLarge as error:
                if len(part.offsets) > 1:
                    end = await self._append_parts(place, part.one_by_one(), refused) or end
                elif self._stops:
                    raise self._refusal(part.last) from error
                else:
                    refused.append(part.last)
        return end

    @property
    def _stops(self) -> bool:
        """Whether a record that the destination can never hold is waited at. By the newest rule: see `OnRefused`."""
        return self.router.rule.on_refused is OnRefused.STOP

    def _refusal(self, offset: int) -> TooLarge:
        return TooLarge(
            f"the record at offset {offset} of {self._source.name}[{self._partition}] is too large for "
            f"{self._destination.name}, or has too many headers, as the rule makes it: alter the router, with "
            'on_refused="skip" to go on without the record',
            topic=self._destination.name,
        )

    async def append_part(self, place: int, part: RoutedRecords) -> tuple[int, int]:
        """Append records to one partition of the destination; the partition, and where they end in it."""
        offsets = await self._destination.append_many(
            part.values,
            keys=part.keys,
            tags=part.tags,
            headers=part.headers,
            timestamps=part.timestamps,
            partition=place,
            producer=self._producer,
            sequence=part.last,
            previous=self._arrived.get(place, NONE_BEFORE),
        )
        self._arrived[place] = part.last
        self._counts.routed += len(part.values)
        return place, offsets[-1] + 1

    def _count_too_large(self, offsets: Sequence[int]) -> None:
        self._counts.too_large += len(offsets)
        logger.warning(
            "router %s leaves out %d records of %s[%d], the first at offset %d: as the rule makes them they are too "
            "large for %s, or have too many headers; read them in their topic",
            self.router.name,
            len(offsets),
            self._source.name,
            self._partition,
            offsets[0],
            self._destination.name,
        )

    def _count_gap(self, gap: Gap) -> None:
        if gap.reason is Reason.SKIPPED:
            return
        lost = self._counts.lost
        lost[gap.reason] = lost.get(gap.reason, 0) + gap.stop - gap.start
        logger.warning(
            "router %s finds no records at %s[%d] %s; it goes on behind them",
            self.router.name,
            self._source.name,
            self._partition,
            gap,
        )

    async def note_cursor(self, way: _Way) -> None:
        """Store how far the destination keeps everything: a later run begins there."""
        self._noted_at = self._seconds()
        places = {place for sent in self._sent for place in sent.ends}
        kept = {place: await self._kept_end(place) for place in places}
        done = None
        while self._sent and all(kept[place] >= end for place, end in self._sent[0].ends.items()):
            done = self._sent.popleft().stop
        if done is not None:
            note = note_of(way.version, way.partitions)
            cached = partial(self._reader.ack_up_to, done, self._partition, note, ack="cached")
            self._cursor = await self._workers.run_at(self._key, cached)

    async def _kept_end(self, place: int) -> int:
        """Where that ends which a partition of the destination has taken and keeps for as long as it ever will."""
        offsets = await self._destination.offsets(place)
        # What is in memory alone is never durable: a cursor that waited for that would stand still for good.
        is_ephemeral = self._destination.spec.durability is Durability.EPHEMERAL
        return offsets.next if is_ephemeral else offsets.durable

    def _seconds(self) -> float:
        return asyncio.get_running_loop().time()


def _below(page: PolledPage[Record], stop: int) -> PolledPage[Record]:
    """The part of the page below `stop`, with a gap that begins there as a whole."""
    gaps = [gap for gap in page.gaps if gap.start < stop]
    rows = [record for record in page.rows if record.offset < stop]
    return page._replace(rows=rows, gaps=gaps, next=min(page.next, max([stop, *(gap.stop for gap in gaps)])))


def producer_of(router: RouterSpec, source_id: str, partition: int) -> ReservedProducer:
    """The producer that a router is in its destination, for one partition of a source."""
    return ReservedProducer.of_worker(f"{router.router_id}/{source_id}/{partition}")
