"""The library's threads do not live through a fork: a child of a process that used it would wait for ever.

So every process knows whether it was forked from one that had, and then refuses instead of hanging.
"""

from __future__ import annotations

from forebay.disk.forks import FORKS
from forebay.errors import Closed


class LibraryUse:
    """Whether this process, or the one it was forked from, has used the library."""

    def __init__(self) -> None:
        self.used = False
        self.broken = False
        FORKS.enter(self)

    def begin(self) -> None:
        """The library is about to be used; `Closed` where it cannot be."""
        if self.broken:
            raise Closed(
                "this process was forked from one that had used an object store, which cannot work here: "
                'start it by "spawn" or "forkserver", and open the store from settings in it'
            )
        self.used = True

    def abandon(self) -> None:
        """In a child: what its parent has begun does not work there."""
        self.broken = self.used


LIBRARY = LibraryUse()
