"""Compaction: records that a later one with their key has superseded are deleted, in the background.

Records are looked at once each, when they have reached `compact_lag_ms`; then everything older of their keys goes. So a
record ends at the latest when the one that superseded it is as old, and never before it is itself. The newest of a key
stays, and so do records without one.
"""

from __future__ import annotations

import weakref
from itertools import takewhile

from forebay.engines import OpenShard
from forebay.engines.seam import LookedUpShard, offering
from forebay.shard.deletion import DeleteRange
from forebay.topics import Cleanup

PASS_PAGES = 16
"""No more than so many pages are looked at in one pass, so that a long topic does not keep the others waiting."""


class Compaction:
    """Remembers how far each open shard has been looked at; a shard that is opened anew is looked at from its front."""

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[OpenShard, int] = weakref.WeakKeyDictionary()

    def step(self, shard: OpenShard, now_ms: int) -> int:
        """One pass over a shard; how many records it ended."""
        spec = shard.ref.spec
        if spec.cleanup is not Cleanup.COMPACT:
            return 0
        looked_up = offering(shard, "delete")
        start = max(self._seen.get(shard, 0), shard.offsets().earliest)
        keys, end = _aged(shard, start, now_ms - spec.compact_lag_ms)
        ended = sum(_delete_superseded(looked_up, key, end) for key in keys)
        self._seen[shard] = end
        return ended


def _aged(shard: OpenShard, start: int, appended_max: int) -> tuple[dict[bytes, None], int]:
    """The keys of records from `start` on that were appended by then, and where those end."""
    keys: dict[bytes, None] = {}
    at = start
    for _ in range(PASS_PAGES):
        page = shard.read(at)
        for batch in page.batches:
            aged = sum(run.records for run in takewhile(lambda run: run.at <= appended_max, batch.appended()))
            keys.update((key, None) for key in (batch.keys() or [])[:aged] if key is not None)
            if aged < batch.count:
                return keys, batch.base + aged
        if page.next == at:
            break
        at = page.next
    return keys, at


def _delete_superseded(shard: LookedUpShard, key: bytes, end: int) -> int:
    """Delete the records of a key below `end`, but for its newest."""
    newest = shard.read_by_key(key).batches
    ended = at = 0
    while newest and at < min(end, newest[0].base):
        page = shard.read_by_key(key, at, history=True)
        for batch in page.batches:
            stop = min(batch.end, end, newest[0].base)
            if batch.base < stop:
                ended += shard.delete(DeleteRange(batch.base, stop))
        at = page.next
    return ended
