"""Where a shard is served."""

from __future__ import annotations

from forebay.service.placement import HERE, Alone, Nowhere, Placement, There
from forebay.topics import ShardRef, TopicName, TopicSpec


def test_a_broker_without_others_serves_every_shard_itself() -> None:
    placement: Placement = Alone()
    spec = TopicSpec.create(TopicName("shop", "orders"), topic_id="0" * 32, created_at=0, partitions=2)

    assert [placement.of(ShardRef(spec, partition)) for partition in range(2)] == [HERE, HERE]


def test_the_places_differ_and_are_matched_by_kind() -> None:
    places = [HERE, There(broker="d1", url="http://127.0.0.1:7878"), Nowhere(why="moving", retry_after_s=0.5)]

    assert [type(place).__name__ for place in places] == ["Here", "There", "Nowhere"]
    assert There(broker="d1", url="u") == There(broker="d1", url="u") != There(broker="d2", url="u")
