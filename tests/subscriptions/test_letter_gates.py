"""Something ends, or changes, while dead letters are being sent or replayed: each is still somewhere once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import pytest

import forebay
from forebay import EARLIEST, Conflict, ForebayError, aio
from forebay.aio.subscriptions import AsyncSubscription
from forebay.storage import Storage, Topic
from forebay.storage.cursors import Reader
from forebay.storage.subscriptions import SubscriptionDriver
from forebay.subscriptions.dispatch import Dispatch
from forebay.testing.inside import inside
from tests.ledger import Ledger
from tests.support.gates import HeldStep, StepGate
from tests.support.soak import sampled
from tests.support.waiting import PATIENCE, async_until, until

pytestmark = pytest.mark.slow

POISON: Final = {b"1", b"3"}
SENDING: Final = [
    HeldStep(owner, name, when)
    for owner, name in [
        (SubscriptionDriver, "store_run"),
        (SubscriptionDriver, "records"),
        (Topic, "last_sequence"),
        (Topic, "append"),
        (Topic, "flush"),
        (Dispatch, "letters_arrived"),
        (Dispatch, "end_letters"),
    ]
    for when in ("before", "after")
]
REPLAYING: Final = [
    HeldStep(owner, name, when)
    for owner, name in [
        (Topic, "acquire"),
        (Topic, "page"),
        (Reader, "reset"),
        (Topic, "append_many"),
        (Topic, "flush"),
        (Topic, "delete_by_offset"),
    ]
    for when in ("before", "after")
]


@dataclass
class LettersPlay:
    """A subscription of `a` whose dead letters go to `dead`, and a call that is held inside a step."""

    log: Storage
    gate: StepGate
    consumer: forebay.Consumer
    errors: list[BaseException] = field(default_factory=list)

    @property
    def source(self) -> Topic:
        return self.log.topic("a")

    @property
    def dead(self) -> Topic:
        return self.log.topic("dead")

    def letters(self, topic: str = "dead") -> Counter[bytes | None]:
        return Counter(letter.record.value for letter in self.log.topic(topic).dead_letters().letters())

    def consume(self) -> list[bytes]:
        """Take all that is there; what is poison is refused, the rest acknowledged."""
        found: list[bytes] = []
        with self.source.subscription("s").consumer() as consumer:
            while taken := consumer.take(wait_s=0.05):
                for one in taken:
                    found.append(one.record.value or b"")
                    if one.record.value in POISON:
                        consumer.nack(one, delay_ms=0)
                    else:
                        consumer.ack(one)
        return sorted(found)

    @contextmanager
    def held(self, call: Callable[[], object]) -> Iterator[None]:
        """The call is inside its step while the block runs, and has ended after it."""

        def run() -> None:
            try:
                call()
            except ForebayError as error:
                self.errors.append(error)

        thread = threading.Thread(target=run)
        self.gate.armed.set()
        thread.start()
        try:
            assert self.gate.reached.wait(PATIENCE)
            yield
        finally:
            self.gate.released.set()
            thread.join(PATIENCE)
        assert not thread.is_alive()


@contextmanager
def _playing(path: Path, step: HeldStep) -> Iterator[LettersPlay]:
    """Four records were taken, two of them refused for the last time."""
    gate = StepGate()
    with pytest.MonkeyPatch.context() as patched, forebay.open(path) as log:
        source = log.create_topic("a", durability="fsync")
        log.create_topic("dead")
        source.append_many([b"0", b"1", b"2", b"3"], keys=[b"a", b"b", b"c", b"d"])
        subscription = source.subscribe(
            "s", start=EARLIEST, deliveries_max=1, on_spent="dead_letter", dead_letter_topic="dead"
        )
        consumer = subscription.consumer()
        taken = consumer.take()
        consumer.ack(*(one for one in taken if one.record.value not in POISON))
        consumer.nack(*(one for one in taken if one.record.value in POISON), delay_ms=0)
        step.guard(patched, gate)
        yield LettersPlay(log, gate, consumer)
        consumer.close()


def _lose(topic: Topic) -> None:
    """The owner's lease has ended; the next use opens the shard again, in another epoch."""
    wal = inside(topic).segment().wal
    wal.fence("the lease has ended")
    until(lambda: wal.closed)


def _replace(log: Storage, name: str) -> None:
    log.delete_topic(name)
    log.create_topic(name, durability="fsync")


# While letters are sent


def _nothing_lost(play: LettersPlay) -> Iterator[None]:
    """Whatever was under way: two letters, and no record comes again that is done."""
    yield
    play.consumer.close()
    again = play.consume()
    assert set(again) <= POISON, "what was acknowledged before is delivered again"
    assert play.letters() == Counter(POISON)


