"""The log of one shard: stage, commit, maintain. No threads of its own; whoever calls does the work.

`stage_*` checks, assigns offsets and queues. `commit` writes, syncs as the durability class asks, and
publishes. What time asks for is in `upkeep`. Knows no topics and no metadata.

Locks, outer first: `committing` (one writer at a time), then the queue's own. Readers take neither:
they go by `head`, which moves only after the bytes below it may be shown.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from forebay.appends.callbacks import Waking
from forebay.appends.free_space import FreeSpace
from forebay.appends.group_commit import GroupCommit
from forebay.appends.queue import AppendQueue, Entry, Producing
from forebay.appends.ticket import Ticket
from forebay.errors import Closed, Fenced, ForebayError, Unavailable
from forebay.format.batch import ColumnBytes
from forebay.locks import Rank, RankedCondition
from forebay.records import Offsets
from forebay.topics import Durability
from forebay.wal.active import ActiveFile
from forebay.wal.cache import CachedFrame
from forebay.wal.files import FileList
from forebay.wal.healing import rebuild
from forebay.wal.live import LiveFile
from forebay.wal.published import PublishedLog
from forebay.wal.refusals import Refusals, fenced, refusals
from forebay.wal.skipping import skip_to_history
from forebay.wal.writer import Writer

logger = logging.getLogger(__name__)

ROTATE_WAIT_SECONDS = 60.0


class Counters:
    """What the log has done since it was opened; the core counts, others publish."""

    __slots__ = (
        "bytes_written",
        "commits",
        "fsync_seconds",
        "fsyncs",
        "pause_seconds",
        "pauses",
        "records",
        "rotations",
    )

    def __init__(self) -> None:
        self.bytes_written = self.commits = self.fsyncs = self.pauses = self.records = self.rotations = 0
        self.fsync_seconds = self.pause_seconds = 0.0

    def committed(self, made: Sequence[CachedFrame]) -> None:
        """One more commit, of these frames."""
        self.commits += 1
        self.records += made[-1].end - made[0].base
        for frame in made:
            self.bytes_written += len(frame.data)


class Wal(PublishedLog):
    """One shard's log, open for appends. Made by `forebay.wal.begin.begin`."""

    def __init__(
        self,
        writer: Writer,
        files: FileList,
        *,
        durability: Durability,
        live: LiveFile,
        still_owner: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__(writer, files, live)
        self.durability = durability
        self.settings = writer.settings
        self.queue = AppendQueue(writer.next, writer.window, writer.settings)
        self.group = GroupCommit(writer.place, self.queue, self._commit)
        self._space = FreeSpace(writer.disk, writer.place.directory, writer.place, writer.settings.free_bytes_min)
        self.counters = Counters()
        self.on_dirty: Callable[[], None] = lambda: None
        """Called when there may be work for `upkeep`."""
        self.failure: str | None = None
        """Why appends are refused, if they are."""
        self.fenced: str | None = None
        """Why this log will never take an append again, if so: another owner has the shard, or may have."""
        self.dirty_since: float | None = None
        self.queued_since: float | None = None
        self.idle_since = writer.clock.monotonic()
        self.still_owner = still_owner
        self.trouble: BaseException | None = None

    # Appending

    def stage_one(self, entry: Entry, size: int) -> Ticket:
        """Queue one record; see `AppendQueue.stage_one`."""
        self.queue.stage_one(entry, size)
        if self.queued_since is None:
            self._note_queued()
        return entry.ticket

    def stage_many(self, columns: ColumnBytes, producing: Producing | None, ticket: Ticket) -> Ticket:
        """Queue many records as one; see `AppendQueue.stage_many`."""
        self.queue.stage_many(columns, producing, ticket)
        if self.queued_since is None:
            self._note_queued()
        return ticket

    def settle(self, ticket: Ticket) -> int:
        """See `GroupCommit.wait`."""
        # As `is_held_queued`, without that call: an append of class memory is hardly more than a few of them.
        if self.durability is Durability.MEMORY and ticket.offset + ticket.count <= self.writer.reserved:
            still_owner = self.still_owner
            if still_owner is None or still_owner():
                return ticket.result() if ticket.done else ticket.offset
        return self.group.wait(ticket)

    def is_held_queued(self, ticket: Ticket) -> bool:
        """Whether an append is acknowledged in the queue: of class memory, while the shard is ours.

        Its offset is reserved, so that even if it is lost it never stands for another record.
        """
        if self.durability is not Durability.MEMORY or ticket.offset + ticket.count > self.writer.reserved:
            return False
        return self.still_owner is None or self.still_owner()

    @property
    def committing(self) -> threading.RLock:
        """Held by the one thread at a time that changes the log."""
        return self.group.lock

    def is_inside(self) -> bool:
        """Whether the thread that asks is in the middle of a write of this log."""
        return self.group.is_inside()

    def commit(self) -> None:
        """Write and publish everything that waits; see `GroupCommit.commit`."""
        self.group.commit()

    def commit_within(self, seconds: float) -> None:
        """As `commit`, unless the log still pauses or is written when the time is up."""
        self.group.commit_within(seconds, self.writer.clock)

    def call_back(self) -> None:
        """Run the callbacks that are due. The caller holds no lock."""
        self.group.call_back()

    def _commit(self) -> None:
        try:
            self.queued_since = None
            self.writer.unsettled = False
            self.queue.take()
            if self.queue.taken:
                self._write()
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, OSError | ForebayError):
                raise

    def _write(self) -> None:
        writer = self.writer
        now = writer.clock.monotonic()
        if now >= self._space.due:
            self._space.check(now)
        full = writer.active is not None and writer.active.position >= self.settings.rotate_bytes_max
        if full and not writer.syncing:
            self.rotate_locked()
        made = writer.write(self.queue.taken)
        if self.durability is Durability.FSYNC:
            self.timed_sync()
        # After everything that takes time and before anybody hears of it: whoever pauses here acknowledges nothing.
        if self.still_owner is not None and not self.still_owner():
            raise Fenced(f"{writer.place}: the lease ended before the append was acknowledged")
        self.publish(made)
        self.counters.committed(made)
        self.idle_since = writer.clock.monotonic()
        self.note_dirty()
        self.queue.settle()
        self.wake()

    def note_dirty(self) -> None:
        if self.dirty_since is None:
            try:
                self.dirty_since = self.writer.clock.monotonic()
                self.on_dirty()
            except BaseException:
                # Nobody may have heard of it (Ctrl-C): the next who has something to sync says it again.
                self.dirty_since = None
                raise

    def _note_queued(self) -> None:
        if self.durability is Durability.MEMORY:
            try:
                self.queued_since = self.writer.clock.monotonic()
                self.on_dirty()
            except BaseException:
                self.queued_since = None
                raise

    def timed_sync(self) -> None:
        begun = self.writer.clock.monotonic()
        self.writer.sync()
        self.counters.fsyncs += 1
        self.counters.fsync_seconds += self.writer.clock.monotonic() - begun

    def rotate_locked(self) -> None:
        """Begin a new file, if the present one has records. The caller holds `committing`."""
        if self.writer.rotate():
            self.counters.rotations += 1
            self.tell()
            self.note_dirty()

    # Pausing and going on elsewhere

    def hold(self, refusal: ForebayError) -> None:
        """Refuse appends with this error from now on; what is queued is still committed."""
        self.queue.hold(refusal)

    def release(self) -> None:
        """Take appends again, unless the log has failed meanwhile."""
        self.queue.hold(None)

    def skip_to_history(self, stop: int) -> None:
        """History holds everything below `stop`: go on there. The caller has held appends and committed.

        On return `head` is there too, so that readers go on, and the log says who has the offsets in between.
        Raises `Unavailable` if no new file could be begun; it may then be repeated.
        """
        self._await_sync()
        with self.committing:
            self.check_writable()
            assert self.queue.is_empty, "appends are held, and what was queued is committed"
            if stop <= self.writer.next:
                return
            try:
                self._begin_file(lambda: skip_to_history(self.writer, stop))
            finally:
                # Where the writer goes on, whatever happened: an offset is never given out twice.
                self.queue.restart_at(self.writer.next)
            self.head = self.writer.end
            self.tell()
            self.note_dirty()
        self.wake()
        self.call_back()

    def fence(self, reason: str) -> None:
        """Another owner has the shard: stop for ever. What is queued fails, and so does every later append."""
        with self.committing:
            if self.fenced is None and not self.closed:
                self._fence(reason)
        self.call_back()

    def _fence(self, reason: str) -> None:
        self.fenced = reason
        self.live.end()
        answers = fenced(self.writer.place, reason)
        self._stop(reason, answers if self.writer.unsettled else answers.unwritten(), self.head)

    # Failing and healing

    def _fail(self, error: BaseException) -> None:
        """A commit ended in an exception: settle every waiter. Unless nothing was written, distrust the file."""
        name, writer = self.writer.place, self.writer
        if self.queue.taken and self.queue.taken[-1].end <= self.head:
            # Published already: whatever failed then did not fail these appends.
            self.queue.settle()
        if isinstance(error, Fenced):
            self._fence(str(error))
            return
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        refusal = error if isinstance(error, ForebayError) else Unavailable(f"{name}: not written ({reason})")
        if not writer.unsettled:
            self.queue.fail(refusal, refusal, max(writer.next, self._skip_lost(writer.end)))
            return
        self.live.doubtful = True
        self.tell()
        self._stop(reason, refusals(name, reason), self._skip_lost(self.head))

    def _stop(self, reason: str, answers: Refusals, next_offset: int) -> None:
        """Take no appends any more, and answer all that wait."""
        self.failure = reason
        self.queue.refuse(answers.later)
        self.queue.fail(answers.written, answers.queued, next_offset)
        logger.error("%s: log failed at offset %d: %s", self.writer.place, self.head, reason)
        self.on_dirty()

    def _skip_lost(self, end: int) -> int:
        """Where to go on: at `end`, but class `memory` acknowledges what only waits, and gives out no offset twice."""
        if self.durability is not Durability.MEMORY or self.queue.next <= end:
            return end
        self.writer.skip_to(self.queue.next, end)
        return self.queue.next

    def heal(self) -> bool:
        """Try to make a failed log writable again; true if it is. Acknowledged records keep their offsets."""
        with self.committing:
            if self.failure is None or self.fenced is not None or self.closed:
                return self.failure is None
            try:
                window = rebuild(self.writer, self.files, self.cache, self.head)
            except (OSError, ForebayError) as error:
                logger.warning("%s: still read-only: %s", self.writer.place, error)
                return False
            self.head = self.writer.end
            self.live.doubtful = False
            self.tell()
            self.writer.unsettled = False
            self.queue.restart_at(self.writer.next, window)
            self.failure = None
            self.queue.refuse(None)
            logger.warning("%s: writable again from offset %d", self.writer.place, self.writer.next)
            return True

    def guarded(self, step: Callable[[], None]) -> bool:
        """Run a step that writes to the active file; true if it succeeded. The caller holds `committing`."""
        self.writer.unsettled = False
        try:
            step()
        except BaseException as error:
            if self.writer.unsettled:
                self._fail(error)
            if not isinstance(error, OSError | ForebayError):
                raise
            logger.warning("%s: %s", self.writer.place, error)
            self.trouble = error
            return False
        self.writer.unsettled = False
        return True

    def fail_file(self, file: ActiveFile, error: OSError) -> None:
        """A background sync of `file` has failed: it cannot be trusted, unless a copy has replaced it meanwhile."""
        with self.committing:
            if self.failure is None and not self.closed and file is self.writer.active:
                self.writer.unsettled = True
                self._fail(error)
        self.call_back()

    # Reading

    def wake(self) -> None:
        """Wake the threads that wait for more; the wakers are due at the next `call_back`, without a lock."""
        super().wake()
        if self.wakers:
            self.queue.due.append(Waking(self.wakers, self.writer.place))

    def bring_up(self) -> None:
        """Of class memory an append is acknowledged in the queue: it is written before it is asked for."""
        if self.durability is Durability.MEMORY and not self.queue.is_empty:
            self.commit()

    def offsets(self) -> Offsets:
        """The watermarks now."""
        floors, durable = self.writer.removals.floor, min(self.writer.durable, self.head)
        return Offsets(floors.earliest, floors.evict_floor, durable, exported=0, next=self.queue.next)

    # Ending

    def flush(self) -> None:
        """Everything appended so far is synced on return, whatever the class; else `Unavailable`.

        Waits for a background sync that began before, and fails if that did: the kernel reports a lost write once.
        """
        self.commit()
        if self.failure is not None:
            self.heal()
        self._await_sync()
        with self.committing:
            self.check_writable()
            if self.failure is not None or not self.guarded(self.timed_sync):
                raise Unavailable(
                    f"{self.writer.place}: not everything could be made durable ({self.failure or self.trouble})"
                )
            self.dirty_since = None
            self.tell()

    def rotate(self) -> None:
        """Close the active file, if it has records, and begin a new one."""
        self.commit()
        self._await_sync()
        with self.committing:
            self.check_writable()
            self._begin_file(self.rotate_locked)

    def _await_sync(self) -> None:
        """A sync beside us may fail, and the system tells only once: the file must still be the active one then.

        The caller holds no lock, so that appends go on meanwhile.
        """
        with self.published:
            self.published.wait_for(lambda: not self.writer.syncing, ROTATE_WAIT_SECONDS)

    def _begin_file(self, step: Callable[[], None]) -> None:
        if self.failure is not None or self.writer.syncing or not self.guarded(step):
            why = self.failure or ("a sync is under way" if self.writer.syncing else self.trouble)
            raise Unavailable(f"{self.writer.place}: no new log file could be begun ({why}); try again")

    def sync_ended(self) -> None:
        """The outcome of the background sync was acted on."""
        self.writer.background = None
        with self.published:
            self.published.notify_all()

    def close(self) -> None:
        """Write and sync everything, say in the log that it ended in order, give files back. Harmless when repeated."""
        if self.closed:
            return
        self.commit()
        if self.failure is not None:
            self.heal()
        with self.committing:
            if self.fenced is None:
                self.queue.refuse(Closed(f"{self.writer.place} is closed"))
            # What came in since the commit above: nobody else will write it now.
            self._commit()
            self.closed = True
            if self.failure is None and self.guarded(self.writer.finish) and self.writer.touched:
                self.tell()
            for file in self.files.all:
                file.close()
            self.live.close()
        self.wake()
        self.call_back()

    def abandon(self) -> None:
        """End without touching the disk: in a forked child, whose parent goes on writing."""
        self.closed = True
        # Whoever held a lock at the fork does not exist here.
        self.published = RankedCondition(Rank.LEAF, "wal.published")
        self.queue = AppendQueue(0, self.writer.window, self.settings)
        self.group = GroupCommit(self.writer.place, self.queue, self._commit)
        self.queue.refuse(Closed(f"{self.writer.place} was opened before a fork: open it anew in the child"))

    def check_writable(self) -> None:
        self.check_open()
        if self.fenced is not None:
            raise fenced(self.writer.place, self.fenced).later
