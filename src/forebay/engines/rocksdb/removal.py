"""Deleting and evicting, a bounded piece at a time: each piece is one write, with every index that it concerns.

A process that dies in between leaves some pieces done and the others not, each whole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TypeAlias

from forebay.engines.rocksdb.database import RocksBatch, RocksDatabase, View
from forebay.engines.rocksdb.layout import EntryKind, StoredEntry
from forebay.engines.rocksdb.rows import RowsState, ShardRows
from forebay.engines.rocksdb.times import drop_blocks, edges_at, lower_blocks
from forebay.format.control.offsets import OffsetSet
from forebay.records import Reason

PIECE_RECORDS = 1_000
PIECE_BYTES = 4 * 1024 * 1024
COMPACTED_BYTES = 64 * 1024 * 1024
"""When so many bytes were removed at once, the shard asks the database to free their space."""

Making: TypeAlias = Callable[[RocksBatch, RowsState], RowsState | None]
"""Puts changes into a batch and returns where the shard stands then; `None` if nothing is to be written."""
Piece: TypeAlias = list[tuple[StoredEntry, list[int]]]


class Removal:
    """Takes records out of one shard. The caller runs one removal at a time; `commit` writes what was made."""

    def __init__(self, database: RocksDatabase, rows: ShardRows, commit: Callable[[Making], None]) -> None:
        self._database = database
        self._rows = rows
        self._commit = commit

    def delete_found(self, prefix: bytes, stop: int) -> int:
        """End the records below `stop` that an index names under `prefix`; how many they were."""

        def choose(view: View, at: int) -> tuple[Piece, int]:
            piece, end = self._piece(view, self._rows.found(view, prefix, at, stop, PIECE_RECORDS))
            return piece, end or stop

        return self._delete(choose, 0, stop)

    def delete_offsets(self, offsets: OffsetSet) -> int:
        """End the records at these offsets; how many of them were live."""
        wanted = offsets.offsets().tolist()

        def choose(view: View, at: int) -> tuple[Piece, int]:
            """From the offset at this place on; the next place."""
            piece, end = self._piece(view, wanted[at : at + PIECE_RECORDS])
            return piece, bisect_left(wanted, end, at)

        return self._delete(choose, 0, len(wanted))

    def delete_range(self, start: int, stop: int) -> int:
        """End the records of `[start, stop)`; how many they were."""

        def choose(view: View, at: int) -> tuple[Piece, int]:
            piece: Piece = []
            records = size = 0
            for entry in self._rows.entries(view, at, stop):
                if entry.kind is EntryKind.LIVE:
                    piece.append((entry, list(range(max(entry.base, start), min(entry.end, stop)))))
                    records, size = records + len(piece[-1][1]), size + len(entry.value)
                if records >= PIECE_RECORDS or size >= PIECE_BYTES:
                    return piece, entry.end
            return piece, stop

        return self._delete(choose, start, stop)

    def drop_below(self, target: int, reason: Reason | None = None) -> int:
        """End everything below `target`; how many live records there were. With a reason `evict_floor` moves too."""
        ended = removed = 0
        at = -1

        def make(batch: RocksBatch, state: RowsState) -> RowsState | None:
            nonlocal ended, removed, at
            counters = state.counters
            at, below = counters.earliest, counters.below
            records = size = 0
            with self._database.view() as view:
                for entry in self._rows.entries(view, at, target):
                    at, below = self._rows.cut(batch, entry, target)
                    records += at - entry.base if entry.kind is EntryKind.LIVE else 0
                    size += len(entry.value)
                    if records >= PIECE_RECORDS or size >= PIECE_BYTES:
                        break
            if at == counters.earliest:
                return None
            keys = self._rows.keys
            batch.delete_range(keys.entry(counters.earliest), keys.entry(at))
            drop_blocks(batch, keys, counters.earliest, at)
            ended, removed = ended + records, removed + size
            moved = counters._replace(earliest=at, live=counters.live - records, below=below)
            return state._replace(counters=moved if reason is None else moved._replace(evict_floor=at, reason=reason))

        while at < target:
            self._commit(make)
        if removed >= COMPACTED_BYTES:
            self._database.compact(self._rows.keys.entry(0), self._rows.keys.entry(target))
        return ended

    def _piece(self, view: View, offsets: Sequence[int]) -> tuple[Piece, int]:
        """The live records at the first of these offsets, as many as one write takes, and the offset behind them."""
        piece: Piece = []
        size = end = 0
        entry: StoredEntry | None = None
        for offset in offsets:
            if entry is None or entry.end <= offset:
                if size >= PIECE_BYTES:
                    break
                entry = self._rows.entry_at(view, offset)
                if entry is not None and entry.kind is EntryKind.LIVE:
                    piece.append((entry, []))
                    size += len(entry.value)
            if entry is not None and entry.kind is EntryKind.LIVE:
                piece[-1][1].append(offset)
            end = offset + 1
        return piece, end

    def _delete(self, choose: Callable[[View, int], tuple[Piece, int]], start: int, stop: int) -> int:
        """Delete piece by piece, as chosen from a place on, until there is nothing more."""
        ended, at = 0, start

        def make(batch: RocksBatch, state: RowsState) -> RowsState | None:
            nonlocal ended, at
            with self._database.view() as view:
                piece, at = choose(view, at)
                if not piece:
                    return None
                gone: dict[int, int] = {}
                for entry, offsets in piece:
                    gone |= self._rows.take_out(batch, entry, offsets)
                ended += len(gone)
                return self._without(view, batch, state, gone)

        while at < stop:
            self._commit(make)
        return ended

    def _without(self, view: View, batch: RocksBatch, state: RowsState, gone: dict[int, int]) -> RowsState:
        """Where the shard stands without these records; the time index is corrected for them."""

        def newest_in(start: int, stop: int) -> int:
            return self._rows.newest_time(view, start, stop, without=gone)

        keys, counters = self._rows.keys, state.counters
        corrected = lower_blocks(view, batch, keys, gone=gone, newest_in=newest_in)
        edges = edges_at(view, keys, counters.next, newest_in, corrected)
        return RowsState(counters._replace(live=counters.live - len(gone)), edges)
