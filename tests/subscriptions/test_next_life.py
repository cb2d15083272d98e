"""What one process has stored of a subscription, as the next one reads it: several partitions, closed or killed."""

from __future__ import annotations

import random  # noqa: TID251  # seeded: the same run again
from collections import Counter
from collections.abc import Iterator
from typing import Final

import pytest

import forebay
from forebay import EARLIEST
from forebay.storage.subscriptions import SubscriptionDriver
from forebay.topics import SubscriptionOptions
from tests.ledger import Ledger
from tests.subscriptions.simulated import PARTITIONS, RECORDS, SimulatedPeer, SimulatedWorld
from tests.support.baton import Baton
from tests.support.soak import SOAK

LIVES: Final = 4
SEEDS: Final = 1_000 if SOAK else 10
Place = tuple[int, int]


def delivered(driver: SubscriptionDriver, number: int, count: int) -> dict[Place, int]:
    """What a take brings: by partition and offset, for which time."""
    taken = driver.pull(number, count)
    return {(one.record.partition, one.record.offset): one.attempt for one in taken}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exclusive", "shared", "key_shared"])
@pytest.mark.parametrize("is_killed", [False, True])
def test_the_next_process_delivers_what_the_one_before_had_not_done_and_counts_on(
    mode: str, ledger: Ledger, *, is_killed: bool
) -> None:
    """Killed once its cursors were flushed; what is done above the cursor, and each count, is known to the next."""
    options = SubscriptionOptions(mode=mode, ack_timeout_ms=600_000)
    for seed in range(SEEDS):
        chance = random.Random(f"{mode} {is_killed} {seed}")
        world = SimulatedWorld(chance, Baton(chance, at_gates=0, at_locks=0), options)
        world.log.heads[:] = [RECORDS] * len(world.log.heads)
        done, attempts = set[Place](), Counter[Place]()
        for life in range(LIVES):
            process = SimulatedPeer(world, f"life {life}")
            driver = process.subscription().driver
            number = driver.attach("c", 100)
            taken: dict[Place, int] = {}
            while more := delivered(driver, number, chance.randint(1, 9)):
                taken |= more
                if chance.random() < 0.3:
                    break
            for place, attempt in taken.items():
                assert place not in done, "what was acknowledged is delivered again"
                assert attempt == attempts[place] + 1, f"{place} was delivered {attempts[place]} times before"
                attempts[place] = attempt
            for place in [place for place in taken if chance.random() < 0.5]:
                world.done.add(world.place(*place))
                assert driver.ack(number, {place[0]: [place[1]]}) == 1
                done.add(place)
            if is_killed:
                process.cursors.flush()
                process.is_dead = True
                world.log.shards.clear()
            else:
                driver.detach(number)
        ledger.count("lives of a subscription", n=LIVES, mode=mode)
        everything = {(partition, offset) for partition in range(PARTITIONS) for offset in range(RECORDS)}
        assert attempts.keys() <= everything
        last = SimulatedPeer(world, "last")
        driver = last.subscription().driver
        number, left = driver.attach("c", 1000), set[Place]()
        while more := delivered(driver, number, 100):
            assert not more.keys() & done
            left |= more.keys()
            world.done.update(world.place(*place) for place in more)
            driver.ack(number, {partition: [at for p, at in more if p == partition] for partition in range(PARTITIONS)})
        assert left | done == everything


def all_of(consumer: forebay.Consumer) -> Iterator[forebay.DeliveredRecord]:
    while taken := consumer.take(100):
        yield from taken


def test_a_consumer_holds_no_more_than_it_may_over_all_partitions() -> None:
    with forebay.open(":memory:") as log:
        topic = log.create_topic("shop/orders", partitions=3)
        for partition in range(3):
            topic.append_many([b"v"] * 10, partition=partition)
        subscription = topic.subscribe("s", start=EARLIEST, mode="shared")
        with subscription.consumer(unacked_max=5) as consumer, subscription.consumer(unacked_max=7) as other:
            held = [*all_of(consumer)]
            assert len(held) == 5
            assert len([*all_of(other)]) == 7
            assert sum(lag.held for lag in subscription.lag()) == 12

            consumer.ack(held[0], held[1])

            assert len([*all_of(consumer)]) == 2
