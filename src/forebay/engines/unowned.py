"""Shards that this process does not own, read by what the metadata store and history say of them.

An owner's log looks at such a shard here: one that another directory holds, that was sealed, or that was never
used. Opening one acquires nothing and writes nothing. Its records end where history ends: what the holder has not
exported lies on the holder's disk alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from forebay.appends.callbacks import Waking, call_back
from forebay.clock import Clock
from forebay.disk import Disk
from forebay.engines.readonly import FollowedShard, FollowedView, LeftShards
from forebay.engines.seam import OwnedShard
from forebay.errors import Moved
from forebay.shard import ShardContext
from forebay.shard.recovery import known_in_history
from forebay.shard.tiers import RecordedHistory
from forebay.topics import Engine, ShardRef
from forebay.wal.readonly import FollowedLog

IsKnown: TypeAlias = Callable[[ShardRef], bool]
NO_HOLDER = ""
"""The id of no directory: for a reader of history alone every holder is another one."""


class MovingWakers(set[Callable[[], None]]):
    """The wakers of a shard that this process may come to own. Any thread adds and discards, without a lock.

    A thread that adds one while the wakers move finds it called by the owned shard as well: it puts it in here first
    and then looks where they move, and the thread that moves them says where and then copies.
    """

    def __init__(self) -> None:
        super().__init__()
        self._moved_to: set[Callable[[], None]] | None = None

    def add(self, waker: Callable[[], None]) -> None:
        """See `set`."""
        super().add(waker)
        if self._moved_to is not None:
            self._moved_to.add(waker)

    def discard(self, waker: object) -> None:
        """See `set`."""
        super().discard(waker)
        if self._moved_to is not None:
            self._moved_to.discard(waker)

    def move(self, wakers: set[Callable[[], None]]) -> None:
        """From now on each waker is among these, and so is each that is added later."""
        self._moved_to = wakers
        wakers.update(self)


class _NoLog(FollowedLog):
    """The log of a shard whose files lie elsewhere, or that has none: nothing is ever read from it."""

    def refresh(self) -> None:
        """There is nothing to look at, whatever lies in this directory from earlier."""


class UnownedShard(FollowedShard):
    """A shard seen by its history, until this process owns it."""

    failure = None

    def __init__(
        self,
        ref: ShardRef,
        past: RecordedHistory,
        around: ShardContext,
        *,
        disk: Disk,
        clock: Clock,
        is_known: IsKnown,
        is_lost: bool,
    ) -> None:
        log = _NoLog(disk, clock, "", around.settings.wal, lambda: True)
        super().__init__(ref, log, past, clock=clock, is_known=is_known)
        self._moving = MovingWakers()
        self.wakers = self._moving
        self._around = around
        self._is_lost = is_lost

    @property
    def holder(self) -> str | None:
        """The directory that holds the shard; `None` if it was never used."""
        stored = self._around.catalog(self.ref).state()
        return stored.state.holder if stored is not None else None

    def last_sequence(self, producer: int) -> int | None:
        """The newest sequence of a producer that is in history, from which the next owner goes on."""
        around = self._around
        known = known_in_history(around.catalog(self.ref), around.places, around.settings.wal, 0)
        return known.window.last_sequence(producer)

    def refuse_if_lost(self) -> None:
        """`Moved` where another owner replaced this process: not all that it appended may be history."""
        if self._is_lost:
            raise Moved(
                f"{self.ref} has another owner since this process appended to it: what was not exported then is lost, "
                'and can be brought back with "forebay shard salvage"',
                shard=self.ref,
            )

    def wake_from(self, owned: OwnedShard) -> None:
        """Readers that wait for records of this shard are woken by `owned` from now on, and need not poll.

        They are woken now as well, when no lock is held: a record that was published before this call woke none.
        """
        self._moving.move(owned.wakers)
        self.poll_seconds = owned.poll_seconds
        call_back(deque([Waking(self.wakers, self.ref)]))

    def _check_known(self, view: FollowedView) -> None:
        super()._check_known(view)
        if view.past.is_elsewhere and self.ref.spec.engine is not Engine.SEGMENT:
            # Such a shard has no history: once it is used elsewhere, nothing recorded shows its records.
            self._closed = "is used by another directory now: ask for it again"
            self._check_open()


class UnownedShards:
    """The shards that are looked at, each opened once."""

    def __init__(self, around: ShardContext, *, disk: Disk, clock: Clock, is_known: IsKnown) -> None:
        self._disk = disk
        self._clock = clock
        self._around = around
        self._is_known = is_known
        self._shards: dict[str, UnownedShard] = {}
        self._left = LeftShards()
        self._lost: set[str] = set()
        """Shards that another owner has taken from this process, until this process owns them again."""

    def found(self, ref: ShardRef) -> UnownedShard | None:
        """The shard, if it is looked at already and can go on. Takes no lock."""
        shard = self._shards.get(ref.id)
        return shard if shard is not None and not shard.is_over else None

    def open(self, ref: ShardRef) -> UnownedShard:
        """The shard as it is recorded. Called with the lock that its engine has for it: no other thread opens it."""
        shard = self.found(ref)
        if shard is None:
            self.leave(ref, None)
            past = RecordedHistory(self._around.catalog(ref), self._around.places, NO_HOLDER, self._clock)
            shard = self._shards[ref.id] = UnownedShard(
                ref,
                past,
                self._around,
                disk=self._disk,
                clock=self._clock,
                is_known=self._is_known,
                is_lost=ref.id in self._lost,
            )
        return shard

    def leave(self, ref: ShardRef, owned: OwnedShard | None) -> None:
        """Readers of this shard ask again from now on, and find the one that this process owns, if it does.

        Called by the thread that has opened or given up the shard. Waits for no reader.
        """
        if owned is not None:
            self._lost.discard(ref.id)
        shard = self._shards.pop(ref.id, None)
        if shard is None:
            return
        # Before any reader is woken: it finds that it has to ask again.
        shard.refuse("has changed hands: ask for it again")
        if owned is not None:
            shard.wake_from(owned)
        self._left.add(shard)

    def lose(self, ref: ShardRef) -> None:
        """Another owner has taken this shard. Called before the shard is given up here."""
        self._lost.add(ref.id)

    def forget(self, ref: ShardRef) -> None:
        """The topic of this shard was deleted. Waits for no reader."""
        self.leave(ref, None)
        self._lost.discard(ref.id)

    def close(self) -> None:
        """Give every descriptor back. Waits for readers that are inside; the engines are closed by then."""
        for shard in self._shards.values():
            shard.end("is closed")
        self._left.close()
