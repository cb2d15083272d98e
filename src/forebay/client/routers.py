"""Routers of a broker, over HTTP: the surface of `forebay.surface.awaiting.Routers`, and of `forebay.surface.Routers`.

The broker runs them; here they are defined, and say how they fare.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Final, Unpack

import msgspec

from forebay.arguments import checked_position
from forebay.client.topics import decoded, position_text
from forebay.client.transport import HttpCall, HttpTransport
from forebay.errors import Indeterminate, UnknownRouter
from forebay.records import LATEST, Position
from forebay.routing import (
    RouterRule,
    RouterSpec,
    RouterStatus,
    RuleOptions,
    check_router_name,
    check_rule,
    listed_names,
)
from forebay.topics import TopicName
from forebay.wire.bodies import MediaType
from forebay.wire.routers import RouterItem, RouterList, RouterPut, RouterStatusItem, RuleItem

if TYPE_CHECKING:
    from forebay.client.loops import LoopThread

LISTED_MAX: Final = 1_000
"""Routers of one page of a list."""
_PATH: Final = "/v1/routers"


class AsyncRemoteRouters:
    """The routers of a broker, for one event loop. Made by `AsyncRemoteLog.routers`."""

    def __init__(self, transport: HttpTransport) -> None:
        self._transport = transport

    async def create(
        self,
        name: str,
        *,
        sources: Iterable[str | TopicName],
        destination: str | TopicName,
        start: Position = LATEST,
        **rule: Unpack[RuleOptions],
    ) -> RouterSpec:
        """See `surface.awaiting.Routers.create`.

        `Indeterminate` if the router exists after an attempt whose answer was lost: it may be the one that was made.
        """
        put = RouterPut(
            sources=[str(TopicName.parse(source)) for source in listed_names(sources)],
            destination=str(TopicName.parse(destination)),
            start=position_text(checked_position(start)),
            rule=_rule_item(rule),
        )
        return await self._changed("PUT", _path_of(name), put)

    async def alter(self, name: str, **rule: Unpack[RuleOptions]) -> RouterSpec:
        """See `surface.awaiting.Routers.alter`."""
        return await self._changed("PUT", f"{_path_of(name)}/rule", _rule_item(rule))

    async def pause(self, name: str) -> RouterSpec:
        """See `surface.awaiting.Routers.pause`."""
        return await self._changed("POST", f"{_path_of(name)}/pause")

    async def resume(self, name: str) -> RouterSpec:
        """See `surface.awaiting.Routers.resume`."""
        return await self._changed("POST", f"{_path_of(name)}/resume")

    async def delete(self, name: str) -> None:
        """See `surface.awaiting.Routers.delete`. A router that a lost attempt has deleted is deleted."""
        try:
            await self._transport.call(HttpCall(method="DELETE", path=_path_of(name)), bytes)
        except Indeterminate as doubt:
            if not isinstance(doubt.__cause__, UnknownRouter):
                raise

    async def all(self) -> list[RouterSpec]:
        """See `surface.awaiting.Routers.all`."""
        return [status.router for status in await self.statuses()]

    async def get(self, name: str) -> RouterSpec:
        """See `surface.awaiting.Routers.get`."""
        return (await self.status(name)).router

    async def status(self, name: str) -> RouterStatus:
        """See `surface.awaiting.Routers.status`."""
        call = HttpCall(method="GET", path=_path_of(name))
        return await self._transport.call(call, lambda body: decoded(RouterStatusItem, body).status())

    async def statuses(self) -> list[RouterStatus]:
        """See `surface.awaiting.Routers.statuses`."""
        found: list[RouterStatus] = []
        after: dict[str, str] = {}
        while True:
            call = HttpCall(method="GET", path=_PATH, query={"limit": str(LISTED_MAX), **after})
            page = await self._transport.call(call, partial(decoded, RouterList))
            found += [item.status() for item in page.routers]
            if page.after is None:
                return found
            after = {"after": page.after}

    async def _changed(self, method: str, path: str, message: msgspec.Struct | None = None) -> RouterSpec:
        content = b"" if message is None else msgspec.json.encode(message)
        call = HttpCall(method=method, path=path, content=content, media=MediaType.JSON)
        return await self._transport.call(call, lambda body: decoded(RouterItem, body).spec())


class RemoteRouters:
    """The routers of a broker, for any number of threads. Made by `RemoteLog.routers`."""

    def __init__(self, routers: AsyncRemoteRouters, loop: LoopThread) -> None:
        self._routers = routers
        self._loop = loop

    def create(
        self,
        name: str,
        *,
        sources: Iterable[str | TopicName],
        destination: str | TopicName,
        start: Position = LATEST,
        **rule: Unpack[RuleOptions],
    ) -> RouterSpec:
        """See `surface.Routers.create`, and `AsyncRemoteRouters.create`."""
        create = partial(self._routers.create, name, sources=sources, destination=destination, start=start, **rule)
        return self._loop.call(create)

    def alter(self, name: str, **rule: Unpack[RuleOptions]) -> RouterSpec:
        """See `surface.Routers.alter`."""
        return self._loop.call(partial(self._routers.alter, name, **rule))

    def pause(self, name: str) -> RouterSpec:
        """See `surface.Routers.pause`."""
        return self._loop.call(partial(self._routers.pause, name))

    def resume(self, name: str) -> RouterSpec:
        """See `surface.Routers.resume`."""
        return self._loop.call(partial(self._routers.resume, name))

    def delete(self, name: str) -> None:
        """See `surface.Routers.delete`."""
        self._loop.call(partial(self._routers.delete, name))

    def all(self) -> list[RouterSpec]:
        """See `surface.Routers.all`."""
        return self._loop.call(self._routers.all)

    def get(self, name: str) -> RouterSpec:
        """See `surface.Routers.get`."""
        return self._loop.call(partial(self._routers.get, name))

    def status(self, name: str) -> RouterStatus:
        """See `surface.Routers.status`."""
        return self._loop.call(partial(self._routers.status, name))

    def statuses(self) -> list[RouterStatus]:
        """See `surface.Routers.statuses`."""
        return self._loop.call(self._routers.statuses)


def _path_of(name: str) -> str:
    return f"{_PATH}/{check_router_name(name)}"


def _rule_item(options: RuleOptions) -> RuleItem:
    rule = RouterRule.of(**options)
    check_rule(rule)
    return RuleItem.of(rule)
