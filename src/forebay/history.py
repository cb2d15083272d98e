"""Catalogued history as pages: offsets → descriptors → index → ranged reads → batches.

Knows the catalog and the store of segments; knows nothing of logs.
Memory stays bounded: a few blocks for each of the latest readers, never more than one budget for all of them.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import NamedTuple

from forebay.blobs import BlobChanged, BlobMissing, BlobStore
from forebay.blobs.ranges import ObjectBytes, Range
from forebay.catalog import ShardCatalog
from forebay.errors import Corrupt, Unsupported
from forebay.format.descriptor import DescriptorKind, LoadStatus, SegmentDescriptor
from forebay.format.segment import index_name
from forebay.pages import Page
from forebay.records import Gap, Reason
from forebay.sealed import ByteSource, SealedSegment

PAGE_BYTES = 1024 * 1024
FIRST_BYTES = 256 * 1024
"""Fetched at a place where no reader stood before: large ranges take their time."""
BLOCK_BYTES = 4 * 1024 * 1024
BLOCKS_AHEAD = 2
THREADS_MAX = 16
RUNS_MAX = 3
BUDGET_BYTES = 64 * 1024 * 1024
"""What all readers of one store hold in blocks, whatever their number."""
READERS_KNOWN = 64
SEGMENTS_OPEN = 8
"""Of so many segments bytes are held."""
SEGMENTS_KNOWN = 64
"""Of so many what was read of the index is."""
SPOT = 1
"""Who asks for no more bytes wants the frame at one place and does not read on: nothing else is fetched for it."""

OpenSegment = Callable[[SegmentDescriptor], SealedSegment]


class Stretch(NamedTuple):
    """Offsets `[start, stop)` of history, all in one segment."""

    start: int
    stop: int
    segment: Callable[[], SealedSegment]
    waits: bool
    """They were loaded, and count once the load is committed."""


class History:
    """The history of one shard. Safe for concurrent use; remembers descriptors until the catalog moves on."""

    def __init__(self, catalog: ShardCatalog, open_segment: OpenSegment) -> None:
        self._catalog = catalog
        self._open_segment = open_segment
        self._lock = threading.Lock()
        self._descriptors: list[SegmentDescriptor] = []
        self._generation = -1
        self._segments: OrderedDict[tuple[str, int], SealedSegment] = OrderedDict()
        self._ends: deque[int] = deque(maxlen=READERS_KNOWN)
        """Where the latest pages ended: who asks there is reading on."""
        self._loads: dict[str, LoadStatus] = {}
        """Bulk loads that are over: how they ended never changes."""
        self.end = 0
        """Everything below is history, as far as it is known here."""

    def read(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page:
        """Records from `offset` on, at least one if history covers it; an empty page behind its end.

        What a bulk load brought counts once the load is committed: until then the page before it is empty too.
        """
        if offset >= self.end:
            self.refresh()
        descriptor = self._covering(offset)
        try:
            return self._read(descriptor, offset, bytes_max)
        except (BlobMissing, BlobChanged, FileNotFoundError) as error:
            self.refresh()
            replaced = self._covering(offset)
            if replaced != descriptor:
                return self._read(replaced, offset, bytes_max)
            raise Corrupt(
                f'the history of {self._catalog.keys} at offset {offset} is not there: {error}; run "forebay verify"'
            ) from error

    def _read(self, descriptor: SegmentDescriptor | None, offset: int, bytes_max: int) -> Page:
        if descriptor is None:
            return Page([], [], offset)
        gap = descriptor.gap
        if descriptor.load_id is not None:
            status = self._load_status(descriptor.load_id)
            if status is LoadStatus.OFFERED:
                return Page([], [], offset)
            if status is LoadStatus.ABANDONED:
                # Its descriptors become such a hole sooner or later.
                gap = Gap(offset, descriptor.end, Reason.SKIPPED)
        if gap is not None:
            return Page([], [gap._replace(start=offset)], gap.stop)
        segment = self._segment(descriptor)
        if bytes_max <= SPOT:
            return segment.read_one(offset).clipped(descriptor.end)
        page = segment.read(offset, self._page_bytes(offset, bytes_max)).clipped(descriptor.end)
        with self._lock:
            self._ends.append(page.next)
        return page

    def offset_at_time(self, timestamp: int) -> int | None:
        """The first record at or after the time; `None` if history has none.

        It may lie in a bulk load that is not committed yet: who begins there waits, and misses nothing of it.
        """
        self.refresh()
        for descriptor in self._descriptors:
            if descriptor.kind is DescriptorKind.FRAMES and descriptor.time_max >= timestamp:
                if self._is_given_up(descriptor):
                    continue
                found = self._segment(descriptor).offset_at_time(timestamp)
                if found is not None:
                    return found
        return None

    def stretches(self, start: int, stop: int) -> list[Stretch]:
        """What there is of `[start, stop)` to be looked into, in order; holes are left out."""
        if stop > self.end:
            self.refresh()
        with self._lock:
            pieces = [piece for piece in self._descriptors if piece.end > start and piece.start < stop]
        found = []
        for piece in pieces:
            if piece.gap is None and not self._is_given_up(piece):
                low, high = max(start, piece.start), min(stop, piece.end)
                waits = piece.load_id is not None and self._load_status(piece.load_id) is LoadStatus.OFFERED
                found.append(Stretch(low, high, partial(self._segment, piece), waits))
        return found

    def is_waiting(self, offset: int) -> bool:
        """Whether this offset can be read only once a bulk load is committed."""
        if offset >= self.end:
            self.refresh()
        found = self._covering(offset)
        load_id = found.load_id if found is not None else None
        return load_id is not None and self._load_status(load_id) is LoadStatus.OFFERED

    def refresh(self) -> None:
        """Look at the catalog again, if it has moved."""
        frontier = self._catalog.frontier()
        with self._lock:
            if (frontier.next, frontier.cur.generation) == (self.end, self._generation):
                return
        descriptors = self._catalog.descriptors()
        with self._lock:
            self._descriptors = descriptors
            self._generation = frontier.cur.generation
            self.end = descriptors[-1].end if descriptors else 0

    def close(self) -> None:
        """Give back what is held."""
        with self._lock:
            for segment in self._segments.values():
                segment.close()
            self._segments.clear()

    def _load_status(self, load_id: str) -> LoadStatus:
        status = self._loads.get(load_id)
        if status is None:
            status = self._catalog.load_status(load_id)
            if status is not LoadStatus.OFFERED:
                self._loads[load_id] = status
        return status

    def _is_given_up(self, descriptor: SegmentDescriptor) -> bool:
        load_id = descriptor.load_id
        return load_id is not None and self._load_status(load_id) is LoadStatus.ABANDONED

    def _page_bytes(self, offset: int, bytes_max: int) -> int:
        """Less for a reader that has just come, so that it has its first record soon."""
        with self._lock:
            return bytes_max if offset in self._ends else min(bytes_max, FIRST_BYTES)

    def _covering(self, offset: int) -> SegmentDescriptor | None:
        with self._lock:
            place = bisect_right(self._descriptors, offset, key=lambda piece: piece.start) - 1
            found = self._descriptors[place] if place >= 0 else None
        return found if found is not None and offset < found.end else None

    def _segment(self, descriptor: SegmentDescriptor) -> SealedSegment:
        if descriptor.kind is not DescriptorKind.FRAMES:
            raise Unsupported(f"{descriptor.object_key} is a segment of kind {descriptor.kind}: upgrade to read it")
        place = (descriptor.object_key, descriptor.start)
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


class _Run:
    """One reader's way through a segment: adjoining blocks, fetched or under way, from where it stands."""

    def __init__(self, start: int) -> None:
        self.blocks: deque[tuple[int, Future[bytes]]] = deque()
        self.stop = start
        """Where the last block ends."""

    def covers(self, position: int) -> bool:
        """Whether a read there is in these blocks, or goes on right behind them."""
        return self.blocks[0][0] <= position <= self.stop

    @property
    def bytes(self) -> int:
        """What its blocks hold or will hold."""
        return self.stop - self.blocks[0][0] if self.blocks else 0

    def ahead_of(self, position: int) -> int:
        """How many blocks begin there or later."""
        return sum(start >= position for start, _ in self.blocks)

    def forget_before(self, position: int) -> None:
        """Let go of the blocks that end there or earlier."""
        while len(self.blocks) > 1 and self.blocks[1][0] <= position:
            self.blocks.popleft()


