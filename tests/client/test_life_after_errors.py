"""A call ends in doubt or in an error, and the same client, lane, consumer or group goes on with something else.

Schedules from a seed: connections are cut in a request or in its answer, once or until the call gives up; the broker
fails before it has done an append, or after, or answers too late; awaiting callers are cancelled. What must hold is a
model: what was acknowledged is there once, at its offset; what is in doubt at most once; what was refused not at all; a
sequence of a producer never names two different appends; and what one call has suffered changes nothing for the next.
"""

from __future__ import annotations

import asyncio
import random  # noqa: TID251  # seeded: the same schedules in every run
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import pyarrow as pa
import pytest

import forebay
from forebay import Indeterminate, Invalid, Unavailable, aio
from forebay.client import RemoteLog, RemoteTopic
from forebay.errors import Conflict, ForebayError, Full, PartitionOutcomes, UnknownTopic
from forebay.format.frame.batch import batch_of
from forebay.service.service import AppendRecords, Service
from forebay.wire.items import RecordColumns
from tests.ledger import Ledger
from tests.support.brokers import RunningBroker, running_broker
from tests.support.proxies import CuttingProxy, cutting_proxy
from tests.support.soak import SOAK
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.slow

SEEDS: Final = range(40 if SOAK else 2)
CALLS: Final = 40 if SOAK else 18
NEVER: Final = 1 << 40
BYTES: Final = 900
"""More than a request or an answer has, with all headers."""
TIMEOUT_S: Final = 0.6
"""A call gives up after this."""
PARTITIONS: Final = 3
ATTEMPTS_MAX: Final = 50
T = TypeVar("T")


