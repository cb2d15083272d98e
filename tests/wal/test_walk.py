"""The walk over frames against a model that tries every place, and visitors that must not pass over damage."""

from __future__ import annotations

import ast
import errno
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from random import Random  # noqa: TID251  # seeded: the same run again
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from _pytest.outcomes import Failed

import forebay.wal.files
import forebay.wal.recovery.heal
import forebay.wal.scan
from forebay.appends.producer_window import ProducerWindow
from forebay.compacting import merging
from forebay.compacting.merging import Merge, MergedRows
from forebay.errors import Corrupt, ForebayError, Unavailable
from forebay.format.columns.rows import Columns, encode_columns
from forebay.format.control.frames import encode_mark
from forebay.format.control.offsets import OffsetSet
from forebay.format.files.segment import HEADER_BYTES
from forebay.format.frame.batch import encode_data_frame
from forebay.format.frame.head import HEAD_SIZE, FrameHead, Verdict, read_frame
from forebay.format.index.sections import SectionKind, decode_index
from forebay.format.metadata.descriptor import DescriptorKind, SegmentDescriptor
from forebay.inspection import salvage
from forebay.inspection.dump import dump
from forebay.inspection.segments import damaged_places
from forebay.records import Gap, Reason, Run
from forebay.sealed import FRAME_BYTES_LIMIT, ByteSource, SealedSegment
from forebay.settings import WalSettings
from forebay.shard import recovery
from forebay.topics import Durability
from forebay.wal.files import LogFile
from forebay.wal.scan import LogScan
from forebay.wal.sealing import Sealer, index_of
from forebay.wal.tail import CachedFrame
from forebay.wal.walk import ControlFrame, DataFrames, Step, Unreadable, walk
from tests.wal.rig import DIRECTORY, TOPIC_ID, Rig, Simulated, simulated
from tests.wal.scenarios import fail_next

SALT = 12345
SOURCES = Path(forebay.wal.scan.__file__).parents[1]


