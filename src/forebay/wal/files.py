"""The files of one shard, as readers see them: growing or rotated log files, and sealed ones with an index.

Knows frames, indexes and the disk. Every frame is checked before a record of it is shown; a place
that does not check is answered as a damaged range. Reading is by offset, never by a remembered place,
so a file that is replaced under a reader costs it a look-up and nothing else.
"""

from __future__ import annotations

import errno
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from forebay.disk import Disk, File
from forebay.errors import Corrupt
from forebay.format import index as index_format
from forebay.format.batch import Batch, decode
from forebay.format.checksum import salted
from forebay.format.frame import HEADER, Kind, Verdict, resync
from forebay.format.segment import HEADER_BYTES, SegmentHeader, decode_header, index_name
from forebay.pages import Page
from forebay.records import Gap, Reason
from forebay.wal.gathered import Gathered
from forebay.wal.scan import FRAME_BYTES_LIMIT, OFFSETS_AHEAD, Piece, pieces_of
from forebay.wal.sparse import SparseIndex

READ_BYTES = 1024 * 1024
READ_BYTES_MIN = 4096
READ_ATTEMPTS = 3
_REPLACED = (errno.ESTALE, errno.ENOENT, errno.EBADF)
"""How a file answers that has been replaced by another with the same records."""


class LogFile:
    """A log file without an index file: the active one, or one that waits to be sealed."""

    def __init__(
        self,
        file: File,
        header: SegmentHeader,
        *,
        index: SparseIndex,
        gaps: list[Gap],
        frames: int,
        end: int,
        limit: int,
    ) -> None:
        self.file = file
        self.header = header
        self.salt_crc = salted(header.salt)
        self.start = header.start
        self.index = index
        self.gaps = gaps
        self.frames = frames
        """Data frames below `limit`."""
        self.end = end
        self.limit = limit
        """Readers see frames below this byte only."""
        self.indexing = threading.Lock()
        """Held while `index` and `limit` move together."""

    @property
    def path(self) -> str:
        return self.file.path

    @property
    def leading_gap(self) -> Gap | None:
        """The hole before the first offset of this file."""
        return next((gap for gap in self.gaps if gap.stop == self.start), None)

    def read(self, offset: int, bytes_max: int) -> Page:
        """Frames from the one that covers `offset`, at least one, up to about `bytes_max`."""
        # In this order: a file that grows meanwhile has moved its limit before its end.
        end, limit = self.end, self.limit
        position = self.index.position_of(offset) or HEADER_BYTES
        gathered = Gathered(offset, bytes_max)
        chunk_bytes = max(READ_BYTES_MIN, min(bytes_max, READ_BYTES))
        for piece in pieces_of(self.file, self.salt_crc, position, limit, chunk_bytes):
            if gathered.take(piece):
                return gathered.page()
            if piece.verdict is not Verdict.WHOLE:
                gathered.hole(self.damage(piece.stop, gathered.next)[0])
                return gathered.page()
        # Behind the last whole frame only damage can stand: the file is known to have reached further.
        gathered.hole(Gap(gathered.next, end, Reason.DAMAGED))
        return gathered.page()

    def offset_at_time(self, timestamp: int) -> int | None:
        """The offset of the first record at or after the time; `None` if there is none."""
        if not self.index.times_known:
            self._index_times()
        position = self.index.position_at_time(timestamp)
        if position is None:
            return None
        for piece in self._whole_pieces(position, self.limit):
            found = first_at_time((batch for batch, _ in _batches(piece)), timestamp)
            if found is not None:
                return found
        return None

    def _index_times(self) -> None:
        index, position = SparseIndex(), HEADER_BYTES
        while True:
            limit = self.limit
            for piece in self._whole_pieces(position, limit):
                for batch, place in _batches(piece):
                    index.add(batch.base, place, int(batch.timestamps().max()))
            position = limit
            with self.indexing:
                # The writer may have gone on meanwhile: nothing that it published may be missing.
                if self.limit == limit:
                    self.index = index
                    return

    def _whole_pieces(self, position: int, limit: int) -> Iterator[Piece]:
        """The frames of `[position, limit)`, stepping over damage."""
        expected = 0
        while position < limit:
            for piece in pieces_of(self.file, self.salt_crc, position, limit):
                yield piece
                position = piece.stop
                expected = max([expected, *(head.end for head in piece.heads)])
            if position < limit:
                position = self.damage(position, expected)[1]

    def close(self) -> None:
        """Give the descriptor back."""
        self.file.close()

    def damage(self, position: int, expected: int) -> tuple[Gap, int]:
        """The damaged range that begins at a bad place, and the byte where whole frames go on."""
        limit, end = self.limit, self.end
        buffer = self.file.read_at(limit - position, position)
        bound = max(end, expected) + OFFSETS_AHEAD
        found = resync(buffer, 0, self.salt_crc, FRAME_BYTES_LIMIT, expected, bound)
        if found is None:
            return Gap(expected, max(end, expected), Reason.DAMAGED), limit
        return Gap(expected, int(HEADER.unpack_from(buffer, found)[0]), Reason.DAMAGED), position + found


