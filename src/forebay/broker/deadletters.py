"""Routes of dead letters: list, inspect, replay, purge."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from forebay.broker.app import Broker
from forebay.broker.exchange import HttpAnswer, Request
from forebay.broker.records import PAGE_BYTES
from forebay.broker.routes import Route
from forebay.broker.topics import TOPIC
from forebay.errors import Invalid
from forebay.records import LetterPlace
from forebay.service.deadletters import LettersRef
from forebay.service.principals import AccessScope
from forebay.service.subscriptions import SubscriptionRef
from forebay.topics import TopicName
from forebay.wire.subscriptions import LetterCount, LetterItem, LetterList, LetterRef, Purging, Replaying

LETTERS: Final = f"{TOPIC}/deadletters"
LISTED: Final = 100
LISTED_MAX: Final = 1_000


class LettersQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which dead letters of a topic to list."""

    after_partition: Annotated[int, Meta(ge=0, description="Those behind this place: of the last one of a page.")] = 0
    after_offset: Annotated[int, Meta(ge=0)] | None = None
    records_max: Annotated[int, Meta(ge=1, le=LISTED_MAX)] = LISTED
    origin: Annotated[str | None, Meta(description="With `subscription`: only those of this topic.")] = None
    subscription: Annotated[str | None, Meta(description="With `origin`: only those of this subscription.")] = None


class LetterQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One dead letter."""

    offset: Annotated[int, Meta(ge=0)]
    partition: Annotated[int, Meta(ge=0)] = 0
    origin: str | None = None
    subscription: str | None = None


def _ref(request: Request, asked: LettersQuery | LetterQuery | Replaying | Purging) -> LettersRef:
    if (asked.origin is None) != (asked.subscription is None):
        raise Invalid("origin and subscription go together: give the topic and the name of a subscription, or neither")
    if asked.origin is None or asked.subscription is None:
        return LettersRef(request.topic)
    return LettersRef(request.topic, SubscriptionRef(TopicName.parse(asked.origin), asked.subscription))


def _places(asked: list[LetterRef] | None) -> list[LetterPlace] | None:
    return None if asked is None else [LetterPlace(place.partition, place.offset) for place in asked]


async def list_dead_letters(broker: Broker, request: Request) -> HttpAnswer:
    """A page of dead letters."""
    query = request.query(LettersQuery)
    after = None if query.after_offset is None else LetterPlace(query.after_partition, query.after_offset)
    found = await broker.service.dead_letters.letters(
        request.principal,
        _ref(request, query),
        records_max=query.records_max,
        after=after,
        bytes_max=request.admitted.reserve(PAGE_BYTES),
    )
    return await broker.compute(lambda: HttpAnswer.of(LetterList.of(found)))


async def get_dead_letter(broker: Broker, request: Request) -> HttpAnswer:
    """One dead letter."""
    query = request.query(LetterQuery)
    place = LetterPlace(query.partition, query.offset)
    found = await broker.service.dead_letters.get(request.principal, _ref(request, query), place)
    return HttpAnswer.of(LetterItem.of(found))


async def replay_dead_letters(broker: Broker, request: Request) -> HttpAnswer:
    """Append dead letters to the topics they come from, or to another one, and remove them."""
    asked = await request.json(Replaying, default=Replaying())
    to = None if asked.to is None else TopicName.parse(asked.to)
    origins = [TopicName.parse(name) for name in asked.origins]
    letters, places = _ref(request, asked), _places(asked.places)
    count = await broker.service.dead_letters.replay(request.principal, letters, places, to, origins)
    return HttpAnswer.of(LetterCount(count))


async def purge_dead_letters(broker: Broker, request: Request) -> HttpAnswer:
    """Delete dead letters."""
    asked = await request.json(Purging, default=Purging())
    count = await broker.service.dead_letters.purge(request.principal, _ref(request, asked), _places(asked.places))
    return HttpAnswer.of(LetterCount(count))


ROUTES = (
    Route(
        method="GET", path=LETTERS, name="list_dead_letters",
        summary="List the dead letters in a topic, a page at a time", handler=list_dead_letters,
        scopes=(AccessScope.READ,), query=LettersQuery, answer=LetterList, tag="subscriptions",
        statuses=(404, 421, 422),
    ),
    Route(
        method="GET", path=f"{LETTERS}/letter", name="get_dead_letter", summary="One dead letter",
        handler=get_dead_letter, scopes=(AccessScope.READ,), query=LetterQuery, answer=LetterItem, tag="subscriptions",
        statuses=(404, 421, 422),
    ),
    Route(
        method="POST", path=f"{LETTERS}/replay", name="replay_dead_letters",
        summary="Append dead letters to the topics they come from, or to another one, and remove them: each once",
        handler=replay_dead_letters, body=Replaying, answer=LetterCount,
        scopes=(AccessScope.READ, AccessScope.DELETE, AccessScope.WRITE), needs_all_scopes=True,
        tag="subscriptions", statuses=(404, 409, 421, 422, 504, 507), is_audited=True,
    ),
    Route(
        method="POST", path=f"{LETTERS}/purge", name="purge_dead_letters", summary="Delete dead letters",
        handler=purge_dead_letters, body=Purging, answer=LetterCount, tag="subscriptions",
        scopes=(AccessScope.READ, AccessScope.DELETE), needs_all_scopes=True,
        statuses=(404, 409, 421, 422, 504), is_audited=True,
    ),
)  # fmt: skip
"""Of dead letters."""
