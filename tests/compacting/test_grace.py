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
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from tests.compacting.environment import LEASE, WINDOW, CompactionEnvironment, Compactor
from tests.history.attached import LOAD, LoadEnvironment, values
from tests.support.environments import directories
from tests.support.environments.shard import TOPIC, ShardEnvironment

GRACE_S: Final = 3600


def _grown() -> ShardEnvironment:
    """Two files of history that were exported long ago."""
    shard_environment = ShardEnvironment()
    for _ in range(2):
        shard_environment.append(5)
        shard_environment.seal()
        shard_environment.export()
    shard_environment.clock.advance(10 * GRACE_S)
    return shard_environment


def _swap(shard_environment: ShardEnvironment, name: str) -> None:
    """What compaction does, as far as the catalog and the names of objects go."""
    key = f"{TOPIC}_0/{COMPACTED}{name}.parquet"
    for made in (key, index_name(key)):
        shard_environment.store.put_if_absent(made, b"rows")
    _replace(shard_environment.catalog(), key, shard_environment.clock)


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


def _sweep(shard_environment: ShardEnvironment, collector: Collector | None = None) -> set[str]:
    """By a process that has looked before with this collector, or by one that has just come."""
    return set((collector or Collector(shard_environment.clock, GRACE_S)).collect(shard_environment.scope()))


def test_old_objects_stay_for_the_grace_however_old_they_are() -> None:
    shard_environment = _grown()
    frames, collector = shard_environment.keys(), Collector(shard_environment.clock, GRACE_S)
    _swap(shard_environment, "one")

    assert _sweep(shard_environment, collector) == set()
    shard_environment.clock.advance(GRACE_S - 1)
    assert _sweep(shard_environment, collector) == set()
    shard_environment.clock.advance(1)
    assert _sweep(shard_environment, collector) == frames


def test_a_history_that_is_compacted_again_and_again_is_swept_in_its_time() -> None:
    shard_environment = _grown()
    frames, collector = shard_environment.keys(), Collector(shard_environment.clock, GRACE_S)
    _swap(shard_environment, "one")
    assert _sweep(shard_environment, collector) == set()
    shard_environment.clock.advance(GRACE_S - 1)
    _swap(shard_environment, "two")
    assert _sweep(shard_environment, collector) == set()

    shard_environment.clock.advance(1)
    assert _sweep(shard_environment, collector) == frames, "what the second replaced has its own time"
    shard_environment.clock.advance(GRACE_S)
    assert len(_sweep(shard_environment, collector)) == 2


def test_an_owner_that_comes_later_knows_that_too() -> None:
    shard_environment = _grown()
    frames = shard_environment.keys()
    _swap(shard_environment, "one")
    shard_environment.clock.advance(GRACE_S - 1)

    assert _sweep(shard_environment) == set()
    shard_environment.clock.advance(1)
    assert _sweep(shard_environment) == frames


@pytest.mark.parametrize("mode", ["local", "shared_fs"])
def test_what_a_load_brought_stays_so_long_too(mode: str) -> None:
    environment = LoadEnvironment(mode)
    node = environment.node()
    node.offer({0: values(0, 10)})
    node.loads.attach(LOAD)
    grace_s = environment.settings.export.orphan_grace_s
    environment.clock.advance(10 * grace_s)
    brought = {path for path in environment.files() if f"/loads/{LOAD}/" in path and path.endswith(".seg")}
    assert brought
    _replace(environment.catalog(0), "made.parquet", environment.clock)

    node.collect_directory()
    assert brought <= environment.files().keys()
    environment.clock.advance(grace_s)
    node.collect_directory()
    assert not brought & environment.files().keys()


def test_grace_begins_with_the_swap_however_long_the_writing_took() -> None:
    environment = CompactionEnvironment()
    compactor = Compactor(environment)

    def slowly(units: Sequence[Unit]) -> Iterator[SegmentDescriptor | str]:
        for made in compactor.write(units):
            environment.shard_environment.clock.advance(10 * GRACE_S)
            yield made

    passes = Passes(compactor.compaction, compactor.target, slowly, compactor.look, WINDOW)
    taken = environment.metadata.transaction([], [Put(LEASE, b"compactor")])
    passes.run(ShardLease(RevisionIs(LEASE, taken.revision), lambda: None))

    assert passes.swapped == 1
    assert [piece.created_at for piece in environment.catalog().descriptors()] == [
        environment.shard_environment.clock.now_ms()
    ]
    compactor.close()


def test_what_tables_name_is_asked_where_it_is_listed_whatever_store_is_swept(tmp_path: Path) -> None:
    """As after a change of the mode: something is left in the directory, and long lists lie in the store."""
    environment = directories.shared_fs(tmp_path, export=ExportSettings(orphan_grace_s=0))
    with environment.open("one") as log:
        topic = log.create_topic("shop/orders")
        topic.append(b"first")
        places, spec = inside(log).places, topic.spec
        assert places.store is not None
        left = f"{spec.topic_id}_0/{COMPACTED}left.parquet"
        places.loads.open().put_if_absent(left, b"rows")
        tabled = TableObjects(
            directories.metadata_of(log), "/forebay", spec.namespace, spec.topic, spec.topic_id, clock=ManualClock()
        )
        tabled.put([f"{number}.parquet" for number in range(LISTED_MAX + 1)], places.store)
        while not (swept := inside(log).collect(topic)):
            assert places.loads.stat(left) is not None  # younger than a millisecond

        assert swept == [left]


def test_what_has_gone_is_not_remembered() -> None:
    """However long an owner lives, and however often its history is compacted."""
    shard_environment = _grown()
    collector = Collector(shard_environment.clock, GRACE_S)
    for name in map(str, range(5)):
        _swap(shard_environment, name)
        assert _sweep(shard_environment, collector) == set()
        assert collector._unneeded
        shard_environment.clock.advance(GRACE_S - 1)
        assert _sweep(shard_environment, collector) == set()
        shard_environment.clock.advance(2)
        assert _sweep(shard_environment, collector)

    assert not collector._unneeded
