"""Appending: which partition, which offsets, atomic or split, waited for or not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import forebay
from forebay import Ack, Closed, Conflict, Indeterminate, Invalid, Storage, Unavailable
from forebay.appends.queue import Producing, QueuedRecord, QueueFull
from forebay.appends.ticket import Ticket
from forebay.engines import OwnedShard
from forebay.format.columns.rows import ColumnBytes, Row
from forebay.partitioning import Partitioner, partition_of_key, partition_of_producer
from forebay.settings import WalSettings
from forebay.storage.append import Appender
from forebay.testing.simulated.clock import ManualClock
from tests.storage.rig import QUICK, WatchedDisk, quick, values, wal_of
from tests.support.waiting import until

KAFKA = {b"21": -973932308, b"foobar": -790332482, b"a-little-bit-long-string": -985981536}
"""murmur2 of these keys as Kafka's own tests have it."""


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Storage]:
    with forebay.open(tmp_path / "log", QUICK) as log:
        yield log


def test_a_key_goes_where_kafka_puts_it(log: Storage) -> None:
    topic = log.create_topic("t", partitions=7)
    for key in KAFKA:
        topic.append(b"v", key=key)
    topic.append_many([b"v"] * 3, keys=list(KAFKA))
    topic.append_arrow(pa.record_batch({"value": [b"v"] * 3, "key": list(KAFKA)}))

    found = {(record.key, record.partition) for record in topic.read()}
    assert found == {(key, (murmur & 0x7FFFFFFF) % 7) for key, murmur in KAFKA.items()}
    assert len(list(topic.read())) == 9


def test_records_without_a_key_take_turns_and_calls_stay_together(log: Storage) -> None:
    topic = log.create_topic("t", partitions=3)
    for _ in range(6):
        topic.append(b"one")
    topic.append_many([b"many"] * 5)

    counts = [values(topic.read(partition=partition)) for partition in range(3)]
    assert [column.count(b"one") for column in counts] == [2, 2, 2]
    assert sorted(column.count(b"many") for column in counts) == [0, 0, 5]


def test_handles_of_one_topic_continue_one_sequence_of_turns(log: Storage) -> None:
    """Each handle began with partition 0: a program that asks for the topic at each append filled that one alone."""
    log.create_topic("t", partitions=3)

    for number in range(4):
        log.topic("t").append(b"%d" % number)
    log.topic("t").append_many([b"4", b"4"])
    first, second = log.topic("t"), log.topic("t")
    acks = [topic.append_nowait(b"v") for topic in (first, second, first, second)]
    assert [(ack.partition, ack.result(60)) for ack in acks] == [(2, 1), (0, 2), (1, 3), (2, 2)]
    assert [values(first.read(partition=place))[:2] for place in range(3)] == [[b"0", b"3"], [b"1", b"4"], [b"2", b"v"]]

    log.delete_topic("t")
    assert log.create_topic("t", partitions=3).append_nowait(b"v").partition == 0


def test_turns_go_on_over_partitions_that_are_added(log: Storage) -> None:
    topic = log.create_topic("t", partitions=2)
    assert [topic.append_nowait(b"v").partition for _ in range(3)] == [0, 1, 0]

    log.alter_topic("t", partitions=4)

    assert [log.topic("t").append_nowait(b"v").partition for _ in range(3)] == [3, 0, 1]


def test_a_partition_that_is_named_is_used(log: Storage) -> None:
    topic = log.create_topic("t", partitions=3)
    topic.append(b"v", key=b"k", partition=2)
    assert topic.append_nowait(b"v", partition=2).result() == 1
    topic.append_many([b"v", b"v"], keys=[b"a", b"b"], partition=2)
    topic.append_arrow(pa.record_batch({"value": [b"v"]}), partition=2)

    assert [record.offset for record in topic.read(partition=2)] == [0, 1, 2, 3, 4]
    assert len(list(topic.read())) == 5


def test_many_records_are_placed_by_key_and_reported_in_the_order_given(log: Storage) -> None:
    topic = log.create_topic("t", partitions=4)
    keys = [b"%d" % n if n % 5 else None for n in range(100)]

    offsets = topic.append_many([b"%d" % n for n in range(100)], keys=keys)

    found = {(record.partition, record.offset): record for record in topic.read()}
    for number, (key, offset) in enumerate(zip(keys, offsets, strict=True)):
        if key is not None:
            assert found[partition_of_key(key, 4), offset].value == b"%d" % number
    assert len({record.partition for record in found.values() if record.key is None}) == 1
    for partition in range(4):
        assert [r.offset for r in topic.read(partition=partition)] == list(range(topic.offsets(partition).next))


