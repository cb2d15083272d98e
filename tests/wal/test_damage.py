"""Flipped bits and cuts at every byte of every kind of file: an intact answer, a named error or a damaged range."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

import pytest

from forebay.errors import ForebayError
from forebay.testing.checks.history import Event, Reading, ShardEvents, read_everything
from forebay.testing.checks.invariants import Violation, check_log, damage_is_reported, recovery_is_stable
from forebay.testing.simulated.disk import ROOMY, SimulatedDisk
from forebay.testing.simulated.trace import Image, Trace
from forebay.topics import Durability
from tests.ledger import Ledger
from tests.support.soak import SOAK, sampled
from tests.wal.rig import DIRECTORY, Rig, Simulated, simulated

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # far more than needed: a shared machine may be busy

ONE_IN: Final = 3
"""In a normal run one in so many cases is tried, so that a byte meets a flip or a cut; in a soak run all."""
FLIPS: Final = (0x01, 0x80, 0xFF, 0x10, 0x5A) if SOAK else (0x01, 0xFF)


class Shard(NamedTuple):
    """A closed shard: what it reported, its bytes, and which file is of which kind."""

    events: list[Event]
    image: Image
    kinds: dict[str, int]

    def disk(self, changed: Mapping[int, bytes | None]) -> SimulatedDisk:
        """The disk with these files changed, or without them."""
        contents = {**self.image.files, **changed}
        files = {inode: content for inode, content in contents.items() if content is not None}
        directories = {
            inode: {name: child for name, child in names.items() if child in files or child in self.image.directories}
            for inode, names in self.image.directories.items()
        }
        image = Image(files=files, directories=directories)
        return SimulatedDisk.restored(image, Trace(start=image), free=ROOMY, next_inode=1_000)


def _shard(durability: Durability) -> Shard:
    rig = Rig(simulated(), durability).open()
    for _ in range(3):
        rig.append(size=20)
    rig.append(2, producing=(1, 0))
    rig.wal.rotate()
    rig.append(2)
    rig.shard.upkeep.seal_rotated()
    rig.wal.rotate()
    rig.append()
    rig.append(2)
    rig.append(producing=(1, 1))
    rig.flush()
    rig.wal.close()
    volume = rig.disk.volume
    names = {name: volume.find(f"{DIRECTORY}/{name}") for name in rig.disk.list_directory(DIRECTORY)}
    segments = sorted(name for name in names if name.endswith(".seg"))
    kinds = {
        "sealed segment": names[segments[0]],
        "index": names[segments[0].replace(".seg", ".idx")],
        "rotated segment": names[segments[1]],
        "active segment": names[segments[2]],
        "checkpoint": names["checkpoint"],
        "live": names["live"],
    }
    return Shard(rig.events, volume.image(), kinds)


SHARDS: Final = {durability: _shard(durability) for durability in (Durability.FSYNC, Durability.DISK)}
KINDS: Final = tuple(SHARDS[Durability.FSYNC].kinds)


@pytest.mark.parametrize("durability", SHARDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.proves("I12")
def test_no_damaged_byte_is_served_or_hides_a_record(kind: str, durability: Durability, ledger: Ledger) -> None:
    shard = SHARDS[durability]
    inode = shard.kinds[kind]
    broken: list[str] = []
    damaged = sampled(_damaged(shard.image.files[inode]), one_in=ONE_IN, seed=f"{kind} {durability}")
    for what, where, content in damaged:
        outcome, violations = judge(shard, {inode: content}, durability)
        ledger.count("damaged bytes", file=kind, outcome=outcome)
        broken += [f"{what} at byte {where}: {violation}" for violation in violations]
    assert broken[:10] == []


def test_damage_to_one_sealed_file_leaves_all_others_readable() -> None:
    shard = SHARDS[Durability.FSYNC]
    for kind in ("sealed segment", "index"):
        content = shard.image.files[shard.kinds[kind]]
        damaged = shard.disk({shard.kinds[kind]: content[:70] + b"\xff\xff" + content[72:]})

        rig = Rig(damaged, Durability.FSYNC, epoch=5).open()
        page = rig.read(5)

        assert [batch.base for batch in page.batches] == [5]


def _damaged(content: bytes) -> Iterator[tuple[str, int, bytes]]:
    for place in range(len(content)):
        for flip in FLIPS:
            yield f"flip {flip:02x}", place, content[:place] + bytes([content[place] ^ flip]) + content[place + 1 :]
        yield "cut", place, content[:place]


def judge(shard: Shard, changed: Mapping[int, bytes | None], durability: Durability) -> tuple[str, list[Violation]]:
    """Open and read twice; what was acknowledged and durable is there or named as damaged."""
    disk = shard.disk(changed)
    history = ShardEvents(durability, shard.events)
    try:
        rig = Rig(disk, durability, epoch=5).open()
        reading = reading_of(rig)
    except ForebayError as error:
        return "named error", [] if str(error) else [Violation("I12", "an error without a message")]
    violations = [*check_log(history, reading), *damage_is_reported(history, reading, reading.end)]
    _look_up_times(rig)
    violations += _go_on(rig, reading)
    return "damaged range" if reading.gaps else "intact", violations


def reading_of(rig: Simulated) -> Reading:
    """What is there now. The log alone does not answer below its first file: the decision names that as damaged."""
    front = [gap for gap in rig.shard.decision.damage if (gap.start, gap.stop) == (0, rig.wal.files.begins)]
    reading = read_everything(rig.read, rig.wal.offsets().next, front[0].stop if front else 0)
    return replace(reading, start=0, steps=(*front, *reading.steps))


def _go_on(rig: Simulated, before: Reading) -> Iterator[Violation]:
    """Damage stays reported, and what comes after it is readable."""
    again = Rig(rig.disk, rig.durability, epoch=rig.epoch).open()
    yield from recovery_is_stable(before, reading_of(again))
    again.append()
    again.flush()
    last = reading_of(Rig(rig.disk, rig.durability, epoch=again.epoch).open())
    if last.steps[: len(before.steps)] != before.steps or last.next != before.next + 1:
        yield Violation("I12", f"after an append the reading differs: {before.steps} {last.steps}")


def _look_up_times(rig: Simulated) -> None:
    """A look-up gives a record or a named error; it never fails otherwise."""
    try:
        rig.wal.offset_at_time(rig.clock.now_ms())
    except ForebayError as error:
        assert str(error)
