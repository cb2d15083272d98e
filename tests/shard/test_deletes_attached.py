"""Deletes, floors and eviction where part of the history came by a bulk load."""

from __future__ import annotations

import pytest

from forebay.records import Gap
from tests.history.attached import LOAD, Land, Node, values


def _live(node: Node) -> list[int]:
    return [step[0] for step in node.stream() if not isinstance(step, Gap)]


@pytest.mark.parametrize("mode", ["shared_fs", "local"])
def test_records_of_a_load_are_deleted_and_counted_as_any_others(mode: str) -> None:
    land = Land(mode)
    node = land.node()
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
        node = land.node()
    assert node.shard().deletes.delete_before(46) == 1
    node.shard().rotate()
    node.shard().upkeep.seal_rotated()
    node.shard().archive.catch_up()
    node.shard().archive.retain()
    assert land.catalog(0).descriptors()[0].start == 45
    assert _live(node) == expected[1:]
