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
    for shard in shards:
        shard.wakers.add(woken.set)
    try:
        while stop is None or not stop.is_set():
            woken.clear()
            found = False
            for cursor in cursors:
                for batch in cursor.pull():
                    found = True
                    yield from batch.records(cursor.partition)
            if not found and not _awaited(woken, timeout, stop):
                return
    finally:
        for shard in shards:
            shard.wakers.discard(woken.set)


def _awaited(woken: threading.Event, timeout: float | None, stop: threading.Event | None) -> bool:
    """Wait for a wake-up; false when the time is up or `stop` is set."""
    left = timeout
    while not woken.is_set():
        if stop is not None and stop.is_set():
            return False
        if left is not None and left <= 0:
            return False
        step = STOP_CHECK_SECONDS if left is None else min(left, STOP_CHECK_SECONDS)
        woken.wait(step)
        left = None if left is None else left - step
    return True
