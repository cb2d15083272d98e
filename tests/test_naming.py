"""Names of other protocols: each leads to one topic, key or reader, and back to the same name."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import Invalid, Unsupported
from forebay.naming import (
    MqttPlace,
    amqp_queue,
    kafka_topic,
    kafka_topic_id,
    mqtt_topic,
    name_of_reader,
    place_of_mqtt,
    reader_of,
    topic_id_of_kafka,
    topic_of_amqp,
    topic_of_kafka,
)
from forebay.partitioning import partition_of_key
from forebay.progress import ReaderName
from forebay.topics import PART_CHARACTERS_MAX, TopicName, shard_id

TOPIC_ID: Final = "00112233445566778899aabbccddeeff"

part = st.text("abcABC019._-x", min_size=1, max_size=PART_CHARACTERS_MAX).filter(lambda text: text not in (".", ".."))
any_name = st.one_of(part, st.text(max_size=25))


class TestEachProtocolHasItsShard:
    """The three rows of a storage adapter's table: what each protocol calls by name lies in exactly one shard."""

    def test_an_mqtt_topic_is_a_key_of_a_topic_and_so_lies_in_one_shard(self) -> None:
        place = place_of_mqtt("shop/orders/eu/7")

        assert place == MqttPlace(TopicName("shop", "orders"), b"shop/orders/eu/7")
        shards = {shard_id(TOPIC_ID, partition_of_key(place.key, 16)) for _ in range(3)}
        assert len(shards) == 1
        assert mqtt_topic(*place) == "shop/orders/eu/7"

    def test_a_kafka_partition_is_the_partition_of_that_number(self) -> None:
        assert topic_of_kafka("shop.orders") == TopicName("shop", "orders")
        assert kafka_topic_id(TOPIC_ID) == bytes(range(0, 256, 17))
        assert shard_id(topic_id_of_kafka(bytes(range(0, 256, 17))), 3) == f"{TOPIC_ID}_3"

    def test_an_amqp_queue_is_a_topic_of_one_partition(self) -> None:
        assert topic_of_amqp("shop", "orders") == TopicName("shop", "orders")
        assert shard_id(TOPIC_ID, 0) == f"{TOPIC_ID}_0"


@pytest.mark.parametrize(
    ("name", "topic"),
    [
        ("orders", "default/orders"),
        ("shop.orders", "shop/orders"),
        ("shop.orders.eu", "shop/orders.eu"),
        ("default.orders.eu", "default/orders.eu"),
        ("__consumer_offsets", "default/__consumer_offsets"),
        ("a..b", "a/.b"),
    ],
)
def test_a_kafka_topic_and_its_topic(name: str, topic: str) -> None:
    assert topic_of_kafka(name) == TopicName.parse(topic)
    assert kafka_topic(TopicName.parse(topic)) == name


@pytest.mark.parametrize("name", ["", ".", "..", ".a", "a.", "a...", "a/b", "ä", "a b", "a" * 101, "a" * 250, "a\n"])
def test_what_is_no_kafka_topic_is_refused(name: str) -> None:
    with pytest.raises(Invalid):
        topic_of_kafka(name)


def test_a_topic_has_one_name_in_kafka_or_none() -> None:
    with pytest.raises(Invalid, match=r"default\.orders is called orders in Kafka"):
        topic_of_kafka("default.orders")
    with pytest.raises(Unsupported, match=r"eu\.shop/orders has no name in Kafka") as refusal:
        kafka_topic(TopicName("eu.shop", "orders"))
    assert refusal.value.topic == "eu.shop/orders"


@given(part, part)
def test_a_topic_that_kafka_can_name_is_found_by_that_name(namespace: str, topic: str) -> None:
    name = TopicName(namespace, topic)
    if "." not in namespace:
        assert topic_of_kafka(kafka_topic(name)) == name


@pytest.mark.parametrize("topic_id", [b"", bytes(15), bytes(17)])
def test_an_id_of_another_length_is_refused(topic_id: bytes) -> None:
    with pytest.raises(Invalid, match="has 16 bytes"):
        topic_id_of_kafka(topic_id)


@given(st.binary(min_size=16, max_size=16))
def test_ids_come_back(topic_id: bytes) -> None:
    assert kafka_topic_id(topic_id_of_kafka(topic_id)) == topic_id


