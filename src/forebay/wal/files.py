"""The files of one shard, as readers see them: growing or rotated log files, and sealed ones with an index.

Knows frames, indexes and the disk. Every frame is checked before a record of it is shown; a place
that does not check is answered as a damaged range. Reading is by offset, never by a remembered place,
so a file that is replaced under a reader costs it a look-up and nothing else.
"""

from __future__ import annotations

import errno
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from forebay.clock import Clock
from forebay.disk import Disk, File
from forebay.errors import Corrupt, UnsupportedFormat
from forebay.format.checksum import salted
from forebay.format.control.frames import decode_gap
from forebay.format.files.segment import HEADER_BYTES, SegmentHeader, index_name
from forebay.format.frame.batch import Batch, decode
from forebay.format.frame.head import Kind, Verdict
from forebay.format.frame.scan import FrameTable
from forebay.format.index import sections as index_format
from forebay.format.index.hashing import Places
from forebay.format.index.lookups import HeldPostings
from forebay.format.index.sections import SectionKind
from forebay.locks import Rank, RankedLock
from forebay.pages import Page, Span
from forebay.records import Gap, Reason
from forebay.sealed import UNREADABLE, ByteSource, Gathered, SealedSegment, first_at_time
from forebay.wal.scan import LogScan, is_bare
from forebay.wal.sparse import SparseIndex
from forebay.wal.walk import CHUNK_BYTES, ControlFrame, DataFrames, Step, Unreadable, walk

