"""A data directory as an inspector sees it: its topics, the recorded states, and the shard directories found."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from forebay.catalog.entries import UnreadableValue
from forebay.clock import Clock
from forebay.directory import CLAIM, CLAIMING, LOCK, LogDirectory, NoDirectory, is_owned
from forebay.disk import Disk
from forebay.format.metadata.descriptor import ShardState
from forebay.format.metadata.keys import deleted_key, directory_key, late_key, state_key, topics_prefix
from forebay.format.metadata.value import decode_value
from forebay.metadata import Entry, MetadataStore
from forebay.metadata.open_store import open_metadata
from forebay.service.stored import unreadable_in
from forebay.settings import Settings
from forebay.shard.directories import named_directory
from forebay.topics import Engine, TopicSpec, shard_id


class ExpectedShard(NamedTuple):
    """A shard that should be there: whose it is and where its files lie. `partition` is -1 if of no topic."""

    id: str
    name: str
    directory: str
    spec: TopicSpec | None
    partition: int


@dataclass(slots=True)
class Inspected:
    """What the metadata store says, read once."""

    path: str
    shards: str
    id: str
    owned: bool
    shared: bool
    topics: list[TopicSpec]
    deleting: list[TopicSpec]
    leaving: set[str]
    """The ids of topics that were deleted, and of which there may still be files."""
    entries: list[Entry]
    """Everything, by key."""
    bad: list[UnreadableValue]
    """The values of every kind that cannot be read, by key."""
    prefix: str

    def state(self, spec: TopicSpec, partition: int) -> ShardState | None:
        """The recorded state of a shard; `None` if there is none that can be used."""
        key = state_key(spec.namespace, spec.topic, partition, prefix=self.prefix)
        entry = self.entry(key)
        if entry is None or any(bad.key == key for bad in self.bad):
            return None
        return decode_value(entry.value, ShardState)[0]

    def states(self, spec: TopicSpec) -> list[ShardState | None]:
        """The recorded state of each partition; `None` for one that was never used."""
        return [self.state(spec, partition) for partition in range(spec.partitions)]

    def entry(self, key: str) -> Entry | None:
        """What is stored with this key."""
        return next((entry for entry in self.below(key) if entry.key == key), None)

    def directory_name(self, directory_id: str | None) -> str:
        """A data directory as messages name it: by its path, if it is recorded, and its id."""
        return named_directory(directory_id, self.entry(directory_key(directory_id or "", prefix=self.prefix)))

    def below(self, prefix: str) -> Iterator[Entry]:
        """All whose key begins like this."""
        place = bisect_left(self.entries, prefix, key=_key)
        while place < len(self.entries) and self.entries[place].key.startswith(prefix):
            yield self.entries[place]
            place += 1

    def places(self) -> list[ExpectedShard]:
        """The shards of all topics that keep files, by topic and partition."""
        return [
            ExpectedShard(
                shard_id(spec.topic_id, partition),
                f"{spec.name}[{partition}]",
                f"{self.shards}/{shard_id(spec.topic_id, partition)}",
                spec,
                partition,
            )
            for spec in self.topics
            if spec.engine is Engine.SEGMENT
            for partition in range(spec.partitions)
        ]

    def strangers(self, disk: Disk) -> list[ExpectedShard]:
        """Directories below `shards` that belong to no topic, and to none whose deletion has begun."""
        root = self.shards
        names = disk.list_directory(root) if disk.exists(root) else []
        known = {place.id for place in self.places()}
        return [
            ExpectedShard(name, name, f"{root}/{name}", None, -1)
            for name in names
            if name not in known and name not in (CLAIM, CLAIMING) and name.partition("_")[0] not in self.leaving
        ]


def _key(entry: Entry) -> str:
    return entry.key


@contextmanager
def metadata_of(
    directory: LogDirectory | NoDirectory, settings: Settings, disk: Disk, clock: Clock, *, read_only: bool = True
) -> Iterator[MetadataStore]:
    """The metadata store of the directory, or the one that needs none."""
    path = directory.metadata_at(settings.metadata.path)
    store = open_metadata(settings.metadata, path, disk=disk, clock=clock, read_only=read_only)
    try:
        yield store
    finally:
        store.close()


def inspected(path: str, settings: Settings, disk: Disk, store: MetadataStore) -> Inspected:
    """Read everything that the metadata store says. Values that cannot be used are kept apart."""
    directory = LogDirectory.look(path, disk)
    prefix = settings.metadata.prefix
    found = Inspected(
        path=directory.path,
        shards=directory.shards,
        id=directory.id,
        owned=disk.exists(f"{directory.path}/{LOCK}") and is_owned(directory.path, disk),
        shared=settings.is_shared,
        topics=[],
        deleting=[],
        leaving=set(),
        entries=store.range(f"{prefix}/"),
        bad=[],
        prefix=prefix,
    )
    found.bad = list(unreadable_in(found.entries, prefix=prefix))
    bad = {value.key for value in found.bad}
    for entry in found.entries:
        if entry.key.startswith((deleted_key("", prefix=prefix), late_key("", prefix=prefix))):
            found.leaving.add(entry.key.rpartition("/")[2])
        if entry.key in bad:
            continue
        if entry.key.startswith(topics_prefix(prefix=prefix)):
            found.topics.append(decode_value(entry.value, TopicSpec)[0])
        elif entry.key.startswith(deleted_key("", prefix=prefix)):
            found.deleting.append(decode_value(entry.value, TopicSpec)[0])
    return found


def look(path: str, settings: Settings, disk: Disk, clock: Clock) -> Inspected:
    """The directory as it is now; raises what opening its metadata raises."""
    with metadata_of(LogDirectory.look(path, disk), settings, disk, clock) as store:
        return inspected(path, settings, disk, store)
