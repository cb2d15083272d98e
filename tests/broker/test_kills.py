"""kill -9 of a broker under load: what its clients were answered still holds when it serves again.

Clients append to topics of every durability class, each with a producer and sequences, and send again what they have no
answer for; readers follow beside them. Every answer is kept as an event of its shard, and the checker of histories
compares all of them with what the last broker has. Clients of the library produce batches and follow streams over all
kills, by themselves.
"""

from __future__ import annotations

import itertools
import random  # noqa: TID251 - seeded: the same kills again
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

import forebay
from forebay.client import RemoteLog
from forebay.locks import Rank, RankedCondition
from forebay.records import Gap, Reason
from forebay.testing.checks.history import (
    AppendAnswered,
    AppendOutcome,
    Begun,
    Crashed,
    Event,
    Reading,
    ReadSeen,
    ShardEvents,
)
from forebay.testing.checks.invariants import check_log, no_crash_is_damage, stream_is_gapless
from forebay.topics import Durability
from tests.ledger import Ledger
from tests.support.brokers import START_SECONDS, BrokerCommand, plain_client
from tests.support.proxies import CuttingProxy, cutting_proxy
from tests.support.soak import SOAK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600 if SOAK else 600)]  # a shared machine may be busy

PATIENT_SECONDS: Final = 900.0 if SOAK else START_SECONDS
"""A soak shares its machine for long: what takes that long is no failure of the broker."""
KILLS: Final = 50 if SOAK else 3
ACKS: Final = (100, 2000) if SOAK else (60, 200)
"""How many answers the clients get from one broker, at least and at most, before it is killed."""
PARTITIONS: Final = 2
PRODUCERS: Final = 3
"""Clients that append to one partition."""
CLASSES: Final = (Durability.EPHEMERAL, Durability.MEMORY, Durability.DISK, Durability.FSYNC)
KEEPS_ITS_PRODUCERS: Final = {Durability.FSYNC, Durability.DISK}
PAGE_RECORDS: Final = 500
NO_BROKER: Final = "http://127.0.0.1:9"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBroker:
    """One broker from its start to its kill."""

    number: int
    url: str


