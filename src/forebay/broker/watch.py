"""The route of live streams: many topics on one connection, as server-sent events.

A stream sends what its client takes, and asks for more only then: a slow client costs no other anything. Every page is
rendered once for all streams that want it alike. After each page the stream says where it stands in all partitions; a
client that sends that back goes on there, over restarts of the broker, moves, evictions and re-created topics.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack
from functools import lru_cache
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from forebay.aio.topic import AsyncTopic
from forebay.broker.app import Broker, LastingAnswer
from forebay.broker.exchange import Request, Streamed
from forebay.broker.routes import Route
from forebay.errors import ForebayError, Invalid, UnknownTopic
from forebay.format.frame.batch import Batch
from forebay.live import Delivered, WatchedTopic, Watcher
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
        pieces = _pieces(broker, watched, watcher, lasting)
        return Streamed(pieces, MEDIA, (("cache-control", "no-store"), ("x-accel-buffering", "no")), held.pop_all())


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


async def _pieces(
    broker: Broker, watched: Sequence[WatchedName], watcher: Watcher[bytes], lasting: LastingAnswer
) -> AsyncGenerator[bytes, None]:
    """Events without an end: pages as they come, each with the place behind it, and signs of life between them.

    An error that names a topic which was deleted is an event among the others, as long as there are other topics. What
    ends the stream but the broker itself is its last event: an error.
    """
    loop, heartbeat_s = asyncio.get_running_loop(), broker.settings.heartbeat_interval_ms / 1000
    try:
        place = _place(watched, watcher)
        gone = [_gone_event(broker, each.name) for each in watched if each.topic is None]
        yield b"".join((events.encode_retry(RETRY_MS), place, *gone))
        while True:
            try:
                found = await watcher.take(loop.time() + heartbeat_s)
            except ForebayError:
                name = await _forget_deleted(broker, watched, watcher)
                if name is None:
                    raise
                yield _gone_event(broker, name)
                continue
            if found is None and watcher.is_closed:
                if lasting.error is not None:
                    raise lasting.error
                # The broker ends: the client connects to the next one and goes on.
                return
            # Raises where partitions were added, and one place cannot carry them all.
            before, place = place, _place(watched, watcher)
            if found is not None:
                yield b"".join((*_gaps(found), *found.rows, place))
            else:
                # Pages without a record for this client have moved the place, too: it need not read them again.
                yield events.HEARTBEAT if place == before else place + events.HEARTBEAT
    except Exception as error:
        if not isinstance(error, ForebayError):
            logger.exception("a live stream failed")
        yield events.encode_event(broker.sent_error(error).body, event=events.ERROR_EVENT)


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


def _place(watched: Sequence[WatchedName], watcher: Watcher[bytes]) -> bytes:
    """Where the stream stands now, as an event without a text: clients keep its id and show nothing."""
    offsets = iter(watcher.offsets())
    standing = []
    for each in watched:
        reached = None if each.source is None else next(offsets)
        if each.topic is None:
            standing.append((each.name, each.left_at))
        else:
            assert reached is not None, "it is watched"
            standing.append((each.name, WatchPosition.of(each.topic.spec.topic_id, reached)))
    return _place_event(tuple(standing))


@lru_cache(PLACES_KEPT)
def _place_event(places: tuple[tuple[str, WatchPosition], ...]) -> bytes:
    """The event of a place: name and position of each topic. Kept, because streams of a crowd stand alike."""
    names, positions = zip(*places, strict=True)
    return b"id: %s\n\n" % encode_event_id(names, positions).encode()


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
