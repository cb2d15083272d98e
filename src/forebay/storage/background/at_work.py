"""Which shards the threads of one worker work on now: one thread for each shard, and none waits for another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from forebay.locks import Rank, RankedCondition


class AtWork:
    """Keys that a thread is at. The lock is a leaf, held for single steps."""

    def __init__(self) -> None:
        self._changed = RankedCondition(Rank.LEAF, "storage.at_work")
        self._at: dict[str, int] = {}
        """The thread at each of them."""

    @contextmanager
    def at(self, key: str) -> Iterator[bool]:
        """Inside, no other thread is at the key; false, at once, if one is: then leave it alone."""
        with self._changed:
            is_free = self.is_free(key)
            if is_free:
                self._at[key] = threading.get_ident()
        try:
            yield is_free
        finally:
            if is_free:
                self._leave(key)

    @contextmanager
    def after_others(self, key: str) -> Iterator[None]:
        """As `at`, for a caller that may wait until the other thread has left. It holds no lock that thread needs."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_idle(key))
            is_ours = key in self._at
            self._at[key] = threading.get_ident()
        try:
            yield
        finally:
            if not is_ours:
                self._leave(key)

    def is_free(self, key: str) -> bool:
        """Whether no thread is at it, so that `at` would be true."""
        return key not in self._at

    def is_idle(self, key: str) -> bool:
        """Whether no other thread is at it. The calling thread may be, in a callback: it must not wait for itself."""
        return self._at.get(key, threading.get_ident()) == threading.get_ident()

    def wait_idle(self, key: str) -> None:
        """Return once no other thread is at it. The caller has seen to it that none begins."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_idle(key))

    def abandon(self) -> None:
        """In a forked child: the threads are not there."""
        self._changed = RankedCondition(Rank.LEAF, "storage.at_work")
        self._at = {}

    def _leave(self, key: str) -> None:
        with self._changed:
            self._at.pop(key, None)
            self._changed.notify_all()