class Lives:
    """The brokers, one after the other, as clients go from each to the next. For many threads."""

    def __init__(self) -> None:
        self._changed = RankedCondition(Rank.LEAF, "tests.lives")
        self._present: LiveBroker | None = None
        self._waiting = 0
        self._acks = 0
        self._is_over = False

    def begin(self, url: str) -> None:
        """A broker serves."""
        with self._changed:
            number = 1 if self._present is None else self._present.number + 1
            self._present, self._acks = LiveBroker(number=number, url=url), 0
            self._changed.notify_all()

    def end(self) -> None:
        """The clients have done enough."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def after(self, number: int) -> LiveBroker | None:
        """The broker behind this one, once there is one; `None` if the clients have done enough."""
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            found = self._changed.wait_for(
                lambda: self._is_over or (self._present is not None and self._present.number > number), PATIENT_SECONDS
            )
            self._waiting -= 1
            assert found, f"there is no broker behind number {number}"
            return None if self._is_over else self._present

    @property
    def is_over(self) -> bool:
        """Whether the clients have done enough."""
        return self._is_over

    def count_ack(self) -> None:
        """A client got an answer."""
        with self._changed:
            self._acks += 1
            self._changed.notify_all()

    def wait_for_acks(self, count: int) -> None:
        """Return when the present broker has given so many answers."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._acks >= count, PATIENT_SECONDS), f"{self._acks} answers"

    def wait_for_clients(self, count: int) -> None:
        """Return when so many clients wait for the next broker: none has anything under way."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._waiting == count, PATIENT_SECONDS), f"{self._waiting} wait"


class KeptShard:
    """A partition and all that its clients saw, in order. For many threads."""

    def __init__(self, durability: Durability, partition: int) -> None:
        self.durability = durability
        self.partition = partition
        self.events: list[Event] = []
        self._lock = threading.Lock()
        self._attempts = itertools.count()

    @property
    def address(self) -> str:
        """Where its records are."""
        return f"/v1/topics/kills/{self.durability.value}/records"

    def add(self, event: Event) -> None:
        """A client saw this."""
        with self._lock:
            self.events.append(event)

    def begin(self, values: Sequence[str], caller: str, producing: tuple[int, int]) -> int:
        """A client sends these values; the number of the attempt."""
        with self._lock:
            attempt = next(self._attempts)
            self.events.append(Begun(attempt, tuple(value.encode() for value in values), caller, producing))
            return attempt


class Appender:
    """One client that appends to one partition until it is enough. For one thread."""

    def __init__(self, lives: Lives, shard: KeptShard, name: str, producers: Iterator[int]) -> None:
        self._lives = lives
        self._shard = shard
        self._name = name
        self._producers = producers
        self._producer = next(producers)
        self._sequence = 0

    def run(self) -> None:
        """Append; what has no answer is sent again to the next broker."""
        chance = random.Random(self._name)
        numbers = itertools.count()
        values: list[str] = []
        life = self._lives.after(0)
        while life is not None:
            with plain_client(life.url) as client:
                while not self._lives.is_over:
                    values = values or [f"{self._name}-{next(numbers)}" for _ in range(chance.choice((1, 1, 1, 5)))]
                    try:
                        if self._append(client, values):
                            if chance.random() < 0.1:
                                self._append(client, values)  # The same again: it is given the same offset.
                            self._sequence += 1
                        values = []
                    except httpx.TransportError:
                        break
            life = self._lives.after(life.number)

    def _append(self, client: httpx.Client, values: Sequence[str]) -> bool:
        """Send the values once; whether they are in the log."""
        attempt = self._shard.begin(values, self._name, (self._producer, self._sequence))
        where = {"partition": self._shard.partition, "producer": self._producer, "sequence": self._sequence}
        try:
            answer = client.post(self._shard.address, params=where, json=[{"value": value} for value in values])
        except httpx.TransportError:
            self._shard.add(AppendAnswered(attempt, AppendOutcome.INDETERMINATE))
            raise
        if answer.status_code == httpx.codes.OK:
            (given,) = answer.json()["ranges"]
            assert (given["partition"], given["count"]) == (self._shard.partition, len(values))
            self._shard.add(AppendAnswered(attempt, AppendOutcome.ACKED, given["first"]))
            self._lives.count_ack()
            return True
        self._shard.add(AppendAnswered(attempt, AppendOutcome.REFUSED))
        if answer.status_code == httpx.codes.CONFLICT and self._shard.durability not in KEEPS_ITS_PRODUCERS:
            # The crash took appends that this class may lose; the producer cannot go on behind them.
            self._producer, self._sequence = next(self._producers), 0
            return False
        raise AssertionError(f"{self._name} was refused: {answer.status_code} {answer.text}")


class Follower:
    """One client that reads a partition as it grows. For one thread."""

    def __init__(self, lives: Lives, shard: KeptShard) -> None:
        self._lives = lives
        self._shard = shard

    def run(self) -> None:
        """Read page after page, and keep what they show."""
        offset = 0
        life = self._lives.after(0)
        while life is not None:
            with plain_client(life.url) as client:
                while not self._lives.is_over:
                    try:
                        page = read_page(client, self._shard, offset, wait_ms=100)
                    except httpx.TransportError:
                        break
                    steps = steps_of(page)
                    self._shard.add(ReadSeen(tuple(step for step in steps if not isinstance(step, Gap))))
                    shown = Reading(start=offset, steps=tuple(steps), end=page["next"], next=page["next"])
                    assert list(stream_is_gapless(shown)) == []
                    offset = page["next"]
            life = self._lives.after(life.number)


def read_page(client: httpx.Client, shard: KeptShard, offset: int, wait_ms: int = 0) -> dict[str, Any]:
    where = {"partition": shard.partition, "start": offset, "records_max": PAGE_RECORDS, "wait_ms": wait_ms}
    answer = client.get(shard.address, params=where)
    assert answer.status_code == httpx.codes.OK, answer.text
    page: dict[str, Any] = answer.json()
    return page


def steps_of(page: dict[str, Any]) -> list[tuple[int, bytes] | Gap]:
    steps: list[tuple[int, bytes] | Gap] = []
    for item in page["records"]:
        gap = item.get("gap")
        if gap is not None:
            steps.append(Gap(gap["start"], gap["stop"], Reason[gap["reason"].upper()]))
        else:
            steps.append((item["offset"], item["value"].encode()))
    return steps


def read_shard(client: httpx.Client, shard: KeptShard) -> Reading:
    """All of a partition, from its first offset on."""
    steps: list[tuple[int, bytes] | Gap] = []
    offset = 0
    while (page := read_page(client, shard, offset))["next"] > offset:
        steps += steps_of(page)
        offset = page["next"]
    answer = client.get(shard.address.replace("/records", "/offsets"), params={"partition": shard.partition})
    (offsets,) = answer.json()["partitions"]
    return Reading(start=0, steps=tuple(steps), end=offset, next=offsets["next"])


class BatchingClient:
    """A client of the library with a topic of its own, which goes on from broker to broker by itself.

    One thread produces batches, another one follows.
    """

    def __init__(self, log: RemoteLog, durability: Durability) -> None:
        self._log = log
        self._durability = durability
        self._name = f"kills/batched-{durability.value}"
        self._is_enough = threading.Event()
        self._has_begun = threading.Event()
        self.sent: list[tuple[bytes, int]] = []
        """Values, in the order in which they were appended, and the offsets that they were given."""
        self._followed: dict[int, list[tuple[int, bytes | None]]] = {number: [] for number in range(PARTITIONS)}
        """By partition, offset and value of each record of the stream."""

    def begin(self) -> None:
        """Make the topic, once there is a broker."""
        self._log.create_topic(self._name, durability=self._durability.value, partitions=PARTITIONS)
        self._has_begun.set()

    def end(self) -> None:
        """It is enough, and there is a broker that stays."""
        self._is_enough.set()

    def produce(self) -> None:
        """Append until it is enough; every record is acknowledged, however many brokers that takes."""
        assert self._has_begun.wait(PATIENT_SECONDS)
        numbers = itertools.count()
        with self._log.topic(self._name).producer(linger_ms=1, batch_records=16) as producer:
            while not self.sent or not self._is_enough.is_set():
                values = [b"%d" % next(numbers) for _ in range(50)]
                acks = [producer.append_nowait(value, key=b"%d" % (int(value) % 5)) for value in values]
                self.sent += [(value, ack.result(PATIENT_SECONDS)) for value, ack in zip(values, acks, strict=True)]

    def follow(self) -> None:
        """Take what the stream brings until it is enough, and something of each partition came."""
        assert self._has_begun.wait(PATIENT_SECONDS)
        with self._log.topic(self._name).follow(forebay.EARLIEST, timeout=0.1) as stream:
            while not (self._is_enough.is_set() and all(self._followed.values())):
                for record in stream:
                    self._followed[record.partition].append((record.offset, record.value))

    def check(self) -> None:
        """What the last broker has is what was acknowledged, once and in order; so is what the stream has brought."""
        records = list(self._log.topic(self._name).read())
        places = {record.value: record.offset for record in records}
        assert len(places) == len(records), "a record is there twice"
        assert places == dict(self.sent)
        for partition, followed in self._followed.items():
            held = [(record.offset, record.value) for record in records if record.partition == partition]
            assert [int(value or b"") for _, value in held] == sorted(int(value or b"") for _, value in held)
            assert followed == held[: len(followed)]
            assert followed


@contextmanager
def batching_clients(log: RemoteLog) -> Iterator[list[BatchingClient]]:
    """A client of the library for each class that keeps its records, in threads until the block ends."""
    found = [BatchingClient(log, durability) for durability in sorted(KEEPS_ITS_PRODUCERS)]
    with ThreadPoolExecutor(2 * len(found)) as pool:
        done = [pool.submit(work) for client in found for work in (client.produce, client.follow)]
        try:
            yield found
        finally:
            for client in found:
                client.end()
            for each in done:
                each.result()


@contextmanager
def clients_of(lives: Lives, shards: Sequence[KeptShard]) -> Iterator[int]:
    """Every client in a thread of its own, ended when it is enough; how many there are."""
    producers = itertools.count(1)
    running: list[Appender | Follower] = []
    for shard in shards:
        where = f"{shard.durability.value}-{shard.partition}"
        running += [Appender(lives, shard, f"{where}-{number}", producers) for number in range(PRODUCERS)]
        running.append(Follower(lives, shard))
    with ThreadPoolExecutor(len(running)) as pool:
        done = [pool.submit(each.run) for each in running]
        try:
            yield len(running)
        finally:
            lives.end()
            for each in done:
                each.result()  # A client that failed says more than the wait for it.


def make_topics(client: httpx.Client) -> None:
    for durability in CLASSES:
        asked = {"durability": durability.value, "partitions": PARTITIONS}
        answer = client.put(f"/v1/topics/kills/{durability.value}", json=asked)
        assert answer.status_code == httpx.codes.CREATED, answer.text


def kill_under_load(
    path: Path, shards: Sequence[KeptShard], proxy: CuttingProxy, batching: Sequence[BatchingClient]
) -> None:
    """Start brokers, one after the other, and kill each while clients append and read."""
    lives, chance = Lives(), random.Random(13)
    with clients_of(lives, shards) as clients:
        for number in range(KILLS):
            with BrokerCommand(path) as broker:
                proxy.target = broker.url
                with broker.client() as asking:
                    if number == 0:
                        make_topics(asking)
                        for each in batching:
                            each.begin()
                lives.begin(broker.url)
                lives.wait_for_acks(chance.randint(*ACKS))
                code, logged = broker.end(signal.SIGKILL)
                assert code == -signal.SIGKILL
                assert "Traceback" not in logged
            lives.wait_for_clients(clients)
            for shard in shards:
                shard.add(Crashed(power=False))


def test_a_broker_killed_under_load_keeps_what_it_acknowledged(tmp_path: Path, ledger: Ledger) -> None:
    shards = [KeptShard(durability, partition) for durability in CLASSES for partition in range(PARTITIONS)]
    with (
        cutting_proxy(NO_BROKER) as proxy,
        forebay.connect(proxy.url, timeout_s=PATIENT_SECONDS) as log,
        ExitStack() as held,
    ):
        with batching_clients(log) as batching:
            kill_under_load(tmp_path / "data", shards, proxy, batching)
            broker = held.enter_context(BrokerCommand(tmp_path / "data"))
            proxy.target = broker.url
        client = held.enter_context(broker.client())
        assert client.get("/v1/ready").json()["degraded"] == []
        readings = [read_shard(client, shard) for shard in shards]
        for each in batching:
            each.check()
            ledger.count("acknowledged to clients of the library", n=len(each.sent))
    found: list[str] = []
    for shard, reading in zip(shards, readings, strict=True):
        history = ShardEvents(shard.durability, shard.events)
        broken = [*check_log(history, reading), *no_crash_is_damage(reading)]
        found += [f"{shard.durability.value}[{shard.partition}] {each}" for each in broken]
        ledger.count("acknowledged over HTTP", n=len(history.acked), durability=shard.durability.value)
        ledger.violation("acknowledged over HTTP", n=len(broken), durability=shard.durability.value)
        assert history.acked
        if shard.durability in KEEPS_ITS_PRODUCERS:
            assert reading.gaps == []
    ledger.count("kills of a broker", n=KILLS)
    assert found == []
