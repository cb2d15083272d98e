"""The routers in the metadata store: created, altered, paused and deleted there, for all processes.

Each call reads or writes the store in the caller's thread, without a lock. Which process moves the records is no matter
of this module.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from forebay.catalog.transact import Done, Write, transact
from forebay.clock import Clock
from forebay.errors import Conflict, Corrupt, Invalid, UnknownRouter, UnknownTopic, UnsupportedFormat
from forebay.format.metadata.keys import router_key, routers_prefix, routes_key
from forebay.format.metadata.value import decode_value, encode_value
from forebay.metadata import Absent, Delete, Entry, MetadataStore, Put, RevisionIs
from forebay.records import EARLIEST, LATEST, Position
from forebay.routers.rules import check_no_cycle
from forebay.routing import SOURCES_MAX, RouterRule, RouterSource, RouterSpec, check_router_name, check_rule
from forebay.storage import Storage, Topic
from forebay.topics import TopicName, TopicSpec

logger = logging.getLogger(__name__)

_ID_BYTES: Final = 8
_DRAWN_BYTES: Final = 8


class _RouteChange(msgspec.Struct, frozen=True, kw_only=True):
    """What lies at the key that changes with every router."""

    changed_by: str
    """A number drawn for the change."""


class RouterBook:
    """The definitions of routers."""

    def __init__(self, log: Storage, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._prefix = log.settings.metadata.prefix

    @property
    def _store(self) -> MetadataStore:
        return self._log.metadata

    def all(self) -> list[RouterSpec]:
        """Every router, by name; those that cannot be read are logged, and keep no other from being listed."""
        found = []
        for entry in self._store.range(routers_prefix(prefix=self._prefix)):
            try:
                found.append(decode_value(entry.value, RouterSpec)[0])
            except (Corrupt, UnsupportedFormat) as error:
                logger.warning("the router at %s does not run: %s", entry.key, error)
        return sorted(found, key=lambda router: router.name)

    def get(self, name: str) -> RouterSpec:
        """The router of this name; `UnknownRouter` if there is none."""
        entry = self._store.get(router_key(check_router_name(name), prefix=self._prefix))
        if entry is None:
            raise _unknown(name)
        return decode_value(entry.value, RouterSpec)[0]

    def create(
        self,
        name: str,
        sources: Sequence[str | TopicName],
        destination: str | TopicName,
        rule: RouterRule,
        *,
        start: Position = LATEST,
    ) -> RouterSpec:
        """Store a router that begins at `start` in each partition of its sources; `Conflict` if one of its name exists.

        Where it begins is stored before the router is: a router that exists misses nothing from that moment on.
        """
        check_rule(rule)
        if start not in (EARLIEST, LATEST) and start.kind != "time":
            raise Invalid(f"a router starts at earliest, latest or a time, not at {start.kind} {start.value}")
        target = self._log.topic(destination)
        topics = self._sources(sources, target.spec)
        router = RouterSpec(
            name=check_router_name(name),
            router_id=self._clock.random_bytes(_ID_BYTES).hex(),
            sources=tuple(RouterSource(topic=topic.name, topic_id=topic.spec.topic_id) for topic in topics),
            destination=target.name,
            destination_id=target.spec.topic_id,
            rules=(rule,),
            created_at=self._clock.now_ms(),
        )
        self._check_free(router)
        for topic in topics:
            reader = topic.reader(router.reader)
            for partition in range(topic.partitions):
                reader.reset(start, partition, note=note_of(router.version, target.partitions))
        self._put_new(router)
        return router

    def alter(self, name: str, rule: RouterRule) -> RouterSpec:
        """Give a router another rule: each partition goes by it from the record that is routed next.

        Records that were routed before stay as they are.
        """
        check_rule(rule)

        def altered(router: RouterSpec) -> RouterSpec:
            if router.rule == rule:
                return router
            return router.altered(rule, min([router.version, *self._versions_in_use(router)]))

        return self._change(name, altered, "is not altered")

    def pause(self, name: str) -> RouterSpec:
        """Have the router move nothing until it is resumed. Processes that run it obey within a second or two."""
        return self._change(name, lambda router: msgspec.structs.replace(router, is_paused=True), "is not paused")

    def resume(self, name: str) -> RouterSpec:
        """Have the router go on where it stopped."""
        return self._change(name, lambda router: msgspec.structs.replace(router, is_paused=False), "is not resumed")

    def delete(self, name: str) -> RouterSpec | None:
        """Remove a router, which is returned; `None` if another call has. Its cursors stay: see `forget_cursors`."""
        key = router_key(check_router_name(name), prefix=self._prefix)

        def removed(entry: Entry | None) -> Write[RouterSpec | None] | Done[RouterSpec | None]:
            if entry is None:
                return Done(None)
            router, _ = decode_value(entry.value, RouterSpec)
            return Write([RevisionIs(key, entry.mod_revision)], [Delete(key)], router)

        self.get(name)
        what = f"router {name} is not deleted"
        return transact(self._store, lambda: self._store.get(key), removed, what=what, clock=self._clock)

    def forget_cursors(self, router: RouterSpec) -> None:
        """Remove what is stored of how far a router has come. For one that no process runs any more."""
        for source in router.sources:
            try:
                topic = self._log.topic(source.topic)
            except UnknownTopic:
                continue
            if topic.spec.topic_id == source.topic_id:
                topic.reader(router.reader).forget()

    def _sources(self, names: Sequence[str | TopicName], target: TopicSpec) -> list[Topic]:
        if not 1 <= len(names) <= SOURCES_MAX:
            raise Invalid(f"a router has 1 to {SOURCES_MAX} sources, not {len(names)}")
        parsed = [TopicName.parse(name) for name in names]
        if len(set(parsed)) < len(parsed):
            raise Invalid("a router names one of its sources twice: name each topic once")
        check_no_cycle([], parsed, target.name)
        return [self._log.topic(name) for name in parsed]

    def _check_free(self, router: RouterSpec) -> None:
        """`Conflict` if there is such a router already, before anything is stored for the new one."""
        if self._store.get(router_key(router.name, prefix=self._prefix)) is not None:
            raise Conflict(f'router {router.name} exists already: alter it, or delete it first ("forebay router list")')

    def _put_new(self, router: RouterSpec) -> None:
        key, routes = router_key(router.name, prefix=self._prefix), routes_key(prefix=self._prefix)
        value = encode_value(router)
        drawn = encode_value(_RouteChange(changed_by=self._clock.random_bytes(_DRAWN_BYTES).hex()))

        def put(found: tuple[Entry | None, Entry | None]) -> Write[None] | Done[None]:
            entry, changed = found
            if entry is not None:
                if entry.value == value:
                    return Done(None)
                self._check_free(router)
            sources = [TopicName.parse(source.topic) for source in router.sources]
            check_no_cycle(self.all(), sources, TopicName.parse(router.destination))
            seen = Absent(routes) if changed is None else RevisionIs(routes, changed.mod_revision)
            # Commit point: from here on the router exists.
            return Write([Absent(key), seen], [Put(key, value), Put(routes, drawn)], None)

        def look() -> tuple[Entry | None, Entry | None]:
            # In this order: a router that is stored after the look at `routes` changes `routes`.
            changed = self._store.get(routes)
            return self._store.get(key), changed

        transact(self._store, look, put, what=f"router {router.name} is not created", clock=self._clock)

    def _change(self, name: str, change: Callable[[RouterSpec], RouterSpec], what: str) -> RouterSpec:
        key = router_key(check_router_name(name), prefix=self._prefix)

        def changed(entry: Entry | None) -> Write[RouterSpec] | Done[RouterSpec]:
            if entry is None:
                raise _unknown(name)
            router, unknown = decode_value(entry.value, RouterSpec)
            wanted = change(router)
            if wanted == router:
                return Done(router)
            put = Put(key, encode_value(wanted, unknown=unknown))
            return Write([RevisionIs(key, entry.mod_revision)], [put], wanted)

        read = self._store.get
        return transact(self._store, lambda: read(key), changed, what=f"router {name} {what}", clock=self._clock)

    def _versions_in_use(self, router: RouterSpec) -> list[int]:
        """The rules by which partitions of the sources may have to be routed again after a crash."""
        found = []
        for source in router.sources:
            try:
                topic = self._log.topic(source.topic)
            except UnknownTopic:
                continue
            reader = topic.reader(router.reader)
            notes = [reader.note(partition) for partition in range(topic.partitions)]
            found += [parse_note(note)[0] for note in notes if note]
        return found


def note_of(version: int, partitions: int) -> str:
    """What is noted beside a cursor: by which rule, and for how many partitions, records from there on are routed."""
    return f"{version} {partitions}"


def parse_note(note: str) -> tuple[int, int]:
    """The version of the rule and the number of partitions that a note says."""
    try:
        version, partitions = map(int, note.split())
    except ValueError as error:
        raise Corrupt(
            f"the note of a router's cursor is {note!a:.80}: delete the router and create it again"
        ) from error
    return version, partitions


def _unknown(name: str) -> UnknownRouter:
    return UnknownRouter(f'there is no router {name!a:.120}: "forebay router list" shows all routers')
