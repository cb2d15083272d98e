"""Lanes: the producers by which a client's appends are recognised when they are repeated.

Pure bookkeeping. A lane is a random producer with a sequence that rises, and carries one append at a time: sequences
reach the broker in order however many threads or tasks append. Appends that go on at the same time have lanes of their
own. A lane belongs to one partition, or to the records whose keys choose their partitions.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final, TypeAlias

from forebay.appends.producer_window import CALL_IDS
from forebay.clock import Clock

BY_KEY: Final = None
Target: TypeAlias = int | None
"""A partition, or `BY_KEY`."""


@dataclass(slots=True)
class ProducerLane:
    """One producer. `sequence` is that of its next append."""

    producer: int
    sequence: int = 0


class ProducerLanes:
    """The lanes of one topic. For one event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._idle: defaultdict[Target, list[ProducerLane]] = defaultdict(list)

    def take(self, target: Target) -> ProducerLane:
        """A lane for one append, which no other has meanwhile. One that is not given back is used no more.

        The lane that was used last comes first: a broker remembers a limited number of producers.
        """
        idle = self._idle[target]
        return idle.pop() if idle else ProducerLane(CALL_IDS + (int.from_bytes(self._clock.random_bytes(8)) >> 2))

    def give_back(self, target: Target, lane: ProducerLane) -> None:
        """The append has its outcome. The caller has moved `sequence` on if the broker took it."""
        self._idle[target].append(lane)
