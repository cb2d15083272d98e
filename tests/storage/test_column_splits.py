"""However records come in, those of each partition are the same: every column is kept where a key decides."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import forebay.aio
from forebay.format.columns.rows import Columns, encode_columns
from forebay.format.frame.batch import batch_of
from forebay.partitioning import Partitioner
from forebay.records import Record
from forebay.settings import WalSettings
from forebay.storage.append import Appender, Records
from forebay.testing.simulated.clock import ManualClock
from tests.storage.rig import QUICK
from tests.support.waiting import PATIENCE

PARTITIONS: Final = 3
FRAME_BYTES: Final = 64 * 1024
HEADER = st.tuples(st.text(min_size=1, max_size=3), st.one_of(st.none(), st.binary(max_size=3)))
ROW = st.tuples(
    st.one_of(st.none(), st.binary(max_size=4)),
    st.one_of(st.none(), st.binary(max_size=2)),
    st.one_of(st.none(), st.text(min_size=1, max_size=3)),
    st.lists(HEADER, max_size=2).map(tuple),
    st.integers(0, 2**40),
)
Rows = Sequence[tuple[bytes | None, bytes | None, str | None, tuple[tuple[str, bytes | None], ...], int]]


def _columns(rows: Rows, *, tagged: bool, headed: bool) -> Columns:
    return Columns(
        values=[row[0] for row in rows],
        keys=[row[1] for row in rows],
        tags=[row[2] for row in rows] if tagged else None,
        headers=[row[3] for row in rows] if headed else None,
        timestamps=[row[4] for row in rows],
    )


def _appender() -> Appender:
    def own(partition: int) -> None:
        raise AssertionError("nothing is queued here")

    return Appender(
        "t",
        WalSettings(frame_bytes_max=FRAME_BYTES),
        ManualClock(),
        Partitioner(PARTITIONS),
        own=own,  # type: ignore[arg-type]
        find=lambda _: None,
        commit_soon=lambda _: None,
    )


def _by_partition(records: Records) -> dict[int, list[Record]]:
    found: dict[int, list[Record]] = {}
    for part in records.parts:
        base = len(found.setdefault(part.partition, []))
        found[part.partition] += batch_of(part.columns, base=base, epoch=0, appended_at=0).records(part.partition)
    return found


@pytest.mark.slow
@settings(max_examples=100)
@given(rows=st.lists(ROW, min_size=1, max_size=12), tagged=st.booleans(), headed=st.booleans())
def test_columns_that_are_split_by_key_are_those_of_append_many(rows: Rows, *, tagged: bool, headed: bool) -> None:
    columns = _columns(rows, tagged=tagged, headed=headed)
    encoded = encode_columns(columns)
    arrow = batch_of(encoded, base=0, epoch=0, appended_at=0).to_arrow(
        0, ("timestamp", "key", "value", "tag", "headers")
    )
    many = {
        "keys": columns.keys,
        "tags": columns.tags,
        "headers": columns.headers,
        "timestamps": columns.timestamps,
    }
    expected = _by_partition(_appender().prepare_many(columns.values, **many))  # type: ignore[arg-type]

    assert _by_partition(_appender().prepare_columns(encoded)) == expected
    assert _by_partition(_appender().prepare_arrow(arrow)) == expected
    for partition in range(PARTITIONS):
        named = _by_partition(_appender().prepare_many(columns.values, **many, partition=partition))  # type: ignore[arg-type]
        assert _by_partition(_appender().prepare_columns(encoded, partition=partition)) == named
        assert _by_partition(_appender().prepare_arrow(arrow, partition=partition)) == named


@pytest.mark.slow
@settings(max_examples=20)
@given(rows=st.lists(ROW, min_size=8, max_size=12))
def test_records_that_are_split_over_frames_are_the_same(rows: Rows) -> None:
    large = [(bytes(FRAME_BYTES // 3), *row[1:]) for row in rows]
    columns = _columns(large, tagged=True, headed=True)

    split = _appender().prepare_many(
        columns.values,
        keys=columns.keys,
        tags=columns.tags,
        headers=columns.headers,
        timestamps=[row[4] for row in rows],
        atomic=False,
    )

    assert len(split.parts) > PARTITIONS
    found = _by_partition(split)
    assert [row for _, row in sorted((place, _content(row)) for place, row in _placed(split, found))] == large


def _placed(split: Records, found: dict[int, list[Record]]) -> list[tuple[int, Record]]:
    """Each record with its place in the call."""
    left = {partition: iter(records) for partition, records in found.items()}
    return [
        (int(row), next(left[part.partition]))
        for part in split.parts
        for row in (part.rows if part.rows is not None else ())
    ]


def test_a_server_that_appends_encoded_rows_keeps_tags_and_headers(tmp_path: Path) -> None:
    """Of rows that a key had spread over partitions, only timestamp, key and value were stored."""
    rows: Rows = [(b"v%d" % number, b"k%d" % number, f"t{number}", (("h", b"1"),), number) for number in range(8)]

    async def use() -> list[Record]:
        async with forebay.aio.open(tmp_path / "log", QUICK) as log:
            topic = await log.create_topic("t", partitions=PARTITIONS)
            ack = await topic.append_columns_nowait(encode_columns(_columns(rows, tagged=True, headed=True)))
            assert sum(part.count for part in ack.result(PATIENCE)) == len(rows)
            return [record async for record in topic.read()]

    assert _contents(asyncio.run(use())) == sorted(rows)


def _content(record: Record) -> tuple[object, ...]:
    return record.value, record.key, record.tag, record.headers, record.timestamp


def _contents(records: Sequence[Record]) -> list[tuple[object, ...]]:
    return sorted(map(_content, records))
