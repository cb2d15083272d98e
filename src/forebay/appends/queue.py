"""What waits to be written: offsets are assigned here, in order, before any byte is made.

Knows no files. Single appends are merged into shared frames, an append of many records is a frame
of its own, so an append is never split. Each append enters by one list operation that also moves
the next offset: an exception at any instant (Ctrl-C) leaves it wholly in or wholly out.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from forebay.appends.budget import STEP_BYTES, QueueBudget
from forebay.appends.callbacks import Answered
from forebay.appends.producer_window import ProducerWindow, Recalled, check_content, check_repeat
from forebay.appends.ticket import Ticket
from forebay.appends.waiting import INSIDE, is_inside
from forebay.errors import ForebayError, Throttled, Unavailable
from forebay.format.columns.rows import ColumnBytes, Columns, content_checksum, encode_columns, encode_row
from forebay.format.control.frames import WindowEntry
from forebay.locks import Rank, RankedRLock
from forebay.records import Headers, Run
from forebay.settings import WalSettings

T = TypeVar("T")

ROW_BYTES = 16
"""What a record costs in a frame beside its own bytes: timestamp and one offset, roughly."""


def record_bytes(value: bytes | None, key: bytes | None, tag: str | None, headers: Headers) -> int:
    """About what a record takes in a frame; never less for the bytes of the record itself."""
    size = ROW_BYTES
    if value is not None:
        size += len(value)
    if key is not None:
        size += len(key)
    if tag is None and not headers:
        return size
    if tag is not None:
        size += len(tag.encode()) + 4
    for name, content in headers:
        size += len(name.encode()) + len(content or b"") + 8
    return size


class Producing(NamedTuple):
    """Who appends, for idempotence; see `ProducerWindow.expect`."""

    producer: int
    sequence: int
    previous: int | None = None
    """The sequence of the producer's last append to the shard; `None` for the one before `sequence`."""
    generation: int | None = None
    """Of an append that a hash has placed and that is looked for before: by which generation of partitions that was."""


class ProducedAppend(NamedTuple):
    """An idempotent append that waits, and the checksum of its records."""

    ticket: Ticket
    checksum: int


class QueuedRecord(NamedTuple):
    """A single record in the queue."""

    value: bytes | None
    key: bytes | None
    tag: str | None
    headers: Headers
    timestamp: int
    producing: Producing | None
    ticket: Ticket


class PendingFrame:
    """One frame to be: single records that share it, or the columns of one larger append."""

    __slots__ = ("base", "columns", "entries", "produced", "producing", "size", "ticket")

    def __init__(
        self,
        base: int,
        columns: ColumnBytes | None = None,
        producing: Producing | None = None,
        ticket: Ticket | None = None,
    ) -> None:
        self.base = base
        self.entries: list[QueuedRecord] = []
        self.columns = columns
        self.producing = producing
        self.produced = producing is not None
        """Some append in it may be idempotent."""
        self.ticket = ticket
        self.size = columns.size if columns is not None else 0

    @property
    def end(self) -> int:
        return self.base + (len(self.entries) if self.columns is None else self.columns.count)

    def encode(self) -> ColumnBytes:
        """The columns of all records of the frame."""
        if self.columns is not None:
            return self.columns
        if len(self.entries) == 1:
            return encode_row(self.entries[0][:5])
        values, keys, tags, headers, timestamps, _, _ = zip(*self.entries, strict=True)
        return encode_columns(Columns(values=values, keys=keys, tags=tags, headers=headers, timestamps=timestamps))

    def runs(self) -> list[Run]:
        """Who appended what, in order; empty if no append of the frame is idempotent."""
        if self.columns is not None:
            return [Run(self.columns.count, *self.producing[:2])] if self.producing else []
        if not self.produced or not any(entry.producing for entry in self.entries):
            return []
        return [Run(1, *(entry.producing or (0, 0))[:2]) for entry in self.entries]

    def tickets(self) -> list[Ticket]:
        """The appends in it, in offset order."""
        return [self.ticket] if self.ticket is not None else [entry.ticket for entry in self.entries]

    def below(self, end: int) -> PendingFrame:
        """The single records in it below `end`, as a frame of their own."""
        return self._of(self.base, self.entries[: end - self.base])

    def from_on(self, start: int) -> PendingFrame:
        """The single records in it from `start` on, as a frame of their own."""
        return self._of(start, self.entries[start - self.base :])

    def _of(self, base: int, entries: list[QueuedRecord]) -> PendingFrame:
        part = PendingFrame(base)
        part.entries, part.produced = entries, self.produced
        part.size = sum(record_bytes(*entry[:4]) for entry in entries)
        return part


