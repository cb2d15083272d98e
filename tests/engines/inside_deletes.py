"""Appends that happen inside a delete: between two of its steps, under its look, and while it waits for another."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, TypeAlias

from forebay.engines import NewRecord, OwnedShard
from forebay.engines.memory import MemoryShard
from forebay.engines.rocksdb.shard import RocksShard
from forebay.records import OFFSET_MAX
from forebay.shard import SegmentShard
from forebay.testing.checks.invariants import Violation
from forebay.testing.contracts.engines import NamedEngine
from forebay.testing.contracts.lookups import keyed, offsets_of, tagged
from forebay.testing.inside import inside
from forebay.testing.simulated.disk import SimulatedDisk
from forebay.testing.simulated.faults import Call
from forebay.topics import ShardRef
from tests.engines.lookup_homes import LookupMemoryHome, LookupSegmentHome, RocksHome

RECORDS: Final = 6
Delete: TypeAlias = Callable[[NamedEngine, ShardRef], int]
Act: TypeAlias = Callable[[], None]

DELETES: Final[dict[str, Delete]] = {
    "key": lambda engine, ref: engine.delete_by_key(ref, b"k"),
    "tag": lambda engine, ref: engine.delete_by_tag(ref, "t"),
    "range": lambda engine, ref: engine.delete_by_offset(ref, 0, OFFSET_MAX),
    "before": lambda engine, ref: engine.delete_before(ref, OFFSET_MAX),
}
FOUND: Final = ("key", "tag")
"""The deletes that look records up first."""


class _Meanwhile(AbstractContextManager[None]):
    """A lock that another holds when it is wanted first: until it is free, something happens."""

    def __init__(self, lock: AbstractContextManager[Any], act: Act) -> None:
        self._lock = lock
        self._acts = [act]

    def __enter__(self) -> None:
        if self._acts:
            self._acts.pop()()
        self._lock.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._lock.__exit__(*raised)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


def while_waiting(shard: OwnedShard, act: Act) -> None:
    """Let `act` happen while the next delete of this shard waits for one before it."""
    holder: Any = shard.deletes if isinstance(shard, SegmentShard) else shard
    lock = "_published" if isinstance(shard, MemoryShard) else "_changing"
    setattr(holder, lock, _Meanwhile(getattr(holder, lock), act))


def under_the_look(disk: SimulatedDisk, act: Act) -> None:
    """Let `act` happen when the next index is read, which was replaced meanwhile, so that the look is repeated."""

    def replaced(call: Call) -> bool:
        if call.kind == "read" and call.path.endswith(".idx"):
            act()
            return True
        return False

    disk.fail_when(replaced, errno.ESTALE)


def between_pieces(shard: OwnedShard, act: Act) -> None:
    """Let `act` happen after the first piece of the next delete."""
    assert isinstance(shard, RocksShard)
    inside(shard).after_next_piece(act)


def write(engine: NamedEngine, ref: ShardRef, count: int = 1) -> None:
    """Records that every delete matches."""
    for _ in range(count):
        engine.write(ref, NewRecord(b"v", 1, b"k", "t"))


def segments() -> tuple[NamedEngine, ShardRef, SimulatedDisk]:
    """The segment engine with records in a sealed file and behind it."""
    disk = SimulatedDisk(directories=["/d"])
    home = LookupSegmentHome("/d", "disk", disk=disk)
    engine, ref = home.open(), home.ref()
    write(engine, ref, RECORDS - 2)
    shard = engine.engine.open_shard(ref)
    shard.rotate()
    shard.upkeep.seal_rotated()
    write(engine, ref, 2)
    return engine, ref, disk


def rocks(path: str) -> tuple[NamedEngine, ShardRef]:
    """The RocksDB engine with the same records."""
    home = RocksHome(path)
    engine, ref = home.open(), home.ref()
    write(engine, ref, RECORDS)
    return engine, ref


def memory() -> tuple[NamedEngine, ShardRef]:
    """The memory engine with the same records."""
    home = LookupMemoryHome()
    engine, ref = home.open(), home.ref()
    write(engine, ref, RECORDS)
    return engine, ref


def bounded_by_the_head(engine: NamedEngine, ref: ShardRef, delete: Delete) -> Iterator[Violation]:
    """I23: a delete ends what was published when it was called, and nothing that came while it ran."""
    ended = delete(engine, ref)
    left = offsets_of(keyed(engine, ref, b"k"))
    if ended != RECORDS or left != offsets_of(tagged(engine, ref, "t")) or left != [RECORDS]:
        yield Violation("I23", f"{ended} of {RECORDS} records ended, and of those behind them {left} are left")
