"""Routes of subscriptions and their consumers.

Definitions and operators' calls go to the log's threads. A consumer lives in a session (`service.subscriptions`) that
its requests renew; pulls and streams wait in the event loop, and records that memory has are delivered there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from forebay.broker.app import Broker, LastingAnswer
from forebay.broker.exchange import HttpAnswer, Request, Streamed
from forebay.broker.records import PAGE_BYTES, PAGE_RECORDS
from forebay.broker.routes import Route
from forebay.broker.topics import TOPIC
from forebay.broker.watch import MEDIA, RETRY_MS
from forebay.errors import ForebayError
from forebay.pages import LOOP_BYTES_MAX
from forebay.records import DeliveredRecord, Start
from forebay.service.principals import AccessScope
from forebay.service.subscriptions import RECORD_BYTES, ConsumerSession, SubscriptionRef, TakenRecords
from forebay.wire import events
from forebay.wire.positions import parse_start
from forebay.wire.subscriptions import (
    PULL_RECORDS,
    PULL_RECORDS_MAX,
    Acking,
    AnswerCount,
    AttachedConsumer,
    ConsumerNames,
    ConsumerPut,
    DeliveredItem,
    LagItem,
    LagPage,
    Nacking,
    PeekedRecords,
    Places,
    PulledRecords,
    Pulling,
    Seeking,
    SoughtPlaces,
    SubscriptionItem,
    SubscriptionList,
    SubscriptionPatch,
    SubscriptionPut,
)

logger = logging.getLogger(__name__)

SUBSCRIPTIONS: Final = f"{TOPIC}/subscriptions"
SUBSCRIPTION: Final = f"{SUBSCRIPTIONS}/{{subscription}}"
CONSUMER: Final = f"{SUBSCRIPTION}/consumers/{{consumer}}"
PEEKED: Final = 10
_ENCODER: Final = msgspec.json.Encoder()


class IncarnationQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which subscription of this name is meant."""

    id: Annotated[str | None, Meta(description="Its `subscription_id`: a later one of its name is a `conflict`.")] = (
        None
    )


class PeekQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How many records to look at."""

    id: str | None = None
    records_max: Annotated[int, Meta(ge=1, le=PAGE_RECORDS)] = PEEKED
    partition: Annotated[int, Meta(ge=0)] | None = None


class StreamQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a stream takes records."""

    max: Annotated[int, Meta(ge=1, le=PULL_RECORDS_MAX, description="Records that are taken at once.")] = PULL_RECORDS


def _ref(request: Request) -> SubscriptionRef:
    query = request.query(IncarnationQuery)
    return SubscriptionRef(request.topic, request.at["subscription"], query.id)


def _start(places: Places, option: str) -> Start:
    if isinstance(places, str):
        return parse_start(places, option)
    return {partition: parse_start(place, option) for partition, place in places.items()}


# Definitions


async def list_subscriptions(broker: Broker, request: Request) -> HttpAnswer:
    """The subscriptions of a topic."""
    found = await broker.service.subscriptions.of_topic(request.principal, request.topic)
    return await broker.list_answer(
        request, found, lambda items: SubscriptionList([SubscriptionItem.of(spec) for spec in items])
    )


async def put_subscription(broker: Broker, request: Request) -> HttpAnswer:
    """Create a subscription, or find the one that is there."""
    put = await request.json(SubscriptionPut, default=SubscriptionPut())
    ref = SubscriptionRef(request.topic, request.at["subscription"])
    start = _start(put.start, "start")
    spec = await broker.service.subscriptions.create(request.principal, ref, start, put.options())
    return HttpAnswer.of(SubscriptionItem.of(spec))


async def get_subscription(broker: Broker, request: Request) -> HttpAnswer:
    """The definition of a subscription."""
    found = await broker.service.subscriptions.get(request.principal, _ref(request))
    return HttpAnswer.of(SubscriptionItem.of(found.spec))


