"""Replays and purges of dead letters that cannot go on, or are about many: each letter is somewhere exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import EARLIEST, Full, Invalid, Moved, aio
from forebay.aio.deadletters import AsyncDeadLetters
from forebay.aio.topic import AsyncTopic
from forebay.records import LetterPlace
from forebay.service import deadletters as service
from forebay.service.principals import AccessScope, Principal
from forebay.service.subscriptions import ServedSubscriptions
from forebay.storage import deadletters
from forebay.storage.topic import Topic
from forebay.topics import TopicName

EVERYTHING = Principal(name="ann", scopes=frozenset(AccessScope), prefixes=frozenset(["*"]))


class Killed(BaseException):
    """The process ends here."""


def spent(log: forebay.Storage) -> forebay.Subscription:
    """One dead letter of partition 0 and then three of partition 1, all in one partition of `dead`."""
    orders = log.create_topic("shop/orders", partitions=2)
    subscription = orders.subscribe(
        "s", start=EARLIEST, deliveries_max=1, on_spent="dead_letter", dead_letter_topic="dead"
    )
    for partition, values in ((0, [b"a"]), (1, [b"b", b"c", b"d"])):
        orders.append_many(values, partition=partition)
        with subscription.consumer() as consumer:
            consumer.nack(*consumer.take())
            assert consumer.take() == []
    return subscription


def values(topic: forebay.Topic) -> list[bytes]:
    return sorted(
        record.value or b"" for partition in range(topic.partitions) for record in topic.read(partition=partition)
    )


def left(subscription: forebay.Subscription) -> list[bytes | None]:
    return [letter.record.value for letter in subscription.dead_letters().letters()]


def test_a_target_that_stays_full_keeps_no_letter_from_another(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as log:
        subscription = spent(log)
        letters = subscription.dead_letters()
        small = log.create_topic("small", partitions=2, cap_records=2, on_full="reject_new")
        other = log.create_topic("other")

        for _ in range(2):
            with pytest.raises(Full, match=r"small refuses dead letters of default/dead\[0\]") as refused:
                letters.replay(to="small")
            assert left(subscription) == [b"b", b"c", b"d"]
        assert "(0 were replayed)" in str(refused.value)

        assert letters.replay(to="other") == 3
        assert (values(small), values(other), left(subscription)) == ([b"a"], [b"b", b"c", b"d"], [])
        assert log.groups() == ["s"]


def test_a_replay_that_was_killed_on_its_way_into_a_full_topic_is_taken_back_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Topic.append_many

    def killed(topic: Topic, given: Iterable[bytes | None], **options: Any) -> Any:
        if topic.name == "default/small" and options["partition"] == 1:
            raise Killed
        return append(topic, given, **options)

    with forebay.open(tmp_path) as log:
        subscription = spent(log)
        log.create_topic("small", partitions=2, cap_records=2, on_full="reject_new")
        log.create_topic("other")
        with monkeypatch.context() as patch:
            patch.setattr(Topic, "append_many", killed)
            with pytest.raises(Killed):
                subscription.dead_letters().replay(to="small")
    with forebay.open(tmp_path) as log:
        subscription = log.topic("shop/orders").subscription("s")
        assert left(subscription) == [b"a", b"b", b"c", b"d"]

        assert subscription.dead_letters().replay(to="other") == 4

        assert (values(log.topic("small")), values(log.topic("other"))) == ([b"a"], [b"b", b"c", b"d"])
        assert left(subscription) == []


def test_a_target_that_refuses_a_record_for_good_keeps_no_letter_from_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one in memory does for a batch that is larger than all of it."""
    append = Topic.append_many

    def refused(topic: Topic, given: Iterable[bytes | None], **options: Any) -> Any:
        if topic.name == "default/picky":
            raise Invalid("too large for this topic")
        return append(topic, given, **options)

    monkeypatch.setattr(Topic, "append_many", refused)
    with forebay.open(":memory:") as log:
        subscription = spent(log)
        log.create_topic("picky")

        with pytest.raises(Invalid, match="picky refuses .* too large for this topic; replay them again"):
            subscription.dead_letters().replay(to="picky")

        assert subscription.dead_letters().replay() == 4
        assert values(log.topic("shop/orders")) == sorted([b"a", b"b", b"c", b"d"] * 2)


