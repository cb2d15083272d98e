"""Commits that are acknowledged before they are durable: kept in memory, written together after a short while.

What is lost if the process dies is bounded by `progress.flush_interval_ms` and `progress.flush_records_min`: the
group then reads that much again. Nothing is ever skipped by it.
"""

from __future__ import annotations

import logging

from forebay.clock import Clock
from forebay.errors import UnknownTopic
from forebay.locks import Rank, RankedCondition, RankedLock
from forebay.progress import Progress, ProgressStore, ReaderName
from forebay.settings import ProgressSettings
from forebay.workers import Worker

logger = logging.getLogger(__name__)


class CachedCommits:
    """Places on their way into the progress store. Safe for concurrent use."""

    def __init__(self, store: ProgressStore, settings: ProgressSettings, clock: Clock) -> None:
        self._store = store
        self._settings = settings
        self._changed = RankedCondition(Rank.LEAF, "storage.cached_commits")
        self._writing = RankedLock(Rank.ROUND, "storage.commit_flush")
        self._pending: dict[tuple[ReaderName, int], Progress] = {}
        self._durable: dict[tuple[ReaderName, int], int] = {}
        """Where each stands in the store, as far as it was written here."""
        delay_s = settings.flush_interval_ms / 1000
        self.worker = Worker("forebay-commits", self._write_pending, clock=clock, delay_s=delay_s)

    def commit(self, name: ReaderName, partition: int, progress: Progress) -> int:
        """Note a place; where it stands on return, in memory. It never goes back, nor behind what is stored.

        Called by the committing thread; reads the metadata store before it takes the lock.
        """
        place = (name, partition)
        stored = self._store.get(name, partition, progress.incarnation)
        if stored is not None and stored.offset >= progress.offset:
            return self._further(stored, self.get(name, partition, progress.incarnation)).offset
        with self._changed:
            known = self._pending.get(place)
            if known is not None and known.incarnation == progress.incarnation and known.offset >= progress.offset:
                return known.offset
            self._pending[place] = progress
            moved = progress.offset - self._durable.get(place, 0)
        self.worker.wake()
        if moved >= self._settings.flush_records_min:
            self.flush()
        return progress.offset

    def found(self, name: ReaderName, partition: int, incarnation: str) -> Progress | None:
        """The place as stored, or as noted last if that is further."""
        stored = self._store.get(name, partition, incarnation)
        noted = self.get(name, partition, incarnation)
        return noted if stored is None else self._further(stored, noted)

    @staticmethod
    def _further(stored: Progress, noted: Progress | None) -> Progress:
        return noted if noted is not None and noted.offset > stored.offset else stored

    def get(self, name: ReaderName, partition: int, incarnation: str) -> Progress | None:
        """The place as noted last, if it is not in the store yet."""
        found = self._pending.get((name, partition))
        return found if found is not None and found.incarnation == incarnation else None

    def flush(self) -> None:
        """On return everything noted before is in the store, or logged as belonging to a topic that is no more."""
        with self._writing:
            pending = dict(self._pending)
            readers: dict[ReaderName, dict[int, Progress]] = {}
            for (name, partition), progress in pending.items():
                readers.setdefault(name, {})[partition] = progress
            for name, cursors in readers.items():
                self._write(name, cursors)

    def forget(self, name: ReaderName) -> None:
        """What is noted of this reader does not count any more."""
        with self._writing, self._changed:
            for place in [place for place in self._pending if place[0] == name]:
                del self._pending[place]
            self._durable = {place: offset for place, offset in self._durable.items() if place[0] != name}

    def forget_topic(self, namespace: str, topic: str) -> None:
        """A topic of this name was deleted: drop where its readers stood.

        What is noted stays: it may belong to a later topic of the name, and the next flush drops the rest.
        """
        with self._writing, self._changed:
            for place in [place for place in self._durable if place[0][:2] == (namespace, topic)]:
                del self._durable[place]

    def end(self) -> None:
        """Write what is left, and stop."""
        self.worker.stop()
        self.flush()

    def abandon(self) -> None:
        """In a forked child: the thread is not there, and the parent writes what it noted."""
        self.worker.abandon()
        self._changed = RankedCondition(Rank.LEAF, "storage.cached_commits")
        self._writing = RankedLock(Rank.ROUND, "storage.commit_flush")
        self._pending.clear()

    def _write(self, name: ReaderName, cursors: dict[int, Progress]) -> None:
        try:
            standing = self._store.ack_up_to(name, cursors)
        except UnknownTopic as error:
            logger.warning("%s", error)
            standing = {}
        with self._changed:
            for partition, progress in cursors.items():
                if partition in standing:
                    self._durable[name, partition] = standing[partition]
                if self._pending.get((name, partition)) is progress:
                    del self._pending[name, partition]

    def _write_pending(self) -> None:
        """The step of the background worker: what is not written is tried again after the same interval."""
        try:
            self.flush()
        finally:
            if self._pending:
                self.worker.wake()
