"""Group offsets for asyncio, as by `forebay.Group`, in the log's few threads."""

from __future__ import annotations

from functools import partial

from forebay.aio.workers import Workers
from forebay.records import CommitAck, GroupOffset, Position
from forebay.storage import Group
from forebay.topics import TopicName


class AsyncGroup:
    """One consumer group. Made by `AsyncLog.group`."""

    def __init__(self, group: Group, workers: Workers) -> None:
        self.name = group.name
        self._group = group
        self._run = workers.run

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
        return await self._run(
            partial(self._group.commit, topic, offset, partition, note=note, ack=ack, expected=expected)
        )

    async def fetch(self, topic: str | TopicName, partition: int = 0) -> int | None:
        """See `Group.fetch`."""
        return await self._run(self._group.fetch, topic, partition)

    async def note(self, topic: str | TopicName, partition: int = 0) -> str:
        """See `Group.note`."""
        return await self._run(self._group.note, topic, partition)

    async def offsets(self) -> list[GroupOffset]:
        """See `Group.offsets`."""
        return await self._run(self._group.offsets)

    async def reset(
        self, topic: str | TopicName, position: Position | int, partition: int | None = None
    ) -> dict[int, int]:
        """See `Group.reset`."""
        return await self._run(self._group.reset, topic, position, partition)

    async def delete(self) -> int:
        """See `Group.delete`."""
        return await self._run(self._group.delete)
