"""Topic definitions in the metadata store: create, find, list, delete. Each change is one transaction."""

from __future__ import annotations

from forebay.clock import Clock
from forebay.errors import Conflict, UnknownTopic
from forebay.format.keys import deleted_key, topic_key, topics_prefix
from forebay.format.value import decode_value, encode_value
from forebay.metadata import Absent, Delete, DeleteRange, Exists, MetadataStore, Put, RevisionIs
from forebay.shard import ShardRef
from forebay.topics import TopicName, TopicSpec


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
    ) -> TopicSpec:
        """The checked definition of a topic to be created, with an id of its own."""
        return TopicSpec.create(
            name,
            topic_id=self._clock.random_bytes(16).hex(),
            created_at=self._clock.now_ms(),
            partitions=partitions,
            durability=durability,
            engine=engine,
            compression=compression,
        )

    def create(self, spec: TopicSpec, *, exist_ok: bool) -> TopicSpec:
        """Record the definition; the one in force on return."""
        key = topic_key(spec.namespace, spec.topic, prefix=self._prefix)
        # Commit point: from here on the topic exists. Its shards get their state when first opened.
        if self._store.transaction([Absent(key)], [Put(key, encode_value(spec))]).succeeded:
            return spec
        if exist_ok:
            return self.get(spec.name)
        raise Conflict(f"topic {spec.name} exists already: open it with topic(), or pass exist_ok=True")

    def get(self, name: TopicName) -> TopicSpec:
        """The definition; `UnknownTopic` only if the store says that there is none."""
        entry = self._store.get(topic_key(name.namespace, name.topic, prefix=self._prefix))
        if entry is None:
            raise UnknownTopic(f'there is no topic {name}: create it, or see "forebay topic list" for what there is')
        return decode_value(entry.value, TopicSpec)[0]

    def is_current(self, spec: TopicSpec) -> bool:
        """Whether this very topic, and not another of its name, still exists."""
        try:
            return self.get(spec.name).topic_id == spec.topic_id
        except UnknownTopic:
            return False

    def all(self) -> list[TopicSpec]:
        """Every definition, by name."""
        return [
            decode_value(entry.value, TopicSpec)[0] for entry in self._store.range(topics_prefix(prefix=self._prefix))
        ]

    def begin_deletion(self, name: TopicName) -> None:
        """From here on the topic is unknown; what it leaves is noted, to be removed."""
        key = topic_key(name.namespace, name.topic, prefix=self._prefix)
        entry = self._store.get(key)
        if entry is None:
            raise UnknownTopic(f"there is no topic {name}")
        spec = decode_value(entry.value, TopicSpec)[0]
        note = Put(deleted_key(spec.topic_id, prefix=self._prefix), entry.value)
        # Commit point: the name is free and the topic gone for everyone; files follow.
        if not self._store.transaction([RevisionIs(key, entry.mod_revision)], [Delete(key), note]).succeeded:
            raise Conflict(f"topic {name} was changed at the same time: look at it again before deleting it")

    def deleting(self) -> list[TopicSpec]:
        """Topics whose deletion has begun and not ended."""
        entries = self._store.range(f"{self._prefix}/deleted/")
        return [decode_value(entry.value, TopicSpec)[0] for entry in entries]

    def end_deletion(self, spec: TopicSpec) -> None:
        """Everything of the topic is gone: forget its shards' states, and that it was being deleted."""
        note = deleted_key(spec.topic_id, prefix=self._prefix)
        states = f"{self._prefix}/storage/topics/{spec.namespace}/{spec.topic}/"
        # Only while the note stands: once it is gone, the states below that name may be those of a new topic.
        self._store.transaction([Exists(note)], [DeleteRange(states), Delete(note)])


def refs_of(spec: TopicSpec) -> list[ShardRef]:
    """The shards of a topic."""
    return [ShardRef(spec, partition) for partition in range(spec.partitions)]
