"""What Forebay stores by key in the metadata store: every kind of key with what its value is, in one table.

The lists of the log pass over a value that cannot be read (`forebay.catalog.entries`). Here all of them are found, by
the tools that look at a data directory and by a server that says how it fares. A new kind of key needs a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import msgspec

from forebay.bulk import BackfillPlan
from forebay.catalog.entries import UnreadableValue, read_or_log, refused
from forebay.cleanup.deleted_topics import LateObjects
from forebay.cleanup.tables import ListedObjects
from forebay.format.metadata.descriptor import Cur, SegmentDescriptor, ShardState
from forebay.format.metadata.keys import all_subscriptions_prefix, routers_prefix, tokens_prefix
from forebay.format.metadata.vectors import DeletionVector
from forebay.loads.book import AttachedPart, SinkState
from forebay.loads.prepare import Load
from forebay.metadata import Entry, MetadataStore
from forebay.progress import Progress
from forebay.routing import RouterSpec
from forebay.service.tokens import AccessToken
from forebay.shard.directories import DirectoryPlace
from forebay.subscriptions.definitions import LetterSecret
from forebay.topics import SubscriptionSpec, TopicSpec

PAGE_KEYS: Final = 500


class StoredKind(NamedTuple):
    """One kind of key: what it is called, which keys are of it, and what their values are."""

    name: str
    pattern: re.Pattern[str]
    """Of the key without the prefix of the settings."""
    holds: type[msgspec.Struct] | None
    """`None` where no call reads what the value says: that the key is there, or by whom, is all it says."""


def _kind(name: str, pattern: str, holds: type[msgspec.Struct] | None) -> StoredKind:
    return StoredKind(name, re.compile(pattern.replace("*", "[^/]+").replace("#", "[0-9]+")), holds)


STORED_KINDS: Final = (
    _kind("topic", "/topics/*/*", TopicSpec),
    _kind("deletion of a topic", "/deleted/*", TopicSpec),
    _kind("late objects of a deleted topic", "/late/*", LateObjects),
    _kind("state of a shard", "/storage/topics/*/*/#/state", ShardState),
    _kind("segment of a shard", "/storage/topics/*/*/#/segments/#", SegmentDescriptor),
    _kind("end of the history of a shard", "/storage/topics/*/*/#/segments/cur", Cur),
    _kind("deleted offsets of a shard", "/storage/topics/*/*/#/deletes/#", DeletionVector),
    _kind("place of a reader", "/progress/*/*/*/#", Progress),
    _kind("subscription", "/subscriptions/*/*/*", SubscriptionSpec),
    _kind("change of subscriptions", "/subscribed", None),
    _kind("secret of dead letters", "/letters", LetterSecret),
    _kind("router", "/routers/*", RouterSpec),
    _kind("change of routers", "/routes", None),
    _kind("token", "/tokens/*", AccessToken),
    _kind("load", "/loads/*", Load),
    _kind("offer of a load", "/offers/*/load", None),
    _kind("part of a load", "/offers/*/#", AttachedPart),
    _kind("batch of a streaming query", "/sinks/*/*/*", SinkState),
    _kind("backfill", "/backfills/*/*", BackfillPlan),
    _kind("objects of tables", "/tables/*/*", ListedObjects),
    _kind("data directory", "/directories/*", DirectoryPlace),
    _kind("lease of a compaction", "/compactors/*/*/#", None),
    _kind("lease of a registration", "/registrars/*/*", None),
    _kind("lease of a lake", "/lakes/*/*", None),
    # Of a store in etcd alone: the others keep their sessions elsewhere.
    _kind("session", "/sessions/*", None),
)
"""Every kind of key there is; no key is of two kinds."""


def kind_of(key: str, *, prefix: str) -> StoredKind | None:
    """What is stored at a key; `None` if Forebay stores nothing there."""
    rest = key.removeprefix(prefix)
    return next((kind for kind in STORED_KINDS if kind.pattern.fullmatch(rest)), None)


def unreadable_in(entries: Iterable[Entry], *, prefix: str) -> Iterator[UnreadableValue]:
    """Those of the entries, of any kinds, whose values cannot be read. Keys that are of no kind are passed over."""
    for entry in entries:
        kind = kind_of(entry.key, prefix=prefix)
        error = None if kind is None or kind.holds is None else refused(entry, kind.holds)
        if error is not None:
            yield UnreadableValue(entry.key, error)


def look_at_definitions(store: MetadataStore, *, prefix: str) -> None:
    """Read every subscription, router and token once, so that those that cannot be read are noted and logged.

    Waits for the metadata store, and reads it page by page. All topics are read by what opens their shards.
    """
    for below in (all_subscriptions_prefix(prefix=prefix), routers_prefix(prefix=prefix), tokens_prefix(prefix=prefix)):
        after: str | None = None
        while page := store.range(below, start_after=after, limit=PAGE_KEYS):
            for entry in page:
                kind = kind_of(entry.key, prefix=prefix)
                if kind is not None and kind.holds is not None:
                    read_or_log(entry, kind.holds)
            after = page[-1].key
