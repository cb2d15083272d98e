"""Spark before 4.3, by what it offers: micro-batches without a limit, tasks without a partition."""

from __future__ import annotations

from pathlib import Path

import pytest

import forebay
from forebay.errors import Unsupported
from forebay.spark.reading.options import ReadOptions
from forebay.spark.reading.streaming import reader
from forebay.spark.reading.streaming.limited import LimitedStreamReader
from forebay.spark.reading.streaming.reader import WholeStreamReader, stream_reader

COLUMNS = ("offset", "value")


@pytest.fixture
def options(tmp_path: Path) -> dict[str, str]:
    with forebay.open(tmp_path / "data") as log:
        topic = log.create_topic("shop/orders")
        topic.append_many([b"0", b"1", b"2"])
    return {"path": str(tmp_path / "data"), "topic": "shop/orders", "startingOffsets": "earliest"}


def test_a_micro_batch_reaches_to_the_end_where_spark_says_no_limit(
    options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "find_spec", lambda _: None)
    stream = stream_reader(ReadOptions.parse(options, streaming=True), COLUMNS)
    assert isinstance(stream, WholeStreamReader)
    try:
        start = stream.initialOffset()
        end = stream.latestOffset()
        rows = [
            row for part in stream.partitions(start, end) for batch in stream.read(part) for row in batch.to_pylist()
        ]
        assert stream.partitions(end, stream.latestOffset()) == []
    finally:
        stream.stop()

    assert rows == [{"offset": number, "value": b"%d" % number} for number in range(3)]
    assert list(stream.read(None)) == []


@pytest.mark.parametrize("limit", ["maxOffsetsPerTrigger", "maxBytesPerTrigger"])
def test_a_limit_that_spark_cannot_keep_is_refused_by_name(
    options: dict[str, str], limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = ReadOptions.parse({**options, limit: "10"}, streaming=True)
    assert isinstance(stream_reader(parsed, COLUMNS), LimitedStreamReader)

    monkeypatch.setattr(reader, "find_spec", lambda _: None)
    with pytest.raises(Unsupported, match=rf"cannot limit a micro-batch.*{limit}"):
        stream_reader(parsed, COLUMNS)
