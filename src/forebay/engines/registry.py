"""The open shards of one engine: opens each shard once and closes it once, under a lock of that shard alone.

A thread holds a shard's lock while it opens, gives up or removes that shard, also over metadata calls and recovery.
It holds no other lock of this module meanwhile, so a shard that hangs delays its own users and no other shard.
"""

from __future__ import annotations

import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Generic, Protocol, TypeAlias, TypeVar

from forebay.appends.callbacks import deferred
from forebay.appends.waiting import is_inside
from forebay.errors import Closed, DataLoss, Unavailable
from forebay.locks import Rank, RankedRLock
from forebay.topics import ShardRef, TopicSpec


class Named(Protocol):
    """What a registry must know of a shard."""

    ref: ShardRef


S = TypeVar("S", bound=Named)
Key: TypeAlias = tuple[str, int]
"""Topic id and partition of a shard."""
_Locks: TypeAlias = "weakref.WeakValueDictionary[Key, threading.RLock]"


class Registry(Generic[S]):
    """Shards by topic id and partition. Safe for concurrent use, in signal handlers too."""

    def __init__(self) -> None:
        self._shards: dict[Key, S] = {}
        self._ended: str | None = None
        self._noting = RankedRLock(Rank.LEAF, "engines.registry")
        """A leaf, held for single steps: one lock for each shard, and one answer to what is open."""
        self._locks: _Locks = weakref.WeakValueDictionary()
        """A lock lives while a thread uses it: a deleted shard leaves none behind."""
        self._working: _Locks = weakref.WeakValueDictionary()
        """Held by the thread that opens or closes a shard: a mark that no exception at any instant leaves behind."""

    def find(self, topic_id: str, partition: int) -> S | None:
        """The shard, if it is open. Takes no lock."""
        return self._shards.get((topic_id, partition))

    def shards(self) -> list[S]:
        """Every open shard. Takes no lock."""
        return list(self._shards.copy().values())

    def lock(self, topic_id: str, partition: int) -> threading.RLock:
        """The lock of one shard: while a thread holds it, no other opens, gives up or removes that shard."""
        with self._noting:
            # Entered again by a signal handler, which is done with what it made by the time the first one goes on.
            return self._locks.setdefault((topic_id, partition), RankedRLock(Rank.REGISTRY, "engines.shard"))

    def open(self, ref: ShardRef, opening: Callable[[ShardRef], S]) -> S:
        """The shard, opened by `opening` if it is not open. A thread that comes meanwhile waits, and gets the same."""
        key = (ref.spec.topic_id, ref.partition)
        shard = self._shards.get(key)
        if shard is not None:
            return shard
        with self.lock(*key):
            self.check_open()
            shard = self._shards.get(key)
            if shard is None:
                with self._work_on(key):
                    shard = self._shards[key] = opening(ref)
            return shard

    def give_up(self, topic_id: str, partition: int, closing: Callable[[S | None], None]) -> None:
        """Take the shard out and close it by `closing`, which gets `None` if it is not open.

        A thread that uses the shard meanwhile waits until it is closed. Append callbacks run after the lock is free.
        """
        key = (topic_id, partition)
        with deferred(), self.lock(*key), self._work_on(key):
            closing(self._shards.pop(key, None))

    def give_up_this(self, shard: S, may_close: Callable[[], bool], closing: Callable[[S], None]) -> bool:
        """Take out and close this very shard, for a background worker that waits for nothing; whether that is done.

        Also done if the shard was taken out before: one that was opened since stays. Not done while another thread is
        at the shard, or `may_close` refuses; it is asked with the lock held, so no shard is opened meanwhile.
        """
        key = (shard.ref.spec.topic_id, shard.ref.partition)
        lock = self.lock(*key)
        with deferred():
            if not lock.acquire(blocking=False):
                return False
            try:
                if self._shards.get(key) is not shard:
                    return True
                if not may_close():
                    return False
                with self._work_on(key):
                    del self._shards[key]
                    closing(shard)
                return True
            finally:
                lock.release()

    def take_out(self, ref: ShardRef, taken: Callable[[S], None]) -> bool:
        """Take the shard out, if it is open, for a background worker that waits for nothing; whether that is done.

        Not done while another thread is at the shard. `taken` gets the shard, without a lock.
        """
        key = (ref.spec.topic_id, ref.partition)
        lock = self.lock(*key)
        if not lock.acquire(blocking=False):
            return False
        try:
            shard = self._shards.pop(key, None)
        finally:
            lock.release()
        if shard is not None:
            taken(shard)
        return True

    def drop(self, shard: S) -> None:
        """Take out this very shard, which has ended by itself; one that was opened since stays. Waits for no shard."""
        key = (shard.ref.spec.topic_id, shard.ref.partition)
        with self._noting:
            if self._shards.get(key) is shard:
                del self._shards[key]

    def if_closed(self, ref: ShardRef, work: Callable[[], None]) -> None:
        """Do something with what a closed shard has left; nothing if it is open. Waits for the shard's lock."""
        with self.lock(ref.spec.topic_id, ref.partition):
            if self.find(ref.spec.topic_id, ref.partition) is None:
                work()

    def if_idle(self, ref: ShardRef, work: Callable[[], None]) -> bool:
        """As `if_closed`, for background workers: false if another thread is at the shard, and nothing is done."""
        lock = self.lock(ref.spec.topic_id, ref.partition)
        if not lock.acquire(blocking=False):
            return False
        try:
            self.if_closed(ref, work)
            return True
        finally:
            lock.release()

    def close(self, closing: Callable[[S], None]) -> None:
        """Open no more shards, and close every open one by `closing`; may be repeated. Waits for each shard's lock.

        Append callbacks and wakers run after the lock of their shard is free. Where a shard has lost records, all are
        closed before the first such `DataLoss` is raised; the log names the others.
        """
        self._ended = "is closed"
        with self._noting:
            # Shards that are being opened come last: a thread that has their lock found the registry open.
            keys = dict.fromkeys([*self._shards.copy(), *self._locks])
        losses: list[DataLoss] = []
        for key in keys:
            with deferred(), self.lock(*key), self._work_on(key):
                shard = self._shards.get(key)
                if shard is not None:
                    try:
                        closing(shard)
                    except DataLoss as loss:
                        losses.append(loss)
        if losses:
            raise losses[0]

    @property
    def is_closed(self) -> bool:
        """Whether no more shards are opened."""
        return self._ended is not None

    def check_open(self) -> None:
        """`Closed` once no more shards are opened."""
        if self._ended is not None:
            raise Closed(f"this engine {self._ended}")

    def _work_on(self, key: Key) -> threading.RLock:
        """The mark of work on a shard, for the thread that holds its lock; `Unavailable` inside such work."""
        with self._noting:
            mark = self._working.setdefault(key, RankedRLock(Rank.SHARD, "engines.shard_work"))
        if is_inside(mark)():
            raise Unavailable(
                "a signal handler interrupted this thread while it opened or closed this shard: try again after that"
            )
        return mark


