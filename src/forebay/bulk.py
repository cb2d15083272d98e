"""Bulk loads as their users see them: what was staged, what was offered, and what came of it.

Values alone. Embedded logs, clients of a broker and the messages between them share these.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MOST = 2**63 - 1

Count = Annotated[int, Meta(ge=1, le=MOST)]
Moment = Annotated[int, Meta(ge=-MOST - 1, le=MOST)]


class SharedStore(msgspec.Struct, frozen=True, kw_only=True):
    """Where the store of history lies, for processes that reach it themselves: without anything secret."""

    name: str
    """What descriptors call it."""
    mode: Literal["shared_fs", "object_store"]
    backend: str
    root: str
    options: dict[str, str] = {}
    """How to find the service: its endpoint, its region. Credentials are each process's own."""


class LoadTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Where the segments of a load have to lie, and what the topic is like that they are for."""

    topic_id: str
    partitions: int
    generation: int
    """Counts the changes of the number of partitions: keys belong elsewhere after each."""
    compression: str
    store: str
    """What descriptors call the store."""
    shared: bool
    """Whether other machines reach the store. If not, only the process that has the topic puts segments there."""
    prefixes: tuple[str, ...]
    """Of each partition: the keys of its segments begin so, and have no further slash."""
    place: SharedStore | None = None
    """Where the store is, if others reach it."""


class LoadSegment(msgspec.Struct, frozen=True, kw_only=True):
    """One finished segment of a load in the store, and the partition that it is for."""

    partition: Annotated[int, Meta(ge=0, le=MOST)]
    object_key: str
    records: Count
    bytes: Count
    index_bytes: Count
    time_min: Moment
    time_max: Moment
    appended_max: Moment
    content_hash: str
    etag: str | None = None
    sparse: tuple[tuple[int, int], ...] = ()
    """Places to start reading: so many records behind its start, and the byte."""


class LoadBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Which batch of a streaming query a load brings. Of each batch one load is committed, however often it runs."""

    query_id: Annotated[str, Meta(pattern="^[0-9A-Za-z._-]{1,100}$")]
    batch_id: Annotated[int, Meta(ge=0, le=MOST)]


class BackfillPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a backfill brings. Its id stands for that for ever, so that a repeat adds nothing."""

    fingerprint: Annotated[str, Meta(max_length=200)]
    """Of the rows, another one if they are others; empty if that is not known."""
    loads: Annotated[int, Meta(ge=0, le=MOST)]
    """In how many loads they come."""


class BackfillState(msgspec.Struct, frozen=True, kw_only=True):
    """How far a backfill has come in a topic."""

    query_id: str
    """Its loads are offered as batches of this query, numbered from 0."""
    done: int
    """So many of its loads the topic has."""
    plan: BackfillPlan | None = None
    """What it brings; `null` before it began."""


class LoadPart(msgspec.Struct, frozen=True, kw_only=True):
    """What a load brings for one partition: offsets `[start, start + records)` once it is attached there."""

    partition: int
    records: int
    start: int | None = None


class BulkLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How far a load has come. Committed and abandoned are final."""

    load_id: str
    topic: str
    status: Literal["offered", "committed", "abandoned"]
    parts: tuple[LoadPart, ...]
    created_at: int
    """In milliseconds since 1970."""
    expires_at: int | None = None
    """If it is not attached everywhere by then, it is given up."""
    batch: LoadBatch | None = None
    waiting: dict[int, str] = {}
    """After an attempt to attach it: the partitions that wait for an owner elsewhere, and why."""

    @property
    def is_over(self) -> bool:
        """Whether nothing changes any more."""
        return self.status != "offered"
