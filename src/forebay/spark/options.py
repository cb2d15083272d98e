"""The options of a Spark read, parsed once. Their words are those of Spark's Kafka source.

Knows strings and topic names; knows neither Spark nor files. Spark hands option names over in any case.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from forebay.errors import Invalid, Unsupported
from forebay.records import OFFSET_MAX
from forebay.spark.columns import SPARK_TYPES
from forebay.topics import TopicName

FROM_LATEST: Final = -1
FROM_EARLIEST: Final = -2
PARTITIONS_MIN_MAX: Final = 100_000

Places: TypeAlias = int | Mapping[int, int]
"""One of the two ends for all partitions, or for each partition an offset or an end."""

_NAMES: Final = (
    "path",
    "topic",
    "startingOffsets",
    "endingOffsets",
    "columns",
    "minPartitions",
    "failOnDataLoss",
)
_OTHER_WORDS: Final = {
    "subscribe": 'write option("topic", …)',
    "assign": 'write option("topic", …), and startingOffsets and endingOffsets for a part of it',
    "includeheaders": "headers are always there; leave them out with the option columns",
    "paths": 'one read takes one directory: write option("path", …)',
}
"""What a user of another source may write, and what to write here."""
_EXAMPLE: Final = '{"shop/orders": {"0": 23, "1": -1}} (-2 is the earliest, -1 the latest)'


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What a batch read was asked for, checked as far as the words go."""

    path: str
    topic: TopicName
    starting: Places = FROM_EARLIEST
    ending: Places = FROM_LATEST
    columns: tuple[str, ...] = tuple(SPARK_TYPES)
    partitions_min: int = 1
    fail_on_data_loss: bool = True

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> ReadOptions:
        """The options of `spark.read`; `Invalid` or `Unsupported` names the one that is wrong."""
        given = {name.lower(): text for name, text in options.items()}
        _refuse_unknown(given)
        topic = _topic(_required(given, "topic", '.option("topic", "shop/orders")'))
        return cls(
            path=_required(given, "path", '.option("path", "/var/lib/orders")'),
            topic=topic,
            starting=_starting(given.get("startingoffsets", "earliest"), topic),
            ending=_ending(given.get("endingoffsets", "latest"), topic),
            columns=_columns(given.get("columns", ",".join(SPARK_TYPES))),
            partitions_min=_partitions_min(given.get("minpartitions", "1")),
            fail_on_data_loss=_truth(given.get("failondataloss", "true")),
        )


def _refuse_unknown(given: Mapping[str, str]) -> None:
    known = {name.lower() for name in _NAMES}
    for name in sorted(set(given) - known):
        way_out = _OTHER_WORDS.get(name, f"the options are {', '.join(_NAMES)}")
        raise Invalid(f'option "{name}" is not known to the forebay source: {way_out}')


def _required(given: Mapping[str, str], name: str, example: str) -> str:
    text = given.get(name, "")
    if not text:
        raise Invalid(f'option "{name}" is missing: write {example}')
    return text


def _topic(text: str) -> TopicName:
    if "," in text:
        raise Unsupported(f'option "topic" is {text!r}: one read takes one topic; read each and join them with union')
    return TopicName.parse(text)


def _starting(text: str, topic: TopicName) -> Places:
    places = _places("startingOffsets", text, topic)
    _refuse("startingOffsets", places, FROM_LATEST, "a batch read starts at earliest or at offsets")
    return places


def _ending(text: str, topic: TopicName) -> Places:
    places = _places("endingOffsets", text, topic)
    _refuse("endingOffsets", places, FROM_EARLIEST, "a batch read ends at latest or at offsets")
    return places


def _refuse(option: str, places: Places, end: int, rule: str) -> None:
    if end in ([places] if isinstance(places, int) else places.values()):
        word = {FROM_LATEST: "latest (-1)", FROM_EARLIEST: "earliest (-2)"}[end]
        raise Invalid(f'option "{option}" may not be {word}: {rule}')


def _places(option: str, text: str, topic: TopicName) -> Places:
    word = text.strip().lower()
    if word in ("earliest", "latest"):
        return FROM_EARLIEST if word == "earliest" else FROM_LATEST
    try:
        by_topic = msgspec.json.decode(text, type=dict[str, dict[str, int]])
    except msgspec.MsgspecError as error:
        raise Invalid(
            f'option "{option}" is {text!r:.200}: write earliest, latest or JSON such as {_EXAMPLE}; {error}'
        ) from error
    if [TopicName.parse(name) for name in by_topic] != [topic]:
        raise Invalid(f'option "{option}" names {", ".join(by_topic) or "no topic"}: it must name {topic} and no other')
    (by_partition,) = by_topic.values()
    places = {_partition(option, number): _place(option, number, offset) for number, offset in by_partition.items()}
    if len(places) != len(by_partition):
        raise Invalid(f'option "{option}" names a partition twice: {text!r:.200}')
    return places


def _partition(option: str, text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text):
        raise Invalid(f'option "{option}" names a partition {text!r}: it is a number such as "0"')
    return int(text)


def _place(option: str, partition: str, offset: int) -> int:
    if not FROM_EARLIEST <= offset <= OFFSET_MAX:
        raise Invalid(f'option "{option}" has offset {offset} for partition {partition}: write {_EXAMPLE}')
    return offset


def _columns(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    return checked_columns(names, 'option "columns"')


def checked_columns(names: tuple[str, ...], source: str) -> tuple[str, ...]:
    """The names, once each is known to be a column and none comes twice."""
    for name in names:
        if name not in SPARK_TYPES:
            raise Invalid(f"{source} names {name!r}: the columns are {', '.join(SPARK_TYPES)}")
        if names.count(name) > 1:
            raise Invalid(f"{source} names {name!r} twice")
    return names


def _partitions_min(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= PARTITIONS_MIN_MAX:
        raise Invalid(f'option "minPartitions" is {text!r}: allowed are 1 to {PARTITIONS_MIN_MAX}')
    return int(text)


def _truth(text: str) -> bool:
    word = text.strip().lower()
    if word not in ("true", "false"):
        raise Invalid(f'option "failOnDataLoss" is {text!r}: write true or false')
    return word == "true"
