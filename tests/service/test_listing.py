"""Lists of topics: a caller gets its own page by page, and those of others cost it nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import pytest

import forebay.aio
from forebay.clock import SystemClock
from forebay.format.metadata.keys import topic_key
from forebay.format.metadata.value import encode_value
from forebay.metadata import MetadataStore, Put
from forebay.routers import AsyncRouters
from forebay.service import service
from forebay.service.placement import Alone
from forebay.service.principals import AccessScope, Principal, listed
from forebay.service.quotas import Quotas
from forebay.service.service import Service
from forebay.settings import Settings
from forebay.topics import TopicName, TopicSpec

T = TypeVar("T")

OWN = ["audit/x", "shop/a", "shop/b", "shop/orders", "shop/orders2", "shop2/one", "shop2/one2", "zoo/z"]
FOREIGN = [f"{namespace}/t{number:04}" for namespace in ("aaa", "mid", "shop-1", "shop1") for number in range(750)]


def with_service(names: list[str], call: Callable[[Service], Awaitable[T]]) -> T:
    """What the call gives with a service over these topics."""

    async def whole() -> T:
        async with forebay.aio.open(":memory:") as log:
            settings = Settings.load(None, {}, environment={})
            for place in range(0, len(names), 50):
                log.metadata.transaction([], [_definition(TopicName.parse(name)) for name in names[place : place + 50]])
            service = Service(
                log,
                quotas=Quotas(settings.server, SystemClock()),
                placement=Alone(),
                tokens=None,
                routers=AsyncRouters(log),
            )
            return await call(service)

    return asyncio.run(whole())


def _definition(name: TopicName) -> Put:
    spec = TopicSpec.create(name, topic_id="0" * 32, created_at=1)
    return Put(topic_key(name.namespace, name.topic, prefix=Settings().metadata.prefix), encode_value(spec))


def caller(*prefixes: str) -> Principal:
    return Principal(name="billing", scopes=frozenset({AccessScope.READ}), prefixes=frozenset(prefixes))


async def pages(service: Service, who: Principal, prefix: str, limit: int) -> list[list[str]]:
    """The names of each page, up to the last."""
    found: list[list[str]] = []
    after: TopicName | None = None
    while True:
        page, after = await service.topics(who, prefix, after=after, limit=limit)
        found.append([str(spec.name) for spec in page])
        if after is None:
            return found


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
@pytest.mark.parametrize("prefix", ["", "shop", "shop/", "shop/orders", "z"])
@pytest.mark.parametrize(
    "prefixes", [("shop/",), ("shop/orders", "shop/orders2", "shop2/one"), ("audit/", "zoo/z", "shop/b"), ("none/",)]
)
def test_all_pages_together_are_what_the_caller_may_see(prefixes: tuple[str, ...], prefix: str, limit: int) -> None:
    who = caller(*prefixes)
    expected = [str(name) for name in listed(who, map(TopicName.parse, OWN)) if str(name).startswith(prefix)]

    found = with_service([*OWN, *FOREIGN[::250]], lambda service: pages(service, who, prefix, limit))

    assert [name for page in found for name in page] == expected
    assert all(len(page) == limit for page in found[:-1])


@pytest.mark.slow
def test_topics_of_others_are_not_read_to_fill_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    async def counted(service: Service) -> list[list[str]]:
        kind: type[MetadataStore] = type(service.metadata)
        plain = kind.range

        def count(
            store: MetadataStore, prefix: str, *, start_after: str | None = None, limit: int | None = None
        ) -> object:
            entries = plain(store, prefix, start_after=start_after, limit=limit)
            if "/topics/" in prefix:
                read.append(len(entries))
            return entries

        monkeypatch.setattr(kind, "range", count)
        return await pages(service, caller("shop/", "zoo/z"), "", 2)

    assert with_service([*OWN, *FOREIGN], counted) == [["shop/a", "shop/b"], ["shop/orders", "shop/orders2"], ["zoo/z"]]
    assert len(read) <= 5
    assert sum(read) == 5


@pytest.mark.slow
def test_topics_are_counted_by_a_thread_when_one_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop once walked over the names of all topics with each creation."""
    walkers: list[str] = []

    def walked(who: Principal, names: Iterable[TopicName]) -> list[TopicName]:
        walkers.append(threading.current_thread().name)
        return listed(who, names)

    monkeypatch.setattr(service, "listed", walked)

    async def create(made: Service) -> None:
        who = Principal(name="own", scopes=frozenset(AccessScope), prefixes=frozenset(["new/"]))
        for number in range(3):
            await made.create_topic(who, TopicName("new", f"t{number}"))

    with_service(FOREIGN, create)
    assert len(walkers) == 1, "once a second"
    assert threading.current_thread().name not in walkers


def test_a_limit_on_topics_holds_for_each_caller_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "COUNT_SECONDS", -1.0)

    async def create(made: Service) -> None:
        seen: list[tuple[int, int]] = []
        monkeypatch.setattr(made.quotas, "check_topics", lambda *, total, below: seen.append((total, below)))
        for prefix in ("new/", "more/", "new/"):
            who = Principal(name=prefix, scopes=frozenset(AccessScope), prefixes=frozenset([prefix]))
            await made.create_topic(who, TopicName(prefix[:-1], f"t{len(seen)}"))
        assert seen == [(2, 0), (3, 0), (4, 1)]

    with_service(["aaa/a", "aaa/b"], create)
