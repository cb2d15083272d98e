"""The segments of one partition, for callers who look: log files of this process, and what history is made of.

Reads memory, the footers of local indexes, and one range of metadata; never a store.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from forebay.catalog import ShardCatalog
from forebay.engines import OwnedShard
from forebay.errors import Corrupt
from forebay.format.metadata.descriptor import SegmentDescriptor
from forebay.shard import SegmentShard
from forebay.wal.files import LogFile, SealedFile


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSegment:
    """One log file `[start, end)` in the data directory of the owner."""

    start: int
    end: int
    bytes: int | None
    """`None` if its index cannot be read, or the file went meanwhile."""
    sealed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentPage:
    """The segments that begin in `[start, next)`. With `next`, there are more from there on."""

    local: tuple[LocalSegment, ...]
    """Of a partition that this process owns and has open; else none."""
    history: tuple[SegmentDescriptor, ...]
    next: int | None


def segment_page(shard: OwnedShard | None, catalog: ShardCatalog, start: int, limit: int) -> SegmentPage:
    """The segments that begin at `start` or behind it, at most `limit` of each kind.

    Runs in the caller's thread, without a lock; it waits for the metadata store and for small reads of local files.
    """
    history, cut = catalog.page(start, limit)
    files = [] if not isinstance(shard, SegmentShard) else [f for f in shard.wal.files.all if f.start >= start]
    # Two files may begin at one offset, if the first has no record: they come together.
    local_cut = max(files[limit].start, start + 1) if len(files) > limit else None
    stop = min((each for each in (cut, local_cut) if each is not None), default=None)
    return SegmentPage(
        local=tuple(_local(file) for file in files if stop is None or file.start < stop),
        history=tuple(piece for piece in history if stop is None or piece.start < stop),
        next=stop,
    )


def _local(file: LogFile | SealedFile) -> LocalSegment:
    size: int | None = None
    if isinstance(file, LogFile):
        size = file.limit
    else:
        with suppress(OSError, Corrupt):
            size = file.footer.segment_bytes
    return LocalSegment(start=file.start, end=file.end, bytes=size, sealed=isinstance(file, SealedFile))
