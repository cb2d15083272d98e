"""One topic of a broker, call by call: definition, pages, watermarks, places. For one event loop.

All handles of a log for one topic share this, and so the lanes of its appends.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from forebay.arguments import StoredOffset, checked_partition, checked_position
from forebay.client.appends import Appends
from forebay.client.producers import AsyncRemoteProducer
from forebay.client.transport import HttpCall, HttpTransport, TopicTransport
from forebay.clock import Clock
from forebay.decoders import decoder
from forebay.errors import Invalid, OffsetOutOfRange, Unavailable, UnknownTopic
from forebay.partitioning import check_partition
from forebay.records import EARLIEST, LATEST, Offsets, Position, RecordPage, Start
from forebay.surface.blocking import PAGE_BYTES, PAGE_RECORDS
from forebay.topics import TopicName, TopicSpec
from forebay.wire import answers
from forebay.wire.answers import BatchPage
from forebay.wire.bodies import MediaType
from forebay.wire.messages import Deleted, LastSequence, OffsetFound, OffsetsPage, TopicItem

T = TypeVar("T", bound=msgspec.Struct)


def topic_path(name: TopicName) -> str:
    """Where the broker has the topic."""
    return f"/v1/topics/{name.namespace}/{name.topic}"


def spec_of(body: bytes) -> TopicSpec:
    """The definition that an answer carries."""
    return decoded(TopicItem, body).spec()


class ClosedWithLog(Protocol):
    """What ends before the connections of its log are closed."""

    async def close(self) -> None:
        """End it. Harmless when repeated; raises nothing."""


class ReadEnd(NamedTuple):
    """The watermarks of a partition, and where a read ends in it."""

    offsets: Offsets
    end: int


class TopicCalls:
    """The requests about one topic."""

    def __init__(self, transport: HttpTransport, spec: TopicSpec, clock: Clock) -> None:
        self.transport = TopicTransport(transport, spec.topic_id)
        self.spec = spec
        """As the broker said last."""
        self.name = str(spec.name)
        self.path = topic_path(spec.name)
        self.appends = Appends(self.transport, self.path, self.name, clock, lambda: self.spec.partitions)
        self.clock = clock
        self._producers: weakref.WeakSet[AsyncRemoteProducer] = weakref.WeakSet()
        self.consumers: weakref.WeakSet[ClosedWithLog] = weakref.WeakSet()
        """Of its subscriptions: they leave when the log is closed."""

    async def refresh(self) -> TopicSpec:
        """Ask for the definition as it is now; `UnknownTopic` if this topic is gone, also if another has its name."""
        found = await self.transport.call(HttpCall(method="GET", path=self.path), spec_of)
        if found.topic_id != self.spec.topic_id:
            # By a broker that does not look at the id of a request.
            raise UnknownTopic(f"{self.name} was deleted and created again: ask the log for it again", topic=self.name)
        self.spec = found
        return found

    async def page(
        self, partition: int, offset: int, *, records_max: int = PAGE_RECORDS, bytes_max: int = PAGE_BYTES
    ) -> BatchPage:
        """A page of a partition, by column."""
        query = {
            "partition": str(partition),
            "start": str(offset),
            "records_max": str(records_max),
            "bytes_max": str(bytes_max),
        }
        call = HttpCall(method="GET", path=f"{self.path}/records", query=query, accept=MediaType.FRAMES)
        return await self.transport.call(call, answers.decode_page_frames)

    async def looked_up(self, partition: int, start: int, query: Mapping[str, str]) -> RecordPage:
        """A page of what a key or a tag has in a partition."""
        asked = {"partition": str(partition), "start": str(start), **query}
        call = HttpCall(method="GET", path=f"{self.path}/records", query=asked)
        return await self.transport.call(call, answers.decode_page_json)

    async def offsets(self, partition: int) -> Offsets:
        """The watermarks of a partition."""
        query = {"partition": str(checked_partition(partition))}
        call = HttpCall(method="GET", path=f"{self.path}/offsets", query=query)
        return await self.transport.call(call, lambda body: decoded(OffsetsPage, body).partitions[0].offsets())

    async def read_ends(self, partitions: Sequence[int]) -> dict[int, ReadEnd]:
        """The watermarks of these partitions and where a read of them ends, all from one answer of the broker."""
        query = {"partition": str(partitions[0])} if len(partitions) == 1 else {}
        call = HttpCall(method="GET", path=f"{self.path}/offsets", query=query)
        page = await self.transport.call(call, partial(decoded, OffsetsPage))
        # A broker that is older than this client says no end: there a bulk load may be seen in part.
        found = {
            item.partition: ReadEnd(item.offsets(), item.next if item.end is msgspec.UNSET else item.end)
            for item in page.partitions
        }
        return {number: found[number] for number in partitions}

    async def offset_of(self, position: Position, partition: int) -> int | None:
        """The offset that a position stands for; `None` for a time that no record has reached."""
        query = {"partition": str(checked_partition(partition)), "at": position_text(position)}
        call = HttpCall(method="GET", path=f"{self.path}/offset", query=query)
        return await self.transport.call(call, lambda body: decoded(OffsetFound, body).offset)

    async def resolve(self, position: Position | int, partition: int) -> int:
        """The offset that a position means in a partition now."""
        position = checked_position(position)
        found = await self.offset_of(position, partition)
        if found is None:
            found = await self.offset_of(LATEST, partition)
        assert found is not None, "only a time may have no offset"
        return found

    async def last_sequence(self, producer: int, partition: int) -> int | None:
        """The newest acknowledged sequence of a producer; `None` if it is not known."""
        query = {"partition": str(checked_partition(partition)), "producer": str(producer)}
        call = HttpCall(method="GET", path=f"{self.path}/sequence", query=query)
        return await self.transport.call(call, lambda body: decoded(LastSequence, body).sequence)

    async def delete(self, query: Mapping[str, str], partition: int | None) -> int:
        """Delete records; how many. If an answer was lost, those that the lost attempt deleted are not counted."""
        asked = dict(query) if partition is None else {**query, "partition": str(checked_partition(partition))}
        call = HttpCall(method="DELETE", path=f"{self.path}/records", query=asked)
        return await self.transport.call(call, lambda body: decoded(Deleted, body).records)

    def producer(
        self, *, linger_ms: float, batch_records: int, batch_bytes: int, in_flight: int, in_flight_bytes: int
    ) -> AsyncRemoteProducer:
        """A producer for the topic."""
        made = AsyncRemoteProducer(
            self.appends,
            self.spec.partitions,
            self.clock,
            linger_ms=linger_ms,
            batch_records=batch_records,
            batch_bytes=batch_bytes,
            in_flight=in_flight,
            in_flight_bytes=in_flight_bytes,
        )
        self._producers.add(made)
        return made

    async def drain(self) -> None:
        """Return when all that is queued has its outcome."""
        await self.appends.drain()
        for producer in list(self._producers):
            await producer.flush()

    async def leave(self) -> None:
        """Have all consumers leave: what they hold is due for others at once."""
        await asyncio.gather(*(consumer.close() for consumer in list(self.consumers)))

    async def flush(self) -> None:
        """On return everything appended so far is synced."""
        await self.drain()
        await self.transport.call(HttpCall(method="POST", path=f"{self.path}/flush"), bytes)

    # What callers mean by `partition` and `start`

    def chosen(self, start: Start, partition: int | None, stop: int | None = None) -> Sequence[int]:
        """The partitions to read: the one that is named, those that `start` names, else all."""
        count = self.spec.partitions
        if partition is not None or isinstance(start, Mapping):
            numbers = sorted(start) if partition is None and isinstance(start, Mapping) else [partition]
            for number in numbers:
                check_partition(checked_partition(number), count)
            return [checked_partition(number) for number in numbers]
        if count > 1 and (checked_position(start).kind == "offset" or stop is not None):
            raise Invalid(
                f"{self.name} has {count} partitions and an offset is a place in one of them: "
                "name the partition, or give {partition: offset} for each"
            )
        return range(count)

    async def first(self, partition: int, start: Start, offsets: Offsets) -> int:
        """The offset that a caller means by `start`; `OffsetOutOfRange` if it lies behind the end of the partition."""
        place = start.get(partition, EARLIEST) if isinstance(start, Mapping) else start
        if isinstance(place, StoredOffset):
            return int(place)
        position = checked_position(place)
        if position == EARLIEST:
            return offsets.earliest
        if position.kind != "offset":
            return await self.resolve(position, partition)
        if position.value > offsets.next:
            raise OffsetOutOfRange(
                f"{self.name}[{partition}] ends at offset {offsets.next}, and start is {position.value}: start at most "
                "there, or at LATEST",
                topic=self.name,
                partition=partition,
                offset=position.value,
                earliest=offsets.earliest,
                next=offsets.next,
            )
        return position.value


def decoded(kind: type[T], body: bytes) -> T:
    """The message of an answer; `Unavailable` if it was damaged on its way."""
    try:
        return decoder(kind).decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Unavailable(f"the answer is not sound: {error}; ask again") from error


def position_text(position: Position) -> str:
    """A position as addresses have it."""
    if position.kind == "offset":
        return str(position.value)
    return f"{position.value}ms" if position.kind == "time" else position.kind
