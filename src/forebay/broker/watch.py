"""The route of live streams: many topics on one connection, as server-sent events.

A stream sends what its client takes, and asks for more only then: a slow client costs no other anything. Every page is
rendered once for all streams that want it alike. After each page the stream says where it stands in all partitions; a
client that sends that back goes on there, over restarts of the broker, moves, evictions and re-created topics.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack
from functools import lru_cache
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from forebay.aio.topic import AsyncTopic
from forebay.broker.app import Broker, LastingAnswer
from forebay.broker.exchange import AnswerWriter, Request, SeenBytes, Streamed
from forebay.broker.guard import encode_chunk
from forebay.broker.routes import Route
from forebay.errors import ForebayError, Invalid, UnknownTopic
from forebay.format.frame.batch import Batch
from forebay.live import Delivered, Render, SharedPage, WatchedTopic, Watcher
from forebay.records import EARLIEST, Start
from forebay.service.principals import AccessScope
from forebay.topics import TopicName
from forebay.wire import bodies, events
from forebay.wire.items import GapItem, RecordItem, items_of
from forebay.wire.positions import parse_start
from forebay.wire.watching import WatchPlace, WatchPosition, check_watch, decode_place, encode_event_id

logger = logging.getLogger(__name__)

MEDIA: Final = "text/event-stream"
RETRY_MS: Final = 1_000
"""How long a client waits before it connects again."""
WATCHING_BYTES_MAX: Final = 256 * 1024
"""A body that names topics to watch: as many as one may, with the longest names and ids."""
RENDERS_KEPT: Final = 10_000
PLACES_KEPT: Final = 256
"""Streams that stand alike ask for their place one after the other."""
PUSHED_MAX: Final = 4
"""So many pages are written at once to a connection; one with more to take takes turns with the others."""
_ENCODER: Final = msgspec.json.Encoder()


class WatchQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What to watch."""

    topic: Annotated[tuple[str, ...], Meta(min_length=1, description="namespace/topic; may be repeated.")]
    start: Annotated[str, Meta(description="`earliest`, `latest`, or a time: where a first connection begins.")] = (
        "latest"
    )
    last_event_id: Annotated[str | None, Meta(description="As the header Last-Event-ID.")] = None
    key: str | None = None
    key_b64: str | None = None
    tag: str | None = None


