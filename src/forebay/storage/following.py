"""Follow several partitions at once: pull from whichever has something, wait when none has."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from forebay.engines import OpenShard
from forebay.reading import Cursor
from forebay.records import Record

STOP_CHECK_SECONDS = 0.1


def follow(
    cursors: Sequence[Cursor], shards: Sequence[OpenShard], timeout: float | None, stop: threading.Event | None
) -> Iterator[Record]:
    """Records as they come; ends when nothing came for `timeout` seconds or soon after `stop` is set.

    Wake-ups only wake: what is there is always asked for by offset, so a missed one costs nothing.
    """
    woken = threading.Event()
    polls = [shard.poll_seconds for shard in shards if shard.poll_seconds is not None]
    step = min([STOP_CHECK_SECONDS, *polls])
    for shard in shards:
        shard.wakers.add(woken.set)
    try:
        idle = 0.0
        while stop is None or not stop.is_set():
            woken.clear()
            for cursor in cursors:
                for batch in cursor.pull():
                    idle = 0.0
                    yield from batch.records(cursor.partition)
            if timeout is not None and idle >= timeout:
                return
            if not woken.wait(step):
                idle += step
    finally:
        for shard in shards:
            shard.wakers.discard(woken.set)
