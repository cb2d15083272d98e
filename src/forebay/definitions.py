"""Topic definitions in the metadata store: create, find, list, delete. Each change is one transaction.

A process remembers the definitions that it uses, while it follows the changes that others make: then finding a topic
reads nothing. What it remembers is at most `STALE_SECONDS` old as far as the metadata store's watch sees.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Unpack

import msgspec

from forebay.catalog.entries import decode_entry, read_or_log
from forebay.catalog.shard import decode_state
from forebay.catalog.transact import Done, Write, transact
from forebay.clock import Clock
from forebay.errors import Conflict, Corrupt, Indeterminate, Invalid, UnknownTopic, UnsupportedFormat
from forebay.format.metadata.keys import deleted_key, shards_prefix, topic_key, topics_prefix
from forebay.format.metadata.value import Unknown, encode_value
from forebay.locks import Rank, RankedLock
from forebay.metadata import (
    Absent,
    Delete,
    Entry,
    MetadataStore,
    Put,
    RevisionIs,
    ValueIs,
    Watch,
)
from forebay.topics import TopicLimits, TopicName, TopicSpec

FOLLOW_SECONDS: Final = 0.25
"""How often a process asks the watch for changes that others have made."""
STALE_SECONDS: Final = 1.0
"""What is remembered counts for so long after the last answer of the watch; then the store is read."""
REMEMBERED_MAX: Final = 100_000
"""Definitions that a process remembers."""


class Defined(NamedTuple):
    """A definition as found, with what is needed to change it."""

    spec: TopicSpec
    unknown: Unknown
    revision: int

    @classmethod
    def of(cls, entry: Entry) -> Defined:
        """As stored."""
        return cls(*decode_entry(entry, TopicSpec), entry.mod_revision)


class Registered(NamedTuple):
    """A definition that is recorded, and whether this very call has made it."""

    spec: TopicSpec
    is_new: bool


class FoundDefinitions(NamedTuple):
    """All that there is, for a caller who uses all of it."""

    specs: list[TopicSpec]
    unreadable: dict[TopicName, Corrupt | UnsupportedFormat]
    """Topics whose definitions cannot be read, each with the reason."""


class DefinitionChanges(NamedTuple):
    """What others, and this process, have done to definitions since the last look."""

    defined: dict[TopicName, Defined]
    """Created or altered, and still there."""
    deleted: set[TopicName]
    """Names of which a topic was deleted. There may be another of that name since."""


class _Remembered:
    """The definitions that this process uses, by name. Safe for concurrent use; no lock is held over a read."""

    def __init__(self) -> None:
        self._lock = RankedLock(Rank.LEAF, "definitions")
        self._by_name: dict[TopicName, Defined] = {}
        self.generation = 0
        """Rises with every change: what was read before the last one is not remembered."""

    def get(self, name: TopicName) -> Defined | None:
        return self._by_name.get(name)

    def put(self, found: Iterable[Defined], generation: int) -> None:
        """Remember what was read while this was the generation; the oldest go if there are too many."""
        with self._lock:
            if generation == self.generation:
                self._by_name.update((defined.spec.name, defined) for defined in found)
                while len(self._by_name) > REMEMBERED_MAX:
                    del self._by_name[next(iter(self._by_name))]

    def change(self, name: TopicName, revision: int, defined: Defined | None) -> None:
        """A definition was changed, or deleted, by this revision."""
        with self._lock:
            self.generation += 1
            known = self._by_name.get(name)
            if known is None or known.revision >= revision:
                return
            if defined is not None:
                self._by_name[name] = defined
            else:
                del self._by_name[name]

    def forget(self, name: TopicName) -> None:
        """This process has changed it: read it before it is used again."""
        with self._lock:
            self.generation += 1
            self._by_name.pop(name, None)

    def clear(self) -> None:
        with self._lock:
            self.generation += 1
            self._by_name.clear()


class Definitions:
    """What topics there are. Safe for concurrent use."""

    def __init__(self, store: MetadataStore, prefix: str, clock: Clock, *, is_alone: bool = False) -> None:
        """`is_alone`: no other process can change the store, so what is remembered is never outdated."""
        self._store = store
        self._prefix = prefix
        self._clock = clock
        self._remembered = _Remembered()
        self._followed_at = float("inf" if is_alone else "-inf")
        """Every change before this moment has been taken into account."""

    def new_spec(
        self,
        name: TopicName,
        *,
        partitions: int,
        durability: str | None,
        engine: str | None,
        compression: str,
        **limits: Unpack[TopicLimits],
    ) -> TopicSpec:
        """The checked definition of a topic to be created, with an id of its own."""
        unknown = sorted(limits.keys() - TopicLimits.__annotations__.keys())
        if unknown:
            raise Invalid(f"{unknown[0]} is no limit of a topic; what is: {', '.join(TopicLimits.__annotations__)}")
        return TopicSpec.create(
            name,
            topic_id=self._clock.random_bytes(16).hex(),
            created_at=self._clock.now_ms(),
            partitions=partitions,
            durability=durability,
            engine=engine,
            compression=compression,
            **limits,
        )

    def create(self, spec: TopicSpec, *, exist_ok: bool) -> Registered:
        """Record the definition; the one in force on return. An answer that got lost is asked for again.

        Each attempt creates a topic of another id. One whose answer was lost may have landed, and the topic may have
        been deleted since: the deletion of an id would remove what a later topic of that id writes.
        """
        key = topic_key(spec.namespace, spec.topic, prefix=self._prefix)
        tried: list[str] = []

        def read() -> Entry | None:
            # At first it is taken to be new: most often that saves a read.
            return self._store.get(key) if tried else None

        def change(entry: Entry | None) -> Write[Registered] | Done[Registered]:
            if entry is None:
                topic_id = self._clock.random_bytes(16).hex() if tried else spec.topic_id
                tried.append(topic_id)
                wanted = msgspec.structs.replace(spec, topic_id=topic_id)
                # Commit point: from here on the topic exists. Its shards get their state when first opened.
                return Write([Absent(key)], [Put(key, encode_value(wanted))], Registered(wanted, is_new=True))
            found = Defined.of(entry).spec
            if exist_ok or found.topic_id in tried:
                return Done(Registered(found, is_new=found.topic_id in tried))
            raise Conflict(f"topic {spec.name} exists already: open it, or create it with exist_ok", topic=spec.name)

        what = f"topic {spec.name} is not created"
        try:
            return transact(self._store, read, change, what=what, clock=self._clock)
        except Indeterminate as error:
            raise Indeterminate(f"topic {spec.name} may exist now: {error}; create it again with exist_ok") from error
        finally:
            self._remembered.forget(spec.name)

    def is_registered(self, spec: TopicSpec) -> bool:
        """Whether the topic is still as it was created, whatever a read that lags behind would show."""
        key = topic_key(spec.namespace, spec.topic, prefix=self._prefix)
        return self._store.transaction([ValueIs(key, encode_value(spec))], []).succeeded

    def look(self, name: TopicName) -> Defined:
        """The definition as stored; `UnknownTopic` only if the store says that there is none, or not the one meant."""
        entry = self._store.get(topic_key(name.namespace, name.topic, prefix=self._prefix))
        if entry is None:
            raise UnknownTopic(
                f'there is no topic {name}: create it, or see "forebay topic list" for what there is', topic=name
            )
        found = Defined.of(entry)
        _check_meant(name, found.spec)
        return found

    def get(self, name: TopicName) -> TopicSpec:
        """The definition; see `look`."""
        return self.look(name).spec

    def find(self, name: TopicName) -> Defined:
        """The definition, without a read if this process remembers it and follows the changes of others; see `look`.

        Where it does not follow them, because no watch is open or the store does not answer it, the store is read.
        """
        found = self._remembered.get(name)
        is_it = found is not None and self._is_followed and name.means(found.spec.topic_id)
        return found if found is not None and is_it else self._read(name)

    def known(self, name: TopicName) -> TopicSpec | None:
        """The definition if this process remembers it and follows the changes of others; reads nothing.

        `None`, too, if what is remembered is not the topic that the name means.
        """
        found = self._remembered.get(name)
        if found is None or not self._is_followed or not name.means(found.spec.topic_id):
            return None
        return found.spec

    @property
    def _is_followed(self) -> bool:
        """Whether what is remembered counts."""
        return self._clock.monotonic() - self._followed_at <= STALE_SECONDS

    def _read(self, name: TopicName) -> Defined:
        """The definition as stored, which is remembered from now on if changes are followed; see `look`."""
        is_followed, generation = self._is_followed, self._remembered.generation
        found = self.look(name)
        if is_followed:
            self._remembered.put([found], generation)
        return found

    def alter(
        self,
        name: TopicName,
        change: Callable[[TopicSpec], TopicSpec],
        guards: Callable[[TopicSpec, TopicSpec], Sequence[RevisionIs]] = lambda old, new: (),
    ) -> Defined:
        """Change the definition of a topic by what it is; the definition in force on return.

        `change` is called again where another has altered the topic meanwhile; what it raises comes out. `guards` gives
        what must still hold for a change from one definition to another.
        """
        key = topic_key(name.namespace, name.topic, prefix=self._prefix)

        def altered(defined: Defined) -> Write[None] | Done[None]:
            spec = change(defined.spec)
            if spec == defined.spec:
                return Done(None)
            # Commit point: from here on every process that looks finds the topic altered.
            put = Put(key, encode_value(spec, unknown=defined.unknown))
            return Write([RevisionIs(key, defined.revision), *guards(defined.spec, spec)], [put], None)

        what = f"topic {name} is not altered"
        try:
            transact(self._store, lambda: self.look(name), altered, what=what, clock=self._clock)
        finally:
            self._remembered.forget(name)
        return self.look(name)

    def watch(self) -> Watch:
        """Begin to follow changes: from now on, `follow` gives those that come."""
        watch = self._store.watch(topics_prefix(prefix=self._prefix))
        # After it has begun: of what is read from here on, the watch sees every change.
        self.unfollow()
        return watch

    def follow(self, watch: Watch) -> DefinitionChanges:
        """Take the changes since the last call into account; what they were. By one thread at a time."""
        began = self._clock.monotonic()
        changes = DefinitionChanges({}, set())
        for change in watch.poll(0):
            defined = _readable(change.entry) if change.entry is not None else None
            name = TopicName.parse(change.key.removeprefix(topics_prefix(prefix=self._prefix)))
            if change.entry is not None and defined is None:
                self._remembered.forget(name)
                continue
            self._remembered.change(name, change.revision, defined)
            if defined is not None:
                changes.defined[name] = defined
            else:
                changes.defined.pop(name, None)
                changes.deleted.add(name)
        self._followed_at = max(self._followed_at, began)
        return changes

    def unfollow(self) -> None:
        """The watch is over: what is remembered does not count any more."""
        if self._followed_at != float("inf"):
            self._followed_at = float("-inf")
            self._remembered.clear()

    def current(self, spec: TopicSpec) -> TopicSpec | None:
        """The definition that this very topic, and not another of its name, has now; `None` if it is gone.

        Reads the store, and remembers what it finds.
        """
        try:
            found = self._read(spec.name).spec
        except UnknownTopic:
            return None
        return found if found.topic_id == spec.topic_id else None

    def is_current(self, spec: TopicSpec) -> bool:
        """Whether this very topic, and not another of its name, still exists."""
        return self.current(spec) is not None

    def gone(self, specs: Sequence[TopicSpec]) -> list[TopicSpec]:
        """Which of these topics, all of one name, are no more: deleted, perhaps with another of their name since.

        Reads the store. While a definition of that name cannot be read, none counts as gone.
        """
        entry = self._store.get(topic_key(specs[0].namespace, specs[0].topic, prefix=self._prefix))
        if entry is None:
            return list(specs)
        now = _readable(entry)
        return [spec for spec in specs if now is not None and spec.topic_id != now.spec.topic_id]

    def all_defined(self) -> list[Defined]:
        """Every definition as stored, by name, but for those that cannot be read, which are logged."""
        entries = self._store.range(topics_prefix(prefix=self._prefix))
        return [defined for entry in entries if (defined := _readable(entry)) is not None]

    def every(self) -> list[TopicSpec]:
        """Every definition, by name, for a caller that removes what no topic has.

        `Corrupt` or `UnsupportedFormat` while one cannot be read: what it has would look as if no topic had it.
        """
        return [Defined.of(entry).spec for entry in self._store.range(topics_prefix(prefix=self._prefix))]

    def all_to_use(self) -> FoundDefinitions:
        """Every definition, by name, for a caller that will use all of them: remembered as by `find`.

        One that cannot be read keeps no other from being used.
        """
        is_followed, generation = self._is_followed, self._remembered.generation
        below = topics_prefix(prefix=self._prefix)
        found, unreadable = list[Defined](), dict[TopicName, Corrupt | UnsupportedFormat]()
        for entry in self._store.range(below):
            try:
                found.append(Defined.of(entry))
            except (Corrupt, UnsupportedFormat) as error:
                unreadable[TopicName.parse(entry.key.removeprefix(below))] = error
        if is_followed:
            self._remembered.put(found, generation)
        return FoundDefinitions([defined.spec for defined in found], unreadable)

    def all(self, prefix: str = "", *, after: TopicName | None = None, limit: int | None = None) -> list[TopicSpec]:
        """The definitions, by name: of names that start with `prefix` and come after `after`, at most `limit`.

        Those that cannot be read are logged and left out; fewer than `limit` are the last ones all the same.
        """
        below = f"{topics_prefix(prefix=self._prefix)}{prefix}"
        behind = None if after is None else topic_key(after.namespace, after.topic, prefix=self._prefix)
        found: list[TopicSpec] = []
        while True:
            left = None if limit is None else limit - len(found)
            page = self._store.range(below, start_after=behind, limit=left)
            found += [defined.spec for entry in page if (defined := _readable(entry)) is not None]
            if left is None or len(page) < left or len(found) == limit:
                return found
            behind = page[-1].key

    def begin_deletion(self, name: TopicName) -> list[TopicSpec]:
        """From here on the topic is unknown; what it leaves is noted, to be removed. Its definition is returned.

        Of a definition that cannot be read the states of the shards say which topics may have left something: one each.
        """
        key = topic_key(name.namespace, name.topic, prefix=self._prefix)
        entry = self._store.get(key)
        if entry is None:
            raise UnknownTopic(f"there is no topic {name}", topic=name)
        known = _readable(entry)
        if known is not None:
            _check_meant(name, known.spec)
            specs = [known.spec]
            notes = [Put(deleted_key(known.spec.topic_id, prefix=self._prefix), entry.value)]
        else:
            specs = self._by_states(name)
            notes = [Put(deleted_key(spec.topic_id, prefix=self._prefix), encode_value(spec)) for spec in specs]
        try:
            # Commit point: the name is free and the topic gone for everyone; files follow.
            outcome = self._store.transaction([RevisionIs(key, entry.mod_revision)], [Delete(key), *notes])
        finally:
            self._remembered.forget(name)
        if not outcome.succeeded:
            raise Conflict(
                f"topic {name} was changed at the same time: look at it again before deleting it", topic=name
            )
        return specs

    def _by_states(self, name: TopicName) -> list[TopicSpec]:
        """The topics, on engine `segment`, that the states of shards below this name are of."""
        partitions: dict[str, int] = {}
        for entry in self._store.range(shards_prefix(name.namespace, name.topic, prefix=self._prefix)):
            partition, _, what = entry.key.rpartition("/")
            if what == "state":
                with contextlib.suppress(Corrupt, UnsupportedFormat):
                    topic_id = decode_state(entry).state.incarnation
                    number = int(partition.rpartition("/")[2])
                    partitions[topic_id] = max(partitions.get(topic_id, 0), number + 1)
        return [
            TopicSpec.create(name, topic_id=topic_id, created_at=self._clock.now_ms(), partitions=count)
            for topic_id, count in partitions.items()
        ]

    def withdraw(self, spec: TopicSpec) -> None:
        """On return this very topic is unknown; what it may have left is noted, to be removed. Fine if it is gone."""
        key = topic_key(spec.namespace, spec.topic, prefix=self._prefix)

        value: bytes | None = encode_value(spec)
        is_known = True

        def read() -> bytes | None:
            nonlocal value, is_known
            # At first it is taken to be as it was created: a read that lags behind may not show it yet.
            if not is_known:
                entry = self._store.get(key)
                is_ours = entry is not None and Defined.of(entry).spec.topic_id == spec.topic_id
                value = entry.value if entry is not None and is_ours else None
            is_known = False
            return value

        def gone(value: bytes | None) -> Write[None] | Done[None]:
            if value is None:
                return Done(None)
            note = Put(deleted_key(spec.topic_id, prefix=self._prefix), value)
            return Write([ValueIs(key, value)], [Delete(key), note], None)

        try:
            transact(self._store, read, gone, what=f"topic {spec.name} is not taken back", clock=self._clock)
        finally:
            self._remembered.forget(spec.name)


def _check_meant(name: TopicName, spec: TopicSpec) -> None:
    if not name.means(spec.topic_id):
        raise UnknownTopic(
            f"topic {name} was deleted, and there is another of its name: this handle has ended; ask for it again",
            topic=name,
        )


def _readable(entry: Entry) -> Defined | None:
    """The definition; `None` if it cannot be read, which is logged: it keeps no other topic from being used."""
    found = read_or_log(entry, TopicSpec)
    return None if found is None else Defined(*found, entry.mod_revision)