async def patch_subscription(broker: Broker, request: Request) -> HttpAnswer:
    """Change a subscription."""
    ref, patch = _ref(request), await request.json(SubscriptionPatch)
    spec = await broker.service.subscriptions.alter(request.principal, ref, patch.changes())
    return HttpAnswer.of(SubscriptionItem.of(spec))


async def delete_subscription(broker: Broker, request: Request) -> HttpAnswer:
    """Remove a subscription with its cursors."""
    await broker.service.subscriptions.delete(request.principal, _ref(request))
    return HttpAnswer(204)


# Operators


async def pause_subscription(broker: Broker, request: Request) -> HttpAnswer:
    """Deliver nothing more."""
    found = await broker.service.subscriptions.get(request.principal, _ref(request))
    await found.pause()
    return HttpAnswer.of(SubscriptionItem.of(found.spec))


async def resume_subscription(broker: Broker, request: Request) -> HttpAnswer:
    """Go on after a pause."""
    found = await broker.service.subscriptions.get(request.principal, _ref(request))
    await found.resume()
    return HttpAnswer.of(SubscriptionItem.of(found.spec))


async def seek_subscription(broker: Broker, request: Request) -> HttpAnswer:
    """Go on at another place."""
    ref, seek = _ref(request), await request.json(Seeking)
    found = await broker.service.subscriptions.get(request.principal, ref)
    return HttpAnswer.of(SoughtPlaces(await found.seek(_start(seek.to, "to"), partition=seek.partition)))


async def flush_subscription(broker: Broker, request: Request) -> HttpAnswer:
    """Store what was acknowledged."""
    await (await broker.service.subscriptions.get(request.principal, _ref(request))).flush()
    return HttpAnswer(204)


async def get_lag(broker: Broker, request: Request) -> HttpAnswer:
    """How far a subscription has come."""
    stands = await (await broker.service.subscriptions.get(request.principal, _ref(request))).lag()
    found = [lag if lag.failure is None else lag._replace(failure=broker.public_message(lag.failure)) for lag in stands]
    return await broker.list_answer(request, found, lambda items: LagPage([LagItem.of(lag) for lag in items]))


async def peek_records(broker: Broker, request: Request) -> HttpAnswer:
    """The first records that are not done."""
    query = request.query(PeekQuery)
    ref = SubscriptionRef(request.topic, request.at["subscription"], query.id)
    found = await broker.service.subscriptions.get(request.principal, ref)
    room = request.admitted.reserve(PAGE_BYTES)
    page = await found.peek_page(query.records_max, partition=query.partition, bytes_max=room)
    return await broker.compute(lambda: HttpAnswer.of(PeekedRecords.of(page)))


async def list_consumers(broker: Broker, request: Request) -> HttpAnswer:
    """The consumers that are attached."""
    found = await broker.service.subscriptions.get(request.principal, _ref(request))
    return HttpAnswer.of(ConsumerNames(await found.consumers()))


# Consumers


async def attach_consumer(broker: Broker, request: Request) -> HttpAnswer:
    """Attach a consumer, or find the one that is attached."""
    ref, asked, consumer = _ref(request), await request.json(ConsumerPut, default=ConsumerPut()), request.at["consumer"]
    name = consumer if asked.name is None else asked.name
    session = await broker.service.subscriptions.attach(
        request.principal,
        ref,
        consumer,
        name=name,
        unacked_max=asked.unacked_max,
        timeout_s=asked.session_timeout_ms / 1000,
    )
    return HttpAnswer.of(
        AttachedConsumer(
            consumer=consumer,
            name=name,
            subscription_id=session.spec.subscription_id,
            session_timeout_ms=round(session.timeout_s * 1000),
        )
    )


async def detach_consumer(broker: Broker, request: Request) -> HttpAnswer:
    """A consumer leaves."""
    ref = SubscriptionRef(request.topic, request.at["subscription"])
    await broker.service.subscriptions.detach(request.principal, ref, request.at["consumer"])
    return HttpAnswer(204)


async def _session(broker: Broker, request: Request) -> ConsumerSession:
    ref = SubscriptionRef(request.topic, request.at["subscription"])
    return await broker.service.subscriptions.session(request.principal, ref, request.at["consumer"])


