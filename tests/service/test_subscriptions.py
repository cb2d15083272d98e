"""Callers that subscribe, where another call comes in between or the caller goes."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from typing import Any

import pytest

from forebay import Conflict, Forbidden, aio
from forebay.aio.log import AsyncLog
from forebay.aio.subscriptions import AsyncConsumer, AsyncSubscription
from forebay.aio.topic import AsyncTopic
from forebay.clock import SystemClock
from forebay.format.metadata.keys import PREFIX
from forebay.records import EARLIEST, DeliveredRecord
from forebay.service.principals import AccessScope, Principal
from forebay.service.quotas import Quotas
from forebay.service.subscriptions import ConsumerSession, ServedSubscriptions, SubscriptionRef
from forebay.settings import ServerSettings
from forebay.storage.subscriptions import Fetched, SubscriptionDriver
from forebay.subscriptions.definitions import SubscriptionStore
from forebay.subscriptions.dispatch import Dispatch
from forebay.testing.inside import inside
from forebay.topics import SubscriptionOptions, TopicName
from tests.support.gates import HeldStep, StepGate
from tests.support.waiting import PATIENCE, async_until

READER = Principal(name="r", scopes=frozenset({AccessScope.READ}), prefixes=frozenset(["*"]))

REF = SubscriptionRef(TopicName("shop", "orders"), "s")


async def served_by(log: AsyncLog) -> ServedSubscriptions:
    """A server with a topic that has the subscription `REF`."""
    topic = await log.create_topic("shop/orders")
    await topic.subscribe("s", start=EARLIEST)

    async def readable(_who: Principal, _name: TopicName) -> AsyncTopic:
        return topic

    return ServedSubscriptions(readable, log.topic, Quotas(ServerSettings(), SystemClock()))


def takes() -> list[asyncio.Task[Any]]:
    """The takes of consumers that are under way."""
    return [task for task in asyncio.all_tasks() if "AsyncConsumer.take" in repr(task.get_coro())]


def test_a_pull_whose_caller_goes_when_its_records_have_just_come_has_taken_nothing() -> None:
    async def go() -> list[tuple[int, int]]:
        async with aio.open(":memory:") as log:
            topic = await log.create_topic("shop/orders")
            subscription = await topic.subscribe("s", start=EARLIEST, mode="shared", ack_timeout_ms=600_000)
            async with subscription.consumer() as consumer, subscription.consumer() as other:
                session = ConsumerSession(READER, subscription.spec, consumer, 60.0, ExitStack())
                pulling = asyncio.create_task(session.pull(10, bytes_max=1000, wait_s=60.0))
                # It waits, with a callback that has it go on; the next one comes after that.
                await async_until(takes)
                (taking,) = takes()
                taking.add_done_callback(lambda _: pulling.cancel())
                await topic.append(b"a")
                with pytest.raises(asyncio.CancelledError):
                    await pulling
                found = await other.take(wait_s=1.0)
                return [(each.record.offset, each.attempt) for each in found]

    assert asyncio.run(go()) == [(0, 1)]


class Gated(AsyncConsumer):
    """A consumer whose takes come back when the test says so."""

    at_gate: asyncio.Event
    gate: asyncio.Event

    async def take(
        self, records_max: int = 100, *, wait_s: float = 0.0, bytes_max: int | None = None
    ) -> list[DeliveredRecord]:
        found = await super().take(records_max, wait_s=wait_s, bytes_max=bytes_max)
        self.at_gate.set()
        await self.gate.wait()
        return found


def test_a_pull_that_begins_when_an_earlier_one_has_just_got_records_gets_them() -> None:
    async def pull_twice() -> tuple[BaseException | None, list[tuple[int, int]]]:
        async with aio.open(":memory:") as log:
            topic = await log.create_topic("shop/orders")
            await topic.append(b"a")
            subscription = await topic.subscribe("s", start=EARLIEST, ack_timeout_ms=600_000)
            async with subscription.consumer() as consumer:
                consumer.__class__, at_gate, gate = Gated, asyncio.Event(), asyncio.Event()
                vars(consumer).update(at_gate=at_gate, gate=gate)
                session = ConsumerSession(READER, subscription.spec, consumer, 60.0, ExitStack())
                first = asyncio.create_task(session.pull(10, bytes_max=1000, wait_s=60.0))
                await at_gate.wait()
                gate.set()
                found = await asyncio.create_task(session.pull(10, bytes_max=1000, wait_s=1.0))
                await asyncio.wait((first,))
                return first.exception(), [(each.record.offset, each.attempt) for each in found.records]

    error, found = asyncio.run(pull_twice())

    assert found == [(0, 1)]
    assert isinstance(error, Conflict)


def test_what_a_thread_has_claimed_for_a_pull_that_was_given_up_comes_with_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In order, and at once: the next one waits for that thread."""
    fetch, has_claimed, may_return = SubscriptionDriver.fetch, threading.Event(), threading.Event()

    def slow(driver: SubscriptionDriver, *args: Any) -> list[Fetched]:
        found = fetch(driver, *args)
        if found and not has_claimed.is_set():
            has_claimed.set()
            assert may_return.wait(PATIENCE)
        return found

    def cached(_driver: SubscriptionDriver, *_args: Any) -> None:
        return None

    async def pull_twice() -> list[tuple[int, int]]:
        async with aio.open(":memory:") as log:
            topic = await log.create_topic("shop/orders")
            await topic.append_many([b"a", b"b"])
            subscription = await topic.subscribe("s", start=EARLIEST, ack_timeout_ms=600_000)
            monkeypatch.setattr(SubscriptionDriver, "fetch", slow)
            monkeypatch.setattr(SubscriptionDriver, "fetch_cached", cached)
            async with subscription.consumer() as consumer:
                session = ConsumerSession(READER, subscription.spec, consumer, 60.0, ExitStack())
                first = asyncio.create_task(session.pull(10, bytes_max=1000, wait_s=60.0))
                assert await asyncio.to_thread(has_claimed.wait, PATIENCE)
                second = asyncio.create_task(session.pull(10, bytes_max=1000, wait_s=0.0))
                # A moment in which it would come back without them.
                await asyncio.sleep(0.3)
                may_return.set()
                found = await second
                await asyncio.wait((first,))
                assert isinstance(first.exception(), Conflict)
                return [(each.record.offset, each.attempt) for each in found.records]

    assert asyncio.run(pull_twice()) == [(0, 1), (1, 1)]


