"""Routes of bulk loads: where segments go, stage, offer, list, status, attach, abandon."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from forebay.broker.app import Broker
from forebay.broker.exchange import HttpAnswer, Request
from forebay.broker.records import received
from forebay.broker.routes import NoQuery, Route
from forebay.broker.topics import LISTED, LISTED_MAX, TOPIC
from forebay.bulk import BackfillPlan, BackfillState, BulkLoad, LoadSegment, LoadTarget
from forebay.decoders import decoder
from forebay.errors import Invalid
from forebay.loads.topic import LOOK_SECONDS, LOOK_SECONDS_MAX
from forebay.pages import LOOP_BYTES_MAX
from forebay.service.principals import AccessScope
from forebay.wire import bodies
from forebay.wire.bodies import MediaType
from forebay.wire.limits import BodyLimits
from forebay.wire.messages import BackfillPut, LoadList, LoadOffer, OfferedLoad

LOADS: Final = f"{TOPIC}/loads"
LOAD: Final = f"{LOADS}/{{load}}"
BACKFILL: Final = f"{TOPIC}/backfills/{{backfill}}"


class LoadListQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which loads of a topic to list."""

    after: Annotated[str | None, Meta(description="The id to go on after: `after` of the page before.")] = None
    limit: Annotated[int, Meta(ge=1, le=LISTED_MAX)] = LISTED


class StageQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The partition that rows are for."""

    partition: Annotated[int, Meta(ge=0)] = 0


class LoadQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How long to wait for a load."""

    wait_ms: Annotated[int, Meta(ge=0, description="How long to wait until the load is over.")] = 0


async def list_loads(broker: Broker, request: Request) -> HttpAnswer:
    """A page of the loads into a topic."""
    query = request.query(LoadListQuery)
    found, more = await broker.service.load_page(request.principal, request.topic, after=query.after, limit=query.limit)
    return await broker.list_answer(request, found, lambda loads: LoadList(list(loads), more))


async def get_load_target(broker: Broker, request: Request) -> HttpAnswer:
    """Where the segments of a load have to lie."""
    request.query(NoQuery)
    return HttpAnswer.of(await broker.service.load_target(request.principal, request.topic, request.at["load"]))


async def stage_rows(broker: Broker, request: Request) -> HttpAnswer:
    """Write the rows of the body as a segment of a load."""
    service, who, name = broker.service, request.principal, request.topic
    service.check_append(who, name)
    partition = request.query(StageQuery).partition
    request.partition = partition
    if MediaType.parse(request.header(b"content-type") or MediaType.ARROW) is not MediaType.ARROW:
        raise Invalid(f"rows of a load are sent as {MediaType.ARROW}")
    body = await received(broker, request)
    limits = BodyLimits(broker.settings.body_bytes_max, broker.settings.batch_records_max)
    rows = await broker.compute(partial(bodies.decode_arrow, body, limits))
    if not rows.num_rows:
        raise Invalid("the body has no rows: leave the request out")
    segment = await service.stage_load(who, name, request.at["load"], rows, partition)
    return HttpAnswer.of(segment, status=201)


async def put_load(broker: Broker, request: Request) -> HttpAnswer:
    """Offer a load."""
    service, who, name = broker.service, request.principal, request.topic
    service.check_append(who, name)
    body = await received(broker, request)
    decode = partial(_offer, body)
    offer = decode() if len(body) <= LOOP_BYTES_MAX else await broker.compute(decode)
    load = await service.offer_load(who, name, request.at["load"], offer)
    return HttpAnswer.of(OfferedLoad(load))


def _offer(body: bytes) -> LoadOffer:
    """The offer of a body. In the event loop, or in a thread."""
    try:
        return decoder(LoadOffer).decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        fields = ", ".join(LoadOffer.__struct_fields__)
        raise Invalid(f"the body is wrong: {error}; it is a JSON object with: {fields}") from error


async def get_load(broker: Broker, request: Request) -> HttpAnswer:
    """How far a load has come; with `wait_ms` once it is over, the time is up, or the broker ends."""
    service, who, name, load_id = broker.service, request.principal, request.topic, request.at["load"]
    seconds = _seconds(broker, request.query(LoadQuery).wait_ms)
    loop = asyncio.get_running_loop()
    deadline, pause = loop.time() + seconds, LOOK_SECONDS
    found, ended = await service.load(who, name, load_id), asyncio.Event()
    with broker.lasting(who, AccessScope.WRITE, (name,), ended.set) as lasting:
        while not (found.is_over or ended.is_set()) and (left := deadline - loop.time()) > 0:
            try:
                async with asyncio.timeout(min(pause, left)):
                    await ended.wait()
            except TimeoutError:
                pause = min(2 * pause, LOOK_SECONDS_MAX)
            found = await service.load(who, name, load_id)
    if lasting.error is not None:
        raise lasting.error
    return HttpAnswer.of(found)


