"""The writing side of a shard's log: the active file, its state, reservation, rotation and syncs.

Has no threads and takes no locks: the caller lets one in at a time. Knows nothing of metadata; the
epoch and `reserve` come from outside. Any exception out of `write`, `sync` or `rotate` means that the
active file can no longer be trusted; what then happens is the business of `healing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from forebay.clock import Clock
from forebay.disk import Disk, replace_file, write_all
from forebay.format.batch import encode_data_frame
from forebay.format.checksum import salted
from forebay.format.control import State, encode_gap, encode_mark, encode_state
from forebay.format.segment import SegmentHeader, encode_header, segment_name
from forebay.records import Gap
from forebay.settings import WalSettings
from forebay.wal.cache import CachedFrame
from forebay.wal.files import FileList, LogFile
from forebay.wal.scan import LogScan
from forebay.wal.staging import PendingFrame
from forebay.wal.window import ProducerWindow

OUTPUT_BYTES = 1024 * 1024
"""Frames are joined up to this size per write: one huge buffer is several times slower."""
RESERVE_SECONDS = 4.0


class ShardPlace(NamedTuple):
    """Whose log it is and where it lies."""

    directory: str
    topic_id: str
    partition: int
    epoch: int
    name: str
    """How messages call the shard."""

    def __str__(self) -> str:
        return self.name


class Floors(NamedTuple):
    """The two watermarks that only move forward."""

    earliest: int = 0
    evict_floor: int = 0


class ActiveFile(LogFile):
    """The file that is being written. `position` may run ahead of `limit`, which readers go by."""

    def __init__(self, scan: LogScan, created: float) -> None:
        super().__init__(
            scan.file,
            scan.header,
            index=scan.index,
            gaps=scan.gaps,
            frames=scan.frames,
            end=scan.end,
            limit=scan.stop,
        )
        self.position = self.synced = scan.stop
        self.marked = scan.durable
        """The highest durable mark that stands in the file."""
        self.created = created


class SyncTarget(NamedTuple):
    """What a sync that starts now will make durable."""

    active: ActiveFile
    position: int
    end: int


class Writer:
    """One shard's log, from `next` on."""

    def __init__(
        self,
        place: ShardPlace,
        settings: WalSettings,
        *,
        disk: Disk,
        clock: Clock,
        files: FileList,
        window: ProducerWindow,
        zstd_level: int | None,
        reserve: Callable[[int], int] | None = None,
    ) -> None:
        self.place = place
        self.disk = disk
        self.clock = clock
        self.settings = settings
        self.files = files
        self.window = window
        self.floors = Floors()
        self.active: ActiveFile | None = None
        self.end = 0
        """Everything below is written."""
        self.durable = 0
        """Everything below is synced."""
        self.reserved_end = 0
        """No frame reaches above before a higher value is durable."""
        self.opening_gap: Gap | None = None
        """The hole that the next new file begins behind."""
        self.obsolete: str | None = None
        """A file without records that the next new file takes the place of."""
        self.state_written = False
        self.touched = False
        """Something was written since the log was opened."""
        self.unsettled = False
        """Bytes went to the active file that nobody has accounted for: an exception now means it cannot be trusted."""
        self._zstd_level = zstd_level
        self._reserve = reserve
        self._reserving: tuple[int, int] | None = None
        self._reserved_at = (clock.monotonic(), 0)
        self._identity: str | None = None

    def write(self, frames: Sequence[PendingFrame]) -> list[CachedFrame]:
        """Append the frames. On return their bytes are with the operating system; nothing is published yet."""
        end = frames[-1].end
        active = self._ready(end)
        appended_at = self.clock.now_ms()
        prelude = self._prelude(active, end)
        if prelude:
            self._put(active, prelude)
        made: list[CachedFrame] = []
        waiting: list[bytes] = []
        size = 0
        position = active.position
        for frame in frames:
            columns = frame.encode()
            data = encode_data_frame(
                salt_crc=active.salt_crc,
                base=frame.base,
                epoch=self.place.epoch,
                durable=self.durable,
                appended_at=appended_at,
                runs=frame.runs(),
                columns=columns,
                zstd_level=self._zstd_level,
            )
            made.append(CachedFrame(frame.base, frame.end, data))
            active.index.add(frame.base, position, columns.time_max)
            position += len(data)
            waiting.append(data)
            size += len(data)
            if size >= OUTPUT_BYTES:
                self._put(active, waiting)
                waiting, size = [], 0
        if waiting:
            self._put(active, waiting)
        active.frames += len(frames)
        active.marked = self.durable
        self.end = end
        return made

    def sync(self) -> None:
        """Make everything written durable."""
        target = self.sync_begin()
        if target is not None:
            unsettled, self.unsettled = self.unsettled, True
            target.active.file.sync()
            self.sync_end(target)
            self.unsettled = unsettled

    def sync_begin(self) -> SyncTarget | None:
        """What is to be synced, if anything is not; the sync itself may then run beside other work."""
        active = self.active
        if active is None or active.position == active.synced:
            return None
        return SyncTarget(active, active.position, self.end)

    def sync_end(self, target: SyncTarget) -> None:
        """The sync of `target` has returned without an error."""
        active = target.active
        active.synced = max(active.synced, target.position)
        if active is not self.active:
            return
        self.durable = max(self.durable, target.end)
        if self._reserving is not None and self._reserving[1] <= active.synced:
            self.reserved_end = max(self.reserved_end, self._reserving[0])
            self._reserving = None

    def mark(self, *, clean: bool = False) -> None:
        """Write down how far the log is durable; `clean` says that nothing will follow."""
        active = self.active
        assert active is not None
        self._put(active, [encode_mark(clean=clean, **self.stamp(active.salt_crc))])
        active.marked = self.durable

    @property
    def next(self) -> int:
        """Where the next record goes."""
        return self.opening_gap.stop if self.opening_gap is not None else self.end

    def rotate(self) -> bool:
        """Begin a new file behind the present one, which is fully durable then. False before the first record."""
        old = self.active
        if old is None or old.frames == 0:
            return False
        self.sync()
        # The old file and its name are durable here, so the next one's `previous_end` tells the truth.
        self.active = self._create(self.end)
        old.limit = old.position
        return True

    def finish(self) -> None:
        """Make everything durable and say in the log that it ended in order; nothing if nothing was written."""
        if self.active is None or not self.touched:
            return
        self.sync()
        self.mark(clean=True)
        self.sync()

    def resume_behind(self, end: int, reserved_end: int) -> None:
        """Go on in a new file, to be made at the first append."""
        self.end = self.durable = end
        self.reserved_end = reserved_end

    def resume(self, active: ActiveFile, scan: LogScan) -> None:
        """Go on in a file that holds exactly what was published and is durable as a whole."""
        self.active = active
        self.end = self.durable = scan.end
        self.reserved_end = scan.reserved_end
        self._reserving = None
        self.state_written = scan.state_epoch == self.place.epoch

    def reserve_ahead(self) -> None:
        """With an outside reservation: ask for more before it is needed, so that no append waits."""
        if self._reserve is not None and self.end > self.reserved_end - self._step() // 2:
            self.reserved_end = max(self.reserved_end, self._reserve(self.end + self._step()))

    def _ready(self, end: int) -> ActiveFile:
        if self._reserve is not None and end > self.reserved_end:
            self.reserved_end = self._reserve(end + self._step())
        if self.active is None:
            self.active = self._create(self.next)
            self.opening_gap = None
        return self.active

    def _prelude(self, active: ActiveFile, end: int) -> list[bytes]:
        """Control frames due before records up to `end`; waits for the disk only if the reservation is used up."""
        needed = end > self.reserved_end
        early = self._reserving is None and self._reserve is None and end > self.reserved_end - self._step() // 2
        if not needed and not early:
            return [] if self.state_written else self._begin_epoch(active)
        reserved_end = end + self._step()
        frames = self._state(active.salt_crc, reserved_end)
        self.state_written = True
        self._reserving = (reserved_end, active.position + sum(map(len, frames)))
        self._reserved_at = (self.clock.monotonic(), end)
        if not needed:
            return frames
        # A reader may see an offset as soon as it is written: it must never be given out again, whatever survives.
        self._put(active, frames)
        self.sync()
        return []

    def _begin_epoch(self, active: ActiveFile) -> list[bytes]:
        self.state_written = True
        return self._state(active.salt_crc, self.reserved_end)

    def _step(self) -> int:
        since, end = self._reserved_at
        elapsed = self.clock.monotonic() - since
        rate = (self.end - end) / elapsed if elapsed > 0 else 0.0
        return max(self.settings.reserve_records_min, int(rate * RESERVE_SECONDS))

    def _create(self, start: int) -> ActiveFile:
        """A new file with its name, header and state durable, so that recovery never meets half of one."""
        place = self.place
        salt = self.clock.random_bytes(16)
        header = SegmentHeader(place.topic_id, place.partition, place.epoch, start, self.clock.now_ms(), salt)
        salt_crc = salted(salt)
        reserved_end = self.reserved_end
        if self._reserve is None:
            reserved_end = max(reserved_end, start + self._step())
        opening = [encode_header(header), *self._state(salt_crc, reserved_end, next_offset=start, restated=True)]
        if start > self.end:
            assert self.opening_gap is not None and self.opening_gap.stop == start
            opening.append(encode_gap(self.opening_gap, **self.stamp(salt_crc, start)))
        path = f"{place.directory}/{segment_name(start, place.epoch)}"
        content = b"".join(opening)
        replace_file(self.disk, path, content)
        active = ActiveFile(self._scanned(path, header, len(content)), self.clock.monotonic())
        self.reserved_end = reserved_end
        self._reserving = None
        self._reserved_at = (self.clock.monotonic(), start)
        self.state_written = True
        self.end = self.durable = start
        self.files.add(active)
        if self.obsolete is not None:
            self.disk.unlink(self.obsolete)
            self.obsolete = None
        return active

    def _scanned(self, path: str, header: SegmentHeader, size: int) -> LogScan:
        scan = LogScan(self.disk.open(path, writable=True), header, ProducerWindow(1, 1))
        scan.run(size, proof=0)
        return scan

    def _state(
        self, salt_crc: int, reserved_end: int, *, next_offset: int | None = None, restated: bool = False
    ) -> list[bytes]:
        if self._identity is None:
            self._identity = self.disk.identity(self.place.directory)
        state = State(
            reserved_end=reserved_end,
            previous_end=self.end,
            earliest=self.floors.earliest,
            evict_floor=self.floors.evict_floor,
            identity=self._identity,
            window=tuple(self.window.entries()) if restated else (),
            restated=restated,
        )
        return encode_state(state, frame_bytes_max=self.settings.frame_bytes_max, **self.stamp(salt_crc, next_offset))

    def stamp(self, salt_crc: int, next_offset: int | None = None) -> dict[str, int]:
        """What every control frame written now carries."""
        return {
            "salt_crc": salt_crc,
            "next_offset": self.end if next_offset is None else next_offset,
            "epoch": self.place.epoch,
            "durable": self.durable,
            "appended_at": self.clock.now_ms(),
        }

    def _put(self, active: ActiveFile, parts: Sequence[bytes]) -> None:
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self.unsettled = self.touched = True
        write_all(active.file, data, active.position)
        active.position += len(data)