async def ack_records(broker: Broker, request: Request) -> HttpAnswer:
    """Records are done."""
    session, done = await _session(broker, request), await request.json(Acking, default=Acking())
    with session.used():
        return HttpAnswer.of(AnswerCount(await session.ack(done.offsets, done.up_to)))


async def nack_records(broker: Broker, request: Request) -> HttpAnswer:
    """Records could not be done."""
    session, failed = await _session(broker, request), await request.json(Nacking)
    with session.used():
        if failed.is_unused:
            return HttpAnswer.of(AnswerCount(session.take_back(failed.offsets, failed.attempts)))
        counted = await session.nack(failed.offsets, failed.delay_ms, failed.error, failed.attempts)
        return HttpAnswer.of(AnswerCount(counted))


async def pull_records(broker: Broker, request: Request) -> HttpAnswer:
    """Acknowledge, refuse and take records, all in one call."""
    session, pull = await _session(broker, request), await request.json(Pulling, default=Pulling())
    with session.used():
        acked = await session.ack(pull.ack, pull.ack_up_to)
        if pull.nack:
            await session.begin_pull(pull.sequence)
        nacked = await session.nack(pull.nack, pull.delay_ms, pull.error)
        taken = await _pulled(broker, request, session, pull)
        with _returned_on_error(session, taken):
            size = _size(taken.records)
            request.admitted.hold(size)
            encode = partial(_encode, taken.records, acked, nacked, session.lost)
            return await broker.compute(encode) if size > LOOP_BYTES_MAX else encode()


@contextmanager
def _returned_on_error(session: ConsumerSession, taken: TakenRecords) -> Iterator[None]:
    """Records that were taken are due again at once if they do not come to be sent: the client has gone, say."""
    try:
        yield
    except BaseException:
        session.return_all(taken)
        raise


def _encode(found: Sequence[DeliveredRecord], acked: int, nacked: int, lost: int) -> HttpAnswer:
    """Pulled records as an answer. In the event loop, or in a thread."""
    items = [DeliveredItem.of(delivered) for delivered in found]
    return HttpAnswer.of(PulledRecords(records=items, acked=acked, nacked=nacked, lost=lost))


async def _pulled(broker: Broker, request: Request, session: ConsumerSession, pull: Pulling) -> TakenRecords:
    """What is due, waited for until the time is up or the broker ends; raises if the caller may not have it now."""
    wait_s = min(pull.wait_ms, broker.settings.wait_timeout_max_ms) / 1000
    # Not reserved: most pulls wait, and get a few records.
    bytes_max = request.admitted.share(pull.bytes_max)
    pulling = asyncio.ensure_future(session.pull(pull.max, bytes_max=bytes_max, wait_s=wait_s, sequence=pull.sequence))
    try:
        with broker.lasting(request.principal, AccessScope.READ, (request.topic,), pulling.cancel) as lasting:
            await asyncio.wait((pulling,))
    except BaseException:
        # The client has gone, most likely.
        _end_pull(session, pulling)
        raise
    if not pulling.cancelled():
        return pulling.result()
    if lasting.error is not None:
        raise lasting.error
    # The broker ends.
    return TakenRecords([], 0)


def _end_pull(session: ConsumerSession, pulling: asyncio.Future[TakenRecords]) -> None:
    """End a pull whose caller waits no more. What it has taken, if it is done already, is due again at once."""
    if not pulling.cancel() and not pulling.cancelled() and pulling.exception() is None:
        session.return_all(pulling.result())


def _size(found: Sequence[DeliveredRecord]) -> int:
    """About what records take in memory."""
    return sum(len(each.record.value or b"") + len(each.record.key or b"") + RECORD_BYTES for each in found)


# Streams


