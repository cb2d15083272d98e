"""Objects that history has let go of lately: whoever planned a read before that may be at them still."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from forebay.clock import Clock
from forebay.format.descriptor import SegmentDescriptor, Status


class Replaced:
    """Remembers since when objects were found to be named by nobody. For one thread at a time.

    When exactly a compaction has let go of each is not written down, nor when an index was made anew. While no segment
    of history, and no index, was made so within the grace, all were let go of before that; else it counts from the
    first look that found them so.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: dict[str, float] = {}

    def long_ago(self, unneeded: Collection[str], pieces: Iterable[SegmentDescriptor], grace_s: float) -> list[str]:
        """Those that history, which consists of these pieces, has not named for as long as the grace.

        They go now, and are not remembered any longer.
        """
        now, lately_ms = self._clock.monotonic(), self._clock.now_ms() - int(grace_s * 1000)
        if any(_is_remade(piece) and piece.created_at > lately_ms for piece in pieces):
            gone = [key for key in unneeded if now - self._since.setdefault(key, now) >= grace_s]
        else:
            gone = list(unneeded)
        for key in gone:
            self._since.pop(key, None)
        return gone


def _is_remade(piece: SegmentDescriptor) -> bool:
    return piece.status is Status.COMPACTED or piece.index_key is not None
