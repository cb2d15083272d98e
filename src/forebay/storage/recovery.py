"""Recovery of all shards of a data directory at once: in few transactions and several threads, with a result.

First the shards are acquired, many in one transaction. Then a few threads open them, each the next one that is left.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple, Protocol, TypeAlias

from forebay.appends.callbacks import deferred
from forebay.engines import OwnedShard
from forebay.engines.directory import Engines
from forebay.engines.segment import Acquisition
from forebay.errors import ForebayError, Indeterminate, Unavailable, UnknownTopic
from forebay.metadata import Entry
from forebay.shard.ownership import BATCH_SHARDS
from forebay.topics import Engine, ShardRef, TopicName, TopicSpec

logger = logging.getLogger(__name__)

REPORT_SECONDS = 0.02
"""How often the thread that waits for the openers reports what they have done."""
ACQUIRERS_MAX = 4
"""Transactions that acquire shards at the same time."""
NO_TOPIC: Final = "0" * 32
"""An id that no topic has."""
Progress: TypeAlias = Callable[[float], None]
OnBytes: TypeAlias = Callable[[int], None]


class FailedShard(NamedTuple):
    """A shard of this directory that could not be opened."""

    ref: ShardRef
    error: ForebayError
    """Why, with the next step."""

    @classmethod
    def undefined(cls, name: TopicName, error: ForebayError) -> FailedShard:
        """Of a topic whose definition cannot be read, so that neither its id nor its partitions are known."""
        return cls(ShardRef(TopicSpec.create(name, topic_id=NO_TOPIC, created_at=0), 0), error)

    def __str__(self) -> str:
        return f"{self.ref}: {self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What became of the shards of a directory that were to be opened."""

    opened: int
    """How many were opened now."""
    failed: tuple[FailedShard, ...]
    """Those that could not be opened, each with its reason, by topic and partition. The others are in use."""

    @property
    def is_degraded(self) -> bool:
        """Whether some shard could not be opened."""
        return bool(self.failed)

    def raise_failed(self) -> None:
        """Raise the reason of the first shard that could not be opened, if there is one."""
        if self.failed:
            raise self.failed[0].error


class OpensShards(Protocol):
    """Opens a shard by a function, with its lock held, and makes it known to readers."""

    def __call__(self, opening: Callable[[ShardRef], OwnedShard], ref: ShardRef) -> OwnedShard: ...


