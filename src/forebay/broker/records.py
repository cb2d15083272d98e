"""Routes that bring records and give them: append, read, look up, delete.

Appends and reads at the tail stay in the event loop; a body or a page that takes long to decode or encode goes to a
thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from forebay.aio.topic import AsyncTopic
from forebay.appends.producer_window import KEY_IDS, ReservedProducer
from forebay.broker.app import Broker
from forebay.broker.exchange import HttpAnswer, Request
from forebay.broker.routes import RequestHeader, Route
from forebay.broker.topics import TOPIC
from forebay.errors import Conflict, Invalid, Unsupported
from forebay.format.columns.rows import ColumnBytes
from forebay.pages import LOOP_BYTES_MAX, LOOP_RECORDS_MAX, Page, Reach
from forebay.partitioning import partitions_of_key
from forebay.records import Position
from forebay.service.principals import AccessScope
from forebay.service.service import AppendRecords, DeleteRecords
from forebay.storage import BatchAck
from forebay.topics import TopicSpec
from forebay.wire import answers, bodies
from forebay.wire.answers import BatchPage, PageMarks
from forebay.wire.bodies import MediaType
from forebay.wire.compression import decompress_body, inflated_bytes
from forebay.wire.errors import encode_refusal
from forebay.wire.items import RecordColumns
from forebay.wire.limits import BodyLimits
from forebay.wire.messages import AppendedRanges, Deleted, OffsetRangeItem
from forebay.wire.positions import parse_start

if TYPE_CHECKING:
    import pyarrow as pa

IDEMPOTENCY_KEY_CHARACTERS_MAX: Final = 256
IDEMPOTENCY_KEY: Final = RequestHeader(
    "Idempotency-Key", "A repeat with the same key stores nothing twice", IDEMPOTENCY_KEY_CHARACTERS_MAX
)
PAGE_RECORDS: Final = 10_000
PAGE_BYTES: Final = 1024 * 1024
PAGE_RECORDS_MAX: Final = 1_000_000
PAGE_BYTES_MAX: Final = 64 * 1024 * 1024
LATE_SECONDS: Final = 1.0
"""For so long a read that has waited in vain looks at the end again, beyond the time that its caller gave it."""
APPEND_MEDIA: Final = (MediaType.JSON, MediaType.NDJSON, MediaType.ARROW, MediaType.RAW)
NOT_ACCEPTABLE: Final = 406
_WEIGHT: Final = re.compile(r"0(\.\d{0,3})?|1(\.0{0,3})?")
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
    offsets: Annotated[
        bool, Meta(description="Whether the answer has the offset of each record, also where others were refused.")
    ] = False


class ReadQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which records to read."""

    partition: (
        Annotated[
            int,
            Meta(
                ge=0,
                description="Left out: 0, or where the hash of the key puts it, now and before partitions were added.",
            ),
        ]
        | None
    ) = None
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
    try:
        ack = await service.append(who, name, records)
    except Conflict as error:
        key = request.header(b"idempotency-key")
        if key is None or error.kind != "other_records":
            raise
        raise Conflict(
            f"{name}: Idempotency-Key {key!r} was used before for other records, which are stored: a repeat has the "
            "same records; give others a key of their own",
            topic=name,
            kind=error.kind,
        ) from error
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
    # It counts with what it takes in memory before that is made, which may be a thousand times what was sent.
    request.admitted.grow(max(0, inflated_bytes(body, encoding, bytes_max) - len(body)))
    plain = await broker.compute(partial(decompress_body, body, encoding, bytes_max))
    request.admitted.hold(max(len(plain), len(body)))
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
    of_raw = (query.key, query.key_b64, query.tag, query.timestamp, query.header or None)
    if media is not MediaType.RAW and any(part is not None for part in of_raw):
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
        columns=columns,
        partition=query.partition,
        producer=producer,
        sequence=sequence,
        previous=previous,
        names_each=query.offsets,
    )


def _producing(request: Request, query: AppendQuery) -> tuple[int | None, int | None, int | None]:
    """Who produces: the query says so, or an idempotency key stands for a producer of one append."""
    key = request.header(b"idempotency-key")
    if key is None:
        return query.producer, query.sequence, query.previous
    if query.producer is not None or query.sequence is not None or query.previous is not None:
        raise Invalid(
            "Idempotency-Key stands for a producer, its sequence and the one before: give the one or the others"
        )
    if not 1 <= len(key) <= IDEMPOTENCY_KEY_CHARACTERS_MAX:
        raise Invalid(f"Idempotency-Key has {len(key)} characters; allowed: 1 to {IDEMPOTENCY_KEY_CHARACTERS_MAX}")
    # Of each principal by itself: no caller is answered with the append of another that chose the same text.
    digest = hashlib.blake2b(f"{request.principal.name}\n{key}".encode(), digest_size=8).digest()
    return ReservedProducer.of_key(digest), 0, None


