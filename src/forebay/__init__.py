"""Forebay keeps event streams: a fast local log in front, immutable segments behind, one sequence of offsets.

import forebay

with forebay.open("./data") as log:
    orders = log.create_topic("shop/orders", durability="fsync")
    orders.append(b"paid", key=b"42", tag="eu")
    for record in orders.read(forebay.EARLIEST):
        print(record.offset, record.value)
"""

from __future__ import annotations

from collections.abc import Mapping

from forebay.errors import (
    Closed,
    Conflict,
    Corrupt,
    DataLoss,
    Fenced,
    ForebayError,
    Indeterminate,
    Invalid,
    Moved,
    Unavailable,
    UnknownTopic,
    Unsupported,
    UnsupportedFormat,
)
from forebay.records import EARLIEST, LATEST, Gap, Offsets, Position, Reason, Record
from forebay.settings import Settings
from forebay.storage import Ack, Storage, Topic

__version__ = "0.1.0"

__all__ = [
    "EARLIEST",
    "LATEST",
    "Ack",
    "Closed",
    "Conflict",
    "Corrupt",
    "DataLoss",
    "Fenced",
    "ForebayError",
    "Gap",
    "Indeterminate",
    "Invalid",
    "Moved",
    "Offsets",
    "Position",
    "Reason",
    "Record",
    "Settings",
    "Storage",
    "Topic",
    "Unavailable",
    "UnknownTopic",
    "Unsupported",
    "UnsupportedFormat",
    "__version__",
    "open",
]


def open(path: str, settings: Settings | Mapping[str, object] | None = None, *, read_only: bool = False) -> Storage:
    """Open the data directory `path`, made if it does not exist, for this process alone; or `:memory:`.

    With `read_only`, open it beside whoever owns it, to read and follow. `settings` are a `Settings`, or a
    mapping such as `{"wal": {"sync_interval_ms": 200}}`.
    """
    if not isinstance(settings, Settings):
        settings = Settings.load(overrides=settings)
    return Storage.open(path, settings, read_only=read_only)