def test_what_may_have_arrived_at_another_owner_is_not_replayed_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = Topic.flush

    def killed(topic: Topic) -> None:
        flush(topic)
        if topic.name == "default/far":
            raise Killed

    with forebay.open(tmp_path) as log:
        subscription = spent(log)
        log.create_topic("far")
        log.create_topic("other")
        with monkeypatch.context() as patch:
            patch.setattr(Topic, "flush", killed)
            with pytest.raises(Killed):
                subscription.dead_letters().replay(to="far")
    refused = {"far"}
    with forebay.open(tmp_path, may_own=lambda ref: ref.spec.topic not in refused) as log:
        letters = log.topic("shop/orders").subscription("s").dead_letters()
        with pytest.raises(Moved, match=r"an earlier replay of default/dead\[0\] into default/far is not finished"):
            letters.replay(to="other")
        refused.clear()
        assert letters.replay(to="other") == 4
        assert (values(log.topic("far")), values(log.topic("other"))) == ([b"a", b"b", b"c", b"d"], [])


def test_a_target_of_another_process_is_named_with_its_owner_and_the_way_out(tmp_path: Path) -> None:
    shared = {
        "storage": {"mode": "shared_fs"},
        "store": {"root": str(tmp_path / "store")},
        "metadata": {"path": str(tmp_path / "meta.db")},
    }
    with forebay.open(tmp_path / "one", shared) as one, forebay.open(tmp_path / "two", shared) as two:
        subscription = spent(one)
        one.create_topic("here")
        two.create_topic("far").append(b"its owner is two")

        for _ in range(2):
            with pytest.raises(Moved) as refused:
                subscription.dead_letters().replay(to="far")
            said = str(refused.value)
            assert "dead letters of default/dead[0] stay (0 were replayed)" in said
            assert "default/far[0] is owned by the living session" in said and str(tmp_path / "two") in said
            assert "replay them into a topic that this process owns (to=, --to)" in said and "topic move" in said
            assert (refused.value.topic, refused.value.partition) == ("default/far", 0)
        assert left(subscription) == [b"a", b"b", b"c", b"d"]

        assert subscription.dead_letters().replay(to="here") == 4
        assert values(two.topic("far")) == [b"its owner is two"]


def test_a_purge_keeps_few_places_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = []
    delete = Topic.delete_by_offset

    def seen(topic: Topic, start: int, stop: int, partition: int) -> int:
        ranges.append((start, stop))
        return delete(topic, start, stop, partition)

    monkeypatch.setattr(deadletters, "PURGE_MAX", 3)
    monkeypatch.setattr(Topic, "delete_by_offset", seen)
    with forebay.open(":memory:") as log:
        subscription = spent(log)

        assert subscription.dead_letters().purge() == 4

        assert left(subscription) == []
    assert ranges == [(0, 3), (3, 4)]


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many places each replay for a caller of a server is about."""
    sizes: list[int] = []
    replay = AsyncDeadLetters.replay

    async def seen(letters: AsyncDeadLetters, places: list[LetterPlace], **options: Any) -> int:
        sizes.append(len(places))
        return await replay(letters, places, **options)

    monkeypatch.setattr(service, "LOOKED_AT", 3)
    monkeypatch.setattr(AsyncDeadLetters, "replay", seen)
    yield sizes


@pytest.mark.slow
def test_a_replay_for_a_caller_goes_page_by_page_and_ends_though_letters_come_back(replayed: list[int]) -> None:
    """A consumer refuses each record that is replayed at once, so that there is always another dead letter."""

    async def replay() -> tuple[int, list[bytes]]:
        async with aio.open(":memory:") as log:
            topic = await log.create_topic("shop/orders")
            await topic.append_many([b"%d" % number for number in range(5)])
            subscription = await topic.subscribe("s", start=EARLIEST, deliveries_max=1, on_spent="dead_letter")
            dead = await log.topic("shop/orders.s.dead_letters")

            async def readable(_who: Principal, name: TopicName) -> AsyncTopic:
                return topic if name.topic == "orders" else dead

            quotas: Any = None
            served = service.ServedDeadLetters(readable, ServedSubscriptions(readable, log.topic, quotas))
            async with subscription.consumer() as consumer:

                async def refuse() -> None:
                    while taken := await consumer.take(wait_s=0.2):
                        await consumer.nack(*taken)

                await refuse()
                replaying = asyncio.create_task(
                    served.replay(EVERYTHING, service.LettersRef(TopicName.parse(dead.name)), None, None)
                )
                while not replaying.done():
                    await refuse()
                count = await replaying
                await refuse()
                letters = await (await subscription.dead_letters()).letters()
            return count, sorted(letter.record.value or b"" for letter in letters)

    count, found = asyncio.run(replay())

    assert count == 5
    assert found == [b"%d" % number for number in range(5)], "each came back once"
    assert sum(replayed) == 5 and max(replayed) <= 3
