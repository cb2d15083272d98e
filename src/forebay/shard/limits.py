"""Which records end when: the caps and the time to live of a topic, applied to one shard. Pure: reads no clock.

Every engine gives what it holds as `Stretch`es and asks here, so all of them evict the same records. Limits
look at what lies at or above `earliest`; deleted records count for caps as if they were there, because
nothing but the passing of the floor takes them out of the account. Gaps count for no byte and no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forebay.errors import Full
from forebay.records import Reason
from forebay.settings import RetentionSettings
from forebay.topics import OnFull, TopicSpec


class Stretch(NamedTuple):
    """Consecutive offsets `[start, stop)` that were appended at once and are all live, all deleted, or all a gap."""

    start: int
    stop: int
    live: bool
    appended_at: int | None
    """Milliseconds; `None` for a gap, which never keeps anything from going."""
    size: int
    """The bytes that all of them count for."""
    sizes: Callable[[], npt.NDArray[np.int64]]
    """The bytes that each of them counts for."""

    def behind(self, count: int) -> Stretch:
        """The rest of it behind the first `count`, which is not all of it."""
        if not count:
            return self
        sizes = self.sizes()
        left = sizes[count:]
        return self._replace(start=self.start + count, size=int(left.sum()), sizes=lambda: left)


class Evicted(NamedTuple):
    """What one pass did."""

    floor: int
    """`evict_floor` on return."""
    records: int = 0
    """Live records that ended."""
    bytes: int = 0
    """What they, and the deleted ones among them, counted for."""
    reason: Reason | None = None
    """Why the floor moved; `None` if it did not."""
    held_back: bool = False
    """By time more would have gone, but no more than a share goes in one pass."""


class Limits(NamedTuple):
    """The limits of one shard."""

    cap_records: int | None = None
    cap_bytes: int | None = None
    ttl_ms: int | None = None
    rejects: bool = False
    share_percent: int = 50
    """No more of the live records go in one pass because of time: a clock that jumps must not end them all."""

    @classmethod
    def of(cls, spec: TopicSpec, settings: RetentionSettings) -> Limits:
        """As the definition of the topic says, applied as the settings say."""
        rejects = spec.on_full is OnFull.REJECT_NEW
        return cls(spec.cap_records, spec.cap_bytes, spec.ttl_ms, rejects, settings.evict_share_percent)

    def check_room(self, name: object, records: int, size: int) -> None:
        """`Full` if a shard that refuses at its caps would hold so many offsets and bytes."""
        if not self.rejects:
            return
        for what, would, cap in (("cap_records", records, self.cap_records), ("cap_bytes", size, self.cap_bytes)):
            if cap is not None and would > cap:
                raise Full(
                    f"{name} is full: with this append it would hold {would}, above {what} {cap}: delete records, "
                    'raise the cap, or let the topic discard old ones (on_full "discard_old")',
                    shard=name,
                )


class Holding(NamedTuple):
    """What a shard holds before a pass."""

    floor: int
    """`evict_floor`."""
    earliest: int
    head: int
    live: int
    bytes: int
    """What `[earliest, head)` counts for."""


def plan(
    limits: Limits, holding: Holding, stretches: Callable[[], Iterator[Stretch]], now_ms: int
) -> tuple[int, Evicted]:
    """Where `earliest` must move to, and what that ends. `stretches` gives everything from `earliest` on.

    Caps come first. `cap_records` keeps that many offsets below the head; `cap_bytes` as many records as fit, but
    always the newest; `ttl_ms` ends what was appended so long ago, from the front up to the first that stays.
    """
    going = _Pass(limits, holding, now_ms)
    if going.is_idle:
        return holding.earliest, Evicted(holding.floor)
    for stretch in stretches():
        if not going.takes_all(stretch):
            break
    if going.at == holding.earliest:
        return going.at, Evicted(holding.floor, held_back=going.held_back)
    return going.at, Evicted(going.at, going.records, going.bytes, going.reason, going.held_back)


class _Pass:
    """One pass from the front."""

    def __init__(self, limits: Limits, holding: Holding, now_ms: int) -> None:
        self.at = holding.earliest
        self.records = 0
        self.bytes = 0
        self.reason: Reason | None = None
        self.held_back = False
        self._head = holding.head
        self._live = holding.live
        self._share_percent = limits.share_percent
        self._until = 0
        self._excess = 0
        self._expired = None if limits.ttl_ms is None else now_ms - limits.ttl_ms
        self._allowed: int | None = None
        if not limits.rejects:
            if limits.cap_records is not None:
                self._until = holding.head - limits.cap_records
            if limits.cap_bytes is not None:
                self._excess = holding.bytes - limits.cap_bytes

    @property
    def is_idle(self) -> bool:
        """Whether nothing can go, whatever is there."""
        return self._until <= self.at and self._excess <= 0 and self._expired is None

    def takes_all(self, stretch: Stretch) -> bool:
        """End what must go of the stretch; false if some of it stays."""
        capped = self._by_caps(stretch)
        if capped:
            self._take(stretch, capped, Reason.CAP)
            if self.at == stretch.stop:
                return True
            stretch = stretch.behind(capped)
        expired = self._by_time(stretch)
        if expired:
            self._take(stretch, expired, Reason.TTL)
        return self.at == stretch.stop

    def _by_caps(self, stretch: Stretch) -> int:
        """How many of the stretch the caps ask for."""
        count = stretch.stop - stretch.start
        number = min(max(self._until - stretch.start, 0), count)
        missing = self._excess - self.bytes
        if missing <= 0 or number == count:
            return number
        last = min(count, self._head - 1 - stretch.start)
        if stretch.size <= missing:
            return max(number, last)
        needed = int(np.searchsorted(np.cumsum(stretch.sizes()), missing)) + 1
        return max(number, min(needed, last))

    def _by_time(self, stretch: Stretch) -> int:
        """How many of the stretch are too old, as far as a pass may go."""
        if self._expired is None or (stretch.appended_at is not None and stretch.appended_at > self._expired):
            return 0
        count = stretch.stop - stretch.start
        if not stretch.live:
            return count
        if self._allowed is None:
            left = self._live - self.records
            self._allowed = self.records + max(1, left * self._share_percent // 100)
        room = self._allowed - self.records
        self.held_back = room < count
        return min(room, count)

    def _take(self, stretch: Stretch, count: int, reason: Reason) -> None:
        whole = count == stretch.stop - stretch.start
        self.at = stretch.start + count
        self.bytes += stretch.size if whole else int(stretch.sizes()[:count].sum())
        if stretch.live:
            self.records += count
        self.reason = reason
