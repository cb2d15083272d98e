"""Reads the log of a shard from another process than its owner's, up to what the owner has published.

While the owner lives, its file `live` says how far that is; before it has written one, the durable marks in the log
do. Without an owner, everything that is whole is synced first and then shown. Changes nothing on disk.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator, Sequence
from typing import Self

from forebay.appends.producer_window import ProducerWindow
from forebay.clock import Clock
from forebay.disk import Disk, File
from forebay.errors import Corrupt, Unavailable
from forebay.format.files.live import Live
from forebay.format.files.segment import HEADER_BYTES, decode_header, parse_segment_name, segment_name
from forebay.format.frame.head import Verdict
from forebay.pages import Page
from forebay.records import Offsets
from forebay.settings import WalSettings
from forebay.wal.files import FileList, LogFile, SealedFile, walked
from forebay.wal.recovery.survey import Survey, indexed_files, survey
from forebay.wal.removals import Removals
from forebay.wal.scan import LogScan
from forebay.wal.tail import read_live

PAGE_BYTES = 1024 * 1024
POLL_SECONDS = 0.005
POLL_SECONDS_MAX = 0.1
CHANGING_SECONDS = 5.0
"""So long a read begins again where the owner seals or removes files under it, after longer and longer pauses."""
PUBLISHED_WITHIN_SECONDS = 1.0
"""How long a first look waits for an owner that has begun to write and not published yet."""


def tries(clock: Clock) -> Iterator[None]:
    """Once at once, then again after a pause that grows, until the time is up in which an owner's files may change."""
    deadline, pause = clock.monotonic() + CHANGING_SECONDS, POLL_SECONDS
    yield
    while clock.monotonic() < deadline:
        clock.sleep(pause)
        pause = min(2 * pause, POLL_SECONDS_MAX)
        yield


