"""Eviction of a shard with history: bytes are counted exactly in every tier, and floors survive whatever comes."""

from __future__ import annotations

import msgspec
import pytest

from forebay.appends.queue import record_bytes
from forebay.appends.ticket import Ticket
from forebay.errors import Full
from forebay.format.columns.rows import Columns, encode_columns
from forebay.records import Gap, Reason
from forebay.shard.eviction import weigh
from forebay.testing.inside import inside
from forebay.topics import OnFull
from tests.protocol.environment import MODES, Node, OwnersEnvironment

COUNTS = (1, 4, 2, 7, 3, 1, 5, 2, 6, 4)


def _append(node: Node, count: int) -> list[int]:
    """Records whose sizes differ; those sizes."""
    first = node.shard.offsets().next
    values = [b"x" * (offset * 7 % 31) for offset in range(first, first + count)]
    columns = encode_columns(Columns(values=values, timestamps=[1] * count))
    node.shard.acknowledge(node.shard.stage_many(columns, None, Ticket()))
    node.shard.commit()
    return [record_bytes(value, None, None, ()) for value in values]


@pytest.mark.parametrize("mode", MODES)
def test_bytes_are_counted_exactly_in_every_tier(mode: str) -> None:
    node = OwnersEnvironment(mode).node("a")
    sizes: list[int] = []
    for number, count in enumerate(COUNTS):
        sizes += _append(node, count)
        if number % 3 == 2:
            node.shard.rotate()
        if number == 5:
            node.export()
            node.shard.history.retain()
        if number == 8:
            node.rotate()

    for start in range(len(sizes)):
        for stop in range(start, len(sizes) + 1):
            assert weigh(inside(node.shard).tiers, start, stop).bytes == sum(sizes[start:stop]), (start, stop)


@pytest.mark.parametrize("mode", MODES)
def test_limits_that_change_are_gone_by_at_once(mode: str) -> None:
    node = OwnersEnvironment(mode).node("a")
    spec = node.environment.ref.spec
    sizes = [size for count in COUNTS for size in _append(node, count)]
    node.export()
    sizes += _append(node, 5)
    head = len(sizes)
    shard = node.shard
    assert shard.evict(0).floor == 0
    assert (shard.holding().live, shard.holding().bytes) == (head, sum(sizes))

    shard.adopt(msgspec.structs.replace(spec, cap_bytes=sum(sizes[20:])))
    assert shard.evict(0) == (20, 20, sum(sizes[:20]), Reason.CAP, False)
    shard.adopt(msgspec.structs.replace(spec, cap_records=head - 30))
    assert shard.evict(0) == (30, 10, sum(sizes[20:30]), Reason.CAP, False)
    shard.history.retain()
    assert (shard.holding().live, shard.holding().bytes) == (head - 30, sum(sizes[30:]))
    shard.adopt(msgspec.structs.replace(spec, cap_records=head - 30, on_full=OnFull.REJECT_NEW))
    with pytest.raises(Full):
        _append(node, 1)
    shard.adopt(spec)
    _append(node, 1)

    node.die()
    again = node.environment.node("a").shard
    assert again.offsets()[:2] == (30, 30)
    assert again.read(7).events == [Gap(7, 30, Reason.CAP)]


def test_files_that_history_has_not_stay_though_all_in_them_has_ended() -> None:
    """Else what is exported next would not continue the history."""
    node = OwnersEnvironment().node("a")
    for _ in range(3):
        _append(node, 4)
        node.rotate()
    _append(node, 1)
    shard = node.shard
    shard.deletes.delete_before(9)

    assert shard.history.retain() == 0
    assert shard.wal.files.begins == 0
    node.export()

    assert shard.history.exported == 13
    assert [(piece.start, piece.end) for piece in node.environment.catalog.descriptors()][-1] == (12, 13)
    shard.history.retain()
    assert shard.read(9).batches[0].base == 9