def _batches(piece: Piece) -> list[tuple[Batch, int]]:
    return [
        (decode(piece.buffer, position, head), piece.origin + position)
        for head, position in zip(piece.heads, piece.positions, strict=True)
        if head.kind == Kind.DATA
    ]


def first_at_time(batches: Iterable[Batch], timestamp: int) -> int | None:
    """The offset of the first record at or after the time."""
    for batch in batches:
        matches = batch.timestamps() >= timestamp
        place = int(np.argmax(matches))
        if matches[place]:
            return batch.base + place
    return None


class SealedIndex(NamedTuple):
    """The decoded index of a sealed file."""

    entries: index_format.FrameEntries
    gaps: list[Gap]


class SealedFile:
    """An immutable file with its index. The index is read when first needed and may be forgotten again."""

    def __init__(self, disk: Disk, path: str, start: int, end: int) -> None:
        self.path = path
        self.start = start
        self.end = end
        self._disk = disk
        self._file: File | None = None
        self._salt_crc = 0
        self._index: SealedIndex | None = None

    @property
    def leading_gap(self) -> Gap | None:
        """The hole before the first offset of this file."""
        return next((gap for gap in self.index().gaps if gap.stop == self.start), None)

    @property
    def previous_end(self) -> int:
        """Where the file before this one must end."""
        gap = self.leading_gap
        return gap.start if gap is not None else self.start

    def index(self) -> SealedIndex:
        """The frames and holes of the file; read once."""
        if self._index is None:
            self._index = read_index(self._disk, index_name(self.path))
        return self._index

    def read(self, offset: int, bytes_max: int) -> Page:
        """Frames from the one that covers `offset`, at least one, up to about `bytes_max`."""
        entries, gaps = self.index()
        first = index_format.find_offset(entries, offset)
        gathered = Gathered(offset, bytes_max)
        if first >= len(entries) or int(entries["offset"][first]) > offset:
            gathered.hole(_hole_at(gaps, offset, self))
            return gathered.page()
        stop = _frames_within(entries, first, bytes_max)
        origin = int(entries["position"][first])
        size = int(entries["position"][stop - 1]) + int(entries["length"][stop - 1]) - origin
        try:
            buffer = self._opened().read_at(size, origin)
        except Corrupt:
            gathered.hole(Gap(offset, self.end, Reason.DAMAGED))
            return gathered.page()
        for place in range(first, stop):
            gathered.known_frame(entries[place], buffer, origin, self._salt_crc)
            if place + 1 < stop and int(entries["offset"][place + 1]) > gathered.next:
                gathered.hole(_hole_at(gaps, gathered.next, self))
        return gathered.page()

    def offset_at_time(self, timestamp: int) -> int | None:
        """The offset of the first record at or after the time; `None` if there is none."""
        entries = self.index().entries
        place = index_format.find_time(entries, timestamp)
        if place is None:
            return None
        page = self.read(int(entries["offset"][place]), 1)
        return first_at_time(page.batches, timestamp)

    def close(self) -> None:
        """Give memory and descriptor back; the next read takes them again."""
        self._index = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> File:
        if self._file is None:
            file = self._disk.open(self.path)
            self._salt_crc = salt_crc_of(file)
            self._file = file
        return self._file