class Budget:
    """How much all readers together hold: beyond it, the one that stood still for longest lets go. Thread-safe."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._held: OrderedDict[_Run, tuple[ReadAhead, int]] = OrderedDict()
        self._total = 0

    def used(self, reader: ReadAhead, run: _Run) -> None:
        """The run was read from. The caller holds no lock."""
        stale: list[tuple[ReadAhead, _Run]] = []
        with self._lock:
            self._total += run.bytes - self._held.pop(run, (reader, 0))[1]
            self._held[run] = (reader, run.bytes)
            while self._total > self._bytes_max and len(self._held) > 1:
                oldest, (holder, size) = self._held.popitem(last=False)
                self._total -= size
                stale.append((holder, oldest))
        for holder, oldest in stale:
            holder.forget(oldest)

    def given_back(self, run: _Run) -> None:
        """The run holds nothing any more."""
        with self._lock:
            self._total -= self._held.pop(run, (None, 0))[1]


class ReadAhead:
    """A byte source over ranged reads. Safe for concurrent use.

    A read somewhere fetches what it asks for and no more, so that its answer comes soon. Reads that go on from
    there find the next blocks fetched before they are needed. Holds `blocks_ahead + 2` blocks for each of the last
    `RUNS_MAX` readers at the most, and none of a reader that came to the end.
    """

    def __init__(
        self,
        fetch: Range,
        size: int,
        *,
        pool: ThreadPoolExecutor,
        block_bytes: int,
        blocks_ahead: int,
        budget: Budget | None = None,
    ) -> None:
        self._budget = budget or Budget(BUDGET_BYTES)
        self._fetch = fetch
        self._size = size
        self._pool = pool
        self._block_bytes = block_bytes
        self._blocks_ahead = blocks_ahead
        self._lock = threading.Lock()
        self._runs: list[_Run] = []
        """The one used last stands last."""

    def read_at(self, length: int, position: int) -> bytes:
        """See `ByteSource`."""
        stop = min(position + length, self._size)
        if position >= stop:
            return b""
        with self._lock:
            run, left = self._run_at(position, stop)
            wanted = [(start, block) for start, block in run.blocks if start < stop]
        self._budget.used(self, run)
        for gone in left:
            self._budget.given_back(gone)
        try:
            parts = [block.result()[max(0, position - start) : stop - start] for start, block in wanted]
        except BaseException:
            self.forget(run)
            raise
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Forget all blocks."""
        for run in list(self._runs):
            self.forget(run)

    def forget(self, run: _Run) -> None:
        """Let go of a run's blocks; who still reads from it keeps what it has."""
        with self._lock:
            if run in self._runs:
                self._runs.remove(run)
        self._budget.given_back(run)

    def _run_at(self, position: int, stop: int) -> tuple[_Run, list[_Run]]:
        """The run whose blocks hold `[position, stop)`, and those that are over."""
        run = next((run for run in self._runs if run.covers(position)), None)
        ahead = self._blocks_ahead
        if run is None:
            run, ahead = _Run(position), 0
        else:
            self._runs.remove(run)
            run.forget_before(position)
        while run.stop < stop:
            self._ask(run, min(stop, self._block_end(run.stop)))
        while run.stop < self._size and run.ahead_of(stop) < ahead:
            self._ask(run, min(self._size, self._block_end(run.stop)))
        self._runs.append(run)
        left, self._runs = self._runs[:-RUNS_MAX], self._runs[-RUNS_MAX:]
        if stop == self._size:
            left.append(self._runs.pop())
        return run, left

    def _block_end(self, position: int) -> int:
        # Whole multiples: stores keep an object in parts, and a range that lies in one part costs less.
        return (position // self._block_bytes + 1) * self._block_bytes

    def _ask(self, run: _Run, stop: int) -> None:
        run.blocks.append((run.stop, self._pool.submit(self._fetch, run.stop, stop)))
        run.stop = stop


class Objects:
    """Segments in an object store, opened as `History` asks for them. Holds the threads that read ahead."""

    def __init__(self, store: BlobStore, *, read_ahead_bytes: int = BLOCKS_AHEAD * BLOCK_BYTES) -> None:
        self._store = store
        self._block_bytes = min(BLOCK_BYTES, max(1, read_ahead_bytes // BLOCKS_AHEAD))
        self._blocks_ahead = read_ahead_bytes // self._block_bytes
        self._budget = Budget(max(BUDGET_BYTES, read_ahead_bytes))
        self._pool = ThreadPoolExecutor(
            max_workers=min(THREADS_MAX, self._blocks_ahead + 1), thread_name_prefix="forebay-history"
        )

    def segment(self, descriptor: SegmentDescriptor) -> SealedSegment:
        """The segment that a descriptor names; its object must still be the one that was catalogued."""
        index = partial(self._store.get_range, index_name(descriptor.object_key))
        return SealedSegment(
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
        return partial(self._store.get_range, descriptor.object_key, etag=descriptor.etag)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
