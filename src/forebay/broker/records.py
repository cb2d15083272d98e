"""Routes that bring records and give them: append, read, look up, delete.

Appends and reads at the tail stay in the event loop; a body or a page that takes long to decode or encode goes to a
thread.
"""

from __future__ import annotations

import asyncio
import hashlib
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from forebay.aio.topic import AsyncTopic
from forebay.appends.producer_window import KEY_IDS, ROUTER_IDS
from forebay.broker.app import Broker
from forebay.broker.exchange import HttpAnswer, Request
from forebay.broker.routes import Route
from forebay.broker.topics import TOPIC
from forebay.errors import Invalid
from forebay.format.columns.rows import ColumnBytes
from forebay.pages import LOOP_BYTES_MAX, LOOP_RECORDS_MAX, Page, Reach
from forebay.records import Position
from forebay.service.principals import AccessScope
from forebay.service.service import AppendRecords, DeleteRecords
from forebay.storage import BatchAck
from forebay.wire import answers, bodies
from forebay.wire.answers import BatchPage, PageMarks
from forebay.wire.bodies import MediaType
from forebay.wire.compression import decompress_body
from forebay.wire.items import RecordColumns
from forebay.wire.limits import BodyLimits
from forebay.wire.messages import AppendedRanges, Deleted, OffsetRangeItem
from forebay.wire.positions import parse_start

if TYPE_CHECKING:
    import pyarrow as pa

IDEMPOTENCY_KEY_CHARACTERS_MAX: Final = 256
PAGE_RECORDS: Final = 10_000
PAGE_BYTES: Final = 1024 * 1024
PAGE_RECORDS_MAX: Final = 1_000_000
PAGE_BYTES_MAX: Final = 64 * 1024 * 1024
APPEND_MEDIA: Final = (MediaType.JSON, MediaType.NDJSON, MediaType.ARROW, MediaType.RAW)
READ_MEDIA: Final = (MediaType.JSON, MediaType.NDJSON, MediaType.ARROW, MediaType.FRAMES)
RECORD_MARKS: Final = {MediaType.JSON: b"{", MediaType.NDJSON: b"\n"}
"""What every record of a body has at least once."""


class AppendQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where records go, who produces them, and the parts of a record whose value is the whole body."""

    partition: Annotated[int, Meta(ge=0, description="Left out: by key, or in turn.")] | None = None
    producer: Annotated[int, Meta(ge=1, le=KEY_IDS - 1)] | None = None
    sequence: Annotated[int, Meta(ge=0)] | None = None
    previous: int | None = None
    key: str | None = None
    key_b64: str | None = None
    tag: str | None = None
    timestamp: str | None = None
    header: tuple[str, ...] = ()
    offsets: Annotated[bool, Meta(description="Whether to answer with the offset of each record.")] = False


class ReadQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which records to read."""

    partition: Annotated[int, Meta(ge=0)] = 0
    start: Annotated[str, Meta(description="`earliest`, `latest`, an offset, or a time.")] = "earliest"
    records_max: Annotated[int, Meta(ge=1, le=PAGE_RECORDS_MAX)] = PAGE_RECORDS
    bytes_max: Annotated[int, Meta(ge=1, le=PAGE_BYTES_MAX)] = PAGE_BYTES
    wait_ms: Annotated[int, Meta(ge=0, description="How long to wait for a first record.")] = 0
    key: str | None = None
    key_b64: str | None = None
    tag: str | None = None
    history: Annotated[bool, Meta(description="With a key: all its records, not only the newest.")] = False


class DeleteQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which records to delete: by one of key, tag, `before`, or `start` and `stop`."""

    partition: Annotated[int, Meta(ge=0)] | None = None
    key: str | None = None
    key_b64: str | None = None
    tag: str | None = None
    start: Annotated[int, Meta(ge=0)] | None = None
    stop: Annotated[int, Meta(ge=0)] | None = None
    before: Annotated[int, Meta(ge=0)] | None = None


# Append


async def append_records(broker: Broker, request: Request) -> HttpAnswer:
    """Append the records of the body."""
    service, who, name = broker.service, request.principal, request.topic
    service.check_append(who, name)
    query = request.query(AppendQuery)
    media = MediaType.parse(request.header(b"content-type") or MediaType.JSON)
    limits = BodyLimits(broker.settings.body_bytes_max, broker.settings.batch_records_max)
    body = await received(broker, request)
    decode = partial(_decode, request, query, media, body, limits, broker.clock.now_ms())
    records = await broker.compute(decode) if _holds_a_loop(media, body) else decode()
    ack = await service.append(who, name, records)
    ranges = [OffsetRangeItem(*each) for each in ack.ranges]
    if ranges:
        request.partition, request.offset = ranges[0].partition, ranges[0].first
    if query.offsets and isinstance(ack, BatchAck) and len(ranges) > 1:
        # Every partition has answered, so every record has its offset.
        return HttpAnswer.of(AppendedRanges(ranges, [offset for offset in ack.offsets() if offset is not None]))
    return HttpAnswer.of(AppendedRanges(ranges))


async def received(broker: Broker, request: Request) -> bytes:
    """The body of a request, decompressed; `TooLarge` or `Throttled` before memory is spent on it."""
    bytes_max = broker.settings.body_bytes_max
    body = await request.body(bytes_max, "server.body_bytes_max")
    encoding = request.header(b"content-encoding")
    if encoding is None:
        return body
    plain = await broker.compute(partial(decompress_body, body, encoding, bytes_max))
    # It counts with what it takes in memory from here on, which may be a thousand times what was sent.
    request.admitted.grow(max(0, len(plain) - len(body)))
    return plain


def _holds_a_loop(media: MediaType, body: bytes) -> bool:
    """Whether to decode the body in the event loop would hold it: many small records take as long as a large body."""
    if len(body) > LOOP_BYTES_MAX:
        return True
    mark = RECORD_MARKS.get(media)
    return mark is not None and body.count(mark) > LOOP_RECORDS_MAX


def _decode(
    request: Request, query: AppendQuery, media: MediaType, body: bytes, limits: BodyLimits, now_ms: int
) -> AppendRecords:
    """The records of a body. In the event loop, or in a thread."""
    if media is not MediaType.RAW and (query.key or query.key_b64 or query.tag or query.timestamp or query.header):
        raise Invalid(f"key, tag, timestamp and header in the address are for a body of {MediaType.RAW}")
    columns: RecordColumns | ColumnBytes | pa.RecordBatch
    if media is MediaType.JSON:
        columns = bodies.decode_json(body, limits, now_ms)
    elif media is MediaType.NDJSON:
        columns = bodies.decode_ndjson(body, limits, now_ms)
    elif media is MediaType.ARROW:
        columns = bodies.decode_plain_arrow(body, limits, now_ms) or bodies.decode_arrow(body, limits)
    elif media is MediaType.RAW:
        columns = bodies.decode_raw(
            body,
            limits,
            key=query.key,
            key_b64=query.key_b64,
            tag=query.tag,
            timestamp=query.timestamp,
            headers=query.header,
        )
    else:
        raise Invalid(f"{media} is for reading: send records as {', '.join(APPEND_MEDIA)}")
    producer, sequence, previous = _producing(request, query)
    return AppendRecords(
        columns=columns, partition=query.partition, producer=producer, sequence=sequence, previous=previous
    )


def _producing(request: Request, query: AppendQuery) -> tuple[int | None, int | None, int | None]:
    """Who produces: the query says so, or an idempotency key stands for a producer of one append."""
    key = request.header(b"idempotency-key")
    if key is None:
        return query.producer, query.sequence, query.previous
    if query.producer is not None or query.sequence is not None:
        raise Invalid("Idempotency-Key and producer both say who produces: give one")
    if not 1 <= len(key) <= IDEMPOTENCY_KEY_CHARACTERS_MAX:
        raise Invalid(f"Idempotency-Key has {len(key)} characters; allowed: 1 to {IDEMPOTENCY_KEY_CHARACTERS_MAX}")
    # Of each principal by itself: no caller is answered with the append of another that chose the same text.
    digest = hashlib.blake2b(f"{request.principal.name}\n{key}".encode(), digest_size=8).digest()
    return KEY_IDS + int.from_bytes(digest) % (ROUTER_IDS - KEY_IDS), 0, None


# Read


async def read_records(broker: Broker, request: Request) -> HttpAnswer:
    """A page of a partition, or what a key or a tag has in it."""
    query = request.query(ReadQuery)
    request.partition = query.partition
    topic = await broker.service.readable(request.principal, request.topic, query.partition)
    media, who = _accepted(request), request.principal.name
    start = parse_start(query.start, "start")
    if query.key is not None or query.key_b64 is not None or query.tag is not None:
        page = await _look_up(request, topic, query, start, media)
    else:
        offset = start.value if start.kind == "offset" else await topic.resolve(start, query.partition, who=who)
        request.offset = offset
        page = await _page(broker, request, topic, query, offset)
    encode = partial(_encode, page, media)
    size = sum(int(batch.sizes().sum()) for batch in page.batches)
    # A single batch may be larger than what was reserved. Pages that wait for a thread are in memory, too.
    request.admitted.hold(size)
    return await broker.compute(encode) if size > LOOP_BYTES_MAX or _is_crowded(page, media) else encode()


def _is_crowded(page: BatchPage, media: MediaType) -> bool:
    """Whether the records of the page, each of which becomes an object, are many, however small."""
    return media in RECORD_MARKS and sum(batch.count for batch in page.batches) > LOOP_RECORDS_MAX


async def _page(broker: Broker, request: Request, topic: AsyncTopic, query: ReadQuery, offset: int) -> BatchPage:
    """The page at `offset`, waited for as long as the query says if there is none yet."""

    async def read() -> tuple[Page, Reach]:
        return await topic.batch_page(
            query.partition,
            offset,
            records_max=query.records_max,
            bytes_max=request.admitted.reserve(query.bytes_max),
            who=request.principal.name,
        )

    page, reach = await read()
    if page.next == offset and query.wait_ms:
        request.admitted.hold(0)
        await _until_published(broker, request, topic, query, offset)
        page, reach = await read()
    return _with_marks(query.partition, page, reach)


async def _until_published(broker: Broker, request: Request, topic: AsyncTopic, query: ReadQuery, offset: int) -> None:
    """Wait until there is something at `offset`, the time is up, the broker ends, or the caller may not read it."""
    seconds = min(query.wait_ms, broker.settings.wait_timeout_max_ms) / 1000
    ended = asyncio.Event()
    async with topic.follow({query.partition: offset}, timeout=seconds, on_gap=lambda *_: None) as stream:
        with broker.lasting(request.principal, AccessScope.READ, (request.topic,), ended.set) as lasting:
            first = asyncio.ensure_future(anext(stream, None))
            ending = asyncio.create_task(ended.wait())
            try:
                await asyncio.wait((first, ending), return_when=asyncio.FIRST_COMPLETED)
            finally:
                first.cancel()
                ending.cancel()
                # An error of the look is met again by the read that follows, which says it better.
                await asyncio.gather(first, ending, return_exceptions=True)
        if lasting.error is not None:
            raise lasting.error


async def _look_up(
    request: Request, topic: AsyncTopic, query: ReadQuery, start: Position, media: MediaType
) -> BatchPage:
    """What a key or a tag has in the partition, by the index; a page of it."""
    if media not in (MediaType.JSON, MediaType.NDJSON):
        raise Invalid(f"look-ups by key or tag answer with {MediaType.JSON} or {MediaType.NDJSON}")
    key = bodies.key_bytes(query.key, query.key_b64)
    if key is not None and query.tag is not None:
        raise Invalid("look up by key or by tag, not by both")
    page, reach = await topic.lookup_page(
        query.partition,
        start,
        key=key,
        tag=query.tag,
        history=query.history,
        records_max=query.records_max,
        bytes_max=request.admitted.reserve(query.bytes_max),
        who=request.principal.name,
    )
    return _with_marks(query.partition, page, reach)


def _with_marks(partition: int, page: Page, reach: Reach) -> BatchPage:
    marks = PageMarks(page.next, max(reach.head, page.next), reach.earliest, reach.evict_floor)
    return BatchPage(partition, page.batches, page.events, marks)


def _accepted(request: Request) -> MediaType:
    """How to answer a read: the first of `Accept` that is offered, JSON if it does not matter."""
    accept = request.header(b"accept")
    for entry in (accept or "*/*").split(","):
        name = entry.partition(";")[0].strip().lower()
        if name in ("*/*", "application/*"):
            return MediaType.JSON
        if name in READ_MEDIA:
            return MediaType(name)
    return MediaType.parse(accept or "")


def _encode(page: BatchPage, media: MediaType) -> HttpAnswer:
    """A page as an answer. In the event loop, or in a thread."""
    if media is MediaType.FRAMES:
        return HttpAnswer(200, answers.encode_page_frames(page), media)
    headers = tuple(page.marks.headers().items())
    if media is MediaType.ARROW:
        return HttpAnswer(200, answers.encode_page_arrow(page), media, headers)
    items = answers.batch_page_items(page)
    if media is MediaType.NDJSON:
        return HttpAnswer(200, answers.encode_page_ndjson(items), media, headers)
    return HttpAnswer(200, answers.encode_page_json(items, page.marks), media)


# Delete


async def delete_records(broker: Broker, request: Request) -> HttpAnswer:
    """End records of a topic."""
    query = request.query(DeleteQuery)
    request.partition, request.offset = query.partition, query.start
    what = DeleteRecords(
        partition=query.partition,
        key=bodies.key_bytes(query.key, query.key_b64),
        tag=query.tag,
        start=query.start,
        stop=query.stop,
        before=query.before,
    )
    return HttpAnswer.of(Deleted(await broker.service.delete_records(request.principal, request.topic, what)))


ROUTES = (
    Route(
        method="POST", path=f"{TOPIC}/records", name="append_records", summary="Append records",
        handler=append_records, scopes=(AccessScope.WRITE,), query=AppendQuery, body=bodies.RecordsBody,
        body_media=APPEND_MEDIA, answer=AppendedRanges, tag="records", statuses=(404, 409, 421, 422, 504, 507),
    ),
    Route(
        method="GET", path=f"{TOPIC}/records", name="read_records", summary="Read a page of a partition",
        handler=read_records, scopes=(AccessScope.READ,), query=ReadQuery, answer=answers.PageBody,
        answer_media=READ_MEDIA, tag="records", statuses=(404, 421, 422),
    ),
    Route(
        method="DELETE", path=f"{TOPIC}/records", name="delete_records", summary="Delete records",
        handler=delete_records, scopes=(AccessScope.DELETE,), query=DeleteQuery, answer=Deleted, tag="records",
        statuses=(404, 409, 421, 422), is_audited=True,
    ),
)  # fmt: skip
"""Of records."""
