"""What a log has done, in numbers. Knows nothing of who asks."""

from __future__ import annotations

from collections.abc import Sequence

from forebay.wal.cache import CachedFrame


class Counters:
    """What the log has done since it was opened; the core counts, others publish."""

    __slots__ = (
        "bytes_written",
        "commits",
        "fsync_seconds",
        "fsyncs",
        "pause_seconds",
        "pauses",
        "records",
        "rotations",
    )

    def __init__(self) -> None:
        self.bytes_written = self.commits = self.fsyncs = self.pauses = self.records = self.rotations = 0
        self.fsync_seconds = self.pause_seconds = 0.0

    def committed(self, made: Sequence[CachedFrame]) -> None:
        """One more commit, of these frames."""
        self.commits += 1
        self.records += made[-1].end - made[0].base
        self.bytes_written += sum([len(frame.data) for frame in made])
