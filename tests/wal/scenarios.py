"""What a shard does in the crash and fault tests: small runs that reach every step of the log."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Final, NamedTuple

from forebay.errors import Unavailable
from forebay.testing.simulated.disk import SimulatedDisk
from forebay.testing.simulated.faults import Call
from forebay.topics import Durability
from tests.wal.rig import Simulated

FSYNC, DISK, MEMORY = Durability.FSYNC, Durability.DISK, Durability.MEMORY
ALL: Final = (FSYNC, DISK, MEMORY)


class Scenario(NamedTuple):
    """What happens before the explored part, and in it."""

    name: str
    durabilities: tuple[Durability, ...]
    before: Callable[[Simulated], None]
    run: Callable[[Simulated], None]


def _nothing(_: Simulated) -> None:
    """A shard that has just been opened for the first time."""


def _some_records(rig: Simulated) -> None:
    rig.append()
    rig.append(2)
    rig.flush()


def _append(rig: Simulated) -> None:
    for _ in range(6):
        rig.append()
        rig.see()
    rig.append(size=700)
    rig.clock.advance(2)
    rig.shard.upkeep.maintain()
    rig.append()


def _group_commit(rig: Simulated) -> None:
    for _ in range(3):
        rig.group(1, 1, 3, 1)
        rig.see()
    rig.group(2, 1, 1)


def _many_records(rig: Simulated) -> None:
    rig.append(5)
    rig.append(40, size=40)
    rig.see()
    rig.append(3, size=300)
    rig.append(2)


def _rotate(rig: Simulated) -> None:
    rig.append(2)
    rig.wal.rotate()
    rig.append()
    rig.see()
    rig.append(size=4096)
    rig.append()
    rig.append()


def _seal(rig: Simulated) -> None:
    for _ in range(6):
        rig.append(size=30)
    rig.wal.rotate()
    rig.append()
    rig.shard.upkeep.seal_rotated()
    rig.see()
    rig.append(2)
    rig.wal.rotate()
    rig.shard.upkeep.seal_rotated()
    rig.append()


def _produce(rig: Simulated) -> None:
    for sequence in range(3):
        rig.append(producing=(1, sequence))
    rig.append(2, producing=(2, 0))
    rig.append(producing=(1, 2))
    rig.wal.rotate()
    rig.append(producing=(1, 3))
    rig.append(producing=(2, 0))
    rig.see()
    rig.append(producing=(1, 4))


def _reserve(rig: Simulated) -> None:
    """Beyond what was reserved at first, in small steps and in one that is larger than any reservation."""
    for _ in range(7):
        rig.append()
    rig.append(20)
    rig.see()
    for _ in range(3):
        rig.append(4)


def _close(rig: Simulated) -> None:
    rig.append(2)
    rig.shard.upkeep.close()
    rig.open()
    rig.append()
    rig.see()
    rig.append()
    rig.shard.upkeep.close()


def _heal(rig: Simulated) -> None:
    """A write and a sync fail, each with more to come."""
    rig.append(2)
    fail_next(rig, "write", errno.EIO, taken=9)
    rig.append()
    rig.append()
    rig.shard.upkeep.maintain()
    rig.append()
    rig.see()
    fail_next(rig, "sync", errno.EIO)
    try:
        rig.append()
        rig.flush()
    except Unavailable:
        rig.shard.upkeep.maintain()
    rig.append(2)


def fail_next(rig: Simulated, kind: str, number: int, taken: int | None = None, suffix: str = ".seg") -> None:
    def matches(call: Call) -> bool:
        return call.kind == kind and call.path.endswith(suffix)

    rig.disk.fail_when(matches, number, taken=taken)


def inside_next(disk: SimulatedDisk, kind: str, act: Callable[[], None], suffix: str = ".seg") -> None:
    """Let `act` happen once, in the middle of the next call of this kind: the call has begun and done nothing yet."""
    waiting = [act]

    def meets(call: Call) -> bool:
        if waiting and call.kind == kind and call.path.endswith(suffix):
            waiting.pop()()
        return False

    disk.fail_when(meets, errno.EIO)


SCENARIOS: Final = (
    Scenario("append", ALL, _nothing, _append),
    Scenario("group commit", ALL, _some_records, _group_commit),
    Scenario("many records", ALL, _some_records, _many_records),
    Scenario("rotate", ALL, _some_records, _rotate),
    Scenario("re-frame and index", ALL, _some_records, _seal),
    Scenario("idempotent", ALL, _some_records, _produce),
    Scenario("reserve", ALL, _some_records, _reserve),
    Scenario("clean close", ALL, _some_records, _close),
    Scenario("heal", ALL, _some_records, _heal),
)
