"""The log of a shard as another process sees it: read only, up to what its owner has published.

While the owner lives, `live` says how far; without an owner, whatever is whole is synced first and then
shown, since nobody else answers for it. Changes nothing on disk.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Sequence

from forebay.clock import Clock
from forebay.disk import Disk
from forebay.errors import Corrupt, Unavailable
from forebay.format.frame import Verdict
from forebay.format.live import Live
from forebay.format.segment import HEADER_BYTES, decode_header, parse_segment_name, segment_name
from forebay.pages import Page
from forebay.records import Offsets
from forebay.settings import WalSettings
from forebay.wal.files import FileList, LogFile, SealedFile
from forebay.wal.live import read_live
from forebay.wal.scan import LogScan
from forebay.wal.survey import indexed_files, survey
from forebay.wal.window import ProducerWindow

PAGE_BYTES = 1024 * 1024
POLL_SECONDS = 0.005
ATTEMPTS = 10


class FollowedLog:
    """What may be read now, brought up to date at each look past the known end. For one thread at a time."""

    def __init__(
        self, disk: Disk, clock: Clock, directory: str, settings: WalSettings, is_owned: Callable[[], bool]
    ) -> None:
        self.files = FileList()
        self.head = 0
        self.durable = 0
        self._disk = disk
        self._clock = clock
        self._directory = directory
        self._settings = settings
        self._is_owned = is_owned
        self._live: Live | None = None
        self._scan: LogScan | None = None

    def read(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page:
        """Records from `offset` on that the owner has published; an empty page at the end."""
        if offset >= self.head:
            self.refresh()
        for _ in range(ATTEMPTS):
            if offset >= self.head:
                return Page([], [], offset)
            try:
                return self.files.read(offset, bytes_max).clipped(self.head)
            except OSError as error:
                if error.errno not in (errno.ESTALE, errno.ENOENT):
                    raise
                self._scan = None
                self.refresh()
        raise Unavailable(f"{self._directory}: its files changed {ATTEMPTS} times while one page was read; try again")

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

    def offset_at_time(self, timestamp: int) -> int | None:
        """The first record at or after the time; `None` if there is none."""
        self.refresh()
        found = self.files.offset_at_time(timestamp)
        return found if found is not None and found < self.head else None

    def offsets(self) -> Offsets:
        """The watermarks as far as they are published."""
        self.refresh()
        return Offsets(earliest=0, evict_floor=0, durable=self.durable, exported=0, next=self.head)

    def refresh(self) -> None:
        """Look how far the owner has come."""
        for _ in range(ATTEMPTS):
            live = read_live(self._disk, self._directory)
            if live is not None and live == self._live and self._scan is not None:
                return
            try:
                if live is not None and self._is_owned():
                    done = self._go_by(live)
                else:
                    done = self._survey(live)
            except OSError as error:
                if error.errno not in (errno.ESTALE, errno.ENOENT):
                    raise
                done = False
            if done:
                return
            self._scan = None
        raise Unavailable(f"{self._directory}: its files changed {ATTEMPTS} times while they were looked at; try again")

    def close(self) -> None:
        """Give descriptors back."""
        for file in self.files.all:
            file.close()

    def _survey(self, live: Live | None) -> bool:
        """Nobody owns the log: sync what is there, so that it cannot vanish again, and show all that is whole."""
        if self._is_owned():
            # An owner came, or one has not published yet: what it will keep is not known before it says so.
            self._live, self.head = None, 0 if live is None else self.head
            return True
        self._sync_newest()
        facts = survey(self._disk, self._directory, self._settings, writable=False)
        files: list[LogFile | SealedFile] = [*facts.sealed, *(_log_file(scan) for scan in facts.logs)]
        self.files = FileList(files)
        self.head = self.durable = facts.end
        self._live, self._scan = live, facts.last
        return True

    def _sync_newest(self) -> None:
        segments = self._segments()
        if segments:
            file = self._disk.open(f"{self._directory}/{segments[-1]}")
            with contextlib.closing(file):
                file.sync()

    def _go_by(self, live: Live) -> bool:
        """Show what the owner has published; false if files were replaced meanwhile."""
        name = segment_name(live.file_start, live.file_epoch)
        scan = self._scan
        fresh = scan is None or not scan.path.endswith(name)
        if scan is None or fresh:
            scan = self._opened(f"{self._directory}/{name}")
        scan.run(live.position, proof=0)
        if scan.stop < live.position:
            return False
        newest = _log_file(scan)
        newest.end = live.end
        if fresh:
            older = [segment for segment in self._segments() if segment < name]
            self.files = FileList([*self._older(older, newest), newest])
        else:
            self.files = FileList([*self.files.all[:-1], newest])
        self._scan, self._live = scan, live
        self.head, self.durable = live.end, live.durable
        return True

    def _older(self, segments: Sequence[str], newest: LogFile) -> list[LogFile | SealedFile]:
        """The files before the newest, from the back: each says where the one before it must end."""
        sealed = indexed_files(self._disk, self._directory, segments)
        files: list[LogFile | SealedFile] = []
        follower: LogFile | SealedFile = newest
        for segment in reversed(segments):
            found: LogFile | SealedFile | None = sealed.get(segment)
            if found is None:
                scan = self._opened(f"{self._directory}/{segment}")
                gap = follower.leading_gap
                scan.run(scan.file.size(), proof=gap.start if gap is not None else follower.start)
                found = _log_file(scan)
            files.append(found)
            follower = found
        return files[::-1]

    def _segments(self) -> list[str]:
        if not self._disk.exists(self._directory):
            # A shard that nobody has written to yet.
            return []
        return sorted(name for name in self._disk.list_directory(self._directory) if parse_segment_name(name))

    def _opened(self, path: str) -> LogScan:
        file = self._disk.open(path)
        header = decode_header(file.read_at(HEADER_BYTES, 0))
        if isinstance(header, Verdict):
            raise Corrupt(f'{path} has a {header.value} header: run "forebay verify"')
        return LogScan(file, header, ProducerWindow(1, 1))


def _log_file(scan: LogScan) -> LogFile:
    return LogFile(
        scan.file,
        scan.header,
        index=scan.index,
        gaps=scan.gaps,
        frames=scan.frames,
        end=scan.end,
        limit=scan.stop,
    )