class AppendQueue:
    """The bounded queue of a shard."""

    def __init__(
        self,
        next_offset: int,
        window: ProducerWindow,
        settings: WalSettings,
        budget: QueueBudget,
        generation: int = 0,
    ) -> None:
        """`budget` bounds this queue and all others of the process together; for `generation` see `recall`."""
        self.lock = RankedRLock(Rank.QUEUE, "appends.queue")
        """Its owner is known, so that a signal handler that comes in between is refused. Never entered twice."""
        self.is_inside = is_inside(self.lock)
        self.due: deque[Answered] = deque()
        """Answered appends whose callbacks run once no lock is held."""
        self.window = window
        self.taken: list[PendingFrame] = []
        self._frames: list[PendingFrame] = [PendingFrame(next_offset)]
        self._settings = settings
        self.bytes = 0
        """What waits, in bytes. Changed by the queue alone, and no property: each append asks for it."""
        self._share = budget.share()
        self._allowed = 0
        """How much of the share is for what waits; the rest is for `taken`."""
        self._passing: int | None = None
        """The offset of the record that is being written without having waited here."""
        self._queued: dict[int, dict[int, ProducedAppend]] = {}
        self._failing: list[tuple[list[PendingFrame], ForebayError | None]] = []
        """Appends whose outcome is known and not said yet; without an error where they are acknowledged and wait on."""
        self._kept: int | None = None
        """The first record that a commit could not write, and that waits on: until it is written, what is taken counts
        as waiting. Else each commit that fails would let in as much again."""
        self.refusal: ForebayError | None = None
        """Every append is answered with this error. The owner of the queue assigns it, in one statement with its own
        state; what was queued a moment before is still written or failed by the owner's next step."""
        self._held: ForebayError | None = None
        """The same while the log pauses, whatever else is the case."""
        self._looked = generation
        """The newest generation of partitions whose appends were looked for here, or that the shard knows."""

    @property
    def next(self) -> int:
        """The next offset to assign."""
        return self._frames[-1].end

    @property
    def first(self) -> int:
        """The first offset whose append is not answered; the next one to assign if there is none."""
        with self.lock:
            return (self.taken or self._frames)[0].base if self._passing is None else self._passing

    @property
    def is_empty(self) -> bool:
        return self._frames[-1].end == self._frames[0].base

    def if_idle_at(self, offset: int, step: Callable[[], T]) -> T | None:
        """What `step` gives, run before the next append is queued; `None` unless that gets `offset` and none waits.

        For the thread that holds the commit lock. `step` must not wait.
        """
        with self.lock:
            is_idle = self.is_empty and not self.taken and not self._failing and self._passing is None
            return step() if is_idle and self.next == offset else None

    def stage_one(self, entry: QueuedRecord, size: int) -> Ticket:
        """Queue one record. On return it has its offset (`ticket.offset`); nothing is written yet.

        A repeat of an append still on its way is answered together with it; one of an acknowledged append
        is answered on return. Raises `QueueFull`, the refusal of the shard, or `Conflict` for a sequence
        out of step.
        """
        if self.is_inside():
            raise Unavailable(INSIDE)
        with self.lock:
            if entry.producing is None:
                if self.bytes or self.refusal is not None or self._held is not None or size > STEP_BYTES:
                    self._admit(1, size)
                return self._enter(entry, size)
            self._refuse()
            append = ProducedAppend(entry.ticket, content_checksum(encode_row(entry[:5])))
            if not self._repeats(entry.producing, append, 1):
                self._admit(1, size)
                return self._enter_producing(entry.producing, append, entry, size)
        return _answered(entry.ticket)

    def stage_many(self, columns: ColumnBytes, producing: Producing | None, ticket: Ticket) -> Ticket:
        """Queue many records as one frame of their own, all or none; else as `stage_one`."""
        if self.is_inside():
            raise Unavailable(INSIDE)
        with self.lock:
            if producing is None:
                self._admit(columns.count, columns.size)
                return self._enter_columns(columns, None, ticket)
            self._refuse()
            append = ProducedAppend(ticket, content_checksum(columns))
            if not self._repeats(producing, append, columns.count):
                self._admit(columns.count, columns.size)
                return self._enter_producing(producing, append, columns, columns.size)
        return _answered(ticket)

    def recall(self, producing: Producing) -> Recalled | None:
        """What is known of a producer and of this append, on its way or acknowledged; `None` if nothing is.

        From now on an append of an older generation of partitions than this one is refused here, unless it repeats:
        the append that is looked for cannot come in behind the look. `Conflict` where damage may have taken it.
        """
        if self.is_inside():
            raise Unavailable(INSIDE)
        with self.lock:
            self._looked = max(self._looked, producing.generation or 0)
            queued = self._queued.get(producing.producer, {})
            known = self.window.recall(producing.producer, producing.sequence, next(reversed(queued), None))
            original = queued.get(producing.sequence)
            return known if known is None or original is None else known._replace(records=original.ticket.count)

    def adopt_generation(self, generation: int) -> None:
        """Refuse appends that an older generation of partitions has placed, unless they repeat."""
        with self.lock:
            self._looked = max(self._looked, generation)

    def pass_by(self, offset: int) -> bool:
        """Give `offset` to a record that is written at once; false if it must wait here like others, or be refused.

        For the committer. It calls `passed` once the record is published, or `fail`.
        """
        with self.lock:
            frame = self._frames[0]
            if frame.base != offset or frame.entries or len(self._frames) > 1 or self.taken or self._failing:
                return False
            if self.refusal is not None or self._held is not None:
                return False
            self._passing = offset
            frame.base = offset + 1
            return True

    def passed(self) -> None:
        """The record that did not wait here is published."""
        self._passing = None

    def take(self, end_max: int | None = None) -> None:
        """Move everything that waits to `taken`, for the committer, which empties it with `acknowledge`.

        Nothing if it reaches above `end_max`.
        """
        if self._failing:
            self._finish_failed()
        with self.lock:
            waiting = self._frames
            if end_max is not None and waiting[-1].end > end_max:
                return
            if len(waiting) > 1 or not waiting[0].entries:
                waiting = [frame for frame in waiting if frame.entries or frame.columns is not None]
                following = self._frames[-1].end
            else:
                following = waiting[0].base + len(waiting[0].entries)
            self.taken, self._frames = waiting, [PendingFrame(following)]
            if self._kept is None:
                self.bytes = self._allowed = 0

    def take_below(self, end: int) -> None:
        """Move the appends that end at or below `end` to `taken`; the others wait on. Else as `take`."""
        if self._failing:
            self._finish_failed()
        with self.lock:
            taken, waiting = _divided(self._frames, end)
            self.taken, self._frames = taken, waiting or [PendingFrame(self._frames[-1].end)]
            if self._kept is None:
                size = sum(frame.size for frame in waiting)
                self.bytes, self._allowed = size, min(size, self._allowed)

    def acknowledge(self) -> None:
        """All of `taken` is published: remember its producers and acknowledge. May be repeated if it was cut short."""
        with self.lock:
            for frame in self.taken:
                if frame.produced:
                    self._remember(frame)
            if self._kept is not None and self.taken:
                size = sum(frame.size for frame in self._frames)
                self._kept, self.bytes, self._allowed = None, size, min(size, self._allowed)
            if self._share.bytes != self._allowed:
                self._share.budget.shrink(self._share, self._allowed)
        for frame in self.taken:
            if frame.ticket is not None:
                frame.ticket.finish(None, self.due)
            for entry in frame.entries:
                entry.ticket.finish(None, self.due)
        self.taken = []

    def fail(
        self, written: ForebayError, queued: ForebayError, next_offset: int, *, kept_end: int | None = None
    ) -> None:
        """Fail what was taken with one error and what still waits with another; go on at `next_offset`.

        Appends that end at or below `kept_end` do not fail: they are acknowledged and wait on, at their offsets, and
        the queue goes on behind them.
        """
        with self.lock:
            kept, taken = _divided(self.taken, kept_end)
            also_kept, waiting = _divided(self._frames, kept_end)
            kept += also_kept
            size = sum(frame.size for frame in kept)
            allowed = min(size, self._share.bytes)
            following = PendingFrame(kept[-1].end if kept else next_offset)
            by_producer = _by_producer(kept, self._queued)
            # One statement: an exception (Ctrl-C) finds every append either waiting or failing, never in between.
            (
                self._failing,
                self.taken,
                self._frames,
                self._kept,
                self._queued,
                self.bytes,
                self._allowed,
                self._passing,
            ) = (
                [*self._failing, (taken, written), (waiting, queued), (kept, None)],
                [],
                [*kept, following],
                kept[0].base if kept else None,
                by_producer,
                size,
                allowed,
                None,
            )
            self._share.budget.shrink(self._share, allowed)
        self._finish_failed()

    def _finish_failed(self) -> None:
        """Answer the appends that have failed, or wait on. Cut short, the next commit answers the rest."""
        while self._failing:
            frames, error = self._failing[0]
            for frame in frames:
                for ticket in frame.tickets():
                    ticket.finish(error, self.due)
            self._failing = self._failing[1:]

    def last_sequence(self, producer: int) -> int | None:
        """The newest sequence of a producer, of what waits or else of what was written."""
        with self.lock:
            queued = self._queued.get(producer)
            return next(reversed(queued)) if queued else self.window.last_sequence(producer)

    def hold(self, refusal: ForebayError | None) -> None:
        """Answer appends with this error, beside `refusal`, for a caller that lets the log pause; `None` ends it."""
        with self.lock:
            self._held = refusal

    def pause(self, pause: Paused) -> None:
        """Let appends wait for a while. Raises why they are refused, if they are for a reason other than a pause."""
        with self.lock:
            refusal = self.refusal or self._held
            if refusal is not None and not isinstance(refusal, Paused):
                raise copy.copy(refusal)
            self._held = pause

    def resume(self) -> None:
        """End the pause; whatever else holds appends back still does."""
        with self.lock:
            if self.is_paused:
                self._held = None

    @property
    def is_paused(self) -> bool:
        return isinstance(self._held, Paused)

    def restart_at(self, next_offset: int, window: ProducerWindow | None = None) -> None:
        """Go on at this offset, with what the log remembers of producers if that changed.

        Where acknowledged appends wait on, the first of them is at this offset.
        """
        with self.lock:
            if self.is_empty:
                self._frames = [PendingFrame(next_offset)]
            assert self._frames[0].base == next_offset, "what waits on keeps its offsets"
            if window is not None:
                self.window.restore(window)

    def _refuse(self) -> None:
        """Raise why the shard takes no appends, if so."""
        refusal = self.refusal or self._held
        if refusal is not None:
            raise copy.copy(refusal)

    def _admit(self, count: int, size: int) -> None:
        """See that there is room, and charge the budget, for an append that enters now: not for one that repeats."""
        if self.refusal is not None or self._held is not None:
            self._refuse()
        waiting = self._frames[-1].end - (self._frames[0].base if self._kept is None else self._kept)
        if waiting and (
            waiting + count > self._settings.queue_records_max or self.bytes + size > self._settings.queue_bytes_max
        ):
            raise QueueFull(
                f"{waiting} records ({self.bytes} bytes) wait to be written: the queue is full; try again",
                records=waiting,
                size=self.bytes,
            )
        if self.bytes + size > self._allowed and (waiting or size > STEP_BYTES):
            self._charge(waiting, size)

    def _charge(self, waiting: int, size: int) -> None:
        """Have the share cover another append; `QueueFull` if others wait here and the process holds too much."""
        share = self._share
        more = max(self.bytes + size - self._allowed, STEP_BYTES)
        if not share.budget.grow(share, more, always=not waiting):
            raise QueueFull(
                f"{waiting} records wait to be written here, and the append queues of this process hold "
                f"runtime.queue_bytes_max ({share.budget.bytes_max} bytes) together: try again",
                records=waiting,
                size=self.bytes,
            )
        self._allowed += more

    def _enter(self, entry: QueuedRecord, size: int) -> Ticket:
        frame = self._frames[-1]
        if frame.columns is not None or frame.size + size > self._settings.batch_bytes_max:
            frame = PendingFrame(frame.end)
            self._frames.append(frame)
        ticket = entry.ticket
        ticket.offset = frame.base + len(frame.entries)
        ticket.count = 1
        if entry.producing is not None:
            frame.produced = True
        frame.entries.append(entry)
        frame.size += size
        self.bytes += size
        return ticket

    def _enter_columns(self, columns: ColumnBytes, producing: Producing | None, ticket: Ticket) -> Ticket:
        ticket.offset = self._frames[-1].end
        ticket.count = columns.count
        self._frames.append(PendingFrame(ticket.offset, columns, producing, ticket))
        self.bytes += columns.size
        return ticket

    def _enter_producing(
        self, producing: Producing, append: ProducedAppend, content: QueuedRecord | ColumnBytes, size: int
    ) -> Ticket:
        queued = self._queued.setdefault(producing.producer, {})
        try:
            queued[producing.sequence] = append
            if isinstance(content, QueuedRecord):
                return self._enter(content, size)
            return self._enter_columns(content, producing, append.ticket)
        except BaseException:
            if append.ticket not in self._frames[-1].tickets():
                queued.pop(producing.sequence, None)
            raise

    def _repeats(self, producing: Producing, append: ProducedAppend, count: int) -> bool:
        """False for the producer's next append; a repeat gets its offset or follows the original."""
        queued = self._queued.get(producing.producer, {})
        original = queued.get(producing.sequence)
        if original is not None:
            check_repeat(producing.producer, producing.sequence, original.ticket.count, count)
            check_content(producing.producer, producing.sequence, original.checksum, append.checksum)
            original.ticket.follow(append.ticket)
            return True
        # Sequences rise, so the one queued last is the highest.
        offset = self.window.expect(*producing[:3], next(reversed(queued), None), count, append.checksum)
        if offset is None:
            check_generation(producing, self._looked)
            return False
        append.ticket.offset = offset
        return True

    def _remember(self, frame: PendingFrame) -> None:
        offset = frame.base
        for run in frame.runs():
            if run.producer:
                last = self.window.last_sequence(run.producer)
                queued = self._queued.get(run.producer, {})
                if last is None or last < run.sequence:
                    append = queued.get(run.sequence)
                    checksum = None if append is None else append.checksum
                    self.window.add(WindowEntry(run.producer, run.sequence, 1, run.count, offset), checksum)
                queued.pop(run.sequence, None)
                if not queued:
                    self._queued.pop(run.producer, None)
            offset += run.count


