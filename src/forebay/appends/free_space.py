"""Refuses appends before the disk is full, so that reading, deleting and clean-up still have room to work."""

from __future__ import annotations

from forebay.disk import Disk
from forebay.errors import Unavailable

CHECK_SECONDS = 0.1
"""After so long the disk is asked again."""
CHECK_SHARE = 4
"""And when as many bytes were written as this part of what was free above the limit: others write, too."""


def check_room(disk: Disk, directory: str, needed: int, what: str) -> None:
    """`Unavailable`, which names both numbers, if fewer than `needed` bytes are free for what is done."""
    free = disk.free_bytes(directory)
    if free < needed:
        raise Unavailable(
            f"{what}: that takes {needed} bytes, and {free} are free below {directory}; free {needed - free} more"
        )


class FreeSpace:
    """The free space below a directory, asked for now and then. For one thread at a time."""

    def __init__(self, disk: Disk, directory: str, name: object, bytes_min: int) -> None:
        self.due = float("-inf")
        """The monotonic time from which on `check` asks the disk again."""
        self.left: float = 0
        """So many bytes may be written before that; who writes takes them off."""
        self._disk = disk
        self._directory = directory
        self._name = name
        self._bytes_min = bytes_min
        if not bytes_min:
            # None is asked for: the disk itself says when it is full.
            self.give_up()

    def check(self, now: float, size: int = 0) -> None:
        """`Unavailable` if too little is free for `size` bytes more; else the next check is due a little later."""
        free = self._disk.free_bytes(self._directory)
        room = free - size - self._bytes_min
        if room < 0:
            short = "fewer than" if free < self._bytes_min else f"and {size} more would leave fewer than"
            raise Unavailable(
                f"{self._name}: {free} bytes are free below {self._directory}, {short} wal.free_bytes_min "
                f"({self._bytes_min}): free some space; appends go on by themselves then"
            )
        self.due = now + CHECK_SECONDS
        self.left = size + room // CHECK_SHARE

    def give_up(self) -> None:
        """Ask no more: what is written from here on is worth more than the room it takes from others."""
        self.due = self.left = float("inf")
