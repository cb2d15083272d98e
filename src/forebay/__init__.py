"""Forebay keeps event streams: a fast local log in front, immutable segments behind, one sequence of offsets.

import forebay

with forebay.open("./data") as log:
    orders = log.create_topic("shop/orders", durability="fsync")
    orders.append(b"paid", key=b"42", tag="eu")
    for record in orders.read(forebay.EARLIEST):
        print(record.offset, record.value)
"""

from __future__ import annotations

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import PurePath

    from forebay.bulk import BackfillPlan, BackfillState, BulkLoad, LoadBatch, LoadPart, LoadSegment, LoadTarget
    from forebay.catalog.entries import UnreadableValue
    from forebay.client import RemoteLog
    from forebay.errors import (
        Closed,
        Conflict,
        Corrupt,
        DataLoss,
        Fenced,
        Forbidden,
        ForebayError,
        Full,
        Indeterminate,
        Invalid,
        Moved,
        NotReady,
        OffsetOutOfRange,
        PartitionOutcomes,
        Throttled,
        TooLarge,
        Unauthenticated,
        Unavailable,
        UnknownConsumer,
        UnknownLoad,
        UnknownRouter,
        UnknownSubscription,
        UnknownTopic,
        Unsupported,
        UnsupportedFormat,
    )
    from forebay.format.metadata.descriptor import AcceptedLoss, ShardState
    from forebay.inspection.calls import PartitionSalvage, repair, salvage, verify
    from forebay.inspection.findings import Finding, Report
    from forebay.inspection.moves import TopicMove, move_topic
    from forebay.inspection.steps import Step
    from forebay.loads.topic import TopicLoads
    from forebay.meter import Durations, Metric, MetricKind, Sample
    from forebay.records import (
        EARLIEST,
        LATEST,
        DeadLetter,
        DeliveredRecord,
        DeliveryState,
        Gap,
        GroupOffset,
        LetterPage,
        LetterPlace,
        OffsetRange,
        Offsets,
        PeekedPage,
        Position,
        Reason,
        Record,
        RecordPage,
        SpentReason,
        SubscriptionLag,
    )
    from forebay.routers import Routers
    from forebay.routing import HeaderMatch, OnRefused, RouterRule, RouterSource, RouterSpec, RouterState, RouterStatus
    from forebay.settings import Settings
    from forebay.shard import RecoveryDecision
    from forebay.shard.history import ExportStatus
    from forebay.storage import (
        Ack,
        BatchAck,
        Consumer,
        Copied,
        DeadLetters,
        FailedShard,
        Group,
        Reader,
        Recovered,
        Retained,
        Storage,
        Stream,
        Subscription,
        Topic,
    )
    from forebay.storage.erasure.answer import CopyPlace, Erasure, Remnant
    from forebay.storage.status import LogStatus, PartitionStatus, TopicStatus
    from forebay.topics import OnOwnerLoss, ShardRef, SubscriptionSpec, TopicName, TopicSpec
    from forebay.workers import WorkerStatus

__version__ = "0.1.0"

__all__ = [
    "AcceptedLoss",
    "Ack",
    "BackfillPlan",
    "BackfillState",
    "BatchAck",
    "BulkLoad",
    "Closed",
    "Conflict",
    "Consumer",
    "Copied",
    "CopyPlace",
    "Corrupt",
    "DataLoss",
    "DeadLetter",
    "DeadLetters",
    "DeliveredRecord",
    "DeliveryState",
    "Durations",
    "EARLIEST",
    "Erasure",
    "ExportStatus",
    "FailedShard",
    "Fenced",
    "Finding",
    "Forbidden",
    "ForebayError",
    "Full",
    "Gap",
    "Group",
    "GroupOffset",
    "HeaderMatch",
    "Indeterminate",
    "Invalid",
    "LATEST",
    "LetterPage",
    "LetterPlace",
    "LoadBatch",
    "LoadPart",
    "LoadSegment",
    "LoadTarget",
    "LogStatus",
    "Metric",
    "MetricKind",
    "Moved",
    "NotReady",
    "OffsetOutOfRange",
    "OffsetRange",
    "Offsets",
    "OnOwnerLoss",
    "OnRefused",
    "PartitionOutcomes",
    "PartitionSalvage",
    "PartitionStatus",
    "PeekedPage",
    "Position",
    "Reader",
    "Reason",
    "Record",
    "RecordPage",
    "Recovered",
    "RecoveryDecision",
    "Remnant",
    "Report",
    "Retained",
    "RouterRule",
    "RouterSource",
    "RouterSpec",
    "RouterState",
    "RouterStatus",
    "Routers",
    "Sample",
    "Settings",
    "ShardRef",
    "ShardState",
    "SpentReason",
    "Step",
    "Storage",
    "Stream",
    "Subscription",
    "SubscriptionLag",
    "SubscriptionSpec",
    "Throttled",
    "TooLarge",
    "Topic",
    "TopicLoads",
    "TopicMove",
    "TopicName",
    "TopicSpec",
    "TopicStatus",
    "Unauthenticated",
    "Unavailable",
    "UnknownConsumer",
    "UnknownLoad",
    "UnknownRouter",
    "UnknownSubscription",
    "UnknownTopic",
    "UnreadableValue",
    "Unsupported",
    "UnsupportedFormat",
    "WorkerStatus",
    "__version__",
    "connect",
    "move_topic",
    "open",
    "repair",
    "salvage",
    "verify",
]

