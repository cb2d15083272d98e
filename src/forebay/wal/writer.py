"""The writing side of a shard's log: the active file, its state, reservation, rotation and syncs.

Has no threads; one thread at a time may use a writer, the one that holds the log's commit lock. Knows nothing of
metadata; the epoch and `reserve` come from outside. After an exception out of `write`, `sync` or `rotate` the writer
is `in_doubt` if bytes may have reached the active file: it can no longer be trusted then, and `healing` replaces it.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from forebay.appends.producer_window import ProducerWindow
from forebay.appends.queue import AppendQueue, PendingFrame
from forebay.clock import Clock
from forebay.disk import Disk, replace_file, write_all, write_rest
from forebay.errors import Unavailable
from forebay.format.checksum import salted
from forebay.format.columns.rows import Row
from forebay.format.control.frames import State, encode_gap, encode_mark, encode_state
from forebay.format.files.segment import SegmentHeader, encode_header, segment_name
from forebay.format.frame.batch import encode_data_frame, encode_row_frame
from forebay.locks import Rank, RankedCondition, RankedLock
from forebay.meter import ShardCounts
from forebay.records import Bytes, Gap, Reason
from forebay.settings import WalSettings
from forebay.wal.files import FileList, LogFile
from forebay.wal.removals import Removals
from forebay.wal.scan import LogScan
from forebay.wal.tail import CachedFrame

logger = logging.getLogger(__name__)

OUTPUT_BYTES = 1024 * 1024
"""Frames are joined up to this size per write: one huge buffer is several times slower."""
RESERVE_SECONDS = 4.0
RESERVE_LOOKS = 8
"""How often, within the smallest step, it is looked whether more should be reserved."""
_NEW: Final = tuple.__new__
"""Half the cost of calling a named tuple's class."""
SYNC_WAIT_SECONDS = 60.0
"""How long a sync waits for one of the same file that began before it. Then the file counts as failed."""


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
        self.state_epoch = scan.state_epoch
        """The epoch of the newest state in the file."""
        self.clean_mark = b""
        """The frame that ends a log which was closed in order."""
        self.opened_behind = scan.previous_end
        """Where the file before it ended, as its first state says."""
        self.has_blind = bool(scan.blind)
        """Damaged control frames may have held deletes: each opening walks the file and says so."""
        self.written: list[tuple[int, int, int]] = []
        """Base, position and highest time of frames that are not published yet."""

    def publish(self, end: int) -> None:
        """Show readers everything up to `position`, which holds the records below `end`."""
        with self.indexing:
            for base, position, time_max in self.written:
                self.index.add(base, position, time_max)
            self.written = []
            self.limit = self.position
            self.end = end


class SyncTarget(NamedTuple):
    """What a sync that starts now will make durable."""

    active: ActiveFile
    position: int
    end: int
    begun: float


class BackgroundSync:
    """A sync of the active file that runs beside appends, and how it ended.

    The kernel reports a lost write once, to one of the syncs of a file that run at the same time. So a thread that
    answers for the same file first waits here for the outcome. The lock is a leaf: the thread that syncs takes no
    other lock before it calls `end`, and a waiter may hold the commit lock.
    """

    __slots__ = ("_changed", "error", "is_over", "target")

    def __init__(self, target: SyncTarget, changed: threading.Condition) -> None:  # noqa: TID251 - a ranked one
        """`changed` is the writer's own: one for each sync is most of what a sync of many logs takes in memory."""
        self.target = target
        self._changed = changed
        self.is_over = False
        self.error: OSError | None = None
        """Why it has failed, if so."""

    def end(self, error: OSError | None = None) -> None:
        """The sync has returned, or failed with `error`. Only the first call counts."""
        with self._changed:
            if not self.is_over:
                self.error, self.is_over = error, True
            self._changed.notify_all()

    def wait(self, seconds_max: float) -> None:
        """Return once the sync has succeeded; `OSError` if it failed or has not returned within the time."""
        with self._changed:
            is_over = self._changed.wait_for(lambda: self.is_over, seconds_max)
        path = self.target.active.path
        if not is_over:
            raise OSError(errno.ETIMEDOUT, f"a sync begun before has not returned for {seconds_max:.0f} s", path)
        if self.error is not None:
            raise OSError(self.error.errno, f"a sync begun before has failed: {self.error}", path)


