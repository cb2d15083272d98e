"""Routes for those who read whole topics past the log, as Spark does: plan, stored pages of the log, stored bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Meta

from forebay.broker.app import Broker
from forebay.broker.exchange import HttpAnswer, Request
from forebay.broker.records import PAGE_BYTES, PAGE_BYTES_MAX
from forebay.broker.routes import Route
from forebay.broker.topics import TOPIC
from forebay.records import OFFSET_MAX
from forebay.service.principals import AccessScope
from forebay.service.service import LookedAt
from forebay.storage.views import StoredRange
from forebay.views.snapshot import ShardView
from forebay.wire import answers
from forebay.wire.answers import BatchPage, PageMarks
from forebay.wire.bodies import MediaType
from forebay.wire.messages import TopicItem
from forebay.wire.plans import HistoryPiece, LogPiece, PlannedPartition, TopicPlan, encode_deleted

BYTES: Final = "application/octet-stream"
OBJECT_BYTES_MAX: Final = 8 * 1024 * 1024
"""What one answer has of an object."""
PIECE_BYTES: Final = 600
"""About what a piece of history takes in a plan, for as long as that is not made."""
POSITION_MAX: Final = 1 << 50
"""No object is as long as that."""


class PlanQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the caller has of the plan."""

    known: Annotated[str | None, Meta(description="`edition` of a plan: its history is not sent again.")] = None


class StoredPageQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which records of the log to read."""

    start: Annotated[int, Meta(ge=0, le=OFFSET_MAX)]
    topic_id: Annotated[str, Meta(description="That of the plan: another topic of the name has other records.")]
    partition: Annotated[int, Meta(ge=0)] = 0
    bytes_max: Annotated[int, Meta(ge=1, le=PAGE_BYTES_MAX)] = PAGE_BYTES


class ObjectQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which bytes of an object that a plan names."""

    partition: Annotated[int, Meta(ge=0)]
    store: str
    key: str
    start: Annotated[int, Meta(ge=0, le=POSITION_MAX)]
    stop: Annotated[
        int, Meta(ge=0, le=POSITION_MAX, description="At most so far; an answer may end earlier: go on there.")
    ]
    topic_id: Annotated[str, Meta(description="That of the plan: another topic of the name has other objects.")]
    etag: str | None = None


async def get_plan(broker: Broker, request: Request) -> HttpAnswer:
    """Where the records of a topic lie now."""
    known = request.query(PlanQuery).known
    found = await broker.service.look(request.principal, request.topic)
    request.admitted.hold(sum(len(view.pieces) for view in found.views) * PIECE_BYTES)
    return await broker.compute(partial(_answer, found, known))


def _answer(found: LookedAt, known: str | None) -> HttpAnswer:
    """The plan as an answer. In a thread: a long history takes its time."""
    edition = edition_of(found.views)
    is_known = known == edition
    plan = TopicPlan(
        topic=TopicItem.of(found.spec),
        edition=edition,
        partitions=[_planned(view, is_known=is_known) for view in found.views],
        store=found.store,
    )
    return HttpAnswer.of(plan)


def edition_of(views: Sequence[ShardView]) -> str:
    """Another text whenever the pieces of history are others.

    A load that is waited for ends the history before it. How it ended never changes, so that where history begins and
    ends, and the generation of its catalog, say which pieces it has.
    """
    parts = [(view.topic_id, view.generation, view.earliest, _history_end(view)) for view in views]
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def _history_end(view: ShardView) -> int:
    return next((piece.stop for piece in reversed(view.pieces) if piece.descriptor is not None), view.earliest)


def _planned(view: ShardView, *, is_known: bool) -> PlannedPartition:
    end = _history_end(view)
    history = [HistoryPiece(p.start, p.stop, p.bytes, p.descriptor) for p in view.pieces if p.start < end]
    return PlannedPartition(
        partition=view.partition,
        epoch=view.epoch,
        earliest=view.earliest,
        next=view.next,
        evict_floor=view.floor.evict_floor,
        reason=None if view.floor.reason is None else int(view.floor.reason),
        generation=view.generation,
        deleted=encode_deleted(view.deleted),
        history=UNSET if is_known else history,
        log=[LogPiece(piece.start, piece.stop, piece.bytes) for piece in view.pieces if piece.start >= end],
    )


async def read_stored(broker: Broker, request: Request) -> HttpAnswer:
    """A page of the log as it is stored."""
    service, who = broker.service, request.principal
    service.check_read(who, request.topic)
    query = request.query(StoredPageQuery)
    request.partition, request.offset = query.partition, query.start
    spec = await service.plannable(who, request.topic, query.topic_id)
    bytes_max = request.admitted.reserve(query.bytes_max)
    page, head = await service.stored_page(who, spec, query.partition, query.start, bytes_max)
    batches, gaps = ([], []) if page is None else (page.batches, page.events)
    # An empty page before the head: no file of the log has this offset.
    marks = PageMarks(query.start if page is None else page.next, head, 0, 0)
    request.admitted.hold(0 if page is None else page.bytes)
    encode = partial(answers.encode_page_frames, BatchPage(query.partition, batches, gaps, marks))
    return HttpAnswer(200, await broker.compute(encode), MediaType.FRAMES)


async def read_object(broker: Broker, request: Request) -> HttpAnswer:
    """Bytes of an object that the plan names."""
    service, who = broker.service, request.principal
    service.check_read(who, request.topic)
    query = request.query(ObjectQuery)
    request.partition = query.partition
    spec = await service.plannable(who, request.topic, query.topic_id)
    length = request.admitted.reserve(min(max(query.stop - query.start, 1), OBJECT_BYTES_MAX))
    stop = min(query.stop, query.start + length)
    wanted = StoredRange(query.store, query.key, query.start, stop, query.etag)
    return HttpAnswer(200, await service.stored_bytes(who, spec, query.partition, wanted), BYTES)


READ: Final = (AccessScope.READ,)
ROUTES = (
    Route(
        method="GET", path=f"{TOPIC}/plan", name="get_plan", summary="Where the records of a topic lie at one moment",
        handler=get_plan, scopes=READ, query=PlanQuery, answer=TopicPlan, tag="plans", statuses=(404, 421, 422),
    ),
    Route(
        method="GET", path=f"{TOPIC}/stored", name="read_stored", summary="A page of the log as it is stored",
        handler=read_stored, scopes=READ, query=StoredPageQuery, answer_media=(MediaType.FRAMES,), tag="plans",
        statuses=(404, 409, 421, 422),
    ),
    Route(
        method="GET", path=f"{TOPIC}/object", name="read_object", summary="Bytes of an object of history",
        handler=read_object, scopes=READ, query=ObjectQuery, answer_media=(BYTES,), tag="plans",
        statuses=(404, 409, 421, 422),
    ),
)  # fmt: skip
"""Of whole topics."""
