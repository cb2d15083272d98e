"""How decoded records of a request are queued: one alone shares a frame, columns go where rows of Arrow would."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pyarrow as pa

from forebay import Record
from forebay.aio import AsyncLog
from forebay.records import OffsetRange
from forebay.service.service import AppendRecords
from forebay.testing.inside import inside
from forebay.wire import bodies
from forebay.wire.items import RecordColumns
from forebay.wire.limits import BodyLimits
from tests.storage.rig import quick
from tests.support.waiting import PATIENCE

LIMITS = BodyLimits(1_000_000, 10_000)


def run(path: Path, use: Callable[[AsyncLog], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(PATIENCE), AsyncLog(path, quick(), commits_each_turn=True) as log:
            await use(log)

    asyncio.run(whole())


def test_requests_with_one_record_each_share_a_frame(tmp_path: Path) -> None:
    async def use(log: AsyncLog) -> None:
        topic = await log.create_topic("t")
        await topic.append(b"first")
        one = RecordColumns([b"a"], [b"k"], ["tag"], [(("h", None),)], [7])
        two = RecordColumns([None])
        wal = inside(topic).wal()
        assert wal.writer.active is not None
        frames = wal.writer.active.frames

        acks = [await AppendRecords(columns=columns).queue(topic) for columns in (one, two)]
        for ack in acks:
            await ack

        assert wal.writer.active.frames == frames + 1
        assert [ack.ranges for ack in acks] == [(OffsetRange(0, 1, 1),), (OffsetRange(0, 2, 1),)]
        found = [record async for record in topic.read(1)]
        assert found[0] == Record(0, 1, 7, b"k", b"a", "tag", (("h", None),))
        assert found[1].value is None

    run(tmp_path / "log", use)


def test_columns_with_keys_fall_into_the_partitions_that_rows_of_arrow_do(tmp_path: Path) -> None:
    rows = pa.record_batch(
        {"value": [b"%d" % n for n in range(50)], "key": [b"k%d" % n for n in range(50)], "timestamp": range(50)}
    )
    body = bodies.encode_arrow([rows])

    async def use(log: AsyncLog) -> None:
        columns = bodies.decode_plain_arrow(body, LIMITS, 0)
        assert columns is not None
        found = []
        for name, given in (("columns", columns), ("arrow", bodies.decode_arrow(body, LIMITS))):
            topic = await log.create_topic(name, partitions=4)
            for sequence in (0, 0):
                await (await AppendRecords(columns=given, producer=5, sequence=sequence).queue(topic))
            found.append([[record async for record in topic.read(partition=number)] for number in range(4)])
        assert found[0] == found[1]
        assert sum(map(len, found[0])) == 50, "a repeat adds nothing"

    run(tmp_path / "log", use)


def test_columns_without_keys_stay_together_and_go_where_they_are_sent(tmp_path: Path) -> None:
    body = bodies.encode_arrow([pa.record_batch({"value": [b"a", b"b"]})])

    async def use(log: AsyncLog) -> None:
        topic = await log.create_topic("t", partitions=3)
        columns = bodies.decode_plain_arrow(body, LIMITS, 9)
        assert columns is not None
        ack = await AppendRecords(columns=columns, partition=2).queue(topic)
        await ack
        assert ack.ranges == (OffsetRange(2, 0, 2),)
        assert [(record.value, record.timestamp) async for record in topic.read(partition=2)] == [(b"a", 9), (b"b", 9)]

    run(tmp_path / "log", use)
