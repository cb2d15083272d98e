"""A process that changes a shard of the segment engine: `python -m tests.engines.segment_children <directory> …`.

Each line it writes is a fact the parent may rely on: it is written after the call returned.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback

from forebay.clock import SystemClock
from forebay.disk import SystemDisk
from forebay.engines import SegmentEngine
from forebay.errors import Unavailable
from forebay.metadata.sqlite import SqliteMetadata
from forebay.settings import Settings
from forebay.topics import ShardRef
from tests.engines.lookup_homes import LookupSegmentHome
from tests.engines.rocks_children import LIMITS, STEPS, Straight, say
from tests.engines.streams import answer, seeded

TIDY_STEPS = 8
"""So that what was deleted stays for a while in the growing file alone."""


def home_in(directory: str, mode: str, durability: str) -> LookupSegmentHome:
    """The engine in a directory, with its metadata beside it."""
    os.makedirs(f"{directory}/store", exist_ok=True)
    around = {"store": {"root": f"{directory}/store"}, "retention": {"time_s": 0, "grace_s": 0}}
    settings = Settings.load(
        overrides={
            "wal": {"producer_appends_max": 16, "free_bytes_min": 0, "rotate_bytes_max": 8192, "cache_bytes_max": 2048},
            "storage": {"mode": mode},
            **(around if mode == "shared_fs" else {}),
        }
    )
    metadata = SqliteMetadata(f"{directory}/metadata.sqlite", disk=SystemDisk(), clock=SystemClock())
    return LookupSegmentHome(directory, durability, settings=settings, metadata=metadata)


def change_for_ever(directory: str, mode: str, durability: str, seed: str, first: str) -> None:
    """Change a shard from a step of a stream on, and say how many steps are done."""
    home = home_in(directory, mode, durability)
    engine, ref = home.open(), home.ref(0, **LIMITS)
    engine.create_shard(ref)
    due = threading.Event()
    threading.Thread(target=tidy_for_ever, args=(engine, ref, due), daemon=True).start()
    life = Straight(engine, ref, home.clock)
    for done, step in enumerate(seeded(int(seed), STEPS)[int(first) :], start=int(first) + 1):
        while answer(life, step) is Unavailable:
            pass  # the other thread has changed the catalog at the same time
        say(str(done))
        if not done % TIDY_STEPS:
            due.set()
    signal.pause()


def tidy_for_ever(engine: SegmentEngine, ref: ShardRef, due: threading.Event) -> None:
    """Seal, export and drop what may go whenever it is due, as the threads of a log do.

    A failure that they would not try again after ends the process.
    """
    try:
        shard = engine.open_shard(ref)
        while due.wait():
            due.clear()
            with contextlib.suppress(Unavailable):
                shard.rotate()
                shard.upkeep.seal_rotated()
                shard.history.catch_up()
                shard.history.retain()
    finally:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    change_for_ever(*sys.argv[1:])
