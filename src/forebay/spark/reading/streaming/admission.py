"""How much of what waits one micro-batch takes: pure arithmetic over what waits.

Each partition gets its part in proportion to what waits there, so that all reach the end together. What is
left over by rounding goes round in an order that changes from batch to batch: a small partition is not
starved beside one that never empties.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from forebay.spark.reading.streaming.offsets import Place


class WeighedRange(NamedTuple):
    """Offsets `[start, stop)` that weigh so many records or bytes; a gap weighs nothing."""

    start: int
    stop: int
    weight: int


class Backlog(NamedTuple):
    """What waits in a partition: stretches one after the other, from where the stream stands to the end."""

    start: int
    stretches: Sequence[WeighedRange]

    @property
    def stop(self) -> int:
        return self.stretches[-1].stop if self.stretches else self.start

    @property
    def weight(self) -> int:
        return sum(stretch.weight for stretch in self.stretches)


def clipped(start: int, stop: int, stretches: Sequence[WeighedRange]) -> Backlog:
    """The backlog `[start, stop)` with the weights of these stretches; what none of them covers weighs nothing."""
    found = []
    at = start
    for stretch in sorted(stretches):
        first, last = max(at, stretch.start), min(stop, stretch.stop)
        if first >= last:
            continue
        if at < first:
            found.append(WeighedRange(at, first, 0))
        weight = stretch.weight * (last - first) // (stretch.stop - stretch.start)
        found.append(WeighedRange(first, last, max(weight, min(stretch.weight, 1))))
        at = last
    if at < stop:
        found.append(WeighedRange(at, stop, 0))
    return Backlog(start, found)


def admitted(backlogs: Mapping[Place, Backlog], weight_max: int | None) -> dict[Place, int]:
    """Where one micro-batch ends in each partition.

    Without a limit, and where all that waits weighs no more, that is the end. Else the batch weighs at most
    `weight_max`, but it is never empty: the first record goes through, however large.
    """
    total = sum(backlog.weight for backlog in backlogs.values())
    if weight_max is None or total <= weight_max:
        return {place: backlog.stop for place, backlog in backlogs.items()}
    ends: dict[Place, int] = {}
    spent = 0
    for place, backlog in backlogs.items():
        ends[place], weight = _cut(backlog, weight_max * backlog.weight // total)
        spent += weight
    for place in _in_turn(backlogs):
        end, weight = _one_more(backlogs[place], ends[place])
        if weight and (spent == 0 or spent + weight <= weight_max):
            ends[place] = end
            spent += weight
    return ends


def _cut(backlog: Backlog, share: int) -> tuple[int, int]:
    """How far a share goes, and how much of it that takes. Gaps on the way cost nothing."""
    end, spent = backlog.start, 0
    for stretch in backlog.stretches:
        if spent + stretch.weight > share:
            count = (share - spent) * (stretch.stop - stretch.start) // stretch.weight
            weight = -(-count * stretch.weight // (stretch.stop - stretch.start))
            return (stretch.start + count, spent + weight) if count else (end, spent)
        end, spent = stretch.stop, spent + stretch.weight
    return end, spent


def _one_more(backlog: Backlog, end: int) -> tuple[int, int]:
    """One record further, and about what it weighs; nothing where there is none."""
    for stretch in backlog.stretches:
        if stretch.stop > end and stretch.weight:
            count = stretch.stop - stretch.start
            return max(end, stretch.start) + 1, -(-stretch.weight // count)
    return end, 0


def _in_turn(backlogs: Mapping[Place, Backlog]) -> list[Place]:
    """The partitions in order; which of them comes first depends on how far the stream is."""
    places = sorted(backlogs)
    read = sum(backlog.start for backlog in backlogs.values())
    first = zlib.crc32(b"%d" % read) % len(places)
    return places[first:] + places[:first]
