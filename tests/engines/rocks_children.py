"""What other processes do to the RocksDB engine: `python -m tests.engines.rocks_children <act> <directory> …`.

Each line a child writes is a fact the parent may rely on: it is written after the call returned.
"""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Callable

from forebay.clock import SystemClock
from forebay.disk import SystemDisk
from forebay.engines.by_name import NewRecord
from forebay.engines.rocksdb import removal
from forebay.errors import ForebayError
from forebay.metadata.sqlite import SqliteMetadata
from forebay.testing.contracts.engines import NamedEngine
from forebay.testing.simulated.clock import ManualClock
from forebay.topics import ShardRef
from tests.engines.lookup_homes import RocksHome
from tests.engines.streams import answer, seeded

LIMITS: dict[str, int | str | None] = {"cap_records": 800, "cap_bytes": 40_000, "ttl_ms": 10**9}
STEPS = 150
PIECE_RECORDS = 20
"""Small, so that deletes are many writes and some are cut short in between."""


def home_in(directory: str, durability: str) -> RocksHome:
    """The engine in a directory, with its metadata beside it."""
    metadata = SqliteMetadata(f"{directory}/metadata.sqlite", disk=SystemDisk(), clock=SystemClock())
    return RocksHome(f"{directory}/rocksdb", durability, metadata=metadata)


class Straight:
    """A life without restarts."""

    def __init__(self, engine: NamedEngine, ref: ShardRef, clock: ManualClock) -> None:
        self.engine = engine
        self.clock = clock
        self._ref = ref

    def ref(self, partition: int) -> ShardRef:
        return self._ref

    def restart(self) -> None:
        raise AssertionError("not in this stream")

    def tidy(self, partition: int, depth: int) -> None:
        raise AssertionError("not in this stream")


def change_for_ever(directory: str, durability: str, seed: str) -> None:
    """Change a shard, and say how many steps are done."""
    removal.PIECE_RECORDS = PIECE_RECORDS
    home = home_in(directory, durability)
    life = Straight(home.open(), home.ref(0, **LIMITS), home.clock)
    for done, step in enumerate(seeded(int(seed), STEPS), start=1):
        answer(life, step)
        say(str(done))
    signal.pause()


def fill(directory: str, bytes_max: str) -> None:
    """Append until no file may grow any more; say each offset, then the error and what is readable."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    home = home_in(directory, "disk")
    engine, ref = home.open(), home.ref()
    engine.write(ref, NewRecord(b"0", 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(bytes_max), int(bytes_max)))
    acked = 0
    try:
        while True:
            acked = engine.write(ref, NewRecord(b"x" * 1_000, 1))
    except ForebayError as error:
        say(f"{type(error).__name__} {acked}")
    try:
        engine.write(ref, NewRecord(b"later", 1))
    except ForebayError as error:
        say(type(error).__name__)
    say(str(sum(batch.count for batch in engine.read_by_offset(ref, 0, bytes_max=1 << 30).batches)))
    say(str(engine.open_shard(ref).failure is not None))
    signal.pause()


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


ACTS: dict[str, Callable[..., None]] = {"change": change_for_ever, "fill": fill}

if __name__ == "__main__":
    ACTS[sys.argv[1]](*sys.argv[2:])
