"""Routers for asyncio: `AsyncRouters(log)` is `Routers(log)` in the few threads of an asynchronous log."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Final, Unpack

from forebay.aio.log import AsyncLog
from forebay.clock import Clock
from forebay.records import LATEST, Position
from forebay.routers.routers import Routers
from forebay.routing import RouterSpec, RouterStatus, RuleOptions
from forebay.topics import TopicName

ALL: Final = "the topics of all routers"
"""What the status of several routers may wait for."""


class AsyncRouters:
    """The routers of a log that is used with asyncio. For the tasks of one event loop."""

    def __init__(self, log: AsyncLog, *, clock: Clock | None = None) -> None:
        self._routers = Routers(log.blocking, clock=clock)
        self._run = log.in_thread

    async def create(
        self,
        name: str,
        *,
        sources: Iterable[str | TopicName],
        destination: str | TopicName,
        start: Position = LATEST,
        **rule: Unpack[RuleOptions],
    ) -> RouterSpec:
        """See `Routers.create`."""
        create = partial(self._routers.create, name, sources=sources, destination=destination, start=start, **rule)
        return await self._run(create, at=f"router {name}")

    async def alter(self, name: str, **rule: Unpack[RuleOptions]) -> RouterSpec:
        """See `Routers.alter`."""
        return await self._run(partial(self._routers.alter, name, **rule))

    async def pause(self, name: str) -> RouterSpec:
        """See `Routers.pause`."""
        return await self._run(partial(self._routers.pause, name))

    async def resume(self, name: str) -> RouterSpec:
        """See `Routers.resume`."""
        return await self._run(partial(self._routers.resume, name))

    async def delete(self, name: str) -> None:
        """See `Routers.delete`."""
        await self._run(partial(self._routers.delete, name), at=f"router {name}")

    async def all(self) -> list[RouterSpec]:
        """See `Routers.all`."""
        return await self._run(self._routers.all)

    async def get(self, name: str) -> RouterSpec:
        """See `Routers.get`."""
        return await self._run(partial(self._routers.get, name))

    async def status(self, name: str) -> RouterStatus:
        """See `Routers.status`."""
        return await self._run(partial(self._routers.status, name), at=f"router {name}")

    async def statuses(self) -> list[RouterStatus]:
        """See `Routers.statuses`."""
        return await self._run(self._routers.statuses, at=ALL)

    async def statuses_of(self, routers: Iterable[RouterSpec]) -> list[RouterStatus]:
        """See `Routers.statuses_of`."""
        return await self._run(partial(self._routers.statuses_of, routers), at=ALL)

    async def start(self) -> None:
        """See `Routers.start`."""
        await asyncio.to_thread(self._routers.start)

    async def stop(self) -> None:
        """See `Routers.stop`. Waits for none of the threads of the log: they may hang where routers do."""
        await asyncio.to_thread(self._routers.stop)
