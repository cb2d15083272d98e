"""Catalogued history as pages: offsets → descriptors → index → ranged reads → batches.

Knows the catalog and the store of segments; knows nothing of logs.
Memory stays bounded: a few blocks read ahead per segment, few segments open at a time.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from forebay.blobs import BlobStore
from forebay.catalog import ShardCatalog
from forebay.errors import Unsupported
from forebay.format.descriptor import DescriptorKind, SegmentDescriptor
from forebay.format.segment import index_name
from forebay.pages import Page
from forebay.sealed import ByteSource, SealedSegment

PAGE_BYTES = 1024 * 1024
BLOCK_BYTES = 1024 * 1024
BLOCKS_AHEAD = 3
SEGMENTS_OPEN = 8

OpenSegment = Callable[[SegmentDescriptor], SealedSegment]
Range = Callable[[int, int], bytes]
"""The bytes `[start, stop)` of one object."""


class History:
    """The history of one shard. Safe for concurrent use; remembers descriptors until the catalog moves on."""

    def __init__(self, catalog: ShardCatalog, open_segment: OpenSegment) -> None:
        self._catalog = catalog
        self._open_segment = open_segment
        self._lock = threading.Lock()
        self._descriptors: list[SegmentDescriptor] = []
        self._generation = -1
        self._segments: OrderedDict[tuple[str, int], SealedSegment] = OrderedDict()
        self.end = 0
        """Everything below is history, as far as it is known here."""

    def read(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page:
        """Records from `offset` on, at least one if history covers it; an empty page behind its end."""
        if offset >= self.end:
            self.refresh()
        descriptor = self._covering(offset)
        if descriptor is None:
            return Page([], [], offset)
        gap = descriptor.gap
        if gap is not None:
            return Page([], [gap._replace(start=offset)], gap.stop)
        return self._segment(descriptor).read(offset, bytes_max).clipped(descriptor.end)

    def offset_at_time(self, timestamp: int) -> int | None:
        """The first record at or after the time; `None` if history has none."""
        self.refresh()
        for descriptor in self._descriptors:
            if descriptor.kind is DescriptorKind.FRAMES and descriptor.time_max >= timestamp:
                found = self._segment(descriptor).offset_at_time(timestamp)
                if found is not None:
                    return found
        return None

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
            while len(self._segments) > SEGMENTS_OPEN:
                self._segments.popitem(last=False)[1].close()
            return segment


class ReadAhead:
    """A byte source over ranged reads: whole blocks, the next ones asked for before they are needed.

    Holds `blocks_ahead + 2` blocks at the most.
    """

    def __init__(
        self, fetch: Range, size: int, *, pool: ThreadPoolExecutor, block_bytes: int, blocks_ahead: int
    ) -> None:
        self._fetch = fetch
        self._size = size
        self._pool = pool
        self._block_bytes = block_bytes
        self._blocks_ahead = blocks_ahead
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, Future[bytes]] = OrderedDict()

    def read_at(self, length: int, position: int) -> bytes:
        """See `ByteSource`."""
        stop = min(position + length, self._size)
        if position >= stop:
            return b""
        first, last = position // self._block_bytes, (stop - 1) // self._block_bytes
        parts = []
        for block in range(first, last + 1):
            data = self._block(block)
            start = block * self._block_bytes
            parts.append(data[max(0, position - start) : stop - start])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Forget all blocks."""
        with self._lock:
            self._blocks.clear()

    def _block(self, block: int) -> bytes:
        with self._lock:
            wanted = self._asked(block)
            for ahead in range(block + 1, block + 1 + self._blocks_ahead):
                if ahead * self._block_bytes < self._size:
                    self._asked(ahead)
            while len(self._blocks) > self._blocks_ahead + 2:
                self._blocks.popitem(last=False)
        try:
            return wanted.result()
        except BaseException:
            with self._lock:
                self._blocks.pop(block, None)
            raise

    def _asked(self, block: int) -> Future[bytes]:
        found = self._blocks.pop(block, None)
        if found is None:
            start = block * self._block_bytes
            found = self._pool.submit(self._fetch, start, min(start + self._block_bytes, self._size))
        self._blocks[block] = found
        return found


class Objects:
    """Segments in an object store, opened as `History` asks for them. Holds the threads that read ahead."""

    def __init__(self, store: BlobStore, *, block_bytes: int = BLOCK_BYTES, blocks_ahead: int = BLOCKS_AHEAD) -> None:
        self._store = store
        self._block_bytes = block_bytes
        self._blocks_ahead = blocks_ahead
        self._pool = ThreadPoolExecutor(max_workers=blocks_ahead + 1, thread_name_prefix="forebay-history")

    def segment(self, descriptor: SegmentDescriptor) -> SealedSegment:
        """The segment that a descriptor names; its object must still be the one that was catalogued."""
        key, etag = descriptor.object_key, descriptor.etag

        def source() -> ByteSource:
            return ReadAhead(
                lambda start, stop: self._store.get_range(key, start, stop, etag=etag),
                descriptor.bytes,
                pool=self._pool,
                block_bytes=self._block_bytes,
                blocks_ahead=self._blocks_ahead,
            )

        def index() -> bytes:
            return self._store.get_range(index_name(key), 0, descriptor.index_bytes)

        shift = 0 if descriptor.header_start is None else descriptor.start - descriptor.header_start
        return SealedSegment(key, descriptor.start, descriptor.end, source=source, index=index, shift=shift)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