READ_BYTES = 1024 * 1024
READ_BYTES_MIN = 4096
READ_ATTEMPTS = 3
REPLACED = (errno.ESTALE, errno.ENOENT, errno.EBADF)
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
        self.indexing = RankedLock(Rank.LEAF, "wal.index")
        """Held while `index` and `limit` move together."""
        self._postings: dict[SectionKind, HeldPostings] = {}
        self._unposted: dict[SectionKind, list[Gap]] = {}
        """Damage that was met while the file was read for its postings."""
        self._posting = RankedLock(Rank.IO, "wal.postings")

    @property
    def path(self) -> str:
        return self.file.path

    @property
    def is_bare(self) -> bool:
        """No record stands in the file, nor did one in a frame that is damaged now."""
        return is_bare(self.frames, self.gaps)

    @property
    def leading_gap(self) -> Gap | None:
        """The gap before the first offset of this file."""
        return next((gap for gap in self.gaps if gap.stop == self.start), None)

    @property
    def previous_end(self) -> int:
        """Where the file before this one must end."""
        gap = self.leading_gap
        return gap.start if gap is not None else self.start

    def read(self, offset: int, bytes_max: int) -> Page:
        """Frames from the one that covers `offset`, at least one, up to about `bytes_max`."""
        # In this order: a file that grows meanwhile has moved its limit before its end.
        end, limit = self.end, self.limit
        position = self.index.position_of(offset) or HEADER_BYTES
        gathered = Gathered(offset, bytes_max)
        chunk_bytes = max(READ_BYTES_MIN, min(bytes_max, READ_BYTES))
        for step in self.walk(position, limit, chunk_bytes):
            match step:
                case DataFrames():
                    if _fills(gathered, step):
                        return gathered.page()
                case ControlFrame():
                    if step.head.kind == Kind.GAP:
                        gathered.add_gap(decode_gap(step.buffer, step.position, step.head))
                case Unreadable():
                    gathered.add_gap(step.gap)
                    continue
            if step.ends_read and not gathered.is_empty and gathered.left < bytes_max // 4:
                # About full: the next page would have to read and check again what is read and checked now.
                return gathered.page()
        # Behind the last whole frame only damage can stand: the file is known to have reached further.
        gathered.add_gap(Gap(gathered.next, end, Reason.DAMAGED))
        return gathered.page()

    def offset_at_time(self, timestamp: int) -> int | None:
        """The offset of the first record at or after the time; `None` if there is none."""
        if not self.index.times_known:
            self._index_times()
        position = self.index.position_at_time(timestamp)
        if position is None:
            return None
        return first_at_time((batch for batch, _ in self._batches(position, self.limit)), timestamp)

    def damage_at(self, offset: int) -> Gap | None:
        """The damaged range that covers `offset`; `None` if its record can be read, or was none."""
        if not self._is_damaged(offset):
            return None
        found = [step.gap for step in self.walk() if isinstance(step, Unreadable)]
        found += [gap for gap in self.gaps if gap.reason is Reason.DAMAGED]
        return next((gap for gap in found if gap.start <= offset < gap.stop), None)

    def _index_times(self) -> None:
        index, position = SparseIndex(), HEADER_BYTES
        while True:
            limit = self.limit
            for batch, place in self._batches(position, limit):
                index.add(batch.base, place, int(batch.timestamps().max()))
            position = limit
            with self.indexing:
                # The writer may have gone on meanwhile: nothing that it published may be missing.
                if self.limit == limit:
                    self.index = index
                    return

    def find(self, kind: SectionKind, wanted: int, start: int = 0) -> Iterator[Places]:
        """The offsets from `start` on of records that may have the key or tag with this hash, in rising pieces.

        The first time all of the file is read for it, and later what was appended since.
        """
        with self._posting:
            found = list(self._posted(kind).find(wanted, max(start, self.start) - self.start))
        return (records + self.start for records in found)

    def find_backwards(self, kind: SectionKind, wanted: int) -> Iterator[Places]:
        """All of them, the newest piece first; inside each piece they rise."""
        with self._posting:
            found = list(self._posted(kind).find_backwards(wanted))
        return (records + self.start for records in found)

    def unsearched(self, kind: SectionKind) -> list[Gap]:
        """The ranges in which `find` cannot see: damaged now or when the file was opened, or held by history."""
        with self._posting:
            self._posted(kind)
            missed = self._unposted.get(kind, [])
        return sorted({*missed, *(gap for gap in self.gaps if gap.reason in UNREADABLE)})

    def know_postings_of(self, shorter: LogFile) -> None:
        """Take over what was read for look-ups while the file was shorter; `shorter` must not be used afterwards."""
        self._postings, self._unposted = shorter._postings, shorter._unposted

    def _posted(self, kind: SectionKind) -> HeldPostings:
        """The postings of everything published. The caller holds `_posting`."""
        # In this order: a file that grows meanwhile has moved its limit before its end.
        end, limit = self.end, self.limit
        if any(not self._is_damaged(gap.start) for gap in self._unposted.get(kind, ())):
            # The sound bytes were restored meanwhile.
            del self._postings[kind], self._unposted[kind]
        held = self._postings.setdefault(kind, HeldPostings(kind, self.start))
        if held.end < end:
            missed = self._unposted.setdefault(kind, [])
            position = self.index.position_of(held.end) or HEADER_BYTES
            for step in self.walk(position, limit):
                match step:
                    case DataFrames():
                        for batch, _ in step.batches():
                            held.add(batch)
                    case ControlFrame():
                        pass
                    case Unreadable():
                        missed += [step.gap] if step.gap.stop > step.gap.start else []
            # Behind the last record there may be a gap.
            held.end = max(held.end, end)
        return held

    def _is_damaged(self, offset: int) -> bool:
        return any(gap.reason is Reason.DAMAGED and gap.start <= offset for gap in self.read(offset, 1).events)

    def walk(
        self,
        start: int = HEADER_BYTES,
        limit: int | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        *,
        source: ByteSource | None = None,
    ) -> Iterator[Step]:
        """The file from byte `start` on, up to `limit`: unless given, up to what readers see.

        `source` gives the bytes of the file, if not the file itself.
        """
        # In this order: a file that grows meanwhile has moved its limit before its end.
        end = self.end
        stop = self.limit if limit is None else limit
        content = self.file if source is None else source
        return walk(content, self.salt_crc, start, stop, expected=self.start, end=end, chunk_bytes=chunk_bytes)

    def _batches(self, position: int, limit: int) -> Iterator[tuple[Batch, int]]:
        """The records of `[position, limit)` with the place of each frame."""
        for step in self.walk(position, limit):
            match step:
                case DataFrames():
                    for head, at in step.each():
                        yield decode(step.buffer, at, head), step.origin + at
                case ControlFrame() | Unreadable():
                    # Neither has records that a look-up by time could find.
                    pass

    def close(self) -> None:
        """Give the descriptor back."""
        self.file.close()


def _fills(gathered: Gathered, data: DataFrames) -> bool:
    """Add the records to a page; true once the page is full."""
    if data.end <= gathered.next:
        return False
    if not (gathered.is_empty or isinstance(data.frames, FrameTable)) and gathered.left < data.frames.length:
        # Not even decoded.
        return True
    for batch, length in data.batches():
        if batch.end > gathered.next:
            if not gathered.is_empty and gathered.left < length:
                return True
            gathered.add(batch, length)
    return False


def walked(scan: LogScan) -> LogFile:
    """The file by the facts that a walk found."""
    return LogFile(
        scan.file,
        scan.header,
        index=scan.index,
        gaps=scan.gaps,
        frames=scan.frames,
        end=scan.end,
        limit=scan.stop,
    )


