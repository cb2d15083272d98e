"""Pieces that are kept from look to look are those that a first look would find."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from forebay.format.metadata.descriptor import DescriptorKind, SegmentDescriptor
from forebay.testing.simulated.disk import SimulatedDisk
from forebay.views.look import Cover
from forebay.wal.files import SealedFile


def _history(lengths: list[int]) -> list[SegmentDescriptor]:
    """Segments one after the other; every third one came with a load."""
    found, start = [], 0
    for number, length in enumerate(lengths):
        load = f"load-{number}" if number % 3 == 0 else None
        found.append(
            SegmentDescriptor(
                kind=DescriptorKind.FRAMES, topic_id="ab" * 16, start=start, end=start + length, epoch=1, load_id=load
            )
        )
        start += length
    return found


def _log(disk: SimulatedDisk, ends: list[int]) -> Any:
    """As much of a followed log as is asked: its files, of which each begins where the one before ends."""
    starts = [0, *ends[:-1]]
    files = [SealedFile(disk, f"/data/{start}", start, end) for start, end in zip(starts, ends, strict=True)]
    return SimpleNamespace(files=SimpleNamespace(all=files))


def test_nothing_is_kept_of_files_that_are_gone() -> None:
    disk = SimulatedDisk(directories=["/data"])
    kept = Cover(disk)
    for size in (10, 30):
        disk.create("/data/0").write_at(b"x" * size, 0)
        log = _log(disk, [5])
        found = kept.pieces(0, 5, [], set(), log)
        assert found == Cover(disk).pieces(0, 5, [], set(), log)
        assert [piece.bytes for piece in found] == [size]

        disk.unlink("/data/0")
        kept.pieces(5, 5, [], set(), None)


@st.composite
def _looks(draw: st.DrawFn) -> Iterator[tuple[list[SegmentDescriptor], list[int], int, int, set[str]]]:
    lengths = draw(st.lists(st.integers(1, 30), max_size=6))
    histories = [_history(lengths), _history(lengths[::-1])]
    looks = []
    for _ in range(draw(st.integers(1, 6))):
        ends = sorted(draw(st.sets(st.integers(1, 200), min_size=1, max_size=5)))
        start = draw(st.sampled_from([0, 20]))
        stop = draw(st.integers(start, 250))
        given_up = draw(st.sets(st.sampled_from(["load-0", "load-3"])))
        looks.append((draw(st.sampled_from(histories)), ends, start, stop, given_up))
    return iter(looks)


@given(_looks())
def test_what_is_kept_is_what_a_first_look_finds(
    looks: Iterator[tuple[list[SegmentDescriptor], list[int], int, int, set[str]]],
) -> None:
    disk = SimulatedDisk(directories=["/data"])
    kept = Cover(disk)
    for history, ends, start, stop, given_up in looks:
        log = _log(disk, ends)
        found = kept.pieces(start, stop, history, given_up, log)

        assert found == Cover(disk).pieces(start, stop, history, given_up, log)
        edges = [start, *(piece.stop for piece in found)]
        assert [piece.start for piece in found] == edges[:-1]
        assert edges[-1] == stop
        for piece in found:
            if piece.descriptor is not None:
                load = next(each.load_id for each in history if each.start <= piece.start < each.end)
                assert (piece.gap is not None) == (load in given_up)
