"""Deliberate breaks of filters by time: a slip at the first or last time of a segment or frame must be noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import pytest

from forebay.format.index.sections import FrameEntries
from forebay.format.metadata.descriptor import SegmentDescriptor
from forebay.spark.reading.filters import Filters, Mask
from forebay.testing.checks.invariants import names_of
from tests.ledger import Ledger
from tests.spark.edges import edged_topic, misses_at_edges
from tests.spark.mixed import Mixed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def edged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    topic = edged_topic(tmp_path_factory.mktemp("edged"))
    yield topic
    topic.close()


def _segments(*, last: int, first: int) -> Callable[[pytest.MonkeyPatch], None]:
    """Segments end so many milliseconds earlier, or begin so many later, than they do."""

    def may_match(filters: Filters, descriptor: SegmentDescriptor) -> bool:
        low, high = filters.span_of("timestamp")
        ends, begins = (descriptor.time_max - last) * 1000, (descriptor.time_min + first) * 1000
        return descriptor.gap is not None or (ends >= low and begins <= high)

    return lambda patch: patch.setattr(Filters, "may_match", may_match)


def _frames(*, last: int, first: int) -> Callable[[pytest.MonkeyPatch], None]:
    """The same for the frames of an index."""

    def may_match_frames(filters: Filters, entries: FrameEntries) -> Mask:
        low, high = filters.span_of("timestamp")
        found: Mask = (entries["time_max"] - last >= -(-low // 1000)) & (entries["time_min"] + first <= high // 1000)
        return found

    return lambda patch: patch.setattr(Filters, "may_match_frames", may_match_frames)


MUTANTS: Final = {
    "last time of a segment": _segments(last=1, first=0),
    "first time of a segment": _segments(last=0, first=1),
    "last time of a frame": _frames(last=1, first=0),
    "first time of a frame": _frames(last=0, first=1),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_slip_at_the_edge_of_a_time_is_named(
    edged: Mixed, monkeypatch: pytest.MonkeyPatch, name: str, ledger: Ledger
) -> None:
    MUTANTS[name](monkeypatch)

    found = names_of(misses_at_edges(edged))

    ledger.count("mutants caught", n=int("I6" in found))
    assert "I6" in found
