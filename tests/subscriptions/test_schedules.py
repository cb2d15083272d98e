"""Seeded schedules of consumers that come, go, stall and die, over an embedded log whose clock is turned by hand."""

from __future__ import annotations

import random  # noqa: TID251  # seeded: the same run again
from collections import Counter
from typing import Final, NamedTuple

import pytest

import forebay
from forebay import EARLIEST, DeliveredRecord, Settings, SpentReason, Storage
from forebay.testing.simulated.clock import ManualClock
from tests.support.soak import SOAK

SEEDS: Final = 200 if SOAK else 10
STEPS: Final = 120
ACK_TIMEOUT_MS: Final = 300
DELIVERIES_MAX: Final = 3
Place = tuple[int, int]


class Held(NamedTuple):
    delivered: DeliveredRecord
    until_s: float


class Worker:
    """A consumer, and what it was given."""

    def __init__(self, consumer: forebay.Consumer) -> None:
        self.consumer = consumer
        self.held: dict[Place, Held] = {}
        self.before: list[DeliveredRecord] = []


def place(delivered: DeliveredRecord) -> Place:
    return delivered.record.partition, delivered.record.offset


def is_poison(delivered: DeliveredRecord) -> bool:
    return (delivered.record.value or b"").endswith(b"7")


class Schedule:
    """One run: what consumers do is drawn, and what they are given is checked at each delivery."""

    def __init__(self, seed: int, mode: str) -> None:
        self.chance = random.Random(seed)
        self.clock = ManualClock(seed=seed)
        self.log = Storage.open(":memory:", Settings(), clock=self.clock)
        self.topic = self.log.create_topic("shop/orders", partitions=2)
        self.mode = mode
        self.subscription = self.topic.subscribe(
            "s",
            start=EARLIEST,
            mode=mode,
            ack_timeout_ms=ACK_TIMEOUT_MS,
            deliveries_max=DELIVERIES_MAX,
            on_spent="dead_letter",
        )
        self.workers: list[Worker] = []
        self.acked: set[Place] = set()
        self.attempts: dict[Place, int] = {}
        self.keys: dict[Place, bytes | None] = {}
        self.appended = 0

    def run(self) -> None:
        steps = [self.append, self.come, self.take, self.take, self.take, self.answer, self.answer, self.stall]
        steps += [self.leave, self.die, self.ack_late]
        for _ in range(STEPS):
            self.chance.choice(steps)()
        self.finish()

    # What may happen

    def append(self) -> None:
        for _ in range(self.chance.randint(1, 4)):
            key = self.chance.choice([b"a", b"b", b"c", None])
            partition = self.chance.randrange(2) if key is None else key[0] % 2
            self.topic.append(b"%d" % self.appended, key=key, partition=partition)
            self.appended += 1

    def come(self) -> None:
        if len(self.workers) < 4:
            self.workers.append(Worker(self.subscription.consumer(f"c{self.appended}").__enter__()))

    def take(self) -> None:
        if self.workers:
            self.took(self.chance.choice(self.workers), self.chance.randint(1, 4))

    def answer(self) -> None:
        worker = self.chance.choice(self.workers) if self.workers else None
        for at, held in list(worker.held.items()) if worker else ():
            assert worker is not None
            if is_poison(held.delivered):
                worker.consumer.nack(held.delivered, delay_ms=self.chance.choice([0, 50]), error="seven")
            elif self.chance.random() < 0.6:
                self.ack(worker, held.delivered, is_held=self.is_held(held))
            elif self.chance.random() < 0.3:
                worker.consumer.nack(held.delivered, delay_ms=self.chance.choice([0, 50]))
            else:
                continue
            del worker.held[at]

    def stall(self) -> None:
        self.clock.advance(self.chance.choice([0.01, 0.1, 0.35]))

    def leave(self) -> None:
        if len(self.workers) > 1:
            self.workers.pop(self.chance.randrange(len(self.workers))).consumer.close()

    def die(self) -> None:
        """The consumer is dropped without being closed."""
        if len(self.workers) > 1:
            self.workers.pop(self.chance.randrange(len(self.workers)))

    def ack_late(self) -> None:
        worker = self.chance.choice(self.workers) if self.workers else None
        if worker is not None and worker.before:
            delivered = self.chance.choice(worker.before)
            if not is_poison(delivered):
                held = worker.held.get(place(delivered))
                self.ack(worker, delivered, is_held=held is not None and self.is_held(held))
                worker.held.pop(place(delivered), None)

    # What must be so

    def is_held(self, held: Held) -> bool:
        return self.clock.monotonic() < held.until_s

    def ack(self, worker: Worker, delivered: DeliveredRecord, *, is_held: bool) -> None:
        counted = worker.consumer.ack(delivered)
        if is_held:
            assert counted == 1, "the consumer holds it, and its acknowledgement does not count"
        if counted:
            assert place(delivered) not in self.acked
            self.acked.add(place(delivered))

    def took(self, worker: Worker, count: int) -> int:
        taken = worker.consumer.take(count)
        for one in taken:
            at = place(one)
            assert at not in self.acked, "a record comes again that was acknowledged"
            assert one.attempt == self.attempts.get(at, 0) + 1 <= DELIVERIES_MAX
            self.keys[at] = one.record.key
            for other in self.workers:
                if other is not worker and at in other.held:
                    assert not self.is_held(other.held[at]), "a record is with two consumers"
            self.attempts[at] = one.attempt
            worker.held[at] = Held(one, self.clock.monotonic() + ACK_TIMEOUT_MS / 1000)
            worker.before.append(one)
            if self.mode == "key_shared" and one.record.key is not None:
                self.check_key(worker, at, one.record.key)
        return len(taken)

    def check_key(self, worker: Worker, at: Place, key: bytes) -> None:
        """Every earlier record of the key is done, spent, or with the same consumer."""
        for earlier, known in self.keys.items():
            if known != key or earlier[0] != at[0] or earlier[1] >= at[1]:
                continue
            mine = worker.held.get(earlier)
            is_mine = mine is not None and self.is_held(mine)
            is_spent = self.attempts[earlier] == DELIVERIES_MAX
            assert earlier in self.acked or is_mine or is_spent, f"{at} comes before {earlier} of its key is done"

    def finish(self) -> None:
        """One consumer that works takes all the rest."""
        for worker in self.workers:
            worker.consumer.close()
        self.workers = []
        with self.log, self.subscription.consumer() as consumer:
            worker = Worker(consumer)
            self.workers.append(worker)
            while sum(lag.lag for lag in self.subscription.lag()):
                if not self.took(worker, 10):
                    self.clock.advance(0.06)
                for held in list(worker.held.values()):
                    if is_poison(held.delivered):
                        consumer.nack(held.delivered, delay_ms=0)
                    else:
                        self.ack(worker, held.delivered, is_held=self.is_held(held))
                worker.held.clear()
            letters = self.subscription.dead_letters().letters(1_000)
        dead = Counter((letter.record.partition, letter.record.offset) for letter in letters)
        everything = {(p, o) for p in range(2) for o in range(self.topic_ends[p])}
        assert set(dead.values()) <= {1}, "a record is a dead letter twice"
        assert not dead.keys() & self.acked
        assert dead.keys() | self.acked == everything
        assert all(letter.attempts == DELIVERIES_MAX for letter in letters)

    @property
    def topic_ends(self) -> list[int]:
        ends = Counter[int]()
        for partition, offset in self.attempts:
            ends[partition] = max(ends[partition], offset + 1)
        return [ends[0], ends[1]]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["shared", "key_shared", "failover"])
