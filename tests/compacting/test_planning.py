"""Plans of compaction: what is taken, what is left alone, and that a plan that was carried out leaves nothing to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st

from forebay.catalog.shard import Piece
from forebay.compacting.passes import PASSES_MAX
from forebay.compacting.planning import CatalogEntry, Known, Rewrite, Rules, plan, weight
from forebay.format.metadata.descriptor import DescriptorKind, LoadStatus, SegmentDescriptor
from forebay.format.parquet.file import TIME_MAX

NOW: Final = 1_000_000
RULES: Final = Rules(target_bytes=1_000, segments_min=3, settle_ms=100)
FRAMES, PARQUET, GAP, MANIFEST = (
    DescriptorKind.FRAMES,
    DescriptorKind.PARQUET,
    DescriptorKind.GAP,
    DescriptorKind.MANIFEST,
)


def piece(kind: DescriptorKind, start: int, end: int, **more: object) -> SegmentDescriptor:
    fields: dict[str, object] = {"bytes": 100, "records": end - start, "created_at": 0, "object_key": f"{start}"}
    if kind is GAP:
        fields = {"reason": 2}
    return SegmentDescriptor(kind=kind, topic_id="t", start=start, end=end, epoch=1, **{**fields, **more})  # type: ignore[arg-type]


def entries(*pieces: SegmentDescriptor) -> list[CatalogEntry]:
    return [CatalogEntry(Piece(descriptor, number + 1), [descriptor]) for number, descriptor in enumerate(pieces)]


def row(*kinds: DescriptorKind, **more: object) -> list[SegmentDescriptor]:
    return [piece(kind, 10 * number, 10 * number + 10, **more) for number, kind in enumerate(kinds)]


def planned(pieces: Sequence[SegmentDescriptor], rules: Rules = RULES, **known: object) -> list[tuple[int, int]]:
    facts = Known(NOW, {}, lambda descriptor: 0)._replace(**known)  # type: ignore[arg-type]
    return [(rewrite.start, rewrite.end) for rewrite in plan(entries(*pieces), rules, facts)]


def test_small_segments_are_put_together_once_there_are_enough() -> None:
    assert planned(row(FRAMES, FRAMES)) == []
    assert planned(row(FRAMES, FRAMES, FRAMES)) == [(0, 30)]
    assert planned(row(FRAMES, GAP, FRAMES, FRAMES, GAP)) == [(0, 50)]
    assert planned(row(GAP, FRAMES, FRAMES, FRAMES)) == [(10, 40)], "a gap in front stays what it is"


def test_groups_are_of_the_target_size() -> None:
    assert planned(row(*[FRAMES] * 7, bytes=500)) == [(0, 20), (20, 40), (40, 60)]
    assert planned(row(FRAMES, bytes=5_000)) == [(0, 10)]
    assert planned(row(PARQUET, bytes=300, source_bytes=5_000)) == []


def test_what_ended_makes_a_segment_worth_it() -> None:
    some = row(PARQUET, FRAMES, bytes=2_000)
    assert planned(some, dead=lambda one: 1 if one.start == 0 else 0) == [(0, 10), (10, 20)]
    lazy = msgspec.structs.replace(RULES, dead_share=0.5)
    large = row(PARQUET, bytes=300, source_bytes=2_000)
    assert planned(large, lazy, dead=lambda one: 5) == []
    assert planned(large, lazy, dead=lambda one: 6) == [(0, 10)]


@pytest.mark.parametrize(
    "more",
    [
        {"created_at": NOW - 50},
        {"load_id": "offered"},
        {"load_id": "abandoned"},
        {"time_max": TIME_MAX + 1},
        {"time_min": -TIME_MAX - 1},
    ],
)
def test_what_must_not_be_touched_divides(more: dict[str, object]) -> None:
    pieces = row(*[FRAMES] * 7)
    pieces[3] = msgspec.structs.replace(pieces[3], **more)
    loads = {"offered": LoadStatus.OFFERED, "abandoned": LoadStatus.ABANDONED}

    assert planned(pieces, loads=loads) == [(0, 30), (40, 70)]


def test_committed_load_counts_like_any_segment_and_another_directory_does_not() -> None:
    loaded = row(*[FRAMES] * 3, load_id="done")
    assert planned(loaded, loads={"done": LoadStatus.COMMITTED}) == [(0, 30)]
    assert planned(row(*[FRAMES] * 3), readable=lambda one: one.start != 0) == []


def test_what_lies_below_the_floor_is_left_to_go() -> None:
    assert planned(row(*[FRAMES] * 5), earliest=20) == [(20, 50)]


def test_large_segment_is_not_written_again_for_a_little() -> None:
    pieces = row(PARQUET, FRAMES, FRAMES, FRAMES, bytes=10)
    pieces[0] = msgspec.structs.replace(pieces[0], source_bytes=900)

    assert planned(pieces) == [(10, 40)]


def test_manifest_is_rewritten_as_a_whole() -> None:
    inner = row(*[FRAMES] * 4, bytes=400)
    manifest = piece(MANIFEST, 0, 40, object_key="m")
    facts = Known(NOW, {}, lambda descriptor: 0)

    (rewrite,) = plan([CatalogEntry(Piece(manifest, 1), inner)], RULES, facts)

    assert [piece.descriptor for piece in rewrite.pieces] == [manifest]
    assert [(len(part.sources), bool(part.why)) for part in rewrite.parts] == [(3, True), (1, False)]


PIECES: Final = st.lists(
    st.tuples(
        st.sampled_from([FRAMES, FRAMES, PARQUET, GAP]), st.integers(1, 1_500), st.integers(0, 10), st.booleans()
    ),
    max_size=30,
)


@hypothesis.given(PIECES, st.integers(1, 5))
def test_plan_is_of_whole_runs_and_once_carried_out_leaves_nothing(
    drawn: list[tuple[DescriptorKind, int, int, bool]], segments_min: int
) -> None:
    rules = msgspec.structs.replace(RULES, segments_min=segments_min)
    pieces = [
        piece(kind, 10 * at, 10 * at + 10, **({} if kind is GAP else {"bytes": size, "created_at": NOW * young}))
        for at, (kind, size, _, young) in enumerate(drawn)
    ]
    dead = {10 * at: ended for at, (kind, _, ended, _) in enumerate(drawn) if kind is not GAP}
    untouched = [one for one in pieces if one.created_at == NOW]
    for _ in range(PASSES_MAX):
        facts = Known(NOW, {}, lambda one: dead.get(one.start, 0))
        rewrites = plan(entries(*pieces), rules, facts)
        if not rewrites:
            break
        for rewrite in rewrites:
            pieces = _carried_out(pieces, rewrite, dead)
    else:
        raise AssertionError("there is always something left to do")
    assert all(one in pieces for one in untouched)


def _carried_out(pieces: list[SegmentDescriptor], rewrite: Rewrite, dead: dict[int, int]) -> list[SegmentDescriptor]:
    """What the catalog says afterwards."""
    old = [one.descriptor for one in rewrite.pieces]
    at = pieces.index(old[0])
    assert pieces[at : at + len(old)] == old and rewrite.parts[0].sources == tuple(old)
    live = sum(weight(one) * (one.records - dead.get(one.start, 0)) // one.records for one in old if one.records)
    records = sum(one.records - dead.pop(one.start, 0) for one in old)
    made = piece(PARQUET, rewrite.start, rewrite.end, bytes=live // 4 + 1, source_bytes=live, records=records)
    return [*pieces[:at], made, *pieces[at + len(old) :]]
