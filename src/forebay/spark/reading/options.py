"""The options of a Spark read, parsed once. Their words are those of Spark's Kafka source.

Knows strings and topic names; knows neither Spark nor files. Spark hands option names over in any case.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import msgspec

from forebay.decoders import decoder
from forebay.errors import Invalid
from forebay.records import OFFSET_MAX
from forebay.spark.place.location import NAMES as PLACE_NAMES
from forebay.spark.place.location import Location, is_about_place
from forebay.spark.reading.columns import SPARK_TYPES
from forebay.spark.reading.filters import NO_FILTERS, Filters
from forebay.spark.reading.where import parse_where
from forebay.topics import TopicName

FROM_LATEST: Final = -1
FROM_EARLIEST: Final = -2
PARTITIONS_MIN_MAX: Final = 100_000

STREAM_NAMES: Final = ("maxOffsetsPerTrigger", "maxBytesPerTrigger")
ENDING_NAMES: Final = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
NAMES: Final = (
    *PLACE_NAMES,
    "topic",
    "topics",
    "topicPattern",
    "topicId",
    "startingOffsets",
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    *ENDING_NAMES,
    "columns",
    "where",
    "minPartitions",
    "failOnDataLoss",
    "pushFilters",
    *STREAM_NAMES,
)
_OTHER_WORDS: Final = {
    "subscribe": 'write option("topics", …)',
    "subscribepattern": 'write option("topicPattern", …)',
    "assign": 'write option("topic", …), and startingOffsets and endingOffsets for a part of it',
    "includeheaders": "headers are always there; leave them out with the option columns",
    "paths": 'one read takes one directory: write option("path", …)',
}
"""What a user of another source may write, and what to write here."""
_OFFSETS: Final = '{"shop/orders": {"0": 23, "1": -1}} (-2 is the earliest, -1 the latest)'
_TIMES: Final = '{"shop/orders": {"0": 1700000000000}} (milliseconds since 1970)'
_TIME: Final = "milliseconds since 1970 or a time such as 2026-11-15T12:00:00Z"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topics:
    """Which topics are read: these, or those whose whole name matches a pattern."""

    names: tuple[TopicName, ...] = ()
    pattern: str | None = None
    topic_id: str | None = None
    """That of the one topic, if no other of its name will do."""

    def __str__(self) -> str:
        return ", ".join(map(str, self.names)) if self.pattern is None else f"topics that match {self.pattern}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Where a read starts or ends: the same for all partitions, or one for each by topic and partition.

    A number is an offset or one of the two ends; with `is_time` it is a time in milliseconds.
    """

    option: str
    everywhere: int = FROM_EARLIEST
    by_topic: Mapping[str, Mapping[int, int]] | None = None
    is_time: bool = False

    def at(self, topic: str, partition: int) -> int:
        """The limit of one partition."""
        return self.everywhere if self.by_topic is None else self.by_topic[topic][partition]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What a read was asked for, checked as far as the words go."""

    location: Location
    topics: Topics
    starting: Limit = Limit(option="startingOffsets", everywhere=FROM_EARLIEST)
    ending: Limit = Limit(option="endingOffsets", everywhere=FROM_LATEST)
    columns: tuple[str, ...] = tuple(SPARK_TYPES)
    where: Filters = NO_FILTERS
    """Conditions that every row meets that is shown."""
    partitions_min: int = 1
    fail_on_data_loss: bool = True
    push_filters: bool = False
    """Whether the session was seen to keep the plans of its scans apart: see `forebay.spark.reading.pushing`."""
    offsets_max: int | None = None
    bytes_max: int | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool = False) -> ReadOptions:
        """The options of `spark.read`, or of `spark.readStream`, which starts at the end by default.

        `Invalid` or `Unsupported` names the one that is wrong.
        """
        given = {name.lower(): text for name, text in options.items()}
        _refuse_unknown(given, streaming=streaming)
        starting = _limit(given, "starting", "latest" if streaming else "earliest")
        ending = _limit(given, "ending", "latest")
        if not streaming:
            _refuse(starting, FROM_LATEST, "a batch read starts at earliest, at offsets or at a time")
        _refuse(ending, FROM_EARLIEST, "a batch read ends at latest, at offsets or at a time")
        return cls(
            topics=_topics(given),
            location=Location.parse(options),
            starting=starting,
            ending=ending,
            columns=parse_columns(given.get("columns", ",".join(SPARK_TYPES))),
            where=parse_where(given["where"]) if "where" in given else NO_FILTERS,
            partitions_min=_number(given, "minPartitions", PARTITIONS_MIN_MAX) or 1,
            fail_on_data_loss=_truth(given, "failOnDataLoss", "true"),
            push_filters=_truth(given, "pushFilters", "false"),
            offsets_max=_number(given, "maxOffsetsPerTrigger", OFFSET_MAX),
            bytes_max=_number(given, "maxBytesPerTrigger", OFFSET_MAX),
        )


def _refuse_unknown(given: Mapping[str, str], *, streaming: bool) -> None:
    known = {name.lower(): name for name in NAMES}
    for name in sorted(name for name in given if name not in known and not is_about_place(name)):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
        every = f"the options are {', '.join(NAMES)}"
        way_out = _OTHER_WORDS.get(name, f"did you mean {known[near[0]]}? {every}" if near else every)
        raise Invalid(f'option "{name}" is not known to the forebay source: {way_out}')
    for name in ENDING_NAMES if streaming else STREAM_NAMES:
        if name.lower() in given:
            raise Invalid(
                f'option "{name}" is for {"spark.read: a stream has no end" if streaming else "spark.readStream"}'
                f"{'' if streaming else ': a batch reads all that there is'}; leave it out"
            )


def _topics(given: Mapping[str, str]) -> Topics:
    named = [name for name in ("topic", "topics", "topicPattern") if given.get(name.lower(), "")]
    if len(named) != 1:
        wrong = f"{' and '.join(named)} are given" if named else "is missing"
        raise Invalid(
            f'option "topic" {wrong}: write one of .option("topic", "shop/orders"), .option("topics", "shop/orders,'
            'shop/returns") and .option("topicPattern", "shop/.*")'
        )
    text = given[named[0].lower()]
    if named[0] == "topicPattern":
        try:
            re.compile(text)
        except re.error as error:
            raise Invalid(f'option "topicPattern" is {text!r:.200}, which is no regular expression: {error}') from error
        return Topics(pattern=text, topic_id=_topic_id(given, named[0]))
    if named[0] == "topic" and "," in text:
        raise Invalid(f'option "topic" is {text!r:.200}: for several write option("topics", …)')
    names = [TopicName.parse(part.strip()) for part in text.split(",")]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise Invalid(f'option "topics" names {twice[0]} twice')
    return Topics(names=tuple(names), topic_id=_topic_id(given, named[0]))


def _topic_id(given: Mapping[str, str], named: str) -> str | None:
    text = given.get("topicid")
    if text is not None and named != "topic":
        raise Invalid(f'option "topicId" goes with option "topic", not with {named}: leave it out')
    if text is not None and not re.fullmatch("[0-9a-f]{32}", text):
        raise Invalid(f'option "topicId" is {text!r:.80}: see "forebay topic show" for the id, of 32 digits')
    return text


def _limit(given: Mapping[str, str], side: str, default: str) -> Limit:
    """The start or the end, in whichever of the three ways it is given."""
    ways = {f"{side}Offsets": _offsets, f"{side}Timestamp": _time, f"{side}OffsetsByTimestamp": _times}
    named = [option for option in ways if option.lower() in given]
    if len(named) > 1:
        raise Invalid(f"options {' and '.join(named)} contradict each other: give one of them")
    option = named[0] if named else f"{side}Offsets"
    return ways[option](option, given.get(option.lower(), default))


def _refuse(limit: Limit, end: int, rule: str) -> None:
    numbers = [limit.everywhere] if limit.by_topic is None else [n for p in limit.by_topic.values() for n in p.values()]
    if not limit.is_time and end in numbers:
        word = {FROM_LATEST: "latest (-1)", FROM_EARLIEST: "earliest (-2)"}[end]
        raise Invalid(f'option "{limit.option}" may not be {word}: {rule}')


def _offsets(option: str, text: str) -> Limit:
    word = text.strip().lower()
    if word in ("earliest", "latest"):
        return Limit(option=option, everywhere=FROM_EARLIEST if word == "earliest" else FROM_LATEST)
    found = _by_topic(option, text, f"earliest, latest or JSON such as {_OFFSETS}")
    for partitions in found.values():
        for partition, offset in partitions.items():
            if not FROM_EARLIEST <= offset <= OFFSET_MAX:
                raise Invalid(f'option "{option}" has offset {offset} for partition {partition}: write {_OFFSETS}')
    return Limit(option=option, by_topic=found)


def _time(option: str, text: str) -> Limit:
    if re.fullmatch("[0-9]{1,18}", text.strip()):
        return Limit(option=option, everywhere=int(text), is_time=True)
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise Invalid(f'option "{option}" is {text!r:.200}: write {_TIME}') from error
    if moment.tzinfo is None:
        raise Invalid(f'option "{option}" is {text!r:.200}, without a time zone: write {_TIME}')
    return Limit(option=option, everywhere=round(moment.timestamp() * 1000), is_time=True)


def _times(option: str, text: str) -> Limit:
    return Limit(option=option, by_topic=_by_topic(option, text, f"JSON such as {_TIMES}"), is_time=True)


def _by_topic(option: str, text: str, example: str) -> dict[str, dict[int, int]]:
    try:
        by_topic = decoder(dict[str, dict[str, int]]).decode(text)
    except msgspec.MsgspecError as error:
        raise Invalid(f'option "{option}" is {text!r:.200}: write {example}; {error}') from error
    found: dict[str, dict[int, int]] = {}
    for topic, by_partition in by_topic.items():
        partitions = {_partition(option, number): value for number, value in by_partition.items()}
        name = str(TopicName.parse(topic))
        if name in found or len(partitions) != len(by_partition):
            raise Invalid(f'option "{option}" names a {"topic" if name in found else "partition"} twice: {text!r:.200}')
        found[name] = partitions
    if not found:
        raise Invalid(f'option "{option}" names no topic: write {example}')
    return found


def _partition(option: str, text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text):
        raise Invalid(f'option "{option}" names a partition {text!r}: it is a number such as "0"')
    return int(text)


def is_for_stream(options: Mapping[str, str]) -> bool:
    """Whether these options make sense for a stream alone: Spark asks for columns before it says which it is."""
    given = {name.lower(): text for name, text in options.items()}
    starting = given.get("startingoffsets", "").strip().lower()
    at_the_end = starting == "latest" or re.search(rf":\s*{FROM_LATEST}\b", starting) is not None
    return at_the_end or any(name.lower() in given for name in STREAM_NAMES)


def is_for_batch(options: Mapping[str, str]) -> bool:
    """Whether these options make sense for a batch read alone: a stream has no end."""
    given = {name.lower() for name in options}
    return any(name.lower() in given for name in ENDING_NAMES)


def parse_columns(text: str) -> tuple[str, ...]:
    """The columns that the option of that name lists."""
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


def _number(given: Mapping[str, str], option: str, most: int) -> int | None:
    text = given.get(option.lower())
    if text is None:
        return None
    if not re.fullmatch("[0-9]{1,19}", text.strip()) or not 1 <= int(text) <= most:
        raise Invalid(f'option "{option}" is {text!r}: allowed are 1 to {most}')
    return int(text)


def _truth(given: Mapping[str, str], option: str, default: str) -> bool:
    text = given.get(option.lower(), default)
    word = text.strip().lower()
    if word not in ("true", "false"):
        raise Invalid(f'option "{option}" is {text!r}: write true or false')
    return word == "true"