def read_index(disk: Disk, path: str) -> SealedIndex:
    """The index file, checked against its own checksums; `Corrupt` if it does not hold."""
    file = disk.open(path)
    try:
        decoded = index_format.decode_index(file.read_at(file.size(), 0))
    except Corrupt as error:
        raise Corrupt(f'{path}: {error}; run "forebay repair"') from error
    finally:
        file.close()
    if isinstance(decoded, Verdict):
        raise Corrupt(f'{path} is {decoded.value}: run "forebay repair"')
    return SealedIndex(decoded[1], decoded[2])


def salt_crc_of(file: File) -> int:
    """What every checksum in this segment starts from."""
    header = decode_header(file.read_at(HEADER_BYTES, 0))
    if isinstance(header, Verdict):
        raise Corrupt(f'{file.path} has a {header.value} header: run "forebay verify"')
    return salted(header.salt)


def _hole_at(gaps: list[Gap], offset: int, file: SealedFile) -> Gap:
    for gap in gaps:
        if gap.start <= offset < gap.stop:
            return gap
    raise Corrupt(f'{file.path} has no record and names no hole at offset {offset}: run "forebay verify"')


def _frames_within(entries: index_format.FrameEntries, first: int, bytes_max: int) -> int:
    """The end of the run of frames from `first` that fits; at least one."""
    room = int(entries["position"][first]) + bytes_max
    ends = entries["position"][first:] + entries["length"][first:]
    return first + max(1, int(np.searchsorted(ends, room, side="right")))


class FileList:
    """All files of a shard in offset order. Readers take the tuple as it is."""

    def __init__(self, files: Sequence[LogFile | SealedFile] = ()) -> None:
        self.all: tuple[LogFile | SealedFile, ...] = tuple(sorted(files, key=_start))
        # The writer adds while the sealer replaces: neither may undo the other.
        self._changing = threading.Lock()

    def add(self, file: LogFile | SealedFile) -> None:
        """A newer file."""
        with self._changing:
            self.all = (*self.all, file)

    def replace(self, old: LogFile | SealedFile, new: LogFile | SealedFile) -> None:
        """The same records in another file."""
        with self._changing:
            self.all = tuple(new if file is old else file for file in self.all)

    def forget(self, path: str) -> None:
        """This file is no part of the shard."""
        with self._changing:
            self.all = tuple(file for file in self.all if file.path != path)

    @property
    def earliest(self) -> int:
        """The first offset that a file may hold; 0 without files."""
        return self.all[0].start if self.all else 0

    def read(self, offset: int, bytes_max: int) -> Page:
        """Whoever covers `offset` answers. A file replaced meanwhile is looked up again."""
        for attempt in range(READ_ATTEMPTS):
            try:
                return self._read(offset, bytes_max)
            except OSError as error:
                if error.errno not in _REPLACED or attempt + 1 == READ_ATTEMPTS:
                    raise
        raise AssertionError

    def _read(self, offset: int, bytes_max: int) -> Page:
        files = self.all
        place = bisect_right(files, offset, key=_start) - 1
        if place >= 0 and offset < files[place].end:
            return files[place].read(offset, bytes_max).clipped(files[place].end)
        if place + 1 == len(files):
            return Page([], [], offset)
        follower = files[place + 1]
        gap = follower.leading_gap
        if gap is not None and gap.start <= offset:
            return Page([], [gap._replace(start=offset)], gap.stop)
        # No file holds these offsets and none says that they are empty: a file is missing.
        stop = gap.start if gap is not None else follower.start
        return Page([], [Gap(offset, stop, Reason.DAMAGED)], stop)

    def offset_at_time(self, timestamp: int) -> int | None:
        """The offset of the first record at or after the time, over all files."""
        for attempt in range(READ_ATTEMPTS):
            try:
                found = (file.offset_at_time(timestamp) for file in self.all)
                return next((offset for offset in found if offset is not None), None)
            except OSError as error:
                if error.errno not in _REPLACED or attempt + 1 == READ_ATTEMPTS:
                    raise
        raise AssertionError


def _start(file: LogFile | SealedFile) -> int:
    return file.start
