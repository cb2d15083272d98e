"""Catalogued history as pages: offsets → descriptors → index → ranged reads → batches.

Knows the catalog and the store of segments; knows nothing of logs.
Memory stays bounded: a few blocks for each of the latest readers, never more than one budget for all of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias, TypeVar

from forebay.blobs import BlobChanged, BlobMissing
from forebay.blobs.blocks import BUDGET_BYTES, Budget, ReadAhead
from forebay.blobs.ranges import ObjectBytes, Range
from forebay.errors import Corrupt, Unsupported
from forebay.format.metadata.descriptor import DescriptorKind, LoadStatus, SegmentDescriptor
from forebay.locks import Rank, RankedLock
from forebay.meter import LogMeter, Metric
from forebay.pages import Page, Span
from forebay.records import OFFSET_MAX, Gap, Reason
from forebay.sealed import ByteSource, SealedSegment, StoredSegment

if TYPE_CHECKING:  # what reads segments alone, as a task of Spark, needs no catalog
    from forebay.catalog import ShardCatalog

PAGE_BYTES = 1024 * 1024
FIRST_BYTES = 256 * 1024
"""Fetched at a place where no reader stood before: large ranges take their time."""
BLOCK_BYTES = 4 * 1024 * 1024
BLOCKS_AHEAD = 2
THREADS_MAX = 16
READERS_KNOWN = 64
ATTEMPTS = 4
"""Of a look under which objects are replaced."""
SEGMENTS_OPEN = 8
"""Of so many segments bytes are held."""
SEGMENTS_KNOWN = 64
"""Of so many what was read of the index is."""
SPOT = 1
"""Who asks for no more bytes wants the frame at one place and does not read on: nothing else is fetched for it."""

REPLACED = (BlobMissing, BlobChanged, FileNotFoundError)
"""How an object answers that compaction has replaced, or that is lost."""
READABLE = (DescriptorKind.FRAMES, DescriptorKind.PARQUET)
_NO_TIME: Final = -(2**63) - 1
OpenSegment = Callable[[SegmentDescriptor], SealedSegment]
T = TypeVar("T")
_Place: TypeAlias = tuple[str, str, int, str | None, str]


class InHistory(NamedTuple):
    """One segment of history, opened by the first who needs it."""

    open: Callable[[], SealedSegment]
    waits: bool
    """A bulk load brought it that is not committed: its records count from then on."""
    is_whole: bool
    """There is a record for each of its offsets, as far as is known without a look into it."""


class History:
    """The history of one shard. Safe for concurrent use; remembers descriptors until the catalog moves on."""

    def __init__(self, catalog: ShardCatalog, open_segment: OpenSegment) -> None:
        self._catalog = catalog
        self._open_segment = open_segment
        self._lock = RankedLock(Rank.IO, "history.descriptors")
        self._descriptors: list[SegmentDescriptor] = []
        """In order. It grows while the catalog does; where pieces of it are replaced, there is another list."""
        self._tops: list[int] = []
        """For each descriptor the newest time of a record in it or before it."""
        self._generation = -1
        self._segments: OrderedDict[_Place, SealedSegment] = OrderedDict()
        self._ends: deque[int] = deque(maxlen=READERS_KNOWN)
        """Where the latest pages ended: who asks there is reading on."""
        self._loads: dict[str, LoadStatus] = {}
        """Bulk loads that are over: how they ended never changes."""
        self.end = 0
        """Everything below is history, as far as it is known here."""
        self.loads: dict[str, int] = {}
        """Where the bulk loads begin that the catalog still names as such: most are over."""
        self.compactions = 0
        """How often segments turned up here that others were compacted into."""
        self._compacted: set[str] = set()
        self._begun = self._taken = 0
        """Looks at the catalog that were begun, and which of them was taken in last."""

    def read(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page:
        """Records from `offset` on, at least one if history covers it; an empty page behind its end.

        What a bulk load brought counts once the load is committed: until then the page before it is empty too.
        """
        if offset >= self.end:
            self.refresh()
        left = ATTEMPTS
        while True:
            left, known = left - 1, self._descriptors
            try:
                found = self._found(offset)
                if isinstance(found, Page):
                    return found
                if bytes_max <= SPOT:
                    return found.tier.read_one(offset).clipped(found.stop)
                page = found.tier.read(offset, self._page_bytes(offset, bytes_max)).clipped(found.stop)
            except REPLACED as error:
                self._look_again(f"offset {offset}", error, known if left else None)
                continue
            with self._lock:
                self._ends.append(page.next)
            return page

    def _tried(self, place: str, look: Callable[[], T]) -> T:
        """Look, and look again where objects were replaced meanwhile; `Corrupt` if they are simply not there."""
        left = ATTEMPTS
        while True:
            left, known = left - 1, self._descriptors
            try:
                return look()
            except REPLACED as error:
                self._look_again(place, error, known if left else None)

    def _look_again(self, place: str, error: Exception, known: list[SegmentDescriptor] | None) -> None:
        """Read the catalog again after an object was missing; `Corrupt` if it still says what was `known`."""
        self.refresh()
        if known is None or self._descriptors is known:
            raise Corrupt(
                f'the history of {self._catalog.keys} at {place} is not there: {error}; run "forebay verify"'
            ) from error

    def _found(self, offset: int) -> Span[SealedSegment] | Page:
        """The segment that has an offset, or the page that says why there are no records to be read now."""
        descriptor = self._covering(offset)
        if descriptor is None:
            return Page([], [], offset)
        gap = descriptor.gap
        if descriptor.load_id is not None:
            status = self.load_status(descriptor.load_id)
            if status is LoadStatus.OFFERED:
                return Page([], [], offset)
            if status is LoadStatus.ABANDONED:
                # Its descriptors become such a gap sooner or later.
                gap = Gap(offset, descriptor.end, Reason.SKIPPED)
        if gap is not None:
            return Page([], [gap._replace(start=offset)], gap.stop)
        return Span(descriptor.start, descriptor.end, self._segment(descriptor))

    def offset_at_time(self, timestamp: int, end: int = OFFSET_MAX) -> int | None:
        """The first record at or after the time; `None` if history has none.

        `end` is where history ends as far as the caller knows: the catalog is read only if less is known here.
        The record may lie in a bulk load that is not committed yet: a reader that begins there waits for it.
        """
        if end > self.end:
            self.refresh()
        return self._tried(f"time {timestamp}", lambda: self._offset_at_time(timestamp))

    def damage_at(self, offset: int) -> Gap | None:
        """The range that covers `offset` and was damaged before it became history; its times are not known."""
        found = self._covering(offset)
        if found is None or found.kind not in READABLE:
            gap = found.gap if found is not None else None
            return gap if gap is not None and gap.reason is Reason.DAMAGED else None
        if found.records == found.end - found.start or self._is_given_up(found):
            return None
        return self._tried(f"offset {offset}", lambda: self._segment(found).damage_at(offset))

    def _offset_at_time(self, timestamp: int) -> int | None:
        with self._lock:
            descriptors, tops = self._descriptors, self._tops
        # The first whose newest record is not older, and after it each one: its records may have been given up.
        for place in range(bisect_left(tops, timestamp), len(descriptors)):
            descriptor = descriptors[place]
            if _top(descriptor) >= timestamp:
                if self._is_given_up(descriptor):
                    continue
                found = self._segment(descriptor).offset_at_time(timestamp)
                if found is not None:
                    return found
        return None

    def cover(self, start: int, stop: int) -> list[Span[InHistory | Gap]]:
        """What is catalogued of `[start, stop)`, in order: segments, and the gaps that the catalog names.

        Between two of them nothing is catalogued. Opens no segment.
        """
        if stop > self.end:
            self.refresh()
        spans: list[Span[InHistory | Gap]] = []
        descriptors = self._descriptors
        for place in range(max(bisect_right(descriptors, start, key=_start) - 1, 0), len(descriptors)):
            piece = descriptors[place]
            low, high = max(start, piece.start), min(stop, piece.end)
            if piece.start >= stop:
                break
            if low < high:
                spans.append(Span(low, high, self._tier(piece, low, high)))
        return spans

    def _tier(self, piece: SegmentDescriptor, start: int, stop: int) -> InHistory | Gap:
        if self._is_given_up(piece):
            return Gap(start, stop, Reason.SKIPPED)
        if piece.gap is not None:
            return Gap(start, stop, piece.gap.reason)
        waits = piece.load_id is not None and self.load_status(piece.load_id) is LoadStatus.OFFERED
        return InHistory(partial(self._segment, piece), waits, piece.records == piece.end - piece.start)

    def before_gaps(self, end: int) -> int:
        """Where the gaps begin that history ends in, if `end` is its end; else `end`. By what is known here."""
        with self._lock:
            for piece in reversed(self._descriptors):
                if piece.end != end or piece.gap is None:
                    break
                end = piece.start
        return end

    def is_waiting(self, offset: int) -> bool:
        """Whether this offset can be read only once a bulk load is committed."""
        if offset >= self.end:
            self.refresh()
        found = self._covering(offset)
        load_id = found.load_id if found is not None else None
        return load_id is not None and self.load_status(load_id) is LoadStatus.OFFERED

    def refresh(self) -> None:
        """Look at the catalog again, if it has moved. Where it has only grown, what was added is read and no more."""
        while not self._is_looked_at():
            pass

    def _is_looked_at(self) -> bool:
        """Look once; false if what was read goes on from what another look has changed meanwhile."""
        with self._lock:
            self._begun += 1
            look = self._begun
        frontier = self._catalog.frontier()
        with self._lock:
            generation, end = self._generation, self.end
            if (frontier.next, frontier.cur.generation) == (end, generation):
                return True
        added = self._catalog.descriptors_behind(end, generation) if frontier.cur.generation == generation else None
        found = self._catalog.descriptors() if added is None else added
        unknown = {piece.load_id for piece in found if piece.load_id is not None} - self._loads.keys()
        if len(unknown) > 1:
            self._loads.update(dict.fromkeys(self._catalog.committed_loads(unknown, frontier), LoadStatus.COMMITTED))
        with self._lock:
            if look < self._taken:
                # One that was begun later is over already, and knows no less.
                return True
            if added is not None and (generation, end) != (self._generation, self.end):
                return False
            self._taken = look
            self._take(found, is_all=added is None)
            self._generation = frontier.cur.generation
            return True

    def _take(self, found: list[SegmentDescriptor], *, is_all: bool) -> None:
        """This is history from now on, or what was added to it."""
        compacted = {piece.object_key for piece in found if piece.kind is DescriptorKind.PARQUET}
        self.compactions += bool(compacted - self._compacted)
        # The first piece of a load is where it begins.
        loads = {piece.load_id: piece.start for piece in reversed(found) if piece.load_id is not None}
        before = _NO_TIME if is_all or not self._tops else self._tops[-1]
        tops = list(accumulate(map(_top, found), max, initial=before))[1:]
        if is_all:
            self._descriptors, self._tops, self._compacted, self.loads = found, tops, compacted, loads
            self.end = found[-1].end if found else 0
        elif found:
            self._tops += tops
            self._descriptors += found
            self._compacted |= compacted
            self.loads = {**loads, **self.loads} if loads else self.loads
            self.end = found[-1].end

    def renew(self) -> None:
        """As `refresh`, unless no reader has looked yet: then there is nothing that could be out of date."""
        if self._generation >= 0:
            self.refresh()

    def close(self) -> None:
        """Give back what is held."""
        with self._lock:
            for segment in self._segments.values():
                segment.close()
            self._segments.clear()

    def load_status(self, load_id: str) -> LoadStatus:
        """How far a bulk load is. Asks the metadata store until it is over, which never changes again."""
        status = self._loads.get(load_id)
        if status is None:
            status = self._catalog.load_status(load_id)
            if status is not LoadStatus.OFFERED:
                self._loads[load_id] = status
        return status

    def _is_given_up(self, descriptor: SegmentDescriptor) -> bool:
        load_id = descriptor.load_id
        return load_id is not None and self.load_status(load_id) is LoadStatus.ABANDONED

    def _page_bytes(self, offset: int, bytes_max: int) -> int:
        """Less for a reader that has just come, so that it has its first record soon."""
        with self._lock:
            return bytes_max if offset in self._ends else min(bytes_max, FIRST_BYTES)

    def _covering(self, offset: int) -> SegmentDescriptor | None:
        with self._lock:
            place = bisect_right(self._descriptors, offset, key=_start) - 1
            found = self._descriptors[place] if place >= 0 else None
        return found if found is not None and offset < found.end else None

    def _segment(self, descriptor: SegmentDescriptor) -> SealedSegment:
        if descriptor.kind not in READABLE:
            raise Unsupported(f"{descriptor.object_key} is a segment of kind {descriptor.kind}: upgrade to read it")
        # Where any of this changed, what was opened before looks in the wrong place or for other bytes.
        place = (descriptor.store, descriptor.object_key, descriptor.start, descriptor.etag, descriptor.index_object)
        with self._lock:
            segment = self._segments.pop(place, None)
            if segment is None:
                segment = self._open_segment(descriptor)
            self._segments[place] = segment
            while len(self._segments) > SEGMENTS_KNOWN:
                self._segments.popitem(last=False)[1].close()
            for idle in islice(self._segments.values(), max(0, len(self._segments) - SEGMENTS_OPEN)):
                idle.rest()
            return segment


def _start(piece: SegmentDescriptor) -> int:
    return piece.start


def _top(piece: SegmentDescriptor) -> int:
    """The newest time of its records."""
    return piece.time_max if piece.kind in READABLE and piece.records else _NO_TIME


def _class_of(descriptor: SegmentDescriptor) -> type[StoredSegment]:
    if descriptor.kind is not DescriptorKind.PARQUET:
        return StoredSegment
    from forebay.columnar import ParquetSegment  # noqa: PLC0415 - it brings Arrow, which takes its time to load

    return ParquetSegment


class RangeStore(Protocol):
    """Gives bytes of objects: a `BlobStore`, or less than one."""

    def get_range(self, key: str, start: int, stop: int, *, etag: str | None = None) -> bytes:
        """See `BlobStore.get_range`."""


class Objects:
    """Segments in an object store, opened as `History` asks for them. Holds the threads that read ahead."""

    def __init__(
        self,
        store: RangeStore,
        *,
        read_ahead_bytes: int = BLOCKS_AHEAD * BLOCK_BYTES,
        meter: LogMeter | None = None,
    ) -> None:
        """With `meter` each request to the store is counted."""
        self._store = store
        self._meter = meter
        self._block_bytes = min(BLOCK_BYTES, max(1, read_ahead_bytes // BLOCKS_AHEAD))
        self._blocks_ahead = read_ahead_bytes // self._block_bytes
        self._budget = Budget(max(BUDGET_BYTES, read_ahead_bytes))
        self._pool = ThreadPoolExecutor(
            max_workers=min(THREADS_MAX, self._blocks_ahead + 1), thread_name_prefix="forebay-history"
        )

    def segment(self, descriptor: SegmentDescriptor) -> SealedSegment:
        """The segment that a descriptor names; its object must still be the one that was catalogued."""
        index = partial(self._fetch, descriptor.index_object, None)
        return _class_of(descriptor)(
            descriptor.object_key,
            descriptor.start,
            descriptor.end,
            source=lambda: self.source(descriptor),
            spot=lambda: ObjectBytes(self._range(descriptor), descriptor.bytes),
            index=lambda: ObjectBytes(index, descriptor.index_bytes),
            shift=0 if descriptor.header_start is None else descriptor.start - descriptor.header_start,
        )

    def source(self, descriptor: SegmentDescriptor) -> ByteSource:
        """Its bytes alone."""
        return ReadAhead(
            self._range(descriptor),
            descriptor.bytes,
            pool=self._pool,
            block_bytes=self._block_bytes,
            blocks_ahead=self._blocks_ahead,
            budget=self._budget,
        )

    def _range(self, descriptor: SegmentDescriptor) -> Range:
        return partial(self._fetch, descriptor.object_key, descriptor.etag)

    def _fetch(self, key: str, etag: str | None, start: int, stop: int) -> bytes:
        """Bytes of an object; run by readers and by the threads that read ahead."""
        if self._meter is None:
            return self._store.get_range(key, start, stop, etag=etag)
        with self._meter.timed(Metric.HISTORY_QUERY_SECONDS):
            found = self._store.get_range(key, start, stop, etag=etag)
        self._meter.add(Metric.HISTORY_BYTES_READ, len(found))
        return found

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