@pytest.mark.parametrize(
    ("mqtt", "topic"),
    [
        ("alarm", "default/alarm"),
        ("default/alarm", "default/alarm"),
        ("shop/orders", "shop/orders"),
        ("shop/orders/", "shop/orders"),
        ("/shop", "x--/shop"),
        ("a/", "a/x--"),
        ("küche/licht 1/an", "x--k_C3_BCche/x--licht_201"),
        ("x--a/b", "x--x--a/b"),
        ("./b", "x--./b"),
    ],
)
def test_an_mqtt_topic_is_the_key_of_its_messages(mqtt: str, topic: str) -> None:
    name = TopicName(*topic.split("/"))

    assert place_of_mqtt(mqtt) == MqttPlace(name, mqtt.encode())
    assert mqtt_topic(name, mqtt.encode()) == mqtt


@pytest.mark.parametrize(
    "key", [None, b"", b"c-1", b"shop/orders2/x", b"shop/orders/\xff", b"shop/orders/#", b"$SYS/x"]
)
def test_a_record_from_elsewhere_has_the_name_of_its_topic_in_mqtt(key: bytes | None) -> None:
    assert mqtt_topic(TopicName("shop", "orders"), key) == "shop/orders"
    assert mqtt_topic(TopicName("default", "alarm"), key) == "alarm"


@pytest.mark.parametrize("mqtt", ["", "a/+", "#", "a/#", "$SYS/uptime", "$share/g/a", "a\0", "a" * 65_536, "\ud800"])
def test_what_is_no_mqtt_topic_is_refused(mqtt: str) -> None:
    with pytest.raises(Invalid):
        place_of_mqtt(mqtt)


@pytest.mark.parametrize(
    "name", ["default/x--", "x--_2B/a", "x--a/b", "x--_zz/b", "x--_FF/b", "x--a_2Fb/c", "x--_24/a"]
)
def test_a_topic_that_no_mqtt_topic_leads_to_has_no_name_there(name: str) -> None:
    with pytest.raises(Unsupported, match="has no name in MQTT"):
        mqtt_topic(TopicName.parse(name), None)


@given(st.lists(any_name, min_size=1, max_size=4).map("/".join))
def test_every_mqtt_topic_comes_back(topic: str) -> None:
    try:
        place = place_of_mqtt(topic)
    except Invalid:
        return

    assert mqtt_topic(*place) == topic


@pytest.mark.parametrize(
    ("host", "queue", "topic"),
    [
        ("/", "orders", "default/orders"),
        ("default", "orders", "x--default/orders"),
        ("shop", "amq.gen-7", "shop/amq.gen-7"),
        ("/eu", "a b", "x--_2Feu/x--a_20b"),
    ],
)
def test_an_amqp_queue_and_its_topic(host: str, queue: str, topic: str) -> None:
    assert topic_of_amqp(host, queue) == TopicName.parse(topic)
    assert amqp_queue(TopicName.parse(topic)) == (host, queue)


@pytest.mark.parametrize(("host", "queue"), [("", "q"), ("/", ""), ("/", "q" * 256), ("h" * 256, "q"), ("\udc00", "q")])
def test_what_is_no_amqp_queue_is_refused(host: str, queue: str) -> None:
    with pytest.raises(Invalid):
        topic_of_amqp(host, queue)


@pytest.mark.parametrize("name", ["x--_2F/q", "x--shop/q", "shop/x--", "x--_zz/q"])
def test_a_topic_that_no_queue_leads_to_has_no_name_in_amqp(name: str) -> None:
    with pytest.raises(Unsupported, match="has no name in AMQP"):
        amqp_queue(TopicName.parse(name))


@given(any_name, any_name)
def test_every_queue_comes_back(host: str, queue: str) -> None:
    try:
        name = topic_of_amqp(host, queue)
    except Invalid:
        return

    assert amqp_queue(name) == (host, queue)


@pytest.mark.parametrize(
    ("name", "reader"),
    [("billing", "billing"), ("my_group", "my_group"), ("a b", "x--a_20b"), ("x--a", "x--x--a"), ("..", "x--..")],
)
def test_a_group_or_client_and_its_reader(name: str, reader: str) -> None:
    assert reader_of(name) == reader
    assert name_of_reader(reader) == name


@given(any_name)
def test_every_group_comes_back_and_its_reader_is_valid(name: str) -> None:
    try:
        reader = reader_of(name)
    except Invalid:
        return

    assert ReaderName.of("shop", "orders", reader).reader == reader
    assert name_of_reader(reader) == name


def test_a_name_without_a_counterpart_is_refused() -> None:
    with pytest.raises(Invalid, match="without a name"):
        reader_of("")
    with pytest.raises(Unsupported, match="takes 153 characters here, and 100 are allowed"):
        reader_of(" " * 50)
    for reader in ("x--", "x--billing", "x--_zz", "x--_C3"):
        with pytest.raises(Unsupported, match="is the reader of no group"):
            name_of_reader(reader)
