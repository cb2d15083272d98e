"""Which tier has an offset, and pages over all tiers: memory, local files, history.

`cover` is the one answer. A local file comes first; history answers for what lies before, between and behind the
files, and for what a file has lost. Files that are removed under a reader cost it another look. `Tiers` shows all that
is stored; `Visible` leaves out what ended: a deleted record is a gap that cursors step over, what a cap or age ended is
one gap up to the floor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol, TypeAlias, TypeVar

from forebay.blobs import BlobChanged, BlobMissing
from forebay.catalog import ShardCatalog
from forebay.catalog.removals import RecordedRemovals
from forebay.clock import Clock
from forebay.errors import Corrupt, Unavailable
from forebay.format.control.frames import NO_FLOOR, Floor, higher
from forebay.format.control.offsets import WINDOW, OffsetSet
from forebay.format.metadata.descriptor import ShardState
from forebay.format.metadata.vectors import without
from forebay.history import History, InHistory
from forebay.pages import Page, Span, joined
from forebay.places import Places
from forebay.records import OFFSET_MAX, Gap, Offsets, Reason
from forebay.sealed import UNREADABLE, first_at_time
from forebay.wal.files import READ_ATTEMPTS, Attempts, FileList, LogFile, SealedFile

logger = logging.getLogger(__name__)

PAGE_BYTES = 1024 * 1024
LOOK_SECONDS = 0.2
"""So long `RecordedHistory` goes by its last look."""
REPORTED_MAX = 64
"""So many flaws of local files are remembered, so that each is said once and not for every page."""

Tier: TypeAlias = LogFile | SealedFile | InHistory | Gap
"""Who has a range of offsets: a local file, a segment of history, or none, and then why there are no records."""
T = TypeVar("T")


class LocalLog(Protocol):
    """The hot tiers: files, cache and live records of one shard."""

    @property
    def files(self) -> FileList:
        """The local files."""

    @property
    def head(self) -> int:
        """Everything below can be read."""

    def read(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page | None:
        """A page; an empty one at the end, `None` where the log does not have the offset."""

    def offset_at_time(self, timestamp: int, start: int = 0) -> int | None:
        """The first record at or after the time that is in the local files, of those that reach beyond `start`."""


class Past(Protocol):
    """What is catalogued of the shard."""

    @property
    def exported(self) -> int:
        """The end of history as far as it is known."""

    @property
    def history(self) -> History | NoHistory:
        """Pages of it."""


class NoHistory:
    """The past of a shard that is a log alone: nothing is catalogued. Answers as an empty `History` does."""

    exported = 0
    compactions = 0

    @property
    def history(self) -> NoHistory:
        """Itself."""
        return self

    def read(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page:
        """An empty page."""
        return Page([], [], offset)

    def offset_at_time(self, timestamp: int, end: int = 0) -> int | None:
        """`None`."""
        return None

    def damage_at(self, offset: int) -> Gap | None:
        """`None`."""
        return None

    def cover(self, start: int, stop: int) -> list[Span[InHistory | Gap]]:
        """Nothing."""
        return []

    def is_waiting(self, offset: int) -> bool:
        """False."""
        return False

    def refresh(self) -> None:
        """Nothing to look at."""

    def record(self, deleted: OffsetSet, floor: Floor) -> None:
        """Never asked for: everything that ends lies above the end of this history."""
        raise AssertionError(f"{deleted}, {floor}: a log alone has no history")

    def deleted(self) -> OffsetSet:
        """None."""
        return OffsetSet()


class Tiers:
    """All that is stored of one shard, records that ended included. Safe for concurrent use, as its tiers are."""

    def __init__(self, log: LocalLog, past: Past) -> None:
        self._log = log
        self._past = past
        self._reported: set[str] = set()
        """What was said of local files."""

    @property
    def exported(self) -> int:
        """The end of history as far as it is known."""
        return self._past.exported

    # Who has it

    def cover(self, start: int, stop: int) -> list[Span[Tier]]:
        """Which tier has each offset of `[start, stop)`, in order and without a break, as far as the shard reaches.

        Opens no segment of history. A local file may lack some of its own range: `in_history` says who has that.
        """
        spans: list[Span[Tier]] = []
        for low, high, tier in self._log.files.cover(start, min(stop, max(self._log.head, self._past.exported))):
            if tier is None:
                spans += self.in_history(low, high)
            elif isinstance(tier, Gap) and tier.reason in UNREADABLE:
                spans += self.in_history(low, high, tier.reason)
            else:
                spans.append(Span(low, high, tier))
        return spans

    def in_history(self, start: int, stop: int, lacking: Reason = Reason.DAMAGED) -> list[Span[Tier]]:
        """What history has of `[start, stop)`, which no local file can give; what it lacks is a gap for that reason."""
        spans: list[Span[Tier]] = []
        for low, high, tier in self._past.history.cover(start, stop):
            if low > start:
                spans.append(Span(start, low, Gap(start, low, lacking)))
            spans.append(Span(low, high, tier))
            start = high
        return [*spans, Span(start, stop, Gap(start, stop, lacking))] if start < stop else spans

    def steady(self, look: Callable[[], T]) -> T:
        """What `look` finds over `cover`; it looks again where files or objects were replaced meanwhile.

        Raises `Corrupt` where an object stays missing, and the error of a file that cannot be read.
        """
        attempts, left = Attempts(self._log.files), READ_ATTEMPTS
        while True:
            try:
                return look()
            except (BlobMissing, BlobChanged) as error:
                left -= 1
                if left <= 0:
                    raise Corrupt(f'history is not there: {error}; run "forebay verify"') from error
            except OSError as error:
                if not attempts.again(error):
                    raise
            # It may have been a file of history that is compacted by now.
            self._past.history.refresh()

    # Pages

    def read(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page:
        """Records from `offset` on, at least one if there is any, about `bytes_max`; an empty page at the end."""
        try:
            page = self._log.read(offset, bytes_max)
        except (Corrupt, OSError) as error:
            return self._instead(error, offset, bytes_max)
        if page is not None and page.next > offset:
            return self._filled(page, offset, bytes_max) if page.events else page
        if page is not None and offset >= self._past.exported:
            return page
        # Before the files, or where the log stands before something that was put into history from elsewhere.
        page = self._past.history.read(offset, bytes_max)
        if page.next > offset:
            return page
        # Where history has it and gives nothing, it was loaded, and the load is not committed yet. What neither has
        # was there once, for offsets behind it were given out.
        found = self.cover(offset, max(self._log.head, self._past.exported))
        gap = found[0].tier if found else None
        return Page([], [gap], gap.stop) if isinstance(gap, Gap) else page

    def offset_at_time(self, timestamp: int) -> int | None:
        """The first record at or after the time, by offset, in whichever tier it lies."""
        while True:
            exported = self._past.exported
            found = self._past.history.offset_at_time(timestamp, exported)
            if found is not None:
                # Whatever lies before it is history too.
                return found
            # Files that history has would say nothing else, and may be damaged.
            found = self._log.offset_at_time(timestamp, exported)
            begins = self._log.files.begins
            if self._past.exported == exported or (begins is not None and begins <= exported):
                return found
            # What was not history yet at the first look may have gone from here before the second.

    def damage_at(self, offset: int) -> Gap | None:
        """The damaged range of the tier that answers for the time of `offset`, if one covers it."""
        if offset < self._past.exported:
            return self._past.history.damage_at(offset)
        return self._log.files.damage_at(offset)

    def _instead(self, error: Corrupt | OSError, offset: int, bytes_max: int) -> Page:
        """What history has where a local file, or its index, cannot be read; raises why not if it has nothing."""
        if offset >= self._past.exported:
            raise error
        try:
            page = self._past.history.read(offset, bytes_max)
        except (Corrupt, Unavailable) as worse:
            # That it is not there at all says more than that it could not be read now.
            raise worse if isinstance(error, OSError) and isinstance(worse, Corrupt) else error from None
        if page.next == offset:
            raise error
        if str(error) not in self._reported:
            if len(self._reported) >= REPORTED_MAX:
                self._reported.clear()
            self._reported.add(str(error))
            logger.warning("what a local file has is read from history: %s", error)
        return page

    def _filled(self, page: Page, offset: int, bytes_max: int) -> Page:
        """The page up to its first gap that history may fill; or, where it begins with one, what history has."""
        gap = next((gap for gap in page.events if gap.reason in UNREADABLE), None)
        if gap is None:
            return page
        if gap.start > offset:
            return page.clipped(gap.start)
        try:
            instead = self._past.history.read(offset, bytes_max).clipped(gap.stop)
        except (Corrupt, Unavailable) as error:
            if gap.reason is Reason.HISTORY:
                raise
            logger.warning("what is damaged here cannot be read from history either: %s", error)
            return page
        # What ended there is not lost here.
        is_known = instead.batches or any(event.reason is Reason.DELETED for event in instead.events)
        if is_known or (gap.reason is Reason.HISTORY and instead.next > offset):
            return instead
        covered = self._past.history.cover(offset, gap.stop)
        if gap.reason is Reason.HISTORY and covered and covered[0].start == offset:
            # A load that was not committed at the read may be by now: the next read gives its records.
            return instead
        # Where history begins later, the rest is not lost.
        return page.clipped(covered[0].start) if covered and covered[0].start > offset else page


class StoredStream(Protocol):
    """All that is stored, whether it ended or not."""

    def read(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page:
        """A page; an empty one at the end."""

    def offset_at_time(self, timestamp: int) -> int | None:
        """The first record at or after the time."""

    def damage_at(self, offset: int) -> Gap | None:
        """The damaged range that covers `offset`, if one does whose times are not known."""


class Ended(NamedTuple):
    """What ended, as of one moment. No offset below `floor.earliest` needs to be in `deleted`."""

    deleted: OffsetSet
    floor: Floor


NOTHING: Final = Ended(OffsetSet(), NO_FLOOR)


class Visible:
    """What readers of a shard are shown. Safe for concurrent use."""

    def __init__(self, stream: StoredStream, head: Callable[[], int]) -> None:
        self._stream = stream
        self._head = head
        self.ended = NOTHING
        """Replaced as a whole; a reader goes on with the one it has."""

    def read(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page:
        """Live records from `offset` on, at least one if there is any; an empty page at the end."""
        while True:
            deleted, floor = self.ended
            if offset < floor.earliest:
                return Page([], _below(offset, floor), floor.earliest)
            start = min(run_end(deleted, offset), max(self._head(), offset))
            page = self._stream.read(start, bytes_max)
            # Else what lies there may have been removed meanwhile. A read may take long: what was deleted during it
            # is left out, too.
            deleted, floor = self.ended
            if offset >= floor.earliest:
                return _shown(page, offset, start, deleted)

    def read_cached(self, offset: int, read: Callable[[int], Page | None]) -> Page | None:
        """As `read`, of what `read` has in memory; `None` where it has nothing. Takes no lock of its own."""
        deleted, floor = self.ended
        if offset < floor.earliest:
            return Page([], _below(offset, floor), floor.earliest)
        start = min(run_end(deleted, offset), max(self._head(), offset))
        page = read(start)
        return None if page is None else _shown(page, offset, start, deleted)

    def offset_at_time(self, timestamp: int) -> int | None:
        """The first live record at or after the time; `None` if there is none.

        Where a damaged range lies right before it, the start of that: the record may have stood there, and a reader
        that begins there meets it.
        """
        found = self._live_at_time(timestamp)
        end = found if found is not None else self._head()
        deleted, floor = self.ended
        gap = self._stream.damage_at(end - 1) if end > floor.earliest else None
        if gap is None:
            return found
        start = run_end(deleted, max(gap.start, floor.earliest))
        return start if start < end else found

    def _live_at_time(self, timestamp: int) -> int | None:
        found = self._stream.offset_at_time(timestamp)
        deleted, floor = self.ended
        if found is None or (found >= floor.earliest and found not in deleted):
            return found
        at = max(found, floor.earliest)
        while (page := self.read(at)).next > at:
            matching = first_at_time(page.batches, timestamp)
            if matching is not None:
                return matching
            at = page.next
        # A bulk load that is not committed yet: who begins there waits, and misses nothing of it.
        return at if at < self._head() else None


def run_end(deleted: OffsetSet, offset: int) -> int:
    """The first offset from there on that was not deleted."""
    while offset in deleted:
        stop = (offset & -WINDOW) + WINDOW
        left = OffsetSet.of_range(offset, stop) - deleted
        offset = next(iter(left), stop)
    return offset


def _below(offset: int, floor: Floor) -> list[Gap]:
    """The gaps that a reader at `offset` gets for everything below `earliest`."""
    gaps = []
    if offset < floor.evict_floor:
        gaps.append(Gap(offset, floor.evict_floor, floor.reason or Reason.CAP))
        offset = floor.evict_floor
    return [*gaps, Gap(offset, floor.earliest, Reason.DELETED)] if offset < floor.earliest else gaps


def _shown(page: Page, offset: int, start: int, deleted: OffsetSet) -> Page:
    """The page from `start` on without deleted records; `[offset, start)` are deleted too."""
    if start == offset and not deleted.count_in(offset, page.next):
        return page
    batches = []
    events = list(page.events)
    if start > offset:
        events.append(Gap(offset, start, Reason.DELETED))
    for batch in page.batches:
        kept, gone = without(batch, deleted)
        batches += kept
        events += gone
    return Page(batches, joined(sorted(events)), page.next)


class RecordedHistory:
    """History beside its owner, seen from the data directory `holder`. For one thread at a time, but for `history`."""

    def __init__(self, catalog: ShardCatalog, places: Places, holder: str, clock: Clock) -> None:
        self._catalog = catalog
        self._places = places
        self._holder = holder
        self._clock = clock
        self.history = History(catalog, places.segment)
        """What is catalogued."""
        self._looked_at = float("-inf")
        self._is_elsewhere = False
        self.ended = NOTHING
        """What ended in history, as of the last look."""
        self._deletes = 0
        self.reserved_end = 0
        """No offset at or above was ever given out, as of the last look; the highest of all where a log alone knows."""

    def again(self) -> RecordedHistory:
        """The same, for another thread: it shares what is catalogued, and looks for itself at the rest."""
        other = RecordedHistory(self._catalog, self._places, self._holder, self._clock)
        other.history = self.history
        return other

    @property
    def exported(self) -> int:
        """The end of history, as of a moment ago."""
        self._look()
        return self.history.end

    @property
    def is_elsewhere(self) -> bool:
        """Whether another directory has the shard, as of a moment ago. Files here are what it was before, then.

        What is not history of them, its new owner could not take over: it counts as lost everywhere.
        """
        self._look()
        return self._is_elsewhere

    def beside(self, local: Offsets) -> Offsets:
        """The watermarks, where a local log says the rest: what another directory holds is seen by its history."""
        end = self.exported
        if self._is_elsewhere:
            return local._replace(exported=end, next=end, durable=end)
        return local._replace(exported=end, next=max(local.next, end), durable=max(local.durable, end))

    def close(self) -> None:
        """Give back what is held."""
        self.history.close()

    def look(self) -> None:
        """Look at everything that is recorded, now."""
        stored = self._catalog.state()
        self._is_elsewhere = stored is not None and stored.state.holder not in (None, self._holder)
        if stored is not None:
            self._take(stored.state)
            self.reserved_end = OFFSET_MAX if stored.state.reserved_in_log else stored.state.reserved_end
        self.history.refresh()
        self._looked_at = self._clock.monotonic()

    def _look(self) -> None:
        if self._clock.monotonic() - self._looked_at >= LOOK_SECONDS:
            self.look()

    def _take(self, state: ShardState) -> None:
        deleted = self.ended.deleted
        if state.deletes != self._deletes:
            deleted |= RecordedRemovals(self._catalog).deleted()
            self._deletes = state.deletes
        elif state.floor == self.ended.floor:
            return
        self.ended = Ended(deleted, higher(self.ended.floor, state.floor))
