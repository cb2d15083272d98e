"""Rights of callers that subscribe, where another call comes in between."""

from __future__ import annotations

import asyncio

import pytest

from forebay import Forbidden, aio
from forebay.aio.subscriptions import AsyncSubscription
from forebay.aio.topic import AsyncTopic
from forebay.clock import SystemClock
from forebay.records import EARLIEST
from forebay.service.principals import AccessScope, Principal
from forebay.service.quotas import Quotas
from forebay.service.subscriptions import ServedSubscriptions, SubscriptionRef
from forebay.settings import ServerSettings
from forebay.topics import SubscriptionOptions, TopicName


def test_a_subscription_that_is_deleted_during_the_call_is_not_created_without_rights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A caller that may only read deletes the subscription just after the broker has found it."""
    options: SubscriptionOptions = {"deliveries_max": 1, "on_spent": "dead_letter", "dead_letter_topic": "shop/secret"}
    reader = Principal(name="r", scopes=frozenset({AccessScope.READ}), prefixes=frozenset(["*"]))
    ref = SubscriptionRef(TopicName("shop", "orders"), "s")

    async def race() -> list[str]:
        async with aio.open(":memory:") as log:
            await log.create_topic("shop/secret")
            topic = await log.create_topic("shop/orders")

            async def readable(_who: Principal, _name: TopicName) -> AsyncTopic:
                return topic

            served = ServedSubscriptions(readable, log.topic, Quotas(ServerSettings(), SystemClock()))
            with pytest.raises(Forbidden):
                await served.create(reader, ref, EARLIEST, options)
            await topic.subscribe("s", **options)
            subscription = AsyncTopic.subscription

            async def deleted(self: AsyncTopic, name: str) -> AsyncSubscription:
                found = await subscription(self, name)
                await found.delete()
                return found

            monkeypatch.setattr(AsyncTopic, "subscription", deleted)
            await served.create(reader, ref, EARLIEST, options)
            return [spec.name for spec in await topic.subscriptions()]

    assert asyncio.run(race()) == []
