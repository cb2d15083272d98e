"""One stream over all tiers: at each page the question "who covers this offset?" is asked anew.

The local log answers for what it has; history for what lies below, for what was put into history from
elsewhere, and for what the local files have lost or cannot give. Files that go away under a reader cost it a look-up.
"""

from __future__ import annotations

import logging
from typing import Protocol

from forebay.errors import Corrupt, Unavailable
from forebay.format.control import Floor
from forebay.format.offsets import OffsetSet
from forebay.history import History, Stretch
from forebay.pages import Page
from forebay.records import Gap, Reason
from forebay.sealed import UNREADABLE
from forebay.wal.files import BelowFiles, FileList

logger = logging.getLogger(__name__)

PAGE_BYTES = 1024 * 1024
TOLD_MAX = 64
"""So many flaws of local files are remembered, so that each is said once and not for every page."""
ELSEWHERE = UNREADABLE
"""Gaps of the local log that history may fill."""


class LocalLog(Protocol):
    """The hot tiers: files, cache and live records of one shard."""

    files: FileList

    @property
    def head(self) -> int:
        """Readers see everything below."""

    def read(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page:
        """A page; raises `BelowFiles` where the local files begin later."""

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

    def offset_at_time(self, timestamp: int) -> int | None:
        """`None`."""
        return None

    def damage_at(self, offset: int) -> Gap | None:
        """`None`."""
        return None

    def stretches(self, start: int, stop: int) -> list[Stretch]:
        """None."""
        return []

    def gaps(self, start: int, stop: int) -> list[Gap]:
        """None."""
        return []

    def covers(self, offset: int) -> bool:
        """False."""
        return False

    def is_waiting(self, offset: int) -> bool:
        """False."""
        return False

    def refresh(self) -> None:
        """Nothing."""

    def record(self, deleted: OffsetSet, floor: Floor) -> None:
        """Never asked for: everything that ends lies above the end of this history."""
        raise AssertionError(f"{deleted}, {floor}: a log alone has no history")

    def deleted(self) -> OffsetSet:
        """None."""
        return OffsetSet()


class Tiers:
    """Reads one shard. Safe for concurrent use, as its tiers are."""

    def __init__(self, log: LocalLog, past: Past) -> None:
        self._log = log
        self._past = past
        self._told: set[str] = set()
        """What was said of local files."""

    @property
    def _history(self) -> History | NoHistory:
        return self._past.history

    def read(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page:
        """Records from `offset` on, at least one if there is any, about `bytes_max`; an empty page at the end."""
        try:
            page = self._log.read(offset, bytes_max)
        except BelowFiles:
            return self._below(offset, bytes_max)
        except (Corrupt, OSError) as error:
            return self._instead(error, offset, bytes_max)
        if page.events:
            return self._filled(page, offset, bytes_max)
        if page.next == offset and offset < self._past.exported:
            # The log stands before something that was put into history from elsewhere.
            return self._history.read(offset, bytes_max)
        return page

    def offset_at_time(self, timestamp: int) -> int | None:
        """The first record at or after the time, by offset, in whichever tier it lies."""
        while True:
            exported = self._past.exported
            found = self._history.offset_at_time(timestamp)
            if found is not None:
                # Whatever lies before it is history too.
                return found
            # Files that history has would tell nothing else, and may be damaged.
            found = self._log.offset_at_time(timestamp, exported)
            begins = self._log.files.begins
            if self._past.exported == exported or (begins is not None and begins <= exported):
                return found
            # What was not history yet at the first look may have gone from here before the second.

    def damage_at(self, offset: int) -> Gap | None:
        """The damaged range of the tier that answers for the time of `offset`, if one covers it."""
        return self._history.damage_at(offset) if offset < self._past.exported else self._log.files.damage_at(offset)

    def _instead(self, error: Corrupt | OSError, offset: int, bytes_max: int) -> Page:
        """What history has where a local file, or its index, cannot be read; raises why not if it has nothing."""
        if offset >= self._past.exported:
            raise error
        try:
            page = self._history.read(offset, bytes_max)
        except (Corrupt, Unavailable) as worse:
            # That it is not there at all says more than that it could not be read now.
            raise worse if isinstance(error, OSError) and isinstance(worse, Corrupt) else error from None
        if page.next == offset:
            raise error
        if str(error) not in self._told:
            if len(self._told) >= TOLD_MAX:
                self._told.clear()
            self._told.add(str(error))
            logger.warning("what a local file has is read from history: %s", error)
        return page

    def _below(self, offset: int, bytes_max: int) -> Page:
        page = self._history.read(offset, bytes_max)
        if page.next > offset or self._history.covers(offset):
            # Where history has it and gives nothing, it was loaded, and the load is not committed yet.
            return page
        # Neither the files nor the catalog have it: it was there once, for offsets behind it were given out.
        begins = self._log.files.begins
        stop = begins if begins is not None and begins > offset else self._log.head
        return Page([], [Gap(offset, stop, Reason.DAMAGED)], stop)

    def _filled(self, page: Page, offset: int, bytes_max: int) -> Page:
        """The page up to its first hole that history may fill; or, where it begins with one, what history has."""
        hole = next((gap for gap in page.events if gap.reason in ELSEWHERE), None)
        if hole is None:
            return page
        if hole.start > offset:
            return page.clipped(hole.start)
        try:
            instead = self._history.read(offset, bytes_max).clipped(hole.stop)
        except (Corrupt, Unavailable) as error:
            if hole.reason is Reason.HISTORY:
                raise
            logger.warning("what is damaged here cannot be read from history either: %s", error)
            return page
        # What ended there is not lost here.
        is_known = instead.batches or any(gap.reason is Reason.DELETED for gap in instead.events)
        waits = hole.reason is Reason.HISTORY and (instead.next > offset or self._history.covers(offset))
        return instead if is_known or waits else page
