"""The segment engine seen from a second process: the same reading, no writing.

Reads files and `live`, never the owner's memory, so a reader here costs the owner nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from forebay.clock import Clock
from forebay.disk import Disk
from forebay.engines.operations import ShardedEngine
from forebay.engines.seam import PAGE_BYTES
from forebay.engines.segment import SHARDS
from forebay.errors import Unsupported
from forebay.format.batch import ColumnBytes
from forebay.pages import Page
from forebay.records import Offsets
from forebay.settings import Settings
from forebay.shard import RecoveryDecision, ShardRef, Source
from forebay.wal.follow import POLL_SECONDS, FollowedLog
from forebay.wal.staging import Entry, Producing, Ticket


class FollowedShard:
    """A shard that another process owns, or nobody."""

    failure = "opened read-only"
    epoch = 0
    poll_seconds: float | None = POLL_SECONDS

    def __init__(self, ref: ShardRef, log: FollowedLog) -> None:
        self.ref = ref
        self.durability = ref.spec.durability
        self.wakers: set[Callable[[], None]] = set()
        self.log = log
        self._lock = threading.Lock()

    @property
    def decision(self) -> RecoveryDecision:
        """Nothing was recovered here; the next offset is what is published."""
        return RecoveryDecision(next_offset=self.offsets().next, source=Source.LOCAL, exact=True)

    def stage_one(self, entry: Entry, size: int) -> Ticket:
        """Refused: see `OpenShard`."""
        raise self._refusal()

    def stage_many(self, columns: ColumnBytes, producing: Producing | None, ticket: Ticket) -> Ticket:
        """Refused: see `OpenShard`."""
        raise self._refusal()

    def settle(self, ticket: Ticket) -> int:
        """Refused: see `OpenShard`."""
        raise self._refusal()

    def commit(self) -> None:
        """Nothing ever waits."""

    def last_sequence(self, producer: int) -> int | None:
        """Refused: only the owner knows its producers."""
        raise self._refusal()

    def read(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page:
        """See `OpenShard`."""
        with self._lock:
            return self.log.read(offset, bytes_max)

    def wait(self, offset: int, timeout: float | None) -> bool:
        """See `OpenShard`."""
        return self.log.wait(offset, timeout)

    def offset_at_time(self, timestamp: int) -> int | None:
        """See `OpenShard`."""
        with self._lock:
            return self.log.offset_at_time(timestamp)

    def offsets(self) -> Offsets:
        """See `OpenShard`."""
        with self._lock:
            return self.log.offsets()

    def flush(self) -> None:
        """Refused: see `OpenShard`."""
        raise self._refusal()

    def rotate(self) -> None:
        """Refused: see `OpenShard`."""
        raise self._refusal()

    def _refusal(self) -> Unsupported:
        return Unsupported(f"{self.ref} is opened read-only: append in the process that owns the directory")


class FollowingEngine(ShardedEngine[FollowedShard]):
    """Shards below `<root>/shards`, whoever owns them."""

    def __init__(
        self, root: str, settings: Settings, *, disk: Disk, clock: Clock, is_owned: Callable[[], bool]
    ) -> None:
        super().__init__()
        self._root = root
        self._settings = settings
        self._disk = disk
        self._clock = clock
        self._is_owned = is_owned

    def close(self) -> None:
        """Give descriptors back."""
        for shard in self.shards():
            shard.log.close()

    def abandon(self) -> None:
        """Readers share nothing that a child could harm."""

    def _open(self, ref: ShardRef) -> FollowedShard:
        directory = f"{self._root}/{SHARDS}/{ref.id}"
        log = FollowedLog(self._disk, self._clock, directory, self._settings.wal, self._is_owned)
        return FollowedShard(ref, log)

    def _remove(self, ref: ShardRef, shard: FollowedShard | None) -> None:
        raise Unsupported(f"{ref} is opened read-only: delete it in the process that owns the directory")