class ShardedEngine(Generic[S]):
    """Keeps shards open, each once. An engine adds how a shard is opened, closed and removed."""

    def __init__(self) -> None:
        self.registry: Registry[S] = Registry()

    @abstractmethod
    def _open(self, ref: ShardRef) -> S:
        """Open a shard that is not open yet."""

    @abstractmethod
    def _close(self, shard: S) -> None:
        """Close a shard in order."""

    @abstractmethod
    def _remove(self, ref: ShardRef, shard: S | None) -> None:
        """Remove a shard, which was open if `shard` is given."""

    def open_shard(self, ref: ShardRef) -> S:
        """The shard, opened once."""
        return self.registry.open(ref, self._open)

    def open_here(self, ref: ShardRef) -> S:
        """As `open_shard`, for a caller who only looks: nothing that another directory holds is taken over."""
        return self.registry.open(ref, self._open)

    def may_own(self, ref: ShardRef) -> bool:
        """Whether a caller who only looks may open the shard as its owner: it is recorded as this directory's.

        If not, a look goes by what is recorded of the shard.
        """
        return True

    def find(self, ref: ShardRef) -> S | None:
        """The shard, if it is open. Takes no lock."""
        return self.registry.find(ref.spec.topic_id, ref.partition)

    def shards(self) -> list[S]:
        """Every open shard."""
        return self.registry.shards()

    def close(self) -> None:
        """See `StorageEngine`."""
        self.registry.close(self._close)

    def prepare(self, spec: TopicSpec) -> None:
        """See `StorageEngine`."""
        self.registry.check_open()

    def retire_deleted(self, ref: ShardRef, may_close: Callable[[], bool]) -> bool:
        """Close a shard that has left, as its topic was deleted elsewhere; false if that is to be tried again.

        What it has on disk stays: the cleanup removes that. See `Registry.give_up_this`.
        """
        shard = self.find(ref)
        return shard is None or self.registry.give_up_this(shard, may_close, self._close)

    def delete_shard(self, ref: ShardRef) -> None:
        """See `StorageEngine`."""
        self.registry.check_open()
        self.registry.give_up(ref.spec.topic_id, ref.partition, partial(self._remove, ref))
