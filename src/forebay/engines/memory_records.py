"""Records held in memory, with indexes by offset, key, tag and time. One thread at a time; knows no shards.

Deliberately plain, for the other engines are compared with it: a list of what was appended at once, a set of
deleted offsets, and for each key and tag a sorted list of its live offsets.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from forebay.format.control.offsets import OffsetSet
from forebay.format.frame.batch import Batch, batch_of
from forebay.records import Gap, Reason
from forebay.shard.limits import Stretch

NO_TIME = -(2**63)
FEW = 64
"""Up to here offsets are taken out of a list one by one."""

K = TypeVar("K", bytes, str)


class HeldAppend:
    """What was appended at once. `batch` is `None` once all of it is deleted."""

    __slots__ = ("_sizes", "base", "batch", "bytes", "deleted", "end", "size", "top")

    def __init__(self, base: int, batch: Batch | None, size: int, sizes: npt.NDArray[np.int64]) -> None:
        self.base = base
        self.end = base + len(sizes)
        self.batch = batch
        self.size = size
        """What it takes in memory."""
        self.bytes = int(sizes.sum())
        self._sizes = sizes if batch is None else None
        self.deleted = 0
        self.top = NO_TIME if batch is None else int(batch.timestamps().max())
        """The newest time of a live record."""

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """What each record counts for."""
        if self._sizes is not None:
            return self._sizes
        assert self.batch is not None
        return self.batch.sizes()

    def empty(self) -> None:
        """Drop the records: all of them are deleted."""
        self._sizes = self.sizes
        self.batch, self.size, self.top = None, 0, NO_TIME


class HeldRecords:
    """Everything from `earliest` to `next`."""

    def __init__(self, start: int) -> None:
        self.earliest = start
        self.next = start
        self.live = 0
        self.endings = 0
        """How often records have ended: by this a reader that holds no lock sees whether what it has is current."""
        self.size = 0
        """What all of it takes in memory."""
        self.bytes = 0
        """What all of it counts for."""
        self._held: list[HeldAppend] = []
        self._bases: list[int] = []
        self._times: list[int] = []
        """When each of `_held` was appended."""
        self._deleted = OffsetSet()
        self._keys: defaultdict[bytes, list[int]] = defaultdict(list)
        self._tags: defaultdict[str, list[int]] = defaultdict(list)
        self._highs: list[int] | None = []
        """The newest time up to and with each of `_held`; `None` once some of them may be gone."""

    def append(self, batch: Batch, size: int) -> None:
        """Take in the next records: all of it, or nothing if an exception (Ctrl-C) comes in between."""
        held = HeldAppend(batch.base, batch, size, batch.sizes())
        try:
            for offset, key in enumerate(batch.keys() or (), batch.base):
                if key is not None:
                    self._keys[key].append(offset)
            for offset, tag in enumerate(batch.tags() or (), batch.base):
                if tag is not None:
                    self._tags[tag].append(offset)
            if self._highs is not None:
                self._highs.append(max(self._highs[-1], held.top) if self._highs else held.top)
            self._bases.append(held.base)
            self._times.append(batch.appended_at)
            self._held.append(held)
            live, size, total = self.live + batch.count, self.size + size, self.bytes + held.bytes
            # One statement, in which no exception comes: the records are in.
            self.next, self.live, self.size, self.bytes = held.end, live, size, total
        except BaseException:
            if self.next != held.end:
                self._take_back(batch)
            raise

    def _take_back(self, batch: Batch) -> None:
        """Undo what was done of an append that was cut short: nothing of it is behind `next`."""
        count = bisect_left(self._bases, self.next)
        del self._held[count:], self._bases[count:], self._times[count:]
        self._highs = None
        for key in {key for key in batch.keys() or () if key is not None}:
            _cut_back(self._keys, key, self.next)
        for tag in {tag for tag in batch.tags() or () if tag is not None}:
            _cut_back(self._tags, tag, self.next)

    def pieces(self, offset: int) -> Iterator[tuple[Batch | Gap, int]]:
        """What lies from `offset` on, in order: live records with about their size, and deleted ranges with none."""
        for place in range(max(bisect_right(self._bases, offset) - 1, 0), len(self._held)):
            held = self._held[place]
            for start, stop, live in self._runs(held):
                if stop <= offset:
                    continue
                if live:
                    assert held.batch is not None
                    found = held.batch.slice(max(start, offset), stop)
                    yield found, held.size * found.count // (held.end - held.base)
                else:
                    yield Gap(max(start, offset), stop, Reason.DELETED), 0

    def stretches(self) -> Iterator[Stretch]:
        """The same for eviction, from `earliest` on."""
        for held, appended_at in zip(self._held, self._times, strict=True):
            for start, stop, live in self._runs(held):
                sizes = held.sizes[start - held.base : stop - held.base]
                yield Stretch(start, stop, live, appended_at, int(sizes.sum()), sizes.copy)

    def of_key(self, key: bytes) -> Sequence[int]:
        """The live offsets of a key."""
        return self._from_earliest(self._keys.get(key, ()))

    def of_tag(self, tag: str) -> Sequence[int]:
        """The live offsets of a tag."""
        return self._from_earliest(self._tags.get(tag, ()))

    def _from_earliest(self, offsets: Sequence[int]) -> Sequence[int]:
        """Those that are not dropped: an interrupt (Ctrl-C) may have kept `drop_below` from forgetting the others."""
        if not offsets or offsets[0] >= self.earliest:
            return offsets
        return offsets[bisect_left(offsets, self.earliest) :]

    def within(self, start: int, stop: int) -> list[int]:
        """The live offsets of `[start, stop)`."""
        found: list[int] = []
        for place in range(max(bisect_right(self._bases, start) - 1, 0), len(self._held)):
            held = self._held[place]
            if held.base >= stop:
                break
            for first, last, live in self._runs(held):
                if live:
                    found += range(max(first, start), min(last, stop))
        return found

    def one(self, offset: int) -> tuple[Batch, int]:
        """The live record at `offset`, and what it counts for."""
        held = self._at(offset)
        assert held.batch is not None
        return held.batch.slice(offset, offset + 1), int(held.sizes[offset - held.base])

    def first_at_time(self, timestamp: int) -> int | None:
        """The first live record at or after the time."""
        if self._highs is None:
            self._highs = list(accumulate((held.top for held in self._held), max))
        place = bisect_left(self._highs, timestamp)
        if place == len(self._highs):
            return None
        batch = self._held[place].batch
        assert batch is not None, "a newest time is that of a live record"
        matches = (batch.timestamps() >= timestamp) & ~self._deleted.mask(batch.base, batch.count)
        return batch.base + int(np.argmax(matches))

    def delete(self, offsets: Iterable[int]) -> int:
        """End these live records; how many they are."""
        ordered = sorted(offsets)
        if not ordered:
            return 0
        keys: defaultdict[bytes, list[int]] = defaultdict(list)
        tags: defaultdict[str, list[int]] = defaultdict(list)
        self._deleted |= OffsetSet.of(ordered)
        place = 0
        while place < len(ordered):
            held = self._at(ordered[place])
            until = bisect_left(ordered, held.end)
            self._delete_in(held, ordered[place:until], keys, tags)
            place = until
        for key, gone in keys.items():
            _take_out(self._keys, key, gone)
        for tag, gone in tags.items():
            _take_out(self._tags, tag, gone)
        self.live -= len(ordered)
        self.endings += 1
        self._highs = None
        return len(ordered)

    def drop_below(self, offset: int) -> int:
        """Drop everything below `offset`, which becomes `earliest`; how many live records that ended."""
        count = bisect_left(self._bases, offset)
        if count and self._held[count - 1].end > offset:
            self._cut(count - 1, offset)
        dropped = self._held[:count]
        ended = sum(held.end - held.base - held.deleted for held in dropped)
        left = {
            "_held": self._held[count:],
            "_bases": self._bases[count:],
            "_times": self._times[count:],
            "_highs": None,
            "_deleted": self._deleted.clipped(offset, self.next),
            "live": self.live - ended,
            "size": self.size - sum(held.size for held in dropped),
            "bytes": self.bytes - sum(held.bytes for held in dropped),
            "earliest": offset,
            "endings": self.endings + 1,
        }
        # One step of the interpreter: an exception from outside (Ctrl-C) finds all of it done or nothing.
        vars(self).update(left)
        self._forget_below(offset, dropped)
        return ended

    def fit_into(self, size: int) -> int:
        """Where `earliest` must move to so that no more than `size` is taken; the newest append stays."""
        left, place = self.size, 0
        while left > size and place < len(self._held) - 1:
            left -= self._held[place].size
            place += 1
        return self._bases[place]

    def _at(self, offset: int) -> HeldAppend:
        return self._held[bisect_right(self._bases, offset) - 1]

    def _runs(self, held: HeldAppend) -> Iterator[tuple[int, int, bool]]:
        """Start, stop, and whether they are live, of the runs of records of one append."""
        count = held.end - held.base
        if held.deleted in (0, count):
            yield held.base, held.end, not held.deleted
            return
        gone = self._deleted.mask(held.base, count)
        edges = [0, *(np.flatnonzero(gone[1:] != gone[:-1]) + 1).tolist(), count]
        for start, stop in pairwise(edges):
            yield held.base + start, held.base + stop, not gone[start]

    def _delete_in(
        self,
        held: HeldAppend,
        offsets: list[int],
        keys: defaultdict[bytes, list[int]],
        tags: defaultdict[str, list[int]],
    ) -> None:
        """End records of one append; their keys and tags are added to `keys` and `tags`."""
        batch = held.batch
        assert batch is not None
        for found, index in ((batch.keys(), keys), (batch.tags(), tags)):
            for offset in offsets if found is not None else ():
                entry = found[offset - held.base]  # type: ignore[index]
                if entry is not None:
                    index[entry].append(offset)  # type: ignore[index]
        held.deleted += len(offsets)
        if held.deleted == held.end - held.base:
            self.size -= held.size
            held.empty()
        else:
            held.top = _newest(batch, self._deleted.mask(batch.base, batch.count))

    def _cut(self, place: int, offset: int) -> None:
        """Make two of one append, the second from `offset` on, with memory of its own."""
        held = self._held[place]
        front, rest = (self._part(held, start, stop) for start, stop in ((held.base, offset), (offset, held.end)))
        if rest.batch is not None:
            columns = rest.batch.columns_bytes()
            rest.size = columns.size
            rest.batch = batch_of(columns, base=offset, epoch=rest.batch.epoch, appended_at=rest.batch.appended_at)
        front.size = held.size - rest.size
        before, after, time = slice(place), slice(place + 1, None), self._times[place]
        cut = {
            "_held": [*self._held[before], front, rest, *self._held[after]],
            "_bases": [*self._bases[before], front.base, rest.base, *self._bases[after]],
            "_times": [*self._times[before], time, time, *self._times[after]],
            "_highs": None,
        }
        # One step, as in `drop_below`.
        vars(self).update(cut)

    def _part(self, held: HeldAppend, start: int, stop: int) -> HeldAppend:
        batch = held.batch.slice(start, stop) if held.batch is not None else None
        part = HeldAppend(start, batch, 0, held.sizes[start - held.base : stop - held.base])
        part.deleted = self._deleted.count_in(start, stop)
        if part.batch is not None and part.deleted == stop - start:
            part.empty()
        elif part.batch is not None:
            part.top = _newest(part.batch, self._deleted.mask(start, stop - start))
        return part

    def _forget_below(self, offset: int, dropped: list[HeldAppend]) -> None:
        batches = [held.batch for held in dropped if held.batch is not None]
        for key in {key for batch in batches for key in batch.keys() or () if key is not None}:
            _cut_front(self._keys, key, offset)
        for tag in {tag for batch in batches for tag in batch.tags() or () if tag is not None}:
            _cut_front(self._tags, tag, offset)


def _newest(batch: Batch, gone: npt.NDArray[np.bool_]) -> int:
    left = batch.timestamps()[~gone]
    return int(left.max()) if len(left) else NO_TIME


def _take_out(index: defaultdict[K, list[int]], entry: K, gone: list[int]) -> None:
    offsets = index[entry]
    if len(gone) <= FEW:
        for offset in gone:
            del offsets[bisect_left(offsets, offset)]
    else:
        out = set(gone)
        offsets[:] = [offset for offset in offsets if offset not in out]
    if not offsets:
        del index[entry]


def _cut_front(index: defaultdict[K, list[int]], entry: K, offset: int) -> None:
    offsets = index.get(entry, [])
    del offsets[: bisect_left(offsets, offset)]
    if not offsets:
        index.pop(entry, None)


def _cut_back(index: defaultdict[K, list[int]], entry: K, offset: int) -> None:
    offsets = index.get(entry, [])
    del offsets[bisect_left(offsets, offset) :]
    if not offsets:
        index.pop(entry, None)
