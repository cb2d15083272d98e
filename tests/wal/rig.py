"""One shard on a disk, driven by hand: every append and every answer is noted in the trace of the disk."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final, Generic, Self, TypeVar
from zlib import crc32

from forebay.appends.producer_window import ProducerWindow
from forebay.appends.queue import Producing, QueuedRecord, record_bytes
from forebay.appends.ticket import Ticket
from forebay.disk import Disk
from forebay.errors import DataLoss, ForebayError, Indeterminate
from forebay.format.columns.rows import Columns, Row, encode_columns
from forebay.format.metadata.descriptor import ShardState
from forebay.pages import Page
from forebay.settings import WalSettings
from forebay.shard import SegmentShard
from forebay.shard.tiers import NoHistory, Tiers
from forebay.testing.checks.history import (
    NOTE,
    AppendAnswered,
    AppendOutcome,
    Begun,
    Crashed,
    Event,
    Lost,
    Reading,
    ReadSeen,
    ShardEvents,
    Synced,
    read_everything,
)
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.crashes import CrashState
from forebay.testing.simulated.damage import CrashDamage
from forebay.testing.simulated.disk import SimulatedDisk
from forebay.testing.simulated.trace import Note
from forebay.topics import Durability, ShardRef, TopicSpec
from forebay.wal.log import Wal
from forebay.wal.recovery.resume import Start, resume
from forebay.wal.recovery.survey import Survey, survey
from forebay.wal.sealing import Sealer
from forebay.wal.upkeep import Upkeep
from forebay.wal.writer import ShardPlace

D = TypeVar("D", bound=Disk)
TOPIC_ID: Final = "0123456789abcdef0123456789abcdef"
ROOT: Final = "/s"
DIRECTORY: Final = f"{ROOT}/shard"
SMALL: Final = WalSettings(
    free_bytes_min=0, rotate_bytes_max=4096, reserve_records_min=8, cache_bytes_max=4096, producer_appends_max=4
)


def simulated() -> SimulatedDisk:
    """An empty disk with a place for the shard."""
    return SimulatedDisk(directories=[ROOT])


def acquired(epoch: int) -> ShardState:
    """The shard's recorded state before it is acquired in `epoch`."""
    if epoch == 1:
        return ShardState(incarnation=TOPIC_ID)
    return ShardState(incarnation=TOPIC_ID, epoch=epoch - 1, owner="gone", holder=ROOT, holder_since=1)


def spec_of(durability: Durability) -> TopicSpec:
    """A topic of one partition."""
    return TopicSpec(namespace="shop", topic="orders", topic_id=TOPIC_ID, partitions=1, durability=durability)


