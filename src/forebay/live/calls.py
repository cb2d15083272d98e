"""Calls that may wait for a disk, made from an event loop: a thread runs them, a task waits for the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

from forebay.storage import Topic

T = TypeVar("T")


class CallKey(NamedTuple):
    """What a call may wait for: the shard of a partition, or any shard of a topic. Others need not wait for it."""

    topic: str
    topic_id: str = ""
    """Of the topic that is meant, where it is known: a later one of the same name does not wait for what hangs here."""
    partition: int | None = None

    @classmethod
    def of(cls, topic: Topic, partition: int | None = None) -> Self:
        """Of a topic that is at hand."""
        return cls(topic.name, topic.spec.topic_id, partition)

    def __str__(self) -> str:
        return self.topic if self.partition is None else f"{self.topic}[{self.partition}]"


class StartCall(Protocol):
    """Begins a call in a thread. Cancelling what waits for it does not stop it; `Closed` once the log is closed."""

    def __call__(self, key: Hashable, call: Callable[[], T], /) -> asyncio.Future[T]:
        """The answer, or the error, of the call. `key` is what it may wait for."""


class KeptCall(Generic[T]):
    """One call at a time in a thread. The answer that a cancelled task did not take is given to the next one."""

    def __init__(self, start: StartCall, key: Hashable) -> None:
        """`key` is what the calls may wait for."""
        self._start = start
        self._key = key
        self._pending: asyncio.Future[T] | None = None

    async def answer(self, call: Callable[[], T]) -> T:
        """The answer to `call`, or to the call that a cancelled task has left under way."""
        pending = self._pending
        if pending is None:
            pending = self._pending = self._start(self._key, call)
        try:
            answer = await asyncio.shield(pending)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._pending = None
            raise
        self._pending = None
        return answer
