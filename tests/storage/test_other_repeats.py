"""A repeat has the same records: one with others is refused, in every way to append."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import forebay
import forebay.aio
from forebay import Conflict, Storage
from forebay.format.columns.rows import Columns, content_checksum, encode_columns, encode_large, encode_row
from forebay.format.frame.batch import encode_arrow
from tests.storage.rig import QUICK, values
from tests.support.brokers import running_broker


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Storage]:
    with forebay.open(tmp_path / "log", QUICK) as log:
        yield log


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_a_repeat_with_other_records_is_a_conflict(log: Storage, durability: str) -> None:
    topic = log.create_topic("t", durability=durability)
    assert topic.append(b"first", key=b"k", producer=7, sequence=0) == 0
    assert list(topic.append_many([b"a", b"b"], producer=7, sequence=1)) == [1, 2]

    assert topic.append(b"first", key=b"k", timestamp=5, producer=7, sequence=0) == 0
    for other in ({"value": b"second", "key": b"k"}, {"value": b"first", "key": b"K"}, {"value": None, "key": b"k"}):
        with pytest.raises(Conflict, match="repeats sequence 0 with other records"):
            topic.append(**other, producer=7, sequence=0)
    with pytest.raises(Conflict, match="other records"):
        topic.append_many([b"a", b"c"], producer=7, sequence=1)
    with pytest.raises(Conflict, match="other records"):
        topic.append_arrow(pa.record_batch({"value": [b"a", b"c"]}), producer=7, sequence=1)
    assert list(topic.append_arrow(pa.record_batch({"value": [b"a", b"b"]}), producer=7, sequence=1)) == [1, 2]
    assert values(topic.read()) == [b"first", b"a", b"b"]


def test_a_client_is_told_the_kind_of_a_conflict(tmp_path: Path) -> None:
    with running_broker(tmp_path / "data") as broker, forebay.connect(broker.url) as log:
        topic = log.create_topic("t")
        topic.append(b"first", producer=7, sequence=0)

        with pytest.raises(Conflict) as other:
            topic.append(b"second", producer=7, sequence=0)
        with pytest.raises(Conflict) as unknown:
            topic.append(b"second", producer=8, sequence=4)

    assert (other.value.kind, unknown.value.kind) == ("other_records", "unknown_producer")


def test_an_event_loop_refuses_it_too(tmp_path: Path) -> None:
    async def use() -> None:
        async with forebay.aio.open(tmp_path / "log", QUICK) as log:
            topic = await log.create_topic("t")
            await topic.append(b"first", producer=7, sequence=0)
            with pytest.raises(Conflict, match="other records"):
                await topic.append(b"second", producer=7, sequence=0)
            assert await topic.append(b"first", producer=7, sequence=0) == 0

    asyncio.run(use())


def test_after_a_restart_the_number_of_records_decides(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log:
        log.create_topic("t").append(b"first", producer=7, sequence=0)
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = log.topic("t")

        assert topic.append(b"second", producer=7, sequence=0) == 0
        with pytest.raises(Conflict):
            topic.append_many([b"a", b"b"], producer=7, sequence=0)


def test_one_content_has_one_checksum_however_it_was_encoded() -> None:
    row = (b"value", b"key", "tag", (("name", b"1"),), 1)
    columns = Columns([row[0]], [2], [row[1]], [row[2]], [row[3]])
    arrow = pa.record_batch(
        {"value": [b"value"], "key": [b"key"], "tag": ["tag"], "headers": [[{"key": "name", "value": b"1"}]]}, HEADED
    )

    checksums = {
        content_checksum(encode_row(row)),
        content_checksum(encode_columns(columns)),
        content_checksum(encode_large(columns)),
        content_checksum(encode_arrow(arrow, 3)),
    }

    assert len(checksums) == 1


HEADED = pa.schema(
    [
        ("value", pa.binary()),
        ("key", pa.binary()),
        ("tag", pa.string()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ]
)
