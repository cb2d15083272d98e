"""Records that only look like dead letters: none is replayed unless the one who replays names its origin."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

import forebay
from forebay import EARLIEST, Forbidden, Invalid, SpentReason, aio
from forebay.aio.topic import AsyncTopic
from forebay.records import DeadLetter, Headers, LetterPlace, Record
from forebay.routers import Routers
from forebay.service import deadletters as service
from forebay.service.principals import AccessScope, Principal
from forebay.service.subscriptions import ServedSubscriptions
from forebay.storage import Storage, Topic
from forebay.storage.deadletters import REPLAY_READER
from forebay.subscriptions import deadletters
from forebay.topics import TopicName
from tests.support.brokers import running_broker
from tests.support.waiting import until

FORGED: Final[Headers] = (
    ("forebay-origin-topic", b"payments/ledger"),
    ("forebay-origin-partition", b"0"),
    ("forebay-origin-offset", b"7"),
    ("forebay-subscription", b"audit"),
    ("forebay-attempts", b"3"),
    ("forebay-reason", SpentReason.NACK.encode()),
    ("forebay-dead-at", b"1"),
)


def _spent(log: Storage, dead: str = "a") -> list[DeadLetter]:
    """Two genuine letters of `payments/ledger` in a topic that others may write to."""
    ledger = log.create_topic("payments/ledger", exist_ok=True)
    subscription = ledger.subscribe(
        "audit", start=EARLIEST, deliveries_max=1, on_spent="dead_letter", dead_letter_topic=dead
    )
    ledger.append_many([b"pay 1", b"pay 2"], keys=[b"k", None], tags=["t", None], headers=[{"h": b"1"}, None])
    with subscription.consumer() as consumer:
        consumer.nack(*consumer.take(), error="no")
        assert consumer.take() == []
    return log.topic(dead).dead_letters().letters()


def _values(topic: Topic) -> list[bytes | None]:
    return [record.value for record in topic.read()]


def _stored(topic: Topic, place: LetterPlace) -> Record:
    return next(record for record in topic.read(partition=place.partition) if record.offset == place.offset)


def _append(topic: Topic, record: Record, **changed: Any) -> None:
    """Append what a record of another place says, but for what is changed."""
    fields = {name: getattr(record, name) for name in ("key", "tag", "headers", "timestamp")} | changed
    topic.append(fields.pop("value", record.value), **fields)


def test_letters_that_a_subscription_has_sent_are_vouched_for_and_replayed(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as log:
        assert [letter.is_vouched for letter in _spent(log)] == [True, True]
    with forebay.open(tmp_path) as log:
        letters = log.topic("a").dead_letters()
        assert [letter.is_vouched for letter in letters.letters()] == [True, True], "in another life, too"
        assert letters.letters()[0].record.headers == (("h", b"1"),)
        assert letters.replay() == 2
        assert _values(log.topic("payments/ledger")) == [b"pay 1", b"pay 2"] * 2


def test_a_forged_letter_is_shown_as_one_and_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with forebay.open(tmp_path) as log:
        ledger, topic = log.create_topic("payments/ledger"), log.create_topic("a")
        topic.append(b"pay mallory", headers=FORGED)
        letters = topic.dead_letters()
        [shown] = letters.letters()
        assert (shown.topic, shown.is_vouched) == ("payments/ledger", False)

        with caplog.at_level(logging.WARNING):
            assert letters.replay() == 0
        assert "1 records of default/a stay: it says that it is a dead letter of payments/ledger" in caplog.text
        assert letters.replay(to="payments/ledger") == 0, "another target is no reason to trust it"
        with pytest.raises(Invalid, match=r"default/a\[0\] at offset 0: .* --origin payments/ledger"):
            letters.replay([LetterPlace(0, 0)])
        assert letters.replay(origins=["payments/other"]) == 0
        assert (_values(ledger), _values(topic)) == ([], [b"pay mallory"])

        assert letters.replay(origins=["payments/ledger"]) == 1, "letters of earlier versions have no seal"
        assert (_values(ledger), _values(topic)) == ([b"pay mallory"], [])


@pytest.mark.parametrize("changed", ["value", "key", "tag", "timestamp", "own header", "origin", "error", "no seal"])
def test_a_letter_that_was_changed_is_no_longer_vouched_for(tmp_path: Path, changed: str) -> None:
    with forebay.open(tmp_path) as log:
        genuine = _spent(log)[0]
        topic = log.topic("a")
        record = _stored(topic, genuine.place)
        headers = {
            "own header": (("h", b"2"), *record.headers[1:]),
            "origin": tuple(
                (name, b"x/y" if name == deadletters.ORIGIN_TOPIC else text) for name, text in record.headers
            ),
            "error": tuple((name, b"yes" if name == deadletters.ERROR else text) for name, text in record.headers),
            "no seal": record.headers[:-1],
        }
        fields = {"value": b"pay mallory", "key": b"other", "tag": "other", "timestamp": 1}
        change = {"headers": headers[changed]} if changed in headers else {changed: fields[changed]}
        _append(topic, record, **change)
        assert [letter.is_vouched for letter in topic.dead_letters().letters()] == [True, True, False]


def test_a_letter_in_another_topic_is_none_that_was_sent_there(tmp_path: Path) -> None:
    """By copy, by router and by hand: the seal is for the topic that the subscription has sent it to."""
    with forebay.open(tmp_path) as log:
        genuine = _spent(log)
        source = log.topic("a")
        copied, routed = log.create_topic("copied"), log.create_topic("routed")
        log.copy_topic("a", "copied")
        routers = Routers(log)
        routers.create("r", sources=["a"], destination="routed", start=EARLIEST)
        with routers.running():
            until(lambda: len(_values(routed)) == 2)
        by_hand = log.create_topic("by-hand")
        for letter in genuine:
            _append(by_hand, _stored(source, letter.place))
        for topic in (copied, routed, by_hand):
            assert [letter.is_vouched for letter in topic.dead_letters().letters()] == [False, False], topic.name
            assert topic.dead_letters().replay() == 0
        # Nor is one that comes back by a router as a forged record that a router has written.
        forged, back = log.create_topic("forged"), log.create_topic("back")
        forged.append(b"pay mallory", headers=FORGED)
        routers.create("back", sources=["forged"], destination="back", start=EARLIEST)
        with routers.running():
            until(lambda: _values(back) == [b"pay mallory"])
        assert back.dead_letters().replay() == 0
        assert _values(log.topic("payments/ledger")) == [b"pay 1", b"pay 2"]


def test_a_replay_that_a_caller_has_noted_is_not_finished(tmp_path: Path) -> None:
    """A caller that may read a topic may move cursors in it, also that of replays, with any note."""
    with forebay.open(tmp_path) as log:
        ledger, topic = log.create_topic("payments/ledger"), log.create_topic("a")
        topic.append(b"pay mallory", headers=FORGED)
        note = {
            "target": ledger.name,
            "target_id": ledger.spec.topic_id,
            "partitions": 1,
            "sequence": 0,
            "offsets": [0],
            "seal": "0" * 64,
        }
        log.group(REPLAY_READER).commit("a", 0, note=msgspec.json.encode(note).decode())
        topic.reader(REPLAY_READER).reset(EARLIEST, 0, msgspec.json.encode(note).decode())
        with pytest.raises(Invalid, match="nothing says that this log has begun it"):
            topic.dead_letters().replay()
        assert _values(ledger) == []
        log.group(REPLAY_READER).delete()
        assert topic.dead_letters().replay() == 0


@pytest.mark.slow
def test_over_http_a_forged_letter_stays_unless_its_origin_is_named(tmp_path: Path) -> None:
    with running_broker(tmp_path) as broker:
        log = broker.log()
        _spent(log)
        topic, ledger = log.topic("a"), log.topic("payments/ledger")
        topic.append(b"pay mallory", headers=FORGED)
        with forebay.connect(broker.url) as remote:
            letters = remote.topic("a").dead_letters()
            assert [letter.is_vouched for letter in letters.letters()] == [True, True, False]
            assert not letters.get(2).is_vouched
            with pytest.raises(Invalid, match="nothing vouches for that"):
                letters.replay([LetterPlace(0, 2)])
            assert letters.replay() == 2
            assert (_values(ledger)[2:], _values(topic)) == ([b"pay 1", b"pay 2"], [b"pay mallory"])
            assert letters.replay(to="payments/ledger") == 0
            assert letters.replay(origins=["payments/ledger"]) == 1
            assert (_values(ledger)[4:], _values(topic)) == ([b"pay mallory"], [])


@pytest.mark.parametrize("origins", [[], [TopicName.parse("payments/ledger")]], ids=["none named", "named"])
def test_the_one_who_replays_needs_the_right_to_write_to_each_origin(tmp_path: Path, origins: list[TopicName]) -> None:
    scopes = frozenset(AccessScope)
    clerk = Principal(name="clerk", scopes=scopes, prefixes=frozenset(["default/"]))

    async def replay(*, is_forged: bool) -> int:
        async with aio.open(tmp_path) as log:

            async def readable(who: Principal, name: TopicName) -> AsyncTopic:
                return await log.topic(name)

            quotas: Any = None
            served = service.ServedDeadLetters(readable, ServedSubscriptions(readable, log.topic, quotas))
            places = [LetterPlace(0, 2)] if is_forged else None
            return await served.replay(clerk, service.LettersRef(TopicName.parse("a")), places, None, origins)

    with forebay.open(tmp_path) as log:
        _spent(log)
        log.topic("a").append(b"pay mallory", headers=FORGED)
    for is_forged in (False, True):
        with pytest.raises(Forbidden):
            asyncio.run(replay(is_forged=is_forged))
    with forebay.open(tmp_path) as log:
        assert _values(log.topic("payments/ledger")) == [b"pay 1", b"pay 2"]
        assert len(_values(log.topic("a"))) == 3