def _another_comes(play: LettersPlay) -> Iterator[None]:
    """The consumer leaves while it sends letters, and another one sends what it finds to be sent."""
    play.consumer.close()
    assert set(play.consume()) <= POISON
    yield from _nothing_lost(play)


def _add_partitions(play: LettersPlay) -> Iterator[None]:
    play.log.alter_topic("dead", partitions=3)
    play.log.alter_topic("a", partitions=2)
    yield from _nothing_lost(play)


def _lose_source(play: LettersPlay) -> Iterator[None]:
    _lose(play.source)
    yield
    play.consumer.close()
    # Acknowledgements that were not stored when the epoch ended may come again; nothing is lost.
    play.consume()
    assert play.letters() == Counter(POISON)


def _lose_dead(play: LettersPlay) -> Iterator[None]:
    _lose(play.dead)
    yield from _nothing_lost(play)


def _replace_dead(play: LettersPlay) -> Iterator[None]:
    _replace(play.log, "dead")
    yield
    play.consumer.close()
    assert set(play.consume()) <= POISON
    # What had arrived went with the topic.
    assert set(play.letters()) <= POISON
    assert set(play.letters().values()) <= {1}


def _replace_source(play: LettersPlay) -> Iterator[None]:
    _replace(play.log, "a")
    play.source.append(b"1")
    play.source.append(b"4")
    yield
    play.source.subscribe("s", start=EARLIEST, deliveries_max=1, on_spent="dead_letter", dead_letter_topic="dead")
    assert play.consume() == [b"1", b"4"], "the new topic has records of its own"
    assert play.letters()[b"1"] in (1, 2)
    assert play.letters()[b"3"] <= 1


def _alter(play: LettersPlay) -> Iterator[None]:
    play.source.subscription("s").alter(ack_timeout_ms=1_000)
    yield from _nothing_lost(play)


def _send_elsewhere(play: LettersPlay) -> Iterator[None]:
    """The consumer leaves while it sends letters; then they are to go to another topic, and another one comes."""
    play.consumer.close()
    play.source.subscription("s").alter(dead_letter_topic="other")
    assert set(play.consume()) <= POISON
    yield
    assert set(play.consume()) <= POISON
    both = play.letters(), play.letters("other")
    assert both[0] + both[1] == Counter(POISON), f"in the topic of before and in the other: {both}"


def _partitions_and_another(play: LettersPlay) -> Iterator[None]:
    """The letters of the next consumer would go to another partition than those that are on their way."""
    play.log.alter_topic("dead", partitions=3)
    yield from _another_comes(play)


WHILE_SENT: Final = [
    _another_comes,
    _add_partitions,
    _lose_source,
    _lose_dead,
    _replace_dead,
    _replace_source,
    _alter,
    _send_elsewhere,
    _partitions_and_another,
]


@pytest.mark.parametrize("event", WHILE_SENT, ids=lambda event: event.__name__.strip("_"))
def test_what_changes_while_letters_are_sent_loses_none_and_doubles_none(
    event: Callable[[LettersPlay], Iterator[None]], tmp_path: Path, ledger: Ledger
) -> None:
    for number, step in enumerate(sampled(SENDING, one_in=3, seed=event.__name__)):
        with _playing(tmp_path / str(number), step) as play:
            with play.held(play.consumer.take):
                rest = event(play)
                next(rest)
            assert next(rest, None) is None, f"{step}, then {event.__name__}"
        ledger.count("changes while letters are sent", event=event.__name__.strip("_"), step=str(step))


# While letters are replayed


def _replayed_once(play: LettersPlay, origins: Sequence[str] = ()) -> None:
    """Run again: each is in the topic once more, and none is left."""
    play.dead.dead_letters().replay(origins=origins)
    assert not play.letters()
    found = Counter(record.value for record in play.source.read())
    assert found == Counter({b"0": 1, b"1": 2, b"2": 1, b"3": 2})


def _others_replay(play: LettersPlay) -> None:
    for call in (play.dead.dead_letters().replay, play.dead.dead_letters().purge):
        with pytest.raises(Conflict, match="are being replayed or purged"):
            call()


def _partitions_come(play: LettersPlay) -> None:
    play.log.alter_topic("dead", partitions=3)
    play.log.alter_topic("a", partitions=2)


WHILE_REPLAYED: Final[dict[str, Callable[[LettersPlay], None]]] = {
    "another replay": _others_replay,
    "partitions": _partitions_come,
    "target lost": lambda play: _lose(play.source),
    "letters lost": lambda play: _lose(play.dead),
}


