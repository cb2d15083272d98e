"""One stream of operations, three engines: every reader sees the same (the engines differ in what survives alone)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random  # noqa: TID251  # seeded: the same run again
from typing import Final, TypeAlias

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis import settings as effort

from forebay.disk import SystemDisk
from forebay.engines import NewRecord, OwnedShard
from forebay.errors import ForebayError
from forebay.settings import Settings
from forebay.shard import SegmentShard
from forebay.shard.limits import Evicted
from forebay.testing.contracts.engines import NamedEngine, append_by, steps_of
from forebay.testing.contracts.lookups import LookupHome
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.disk import SimulatedDisk
from forebay.topics import ShardRef
from tests.engines.homes import MemoryHome, SegmentHome
from tests.engines.lookup_homes import LookupMemoryHome, LookupSegmentHome, RocksHome
from tests.engines.streams import DELETES, Step, mixed, standing
from tests.engines.streams import answer as answer_of
from tests.ledger import Ledger
from tests.support.soak import SOAK

pytestmark = pytest.mark.slow

Operation: TypeAlias = tuple[str, int, object]

WAL: Final = {
    "producer_appends_max": 4,
    "producers_max": 3,
    "free_bytes_min": 0,
    "rotate_bytes_max": 4096,
    "cache_bytes_max": 2048,
    "batch_bytes_max": 4096,
}
SMALL: Final = Settings.load(overrides={"wal": WAL})
LOTS: Final = 4 if SOAK else 2
STEPS: Final = 40
STREAMS: Final = 150 if SOAK else 28
# RocksDB syncs a lot when it is opened, and what is compared here is no disk.
ROOM: Final = "/dev/shm" if Path("/dev/shm").is_dir() else None

values = st.none() | st.binary(max_size=300)
headers = st.lists(st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=5)), max_size=3).map(tuple)
records = st.builds(
    NewRecord,
    values,
    st.integers(min_value=-5, max_value=50),
    st.none() | st.binary(max_size=8),
    st.none() | st.text(min_size=1, max_size=8),
    headers,
)
producers = st.integers(1, 4) | st.integers(2**63, 2**63 + 3)
operations = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 1), records),
    st.tuples(st.just("batch"), st.integers(0, 1), st.lists(records, max_size=40)),
    st.tuples(st.just("producer"), st.integers(0, 1), st.tuples(producers, st.integers(0, 8), st.none())),
    st.tuples(st.just("producer"), st.integers(0, 1), st.tuples(producers, st.integers(3, 30), st.integers(-1, 2))),
    st.tuples(st.just("read"), st.integers(0, 1), st.tuples(st.integers(0, 100), st.integers(1, 30))),
    st.tuples(st.just("time"), st.integers(0, 1), st.integers(-6, 51)),
    st.tuples(st.just("rotate"), st.integers(0, 1), st.none()),
    st.tuples(st.just("create"), st.integers(0, 2), st.none()),
    st.tuples(st.just("list"), st.integers(0, 2), st.none()),
    st.tuples(st.just("upkeep"), st.integers(0, 1), st.none()),
)


def answer(engine: NamedEngine, ref: ShardRef, kind: str, what: object, upkeep: Callable[[], None]) -> object:
    """What the engine says to one operation; an error counts by its family."""
    shard = engine.open_shard(ref)
    # What waits in the queue of class memory is remembered beyond the window's limit.
    shard.commit()
    answers: dict[str, Callable[[], object]] = {
        "write": lambda: engine.write(ref, what),  # type: ignore[arg-type]
        "batch": lambda: engine.batch_write(ref, what),  # type: ignore[arg-type]
        "producer": lambda: append_by(shard, *what[:2], previous=_before(shard, *what)),  # type: ignore[index,misc]
        "read": lambda: steps_of(engine, ref, what[0], records_max=what[1]),  # type: ignore[index]
        "time": lambda: engine.get_offset_by_timestamp(ref, what),  # type: ignore[arg-type]
        "rotate": shard.rotate,
        "create": lambda: engine.create_shard(ref),
        "list": lambda: [status.offsets.next for status in engine.list_shard(ref.id)],
        "upkeep": upkeep,
    }
    try:
        return answers[kind]()
    except ForebayError as error:
        return type(error)


def _before(shard: OwnedShard, producer: int, sequence: int, nearness: int | None) -> int | None:
    """Mostly the last sequence of the producer, now and then another."""
    last = shard.last_sequence(producer)
    return None if nearness is None else (-1 if last is None else last) + nearness // 2


def history_of(
    engine: NamedEngine, ref_of: Callable[[int], ShardRef], script: list[Operation], upkeep: Callable[[], None]
) -> list[object]:
    """Every answer, then everything a reader finds."""
    told = [answer(engine, ref_of(partition), kind, what, upkeep) for kind, partition, what in script]
    for partition in range(3):
        engine.create_shard(ref_of(partition))
        told.append(steps_of(engine, ref_of(partition), bytes_max=500))
    engine.close()
    return told


@pytest.mark.parametrize("durability", ["memory", "disk", "fsync"])
@given(script=st.lists(operations, max_size=30))
@effort(max_examples=60)
@pytest.mark.proves("I29")
def test_memory_and_segment_engine_show_the_same_history(durability: str, script: list[Operation]) -> None:
    """I29, for the engines there are."""
    memory = MemoryHome(SMALL)
    clock = ManualClock()
    segment = SegmentHome(SimulatedDisk(directories=["/s"]), "/s", durability, settings=SMALL, clock=clock)

    def upkeep() -> None:
        clock.advance(2.0)
        for shard in segment.shards:
            shard.upkeep.maintain()

    expected = history_of(memory.open(), memory.ref, script, lambda: None)
    assert history_of(segment.open(), segment.ref, script, upkeep) == expected


@given(script=st.lists(operations, max_size=40))
@effort(max_examples=20)
def test_the_machines_disk_shows_the_same_history_and_keeps_it(script: list[Operation]) -> None:
    with tempfile.TemporaryDirectory() as root:
        memory = MemoryHome(SMALL)
        segment = SegmentHome(SystemDisk(), str(Path(root)), "disk", settings=SMALL)
        told = history_of(memory.open(), memory.ref, script, lambda: None)

        assert history_of(segment.open(), segment.ref, script, lambda: None) == told
        again = segment.open()
        assert [steps_of(again, segment.ref(partition)) for partition in range(3)] == told[-3:]
        again.close()


CAPS: dict[str, dict[str, int | str | None]] = {
    "none": {},
    "old ones go": {"cap_records": 60, "cap_bytes": 4_000},
    "new ones are refused": {"cap_records": 150, "cap_bytes": 9_000, "on_full": "reject_new"},
    "by time": {"cap_records": 150, "ttl_ms": 5_000},
    "by time, or refused": {"cap_bytes": 9_000, "ttl_ms": 5_000, "on_full": "reject_new"},
}
HAPPENS: dict[str, set[str]] = {
    "none": set(),
    "old ones go": {"evicted"},
    "new ones are refused": {"Full"},
    "by time": {"evicted", "held back"},
    "by time, or refused": {"evicted", "held back", "Full"},
}


class Lives:
    """An engine through its restarts. Where records end with it, there is none."""

    def __init__(self, home: LookupHome, limits: dict[str, int | str | None]) -> None:
        self.clock = home.clock
        self.engine = home.open()
        self._home = home
        self._limits = limits

    def ref(self, partition: int) -> ShardRef:
        return self._home.ref(partition, **self._limits)

    def restart(self) -> None:
        if not self._home.forgets:
            self.engine.close()
            self.engine = self._home.open()

    def tidy(self, partition: int, depth: int) -> None:
        shard = self.engine.open_shard(self.ref(partition))
        shard.rotate()
        if isinstance(shard, SegmentShard):
            work = (shard.upkeep.seal_rotated, shard.history.catch_up, shard.history.retain)
            for done in work[:depth]:
                done()

    def told(self, script: list[Step]) -> list[object]:
        """Every answer, then everything that can be asked."""
        found = [answer_of(self, step) for step in script]
        found += [standing(self.engine, self.ref(partition)) for partition in range(2)]
        self.engine.close()
        return found


def segment_home(durability: str, mode: str, **wal: int) -> LookupSegmentHome:
    """The segment engine on a disk of its own, as small as the others are."""
    around = {"store": {"root": "/s/store"}, "retention": {"time_s": 0, "grace_s": 0}} if mode == "shared_fs" else {}
    settings = Settings.load(overrides={"wal": WAL | wal, "storage": {"mode": mode}, **around})
    return LookupSegmentHome("/s", durability, settings=settings, disk=SimulatedDisk(directories=["/s"]))


def compared(root: str, chance: Random) -> list[LookupHome]:
    """The engines that are compared with the memory engine."""
    rocks = RocksHome(f"{root}/rocksdb", chance.choice(["disk", "fsync"]), settings=SMALL)
    durability, mode = chance.choice(["memory", "disk", "fsync"]), chance.choice(["local", "shared_fs"])
    return [rocks, segment_home(durability, mode)]


def happened(script: list[Step], told: list[object]) -> set[str]:
    """What a stream has come to: that all of it comes about is asked of every lot."""
    found: set[str] = set()
    for step, said in zip(script, told, strict=False):
        match said:
            case type():
                found.add(said.__name__)
            case Evicted(records=count) if count:
                found.add("evicted")
                found |= {"held back"} if said.held_back else set()
            case int() if said and step.kind in DELETES:
                found.add(step.kind)
            case (list() as some, list()) if some:
                found.add(step.kind)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("lot", range(LOTS))
@pytest.mark.parametrize("caps", CAPS)
@pytest.mark.proves("I29")
def test_all_engines_show_the_same_history(caps: str, lot: int, ledger: Ledger) -> None:
    """I29: appends, look-ups, deletes, evictions, clock jumps and restarts, and files sealed and exported meanwhile."""
    came: set[str] = set()
    for number in range(STREAMS):
        name = f"{caps}, lot {lot}, stream {number}"
        script = mixed(name, STEPS)
        expected = Lives(LookupMemoryHome(SMALL), CAPS[caps]).told(script)
        came |= happened(script, expected)
        with tempfile.TemporaryDirectory(dir=ROOM) as root:
            for home in compared(root, Random(name)):
                told = Lives(home, CAPS[caps]).told(script)
                for at, (said, wanted) in enumerate(zip(told, expected, strict=True)):
                    assert said == wanted, f"{name}, {type(home).__name__}, step {at}: {script[at : at + 1]}"
        ledger.count("streams on three engines", caps=caps)
    assert came >= {"Conflict", "by_key", "newest", "by_tag", *DELETES, *HAPPENS[caps]}


@pytest.mark.parametrize("tidied", [None, 0, 1, 3])
@pytest.mark.parametrize("compression", ["none", "zstd:1"])
@pytest.mark.parametrize("size", [1, 10], ids=["one by one", "ten at once"])
def test_a_record_ends_by_the_time_it_was_appended_whatever_frame_it_came_to(
    size: int, compression: str, tidied: int | None
) -> None:
    """Many small frames are read as few batches, and rewritten as few frames."""
    floors = []
    for home in (LookupMemoryHome(SMALL), segment_home("disk", "shared_fs", rotate_bytes_max=65_536)):
        life = Lives(home, {"ttl_ms": 5_000} | ({} if home.forgets else {"compression": compression}))
        for _ in range(4):
            for _ in range(30 // size):
                life.engine.batch_write(life.ref(0), [NewRecord(b"v", 1)] * size)
            life.clock.jump(1_000)
        if tidied is not None:
            life.tidy(0, tidied)
            life.restart()
        found = []
        for _ in range(4):
            life.clock.jump(1_000)
            found.append(drained(life))
        floors.append(found)
        life.engine.close()

    assert floors == [[30, 60, 90, 120]] * 2


def drained(life: Lives) -> int:
    """The floor once time ends no more records now."""
    shard = life.engine.open_shard(life.ref(0))
    while (evicted := shard.evict(life.clock.now_ms())).reason is not None:
        pass
    return evicted.floor
