"""Deletes and floors as a second process sees them: by the log's newest file and by what is recorded."""

from __future__ import annotations

import pytest

from forebay.engines.readonly import FollowedShard, FollowingEngine
from forebay.records import Gap, Reason
from forebay.shard import ShardContext
from forebay.shard.tiers import LOOK_SECONDS
from forebay.testing.checks.history import read_everything
from forebay.testing.inside import inside
from forebay.topics import Durability
from tests.protocol.environment import MODES, Node, OwnersEnvironment
from tests.support.environments.simulated import GRACE_S


def followed(node: Node, *, owned: bool = True) -> FollowedShard:
    """The same directory, opened beside its owner."""
    environment = node.environment
    around = ShardContext(environment.metadata, environment.settings, node.places, node.name, lambda: True)
    engine = FollowingEngine(
        f"/{node.name}/shards",
        environment.settings,
        disk=environment.disk,
        clock=environment.clock,
        around=around,
        is_owned=lambda: owned,
        is_known=lambda ref: True,
    )
    return engine.open_shard(environment.ref)


def live(node: Node, shard: FollowedShard) -> list[int]:
    """What a reader is given a moment later."""
    node.environment.clock.advance(LOOK_SECONDS)
    return [offset for offset, _ in read_everything(shard.read, shard.offsets().next).records]


@pytest.mark.parametrize("durability", [Durability.FSYNC, Durability.DISK])
@pytest.mark.parametrize("mode", MODES)
def test_a_reader_beside_sees_deletes_in_every_tier(mode: str, durability: Durability) -> None:
    node = OwnersEnvironment(mode, durability).node("a")
    node.append(4)
    node.append(4)
    beside = followed(node)
    assert live(node, beside) == list(range(8))

    node.shard.deletes.delete_range(2, 5)
    assert live(node, beside) == live(node, followed(node)) == [0, 1, 5, 6, 7]
    node.export()
    assert live(node, beside) == live(node, followed(node)) == [0, 1, 5, 6, 7]
    node.append()
    node.shard.deletes.delete_range(6, 7)
    node.shard.deletes.evict_below(1, Reason.TTL)
    assert live(node, beside) == live(node, followed(node)) == [1, 5, 7, 8]
    assert beside.offsets()[:2] == followed(node).offsets()[:2] == (1, 1)
    assert beside.read(0).events == [Gap(0, 1, Reason.TTL)]
    node.engine.close()
    assert live(node, followed(node, owned=False)) == [1, 5, 7, 8]


def test_a_reader_beside_is_never_shown_damage_where_the_floor_has_passed() -> None:
    node = OwnersEnvironment("shared_fs").node("a")
    for _ in range(4):
        node.append(3)
        node.rotate()
    node.export()
    node.append()
    beside = followed(node)
    assert beside.read(0, 1).next == 3
    node.shard.deletes.evict_below(7, Reason.CAP)
    node.shard.history.retain()
    node.environment.clock.advance(2 * GRACE_S)
    node.cleanup.collect_owned(node.shard)
    late = followed(node)
    inside(late).skip_next_look(node.environment.clock)

    for shard in (beside, late):
        assert shard.read(3).events == [Gap(3, 7, Reason.CAP)]


def test_times_lead_a_reader_beside_to_the_first_live_record() -> None:
    node = OwnersEnvironment("local").node("a")
    for _ in range(3):
        node.append(2)
        node.environment.clock.advance(1)
    begun = node.shard.read(0).batches[0].records(0)[0].timestamp
    node.shard.deletes.delete_range(2, 5)

    for shard in (node.shard, followed(node)):
        assert [shard.offset_at_time(begun + at) for at in (0, 1, 1_000, 2_000, 2_001)] == [0, 5, 5, 5, None]