async def attach_load(broker: Broker, request: Request) -> HttpAnswer:
    """Attach a load where this broker can; how far it is then, or when the time is up."""
    service, who, name, load_id = broker.service, request.principal, request.topic, request.at["load"]
    seconds = _seconds(broker, request.query(LoadQuery).wait_ms)
    attaching, ended = service.attach_load(who, name, load_id), asyncio.Event()
    ending = asyncio.create_task(ended.wait())
    with broker.lasting(who, AccessScope.WRITE, (name,), ended.set) as lasting:
        try:
            await asyncio.wait((attaching, ending), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()
    if lasting.error is not None:
        raise lasting.error
    found = attaching.result() if attaching.done() else await service.load(who, name, load_id)
    return HttpAnswer.of(found)


async def abandon_load(broker: Broker, request: Request) -> HttpAnswer:
    """Give a load up."""
    return HttpAnswer.of(await broker.service.abandon_load(request.principal, request.topic, request.at["load"]))


async def get_backfill(broker: Broker, request: Request) -> HttpAnswer:
    """How far a backfill has come."""
    request.query(NoQuery)
    return HttpAnswer.of(await broker.service.backfill(request.principal, request.topic, request.at["backfill"]))


async def put_backfill(broker: Broker, request: Request) -> HttpAnswer:
    """Begin a backfill, or go on with it."""
    service, who, name = broker.service, request.principal, request.topic
    service.check_append(who, name)
    put = await request.json(BackfillPut)
    plan = BackfillPlan(fingerprint=put.fingerprint, loads=put.loads)
    return HttpAnswer.of(await service.begin_backfill(who, name, request.at["backfill"], plan))


def _seconds(broker: Broker, wait_ms: int) -> float:
    return min(wait_ms, broker.settings.wait_timeout_max_ms) / 1000


WRITE: Final = (AccessScope.WRITE,)
ROUTES = (
    Route(
        method="GET", path=LOADS, name="list_loads", summary="List bulk loads into a topic, a page at a time",
        handler=list_loads, scopes=WRITE, query=LoadListQuery, answer=LoadList, tag="loads", statuses=(404, 422),
    ),
    Route(
        method="GET", path=f"{LOAD}/target", name="get_load_target", summary="Where the segments of a load have to lie",
        handler=get_load_target, scopes=WRITE, answer=LoadTarget, tag="loads", statuses=(404, 422),
    ),
    Route(
        method="POST", path=f"{LOAD}/segments", name="stage_rows", summary="Write rows as a segment of a load",
        handler=stage_rows, scopes=WRITE, query=StageQuery, body_media=(MediaType.ARROW,), answer=LoadSegment,
        status=201, tag="loads", statuses=(404, 422, 504, 507),
    ),
    Route(
        method="PUT", path=LOAD, name="put_load", summary="Offer a load: its segments come in everywhere, or nowhere",
        handler=put_load, scopes=WRITE, body=LoadOffer, answer=OfferedLoad, tag="loads",
        statuses=(404, 409, 422, 504, 507), is_audited=True,
    ),
    Route(
        method="GET", path=LOAD, name="get_load", summary="How far a load has come, and its offsets",
        handler=get_load, scopes=WRITE, query=LoadQuery, answer=BulkLoad, tag="loads", statuses=(404, 422),
    ),
    Route(
        method="POST", path=f"{LOAD}/attach", name="attach_load", summary="Attach a load now",
        handler=attach_load, scopes=WRITE, query=LoadQuery, answer=BulkLoad, tag="loads",
        statuses=(404, 409, 421, 422, 500, 504), is_audited=True,
    ),
    Route(
        method="POST", path=f"{LOAD}/abandon", name="abandon_load", summary="Give a load up",
        handler=abandon_load, scopes=WRITE, answer=BulkLoad, tag="loads", statuses=(404, 409, 422, 504),
        is_audited=True,
    ),
    Route(
        method="GET", path=BACKFILL, name="get_backfill", summary="How far a backfill has come",
        handler=get_backfill, scopes=WRITE, answer=BackfillState, tag="loads", statuses=(404, 422),
    ),
    Route(
        method="PUT", path=BACKFILL, name="put_backfill", summary="Begin a backfill: its id stands for its rows",
        handler=put_backfill, scopes=WRITE, body=BackfillPut, answer=BackfillState, tag="loads",
        statuses=(404, 409, 422, 504), is_audited=True,
    ),
)  # fmt: skip
"""Of bulk loads."""
