"""What reading asks of a location, and the location opened for it: files, or a broker. Each task loads this."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from forebay.errors import Unsupported
from forebay.topics import Engine, TopicName, TopicSpec

if TYPE_CHECKING:
    from forebay.disk import Disk
    from forebay.format.metadata.descriptor import SegmentDescriptor
    from forebay.pages import Page
    from forebay.sealed import SealedSegment
    from forebay.spark.place.broker import BrokerPlace
    from forebay.spark.place.location import Location
    from forebay.spark.place.opening import Opened
    from forebay.views.snapshot import ShardView


class LogTail(Protocol):
    """The log of a partition, for what no store has: `forebay.wal.readonly.FollowedLog`, or that of a broker."""

    @property
    def head(self) -> int:
        """Where it ended when it was read last."""

    def read(self, offset: int, bytes_max: int) -> Page | None:
        """Records from `offset` on as they are stored; an empty page at the end, `None` where it has not got them."""

    def wait(self, offset: int, timeout: float | None) -> bool:
        """Wait until there is something at or above `offset`; false when the time is up."""

    def close(self) -> None:
        """Give back what is held."""


class SegmentPlaces(Protocol):
    """Opens the segments of history: `forebay.places.Places`, or those of a broker."""

    def segment(self, descriptor: SegmentDescriptor) -> SealedSegment:
        """The segment that a descriptor names."""


class ReadPlace(Protocol):
    """A location as reading sees it: `forebay.spark.place.opening.Opened`, or a broker. For one thread; `close` it."""

    @property
    def location(self) -> Location: ...

    @property
    def disk(self) -> Disk: ...

    @property
    def places(self) -> SegmentPlaces:
        """Where the segments of history are."""

    def log(self, shard: str) -> LogTail | None:
        """The log of a shard; `None` where there is none to be read."""

    def view(self, topic_id: str, topic: str, partition: int) -> ShardView | None:
        """The partition as it is now; `None` where the topic is gone."""

    def close(self) -> None:
        """Give everything back."""


def topics_with_history(
    names: Sequence[str], every: Callable[[], Iterable[TopicSpec]], one: Callable[[TopicName], TopicSpec]
) -> list[TopicSpec]:
    """The topics of these names by `one`, each once, or if none is named those of `every` that have history.

    Raises `UnknownTopic`, and `Unsupported` for a topic without history that is named.
    """
    if not names:
        return [spec for spec in every() if spec.engine is Engine.SEGMENT]
    specs = [one(name) for name in dict.fromkeys(map(TopicName.parse, names))]
    for spec in specs:
        if spec.engine is not Engine.SEGMENT:
            raise Unsupported(f'{spec.name} lives on engine "{spec.engine}" and has no history: leave it out')
    return specs


@contextlib.contextmanager
def opened_to_read(location: Location, topics: Mapping[str, str] | None = None) -> Iterator[Opened | BrokerPlace]:
    """The location, given back at the end. `topics` are names by the ids of topics that will be read."""
    with contextlib.closing(read_place(location, topics)) as found:
        yield found


def read_place(location: Location, topics: Mapping[str, str] | None = None) -> Opened | BrokerPlace:
    """The same; the caller closes it. What the other kind of location needs is not loaded."""
    if location.broker is None:
        from forebay.spark.place.opening import Opened

        return Opened(location)
    from forebay.spark.place.broker import BrokerPlace

    return BrokerPlace(location, topics)
