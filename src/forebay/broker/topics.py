"""Routes of topics: create, show, list, alter, delete, seal, export, copy, watermarks, status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta

from forebay.broker.app import Broker
from forebay.broker.exchange import HttpAnswer, Request
from forebay.broker.routes import NoQuery, Route
from forebay.errors import Conflict, Invalid
from forebay.service.principals import AccessScope
from forebay.storage.recorded import RecordedShard
from forebay.topics import TopicName, TopicSpec
from forebay.wire.bodies import key_bytes
from forebay.wire.items import GapItem
from forebay.wire.messages import (
    CopiedItem,
    Copying,
    CopyPlaceItem,
    ErasedItem,
    Erasing,
    Exporting,
    LastSequence,
    LossItem,
    OffsetFound,
    OffsetsItem,
    OffsetsPage,
    RemnantItem,
    RetainedItem,
    Sealing,
    ShardItem,
    ShardList,
    TakingOver,
    TopicItem,
    TopicList,
    TopicPatch,
    TopicPut,
)
from forebay.wire.positions import parse_start

LISTED: int = 1_000
"""Topics of one page, if the caller does not say how many."""
LISTED_MAX = 10_000
ANY = tuple(AccessScope)
"""What shows a topic, a caller with any right on it may see."""
TOPIC = "/v1/topics/{namespace}/{topic}"


class ListQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which topics to list."""

    prefix: Annotated[str, Meta(description="How their names begin.")] = ""
    after: Annotated[str | None, Meta(description="The name to go on after: `after` of the page before.")] = None
    limit: Annotated[int, Meta(ge=1, le=LISTED_MAX)] = LISTED


class PartitionQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which partition; all of them if none is named."""

    partition: Annotated[int, Meta(ge=0)] | None = None


class PositionQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A place in a partition."""

    at: Annotated[str, Meta(description="`earliest`, `latest`, an offset, or a time.")]
    partition: Annotated[int, Meta(ge=0)] = 0


class SequenceQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An idempotent producer in a partition."""

    producer: Annotated[int, Meta(ge=1)]
    partition: Annotated[int, Meta(ge=0)] = 0


async def list_topics(broker: Broker, request: Request) -> HttpAnswer:
    """A page of the topics that the caller may know of."""
    query = request.query(ListQuery)
    after = None if query.after is None else TopicName.parse(query.after)
    found, more = await broker.service.topics(request.principal, query.prefix, after=after, limit=query.limit)
    after_next = None if more is None else str(more)
    return await broker.list_answer(
        request, found, lambda specs: TopicList([TopicItem.of(spec) for spec in specs], after_next)
    )


async def put_topic(broker: Broker, request: Request) -> HttpAnswer:
    """Create a topic."""
    put = await request.json(TopicPut, default=TopicPut())
    fields = {name: value for name, value in msgspec.structs.asdict(put).items() if value is not UNSET}
    spec, is_new = await broker.service.create_topic(request.principal, request.topic, **fields)
    if not is_new:
        _check_same(spec, fields)
    return HttpAnswer.of(TopicItem.of(spec), status=201 if is_new else 200)


def _check_same(spec: TopicSpec, fields: Mapping[str, Any]) -> None:
    """`Conflict` unless a topic that is there has the options that are given."""
    options = {name: value for name, value in fields.items() if name != "exist_ok" and value is not None}
    wanted = TopicSpec.create(spec.name, topic_id=spec.topic_id, created_at=spec.created_at, **options)
    for name in fields.keys() - {"exist_ok"}:
        # Without a class or an engine the defaults are asked for, and so any; without a limit, none.
        is_any = fields[name] is None and name in ("durability", "engine")
        found = spec.loss_policy if name == "on_owner_loss" else getattr(spec, name)
        if not is_any and found != getattr(wanted, name):
            raise Conflict(
                f"topic {spec.name} exists with {name} {found}, not {getattr(wanted, name)}: PATCH changes what can be "
                "changed; leave an option out to take the topic as it is",
                topic=spec.name,
            )


async def get_topic(broker: Broker, request: Request) -> HttpAnswer:
    """The definition of a topic."""
    request.query(NoQuery)
    return HttpAnswer.of(TopicItem.of(await broker.service.topic(request.principal, request.topic)))


async def patch_topic(broker: Broker, request: Request) -> HttpAnswer:
    """Change a topic."""
    patch = await request.json(TopicPatch)
    fields = {name: value for name, value in msgspec.structs.asdict(patch).items() if value is not UNSET}
    return HttpAnswer.of(TopicItem.of(await broker.service.alter_topic(request.principal, request.topic, **fields)))


async def delete_topic(broker: Broker, request: Request) -> HttpAnswer:
    """Delete a topic with all its records."""
    await broker.service.delete_topic(request.principal, request.topic)
    return HttpAnswer(204)


async def seal_topic(broker: Broker, request: Request) -> HttpAnswer:
    """End a topic here in order."""
    sealing = await request.json(Sealing, default=Sealing())
    sealed = await broker.service.seal_topic(
        request.principal, request.topic, target=sealing.target, accept_damage=sealing.accept_damage
    )
    return _shards(broker, sealed)


async def get_shards(broker: Broker, request: Request) -> HttpAnswer:
    """The partitions of a topic as they are recorded."""
    request.query(NoQuery)
    return _shards(broker, await broker.service.shards(request.principal, request.topic))


def _shards(broker: Broker, found: Sequence[RecordedShard]) -> HttpAnswer:
    """Recorded partitions as an answer."""
    return HttpAnswer.of(ShardList([_shard_item(broker, shard) for shard in found]))


def _shard_item(broker: Broker, shard: RecordedShard) -> ShardItem:
    state = shard.state
    sealed = state if state is not None and shard.is_sealed else None
    return ShardItem(
        partition=shard.partition,
        phase=shard.phase,
        epoch=0 if state is None else state.epoch,
        holder=None if state is None else state.holder,
        here=broker.service.is_here(shard),
        exported=shard.exported,
        next=None if sealed is None else sealed.next_offset,
        sealed_by=None if sealed is None else sealed.sealed_by,
        sealed_at=None if sealed is None else sealed.sealed_at,
        target=None if sealed is None else sealed.target,
        losses=[] if state is None else [LossItem(**msgspec.structs.asdict(loss)) for loss in state.losses],
    )


async def take_over(broker: Broker, request: Request) -> HttpAnswer:
    """Own a partition whose owner is gone."""
    taking = await request.json(TakingOver, default=TakingOver())
    found = await broker.service.take_over(
        request.principal, request.topic, taking.partition, accept_loss=taking.accept_loss
    )
    return _shards(broker, found)


async def unseal_topic(broker: Broker, request: Request) -> HttpAnswer:
    """Take a sealed topic back."""
    return _shards(broker, await broker.service.unseal_topic(request.principal, request.topic))


async def export_topic(broker: Broker, request: Request) -> HttpAnswer:
    """Make all of a topic history."""
    exporting = await request.json(Exporting, default=Exporting())
    exported = await broker.service.export_topic(
        request.principal, request.topic, accept_damage=exporting.accept_damage
    )
    return _shards(broker, exported)


async def erase_key(broker: Broker, request: Request) -> HttpAnswer:
    """Erase a key of a topic."""
    erasing = await request.json(Erasing)
    key = key_bytes(erasing.key, erasing.key_b64)
    if key is None:
        raise Invalid("which key is to be erased is not said: give key or key_b64")
    erased = await broker.service.erase_key(request.principal, request.topic, key, now=erasing.now)
    return HttpAnswer.of(
        ErasedItem(
            topic=erased.topic,
            deleted=erased.deleted,
            remains=[RemnantItem(**asdict(remnant)) for remnant in erased.remains],
            commands=erased.commands,
            copies=[CopyPlaceItem(**asdict(place)) for place in erased.copies],
        )
    )


async def copy_topic(broker: Broker, request: Request) -> HttpAnswer:
    """Bring every record of a topic into another, each once."""
    copying = await request.json(Copying)
    copied = await broker.service.copy_topic(request.principal, request.topic, TopicName.parse(copying.target))
    return HttpAnswer.of(
        CopiedItem(
            copied.copied, copied.source, copied.target, [GapItem.of(number, gap) for number, gap in copied.gaps]
        )
    )


async def flush_topic(broker: Broker, request: Request) -> HttpAnswer:
    """Make everything appended so far durable."""
    await broker.service.flush_topic(request.principal, request.topic)
    return HttpAnswer(204)


async def rotate_topic(broker: Broker, request: Request) -> HttpAnswer:
    """Begin a new log file in each partition."""
    await broker.service.rotate_topic(request.principal, request.topic)
    return HttpAnswer(204)


async def retain_topic(broker: Broker, request: Request) -> HttpAnswer:
    """Apply the limits of a topic and the retention of its files now."""
    removed = await broker.service.retain_topic(request.principal, request.topic)
    return HttpAnswer.of(RetainedItem(**removed._asdict()))


async def get_offsets(broker: Broker, request: Request) -> HttpAnswer:
    """The watermarks of the partitions of a topic."""
    partition = request.query(PartitionQuery).partition
    found = await broker.service.offsets(request.principal, request.topic, partition)
    return await broker.list_answer(
        request, found, lambda items: OffsetsPage([OffsetsItem.of(*item) for item in items])
    )


async def find_offset(broker: Broker, request: Request) -> HttpAnswer:
    """Where a position stands in a partition."""
    query = request.query(PositionQuery)
    found = await broker.service.resolve(request.principal, request.topic, query.partition, parse_start(query.at, "at"))
    return HttpAnswer.of(OffsetFound(partition=query.partition, offset=found))


async def get_sequence(broker: Broker, request: Request) -> HttpAnswer:
    """How far an idempotent producer has come: it goes on with the next sequence."""
    query = request.query(SequenceQuery)
    found = await broker.service.last_sequence(request.principal, request.topic, query.producer, query.partition)
    return HttpAnswer.of(LastSequence(partition=query.partition, producer=query.producer, sequence=found))


ROUTES = (
    Route(
        method="GET", path="/v1/topics", name="list_topics", summary="List topics, a page at a time",
        handler=list_topics, scopes=ANY, query=ListQuery, answer=TopicList, tag="topics",
    ),
    Route(
        method="PUT", path=TOPIC, name="put_topic", summary="Create a topic",
        handler=put_topic, scopes=(AccessScope.ADMIN,), body=TopicPut, answer=TopicItem, status=201, tag="topics",
        status_there=200,
        statuses=(409, 422), is_audited=True,
    ),
    Route(
        method="GET", path=TOPIC, name="get_topic", summary="The definition of a topic",
        handler=get_topic, scopes=ANY, answer=TopicItem, tag="topics", statuses=(404,),
    ),
    Route(
        method="PATCH", path=TOPIC, name="patch_topic", summary="Change a topic while it is used",
        handler=patch_topic, scopes=(AccessScope.ADMIN,), body=TopicPatch, answer=TopicItem, tag="topics",
        statuses=(404, 409, 421, 422), is_audited=True,
    ),
    Route(
        method="DELETE", path=TOPIC, name="delete_topic", summary="Delete a topic with all its records",
        handler=delete_topic, scopes=(AccessScope.ADMIN,), status=204, tag="topics", statuses=(404, 409, 421),
        is_audited=True,
    ),
    Route(
        method="POST", path=f"{TOPIC}/seal", name="seal_topic", summary="End a topic here; another directory goes on",
        handler=seal_topic, scopes=(AccessScope.ADMIN,), body=Sealing, answer=ShardList, tag="topics",
        statuses=(404, 409, 421, 422), is_audited=True,
    ),
    Route(
        method="POST", path=f"{TOPIC}/unseal", name="unseal_topic", summary="Take back a topic that was sealed here",
        handler=unseal_topic, scopes=(AccessScope.ADMIN,), answer=ShardList, tag="topics",
        statuses=(404, 409, 421, 422), is_audited=True,
    ),
    Route(
        method="POST", path=f"{TOPIC}/take-over", name="take_over", summary="Own a partition whose owner is gone",
        handler=take_over, scopes=(AccessScope.ADMIN,), body=TakingOver, answer=ShardList, tag="topics",
        statuses=(404, 409, 421, 422), is_audited=True,
    ),
    Route(
        method="POST", path=f"{TOPIC}/export", name="export_topic", summary="Make all of a topic history",
        handler=export_topic, scopes=(AccessScope.ADMIN,), body=Exporting, answer=ShardList, tag="topics",
        statuses=(404, 409, 421, 422), is_audited=True,
    ),
    Route(
        method="POST", path=f"{TOPIC}/erase", name="erase_key",
        summary="Erase a key, and say where its bytes remain",
        handler=erase_key, scopes=(AccessScope.ADMIN, AccessScope.DELETE), needs_all_scopes=True, body=Erasing,
        answer=ErasedItem,
        tag="topics", statuses=(404, 409, 421, 422), is_audited=True,
    ),
    Route(
        method="POST", path=f"{TOPIC}/copy", name="copy_topic", summary="Bring every record into another topic, once",
        handler=copy_topic, scopes=(AccessScope.READ, AccessScope.WRITE), needs_all_scopes=True, body=Copying,
        answer=CopiedItem, tag="topics",
        statuses=(404, 409, 421, 422), is_audited=True,
    ),
    Route(
        method="POST", path=f"{TOPIC}/flush", name="flush_topic", summary="Make everything appended so far durable",
        handler=flush_topic, scopes=(AccessScope.WRITE,), status=204, tag="topics", statuses=(404, 421),
    ),
    Route(
        method="POST", path=f"{TOPIC}/rotate", name="rotate_topic", summary="Begin a new log file in each partition",
        handler=rotate_topic, scopes=(AccessScope.ADMIN,), status=204, tag="topics", statuses=(404, 421, 422),
        is_audited=True,
    ),
    Route(
        method="POST", path=f"{TOPIC}/retain", name="retain_topic", summary="Apply limits and retention now",
        handler=retain_topic, scopes=(AccessScope.ADMIN,), answer=RetainedItem, tag="topics", statuses=(404,),
        is_audited=True,
    ),
    Route(
        method="GET", path=f"{TOPIC}/shards", name="get_shards", summary="Who has the partitions, as it is recorded",
        handler=get_shards, scopes=(AccessScope.ADMIN,), answer=ShardList, tag="topics", statuses=(404,),
    ),
    Route(
        method="GET", path=f"{TOPIC}/offsets", name="get_offsets", summary="The watermarks of the partitions",
        handler=get_offsets, scopes=(AccessScope.READ,), query=PartitionQuery, answer=OffsetsPage, tag="topics",
        statuses=(404, 421),
    ),
    Route(
        method="GET", path=f"{TOPIC}/offset", name="find_offset", summary="The offset of a time or an end",
        handler=find_offset, scopes=(AccessScope.READ,), query=PositionQuery, answer=OffsetFound, tag="topics",
        statuses=(404, 421),
    ),
    Route(
        method="GET", path=f"{TOPIC}/sequence", name="get_sequence", summary="The last sequence of a producer",
        handler=get_sequence, scopes=(AccessScope.WRITE,), query=SequenceQuery, answer=LastSequence, tag="topics",
        statuses=(404, 421),
    ),
)  # fmt: skip
"""Of topics."""
