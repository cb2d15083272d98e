"""One append on its way: the offset it was given, and how it ended."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from forebay.errors import ForebayError

if TYPE_CHECKING:
    from forebay.appends.callbacks import Answered

logger = logging.getLogger(__name__)


class Ticket:
    """One append on its way: `done` turns true once its durability class holds, or `error` says why it never will."""

    __slots__ = ("callback", "count", "done", "error", "followers", "offset")

    def __init__(self, callback: Callable[[Ticket], None] | None = None) -> None:
        self.offset = -1
        self.count = 0
        self.done = False
        self.error: ForebayError | None = None
        self.callback = callback
        self.followers: list[Ticket] | None = None

    def result(self) -> int:
        """The first offset of the append; raises the error it failed with."""
        assert self.done
        if self.error is not None:
            raise copy.copy(self.error)
        return self.offset

    def finish(self, error: ForebayError | None = None, due: deque[Answered] | None = None) -> None:
        """Set the outcome, once, and wake the thread that waits for it. May be repeated if it was cut short (Ctrl-C).

        Under a lock of the log `due` takes those whose callers' own callbacks are to run once it is given back;
        `callback` is called at once and only wakes.
        """
        if not self.done:
            for follower in self.followers or ():
                follower.finish(error, due)
            self.error = error
            self.done = True
        if self.callback is not None:
            try:
                self.callback(self)
            except Exception:
                # The append is what it is; the receiver of the call may be gone (a closed event loop).
                logger.exception("the callback of an append failed")
            self.callback = None

    def follow(self, repeat: Ticket) -> None:
        """Answer `repeat` together with this append, whose repetition it is."""
        repeat.offset, repeat.count = self.offset, self.count
        self.followers = [*(self.followers or ()), repeat]
