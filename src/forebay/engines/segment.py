"""The segment engine: each shard is a log of segment files in a directory of its own."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

from forebay.clock import Clock
from forebay.disk import Disk, make_directories
from forebay.engines.operations import ShardedEngine, wanted
from forebay.errors import Conflict, ForebayError
from forebay.format.descriptor import ShardState
from forebay.metadata import MetadataStore
from forebay.settings import Settings
from forebay.shard import Owner, SegmentShard, ShardRef, acquire, read_state
from forebay.wal.begin import ASIDE
from forebay.wal.survey import tail_bytes

logger = logging.getLogger(__name__)

SHARDS = "shards"


class SegmentEngine(ShardedEngine[SegmentShard]):
    """Shards below `<root>/shards`, owned by this process."""

    def __init__(
        self,
        root: str,
        settings: Settings,
        *,
        disk: Disk,
        clock: Clock,
        metadata: MetadataStore,
        owner: Owner,
        on_open: Callable[[SegmentShard], None],
    ) -> None:
        super().__init__()
        self._root = root
        self._settings = settings
        self._disk = disk
        self._clock = clock
        self._metadata = metadata
        self._owner = owner
        self._on_open = on_open

    def directory(self, ref: ShardRef) -> str:
        """Where the files of the shard lie."""
        return f"{self._root}/{SHARDS}/{ref.id}"

    def tail_bytes(self, ref: ShardRef) -> int:
        """About how many bytes opening the shard will walk."""
        return 0 if ref.id in self._shards else tail_bytes(self._disk, self.directory(ref))

    def open_many(self, refs: Sequence[ShardRef], on_bytes: Callable[[int], None]) -> None:
        """Open shards that are not open yet, acquired in few transactions; `on_bytes` hears of the bytes walked.

        One that cannot be opened does not keep the others closed; the first error is raised when all were tried.
        """
        failed: list[ForebayError | OSError] = []
        with self._lock:
            self._check_open()
            closed = [ref for ref in refs if ref.id not in self._shards]
            for ref in closed:
                self._make_directory(ref)
            taken = acquire(self._metadata, [wanted(ref, self._settings) for ref in closed], self._owner)
            for ref, (before, epoch) in zip(closed, taken, strict=True):
                try:
                    self._shards[ref.id] = self._recover(ref, before, epoch, on_bytes)
                except (ForebayError, OSError) as error:
                    logger.error("%s cannot be opened: %s", ref, error)
                    failed.append(error)
        if failed:
            raise failed[0]

    def _open(self, ref: ShardRef) -> SegmentShard:
        self._make_directory(ref)
        before, epoch = acquire(self._metadata, [wanted(ref, self._settings)], self._owner)[0]
        return self._recover(ref, before, epoch, None)

    def _make_directory(self, ref: ShardRef) -> None:
        """Give a new shard its directory before anybody owns it: from then on, one that is missing was lost.

        Going on without it would give offsets out twice.
        """
        stored = read_state(self._metadata, wanted(ref, self._settings).key)
        directory = self.directory(ref)
        if stored is None:
            make_directories(self._disk, directory)
        elif stored.state.holder == self._owner.holder and not self._disk.exists(directory):
            raise Conflict(
                f"{ref} has lost its directory {directory}, and with it how far its offsets went: restore it from a "
                "backup, or delete the topic and create it anew"
            )

    def _close(self, shard: SegmentShard) -> None:
        try:
            shard.upkeep.close()
        except OSError as error:
            # The others must still be closed; what is missing here is found by the next recovery.
            logger.warning("%s: not closed in order: %s", shard.ref, error)

    def _abandon(self, shard: SegmentShard) -> None:
        shard.wal.abandon()

    def _recover(
        self, ref: ShardRef, before: ShardState | None, epoch: int, on_bytes: Callable[[int], None] | None
    ) -> SegmentShard:
        shard = SegmentShard.open(
            ref,
            self.directory(ref),
            self._settings.wal,
            disk=self._disk,
            clock=self._clock,
            before=before,
            epoch=epoch,
            holder=self._owner.holder,
            on_bytes=on_bytes,
        )
        self._on_open(shard)
        return shard

    def _remove(self, ref: ShardRef, shard: SegmentShard | None) -> None:
        if shard is not None:
            shard.wal.close()
        directory = self.directory(ref)
        for below in (f"{directory}/{ASIDE}", directory):
            with contextlib.suppress(FileNotFoundError):
                for name in self._disk.list_directory(below):
                    if name != ASIDE:
                        self._disk.unlink(f"{below}/{name}")
                self._disk.remove_directory(below)
        with contextlib.suppress(FileNotFoundError):
            self._disk.sync_directory(f"{self._root}/{SHARDS}")