@pytest.mark.parametrize("name", WHILE_REPLAYED)
def test_what_changes_while_letters_are_replayed_brings_each_once(name: str, tmp_path: Path, ledger: Ledger) -> None:
    for number, step in enumerate(sampled(REPLAYING, one_in=3, seed=name)):
        with _playing(tmp_path / str(number), step) as play:
            play.consumer.take()
            assert play.letters() == Counter(POISON)
            play.consumer.close()
            with play.held(play.dead.dead_letters().replay):
                WHILE_REPLAYED[name](play)
            _replayed_once(play)
        ledger.count("changes while letters are replayed", event=name, step=str(step))


@pytest.mark.parametrize("which", ["a", "dead"])
def test_a_topic_that_is_replaced_while_letters_are_replayed_gets_none_twice(
    which: str, tmp_path: Path, ledger: Ledger
) -> None:
    for number, step in enumerate(sampled(REPLAYING, one_in=3, seed=which)):
        with _playing(tmp_path / str(number), step) as play:
            play.consumer.take()
            play.consumer.close()
            with play.held(play.dead.dead_letters().replay):
                _replace(play.log, which)
            play.dead.dead_letters().replay()
            found = Counter(record.value for record in play.source.read())
            original = 1 if which == "dead" else 0
            assert all(found[value] in (original, original + 1) for value in POISON), f"{step}: {found}"
            assert not play.letters()
        ledger.count("changes while letters are replayed", event=f"{which} replaced", step=str(step))


# While letters are replayed that only an operator vouches for


def _forge(play: LettersPlay) -> None:
    """The letters of the play as another writer could have made them: nothing seals them."""
    play.consumer.close()
    letters = play.dead.dead_letters().letters()
    play.dead.dead_letters().purge()
    for letter in letters:
        _forge_one(play.dead, letter.record.value, letter.record.offset)


@pytest.mark.parametrize("name", [*WHILE_REPLAYED, "closed", "a replaced", "dead replaced"])
def test_what_changes_while_letters_of_a_named_origin_are_replayed_brings_each_once(
    name: str, tmp_path: Path, ledger: Ledger
) -> None:
    for number, step in enumerate(sampled(REPLAYING, one_in=3, seed=f"origins {name}")):
        path = tmp_path / str(number)
        with _playing(path, step) as play:
            play.consumer.take()
            _forge(play)
            assert play.dead.dead_letters().replay() == 0, "nothing vouches for them"
            with play.held(partial(play.dead.dead_letters().replay, origins=["a"])):
                if name == "closed":
                    play.log.close()
                elif name.endswith("replaced"):
                    _replace(play.log, name.split(maxsplit=1)[0])
                else:
                    WHILE_REPLAYED[name](play)
            if name.endswith("replaced"):
                play.dead.dead_letters().replay(origins=["a"])
                found = Counter(record.value for record in play.source.read())
                original = 0 if name == "a replaced" else 1
                assert all(found[value] in (original, original + 1) for value in POISON), f"{step}: {found}"
                assert not play.letters()
            elif name != "closed":
                _replayed_once(play, origins=["a"])
        if name == "closed":
            with forebay.open(path) as log:
                _replayed_once(LettersPlay(log, play.gate, play.consumer), origins=["a"])
        ledger.count("changes while letters are replayed", event=f"{name}, named origin", step=str(step))


# While letters are purged

PURGING: Final = [
    HeldStep(Topic, name, when) for name in ("acquire", "page", "delete_by_offset") for when in ("before", "after")
]


def _letters_come(play: LettersPlay) -> None:
    """One more record is spent while letters are purged."""
    play.source.append(b"3", key=b"d")
    assert play.consume() == [b"3"]


@pytest.mark.parametrize("name", [*WHILE_REPLAYED, "letters come", "closed", "dead replaced", "a replaced"])
def test_what_changes_while_letters_are_purged_removes_those_that_were_there_and_no_others(
    name: str, tmp_path: Path, ledger: Ledger
) -> None:
    for number, step in enumerate(sampled(PURGING, one_in=2, seed=f"purge {name}")):
        path = tmp_path / str(number)
        with _playing(path, step) as play:
            play.consumer.take()
            play.consumer.close()
            with play.held(play.dead.dead_letters().purge):
                if name == "closed":
                    play.log.close()
                elif name == "letters come":
                    _letters_come(play)
                elif name.endswith("replaced"):
                    _replace(play.log, name.split(maxsplit=1)[0])
                    # It has the offset of one that is purged.
                    _forge_one(play.dead)
                else:
                    WHILE_REPLAYED[name](play)
            left = Counter[bytes | None]() if name == "closed" else play.letters()
            if name == "dead replaced":
                assert left == Counter([b"new"]), f"{step}: a letter of the new topic is purged"
            elif name == "letters come":
                # What is here is looked at once the topic is acquired.
                assert left[b"3"] >= 1 or step.name == "acquire", f"{step}: {left}"
        with forebay.open(path) as log:
            again = LettersPlay(log, play.gate, play.consumer)
            again.dead.dead_letters().purge()
            assert not again.letters()
            if name != "a replaced":
                kept = Counter([b"0", b"1", b"2", b"3"] + [b"3"] * (name == "letters come"))
                assert Counter(record.value for record in again.source.read()) == kept
        ledger.count("changes while letters are purged", event=name, step=str(step))


