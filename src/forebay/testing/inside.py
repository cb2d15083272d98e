"""The one door for tests into an open log: its shards, its stores and its background workers.

Only this module knows how a log is put together. A test that needs to look behind the public names, or to run a step
of the background work in its own thread, comes through `inside`: when the core is re-laid, this file changes and no
test does. Everything here is the log's own object, never a copy, and nothing is replaced behind its back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias, overload

from forebay.aio import AsyncLog
from forebay.engines import OpenShard, SegmentEngine
from forebay.engines.background import Background
from forebay.metadata import MetadataStore
from forebay.shard import SegmentShard
from forebay.shard.archive import Archive
from forebay.shard.places import Places
from forebay.storage import Storage, Topic
from forebay.storage.background.history import HistoryWorker
from forebay.storage.background.limits import LimitsWorker
from forebay.storage.background.seal import SealWorker
from forebay.storage.background.sync import SyncWorker
from forebay.wal.log import Wal

_Worker: TypeAlias = SyncWorker | SealWorker | HistoryWorker | LimitsWorker


@overload
def inside(opened: Storage | AsyncLog) -> InsideLog: ...
@overload
def inside(opened: Topic) -> InsideTopic: ...
def inside(opened: Storage | AsyncLog | Topic) -> InsideLog | InsideTopic:
    """Look behind the public names of an open log, or of one of its topics."""
    if isinstance(opened, Topic):
        return InsideTopic(opened)
    return InsideLog(opened._log if isinstance(opened, AsyncLog) else opened)


class InsideTopic:
    """The shards of one topic. Asking for one opens it, as an append would."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic

    def shard(self, partition: int = 0) -> OpenShard:
        """The shard of a partition, on whichever engine it is."""
        return self._topic._shard(partition)

    def segment(self, partition: int = 0) -> SegmentShard:
        """The shard of a partition of a topic on engine `segment`."""
        shard = self.shard(partition)
        assert isinstance(shard, SegmentShard), f"{shard.ref} is on engine {shard.ref.spec.engine}"
        return shard

    def wal(self, partition: int = 0) -> Wal:
        """The write-ahead log of a partition."""
        return self.segment(partition).wal

    def history(self, partition: int = 0) -> Archive:
        """What exports the log of a partition and removes local copies."""
        return self.segment(partition).archive


class InsideLog:
    """The parts of an open log that a test may look at, and its background workers."""

    def __init__(self, log: Storage) -> None:
        self._log = log

    @property
    def metadata(self) -> MetadataStore:
        """The metadata store that the log has open."""
        return self._log._parts.metadata

    @property
    def places(self) -> Places:
        """Where history lies: the store, the files of loads, this directory."""
        places = self._log._parts.places
        assert places is not None, "a log in memory has no history"
        return places

    @property
    def engine(self) -> SegmentEngine:
        """The segment engine of a log that this process owns."""
        engine = self._log._parts.owned
        assert engine is not None, "this log is in memory or read-only"
        return engine

    @property
    def workers(self) -> InsideWorkers:
        """What works in the background, by name."""
        return InsideWorkers(self._log)

    def shards(self) -> list[OpenShard]:
        """Every shard that is open now."""
        return self._log._shards.all()


class InsideWorkers:
    """The background workers of an open log, each by the name of its work."""

    def __init__(self, log: Storage) -> None:
        self._log = log

    @property
    def sync(self) -> InsideWorker:
        """Makes appends durable in the background."""
        return InsideWorker(_running(self._log._parts.maintenance))

    @property
    def sealing(self) -> InsideWorker:
        """Seals rotated files and heals failed logs."""
        return InsideWorker(_running(self._log._parts.sealing))

    @property
    def history(self) -> InsideWorker:
        """Exports, removes local copies, and does what is due now and then for the directory."""
        return InsideWorker(_running(self._log._parts.archiving))

    @property
    def limits(self) -> InsideWorker:
        """Ends records by caps, times to live and key compaction, and follows changes to topics."""
        return InsideWorker(self._log._keeping)


class InsideWorker:
    """One background worker, to be stepped by hand."""

    def __init__(self, worker: _Worker) -> None:
        self._worker = worker

    def step(self) -> None:
        """Do once, in the calling thread, what the worker's own thread does each time."""
        self._worker.step()

    def take_over(self) -> None:
        """End the worker's own thread: from now on it does only what a test steps."""
        worker = self._worker
        with worker._changed:
            worker._ended = True
            worker._changed.notify_all()
        worker._thread.join()
        worker._thread, worker._ended = Background("stepped by a test", lambda: None), False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the worker's own thread from beginning a step meanwhile; the calling thread may step."""
        assert not isinstance(self._worker, SealWorker), "take it over instead: it has no step that can be held up"
        with self._worker._stepping:
            yield


def _running(worker: _Worker | None) -> _Worker:
    assert worker is not None, "this log is in memory or read-only: it has no such worker"
    return worker
