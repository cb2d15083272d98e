"""Deletes, floors and eviction where part of the history came by a bulk load."""

from __future__ import annotations

import pytest

from forebay.engines.readonly import FollowedShard, FollowingEngine
from forebay.loads.book import LoadBook
from forebay.records import Gap, Reason
from forebay.shard import ShardContext
from forebay.shard.eviction import weigh
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from forebay.topics import ShardRef
from tests.history.attached import LOAD, LoadEnvironment, LoadOwner, values


def _live(node: LoadOwner) -> list[int]:
    return [step[0] for step in node.stream() if not isinstance(step, Gap)]


@pytest.mark.parametrize("mode", ["shared_fs", "local"])
def test_records_of_a_load_are_deleted_and_counted_as_any_others(mode: str) -> None:
    environment = LoadEnvironment(mode)
    node = environment.node()
    node.append(count=5)
    node.shard().deletes.delete_range(3, 4)
    node.offer({0: values(0, 100)}, per_segment=40)
    node.loads.attach(LOAD)
    node.append(count=3)
    shard = node.shard()

    assert shard.deletes.delete_range(4, 50) == 46
    assert shard.deletes.delete_range(90, 107) == 17
    assert shard.deletes.delete_before(2) == 2
    shard.rotate()
    expected = [2, *range(50, 90), 107]
    for _ in range(2):
        assert _live(node) == expected
        assert (node.shard().holding().live, node.shard().offsets().earliest) == (len(expected), 2)
        node.close()
        node = environment.node()
    assert node.shard().deletes.delete_before(46) == 1
    node.shard().rotate()
    node.shard().upkeep.seal_rotated()
    node.shard().history.catch_up()
    node.shard().history.retain()
    assert environment.catalog(0).descriptors()[0].start == 45
    assert _live(node) == expected[1:]


def _weighed_anew(node: LoadOwner) -> int:
    """What a shard that was just opened counts for."""
    shard = node.shard()
    return weigh(inside(shard).tiers, 0, shard.offsets().next).bytes


@pytest.mark.parametrize("committed", [True, False])
def test_bytes_of_a_load_count_once_it_is_committed_and_those_behind_it_always(*, committed: bool) -> None:
    environment = LoadEnvironment(partitions=2)
    node, other = environment.node("a"), environment.node("b")
    other.append(1)
    node.append(0, 5)
    before = node.shard().holding().bytes
    node.offer({0: values(0, 10), 1: values(1, 10)})
    node.loads.attach(LOAD)
    node.append(0, 5)
    waiting = node.shard().holding().bytes
    assert waiting > before
    assert node.shard().holding().bytes == waiting == _weighed_anew(node)

    if not committed:
        LoadBook(environment.inner, "/forebay", ManualClock()).give_up(LOAD)
    other.settle()

    held = node.shard().holding().bytes
    assert (held > waiting) == committed
    assert held == _weighed_anew(node)
    node.append(0)
    assert node.shard().holding().bytes == _weighed_anew(node) > held


def _beside(node: LoadOwner) -> FollowedShard:
    """The shard as a second process reads it, which has not looked of late what has ended."""
    environment = node.environment
    engine = FollowingEngine(
        f"/{node.name}/shards",
        environment.settings,
        disk=environment.disk,
        clock=environment.clock,
        around=ShardContext(environment.metadata, environment.settings, node.places, node.name, lambda: True),
        is_owned=lambda: True,
        is_known=lambda ref: True,
    )
    shard = engine.open_shard(ShardRef(environment.spec, 0))
    inside(shard).skip_next_look(environment.clock)
    return shard


def test_a_reader_beside_is_never_shown_that_a_load_is_lost_where_the_floor_has_passed() -> None:
    """Found by review: it was sent past the whole load, live records included, by what it knew of the floor before."""
    node = LoadEnvironment().node()
    node.append(count=3)
    node.offer({0: values(0, 10)}, per_segment=5)
    node.loads.attach(LOAD)
    node.append(count=3)
    shard = node.shard()
    assert _beside(node).read(3).batches
    shard.deletes.evict_below(10, Reason.CAP)
    shard.rotate()
    shard.upkeep.seal_rotated()
    shard.history.catch_up()
    shard.history.retain()

    assert _beside(node).read(4).events == [Gap(4, 10, Reason.CAP)]
