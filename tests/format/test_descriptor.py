"""Descriptors stay small, plan without the object, and live under keys that sort like offsets."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import UnsupportedFormat
from forebay.format.index.sections import find_offset, frame_entries
from forebay.format.metadata import keys
from forebay.format.metadata.descriptor import (
    DESCRIPTOR_BYTES_MAX,
    SPARSE_ENTRIES_MAX,
    Cur,
    DescriptorKind,
    Phase,
    SegmentDescriptor,
    ShardState,
    SparseEntry,
    Status,
    gap_descriptor,
    sparse_index,
)
from forebay.format.metadata.value import Unknown, decode_value, encode_value
from forebay.records import Gap, Reason
from tests.format.samples import DESCRIPTOR, SHARD_STATE, TOPIC_ID

_LARGEST = SegmentDescriptor(
    kind=DescriptorKind.FRAMES,
    topic_id="f" * 32,
    start=2**63 - 2,
    end=2**63 - 1,
    epoch=2**32 - 1,
    segment_id="f" * 64,
    reason=2**32 - 1,
    bytes=2**63,
    records=2**63,
    live_records=2**63,
    time_min=-(2**63),
    time_max=2**63 - 1,
    content_hash="f" * 32,
    store="s" * 64,
    object_key="k" * 512,
    etag="e" * 128,
    object_version="v" * 128,
    leader="l" * 128,
    status=Status.COMPACTED,
    created_at=2**63 - 1,
    completed=False,
    header_start=2**63 - 2,
    index_bytes=2**63,
    load_id="i" * 64,
    sparse=tuple(SparseEntry(2**40 + i, 2**40 + i) for i in range(SPARSE_ENTRIES_MAX)),
)


@pytest.mark.parametrize("descriptor", [_LARGEST, DESCRIPTOR])
def test_descriptor_is_at_most_4_kib_and_comes_back_as_it_was(descriptor: SegmentDescriptor) -> None:
    stored = encode_value(descriptor)

    assert len(stored) <= DESCRIPTOR_BYTES_MAX
    assert decode_value(stored, SegmentDescriptor) == (descriptor, Unknown())


@pytest.mark.parametrize(
    "stored",
    [
        SHARD_STATE,
        ShardState(incarnation=TOPIC_ID),
        ShardState(incarnation=TOPIC_ID, phase=Phase.SEALED, next_offset=7, sealed_by="broker-1", sealed_at=5),
        Cur(start=0, next=42, epoch=3),
    ],
)
def test_state_and_cur_come_back_as_they_were(stored: msgspec.Struct) -> None:
    assert decode_value(encode_value(stored), type(stored)) == (stored, Unknown())


def test_gap_descriptor_names_its_hole() -> None:
    gap = Gap(5, 9, Reason.SKIPPED)

    descriptor = gap_descriptor(gap, topic_id=TOPIC_ID, epoch=3, created_at=1)

    assert descriptor.gap == gap
    assert DESCRIPTOR.gap is None
    assert len(encode_value(descriptor)) < 256


def test_gap_of_a_reason_from_a_newer_version_is_unsupported() -> None:
    descriptor = gap_descriptor(Gap(5, 9, Reason.LOST), topic_id=TOPIC_ID, epoch=3, created_at=1)

    with pytest.raises(UnsupportedFormat):
        _ = msgspec.structs.replace(descriptor, reason=77).gap


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=300), st.floats(0, 1))
def test_sparse_index_leads_to_a_frame_at_or_before_every_record(counts: list[int], place: float) -> None:
    rows, offset = [], 1000
    for i, count in enumerate(counts):
        rows.append((offset, 64 + 100 * i, 100, count, 0, 0))
        offset += count
    entries = frame_entries(rows)

    sparse = sparse_index(entries, 1000)
    record = int(place * (offset - 1001))
    before = [entry for entry in sparse if entry.records <= record]

    assert len(sparse) <= SPARSE_ENTRIES_MAX
    assert sparse[0] == SparseEntry(0, 64)
    covering = int(entries["position"][find_offset(entries, 1000 + record)])
    assert before[-1].position <= covering
    assert sparse == tuple(sorted(set(sparse), key=lambda entry: entry.records))


def test_sparse_index_of_nothing_is_empty() -> None:
    assert sparse_index(frame_entries([]), 0) == ()


def test_keys_are_those_of_the_metadata_layout() -> None:
    shard = ("shop", "orders", 3)
    root = "/forebay/storage/topics/shop/orders/3"

    assert keys.state_key(*shard) == f"{root}/state"
    assert keys.segment_key(*shard, 42) == f"{root}/segments/00000000000000000042"
    assert keys.cur_key(*shard) == f"{root}/segments/cur"
    assert keys.deletes_key(*shard, 42) == f"{root}/deletes/00000000000000000042"
    assert keys.topic_key("shop", "orders") == "/forebay/topics/shop/orders"
    assert keys.topics_prefix() == "/forebay/topics/"
    assert keys.topics_prefix("shop") == "/forebay/topics/shop/"
    assert keys.deleted_key(TOPIC_ID) == f"/forebay/deleted/{TOPIC_ID}"
    assert keys.progress_key("shop", "orders", "billing", 3) == "/forebay/progress/shop/orders/billing/3"
    assert keys.load_key("l1") == "/forebay/loads/l1"
    assert keys.token_key("t1") == "/forebay/tokens/t1"
    assert keys.sink_key("q1", "shop", "orders") == "/forebay/sinks/q1/shop/orders"
    assert keys.state_key(*shard, prefix="/other") == "/other/storage/topics/shop/orders/3/state"


def test_segment_keys_sort_like_offsets_and_before_cur() -> None:
    starts = [0, 9, 10, 2**40, 2**63 - 1]
    stored = [keys.segment_key("shop", "orders", 0, start) for start in starts]

    assert sorted([keys.cur_key("shop", "orders", 0), *reversed(stored)]) == [
        *stored,
        keys.cur_key("shop", "orders", 0),
    ]
    assert all(key.startswith(keys.segments_prefix("shop", "orders", 0)) for key in stored)
