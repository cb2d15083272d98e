"""The seam of the engines: what a topic may ask of the place where its records are kept, as Protocols by ability.

`ReadShard` is a shard that can be read, `OwnedShard` one that this process owns and may change; code that needs the
second asks for it by type. `StorageEngine` opens shards. Every engine answers alike to the last detail: one contract
suite in `forebay.testing` states it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from forebay.appends.producer_window import Recalled
from forebay.appends.queue import Producing, QueuedRecord
from forebay.appends.ticket import Ticket
from forebay.errors import UnknownTopic
from forebay.format.columns.rows import ColumnBytes, Row
from forebay.meter import ShardCounts
from forebay.pages import Page, Reach
from forebay.records import Offsets
from forebay.shard import RecoveryDecision
from forebay.shard.deletes import Deletion
from forebay.shard.limits import Evicted, Holding
from forebay.topics import Durability, ShardRef, TopicSpec

PAGE_RECORDS = 10_000
PAGE_BYTES = 1024 * 1024


class ReadShard(Protocol):
    """One shard to read and follow, whether or not this process owns it. Safe for concurrent calls.

    What was deleted reads as a gap of reason `DELETED`, which cursors step over in silence. What was evicted
    is one gap up to `evict_floor`, of reason `CAP` or `TTL`, whatever else had been there.
    """

    ref: ShardRef
    durability: Durability
    wakers: set[Callable[[], None]]
    """Called after each publication by the thread that published; they only wake."""
    poll_seconds: float | None
    """How often a reader looks for new records where no thread calls the wakers; `None` where they are called."""

    @property
    def decision(self) -> RecoveryDecision:
        """How the shard was recovered when it was opened."""

    @property
    def epoch(self) -> int:
        """Counts the owners of the shard; 0 where this process is none of them."""

    @property
    def failure(self) -> str | None:
        """Why appends are refused, if they are."""

    def last_sequence(self, producer: int) -> int | None:
        """The newest acknowledged sequence of an idempotent producer."""

    def read(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page:
        """Records from `offset` on, at least one if there is any, about `bytes_max`; an empty page at the end."""

    def read_cached(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page | None:
        """What `read` would give, if it is in memory; `None` if not, or if the shard is closed: then ask `read`.

        For event loops: touches neither disk nor metadata, and waits for no lock under which another thread does.
        """

    def reach(self) -> Reach:
        """Which offsets can be read now. Of a shard that this process owns, it takes no lock."""

    def ended(self) -> object:
        """A value that stays equal until more records of the shard are deleted or evicted. Takes no lock.

        A page that was read after this call, and that is kept, is out of date once the value is another.
        """

    def wait(self, offset: int, timeout: float | None) -> bool:
        """Wait until something at or above `offset` can be read; false if the time is up."""

    def offset_at_time(self, timestamp: int) -> int | None:
        """The first record at or after the time, by offset; `None` if there is none."""

    def offsets(self) -> Offsets:
        """The watermarks now."""

    def published(self) -> int:
        """Where a reader of new records alone begins: behind all that can be read, before all that only waits.

        What waits may yet be refused, and then its offset goes to another record.
        """

    def lag_end(self) -> int:
        """Where the lag of readers ends: behind the last record, queued ones included.

        `offsets().next` may lie further: after a crash behind a gap as wide as what was reserved, which no record
        follows yet. Asks no other machine if this process owns the shard: `Topic.lag_end` has looked at history.
        """

    def read_by_key(
        self,
        key: bytes,
        start: int = 0,
        *,
        history: bool = False,
        records_max: int = PAGE_RECORDS,
        bytes_max: int = PAGE_BYTES,
    ) -> Page:
        """The newest live record with exactly this key, if it is at or above `start`; `next` is the head.

        With `history` all live ones from `start` on, in offset order: `next` is behind the last one given, or the
        head if there are no more. The first comes through whatever the limits. What was evicted comes as a gap;
        what was deleted does not.
        """

    def read_by_tag(
        self, tag: str, start: int = 0, *, records_max: int = PAGE_RECORDS, bytes_max: int = PAGE_BYTES
    ) -> Page:
        """All live records with exactly this tag from `start` on, paged as `read_by_key` with `history`."""


class OwnedShard(ReadShard, Protocol):
    """One shard that this process owns: what a reader may do, and appends, deletes and eviction."""

    counts: ShardCounts
    """What it has done since it was opened."""

    def append(self, row: Row, size: int, producing: Producing | None) -> int:
        """Append one record of about `size` bytes; its offset once its durability class holds, else raises its error.

        `QueueFull` and `Closed` say that nothing was done.
        """

    def stage_one(self, entry: QueuedRecord, size: int) -> Ticket:
        """Queue one record: it has its offset on return, nothing more holds yet."""

    def stage_many(self, columns: ColumnBytes, producing: Producing | None, ticket: Ticket) -> Ticket:
        """Queue many records as one append: all or none of them, at consecutive offsets."""

    def recall(self, producing: Producing) -> Recalled | None:
        """What is known here of a producer and of this append; see `AppendQueue.recall`."""

    def stages_slowly(self, count: int) -> bool:
        """Whether to queue so many records may first wait for metadata, files or a thread that waits for those.

        A look without such a wait, for event loops: they leave that append to another thread.
        """

    def acknowledge(self, ticket: Ticket) -> int:
        """Return the first offset once the durability class of that append holds, else raise its error."""

    def is_held(self, ticket: Ticket) -> bool:
        """Whether the durability class of a queued append holds already, so that no thread has to wait for it."""

    def commit(self) -> None:
        """Write and publish everything that is queued."""

    @property
    def commits_slowly(self) -> bool:
        """Whether `commit` must first wait for something else than writing and syncing what is queued.

        A look without a lock, for threads that commit for many shards and leave such a commit to another thread.
        """

    def is_inside(self) -> bool:
        """Whether the calling thread is at writing the shard: a signal handler has interrupted it there.

        Such a handler does not wait for what is queued: the write that it has interrupted waits for the handler.
        """

    def commit_within(self, seconds: float) -> None:
        """As `commit`, unless another thread is still at it when the time is up."""

    def flush(self) -> None:
        """On return everything appended before is as durable as this engine can make it."""

    def rotate(self) -> None:
        """Begin a new file, where the engine has files."""

    def delete(self, what: Deletion) -> int:
        """How many live records it ended: of those published before the call, and no later one.

        On return it holds by the durability class of the topic. What is not there is no error.
        """

    def evict(self, now_ms: int) -> Evicted:
        """Apply the caps and the time to live of the topic; what was done. Floors never go back."""

    def holding(self) -> Holding:
        """What is held now, as the caps count it."""

    def adopt(self, spec: TopicSpec) -> None:
        """Go by this definition of the same topic from now on: its limits have changed, or its partitions."""

    def leave(self, why: UnknownTopic) -> None:
        """The topic was deleted by another process: acknowledge nothing from now on, and answer appends with `why`.

        Holds from the call on, before it waits for an append that is under way; on return there is none. Called by a
        background worker.
        """


class StorageEngine(Protocol):
    """Opens and removes shards. `ByName` answers by shard name over any of them."""

    def prepare(self, spec: TopicSpec) -> None:
        """On return the engine has what it needs to open shards of this topic at their first use. It opens none.

        `Unavailable` if it has not yet.
        """

    def open_shard(self, ref: ShardRef) -> OwnedShard:
        """The shard, opened (and recovered) once; the same object afterwards. Made when it is first used."""

    def shards(self) -> Sequence[OwnedShard]:
        """Every open shard."""

    def delete_shard(self, ref: ShardRef) -> None:
        """On return the shard and its records are gone; nothing happens if they were."""

    def close(self) -> None:
        """On return everything is as durable as it can be and nothing is left to replay."""
