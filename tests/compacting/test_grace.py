"""What compaction took the place of stays for the grace: whoever planned a read before it goes on undisturbed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import pytest

from forebay.catalog import ShardCatalog
from forebay.cleanup.collector import Collector
from forebay.cleanup.tables import LISTED_MAX, TableObjects
from forebay.compacting.passes import Passes, ShardLease, Unit
from forebay.format.files.segment import COMPACTED, index_name
from forebay.format.metadata.descriptor import DescriptorKind, SegmentDescriptor, Status
from forebay.metadata import Put, RevisionIs
from forebay.settings import ExportSettings
from forebay.testing.clock import ManualClock
from forebay.testing.inside import inside
from tests.compacting.world import LEASE, WINDOW, Compactor, World
from tests.history.attached import LOAD, Land, values
from tests.history.house import TOPIC, House
from tests.moves import rig

GRACE_S: Final = 3600


def _grown() -> House:
    """Two files of history that were exported long ago."""
    house = House()
    for _ in range(2):
        house.append(5)
        house.seal()
        house.export()
    house.clock.advance(10 * GRACE_S)
    return house


def _swap(house: House, name: str) -> None:
    """What compaction does, as far as the catalog and the names of objects go."""
    key = f"{TOPIC}_0/{COMPACTED}{name}.parquet"
    for made in (key, index_name(key)):
        house.store.put_if_absent(made, b"rows")
    _replace(house.catalog(), key, house.clock)


def _replace(catalog: ShardCatalog, key: str, clock: ManualClock) -> None:
    pieces = catalog.pieces()
    new = msgspec.structs.replace(
        pieces[0].descriptor,
        kind=DescriptorKind.PARQUET,
        end=pieces[-1].descriptor.end,
        object_key=key,
        status=Status.COMPACTED,
        created_at=clock.now_ms(),
        load_id=None,
    )
    assert catalog.replace(pieces, new)


def _sweep(house: House, collector: Collector | None = None) -> set[str]:
    """By a process that has looked before with this collector, or by one that has just come."""
    return set((collector or Collector(house.clock, GRACE_S)).collect(house.scope()))


def test_old_objects_stay_for_the_grace_however_old_they_are() -> None:
    house = _grown()
    frames, collector = house.keys(), Collector(house.clock, GRACE_S)
    _swap(house, "one")

    assert _sweep(house, collector) == set()
    house.clock.advance(GRACE_S - 1)
    assert _sweep(house, collector) == set()
    house.clock.advance(1)
    assert _sweep(house, collector) == frames


def test_a_history_that_is_compacted_again_and_again_is_swept_in_its_time() -> None:
    house = _grown()
    frames, collector = house.keys(), Collector(house.clock, GRACE_S)
    _swap(house, "one")
    assert _sweep(house, collector) == set()
    house.clock.advance(GRACE_S - 1)
    _swap(house, "two")
    assert _sweep(house, collector) == set()

    house.clock.advance(1)
    assert _sweep(house, collector) == frames, "what the second replaced has its own time"
    house.clock.advance(GRACE_S)
    assert len(_sweep(house, collector)) == 2


def test_an_owner_that_comes_later_knows_that_too() -> None:
    house = _grown()
    frames = house.keys()
    _swap(house, "one")
    house.clock.advance(GRACE_S - 1)

    assert _sweep(house) == set()
    house.clock.advance(1)
    assert _sweep(house) == frames


@pytest.mark.parametrize("mode", ["local", "shared_fs"])
def test_what_a_load_brought_stays_so_long_too(mode: str) -> None:
    land = Land(mode)
    node = land.node()
    node.offer({0: values(0, 10)})
    node.loads.attach(LOAD)
    grace_s = land.settings.export.orphan_grace_s
    land.clock.advance(10 * grace_s)
    brought = {path for path in land.files() if f"/loads/{LOAD}/" in path and path.endswith(".seg")}
    assert brought
    _replace(land.catalog(0), "made.parquet", land.clock)

    node.collect_directory()
    assert brought <= land.files().keys()
    land.clock.advance(grace_s)
    node.collect_directory()
    assert not brought & land.files().keys()


def test_grace_begins_with_the_swap_however_long_the_writing_took() -> None:
    world = World()
    compactor = Compactor(world)

    def slowly(units: Sequence[Unit]) -> Iterator[SegmentDescriptor | str]:
        for made in compactor.write(units):
            world.house.clock.advance(10 * GRACE_S)
            yield made

    passes = Passes(compactor.compaction, compactor.target, slowly, compactor.look, WINDOW)
    taken = world.metadata.transaction([], [Put(LEASE, b"compactor")])
    passes.run(ShardLease(RevisionIs(LEASE, taken.revision), lambda: None))

    assert passes.swapped == 1
    assert [piece.created_at for piece in world.catalog().descriptors()] == [world.house.clock.now_ms()]
    compactor.close()


def test_what_tables_name_is_asked_where_it_is_listed_whatever_store_is_swept(tmp_path: Path) -> None:
    """As after a change of the mode: something is left in the directory, and long lists lie in the store."""
    land = rig.shared_fs(tmp_path, export=ExportSettings(orphan_grace_s=0))
    with land.open("one") as log:
        topic = log.create_topic("shop/orders")
        topic.append(b"first")
        places, spec = inside(log).places, topic.spec
        assert places.store is not None
        left = f"{spec.topic_id}_0/{COMPACTED}left.parquet"
        places.loads.open().put_if_absent(left, b"rows")
        tabled = TableObjects(
            rig.metadata_of(log), "/forebay", spec.namespace, spec.topic, spec.topic_id, clock=ManualClock()
        )
        tabled.put([f"{number}.parquet" for number in range(LISTED_MAX + 1)], places.store)
        while not (swept := inside(log).collect(topic)):
            assert places.loads.stat(left) is not None  # younger than a millisecond

        assert swept == [left]


def test_what_has_gone_is_not_remembered() -> None:
    """However long an owner lives, and however often its history is compacted."""
    house = _grown()
    collector = Collector(house.clock, GRACE_S)
    for name in map(str, range(5)):
        _swap(house, name)
        assert _sweep(house, collector) == set()
        assert collector._unneeded
        house.clock.advance(GRACE_S - 1)
        assert _sweep(house, collector) == set()
        house.clock.advance(2)
        assert _sweep(house, collector)

    assert not collector._unneeded
