"""The file that a shard's log grows in. Knows what is written and what readers may see of it; writes nothing itself."""

from __future__ import annotations

from typing import NamedTuple

from forebay.wal.files import LogFile
from forebay.wal.scan import LogScan


class ActiveFile(LogFile):
    """The file that is being written. `position` may run ahead of `limit`, which readers go by."""

    def __init__(self, scan: LogScan, created: float) -> None:
        super().__init__(
            scan.file,
            scan.header,
            index=scan.index,
            gaps=scan.gaps,
            frames=scan.frames,
            end=scan.end,
            limit=scan.stop,
        )
        self.position = self.synced = scan.stop
        self.marked = scan.durable
        """The highest durable mark that stands in the file."""
        self.created = created
        self.written: list[tuple[int, int, int]] = []
        """Base, position and highest time of frames that are not published yet."""

    def publish(self, end: int) -> None:
        """Show readers everything up to `position`, which holds the records below `end`."""
        with self.indexing:
            for base, position, time_max in self.written:
                self.index.add(base, position, time_max)
            self.written = []
            self.limit = self.position
            self.end = end


class SyncTarget(NamedTuple):
    """What a sync that starts now will make durable."""

    active: ActiveFile
    position: int
    end: int
