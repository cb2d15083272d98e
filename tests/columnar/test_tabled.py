"""Objects that tables name: read as they were written, few or many, and only for the topic they are of."""

from __future__ import annotations

import pytest

from forebay.metadata import MemoryMetadata
from forebay.tabled import LISTED_MAX, Tabled
from forebay.testing.blobs import SimulatedBlobs

FEW = frozenset({"a/1.parquet", "b/2.parquet"})
MANY = frozenset(f"shard/{number:06d}.parquet" for number in range(LISTED_MAX + 1))


@pytest.mark.parametrize(("first", "then"), [(FEW, MANY), (MANY, FEW), (MANY, MANY | FEW), (FEW, frozenset())])
def test_what_was_written_last_is_kept(first: frozenset[str], then: frozenset[str]) -> None:
    store = SimulatedBlobs()
    tabled = Tabled(MemoryMetadata(), "/forebay", "shop", "orders", "ab" * 16)

    assert tabled.objects(store) == frozenset()
    tabled.put(first, store)
    tabled.put(first, store)
    assert tabled.objects(store) == first
    tabled.put(then, store)

    assert tabled.objects(store) == then
    assert len(store.contents) == (len(then) > LISTED_MAX), "an old list does not stay"


def test_topic_created_anew_has_none() -> None:
    store, metadata = SimulatedBlobs(), MemoryMetadata()
    Tabled(metadata, "/forebay", "shop", "orders", "ab" * 16).put(FEW, store)
    anew = Tabled(metadata, "/forebay", "shop", "orders", "cd" * 16)

    assert anew.objects(store) == frozenset()
    anew.put(MANY, store)
    assert anew.objects(store) == MANY
