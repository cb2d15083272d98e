"""Is a shard in the database as it was written? Reads all of it and changes nothing.

For a database that was opened to be read only: what it shows is of one moment. Memory stays bounded: of the indexes
only a sum is kept for each stretch of offsets, and a stretch is looked at record by record if its sums differ.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forebay.engines.rocksdb.database import RocksDatabase, View
from forebay.engines.rocksdb.layout import (
    FANOUT_BITS,
    Bounds,
    EntryKind,
    Keys,
    ShardCounters,
    StoredEntry,
    appended_in,
    block_in,
    decode_appended,
    decode_entry,
    decode_time,
    offset_in,
)
from forebay.engines.rocksdb.rows import ShardRows, index_keys
from forebay.engines.rocksdb.times import LEVELS, Block, Edges, Place
from forebay.errors import Corrupt

LAST_KEY = b"\xff" * 20
STRETCH_BITS = 16
STRETCHES_DETAILED = 8
"""In so many stretches of offsets a wrong index is looked at record by record; of others only the place is reported."""


class AuditFlaw(NamedTuple):
    """What is wrong. What is `derived` could be rebuilt from the records."""

    what: str
    offsets: tuple[int, int] | None = None
    derived: bool = False


class _Looked(NamedTuple):
    """What all records up to the end of an entry count for, if it is known, and the times of its own if they live."""

    total: int | None
    times: npt.NDArray[np.int64] | None


class _Sums:
    """Of a set of keys a count and a sum for each stretch of offsets: two that differ are not the same set."""

    def __init__(self) -> None:
        self.stretches: dict[int, tuple[int, int]] = {}

    def add(self, key: bytes) -> None:
        stretch = offset_in(key) >> STRETCH_BITS
        count, total = self.stretches.get(stretch, (0, 0))
        self.stretches[stretch] = count + 1, total + hash(key)

    def unlike(self, other: _Sums) -> list[int]:
        stretches = self.stretches.keys() | other.stretches.keys()
        return sorted(at for at in stretches if self.stretches.get(at) != other.stretches.get(at))


class ShardAudit:
    """One look at one shard."""

    def __init__(self, database: RocksDatabase, keys: Keys, on_bytes: Callable[[int], None]) -> None:
        self.flaws: list[AuditFlaw] = []
        self.bounds: Bounds | None = None
        self.counters = ShardCounters()
        self.entries = 0
        self.records = 0
        self.bytes = 0
        self._database = database
        self._keys = keys
        self._on_bytes = on_bytes
        self._indexed = _Sums()
        self._blocks = 0
        """How many full blocks there must be, without those that `earliest` cuts."""
        self._judged = True
        """The blocks can be read."""

    def run(self) -> None:
        """Look at all of it. `UnsupportedFormat` if a newer version wrote it."""
        try:
            stored = self._database.get(self._keys.bounds)
            self.bounds = None if stored is None else Bounds.decode(stored)
            stored = self._database.get(self._keys.counters)
            self.counters = ShardCounters() if stored is None else ShardCounters.decode(stored)
        except Corrupt as error:
            self._add(str(error))
            return
        self._judge_counters()
        self._walk_entries()
        # Only behind whole records is it known what the indexes must say; still each of their bytes is read.
        is_whole = self._is_whole
        self._walk_indexes(is_whole=is_whole)
        self._walk_blocks(is_whole=is_whole)
        self._walk_window()

    @property
    def _is_whole(self) -> bool:
        return all(flaw.derived for flaw in self.flaws)

    def _judge_counters(self) -> None:
        counters = self.counters
        if not counters.evict_floor <= counters.earliest <= counters.next or counters.below > counters.total:
            self._add(f"its counters contradict each other ({counters})")

    # Records

    def _walk_entries(self) -> None:
        counters = self.counters
        at, edges, live = counters.earliest, Edges(), 0
        before: int | None = counters.below
        try:
            for entry in self._stored_entries():
                if entry.base != at:
                    what = "no entry holds these offsets" if entry.base > at else "two entries hold these offsets"
                    self._add(what, _between(at, entry.base))
                elif before is not None and entry.before != before:
                    what = f"the entry counts {entry.before} bytes before it, not {before}"
                    self._add(what, (at, entry.end), derived=True)
                looked = self._look_at(entry)
                at, before = entry.end, looked.total
                if not self._is_whole:
                    continue
                if looked.times is None:
                    edges, full = edges.skipped(entry.base, entry.end)
                else:
                    edges, full = edges.extended(entry.base, looked.times)
                    live += entry.end - entry.base
                self._judge_blocks(full)
        except Corrupt as error:
            self._add(f"cannot be read on from here: {error}", (at, max(at, counters.next)))
            return
        if at != counters.next:
            self._add("its entries and its counters end at different offsets", _between(at, counters.next))
        elif self._is_whole and (live, before) != (counters.live, counters.total):
            what = f"{live} records are live and all counted {before} bytes; its counters say {counters.live}"
            self._add(f"{what} and {counters.total}", derived=True)

    def _stored_entries(self) -> Iterator[StoredEntry]:
        with self._database.view() as view:
            for key, value in view.rows(*self._keys.entries):
                self._walked(key, value)
                self.entries += 1
                try:
                    yield decode_entry(offset_in(key), value)
                except Corrupt as error:
                    # What it held shows as a gap before the next.
                    self._add(str(error), (offset_in(key), offset_in(key) + 1))

    def _look_at(self, entry: StoredEntry) -> _Looked:
        """Decode the entry; what is wrong with it is noted."""
        salt_crc = self._keys.salt_crc
        times = None
        try:
            if entry.kind is EntryKind.LIVE:
                batch = entry.batch(salt_crc)
                sizes, times = batch.sizes(), batch.timestamps()
                self.records += batch.count
                for key in index_keys(self._keys, batch):
                    self._indexed.add(key)
            else:
                sizes = entry.sizes(salt_crc)
            if len(sizes) != entry.end - entry.base:
                raise Corrupt(f"it has the sizes of {len(sizes)} records, not of {entry.end - entry.base}")
        except (Corrupt, ValueError) as error:
            self._add(f"the entry is damaged: {error}", (entry.base, entry.end))
            return _Looked(None, None)
        return _Looked(entry.before + int(sizes.sum()), times)

    # Indexes

    def _judge_blocks(self, full: list[Block]) -> None:
        for level, number, newest in full if self._judged else ():
            try:
                stored = self._database.get(self._keys.block(level, number))
            except Corrupt:
                # Reported once, when they are walked.
                self._judged = False
                return
            is_cut = self._is_cut((level, number))
            self._blocks += not is_cut
            time = None if stored is None else decode_time(stored)
            if time is None or time < newest or (time > newest and not is_cut):
                shift = FANOUT_BITS * (level + 1)
                what = f"the time index says {time} where the newest record has {newest}"
                self._add(what, (number << shift, (number + 1) << shift), derived=True)

    def _is_cut(self, place: Place) -> bool:
        level, number = place
        return number == self.counters.earliest >> FANOUT_BITS * (level + 1)

    def _walk_blocks(self, *, is_whole: bool) -> None:
        stored = 0
        try:
            with self._database.view() as view:
                for key, value in view.rows(*self._keys.blocks):
                    self._walked(key, value)
                    place = key[-9], block_in(key)
                    stored += not (place[0] < LEVELS and self._is_cut(place))
        except Corrupt as error:
            self._add(f"the time index cannot be read: {error}", derived=True)
            return
        if is_whole and self._judged and stored > self._blocks:
            self._add(f"the time index has {stored - self._blocks} blocks without a record", derived=True)

    def _walk_indexes(self, *, is_whole: bool) -> None:
        found = _Sums()
        try:
            with self._database.view() as view:
                for key, value in self._index_rows(view):
                    self._walked(key, value)
                    found.add(key)
        except Corrupt as error:
            self._add(f"the index of keys and tags cannot be read: {error}", derived=True)
            return
        unlike = self._indexed.unlike(found) if is_whole else []
        if unlike:
            self._detail(unlike[:STRETCHES_DETAILED])
        if len(unlike) > STRETCHES_DETAILED:
            what = f"the index of keys and tags is wrong in {len(unlike) - STRETCHES_DETAILED} stretches more"
            offsets = unlike[STRETCHES_DETAILED] << STRETCH_BITS, (unlike[-1] + 1) << STRETCH_BITS
            self._add(what, offsets, derived=True)

    def _index_rows(self, view: View) -> Iterator[tuple[bytes, bytes]]:
        return chain.from_iterable(view.rows(*rows) for rows in self._keys.lookups)

    def _detail(self, stretches: list[int]) -> None:
        """Which records an index does not know, and what it knows that is not there."""
        rows = ShardRows(self._keys, 0, None)
        expected: set[bytes] = set()
        with self._database.view() as view:
            for stretch in stretches:
                start, stop = stretch << STRETCH_BITS, (stretch + 1) << STRETCH_BITS
                for entry in rows.entries(view, start, stop):
                    if entry.kind is EntryKind.LIVE:
                        batch = entry.batch(self._keys.salt_crc).slice(start, stop)
                        expected.update(index_keys(self._keys, batch))
        with self._database.view() as view:
            chosen = set(stretches)
            stored = {key for key, _ in self._index_rows(view) if offset_in(key) >> STRETCH_BITS in chosen}
        self._add_index_flaw(expected - stored, "live records are not in the index of keys and tags")
        self._add_index_flaw(stored - expected, "entries of the index of keys and tags name no live record")

    def _add_index_flaw(self, keys: set[bytes], what: str) -> None:
        if keys:
            offsets = sorted(map(offset_in, keys))
            self._add(f"{len(keys)} {what}", (offsets[0], offsets[-1] + 1), derived=True)

    # Producers

    def _walk_window(self) -> None:
        try:
            with self._database.view() as view:
                for key, value in view.rows(*self._keys.window):
                    self._walked(key, value)
                    count, offset = decode_appended(value)
                    if offset + count > self.counters.next:
                        producer, sequence = appended_in(key)
                        what = f"append {sequence} of producer {producer} is remembered for records that are not there"
                        self._add(what, (offset, offset + count))
        except (Corrupt, struct.error) as error:
            self._add(f"what is remembered of producers cannot be read: {error}")

    def _walked(self, key: bytes, value: bytes) -> None:
        size = len(key) + len(value)
        self.bytes += size
        self._on_bytes(size)

    def _add(self, what: str, offsets: tuple[int, int] | None = None, *, derived: bool = False) -> None:
        self.flaws.append(AuditFlaw(what, offsets, derived))


def _between(one: int, other: int) -> tuple[int, int]:
    return min(one, other), max(one, other)


def stored_shards(database: RocksDatabase) -> Iterator[tuple[str, int]]:
    """Topic id and partition of every shard that has anything in the database."""
    at = b""
    while True:
        with database.view() as view:
            keys = view.keys(at, LAST_KEY, 1)
        if not keys:
            return
        topic_id, partition = keys[0][:16].hex(), int.from_bytes(keys[0][16:20], "big")
        yield topic_id, partition
        at = Keys(topic_id, partition).stop
