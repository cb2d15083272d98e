"""Room on a disk that fills: a file that is given up when the database cannot grow, so that topics can be deleted."""

from __future__ import annotations

import contextlib
import logging
import posixpath
from typing import Final

from forebay.clock import Clock
from forebay.disk import Disk, write_all

logger = logging.getLogger(__name__)

RESERVE_BYTES: Final = 2 * 1024 * 1024
"""What some hundred changes to the database take."""
SCARCE_BYTES: Final = 1024 * 1024 * 1024
"""While more than this is free there is no such file."""
SUFFIX: Final = "-reserve"


class Reserve:
    """The file beside a database. It is made where space becomes scarce, and again after space was freed."""

    def __init__(self, database: str, disk: Disk, clock: Clock) -> None:
        self.path = f"{database}{SUFFIX}"
        self._disk = disk
        self._clock = clock
        self._is_whole = False

    def keep(self) -> None:
        """Have the file if it is time for it. What keeps it from being made is passed over: nothing depends on it."""
        if self._is_whole:
            return
        with contextlib.suppress(OSError):
            free = self._disk.free_bytes(posixpath.dirname(self.path) or ".")
            if 4 * RESERVE_BYTES <= free < SCARCE_BYTES:
                self._make()

    def give_up(self) -> bool:
        """Free its bytes; whether there were any."""
        self._is_whole = False
        try:
            self._disk.unlink(self.path)
        except OSError:
            return False
        logger.warning(
            "the disk is full: %s was given up, so that topics can be deleted; free some space, it is made again then",
            self.path,
        )
        return True

    def _make(self) -> None:
        if self._disk.exists(self.path):
            self._disk.unlink(self.path)
        file = self._disk.create(self.path)
        try:
            # No zeros: a file system that compresses would keep no room for them.
            write_all(file, self._clock.random_bytes(RESERVE_BYTES), 0)
            file.sync()
            self._is_whole = True
        finally:
            file.close()
            if not self._is_whole:
                self._disk.unlink(self.path)
