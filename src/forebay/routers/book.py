"""The routers in the metadata store: created, altered, paused and deleted there, for all processes.

Each call reads or writes the store in the caller's thread, without a lock. Which process moves the records is no matter
of this module.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from forebay.catalog.entries import decode_entry, read_or_log, readable
from forebay.catalog.transact import Done, Write, transact
from forebay.clock import Clock
from forebay.errors import Conflict, Corrupt, Invalid, Unavailable, UnknownRouter, UnknownTopic, UnsupportedFormat
from forebay.format.metadata.keys import (
    router_key,
    routers_prefix,
    routes_key,
    subscribed_key,
    subscriptions_prefix,
)
from forebay.format.metadata.value import encode_value
from forebay.metadata import Absent, Delete, Entry, MetadataStore, Put, RevisionIs
from forebay.progress import ReservedReader
from forebay.records import EARLIEST, LATEST, Position
from forebay.routers.rules import check_no_cycle
from forebay.routing import (
    READER_PREFIX,
    SOURCES_MAX,
    RouterRule,
    RouterSource,
    RouterSpec,
    check_router_name,
    check_rule,
)
from forebay.storage import Storage, Topic
from forebay.storage.cursors import Reader
from forebay.topics import SubscriptionSpec, TopicName, TopicSpec

logger = logging.getLogger(__name__)

RULES_MAX: Final = 64
RULES_BYTES_MAX: Final = 256 * 1024
"""A router keeps so many rules, of so many bytes in all: one for each alteration since it ran last."""
CREATE_SECONDS: Final = 600
"""A creation that takes longer gives up: see `ORPHAN_SECONDS`."""
ORPHAN_SECONDS: Final = 3600
"""Cursors of a router that no definition names are removed once they were seen twice, so long apart.