def test_what_is_not_given_is_filled_in_and_what_is_given_is_kept(log: Storage) -> None:
    topic = log.create_topic("t")
    topic.append(None, key=b"", tag="x", headers={"a": b"1", "b": None}, timestamp=-7)
    topic.append_many([b"", None], tags="all", timestamps=5, headers=[None, [("h", b""), ("h", b"2")]])
    topic.append_many((b"%d" % n for n in range(2)), tags=["p", None], timestamps=[1, 2])
    topic.append(bytearray(b"ba"), key=memoryview(b"mv"))  # type: ignore[arg-type]

    records = list(topic.read())
    assert [(r.value, r.key, r.tag, r.headers) for r in records] == [
        (None, b"", "x", (("a", b"1"), ("b", None))),
        (b"", None, "all", ()),
        (None, None, "all", (("h", b""), ("h", b"2"))),
        (b"0", None, "p", ()),
        (b"1", None, None, ()),
        (b"ba", b"mv", None, ()),
    ]
    assert [r.timestamp for r in records[:5]] == [-7, 5, 5, 1, 2]
    assert records[5].timestamp > 1_700_000_000_000


def test_an_arrow_batch_comes_back_as_it_was(log: Storage) -> None:
    topic = log.create_topic("t")
    columns = {"value": [b"a", None, b""], "key": [None, b"k", b""], "tag": ["x", None, "y"]}

    assert topic.append_arrow(pa.record_batch(columns)) == [0, 1, 2]
    assert topic.append_arrow(pa.record_batch({"value": pa.array([], pa.binary())})) == []

    [batch] = topic.read_arrow()
    assert {name: batch.column(name).to_pylist() for name in columns} == columns
    assert batch.column("offset").to_pylist() == [0, 1, 2]


def test_too_much_for_one_frame_is_refused_whole_or_split_when_asked(tmp_path: Path) -> None:
    settings = quick(frame_bytes_max=65_536)
    with Storage.open(str(tmp_path / "log"), settings) as log:
        topic = log.create_topic("t", partitions=2)
        many = [b"%04d" % n + b"x" * 1000 for n in range(200)]
        with pytest.raises(Invalid, match=r"wal.frame_bytes_max \(65536\): send less at once"):
            topic.append_many(many, partition=0)
        assert topic.offsets(0).next == 0

        assert topic.append_many(many, partition=0, atomic=False) == list(range(200))
        offsets = topic.append_many(many, keys=[b"%d" % n for n in range(200)], atomic=False)

        assert values(topic.read(partition=0))[:200] == many
        found = {(r.offset, r.value) for p in (0, 1) for r in topic.read(partition=p)}
        assert found >= set(zip(offsets, many, strict=True))
        with pytest.raises(Invalid, match="names exactly one"):
            topic.append_many(many, partition=0, atomic=False, producer=1, sequence=0)


def test_one_record_too_large_refuses_a_split_append_before_anything_is_appended(tmp_path: Path) -> None:
    """The pieces before it had been appended when it was found."""
    with Storage.open(str(tmp_path / "log"), quick(frame_bytes_max=65_536)) as log:
        topic = log.create_topic("t", partitions=2)
        many = [b"x" * 1000] * 100 + [b"y" * 70_000]
        for keys in (None, [b"%d" % n for n in range(101)]):
            with pytest.raises(Invalid, match="70"):
                topic.append_many(many, keys=keys, atomic=False)

        assert [topic.offsets(partition).next for partition in (0, 1)] == [0, 0]