class FollowedLog:
    """What may be read now, brought up to date at each look past the known end. For one thread at a time."""

    def __init__(
        self, disk: Disk, clock: Clock, directory: str, settings: WalSettings, is_owned: Callable[[], bool]
    ) -> None:
        self.files = FileList()
        self.head = 0
        self.durable = 0
        self.removals = Removals()
        """What the log was ever seen to say of deletes and floors; the newest file says all that history does not."""
        self._disk = disk
        self._clock = clock
        self._directory = directory
        self._settings = settings
        self._is_owned = is_owned
        self._live: Live | None = None
        self._scan: LogScan | None = None
        self._unpublished: tuple[list[str], int] | None = None
        """What was there when the log's own marks were gone by: the files, and the size of the newest."""
        self._known = False
        """Some look has found where the log ends."""

    def again(self) -> Self:
        """The same log for another thread: with files of its own, and knowing how far this one has seen it."""
        other = type(self)(self._disk, self._clock, self._directory, self._settings, self._is_owned)
        other._known, other.head, other.durable = self._known, self.head, self.durable
        other.removals.add(self.removals)
        return other

    def read(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page | None:
        """Records from `offset` on that the owner has published; an empty page at the end.

        `None` where no file has it: if anything does, it is the history.
        """
        if offset >= self.head:
            self.refresh()
        for _ in tries(self._clock):
            if offset >= self.head:
                return Page([], [], offset)
            try:
                page = self.files.read(offset, bytes_max)
                return None if page is None else page.clipped(self.head)
            except OSError as error:
                if error.errno not in (errno.ESTALE, errno.ENOENT):
                    raise
                self.list_again()
        raise Unavailable(
            f"{self._directory}: its files changed for {CHANGING_SECONDS:g} s while one page was read; try again"
        )

    def wait(self, offset: int, timeout: float | None) -> bool:
        """Look again and again until something at or above `offset` can be read; false when the time is up."""
        deadline = None if timeout is None else self._clock.monotonic() + timeout
        while True:
            self.refresh()
            if self.head > offset:
                return True
            if deadline is not None and self._clock.monotonic() >= deadline:
                return False
            self._clock.sleep(POLL_SECONDS)

    def offset_at_time(self, timestamp: int, start: int = 0) -> int | None:
        """The first record at or after the time, in files that reach beyond `start`; `None` if there is none."""
        self.refresh()
        found = self.files.offset_at_time(timestamp, start)
        return found if found is not None and found < self.head else None

    def offsets(self) -> Offsets:
        """The watermarks as far as they are published."""
        self.refresh()
        return Offsets(earliest=0, evict_floor=0, durable=self.durable, exported=0, next=self.head)

    def refresh(self) -> None:
        """Look how far the owner has come."""
        # With pauses: an owner that puts a file in the place of another says so right after.
        for _ in tries(self._clock):
            try:
                if self._look():
                    self._known = True
                    return
            except OSError as error:
                if error.errno not in (errno.ESTALE, errno.ENOENT):
                    raise Unavailable(
                        f"{self._directory} cannot be looked at: {error}; check its permissions, and try again"
                    ) from error
            self._scan = None
        raise Unavailable(
            f"{self._directory}: its files changed for {CHANGING_SECONDS:g} s while they were looked at; try again"
        )

    def list_again(self) -> None:
        """Look at every file again: one of them was replaced or removed."""
        self._scan = None
        self.refresh()

    def close(self) -> None:
        """Give descriptors back."""
        self._scan = self._live = self._unpublished = None
        self._show([])

    def _look(self) -> bool:
        """Bring everything up to date; false if files were replaced meanwhile."""
        live = read_live(self._disk, self._directory)
        if live is not None and live == self._live and self._scan is not None:
            return True
        segments = self._segments()
        if live is None and not segments:
            # No owner has written yet, or the shard is deleted.
            self._live = self._scan = None
            self.head = self.durable = 0
            self._show([])
            return True
        if not self._is_owned():
            return self._survey(live, segments)
        if live is not None:
            return self._go_by(live)
        return self._go_by_marks(segments)

    def _survey(self, live: Live | None, segments: Sequence[str]) -> bool:
        """The log has no owner: sync what is there, so that it cannot vanish again, and show all that is whole."""
        if segments:
            self._sync(segments[-1])
        facts = survey(self._disk, self._directory, self._settings, writable=False)
        if self._is_owned():
            # An owner came meanwhile: some of this may be what it has written and not published.
            _close(_files_of(facts))
            return False
        self._show(_files_of(facts))
        self.head = self.durable = facts.end
        if live is not None and facts.doubtful:
            # That sync was worth nothing: what its owner has not shown may still vanish.
            self.head, self.durable = min(facts.end, live.end), min(facts.end, live.durable)
        self._live, self._scan = live, facts.last
        self._note(facts.last)
        return True

    def _go_by_marks(self, segments: list[str]) -> bool:
        """The owner has published nothing, as when it has not opened the shard: show what is durable for certain.

        That is all there is after a clean stop. What else there is may still be taken back, so that a reader
        who knows no better end than this cannot be answered.
        """
        found = (segments, self._size(segments[-1]))
        if found == self._unpublished:
            return True
        waited_until = self._clock.monotonic() + PUBLISHED_WITHIN_SECONDS
        while True:
            facts = survey(self._disk, self._directory, self._settings, writable=False)
            proven = min(facts.end, facts.last.durable) if facts.last is not None else 0
            if proven == facts.end or self._known:
                break
            _close(_files_of(facts))
            if read_live(self._disk, self._directory) is not None or not self._is_owned():
                return False
            if self._clock.monotonic() >= waited_until:
                raise Unavailable(
                    f"{self._directory}: its owner has not published yet how far it may be read: "
                    "try again once the owner has used the topic, or has closed the log"
                )
            self._clock.sleep(POLL_SECONDS)
        self._show(_files_of(facts))
        self.head = self.durable = min(facts.end, max(self.head, proven))
        self._live, self._scan, self._unpublished = None, None, found
        self._note(facts.last)
        return True

    def _sync(self, segment: str) -> None:
        with contextlib.closing(self._disk.open(f"{self._directory}/{segment}")) as file:
            file.sync()

    def _size(self, segment: str) -> int:
        with contextlib.closing(self._disk.open(f"{self._directory}/{segment}")) as file:
            return file.size()

    def _go_by(self, live: Live) -> bool:
        """Show what the owner has published; false if files were replaced meanwhile."""
        name = segment_name(live.file_start, live.file_epoch)
        scan = self._scan
        if scan is not None and scan.path.endswith(name):
            scan.run(live.position, proof=0)
            if scan.stop < live.position:
                return False
            *kept, before = self.files.all
            files = [*kept, _newest(scan, live, before)]
        else:
            with contextlib.ExitStack() as opened:
                scan = self._opened(f"{self._directory}/{name}", opened)
                scan.run(live.position, proof=0)
                if scan.stop < live.position:
                    return False
                newest = _newest(scan, live)
                older = [segment for segment in self._segments() if segment < name]
                files = [*self._older(older, newest, opened), newest]
                opened.pop_all()
        self._show(files)
        self._scan, self._live = scan, live
        self._note(scan)
        self.head, self.durable = live.end, live.durable
        return True

    def _note(self, newest: LogScan | None) -> None:
        if newest is not None and newest.removals.is_some:
            self.removals.add(newest.removals)

    def _show(self, files: Sequence[LogFile | SealedFile]) -> None:
        """Read from these from now on, and give back what only the ones before needed."""
        before, self.files = self.files, FileList(files)
        self._unpublished = None
        kept = {_handle(file) for file in files}
        _close([file for file in before.all if _handle(file) not in kept])

    def _older(
        self, segments: Sequence[str], newest: LogFile, opened: contextlib.ExitStack
    ) -> list[LogFile | SealedFile]:
        """The files before the newest, from the back: each says where the one before it must end."""
        sealed = indexed_files(self._disk, self._directory, segments)
        files: list[LogFile | SealedFile] = []
        follower: LogFile | SealedFile = newest
        for segment in reversed(segments):
            found: LogFile | SealedFile | None = sealed.get(segment)
            if found is None:
                scan = self._opened(f"{self._directory}/{segment}", opened)
                gap = follower.leading_gap
                scan.run(scan.file.size(), proof=gap.start if gap is not None else follower.start)
                found = walked(scan)
            files.append(found)
            follower = found
        return files[::-1]

    def _segments(self) -> list[str]:
        if not self._disk.exists(self._directory):
            # A shard without records so far.
            return []
        return sorted(name for name in self._disk.list_directory(self._directory) if parse_segment_name(name))

    def _opened(self, path: str, opened: contextlib.ExitStack) -> LogScan:
        file = self._disk.open(path)
        opened.callback(file.close)
        header = decode_header(file.read_at(HEADER_BYTES, 0))
        if isinstance(header, Verdict):
            raise Corrupt(f'{path} has a {header.value} header: run "forebay verify"')
        return LogScan(file, header, ProducerWindow(1, 1))


def _files_of(facts: Survey) -> list[LogFile | SealedFile]:
    return [*facts.sealed, *map(walked, facts.logs)]


def _close(files: Sequence[LogFile | SealedFile]) -> None:
    for file in files:
        file.close()


def _handle(file: LogFile | SealedFile) -> File | SealedFile:
    """What holds the descriptor."""
    return file.file if isinstance(file, LogFile) else file


def _newest(scan: LogScan, live: Live, before: LogFile | SealedFile | None = None) -> LogFile:
    """The file that the owner writes, as far as it is published; `before` is the same, as it was seen last."""
    newest = walked(scan)
    newest.end = live.end
    if isinstance(before, LogFile) and before.file is newest.file:
        newest.know_postings_of(before)
    return newest
