"""Names of Kafka, MQTT and AMQP as Forebay's topics, keys and readers, and back.

A front-end for one of these protocols asks here which topic, partition, record key or reader a name stands for, so that
a client of one protocol finds what a client of another has written. Every function has an inverse, and each thing has
one name per protocol. Names that have no counterpart are refused. Pure: knows no protocol beyond its names.

| protocol | its word | here |
|---|---|---|
| Kafka | topic `orders`, `shop.orders` | topic `default/orders`, `shop/orders` |
| Kafka | topic id, 16 bytes | topic id, 32 hexadecimal digits |
| Kafka | partition 3 of a topic | partition 3, its shard is `shard_id(topic_id, 3)` |
| Kafka | group id | reader |
| MQTT | topic `shop/orders/eu` | key `shop/orders/eu` in topic `shop/orders`, and so one shard |
| MQTT | client id, name of a shared subscription | reader |
| AMQP | queue `orders` of virtual host `shop` | topic `shop/orders` with one partition, and so one shard |

`docs/naming.md` has the same table with reasons.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from forebay.errors import Invalid, Unsupported
from forebay.topics import NAMESPACE_DEFAULT, PART_CHARACTERS_MAX, TopicName

MARK: Final = "x--"
"""How a part begins in which characters are written as `_` and two hexadecimal digits for each byte of UTF-8."""
MQTT_TOPIC_BYTES_MAX: Final = 65_535
AMQP_NAME_BYTES_MAX: Final = 255
AMQP_HOST_DEFAULT: Final = "/"

_KAFKA_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
_KAFKA_ID_BYTES: Final = 16
_PLAIN: Final = re.compile(rf"[A-Za-z0-9._-]{{1,{PART_CHARACTERS_MAX}}}")
_ESCAPED: Final = re.compile(r"(?:[A-Za-z0-9.-]|_[0-9A-F]{2})*")
_NOT_KEPT: Final = re.compile(r"[^A-Za-z0-9.-]")
_BYTE: Final = re.compile(rb"_([0-9A-F]{2})")


class MqttPlace(NamedTuple):
    """Where the messages of one MQTT topic lie: in this topic, with this key, and so in one of its partitions."""

    topic: TopicName
    key: bytes


def topic_of_kafka(name: str) -> TopicName:
    """The topic that Kafka clients call `name`: the part before the first dot is the namespace, if there is a dot."""
    if not _KAFKA_TOPIC.fullmatch(name):
        raise Invalid(f"{name!a:.80} is not a Kafka topic: use 1 to 249 of A-Z a-z 0-9 . _ -")
    namespace, dot, topic = name.partition(".")
    if not dot:
        return TopicName(NAMESPACE_DEFAULT, name)
    found = TopicName(namespace, topic)
    if kafka_topic(found) != name:
        raise Invalid(f"{name} is called {kafka_topic(found)} in Kafka: use that name, so that the topic has one")
    return found


def kafka_topic(name: TopicName) -> str:
    """What Kafka clients call the topic; `Unsupported` for a namespace with a dot, which Kafka's names cannot show."""
    if "." in name.namespace:
        raise Unsupported(
            f"{name} has no name in Kafka: its namespace has a dot, and in Kafka the first dot ends the namespace",
            topic=name,
        )
    is_short = name.namespace == NAMESPACE_DEFAULT and "." not in name.topic
    return name.topic if is_short else f"{name.namespace}.{name.topic}"


def topic_id_of_kafka(topic_id: bytes) -> str:
    """The id of the topic whose id Kafka's protocol carries as these 16 bytes."""
    if len(topic_id) != _KAFKA_ID_BYTES:
        raise Invalid(f"a topic id of Kafka has {_KAFKA_ID_BYTES} bytes, not {len(topic_id)}")
    return topic_id.hex()


def kafka_topic_id(topic_id: str) -> bytes:
    """The topic's id as Kafka's protocol carries it: 16 bytes."""
    return bytes.fromhex(topic_id)


def place_of_mqtt(topic: str) -> MqttPlace:
    """Where messages of an MQTT topic lie: its first two levels name the topic, all of it is the key.

    One level alone is a topic of the namespace `default`.
    """
    key = _utf8(topic, "MQTT topic")
    if not 0 < len(key) <= MQTT_TOPIC_BYTES_MAX or "\0" in topic:
        raise Invalid(f"{topic!a:.80} is not an MQTT topic: use 1 to {MQTT_TOPIC_BYTES_MAX} bytes without NUL")
    if "+" in topic or "#" in topic:
        raise Invalid(f"{topic!a:.80} is an MQTT filter and no topic: a topic has no + and no #")
    if topic.startswith("$"):
        raise Invalid(f"{topic!a:.80} belongs to the server: MQTT topics of clients do not begin with $")
    first, slash, rest = topic.partition("/")
    if not slash:
        return MqttPlace(TopicName(NAMESPACE_DEFAULT, _part(first, "MQTT level")), key)
    second = rest.partition("/")[0]
    return MqttPlace(TopicName(_part(first, "MQTT level"), _part(second, "MQTT level")), key)