async def stream_records(broker: Broker, request: Request) -> Streamed:
    """Records as they become due, until the client leaves; they are acknowledged by further calls."""
    query, session = request.query(StreamQuery), await _session(broker, request)
    with ExitStack() as held:
        held.enter_context(session.used())
        ended = asyncio.Event()
        lasting = held.enter_context(broker.lasting(request.principal, AccessScope.READ, (request.topic,), ended.set))
        pieces = _pieces(broker, session, query.max, ended, lasting)
        return Streamed(pieces, MEDIA, (("cache-control", "no-store"), ("x-accel-buffering", "no")), held.pop_all())


async def _pieces(
    broker: Broker, session: ConsumerSession, records_max: int, ended: asyncio.Event, lasting: LastingAnswer
) -> AsyncGenerator[bytes, None]:
    """Events without an end: records once the client has taken those before, and signs of life between them.

    What ends the stream but the broker itself is its last event: an error.
    """
    heartbeat_s, bytes_max = broker.settings.heartbeat_interval_ms / 1000, broker.settings.outbox_bytes_max
    ending = asyncio.create_task(ended.wait())
    try:
        yield events.encode_retry(RETRY_MS)
        while not ended.is_set():
            pulling = asyncio.ensure_future(session.pull(records_max, bytes_max=bytes_max, wait_s=heartbeat_s))
            try:
                await asyncio.wait((pulling, ending), return_when=asyncio.FIRST_COMPLETED)
            except BaseException:
                _end_pull(session, pulling)
                raise
            if not pulling.done():
                pulling.cancel()
                break
            taken = pulling.result()
            with _returned_on_error(session, taken):
                piece = await _events(broker, taken.records) if taken.records else events.HEARTBEAT
            yield piece
        if lasting.error is not None:
            raise lasting.error
    except Exception as error:
        if not isinstance(error, ForebayError):
            logger.exception("a stream of a subscription failed")
        yield events.encode_event(broker.sent_error(error).body, event=events.ERROR_EVENT)
    finally:
        ending.cancel()


async def _events(broker: Broker, found: Sequence[DeliveredRecord]) -> bytes:
    encode = partial(_encode_events, found)
    return await broker.compute(encode) if _size(found) > LOOP_BYTES_MAX else encode()


def _encode_events(found: Sequence[DeliveredRecord]) -> bytes:
    """An event for each record. In the event loop, or in a thread. JSON has no line ends of its own."""
    lines = _ENCODER.encode_lines([DeliveredItem.of(delivered) for delivered in found])[:-1]
    return b"data: %s\n\n" % lines.replace(b"\n", b"\n\ndata: ")