class Writer:
    """One shard's log, from `next` on. Other modules read the public fields and assign none of them."""

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
        on_short: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_short` is called, under the log's locks, when more should be reserved outside: it must not wait."""
        self.place, self.settings = place, settings
        self.disk, self.clock = disk, clock
        self.files = files
        self.window = window
        self.counters = ShardCounts()
        self.removals = Removals()
        """Deletes and floors that each new file states again."""
        self.active: ActiveFile | None = None
        self.end = 0
        """Everything below is written."""
        self.durable = 0
        """Everything below is synced."""
        self.reserved_end = 0
        """No frame reaches above before a higher value is durable."""
        self.reserved = 0
        """Class `memory` acknowledges up to here. By `account` and `give_back` alone: a failing commit leaves it."""
        self.touched = False
        """Something was written since the log was opened."""
        self.in_doubt = False
        """Bytes went to the active file that are not published yet: after an exception now it cannot be trusted."""
        self._gap: Gap | None = None  # the next record stands behind it, and it is not in the log yet
        self._obsolete: str | None = None  # a file without records that the next new file takes the place of
        self._state_written = False  # the active file has a state of this epoch
        self._zstd_level = zstd_level
        self._reserve, self._on_short = reserve, on_short
        self._noting = RankedLock(Rank.LEAF, "wal.reservation")
        self._asked = self._asking = 0  # reservations outside that have begun, and those that have not returned
        self._reserving: tuple[int, int] | None = None  # what a state in the file reserves, and where that state ends
        self._reserved_at: tuple[float, int] | None = None  # when offsets were reserved last, and the end then
        self._look_again = 0  # from this offset on, see whether more should be reserved ahead of need
        self._background: BackgroundSync | None = None  # runs beside other work, until its outcome was acted on
        self._sync_over = RankedCondition(Rank.LEAF, "wal.sync_over")  # notified when a sync returned or was acted on
        self._stray: str | None = None
        """Path of a segment whose creation failed, perhaps after the rename; unlinked before the active file grows."""
        self._reopened_clean = False  # the file ends in a clean mark, which must not outlive what is written behind it
        self._identity: str | None = None

    @property
    def is_packing(self) -> bool:
        """Whether it writes compressed frames, where that makes them smaller."""
        return self._zstd_level is not None

    def write(self, frames: Sequence[PendingFrame]) -> list[CachedFrame]:
        """Append the frames. On return their bytes are with the operating system; nothing is published yet."""
        if frames[0].base != (self.end if self._gap is None else self._gap.stop):
            raise self._misplaced(frames[0].base)
        last = frames[-1]
        end = last.base + (len(last.entries) if last.columns is None else last.columns.count)
        if self._reserve is not None and end > self.reserved_end:
            self._reserve_outside(self._reserve, end + self._step())
        active = self.active if self.active is not None else self.create(self.next)
        appended_at = self.clock.now_ms()
        is_due = end > self.reserved_end or end >= self._look_again or not self._state_written or self._reopened_clean
        if is_due or self._stray is not None or self._gap is not None:
            self._prelude(active, end)
        made: list[CachedFrame] = []
        noted: list[tuple[int, int, int]] = []
        waiting: list[bytes | bytearray] = []
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
                runs=frame.runs() if frame.produced else (),
                columns=columns,
                zstd_level=self._zstd_level,
            )
            base = frame.base
            made.append(_NEW(CachedFrame, (base, base + columns.count, data)))
            noted.append((base, position, columns.time_max))
            position += len(data)
            waiting.append(data)
            size += len(data)
            if size >= OUTPUT_BYTES:
                self._put(active, waiting)
                waiting, size = [], 0
        if waiting:
            # As `_put`, without that call.
            data = waiting[0] if len(waiting) == 1 else b"".join(waiting)
            self.in_doubt = self.touched = True
            write_all(active.file, data, active.position)
            active.position = position
        active.written = noted
        active.frames += len(frames)
        active.marked = self.durable
        self.end = end
        return made

    def write_one(self, row: Row, queue: AppendQueue) -> CachedFrame | None:
        """As `write`, for one record that `queue` lets pass; `None` if anything else must be done first.

        Then nothing was done: a new file, a control frame or a reservation is due, or other appends wait.
        """
        active, base = self.active, self.end
        end, position = base + 1, -1 if active is None else active.position
        if active is None or self.in_doubt or position >= self.settings.rotate_bytes_max or not self._state_written:
            return None
        if end > self.reserved_end or self._gap is not None or self._stray is not None or self._reopened_clean:
            return None
        if (end >= self._look_again and self._is_early(end)) or not queue.pass_by(base):
            return None
        durable = self.durable
        data = encode_row_frame(
            active.salt_crc, base, self.place.epoch, durable, self.clock.now_ms(), row, self._zstd_level
        )
        length = len(data)
        self.in_doubt = self.touched = True
        # As `write_all`, without that call.
        taken = active.file.write_at(data, position)
        if taken != length:
            write_rest(active.file, data, position, taken)
        active.position = position + length
        active.written = [(base, position, row[4])]
        active.frames += 1
        active.marked = durable
        self.end = end
        made: CachedFrame = _NEW(CachedFrame, (base, end, data))
        return made

    def waits_before(self, end: int) -> bool:
        """Whether records up to `end` must wait: for a reservation, a new file or a sync before they are written.

        A look without a lock.
        """
        active = self.active
        if active is None or active.position >= self.settings.rotate_bytes_max:
            return True
        if self._stray is not None or self._reopened_clean:
            return True
        return end > self.reserved_end

    @property
    def syncing(self) -> bool:
        """Whether a sync of the active file runs beside other work: its failure must find that file still active."""
        return self._background is not None and self._background.target.active is self.active

    def sync(self) -> None:
        """Make everything written durable; first wait for a background sync of the same file, and fail if that did."""
        if self._background is not None:
            self._await_background()
        active = self.active
        if active is not None and active.position != active.synced:
            in_doubt, self.in_doubt = self.in_doubt, True
            target = _NEW(SyncTarget, (active, active.position, self.end, self.clock.monotonic()))
            active.file.sync()
            self.note_synced(target)
            self.in_doubt = in_doubt

    def note_all_synced(self, begun: float) -> None:
        """A sync of the whole file system, for which this writer has waited since `begun`, has returned."""
        active = self.active
        if active is not None and active.position != active.synced:
            self.note_synced(SyncTarget(active, active.position, self.end, begun))

    def _await_background(self) -> None:
        background = self._background
        if background is not None and self.syncing:
            in_doubt, self.in_doubt = self.in_doubt, True
            background.wait(SYNC_WAIT_SECONDS)
            self.in_doubt = in_doubt

    def begin_background_sync(self) -> SyncTarget | None:
        """Begin a sync that runs beside appends: what it will make durable, or `None` if there is nothing to sync.

        The caller then syncs the file without the commit lock, and reports to `end_background_sync`.
        """
        active = self.active
        if active is None or active.position == active.synced:
            return None
        target = SyncTarget(active, active.position, self.end, self.clock.monotonic())
        self._background = BackgroundSync(target, self._sync_over)
        return target

    def withdraw_background_sync(self) -> None:
        """The sync that was begun last, under the same commit lock, is not done."""
        self._background = None

    def report_background_sync(self, target: SyncTarget, error: OSError | None) -> None:
        """Answer the threads that wait for the outcome of this sync, not of one that has begun since. Needs no lock.

        Called before the commit lock is taken: one of those threads may hold it.
        """
        background = self._background
        if background is not None and background.target is target:
            background.end(error)

    @property
    def returned_sync(self) -> tuple[SyncTarget, OSError | None] | None:
        """The background sync that has returned and was not acted on yet, with why it has failed, if so."""
        background = self._background
        return None if background is None or not background.is_over else (background.target, background.error)

    def end_background_sync(self, target: SyncTarget) -> None:
        """The outcome of this sync was acted on: another may begin, unless one has since. Needs no lock."""
        background = self._background
        if background is not None and background.target is target:
            self._background = None
        with self._sync_over:
            self._sync_over.notify_all()

    def wait_for_background_sync(self, seconds_max: float) -> None:
        """Return once no sync runs beside other work, or the time is up. The caller holds no lock: appends go on.

        A sync that has returned may not have been acted on.
        """
        with self._sync_over:
            self._sync_over.wait_for(lambda: not self.syncing or self.returned_sync is not None, seconds_max)

    def note_synced(self, target: SyncTarget) -> None:
        """A sync that covered `target` has returned without an error."""
        self.counters.fsync_seconds.observe(self.clock.monotonic() - target.begun)
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
        self.drop_stray()
        mark = encode_mark(clean=clean, **self.stamp(active.salt_crc))
        self._put(active, [mark])
        active.marked = self.durable
        active.clean_mark = mark if clean else b""

    def remove(self, removals: Removals) -> ActiveFile:
        """Write down what ended; in which file. On return the operating system has it."""
        active = self.active if self.active is not None else self.create(self.next)
        self.drop_stray()
        self._put(active, removals.frames(self.settings.frame_bytes_max, self.stamp(active.salt_crc)))
        return active

    @property
    def opening_gap(self) -> Gap | None:
        """The gap that the next record stands behind, where the log does not name it yet."""
        return self._gap

    def _misplaced(self, base: int) -> Unavailable:
        """The error of frames that do not begin at `next`: Ctrl-C came between a step of the writer and the queue's.

        Nothing was written, and the queue goes on at `next`.
        """
        return Unavailable(f"{self.place}: offset {base} was given out, but {self.next} comes next: try again")

    @property
    def next(self) -> int:
        """Where the next record goes."""
        return self._gap.stop if self._gap is not None else self.end

    def rotate(self) -> bool:
        """Begin a new file behind the present one, which is fully durable then. False before the first record."""
        old = self.active
        if old is None or old.is_bare:
            return False
        self.sync()
        # The old file and its name are durable here, so the next one's `previous_end` is true.
        self.create(self.next)
        old.limit = old.position
        return True

    def finish(self) -> None:
        """Make everything durable and say in the log that it ended in order; nothing if nothing was written."""
        if self.active is None or not self.touched:
            return
        self.drop_stray()
        self._put_gap(self.active)
        self.sync()
        self.mark(clean=True)
        self.sync()

    def skip_lost(self, stop: int, end: int) -> None:
        """Never use the offsets from `end` up to `stop`: they were given out, but what they stood for is lost."""
        start = self._gap.start if self._gap is not None else end
        if stop > self.next or stop > end:
            self._gap = Gap(start, stop, Reason.LOST)

    def skip_to(self, stop: int, gap: Gap | None = None, *, reserving: bool = True) -> None:
        """History holds everything below `stop`: go on there, in a new file. If it fails, nothing has changed.

        On return the file and its name are durable, and the gap before it says that history has those offsets. The
        next record stands behind `gap`, if there is one. `reserving` as in `create`.
        """
        self.drop_stray()
        self.sync()
        old, before = self.active, (self.end, self.durable, self._gap, self._obsolete)
        start = self._gap.start if self._gap is not None else self.end
        try:
            if old is not None and old.is_bare:
                # It only opened this place; the next one says all that it said.
                start, self._obsolete = old.previous_end, old.path
            self.end = self.durable = start
            self._gap = Gap(start, stop, Reason.HISTORY)
            self.create(stop, reserving=reserving)
        finally:
            if self.active is old:
                self.end, self.durable, self._gap, self._obsolete = before
        if old is not None and not old.is_bare:
            old.limit = old.position
        elif old is not None:
            self.files.forget(old.path)
            old.close()
        self._gap = gap

    def account(self) -> None:
        """Every byte written so far is published, or belongs to a step that is over: an exception is harmless now."""
        self.in_doubt = False
        if self.active is not None and not self._reopened_clean:
            self.reserved = self.reserved_end

    def distrust(self) -> None:
        """A sync of the active file has failed: what it holds may never reach the disk."""
        self.in_doubt = True

    # Beginning

    def resume_at(self, end: int, gap: Gap | None) -> None:
        """Go on at `end`, behind `gap` if there is one, in a file to be made at the first append."""
        self.end = self.durable = end
        self._gap = gap

    def resume_behind(self, last: LogScan, gap: Gap | None, *, obsolete: bool = False) -> None:
        """Go on behind a file that is not written any more, in one to be made at the first append.

        `obsolete` where it holds no record and the next one says all that it said: it goes then.
        """
        self.removals = last.removals
        self.end = self.durable = last.previous_end if obsolete else last.end
        self._obsolete = last.path if obsolete else None
        self._gap = gap
        if self._reserve is None:
            self.reserved_end = last.reserved_end

    def resume(self, active: ActiveFile, scan: LogScan, gap: Gap | None = None) -> None:
        """Go on in a file that is durable as a whole and holds what was published, behind `gap` if there is one."""
        self.removals = scan.removals
        self._gap = gap
        self._continue(active, scan)

    def restart_after_failure(self, active: ActiveFile, scan: LogScan) -> None:
        """Go on in the durable copy of a file that failed, which holds exactly what was published."""
        self._continue(active, scan)
        self.in_doubt = False

    def _continue(self, active: ActiveFile, scan: LogScan) -> None:
        self.active = active
        self.end = self.durable = scan.end
        if self._reserve is None:
            self.reserved_end = scan.reserved_end
        self._reserving = None
        self._reopened_clean = scan.closed
        self._state_written = scan.state_epoch == self.place.epoch

    @property
    def wants_reservation(self) -> bool:
        """Whether more should be reserved outside, although there is some left.

        Where there is none left, because it was given back, the next append reserves: an idle log holds none.
        """
        if self._reserve is None or self.reserved_end <= self.next:
            return False
        return self.end > self.reserved_end - self._step() // 2

    def reserve_ahead(self) -> None:
        """Reserve more outside before it is needed, so that no append waits. May run beside a commit."""
        if self._reserve is not None and self.wants_reservation:
            self._reserve_outside(self._reserve, self.end + self._step())

    def note_reserved(self, end: int) -> None:
        """Offsets below `end` are reserved outside, until `give_back`."""
        with self._noting:
            self.reserved_end = max(self.reserved_end, end)

    def _reserve_outside(self, reserve: Callable[[int], int], end: int) -> None:
        """Reserve up to `end`; counted before it begins, so that nothing is given back which it finds reserved."""
        with self._noting:
            self._asked += 1
            self._asking += 1
        try:
            self.note_reserved(reserve(end))
        finally:
            with self._noting:
                self._asking -= 1

    def give_back(self, end: int) -> Callable[[], bool] | None:
        """Use no offset from `end` on before it is reserved again; `None` if that cannot be said of this log now.

        The result says whether no reservation has begun since: then what is reserved outside beyond `end` is unused,
        and may be taken back there. The caller holds the commit lock and that of the queue, which is empty.
        """
        with self._noting:
            if self._reserve is None or self._asking or self.next != end or self.in_doubt:
                return None
            self.reserved_end = min(self.reserved_end, end)
            # Class memory acknowledges by this one: nothing waits now, so nothing was that lies beyond.
            self.reserved = min(self.reserved, end)
            asked = self._asked
        return lambda: self._asked == asked

    def _prelude(self, active: ActiveFile, end: int) -> None:
        """Control frames due before records up to `end`; waits for the disk only where that order is a promise."""
        if self._stray is not None:
            self.drop_stray()
        if self._gap is not None:
            self._put_gap(active)
        needed = end > self.reserved_end
        early = end >= self._look_again and self._is_early(end)
        if not needed and not early and self._state_written and not self._reopened_clean:
            return
        reserved_end = end + self._step() if needed or early else self.reserved_end
        self._put(active, self._state(active.salt_crc, reserved_end))
        self._state_written = True
        active.state_epoch = self.place.epoch
        if needed or early:
            self._reserving = (reserved_end, active.position)
            self._reserved_at = (self.clock.monotonic(), end)
        # A reader may see an offset as soon as it is written: it must never be given out again, whatever survives.
        # Neither may a clean mark outlive records behind it, for it would make the end before them the exact one.
        if needed or self._reopened_clean:
            self.sync()
            self._reopened_clean = False

    def _is_early(self, end: int) -> bool:
        """Whether it is time to reserve more, although there is some left. If not, the next look is due later."""
        if end > self.reserved_end - self._step() // 2:
            if self._reserve is not None:
                self._on_short()
            elif self._reserving is None:
                return True
        self._look_again = end + self.settings.reserve_records_min // RESERVE_LOOKS
        return False

    def _put_gap(self, active: ActiveFile) -> None:
        gap = self._gap
        if gap is not None:
            self._put(active, [encode_gap(gap, **self.stamp(active.salt_crc, gap.stop))])
            active.gaps.append(gap)
            self.end, self._gap = gap.stop, None

    def _step(self) -> int:
        if self._reserved_at is None:
            return self.settings.reserve_records_min
        since, end = self._reserved_at
        # Over a second at least: one large append right after a reservation is no rate.
        elapsed = max(1.0, self.clock.monotonic() - since)
        return max(self.settings.reserve_records_min, int((self.end - end) / elapsed * RESERVE_SECONDS))

    def create(self, start: int, *, reserving: bool = True) -> ActiveFile:
        """A new file with its name, header and state durable, so that recovery never meets half of one.

        With `reserving` the state reserves offsets for appends that come next. A recovery reserves none: the one after
        it would take them for given out, and go on behind them.
        """
        place = self.place
        salt = self.clock.random_bytes(16)
        header = SegmentHeader(place.topic_id, place.partition, place.epoch, start, self.clock.now_ms(), salt)
        salt_crc = salted(salt)
        reserved_end = self.reserved_end
        if self._reserve is None:
            reserved_end = max(reserved_end, start + self._step() if reserving else start)
        opening = [encode_header(header), *self._state(salt_crc, reserved_end, next_offset=start, restated=True)]
        opening += self.removals.frames(self.settings.frame_bytes_max, self.stamp(salt_crc, start))
        if start > self.end:
            assert self._gap is not None and self._gap.stop == start
            opening.append(encode_gap(self._gap, **self.stamp(salt_crc, start)))
        path = f"{place.directory}/{segment_name(start, place.epoch)}"
        content = b"".join(opening)
        self._stray = path
        replace_file(self.disk, path, content)
        scan = LogScan(self.disk.open(path, writable=True), header, ProducerWindow(1, 1))
        scan.run(len(content), proof=0)
        active = ActiveFile(scan, self.clock.monotonic())
        self.files.add(active)
        self._adopt(active, start, reserved_end if self._reserve is None else None)
        self._drop_obsolete()
        return active

    def _adopt(self, active: ActiveFile, start: int, reserved_end: int | None) -> None:
        """Go on in a new file, which states `reserved_end`; `None` if it is reserved outside."""
        adopted = {
            "active": active,
            "end": start,
            "durable": start,
            "_gap": None,
            "_state_written": True,
            "touched": True,
            "_stray": None,
            "_reserving": None,
            "_reserved_at": (self.clock.monotonic(), start),
            "_reopened_clean": False,
        }
        if reserved_end is not None:
            adopted["reserved_end"] = reserved_end
        # One step of the interpreter: an exception from outside (Ctrl-C) finds all of it done or nothing.
        vars(self).update(adopted)

    def drop_stray(self) -> None:
        """A file whose making failed half-way may have its name: it must be gone before the present one grows.

        Else recovery would take it for the newest and count what the present one got since for nothing.
        """
        path = self._stray
        if path is None:
            return
        self.files.forget(path)
        if self.disk.exists(path):
            self.disk.unlink(path)
        self.disk.sync_directory(self.place.directory)
        self._stray = None

    def _drop_obsolete(self) -> None:
        """Recovery knows an obsolete file too, so it may stay if the disk refuses."""
        path, self._obsolete = self._obsolete, None
        if path is not None:
            try:
                self.disk.unlink(path)
            except OSError as error:
                logger.warning("%s is not needed any more and could not be removed: %s", path, error)

    def _state(
        self, salt_crc: int, reserved_end: int, *, next_offset: int | None = None, restated: bool = False
    ) -> list[bytes]:
        state = State(
            reserved_end=reserved_end,
            previous_end=self.end,
            earliest=self.removals.floor.earliest,
            evict_floor=self.removals.floor.evict_floor,
            identity=self.identity,
            window=tuple(self.window.entries()) if restated else (),
            restated=restated,
        )
        return encode_state(state, frame_bytes_max=self.settings.frame_bytes_max, **self.stamp(salt_crc, next_offset))

    @property
    def identity(self) -> str:
        """Which boot of the machine and which file system the log is written in."""
        if self._identity is None:
            self._identity = self.disk.identity(self.place.directory)
        return self._identity

    def stamp(self, salt_crc: int, next_offset: int | None = None) -> dict[str, int]:
        """What every control frame written now carries."""
        return {
            "salt_crc": salt_crc,
            "next_offset": self.end if next_offset is None else next_offset,
            "epoch": self.place.epoch,
            "durable": self.durable,
            "appended_at": self.clock.now_ms(),
        }

    def _put(self, active: ActiveFile, parts: Sequence[Bytes]) -> None:
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self.in_doubt = self.touched = True
        write_all(active.file, data, active.position)
        active.position += len(data)
