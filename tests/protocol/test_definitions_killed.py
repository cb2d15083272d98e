"""Kills inside the creation, change and deletion of routers, and of subscriptions with dead letters."""

from __future__ import annotations

from collections import Counter
from typing import Final

import pytest

from forebay import EARLIEST, LATEST
from forebay.routers import Routers
from forebay.storage import Storage, Topic
from tests.ledger import Ledger
from tests.protocol.above import hasten, values
from tests.protocol.killed import KilledCall, kill_inside
from tests.support.waiting import until

pytestmark = pytest.mark.slow


def _fill(log: Storage, numbers: range) -> None:
    for number in numbers:
        for tag in "xy":
            log.topic("a").append(b"%s%d" % (tag.encode(), number), tag=tag, key=b"k%d" % number)


def _topics(log: Storage) -> None:
    log.create_topic("a", partitions=2, durability="fsync")
    log.create_topic("b", partitions=2, durability="fsync")
    _fill(log, range(3))


def _routed(log: Storage, routers: Routers, last: bytes) -> Counter[bytes | None]:
    with pytest.MonkeyPatch.context() as patched, routers.running():
        hasten(patched)
        until(lambda: routers.status("r").lag == 0 and last in values(log.topic("b")))
    return Counter(values(log.topic("b")))


def _once(*wanted: str) -> Counter[bytes | None]:
    return Counter(value.encode() for value in wanted)


# Routers


def _create(log: Storage) -> None:
    """From the end on: a router without its cursors would begin at the first record."""
    Routers(log).create("r", sources=["a"], destination="b", start=LATEST, tags=["x"])


def _check_created(log: Storage, is_done: bool) -> None:  # noqa: FBT001 - told by the harness
    routers = Routers(log)
    if not routers.all():
        assert not is_done
        _create(log)
    _fill(log, range(3, 4))
    assert _routed(log, routers, b"x3") == _once("x3")


def _created(log: Storage) -> None:
    _topics(log)
    Routers(log).create("r", sources=["a"], destination="b", start=EARLIEST, tags=["x"])
    with pytest.MonkeyPatch.context() as patched:
        hasten(patched)
        assert _routed(log, Routers(log), b"x2") == _once("x0", "x1", "x2")


def _alter(log: Storage) -> None:
    with pytest.MonkeyPatch.context() as patched:
        hasten(patched)
        routers = Routers(log)
        for tag in ("z", "y"):
            routers.alter("r", tags=[tag])
            # The partitions go over to the new rule, each in a transaction of its own.
            with routers.running():
                until(lambda: {note.split()[0] for note in _notes(log, routers)} == {str(routers.get("r").version)})


def _notes(log: Storage, routers: Routers) -> list[str]:
    reader = log.topic("a").reader(routers.get("r").reader)
    return [reader.note(partition) for partition in range(2)]


def _check_altered(log: Storage, is_done: bool) -> None:  # noqa: FBT001 - told by the harness
    routers = Routers(log)
    [tag] = routers.get("r").rule.tags
    assert tag == "y" or not is_done
    routers.alter("r", tags=["y"])
    _fill(log, range(3, 4))
    found = _routed(log, routers, b"y3")
    assert set(found.values()) == {1}
    # That a record behind the last one that arrived was left out may be stored nowhere.
    assert found.keys() - {b"y0", b"y1", b"y2"} == _once("x0", "x1", "x2", "y3").keys()


def _delete(log: Storage) -> None:
    Routers(log).delete("r")


def _check_deleted(log: Storage, is_done: bool) -> None:  # noqa: FBT001 - told by the harness
    routers = Routers(log)
    if routers.all():
        assert not is_done
        routers.delete("r")
    routers.create("r", sources=["a"], destination="b", start=LATEST, tags=["y"])
    _fill(log, range(3, 4))
    assert _routed(log, routers, b"y3") == _once("x0", "x1", "x2", "y3")


# Subscriptions with dead letters


def _records(log: Storage) -> None:
    topic = log.create_topic("a", partitions=2, durability="fsync")
    for number in range(6):
        topic.append(b"%d" % number, partition=number % 2)


def _subscribe(log: Storage) -> None:
    log.topic("a").subscribe("s", start=EARLIEST, deliveries_max=1, on_spent="dead_letter", dead_letter_topic="dead")


def _check_subscribed(log: Storage, is_done: bool) -> None:  # noqa: FBT001 - told by the harness
    topic = log.topic("a")
    if is_done:
        assert [subscription.name for subscription in topic.subscriptions()] == ["s"]
    _subscribe(log)
    _check_letters(log, topic, [b"1", b"4"], [b"0", b"2", b"3", b"5"])


def _check_letters(log: Storage, topic: Topic, dead: list[bytes], done: list[bytes]) -> None:
    """Consume everything: what is refused becomes a dead letter, once, and the rest was delivered once."""
    delivered: list[bytes | None] = []
    with topic.subscription("s").consumer() as consumer:
        while taken := consumer.take():
            for one in taken:
                if one.record.value in (b"1", b"4"):
                    consumer.nack(one, delay_ms=0)
                else:
                    delivered.append(one.record.value)
                    consumer.ack(one)
    letters = log.topic("dead").dead_letters().letters()
    assert sorted(letter.record.value or b"" for letter in letters) == dead
    assert all(letter.is_vouched for letter in letters)
    assert sorted(value or b"" for value in delivered) == done


def _subscribed(log: Storage) -> None:
    _records(log)
    log.topic("a").subscribe("s", start=EARLIEST, deliveries_max=1, on_spent="drop")


def _alter_subscription(log: Storage) -> None:
    log.topic("a").subscription("s").alter(on_spent="dead_letter", dead_letter_topic="dead")


def _check_altered_subscription(log: Storage, is_done: bool) -> None:  # noqa: FBT001 - told by the harness
    subscription = log.topic("a").subscription("s")
    assert subscription.spec.dead_letter_topic == "default/dead" or not is_done
    subscription.alter(on_spent="dead_letter", dead_letter_topic="dead")
    _check_letters(log, log.topic("a"), [b"1", b"4"], [b"0", b"2", b"3", b"5"])


CALLS: Final = {
    "create a router": KilledCall(_topics, _create, _check_created, 1),
    "alter a router": KilledCall(_created, _alter, _check_altered, 2),
    "delete a router": KilledCall(_created, _delete, _check_deleted, 1),
    "subscribe with dead letters": KilledCall(_records, _subscribe, _check_subscribed, 2),
    "alter a subscription to dead letters": KilledCall(
        _subscribed, _alter_subscription, _check_altered_subscription, 2
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_kill_inside_a_definition_leaves_it_as_before_or_as_after(name: str, ledger: Ledger) -> None:
    kill_inside(name, CALLS[name], ledger)