def test_an_append_that_is_not_waited_for_can_be_awaited_asked_or_call_back(log: Storage) -> None:
    for durability in ("ephemeral", "memory", "disk", "fsync"):
        topic = log.create_topic(durability, durability=durability)
        called: list[Ack] = []
        done = threading.Event()

        async def waits(topic: forebay.Topic = topic) -> list[int]:
            acks = [topic.append_nowait(b"%d" % n) for n in range(50)]
            return [await ack for ack in acks]

        assert asyncio.run(waits()) == list(range(50))
        ack = topic.append_nowait(b"50")
        ack.add_callback(called.append)
        ack.add_callback(lambda _, done=done: done.set())  # type: ignore[misc]
        assert ack.result(60) == 50
        assert done.wait(60)
        assert ack.done
        assert called == [ack]
        ack.add_callback(called.append)
        assert called == [ack, ack]
        assert values(topic.read()) == [b"%d" % n for n in range(51)]


def test_an_ack_of_class_memory_waits_until_its_offset_is_reserved(tmp_path: Path) -> None:
    """Acknowledged at once, an offset beyond the reservation could have been given out again after a crash."""
    disk = WatchedDisk()
    go_on = threading.Event()

    def hold(kind: str, path: str) -> None:
        if kind == "create":
            assert go_on.wait(60)

    with Storage.open(str(tmp_path / "log"), quick(reserve_records_min=4, flush_interval_ms=1000), disk=disk) as log:
        topic = log.create_topic("t", durability="memory")
        disk.meet = hold

        first = topic.append_nowait(b"first")
        assert not first.done
        go_on.set()

        assert first.result(60) == 0
        until(lambda: wal_of(topic).writer.reserved_end > 0)
        second = topic.append_nowait(b"second")
        assert second.done


def test_the_outcome_of_an_ack_that_is_late_is_open(tmp_path: Path) -> None:
    disk = WatchedDisk()
    go_on = threading.Event()
    with Storage.open(str(tmp_path / "log"), quick(), disk=disk) as log:
        topic = log.create_topic("t")
        topic.append(b"before")
        disk.meet = lambda kind, path: go_on.wait(60) if kind == "write" else None  # type: ignore[assignment]

        ack = topic.append_nowait(b"v")
        with pytest.raises(Indeterminate, match="ask again"):
            ack.result(0.01)
        go_on.set()

        assert ack.result(60) == 1


def test_idempotent_producers_repeat_without_doubling_and_stay_in_their_partition(log: Storage) -> None:
    topic = log.create_topic("t", partitions=3)
    home = partition_of_producer(77, 3)

    first = topic.append(b"a", producer=77, sequence=0)
    many = topic.append_many([b"b", b"c"], producer=77, sequence=1)
    assert topic.append(b"a", producer=77, sequence=0) == first
    assert list(topic.append_many([b"b", b"c"], producer=77, sequence=1)) == list(many) == [1, 2]
    assert topic.append_nowait(b"d", producer=77, sequence=2).result() == 3
    assert topic.append_nowait(b"d", producer=77, sequence=2).result() == 3
    arrow = pa.record_batch({"value": [b"e", b"f"]})
    assert topic.append_arrow(arrow, producer=77, sequence=3) == topic.append_arrow(arrow, producer=77, sequence=3)

    assert values(topic.read()) == [b"a", b"b", b"c", b"d", b"e", b"f"]
    assert {record.partition for record in topic.read()} == {home}
    assert topic.last_sequence(77, home) == 3
    with pytest.raises(Conflict, match="expected 4"):
        topic.append(b"g", producer=77, sequence=9)


@pytest.mark.parametrize("durability", ["ephemeral", "disk"])
def test_a_repeat_with_another_number_of_records_is_a_conflict(log: Storage, durability: str) -> None:
    """It was answered with offsets that do not exist."""
    topic = log.create_topic("t", durability=durability)
    topic.append_many([b"a", b"b"], producer=1, sequence=0)

    for many in ([b"a"], [b"a", b"b", b"c"]):
        with pytest.raises(Conflict, match=f"with {len(many)} records, but it was an append of 2"):
            topic.append_many(many, producer=1, sequence=0)
    assert list(topic.append_many([b"a", b"b"], producer=1, sequence=0)) == [0, 1]


def test_a_repeat_beside_its_original_with_another_number_of_records_is_a_conflict(log: Storage) -> None:
    topic = log.create_topic("t")
    topic.append(b"before")
    with wal_of(topic).committing:
        original = topic.append_nowait(b"a", producer=1, sequence=0)
        with pytest.raises(Conflict, match="with 2 records, but it was an append of 1"):
            topic.append_many([b"a", b"b"], producer=1, sequence=0)
    assert original.result(60) == 1


