"""Deletion vectors: windows, merging, size, and what is left of a batch."""

from __future__ import annotations

import base64
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import Corrupt
from forebay.format.control.offsets import WINDOW, OffsetSet
from forebay.format.metadata.value import decode_value, encode_value
from forebay.format.metadata.vectors import (
    VECTOR_BYTES_MAX,
    DeletionVector,
    decode_vector,
    deleted_by,
    encode_vector,
    live_mask,
    merge,
    vectors_of,
    without,
)
from forebay.records import Reason
from tests.format.samples import VECTOR, batches_of_rows
from tests.ledger import Ledger

_OFFSETS = st.sets(
    st.integers(0, 30) | st.integers(WINDOW - 5, WINDOW + 5) | st.integers(2**40, 2**40 + 5), max_size=20
)


def test_vector_is_exactly_these_bytes() -> None:
    runs = bytes.fromhex("3b300000 01 0000 8713 0100 0000 8713")

    stored = encode_vector(VECTOR)

    fields = msgspec.json.decode(stored)["data"]
    bitmap = base64.b64encode(runs).decode()
    assert fields == {"start": WINDOW, "count": 5000, "generation": 7, "bitmap": bitmap}
    assert list(fields) == ["start", "count", "generation", "bitmap"]


@given(_OFFSETS)
def test_each_window_has_its_vector_and_all_together_the_set(offsets: set[int]) -> None:
    deleted = OffsetSet.of(offsets)

    stored = [encode_vector(vector) for vector in vectors_of(deleted, 3)]
    vectors = [decode_vector(part)[0] for part in stored]

    assert [vector.start for vector in vectors] == sorted({offset // WINDOW * WINDOW for offset in offsets})
    assert sum(vector.count for vector in vectors) == len(offsets)
    assert deleted_by(vectors) == deleted


@given(_OFFSETS, _OFFSETS)
def test_merging_adds_what_is_new_and_counts_the_generation_up(before: set[int], added: set[int]) -> None:
    vectors = {vector.start: vector for vector in vectors_of(OffsetSet.of(before), 5)}

    for start in {offset // WINDOW * WINDOW for offset in added}:
        joined = merge(vectors.get(start), OffsetSet.of(added), start)
        inside = {offset for offset in before | added if start <= offset < start + WINDOW}
        if inside <= before:
            assert joined is None
        else:
            assert joined is not None
            assert deleted_by([joined]) == OffsetSet.of(inside)
            assert joined.generation == (6 if start in vectors else 1)


@pytest.mark.parametrize("kind", ["every second", "at random", "all but some", "all", "runs"])
def test_no_vector_is_larger_than_its_limit(kind: str, ledger: Ledger) -> None:
    rng = np.random.Generator(np.random.PCG64(1))
    offsets = {
        "every second": np.arange(0, WINDOW, 2),
        "at random": np.flatnonzero(rng.random(WINDOW) < 0.5),
        "all but some": np.flatnonzero(rng.random(WINDOW) < 0.97),
        "all": np.arange(WINDOW),
        "runs": np.flatnonzero(np.arange(WINDOW) % 5 < 3),
    }[kind]

    (vector,) = vectors_of(OffsetSet.of(offsets + 9 * WINDOW), 2**63)
    stored = encode_vector(vector)

    ledger.count("bytes of a vector", n=len(stored), deleted=kind)
    assert len(stored) <= VECTOR_BYTES_MAX == 200 * 1024
    assert deleted_by([decode_vector(stored)[0]]) == OffsetSet.of(offsets + 9 * WINDOW)


@pytest.mark.parametrize(
    "changes",
    [
        {"start": WINDOW + 1},
        {"start": -WINDOW},
        {"start": 2**63},
        {"count": 4999},
        {"bitmap": b""},
        {"bitmap": VECTOR.bitmap + b"\0"},
        {"bitmap": bytes.fromhex("3a300000 00000000"), "count": 0},
        {"bitmap": bytes.fromhex("3a300000 01000000 1000 0000 10000000 0000"), "count": 1},
    ],
)
def test_vector_that_contradicts_itself_is_corrupt(changes: dict[str, int | bytes]) -> None:
    stored = encode_value(msgspec.structs.replace(VECTOR, **changes))

    with pytest.raises(Corrupt):
        decode_vector(stored)


def test_two_vectors_of_one_window_are_corrupt() -> None:
    with pytest.raises(Corrupt, match="not of one window"):
        deleted_by([VECTOR, VECTOR])


def test_fields_of_a_later_version_are_kept() -> None:
    class Later(DeletionVector, frozen=True, kw_only=True):
        why: str

    later = Later(**msgspec.structs.asdict(VECTOR), why="erased")

    vector, unknown = decode_vector(encode_value(later, version=2))

    assert vector == VECTOR
    assert decode_value(encode_vector(vector, unknown), Later)[0] == later


@given(st.sets(st.integers(WINDOW - 10, WINDOW + 20)), st.integers(WINDOW - 8, WINDOW), st.integers(1, 15))
def test_what_is_left_of_a_batch_and_the_gaps_make_it_up(offsets: set[int], first: int, count: int) -> None:
    (batch,) = batches_of_rows([[(b"%d" % row, None, None, (), row) for row in range(count)]], first)
    deleted = OffsetSet.of(offsets)

    kept, gone = without(batch, deleted)

    records = [record for part in kept for record in part.records(0)]
    assert records == [record for record in batch.records(0) if record.offset not in offsets]
    assert [offset for gap in gone for offset in range(gap.start, gap.stop)] == sorted(
        offsets & set(range(first, first + count))
    )
    assert {gap.reason for gap in gone} <= {Reason.DELETED}
    edges = sorted([(part.base, part.end) for part in kept] + [(gap.start, gap.stop) for gap in gone])
    assert all(before[1] == after[0] for before, after in pairwise(edges))
    assert live_mask(deleted, first, count).tolist() == [first + row not in offsets for row in range(count)]


def test_batch_without_deletes_is_the_batch_itself() -> None:
    (batch,) = batches_of_rows([[(b"x", None, None, (), 1)] * 3], 10)

    kept, gone = without(batch, OffsetSet.of([9, 13]))

    assert kept == [batch] and gone == []