# Read


async def read_records(broker: Broker, request: Request) -> HttpAnswer:
    """A page of a partition, or what a key or a tag has in it."""
    query = request.query(ReadQuery)
    start = parse_start(query.start, "start")
    accept = request.header(b"accept")
    media = _accepted(accept)
    if media is None:
        return _not_acceptable(accept)
    if query.history and query.key is query.key_b64 is None:
        raise Invalid("history is for a key: pages, and look-ups by tag, give all records")
    if query.key is not None or query.key_b64 is not None or query.tag is not None:
        page = await _look_up(broker, request, query, start, media)
    else:
        partition, who = query.partition or 0, request.principal.name
        request.partition = partition
        topic = await broker.service.readable(request.principal, request.topic, partition)
        offset = start.value if start.kind == "offset" else await topic.resolve(start, partition, who=who)
        request.offset = offset
        page = await _page(broker, request, topic, query, partition, offset)
    encode = partial(_encode, page, media)
    size = sum(int(batch.sizes().sum()) for batch in page.batches)
    # A single batch may be larger than what was reserved. Pages that wait for a thread are in memory, too.
    request.admitted.hold(size)
    return await broker.compute(encode) if size > LOOP_BYTES_MAX or _is_crowded(page, media) else encode()


def _is_crowded(page: BatchPage, media: MediaType) -> bool:
    """Whether the records of the page, each of which becomes an object, are many, however small."""
    return media in RECORD_MARKS and sum(batch.count for batch in page.batches) > LOOP_RECORDS_MAX


async def _page(
    broker: Broker, request: Request, topic: AsyncTopic, query: ReadQuery, partition: int, offset: int
) -> BatchPage:
    """The page at `offset`, waited for as long as the query says if there is none yet."""

    async def read() -> tuple[Page, Reach]:
        return await topic.batch_page(
            partition,
            offset,
            records_max=query.records_max,
            bytes_max=request.admitted.reserve(query.bytes_max),
            who=request.principal.name,
        )

    page, reach = await read()
    if page.next == offset and query.wait_ms:
        request.admitted.hold(0)
        is_in_time = await _is_published(broker, request, topic, query.wait_ms, partition, offset)
        try:
            # Where nothing came in time, a read that hangs does not make the answer late: what was read before stands.
            async with asyncio.timeout(None if is_in_time else LATE_SECONDS):
                page, reach = await read()
        except TimeoutError:
            request.admitted.hold(0)
    return _with_marks(partition, page, reach)


