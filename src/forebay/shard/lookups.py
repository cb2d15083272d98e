"""Records of one shard by key and tag, over all tiers.

Each file, hot or sealed, knows where a hash occurs; history is asked for what the local files do not have. A hash
is only a hint: the key or tag itself is compared on the record. A match that cannot be read is reported as a gap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Protocol, TypeAlias, TypeVar

import numpy as np

from forebay.errors import Corrupt
from forebay.format.control.frames import Floor
from forebay.format.control.offsets import OffsetSet
from forebay.format.frame.batch import Batch
from forebay.format.index.hashing import Places
from forebay.format.index.lookups import Sought
from forebay.format.index.sections import SectionKind
from forebay.history import SPOT, InHistory
from forebay.pages import Page, Span
from forebay.records import Gap, Reason
from forebay.sealed import UNREADABLE
from forebay.shard.tiers import PAGE_BYTES, Ended, Tier, Tiers
from forebay.wal.files import READ_ATTEMPTS

_T = TypeVar("_T")

PAGE_RECORDS = 10_000
NEAR_OFFSETS = 64
"""Matches no further apart are read together."""
NEAR_BYTES = 64 * 1024

Match: TypeAlias = Batch | Gap
"""Consecutive records that match, or a gap where one may have been."""


class SearchedLog(Protocol):
    """The hot tiers of a shard."""

    @property
    def head(self) -> int:
        """Everything below can be read."""

    def check_open(self) -> None:
        """`Closed` if the log is."""

    def bring_up(self) -> None:
        """Publish what was acknowledged already."""


class Searched(Protocol):
    """A file or segment that knows where a hash occurs."""

    def find(self, kind: SectionKind, wanted: int, start: int = 0) -> Iterator[Places]:
        """The offsets from `start` on, in rising pieces."""

    def find_backwards(self, kind: SectionKind, wanted: int) -> Iterator[Places]:
        """All offsets, the newest piece first."""

    def unsearched(self, kind: SectionKind) -> list[Gap]:
        """The ranges of which `find` does not know what is in them."""


class _Waiting(Exception):  # no error: readers stand here until a bulk load is committed
    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset


class Lookups:
    """Looks up records of one shard. Safe for concurrent use, as its tiers are."""

    def __init__(self, log: SearchedLog, tiers: Tiers, ended: Callable[[], Ended]) -> None:
        self._log = log
        self._tiers = tiers
        self._ended = ended

    def read_by_key(
        self,
        key: bytes,
        start: int = 0,
        *,
        history: bool = False,
        records_max: int = PAGE_RECORDS,
        bytes_max: int = PAGE_BYTES,
    ) -> Page:
        """The newest live record with exactly this key, or with `history` all of them, page by page."""
        sought = Sought.of_key(key)
        if history:
            return self._tried(lambda: self._page(sought, start, records_max, bytes_max))
        return self._tried(lambda: self._newest(sought, start))

    def read_by_tag(
        self, tag: str, start: int = 0, *, records_max: int = PAGE_RECORDS, bytes_max: int = PAGE_BYTES
    ) -> Page:
        """All live records with exactly this tag, page by page."""
        sought = Sought.of_tag(tag)
        return self._tried(lambda: self._page(sought, start, records_max, bytes_max))

    def offsets(self, sought: Sought) -> tuple[OffsetSet, list[Gap]]:
        """Where all live records that match are, of those published before the call; and where others may be.

        The gaps are ranges that cannot be read and that may hold a match.
        """
        # Before the first look: one that is repeated, because files were replaced under it, looks no further.
        head, _ = self._now()

        def found() -> tuple[OffsetSet, list[Gap]]:
            matches = list(self._matches(sought, self._ended(), 0, head, waiting=False))
            runs = [np.arange(run.base, run.end) for run in matches if isinstance(run, Batch)]
            unread = [match for match in matches if isinstance(match, Gap)]
            return OffsetSet.of(np.concatenate(runs)) if runs else OffsetSet(), unread

        return self._tried(found)

    def _now(self) -> tuple[int, Ended]:
        """The head, with everything acknowledged below it, and what ended."""
        self._log.check_open()
        self._log.bring_up()
        return self._log.head, self._ended()

    def _tried(self, look: Callable[[], _T]) -> _T:
        """Look, and look again where files, objects or records went meanwhile."""
        for attempt in count(1):
            floor = self._ended().floor
            found = self._tiers.steady(look)
            # Else what is missing may have been removed under it.
            if attempt >= READ_ATTEMPTS or self._ended().floor.earliest == floor.earliest:
                break
        return found

    # Pages

    def _page(self, sought: Sought, start: int, records_max: int, bytes_max: int) -> Page:
        head, ended = self._now()
        found = _Found(records_max, bytes_max)
        below = _tombstone(start, ended.floor)
        try:
            for match in self._matches(sought, ended, start, head, waiting=True):
                if not found.take(match):
                    return found.page(below, found.end)
        except _Waiting as waiting:
            return found.page(below, max(start, waiting.offset))
        return found.page(below, max(start, head))

    def _newest(self, sought: Sought, start: int) -> Page:
        head, ended = self._now()
        events: list[Gap] = []
        batches: list[Batch] = []
        for found in self._backwards(sought, ended, start, head):
            match = found if isinstance(found, Gap) else next(self._verified(sought, np.array([found])), None)
            if isinstance(match, Batch):
                batches.append(match)
                break
            if match is not None:
                # A damaged frame is reported from each match on that was in it.
                events = [match, *(event for event in events if event.stop != match.stop)]
        return Page(batches, [*_tombstone(start, ended.floor), *events], max(start, head))

    # Where matches are

    def _matches(self, sought: Sought, ended: Ended, start: int, head: int, *, waiting: bool) -> Iterator[Match]:
        """The live matches of `[start, head)` in order, and the ranges that may hold one and cannot be searched.

        With `waiting` raises `_Waiting` before a load.
        """
        start = max(start, ended.floor.earliest)
        for span in self._searchable(sought.kind, start, head):
            if isinstance(span.tier, Gap):
                yield from self._read_through(sought, span.tier, ended.deleted)
                continue
            if isinstance(span.tier, InHistory):
                if waiting:
                    raise _Waiting(span.start)
                continue
            for piece in span.tier.find(sought.kind, sought.hash, span.start):
                own = _within(span, piece)
                yield from self._verified(sought, _live(own, ended.deleted))
                if len(own) < len(piece):
                    break

    def _backwards(self, sought: Sought, ended: Ended, start: int, head: int) -> Iterator[int | Gap]:
        """The offsets of live records that may match, the newest first, and ranges that cannot be searched."""
        start = max(start, ended.floor.earliest)
        for span in self._searchable(sought.kind, start, head, backwards=True):
            if isinstance(span.tier, Gap):
                for match in reversed(self._read_through(sought, span.tier, ended.deleted)):
                    yield from [match] if isinstance(match, Gap) else reversed(range(match.base, match.end))
                continue
            if isinstance(span.tier, InHistory):
                continue
            for piece in span.tier.find_backwards(sought.kind, sought.hash):
                yield from reversed(_live(_within(span, piece), ended.deleted).tolist())
                if len(piece) and int(piece[0]) < span.start:
                    break

    def _searchable(
        self, kind: SectionKind, start: int, head: int, *, backwards: bool = False
    ) -> Iterator[Span[Searched | InHistory | Gap]]:
        """All of `[start, head)` that may hold records, in order or from its end.

        Files and segments that can be searched, segments of a load that is not committed, and as gaps the ranges
        that no copy can be searched in. Nothing is read before it is come to.
        """
        spans = self._tiers.cover(start, head)
        for span in reversed(spans) if backwards else spans:
            parts = self._parts(span, kind)
            yield from reversed(parts) if backwards else parts

    def _parts(self, span: Span[Tier], kind: SectionKind) -> list[Span[Searched | InHistory | Gap]]:
        """A span as what can be searched of it and what cannot."""
        start, stop, tier = span
        if isinstance(tier, Gap):
            return [Span(start, stop, Gap(start, stop, tier.reason))] if tier.reason in UNREADABLE else []
        if isinstance(tier, InHistory) and tier.waits:
            return [Span(start, stop, tier)]
        searched = tier.open() if isinstance(tier, InHistory) else tier
        try:
            gaps = [gap for gap in searched.unsearched(kind) if gap.start < stop and gap.stop > start]
        except (Corrupt, OSError):
            if isinstance(tier, InHistory) or stop > self._tiers.exported:
                raise
            gaps = [Gap(start, stop, Reason.DAMAGED)]
        parts: list[Span[Searched | InHistory | Gap]] = []
        for gap in gaps:
            low, high = max(start, gap.start), min(stop, gap.stop)
            if low > start:
                parts.append(Span(start, low, searched))
            if isinstance(tier, InHistory):
                parts.append(Span(low, high, Gap(low, high, Reason.DAMAGED)))
            else:
                # History may have what a local file has lost.
                parts += [part for other in self._tiers.in_history(low, high) for part in self._parts(other, kind)]
            start = high
        return [*parts, Span(start, stop, searched)] if start < stop else parts

    # What is there

    def _read_through(self, sought: Sought, gap: Gap, deleted: OffsetSet) -> list[Match]:
        """What matches in a range that no postings cover, read record by record, and what cannot be read of it.

        Memory may hold what is damaged in a file.
        """
        found: list[Match] = []
        at = gap.start
        while at < gap.stop:
            page = self._tiers.read(at, PAGE_BYTES).clipped(gap.stop)
            if page.next == at:
                break
            found += [event for event in page.events if event.reason in UNREADABLE and not _is_deleted(event, deleted)]
            for batch in page.batches:
                found += matching(sought, batch, _live(_with_entry(sought, batch), deleted))
            at = page.next
        return sorted(found, key=_first)

    def _verified(self, sought: Sought, offsets: Places) -> Iterator[Match]:
        """The records at these rising offsets that do match, in order, and gaps where some cannot be read."""
        place = 0
        while place < len(offsets):
            offset = int(offsets[place])
            near = place + 1 < len(offsets) and int(offsets[place + 1]) - offset <= NEAR_OFFSETS
            page = self._tiers.read(offset, NEAR_BYTES if near else SPOT)
            stop = max(page.next, offset + 1)
            until = place + int(np.searchsorted(offsets[place:], stop))
            found: list[Match] = [gap for gap in page.events if _is_reported(gap, offsets[place:until])]
            for batch in page.batches:
                found += matching(sought, batch, offsets[place:until])
            yield from sorted(found, key=_first)
            place = until


class _Found:
    """A page of matches in the making."""

    def __init__(self, records_max: int, bytes_max: int) -> None:
        self._records_left = records_max
        self._bytes_left = bytes_max
        self._batches: list[Batch] = []
        self._events: list[Gap] = []

    @property
    def end(self) -> int:
        """Behind the last record."""
        return self._batches[-1].end

    def take(self, match: Match) -> bool:
        """Add what there is room for; false if that is not all of it. The first record always comes in."""
        if isinstance(match, Gap):
            self._events.append(match)
            return True
        totals = match.sizes().cumsum()
        room = min(self._records_left, int(np.searchsorted(totals, self._bytes_left, side="right")))
        if not self._batches:
            room = max(1, room)
        if room > 0:
            self._batches.append(match.slice(match.base, match.base + room))
            self._records_left -= self._batches[-1].count
            self._bytes_left -= int(totals[self._batches[-1].count - 1])
        return room >= match.count

    def page(self, below: Iterable[Gap], following: int) -> Page:
        """What was found; `following` is where to go on."""
        return Page(self._batches, [*below, *(gap for gap in self._events if gap.start < following)], following)


def _within(span: Span[_T], offsets: Places) -> Places:
    """Those of the rising offsets that lie in the span."""
    low, high = np.searchsorted(offsets, [span.start, span.stop])
    return offsets[low:high]


def _is_deleted(gap: Gap, deleted: OffsetSet) -> bool:
    """Whether all that may have stood in the gap was deleted."""
    return deleted.count_in(gap.start, gap.stop) == gap.stop - gap.start


def _with_entry(sought: Sought, batch: Batch) -> Places:
    """The offsets of the records of a batch that have any key, or any tag."""
    entries = (batch.keys() if sought.kind is SectionKind.KEY_POSTINGS else batch.tags()) or []
    rows = [row for row, entry in enumerate(entries) if entry is not None]
    return np.array(rows, dtype=np.int64) + batch.base


def _tombstone(start: int, floor: Floor) -> list[Gap]:
    """The gaps that a reader at `start` gets for evicted records."""
    return [Gap(start, floor.evict_floor, floor.reason or Reason.CAP)] if start < floor.evict_floor else []


def _live(offsets: Places, deleted: OffsetSet) -> Places:
    if not len(offsets) or not deleted.count_in(int(offsets[0]), int(offsets[-1]) + 1):
        return offsets
    return np.array([offset for offset in offsets.tolist() if offset not in deleted], dtype=np.int64)


def _is_reported(gap: Gap, offsets: Places) -> bool:
    """Whether a match may have been in this gap."""
    low, high = np.searchsorted(offsets, [gap.start, gap.stop])
    return bool(high > low)


def matching(sought: Sought, batch: Batch, offsets: Places) -> Iterator[Batch]:
    """The records of a batch at these offsets that have what is sought, consecutive ones together.

    The offsets are of records that have a key, or a tag: those without are in no postings.
    """
    strip = batch.key_strip() if sought.kind is SectionKind.KEY_POSTINGS else batch.tag_strip()
    if strip is None:
        return
    low, high = np.searchsorted(offsets, [batch.base, batch.end])
    rows = offsets[low:high] - batch.base
    rows = rows[strip.offsets[rows + 1] - strip.offsets[rows] == len(sought.entry)]
    places = zip(rows.tolist(), strip.offsets[rows].tolist(), strict=True)
    size = len(sought.entry)
    same = np.array([row for row, place in places if strip.filling[place : place + size] == sought.entry], np.int64)
    for run in np.split(same, np.flatnonzero(np.diff(same) != 1) + 1):
        if len(run):
            yield batch.slice(batch.base + int(run[0]), batch.base + int(run[-1]) + 1)


def _first(match: Match) -> int:
    return match.base if isinstance(match, Batch) else match.start
