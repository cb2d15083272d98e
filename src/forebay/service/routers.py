"""Routers for callers with names and rights.

A router reads its sources and writes into its destination, so its caller needs the scope `read` on every source and
`write` on the destination: to create it, and to change or delete it later. A caller knows of a router if it has any
right on each of its topics; any other router is unknown to it. Once created, a router goes on whatever becomes of the
token of its creator. For one event loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from forebay.errors import Corrupt, Invalid, UnknownRouter, UnsupportedFormat
from forebay.records import Position
from forebay.routers import AsyncRouters, RouterCircle
from forebay.routing import RouterSpec, RouterStatus, RuleOptions
from forebay.service.principals import AccessScope, Principal, check_may, listed
from forebay.topics import TopicName


class RouterService:
    """What a server does with routers. Part of `Service`."""

    def __init__(self, routers: AsyncRouters) -> None:
        self._routers = routers

    async def create(
        self,
        who: Principal,
        name: str,
        *,
        sources: Sequence[TopicName],
        destination: TopicName,
        start: Position,
        rule: RuleOptions,
    ) -> RouterSpec:
        """Define a router."""
        _check_topics(who, sources, destination)
        try:
            return await self._routers.create(name, sources=sources, destination=destination, start=start, **rule)
        except RouterCircle as error:
            if len(listed(who, error.topics)) < len(error.topics):
                raise Invalid(
                    "records would go in a circle, by routers or dead letters between topics that this token does not "
                    "cover: choose another destination"
                ) from error
            raise

    async def alter(self, who: Principal, name: str, rule: RuleOptions) -> RouterSpec:
        """Give a router another rule."""
        await self._check_changed(who, name)
        return await self._routers.alter(name, **rule)

    async def pause(self, who: Principal, name: str) -> RouterSpec:
        """Have a router wait."""
        await self._check_changed(who, name)
        return await self._routers.pause(name)

    async def resume(self, who: Principal, name: str) -> RouterSpec:
        """Have a router go on."""
        await self._check_changed(who, name)
        return await self._routers.resume(name)

    async def delete(self, who: Principal, name: str) -> None:
        """Remove a router. One that cannot be read may have any topics: that needs `admin` on the whole broker."""
        try:
            await self._check_changed(who, name)
        except (Corrupt, UnsupportedFormat):
            check_may(who, AccessScope.ADMIN, None)
        await self._routers.delete(name)

    async def page(self, who: Principal, *, after: str | None, limit: int) -> tuple[list[RouterStatus], str | None]:
        """How the routers fare that the caller may know of, by name, and the name to go on after, if there are more."""
        known = [router for router in await self._routers.all() if _may_know(who, router)]
        behind = [router for router in known if after is None or router.name > after]
        page = behind[:limit]
        return await self._routers.statuses_of(page), page[-1].name if len(behind) > limit else None

    async def status(self, who: Principal, name: str) -> RouterStatus:
        """How a router fares."""
        found = await self._known(who, name)
        [status] = await self._routers.statuses_of([found])
        return status

    async def statuses(self, who: Principal) -> list[RouterStatus]:
        """How all routers fare, for those who look after the whole broker."""
        check_may(who, AccessScope.ADMIN, None)
        return await self._routers.statuses()

    async def _known(self, who: Principal, name: str) -> RouterSpec:
        found = await self._routers.get(name)
        if not _may_know(who, found):
            # As if there were none: its topics are no business of this caller.
            raise UnknownRouter(f'there is no router {name!a:.120}: "forebay router list" shows all routers')
        return found

    async def _check_changed(self, who: Principal, name: str) -> None:
        """Return if the caller may change the router."""
        found = await self._known(who, name)
        sources = [TopicName.parse(source.topic) for source in found.sources]
        _check_topics(who, sources, TopicName.parse(found.destination))


def _check_topics(who: Principal, sources: Sequence[TopicName], destination: TopicName) -> None:
    for source in sources:
        check_may(who, AccessScope.READ, source)
    check_may(who, AccessScope.WRITE, destination)


def _may_know(who: Principal, router: RouterSpec) -> bool:
    topics = [TopicName.parse(name) for name in (*(source.topic for source in router.sources), router.destination)]
    return len(listed(who, topics)) == len(topics)
