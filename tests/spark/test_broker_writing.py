"""Writing through a broker: rows once, although it is killed between offer and attach, whatever its storage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from forebay.bulk import BulkLoad
from forebay.client.blocking import RemoteLoads
from forebay.clock import SystemClock
from forebay.errors import Conflict, Unavailable, UnknownTopic, Unsupported
from forebay.loads.prepare import Sink
from forebay.spark.place.opening import opened
from forebay.spark.writing.brokered import BrokerStaging
from forebay.spark.writing.delivery import TaskResult, deliver, give_up, load_store
from forebay.spark.writing.options import Target, WriteOptions, load_id_of, look
from forebay.spark.writing.staging import StoreWriter, Task, stage
from tests.spark.served import Restarted

pytestmark = pytest.mark.slow

TOPIC = "shop/orders"


@pytest.fixture(params=["local", "shared_fs"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Restarted]:
    shared = ("storage.mode=shared_fs", f"store.root={tmp_path / 'store'}")
    broker = Restarted(tmp_path / "data", *(shared if request.param == "shared_fs" else ()))
    with broker.log() as log:
        log.create_topic(TOPIC, partitions=2)
    yield broker
    with broker.command:
        pass


def target_of(broker: Restarted, **options: str) -> Target:
    return look(WriteOptions.parse({"broker": broker.command.url, "topic": TOPIC, **options}))


def staged(target: Target, load_id: str, number: int, values: list[str]) -> TaskResult:
    """What a task does with its rows."""
    spec = target.spec
    task = Task(
        load_id=load_id, topic_id=spec.topic_id, partitions=spec.partitions, zstd_level=None, number=number, attempt=1
    )
    rows = pa.RecordBatch.from_pydict(
        {"value": values, "key": values, "partition": [None] * len(values)},
        schema=pa.schema([("value", pa.string()), ("key", pa.string()), ("partition", pa.int32())]),
    )
    if target.is_staged_by_broker:
        writer = BrokerStaging(target, task)
        found = stage(writer, task, [rows])
        writer.close()
    else:
        with opened(target.store_location) as place:
            found = stage(StoreWriter(load_store(place).store, task, SystemClock()), task, [rows])
    return TaskResult(load_id=load_id, number=number, staged=tuple(found))


def values(broker: Restarted) -> list[str]:
    with broker.log() as log:
        return sorted((record.value or b"").decode() for record in log.topic(TOPIC).read())


def test_rows_come_in_once_although_the_broker_is_killed_between_offer_and_attach(
    broker: Restarted, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of(broker)
    sink = Sink(query_id="0a-1", batch_id=3)
    load_id = load_id_of(target, sink)
    results = [staged(target, load_id, number, [f"{number}-{row}" for row in range(50)]) for number in (0, 1)]
    attach, kills = RemoteLoads.attach, list[str]()

    def killed_first(loads: RemoteLoads, name: str) -> BulkLoad:
        if not kills:
            broker.kill()
        kills.append(name)
        return attach(loads, name)

    monkeypatch.setattr(RemoteLoads, "attach", killed_first)

    deliver(target, load_id, results, sink)

    expected = sorted(f"{number}-{row}" for number in (0, 1) for row in range(50))
    assert kills[0] == load_id
    assert values(broker) == expected
    again = target_of(broker)
    retried = load_id_of(again, sink)
    deliver(again, retried, [staged(again, retried, 0, ["repeated"])], sink)
    assert values(broker) == expected, "a repeat of the batch brings nothing"
    broker.kill()
    assert values(broker) == expected


def test_what_is_given_up_never_comes_in_and_a_late_offer_is_refused(broker: Restarted) -> None:
    target = target_of(broker)
    result = staged(target, "spark-late", 0, ["never"])

    give_up(target, "spark-late", [result])
    give_up(target, "spark-late", [result])

    with pytest.raises((Unavailable, Conflict)):
        deliver(target, "spark-late", [result])
    assert values(broker) == []


def test_a_batch_without_rows_is_recorded_and_a_write_without_rows_is_nothing(broker: Restarted) -> None:
    target, sink = target_of(broker), Sink(query_id="0a-1", batch_id=0)

    deliver(target, "spark-none", [], None)
    deliver(target, load_id_of(target, sink), [], sink)
    later = target_of(broker)
    retried = load_id_of(later, sink)
    deliver(later, retried, [staged(later, retried, 0, ["repeated"])], sink)

    assert values(broker) == []


def test_a_topic_that_changed_since_takes_nothing(broker: Restarted) -> None:
    target = target_of(broker)
    result = staged(target, "spark-one", 0, ["x"])
    with broker.log() as log:
        log.alter_topic(TOPIC, partitions=3)
        with pytest.raises(Conflict, match="nothing was offered"):
            deliver(target, "spark-one", [result])
        log.delete_topic(TOPIC)
        with pytest.raises(UnknownTopic):
            deliver(target, "spark-one", [result])
        log.create_topic(TOPIC, partitions=2)
        with pytest.raises(UnknownTopic, match="was deleted while it was being written to"):
            deliver(target, "spark-one", [result])
        assert list(log.topic(TOPIC).read()) == []
        log.create_topic("shop/memory", durability="ephemeral")
    with pytest.raises(UnknownTopic, match="there is no topic shop/other in the broker at"):
        look(WriteOptions.parse({"broker": broker.command.url, "topic": "shop/other"}))
    with pytest.raises(Unsupported, match="which Spark cannot write to"):
        look(WriteOptions.parse({"broker": broker.command.url, "topic": "shop/memory"}))
