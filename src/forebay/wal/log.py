"""The log of one shard: stage, commit, maintain. No threads of its own: the thread that calls does the work.

`stage_*` checks, assigns offsets and queues. `commit` writes, syncs as the durability class asks, and publishes. What
time asks for is in `upkeep`. Knows no topics and no metadata.

Made of four parts: `queue` (what waits), `group` (one writer for all that wait), `writer` (the active file) and `tail`
(what readers see). Locks, outer first: the commit lock of `group`, then the queue's own. Readers take neither: they go
by `head`, which moves only after the bytes below it may be shown.
"""

from __future__ import annotations

import copy
import logging
import re
import threading
from collections.abc import Callable
from enum import Enum, auto
from typing import Final, NamedTuple

from forebay.appends.callbacks import Waking
from forebay.appends.free_space import FreeSpace
from forebay.appends.group_commit import GroupCommit
from forebay.appends.queue import AppendQueue, Producing, QueuedRecord
from forebay.appends.ticket import Ticket
from forebay.disk import SyncFailedBefore
from forebay.errors import Closed, DataLoss, Fenced, ForebayError, Indeterminate, Unavailable, UnknownTopic
from forebay.format.columns.rows import ColumnBytes, Row
from forebay.pages import LOOP_BYTES_MAX, Page
from forebay.records import Gap, Offsets, Reason
from forebay.topics import Durability
from forebay.wal.bounds import MemoryBounds
from forebay.wal.files import FileList, LogFile
from forebay.wal.recovery.heal import Rebuilt, rebuild
from forebay.wal.refusals import Refusals, fenced, refusals
from forebay.wal.removals import Removals
from forebay.wal.tail import CachedFrame, LiveFile, Tail
from forebay.wal.writer import ActiveFile, SyncTarget, Writer

logger = logging.getLogger(__name__)

_NEW: Final = tuple.__new__
"""Half the cost of calling a named tuple's class."""
TIMED_COMMITS = 8
"""One of so many commits is timed: a look at the clock for each would cost single appends more than they can spare."""
PAGE_BYTES = 1024 * 1024
ROTATE_WAIT_SECONDS = 60.0
GIVE_BACK_SECONDS = 0.5
"""So long a background thread that gives offsets back waits for its turn."""


class LogPhase(Enum):
    """What a log can do. A background sync may run in any of them; see `Writer.syncing`."""

    OPEN = auto()
    """It takes appends."""
    FAILED = auto()
    """A write or a sync failed: readable, and `heal` makes it writable again."""
    FENCED = auto()
    """Another owner has the shard, or may have: readable, and never writable again."""
    CLOSED = auto()
    """It is of no use any more."""


_NEXT: Final = {
    LogPhase.OPEN: (LogPhase.FAILED, LogPhase.FENCED, LogPhase.CLOSED),
    LogPhase.FAILED: (LogPhase.OPEN, LogPhase.FAILED, LogPhase.FENCED, LogPhase.CLOSED),
    LogPhase.FENCED: (LogPhase.FENCED, LogPhase.CLOSED),
    LogPhase.CLOSED: (LogPhase.CLOSED,),
}


class LogState(NamedTuple):
    """What a log can do, and why not more."""

    phase: LogPhase
    reason: str | None = None
    """Why appends are refused. Of a closed log: why it could not be closed in order."""
    is_fenced: bool = False
    """The log was fenced, and may be closed since."""


def _not_owned() -> bool:
    """Whether this process still owns the shard, once its topic was deleted."""
    return False


class Stall(NamedTuple):
    """Why acknowledged records of class `memory` wait in the queue: a commit could not write them."""

    reason: str
    start: int
    stop: int
    """The records of `[start, stop)` waited on when the last commit failed."""

    def __str__(self) -> str:
        return (
            f"offsets [{self.start}, {self.stop}) are acknowledged and wait in memory, because they could not be "
            f"written ({self.reason}); they are written as soon as that is put right"
        )


class WrittenCommit(NamedTuple):
    """A commit whose frames are in the file, before readers see them: only under the commit lock."""

    frames: list[CachedFrame]
    begun: float


