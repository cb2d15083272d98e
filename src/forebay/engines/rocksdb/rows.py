"""The rows of one shard in the database: records with their indexes, and the window of producers. Knows no locks.

What is to be written is collected in a batch of the database, which is all or nothing: a record is never there
without its indexes, nor they without it, nor is an append of a producer remembered without its records.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from forebay.appends.producer_window import ProducerWindow
from forebay.appends.queue import PendingFrame
from forebay.engines.rocksdb.database import View
from forebay.engines.rocksdb.layout import (
    EntryKind,
    Keys,
    ShardCounters,
    StoredEntry,
    appended_in,
    decode_appended,
    decode_entry,
    encode_appended,
    encode_deleted,
    encode_gap,
    encode_live,
    offset_in,
    with_offset,
)
from forebay.engines.rocksdb.times import NO_TIME, Changes, Edges, candidates, put_blocks
from forebay.format.columns.rows import ColumnBytes
from forebay.format.control.frames import WindowEntry
from forebay.format.frame.batch import Batch
from forebay.records import Gap, Reason
from forebay.settings import WalSettings
from forebay.shard.limits import Stretch

ENTRY_RECORDS = 256
ENTRY_BYTES = 32 * 1024
"""A large append becomes entries of about this size, so that a look-up of one record reads no more."""
SEQUENCE_MAX = 2**64 - 1


class RowsState(NamedTuple):
    """What readers of a shard go by: its counters, and the edges of its times. Replaced as a whole."""

    counters: ShardCounters = ShardCounters()
    edges: Edges = Edges()


class ShardRows:
    """Reads and writes the entries of one shard, with their indexes."""

    def __init__(self, keys: Keys, epoch: int, zstd_level: int | None) -> None:
        self.keys = keys
        self._epoch = epoch
        self._zstd_level = zstd_level

    # Writing

    def add(self, changes: Changes, state: RowsState, batch: Batch, columns: ColumnBytes) -> RowsState:
        """Write the next records, which came as `columns`, with their indexes; where the shard stands then."""
        counters = state.counters
        sizes = batch.sizes()
        size = int(sizes.sum())
        before = counters.total
        most = max(1, min(ENTRY_RECORDS, ENTRY_BYTES * batch.count // max(size, 1)))
        if batch.count <= most:
            self._put_live(changes, batch, before, columns)
        else:
            for start in range(0, batch.count, most):
                piece = batch.slice(batch.base + start, batch.base + start + most)
                self._put_live(changes, piece, before + int(sizes[:start].sum()))
        for key in index_keys(self.keys, batch):
            changes.put(key, b"")
        edges, full = state.edges.extended(batch.base, batch.timestamps())
        put_blocks(changes, self.keys, full)
        moved = counters._replace(next=batch.end, live=counters.live + batch.count, total=before + size)
        return RowsState(moved, edges)

    def skip(self, changes: Changes, state: RowsState, gap: Gap) -> RowsState:
        """Write a range that has no records, behind all there are; where the shard stands then."""
        counters = state.counters
        changes.put(self.keys.entry(gap.start), encode_gap(gap.stop, gap.reason, before=counters.total))
        edges, full = state.edges.skipped(gap.start, gap.stop)
        put_blocks(changes, self.keys, full)
        return RowsState(counters._replace(next=gap.stop), edges)

    def take_out(self, changes: Changes, entry: StoredEntry, gone: Collection[int]) -> dict[int, int]:
        """Delete these records of a live entry, with their indexes; their times by offset.

        What stays becomes entries of its own; of what goes, only what it counted for is kept.
        """
        batch = entry.batch(self.keys.salt_crc)
        sizes = batch.sizes()
        before = entry.before + np.concatenate(([0], np.cumsum(sizes)))
        mask = np.zeros(batch.count, np.bool_)
        mask[[offset - entry.base for offset in gone]] = True
        edges = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), batch.count]
        for start, stop in pairwise(edges):
            if mask[start]:
                stub = encode_deleted(sizes[start:stop], appended_at=entry.appended_at, before=int(before[start]))
                changes.put(self.keys.entry(entry.base + start), stub)
                for key in index_keys(self.keys, batch.slice(entry.base + start, entry.base + stop)):
                    changes.delete(key)
            else:
                self._put_live(changes, batch.slice(entry.base + start, entry.base + stop), int(before[start]))
        times = batch.timestamps()
        return {offset: int(times[offset - entry.base]) for offset in gone}

    def cut(self, changes: Changes, entry: StoredEntry, offset: int) -> tuple[int, int]:
        """Remove an entry below `offset`, with its indexes; where that ends, and what all below there counted for.

        What stays of it becomes an entry of its own. The caller removes the old one with its range.
        """
        end = min(offset, entry.end)
        if entry.kind is EntryKind.GAP:
            if end < entry.end:
                changes.put(self.keys.entry(end), encode_gap(entry.end, Reason(entry.reason), before=entry.before))
            return end, entry.before
        batch = entry.batch(self.keys.salt_crc) if entry.kind is EntryKind.LIVE else None
        sizes = entry.sizes(self.keys.salt_crc) if batch is None else batch.sizes()
        before = entry.before + int(sizes[: end - entry.base].sum())
        if batch is not None:
            for key in index_keys(self.keys, batch.slice(entry.base, end)):
                changes.delete(key)
            if end < entry.end:
                self._put_live(changes, batch.slice(end, entry.end), before)
        elif end < entry.end:
            stub = encode_deleted(sizes[end - entry.base :], appended_at=entry.appended_at, before=before)
            changes.put(self.keys.entry(end), stub)
        return end, before

    def _put_live(self, changes: Changes, batch: Batch, before: int, columns: ColumnBytes | None = None) -> None:
        value = encode_live(
            columns or batch.columns_bytes(),
            self.keys.salt_crc,
            base=batch.base,
            epoch=self._epoch,
            appended_at=batch.appended_at,
            before=before,
            zstd_level=self._zstd_level,
        )
        changes.put(self.keys.entry(batch.base), value)

    # Reading

    def entries(self, view: View, offset: int, stop: int) -> Iterator[StoredEntry]:
        """The entries that reach into `[offset, stop)`, in order. The first may begin before, or behind a gap."""
        first, last = self.keys.entries
        row = view.last(first, self.keys.entry(offset))
        start = offset if row is None else offset_in(row[0])
        for key, value in view.rows(self.keys.entry(start), min(self.keys.entry(stop), last)):
            entry = decode_entry(offset_in(key), value)
            if entry.end > offset:
                yield entry

    def entry_at(self, view: View, offset: int) -> StoredEntry | None:
        """The entry that holds the offset."""
        row = view.last(self.keys.entries[0], self.keys.entry(offset))
        entry = None if row is None else decode_entry(offset_in(row[0]), row[1])
        return entry if entry is not None and entry.end > offset else None

    def gap_before(self, view: View, end: int) -> Gap | None:
        """The gap that ends there, if it is one and no record."""
        entry = self.entry_at(view, end - 1) if end else None
        is_gap = entry is not None and entry.kind is EntryKind.GAP
        return Gap(entry.base, entry.end, Reason(entry.reason)) if entry is not None and is_gap else None

    def found(self, view: View, prefix: bytes, start: int, stop: int, most: int) -> list[int]:
        """The first live offsets of `[start, stop)` that an index names under `prefix`."""
        return [offset_in(key) for key in view.keys(with_offset(prefix, start), with_offset(prefix, stop), most)]

    def newest(self, view: View, prefix: bytes, stop: int) -> list[int]:
        """The last live offset below `stop` that an index names under `prefix`, if any."""
        row = view.last(with_offset(prefix, 0), with_offset(prefix, stop - 1)) if stop else None
        return [] if row is None else [offset_in(row[0])]

    def newest_time(self, view: View, start: int, stop: int, without: Collection[int] = ()) -> int:
        """The newest time of live records of `[start, stop)`."""
        found = NO_TIME
        for entry in self.entries(view, start, stop):
            if entry.kind is not EntryKind.LIVE:
                continue
            batch = entry.batch(self.keys.salt_crc).slice(start, stop)
            times = batch.timestamps()
            if without:
                times = times[[offset not in without for offset in range(batch.base, batch.end)]]
            found = max(found, int(times.max()) if len(times) else NO_TIME)
        return found

    def first_at_time(self, view: View, state: RowsState, timestamp: int) -> int | None:
        """The first live record at or after the time."""
        earliest, head = state.counters.earliest, state.counters.next
        for number in candidates(view, self.keys, state.edges, timestamp=timestamp, start=earliest, head=head):
            start, stop = max(number << 6, earliest), min((number + 1) << 6, head)
            for entry in self.entries(view, start, stop):
                if entry.kind is EntryKind.LIVE:
                    batch = entry.batch(self.keys.salt_crc).slice(start, stop)
                    matches = batch.timestamps() >= timestamp
                    if matches.any():
                        return batch.base + int(np.argmax(matches))
        return None

    def stretches(self, view: View, counters: ShardCounters) -> Iterator[Stretch]:
        """Everything from `earliest` on, for eviction."""
        held: StoredEntry | None = None
        for entry in self.entries(view, counters.earliest, counters.next):
            if held is not None:
                yield self._stretch(held, entry.before)
            held = entry
        if held is not None:
            yield self._stretch(held, counters.total)

    def _stretch(self, entry: StoredEntry, until: int) -> Stretch:
        appended_at = None if entry.kind is EntryKind.GAP else entry.appended_at
        is_live = entry.kind is EntryKind.LIVE
        return Stretch(
            entry.base,
            entry.end,
            is_live,
            appended_at,
            until - entry.before,
            lambda: entry.sizes(self.keys.salt_crc),
        )


def index_keys(keys: Keys, batch: Batch) -> Iterator[bytes]:
    """The index entries of live records."""
    for offset, key in enumerate(batch.keys() or (), batch.base):
        if key is not None:
            yield with_offset(keys.of_key(key), offset)
    for offset, tag in enumerate(batch.tags() or (), batch.base):
        if tag is not None:
            yield with_offset(keys.of_tag(tag), offset)


def put_runs(changes: Changes, keys: Keys, frames: Sequence[PendingFrame], window: ProducerWindow) -> None:
    """Write which producer appended what in these frames, and remove what the window is about to forget."""
    added: dict[int, list[int]] = {}
    for frame in frames:
        offset = frame.base
        for run in frame.runs():
            if run.producer:
                changes.put(keys.appended(run.producer, run.sequence), encode_appended(run.count, offset))
                added.setdefault(run.producer, []).append(run.sequence)
            offset += run.count
    for producer, sequences in added.items():
        for sequence in window.sequences_to_forget(producer, sequences):
            changes.delete(keys.appended(producer, sequence))
    for producer in window.producers_to_forget(added):
        forget(changes, keys, producer)


def forget(changes: Changes, keys: Keys, producer: int) -> None:
    """Remove everything of one producer."""
    changes.delete_range(keys.appended(producer, 0), keys.appended(producer, SEQUENCE_MAX))


def stored_window(view: View, keys: Keys, settings: WalSettings) -> ProducerWindow:
    """The window as the last owner left it: the longest silent producer is the one whose last append is oldest."""
    found: dict[int, list[WindowEntry]] = {}
    for key, value in view.rows(*keys.window):
        producer, sequence = appended_in(key)
        count, offset = decode_appended(value)
        found.setdefault(producer, []).append(WindowEntry(producer, sequence, 1, count, offset))
    window = ProducerWindow(settings.producers_max, settings.producer_appends_max)
    for entries in sorted(found.values(), key=lambda entries: entries[-1].offset):
        window.extend(entries)
    return window
