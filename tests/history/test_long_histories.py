"""A shard of many segments: what each further one costs does not grow with their number, and nothing is overlooked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.catalog import Frontier, ShardCatalog, ShardKeys
from forebay.catalog import removals as catalog_removals
from forebay.catalog import shard as catalog_shard
from forebay.catalog.removals import RecordedRemovals
from forebay.disk import Disk
from forebay.format.files.checkpoint import Checkpoint, encode_checkpoint
from forebay.format.files.segment import segment_name
from forebay.format.index.sections import Footer
from forebay.format.metadata.descriptor import Cur, DescriptorKind, SegmentDescriptor, ShardState, Status
from forebay.format.metadata.value import decode_value, encode_value
from forebay.history import History
from forebay.metadata import Entry, MemoryMetadata, Operation, Put
from forebay.metadata.seam import OPERATIONS_MAX
from forebay.records import Gap, Reason
from forebay.sealed import SealedSegment
from forebay.testing.simulated.clock import ManualClock
from forebay.wal import upkeep
from forebay.wal.files import FileList, SealedFile
from forebay.wal.recovery.survey import CHECKPOINT_NAME, read_checkpoint
from forebay.wal.retention import expired
from tests.support.environments.shard import DIRECTORY, ShardEnvironment, expected, history_of, stream
from tests.support.steps import steps_of
from tests.support.waiting import PATIENCE

T = TypeVar("T")
TOPIC: Final = "cd" * 16
KEYS: Final = ShardKeys("shop", "orders", 0, "/forebay")
FEW: Final = 250
MANY: Final = 16_000
STEP: Final = 10


class CountedMetadata(MemoryMetadata):
    """Counts the entries that were read, one by one or in ranges."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def get(self, key: str) -> Entry | None:
        self.entries += 1
        return super().get(key)

    def range(self, prefix: str, *, start_after: str | None = None, limit: int | None = None) -> list[Entry]:
        found = super().range(prefix, start_after=start_after, limit=limit)
        self.entries += len(found)
        return found


class TimedSegment:
    """Answers for the time of a segment by its descriptor alone: its first record has the newest time."""

    def __init__(self, descriptor: SegmentDescriptor) -> None:
        self._descriptor = descriptor

    def offset_at_time(self, timestamp: int) -> int | None:
        return self._descriptor.start if self._descriptor.time_max >= timestamp else None

    def rest(self) -> None:
        pass

    def close(self) -> None:
        pass


def opened(descriptor: SegmentDescriptor) -> SealedSegment:
    return cast(SealedSegment, TimedSegment(descriptor))


def piece(start: int, end: int, time: int | None = None) -> SegmentDescriptor:
    return SegmentDescriptor(
        kind=DescriptorKind.FRAMES,
        topic_id=TOPIC,
        start=start,
        end=end,
        epoch=1,
        content_hash=f"{start:032x}",
        object_key=f"{start}.seg",
        records=end - start,
        time_max=start if time is None else time,
    )


def catalog_of(store: MemoryMetadata, segments: int = 0) -> ShardCatalog:
    """A catalog with so many segments."""
    state = ShardState(incarnation=TOPIC, epoch=1)
    puts: list[Operation] = [Put(KEYS.state, encode_value(state))]
    if segments:
        pieces = [piece(at * STEP, (at + 1) * STEP) for at in range(segments)]
        puts += [Put(KEYS.segment(one.start), encode_value(one)) for one in pieces]
        puts.append(Put(KEYS.cur, encode_value(Cur(start=pieces[-1].start, next=pieces[-1].end, epoch=1))))
    for first in range(0, len(puts), OPERATIONS_MAX):
        store.transaction([], puts[first : first + OPERATIONS_MAX])
    return ShardCatalog(store, KEYS, TOPIC, clock=ManualClock())


