"""The time index: which is the first live record at or after a time, in any order of times. Knows no entries.

Offsets are in blocks of 64, those in blocks of 64 blocks, and so on. For each block that is full the newest time
of its live records is stored; for those that records still come into, `Edges` holds it in memory. The first
block whose newest time is late enough holds the answer, and so do the levels below it: a search by halves, with
64 instead of 2. A stored time may be too new, where `earliest` lies inside the block, never too old.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from forebay.engines.rocksdb.layout import FANOUT_BITS, Keys, block_in, decode_time, encode_time

NO_TIME = -(2**63)
LEVELS = 11
"""Enough for every offset."""
FANOUT = 1 << FANOUT_BITS

Place: TypeAlias = tuple[int, int]
"""Level and number of a block."""


class Rows(Protocol):
    """What of a view is needed here."""

    def rows(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]: ...


class Changes(Protocol):
    """What of a batch is needed here."""

    def put(self, key: bytes, value: bytes) -> None: ...

    def delete(self, key: bytes) -> None: ...

    def delete_range(self, begin: bytes, end: bytes) -> None: ...


class Block(NamedTuple):
    """One block and the newest time in it."""

    level: int
    number: int
    newest: int


class Edges(NamedTuple):
    """The newest time of the block at the head, level by level, without what is in the open block below it."""

    newest: tuple[int, ...] = (NO_TIME,) * LEVELS

    def of(self, level: int) -> int:
        """The newest time of the open block of that level, with everything in it."""
        return max(self.newest[: level + 1])

    def extended(self, base: int, times: npt.NDArray[np.int64]) -> tuple[Edges, list[Block]]:
        """The edges behind records from `base` on, and the blocks that are full now."""
        edges, full = self, list[Block]()
        at, end = base, base + len(times)
        while at < end:
            until = min(end, (at | (FANOUT - 1)) + 1)
            newest = max(edges.newest[0], int(times[at - base : until - base].max()))
            edges, more = Edges((newest, *edges.newest[1:])).skipped(at, until)
            full += more
            at = until
        return edges, full

    def skipped(self, base: int, stop: int) -> tuple[Edges, list[Block]]:
        """The edges once the head is at `stop`, with no other record from `base` on, and the blocks left behind."""
        newest, full, carried = list(self.newest), list[Block](), NO_TIME
        for level in range(LEVELS):
            newest[level] = max(newest[level], carried)
            if base >> _shift(level) == stop >> _shift(level):
                break
            carried, newest[level] = newest[level], NO_TIME
            if carried != NO_TIME:
                full.append(Block(level, base >> _shift(level), carried))
        return Edges(tuple(newest)), full


def _shift(level: int) -> int:
    return FANOUT_BITS * (level + 1)


def edges_at(
    view: Rows,
    keys: Keys,
    head: int,
    newest_in: Callable[[int, int], int],
    corrected: Mapping[Place, int] = MappingProxyType({}),
) -> Edges:
    """The edges of a shard that ends at `head`; `newest_in` gives the newest time of live records in a range.

    `corrected` are blocks that the view does not show as they will be.
    """
    found = [newest_in(head & -FANOUT, head)]
    for level in range(1, LEVELS):
        first, stop = (head >> _shift(level)) << FANOUT_BITS, head >> _shift(level - 1)
        blocks = _newest(view, keys, level - 1, first, stop)
        blocks |= {at: time for (on, at), time in corrected.items() if on == level - 1 and first <= at < stop}
        found.append(max(blocks.values(), default=NO_TIME))
    return Edges(tuple(found))


def _newest(view: Rows, keys: Keys, level: int, first: int, stop: int) -> dict[int, int]:
    """The stored blocks of `[first, stop)` by number."""
    rows = view.rows(keys.block(level, first), keys.block(level, stop))
    return {block_in(key): decode_time(value) for key, value in rows}


def candidates(view: Rows, keys: Keys, edges: Edges, *, timestamp: int, start: int, head: int) -> Iterator[int]:
    """The blocks of 64 offsets from `start` on, by number, that may hold a live record at or after the time."""

    def late(level: int, first: int, stop: int) -> list[int]:
        found = [at for at, newest in _newest(view, keys, level, first, stop).items() if newest >= timestamp]
        edge = head >> _shift(level)
        if first <= edge < stop and edges.of(level) >= timestamp:
            found.append(edge)
        return found

    def below(level: int, number: int) -> Iterator[int]:
        if level == 0:
            yield number
            return
        for child in late(level - 1, number << FANOUT_BITS, (number + 1) << FANOUT_BITS):
            yield from below(level - 1, child)

    first = start >> FANOUT_BITS
    for level in range(LEVELS):
        if first > head >> _shift(level):
            return
        stop = ((first >> FANOUT_BITS) + 1) << FANOUT_BITS
        for number in late(level, first, stop):
            yield from below(level, number)
        first = stop >> FANOUT_BITS


def put_blocks(changes: Changes, keys: Keys, blocks: list[Block]) -> None:
    """Store blocks that are full."""
    for level, number, newest in blocks:
        changes.put(keys.block(level, number), encode_time(newest))


def drop_blocks(changes: Changes, keys: Keys, start: int, stop: int) -> None:
    """Remove the blocks that lie wholly below `stop`, where all below `start` are gone already."""
    for level in range(LEVELS):
        first, last = start >> _shift(level), stop >> _shift(level)
        if first == last:
            return
        changes.delete_range(keys.block(level, first), keys.block(level, last))


def lower_blocks(
    view: Rows, changes: Changes, keys: Keys, *, gone: Mapping[int, int], newest_in: Callable[[int, int], int]
) -> dict[Place, int]:
    """Correct the stored blocks for deleted records; the corrected ones.

    `gone` has the times of those records by offset; `newest_in` leaves them out.
    """
    corrected: dict[Place, int] = {}
    lowered = dict(gone)
    for level in range(LEVELS):
        touched: dict[int, int] = {}
        for place, time in lowered.items():
            touched[place >> FANOUT_BITS] = max(time, touched.get(place >> FANOUT_BITS, NO_TIME))
        lowered = {}
        for number, time in touched.items():
            stored = _newest(view, keys, level, number, number + 1).get(number)
            if stored is None or time < stored:
                continue
            first, stop = number << FANOUT_BITS, (number + 1) << FANOUT_BITS
            if level == 0:
                newest = newest_in(first, stop)
            else:
                blocks = _newest(view, keys, level - 1, first, stop)
                blocks |= {at: corrected.get((level - 1, at), now) for at, now in blocks.items()}
                newest = max(blocks.values(), default=NO_TIME)
            if newest < stored:
                corrected[level, number], lowered[number] = newest, stored
    for (level, number), newest in corrected.items():
        if newest == NO_TIME:
            changes.delete(keys.block(level, number))
        else:
            changes.put(keys.block(level, number), encode_time(newest))
    return corrected