class Rig(Generic[D]):
    """The shard, open in one epoch after the other."""

    def __init__(
        self,
        disk: D,
        durability: Durability,
        *,
        epoch: int = 0,
        settings: WalSettings = SMALL,
        directory: str = DIRECTORY,
        seed: str = "",
    ) -> None:
        self.disk = disk
        self.durability = durability
        self.epoch = epoch
        self.settings = settings
        self.directory = directory
        self.clock = ManualClock(seed=crc32(f"{epoch} {seed}".encode()))
        self.events: list[Event] = []
        self._attempts = itertools.count(epoch * 1_000_000)
        self.shard: SegmentShard

    @property
    def wal(self) -> Wal:
        return self.shard.wal

    def open(self) -> Self:
        """Acquire the shard in a new epoch and recover it."""
        self.epoch += 1
        self.shard = SegmentShard.open(
            ShardRef(spec_of(self.durability), 0),
            self.directory,
            self.settings,
            disk=self.disk,
            clock=self.clock,
            before=acquired(self.epoch),
            epoch=self.epoch,
            holder=ROOT,
        )
        return self

    def note(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(self.disk, SimulatedDisk):
            self.disk.note(NOTE, event)

    def append(self, count: int = 1, *, producing: tuple[int, int] | None = None, size: int = 0) -> AppendOutcome:
        """Append and wait, as a topic does."""
        if count == 1 and producing is None:
            return self.append_one(size)
        attempt, ticket = self.stage(count, producing=producing, size=size)
        return self.hear(attempt, ticket)

    def append_one(self, size: int = 0) -> AppendOutcome:
        """Append one record, which need not wait in the queue."""
        attempt = next(self._attempts)
        value = value_of(attempt, 0, None, size)
        self.note(Begun(attempt, (value,), producing=None))
        row = (value, None, None, (), self.clock.now_ms())
        reported = AppendAnswered(attempt, AppendOutcome.REFUSED)
        try:
            reported = AppendAnswered(attempt, AppendOutcome.ACKED, self.append_row(row))
        except Indeterminate:
            reported = AppendAnswered(attempt, AppendOutcome.INDETERMINATE)
        except ForebayError:
            pass
        self.note(reported)
        return reported.outcome

    def append_row(self, row: Row) -> int:
        """Through the shard."""
        return self.shard.append(row, record_bytes(*row[:4]), None)

    def group(self, *counts: int) -> list[AppendOutcome]:
        """Several appends, one commit."""
        staged = [self.stage(count) for count in counts]
        return [self.hear(attempt, ticket) for attempt, ticket in staged]

    def stage(
        self, count: int = 1, *, producing: tuple[int, int] | None = None, size: int = 0
    ) -> tuple[int, Ticket | ForebayError]:
        """Queue an append of unique values."""
        attempt = next(self._attempts)
        values = tuple(value_of(attempt, place, producing, size) for place in range(count))
        self.note(Begun(attempt, values, producing=producing))
        try:
            return attempt, stage(self.wal, values, producing, self.clock.now_ms())
        except ForebayError as error:
            return attempt, error

    def hear(self, attempt: int, ticket: Ticket | ForebayError) -> AppendOutcome:
        """Wait for the answer and note it."""
        reported = AppendAnswered(attempt, AppendOutcome.REFUSED)
        if isinstance(ticket, Ticket):
            try:
                reported = AppendAnswered(attempt, AppendOutcome.ACKED, self.wal.acknowledge(ticket))
            except Indeterminate:
                reported = AppendAnswered(attempt, AppendOutcome.INDETERMINATE)
            except ForebayError:
                pass
        self.note(reported)
        return reported.outcome

    def flush(self) -> None:
        """Make everything durable and note that it is, also what class memory had only queued."""
        self.wal.flush()
        self.note(Synced(self.wal.queue.next))

    def close(self) -> None:
        """Close the shard and note what it says is lost."""
        try:
            self.shard.upkeep.close()
        except DataLoss as loss:
            assert loss.start is not None and loss.stop is not None
            self.note(Lost(loss.start, loss.stop))

    def promise(self) -> None:
        """Note what the log says of itself: everything below `durable` survives a power loss."""
        self.note(Synced(self.wal.offsets().durable))

    def see(self) -> Reading:
        """Read everything, as some reader may at any time."""
        reading = self.reading()
        self.note(ReadSeen(tuple((offset, value) for offset, value in reading.records if value is not None)))
        return reading

    def read(self, offset: int, bytes_max: int = 1 << 20) -> Page:
        """A page of what memory and the files have, as a shard without history shows it."""
        return Tiers(self.wal, NoHistory()).read(offset, bytes_max)

    def reading(self, bytes_max: int = 1 << 20) -> Reading:
        """What is there now."""
        return read_everything(lambda offset: self.read(offset, bytes_max), self.wal.offsets().next)

    def history(self) -> ShardEvents:
        """Everything noted so far, earlier lives on this disk included."""
        notes = self.disk.trace.notes() if isinstance(self.disk, SimulatedDisk) else ()
        return history_of(self.durability, notes)


class BareRig(Rig[D]):
    """The log alone, begun by hand: where it goes on is given, and whose it is."""

    lease = True
    """What the log receives when it asks whether it still has an owner."""

    def append_row(self, row: Row) -> int:
        """There is no shard around the log."""
        size = record_bytes(*row[:4])
        if self.wal.policy.acks_in_queue:
            return self.wal.acknowledge(self.wal.stage_one(QueuedRecord(*row, None, Ticket()), size))
        return self.wal.append(row, size)

    def surveyed(self) -> Survey:
        return survey(self.disk, self.directory, self.settings)

    def begin(
        self,
        start: Start | None = None,
        *,
        facts: Survey | None = None,
        reserve: Callable[[int], int] | None = None,
        reserved_end: int = 0,
        window: ProducerWindow | None = None,
        on_dirty: Callable[[], None] = lambda: None,
    ) -> Self:
        """Begin in a new epoch; unless the caller says otherwise exactly where the local log ends."""
        self.epoch += 1
        found = facts if facts is not None else self.surveyed()
        self.log = resume(
            found,
            start if start is not None else Start(next_offset=found.end),
            ShardPlace(self.directory, TOPIC_ID, 0, self.epoch, "shop/orders[0]"),
            self.settings,
            disk=self.disk,
            clock=self.clock,
            durability=self.durability,
            reserve=reserve,
            reserved_end=reserved_end,
            window=window,
            still_owner=lambda: self.lease,
            on_dirty=on_dirty,
        )
        self.upkeep = Upkeep(self.log, Sealer(self.disk, self.settings, None))
        return self

    @property
    def wal(self) -> Wal:
        return self.log

    def fill(self, files: int, records: int = 3) -> None:
        """So many sealed files of so many records each, and an active one with one record."""
        for _ in range(files):
            for _ in range(records):
                self.append()
            self.wal.rotate()
        self.append()
        self.flush()
        self.upkeep.seal_rotated()

    def reading_from(self, start: int) -> Reading:
        """What is there now at `start` and behind it."""
        return read_everything(self.read, self.wal.offsets().next, start)


def value_of(attempt: int, place: int, producing: tuple[int, int] | None, size: int) -> bytes:
    """Unique to the append; equal for repeats of one (producer, sequence)."""
    name = f"p{producing[0]}s{producing[1]}" if producing is not None else f"a{attempt}"
    return f"{name}.{place}".encode().ljust(size, b".")


def stage(wal: Wal, values: Sequence[bytes], producing: tuple[int, int] | None, now_ms: int) -> Ticket:
    """Queue one append, of one record or of many."""
    ticket = Ticket()
    who = Producing(*producing) if producing is not None else None
    if len(values) == 1:
        return wal.stage_one(QueuedRecord(values[0], None, None, (), now_ms, who, ticket), len(values[0]) + 16)
    return wal.stage_many(encode_columns(Columns(values=values, timestamps=[now_ms] * len(values))), who, ticket)


def history_of(durability: Durability, notes: Sequence[Note], *, extra: Sequence[Event] = ()) -> ShardEvents:
    """The history that the notes of a trace show."""
    events: list[Event] = []
    for note in notes:
        if note.kind == NOTE:
            events.append(note.payload)  # type: ignore[arg-type]  # only `Rig.note` writes these
        elif note.kind == "crash":
            events.append(Crashed(note.payload != CrashDamage.KILLED.value))
    return ShardEvents(durability, [*events, *extra])


def after(
    state: CrashState, durability: Durability, settings: WalSettings = SMALL, epoch: int = 10
) -> Rig[SimulatedDisk]:
    """A new process on what a crash left."""
    return Rig(state.disk(), durability, epoch=epoch, settings=settings)


Simulated = Rig[SimulatedDisk]
Bare = BareRig[SimulatedDisk]
