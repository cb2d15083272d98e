"""Refuses appends before the disk is full, so that reading, deleting and clean-up still have room to work."""

from __future__ import annotations

from forebay.disk import Disk
from forebay.errors import Unavailable

CHECK_SECONDS = 0.1
"""At most so often the disk is asked."""


class FreeSpace:
    """The free space below a directory, asked for now and then. For one thread at a time."""

    def __init__(self, disk: Disk, directory: str, name: object, bytes_min: int) -> None:
        self.due = float("-inf")
        """The monotonic time from which on `check` asks the disk again."""
        self._disk = disk
        self._directory = directory
        self._name = name
        self._bytes_min = bytes_min

    def check(self, now: float) -> None:
        """`Unavailable` if too little is free; else the next check is due a little later."""
        free = self._disk.free_bytes(self._directory)
        if free < self._bytes_min:
            raise Unavailable(
                f"{self._name}: {free} bytes are free below {self._directory}, fewer than wal.free_bytes_min "
                f"({self._bytes_min}): free some space; appends go on by themselves then"
            )
        self.due = now + CHECK_SECONDS