_HOMES = {
    "forebay.bulk": ("BackfillPlan", "BackfillState", "BulkLoad", "LoadBatch", "LoadPart", "LoadSegment", "LoadTarget"),
    "forebay.catalog.entries": ("UnreadableValue",),
    "forebay.format.metadata.descriptor": ("AcceptedLoss", "ShardState"),
    "forebay.inspection.calls": ("PartitionSalvage", "repair", "salvage", "verify"),
    "forebay.inspection.findings": ("Finding", "Report"),
    "forebay.inspection.moves": ("TopicMove", "move_topic"),
    "forebay.inspection.steps": ("Step",),
    "forebay.loads.topic": ("TopicLoads",),
    "forebay.meter": ("Durations", "Metric", "MetricKind", "Sample"),
    "forebay.records": (
        "DeadLetter",
        "DeliveredRecord",
        "DeliveryState",
        "EARLIEST",
        "Gap",
        "GroupOffset",
        "LATEST",
        "LetterPage",
        "LetterPlace",
        "OffsetRange",
        "Offsets",
        "PeekedPage",
        "Position",
        "Reason",
        "Record",
        "RecordPage",
        "SpentReason",
        "SubscriptionLag",
    ),
    "forebay.routers": ("Routers",),
    "forebay.routing": (
        "HeaderMatch",
        "OnRefused",
        "RouterRule",
        "RouterSource",
        "RouterSpec",
        "RouterState",
        "RouterStatus",
    ),
    "forebay.settings": ("Settings",),
    "forebay.shard": ("RecoveryDecision",),
    "forebay.shard.history": ("ExportStatus",),
    "forebay.storage.erasure.answer": ("CopyPlace", "Erasure", "Remnant"),
    "forebay.storage": (
        "Ack",
        "BatchAck",
        "Consumer",
        "Copied",
        "DeadLetters",
        "FailedShard",
        "Group",
        "Reader",
        "Recovered",
        "Retained",
        "Storage",
        "Stream",
        "Subscription",
        "Topic",
    ),
    "forebay.storage.status": ("LogStatus", "PartitionStatus", "TopicStatus"),
    "forebay.topics": ("OnOwnerLoss", "ShardRef", "SubscriptionSpec", "TopicName", "TopicSpec"),
    "forebay.workers": ("WorkerStatus",),
}
"""Where the public names live; those not listed live in `forebay.errors`."""


if not _typing.TYPE_CHECKING:  # else a misspelt name would pass for one that is found here

    def __getattr__(name: str) -> object:
        """Load a room when its first name is asked for: `forebay --version` needs none of them."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = next((room for room, names in _HOMES.items() if name in names), "forebay.errors")
        found: object = getattr(_importlib.import_module(home), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def open(
    path: str | PurePath | None,
    settings: Settings | Mapping[str, object] | None = None,
    *,
    read_only: bool = False,
    may_own: Callable[[ShardRef], bool] | None = None,
) -> Storage:
    """Open the data directory `path`, made if it does not exist, for this process alone; or `:memory:`.

    With `read_only`, open it beside its owner, to read, to follow and to acknowledge; `path` may then be `None`
    if metadata and history are shared. `settings` are a `Settings`, or a mapping such as
    `{"wal": {"sync_interval_ms": 200}}`. `may_own` says which shards this process may acquire, by default every one
    that is free: see `Storage.open`.
    """
    from forebay.settings import Settings  # noqa: PLC0415 - loaded when first used, as __getattr__ says
    from forebay.storage import Storage  # noqa: PLC0415

    if not isinstance(settings, Settings):
        settings = Settings.load(overrides=settings)
    return Storage.open(path, settings, read_only=read_only, may_own=may_own)


def connect(
    url: str, *, token: str | None = None, verify: bool | str | PurePath = True, timeout_s: float = 60.0
) -> RemoteLog:
    """The log of the broker (`forebay serve`) at `url`, over HTTP, with the surface of `forebay.open`.

    `token` may name an environment variable, as `${FOREBAY_TOKEN}`. `verify` is for `https`: the file (PEM) of a
    certificate authority in place of those of the system, or `False` for none. Nothing is sent before the first call.
    A call that gets no answer is repeated for `timeout_s` seconds; an append is stored once all the same. Then it
    raises `Unavailable`, or `Indeterminate` if the broker may have done it.
    """
    from forebay.client import connect as connected  # noqa: PLC0415 - its libraries are an extra: [client]

    return connected(url, token=token, verify=verify, timeout_s=timeout_s)
