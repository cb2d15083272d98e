"""Bulk loads into topics of a real data directory, while others append and read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from forebay.appends.queue import Paused
from forebay.clock import SystemClock
from forebay.disk import SystemDisk
from forebay.errors import Unavailable, Unsupported
from forebay.format.columns.rows import Row, encode_rows
from forebay.format.metadata.descriptor import LoadStatus
from forebay.inspection import verify
from forebay.loads.book import LoadBook
from forebay.loads.prepare import LoadManifest, LoadPlace, manifest_of, write_segment
from forebay.records import Record
from forebay.storage import Storage, Topic
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from tests.ledger import Ledger
from tests.support.environments import directories
from tests.support.environments.directories import TOPIC, Environment, id_of, metadata_of, shard_of
from tests.support.waiting import until

pytestmark = pytest.mark.slow

ENVIRONMENTS: dict[str, Callable[[Path], Environment]] = {
    "local": directories.local,
    "shared_fs": directories.shared_fs,
}
RECORDS = 20_000


@pytest.fixture(params=ENVIRONMENTS)
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> Environment:
    return ENVIRONMENTS[request.param](tmp_path)


def prepared(log: Storage, topic: Topic, load_id: str, records: int = RECORDS) -> LoadManifest:
    """A load with so many records for each partition, in several segments."""
    store = log.loads.store().store
    segments = []
    for partition in range(topic.spec.partitions):
        for task in range(4):
            rows: list[Row] = [
                (b"load %d" % number, None, None, (), number)
                for number in range(task * records // 4, (task + 1) * records // 4)
            ]
            place = LoadPlace(load_id, topic.spec.topic_id, partition)
            made = write_segment(store, place, f"{task}-0", [encode_rows(rows)], clock=SystemClock())
            assert made is not None
            segments.append((partition, made))
    return manifest_of(load_id, topic.spec.topic_id, segments)


class Appender:
    """Appends one record after the other until asked to stop."""

    def __init__(self, topic: Topic) -> None:
        self.acked: list[int] = []
        self.refused: list[Unavailable] = []
        self._topic = topic
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Appender:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.001):
            try:
                self.acked.append(self._topic.append(b"log", partition=0))
            except Unavailable as error:
                self.refused.append(error)


@pytest.mark.parametrize("how", ["asked for", "at the next look"])
def test_appends_and_a_follower_go_on_across_a_load(environment: Environment, how: str, ledger: Ledger) -> None:
    with environment.open("A") as log:
        topic = log.create_topic(TOPIC, partitions=2)
        manifest = prepared(log, topic, "one")
        with environment.open("A", read_only=True) as beside:
            with Appender(topic) as appender:
                until(lambda: len(appender.acked) > 20)
                stream = beside.topic(TOPIC).follow(0, partition=0, timeout=60)
                seen: list[Record] = [next(stream) for _ in range(10)]
                topic.append(b"log", partition=1)
                if how == "asked for":
                    with inside(log).workers.cleanup.paused():  # else the background may be first
                        log.loads.offer(TOPIC, manifest, None)
                        progress = log.loads.attach("one")
                    assert [part.end - part.start for part in progress.attached] == [RECORDS] * 2
                else:
                    log.loads.offer(TOPIC, manifest, None)
                book = LoadBook(metadata_of(log), "/forebay", ManualClock())
                until(lambda: book.get("one").load.status is LoadStatus.COMMITTED)
                behind = len(appender.acked) + 20
                until(lambda: len(appender.acked) > behind)
            total = topic.offsets(0).next
            seen += [next(stream) for _ in range(total - 10)]
        assert appender.refused == []
        assert [record.offset for record in seen] == list(range(total))
        assert [record.value for record in seen if record.value != b"log"] == [b"load %d" % n for n in range(RECORDS)]
        assert [record.offset for record in seen if record.value == b"log"] == appender.acked
        pauses = [shard_of(topic, partition).wal.counters.pause_seconds.value() for partition in (0, 1)]
        assert [pause.count for pause in pauses] == [1, 1]
        worst = max(pause.sum for pause in pauses)
        mode = environment.settings.storage.mode
        ledger.count("longest pause of appends for a load, ms", n=round(1000 * worst), mode=mode, attached=how)


def test_a_load_survives_a_restart_a_seal_and_a_move(environment: Environment) -> None:
    with environment.open("A") as log, environment.open("B") as other:
        topic = log.create_topic(TOPIC)
        topic.append(b"first")
        log.loads.offer(TOPIC, prepared(log, topic, "one", 400), None)
        log.loads.attach("one")
        topic.append(b"last")
        log.seal_topic(TOPIC, target=id_of(other))

        moved = other.topic(TOPIC)

        assert moved.append(b"elsewhere") == 402
        values = [record.value for record in moved.read()]
        assert values == [b"first", *(b"load %d" % number for number in range(400)), b"last", b"elsewhere"]
        assert moved.offset_at_time(200) == 0
        other.delete_topic(TOPIC)
    left = [path for path in environment.root.rglob("*") if path.is_file() and topic.spec.topic_id in str(path)]
    assert [path for path in left if environment.root / "A" not in path.parents] == []


def test_verification_reads_what_a_load_brought(environment: Environment) -> None:
    with environment.open("A") as log:
        topic = log.create_topic(TOPIC)
        topic.append(b"first")
        log.loads.offer(TOPIC, prepared(log, topic, "one", 400), None)
        log.loads.attach("one")
    disk, clock = SystemDisk(), SystemClock()
    path = str(environment.root / "A")
    assert verify(path, environment.settings, disk=disk, clock=clock).findings == []

    segment = next(path for path in environment.root.rglob("*.seg") if "/loads/one/" in str(path))
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)

    assert [found.severity for found in verify(path, environment.settings, disk=disk, clock=clock).findings] != []
    disk.close()


def test_a_load_is_offered_to_owners_only_and_only_to_topics_with_files(environment: Environment) -> None:
    with environment.open("A") as log:
        topic = log.create_topic(TOPIC)
        manifest = prepared(log, topic, "one", 8)
        fleeting = log.create_topic("shop/fleeting", durability="ephemeral")
        with pytest.raises(Unsupported, match="only topics with files"):
            log.loads.offer("shop/fleeting", manifest_of("two", fleeting.spec.topic_id, []), None)
        with environment.open("A", read_only=True) as beside, pytest.raises(Unsupported, match="read-only"):
            beside.loads.offer(TOPIC, manifest, None)


def test_a_pause_that_lasts_makes_an_append_wait_and_then_refuses_it(tmp_path: Path) -> None:
    with directories.local(tmp_path).open(
        "A", wal=msgspec.structs.replace(directories.WAL, append_timeout_ms=100)
    ) as log:
        topic = log.create_topic(TOPIC)
        topic.append(b"v")
        queue = shard_of(topic).wal.queue
        queue.pause(Paused("a load is being attached"))
        with pytest.raises(Unavailable, match="waited 100 ms"):
            topic.append(b"v")
        resumed = threading.Timer(0.05, queue.resume)
        resumed.start()
        assert topic.append(b"v") == 1
        resumed.join()


def test_a_look_up_ends_at_a_load_that_is_not_committed_as_reading_does(tmp_path: Path) -> None:
    """It asked for the same page for ever, as long as another owner had its part of the load to attach."""
    environment = directories.shared_fs(tmp_path)
    with environment.open("A") as log, environment.open("B") as other:
        topic = log.create_topic(TOPIC, partitions=2)
        topic.append(b"log", partition=0, tag="t", key=b"k")
        other.topic(TOPIC).append(b"log", partition=1)
        manifest = prepared(log, topic, "one", 40)
        with inside(log).workers.cleanup.paused(), inside(other).workers.cleanup.paused():
            log.loads.offer(TOPIC, manifest, None)
            assert [part.partition for part in log.loads.attach("one").attached] == [0]
            behind = topic.append(b"log", partition=0, tag="t", key=b"k")

            assert [record.offset for record in topic.read(partition=0)] == [0]
            assert [record.offset for record in topic.read_by_tag("t", partition=0)] == [0]
            assert [record.offset for record in topic.read_by_key(b"k", history=True, partition=0)] == [0]

            other.loads.attach("one")
            log.loads.attach("one")
        until(
            lambda: LoadBook(metadata_of(log), "/forebay", ManualClock()).get("one").load.status is LoadStatus.COMMITTED
        )

        assert [record.offset for record in topic.read_by_tag("t", partition=0)] == [0, behind]
