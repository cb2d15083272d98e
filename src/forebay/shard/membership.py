"""The life of this process as an owner: one session, replaced by a new one when it has ended."""

from __future__ import annotations

import logging

from forebay.errors import Indeterminate, Unavailable
from forebay.locks import Rank, RankedLock
from forebay.metadata import MetadataStore, Session
from forebay.shard.ownership import Owner

logger = logging.getLogger(__name__)


class Membership:
    """The session that shards are acquired in. Safe for concurrent use."""

    def __init__(self, metadata: MetadataStore, ttl_s: float, holder: str) -> None:
        self.holder = holder
        self._metadata = metadata
        self._ttl_s = ttl_s
        self._lock = RankedLock(Rank.IO, "shard.session")
        self._session = metadata.session(ttl_s)
        self._unended: list[Session] = []
        """Those that have ended here, and not yet for everybody."""

    @property
    def session(self) -> Session:
        """A session that lives: what was owned in an ended one must be acquired again."""
        with self._lock:
            if not self._session.alive():
                # First: where the store is away, the caller does not wait for the end of the last one as well.
                before, self._session = self._session, self._metadata.session(self._ttl_s)
                self._unended.append(before)
            self._unended = [session for session in self._unended if not self._has_ended(session)]
            return self._session

    def _has_ended(self, session: Session) -> bool:
        """End it for everybody: one that was only late would live on, and keep us from what we owned in it."""
        try:
            session.close()
        except (Unavailable, Indeterminate) as error:
            logger.warning("session %s is not renewed any more, others see it end later: %s", session.id, error)
            return False
        return True

    @property
    def owner(self) -> Owner:
        """As whom shards are acquired now."""
        return Owner(self.session.id, self.holder)
