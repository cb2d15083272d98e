"""The driver's part of a write, without Spark: whatever dies and whichever process is the owner, all rows or none."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final
from unittest import mock

import msgspec
import pyarrow as pa
import pytest

import forebay
from forebay.clock import SystemClock
from forebay.directory import LogDirectory
from forebay.disk import SystemDisk
from forebay.errors import Conflict, Indeterminate, Invalid, Unavailable, UnknownTopic
from forebay.format.metadata.descriptor import LoadStatus
from forebay.loads.book import AttachedPart, LoadBook
from forebay.loads.prepare import Sink
from forebay.metadata import Compare, Operation, Outcome, Put
from forebay.metadata.sqlite.store import SqliteMetadata
from forebay.spark.place.opening import opened
from forebay.spark.writing import delivery
from forebay.spark.writing.delivery import TaskResult, deliver, give_up, load_store
from forebay.spark.writing.options import Target, WriteOptions, look
from forebay.spark.writing.staging import StoreWriter, Task, stage
from forebay.storage import Storage
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from tests.ledger import Ledger
from tests.spark.killed_driver import KilledDrivers
from tests.spark.topics import SETTINGS
from tests.support.environments.directories import state_of
from tests.support.soak import SOAK
from tests.support.waiting import until

pytestmark = pytest.mark.slow

TOPIC: Final = "shop/orders"
VALUES: Final = [b"%d" % number for number in range(40)]
WAITING: Final = "60"


class Place:
    """One way to say where topics are, with an owner's way to open them."""

    def __init__(self, root: Path, kind: str) -> None:
        self.kind = kind
        self.directory = root / "a"
        self._root = root
        self.groups: dict[str, Any] = dict(SETTINGS)
        if kind != "local":
            self.groups |= {
                "storage": {"mode": "shared_fs"},
                "store": {"root": f"{root}/store"},
                "metadata": {"path": f"{root}/shared.sqlite"},
            }

    def open(self, name: str = "a", **more: Any) -> Storage:
        return forebay.open(str(self._root / name), {**self.groups, **more})

    def options(self, **more: str) -> dict[str, str]:
        shared = {"store": f"file://{self._root}/store", "metadata": f"sqlite://{self._root}/shared.sqlite"}
        path = {"path": str(self.directory)}
        chosen = {"local": path, "shared": path | shared, "no path": shared}[self.kind]
        return {**chosen, "wal.free_bytes_min": "0", "topic": TOPIC, "attachTimeout": WAITING, **more}

    def target(self, **more: str) -> Target:
        return look(WriteOptions.parse(self.options(**more)))


