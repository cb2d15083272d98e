"""Group offsets for asyncio, as by `forebay.Group`, in the log's few threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from forebay.aio.workers import Workers
from forebay.live import CallKey
from forebay.records import CommitAck, GroupOffset, Position
from forebay.storage import Group
from forebay.topics import TopicName


class AsyncGroup:
    """One consumer group. Made by `AsyncLog.group`."""

    def __init__(self, group: Group, workers: Workers, key_of: Callable[..., CallKey]) -> None:
        """`key_of` says what a call at a topic, or a partition of it, may wait for."""
        self.name = group.name
        self._group = group
        self._ask_about = workers.ask_about
        self._run_at = workers.run_at
        self._key_of = key_of

    async def unreadable_in(self) -> list[TopicName]:
        """See `Group.unreadable_in`."""
        return await self._ask_about(f"group {self.name}", self._group.unreadable_in)

    async def commit(
        self,
        topic: str | TopicName,
        offset: int,
        partition: int = 0,
        *,
        note: str = "",
        ack: CommitAck = "durable",
        expected: int | None = None,
    ) -> int:
        """See `Group.commit`."""
        commit = partial(self._group.commit, topic, offset, partition, note=note, ack=ack, expected=expected)
        return await self._run_at(self._key_of(topic, partition), commit)

    async def fetch(self, topic: str | TopicName, partition: int = 0) -> int | None:
        """See `Group.fetch`."""
        return await self._ask_about(self._key_of(topic, partition), self._group.fetch, topic, partition)

    async def note(self, topic: str | TopicName, partition: int = 0) -> str:
        """See `Group.note`."""
        return await self._ask_about(self._key_of(topic, partition), self._group.note, topic, partition)

    async def offsets(self) -> list[GroupOffset]:
        """See `Group.offsets`."""
        return await self._run_at(f"the topics of group {self.name}", self._group.offsets)

    async def reset(
        self, topic: str | TopicName, position: Position | int, partition: int | None = None
    ) -> dict[int, int]:
        """See `Group.reset`."""
        return await self._run_at(self._key_of(topic, partition), self._group.reset, topic, position, partition)

    async def delete(self) -> int:
        """See `Group.delete`."""
        return await self._ask_about(f"group {self.name}", self._group.delete)
