"""Turn a rotated log file into an immutable one: large frames and an index beside it.

Runs beside appends and readers: it touches only a file that nobody writes any more. A crash at any
step leaves the old bytes or the new ones, which hold the same records; the file counts as sealed only
once its index exists, and until then recovery walks the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from forebay.disk import Disk, File, replace_file, write_all
from forebay.errors import Corrupt
from forebay.format import index as index_format
from forebay.format.batch import Batch, decode, encode_data_frame, merge
from forebay.format.checksum import ContentHash, crc32
from forebay.format.control import decode_gap
from forebay.format.frame import FrameHead, Kind, Verdict, runs_of
from forebay.format.lookups import LookupSections
from forebay.format.scan import FrameTable
from forebay.format.segment import HEADER_BYTES, index_name
from forebay.format.stretch import batches_of
from forebay.format.times import timed
from forebay.records import Gap, Reason, Run
from forebay.settings import WalSettings
from forebay.wal.files import LogFile, SealedFile
from forebay.wal.scan import LogScan, pieces_of
from forebay.wal.window import ProducerWindow

TEMPORARY = ".reframing.tmp"


class Sealer:
    """Seals files of one shard."""

    def __init__(self, disk: Disk, settings: WalSettings, zstd_level: int | None) -> None:
        self._disk = disk
        self._settings = settings
        self._zstd_level = zstd_level

    def seal(self, log: LogFile) -> SealedFile:
        """Write the index. On return it is durable under its name."""
        content, footer = index_of(log)
        # Commit point: with the index under its name the file is sealed; its bytes were durable before.
        replace_file(self._disk, index_name(log.path), content)
        return SealedFile(self._disk, log.path, footer.start, footer.end)

    def wants_reframing(self, log: LogFile) -> bool:
        """Whether the file has many small frames, all of them whole as far as anyone knows."""
        damaged = any(gap.reason is Reason.DAMAGED for gap in log.gaps)
        mean = (log.limit - HEADER_BYTES) / max(1, log.frames)
        return log.frames > 1 and not damaged and mean < self._settings.reframe_bytes_min

    def reframe(self, log: LogFile) -> LogFile:
        """The same records in large frames, durable under the same name. `Corrupt` if not all of them are whole."""
        temporary = log.path + TEMPORARY
        if self._disk.exists(temporary):
            self._disk.unlink(temporary)
        copy = self._disk.create(temporary)
        try:
            self._write_frames(log, copy)
            copy.sync()
        finally:
            copy.close()
        # The name must not be given to a copy that lacks anything: it replaces the only other one.
        renewed = self.reopened(log, temporary)
        renewed.file.close()
        self._disk.rename(temporary, log.path)
        self._disk.sync_directory(log.path.rpartition("/")[0])
        return self.reopened(log, log.path)

    def _write_frames(self, log: LogFile, copy: File) -> None:
        write_all(copy, log.file.read_at(HEADER_BYTES, 0), 0)
        position = HEADER_BYTES
        group = _Group(self._settings.reframe_bytes_max, log.salt_crc, self._zstd_level)
        for data in group.frames_of(log):
            write_all(copy, data, position)
            position += len(data)

    def reopened(self, log: LogFile, path: str) -> LogFile:
        """The file that has this name now, walked from front to back: it must hold the records of `log`."""
        file = self._disk.open(path)
        scan = LogScan(file, log.header, ProducerWindow(1, 1))
        try:
            scan.run(file.size(), proof=0)
            if scan.end != log.end or scan.torn_bytes or scan.gaps != log.gaps:
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

    def frames_of(self, log: LogFile) -> Iterator[bytes]:
        """The frames of the new file, in order. Marks go: a sealed file is durable as a whole."""
        for piece in pieces_of(log.file, log.salt_crc, HEADER_BYTES, log.limit, self._bytes_max):
            for part in piece.parts():
                if isinstance(part, FrameTable):
                    yield from self._add_table(piece.buffer, part)
                    continue
                head, position = part
                if head.kind == Kind.DATA:
                    if self._is_full(head.length, head.epoch):
                        yield self._flush()
                    runs = runs_of(piece.buffer, position, head) or [Run(head.count, 0, 0)]
                    self._add(decode(piece.buffer, position, head), head.length, head.durable, runs)
                elif head.kind != Kind.MARK:
                    if self._batches:
                        yield self._flush()
                    yield piece.buffer[position : position + head.length]
        if self._batches:
            yield self._flush()

    def _is_full(self, length: int, epoch: int) -> bool:
        if not self._batches:
            return False
        return self._bytes + length > self._bytes_max or self._batches[-1].epoch != epoch

    def _add_table(self, buffer: bytes, table: FrameTable) -> Iterator[bytes]:
        """Many small frames without producers."""
        durable = int(table.durable[-1])
        for batch, length in batches_of(buffer, table):
            if self._is_full(length, batch.epoch):
                yield self._flush()
            self._add(batch, length, durable, [Run(batch.count, 0, 0)])

    def _add(self, batch: Batch, length: int, durable: int, runs: Iterable[Run]) -> None:
        self._batches.append(batch)
        for run in runs:
            if self._runs and not run.producer and not self._runs[-1].producer:
                self._runs[-1] = Run(self._runs[-1].count + run.count, 0, 0)
            else:
                self._runs.append(run)
        self._durable = durable
        self._bytes += length

    def _flush(self) -> bytes:
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
        self.lookups = LookupSections(log.start)
        self.path = log.path
        self.end = log.start
        self.epoch_max = 0
        self.appended_max = 0

    def take(self, head: FrameHead, buffer: bytes, position: int, place: int) -> None:
        """Note one frame, which begins at byte `place` of the file."""
        self.epoch_max = max(self.epoch_max, head.epoch)
        self.appended_max = max(self.appended_max, head.appended_at)
        if head.kind == Kind.GAP:
            self.gap(decode_gap(buffer, position, head))
        elif head.kind == Kind.DATA:
            batch = decode(buffer, position, head)
            times = batch.timestamps()
            self._add(batch, [(head.base, place, head.length, head.count, int(times.min()), int(times.max()))])

    def take_table(self, table: FrameTable, buffer: bytes, origin: int) -> None:
        """Note many data frames; `buffer` begins at byte `origin` of the file."""
        self.epoch_max = max(self.epoch_max, int(table.epoch.max()))
        self.appended_max = max(self.appended_max, int(table.appended_at.max()))
        heads = zip(table.base.tolist(), (table.position + origin).tolist(), table.length.tolist(), strict=True)
        frame = 0
        for batch, _ in batches_of(buffer, table):
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
        """Note a hole."""
        if gap.stop > gap.start:
            self.gaps.append(gap)
            self.end = max(self.end, gap.stop)


def _walk(log: LogFile) -> _Walk:
    walk = _Walk(log)
    position = HEADER_BYTES
    while position < log.limit:
        verdict = Verdict.WHOLE
        for piece in pieces_of(log.file, log.salt_crc, position, log.limit):
            for part in piece.parts():
                if isinstance(part, FrameTable):
                    walk.take_table(part, piece.buffer, piece.origin)
                else:
                    head, place = part
                    walk.take(head, piece.buffer, place, piece.origin + place)
            position, verdict = piece.stop, piece.verdict
        if verdict is not Verdict.WHOLE:
            gap, position = log.damage(position, walk.end)
            walk.gap(gap)
    if walk.end < log.end:
        walk.gap(Gap(walk.end, log.end, Reason.DAMAGED))
    return walk


def index_of(log: LogFile) -> tuple[bytes, index_format.Footer]:
    """The index of a log file and its footer, worked out from the file's bytes alone."""
    walk = _walk(log)
    crc, digest = _sums(log.file, log.limit)
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


def _sums(file: File, size: int) -> tuple[int, bytes]:
    crc, digest, position = 0, ContentHash(), 0
    while position < size:
        data = file.read_at(min(1024 * 1024, size - position), position)
        if not data:
            raise Corrupt(f"{file.path} has {position} bytes and should have {size}: it is not sealed")
        crc = crc32(data, crc)
        digest.update(data)
        position += len(data)
    return crc, digest.digest()