def test_spent_records_are_sent_by_an_alteration_only_where_its_caller_may_write() -> None:
    ref = SubscriptionRef(TopicName("shop", "orders"), "s")
    writer = Principal(name="w", scopes=frozenset({AccessScope.READ, AccessScope.WRITE}), prefixes=frozenset(["*"]))

    async def alter() -> list[str | None]:
        async with aio.open(":memory:") as log:
            await log.create_topic("shop/secret")
            topic = await log.create_topic("shop/orders")
            subscription = await topic.subscribe("s", deliveries_max=1)

            async def readable(_who: Principal, _name: TopicName) -> AsyncTopic:
                return topic

            served = ServedSubscriptions(readable, log.topic, Quotas(ServerSettings(), SystemClock()))
            found = [(await served.alter(READER, ref, {"deliveries_max": 2})).dead_letter_topic]
            with pytest.raises(Forbidden):
                await served.alter(READER, ref, {"on_spent": "dead_letter", "dead_letter_topic": "shop/secret"})
            with pytest.raises(Forbidden):
                # The topic of that name would have to be made.
                await served.alter(writer, ref, {"on_spent": "dead_letter"})
            found.append(subscription.spec.dead_letter_topic)
            await served.alter(writer, ref, {"on_spent": "dead_letter", "dead_letter_topic": "shop/secret"})
            with pytest.raises(Forbidden):
                await served.alter(READER, ref, {"dead_letter_topic": "shop/orders.s.dead_letters"})
            return [*found, (await served.alter(READER, ref, {"ack_timeout_ms": 7})).dead_letter_topic]

    assert asyncio.run(alter()) == [None, None, "shop/secret"]


