"""The `live` file of a shard: how far other processes may read. Written at each commit, never synced.

Losing it, or a write to it, costs other processes time and never a fact, so its errors end here.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from forebay.disk import Disk, File
from forebay.format.frame import Verdict
from forebay.format.live import LIVE_BYTES, Live, decode_live, encode_live

if TYPE_CHECKING:
    from forebay.wal.files import LogFile
    from forebay.wal.writer import Writer

logger = logging.getLogger(__name__)

LIVE_NAME = "live"


class LiveFile:
    """The owner's side: one small write per commit."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._path = f"{directory}/{LIVE_NAME}"
        self._file: File | None = None
        self._sequence = 0
        self.doubtful = False
        """The file may not reach the disk: whoever recovers it in this life of the machine must know."""
        self._failed = False
        self._ended = False

    def publish(self, active: LogFile, writer: Writer) -> None:
        """Tell other processes what they may read now."""
        if self._ended:
            return
        self._sequence += 1
        content = encode_live(
            writer.place.epoch,
            active.header.epoch,
            active.start,
            active.limit,
            writer.durable,
            active.end,
            self._sequence,
            self.doubtful,
        )
        self._write(content)

    def doubt(self, shown: Live) -> None:
        """Say that a sync of the newest file has failed before the log was open: the next opening copies the file."""
        self._write(encode_live(*shown._replace(doubtful=True)))
        self.close()

    def _write(self, content: bytes) -> None:
        try:
            if self._file is None:
                self._file = self._open()
            self._file.write_at(content, 0)
            self._failed = False
        except OSError as error:
            if not self._failed:
                logger.warning("%s cannot be written (%s): other processes do not see new records", self._path, error)
            self._failed = True
            # Its name may lead elsewhere by now: the next publishing opens it again.
            self.close()

    def close(self) -> None:
        """Give the descriptor back."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def end(self) -> None:
        """Publish nothing any more: the directory may be another's."""
        self._ended = True
        self.close()

    def _open(self) -> File:
        try:
            return self._disk.open(self._path, writable=True, scratch=True)
        except FileNotFoundError:
            self._disk.create(self._path).close()
            return self._disk.open(self._path, writable=True, scratch=True)


def read_live(disk: Disk, directory: str) -> Live | None:
    """What the owner published last; `None` if there is nothing to go by."""
    try:
        file = disk.open(f"{directory}/{LIVE_NAME}")
    except FileNotFoundError:
        return None
    try:
        live = decode_live(file.read_at(LIVE_BYTES, 0))
    finally:
        file.close()
    return None if isinstance(live, Verdict) else live
