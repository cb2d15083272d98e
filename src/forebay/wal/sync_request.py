"""A background sync of a log that other threads write all the time: the thread that has the log begins it."""

from __future__ import annotations

from collections.abc import Callable

from forebay.wal.log import Wal
from forebay.wal.writer import SyncTarget


class SyncRequest:
    """The wish to begin a background sync, which waits for no lock.

    A log that is free begins it at once. In one that is not, the thread that has the commit lock begins it when its
    commit ends. A log whose thread hangs never answers, and costs nothing.
    """

    __slots__ = ("_is_open", "_on_answer", "_target", "_wal")

    def __init__(self, wal: Wal, on_answer: Callable[[], object]) -> None:
        """`on_answer` is called once the sync has begun, or turned out to be needless, under the log's lock."""
        self._wal = wal
        self._on_answer = on_answer
        self._target: SyncTarget | None = None
        self._is_open = [True]
        """Emptied once, by the thread that answers or by the one that takes the wish back: `pop` is one step."""
        wal.add_errand(self._begin)

    def end(self) -> SyncTarget | None:
        """The sync that has begun, if one has; none begins from here on. The caller syncs, and reports the outcome."""
        if not self._is_answered():
            return self._target
        self._wal.errands.pop(self._begin, None)
        return None

    def _begin(self) -> None:
        """Called under the commit lock, perhaps by a thread that an interrupt (Ctrl-C) reaches."""
        wal, was_answered, was_syncing = self._wal, False, self._wal.writer.syncing
        try:
            self._target = wal.begin_background_sync()
            was_answered = self._is_answered()
        finally:
            if not was_answered and not was_syncing:
                wal.withdraw_background_sync()
        if was_answered:
            self._on_answer()

    def _is_answered(self) -> bool:
        """Whether the wish was open until now: the calling thread has ended it."""
        try:
            return self._is_open.pop()
        except IndexError:
            return False
