"""What time asks of a log: background writes and syncs, marks, rotation by age, sealing, healing.

Called again and again by a background worker, or by a test step by step.
Runs beside appends and readers and holds the log's lock only for what touches the active file.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

from msgspec import UNSET

from forebay.disk import replace_file
from forebay.errors import Corrupt, DataLoss
from forebay.format.files.checkpoint import Checkpoint, CheckpointFile, encode_checkpoint
from forebay.format.files.segment import parse_segment_name
from forebay.locks import Rank, RankedLock
from forebay.records import Gap
from forebay.wal.clean import clean_file
from forebay.wal.files import LogFile, SealedFile
from forebay.wal.log import Wal
from forebay.wal.recovery.survey import CHECKPOINT_NAME
from forebay.wal.sealing import Sealer, listed
from forebay.wal.sync_request import SyncRequest
from forebay.wal.tail import CachedFrame
from forebay.wal.writer import SyncTarget

logger = logging.getLogger(__name__)

CHECKPOINT_SHARE: Final = 64
"""Of so many files that a checkpoint lists one may be sealed without another being written: it names every file.

So each seal costs the same, however many files there are. A start reads the index of a sealed file that is not listed.
"""
DAMAGE_RETRY_SECONDS = 10.0
HEAL_RETRY_SECONDS: Final = 0.1
HEAL_RETRY_SECONDS_MAX: Final = 10.0
"""So long background sealing leaves a damaged file alone before it looks whether the sound one was restored."""
STALL_RETRY_MS = 500
"""So often the background tries again to write acknowledged records that could not be written."""
MOMENT_SECONDS: Final = 0.02
"""A log that another thread has for longer than that is left for the next round."""
AT_ONCE: Final = float("-inf")
NEVER: Final = float("inf")


class Upkeep:
    """The upkeep of one log."""

    def __init__(
        self, wal: Wal, sealer: Sealer, has_copy: Callable[[int, int], bool] = lambda start, stop: False
    ) -> None:
        """`has_copy` says whether history, apart from the log files, holds all records of `[start, stop)`."""
        self._wal = wal
        self._sealer = sealer
        self._has_copy = has_copy
        self._sealing = RankedLock(Rank.SEALING, "wal.sealing")
        self._stopped: DataLoss | None = None
        self._retry_at = 0.0
        self._heal_at = self._heal_wait = 0.0
        self._sealed_since = self._listed = 0
        """Files sealed since a checkpoint was written here last, and how many that one lists."""
        self._left: object = None
        """The append whose callback was due a round ago."""

    def maintain(self) -> None:
        """Do everything that is due, by hand: a process has a thread for syncs and another for `mend`."""
        was_failed = self._wal.failure is not None
        self.call_back_left()
        if self.is_commit_due:
            self._wal.commit()
        if self.is_sync_due:
            self.sync()
        if was_failed:
            self._wal.heal()
        self._wal.do_errands()
        self.write_due(may_rotate=True)
        if self._wal.failure is None and not self._wal.closed and self._wants_sealing():
            self.seal_rotated()

    @property
    def is_commit_due(self) -> bool:
        """Whether the background writes what is queued: after a time, or at once if a reader waits for it.

        Only class `memory` leaves acknowledged appends in the queue. Writing them may wait for metadata.
        """
        return self._is_due(self._wal.queued_since, self._flush_interval_ms)

    @property
    def is_sync_due(self) -> bool:
        """Whether something has been unsynced for so long that the background syncs it."""
        return self._is_due(self._wal.dirty_since, self._wal.settings.sync_interval_ms)

    def is_in_use(self, seconds_max: float) -> bool:
        """Whether one thread after another has written the log for so long, or one that waits for metadata or a disk.

        Called by a background worker, which no interrupt (Ctrl-C) reaches between the two lines.
        """
        is_free = self._wal.committing.acquire(timeout=seconds_max)
        if is_free:
            self._wal.committing.release()
        return not is_free

    @property
    def is_write_due(self) -> bool:
        """Whether `write_due` would write: a mark, or a rotation by age."""
        wal = self._wal
        return wal.failure is None and not wal.closed and (self._is_mark_due or self.is_old)

    @property
    def _is_mark_due(self) -> bool:
        """A file that says already how far the log is durable needs none, however long it is idle."""
        active = self._wal.writer.active
        is_unmarked = active is not None and active.marked < self._wal.writer.durable
        return is_unmarked and self._is_due(self._wal.idle_since, self._wal.settings.mark_interval_ms)

    def write_due(self, *, may_rotate: bool) -> None:
        """Write what time asks for: marks, and rotation by age if that may be. Never copies a file."""
        wal = self._wal
        if wal.failure is not None or wal.closed:
            return
        if self._is_mark_due:
            wal.mark()
        if may_rotate and self.is_old:
            with wal.committing:
                if not wal.closed and wal.failure is None:
                    wal.attempt(wal.rotate_locked)

    @property
    def needs_mending(self) -> bool:
        """Whether there is something for `mend` to do."""
        wal = self._wal
        if wal.closed or wal.fenced is not None:
            return False
        if wal.failure is not None:
            return wal.writer.clock.monotonic() >= self._heal_at
        return self._wants_sealing()

    def mend(self) -> None:
        """Heal a log that has failed, and seal what was rotated. What fails is tried again at the next call.

        Either may copy a whole file, so the thread that syncs all shards never calls this.
        """
        wal = self._wal
        if wal.closed or wal.fenced is not None or (wal.failure is not None and not self._is_healed()):
            return
        if self._wants_sealing():
            self.seal_rotated()

    def _is_healed(self) -> bool:
        """Heal the log, which copies a file, unless that has failed just now; each failure doubles the wait."""
        now = self._wal.writer.clock.monotonic()
        if now < self._heal_at:
            return False
        if self._wal.heal():
            self._heal_at = self._heal_wait = 0.0
            return True
        self._heal_wait = min(max(self._heal_wait * 2, HEAL_RETRY_SECONDS), HEAL_RETRY_SECONDS_MAX)
        self._heal_at = now + self._heal_wait
        return False

    @property
    def is_old(self) -> bool:
        """Whether the active file has records and has reached the age to be rotated."""
        return self._wal.writer.clock.monotonic() >= self.old_at

    @property
    def old_at(self) -> float:
        """When the active file has reached the age to be rotated, by the monotonic clock.

        Never while it has no record or is smaller than `rotate_bytes_min`: then its growth makes it due.
        """
        wal, active = self._wal, self._wal.writer.active
        if active is None or active.is_bare or wal.closed or active.position < wal.settings.rotate_bytes_min:
            return NEVER
        return active.created + wal.settings.rotate_seconds_max

    @property
    def is_busy(self) -> bool:
        """Whether there will soon be work: something queued, unsynced, unmarked, unsealed or failed."""
        return self.due_at < NEVER or bool(self.rotated())

    @property
    def due_at(self) -> float:
        """When there is work next, but for sealing, by the monotonic clock: `AT_ONCE` for what waits for no time.

        A log that was opened and not written to needs no offsets: reserved, they would be a gap after a clean stop.
        For any thread, also one that holds the log's locks: a look at fields.
        """
        wal, writer, settings = self._wal, self._wal.writer, self._wal.settings
        is_left = bool(wal.queue.due)
        if wal.closed or wal.fenced is not None:
            return AT_ONCE if is_left and not wal.closed else NEVER
        if is_left or wal.failure is not None or wal.errands or writer.returned_sync is not None:
            return AT_ONCE
        if writer.touched and writer.wants_reservation:
            return AT_ONCE
        is_unmarked = writer.active is not None and writer.active.marked < writer.durable
        return min(
            _due_at(wal.queued_since, self._flush_interval_ms),
            _due_at(wal.dirty_since, settings.sync_interval_ms),
            _due_at(wal.idle_since if is_unmarked else None, settings.mark_interval_ms),
        )

    @property
    def stopped(self) -> DataLoss | None:
        """The damage that the oldest unsealed file was not sealed for, with the next step; `None` if there is none."""
        return self._stopped if self.rotated() else None

    def seal_rotated(self, *, accept_damage: bool = False) -> None:
        """Seal every file that is no longer written. A failure is logged and tried again at the next call.

        At damage that no other copy fills it stops, see `stopped`; with `accept_damage` it goes on, and the index
        names the damaged ranges. The caller does not hold `committing`, which is taken for a moment: a rotation or
        a healing in another thread exchanges the active file in several steps, and in between it looks rotated.
        """
        with self._sealing:
            with self._wal.committing:
                files = self.rotated()
            for file in files:
                if self._wal.fenced is not None or not self._seal(file, accept_damage=accept_damage):
                    return

    def unseal_damaged(self, exported: int) -> None:
        """Take files that are damaged since they were sealed for unsealed ones, as far as history does not have them.

        Reads all of these files. `seal_rotated` then fills what memory has, and names the rest.
        """
        with self._sealing:
            for file in self._wal.files.reaching(exported):
                if isinstance(file, SealedFile) and file.end > exported:
                    unsealed = self._sealer.unsealed(file)
                    if unsealed is not None:
                        self._wal.files.replace(file, unsealed)
                        file.close()

    def close(self) -> None:
        """Seal what can be sealed and close the log in order; on return there is nothing to replay."""
        if not self._wal.closed:
            self._wal.commit()
            self.seal_rotated()
            self._wal.close()
            if self._wal.failure is None and self._wal.writer.touched:
                self.write_checkpoint(clean=True)

    def sync(self) -> None:
        """Make everything written durable, beside appends and readers."""
        target: SyncTarget | None = None
        try:
            target = self._begun_sync()
            if target is None:
                return
            target.active.file.sync()
            self._wal.end_background_sync(target)
        except BaseException as error:
            if target is not None:
                # Where it was interrupted, whether it would have failed is unknown.
                why = OSError(errno.EINTR, f"a sync was interrupted by {type(error).__name__}")
                self._wal.fail_background_sync(target, error if isinstance(error, OSError) else why)
            if not isinstance(error, OSError):
                raise
        else:
            self._wal.show_synced()

    def _begun_sync(self) -> SyncTarget | None:
        """A sync that has begun; `None` if there is nothing to sync, or another thread keeps the log for a moment."""
        answered = threading.Event()
        request = SyncRequest(self._wal, answered.set)
        answered.wait(MOMENT_SECONDS)
        return request.end()

    def call_back_left(self) -> None:
        """Run the callbacks that a thread has left because it was interrupted: those that were due a round ago."""
        due = self._wal.queue.due
        first = next(iter(due.copy()), None)
        if first is not None and first is self._left:
            self._wal.group.call_back()
        self._left = first

    @property
    def _flush_interval_ms(self) -> int:
        if self._wal.stall is not None:
            return max(STALL_RETRY_MS, self._wal.settings.flush_interval_ms)
        return 0 if self._wal.tail.is_watched else self._wal.settings.flush_interval_ms

    def _is_due(self, since: float | None, interval_ms: int) -> bool:
        return self._wal.failure is None and self._wal.writer.clock.monotonic() >= _due_at(since, interval_ms)

    def rotated(self) -> list[LogFile]:
        """Files that are no longer written and not sealed yet."""
        active = self._wal.writer.active
        return [file for file in self._wal.files.logs if file is not active and not file.is_bare]

    def _wants_sealing(self) -> bool:
        """Whether background sealing has work: not while it waits for a damaged file to be restored."""
        waits = self._stopped is not None and self._wal.writer.clock.monotonic() < self._retry_at
        return not waits and bool(self.rotated())

    def _seal(self, file: LogFile, *, accept_damage: bool) -> bool:
        wal = self._wal
        try:
            if self._sealer.wants_reframing(file):
                file = self._reframed(file)
            try:
                sealed, damage = self._sealer.seal(file, lambda gap: False)
            except DataLoss:
                # A sound file may have its name by now, or memory may hold what is damaged.
                file = self._reframed(self._followed(file))
                sealed, damage = self._sealer.seal(file, lambda gap: accept_damage or self._is_needless(gap))
        except DataLoss as error:
            self._stop(error)
            return False
        except (OSError, Corrupt) as error:
            logger.warning("%s: %s is not sealed yet: %s", wal.writer.place, file.path, error)
            self._followed(file)
            return False
        if damage:
            named = "%s: %s is sealed with damage at %s: these offsets read as damaged from now on"
            logger.warning(named, wal.writer.place, file.path, listed(damage))
        self._stopped = None
        wal.files.replace(file, sealed)
        file.close()
        self._sealed_since += 1
        if self._sealed_since * CHECKPOINT_SHARE >= self._listed:
            self.write_checkpoint(clean=False)
        return True

    def _is_needless(self, gap: Gap) -> bool:
        """Whether nothing that can be read is lost with these offsets: they ended, or history holds the records."""
        if gap.stop == gap.start:
            return False
        return gap.stop <= self._wal.writer.removals.floor.earliest or self._has_copy(gap.start, gap.stop)

    def _copies(self, start: int, stop: int) -> Sequence[CachedFrame]:
        """The frames of `[start, stop)` in the tail cache; none if not all of them are there."""
        frames = self._wal.tail.cache.frames_from(start, self._wal.settings.cache_bytes_max)
        frames = [frame for frame in frames if frame.end <= stop]
        return frames if frames and (frames[0].base, frames[-1].end) == (start, stop) else ()

    def _stop(self, error: DataLoss) -> None:
        """Remember why a file is not sealed, and log it once."""
        place = self._wal.writer.place
        topic = str(place).partition("[")[0]
        stopped = DataLoss(
            f"{place}: {error}, and no other copy has what stood there: the file is not sealed, and nothing from it on "
            "is exported. Restore the file from a backup, or go on without these records: "
            f'"forebay topic export {topic} --accept-damage", or accept_damage=True'
        )
        if self._stopped is None or str(self._stopped) != str(stopped):
            logger.error("%s", stopped)
        self._stopped = stopped
        self._retry_at = self._wal.writer.clock.monotonic() + DAMAGE_RETRY_SECONDS

    def _reframed(self, file: LogFile) -> LogFile:
        """The file in large frames, shown to readers at once: its name already leads there.

        The file as it is, if not all of its frames are whole here or in memory.
        """
        with self._wal.files.replacing:
            try:
                renewed = self._sealer.reframe(file, self._copies)
            except Corrupt as error:
                logger.debug("%s: %s", self._wal.writer.place, error)
                return file
            self._wal.files.replace(file, renewed)
        self._wal.show_replaced(renewed)
        file.close()
        return renewed

    def _followed(self, file: LogFile) -> LogFile:
        """The file that has this name now: a copy made by a late re-framing, or a sound one that was put there.

        The file as it is, if what has its name is not whole. On return it is durable.
        """
        try:
            renewed = self._sealer.reopened(file, file.path)
        except (OSError, Corrupt):
            return file
        try:
            renewed.file.sync()
        except OSError:
            renewed.file.close()
            return file
        self._wal.files.replace(file, renewed)
        self._wal.show_replaced(renewed)
        file.close()
        return renewed

    def write_checkpoint(self, *, clean: bool) -> None:
        writer = self._wal.writer
        named = [(file, parse_segment_name(file.path.rpartition("/")[2])) for file in self._wal.files.all]
        files = [
            CheckpointFile(file.start, name[1], file.end)
            for file, name in named
            if isinstance(file, SealedFile) and name is not None
        ]
        checkpoint = Checkpoint(
            files=tuple(files),
            durable=writer.durable,
            rotated_at=writer.clock.now_ms(),
            clean=clean,
            clean_position=writer.active.position if clean and writer.active is not None else 0,
            last=clean_file(writer) if clean else UNSET,
        )
        path = f"{writer.place.directory}/{CHECKPOINT_NAME}"
        try:
            replace_file(writer.disk, path, encode_checkpoint(checkpoint))
        except OSError as error:
            logger.warning("%s could not be written, the next start takes longer: %s", path, error)
        self._sealed_since, self._listed = 0, len(files)


def _due_at(since: float | None, interval_ms: int) -> float:
    return NEVER if since is None else since + interval_ms / 1000