class Stored:
    """Bytes that are read like a file."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def read_at(self, length: int, position: int) -> bytes:
        return self.content[position : position + length]

    def close(self) -> None:
        pass


def _frames(chance: Random) -> Iterator[bytes]:
    """Many small data frames, some with producers, large ones and control frames, with offsets in sequence."""
    offset = 0
    stamp = {"salt_crc": SALT, "epoch": 1, "durable": 0, "appended_at": 7}
    for _ in range(chance.choice([5, 300])):
        if chance.random() < 0.1:
            yield encode_mark(clean=False, next_offset=offset, **stamp)
            continue
        size, count = (3000, 1) if chance.random() < 0.02 else (8, chance.choice([1, 1, 1, 3]))
        runs = [Run(count, 9, offset)] if chance.random() < 0.05 else []
        columns = encode_columns(Columns(values=[bytes(size)] * count, timestamps=[7] * count))
        yield bytes(encode_data_frame(base=offset, runs=runs, columns=columns, zstd_level=None, **stamp))
        offset += count


def _spoiled(content: bytes, chance: Random) -> bytes:
    damaged = bytearray(content)
    for _ in range(chance.choice([0, 1, 3])):
        place = chance.randrange(len(damaged))
        damaged[place : place + chance.choice([1, 40, 500])] = b"\xee" * min(
            chance.choice([1, 40, 500]), len(damaged) - place
        )
    return bytes(damaged[: chance.choice([len(damaged), len(damaged) - 3])])


class Whole(NamedTuple):
    byte: int
    head: FrameHead


class Bad(NamedTuple):
    byte: int
    stop: int
    gap: Gap
    is_followed: bool


def _model(content: bytes, end: int) -> list[Whole | Bad]:
    """Every place is tried, one after the other."""
    found: list[Whole | Bad] = []
    position = expected = 0
    while position < len(content):
        head = read_frame(content, position, SALT, FRAME_BYTES_LIMIT)
        if isinstance(head, FrameHead):
            found.append(Whole(position, head))
            position, expected = position + head.length, max(expected, head.end)
            continue
        for later in range(position + 8, len(content) - HEAD_SIZE + 1, 8):
            behind = read_frame(content, later, SALT, FRAME_BYTES_LIMIT)
            if isinstance(behind, FrameHead) and behind.base >= expected:
                found.append(Bad(position, later, Gap(expected, behind.base, Reason.DAMAGED), True))
                position, expected = later, behind.base
                break
        else:
            found.append(Bad(position, len(content), Gap(expected, max(end, expected), Reason.DAMAGED), False))
            break
    return found


def _seen(steps: Iterator[Step]) -> Iterator[Whole | Bad]:
    for step in steps:
        match step:
            case DataFrames():
                assert b"".join(step.buffer[at : at + head.length] for head, at in step.each()) == step.raw
                assert step.end == max(head.end for head, _ in step.each())
                for head, at in step.each():
                    yield Whole(step.origin + at, head)
            case ControlFrame():
                yield Whole(step.origin + step.position, step.head)
            case Unreadable():
                yield Bad(step.byte, step.stop, step.gap, step.is_followed)


@pytest.mark.parametrize("seed", range(40))
def test_a_walk_gives_what_a_look_at_every_place_gives(seed: int) -> None:
    chance = Random(seed)
    content = _spoiled(b"".join(_frames(chance)), chance)
    expected = _model(content, end=1000)

    for chunk_bytes in (64, 4096, 1 << 20):
        steps = walk(Stored(content), SALT, 0, len(content), expected=0, end=1000, chunk_bytes=chunk_bytes)
        assert list(_seen(steps)) == expected


def test_a_file_shorter_than_it_should_be_ends_in_unreadable_bytes() -> None:
    content = b"".join(_frames(Random(1)))

    *whole, last = walk(Stored(content), SALT, 0, len(content) + 100, expected=0, end=10_000)

    assert not any(isinstance(step, Unreadable) for step in whole)
    assert isinstance(last, Unreadable)
    assert (last.byte, last.stop, last.verdict) == (len(content), len(content) + 100, Verdict.TORN)
    assert last.gap.stop == 10_000


# Visitors: each check sees the damage. With a walk that leaves it out, none does.


class Damaged(NamedTuple):
    """Ten appends of one producer in a rotated file, of which one frame is damaged."""

    rig: Simulated
    log: LogFile
    lost: DataFrames | ControlFrame
    """The damaged frame, as it was."""

    @property
    def descriptor(self) -> SegmentDescriptor:
        """The file as a piece of history."""
        return SegmentDescriptor(
            kind=DescriptorKind.FRAMES,
            topic_id=TOPIC_ID,
            start=0,
            end=10,
            epoch=1,
            bytes=self.log.limit,
            records=10,
            object_key=self.log.path,
            producers=1,
        )


def _damaged(*, control: bool = False) -> Damaged:
    """The data frame at offset 4 is damaged; with `control`, the state frame that the file begins with."""
    rig = Rig(simulated(), Durability.FSYNC, settings=WalSettings(free_bytes_min=0)).open()
    for number in range(10):
        rig.append(producing=(7, number))
    rig.wal.rotate()
    log = rig.wal.files.all[0]
    assert isinstance(log, LogFile)
    steps = [step for step in log.walk() if not isinstance(step, Unreadable)]
    lost = next(
        s for s in steps if (isinstance(s, ControlFrame) if control else isinstance(s, DataFrames) and s.end == 5)
    )
    with closing(rig.disk.open(log.path, writable=True)) as file:
        file.write_at(b"\xee" * 8, lost.stop - 8)
    return Damaged(rig, log, lost)


GONE = Gap(4, 5, Reason.DAMAGED)


def _facts() -> None:
    log = _damaged().log
    scan = LogScan(log.file, log.header, ProducerWindow(8, 8))
    scan.run(log.limit, proof=log.end)
    assert scan.gaps == [GONE] and scan.window.is_partial


def _durable_behind() -> None:
    """The place had been durable: only a frame behind it says so."""
    log = _damaged().log
    scan = LogScan(log.file, log.header, ProducerWindow(8, 8))
    scan.run(log.limit, proof=0)
    assert scan.end == 10


def _located() -> None:
    log = _damaged().log
    assert log.damage_at(4) == GONE


def _searched() -> None:
    log = _damaged().log
    assert log.unsearched(SectionKind.KEY_POSTINGS) == [GONE]


def _indexed() -> None:
    decoded = decode_index(index_of(_damaged().log)[0])
    assert not isinstance(decoded, Verdict) and decoded[2] == [GONE]


def _reframed() -> None:
    rig, log, lost = _damaged()
    sealer = Sealer(rig.disk, rig.settings, None)
    renewed = sealer.reframe(log, lambda start, stop: [CachedFrame(start, stop, lost.raw)])
    assert renewed.end == 10 and not renewed.gaps


def _healed() -> None:
    rig = Rig(simulated(), Durability.DISK, settings=WalSettings(free_bytes_min=0)).open()
    for _ in range(3):
        rig.append()
    fail_next(rig, "sync", errno.EIO)
    with pytest.raises(Unavailable):
        rig.flush()
    rig.disk.discard_failed(f"{DIRECTORY}/00000000000000000000-00000001.seg")
    assert rig.wal.heal()
    assert [offset for offset, _ in rig.reading().records] == [0, 1, 2]


def _dumped() -> None:
    rig, log, lost = _damaged()
    places = [item["byte"] for item in dump(rig.disk, log.path) if item["kind"] == "not whole"]
    assert places == [lost.origin + lost.position]


def _salvaged() -> None:
    rig, log, _ = _damaged()
    steps = list(salvage._steps(rig.disk, salvage.Remains(log.path, log.header, HEADER_BYTES)))
    assert any(isinstance(step, salvage.Damaged) for step in steps)


def _verified() -> None:
    assert [place.gap for place in damaged_places(_damaged().log)] == [GONE]


def _merged() -> None:
    """No record is missing, but what must be recognised as a repeat is: counting records does not find that."""
    damaged = _damaged(control=True)
    sealed = damaged.rig.disk
    sealer = Sealer(sealed, damaged.rig.settings, None)
    segment, _ = sealer.seal(damaged.log, lambda gap: True)

    class Here:
        def segment(self, descriptor: SegmentDescriptor) -> SealedSegment:
            return segment

        def source(self, descriptor: SegmentDescriptor) -> ByteSource:
            return sealed.open(descriptor.object_key)

    task = Merge(topic_id=TOPIC_ID, partition=0, sources=(damaged.descriptor,), window_of=0)
    rows = MergedRows(task, OffsetSet(), Here(), ProducerWindow(8, 8))
    with pytest.raises(Corrupt, match="left as it is"):
        list(rows.tables())


def _inherited() -> None:
    damaged = _damaged()
    window = ProducerWindow(8, 8)
    with closing(damaged.rig.disk.open(damaged.log.path)) as source, pytest.raises(Corrupt, match="forebay repair"):
        recovery._walk(window, damaged.descriptor, source)


VISITORS: list[tuple[ModuleType, Callable[[], None]]] = [
    (forebay.wal.scan, _facts),
    (forebay.wal.scan, _durable_behind),
    (forebay.wal.files, _located),
    (forebay.wal.files, _searched),
    (forebay.wal.files, _indexed),
    (forebay.wal.files, _reframed),
    (forebay.wal.files, _verified),
    (forebay.wal.recovery.heal, _healed),
    (sys.modules[dump.__module__], _dumped),
    (salvage, _salvaged),
    (merging, _merged),
    (recovery, _inherited),
]


@pytest.mark.parametrize(("module", "check"), VISITORS, ids=[check.__name__ for _, check in VISITORS])
def test_a_visitor_sees_damage_and_would_be_caught_if_it_did_not(
    module: ModuleType, check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    check()

    def blind(*arguments: Any, **limits: Any) -> Iterator[Step]:
        return (step for step in walk(*arguments, **limits) if not isinstance(step, Unreadable))

    monkeypatch.setattr(module, "walk", blind)
    with pytest.raises((AssertionError, ForebayError, Failed)):
        check()


def _walkers(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
            names = {call.id if isinstance(call, ast.Name) else getattr(call, "attr", "") for call in calls}
            if "walk" in names:
                yield function


def test_every_function_that_walks_says_what_it_does_at_damage() -> None:
    """The type checker keeps a `match` complete; a loop that looks for some steps only must name this one."""
    silent = []
    for path in sorted(SOURCES.rglob("*.py")):
        text = path.read_text()
        if "wal.walk import" not in text and ".walk(" not in text:
            continue
        for function in _walkers(ast.parse(text)):
            named = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
            if "Unreadable" not in named and "Step" not in named:
                silent.append(f"{path.relative_to(SOURCES)}:{function.lineno} {function.name}")
    assert silent == []
