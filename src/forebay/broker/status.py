"""Routes that say how partitions and the whole broker fare: epochs, recovery, failures, export, workers."""

from __future__ import annotations

from forebay.broker.app import Broker
from forebay.broker.exchange import HttpAnswer, Request
from forebay.broker.routes import NoQuery, Route
from forebay.broker.topics import ANY, TOPIC
from forebay.service.principals import AccessScope
from forebay.storage.status import PartitionStatus
from forebay.wire.items import GapItem
from forebay.wire.messages import (
    BrokerStatus,
    ExportItem,
    OffsetsItem,
    PartitionItem,
    PartitionList,
    RecoveryItem,
    WorkerItem,
)


async def get_topic_status(broker: Broker, request: Request) -> HttpAnswer:
    """How the partitions of a topic fare that the broker has open."""
    request.query(NoQuery)
    found = await broker.service.topic_status(request.principal, request.topic)
    return HttpAnswer.of(PartitionList([partition_item(each) for each in found.open]))


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
            error=worker.error,
        )
        for worker in found.workers
    ]
    partitions = [partition_item(each) for each in found.open]
    return HttpAnswer.of(
        BrokerStatus(directory_id=found.directory_id, read_only=found.read_only, partitions=partitions, workers=workers)
    )


def partition_item(status: PartitionStatus) -> PartitionItem:
    """The status of a partition as it is sent."""
    return PartitionItem(
        topic=status.topic,
        partition=status.partition,
        engine=status.engine,
        durability=status.durability,
        epoch=status.epoch,
        recovery=_recovery(status),
        failure=status.failure,
        offsets=OffsetsItem.of(status.partition, status.offsets),
        segments=status.segments,
        cache_bytes=status.cache_bytes,
        export=_export(status),
    )


def _recovery(status: PartitionStatus) -> RecoveryItem:
    decision = status.decision
    gaps = [*([] if decision.gap is None else [decision.gap]), *decision.damage]
    return RecoveryItem(
        summary=str(decision),
        next_offset=decision.next_offset,
        source=str(decision.source),
        exact=decision.exact,
        clean=decision.clean,
        gaps=[GapItem.of(status.partition, gap) for gap in gaps],
        torn_bytes=decision.torn_bytes,
    )


def _export(status: PartitionStatus) -> ExportItem | None:
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
        error=found.error,
    )


ROUTES = (
    Route(
        method="GET", path=f"{TOPIC}/status", name="get_topic_status", summary="How the partitions of a topic fare",
        handler=get_topic_status, scopes=ANY, answer=PartitionList, tag="status", statuses=(404,),
    ),
    Route(
        method="GET", path="/v1/status", name="get_status", summary="How the broker fares",
        handler=get_status, scopes=(AccessScope.ADMIN,), answer=BrokerStatus, tag="status",
    ),
)  # fmt: skip
"""Of status."""
