"""Brokers and consumers that are killed under load: what is stored as done never comes again, everything else does."""

from __future__ import annotations

import itertools
import json
import random  # noqa: TID251 - seeded
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import pytest

import forebay
from forebay.client import RemoteLog
from tests.ledger import Ledger
from tests.support.brokers import START_SECONDS, BrokerCommand, running_broker
from tests.support.proxies import CuttingProxy, cutting_proxy
from tests.support.soak import SOAK
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.slow

KILLS: Final = 100 if SOAK else 3
DONE: Final = (200, 1500) if SOAK else (60, 200)
"""Records that are done in the life of a broker before it is killed."""
CONSUMERS: Final = 4
PARTITIONS: Final = 2
NO_BROKER: Final = "http://127.0.0.1:1"
TOPIC: Final = "kills/orders"
HOLDING: Final = Path(__file__).with_name("holding.py")

Place = tuple[int, int]
"""Partition and offset."""


class Delivery(NamedTuple):
    """A record that a consumer got."""

    life: int
    place: Place
    attempt: int


class Seen:
    """What consumers got and acknowledged, life by life of the broker. For many threads."""

    def __init__(self) -> None:
        self.life = 0
        self.is_over = False
        self.deliveries: list[Delivery] = []
        self.acked: set[Place] = set()
        """The broker of this life said that they count, or they were stored before it began."""
        self.cursors: list[dict[int, int]] = [{}]
        """Where the subscription stood when the broker of each life began."""
        self.stored: list[set[Place]] = [set()]
        """What was stored as done by then."""
        self._lock = threading.Lock()

    def deliver(self, records: list[forebay.DeliveredRecord]) -> None:
        with self._lock:
            self.deliveries += [
                Delivery(self.life, (one.record.partition, one.record.offset), one.attempt) for one in records
            ]

    def ack(self, records: list[forebay.DeliveredRecord], life: int) -> None:
        """What counted in this life. Of an earlier one it may be lost: only what was stored is known."""
        with self._lock:
            if life == self.life:
                self.acked |= {(one.record.partition, one.record.offset) for one in records}

    def known_acked(self) -> set[Place]:
        with self._lock:
            return set(self.acked)

    def begin_life(self, cursors: dict[int, int], stored: set[Place]) -> None:
        with self._lock:
            self.life += 1
            self.cursors.append(cursors)
            self.stored.append(self.stored[-1] | stored)
            self.acked = set(self.stored[-1])


def consume(log: RemoteLog, seen: Seen, number: int) -> None:
    """Take and acknowledge until it is enough, from broker to broker."""
    with log.topic(TOPIC).subscription("billing").consumer(f"c{number}") as consumer:
        while not seen.is_over:
            taken = consumer.take(8, wait_s=0.2)
            seen.deliver(taken)
            life = seen.life
            if taken and consumer.ack(*taken) == len(taken):
                seen.ack(taken, life)


def produce(log: RemoteLog, seen: Seen, sent: list[Place]) -> None:
    """Append until it is enough; every record is acknowledged."""
    topic = log.topic(TOPIC)
    for number in itertools.count():
        if seen.is_over:
            return
        partition = number % PARTITIONS
        offsets = topic.append_many([b"%d" % number] * 10, partition=partition)
        sent += [(partition, offset) for offset in offsets]


@contextmanager
def clients(log: RemoteLog, seen: Seen, sent: list[Place]) -> Iterator[None]:
    with ThreadPoolExecutor(CONSUMERS + 1) as pool:
        done = [pool.submit(consume, log, seen, number) for number in range(CONSUMERS)]
        done.append(pool.submit(produce, log, seen, sent))
        try:
            yield
        finally:
            seen.is_over = True
            for each in done:
                each.result()


def standing(broker: BrokerCommand) -> dict[int, int]:
    """The cursors of the subscription, before any consumer comes back."""
    with broker.client() as client:
        found = client.get(f"/v1/topics/{TOPIC}/subscriptions/billing/lag").json()["partitions"]
        return {each["partition"]: each["cursor"] for each in found}