class SealedFile(SealedSegment):
    """A sealed segment that lies in the shard's own directory, with its index beside it."""

    __slots__ = ("_directory", "_disk", "_file_name", "_footer", "_previous_end", "read_last")

    def __init__(self, disk: Disk, path: str, start: int, end: int) -> None:
        super().__init__(start, end)
        cut = path.rfind("/") + 1
        # One for all files of a shard.
        self._directory, self._file_name = sys.intern(path[:cut]), path[cut:]
        self.read_last = 0.0
        """When a reader last read from it, by the monotonic clock; 0 if none did."""
        self._disk = disk
        self._previous_end: int | None = None
        self._footer: index_format.Footer | None = None

    @property
    def path(self) -> str:
        """Where it lies."""
        return self._directory + self._file_name

    @property
    def name(self) -> str:
        """See `SealedSegment`."""
        return self.path

    def _open_source(self) -> File:
        return self._disk.open(self.path)

    def _open_index(self) -> File:
        return self._disk.open(index_name(self.path))

    @property
    def previous_end(self) -> int:
        """Where the file before this one must end; the index is read for it once at most."""
        if self._previous_end is None:
            self._previous_end = super().previous_end
        return self._previous_end

    @property
    def footer(self) -> index_format.Footer:
        """What the index says of the file as a whole; the rest of the index is not kept for it."""
        if self._footer is None:
            self._footer = read_footer(self._disk, index_name(self.path))
            if self._footer is None:
                raise Corrupt(f'the index of {self.path} has no sound footer: run "forebay repair"')
        return self._footer

    @property
    def known_footer(self) -> index_format.Footer | None:
        """The footer if it was read before; asks no disk."""
        return self._footer


def read_footer(disk: Disk, path: str) -> index_format.Footer | None:
    """The footer of an index file; `None` if it does not check."""
    file = disk.open(path)
    try:
        size = min(file.size(), index_format.FOOTER_BYTES)
        footer = index_format.decode_footer(file.read_at(size, file.size() - size))
    finally:
        file.close()
    if footer is Verdict.NEWER:
        raise UnsupportedFormat(f"{path} was written by a newer version: upgrade")
    return footer if isinstance(footer, index_format.Footer) else None