def test_a_rotation_that_the_disk_refuses_says_why(tmp_path: Path) -> None:
    disk = WatchedDisk()

    def refuse(kind: str, path: str) -> None:
        if kind == "create":
            raise OSError(28, "no space left")

    with Storage.open(str(tmp_path / "log"), quick(), disk=disk) as log:
        topic = log.create_topic("t")
        topic.append(b"v")
        disk.meet = refuse
        with pytest.raises(Unavailable, match=r"no new log file could be begun \(.*no space left"):
            topic.rotate()
        disk.meet = lambda kind, path: None


def test_the_window_of_producers_survives_reopening(tmp_path: Path) -> None:
    for _ in range(3):
        with forebay.open(tmp_path / "log", QUICK) as log:
            topic = log.create_topic("t", exist_ok=True)
            assert [topic.append(b"%d" % n, producer=5, sequence=n) for n in range(4)] == [0, 1, 2, 3]

    with forebay.open(tmp_path / "log", QUICK) as log:
        assert values(log.topic("t").read()) == [b"0", b"1", b"2", b"3"]


@pytest.mark.plain_locks
def test_where_some_partitions_hold_and_others_do_not_the_outcome_says_so(tmp_path: Path) -> None:
    """The error of the failed partition said that nothing was done, and no caller wrote what the others had queued."""
    with Storage.open(str(tmp_path / "log"), quick(queue_records_max=4, append_timeout_ms=0)) as log:
        topic = log.create_topic("t", partitions=2)
        by_partition = {partition_of_key(b"%d" % n, 2): b"%d" % n for n in range(50)}
        wal = wal_of(topic, 1)
        with wal.committing:
            acks = [topic.append_nowait(b"full", partition=1) for _ in range(4)]
            with pytest.raises(
                Indeterminate, match=r"1 records are appended \(partition 0: offsets 0 to 0\), the rest is not"
            ):
                topic.append_many([b"zero", b"one"], keys=[by_partition[0], by_partition[1]])
            with pytest.raises(Unavailable):
                topic.append_many([b"one"], keys=[by_partition[1]])

        assert values(topic.read(partition=0)) == [b"zero"]
        assert [ack.result(60) for ack in acks] == [0, 1, 2, 3]
        assert values(topic.read(partition=1)) == [b"full"] * 4