class Wal:
    """One shard's log, open for appends. Made by `forebay.wal.recovery.resume.resume`."""

    def __init__(
        self,
        writer: Writer,
        files: FileList,
        bounds: MemoryBounds,
        *,
        durability: Durability,
        live: LiveFile,
        on_dirty: Callable[[], None],
        still_owner: Callable[[], bool] | None = None,
    ) -> None:
        """`on_dirty` is called, under the log's locks, when there may be work for `upkeep`: it must not wait."""
        place, settings = writer.place, writer.settings
        self.durability = durability
        self.policy = durability.policy
        self.settings = settings
        self.files = files
        self.writer = writer
        self.queue = AppendQueue(writer.next, writer.window, settings, bounds.queues)
        self.group = GroupCommit(place, self.queue, self._commit)
        self.tail = Tail(
            writer.end,
            place.epoch,
            settings.cache_bytes_max,
            bounds.caches,
            live,
            writer.counters,
            is_packed=writer.is_packing,
        )
        self.state = LogState(LogPhase.OPEN)
        """Changed by `_become` alone."""
        self.counters = writer.counters
        self._on_dirty = on_dirty
        self.dirty_since: float | None = None
        self.queued_since: float | None = None
        self.stall: Stall | None = None
        """Why acknowledged records wait in the queue, if the last commit could not write them."""
        self.lost: Gap | None = None
        """From the first to the last record that was acknowledged in this life of the log and is gone."""
        self._losses = self._losses_said = 0
        self.idle_since = writer.clock.monotonic()
        self.still_owner = still_owner
        self._left: UnknownTopic | None = None
        """Why nothing is acknowledged any more, if the topic was deleted."""
        self._unhealed: str | None = None
        """Why the last healing failed, without its numbers."""
        self.errands: dict[Callable[[], None], None] = {}
        """What background workers have left to the thread that has the commit lock: see `add_errand`."""
        self._space = FreeSpace(writer.disk, place.directory, place, settings.free_bytes_min)

    # State

    @property
    def failure(self) -> str | None:
        """Why appends are refused, if they are. Of a closed log: why it could not be closed in order."""
        return self.state.reason

    @property
    def fenced(self) -> str | None:
        """Why this log will never take an append again, if so: another owner has the shard, or may have."""
        return self.state.reason if self.state.is_fenced else None

    @property
    def has_left(self) -> bool:
        """Whether the topic was deleted by another process, so that nothing is acknowledged any more."""
        return self._left is not None

    @property
    def closed(self) -> bool:
        return self.state.phase is LogPhase.CLOSED

    def _become(self, phase: LogPhase, reason: str | None, refusal: ForebayError | None) -> None:
        """Every change of the state. Appends are answered with `refusal` from now on.

        The caller holds the commit lock.
        """
        before = self.state
        assert phase in _NEXT[before.phase], f"{self.writer.place}: {before.phase.name} cannot become {phase.name}"
        state = LogState(phase, reason, before.is_fenced or phase is LogPhase.FENCED)
        # One statement: an exception (Ctrl-C) never leaves a log that is open and refuses appends.
        self.state, self.queue.refusal = state, refusal

    def check_open(self) -> None:
        """`Closed` if the log is."""
        if self.state.phase is LogPhase.CLOSED:
            raise Closed(f"{self.writer.place} is closed")

    def check_writable(self) -> None:
        """`Closed` or `Fenced` if the log will never be written again."""
        self.check_open()
        if self.state.phase is LogPhase.FENCED:
            raise self._fenced(str(self.state.reason)).later

    # Appending

    def append(self, row: Row, size: int) -> int:
        """Append one record; its offset once it is published as its class asks, or the error it failed with.

        Where nothing else waits the record is written at once (`_append_alone`). Else it is queued, and this thread
        writes for all that wait or waits for the one that does. Runs in the caller's thread, which holds no lock.
        """
        group, queue = self.group, self.queue
        claims = group.claims
        try:
            # What waits already may fill the queue: then this append is refused, and waits for no lock. A signal
            # handler that has interrupted this thread under one of the locks gets its answer in the queue as well.
            is_first = not (queue.bytes or queue.is_inside() or group.is_inside())
            if not is_first or claims.setdefault(None, row) is not row:
                ticket = queue.stage_one(QueuedRecord(*row, None, Ticket()), size)
            else:
                with group.lock:
                    claims.pop(None, None)
                    offset = self._append_alone(row)
                    if offset is not None:
                        if self.errands:
                            self._do_errands()
                        return offset
                    # Others wait for this thread, whether or not there is room for its own record.
                    try:
                        ticket = queue.stage_one(QueuedRecord(*row, None, Ticket()), size)
                    finally:
                        self._commit()
        except BaseException:
            if claims.get(None) is row:
                claims.pop(None, None)
            raise
        finally:
            if queue.due:
                group.call_back()
        return group.wait(ticket)

    def _append_alone(self, row: Row) -> int | None:
        """`_commit` of one record that is not queued: its offset, or `None` if anything else must be done first.

        Then nothing was done. The caller holds the commit lock.
        """
        writer, queue, tail, counters = self.writer, self.queue, self.tail, self.counters
        now, base = writer.clock.monotonic(), writer.end
        if now >= self._space.due or self._space.left <= 0:
            return None
        try:
            made = writer.write_one(row, queue)
            if made is None:
                return None
            self._space.left -= len(made.data)
            if self.policy.syncs_before_ack:
                writer.sync()
            # As in `_commit`.
            if self.still_owner is not None and not self.still_owner():
                raise Fenced(f"{writer.place}: the lease ended before the append was acknowledged", shard=writer.place)
            tail.publish((made,), writer)
            queue.passed()
            counters.commits += 1
            counters.records += 1
            counters.bytes_written += len(made.data)
            self.idle_since = now
            if self.dirty_since is None:
                self.note_dirty()
            if counters.commits % TIMED_COMMITS == 1:
                counters.append_seconds.observe(writer.clock.monotonic() - now)
            if tail.waiting or tail.wakers:
                self.wake()
        except BaseException as error:
            failure = self._fail(error)
            if not isinstance(error, OSError | ForebayError):
                raise
            if tail.head <= base:
                raise copy.copy(failure) from error
        return base

    def stage_one(self, entry: QueuedRecord, size: int) -> Ticket:
        """Queue one record; see `AppendQueue.stage_one`."""
        self.queue.stage_one(entry, size)
        if self.policy.acks_in_queue and self.queued_since is None:
            self._note_queued()
        return entry.ticket

    def stage_many(self, columns: ColumnBytes, producing: Producing | None, ticket: Ticket) -> Ticket:
        """Queue many records as one; see `AppendQueue.stage_many`."""
        self.queue.stage_many(columns, producing, ticket)
        if self.policy.acks_in_queue and self.queued_since is None:
            self._note_queued()
        return ticket

    def acknowledge(self, ticket: Ticket) -> int:
        """Wait until the durability class of an append holds; its first offset, or the error it failed with."""
        # As `is_held_queued`, without that call: an append of class memory is hardly more than a few of them.
        if self.policy.acks_in_queue and ticket.offset + ticket.count <= self.writer.reserved:
            still_owner = self.still_owner
            if still_owner is None or still_owner():
                return ticket.result() if ticket.done else ticket.offset
        return self.group.wait(ticket)

    def is_held_queued(self, ticket: Ticket) -> bool:
        """Whether an append is acknowledged in the queue: of class memory, while the shard is ours.

        Its offset is reserved, so that even if it is lost it never stands for another record.
        """
        if not self.policy.acks_in_queue or ticket.offset + ticket.count > self.writer.reserved:
            return False
        return self.still_owner is None or self.still_owner()

    @property
    def committing(self) -> threading.RLock:
        """Held by the one thread at a time that changes the log."""
        return self.group.lock

    def commit(self) -> None:
        """Write and publish everything that waits; see `GroupCommit.commit`."""
        self.group.commit()

    def _commit(self) -> None:
        """Commit what waits, and then do what was left for the holder of the commit lock, which the caller is."""
        self._commit_queued()
        if self.errands:
            self._do_errands()

    def _commit_queued(self) -> None:
        """Write, publish and acknowledge what waits, in this order, or fail it. The caller holds the commit lock.

        What is acknowledged and cannot be written stays in the queue; see `_fail_queued`.
        """
        if self.policy.acks_in_queue and self.queue.next > self.writer.reserved_end:
            # What is acknowledged goes first: it must not wait for a reservation that others need.
            self._commit_taken(self.writer.reserved)
            if self.stall is not None:
                return
        self._commit_taken(None)

    def _commit_taken(self, below: int | None) -> None:
        """As `_commit`, of the appends that end at or below an offset, or of all."""
        try:
            written = self._write_queued(below=below)
            if written is not None:
                if self.policy.syncs_before_ack:
                    self.writer.sync()
                self._publish(written)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, OSError | ForebayError):
                raise

    def _write_queued(self, end_max: int | None = None, below: int | None = None) -> WrittenCommit | None:
        """Write what waits, in a new file if it is time for one; `None` if nothing waits, or it is not to be taken.

        With `below` only the appends that end at or below it.
        """
        writer, queue = self.writer, self.queue
        self.queued_since = None
        if writer.in_doubt or queue.taken:
            self._end_interrupted()
        if self.state.phase is LogPhase.FAILED:
            # What waits is acknowledged, and written once the log is healed.
            return None
        size = queue.bytes
        if below is None:
            queue.take(end_max)
        else:
            queue.take_below(below)
        if not queue.taken:
            return None
        now = writer.clock.monotonic()
        if now >= self._space.due or size > self._space.left:
            self._space.check(now, size)
        self._space.left -= size
        active = writer.active
        if active is not None and active.position >= self.settings.rotate_bytes_max and not writer.syncing:
            self.rotate_locked()
        return _NEW(WrittenCommit, (writer.write(queue.taken), now))

    def _publish(self, written: WrittenCommit) -> None:
        """Show readers what was written, and synced if the class asks for that, and acknowledge it."""
        writer, tail, counters = self.writer, self.tail, self.counters
        made, begun = written
        # After everything that takes time and before the answer: an owner that pauses here acknowledges nothing.
        if self.still_owner is not None and not self.still_owner():
            raise Fenced(f"{writer.place}: the lease ended before the append was acknowledged", shard=writer.place)
        # In this order: what readers may have seen is acknowledged, whatever strikes in between.
        tail.publish(made, writer)
        counters.commits += 1
        counters.records += tail.head - made[0].base
        for frame in made:
            counters.bytes_written += len(frame.data)
        self.idle_since = begun
        if self.dirty_since is None:
            self.note_dirty()
        self.queue.acknowledge()
        if self.stall is not None:
            self._end_stall()
        if counters.commits % TIMED_COMMITS == 1:
            counters.append_seconds.observe(writer.clock.monotonic() - begun)
        # A waiting thread counts itself before it looks at `head`, which has moved by now: none is missed.
        if tail.waiting or tail.wakers:
            self.wake()

    # A commit that one sync makes durable together with those of other logs

    def begin_commit(self) -> WrittenCommit | None:
        """Write what waits. The commit lock is taken on return; the same thread calls `end_commit` after a sync.

        `None`, with the lock free, if nothing waits or could be written, another thread has the lock, or a new file, a
        reservation or a background sync has to be waited for. Never waits for the lock: the thread may hold those of
        other logs. Called by a background worker, which no interrupt (Ctrl-C) reaches.
        """
        is_free, written = False, None
        try:
            is_free = self.group.lock.acquire(blocking=False)
            if is_free and not self.writer.syncing and not self.writer.waits_before(self.queue.next):
                # What is queued since that look may reach further: it must not wait for a reservation here.
                written = self._write_queued(self.writer.reserved_end)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, OSError | ForebayError):
                raise
        finally:
            if is_free and written is None:
                self.group.lock.release()
        return written

    def end_commit(self, written: WrittenCommit, failure: OSError | None) -> None:
        """A sync of all that was written has returned, or failed: publish and acknowledge, or fail the log.

        Releases the commit lock. The caller calls back (`GroupCommit.call_back`) when it holds no other.
        """
        try:
            if isinstance(failure, SyncFailedBefore):
                # Perhaps of another log, which may never recover: the file of this one answers for itself.
                self.writer.sync()
            elif failure is not None:
                raise failure
            else:
                self.writer.note_all_synced(written.begun)
            self._publish(written)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, OSError | ForebayError):
                raise
        finally:
            if self.errands:
                self._do_errands()
            self.group.lock.release()

    def note_dirty(self) -> None:
        """Something is to be synced: `upkeep` has work."""
        if self.dirty_since is None:
            try:
                self.dirty_since = self.writer.clock.monotonic()
                self._on_dirty()
            except BaseException:
                # The call may not have arrived (Ctrl-C): the next thread that has something to sync repeats it.
                self.dirty_since = None
                raise

    def _note_queued(self) -> None:
        try:
            self.queued_since = self.writer.clock.monotonic()
            self._on_dirty()
        except BaseException:
            self.queued_since = None
            raise

    def rotate_locked(self) -> None:
        """Begin a new file, if the present one has records. The caller holds the commit lock."""
        left = self.writer.active
        try:
            if self.writer.rotate():
                self.counters.rotations += 1
                self.show()
                self.note_dirty()
        finally:
            if self.writer.active is not left:
                # Also if it was dirty before, or an interrupt (Ctrl-C) came: the file that was left is to be sealed.
                self._on_dirty()

    # Deleting

    def remove(self, removals: Removals) -> None:
        """End these records, published before, and move the floors; on return the log says so, as its class asks.

        Raises `Unavailable` if nothing was written, and `Indeterminate` if it is not known what will be found.
        """
        self.group.refuse_inside()
        place = self.writer.place
        with self.group.lock:
            self.check_writable()
            if self.failure is not None:
                raise Unavailable(f"{place}: nothing is deleted, the log is read-only ({self.failure})")
            trouble = self.attempt(lambda: self._write_removals(removals))
            if trouble is not None:
                if self.failure is None:
                    raise Unavailable(f"{place}: nothing is deleted ({trouble}); try again")
                raise Indeterminate(
                    f"{place}: the log failed while a delete was being written ({self.failure}): what it names "
                    "may or may not be gone; repeat it"
                )
            self.writer.removals.add(removals)
            self.show_end()
            self.note_dirty()
        self.wake()
        self.group.call_back()

    def _write_removals(self, removals: Removals) -> None:
        active = self.writer.remove(removals)
        if self.policy.syncs_before_ack:
            self.writer.sync()
        if self.still_owner is not None and not self.still_owner():
            raise Fenced(
                f"{self.writer.place}: the lease ended before the delete was acknowledged", shard=self.writer.place
            )
        # From here on a healed log keeps it, and other processes see it.
        active.publish(active.end)

    # Pausing and going on elsewhere

    def hold(self, refusal: ForebayError) -> None:
        """Refuse appends with this error from now on; what is queued is still committed."""
        self.queue.hold(refusal)

    def release(self) -> None:
        """Take appends again, unless the log has failed meanwhile."""
        self.queue.hold(None)

    def skip_to_history(self, stop: int) -> None:
        """History holds everything below `stop`: go on there. The caller has held appends and committed.

        On return `head` is there too, so that readers go on, and the log says that history has the offsets in between.
        Raises `Unavailable` if no new file could be begun; it may then be repeated.
        """
        self._await_background_sync()
        with self.group.lock:
            self.check_writable()
            if not self.queue.is_empty:
                raise Unavailable(f"{self.writer.place} cannot go on behind what history has: {self.stall}")
            if stop <= self.writer.next:
                return
            try:
                self._begin_file(lambda: self.writer.skip_to(stop))
            finally:
                # Where the writer goes on, whatever happened: an offset is never given out twice.
                self.queue.restart_at(self.writer.next)
            self.show_end()
            self.note_dirty()
        self.wake()
        self.group.call_back()

    def give_back_reserved(self, end: int) -> Callable[[], bool] | None:
        """Use no offset from `end` on before it is reserved again, if the log ends there and nothing is queued.

        `None` if not so, or other threads write the log for too long. Else the result says whether no reservation has
        begun since, so that what is reserved outside may be taken back. From here on an append reserves before its
        first byte, and class memory acknowledges none in the queue.
        """
        is_free = False
        try:
            is_free = self.group.lock.acquire(timeout=GIVE_BACK_SECONDS)
            if not is_free or self.state.phase is not LogPhase.OPEN:
                return None
            return self.queue.if_idle_at(end, lambda: self.writer.give_back(end))
        finally:
            if is_free:
                self.group.lock.release()

    def fence(self, why: str | Fenced) -> None:
        """Another owner has the shard: stop for ever. What is queued fails, and so does every later append."""
        with self.group.lock:
            if self.state.phase in (LogPhase.OPEN, LogPhase.FAILED):
                self._fence(why)
        self.group.call_back()

    def leave(self, why: UnknownTopic) -> None:
        """The topic was deleted: acknowledge nothing from now on, and answer every append with `why`.

        Holds from the call on, also while another thread writes: what that one writes is not acknowledged. On return
        no append is under way.
        """
        # In this order: the thread that finds itself no owner any more answers with the reason.
        self._left = why
        self.still_owner = _not_owned
        self.fence(str(why))

    def _fenced(self, reason: str) -> Refusals:
        """What a log that will never be written again answers. Of a deleted topic no append ever appears."""
        if self._left is not None:
            return Refusals(later=self._left, written=self._left, queued=self._left)
        return fenced(self.writer.place, reason)

    def _fence(self, why: str | Fenced) -> ForebayError:
        if isinstance(why, Fenced) and why.deleted and self._left is None:
            name = self.writer.place
            self._left = UnknownTopic(f"{name}: the topic was deleted: this handle has ended", shard=name)
        reason = str(why)
        answers = self._fenced(reason)
        return self._stop(LogPhase.FENCED, reason, answers if self.writer.in_doubt else answers.unwritten(), self.head)

    # Failing and healing

    def _fail(self, error: BaseException) -> ForebayError:
        """A commit ended in an exception: answer every waiter. Unless nothing was written, distrust the file.

        Gives the answer to an append that was being written and is not published.
        """
        name, writer = self.writer.place, self.writer
        if self.queue.taken and self.queue.taken[-1].end <= self.head:
            # Published already: whatever failed then did not fail these appends.
            self.queue.acknowledge()
        if isinstance(error, Fenced):
            return self._fence(error)
        if self.policy.acks_in_queue and self.is_session_over:
            return self._fence(f"the session in which it was acquired has ended ({error})")
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        refusal = error if isinstance(error, ForebayError) else Unavailable(f"{name}: not written ({reason})")
        if not writer.in_doubt:
            self._fail_queued(reason, refusal, refusal, writer.next)
            if writer.active is not None and writer.active.position != writer.active.synced:
                # An interrupt (Ctrl-C) may have come between a publication and its note.
                self.note_dirty()
            return refusal
        return self._stop(LogPhase.FAILED, reason, refusals(name, reason), self.head)

    def _end_interrupted(self) -> None:
        """Finish what a thread left undone that was interrupted (Ctrl-C) while it handled a failure.

        Raises if that failed: appends were not answered, or bytes went to the file that were not published. Else they
        would be forgotten here, and their threads would wait for ever.
        """
        queue, phase = self.queue, self.state.phase
        if queue.taken and queue.taken[-1].end <= self.head:
            queue.acknowledge()
        if queue.taken or (self.writer.in_doubt and phase is LogPhase.OPEN):
            reason = self.state.reason or f"{self.writer.place}: interrupted before the appends were answered"
            raise (Fenced if phase is LogPhase.FENCED else Unavailable)(reason)
        if phase is LogPhase.OPEN:
            self.writer.account()

    def _stop(self, phase: LogPhase, reason: str, answers: Refusals, next_offset: int) -> ForebayError:
        """Take no appends any more, and answer all that wait; the answer to those that were being written."""
        try:
            self._become(phase, reason, answers.later)
            if phase is LogPhase.FENCED:
                # The directory may be another owner's.
                self.tail.live.end()
            else:
                self.show()
            self._fail_queued(reason, answers.written, answers.queued, next_offset)
            level = logging.ERROR if self._left is None else logging.INFO
            logger.log(level, "%s: log failed at offset %d: %s", self.writer.place, self.head, reason)
        finally:
            # Also after an interrupt (Ctrl-C): nothing else asks that the log is healed or given up.
            self._on_dirty()
        return answers.written

    def _fail_queued(self, reason: str, written: ForebayError, queued: ForebayError, next_offset: int) -> None:
        """Fail what was taken and what waits, but for what class `memory` has acknowledged: that waits on.

        It is written by a later commit, or once the log is healed; a log that is fenced has lost it. The caller holds
        the commit lock.
        """
        queue = self.queue
        first, held = queue.first, min(queue.next, self.writer.reserved)
        if not self.policy.acks_in_queue or held <= first:
            queue.fail(written, queued, next_offset)
            return
        if self.state.phase is LogPhase.FENCED or (self.state.phase is LogPhase.OPEN and first != self.writer.next):
            self._note_loss(Gap(first, held, Reason.LOST), reason)
            queue.fail(written, queued, max(next_offset, self._skipped_to(queue.next)))
            self.stall = None
            return
        queue.fail(written, queued, next_offset, kept_end=held)
        if queue.is_empty:
            # Records of one append that is not acknowledged, because it reaches further.
            return
        if self.stall is None:
            logger.warning("%s: offsets [%d, %d) wait in memory: %s", self.writer.place, first, queue.next, reason)
        self.stall = Stall(reason, first, queue.next)
        self._note_queued()

    def _end_stall(self) -> None:
        """What had to wait in the queue is written."""
        self.stall = None
        logger.warning("%s: what waited in memory is written, up to offset %d", self.writer.place, self.head)

    def _note_loss(self, gap: Gap, reason: str) -> None:
        """Records that were acknowledged are gone: say so now, and to every `flush` that covers them.

        Not of a topic that was deleted: they were to go.
        """
        if self._left is not None:
            return
        before = self.lost or gap
        self.lost = Gap(min(before.start, gap.start), max(before.stop, gap.stop), Reason.LOST)
        self._losses += 1
        logger.error(
            "%s: offsets [%d, %d) were acknowledged and are lost: %s", self.writer.place, gap.start, gap.stop, reason
        )

    def _loss(self) -> DataLoss:
        assert self.lost is not None
        start, stop, place = self.lost.start, self.lost.stop, self.writer.place
        return DataLoss(
            f"{place}: records of offsets [{start}, {stop}) were acknowledged and are lost; the log says why. Send "
            "again what is missing there",
            shard=place,
            start=start,
            stop=stop,
            reason="lost",
        )

    def _skipped_to(self, stop: int) -> int:
        """Where to go on once records up to `stop` are lost: behind them, for an offset is given out once."""
        if stop > self.writer.next:
            self.writer.skip_lost(stop, self.writer.end)
        return self.writer.next

    @property
    def is_session_over(self) -> bool:
        """Whether the session in which the shard was acquired has ended. Takes no lock and waits for nothing."""
        return self.still_owner is not None and not self.still_owner()

    def heal(self) -> bool:
        """Try to make a failed log writable again; true if it is. Acknowledged records keep their offsets.

        What class `memory` had acknowledged and not written is written now. The caller holds no lock of the log.
        """
        try:
            with self.group.lock:
                if self.state.phase is not LogPhase.FAILED:
                    return self.state.reason is None
                try:
                    rebuilt = rebuild(self.writer, self.files, self.tail.cache, self.head)
                except (OSError, ForebayError) as error:
                    # Once for each kind of trouble: it is tried again and again, and only numbers change.
                    kind = re.sub(r"\d+", "", str(error))
                    if kind != self._unhealed:
                        logger.warning("%s: still read-only: %s", self.writer.place, error)
                    self._unhealed = kind
                    return False
                self._unhealed = None
                self._go_on_healed(rebuilt)
                return self.state.reason is None
        finally:
            self.group.call_back()

    def _go_on_healed(self, rebuilt: Rebuilt) -> None:
        writer, queue = self.writer, self.queue
        self.tail.head = writer.end
        writer.account()
        if not queue.is_empty:
            # The gap before it may have been in the file that failed.
            self._skipped_to(queue.first)
        queue.restart_at(writer.next, rebuilt.window)
        self._become(LogPhase.OPEN, None, None)
        self.show()
        logger.warning("%s: writable again from offset %d", writer.place, writer.next)
        for gap in rebuilt.lost:
            self._note_loss(gap, "the file that failed does not give them back, and memory has them no longer")
        self._commit()

    def attempt(self, step: Callable[[], None]) -> Exception | None:
        """Run a step that writes to the active file; why it failed, if it did. The caller holds the commit lock.

        If bytes may have reached the file by then, the log has failed too.
        """
        try:
            self._end_interrupted()
            step()
        except BaseException as error:
            if self.writer.in_doubt:
                self._fail(error)
            if not isinstance(error, OSError | ForebayError):
                raise
            logger.warning("%s: %s", self.writer.place, error)
            return error
        self.writer.account()
        return None

    # Background syncs

    def begin_background_sync(self) -> SyncTarget | None:
        """What a sync that starts now would make durable, if anything. Appends go on beside it."""
        with self.group.lock:
            if self.state.phase is not LogPhase.OPEN or self.writer.syncing:
                return None
            target = self.writer.begin_background_sync()
            # Last: an interrupt (Ctrl-C) before this leaves the log dirty.
            self.dirty_since = None
            return target

    def withdraw_background_sync(self) -> None:
        """The sync that has begun is not done: the log is as dirty as before. The caller holds the commit lock."""
        self.writer.withdraw_background_sync()
        self.note_dirty()

    def report_background_sync(self, target: SyncTarget, error: OSError | None) -> None:
        """Answer the threads that wait for this sync to return. Waits for nothing."""
        self.writer.report_background_sync(target, error)

    def end_background_sync(self, target: SyncTarget) -> None:
        """This sync has succeeded. Waits for nothing: if another thread has the log, that one notes it.

        Called by a background worker, which no interrupt (Ctrl-C) reaches.
        """
        self.report_background_sync(target, None)
        self.add_errand(self._act_on_sync)

    def fail_background_sync(self, target: SyncTarget, error: OSError) -> None:
        """This sync has failed: what it covered may never reach the disk. Waits for nothing, as `end_background_sync`.

        Until that was acted on the sync counts as under way: a thread that wants to sync the file fails with it, and
        no new file is begun.
        """
        self.report_background_sync(target, error)
        self.add_errand(self._act_on_sync)

    def _act_on_sync(self) -> None:
        """Go by the outcome of a background sync that has returned, if there is one. The caller holds the commit lock.

        Touches no file where the sync has succeeded: the thread that syncs many logs does this for each of them. A
        failure says nothing of a copy that has replaced the file meanwhile.
        """
        returned = self.writer.returned_sync
        if returned is None:
            return
        target, error = returned
        try:
            if error is None:
                self.writer.note_synced(target)
            else:
                self.fail_file(target.active, error)
        finally:
            self.writer.end_background_sync(target)

    def fail_file(self, file: ActiveFile, error: OSError) -> None:
        """A sync of `file` has failed: it cannot be trusted, unless a copy has replaced it meanwhile."""
        with self.group.lock:
            if self.state.phase is LogPhase.OPEN and file is self.writer.active:
                self.writer.distrust()
                self._fail(error)

    def _await_background_sync(self) -> None:
        """Return once no sync runs beside other work, or after a time. The caller holds no lock: appends go on."""
        self.writer.wait_for_background_sync(ROTATE_WAIT_SECONDS)
        with self.group.lock:
            self._act_on_sync()
        self.group.call_back()

    # Errands

    def add_errand(self, errand: Callable[[], None]) -> None:
        """Have something done under the commit lock without waiting for it. It must be short, and is done once.

        At once if the lock is free; else the thread that has it does it at the end of its commit. One that does not
        look any more leaves it to the next commit, or to the next call of `do_errands`, which the caller sees to.
        Called by background workers, which no interrupt (Ctrl-C) reaches.
        """
        self.errands[errand] = None
        self.do_errands()

    def do_errands(self) -> None:
        """Do what was left, unless another thread has the log: see `add_errand`."""
        if self.writer.returned_sync is not None:
            # Also if the thread that was to note it was interrupted (Ctrl-C).
            self.errands[self._act_on_sync] = None
        is_free = False
        try:
            is_free = bool(self.errands) and self.group.lock.acquire(blocking=False)
            if is_free:
                self._do_errands()
        finally:
            if is_free:
                self.group.lock.release()
        self.group.call_back()

    def _do_errands(self) -> None:
        """The caller holds the commit lock. Their trouble is not that of the caller's append."""
        for errand in list(self.errands):
            # Out before it is done: the thread that left it may have taken it back, and then it is not done.
            if self.errands.pop(errand, self) is None:
                try:
                    errand()
                except Exception:
                    logger.exception("%s: what a background worker left to do has failed", self.writer.place)

    def mark(self) -> None:
        """Write down how far the log is durable, if the file does not say so yet."""
        with self.group.lock:
            active = self.writer.active
            if active is not None and self.state.phase is LogPhase.OPEN and active.marked < self.writer.durable:
                self.attempt(self.writer.mark)
                # Of use only once it is durable; and a file with unsynced bytes keeps its descriptor.
                self.dirty_since = self.dirty_since or self.writer.clock.monotonic()
                self.show()

    # Reading

    @property
    def head(self) -> int:
        """Readers see everything below."""
        return self.tail.head

    def read(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page | None:
        """Records from `offset` on, at least one if there is any, up to about `bytes_max`.

        `None` where neither memory nor a file has it: if anything does, it is the history.
        """
        self.check_open()
        tail = self.tail
        if offset >= tail.head:
            # Read your write.
            self.bring_up()
        head = tail.head
        if offset >= head:
            return Page([], [], offset)
        page = tail.read(offset, bytes_max)
        if page is None:
            page = self.files.read(offset, bytes_max)
        return None if page is None else page.clipped(head)

    def read_cached(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page | None:
        """What memory has from `offset` on; an empty page at the end, `None` where `read` has to be asked.

        For event loops: takes the lock of the tail cache alone, under which there is no input or output. What takes
        long to decompress is left to `read`.
        """
        tail = self.tail
        head = tail.head
        if self.closed or (offset >= head and self.policy.acks_in_queue and head < self.queue.next):
            return None
        if offset >= head:
            return Page([], [], offset)
        page = tail.read(offset, bytes_max, unpack_max=LOOP_BYTES_MAX)
        return None if page is None else page.clipped(head)

    def wait(self, offset: int, timeout: float | None) -> bool:
        """Wait until a record at or above `offset` may be read; false when the time is up or the log closed."""
        self.bring_up()
        return self.tail.wait(offset, timeout)

    def offset_at_time(self, timestamp: int, start: int = 0) -> int | None:
        """The first record at or after the time, in files that reach beyond `start`; `None` if there is none."""
        self.check_open()
        self.bring_up()
        found = self.files.offset_at_time(timestamp, start)
        return found if found is not None and found < self.head else None

    def damage_at(self, offset: int) -> Gap | None:
        """The damaged range of the files that covers `offset`, if one does."""
        return self.files.damage_at(offset)

    def show(self) -> None:
        """Show other processes, and a later recovery, how far the log is published and durable."""
        self.tail.show(self.writer.active, self.writer.durable, doubtful=self.state.phase is LogPhase.FAILED)

    def show_synced(self) -> None:
        """As `show`, after a background sync, unless another thread has the log: its commit shows it."""
        is_free = False
        try:
            is_free = self.group.lock.acquire(blocking=False)
            if is_free and not self.closed:
                self.show()
        finally:
            if is_free:
                self.group.lock.release()
        self.group.call_back()

    def show_replaced(self, file: LogFile) -> None:
        """A file that is not written any more has other bytes under its name: show that, if it is the newest of all.

        After a recovery it may be, until the first append begins another. Other processes read the newest up to the
        byte that they are shown. Called by the thread that seals, which holds no lock of the log.
        """
        with self.group.lock:
            if self.writer.active is None and not self.closed and self.files.all[-1] is file:
                self.tail.live.publish(file, self.writer.place.epoch, self.writer.durable)

    def show_end(self) -> None:
        """Publish the end of what is written, where no record was: readers go on there."""
        self.tail.head = self.writer.end
        self.show()

    def wake(self) -> None:
        """Wake the threads that wait for more; the wakers are due at the next `call_back`, without a lock."""
        self.tail.wake()
        if self.tail.wakers:
            self.queue.due.append(Waking(self.tail.wakers, self.writer.place))

    def bring_up(self) -> None:
        """Of class memory an append is acknowledged in the queue: it is published before a reader asks for it.

        Waits for a commit that another thread has begun; the caller holds no lock below the commit lock.
        """
        if not self.policy.acks_in_queue:
            return
        if not self.queue.is_empty or (self.tail.head < self.queue.next and not self.group.is_inside()):
            self.commit()

    def offsets(self) -> Offsets:
        """The watermarks now."""
        floors, durable = self.writer.removals.floor, min(self.writer.durable, self.head)
        return Offsets(floors.earliest, floors.evict_floor, durable, exported=0, next=self.queue.next)

    # Ending

    def flush(self) -> None:
        """Everything appended so far is synced on return, whatever the class; else `Unavailable`.

        Waits for a background sync that began before, and fails if that did: the kernel reports a lost write once.
        `DataLoss` if acknowledged records are lost for good: once, to every call that began before it was said.
        """
        said = self._losses_said
        self.commit()
        if self.state.phase is LogPhase.FAILED:
            self.heal()
        self._await_background_sync()
        with self.group.lock:
            self.check_writable()
            trouble = self.state.reason or self.stall or self.attempt(self.writer.sync)
            if trouble is not None:
                why = self.state.reason or trouble
                raise Unavailable(f"{self.writer.place}: not everything could be made durable ({why})")
            self.dirty_since = None
            self.show()
            if self._losses > said:
                self._losses_said = self._losses
                raise self._loss()

    def rotate(self) -> None:
        """Close the active file, if it has records, and begin a new one."""
        self.commit()
        self._await_background_sync()
        with self.group.lock:
            self.check_writable()
            self._begin_file(self.rotate_locked)

    def _begin_file(self, step: Callable[[], None]) -> None:
        syncing = "a sync is under way" if self.writer.syncing else None
        trouble = self.state.reason or syncing or self.attempt(step)
        if trouble is not None:
            why = self.state.reason or trouble
            raise Unavailable(f"{self.writer.place}: no new log file could be begun ({why}); try again")

    def close(self, *, deleting: bool = False) -> None:
        """Write and sync everything, say in the log that it ended in order, give files back. Harmless when repeated.

        `DataLoss` once all is closed if records were acknowledged in this life of the log and are gone. Not when
        `deleting`: then they were to go.
        """
        if self.closed:
            return
        self.commit()
        if self.state.phase is LogPhase.FAILED:
            self.heal()
        with self.group.lock:
            place = self.writer.place
            refusal = Closed(f"{place} is closed") if self.fenced is None else self._fenced(self.fenced).later
            self.queue.refusal = refusal
            if self.policy.acks_in_queue:
                # Else they are lost, and they are no more than a queue holds.
                self._space.give_up()
            # What came in since the commit above: no other thread will write it now.
            self._commit()
            if not self.queue.is_empty:
                self._drop_queued(refusal, deleting=deleting)
            reason = self.state.reason
            if reason is None and self.attempt(self.writer.finish) is None and self.writer.touched:
                self.show()
            # Before it counts as closed: a call that repeats an interrupted one (Ctrl-C) does nothing after that.
            self.tail.end()
            loss = self._loss() if self.lost is not None and not deleting else None
            self._become(LogPhase.CLOSED, self.state.reason or (str(loss) if loss is not None else None), refusal)
            for file in self.files.all:
                file.close()
            self.tail.live.close()
        self.wake()
        self.group.call_back()
        if loss is not None:
            raise loss

    def _drop_queued(self, refusal: ForebayError, *, deleting: bool) -> None:
        """The log closes, and what is acknowledged could not be written: it is lost, and the log says where."""
        queue, stall = self.queue, self.stall
        if not deleting:
            why = f"the log was closed before they could be written ({stall.reason if stall else self.state.reason})"
            self._note_loss(Gap(queue.first, queue.next, Reason.LOST), why)
        queue.fail(refusal, refusal, self._skipped_to(queue.next))
        self.stall = None
