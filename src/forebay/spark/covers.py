"""Who has which offsets of a partition, kept from look to look: what has not changed costs nothing again.

Knows descriptors and the files of a log; nothing of Spark.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence, Set

import msgspec

from forebay.disk import Disk
from forebay.format.metadata.descriptor import SegmentDescriptor
from forebay.spark.pieces import ScanPiece, skipped
from forebay.wal.files import SealedFile
from forebay.wal.readonly import FollowedLog


class Cover:
    """The pieces of one partition. For one thread."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._sizes: dict[str, int] = {}
        self._history: Sequence[SegmentDescriptor] | None = None
        self._kept: tuple[object, tuple[ScanPiece, ...]] = None, ()

    def pieces(
        self, start: int, stop: int, history: Sequence[SegmentDescriptor], given_up: Set[str], log: FollowedLog | None
    ) -> tuple[ScanPiece, ...]:
        """Pieces for all of `[start, stop)`: history first, without the loads that were given up, then the log.

        `history` is another list when it has changed.
        """
        middle = min(stop, max(start, history[-1].end)) if history else start
        key = start, middle, frozenset(given_up)
        if self._history is not history or self._kept[0] != key:
            self._history = history
            self._kept = key, tuple(covering(start, middle, (_piece(found, given_up) for found in history)))
        return self._kept[1] + tuple(covering(middle, stop, self._files(log, middle)))

    def _files(self, log: FollowedLog | None, start: int) -> Iterator[ScanPiece]:
        for file in log.files.all if log is not None else ():
            if file.end <= start:
                continue
            if isinstance(file, SealedFile):
                yield ScanPiece(file.start, file.end, self._bytes(file.path), file=file.path)
            else:
                yield ScanPiece(file.start, file.end, file.limit)

    def _bytes(self, path: str) -> int:
        if path not in self._sizes:
            try:
                with contextlib.closing(self._disk.open(path)) as file:
                    self._sizes[path] = file.size()
            except FileNotFoundError:
                return 0  # replaced meanwhile: only how equal the tasks are depends on it
        return self._sizes[path]


def _piece(found: SegmentDescriptor, given_up: Set[str]) -> ScanPiece:
    is_hole = found.load_id is not None and found.load_id in given_up
    descriptor = skipped(found) if is_hole else msgspec.structs.replace(found, sparse=())
    return ScanPiece(found.start, found.end, descriptor.bytes, descriptor)


def covering(start: int, stop: int, pieces: Iterable[ScanPiece]) -> Iterator[ScanPiece]:
    """Pieces for all of `[start, stop)` without overlap: of those given the earlier ones first, else the log itself."""
    at = start
    for piece in pieces:
        if piece.stop <= at or max(at, piece.start) >= stop:
            continue
        if piece.start > at:
            yield ScanPiece(at, piece.start, 0)
        low, high = max(at, piece.start), min(stop, piece.stop)
        yield piece._replace(start=low, stop=high, bytes=piece.bytes * (high - low) // (piece.stop - piece.start))
        at = high
    if at < stop:
        yield ScanPiece(at, stop, 0)
