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
from forebay.errors import ForebayError, Invalid
from forebay.format.frame.batch import Batch
from forebay.live import Delivered, Watcher
from forebay.records import EARLIEST, Start
from forebay.service.principals import AccessScope
from forebay.topics import TopicName
from forebay.wire import bodies, events
from forebay.wire.items import GapItem, RecordItem, items_of
from forebay.wire.positions import parse_start
from forebay.wire.watching import WatchPosition, check_watch, decode_event_id, encode_event_id

logger = logging.getLogger(__name__)

MEDIA: Final = "text/event-stream"
RETRY_MS: Final = 1_000
"""How long a client waits before it connects again."""
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


async def watch_topics(broker: Broker, request: Request) -> Streamed:
    """Records of topics as they come."""
    query = request.query(WatchQuery)
    service, who = broker.service, request.principal
    names = [TopicName.parse(name) for name in dict.fromkeys(query.topic)]
    with ExitStack() as held:
        topics = [await service.readable(who, name) for name in names]
        check_watch(len(topics), sum(topic.partitions for topic in topics))
        starts = await _starts(request, query, topics)
        key = bodies.key_bytes(query.key, query.key_b64)
        sources = [
            topic.watched(rendering(topic.name, key, query.tag), start)
            for topic, start in zip(topics, starts, strict=True)
        ]
        watcher = service.watcher(sources, outbox_bytes_max=broker.settings.outbox_bytes_max)
        held.callback(watcher.close)
        await watcher.begin()
        lasting = held.enter_context(broker.lasting(who, AccessScope.READ, names, watcher.close))
        pieces = _pieces(broker, topics, watcher, lasting)
        return Streamed(pieces, MEDIA, (("cache-control", "no-store"), ("x-accel-buffering", "no")), held.pop_all())


async def _pieces(
    broker: Broker, topics: Sequence[AsyncTopic], watcher: Watcher[bytes], lasting: LastingAnswer
) -> AsyncGenerator[bytes, None]:
    """Events without an end: pages as they come, each with the place behind it, and signs of life between them.

    What ends the stream but the broker itself is its last event: an error.
    """
    loop, heartbeat_s = asyncio.get_running_loop(), broker.settings.heartbeat_interval_ms / 1000
    try:
        place = _place(topics, watcher)
        yield events.encode_retry(RETRY_MS) + place
        while True:
            found = await watcher.take(loop.time() + heartbeat_s)
            if found is None and watcher.is_closed:
                if lasting.error is not None:
                    raise lasting.error
                # The broker ends: the client connects to the next one and goes on.
                return
            # Raises where partitions were added, and one place cannot carry them all.
            before, place = place, _place(topics, watcher)
            if found is not None:
                yield b"".join((*_gaps(found), *found.rows, place))
            else:
                # Pages without a record for this client have moved the place, too: it need not read them again.
                yield events.HEARTBEAT if place == before else place + events.HEARTBEAT
    except Exception as error:
        if not isinstance(error, ForebayError):
            logger.exception("a live stream failed")
        yield events.encode_event(broker.sent_error(error).body, event=events.ERROR_EVENT)


def _place(topics: Sequence[AsyncTopic], watcher: Watcher[bytes]) -> bytes:
    """Where the stream stands now, as an event without a text: clients keep its id and show nothing."""
    standing = zip(topics, watcher.offsets(), strict=True)
    return _place_event(tuple((topic.name, topic.spec.topic_id, tuple(offsets)) for topic, offsets in standing))


@lru_cache(PLACES_KEPT)
def _place_event(places: tuple[tuple[str, str, tuple[int, ...]], ...]) -> bytes:
    """The event of a place: name, id and next offsets of each topic. Kept, because streams of a crowd stand alike."""
    positions = [WatchPosition.of(topic_id, offsets) for _, topic_id, offsets in places]
    return b"id: %s\n\n" % encode_event_id([name for name, _, _ in places], positions).encode()


def _gaps(found: Delivered[bytes]) -> list[bytes]:
    name = found.source.topic.name
    return [
        events.encode_event(
            _ENCODER.encode(RecordItem(topic=name, gap=GapItem.of(found.partition, gap))), event=events.GAP_EVENT
        )
        for gap in found.gaps
    ]


async def _starts(request: Request, query: WatchQuery, topics: Sequence[AsyncTopic]) -> list[Start]:
    """Where to begin in each topic: behind the last event that the client has, or as the query says."""
    last = request.header(b"last-event-id") or query.last_event_id
    if not last:
        start = parse_start(query.start, "start")
        if start.kind == "offset":
            raise Invalid(f"start is {query.start!r:.80}: a watch begins at earliest, latest, a time, or Last-Event-ID")
        return [start] * len(topics)
    places = decode_event_id(last, [topic.name for topic in topics])
    return await asyncio.gather(*(_resumed(topic, place) for topic, place in zip(topics, places, strict=True)))


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
)  # fmt: skip
"""Of live streams."""
