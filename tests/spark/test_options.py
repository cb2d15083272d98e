"""Options of a read: each is parsed once, and whatever is wrong is named with what to write instead."""

from __future__ import annotations

import pickle

import pytest

from forebay.errors import Invalid, Unsupported
from forebay.spark.columns import SPARK_TYPES
from forebay.spark.options import FROM_EARLIEST, FROM_LATEST, ReadOptions
from forebay.topics import TopicName


def _parse(**options: str) -> ReadOptions:
    return ReadOptions.parse({"path": "/data", "topic": "shop/orders", **options})


def test_path_and_topic_are_enough() -> None:
    options = _parse()

    assert options == ReadOptions(path="/data", topic=TopicName("shop", "orders"))
    assert (options.starting, options.ending) == (FROM_EARLIEST, FROM_LATEST)
    assert options.columns == tuple(SPARK_TYPES)
    assert (options.partitions_min, options.fail_on_data_loss) == (1, True)


def test_every_option_is_taken_in_any_case_and_travels() -> None:
    options = _parse(
        startingoffsets='{"/shop/orders": {"0": 5, "1": -2}}',
        ENDINGOFFSETS='{"shop/orders": {"0": 9, "1": -1}}',
        columns=" value , offset",
        minPartitions="8",
        failOnDataLoss="FALSE",
    )

    assert options.starting == {0: 5, 1: FROM_EARLIEST}
    assert options.ending == {0: 9, 1: FROM_LATEST}
    assert options.columns == ("value", "offset")
    assert (options.partitions_min, options.fail_on_data_loss) == (8, False)
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize("missing", ["path", "topic"])
def test_what_is_missing_is_named(missing: str) -> None:
    options = {"path": "/data", "topic": "shop/orders"}
    del options[missing]

    with pytest.raises(Invalid, match=f'option "{missing}" is missing'):
        ReadOptions.parse(options)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("startingTimestamp", "5", '"startingtimestamp" is not known .* startingOffsets'),
        ("subscribe", "orders", 'write option\\("topic"'),
        ("includeHeaders", "true", "headers are always there"),
        ("topic", "shop/or ders", "is not a topic name"),
        ("startingOffsets", "latest", r'"startingOffsets" may not be latest \(-1\)'),
        ("startingOffsets", '{"shop/orders": {"0": -1}}', r'"startingOffsets" may not be latest \(-1\)'),
        ("endingOffsets", "earliest", r'"endingOffsets" may not be earliest \(-2\)'),
        ("endingOffsets", '{"shop/orders": {"0": -2}}', r'"endingOffsets" may not be earliest \(-2\)'),
        ("startingOffsets", "{bad", 'write earliest, latest or JSON such as {"shop/orders"'),
        ("startingOffsets", "[1]", "Expected `object`"),
        ("startingOffsets", '{"shop/orders": {"0": "x"}}', "Expected `int`"),
        ("startingOffsets", '{"shop/other": {"0": 1}}', "names shop/other: it must name shop/orders"),
        ("startingOffsets", "{}", "names no topic"),
        ("startingOffsets", '{"shop/orders": {"zero": 1}}', "names a partition 'zero'"),
        ("startingOffsets", '{"shop/orders": {"0": 1, "00": 2}}', "names a partition twice"),
        ("startingOffsets", '{"shop/orders": {"0": -3}}', "has offset -3 for partition 0"),
        ("startingOffsets", '{"shop/orders": {"0": 9223372036854775808}}', "has offset 9223372036854775808"),
        ("columns", "value,colour", "names 'colour': the columns are key, value, topic"),
        ("columns", "value,value", "names 'value' twice"),
        ("columns", "", "names ''"),
        ("minPartitions", "0", "allowed are 1 to"),
        ("minPartitions", "many", "is 'many'"),
        ("failOnDataLoss", "no", "write true or false"),
    ],
)
def test_what_is_wrong_is_named_with_the_way_out(name: str, text: str, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        _parse(**{name: text})


def test_several_topics_are_not_offered() -> None:
    with pytest.raises(Unsupported, match="one read takes one topic; read each and join them with union"):
        _parse(topic="shop/orders,shop/returns")