def kill_under_load(path: Path, proxy: CuttingProxy, log: RemoteLog, seen: Seen, sent: list[Place]) -> None:
    """Kill brokers one after the other while records are taken; at times just after all that is done was stored."""
    chance, stored = random.Random(15), set[Place]()
    with ExitStack() as held:
        for kill in range(KILLS + 1):
            with BrokerCommand(path, is_verbose=False) as broker:
                if kill == 0:
                    with broker.client() as client:
                        client.put(f"/v1/topics/{TOPIC}", json={"partitions": PARTITIONS, "durability": "fsync"})
                        where = f"/v1/topics/{TOPIC}/subscriptions/billing"
                        made = client.put(where, json={"mode": "shared", "start": "earliest", "ack_timeout_ms": 60_000})
                        assert made.status_code == 200, made.text
                else:
                    seen.begin_life(standing(broker), stored)
                proxy.target = broker.url
                if kill == 0:
                    held.enter_context(clients(log, seen, sent))
                enough = len(seen.known_acked()) + chance.randint(*DONE)
                until(lambda: len(seen.known_acked()) >= enough)  # noqa: B023 - called at once
                stored = seen.known_acked() if kill % 2 == 0 else set()
                if stored:
                    log.topic(TOPIC).subscription("billing").flush()
                if kill == KILLS:
                    seen.is_over = True
                    held.close()
                    finish(log, seen)
                    return
                assert broker.end(signal.SIGKILL)[0] == -signal.SIGKILL
                proxy.target = NO_BROKER


def finish(log: RemoteLog, seen: Seen) -> None:
    """Take the rest with one consumer."""
    subscription = log.topic(TOPIC).subscription("billing")
    with subscription.consumer("last") as consumer:
        while sum(lag.lag for lag in subscription.lag()):
            taken = consumer.take(100, wait_s=1.0)
            seen.deliver(taken)
            consumer.ack(*taken)


def test_a_broker_killed_under_load_delivers_again_what_is_not_stored_as_done_and_nothing_else(
    tmp_path: Path, ledger: Ledger
) -> None:
    seen, sent = Seen(), list[Place]()
    with cutting_proxy(NO_BROKER) as proxy, forebay.connect(proxy.url, timeout_s=PATIENCE) as log:
        kill_under_load(tmp_path / "data", proxy, log, seen, sent)

    got = {delivery.place for delivery in seen.deliveries}
    assert got == set(sent), "every record that was appended was delivered"
    below = [each for each in seen.deliveries if each.place[1] < seen.cursors[each.life].get(each.place[0], 0)]
    again = [each for each in seen.deliveries if each.place in seen.stored[each.life]]
    for name, found in (("delivered below the cursor", below), ("stored as done and delivered again", again)):
        ledger.count(name, n=len(seen.deliveries))
        ledger.violation(name, n=len(found))
    assert (below, again) == ([], [])
    assert any(seen.cursors[-1].values()), "cursors were stored on the way"
    ledger.count("kills of a broker with subscriptions", n=KILLS)


@pytest.mark.parametrize("mode", ["shared", "exclusive", "failover", "key_shared"])
def test_what_a_killed_consumer_held_comes_to_the_next(tmp_path: Path, mode: str, ledger: Ledger) -> None:
    """Its session ends by itself: in mode exclusive no other could attach before."""
    kills = 10 if SOAK else 1
    with running_broker(tmp_path / "data") as broker, forebay.connect(broker.url) as log:
        topic = log.create_topic(TOPIC)
        subscription_path = f"/v1/topics/{TOPIC}/subscriptions/billing"
        subscription = topic.subscribe("billing", mode=mode, start=forebay.EARLIEST, ack_timeout_ms=600_000)
        for kill in range(kills):
            topic.append_many([b"%d" % number for number in range(5)], keys=[b"k"] * 5)
            command = [sys.executable, str(HOLDING), broker.url, f"{subscription_path}/consumers/held-{kill}"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
                assert child.stdout is not None
                held = json.loads(child.stdout.readline())
                assert held == list(range(5 * kill, 5 * kill + 5))
                child.send_signal(signal.SIGKILL)
            until(lambda: subscription.consumers() == [], START_SECONDS)
            with subscription.consumer("next") as consumer:
                taken = consumer.take(wait_s=START_SECONDS)
                assert [(one.record.offset, one.attempt) for one in taken] == [(offset, 2) for offset in held]
                consumer.ack(*taken)
    ledger.count("kills of a consumer over HTTP", n=kills)