async def _is_published(
    broker: Broker, request: Request, topic: AsyncTopic, wait_ms: int, partition: int, offset: int
) -> bool:
    """Wait until there is something at `offset`, the broker ends, or the caller may not read it; not if time was up."""
    seconds = min(wait_ms, broker.settings.wait_timeout_max_ms) / 1000
    ended = asyncio.Event()
    with broker.lasting(request.principal, AccessScope.READ, (request.topic,), ended.set) as lasting:
        first = asyncio.create_task(_first(topic, partition, offset))
        ending = asyncio.create_task(ended.wait())
        try:
            done, _ = await asyncio.wait((first, ending), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            first.cancel()
            ending.cancel()
            # An error of the look is met again by the read that follows, which says it better.
            await asyncio.gather(first, ending, return_exceptions=True)
    if lasting.error is not None:
        raise lasting.error
    return bool(done)


async def _first(topic: AsyncTopic, partition: int, offset: int) -> None:
    """Return when there is something at `offset`."""
    async with topic.follow({partition: offset}, on_gap=lambda *_: None) as stream:
        await anext(stream, None)


async def _look_up(broker: Broker, request: Request, query: ReadQuery, start: Position, media: MediaType) -> BatchPage:
    """What a key or a tag has in a partition, by the index; a page of it.

    The newest record of a key is looked for in one partition after the other, today's first; a page with a gap that
    may hide it is the answer, too.
    """
    service, who, name = broker.service, request.principal, request.topic
    service.check_read(who, name)
    if media not in (MediaType.JSON, MediaType.NDJSON):
        raise Invalid(f"look-ups by key or tag answer with {MediaType.JSON} or {MediaType.NDJSON}")
    key = bodies.key_bytes(query.key, query.key_b64)
    if key is not None and query.tag is not None:
        raise Invalid("look up by key or by tag, not by both")
    if query.wait_ms:
        raise Invalid("wait_ms is for pages: a look-up by key or tag gives what there is")
    empty: BatchPage | None = None
    for place in _places(await service.topic(who, name), query, key, start):
        topic = await service.readable(who, name, place)
        page, reach = await topic.lookup_page(
            place,
            start,
            key=key,
            tag=query.tag,
            history=query.history,
            records_max=query.records_max,
            bytes_max=request.admitted.reserve(query.bytes_max),
            who=who.name,
        )
        found = _with_marks(place, page, reach)
        request.partition = place
        if page.batches or page.events:
            return found
        empty = empty or found
    assert empty is not None, "a key has one place at least"
    return empty


def _places(spec: TopicSpec, query: ReadQuery, key: bytes | None, start: Position) -> list[int]:
    """The partitions to look into, one after the other; `Invalid` where a page of one of them is not the answer."""
    if query.partition is not None:
        return [query.partition]
    if key is None:
        if spec.partitions > 1:
            raise Invalid(
                f"{spec.name} has {spec.partitions} partitions, and records with a tag may be in each: ask each of "
                f"them, with partition=0 to partition={spec.partitions - 1}"
            )
        return [0]
    places = partitions_of_key(key, spec.partitions, spec.earlier)
    if len(places) > 1 and (query.history or start.kind == "offset"):
        what = "all records of a key" if query.history else "an offset to start at"
        named = ", ".join(f"partition={place}" for place in reversed(places))
        raise Invalid(
            f"{spec.name} was given more partitions, the key has been in {len(places)} of them, and {what} must be "
            f"asked for in each: with {named} (the oldest records first)"
        )
    return places


def _with_marks(partition: int, page: Page, reach: Reach) -> BatchPage:
    marks = PageMarks(page.next, max(reach.head, page.next), reach.earliest, reach.evict_floor)
    return BatchPage(partition, page.batches, page.events, marks)


def _accepted(accept: str | None) -> MediaType | None:
    """How to answer a read: what `Accept` likes best of what is offered, `None` if it takes nothing of that.

    Of what it likes alike, what it names first; JSON if that does not matter either.
    """
    weights: dict[str, tuple[float, int]] = {}
    for place, entry in enumerate((accept or "*/*").split(",")):
        name, *parameters = (part.strip().lower() for part in entry.split(";"))
        with suppress(Unsupported):
            name = MediaType.parse(name)
        weights.setdefault(name, (_weight(parameters), -place))
    found: dict[MediaType, tuple[float, int]] = {}
    for media in map(MediaType, READ_MEDIA):
        # The nearest entry decides: a type that is named is not what the others stand for.
        entry_of = next((name for name in (media, "application/*", "*/*") if name in weights), None)
        if entry_of is not None and weights[entry_of][0] > 0:
            found[media] = weights[entry_of]
    return max(found, key=lambda media: (found[media], media is MediaType.JSON), default=None)


def _weight(parameters: Sequence[str]) -> float:
    """How much an entry of `Accept` is liked, from 0 to 1; one that cannot be read counts in full."""
    said = next((each.removeprefix("q=") for each in parameters if each.startswith("q=")), "1")
    return float(said) if _WEIGHT.fullmatch(said) else 1.0


def _not_acceptable(accept: str | None) -> HttpAnswer:
    message = f"Accept is {accept!a:.80}; records are given as {', '.join(READ_MEDIA)}"
    return HttpAnswer(NOT_ACCEPTABLE, encode_refusal("not_acceptable", message))


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
        handler=append_records, scopes=(AccessScope.WRITE,), query=AppendQuery, own_headers=(IDEMPOTENCY_KEY,),
        body=bodies.RecordsBody,
        body_media=APPEND_MEDIA, answer=AppendedRanges, tag="records", statuses=(404, 409, 421, 422, 504, 507),
    ),
    Route(
        method="GET", path=f"{TOPIC}/records", name="read_records", summary="Read a page of a partition",
        handler=read_records, scopes=(AccessScope.READ,), query=ReadQuery, answer=answers.PageBody,
        answer_media=READ_MEDIA, tag="records", statuses=(404, 406, 421, 422),
    ),
    Route(
        method="DELETE", path=f"{TOPIC}/records", name="delete_records", summary="Delete records",
        handler=delete_records, scopes=(AccessScope.DELETE,), query=DeleteQuery, answer=Deleted, tag="records",
        statuses=(404, 409, 421, 422), is_audited=True,
    ),
)  # fmt: skip
"""Of records."""