def test_consumers_come_go_stall_and_die_and_each_record_is_done_or_a_dead_letter_once(mode: str) -> None:
    for seed in range(SEEDS):
        try:
            Schedule(seed, mode).run()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def stopped(deliveries_max: int) -> tuple[forebay.Storage, ManualClock, forebay.Subscription]:
    clock = ManualClock()
    log = Storage.open(":memory:", Settings(), clock=clock)
    topic = log.create_topic("shop/orders")
    topic.append(b"slow")
    options = {"deliveries_max": deliveries_max, "on_spent": "dead_letter"}
    return log, clock, topic.subscribe("s", start=EARLIEST, mode="shared", **options)  # type: ignore[arg-type]


def test_a_consumer_that_was_stopped_for_a_minute_and_acks_late_harms_nothing() -> None:
    log, clock, subscription = stopped(deliveries_max=3)
    with log, subscription.consumer("stopped") as late, subscription.consumer("works") as works:
        (held,) = late.take()
        clock.advance(60)
        (again,) = works.take()

        assert late.ack(held) == 0
        assert late.nack(held) == 0
        assert subscription.lag()[0].held == 1
        assert works.ack(again) == 1
        assert late.ack(held) == 0
        assert subscription.lag()[0].lag == 0
        assert subscription.dead_letters().letters() == []


def test_an_ack_that_comes_after_the_record_became_a_dead_letter_does_not_count() -> None:
    log, clock, subscription = stopped(deliveries_max=1)
    with log, subscription.consumer("stopped") as late, subscription.consumer("works") as works:
        (held,) = late.take()
        clock.advance(60)
        assert works.take() == []

        assert late.ack(held) == 0
        (letter,) = subscription.dead_letters().letters()
        assert letter.reason is SpentReason.ACK_TIMEOUT
        assert works.take() == []
        assert subscription.lag()[0].lag == 0
