"""One at a time: a key of the metadata store that its holder's session owns, and that vanishes with the session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from forebay.clock import Clock
from forebay.errors import Fenced, Unavailable
from forebay.metadata import Absent, MetadataStore, Put, RevisionIs, Session

PAUSE_SECONDS: Final = 0.2


class Lease:
    """A key that is held. A job that changes something asks it at the last moment whether it still is."""

    def __init__(self, key: str, what: str, session: Session, revision: int) -> None:
        self._key = key
        self._what = what
        self._session = session
        self.held = RevisionIs(key, revision)
        """Holds in a transaction if the lease is still this one."""

    def check(self) -> None:
        """`Fenced` if it was lost: another may be at work by now."""
        if not self._session.alive():
            raise Fenced(f"{self._what} lost its lease {self._key} on the way: nothing more was changed; run it again")


@contextmanager
def leased(
    metadata: MetadataStore, key: str, what: str, *, ttl_s: float, wait_s: float, clock: Clock
) -> Iterator[Lease]:
    """Hold the key for the block; `Unavailable` if another still has it after `wait_s`.

    A job that was killed loses it by itself: at once on one machine, else within the time to live of its session.
    """
    session = metadata.session(ttl_s)
    try:
        until = clock.monotonic() + wait_s
        while not (taken := metadata.transaction([Absent(key)], [Put(key, what.encode(), session.id)])).succeeded:
            entry = metadata.get(key)
            if entry is not None and clock.monotonic() >= until:
                raise Unavailable(
                    f"{what} waits for {entry.value.decode(errors='replace')}, which holds {key} in session "
                    f"{entry.session}: run it when that has ended"
                )
            clock.sleep(PAUSE_SECONDS)
        yield Lease(key, what, session, taken.revision)
    finally:
        session.close()