class Watching(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What to watch, where the names of many topics are too long for an address."""

    topics: Annotated[list[str], Meta(min_length=1, description="Each namespace/topic.")]
    start: Annotated[str, Meta(description="`earliest`, `latest`, or a time: where a first connection begins.")] = (
        "latest"
    )
    last_event_id: Annotated[str | None, Meta(description="As the header Last-Event-ID.")] = None
    key: str | None = None
    key_b64: str | None = None
    tag: str | None = None


class WatchedName:
    """One topic of a watch, by the name that the request gives it. For one task."""

    __slots__ = ("left_at", "name", "source", "topic")

    def __init__(self, name: str, topic: AsyncTopic | None, left_at: WatchPosition | None) -> None:
        self.name = name
        self.topic = topic
        """`None` if there is none of the name, or no more."""
        self.left_at = left_at or WatchPosition.nowhere()
        """Where the watch stood in one that there is no more."""
        self.source: WatchedTopic[bytes] | None = None


async def watch_topics(broker: Broker, request: Request) -> Streamed:
    """Records of topics as they come."""
    return await _watch(broker, request, request.query(WatchQuery))


async def watch_many_topics(broker: Broker, request: Request) -> Streamed:
    """The same for topics that the body names."""
    body = await request.json(Watching, bytes_max=WATCHING_BYTES_MAX)
    query = WatchQuery(
        topic=tuple(body.topics),
        start=body.start,
        last_event_id=body.last_event_id,
        key=body.key,
        key_b64=body.key_b64,
        tag=body.tag,
    )
    return await _watch(broker, request, query)


async def _watch(broker: Broker, request: Request, query: WatchQuery) -> Streamed:
    service, who = broker.service, request.principal
    names = request.topics_named(query.topic)
    last = request.header(b"last-event-id") or query.last_event_id
    place = decode_place(last, [str(name) for name in names]) if last else None
    with ExitStack() as held:
        watched = await _watched(broker, request, names, place)
        topics = [each.topic for each in watched if each.topic is not None]
        check_watch(len(watched), sum(topic.partitions for topic in topics))
        starts = await _starts(query, watched, place)
        key = bodies.key_bytes(query.key, query.key_b64)
        for each in watched:
            if each.topic is not None:
                each.source = each.topic.watched(rendering(each.name, key, query.tag), starts[each.name])
        sources = [each.source for each in watched if each.source is not None]
        watcher = service.watcher(sources, outbox_bytes_max=broker.settings.outbox_bytes_max)
        held.callback(watcher.close)
        await watcher.begin()
        lasting = held.enter_context(broker.lasting(who, AccessScope.READ, names, watcher.close))
        stream = WatchStream(broker, watched, watcher, lasting)
        headers = (("cache-control", "no-store"), ("x-accel-buffering", "no"))
        return Streamed(stream.pieces(), MEDIA, headers, held.pop_all(), begin=stream.begin)


async def _watched(
    broker: Broker, request: Request, names: Sequence[TopicName], place: WatchPlace | None
) -> list[WatchedName]:
    """The topics of these names. A watch that goes on does so although some were deleted, but not all of them."""
    found: list[WatchedName] = []
    unknown: UnknownTopic | None = None
    for number, name in enumerate(names):
        try:
            topic = await broker.service.readable(request.principal, name)
            found.append(WatchedName(str(name), topic, None))
        except UnknownTopic as error:
            if place is None:
                raise
            unknown = error
            found.append(WatchedName(str(name), None, place.positions[number] if place.is_of_list else None))
    if unknown is not None and all(each.topic is None for each in found):
        raise unknown
    return found


class WatchStream:
    """The events of one connection. For one task, and for the feeds of its event loop."""

    def __init__(
        self, broker: Broker, watched: Sequence[WatchedName], watcher: Watcher[bytes], lasting: LastingAnswer
    ) -> None:
        self._broker = broker
        self._watched = watched
        self._watcher = watcher
        self._lasting = lasting
        self._said = b""
        """The place that was sent last."""
        self._failure: Exception | None = None
        """Why the stream ends, where `_push` has met it."""
        self._writer: AnswerWriter | None = None
        self._seen: SeenBytes | None = None
        self._events = _places_of(watched)

    def begin(self, writer: AnswerWriter, seen: SeenBytes) -> None:
        """Write pages to the connection as they come, in the step of the loop that finds them."""
        self._writer, self._seen = writer, seen
        self._watcher.outbox.push = self._push

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Events without an end: pages that `_push` leaves, each with the place behind it, and signs of life.

        An error that names a topic which was deleted is an event among the others, as long as there are other topics.
        What ends the stream but the broker itself is its last event: an error.
        """
        broker, watched = self._broker, self._watched
        try:
            self._said = self._place()
            gone = [_gone_event(broker, each.name) for each in watched if each.topic is None]
            yield b"".join((events.encode_retry(RETRY_MS), self._said, *gone))
            while True:
                piece = await self._next_piece()
                if piece is None:
                    # The broker ends: the client connects to the next one and goes on.
                    return
                yield piece
        except Exception as error:
            if not isinstance(error, ForebayError):
                logger.exception("a live stream failed")
            yield events.encode_event(broker.sent_error(error).body, event=events.ERROR_EVENT)

    async def _next_piece(self) -> bytes | None:
        """What comes next; `None` once the broker ends. Raises what else ends the stream."""
        watcher, heartbeat_s = self._watcher, self._broker.settings.heartbeat_interval_ms / 1000
        try:
            found = await watcher.take(asyncio.get_running_loop().time() + heartbeat_s)
        except ForebayError:
            name = await _forget_deleted(self._broker, self._watched, watcher)
            if name is None:
                raise
            self._events = _places_of(self._watched)
            return _gone_event(self._broker, name)
        if found is None and watcher.is_closed:
            error = self._lasting.error or self._failure
            if error is not None:
                raise error
            return None
        # Raises where partitions were added, and one place cannot carry them all.
        before, self._said = self._said, self._place()
        if found is not None:
            return b"".join((*_gaps(found), *found.rows, self._said))
        # Pages without a record for this client have moved the place, too: it need not read them again.
        return events.HEARTBEAT if self._said == before else self._said + events.HEARTBEAT

    def _push(self) -> bool:
        """Write what has come to the connection, which streams that stand alike share; false if the task has to.

        That is so where the client is slow, for errors, partitions that were added, and for many pages at once. Runs in
        the loop while the task waits in `take`; takes nothing that it does not write.
        """
        try:
            return self._write_ready()
        except Exception as error:  # noqa: BLE001 - the task raises it
            # Of this stream alone: those that are woken after it go on.
            self._failure = error
            self._watcher.close()
            return True

    def _write_ready(self) -> bool:
        writer, watcher, pages = self._writer, self._watcher, 0
        assert writer is not None, "begin comes first"
        while writer.has_room and pages < PUSHED_MAX:
            last = watcher.take_last()
            if last is not None:
                self._write_page(*last)
                return True
            try:
                found = watcher.take_ready()
            except ForebayError:
                # The task meets it, too, and says what becomes of the stream.
                return False
            if found is None:
                break
            pages += 1
            if found.shared is not None:
                self._write_page(found.shared, found.source.render)
            else:
                self._said = self._place()
                self._write(encode_chunk(b"".join((*_gaps(found), *found.rows, self._said))))
        return pages > 0 and not watcher.outbox.ready

    def _write_page(self, shared: SharedPage, render: Render[bytes]) -> None:
        """Write the rows of a page with the place behind them; the first stream that stands here makes it for all.

        The place that was sent last says who stands here. A stream may have passed pages since that have nothing
        for it: one that goes on from the place of another reads such pages again, or passes them.
        """
        made = shared.made.get((render, self._said))
        if made is None:
            place = self._place()
            made = shared.made[render, self._said] = (encode_chunk(b"".join((*shared.rows(render), place))), place)
        chunk, self._said = made
        self._write(chunk)

    def _write(self, chunk: bytes) -> None:
        assert self._writer is not None and self._seen is not None, "begin comes first"
        self._writer.write(chunk)
        self._seen.sent += len(chunk)

    def _place(self) -> bytes:
        """Where the stream stands now, as an event without a text: clients keep its id and show nothing."""
        return self._events.event(self._watcher.offsets())


class WatchedPlace(NamedTuple):
    """One topic of a place: followed, and then its offsets make the position; or left, at one that stays."""

    name: str
    is_source: bool
    """Whether the watcher has offsets of it."""
    topic_id: str | None
    left_at: WatchPosition | None


class PlaceEvents:
    """The events that say where streams over one list of topics stand: those that stand alike share one."""

    def __init__(self, watched: tuple[WatchedPlace, ...]) -> None:
        self._watched = watched
        self._kept: OrderedDict[tuple[tuple[int, ...], ...], bytes] = OrderedDict()

    def event(self, offsets: Sequence[Sequence[int]]) -> bytes:
        """That of a stream whose watcher goes on at these offsets, by topic and partition."""
        place = tuple([tuple(each) for each in offsets])
        found = self._kept.get(place)
        if found is None:
            found = self._kept[place] = self._encoded(place)
            if len(self._kept) > PLACES_KEPT:
                self._kept.popitem(last=False)
        return found

    def _encoded(self, place: tuple[tuple[int, ...], ...]) -> bytes:
        reached = iter(place)
        positions = []
        for each in self._watched:
            offsets = next(reached) if each.is_source else ()
            if each.topic_id is not None:
                positions.append(WatchPosition.of(each.topic_id, offsets))
            else:
                assert each.left_at is not None, "it was left"
                positions.append(each.left_at)
        names = [each.name for each in self._watched]
        return b"id: %s\n\n" % encode_event_id(names, positions).encode()


def _places_of(watched: Sequence[WatchedName]) -> PlaceEvents:
    return _place_events(
        tuple(
            WatchedPlace(each.name, each.source is not None, None, each.left_at)
            if each.topic is None
            else WatchedPlace(each.name, is_source=True, topic_id=each.topic.spec.topic_id, left_at=None)
            for each in watched
        )
    )


_place_events = lru_cache(PLACES_KEPT)(PlaceEvents)
"""One object for all streams that watch the same."""


async def _forget_deleted(broker: Broker, watched: Sequence[WatchedName], watcher: Watcher[bytes]) -> str | None:
    """Leave the topic that could not be read, if it was deleted and is not the last one; its name then."""
    left = [each for each in watched if each.topic is not None]
    for each in left:
        if each.source is not None and each.source is watcher.failed and each.topic is not None and len(left) > 1:
            spec = each.topic.spec
            if await broker.service.is_defined(spec):
                return None
            standing = dict(zip((one.source for one in watched if one.source), watcher.offsets(), strict=True))
            each.left_at = WatchPosition.of(spec.topic_id, standing[each.source])
            each.topic = None
            watcher.leave(each.source)
            return each.name
    return None


def _gone_event(broker: Broker, name: str) -> bytes:
    error = UnknownTopic(f"there is no topic {name}, or not any more: the watch goes on in the others", topic=name)
    return events.encode_event(broker.sent_error(error).body, event=events.ERROR_EVENT)


def _gaps(found: Delivered[bytes]) -> list[bytes]:
    name = found.source.topic.name
    return [
        events.encode_event(
            _ENCODER.encode(RecordItem(topic=name, gap=GapItem.of(found.partition, gap))), event=events.GAP_EVENT
        )
        for gap in found.gaps
    ]


async def _starts(query: WatchQuery, watched: Sequence[WatchedName], place: WatchPlace | None) -> dict[str, Start]:
    """Where to begin in each topic: behind the last event that the client has, or as the query says."""
    start = parse_start(query.start, "start")
    if start.kind == "offset":
        raise Invalid(f"start is {query.start!r:.80}: a watch begins at earliest, latest, a time, or Last-Event-ID")
    found: dict[str, Start] = {}
    resumed: list[tuple[AsyncTopic, WatchPosition]] = []
    for number, each in enumerate(watched):
        if each.topic is not None:
            position = None if place is None else place.position(number, each.topic.spec.topic_id)
            if position is None:
                found[each.name] = start
            else:
                resumed.append((each.topic, position))
    starts = await asyncio.gather(*(_resumed(topic, position) for topic, position in resumed))
    return found | {topic.name: start for (topic, _), start in zip(resumed, starts, strict=True)}


async def _resumed(topic: AsyncTopic, place: WatchPosition) -> Start:
    """The place in a topic; its beginning if it is another topic of that name."""
    if not place.is_of(topic.spec.topic_id):
        return EARLIEST
    # Partitions that were added since begin at their first record. Offsets that a crash took back begin at the end.
    starts = dict.fromkeys(range(topic.partitions), 0) | dict(enumerate(place.offsets))
    ends = await topic.ends([number for number, offset in starts.items() if offset])
    return {number: min(offset, ends.get(number, offset)) for number, offset in starts.items()}


@lru_cache(RENDERS_KEPT)
def rendering(topic: str, key: bytes | None, tag: str | None) -> Callable[[Batch, int], Sequence[bytes]]:
    """What streams of a topic get for its batches; one function for all streams that want the same of it."""

    def render(batch: Batch, partition: int) -> Sequence[bytes]:
        items = items_of(batch, partition)
        if key is not None or tag is not None:
            records = batch.records(partition)
            items = [
                item
                for item, record in zip(items, records, strict=True)
                if (key is None or record.key == key) and (tag is None or record.tag == tag)
            ]
        if not items:
            return ()
        for item in items:
            item.topic = topic
        # JSON has no line ends of its own.
        lines = _ENCODER.encode_lines(items)[:-1]
        return (b"data: %s\n\n" % lines.replace(b"\n", b"\n\ndata: "),)

    return render


ROUTES = (
    Route(
        method="GET", path="/v1/watch", name="watch_topics", summary="Follow topics, as server-sent events",
        handler=watch_topics, scopes=(AccessScope.READ,), query=WatchQuery, answer_media=(MEDIA,), tag="records",
        statuses=(404, 421, 422), is_stream=True,
    ),
    Route(
        method="POST", path="/v1/watch", name="watch_many_topics", summary="Follow topics that the body names",
        handler=watch_many_topics, scopes=(AccessScope.READ,), body=Watching, answer_media=(MEDIA,), tag="records",
        statuses=(404, 413, 421, 422), is_stream=True,
    ),
)  # fmt: skip
"""Of live streams."""