Creations are far quicker: those that are under way keep their cursors.
"""
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
        found = readable(self._store.range(routers_prefix(prefix=self._prefix)), RouterSpec)
        return sorted((router for _, router in found), key=lambda router: router.name)

    def get(self, name: str) -> RouterSpec:
        """The router of this name; `UnknownRouter` if there is none."""
        entry = self._store.get(router_key(check_router_name(name), prefix=self._prefix))
        if entry is None:
            raise _unknown(name)
        return decode_entry(entry, RouterSpec)[0]

    def current(self, router: RouterSpec) -> RouterSpec | None:
        """This very router as it is defined now; `None` if it was deleted, also where another one has its name."""
        entry = self._store.get(router_key(router.name, prefix=self._prefix))
        if entry is None:
            return None
        found, _ = decode_entry(entry, RouterSpec)
        return found if found.router_id == router.router_id else None

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
        began = self._clock.monotonic()
        for topic in topics:
            reader = reader_of(router, topic)
            for partition in range(topic.partitions):
                reader.reset(start, partition, note=note_of(router.version, target.partitions))
        self._put_new(router, began)
        return router

    def alter(self, name: str, rule: RouterRule) -> RouterSpec:
        """Give a router another rule: each partition goes by it from the record that is routed next.

        A record that is appended once this has returned is judged by it, or by a later one, in whichever process the
        router runs. Records that were routed before stay as they are.
        """
        check_rule(rule)

        def altered(router: RouterSpec) -> RouterSpec:
            if router.rule == rule:
                return router
            wanted = router.altered(rule, min([router.version, *self._versions_in_use(router)]))
            _check_rules(wanted)
            return wanted

        return self._change(name, altered, "is not altered")

    def pause(self, name: str) -> RouterSpec:
        """Have the router move nothing until it is resumed: no record that is appended once this has returned."""
        return self._change(name, lambda router: msgspec.structs.replace(router, is_paused=True), "is not paused")

    def resume(self, name: str) -> RouterSpec:
        """Have the router go on where it stopped."""
        return self._change(name, lambda router: msgspec.structs.replace(router, is_paused=False), "is not resumed")

    def delete(self, name: str) -> RouterSpec | None:
        """Remove a router, which is returned; `None` if another call has, or if what is stored cannot be read.

        Its cursors stay: see `forget_cursors`.
        """
        key = router_key(check_router_name(name), prefix=self._prefix)

        def removed(entry: Entry | None) -> Write[RouterSpec | None] | Done[RouterSpec | None]:
            if entry is None:
                return Done(None)
            router = read_or_log(entry, RouterSpec)
            return Write([RevisionIs(key, entry.mod_revision)], [Delete(key)], None if router is None else router[0])

        if self._store.get(key) is None:
            raise _unknown(name)
        what = f"router {name} is not deleted"
        return transact(self._store, lambda: self._store.get(key), removed, what=what, clock=self._clock)

    def orphans(self) -> set[ReservedReader]:
        """The readers of routers that no definition names: one was not created to the end, or not deleted to the end.

        Or is being created now. None while a definition cannot be read, for it may be the one of any of them.
        """
        # In this order: the definition is stored after the cursors.
        readers = [name for name in self._log.reserved_readers() if name.startswith(READER_PREFIX)]
        entries = self._store.range(routers_prefix(prefix=self._prefix)) if readers else []
        try:
            named = {decode_entry(entry, RouterSpec)[0].reader for entry in entries}
        except (Corrupt, UnsupportedFormat):
            return set()
        return {ReservedReader(name) for name in readers if name not in named}

    def forget_cursors(self, router: RouterSpec) -> None:
        """Remove what is stored of how far a router has come. For one that no process runs any more."""
        for source in router.sources:
            try:
                topic = self._log.topic(source.topic)
            except UnknownTopic:
                continue
            if topic.spec.topic_id == source.topic_id:
                reader_of(router, topic).forget()

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

    def _put_new(self, router: RouterSpec, began: float) -> None:
        key, routes = router_key(router.name, prefix=self._prefix), routes_key(prefix=self._prefix)
        value = encode_value(router)
        drawn = encode_value(_RouteChange(changed_by=self._clock.random_bytes(_DRAWN_BYTES).hex()))

        subscribed = subscribed_key(prefix=self._prefix)

        def put(found: tuple[Entry | None, Entry | None, Entry | None]) -> Write[None] | Done[None]:
            entry, changed, letters = found
            if entry is not None:
                if entry.value == value:
                    return Done(None)
                self._check_free(router)
            if self._clock.monotonic() - began > CREATE_SECONDS:
                raise Unavailable(
                    f"where router {router.name} begins took more than {CREATE_SECONDS} s to store, and may be cleaned "
                    "away by now: create it again"
                )
            sources = [TopicName.parse(source.topic) for source in router.sources]
            check_no_cycle(self.all(), sources, TopicName.parse(router.destination), self._letters_of)
            seen = [
                Absent(at) if entry is None else RevisionIs(at, entry.mod_revision)
                for at, entry in ((routes, changed), (subscribed, letters))
            ]
            # Commit point: from here on the router exists.
            return Write([Absent(key), *seen], [Put(key, value), Put(routes, drawn)], None)

        def look() -> tuple[Entry | None, Entry | None, Entry | None]:
            # In this order: a router or subscription that is stored after the looks at these two changes one of them.
            changed, letters = self._store.get(routes), self._store.get(subscribed)
            return self._store.get(key), changed, letters

        transact(self._store, look, put, what=f"router {router.name} is not created", clock=self._clock)

    def _letters_of(self, topic: str) -> list[str]:
        """The topics that the subscriptions of a topic send their spent records to."""
        name = TopicName.parse(topic)
        found = readable(
            self._store.range(subscriptions_prefix(name.namespace, name.topic, prefix=self._prefix)), SubscriptionSpec
        )
        return [spec.dead_letter_topic for _, spec in found if spec.dead_letter_topic is not None]

    def _change(self, name: str, change: Callable[[RouterSpec], RouterSpec], what: str) -> RouterSpec:
        key = router_key(check_router_name(name), prefix=self._prefix)

        def changed(entry: Entry | None) -> Write[RouterSpec] | Done[RouterSpec]:
            if entry is None:
                raise _unknown(name)
            router, unknown = decode_entry(entry, RouterSpec)
            wanted = change(router)
            if wanted == router:
                return Done(router)
            put = Put(key, encode_value(wanted, unknown=unknown))
            return Write([RevisionIs(key, entry.mod_revision)], [put], wanted)

        read = self._store.get
        return transact(self._store, lambda: read(key), changed, what=f"router {name} {what}", clock=self._clock)

    def _versions_in_use(self, router: RouterSpec) -> list[int]:
        """The rules by which partitions of the sources may have to be routed again after a crash.

        A mover that begins in a partition without a cursor may be about to note any rule that it has seen.
        """
        found = []
        for source in router.sources:
            try:
                topic = self._log.topic(source.topic)
            except UnknownTopic:
                continue
            if topic.spec.topic_id != source.topic_id:
                # Nothing is routed from a later topic of the name.
                continue
            reader = reader_of(router, topic)
            notes = [reader.note(partition) for partition in range(topic.partitions)]
            found += [parse_note(note)[0] if note else router.rules_before + 1 for note in notes]
        return found


def reader_of(router: RouterSpec, source: Topic) -> Reader:
    """The reader whose cursors say how far a router has come in a source. No caller can move them by their name."""
    return source.reader(ReservedReader(router.reader))


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


def _check_rules(router: RouterSpec) -> None:
    """`Conflict` if a router would keep more rules than it may: it was altered often, and did not run meanwhile."""
    count, size = len(router.rules), len(msgspec.json.encode(router.rules))
    if count > RULES_MAX or size > RULES_BYTES_MAX:
        raise Conflict(
            f"router {router.name} has been altered {count - 1} times since its records were routed last, and keeps "
            f"each rule until then ({RULES_MAX} rules of {RULES_BYTES_MAX} bytes at most): have a process run its "
            "routers, or delete the router and create it again"
        )


class OrphanCursors:
    """Removes cursors that creations and deletions of routers have left when their process was killed. For one thread.

    Each look that is due reads the names of all readers.
    """

    def __init__(self, log: Storage, book: RouterBook, clock: Clock) -> None:
        self._log = log
        self._book = book
        self._clock = clock
        self._seen: set[ReservedReader] = set()
        self._look_at = 0.0

    def look(self) -> None:
        """Remove those that were orphans at the look before, too. Does nothing until that was long enough ago."""
        if self._clock.monotonic() < self._look_at:
            return
        found = self._book.orphans()
        for name in found & self._seen:
            count = self._log.group(name).delete()
            logger.info("%d cursors of a router that was not created, or is deleted, are removed: %s", count, name)
        self._seen = found - self._seen
        self._look_at = self._clock.monotonic() + ORPHAN_SECONDS


def _unknown(name: str) -> UnknownRouter:
    return UnknownRouter(f'there is no router {name!a:.120}: "forebay router list" shows all routers')
