"""Routes that say how partitions and the whole broker fare: epochs, recovery, failures, export, workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from forebay.broker.app import Broker
from forebay.broker.exchange import HttpAnswer, Request
from forebay.broker.routes import NoQuery, Route
from forebay.broker.topics import ANY, LISTED, LISTED_MAX, TOPIC
from forebay.format.metadata.descriptor import SegmentDescriptor
from forebay.records import Gap, Reason
from forebay.service.principals import AccessScope
from forebay.storage.status import PartitionStatus
from forebay.storage.usage import TierUsage
from forebay.topics import TopicName
from forebay.wire.items import GapItem
from forebay.wire.messages import (
    BrokerStatus,
    ExportItem,
    HistorySegmentItem,
    LocalSegmentItem,
    OffsetsItem,
    PartitionItem,
    PartitionList,
    RecoveryItem,
    SegmentList,
    UnreadableItem,
    UsageItem,
    UsageList,
    WorkerItem,
)


async def get_topic_status(broker: Broker, request: Request) -> HttpAnswer:
    """How the partitions of a topic fare that the broker has open."""
    request.query(NoQuery)
    found = await broker.service.topic_status(request.principal, request.topic)
    return await broker.list_answer(
        request, found.open, lambda opened: PartitionList([partition_item(broker, each) for each in opened])
    )


class SegmentQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which segments of a partition: those that begin at an offset or behind it."""

    partition: Annotated[int, Meta(ge=0)] = 0
    start: Annotated[int, Meta(ge=0, description="`next` of the page before.")] = 0
    limit: Annotated[int, Meta(ge=1, le=LISTED_MAX)] = LISTED


async def get_segments(broker: Broker, request: Request) -> HttpAnswer:
    """The log files and the history of a partition, a page at a time."""
    query = request.query(SegmentQuery)
    number = query.partition
    found = await broker.service.segments(
        request.principal, request.topic, number, start=query.start, limit=query.limit
    )
    local = [
        LocalSegmentItem(start=each.start, end=each.end, bytes=each.bytes, sealed=each.sealed) for each in found.local
    ]
    history = [_history_item(number, each) for each in found.history]
    return HttpAnswer.of(SegmentList(partition=number, local=local, history=history, next=found.next))


def _history_item(partition: int, found: SegmentDescriptor) -> HistorySegmentItem:
    gaps = [found.gap] if found.gap is not None else [Gap(*each, Reason.DAMAGED) for each in found.damaged]
    is_stored = found.gap is None
    return HistorySegmentItem(
        kind=found.kind.value,
        start=found.start,
        end=found.end,
        records=found.records,
        bytes=found.bytes,
        object=found.object_key or None,
        status=found.status.value,
        time_min=found.time_min if is_stored else None,
        time_max=found.time_max if is_stored else None,
        created_at=found.created_at,
        load_id=found.load_id,
        gaps=[GapItem.of(partition, gap) for gap in gaps],
    )


async def get_status(broker: Broker, request: Request) -> HttpAnswer:
    """How the broker fares: every open partition, and the background workers."""
    request.query(NoQuery)
    found = await broker.service.status(request.principal)
    workers = [
        WorkerItem(
            name=worker.name,
            steps=worker.steps,
            stepped_at=worker.stepped_at,
            running_s=worker.running_s,
            stuck=worker.stuck,
            failures=worker.failures,
            error=_public(broker, worker.error),
        )
        for worker in found.workers
    ]

    def status_of(opened: Sequence[PartitionStatus]) -> BrokerStatus:
        return BrokerStatus(
            directory_id=found.directory_id,
            read_only=found.read_only,
            partitions=[partition_item(broker, each) for each in opened],
            workers=workers,
            unreadable=[
                UnreadableItem(key=each.key, message=broker.public_message(str(each))) for each in broker.unreadable
            ],
        )

    return await broker.list_answer(request, found.open, status_of)


class UsageQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Whose bytes to add up."""

    topic: Annotated[str | None, Meta(description="This topic alone.")] = None


async def get_usage(broker: Broker, request: Request) -> HttpAnswer:
    """How many bytes topics take."""
    topic = request.query(UsageQuery).topic
    name = None if topic is None else TopicName.parse(topic)
    found = await broker.service.usage(request.principal, name)

    def usage_of(sums: Sequence[TierUsage]) -> UsageList:
        return UsageList([UsageItem(topic=one.topic, tier=one.tier, files=one.files, bytes=one.bytes) for one in sums])

    return await broker.list_answer(request, found, usage_of)


def partition_item(broker: Broker, status: PartitionStatus) -> PartitionItem:
    """The status of a partition as it is sent."""
    return PartitionItem(
        topic=status.topic,
        partition=status.partition,
        engine=status.engine,
        durability=status.durability,
        epoch=status.epoch,
        recovery=_recovery(broker, status),
        failure=_public(broker, status.failure),
        offsets=OffsetsItem.of(status.partition, status.offsets),
        segments=status.segments,
        cache_bytes=status.cache_bytes,
        export=_export(broker, status),
    )


def _recovery(broker: Broker, status: PartitionStatus) -> RecoveryItem:
    decision = status.decision
    gaps = [*([] if decision.gap is None else [decision.gap]), *decision.damage]
    return RecoveryItem(
        summary=broker.public_message(str(decision)),
        next_offset=decision.next_offset,
        source=str(decision.source),
        exact=decision.exact,
        clean=decision.clean,
        gaps=[GapItem.of(status.partition, gap) for gap in gaps],
        torn_bytes=decision.torn_bytes,
    )


def _export(broker: Broker, status: PartitionStatus) -> ExportItem | None:
    found = status.export
    if found is None:
        return None
    return ExportItem(
        exported=found.exported,
        behind_files=found.behind.files,
        behind_records=found.behind.records,
        behind_bytes=found.behind.bytes,
        objects=found.objects,
        bytes=found.bytes,
        errors=found.errors,
        error=_public(broker, found.error),
    )


def _public(broker: Broker, noted: str | None) -> str | None:
    return None if noted is None else broker.public_message(noted)


ROUTES = (
    Route(
        method="GET", path=f"{TOPIC}/status", name="get_topic_status", summary="How the partitions of a topic fare",
        handler=get_topic_status, scopes=ANY, answer=PartitionList, tag="status", statuses=(404,),
    ),
    Route(
        method="GET", path=f"{TOPIC}/segments", name="get_segments", summary="What a partition is stored in",
        handler=get_segments, scopes=(AccessScope.ADMIN,), query=SegmentQuery, answer=SegmentList, tag="status",
        statuses=(404,),
    ),
    Route(
        method="GET", path="/v1/usage", name="get_usage", summary="How many bytes topics take, tier by tier",
        handler=get_usage, scopes=(AccessScope.ADMIN,), query=UsageQuery, answer=UsageList, tag="status",
        statuses=(404,),
    ),
    Route(
        method="GET", path="/v1/status", name="get_status", summary="How the broker fares",
        handler=get_status, scopes=(AccessScope.ADMIN,), answer=BrokerStatus, tag="status",
    ),
)  # fmt: skip
"""Of status."""
