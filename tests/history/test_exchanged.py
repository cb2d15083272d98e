"""A segment and an index that do not belong together: no record is shown at an offset that is not its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forebay.blobs.ranges import ObjectBytes
from forebay.errors import Corrupt
from forebay.records import Gap, Reason
from forebay.sealed import StoredSegment
from tests.support.environments.shard import ShardEnvironment


def _files() -> dict[str, bytes]:
    """Two sealed files of equal layout, `[0, 5)` and `[5, 10)`."""
    environment = ShardEnvironment()
    for _ in range(2):
        environment.append(5)
        environment.seal()
    found = environment.local_files()
    return {
        f"{first}{end}": c
        for n, c in found.items()
        for first in (0, 5)
        for end in (".seg", ".idx")
        if _is(n, first, end)
    }


def _is(name: str, first: int, end: str) -> bool:
    return f"{first:020d}-" in name and name.endswith(end)


def _bytes(content: bytes) -> Callable[[], ObjectBytes]:
    return lambda: ObjectBytes(lambda start, stop: content[start:stop], len(content))


def test_frames_of_another_place_are_a_damaged_range() -> None:
    files = _files()
    right = StoredSegment("a", 0, 5, source=_bytes(files["0.seg"]), index=_bytes(files["0.idx"]))
    wrong = StoredSegment("a", 0, 5, source=_bytes(files["5.seg"]), index=_bytes(files["0.idx"]))

    assert [(batch.base, batch.end) for batch in right.read(0, 1 << 20).batches] == [(0, 5)]
    page = wrong.read(0, 1 << 20)
    assert (page.batches, page.events, page.next) == ([], [Gap(0, 5, Reason.DAMAGED)], 5)


def test_an_index_of_other_offsets_is_refused_by_name() -> None:
    files = _files()
    segment = StoredSegment("a", 0, 5, source=_bytes(files["0.seg"]), index=_bytes(files["5.idx"]))

    with pytest.raises(Corrupt, match=r"the index of a is of \[5, 10\), which does not cover \[0, 5\)"):
        segment.read(0, 1 << 20)