@pytest.mark.slow
def test_a_further_segment_is_catalogued_and_seen_by_as_many_reads_whatever_the_number_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoded = 0
    decode = decode_value

    def counted(*arguments: object) -> object:
        nonlocal decoded
        decoded += 1
        return decode(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(catalog_shard, "decode_value", counted)
    costs = []
    for count in (FEW, MANY):
        store = CountedMetadata()
        catalog = catalog_of(store, count)
        history = History(catalog, opened)
        history.refresh()
        end = history.end
        assert end == count * STEP

        decoded, store.entries = 0, 0
        for _ in range(3):
            catalog.extend(1, [piece(end, end + STEP)])
            assert history.offset_at_time(end, end + STEP) == end
            end += STEP
            assert history.end == end
            assert history.offset_at_time(5) == STEP
            assert history.offset_at_time(end) is None
        costs.append((decoded, store.entries))
        assert len(history.cover(0, end)) == count + 3

    assert costs[0] == costs[1]


@pytest.mark.slow
def test_the_front_of_history_is_dropped_by_as_many_reads_whatever_the_number_behind_it() -> None:
    costs = []
    for count in (FEW, MANY):
        store = CountedMetadata()
        removals = RecordedRemovals(catalog := catalog_of(store, count))
        store.entries = 0
        assert removals.drop_below(1, 5) == 0, "the first segment lies above it in part"
        assert removals.drop_below(1, 3 * STEP + 5) == 3
        assert removals.drop_below(1, 103 * STEP) == 100
        costs.append(store.entries)
        assert [piece.descriptor.start for piece in catalog.pieces()][:2] == [103 * STEP, 104 * STEP]
        assert len(catalog.pieces()) == count - 103

    assert costs[0] == costs[1]


def naive_front(catalog: ShardCatalog, offset: int) -> int:
    """How many pieces may be dropped, by a look at all of history."""
    descriptors = [piece.descriptor for piece in catalog.pieces()]
    born = [place for place, one in enumerate(descriptors) if one.is_born]
    last = min(born[-1] if born else len(descriptors), len(descriptors) - 1)
    return sum(one.end <= offset for one in descriptors[: max(last, 0)])


@given(st.lists(st.booleans(), max_size=12), st.integers(0, 13), st.data())
@settings(max_examples=150)
def test_as_much_of_the_front_is_dropped_as_a_look_at_all_of_history_allows(
    born: list[bool], steps: int, data: st.DataObject
) -> None:
    catalog = catalog_of(MemoryMetadata())
    for at, is_born in enumerate(born):
        one = piece(at * STEP, (at + 1) * STEP)
        catalog.extend(1, [one if is_born else msgspec.structs.replace(one, load_id="load", header_start=0)])
    if len(born) > 1 and data.draw(st.booleans(), "compacts"):
        compacted(catalog, data.draw(st.integers(0, 12), "first"), data.draw(st.integers(1, 3), "count"))
    allowed, before = naive_front(catalog, steps * STEP), len(catalog.pieces())

    with pytest.MonkeyPatch.context() as patched:
        # Pages so short that history has many.
        for module in (catalog_shard, catalog_removals):
            patched.setattr(module, "SWEEP_KEYS", data.draw(st.integers(1, 4), "page"))
        assert RecordedRemovals(catalog).drop_below(1, steps * STEP) == allowed

    assert len(catalog.pieces()) == before - allowed


class AnotherFile(SealedFile):
    """One that says of itself what a real file does, at other offsets."""

    def __init__(self, real: SealedFile, disk: Disk, start: int) -> None:
        super().__init__(disk, real.path, start, start + STEP)
        self._real = real

    @property
    def footer(self) -> Footer:
        return self._real.footer


@pytest.mark.slow
def test_a_look_at_what_has_expired_takes_as_many_steps_whatever_the_number_of_files() -> None:
    steps = []
    for count in (FEW, MANY):
        environment = ShardEnvironment()
        environment.append(5)
        environment.seal()
        real = next(file for file in environment.shard.wal.files.all if isinstance(file, SealedFile))
        footer = real.footer
        files = FileList([AnotherFile(real, environment.disk, at * STEP) for at in range(count)])
        total = count * footer.segment_bytes
        assert files.held_bytes() == total
        now_ms, day = footer.appended_max, 86_400.0

        def look(files: FileList, now_ms: int, bytes_max: int, day: float = day) -> list[SealedFile]:
            return expired(files, MANY * STEP, now_ms=now_ms, now=0.0, time_s=day, bytes_max=bytes_max, grace_s=0.0)

        assert len(look(files, now_ms, total - 1)) == 1
        files.drop(files.all[0])
        assert look(files, now_ms, total - footer.segment_bytes) == []
        steps.append(steps_of(partial(look, files, now_ms, total - 3 * footer.segment_bytes)))

    assert steps[1] <= 1.2 * steps[0]


@pytest.mark.slow
def test_a_look_up_by_time_takes_as_many_steps_whatever_the_number_of_segments() -> None:
    steps = []
    for count in (FEW, MANY):
        history = History(catalog_of(MemoryMetadata(), count), opened)
        end = count * STEP
        history.offset_at_time(0, end)
        times = (0, end // 2, end - STEP, end)
        steps.append(sum(steps_of(partial(history.offset_at_time, at, end)) for at in times))
        assert [history.offset_at_time(at, end) for at in times] == [0, end // 2, end - STEP, None]

    assert steps[1] <= 1.2 * steps[0]


def padded(environment: ShardEnvironment, count: int) -> None:
    """The log has so many sealed files more, all of them before its first."""
    names = (segment_name(at, 1) for at in range(count))
    files = [
        SealedFile(environment.disk, f"{DIRECTORY}/{name}", -STEP * (count - at), -STEP * (count - at - 1))
        for at, name in enumerate(names)
    ]
    environment.shard.wal.files.all = (*files, *environment.shard.wal.files.all)


@pytest.mark.slow
def test_rotation_sealing_and_export_take_as_many_steps_whatever_the_number_of_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upkeep.Upkeep, "write_checkpoint", lambda self, *, clean: None)
    steps: list[dict[str, int]] = []
    for count in (FEW, MANY):
        environment = ShardEnvironment()
        environment.append(5)
        environment.seal()
        environment.export()
        padded(environment, count)
        exporter = environment.exporter()
        exporter.export(environment.shard.wal.files)
        environment.append(5)
        calls: dict[str, Callable[[], object]] = {
            "rotate": environment.shard.rotate,
            "seal": environment.shard.upkeep.seal_rotated,
            "is_busy": lambda: environment.shard.upkeep.is_busy,  # noqa: B023
            "lag": lambda: exporter.lag(environment.shard.wal.files),  # noqa: B023
            "export": lambda: exporter.export(environment.shard.wal.files),  # noqa: B023
            "read": lambda: environment.shard.read(0),  # noqa: B023
            "time": lambda: environment.shard.wal.files.offset_at_time(1_005, 5),  # noqa: B023
        }
        steps.append({name: steps_of(call) for name, call in calls.items()})
        assert exporter.exported == 10

    for name, few in steps[0].items():
        assert steps[1][name] <= 1.2 * few + 50, name


@pytest.mark.slow
def test_each_seal_writes_as_much_of_a_checkpoint_whatever_the_number_of_files_and_a_start_finds_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seals = 40
    monkeypatch.setattr(upkeep, "CHECKPOINT_SHARE", 8)
    listed: list[int] = []

    def counted(checkpoint: Checkpoint) -> bytes:
        listed.append(len(checkpoint.files))
        return encode_checkpoint(checkpoint)

    monkeypatch.setattr(upkeep, "encode_checkpoint", counted)
    environment = ShardEnvironment()
    for _ in range(seals):
        environment.append(1)
        environment.seal()

    assert sum(listed) <= (upkeep.CHECKPOINT_SHARE + 1) * seals
    known = read_checkpoint(environment.disk, DIRECTORY)
    assert known is not None and seals - seals / upkeep.CHECKPOINT_SHARE - 1 <= len(known.files) < seals
    environment.append(3)
    environment.reopen()
    assert len(environment.shard.wal.files.all) == seals + 1
    assert environment.shard.offsets().next == seals + 3
    environment.disk.unlink(f"{DIRECTORY}/{CHECKPOINT_NAME}")
    environment.reopen()
    assert environment.shard.offsets().next == seals + 3
    environment.append(1)
    environment.seal()
    assert environment.export() == seals + 1
    with history_of(environment) as history:
        assert stream(history) == expected(0, seals + 4)


# What is read bit by bit is what all at once would be


def added(catalog: ShardCatalog, times: Sequence[int], kind: DescriptorKind) -> None:
    at = catalog.frontier().next
    for time in times:
        one = piece(at, at + STEP, time)
        if kind is DescriptorKind.GAP:
            one = SegmentDescriptor(
                kind=kind, topic_id=TOPIC, start=at, end=at + STEP, epoch=1, reason=int(Reason.LOST)
            )
        catalog.extend(1, [one])
        at += STEP


def compacted(catalog: ShardCatalog, first: int, count: int) -> None:
    pieces = catalog.pieces()
    old = pieces[first % len(pieces) :][: count + 1] if pieces else []
    if old:
        start, end = old[0].descriptor.start, old[-1].descriptor.end
        new = piece(start, end, max(one.descriptor.time_max for one in old))
        parquet = {"kind": DescriptorKind.PARQUET, "status": Status.COMPACTED, "object_key": f"{start}-{end}.parquet"}
        catalog.replace(old, msgspec.structs.replace(new, **parquet))


def answers(history: History) -> list[object]:
    history.refresh()
    spans = history.cover(0, history.end)
    return [
        history.end,
        [(span.start, span.stop, isinstance(span.tier, Gap)) for span in spans],
        [history.offset_at_time(at) for at in range(-1, 32)],
        history.before_gaps(history.end),
        history.loads,
    ]


CHANGES = st.one_of(
    st.tuples(st.just("add"), st.lists(st.integers(0, 30), min_size=1, max_size=4)),
    st.tuples(st.just("gap"), st.just([0])),
    st.tuples(st.just("compact"), st.lists(st.integers(0, 5), min_size=2, max_size=2)),
    st.tuples(st.just("drop"), st.lists(st.integers(0, 60), min_size=1, max_size=1)),
)


@given(st.lists(CHANGES, max_size=12))
@settings(max_examples=50)
def test_a_history_that_was_followed_is_the_one_that_a_first_look_finds(changes: list[tuple[str, list[int]]]) -> None:
    catalog = catalog_of(MemoryMetadata())
    followed, compactions = History(catalog, opened), 0
    for change, numbers in changes:
        if change == "compact":
            before = catalog.frontier().cur.generation
            compacted(catalog, *numbers)
            compactions += catalog.frontier().cur.generation > before
        elif change == "drop":
            RecordedRemovals(catalog).drop_below(1, numbers[0])
        else:
            added(catalog, numbers, DescriptorKind.GAP if change == "gap" else DescriptorKind.FRAMES)
        assert answers(followed) == answers(History(catalog, opened))
    assert followed.compactions <= compactions


class Gate:
    """Holds the thread that `run` begins where it has made this call."""

    def __init__(self, call: str) -> None:
        self.call = call
        self.thread: int | None = None
        self.reached, self.opened = threading.Event(), threading.Event()

    def run(self, work: Callable[[], None]) -> None:
        self.thread = threading.get_ident()
        work()


class GatedCatalog(ShardCatalog):
    """Looks of some threads wait inside of it."""

    def __init__(self, store: MemoryMetadata, gates: Sequence[Gate]) -> None:
        super().__init__(store, KEYS, TOPIC, clock=ManualClock())
        self._gates = gates

    def frontier(self) -> Frontier:
        return self._passed("frontier", super().frontier())

    def descriptors_behind(self, end: int, generation: int) -> list[SegmentDescriptor] | None:
        return self._passed("descriptors_behind", super().descriptors_behind(end, generation))

    def _passed(self, call: str, found: T) -> T:
        for gate in self._gates:
            if (gate.call, gate.thread) == (call, threading.get_ident()) and not gate.opened.is_set():
                gate.reached.set()
                assert gate.opened.wait(PATIENCE)
        return found


@pytest.mark.parametrize("meanwhile", ["add", "compact", "drop"])
@pytest.mark.parametrize("is_earlier", [False, True])
def test_a_look_at_the_catalog_that_another_overtakes_takes_nothing_back(meanwhile: str, *, is_earlier: bool) -> None:
    first, second = Gate("frontier"), Gate("descriptors_behind")
    store = MemoryMetadata()
    catalog_of(store, 3)
    catalog = GatedCatalog(store, [first, second])
    history = History(catalog, opened)
    history.refresh()
    added(catalog, [40, 50], DescriptorKind.FRAMES)

    with ThreadPoolExecutor(2) as threads:
        try:
            earlier = threads.submit(first.run, history.refresh) if is_earlier else None
            assert earlier is None or first.reached.wait(PATIENCE)
            later = threads.submit(second.run, history.refresh)
            assert second.reached.wait(PATIENCE)
            if meanwhile == "add":
                added(catalog, [60], DescriptorKind.FRAMES)
            elif meanwhile == "compact":
                compacted(catalog, 1, 2)
            else:
                RecordedRemovals(catalog).drop_below(1, STEP)
            if earlier is not None:
                # The one that was begun first is over first: what the other has read goes on from what is no more.
                first.opened.set()
                earlier.result(PATIENCE)
            else:
                history.refresh()
            now = answers(History(catalog, opened))
        finally:
            first.opened.set()
            second.opened.set()
        later.result(PATIENCE)
    assert history.end == now[0]
    assert answers(history) == now