class BrokenService:
    """Fails some appends by chance, before or after they are done; notes what each sequence of a producer names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chance: random.Random | None = None
        self.failures = 0
        self.named: dict[tuple[str, int, int], tuple[Any, ...]] = {}
        self.reused: list[tuple[str, int, int]] = []
        append = Service.append

        async def broken(service: Service, who: Any, name: Any, records: AppendRecords) -> Any:
            drawn = 1.0 if self.chance is None else self.chance.random()
            if drawn < 0.08:
                self.failures += 1
                raise Unavailable("not now") if drawn < 0.04 else RuntimeError("failed before it was done")
            self._note(str(name), records)
            done = await append(service, who, name, records)
            if drawn < 0.12:
                self.failures += 1
                raise RuntimeError("failed once it was done")
            if drawn < 0.16:
                await asyncio.sleep(TIMEOUT_S)
            return done

        monkeypatch.setattr(Service, "append", broken)

    def _note(self, name: str, records: AppendRecords) -> None:
        columns = records.columns
        if records.producer is None or records.sequence is None:
            return
        if isinstance(columns, RecordColumns):
            values = columns.values
        elif isinstance(columns, pa.RecordBatch):
            values = columns.column("value").to_pylist()
        else:
            values = list(batch_of(columns, base=0, epoch=0, appended_at=0).values())
        place = (name, int(records.producer), records.sequence)
        if self.named.setdefault(place, tuple(values)) != tuple(values):
            self.reused.append(place)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    with running_broker(tmp_path_factory.mktemp("after") / "data") as broker:
        yield broker


@pytest.fixture
def proxy(broker: RunningBroker) -> Iterator[CuttingProxy]:
    with cutting_proxy(broker.url) as proxy:
        yield proxy


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> BrokenService:
    return BrokenService(monkeypatch)


def disturb(proxy: CuttingProxy, chance: random.Random) -> None:
    """What happens to the next call."""
    heal(proxy)
    drawn = chance.random()
    if drawn < 0.2:
        proxy.cut_answer(chance.randrange(BYTES))
    elif drawn < 0.4:
        proxy.cut_request(chance.randrange(BYTES))
    elif drawn < 0.5:
        proxy.cut_every_answer(chance.randrange(200))


def heal(proxy: CuttingProxy) -> None:
    proxy.cut_every_answer(None)
    proxy.cut_request(NEVER)


def in_time(call: Callable[[], T]) -> T:
    """What the call comes to once nothing disturbs it: on a busy machine it may take longer than the client waits."""
    for _ in range(ATTEMPTS_MAX):
        with suppress(Indeterminate, Unavailable):
            return call()
    return call()


# Appends


class Told(NamedTuple):
    """What a caller was told of a record."""

    value: bytes
    offset: int | None
    is_refused: bool
    """Nothing was done, it was said."""


class Model:
    """What callers were told, for any number of threads."""

    def __init__(self, ledger: Ledger, what: str) -> None:
        self.told: list[Told] = []
        self._ledger = ledger
        self._what = what

    def acked(self, values: list[bytes], offsets: list[int]) -> None:
        self._count("acknowledged", len(values))
        self.told += [Told(value, offset, False) for value, offset in zip(values, offsets, strict=True)]

    def failed(self, values: list[bytes], error: BaseException) -> None:
        is_refused = isinstance(error, Unavailable | Invalid)
        self._count("refused" if is_refused else "in doubt", len(values))
        self.told += [Told(value, None, is_refused) for value in values]

    def _count(self, outcome: str, records: int) -> None:
        self._ledger.count(self._what, records, outcome=outcome)

    def check(self, records: list[forebay.Record], *, ordered: Callable[[bytes], bool] = lambda value: True) -> None:
        """Compare with all that is stored."""
        stored = Counter(record.value for record in records)
        places = {record.value: record.offset for record in records}
        order = {one.value: number for number, one in enumerate(self.told)}
        assert set(stored) <= set(order), "what no one sent"
        for value, offset, is_refused in self.told:
            if offset is not None:
                assert (stored[value], places.get(value)) == (1, offset), (value, "acknowledged")
            else:
                assert stored[value] <= (0 if is_refused else 1), (value, is_refused)
        acked = {one.value for one in self.told if one.offset is not None and ordered(one.value)}
        for partition in range(PARTITIONS):
            numbers = [order[r.value or b""] for r in records if r.partition == partition and r.value in acked]
            assert numbers == sorted(numbers), "in the order of the calls"


def _one_call(topic: RemoteTopic, model: Model, chance: random.Random, name: str) -> None:
    """Any kind of append; what comes of it is what the model was told."""
    kind = chance.choice(["one", "keyed", "many", "nowait", "arrow", "columns"])
    count = 1 if kind in ("one", "keyed") else chance.randint(2, 4)
    values = [f"{name}-{row}".encode() for row in range(count)]
    keys = [chance.choice([b"a", b"b", b"c", b"d"]) for _ in values]
    offsets: list[int] = []
    try:
        if kind == "one":
            offsets = [topic.append(values[0], partition=chance.randrange(PARTITIONS))]
        elif kind == "keyed":
            offsets = [topic.append(values[0], key=keys[0])]
        elif kind == "many":
            offsets = list(topic.append_many(values, keys=keys if chance.random() < 0.7 else None))
        elif kind == "columns":
            offsets = list(topic.append_arrow(pa.record_batch({"value": values})))
        elif kind == "arrow":
            offsets = list(topic.append_arrow(pa.record_batch({"value": values, "key": keys})))
        else:
            _not_waited_for(topic, model, values, keys)
            return
    except ForebayError as error:
        model.failed(values, error)
    else:
        model.acked(values, offsets)


def _not_waited_for(topic: RemoteTopic, model: Model, values: list[bytes], keys: list[bytes]) -> None:
    acks = [topic.append_nowait(value, key=key) for value, key in zip(values, keys, strict=True)]
    for value, ack in zip(values, acks, strict=True):
        try:
            model.acked([value], [ack.result(PATIENCE)])
        except ForebayError as error:
            model.failed([value], error)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_client_that_goes_on_after_errors_appends_what_it_says(
    broker: RunningBroker, proxy: CuttingProxy, service: BrokenService, ledger: Ledger, seed: int
) -> None:
    chance = random.Random(f"blocking {seed}")
    model = Model(ledger, "records of a client that goes on")
    with forebay.connect(proxy.url, timeout_s=TIMEOUT_S) as log, forebay.connect(broker.url) as direct:
        direct.create_topic(f"after/blocking-{seed}", partitions=PARTITIONS)
        topic = log.topic(f"after/blocking-{seed}")
        service.chance = chance
        for number in range(CALLS):
            disturb(proxy, chance)
            _one_call(topic, model, chance, f"{number}")
        service.chance = None
        heal(proxy)
        for number in range(ATTEMPTS_MAX):
            _one_call(topic, model, chance, f"last-{number}")
            if model.told[-1].offset is not None:
                break
        assert model.told[-1].offset is not None, "it goes on"
        model.check(list(direct.topic(topic.name).read()))
    assert service.reused == []


def test_threads_of_one_client_do_not_suffer_from_each_other(
    broker: RunningBroker, proxy: CuttingProxy, service: BrokenService, ledger: Ledger
) -> None:
    for seed in SEEDS:
        models = [Model(ledger, "records of threads that share a client") for _ in range(3)]
        with forebay.connect(proxy.url, timeout_s=TIMEOUT_S) as log, forebay.connect(broker.url) as direct:
            direct.create_topic(f"after/threads-{seed}", partitions=PARTITIONS)
            topic = log.topic(f"after/threads-{seed}")
            service.chance = random.Random(f"service {seed}")

            def run(model: Model, thread: int, topic: RemoteTopic = topic, seed: int = seed) -> None:
                chance = random.Random(f"thread {thread} {seed}")
                for number in range(CALLS // 2):
                    disturb(proxy, chance)
                    _one_call(topic, model, chance, f"t{thread}-{number}")

            threads = [threading.Thread(target=run, args=(model, place)) for place, model in enumerate(models)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(PATIENCE)
            service.chance = None
            heal(proxy)
            records = list(direct.topic(topic.name).read())
        for place, model in enumerate(models):
            model.check([r for r in records if (r.value or b"").startswith(b"t%d-" % place)])
    assert service.reused == []


@pytest.mark.parametrize("seed", SEEDS)
def test_tasks_that_are_cancelled_leave_the_client_whole(
    broker: RunningBroker, proxy: CuttingProxy, service: BrokenService, ledger: Ledger, seed: int
) -> None:
    chance = random.Random(f"awaiting {seed}")
    model = Model(ledger, "records of tasks that are cancelled")

    async def one(topic: Any, name: str) -> None:
        values = [f"{name}-{row}".encode() for row in range(chance.randint(1, 3))]
        keys = [chance.choice([b"a", b"b", b"c"]) for _ in values]
        patience = chance.choice([0.002, 0.01, 0.05, PATIENCE])
        try:
            if chance.random() < 0.5:
                offsets = [await asyncio.wait_for(topic.append(values[0], key=keys[0]), patience)]
                values = values[:1]
            else:
                offsets = list(await asyncio.wait_for(topic.append_many(values, keys=keys), patience))
        except (ForebayError, TimeoutError) as error:
            model.failed(values, error)
        else:
            model.acked(values, offsets)

    async def run() -> None:
        async with aio.connect(proxy.url, timeout_s=TIMEOUT_S) as log:
            topic = await log.topic(f"after/awaiting-{seed}")
            service.chance = chance
            for number in range(CALLS):
                disturb(proxy, chance)
                await asyncio.gather(*(one(topic, f"{number}.{task}") for task in range(chance.randint(1, 3))))
            service.chance = None
            heal(proxy)
            for number in range(ATTEMPTS_MAX):
                before = len(model.told)
                await one(topic, f"last-{number}")
                if model.told[before].offset is not None:
                    break
            assert model.told[before].offset is not None, "it goes on"

    with forebay.connect(broker.url) as direct:
        direct.create_topic(f"after/awaiting-{seed}", partitions=PARTITIONS)
        asyncio.run(run())
        model.check(list(direct.topic(f"after/awaiting-{seed}").read()), ordered=lambda value: False)
    assert service.reused == []


# Subscriptions and groups


@pytest.mark.parametrize("seed", SEEDS)
def test_a_consumer_that_goes_on_after_errors_loses_no_record_and_no_acknowledgement(
    broker: RunningBroker, proxy: CuttingProxy, ledger: Ledger, seed: int
) -> None:
    chance = random.Random(f"consumer {seed}")
    with forebay.connect(proxy.url, timeout_s=TIMEOUT_S) as log, forebay.connect(broker.url) as direct:
        topic = direct.create_topic(f"after/consumer-{seed}", partitions=2)
        for partition in range(2):
            topic.append_many([b"%d" % number for number in range(60)], partition=partition)
        direct.topic(topic.name).subscribe("s", start=forebay.EARLIEST, ack_timeout_ms=500, mode="shared")
        seen: set[tuple[int, int]] = set()
        done: set[tuple[int, int]] = set()
        """Their acknowledgement was confirmed."""
        consumer = log.topic(topic.name).subscription("s").consumer("one", session_timeout_ms=60_000)
        for _ in range(CALLS):
            disturb(proxy, chance)
            try:
                taken = consumer.take(chance.randint(1, 8), wait_s=0.2)
            except (Indeterminate, Unavailable):
                ledger.count("takes of a consumer that goes on", outcome="error")
                continue
            places = [(one.record.partition, one.record.offset) for one in taken]
            assert done.isdisjoint(places), "what was confirmed as done does not come again"
            seen.update(places)
            ledger.count("takes of a consumer that goes on", outcome="records" if taken else "none")
            if not taken:
                continue
            refused = taken[:1] if chance.random() < 0.2 else []
            try:
                if refused:
                    consumer.nack(*refused, delay_ms=0)
                kept = [one for one in taken if one not in refused]
                if consumer.ack(*kept) == len(kept):
                    done.update((one.record.partition, one.record.offset) for one in kept)
            except (Indeterminate, Unavailable):
                ledger.count("acknowledgements of a consumer that goes on", outcome="error")
        heal(proxy)
        while len(done) < 120 and (taken := in_time(lambda: consumer.take(20, wait_s=5.0))):
            places = [(one.record.partition, one.record.offset) for one in taken]
            assert done.isdisjoint(places)
            seen.update(places)
            with suppress(Indeterminate, Unavailable):
                if consumer.ack(*taken) == len(taken):
                    done.update(places)
        in_time(consumer.close)
        assert seen == {(partition, offset) for partition in range(2) for offset in range(60)}, "none is lost"
        assert sum(lag.lag for lag in direct.topic(topic.name).subscription("s").lag()) == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_group_that_goes_on_after_errors_stands_where_it_was_told_or_one_doubt_further(
    broker: RunningBroker, proxy: CuttingProxy, ledger: Ledger, seed: int
) -> None:
    chance = random.Random(f"group {seed}")
    with forebay.connect(proxy.url, timeout_s=TIMEOUT_S) as log, forebay.connect(broker.url) as direct:
        name = f"after/group-{seed}"
        direct.create_topic(name, partitions=2).append_many([b"x"] * 500, partition=0)
        direct.topic(name).append_many([b"x"] * 500, partition=1)
        group = log.group(f"after-{seed}")
        told, tried = {0: 0, 1: 0}, {0: 0, 1: 0}
        for number in range(1, CALLS + 1):
            disturb(proxy, chance)
            partition, offset = chance.randrange(2), number * 3
            tried[partition] = offset
            try:
                told[partition] = group.commit(name, offset, partition)
                assert told[partition] == offset
                ledger.count("commits of a group that goes on", outcome="committed")
            except (Indeterminate, Unavailable):
                ledger.count("commits of a group that goes on", outcome="error")
        heal(proxy)
        for partition in range(2):
            stands = direct.group(f"after-{seed}").fetch(name, partition) or 0
            assert told[partition] <= stands <= tried[partition]
            assert in_time(partial(group.commit, name, 400, partition)) == 400


# Topics and routers


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_made_and_removed_in_doubt_is_there_or_not_and_goes_on(
    broker: RunningBroker, proxy: CuttingProxy, ledger: Ledger, seed: int
) -> None:
    chance = random.Random(f"topics {seed}")
    with forebay.connect(proxy.url, timeout_s=TIMEOUT_S) as log, forebay.connect(broker.url) as direct:
        direct.create_topic(f"made{seed}/source", exist_ok=True)
        for number in range(CALLS // 2):
            name = f"made{seed}/t{number}"
            disturb(proxy, chance)
            is_made = _tried(ledger, partial(log.create_topic, name, partitions=2))
            heal(proxy)
            if is_made:
                assert direct.topic(name).partitions == 2
            topic = in_time(partial(log.create_topic, name, partitions=2, exist_ok=True))
            offset = in_time(partial(topic.append, b"v", partition=1, producer=1, sequence=0))
            assert offset == 0, "no other topic has been there"
            disturb(proxy, chance)
            is_altered = _tried(ledger, partial(log.alter_topic, name, partitions=3))
            disturb(proxy, chance)
            is_routed = _tried(ledger, partial(_route, log, seed, name, number))
            heal(proxy)
            assert direct.topic(name).partitions in ((3,) if is_altered else (2, 3))
            if is_routed:
                assert [each.name for each in direct.routers.all() if each.name == f"r{seed}-{number}"]
            disturb(proxy, chance)
            is_deleted = _tried(ledger, partial(log.delete_topic, name))
            heal(proxy)
            if not is_deleted:
                with suppress(UnknownTopic):
                    in_time(partial(log.delete_topic, name))
            assert not [spec for spec in direct.topics(f"made{seed}/") if str(spec.name) == name]


def _route(log: RemoteLog, seed: int, name: str, number: int) -> None:
    log.routers.create(f"r{seed}-{number}", sources=[f"made{seed}/source"], destination=name)


def _tried(ledger: Ledger, call: Callable[[], object]) -> bool:
    """Whether the call has gone well; else its outcome is in doubt, or nothing was done."""
    try:
        call()
    except (Indeterminate, Unavailable):
        ledger.count("definitions made in doubt", outcome="error")
        return False
    ledger.count("definitions made in doubt", outcome="made")
    return True


# One by one: an attempt in doubt, then a refusal that seems clear


@pytest.mark.parametrize("refusal", [Conflict, Full])
def test_a_lane_is_not_used_for_other_records_after_an_attempt_in_doubt(
    broker: RunningBroker, proxy: CuttingProxy, monkeypatch: pytest.MonkeyPatch, refusal: type[ForebayError]
) -> None:
    """The first attempt is done and its answer lost; the second is refused in every partition, by name."""
    append, asked = Service.append, list[tuple[int | None, int | None]]()

    async def refused_once(service: Service, who: Any, name: Any, records: AppendRecords) -> Any:
        asked.append((records.producer, records.sequence))
        if len(asked) == 3:
            named = {"producer": records.producer, "sequence": records.sequence} if refusal is Conflict else {}
            error = refusal("not known here, or no room", **named)
            raise error.with_outcome(PartitionOutcomes((), {0: error, 1: error}))
        return await append(service, who, name, records)

    with forebay.connect(proxy.url) as log, forebay.connect(broker.url) as direct:
        direct.create_topic(f"after/{refusal.__name__}", partitions=2)
        topic = log.topic(f"after/{refusal.__name__}")
        monkeypatch.setattr(Service, "append", refused_once)
        topic.append_many([b"1", b"2"], keys=[b"a", b"b"])
        proxy.cut_answer(0)
        with pytest.raises((Indeterminate, refusal)):
            topic.append_many([b"3", b"4"], keys=[b"a", b"b"])
        assert len(asked) == 3, "it is not sent again by another producer"

        topic.append_many([b"5", b"6"], keys=[b"a", b"b"])

        assert asked[3] != asked[2], "its sequence names other records now"
        values = sorted(record.value or b"" for record in direct.topic(topic.name).read())
        assert values == [b"1", b"2", b"3", b"4", b"5", b"6"]
