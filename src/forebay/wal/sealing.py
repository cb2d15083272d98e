"""Turn a rotated log file into an immutable one: large frames and an index beside it.

Runs beside appends and readers: it touches only a file that is no longer written. A crash at any
step leaves the old bytes or the new ones, which hold the same records; the file counts as sealed only
once its index exists, and until then recovery walks the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from forebay.appends.producer_window import ProducerWindow
from forebay.disk import Disk, File, replace_file, write_all
from forebay.errors import Corrupt, DataLoss
from forebay.format.checksum import ContentHash, crc32
from forebay.format.columns.times import timed
from forebay.format.control.frames import State, decode_gap, decode_state
from forebay.format.files.segment import HEADER_BYTES, decode_header, encode_header, index_name
from forebay.format.frame.batch import Batch, decode, encode_data_frame, merge
from forebay.format.frame.head import Kind, Verdict, read_frame
from forebay.format.frame.scan import FrameTable
from forebay.format.index import sections as index_format
from forebay.format.index.lookups import LookupSections
from forebay.records import Bytes, Gap, Reason, Run
from forebay.sealed import FRAME_BYTES_LIMIT
from forebay.settings import WalSettings
from forebay.wal.files import LogFile, SealedFile, walked
from forebay.wal.scan import LogScan
from forebay.wal.tail import CachedFrame
from forebay.wal.walk import ControlFrame, DataFrames, Unreadable

TEMPORARY = ".reframing.tmp"
SUM_BYTES = 1024 * 1024
PLACES_MAX = 8
"""So many damaged places of one file are named."""

Copies = Callable[[int, int], Sequence[CachedFrame]]
"""The frames of `[start, stop)` as they were written, from memory; none if not all of them are there."""


class Damage(NamedTuple):
    """A damaged place of a log file: its first byte, and the offsets whose records stood there."""

    byte: int
    gap: Gap

    def __str__(self) -> str:
        if self.gap.stop == self.gap.start:
            return f"byte {self.byte} (a frame without records)"
        return f"byte {self.byte} (offsets [{self.gap.start}, {self.gap.stop}))"


class Opening:
    """Whether the state that a log file begins with was found whole. It names the producers of earlier files."""

    def __init__(self) -> None:
        self._is_found = False
        self._continues = False

    def take(self, state: State) -> None:
        """The next state frame."""
        self._is_found = self._is_found or state.restated
        self._continues = state.continues

    @property
    def is_whole(self) -> bool:
        """All of it was there."""
        return self._is_found and not self._continues


class Sealer:
    """Seals files of one shard."""

    def __init__(self, disk: Disk, settings: WalSettings, zstd_level: int | None) -> None:
        self._disk = disk
        self._settings = settings
        self._zstd_level = zstd_level

    def seal(self, log: LogFile, may_lack: Callable[[Gap], bool]) -> tuple[SealedFile, list[Damage]]:
        """Write the index. On return it is durable under its name; the damage that it names is returned too.

        Raises `DataLoss` at damage for which `may_lack` is false: once the index is there, the file goes downstream.
        """
        walk = _walk(log)
        damage = walk.damage if walk.opening.is_whole else [_no_opening(log), *walk.damage]
        lost = [place for place in damage if not may_lack(place.gap)]
        if not _has_header(log):
            # Without its salt no frame of the file can be read elsewhere, so no answer makes that good.
            lost = [Damage(0, Gap(log.start, log.end, Reason.DAMAGED))]
        if lost:
            raise DataLoss(f"{log.path} is damaged at {listed(lost)}")
        content, footer = _indexed(log, walk)
        # Commit point: with the index under its name the file is sealed; its bytes were durable before.
        replace_file(self._disk, index_name(log.path), content)
        return SealedFile(self._disk, log.path, footer.start, footer.end), damage

    def unsealed(self, sealed: SealedFile) -> LogFile | None:
        """A sealed file whose bytes or index have changed since, as one that waits to be sealed.

        `None` if all is as it was sealed. Raises `Corrupt` if its header is damaged: then nothing of it can be read.
        """
        file = self._disk.open(sealed.path)
        try:
            if _is_as_sealed(sealed, file):
                file.close()
                return None
            header = decode_header(file.read_at(HEADER_BYTES, 0))
            if isinstance(header, Verdict):
                raise Corrupt(f"{sealed.path} has a {header.value} header: restore it from a backup")
            scan = LogScan(file, header, ProducerWindow(1, 1))
            scan.run(file.size(), proof=sealed.end)
        except BaseException:
            file.close()
            raise
        return walked(scan)

    def wants_reframing(self, log: LogFile) -> bool:
        """Whether the file has many small frames, all of them whole as far as anyone knows."""
        damaged = any(gap.reason is Reason.DAMAGED for gap in log.gaps)
        mean = (log.limit - HEADER_BYTES) / max(1, log.frames)
        return log.frames > 1 and not damaged and mean < self._settings.reframe_bytes_min

    def reframe(self, log: LogFile, copies: Copies) -> LogFile:
        """The same records in large frames, durable under the same name.

        What is damaged is taken from `copies`; `Corrupt` if a frame is whole in neither.
        """
        temporary = log.path + TEMPORARY
        if self._disk.exists(temporary):
            self._disk.unlink(temporary)
        copy = self._disk.create(temporary)
        try:
            self._write_frames(log, copy, copies)
            copy.sync()
        except Corrupt:
            # Tried again as long as the file is damaged: the space is needed meanwhile.
            self._disk.unlink(temporary)
            raise
        finally:
            copy.close()
        # The name must not be given to a copy that lacks anything: it replaces the only other one.
        renewed = self.reopened(log, temporary)
        renewed.file.close()
        self._disk.rename(temporary, log.path)
        self._disk.sync_directory(log.path.rpartition("/")[0])
        return self.reopened(log, log.path)

    def _write_frames(self, log: LogFile, copy: File, copies: Copies) -> None:
        write_all(copy, encode_header(log.header), 0)
        position = HEADER_BYTES
        group = _Group(self._settings.reframe_bytes_max, log.salt_crc, self._zstd_level)
        for data in group.frames_of(log, copies):
            write_all(copy, data, position)
            position += len(data)

    def reopened(self, log: LogFile, path: str) -> LogFile:
        """The file that has this name now, walked from front to back: it must hold all records of `log`."""
        file = self._disk.open(path)
        scan = LogScan(file, log.header, ProducerWindow(1, 1))
        try:
            scan.run(file.size(), proof=0)
            kept = [gap for gap in log.gaps if gap.reason is not Reason.DAMAGED]
            if scan.end != log.end or scan.torn_bytes or scan.gaps != kept:
                raise Corrupt(f"{log.path} does not hold all records up to {log.end}: it is not rewritten")
        except BaseException:
            file.close()
            raise
        return LogFile(
            file, log.header, index=scan.index, gaps=scan.gaps, frames=scan.frames, end=scan.end, limit=scan.stop
        )


class _Group:
    """Consecutive data frames on their way into one larger frame."""

    def __init__(self, bytes_max: int, salt_crc: int, zstd_level: int | None) -> None:
        self._bytes_max = bytes_max
        self._salt_crc = salt_crc
        self._zstd_level = zstd_level
        self._batches: list[Batch] = []
        self._runs: list[Run] = []
        self._durable = 0
        self._bytes = 0

    def frames_of(self, log: LogFile, copies: Copies) -> Iterator[Bytes]:
        """The frames of the new file, in order. Marks go: a sealed file is durable as a whole."""
        for step in log.walk(chunk_bytes=self._bytes_max):
            match step:
                case DataFrames():
                    yield from self._add_data(step)
                case ControlFrame():
                    yield from self._add_control(step)
                case Unreadable(gap=gap):
                    frames = copies(gap.start, gap.stop) if gap.stop > gap.start else ()
                    if not frames:
                        raise Corrupt(f"{log.path} is damaged at {Damage(step.byte, gap)}: it is not rewritten")
                    for frame in frames:
                        yield from self._add_copy(frame)
        if self._batches:
            yield self._flush()

    def _add_copy(self, frame: CachedFrame) -> Iterator[Bytes]:
        head = read_frame(frame.data, 0, self._salt_crc, FRAME_BYTES_LIMIT)
        if isinstance(head, Verdict):
            raise Corrupt(f"the copy in memory of offsets [{frame.base}, {frame.end}) is of another file")
        yield from self._add_data(DataFrames(bytes(frame.data), 0, 0, head, ends_read=True))

    def _add_data(self, data: DataFrames) -> Iterator[Bytes]:
        for batch, length in data.batches():
            if self._is_full(length, batch.epoch):
                yield self._flush()
            self._add(batch, length, data.durable, data.runs() or [Run(batch.count, 0, 0)])

    def _add_control(self, control: ControlFrame) -> Iterator[Bytes]:
        if control.head.kind != Kind.MARK:
            if self._batches:
                yield self._flush()
            yield control.raw

    def _is_full(self, length: int, epoch: int) -> bool:
        if not self._batches:
            return False
        return self._bytes + length > self._bytes_max or self._batches[-1].epoch != epoch

    def _add(self, batch: Batch, length: int, durable: int, runs: Iterable[Run]) -> None:
        self._batches.append(batch)
        for run in runs:
            if self._runs and not run.producer and not self._runs[-1].producer:
                self._runs[-1] = Run(self._runs[-1].count + run.count, 0, 0)
            else:
                self._runs.append(run)
        self._durable = durable
        self._bytes += length

    def _flush(self) -> Bytes:
        data = encode_data_frame(
            salt_crc=self._salt_crc,
            base=self._batches[0].base,
            epoch=self._batches[-1].epoch,
            durable=self._durable,
            appended_at=max(batch.appended_at for batch in self._batches),
            runs=self._runs if any(run.producer for run in self._runs) else [],
            columns=timed(merge(self._batches), [run for batch in self._batches for run in batch.appended()]),
            zstd_level=self._zstd_level,
        )
        self._batches, self._runs, self._bytes = [], [], 0
        return data


class _Walk:
    """One pass over a file for its index."""

    def __init__(self, log: LogFile) -> None:
        self.rows: list[tuple[int, int, int, int, int, int]] = []
        self.gaps: list[Gap] = []
        self.damage: list[Damage] = []
        """Places with records that are not whole."""
        self.opening = Opening()
        self.lookups = LookupSections(log.start)
        self.summed = _Summed(log.file)
        self.path = log.path
        self.end = log.start
        self.epoch_max = 0
        self.appended_max = 0

    def take_control(self, control: ControlFrame) -> None:
        """Note one frame without records."""
        head, buffer, position = control.head, control.buffer, control.position
        self.epoch_max = max(self.epoch_max, head.epoch)
        self.appended_max = max(self.appended_max, head.appended_at)
        if head.kind == Kind.GAP:
            self.gap(decode_gap(buffer, position, head))
        elif head.kind == Kind.STATE:
            self.opening.take(decode_state(buffer, position, head))

    def take_data(self, data: DataFrames) -> None:
        """Note the records of one frame or of many."""
        head = data.frames
        if isinstance(head, FrameTable):
            self._take_table(head, data)
            return
        self.epoch_max = max(self.epoch_max, head.epoch)
        self.appended_max = max(self.appended_max, head.appended_at)
        batch = decode(data.buffer, data.position, head)
        times = batch.timestamps()
        place = data.origin + data.position
        self._add(batch, [(head.base, place, head.length, head.count, int(times.min()), int(times.max()))])

    def _take_table(self, table: FrameTable, data: DataFrames) -> None:
        self.epoch_max = max(self.epoch_max, int(table.epoch.max()))
        self.appended_max = max(self.appended_max, int(table.appended_at.max()))
        heads = zip(table.base.tolist(), (table.position + data.origin).tolist(), table.length.tolist(), strict=True)
        frame = 0
        for batch, _ in data.batches():
            times = batch.timestamps()
            if int(table.count[frame]) == batch.count:
                self._add(batch, [(*next(heads), batch.count, int(times.min()), int(times.max()))])
                frame += 1
            else:
                # Frames of one record each were put together.
                self._add(batch, [(*next(heads), 1, time, time) for time in times.tolist()])
                frame += batch.count

    def _add(self, batch: Batch, rows: list[tuple[int, int, int, int, int, int]]) -> None:
        """Note the records of one frame, or of one frame for each."""
        if batch.base < self.end:
            raise Corrupt(f'{self.path} goes back to offset {batch.base} at byte {rows[0][1]}: run "forebay verify"')
        self.rows += rows
        self.lookups.add(batch, each=len(rows) > 1)
        self.end = batch.end

    def gap(self, gap: Gap) -> None:
        """Note offsets without records."""
        if gap.stop > gap.start:
            self.gaps.append(gap)
            self.end = max(self.end, gap.stop)

    def lose(self, log: LogFile, stop: int, place: int) -> None:
        """Note that nothing is whole from byte `place` on, up to offset `stop`.

        Gaps that stood there are known by the file's writer.
        """
        for gap in log.gaps:
            if gap.reason is not Reason.DAMAGED and gap.stop <= stop and gap not in self.gaps:
                self.gap(gap)
        gap = Gap(self.end, stop, Reason.DAMAGED)
        if gap.start < min(stop, log.end):
            # What lies behind the end of the log was never acknowledged.
            self.damage.append(Damage(place, gap))
        self.gap(gap)


def _walk(log: LogFile) -> _Walk:
    walk = _Walk(log)
    for step in log.walk(source=walk.summed):
        match step:
            case DataFrames():
                walk.take_data(step)
            case ControlFrame():
                walk.take_control(step)
            case Unreadable():
                walk.lose(log, step.gap.stop, step.byte)
    walk.lose(log, log.end, log.limit)
    return walk


class _Summed:
    """The bytes of a file for a walk over its frames, summed as they are read: no byte is read for the sums alone.

    The sums are of the very bytes that the walk checked. For one thread.
    """

    def __init__(self, file: File) -> None:
        self._file = file
        self._crc = 0
        self._digest = ContentHash()
        self._taken = 0
        """All bytes below were read and are in the sums."""

    def read_at(self, length: int, position: int) -> bytes:
        """See `ByteSource`. A walk reads some bytes twice, where a read ends inside a frame: they count once."""
        data = self._file.read_at(length, position)
        self._take(position)
        if self._taken >= position:
            self._add(memoryview(data)[self._taken - position :])
        return data

    def sums(self, size: int) -> tuple[int, bytes]:
        """Checksum and content hash of the first `size` bytes, behind which no byte was read.

        Raises `Corrupt` if the file is shorter.
        """
        self._take(size)
        if self._taken < size:
            raise Corrupt(f"{self._file.path} has {self._taken} bytes and should have {size}: it is not sealed")
        return self._crc, self._digest.digest()

    def close(self) -> None:
        """Leave the file open: its owner closes it."""

    def _take(self, stop: int) -> None:
        """Take in what stands below `stop` and was not read yet, as far as the file goes."""
        while self._taken < stop:
            data = self._file.read_at(min(SUM_BYTES, stop - self._taken), self._taken)
            if not data:
                return
            self._add(data)

    def _add(self, data: Bytes) -> None:
        self._crc = crc32(data, self._crc)
        self._digest.update(data)
        self._taken += len(data)


def _is_as_sealed(sealed: SealedFile, file: File) -> bool:
    """Whether the index is whole, and the bytes are those that it was made of."""
    sealed.close()
    try:
        footer = sealed.index().footer
        return _Summed(file).sums(footer.segment_bytes) == (footer.segment_crc, footer.content_hash)
    except Corrupt:
        return False


def _no_opening(log: LogFile) -> Damage:
    return Damage(HEADER_BYTES, Gap(log.start, log.start, Reason.DAMAGED))


def _has_header(log: LogFile) -> bool:
    return log.file.read_at(HEADER_BYTES, 0) == encode_header(log.header)


def listed(damage: Sequence[Damage]) -> str:
    """The places by byte and offsets, the first few of many."""
    more = [f"{len(damage) - PLACES_MAX} more"] if len(damage) > PLACES_MAX else []
    return " and ".join([*map(str, damage[:PLACES_MAX]), *more])


def index_of(log: LogFile) -> tuple[bytes, index_format.Footer]:
    """The index of a log file and its footer, worked out from the file's bytes alone."""
    return _indexed(log, _walk(log))


def _indexed(log: LogFile, walk: _Walk) -> tuple[bytes, index_format.Footer]:
    crc, digest = walk.summed.sums(log.limit)
    entries = index_format.frame_entries(walk.rows)
    footer = index_format.Footer(
        epoch=log.header.epoch,
        epoch_max=walk.epoch_max,
        start=log.start,
        end=log.end,
        frames=len(entries),
        records=int(entries["count"].sum()),
        time_min=int(entries["time_min"].min()) if len(entries) else 0,
        time_max=int(entries["time_max"].max()) if len(entries) else 0,
        appended_max=walk.appended_max,
        segment_bytes=log.limit,
        segment_crc=crc,
        content_hash=digest,
    )
    return index_format.encode_index(footer, entries, walk.gaps, walk.lookups.sections()), footer
