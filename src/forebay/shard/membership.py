"""The life of this process as an owner: one session, replaced by a new one when it has ended."""

from __future__ import annotations

import threading

from forebay.metadata import MetadataStore, Session
from forebay.shard.ownership import Owner


class Membership:
    """The session that shards are acquired in. Safe for concurrent use."""

    def __init__(self, metadata: MetadataStore, ttl_s: float, holder: str) -> None:
        self.holder = holder
        self._metadata = metadata
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._session = metadata.session(ttl_s)

    @property
    def session(self) -> Session:
        """One that lives: what was owned in an ended one must be acquired anew."""
        with self._lock:
            if not self._session.alive():
                self._session = self._metadata.session(self._ttl_s)
            return self._session

    @property
    def owner(self) -> Owner:
        """As whom shards are acquired now."""
        return Owner(self.session.id, self.holder)

    def abandon(self) -> None:
        """In a forked child: whoever held the lock does not exist."""
        self._lock = threading.Lock()