def check_generation(producing: Producing, newest: int) -> None:
    """`Unavailable` for an append that a hash has placed among fewer partitions than there are.

    A repeat of it, placed by all of them, may have been looked for here before, and not been found.
    """
    if producing.generation is not None and producing.generation < newest:
        raise Unavailable(
            f"partitions were added to the topic while the append of producer {producing.producer} with sequence "
            f"{producing.sequence} was on its way: nothing was done; send it again"
        )


def _divided(frames: list[PendingFrame], end: int | None) -> tuple[list[PendingFrame], list[PendingFrame]]:
    """The appends that end at or below `end`, and the others; empty frames left out."""
    below: list[PendingFrame] = []
    above: list[PendingFrame] = []
    for frame in frames:
        if frame.end == frame.base:
            continue
        if end is None or frame.base >= end:
            above.append(frame)
        elif frame.end <= end:
            below.append(frame)
        elif frame.columns is not None:
            above.append(frame)
        else:
            below.append(frame.below(end))
            above.append(frame.from_on(end))
    return below, above


def _by_producer(
    frames: list[PendingFrame], queued: dict[int, dict[int, ProducedAppend]]
) -> dict[int, dict[int, ProducedAppend]]:
    """Those of the queued appends that are in the frames, by producer and sequence."""
    found: dict[int, dict[int, ProducedAppend]] = {}
    for frame in frames:
        for run in frame.runs() if frame.produced else ():
            if run.producer:
                found.setdefault(run.producer, {})[run.sequence] = queued[run.producer][run.sequence]
    return found


def _answered(ticket: Ticket) -> Ticket:
    """Answer a repeat whose original is acknowledged; outside the lock, for its callback may append."""
    if ticket.count == 0:
        ticket.finish()
    return ticket


class QueueFull(Throttled):
    """No room now: the caller may help to write what waits, then try again. `records` and `size` (bytes) wait."""

    def __init__(self, *args: object, records: int | None = None, size: int | None = None) -> None:
        super().__init__(*args)
        self.records = records
        self.size = size


class Paused(QueueFull):
    """No room for a while: the log is about to go on elsewhere, and nothing waits to be written."""