READ: Final = (AccessScope.READ,)
ROUTES = (
    Route(
        method="GET", path=SUBSCRIPTIONS, name="list_subscriptions", summary="List the subscriptions of a topic",
        handler=list_subscriptions, scopes=READ, answer=SubscriptionList, tag="subscriptions", statuses=(404, 421),
    ),
    Route(
        method="PUT", path=SUBSCRIPTION, name="put_subscription", summary="Create a subscription, or find it",
        handler=put_subscription, scopes=READ, body=SubscriptionPut, answer=SubscriptionItem, tag="subscriptions",
        statuses=(404, 409, 421, 422, 504), is_audited=True,
    ),
    Route(
        method="GET", path=SUBSCRIPTION, name="get_subscription", summary="The definition of a subscription",
        handler=get_subscription, scopes=READ, query=IncarnationQuery, answer=SubscriptionItem, tag="subscriptions",
        statuses=(404, 409, 421),
    ),
    Route(
        method="PATCH", path=SUBSCRIPTION, name="patch_subscription", summary="Change a subscription while it is used",
        handler=patch_subscription, scopes=READ, query=IncarnationQuery, body=SubscriptionPatch,
        answer=SubscriptionItem, tag="subscriptions", statuses=(404, 409, 421, 422, 504), is_audited=True,
    ),
    Route(
        method="DELETE", path=SUBSCRIPTION, name="delete_subscription",
        summary="Remove a subscription with its cursors, while no consumer is attached",
        handler=delete_subscription, scopes=READ, query=IncarnationQuery, status=204, tag="subscriptions",
        statuses=(404, 409, 421, 422, 504), is_audited=True,
    ),
    Route(
        method="POST", path=f"{SUBSCRIPTION}/pause", name="pause_subscription", summary="Deliver nothing more",
        handler=pause_subscription, scopes=READ, query=IncarnationQuery, answer=SubscriptionItem, tag="subscriptions",
        statuses=(404, 409, 421, 422, 504), is_audited=True,
    ),
    Route(
        method="POST", path=f"{SUBSCRIPTION}/resume", name="resume_subscription", summary="Go on after a pause",
        handler=resume_subscription, scopes=READ, query=IncarnationQuery, answer=SubscriptionItem, tag="subscriptions",
        statuses=(404, 409, 421, 422, 504), is_audited=True,
    ),
    Route(
        method="POST", path=f"{SUBSCRIPTION}/seek", name="seek_subscription",
        summary="Go on at another place, while no consumer is attached",
        handler=seek_subscription, scopes=READ, query=IncarnationQuery, body=Seeking, answer=SoughtPlaces,
        tag="subscriptions", statuses=(404, 409, 421, 422, 504), is_audited=True,
    ),
    Route(
        method="POST", path=f"{SUBSCRIPTION}/flush", name="flush_subscription",
        summary="Store what was acknowledged before", handler=flush_subscription, scopes=READ, query=IncarnationQuery,
        status=204, tag="subscriptions", statuses=(404, 409, 421, 422, 504),
    ),
    Route(
        method="GET", path=f"{SUBSCRIPTION}/lag", name="get_lag",
        summary="How far a subscription has come, and how much is not done", handler=get_lag, scopes=READ,
        query=IncarnationQuery, answer=LagPage, tag="subscriptions", statuses=(404, 409, 421),
    ),
    Route(
        method="GET", path=f"{SUBSCRIPTION}/peek", name="peek_records",
        summary="The first records that are not done, without taking them", handler=peek_records, scopes=READ,
        query=PeekQuery, answer=PeekedRecords, tag="subscriptions", statuses=(404, 409, 421, 422),
    ),
    Route(
        method="GET", path=f"{SUBSCRIPTION}/consumers", name="list_consumers",
        summary="The consumers that are attached", handler=list_consumers, scopes=READ, query=IncarnationQuery,
        answer=ConsumerNames, tag="subscriptions", statuses=(404, 409, 421),
    ),
    Route(
        method="PUT", path=CONSUMER, name="attach_consumer",
        summary="Attach a consumer, with an id of the caller's choice", handler=attach_consumer, scopes=READ,
        query=IncarnationQuery, body=ConsumerPut, answer=AttachedConsumer, tag="subscriptions",
        statuses=(404, 409, 421, 422, 504),
    ),
    Route(
        method="POST", path=f"{CONSUMER}/pull", name="pull_records",
        summary="Acknowledge, refuse and take records, in one call", handler=pull_records, scopes=READ, body=Pulling,
        answer=PulledRecords, tag="subscriptions", statuses=(404, 409, 421, 422),
    ),
    Route(
        method="POST", path=f"{CONSUMER}/ack", name="ack_records", summary="Records are done",
        handler=ack_records, scopes=READ, body=Acking, answer=AnswerCount, tag="subscriptions", statuses=(404, 421),
    ),
    Route(
        method="POST", path=f"{CONSUMER}/nack", name="nack_records", summary="Records could not be done",
        handler=nack_records, scopes=READ, body=Nacking, answer=AnswerCount, tag="subscriptions", statuses=(404, 421),
    ),
    Route(
        method="GET", path=f"{CONSUMER}/stream", name="stream_records",
        summary="Records as they become due, as server-sent events", handler=stream_records, scopes=READ,
        query=StreamQuery, answer_media=(MEDIA,), tag="subscriptions", statuses=(404, 421), is_stream=True,
    ),
    Route(
        method="DELETE", path=CONSUMER, name="detach_consumer", summary="A consumer leaves",
        handler=detach_consumer, scopes=READ, status=204, tag="subscriptions", statuses=(404, 421),
    ),
)  # fmt: skip
"""Of subscriptions."""
