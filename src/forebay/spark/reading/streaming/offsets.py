"""How far a stream is in its topics, as Spark keeps it in a query's checkpoint.

    {"version": 1, "topics": {"shop/orders": {"id": "<topic id>", "partitions": {"0": {"offset": 23, "epoch": 4}}}}}

An offset means something only within one life of a topic, so the topic id stands beside it; the epoch shows an
older copy of a directory from the one that was read. Spark compares offsets as text: equal ones are written
alike. Knows neither Spark nor topics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from forebay.decoders import converted
from forebay.errors import Conflict, Invalid, UnsupportedFormat
from forebay.records import OFFSET_MAX
from forebay.topics import PARTITIONS_MAX, TopicName

VERSION: Final = 1
_NEW_CHECKPOINT: Final = "begin again with a new checkpointLocation"

Json: TypeAlias = dict[str, Any]


class Place(NamedTuple):
    """A partition of a topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]"


class Point(NamedTuple):
    """The next offset to read, and the epoch of the partition's owner when that was found out."""

    offset: int
    epoch: int


@dataclass(frozen=True, slots=True)
class TopicPoints:
    """The points of one topic, in one of its lives."""

    topic_id: str
    points: Mapping[int, Point]


@dataclass(frozen=True, slots=True)
class StreamOffsets:
    """The points of every topic that a stream reads."""

    topics: Mapping[str, TopicPoints]

    @classmethod
    def parse(cls, stored: Json) -> StreamOffsets:
        """What `to_json` gave; `Invalid` for anything else, `UnsupportedFormat` for a later version's."""
        version = stored.get("version") if isinstance(stored, dict) else None
        if isinstance(version, int) and version > VERSION:
            raise UnsupportedFormat(
                f"the checkpoint of this query has offsets of version {version}, known here is {VERSION}: "
                "upgrade Forebay, or go on with the version that wrote it"
            )
        try:
            checked = converted(stored, _Stored)
            topics = {str(TopicName.parse(name)): _points(topic) for name, topic in checked.topics.items()}
        except (msgspec.MsgspecError, Invalid) as error:
            raise Invalid(
                f"the checkpoint of this query holds no offsets of Forebay ({error}): {_NEW_CHECKPOINT}"
            ) from error
        return cls(topics)

    def to_json(self) -> Json:
        """Plain values in one order, so that equal offsets become equal texts."""
        return {
            "version": VERSION,
            "topics": {
                name: {
                    "id": topic.topic_id,
                    "partitions": {
                        str(partition): {"offset": point.offset, "epoch": point.epoch}
                        for partition, point in sorted(topic.points.items())
                    },
                }
                for name, topic in sorted(self.topics.items())
            },
        }

    def places(self) -> Iterator[tuple[Place, Point]]:
        """Every partition with its point, in order."""
        for name, topic in sorted(self.topics.items()):
            for partition, point in sorted(topic.points.items()):
                yield Place(name, partition), point

    def at(self, place: Place) -> Point | None:
        """The point of a partition; `None` for one that these offsets do not have yet."""
        topic = self.topics.get(place.topic)
        return None if topic is None else topic.points.get(place.partition)

    def check_lives(self, topic_ids: Mapping[str, str]) -> None:
        """`Conflict` if a topic was deleted and created again: its offsets then mean other records."""
        for name, topic in sorted(self.topics.items()):
            now = topic_ids.get(name, topic.topic_id)
            if now != topic.topic_id:
                raise Conflict(
                    f"{name} was deleted and created again: this query read topic id {topic.topic_id}, and now it is "
                    f"{now}; offsets of the old one mean nothing in it: {_NEW_CHECKPOINT}"
                )


class _StoredPoint(msgspec.Struct, frozen=True):
    offset: Annotated[int, Meta(ge=0, le=OFFSET_MAX)]
    epoch: Annotated[int, Meta(ge=0)]


class _StoredTopic(msgspec.Struct, frozen=True):
    id: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    partitions: dict[Annotated[str, Meta(pattern=r"^(0|[1-9][0-9]{0,3})\Z")], _StoredPoint]


class _Stored(msgspec.Struct, frozen=True):
    version: Annotated[int, Meta(ge=VERSION, le=VERSION)]
    topics: dict[str, _StoredTopic]


def _points(stored: _StoredTopic) -> TopicPoints:
    points = {int(partition): Point(point.offset, point.epoch) for partition, point in stored.partitions.items()}
    if points and max(points) >= PARTITIONS_MAX:
        raise Invalid(f"partition {max(points)} is above {PARTITIONS_MAX - 1}")
    return TopicPoints(stored.id, points)
