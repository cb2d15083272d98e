"""Routes of routers: create, alter, pause, resume, delete, list, status. And their metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from forebay.broker.app import Broker
from forebay.broker.exchange import HttpAnswer, Request
from forebay.broker.routes import NoQuery, Route
from forebay.broker.topics import ANY, LISTED, LISTED_MAX
from forebay.routing import RouterState, RouterStatus
from forebay.service.principals import AccessScope
from forebay.topics import TopicName
from forebay.wire.positions import parse_start
from forebay.wire.routers import RouterItem, RouterList, RouterPut, RouterStatusItem, RuleItem

ROUTERS: Final = "/v1/routers"
ROUTER: Final = f"{ROUTERS}/{{router}}"
OWN: Final[Any] = {"scopes": (AccessScope.READ, AccessScope.WRITE), "needs_all_scopes": True}
"""`read` on every source and `write` on the destination."""
MEASURED_MAX: Final = 1_000
"""Routers that have numbers of their own in the metrics: the first by name."""


class RouterQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which routers to list."""

    after: Annotated[str | None, Meta(description="The name to go on after: `after` of the page before.")] = None
    limit: Annotated[int, Meta(ge=1, le=LISTED_MAX)] = LISTED


async def list_routers(broker: Broker, request: Request) -> HttpAnswer:
    """A page of the routers that the caller may know of, with their state and lag."""
    query = request.query(RouterQuery)
    found, more = await broker.service.routers.page(request.principal, after=query.after, limit=query.limit)
    return await broker.list_answer(
        request, found, lambda statuses: RouterList([_item(broker, status) for status in statuses], more)
    )


async def put_router(broker: Broker, request: Request) -> HttpAnswer:
    """Create a router."""
    put = await request.json(RouterPut)
    made = await broker.service.routers.create(
        request.principal,
        request.at["router"],
        sources=[TopicName.parse(source) for source in put.sources],
        destination=TopicName.parse(put.destination),
        start=parse_start(put.start, "start"),
        rule=put.rule.options(),
    )
    return HttpAnswer.of(RouterItem.of(made), status=201)


async def get_router(broker: Broker, request: Request) -> HttpAnswer:
    """How a router fares."""
    request.query(NoQuery)
    return HttpAnswer.of(_item(broker, await broker.service.routers.status(request.principal, request.at["router"])))


async def put_rule(broker: Broker, request: Request) -> HttpAnswer:
    """Give a router another rule."""
    rule = await request.json(RuleItem)
    altered = await broker.service.routers.alter(request.principal, request.at["router"], rule.options())
    return HttpAnswer.of(RouterItem.of(altered))


async def pause_router(broker: Broker, request: Request) -> HttpAnswer:
    """Have a router wait."""
    request.query(NoQuery)
    return HttpAnswer.of(RouterItem.of(await broker.service.routers.pause(request.principal, request.at["router"])))


async def resume_router(broker: Broker, request: Request) -> HttpAnswer:
    """Have a router go on."""
    request.query(NoQuery)
    return HttpAnswer.of(RouterItem.of(await broker.service.routers.resume(request.principal, request.at["router"])))


async def delete_router(broker: Broker, request: Request) -> HttpAnswer:
    """Remove a router."""
    request.query(NoQuery)
    await broker.service.routers.delete(request.principal, request.at["router"])
    return HttpAnswer(204)


def _item(broker: Broker, status: RouterStatus) -> RouterStatusItem:
    item = RouterStatusItem.of(status)
    public = {place: broker.public_message(failure) for place, failure in item.failures.items()}
    return msgspec.structs.replace(item, failures=public)


def router_metrics(statuses: Iterable[RouterStatus]) -> Iterator[Metric]:
    """What Prometheus gets of routers. Names of routers are chosen by operators, as those of topics are."""
    lag = GaugeMetricFamily(
        "forebay_router_lag", "Offsets of the sources that are not known to be routed", labels=["router"]
    )
    records = CounterMetricFamily("forebay_router_records_total", "Records routed", labels=["router"])
    lost = CounterMetricFamily(
        "forebay_router_lost_total",
        "Offsets that were gone before they were routed, or too large",
        labels=["router", "reason"],
    )
    state = GaugeMetricFamily(
        "forebay_router_state", "1 for the state that the router is in, 0 for the others", labels=["router", "state"]
    )
    for _, status in zip(range(MEASURED_MAX), statuses, strict=False):
        name = status.router.name
        if status.lag is not None:
            lag.add_metric([name], status.lag)
        records.add_metric([name], status.routed)
        for reason, count in sorted(status.lost.items()):
            lost.add_metric([name, reason], count)
        for each in RouterState:
            state.add_metric([name, each], int(each is status.state))
    return iter((lag, records, lost, state))


ROUTES = (
    Route(
        method="GET", path=ROUTERS, name="list_routers", summary="Routers with their state and lag, a page at a time",
        handler=list_routers, scopes=ANY, query=RouterQuery, answer=RouterList, tag="routers",
    ),
    Route(
        method="PUT", path=ROUTER, name="put_router", summary="Define a router from topics to a topic",
        handler=put_router, **OWN, body=RouterPut, answer=RouterItem, status=201, tag="routers",
        statuses=(404, 409), is_audited=True,
    ),
    Route(
        method="GET", path=ROUTER, name="get_router", summary="How a router fares",
        handler=get_router, scopes=ANY, answer=RouterStatusItem, tag="routers", statuses=(404,),
    ),
    Route(
        method="PUT", path=f"{ROUTER}/rule", name="put_rule", summary="Give a router another rule, as a whole",
        handler=put_rule, **OWN, body=RuleItem, answer=RouterItem, tag="routers", statuses=(404,),
        is_audited=True,
    ),
    Route(
        method="POST", path=f"{ROUTER}/pause", name="pause_router", summary="Have a router wait",
        handler=pause_router, **OWN, answer=RouterItem, tag="routers", statuses=(404,), is_audited=True,
    ),
    Route(
        method="POST", path=f"{ROUTER}/resume", name="resume_router", summary="Have a router go on where it stopped",
        handler=resume_router, **OWN, answer=RouterItem, tag="routers", statuses=(404,), is_audited=True,
    ),
    Route(
        method="DELETE", path=ROUTER, name="delete_router", summary="Remove a router; what it has routed stays",
        handler=delete_router, **OWN, status=204, tag="routers", statuses=(404,), is_audited=True,
    ),
)  # fmt: skip
"""Of routers."""
