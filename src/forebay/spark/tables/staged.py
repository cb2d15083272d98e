"""A table of Parquet files that a batch writes as a whole: readers see all of it or none of it.

Spark writes beside the table, into a directory that readers pass over; then one rename makes that the table. Where a
table is overwritten, the old one is renamed away first: between the two there is none, and a run interrupted just
there finds the old one put back by the next run.
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING

from forebay.disk import Disk, SystemDisk, make_directories
from forebay.errors import Conflict

if TYPE_CHECKING:
    from collections.abc import Callable


class StagedTable:
    """A directory to be filled and then to be the table."""

    def __init__(self, path: str, disk: Disk | None = None) -> None:
        self.path = path
        self._disk = disk or SystemDisk()
        self._parent, name = posixpath.split(path)
        self.stage = f"{self._parent}/.{name}.new"
        """Where Spark writes."""
        self._old = f"{self._parent}/.{name}.old"

    def replace(self, fill: Callable[[str], None], *, overwrite: bool) -> None:
        """Fill the stage, and make it the table. `Conflict` if there is a table that may not be overwritten."""
        self.mend()
        make_directories(self._disk, self._parent)
        try:
            fill(self.stage)
        except BaseException:
            self.mend()
            raise
        if self._disk.exists(self.path):
            if not overwrite:
                remove_tree(self._disk, self.stage)
                raise Conflict(f"{self.path} was made by another program meanwhile: nothing was written to it")
            self._disk.rename(self.path, self._old)
        # Commit point: from here on the table is the new one.
        self._disk.rename(self.stage, self.path)
        self._disk.sync_directory(self._parent)
        if self._disk.exists(self._old):
            remove_tree(self._disk, self._old)

    def mend(self) -> None:
        """Undo what an earlier run left: a stage that was never finished, a table renamed away and not replaced."""
        if self._disk.exists(self._old):
            if self._disk.exists(self.path):
                remove_tree(self._disk, self._old)
            else:
                self._disk.rename(self._old, self.path)
        if self._disk.exists(self.stage):
            remove_tree(self._disk, self.stage)


def remove_tree(disk: Disk, path: str) -> None:
    """A directory with everything below it."""
    for name in disk.list_directory(path):
        below = f"{path}/{name}"
        try:
            disk.unlink(below)
        except OSError:
            remove_tree(disk, below)
    disk.remove_directory(path)