@pytest.mark.parametrize("keys", [None, [b"%d" % n for n in range(200)]])
def test_a_split_append_that_is_refused_half_way_says_what_is_in(
    keys: list[bytes] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Unavailable` said that nothing was done, and whichever caller repeated the append had its first pieces twice."""
    monkeypatch.setattr("forebay.appends.free_space.CHECK_SECONDS", 0.0)
    disk = WatchedDisk()

    def fills_up(kind: str, path: str) -> None:
        if kind == "write" and path.endswith(".seg"):
            disk.free = 0

    settings = quick(frame_bytes_max=65_536, free_bytes_min=1, mark_interval_ms=60_000)
    with Storage.open(str(tmp_path / "log"), settings, disk=disk) as log:
        topic = log.create_topic("t", partitions=2)
        for partition in (0, 1):
            topic.append(b"before", partition=partition)
        disk.meet = fills_up

        with pytest.raises(
            Indeterminate, match=r"(\d+) records are appended \(partition .: offsets 1 to \1\), the rest is not"
        ):
            topic.append_many([b"x" * 1000] * 200, keys=keys, atomic=False)
        with pytest.raises(Unavailable, match="free some space"):
            topic.append_many([b"x" * 1000] * 200, keys=keys, atomic=False)

        assert 0 < values(topic.read()).count(b"x" * 1000) < 200


def test_a_producer_s_append_is_not_split_by_its_keys_either(tmp_path: Path) -> None:
    """The second piece was taken for a repeat of the first, and its records were gone."""
    with Storage.open(str(tmp_path / "log"), quick(frame_bytes_max=65_536)) as log:
        topic = log.create_topic("t", partitions=2)
        with pytest.raises(Invalid, match="names exactly one"):
            topic.append_many([b"x" * 1000] * 200, keys=[b"k"] * 200, atomic=False, producer=1, sequence=0)
        assert list(topic.read()) == []


def test_a_full_queue_makes_appends_wait_and_then_refuses_them(tmp_path: Path) -> None:
    """Waiting had no limit while another thread was stuck in a write."""
    disk = WatchedDisk()
    stuck, go_on = threading.Event(), threading.Event()

    def hold(kind: str, path: str) -> None:
        if kind == "write" and path.endswith(".seg"):
            stuck.set()
            assert go_on.wait(60)

    # No marks: one that is being written would hold the appends before the first is taken from the queue.
    settings = quick(queue_records_max=3, append_timeout_ms=50, mark_interval_ms=60_000)
    with Storage.open(str(tmp_path / "log"), settings, disk=disk) as log:
        topic = log.create_topic("t")
        topic.append(b"before")
        disk.meet = hold
        first = topic.append_nowait(b"stuck")
        assert stuck.wait(60)
        waiting = [topic.append_nowait(b"waits") for _ in range(3)]

        with pytest.raises(QueueFull, match="queue is full"):
            _ = topic.append_nowait(b"refused")
        with pytest.raises(Unavailable, match=r"waited 50 ms \(wal.append_timeout_ms\): 3 records"):
            topic.append(b"refused")
        with pytest.raises(Unavailable, match="waited 50 ms"):
            topic.append_many([b"refused"] * 2)
        go_on.set()

        assert [ack.result(60) for ack in (first, *waiting)] == [1, 2, 3, 4]
        assert topic.append(b"after") == 5
        assert b"refused" not in values(topic.read())


def test_a_full_queue_that_empties_in_time_takes_the_append(tmp_path: Path) -> None:
    with Storage.open(str(tmp_path / "log"), quick(queue_records_max=1)) as log:
        topic = log.create_topic("t")
        wal = wal_of(topic)
        with wal.committing:
            queued = topic.append_nowait(b"queued")
            waiting = threading.Thread(target=topic.append, args=(b"waited",))
            waiting.start()
        waiting.join(60)

        assert queued.result(60) == 0
        assert values(topic.read()) == [b"queued", b"waited"]


def test_flush_makes_everything_durable_whatever_the_class(log: Storage) -> None:
    for durability in ("memory", "disk", "fsync"):
        topic = log.create_topic(durability, partitions=2, durability=durability)
        for partition in (0, 1):
            topic.append(b"v", partition=partition)
        topic.flush()
        assert [topic.offsets(partition).durable for partition in (0, 1)] == [1, 1]


def test_rotation_begins_a_new_file_where_there_are_records(log: Storage) -> None:
    topic = log.create_topic("t", partitions=2)
    topic.append(b"a", partition=0)
    topic.rotate()
    topic.rotate()
    topic.append(b"b", partition=0)

    assert wal_of(topic, 0).counters.rotations == 1
    assert wal_of(topic, 1).counters.rotations == 0
    assert values(topic.read()) == [b"a", b"b"]


def test_offsets_name_every_watermark(log: Storage) -> None:
    topic = log.create_topic("t", durability="fsync")
    assert topic.offsets() == (0, 0, 0, 0, 0)
    topic.append_many([b"v"] * 3)
    assert topic.offsets()._asdict() == {"earliest": 0, "evict_floor": 0, "durable": 3, "exported": 0, "next": 3}


class _Refusing:
    """A shard that answers with these errors, one after the other, and then takes what comes."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.helped = 0
        self.taken = 0

    def append(self, row: Row, size: int, producing: Producing | None) -> int:
        return self._stage(Ticket()).result()

    def stage_one(self, entry: QueuedRecord, size: int) -> Ticket:
        return self._stage(entry.ticket)

    def stage_many(self, columns: ColumnBytes, producing: Producing | None, ticket: Ticket) -> Ticket:
        return self._stage(ticket)

    def _stage(self, ticket: Ticket) -> Ticket:
        if self.errors:
            raise self.errors.pop(0)
        self.taken += 1
        ticket.offset, ticket.done = 7, True
        return ticket

    def commit_within(self, seconds: float) -> None:
        self.helped += 1

    def acknowledge(self, ticket: Ticket) -> int:
        return ticket.result()


def _appender(*shards: _Refusing, timeout_ms: int = 1000) -> tuple[Appender, ManualClock]:
    """Each look for the partition finds the next shard, and at last the same one."""
    left, clock = list(shards), ManualClock()
    settings = WalSettings(append_timeout_ms=timeout_ms)

    def own(_: int) -> OwnedShard:
        return left.pop(0) if len(left) > 1 else left[0]  # type: ignore[return-value]

    found = Appender("t", settings, clock, Partitioner(1), own=own, find=lambda _: None, commit_soon=lambda _: None)
    return found, clock


def _appended(appender: Appender, many: str) -> int:
    if many == "many":
        return appender.batch(appender.prepare_many([b"v"]))[0]
    return appender.one(0, (b"v", None, None, (), 1), None)


FULL, GONE = QueueFull("3 records wait: the queue is full"), Closed("the shard is closed")


@pytest.mark.parametrize("many", ["one", "many"])
def test_an_append_to_a_shard_that_was_opened_again_waits_while_its_queue_is_full(many: str) -> None:
    closed, again = _Refusing(GONE), _Refusing(FULL, FULL)

    assert _appended(_appender(closed, again)[0], many) == 7

    assert (again.helped, again.taken) == (2, 1)


@pytest.mark.parametrize("many", ["one", "many"])
def test_an_append_that_waits_follows_its_partition_to_the_shard_that_is_open_now(many: str) -> None:
    first, second = _Refusing(FULL, GONE), _Refusing(FULL)

    assert _appended(_appender(first, second)[0], many) == 7

    assert (first.taken, second.taken) == (0, 1)


@pytest.mark.parametrize("many", ["one", "many"])
def test_an_append_to_a_shard_that_was_opened_again_waits_no_longer_than_it_may(many: str) -> None:
    closed, again = _Refusing(GONE), _Refusing(*[FULL] * 100)
    appender, clock = _appender(closed, again)
    again.commit_within = lambda seconds: clock.advance(0.4)  # type: ignore[method-assign]

    with pytest.raises(Unavailable, match=r"waited 1000 ms \(wal.append_timeout_ms\)"):
        _appended(appender, many)

    assert len(again.errors) == 96
    assert again.taken == 0


@pytest.mark.parametrize("many", ["one", "many"])
def test_a_shard_that_stays_closed_is_an_error_at_once(many: str) -> None:
    with pytest.raises(Closed):
        _appended(_appender(_Refusing(GONE))[0], many)


@pytest.mark.parametrize("size", [10, 1_500])
def test_large_batches_read_as_they_were_given_from_memory_and_from_the_file(tmp_path: Path, size: int) -> None:
    """Values that are not copied before the frame is made, of all lengths, and buffers that change afterwards."""
    given: list[bytes | bytearray | memoryview | None] = [b"%05d" % number * (size // 5) for number in range(300)]
    given[3], given[7] = None, b""
    given[11], given[13] = bytearray(b"changes" * size), memoryview(b"view" * size)
    wanted = [None if value is None else bytes(value) for value in given]
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = log.create_topic("t")
        ack = topic.append_many_nowait(given)  # type: ignore[arg-type]
        changed = given[11]
        assert isinstance(changed, bytearray)
        changed[:] = bytes(len(changed))
        ack.result()
        found = [record.value for record in topic.read()]
        assert found == wanted and {type(value) for value in found} == {bytes, type(None)}
    with forebay.open(tmp_path / "log", QUICK) as log:
        assert [record.value for record in log.topic("t").read()] == wanted


@pytest.mark.parametrize(
    ("column", "wrong", "message"),
    [
        ("tag", pa.array(["eu", ""]), "a tag has 0 bytes"),
        ("timestamp", pa.array([1, 2**63 - 1]), "a timestamp is 9223372036854775807"),
        ("headers", pa.array([[], [{"key": "k", "value": b""}] * 1001]), "a record has 1001 headers"),
    ],
)
@pytest.mark.parametrize("keyed", [False, True])
def test_rows_of_arrow_keep_the_limits_of_every_record(
    tmp_path: Path, column: str, wrong: pa.Array, message: str, *, keyed: bool
) -> None:
    with forebay.open(tmp_path / "data") as log:
        topic = log.create_topic("t", partitions=3)
        columns = {"value": pa.array([b"a", b"b"]), column: wrong}
        keys = {"key": pa.array([b"k1", b"k2"])} if keyed else {}

        with pytest.raises(forebay.Invalid, match=message):
            topic.append_arrow(pa.record_batch(columns | keys))
        assert [topic.offsets(number).next for number in range(3)] == [0, 0, 0]
