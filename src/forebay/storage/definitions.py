"""Topic definitions in the metadata store: create, find, list, delete. Each change is one transaction."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Unpack

from forebay.catalog.transact import Done, Write, transact
from forebay.clock import Clock
from forebay.errors import Conflict, Indeterminate, Invalid, UnknownTopic
from forebay.format.metadata.keys import deleted_key, topic_key, topics_prefix
from forebay.format.metadata.value import Unknown, decode_value, encode_value
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


class Defined(NamedTuple):
    """A definition as found, with what is needed to change it."""

    spec: TopicSpec
    unknown: Unknown
    revision: int

    @classmethod
    def of(cls, entry: Entry) -> Defined:
        """As stored."""
        return cls(*decode_value(entry.value, TopicSpec), entry.mod_revision)


class Definitions:
    """What topics there are."""

    def __init__(self, store: MetadataStore, prefix: str, clock: Clock) -> None:
        self._store = store
        self._prefix = prefix
        self._clock = clock

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

    def create(self, spec: TopicSpec, *, exist_ok: bool) -> TopicSpec:
        """Record the definition; the one in force on return. An answer that got lost is asked for again."""
        key = topic_key(spec.namespace, spec.topic, prefix=self._prefix)
        is_new = True

        def read() -> Entry | None:
            nonlocal is_new
            # At first it is taken to be new: most often that saves a read.
            entry = None if is_new else self._store.get(key)
            is_new = False
            return entry

        def change(entry: Entry | None) -> Write[TopicSpec] | Done[TopicSpec]:
            if entry is None:
                # Commit point: from here on the topic exists. Its shards get their state when first opened.
                return Write([Absent(key)], [Put(key, encode_value(spec))], spec)
            found = Defined.of(entry).spec
            if exist_ok or found.topic_id == spec.topic_id:
                return Done(found)
            raise Conflict(
                f"topic {spec.name} exists already: open it with topic(), or pass exist_ok=True", topic=spec.name
            )

        what = f"topic {spec.name} is not created"
        try:
            return transact(self._store, read, change, what=what, clock=self._clock)
        except Indeterminate as error:
            raise Indeterminate(
                f"topic {spec.name} may exist now: {error}; create it again with exist_ok=True"
            ) from error

    def is_registered(self, spec: TopicSpec) -> bool:
        """Whether the topic is still as it was created, whatever a read that lags behind would show."""
        key = topic_key(spec.namespace, spec.topic, prefix=self._prefix)
        return self._store.transaction([ValueIs(key, encode_value(spec))], []).succeeded

    def look(self, name: TopicName) -> Defined:
        """The definition as stored; `UnknownTopic` only if the store says that there is none."""
        entry = self._store.get(topic_key(name.namespace, name.topic, prefix=self._prefix))
        if entry is None:
            raise UnknownTopic(
                f'there is no topic {name}: create it, or see "forebay topic list" for what there is', topic=name
            )
        return Defined.of(entry)

    def get(self, name: TopicName) -> TopicSpec:
        """The definition; see `look`."""
        return self.look(name).spec

    def alter(self, name: TopicName, change: Callable[[TopicSpec], TopicSpec]) -> Defined:
        """Change the definition of a topic by what it is; the definition in force on return.

        `change` is called again where another has altered the topic meanwhile; what it raises comes out.
        """
        key = topic_key(name.namespace, name.topic, prefix=self._prefix)

        def altered(defined: Defined) -> Write[None] | Done[None]:
            spec = change(defined.spec)
            if spec == defined.spec:
                return Done(None)
            # Commit point: from here on every process that looks finds the topic altered.
            put = Put(key, encode_value(spec, unknown=defined.unknown))
            return Write([RevisionIs(key, defined.revision)], [put], None)

        transact(self._store, lambda: self.look(name), altered, what=f"topic {name} is not altered", clock=self._clock)
        return self.look(name)

    def watch(self) -> Watch:
        """Changes to definitions from now on."""
        return self._store.watch(topics_prefix(prefix=self._prefix))

    def changed(self, watch: Watch) -> list[Defined]:
        """The definitions that have changed since the last call."""
        return [Defined.of(change.entry) for change in watch.poll(0) if change.entry is not None]

    def current(self, spec: TopicSpec) -> TopicSpec | None:
        """The definition that this very topic, and not another of its name, has now; `None` if it is gone."""
        try:
            found = self.get(spec.name)
        except UnknownTopic:
            return None
        return found if found.topic_id == spec.topic_id else None

    def is_current(self, spec: TopicSpec) -> bool:
        """Whether this very topic, and not another of its name, still exists."""
        return self.current(spec) is not None

    def all_defined(self) -> list[Defined]:
        """Every definition as stored, by name."""
        return [Defined.of(entry) for entry in self._store.range(topics_prefix(prefix=self._prefix))]

    def all(self) -> list[TopicSpec]:
        """Every definition, by name."""
        return [defined.spec for defined in self.all_defined()]

    def begin_deletion(self, name: TopicName) -> TopicSpec:
        """From here on the topic is unknown; what it leaves is noted, to be removed. Its definition is returned."""
        key = topic_key(name.namespace, name.topic, prefix=self._prefix)
        entry = self._store.get(key)
        if entry is None:
            raise UnknownTopic(f"there is no topic {name}", topic=name)
        spec = decode_value(entry.value, TopicSpec)[0]
        note = Put(deleted_key(spec.topic_id, prefix=self._prefix), entry.value)
        # Commit point: the name is free and the topic gone for everyone; files follow.
        if not self._store.transaction([RevisionIs(key, entry.mod_revision)], [Delete(key), note]).succeeded:
            raise Conflict(
                f"topic {name} was changed at the same time: look at it again before deleting it", topic=name
            )
        return spec

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

        transact(self._store, read, gone, what=f"topic {spec.name} is not taken back", clock=self._clock)