class Recovery:
    """One recovery of many shards. Used once, by one thread; progress is reported by that thread, without a lock.

    Half of the progress is acquisition, by shards, and half is opening, by bytes.
    """

    def __init__(
        self, engines: Engines, opens: OpensShards, is_elsewhere: Callable[[ShardRef], bool], on_progress: Progress
    ) -> None:
        """`is_elsewhere` asks the metadata store whether a shard is not this directory's any more.

        It is asked without a lock for a shard that could not be opened, and with the lock of one in the database.
        """
        self._engines = engines
        self._opens = opens
        self._is_elsewhere = is_elsewhere
        self._on_progress = on_progress
        self._opened: list[ShardRef] = []
        self._failed: list[FailedShard] = []

    def run(self, refs: Sequence[ShardRef], states: Mapping[str, Entry], openers: int) -> Recovered:
        """Open those of `refs` that are closed and this directory's. `states` are recorded ones, as just read.

        `Unavailable` if the metadata store does not answer any more: then no shard can be opened.
        """
        ready: list[Acquisition] = []
        for count, found in enumerate(self._acquired(refs, states, openers), 1):
            if found.error is not None:
                self._fail(found.ref, found.error)
            elif found.opening is not None:
                ready.append(found)
            self._on_progress(count / len(refs) / 2)
        # One more for each: an empty shard has no bytes.
        done, total = 0, sum(found.tail_bytes + 1 for found in ready)
        for count in Openers([partial(self._open, found) for found in ready], openers).run():
            done += count
            self._on_progress(0.5 + min(0.499, done / total / 2))
        self._on_progress(1.0)
        failed = sorted(self._failed, key=lambda one: (str(one.ref.spec.name), one.ref.partition))
        return Recovered(opened=len(self._opened), failed=tuple(failed))

    def _acquired(self, refs: Sequence[ShardRef], states: Mapping[str, Entry], threads: int) -> Iterable[Acquisition]:
        yield from self._acquired_together([ref for ref in refs if ref.spec.engine is Engine.SEGMENT], states, threads)
        rocksdb = self._engines.rocksdb
        for ref in [ref for ref in refs if ref.spec.engine is not Engine.SEGMENT]:
            try:
                is_here = rocksdb.is_here(ref, states)
            except (ForebayError, OSError) as error:
                yield Acquisition(ref, error=error)
            else:
                # Each is acquired when it is opened: its records are here alone, and there are few of them.
                yield Acquisition(ref, opening=self._open_in_database if is_here else None)

    def _acquired_together(
        self, refs: Sequence[ShardRef], states: Mapping[str, Entry], threads: int
    ) -> Iterable[Acquisition]:
        """Acquire many shards in each transaction, and several transactions at a time: each waits for the store."""
        segment, done = self._engines.segment, deque[Acquisition]()
        segment.registry.check_open()
        is_alive = segment.living_owners(refs, states)

        def batch(first: int, on_done: OnBytes) -> None:
            found = list(segment.acquire_many(refs[first : first + BATCH_SHARDS], states, is_alive))
            done.extend(found)
            on_done(len(found))

        work = [partial(batch, first) for first in range(0, len(refs), BATCH_SHARDS)]
        for _ in Openers(work, min(threads, ACQUIRERS_MAX)).run():
            while done:
                yield done.popleft()
        yield from done

    def _open_in_database(self, ref: ShardRef, on_bytes: OnBytes) -> OwnedShard:
        if self._is_elsewhere(ref):
            # Opening it would make it again.
            raise UnknownTopic(f"{ref}: the topic was deleted while its shard was being opened", shard=ref)
        return self._engines.rocksdb.open_shard(ref)

    def _open(self, found: Acquisition, on_bytes: OnBytes) -> None:
        """Open one shard. Called by an opener; the trouble of a shard is noted and does not stop the others."""
        ref, opening = found.ref, found.opening
        assert opening is not None, "only these are ready"
        walked = 0

        def on_walked(count: int) -> None:
            nonlocal walked
            walked += count
            on_bytes(count)

        try:
            with deferred(), self._engines.of(ref.spec).registry.lock(ref.spec.topic_id, ref.partition):
                self._opens(lambda current: opening(current, on_walked), ref)
            self._opened.append(ref)
        except ForebayError as error:
            self._fail(ref, error)
        # Also what was not walked: a shard that ended in order, or cannot be opened, is done with all its bytes.
        on_bytes(max(0, found.tail_bytes - walked) + 1)

    def _fail(self, ref: ShardRef, error: ForebayError | OSError) -> None:
        """Name a shard that could not be opened, unless it was sealed, moved or deleted since it was listed."""
        try:
            is_elsewhere = self._is_elsewhere(ref)
        except (Unavailable, Indeterminate) as away:
            raise Unavailable(
                f"the metadata store does not answer, so that no more shards can be opened ({away}): "
                f"{len(self._opened)} are open; recover again once it answers"
            ) from error
        if is_elsewhere:
            logger.info("%s is not opened: it was sealed, moved or deleted meanwhile (%s)", ref, error)
            return
        if isinstance(error, OSError):
            error = Unavailable(f"{ref} cannot be opened: {error}; once the disk works, try again", shard=ref)
        self._failed.append(FailedShard(ref, error))


class Openers:
    """A few threads that open shards, each the next one that is left."""

    def __init__(self, work: Sequence[Callable[[OnBytes], None]], threads: int) -> None:
        """`work` opens one shard each, and calls its argument with what it has done."""
        self._left = deque(work)
        self._threads = min(threads, len(work))
        self._done: deque[int] = deque()
        """What was done and the thread that waits has not reported yet. It looks now and then: waking it for each shard
        would take the interpreter from the openers."""
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()
        """Why each thread has ended; `None` because nothing is left."""
        self._is_stopped = False

    def run(self) -> Iterable[int]:
        """Do all the work; what is done, as it is done, to the thread that asks. What no one foresaw is raised.

        A caller that is interrupted leaves at once. Then each thread ends with the shard that it is at.
        """
        try:
            for _ in range(self._threads):
                threading.Thread(target=self._work, name="forebay-opener", daemon=True).start()
            running = self._threads
            while running:
                try:
                    error = self._ended.get(timeout=REPORT_SECONDS)
                    running -= 1
                    if error is not None:
                        raise error
                except Empty:
                    pass
                while self._done:
                    yield self._done.popleft()
        finally:
            self._is_stopped = True

    def _work(self) -> None:
        try:
            while self._left and not self._is_stopped:
                try:
                    work = self._left.popleft()
                except IndexError:
                    break
                work(self._done.append)
        except BaseException as error:  # noqa: BLE001 - the thread that waits raises it
            self._ended.put(error)
        else:
            self._ended.put(None)