@pytest.fixture(params=["local", "shared", "no path"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    made = Place(tmp_path, request.param)
    with made.open() as log:
        log.create_topic(TOPIC, partitions=3)
    return made


def staged(target: Target, load_id: str, values: Sequence[bytes] = VALUES, tasks: int = 3) -> list[TaskResult]:
    """What so many tasks stage, each a part of the values."""
    results = []
    with opened(target.store_location) as found:
        for number in range(tasks):
            rows = pa.record_batch([pa.array(values[number::tasks], pa.binary())] * 2, ["value", "key"])
            task = Task(
                load_id=load_id,
                topic_id=target.spec.topic_id,
                partitions=target.spec.partitions,
                zstd_level=None,
                number=number,
                attempt=number,
            )
            made = stage(StoreWriter(load_store(found).store, task, found.clock), task, [rows])
            results.append(TaskResult(load_id=load_id, number=number, staged=tuple(made)))
    return results


def bring(target: Target, batch: int, values: Sequence[bytes] = VALUES, tasks: int = 3) -> None:
    """A micro-batch, as the sink of a query brings it."""
    load_id = f"sink-{batch}-{target.run}"
    deliver(target, load_id, staged(target, load_id, values, tasks), Sink(query_id="query", batch_id=batch))


def shown(place: Place, name: str = "a") -> list[bytes]:
    """Every value in the topic, for an owner; a gap that records a loss fails."""
    with place.open(name) as log:
        return sorted(record.value or b"" for record in log.topic(TOPIC).read())


def _status(place: Place, load_id: str) -> LoadStatus | None:
    with opened(place.target().location) as found:
        stored = LoadBook(found.metadata, found.settings.metadata.prefix, ManualClock()).find(load_id)
    return stored.load.status if stored is not None else None


def _pending(place: Place) -> dict[str, dict[int, AttachedPart]]:
    """The loads that another caller still has to see to."""
    with opened(place.target().location) as found:
        return LoadBook(found.metadata, found.settings.metadata.prefix, ManualClock()).pending()


def objects(place: Place) -> list[str]:
    """Segments of loads that lie in the store."""
    root = place.directory if place.kind == "local" else place.directory.parent / "store"
    return [path.name for path in root.rglob("*.seg") if "/loads/" in str(path)]


def test_no_caller_owns_the_topic_and_it_is_attached_here(place: Place) -> None:
    target = place.target()

    deliver(target, "load", staged(target, "load"))

    assert shown(place) == sorted(VALUES)


def test_a_driver_without_an_answer_whether_it_attached_looks(place: Place) -> None:
    target, attach_in, lost = place.target(), delivery.Delivery.attach_in, [True]

    def attached(self: delivery.Delivery, path: str, load_id: str) -> None:
        attach_in(self, path, load_id)
        if lost:
            lost.pop()
            raise Indeterminate("the answer was lost")

    with mock.patch.object(delivery.Delivery, "attach_in", attached):
        deliver(target, "load", staged(target, "load"))

    assert not lost
    assert shown(place) == sorted(VALUES)


def test_rows_of_a_partition_stand_in_the_order_of_the_tasks(place: Place) -> None:
    target = place.target()
    results = staged(target, "load")

    deliver(target, "load", results[::-1])

    with place.open() as log:
        for partition in range(3):
            values = [record.value for record in log.topic(TOPIC).read(partition=partition)]
            assert values == [value for number in range(3) for value in VALUES[number::3] if value in values]


def test_an_owner_in_this_process_attaches_it_though_it_never_used_the_topic(place: Place) -> None:
    target = place.target()
    with place.open() as log:
        if place.kind == "no path":
            for partition in range(3):
                log.topic(TOPIC).append(b"mine", partition=partition)

        deliver(target, "load", staged(target, "load"))

        values = [record.value or b"" for record in log.topic(TOPIC).read()]
        assert sorted(value for value in values if value != b"mine") == sorted(VALUES)
        assert {state_of(log, log.topic(TOPIC), partition).holder for partition in range(3)} == {log.directory_id}


def test_a_driver_waits_for_a_directory_that_is_open_and_takes_it_once_it_is_not(tmp_path: Path) -> None:
    """Whichever caller has it open is still starting, and attaches nothing."""
    place = Place(tmp_path, "local")
    with place.open() as log:
        log.create_topic(TOPIC, partitions=3)
    target = place.target()
    results = staged(target, "load")
    held = LogDirectory.take(str(place.directory), SystemDisk(), SystemClock())
    driver = threading.Thread(target=deliver, args=(target, "load", results))
    driver.start()
    until(lambda: _status(place, "load") is LoadStatus.OFFERED)
    held.release()
    driver.join(60)

    assert not driver.is_alive()
    assert shown(place) == sorted(VALUES)


def test_a_load_that_no_caller_attaches_is_given_up_in_the_end(place: Place) -> None:
    target = place.target(attachTimeout="0.2")
    results = staged(target, "load")
    with contextlib.ExitStack() as held:
        if place.kind == "no path":
            _die_with_records(place)
            message = "partition 0: directory .* has it and offsets .*, which are not in the history: open that"
        else:
            held.callback(LogDirectory.take(str(place.directory), SystemDisk(), SystemClock()).release)
            message = "the process that has .* open did not attach it"
        with pytest.raises(Unavailable, match=f"{message}.*nothing was added"):
            deliver(target, "load", results)
        assert _pending(place) == {}, "nobody else has to look for it to be over"

    assert _status(place, "load") is LoadStatus.ABANDONED
    assert shown(place) == ([b"unexported"] if place.kind == "no path" else [])


_DYING = """
import os, sys, forebay, json
log = forebay.open(sys.argv[1], json.loads(sys.argv[2]))
log.topic("shop/orders").append(b"unexported", partition=0)
os._exit(0)
"""


def _die_with_records(place: Place) -> None:
    """A process appends a record to the directory and ends without a word."""
    arguments = [str(place.directory), msgspec.json.encode(place.groups).decode()]
    subprocess.run([sys.executable, "-c", _DYING, *arguments], check=True)


@pytest.fixture(scope="module")
def drivers() -> Iterator[KilledDrivers]:
    with KilledDrivers() as drivers:
        yield drivers


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_driver_killed_at_any_transaction_is_replayed_to_the_same_rows(
    place: Place, moment: str, drivers: KilledDrivers, ledger: Ledger
) -> None:
    """The replay is cut in another way; what was appended before and after is there, and no gap records a loss."""
    with place.open() as log:
        log.topic(TOPIC).append_many([b"early"] * 5, partition=0)
    batch = 0
    for batch, at in enumerate(range(1, 100) if SOAK else (2, 5, 100)):
        target, sink = place.target(), Sink(query_id="query", batch_id=batch)
        results = staged(target, f"killed-{batch}", _values(batch))
        code = drivers.deliver(moment, at, (target, f"killed-{batch}", results, sink))
        bring(place.target(), batch, _values(batch), tasks=2)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        ledger.count("kills", figure="driver of a load", moment=moment, place=place.kind)

    assert code == 0
    with place.open() as log:
        for partition in range(3):
            log.topic(TOPIC).append(b"late", partition=partition)
    brought = [value for number in range(batch + 1) for value in _values(number)]
    assert shown(place) == sorted([*brought, *[b"early"] * 5, *[b"late"] * 3])


def _values(batch: int) -> list[bytes]:
    return [b"%d/%d" % (batch, number) for number in range(20)]


def test_what_a_dead_driver_has_attached_everywhere_is_committed_by_the_replay(place: Place) -> None:
    """Without another attempt to own anything: no caller has to attach any more."""
    dying = mock.patch.object(LoadBook, "commit", side_effect=KeyboardInterrupt)
    with dying, pytest.raises(KeyboardInterrupt):
        bring(place.target(), 0)
    with mock.patch.object(delivery.Delivery, "attach_in", side_effect=AssertionError):
        bring(place.target(), 0, tasks=2)

    assert shown(place) == sorted(VALUES)


def test_an_owner_elsewhere_that_does_not_attach_is_named(tmp_path: Path) -> None:
    place = Place(tmp_path, "no path")
    with place.open() as log:
        topic = log.create_topic(TOPIC, partitions=3)
        for partition in range(3):
            topic.append(b"mine", partition=partition)
        inside(log).workers.cleanup.take_over()
        target = place.target(attachTimeout="0.3")
        with pytest.raises(Unavailable, match=f"directory {log.directory_id} has it and did not attach it"):
            deliver(target, "load", staged(target, "load"))


def test_aborting_removes_what_was_staged_and_nothing_can_bring_it_in(place: Place) -> None:
    target = place.target()
    results = staged(target, "load")
    assert objects(place) != []

    give_up(target, "load", results)

    assert objects(place) == []
    with pytest.raises(Conflict, match="load load is abandoned"):
        deliver(target, "load", results)  # as an offer that was under way and comes late
    assert shown(place) == []


def test_aborting_after_the_commit_changes_nothing(place: Place) -> None:
    target = place.target()
    results = staged(target, "load")
    deliver(target, "load", results)

    give_up(target, "load", results)

    assert shown(place) == sorted(VALUES)


def test_aborting_an_offer_that_waits_gives_it_up(place: Place) -> None:
    target = place.target()
    results = staged(target, "load")
    dying = mock.patch.object(delivery.Delivery, "finish", side_effect=KeyboardInterrupt)
    with dying, pytest.raises(KeyboardInterrupt):
        deliver(target, "load", results)

    give_up(target, "load", results)

    assert _pending(place) == {}
    assert _status(place, "load") is LoadStatus.ABANDONED
    assert shown(place) == []


def test_nothing_staged_is_nothing_to_bring(place: Place) -> None:
    deliver(place.target(), "load", [])

    assert shown(place) == []


@pytest.mark.parametrize("change", ["deleted", "created anew", "more partitions"])
def test_a_topic_that_changes_meanwhile_gets_nothing(place: Place, change: str) -> None:
    target = place.target()
    results = staged(target, "load")
    with place.open() as log:
        if change == "more partitions":
            log.alter_topic(TOPIC, partitions=5)
        else:
            log.delete_topic(TOPIC)
        if change == "created anew":
            log.create_topic(TOPIC, partitions=3)

    with pytest.raises((UnknownTopic, Conflict), match="nothing was added"):
        deliver(target, "load", results)

    if change != "deleted":
        assert shown(place) == []


# The sink


def test_a_batch_comes_once_however_often_and_however_cut_it_is_repeated(place: Place) -> None:
    bring(place.target(), 0)
    kept = objects(place)
    bring(place.target(), 0, tasks=2)
    assert sorted(objects(place)) == sorted(kept), "what was staged for nothing is gone"

    bring(place.target(), 1, [b"next"], tasks=1)
    bring(place.target(), 0, tasks=5)
    bring(place.target(), 1, [b"next"], tasks=2)

    assert shown(place) == sorted([*VALUES, b"next"])


def test_two_drivers_of_one_query_bring_a_batch_once(place: Place) -> None:
    targets = [place.target(), place.target()]
    with ThreadPoolExecutor(len(targets)) as drivers:
        for batch in range(3):
            brought = [
                drivers.submit(bring, target, batch, _values(batch), tasks) for tasks, target in enumerate(targets, 2)
            ]
            for one in brought:
                one.result(120)

    assert shown(place) == sorted(value for batch in range(3) for value in _values(batch))


def test_attempts_that_no_caller_waits_for_add_nothing_and_are_swept(place: Place) -> None:
    """A second attempt of each task ends before the commit, and a third one after it."""
    target = place.target()
    results = staged(target, "load")
    staged(target, "load")
    deliver(target, "load", results)
    staged(target, "load")
    assert len(objects(place)) == 3 * sum(len(result.staged) for result in results)

    for file in [file for file in place.directory.parent.rglob("*") if file.is_file() and "/loads/" in str(file)]:
        os.utime(file, (1, 1))
    with place.open() as log:
        log.topic(TOPIC).append_many([b"late"] * 3, keys=[b"1", b"2", b"3"])
        log.topic(TOPIC).acquire()
        inside(log).collect_directory()

        values = [record.value or b"" for record in log.topic(TOPIC).read()]
    assert sorted(values) == sorted([*VALUES, *[b"late"] * 3])
    listed = {one.segment.object_key.rpartition("/")[2] for result in results for one in result.staged}
    assert set(objects(place)) == listed


def test_an_empty_batch_is_a_batch(place: Place) -> None:
    bring(place.target(), 0, [], tasks=2)
    bring(place.target(), 0, tasks=2)
    bring(place.target(), 1, tasks=2)

    assert shown(place) == sorted(VALUES)


def test_a_topic_created_again_under_a_query_is_refused_by_name(place: Place) -> None:
    bring(place.target(), 0)
    with place.open() as log:
        log.delete_topic(TOPIC)
        log.create_topic(TOPIC, partitions=3)

    with pytest.raises(Conflict, match="deleted and created again.*new checkpoint location"):
        bring(place.target(), 1)

    assert shown(place) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topic": ""}, 'option "topic" is missing'),
        ({"topic": "a,b"}, "one write goes into one topic"),
        ({"topics": "a"}, 'option "topics" is not known to a forebay write: one write goes into one topic'),
        ({"attachTimout": "1"}, "did you mean attachTimeout"),
        ({"attachTimeout": "soon"}, 'option "attachTimeout" is .soon.: write seconds, 0 to 86400'),
        ({"attachTimeout": "-1"}, "write seconds"),
        ({"topic": "shop/other"}, "there is no topic shop/other in .*: create it first"),
        ({"topic": "shop/fleeting"}, "lives on the memory engine, which Spark cannot write to"),
    ],
)
def test_what_is_wrong_with_the_options_is_named(tmp_path: Path, options: dict[str, str], message: str) -> None:
    place = Place(tmp_path, "local")
    with place.open() as log:
        log.create_topic("shop/fleeting", durability="ephemeral")

    with pytest.raises(Invalid, match=message):
        place.target(**options)


def test_a_batch_is_kept_whose_offer_was_attached_before_its_answer_was_lost(tmp_path: Path) -> None:
    place = Place(tmp_path, "local")
    with place.open() as log:
        log.create_topic(TOPIC, partitions=3)
    target = place.target()
    transaction, lost = SqliteMetadata.transaction, list[str]()

    def lose(store: SqliteMetadata, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        outcome = transaction(store, compares, operations)
        offers = [put.key for put in operations if isinstance(put, Put) and "/offers/" in put.key]
        if not offers or lost:
            return outcome
        lost.extend(offers)
        with place.open() as log:
            assert log.loads.attach(offers[0].split("/offers/")[1].split("/")[0]).load.status is LoadStatus.COMMITTED
        raise Indeterminate("the answer was lost")

    with mock.patch.object(SqliteMetadata, "transaction", lose):
        bring(target, 0)

    assert shown(place) == sorted(VALUES)
