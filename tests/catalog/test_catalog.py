"""The catalog of a shard: one transaction per change, rules checked before, nothing of an older epoch after."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.catalog import ShardCatalog, ShardKeys, never_backwards, no_gap, no_overlap
from forebay.catalog.removals import RecordedRemovals
from forebay.errors import Conflict, Corrupt, Fenced, Unavailable
from forebay.format.metadata.descriptor import DescriptorKind, SegmentDescriptor, ShardState
from forebay.format.metadata.value import encode_value
from forebay.metadata import Delete, MemoryMetadata, MetadataStore, Put
from forebay.records import Reason
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.metadata import Fault, FaultyMetadata
from tests.ledger import Ledger

TOPIC = "cd" * 16
KEYS = ShardKeys("shop", "orders", 0, "/forebay")


def piece(start: int, end: int, content: str = "", *, epoch: int = 1) -> SegmentDescriptor:
    return SegmentDescriptor(
        kind=DescriptorKind.FRAMES,
        topic_id=TOPIC,
        start=start,
        end=end,
        epoch=epoch,
        content_hash=content or f"{start:032x}",
        object_key=f"{start}.seg",
    )


def hole(start: int, end: int) -> SegmentDescriptor:
    return SegmentDescriptor(
        kind=DescriptorKind.GAP, topic_id=TOPIC, start=start, end=end, epoch=1, reason=int(Reason.LOST)
    )


def catalog_of(store: MetadataStore, epoch: int = 1) -> ShardCatalog:
    store.transaction([], [Put(KEYS.state, encode_value(ShardState(incarnation=TOPIC, epoch=epoch)))])
    return ShardCatalog(store, KEYS, TOPIC, clock=ManualClock())


def ranges(catalog: ShardCatalog) -> list[tuple[int, int]]:
    return [(found.start, found.end) for found in catalog.descriptors()]


def test_an_empty_history_ends_at_zero() -> None:
    catalog = catalog_of(MemoryMetadata())

    assert catalog.frontier().next == 0
    assert catalog.descriptors() == []


def test_additions_move_the_frontier_together_with_their_descriptors() -> None:
    catalog = catalog_of(MemoryMetadata())

    catalog.extend(1, [piece(0, 10)])
    catalog.extend(1, [hole(10, 20), piece(20, 25)])

    assert ranges(catalog) == [(0, 10), (10, 20), (20, 25)]
    assert catalog.frontier().next == 25
    assert catalog.descriptors()[1].gap == (10, 20, Reason.LOST)


@pytest.mark.parametrize(
    "additions",
    [
        pytest.param([piece(12, 20)], id="a hole before it"),
        pytest.param([piece(5, 15)], id="an overlap"),
        pytest.param([piece(10, 15), piece(14, 20)], id="an overlap among them"),
        pytest.param([piece(10, 15), piece(16, 20)], id="a hole among them"),
        pytest.param([piece(10, 10)], id="nothing in it"),
        pytest.param([piece(0, 10, "other")], id="other content in the same place"),
    ],
)
def test_what_does_not_continue_the_history_is_refused_and_changes_nothing(
    additions: Sequence[SegmentDescriptor],
) -> None:
    store = MemoryMetadata()
    catalog = catalog_of(store)
    catalog.extend(1, [piece(0, 10)])
    revision = store.revision()

    with pytest.raises(Conflict, match="shop/orders"):
        catalog.extend(1, additions)

    assert store.revision() == revision


def test_what_stands_where_an_addition_would_go_is_never_overwritten() -> None:
    store = MemoryMetadata()
    catalog = catalog_of(store)
    catalog.extend(1, [piece(0, 5)])
    stray = encode_value(piece(5, 9, "of somebody else"))
    store.transaction([], [Put(KEYS.segment(5), stray)])

    with pytest.raises(Unavailable):
        catalog.extend(1, [piece(5, 7)])

    found = store.get(KEYS.segment(5))
    assert found is not None and found.value == stray
    assert catalog.frontier().next == 5


def test_an_addition_repeated_after_a_lost_answer_is_there_once() -> None:
    store = MemoryMetadata()
    catalog = catalog_of(store)
    catalog.extend(1, [piece(0, 10)])
    revision = store.revision()

    catalog.extend(1, [piece(0, 10)])

    assert store.revision() == revision


def test_an_older_epoch_can_add_nothing_after_a_take_over() -> None:
    store = MemoryMetadata()
    old = catalog_of(store, epoch=1)
    old.extend(1, [piece(0, 10)])
    catalog_of(store, epoch=2)

    with pytest.raises(Fenced, match="epoch 2"):
        old.extend(1, [piece(10, 20)])

    assert ranges(old) == [(0, 10)]


def test_another_incarnation_of_the_topic_can_add_nothing() -> None:
    store = MemoryMetadata()
    catalog_of(store)
    stranger = ShardCatalog(store, KEYS, "ef" * 16, clock=ManualClock())

    with pytest.raises(Fenced):
        stranger.extend(1, [piece(0, 10)])


def test_a_gap_in_the_store_is_named_never_read_over() -> None:
    store = MemoryMetadata()
    catalog = catalog_of(store)
    catalog.extend(1, [piece(0, 10)])
    catalog.extend(1, [piece(10, 20)])
    catalog.extend(1, [piece(20, 30)])

    store.transaction([], [Delete(KEYS.segment(10))])

    with pytest.raises(Corrupt, match=r"\[10, 20\) is covered by nothing"):
        catalog.descriptors()


def test_one_descriptor_replaces_many_however_many_there_are() -> None:
    store = MemoryMetadata()
    many = [piece(start, start + 1) for start in range(5_000)]
    manifest = msgspec.structs.replace(piece(0, 5_000, "manifest"), kind=DescriptorKind.MANIFEST)
    catalog_of(store)
    catalog = ShardCatalog(
        store, KEYS, TOPIC, manifest=lambda _: [piece(0, 2_500, "a"), piece(2_500, 5_000, "b")], clock=ManualClock()
    )
    for first in range(0, 5_000, 50):
        catalog.extend(1, many[first : first + 50])
    before = catalog.frontier().cur.generation

    replaced = catalog.replace(catalog.pieces(), manifest)

    assert replaced
    assert ranges(catalog) == [(0, 2_500), (2_500, 5_000)]
    assert catalog.frontier().cur.generation == before + 1
    assert len(store.range(KEYS.segments)) == 2


def test_a_replacement_worked_out_from_what_has_changed_is_not_made() -> None:
    store = MemoryMetadata()
    catalog = catalog_of(store)
    catalog.extend(1, [piece(0, 10)])
    catalog.extend(1, [piece(10, 20)])
    seen = catalog.pieces()
    assert catalog.replace(seen, piece(0, 20, "first"))

    assert not catalog.replace(seen, piece(0, 20, "second"))

    assert [found.content_hash for found in catalog.descriptors()] == ["first"]


def test_a_replacement_interrupted_before_the_sweep_already_answers_for_the_whole_range() -> None:
    store = MemoryMetadata()
    catalog = catalog_of(store)
    for start in range(0, 50, 10):
        catalog.extend(1, [piece(start, start + 10)])

    store.transaction([], [Put(KEYS.segment(0), encode_value(piece(0, 40, "large")))])

    assert ranges(catalog) == [(0, 40), (40, 50)]
    assert catalog.sweep_hidden() == 3
    assert ranges(catalog) == [(0, 40), (40, 50)]


def test_the_newest_piece_that_was_born_in_the_log_stays_however_far_the_floor_is() -> None:
    catalog = catalog_of(MemoryMetadata())
    loaded = [msgspec.structs.replace(piece(at, at + 10), load_id="load", header_start=0) for at in (20, 30)]
    catalog.extend(1, [piece(0, 10), piece(10, 20), *loaded])

    assert RecordedRemovals(catalog).drop_below(1, 40) == 1

    assert ranges(catalog) == [(10, 20), (20, 30), (30, 40)]


def test_nothing_is_dropped_that_hides_what_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = catalog_of(MemoryMetadata())
    catalog.extend(1, [piece(at, at + 10) for at in range(0, 50, 10)])
    removals = RecordedRemovals(catalog)
    with monkeypatch.context() as patched:
        # As where every sweep is refused, because others change what it compares.
        patched.setattr(ShardCatalog, "sweep_hidden", lambda *_: 0)
        assert catalog.replace(catalog.pieces()[:3], piece(0, 30, "merged"))
        assert removals.drop_below(1, 40) == 0
        assert ranges(catalog) == [(0, 30), (30, 40), (40, 50)]

    assert removals.drop_below(1, 40) == 2
    assert ranges(catalog) == [(40, 50)]


@pytest.mark.parametrize(
    ("fault", "method"),
    [
        (Fault.FAIL_BEFORE, "get"),
        (Fault.FAIL_BEFORE, "transaction"),
        (Fault.FAIL_AFTER, "transaction"),
        (Fault.TIME_OUT, "transaction"),
    ],
)
def test_a_fault_at_any_step_leaves_no_gap_and_no_double(fault: Fault, method: str, ledger: Ledger) -> None:
    for step in range(6):
        store = MemoryMetadata()
        catalog_of(store).extend(1, [piece(0, 10)])
        faulty = FaultyMetadata(store)
        faulty.inject(fault, method=method, after=step)
        catalog = ShardCatalog(faulty, KEYS, TOPIC, clock=ManualClock())

        for _ in range(3):
            with contextlib.suppress(Unavailable):
                catalog.extend(1, [piece(10, 20), piece(20, 30)])
            with contextlib.suppress(Unavailable, Conflict):
                catalog.extend(1, [piece(30, 40)])
        faulty.land()

        assert ranges(ShardCatalog(store, KEYS, TOPIC, clock=ManualClock())) == [(0, 10), (10, 20), (20, 30), (30, 40)]
        ledger.count("metadata faults", fault=fault.value, method=method)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_the_rules_accept_exactly_a_contiguous_run(sizes: list[int]) -> None:
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    pieces = [piece(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    assert no_gap(0, pieces, ends[-1]) is None
    assert no_overlap(pieces) is None
    assert never_backwards(0, pieces) is None
    assert no_gap(0, pieces[1:], ends[-1]) is not None
    assert no_overlap([*pieces, pieces[0]]) is not None
    assert never_backwards(1, pieces) is not None
