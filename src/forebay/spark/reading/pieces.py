"""One partition, read piece by piece from wherever each piece was found to lie: history by its descriptor, the rest
by the log.

The planner fixed the pieces. One that is gone since is looked for once more where it lies now; what ended since is
a gap then, and what cannot be found again a named failure, never a row less. Knows nothing of Spark.
"""

from __future__ import annotations

import contextlib
import errno
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from forebay.blobs import BlobChanged, BlobMissing
from forebay.errors import Unavailable
from forebay.format.control.offsets import OffsetSet
from forebay.format.frame.batch import Batch
from forebay.pages import Page
from forebay.sealed import SealedSegment
from forebay.spark.place.reading import LogTail, ReadPlace
from forebay.spark.reading.snapshot import ScanPiece
from forebay.wal.files import SealedFile

PAGE_BYTES = 4 * 1024 * 1024
GONE = (errno.ENOENT, errno.ESTALE, errno.EBADF)


Again: TypeAlias = Callable[[int, int], Sequence[ScanPiece]]
"""Looks for offsets once more: where they lie now, or the gaps that they became."""


class _Gone(Exception):
    """A piece is not where it was planned: it is looked for again."""


class PieceReader:
    """Pages of one partition over its pieces, as stored: what ended is in them. For one thread; `close` it."""

    def __init__(self, opened: ReadPlace, shard: str, pieces: Sequence[ScanPiece], name: str, again: Again) -> None:
        self.later: set[int] = set()
        """Where pieces begin that were not found where it was planned, and lie elsewhere by now."""
        self._opened = opened
        self._shard = shard
        self._pieces = list(pieces)
        self._name = name
        self._look_again = again
        self._log: LogTail | None = None
        self._segment: tuple[ScanPiece, SealedSegment] | None = None

    def piece_at(self, offset: int) -> ScanPiece | None:
        """The piece that has this offset."""
        place = bisect_right(self._pieces, offset, key=lambda piece: piece.start) - 1
        found = self._pieces[place] if place >= 0 else None
        return found if found is not None and offset < found.stop else None

    def read(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page:
        """Records from `offset` on, of one piece; an empty page where the local log has not come so far."""
        piece = self.piece_at(offset)
        if piece is None:
            return Page([], [], offset)
        gap = piece.gap
        if gap is not None:
            return Page([], [gap._replace(start=offset)], gap.stop)
        try:
            return self._read(piece, offset, bytes_max).clipped(piece.stop)
        except (BlobMissing, BlobChanged, _Gone) as error:
            return self._instead(piece, offset, bytes_max, error)
        except OSError as error:
            if error.errno not in GONE:
                raise
            return self._instead(piece, offset, bytes_max, error)

    def segment(self, piece: ScanPiece) -> SealedSegment | None:
        """The sealed segment behind a piece; `None` if it is to be read from the log."""
        if self._segment is not None and self._segment[0] == piece:
            return self._segment[1]
        found = self._open(piece)
        if found is not None:
            self.close_open()
            self._segment = piece, found
        return found

    def wait(self, offset: int, seconds: float) -> bool:
        """Wait until the log has this offset, as when its owner has just come; false when the time is up."""
        log = self._followed()
        return log is not None and log.wait(offset, seconds)

    def first_at_time(self, timestamp: int, start: int, stop: int, deleted: OffsetSet) -> int | None:
        """The first record of `[start, stop)` that is not deleted and has this time or a later one."""
        for piece in self._pieces:
            low, high = max(piece.start, start), min(piece.stop, stop)
            if low >= high or piece.gap is not None:
                continue
            if piece.descriptor is not None and piece.descriptor.time_max < timestamp:
                continue
            with contextlib.suppress(BlobMissing, BlobChanged, FileNotFoundError):
                segment = self.segment(piece)
                hint = segment.offset_at_time(timestamp) if segment is not None else low
                if hint is None:
                    continue
                low = max(low, hint)
            found = self._scanned(timestamp, low, high, deleted)
            if found is not None:
                return found
        return None

    def close(self) -> None:
        """Give back what is held."""
        self.close_open()
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def _read(self, piece: ScanPiece, offset: int, bytes_max: int) -> Page:
        segment = self.segment(piece)
        if segment is not None:
            return segment.read(offset, bytes_max)
        log = self._followed()
        if log is None:
            raise _Gone(f"offset {offset} is in no store")
        page = log.read(offset, bytes_max)
        if page is None or log.head == 0:
            raise _Gone(f"no file of the log has offset {offset}")
        return page

    def _open(self, piece: ScanPiece) -> SealedSegment | None:
        if piece.descriptor is not None:
            return self._opened.places.segment(piece.descriptor)
        if piece.file is not None:
            return SealedFile(self._opened.disk, piece.file, piece.start, piece.stop)
        return None

    def _instead(self, piece: ScanPiece, offset: int, bytes_max: int, error: Exception) -> Page:
        """What a piece that is gone had, from where it lies now."""
        self.close_open()
        if piece.descriptor is None and piece.file is not None:
            # Sealed again: the log finds out which file has these offsets now.
            now: Sequence[ScanPiece] = [piece._replace(start=offset, bytes=0, file=None)]
        else:
            now = self._look_again(offset, piece.stop)
            is_found = now and now[0].start <= offset and now[0].descriptor != piece.descriptor
            if not is_found or (piece.start in self.later and now[0].gap is None):
                raise Unavailable(
                    f"{self._name}: offsets [{offset}, {piece.stop}) were there when this read was planned, and are "
                    f"not any more ({error}): they were compacted or moved since; load it again"
                ) from error
            self.later |= {found.start for found in now}
        place = self._pieces.index(piece)
        before = [piece._replace(stop=offset)] if piece.start < offset else []
        self._pieces[place : place + 1] = [*before, *now]
        return self.read(offset, bytes_max)

    def _scanned(self, timestamp: int, start: int, stop: int, deleted: OffsetSet) -> int | None:
        while start < stop:
            page = self.read(start).clipped(stop)
            if page.next == start:
                return None
            for batch in page.batches:
                found = _first(batch, timestamp, deleted)
                if found is not None:
                    return found
            start = page.next
        return None

    def _followed(self) -> LogTail | None:
        if self._log is None:
            self._log = self._opened.log(self._shard)
        return self._log

    def close_open(self) -> None:
        held, self._segment = self._segment, None
        if held is not None:
            held[1].close()


def _first(batch: Batch, timestamp: int, deleted: OffsetSet) -> int | None:
    matching = (batch.timestamps() >= timestamp) & ~deleted.mask(batch.base, batch.count)
    place = int(np.argmax(matching))
    return batch.base + place if matching[place] else None
