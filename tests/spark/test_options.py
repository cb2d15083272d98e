"""Options of a read: each is parsed once, and whatever is wrong is named with what to write instead."""

from __future__ import annotations

import pickle

import pytest

from forebay.errors import Invalid
from forebay.spark.place.location import Location
from forebay.spark.reading.columns import SPARK_TYPES
from forebay.spark.reading.options import FROM_EARLIEST, FROM_LATEST, ReadOptions, Topics, is_for_stream
from forebay.topics import TopicName


def _parse(**options: str) -> ReadOptions:
    return ReadOptions.parse({"path": "/data", "topic": "shop/orders", **options})


def test_path_and_topic_are_enough() -> None:
    options = _parse()

    assert options == ReadOptions(location=Location(path="/data"), topics=Topics(names=(TopicName("shop", "orders"),)))
    assert (options.starting.at("shop/orders", 0), options.ending.at("shop/orders", 0)) == (FROM_EARLIEST, FROM_LATEST)
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

    assert options.starting.by_topic == {"shop/orders": {0: 5, 1: FROM_EARLIEST}}
    assert options.ending.by_topic == {"shop/orders": {0: 9, 1: FROM_LATEST}}
    assert options.columns == ("value", "offset")
    assert (options.partitions_min, options.fail_on_data_loss) == (8, False)
    assert pickle.loads(pickle.dumps(options)) == options


def test_several_topics_by_name_or_by_pattern() -> None:
    options = {"path": "/data", "topics": "orders, shop/returns"}

    assert ReadOptions.parse(options).topics.names == (TopicName("default", "orders"), TopicName("shop", "returns"))
    assert ReadOptions.parse({"path": "/data", "topicPattern": "shop/.*"}).topics == Topics(pattern="shop/.*")


def test_the_id_of_a_topic_goes_with_one_topic() -> None:
    place = {"path": "/data", "topicId": "ab" * 16}

    assert ReadOptions.parse({**place, "topic": "shop/orders"}).topics.topic_id == "ab" * 16
    for wrong in ({"topics": "shop/orders"}, {"topicPattern": "shop/.*"}):
        with pytest.raises(Invalid, match='"topicId" goes with option "topic", not with'):
            ReadOptions.parse({**place, **wrong})
    with pytest.raises(Invalid, match="\"topicId\" is 'orders': see"):
        ReadOptions.parse({"path": "/data", "topic": "shop/orders", "topicId": "orders"})


@pytest.mark.parametrize(
    ("text", "milliseconds"), [("1700000000123", 1_700_000_000_123), ("2023-11-14T22:13:20.123Z", 1_700_000_000_123)]
)
def test_start_and_end_by_time(text: str, milliseconds: int) -> None:
    options = _parse(startingTimestamp=text, endingOffsetsByTimestamp=f'{{"shop/orders": {{"0": {milliseconds}}}}}')

    assert options.starting.is_time and options.ending.is_time
    assert options.starting.at("shop/orders", 7) == options.ending.at("shop/orders", 0) == milliseconds


def test_a_stream_starts_at_the_end_and_takes_limits() -> None:
    given = {"path": "/data", "topic": "a", "maxOffsetsPerTrigger": "10", "maxBytesPerTrigger": "1000"}

    options = ReadOptions.parse(given, streaming=True)

    assert options.starting.everywhere == FROM_LATEST
    assert (options.offsets_max, options.bytes_max) == (10, 1000)
    assert is_for_stream(given) and is_for_stream({"startingOffsets": "latest"})
    assert not is_for_stream({"path": "/data", "topic": "a"})


@pytest.mark.parametrize(
    ("options", "streaming", "message"),
    [
        ({"topic": "a", "maxBytesPerTrigger": "1"}, False, '"maxBytesPerTrigger" is for spark.readStream'),
        ({"topic": "a", "endingOffsets": "latest"}, True, '"endingOffsets" is for spark.read: a stream has no end'),
        ({"topic": "a", "topics": "b"}, False, 'option "topic" topic and topics are given: write one of'),
        ({"topics": "a,b,a"}, False, "names default/a twice"),
        ({"topicPattern": "("}, False, "no regular expression"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, str], *, streaming: bool, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        ReadOptions.parse({"path": "/data", **options}, streaming=streaming)


@pytest.mark.parametrize("missing", ["path", "topic"])
def test_what_is_missing_is_named(missing: str) -> None:
    options = {"path": "/data", "topic": "shop/orders"}
    del options[missing]

    with pytest.raises(Invalid, match=f'option "{missing}" is missing'):
        ReadOptions.parse(options)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("startingOffset", "5", '"startingoffset" is not known .* did you mean startingOffsets'),
        ("colour", "red", '"colour" is not known to the forebay source: the options are path, settings, store'),
        ("subscribe", "orders", 'write option\\("topics"'),
        ("startingTimestamp", "yesterday", "write milliseconds since 1970 or a time such as"),
        ("startingTimestamp", "2026-11-15T12:00:00", "without a time zone"),
        ("endingOffsetsByTimestamp", "5", "Expected `object`"),
        ("topic", "shop/orders,shop/returns", 'for several write option\\("topics"'),
        ("includeHeaders", "true", "headers are always there"),
        ("topic", "shop/or ders", "is not a topic name"),
        ("startingOffsets", "latest", r'"startingOffsets" may not be latest \(-1\)'),
        ("startingOffsets", '{"shop/orders": {"0": -1}}', r'"startingOffsets" may not be latest \(-1\)'),
        ("endingOffsets", "earliest", r'"endingOffsets" may not be earliest \(-2\)'),
        ("endingOffsets", '{"shop/orders": {"0": -2}}', r'"endingOffsets" may not be earliest \(-2\)'),
        ("startingOffsets", "{bad", 'write earliest, latest or JSON such as {"shop/orders"'),
        ("startingOffsets", "[1]", "Expected `object`"),
        ("startingOffsets", '{"shop/orders": {"0": "x"}}', "Expected `int`"),
        ("startingOffsets", '{"shop/orders": {"0": 1}, "/shop/orders": {"0": 1}}', "names a topic twice"),
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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, False),
        ({"startingOffsets": "earliest"}, False),
        ({"startingOffsets": '{"shop/orders": {"0": -2, "1": 1}}'}, False),
        ({"startingOffsets": '{"shop/orders": {"0": 3, "1": -1}}'}, True),
        ({"startingoffsets": " Latest "}, True),
        ({"maxOffsetsPerTrigger": "5"}, True),
    ],
)
def test_options_of_a_stream_are_distinguished_from_those_of_a_batch(
    options: dict[str, str], *, expected: bool
) -> None:
    assert is_for_stream(options) is expected
