"""Routes of consumer groups: commit, fetch, reset, list, delete, lag."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from forebay.broker.app import Broker
from forebay.broker.exchange import HttpAnswer, Request
from forebay.broker.routes import NoQuery, Route
from forebay.broker.topics import ANY, LISTED, LISTED_MAX
from forebay.service.principals import AccessScope
from forebay.wire.messages import Committed, Committing, GroupItem, GroupPage, GroupPlaces, ResetPlaces, Resetting
from forebay.wire.positions import parse_start

GROUP = "/v1/groups/{group}"


class GroupsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which groups to list."""

    after: Annotated[str | None, Meta(description="The name to go on after: `after` of the page before.")] = None
    limit: Annotated[int, Meta(ge=1, le=LISTED_MAX)] = LISTED


class PlaceQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One partition of a topic."""

    topic: str
    partition: Annotated[int, Meta(ge=0)] = 0


class ForgetQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where to forget a group."""

    topic: Annotated[str | None, Meta(description="Left out: in every topic.")] = None


async def list_groups(broker: Broker, request: Request) -> HttpAnswer:
    """The names of groups and readers."""
    query = request.query(GroupsQuery)
    names, more = await broker.service.groups(request.principal, after=query.after, limit=query.limit)
    return await broker.list_answer(request, names, lambda found: GroupPage(list(found), more))


async def get_group(broker: Broker, request: Request) -> HttpAnswer:
    """Where a group stands, and how far it is behind."""
    request.query(NoQuery)
    name = request.at["group"]
    places = await broker.service.group_places(request.principal, name)
    shown = [
        place if place.failure is None else place._replace(failure=broker.public_message(place.failure))
        for place in places
    ]
    return await broker.list_answer(
        request, shown, lambda found: GroupPlaces(name, [GroupItem.of(place) for place in found])
    )


async def commit_offset(broker: Broker, request: Request) -> HttpAnswer:
    """Everything below an offset is done."""
    commit = await request.json(Committing)
    topic = request.topic_named(commit.topic)
    offset = await broker.service.commit(
        request.principal,
        request.at["group"],
        topic,
        commit.offset,
        commit.partition,
        note=commit.note,
        ack=commit.ack,
        expected=commit.expected,
    )
    return HttpAnswer.of(Committed(topic=str(topic), partition=commit.partition, offset=offset, note=commit.note))


async def fetch_offset(broker: Broker, request: Request) -> HttpAnswer:
    """Where a group stands in one partition."""
    query = request.query(PlaceQuery)
    topic = request.topic_named(query.topic)
    offset, note = await broker.service.fetch(request.principal, request.at["group"], topic, query.partition)
    return HttpAnswer.of(Committed(topic=str(topic), partition=query.partition, offset=offset, note=note))


async def reset_group(broker: Broker, request: Request) -> HttpAnswer:
    """Set a group in a topic, also to an earlier place."""
    reset = await request.json(Resetting)
    topic = request.topic_named(reset.topic)
    standing = await broker.service.reset(
        request.principal, request.at["group"], topic, parse_start(reset.to, "to"), reset.partition, reset.note
    )
    return HttpAnswer.of(ResetPlaces(str(topic), standing))


async def delete_group(broker: Broker, request: Request) -> HttpAnswer:
    """Forget every place of a group, or those that it has in one topic."""
    topic = request.query(ForgetQuery).topic
    if topic is None:
        await broker.service.delete_group(request.principal, request.at["group"])
    else:
        await broker.service.forget(request.principal, request.at["group"], request.topic_named(topic))
    return HttpAnswer(204)


ROUTES = (
    Route(
        method="GET", path="/v1/groups", name="list_groups", summary="The names of consumer groups",
        handler=list_groups, scopes=ANY, query=GroupsQuery, answer=GroupPage, tag="groups",
    ),
    Route(
        method="GET", path=GROUP, name="get_group", summary="Where a group stands, and how far it is behind",
        handler=get_group, scopes=ANY, answer=GroupPlaces, tag="groups",
    ),
    Route(
        method="POST", path=f"{GROUP}/commit", name="commit_offset", summary="Everything below an offset is done",
        handler=commit_offset, scopes=(AccessScope.READ,), body=Committing, answer=Committed, tag="groups",
        statuses=(404, 409, 422),
    ),
    Route(
        method="GET", path=f"{GROUP}/offset", name="fetch_offset", summary="Where a group stands in a partition",
        handler=fetch_offset, scopes=(AccessScope.READ,), query=PlaceQuery, answer=Committed, tag="groups",
        statuses=(404,),
    ),
    Route(
        method="POST", path=f"{GROUP}/reset", name="reset_group", summary="Set a group, also to an earlier place",
        handler=reset_group, scopes=(AccessScope.READ,), body=Resetting, answer=ResetPlaces, tag="groups",
        statuses=(404, 409), is_audited=True,
    ),
    Route(
        method="DELETE", path=GROUP, name="delete_group", summary="Forget every place of a group",
        handler=delete_group, scopes=(AccessScope.READ,), query=ForgetQuery, status=204, tag="groups",
        statuses=(404,), is_audited=True,
    ),
)  # fmt: skip
"""Of consumer groups."""
