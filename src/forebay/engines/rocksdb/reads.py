"""Pages read from the database: by offset, and by what an index names. Takes no lock; each page is of one moment."""

from __future__ import annotations

from collections.abc import Iterator

from forebay.engines.rocksdb.database import RocksDatabase, View
from forebay.engines.rocksdb.layout import EntryKind, ShardCounters, StoredEntry
from forebay.engines.rocksdb.rows import ShardRows
from forebay.errors import Corrupt
from forebay.format.frame.batch import Batch
from forebay.pages import Page, joined, tombstone
from forebay.records import Gap, Reason
from forebay.sealed import Gathered

STEPS_MAX = 4_096
"""A page that finds only what was deleted ends after so many entries."""
FOUND_AT_ONCE = 256


class Pages:
    """The pages of one shard."""

    def __init__(self, name: str, database: RocksDatabase, rows: ShardRows) -> None:
        self._name = name
        self._database = database
        self._rows = rows

    def read(self, counters: ShardCounters, offset: int, bytes_max: int) -> Page | None:
        """Everything from `offset` on, which is below `next`; `None` if the floor has moved since `counters`."""
        page = Gathered(offset, bytes_max)
        for gap in tombstone(offset, counters.evict_floor, counters.reason):
            page.add_gap(gap)
        page.add_gap(Gap(offset, counters.earliest, Reason.DELETED))
        with self._database.view() as view:
            if not self._gather(page, self._rows.entries(view, page.next, counters.next)):
                return None
        if page.next == offset:
            return None
        found = page.page()
        return found._replace(events=joined(found.events))

    def _gather(self, page: Gathered, entries: Iterator[StoredEntry]) -> bool:
        """Add entries until the page is full; false if one is missing."""
        for step, entry in enumerate(entries):
            if entry.base > page.next:
                return False
            if step >= STEPS_MAX or (not page.is_empty and len(entry.value) > page.left):
                return True
            if entry.kind is EntryKind.LIVE:
                page.add(entry.batch(self._rows.keys.salt_crc), len(entry.value))
            else:
                reason = Reason.DELETED if entry.kind is EntryKind.DELETED else Reason(entry.reason)
                page.add_gap(Gap(entry.base, entry.end, reason))
        return True

    def newest(self, counters: ShardCounters, prefix: bytes, start: int) -> Page:
        """The last record that an index names, if it is at or above `start`."""
        events = tombstone(start, counters.evict_floor, counters.reason)
        with self._database.view() as view:
            offsets = [offset for offset in self._rows.newest(view, prefix, counters.next) if offset >= start]
            return Page(list(self._records(view, offsets)), events, max(start, counters.next))

    def found(self, counters: ShardCounters, prefix: bytes, start: int, records_max: int, bytes_max: int) -> Page:
        """The records that an index names, from `start` on."""
        batches: list[Batch] = []
        events = tombstone(start, counters.evict_floor, counters.reason)
        at = start
        with self._database.view() as view:
            while at < counters.next:
                offsets = self._rows.found(view, prefix, at, counters.next, FOUND_AT_ONCE)
                for batch in self._records(view, offsets):
                    size = int(batch.sizes().sum())
                    if batches and (len(batches) == records_max or size > bytes_max):
                        return Page(batches, events, batches[-1].end)
                    batches.append(batch)
                    bytes_max -= size
                if len(offsets) < FOUND_AT_ONCE:
                    break
                at = offsets[-1] + 1
        return Page(batches, events, max(start, counters.next))

    def _records(self, view: View, offsets: list[int]) -> Iterator[Batch]:
        """The records at these offsets, one by one."""
        held: Batch | None = None
        for offset in offsets:
            if held is None or not held.base <= offset < held.end:
                entry = self._rows.entry_at(view, offset)
                if entry is None or entry.kind is not EntryKind.LIVE:
                    raise Corrupt(f"{self._name}: an index names offset {offset}, which is not there: restore a backup")
                held = entry.batch(self._rows.keys.salt_crc)
            yield held.slice(offset, offset + 1)