def _forge_one(topic: Topic, value: bytes | None = b"new", offset: int = 1) -> None:
    said = {"origin-topic": "default/a", "origin-partition": "0", "origin-offset": str(offset), "subscription": "s"}
    said |= {"attempts": "1", "reason": "nack", "dead-at": "0"}
    topic.append(value, headers={f"forebay-{name}": value.encode() for name, value in said.items()})


# The same in an event loop


async def _consumed(subscription: AsyncSubscription) -> list[bytes]:
    found: list[bytes] = []
    async with subscription.consumer() as consumer:
        while taken := await consumer.take(wait_s=0.05):
            for one in taken:
                found.append(one.record.value or b"")
                if one.record.value in POISON:
                    await consumer.nack(one, delay_ms=0)
                else:
                    await consumer.ack(one)
    return found


@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "left"])
def test_a_task_that_ends_while_it_sends_letters_loses_none_and_doubles_none(
    is_cancelled: bool,  # noqa: FBT001 - parametrized
    tmp_path: Path,
    ledger: Ledger,
) -> None:
    async def play(path: Path, gate: StepGate) -> None:
        async with aio.open(path) as log:
            subscription = await (await log.topic("a")).subscription("s")
            consumer = await subscription.consumer().__aenter__()
            taken = await consumer.take()
            await consumer.ack(*(one for one in taken if one.record.value not in POISON))
            await consumer.nack(*(one for one in taken if one.record.value in POISON), delay_ms=0)
            gate.armed.set()
            taking = asyncio.create_task(consumer.take(wait_s=0.5))
            await async_until(gate.reached.is_set)
            if is_cancelled:
                taking.cancel()
            gate.released.set()
            with contextlib.suppress(asyncio.CancelledError, ForebayError):
                await taking
            await consumer.close()
            assert set(await _consumed(subscription)) <= POISON
            letters = await (await log.topic("dead")).dead_letters().letters()
            assert Counter(letter.record.value for letter in letters) == Counter(POISON)

    for number, step in enumerate(sampled(SENDING, one_in=3, seed=f"loop {is_cancelled}")):
        path, gate = tmp_path / str(number), StepGate()
        with forebay.open(path) as log:
            log.create_topic("a").append_many([b"0", b"1", b"2", b"3"])
            log.create_topic("dead")
            log.topic("a").subscribe(
                "s", start=EARLIEST, deliveries_max=1, on_spent="dead_letter", dead_letter_topic="dead"
            )
        with pytest.MonkeyPatch.context() as patched:
            step.guard(patched, gate)
            asyncio.run(play(path, gate))
        ledger.count("changes while letters are sent", event="task ends", step=str(step))


def test_a_replay_whose_task_is_cancelled_goes_on_and_brings_each_once(tmp_path: Path, ledger: Ledger) -> None:
    async def replay(path: Path, gate: StepGate) -> None:
        async with aio.open(path) as log:
            dead = await log.topic("dead")
            gate.armed.set()
            replaying = asyncio.create_task(dead.dead_letters().replay())
            await async_until(gate.reached.is_set)
            replaying.cancel()
            with pytest.raises(asyncio.CancelledError):
                await replaying
            with pytest.raises(Conflict, match="are being replayed or purged"):
                await dead.dead_letters().replay()
            gate.released.set()

    for number, step in enumerate(sampled(REPLAYING, one_in=3, seed="cancelled")):
        path = tmp_path / str(number)
        with _playing(path, HeldStep(Topic, "page", "before")) as play:
            play.consumer.take()
            assert play.letters() == Counter(POISON)
        gate = StepGate()
        with pytest.MonkeyPatch.context() as patched:
            step.guard(patched, gate)
            asyncio.run(replay(path, gate))
        with forebay.open(path) as log:
            _replayed_once(LettersPlay(log, gate, play.consumer))
        ledger.count("changes while letters are replayed", event="task cancelled", step=str(step))