def mqtt_topic(name: TopicName, key: bytes | None) -> str:
    """The MQTT topic of a record: its key if that is an MQTT topic of this very topic, else the topic's own name."""
    own = _text(name.topic) if name.namespace == NAMESPACE_DEFAULT else f"{_text(name.namespace)}/{_text(name.topic)}"
    for text in ((key or b"").decode(errors="replace"), own):
        try:
            if place_of_mqtt(text) in (MqttPlace(name, key or b""), MqttPlace(name, own.encode())):
                return text
        except (Invalid, Unsupported):
            # It is a key of another meaning, or a name that MQTT does not allow.
            continue
    raise Unsupported(f"{name} has no name in MQTT: no MQTT topic would lead back to it", topic=name)


def topic_of_amqp(virtual_host: str, queue: str) -> TopicName:
    """The topic of an AMQP queue: the virtual host is the namespace, and `/` is `default`.

    The topic of a queue has one partition, for the order of a queue is that of one shard.
    """
    for what, text in (("virtual host", virtual_host), ("queue", queue)):
        if not 0 < len(_utf8(text, f"AMQP {what}")) <= AMQP_NAME_BYTES_MAX:
            raise Invalid(f"{text!a:.80} is not an AMQP {what}: use 1 to {AMQP_NAME_BYTES_MAX} bytes")
    if virtual_host == AMQP_HOST_DEFAULT:
        return TopicName(NAMESPACE_DEFAULT, _part(queue, "AMQP queue"))
    if virtual_host == NAMESPACE_DEFAULT:
        # The plain name is taken by the virtual host "/".
        return TopicName(f"{MARK}{virtual_host}", _part(queue, "AMQP queue"))
    return TopicName(_part(virtual_host, "AMQP virtual host"), _part(queue, "AMQP queue"))


def amqp_queue(name: TopicName) -> tuple[str, str]:
    """The virtual host and the queue that the topic is in AMQP."""
    host = AMQP_HOST_DEFAULT if name.namespace == NAMESPACE_DEFAULT else _text(name.namespace)
    queue = _text(name.topic)
    if not host or not queue or topic_of_amqp(host, queue) != name:
        raise Unsupported(f"{name} has no name in AMQP: no queue would lead back to it", topic=name)
    return host, queue


def reader_of(text: str) -> str:
    """The reader of a Kafka group, an MQTT client or an MQTT shared subscription of this name."""
    if not text:
        raise Invalid("a group or client without a name has no reader: give it a name")
    return _part(text, "group or client")


def name_of_reader(reader: str) -> str:
    """The name of the group or client that a reader belongs to."""
    name = _text(reader)
    if not name or _part(name, "group or client") != reader:
        raise Unsupported(f"{reader} is the reader of no group or client of another protocol")
    return name


def _part(text: str, what: str) -> str:
    """The text as a part of a name: as it is, or escaped if it has other characters or looks escaped."""
    if _PLAIN.fullmatch(text) and text not in (".", "..") and not text.startswith(MARK):
        return text
    _utf8(text, what)
    escaped = MARK + _NOT_KEPT.sub(lambda found: "".join(f"_{byte:02X}" for byte in found[0].encode()), text)
    if len(escaped) > PART_CHARACTERS_MAX:
        raise Unsupported(
            f"{what} {text!a:.80} is too long: it takes {len(escaped)} characters here, and {PART_CHARACTERS_MAX} "
            "are allowed; other characters than A-Z a-z 0-9 . - take three for each byte"
        )
    return escaped


def _text(part: str) -> str:
    """What was escaped, or the part itself; an empty text if this is no escape."""
    if not part.startswith(MARK):
        return part
    escaped = part.removeprefix(MARK)
    if not _ESCAPED.fullmatch(escaped):
        return ""
    try:
        return _BYTE.sub(lambda found: bytes([int(found[1], 16)]), escaped.encode()).decode()
    except UnicodeDecodeError:
        return ""


def _utf8(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise Invalid(f"{what} {text!a:.80} cannot be written as UTF-8") from error