class FileList:
    """All files of a shard in offset order. Readers take the tuple as it is."""

    def __init__(self, files: Sequence[LogFile | SealedFile] = (), clock: Clock | None = None) -> None:
        self._clock = clock
        self.all: tuple[LogFile | SealedFile, ...] = tuple(sorted(files, key=_start))
        self.logs: tuple[LogFile, ...] = tuple(file for file in self.all if isinstance(file, LogFile))
        """Those of them that are not sealed: few, however many files there are."""
        self._unsized = {file: None for file in self.all if isinstance(file, SealedFile)}
        """Sealed files whose bytes are not in the sum yet."""
        self._sealed_bytes = 0
        # The writer adds while the sealer replaces: neither may undo the other.
        self._changing = RankedLock(Rank.LEAF, "wal.file_list")
        self.replacing = RankedLock(Rank.IO, "wal.file_names")
        """Held from before a name is given to another file until that file is listed."""

    def add(self, file: LogFile | SealedFile) -> None:
        """A newer file."""
        with self._changing:
            self.all = (*self.all, file)
            self._list(file)

    def replace(self, old: LogFile | SealedFile, new: LogFile | SealedFile) -> None:
        """The same records in another file."""
        with self._changing:
            place = self._place(old)
            if place is not None:
                self.all = (*self.all[:place], new, *self.all[place + 1 :])
                self._unlist(old)
                self._list(new)

    def forget(self, path: str) -> None:
        """This file is no part of the shard."""
        with self._changing:
            for file in self.all:
                if file.path == path:
                    self._unlist(file)
            self.all = tuple(file for file in self.all if file.path != path)

    def drop(self, file: LogFile | SealedFile) -> None:
        """The oldest file is no longer here; what it held is answered for elsewhere."""
        with self._changing:
            assert self.all[0] is file, "only the oldest file may go, so that no gap is left"
            self.all = self.all[1:]
            self._unlist(file)

    def held_bytes(self) -> int:
        """The bytes of all files together. Reads the footer of each sealed file, once for as long as it is listed."""
        with self._changing:
            unsized = list(self._unsized)
        for file in unsized:
            # Read without the lock.
            size = file.footer.segment_bytes
            with self._changing:
                if file in self._unsized:
                    del self._unsized[file]
                    self._sealed_bytes += size
        return self._sealed_bytes + sum(log.limit for log in self.logs)

    def _place(self, file: LogFile | SealedFile) -> int | None:
        files, place = self.all, bisect_left(self.all, file.start, key=_start)
        while place < len(files) and files[place].start == file.start:
            if files[place] is file:
                return place
            place += 1
        return None

    def _list(self, file: LogFile | SealedFile) -> None:
        if isinstance(file, LogFile):
            self.logs = tuple(sorted((*self.logs, file), key=_start))
        else:
            self._unsized[file] = None

    def _unlist(self, file: LogFile | SealedFile) -> None:
        if isinstance(file, LogFile):
            self.logs = tuple(log for log in self.logs if log is not file)
        elif file in self._unsized:
            del self._unsized[file]
        else:
            self._sealed_bytes -= file.footer.segment_bytes

    def reaching(self, offset: int) -> Iterator[LogFile | SealedFile]:
        """The files from the one on that may reach beyond `offset`, in order; those before are not looked at."""
        files = self.all
        for place in range(max(bisect_right(files, offset, key=_start) - 1, 0), len(files)):
            yield files[place]

    @property
    def begins(self) -> int | None:
        """The first offset that the files answer for, the gap before the first of them included."""
        files = self.all
        return files[0].previous_end if files else None

    def cover(self, start: int, stop: int) -> list[Span[LogFile | SealedFile | Gap | None]]:
        """What these files say of `[start, stop)`, in order and without a break.

        A file, the gap that the file behind it names, or `None` where no file answers: before all of them, behind
        them, or where one is missing. Reads at most the indexes of files behind a gap.
        """
        at = start
        spans: list[Span[LogFile | SealedFile | Gap | None]] = []
        for file in self.reaching(start):
            if at >= stop:
                break
            if file.start > at:
                named = max(at, min(file.previous_end, file.start))
                spans += [Span(at, named, None), Span(named, file.start, file.leading_gap)]
            spans.append(Span(max(at, file.start), file.end, file))
            at = max(at, file.end)
        spans.append(Span(at, stop, None))
        clipped = (span._replace(stop=min(span.stop, stop)) for span in spans)
        return [span for span in clipped if span.start < span.stop]

    def read(self, offset: int, bytes_max: int) -> Page | None:
        """A page from `offset` on; `None` where no file answers. A file replaced meanwhile is looked up again."""
        attempts = Attempts(self)
        while True:
            try:
                return self._read(offset, bytes_max)
            except OSError as error:
                if not attempts.again(error):
                    raise

    def _read(self, offset: int, bytes_max: int) -> Page | None:
        tier = self.cover(offset, offset + 1)[0].tier
        if tier is None:
            return None
        if isinstance(tier, Gap):
            return Page([], [tier._replace(start=offset)], tier.stop)
        if self._clock is not None and isinstance(tier, SealedFile):
            tier.read_last = self._clock.monotonic()
        return tier.read(offset, bytes_max).clipped(tier.end)

    def before_gaps(self, end: int) -> int:
        """Where the gaps begin that the log ends in, `end` being its end; that is `end` if it ends in a record.

        Looks at files that are not sealed, and at what is known of them: there is no input or output.
        """
        for file in reversed(self.all):
            if not isinstance(file, LogFile):
                break
            for gap in reversed(file.gaps):
                if gap.stop == end and gap.reason is not Reason.HISTORY:
                    end = gap.start
            if end > file.previous_end:
                break
        return end

    def await_replacement(self) -> None:
        """Whatever took a file's name is listed on return."""
        with self.replacing:
            pass

    def damage_at(self, offset: int) -> Gap | None:
        """The damaged or missing range that covers `offset`, as far as the files answer for it."""
        attempts = Attempts(self)
        while True:
            try:
                return self._damage_at(offset)
            except OSError as error:
                if not attempts.again(error):
                    raise

    def _damage_at(self, offset: int) -> Gap | None:
        files = self.all
        place = bisect_right(files, offset, key=_start) - 1
        if place < 0 or offset < files[place].end:
            return files[place].damage_at(offset) if place >= 0 else None
        for start, stop, tier in self.cover(files[place].end, files[-1].start):
            if start <= offset < stop:
                gap = Gap(start, stop, Reason.DAMAGED) if tier is None else tier
                return gap if isinstance(gap, Gap) and gap.reason is Reason.DAMAGED else None
        return None

    def offset_at_time(self, timestamp: int, start: int = 0) -> int | None:
        """The offset of the first record at or after the time, over all files that reach beyond `start`."""
        attempts = Attempts(self)
        while True:
            try:
                found = (file.offset_at_time(timestamp) for file in self.reaching(start) if file.end > start)
                return next((offset for offset in found if offset is not None), None)
            except OSError as error:
                if not attempts.again(error):
                    raise


class Attempts:
    """How often a look at files is repeated: while others take their places, and a few times where none does."""

    def __init__(self, files: FileList) -> None:
        self._files = files
        self._seen = files.all
        self._left = READ_ATTEMPTS

    def again(self, error: OSError) -> bool:
        """Whether a file may have been replaced under the look; what took its name is then listed."""
        if error.errno not in REPLACED:
            return False
        self._files.await_replacement()
        before, self._seen = self._seen, self._files.all
        self._left = self._left - 1 if before == self._seen else READ_ATTEMPTS
        return self._left > 0


def _start(file: LogFile | SealedFile) -> int:
    return file.start
