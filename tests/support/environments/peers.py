"""Several processes with one metadata store and one place for history, all simulated: nothing runs in the background.

Each is a whole log with a data directory of its own. What its workers would do is done when a test says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from forebay.errors import ForebayError
from forebay.lifecycle import closed
from forebay.metadata import MemoryMetadata, MetadataStore
from forebay.settings import MetadataSettings, Settings, StorageSettings, StoreSettings
from forebay.storage import Storage
from forebay.testing.inside import inside, metadata_instead
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.disk import SimulatedDisk
from forebay.testing.simulated.others import Killed, SharedMetadata
from tests.support.environments.directories import QUICK_RUN, WAL
from tests.support.environments.simulated import files_of

NEVER: Final = 1 << 60
"""A call that no process comes to."""
STALE: Final = 3.0
"""Seconds after which a process goes by nothing that it remembers of definitions."""


@dataclass(slots=True)
class Peer:
    """A log, and its handle on the metadata store."""

    log: Storage
    metadata: SharedMetadata
    disk: SimulatedDisk


class Peers:
    """What processes share: a disk, a store of metadata, a clock."""

    def __init__(
        self,
        *,
        mode: str = "shared_fs",
        metadata: Callable[[], MetadataStore] | None = None,
        settings: MetadataSettings | None = None,
    ) -> None:
        """`metadata` opens a handle on the store, for each process one; `settings` are those of the store."""
        self.disk = SimulatedDisk(directories=["/"])
        self.clock = ManualClock(seed=1)
        self.store = metadata() if metadata else MemoryMetadata()
        self._metadata = metadata
        shared = {"storage": StorageSettings(mode="shared_fs"), "store": StoreSettings(root="/store")}
        private = {"storage": StorageSettings(handoff_root="/handoff")}
        self.settings = Settings(
            wal=WAL,
            runtime=QUICK_RUN,
            metadata=settings or MetadataSettings(),
            **(private if mode == "local" else shared),
        )
        self._open: list[Peer] = []

    def open(self, name: str) -> Peer:
        """A process that has this directory. Its background has done what it does first, and rests."""
        metadata, disk = SharedMetadata(self._handle()), self.disk.another_process()
        with metadata_instead(metadata):
            log = Storage.open(PurePath(f"/{name}"), self.settings, disk=disk, clock=self.clock)
        inside(log).workers.stop()
        self.clock.advance(STALE)
        process = Peer(log, metadata, disk)
        self._open.append(process)
        return process

    @property
    def opened(self) -> list[Peer]:
        """Those that run."""
        return list(self._open)

    def kill(self, process: Peer) -> None:
        """End a process as kill -9 does."""
        process.metadata.die()
        process.disk.end_process()
        closed(process.log)
        self._forget(process)

    def end(self, process: Peer) -> None:
        """Close a process in order, or kill it if that does not work any more."""
        process.metadata.before(NEVER, lambda: None)
        try:
            process.log.close()
            self._forget(process)
        except (ForebayError, Killed):
            self.kill(process)

    def settle(self, process: Peer) -> None:
        """What the background does now and then, after every grace is over."""
        self.clock.advance(self.settings.export.orphan_grace_s + STALE)
        log = inside(process.log)
        log.end_deleted()
        log.deletions.finish()
        log.clear_moved()
        log.remove_late_objects()

    def stored(self) -> list[str]:
        """Everything in the metadata store, by key."""
        return [entry.key for entry in self.store.range("")]

    def shard_files(self) -> list[str]:
        """Files of shards, in the directories and in the store of history."""
        return [path for path in files_of(self.disk) if "/shards/" in path or path.startswith("/store/")]

    def close(self) -> None:
        """End those that run."""
        for process in self.opened:
            self.end(process)
        if self._metadata:
            self.store.close()

    def _handle(self) -> MetadataStore:
        return self._metadata() if self._metadata else self.store

    def _forget(self, process: Peer) -> None:
        self._open.remove(process)
        if process.metadata.inner is not self.store:
            process.metadata.inner.close()
