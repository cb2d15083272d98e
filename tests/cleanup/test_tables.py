"""Objects that tables name: read as they were written, few or many, and only for the topic they are of."""

from __future__ import annotations

from itertools import count

import pytest

from forebay.blobs import Stat
from forebay.cleanup.tables import LISTED_MAX, TableObjects
from forebay.errors import Unavailable
from forebay.metadata import MemoryMetadata, Put, RevisionIs
from forebay.testing.simulated.blobs import SimulatedBlobs
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.metadata import Fault, FaultyMetadata

FEW = frozenset({"a/1.parquet", "b/2.parquet"})
MANY = frozenset(f"shard/{number:06d}.parquet" for number in range(LISTED_MAX + 1))


class PerUpload(SimulatedBlobs):
    """Its etags name the upload and not what was uploaded, as those of some stores do."""

    _numbers = count()

    def _keep(self, key: str, content: bytes) -> Stat:
        stat = super()._keep(key, content)._replace(etag=f"upload {next(self._numbers)}")
        self._shared.kept[key] = (content, stat)
        return stat


@pytest.mark.parametrize("store_type", [SimulatedBlobs, PerUpload])
@pytest.mark.parametrize(("first", "then"), [(FEW, MANY), (MANY, FEW), (MANY, MANY | FEW), (FEW, frozenset())])
def test_what_was_written_last_is_kept(
    first: frozenset[str], then: frozenset[str], store_type: type[SimulatedBlobs]
) -> None:
    store = store_type()
    tabled = TableObjects(MemoryMetadata(), "/forebay", "shop", "orders", "ab" * 16, clock=ManualClock())

    assert tabled.objects(store) == frozenset()
    tabled.put(first, store)
    tabled.put(first, store)
    assert tabled.objects(store) == first
    tabled.put(then, store)

    assert tabled.objects(store) == then
    assert len(store.contents) == (len(then) > LISTED_MAX), "an old list does not stay"


def test_a_list_that_was_uploaded_again_by_a_writer_that_died_is_read() -> None:
    store, metadata = PerUpload(), MemoryMetadata()
    tabled = TableObjects(metadata, "/forebay", "shop", "orders", "ab" * 16, clock=ManualClock())
    tabled.put(MANY, store)
    ((key, content),) = store.contents.items()
    store.upload(key, [content])

    assert tabled.objects(store) == MANY


def test_an_old_list_does_not_stay_where_the_answer_was_lost() -> None:
    store, metadata = SimulatedBlobs(), FaultyMetadata(MemoryMetadata())
    tabled = TableObjects(metadata, "/forebay", "shop", "orders", "ab" * 16, clock=ManualClock())
    tabled.put(MANY, store)
    metadata.inject(Fault.FAIL_AFTER)

    tabled.put(FEW, store)

    assert tabled.objects(store) == FEW
    assert not store.contents


def test_topic_created_anew_has_none() -> None:
    store, metadata = SimulatedBlobs(), MemoryMetadata()
    TableObjects(metadata, "/forebay", "shop", "orders", "ab" * 16, clock=ManualClock()).put(FEW, store)
    recreated = TableObjects(metadata, "/forebay", "shop", "orders", "cd" * 16, clock=ManualClock())

    assert recreated.objects(store) == frozenset()
    recreated.put(MANY, store)
    assert recreated.objects(store) == MANY


def test_whose_turn_is_over_changes_nothing() -> None:
    store, metadata = SimulatedBlobs(), MemoryMetadata()
    tabled = TableObjects(metadata, "/forebay", "shop", "orders", "ab" * 16, clock=ManualClock())
    mine = RevisionIs("/turn", metadata.transaction([], [Put("/turn", b"mine")]).revision)
    tabled.put(FEW, store, held=[mine])
    metadata.transaction([], [Put("/turn", b"another's")])

    with pytest.raises(Unavailable):
        tabled.put([], store, held=[mine])
    assert tabled.objects(store) == FEW
