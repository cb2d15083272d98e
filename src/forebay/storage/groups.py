"""Group offsets: how far a consumer group has come in any partition of any topic, apart from any owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from forebay.engines.operations import check_offset
from forebay.errors import Closed, ForebayError, Invalid, UnknownTopic
from forebay.partitioning import check_partition
from forebay.progress import Progress, ProgressStore, ReaderName
from forebay.records import Position
from forebay.storage.checks import checked_partition
from forebay.storage.commits import CachedCommits
from forebay.storage.topic import Topic
from forebay.topics import TopicName, TopicSpec

Ack = Literal["durable", "cached"]


class GroupOffset(NamedTuple):
    """Where a group stands in a partition: everything below `offset` is done, `lag` records are not.

    `end` and `lag` are `None` where this process cannot ask the partition how far it has come; `failure` says why.
    """

    topic: str
    partition: int
    offset: int
    end: int | None
    note: str
    failure: str | None = None

    @property
    def lag(self) -> int | None:
        return None if self.end is None else max(0, self.end - self.offset)


class Group:
    """One consumer group. Made by `Storage.group`; safe for concurrent use by threads and processes."""

    def __init__(
        self,
        name: str,
        topic: Callable[[str | TopicName], Topic],
        definition: Callable[[str | TopicName], TopicSpec],
        store: ProgressStore,
        commits: CachedCommits,
    ) -> None:
        ReaderName.of("default", "any", name)
        self.name = name
        self._topic = topic
        self._definition = definition
        self._store = store
        self._commits = commits

    def commit(
        self,
        topic: str | TopicName,
        offset: int,
        partition: int = 0,
        *,
        note: str = "",
        ack: Ack = "durable",
        expected: int | None = None,
    ) -> int:
        """Everything below `offset` is done; where the group stands on return.

        A group that is further already stays there. With `expected` it moves only from that very place, else
        `Conflict`: of two members that commit at once, one is told. `ack="durable"` returns when it is in the
        metadata store; `ack="cached"` at once, and a crash may take the last `progress.flush_interval_ms` of it.
        """
        if ack not in ("durable", "cached"):
            raise Invalid(f'ack is {ack!r:.40}; use "durable" or "cached"')
        handle = self._topic(topic)
        name, progress = self._place(handle, offset, partition, note)
        if ack == "cached":
            if expected is not None:
                raise Invalid('expected needs ack="durable": only the metadata store knows where all members stand')
            return self._commits.commit(name, partition, progress)
        if expected is None:
            return self._store.ack_up_to(name, {partition: progress})[partition]
        check_offset(expected)
        self._store.move_from(name, partition, expected, progress)
        return offset

    def fetch(self, topic: str | TopicName, partition: int = 0) -> int | None:
        """Everything below is done; `None` if the group has never committed there."""
        found = self._found(self._definition(topic), partition)
        return found.offset if found is not None else None

    def note(self, topic: str | TopicName, partition: int = 0) -> str:
        """What was noted with the last commit."""
        found = self._found(self._definition(topic), partition)
        return found.note if found is not None else ""

    def offsets(self) -> list[GroupOffset]:
        """Where the group stands in every topic that it has committed in, and how far each has come.

        A partition that cannot be asked here, as one in the memory of another process, keeps no other from being
        shown: its `end` is `None`, and `failure` says why.
        """
        self._commits.flush()
        found = []
        for namespace, topic, partition in self._store.places(self.name):
            try:
                spec = self._definition(TopicName(namespace, topic))
                # Committed in an earlier topic of that name, if it has no such partition.
                progress = self._found(spec, partition) if partition < spec.partitions else None
                if progress is not None:
                    end, failure = self._end(spec, partition)
                    found.append(
                        GroupOffset(f"{namespace}/{topic}", partition, progress.offset, end, progress.note, failure)
                    )
            except UnknownTopic:
                continue
        return found

    def _end(self, spec: TopicSpec, partition: int) -> tuple[int | None, str | None]:
        """How far the partition has come, or why this process cannot say it."""
        try:
            return self._topic(spec.name).offsets(partition).next, None
        except (Closed, UnknownTopic):
            raise
        except ForebayError as error:
            return None, str(error)

    def reset(self, topic: str | TopicName, position: Position | int, partition: int | None = None) -> dict[int, int]:
        """Set the group's place in a partition, or in all of them, also to an earlier one; where each stands now."""
        handle = self._topic(topic)
        partitions = range(handle.partitions) if partition is None else [checked_partition(partition)]
        self._commits.forget(self._name(handle.spec))
        standing = {}
        for number in partitions:
            offset = handle.resolve(position, number)
            name, progress = self._place(handle, offset, number, "")
            self._store.reset(name, number, progress)
            standing[number] = offset
        return standing

    def delete(self) -> int:
        """Forget every place of the group; how many there were."""
        places = self._store.places(self.name)
        for namespace, topic in sorted({(namespace, topic) for namespace, topic, _ in places}):
            name = ReaderName(namespace, topic, self.name)
            self._commits.forget(name)
            self._store.forget(name, 1 + max(p for n, t, p in places if (n, t) == (namespace, topic)))
        return len(places)

    def _name(self, spec: TopicSpec) -> ReaderName:
        return ReaderName(spec.namespace, spec.topic, self.name)

    def _found(self, spec: TopicSpec, partition: int) -> Progress | None:
        check_partition(checked_partition(partition), spec.partitions)
        return self._commits.found(self._name(spec), partition, spec.topic_id)

    def _place(self, topic: Topic, offset: int, partition: int, note: str) -> tuple[ReaderName, Progress]:
        return self._name(topic.spec), topic.reader(self.name).place(offset, partition, note)