def test_a_subscription_that_is_deleted_during_the_call_is_not_created_without_rights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A caller that may only read deletes the subscription just after the broker has found it."""
    options: SubscriptionOptions = {"deliveries_max": 1, "on_spent": "dead_letter", "dead_letter_topic": "shop/secret"}
    ref = SubscriptionRef(TopicName("shop", "orders"), "s")

    async def race() -> list[str]:
        async with aio.open(":memory:") as log:
            await log.create_topic("shop/secret")
            topic = await log.create_topic("shop/orders")

            async def readable(_who: Principal, _name: TopicName) -> AsyncTopic:
                return topic

            served = ServedSubscriptions(readable, log.topic, Quotas(ServerSettings(), SystemClock()))
            with pytest.raises(Forbidden):
                await served.create(READER, ref, EARLIEST, options)
            await topic.subscribe("s", **options)
            subscription = AsyncTopic.subscription

            async def deleted(self: AsyncTopic, name: str) -> AsyncSubscription:
                found = await subscription(self, name)
                await found.delete()
                return found

            monkeypatch.setattr(AsyncTopic, "subscription", deleted)
            await served.create(READER, ref, EARLIEST, options)
            return [spec.name for spec in await topic.subscriptions()]

    assert asyncio.run(race()) == []


def test_a_server_that_ends_has_its_consumers_leave() -> None:
    async def go() -> tuple[list[str], list[str]]:
        async with aio.open(":memory:") as log:
            served = await served_by(log)
            await served.attach(READER, REF, "one", name="one", unacked_max=10, timeout_s=60.0)
            subscription = await (await log.topic("shop/orders")).subscription("s")
            before = await subscription.consumers()
            await served.close()
            return before, await subscription.consumers()

    assert asyncio.run(go()) == (["one"], [])


def test_a_consumer_of_a_subscription_that_was_made_again_is_attached_to_the_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another process has deleted it meanwhile: there the consumers of this one are not known."""

    async def go() -> tuple[str, str, str]:
        async with aio.open(":memory:") as log:
            served = await served_by(log)
            first = await served.attach(READER, REF, "one", name="one", unacked_max=10, timeout_s=60.0)
            topic = await log.topic("shop/orders")
            subscription = await topic.subscription("s")
            with monkeypatch.context() as elsewhere:
                elsewhere.setattr(Dispatch, "consumers", [])
                await subscription.delete()
            made = await topic.subscribe("s", start=EARLIEST)
            again = await served.attach(READER, REF, "one", name="one", unacked_max=10, timeout_s=60.0)
            await served.close()
            return first.spec.subscription_id, made.spec.subscription_id, again.spec.subscription_id

    first, made, again = asyncio.run(go())
    assert first != made == again


@pytest.mark.parametrize("is_new_first", [True, False], ids=["found before", "found after"])
def test_an_attempt_to_attach_to_an_earlier_subscription_is_not_given_to_a_call_for_the_new_one(
    is_new_first: bool,  # noqa: FBT001 - parametrized
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first attempt stands inside a slow step while another process deletes the subscription and makes it again."""
    gate = StepGate()
    HeldStep(Dispatch, "attach", "before").guard(monkeypatch, gate)
    attached: dict[str, Any] = {"name": "one", "unacked_max": 10, "timeout_s": 60.0}

    async def go() -> tuple[str, str, list[str]]:
        async with aio.open(":memory:") as log:
            served = await served_by(log)
            topic = await log.topic("shop/orders")
            before = (await topic.subscription("s")).spec
            gate.armed.set()
            first = asyncio.create_task(served.attach(READER, REF, "one", **attached))
            await async_until(gate.reached.is_set)
            SubscriptionStore(inside(log).metadata, PREFIX, SystemClock()).remove(before)
            made = await topic.subscribe("s", start=EARLIEST)
            if not is_new_first:
                gate.released.set()
            second = asyncio.create_task(served.attach(READER, REF, "one", **attached))
            # A moment in which it would come to wait for the attempt of the first.
            await asyncio.sleep(0.05)
            gate.released.set()
            again = await second
            await asyncio.wait((first,))
            names = await made.consumers()
            assert await served.session(READER, REF, "one") is again
            await served.close()
            return made.spec.subscription_id, again.spec.subscription_id, names

    made, again, names = asyncio.run(go())
    assert (again, names) == (made, ["one"])
