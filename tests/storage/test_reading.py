"""Reading: from any place, up to an end or following what comes, past named gaps, at any pace."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay
from forebay import EARLIEST, LATEST, DataLoss, Gap, Invalid, Position, Reason, Record, Storage, Topic, Unavailable
from forebay.testing.inside import inside
from tests.storage.rig import QUICK, WatchedDisk, quick, values, wal_of
from tests.support.waiting import PATIENCE, until


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Storage]:
    with forebay.open(tmp_path / "log", QUICK) as log:
        yield log


def test_reading_starts_at_either_end_at_an_offset_or_at_a_time(log: Storage) -> None:
    topic = log.create_topic("t")
    topic.append_many([b"%d" % n for n in range(10)], timestamps=[100, 101, 105, 103, 104, 105, 106, 107, 108, 109])

    starts = (EARLIEST, LATEST, 7, Position.at_offset(7), Position.at_time(105), Position.at_time(999), 10)
    assert [values(topic.read(start))[:1] for start in starts] == [[b"0"], [], [b"7"], [b"7"], [b"2"], [], []]
    assert values(topic.read(3, stop=6)) == [b"3", b"4", b"5"]
    assert values(topic.read(3, stop=3)) == []
    assert len(values(topic.read(stop=1_000_000))) == 10
    assert topic.offset_at_time(105) == 2
    assert topic.offset_at_time(110) is None


def test_reading_ends_where_the_log_ended_when_it_began(log: Storage) -> None:
    topic = log.create_topic("t", partitions=2)
    for partition in (0, 1):
        topic.append_many([b"before"] * 3, partition=partition)
    stream = topic.read()
    seen = [next(stream)]
    for partition in (0, 1):
        topic.append_many([b"after"] * 3, partition=partition)

    assert values([*seen, *stream]) == [b"before"] * 6
    assert len(list(topic.read())) == 12


def test_partitions_follow_each_other_and_an_offset_needs_one(log: Storage) -> None:
    topic = log.create_topic("t", partitions=3)
    for partition in (2, 0, 1):
        topic.append_many([b"%d" % partition] * 2, partition=partition)

    assert [(record.partition, record.offset) for record in topic.read()] == [(p, o) for p in range(3) for o in (0, 1)]
    assert values(topic.read(1, partition=2)) == [b"2"]
    for start in (1, Position.at_offset(1)):
        with pytest.raises(Invalid, match="name the partition"):
            topic.read(start)


def test_arrow_and_records_show_the_same(log: Storage) -> None:
    topic = log.create_topic("t", partitions=2)
    topic.append_many([b"%d" % n for n in range(50)], keys=[b"%d" % n for n in range(50)], tags="x", timestamps=5)
    topic.append(b"one", headers={"h": b"1", "n": None})

    rows = [row for batch in topic.read_arrow() for row in batch.to_pylist()]
    assert [(row["partition"], row["offset"], row["key"], row["value"], row["tag"]) for row in rows] == [
        (r.partition, r.offset, r.key, r.value, r.tag) for r in topic.read()
    ]
    assert sum(batch.num_rows for batch in topic.read_arrow(3, stop=5, partition=0)) == 2


def test_a_stream_that_is_left_goes_on_where_it_was(log: Storage) -> None:
    topic = log.create_topic("t")
    topic.append_many([b"%d" % n for n in range(10)])
    stream = topic.read()

    first = [next(stream), next(stream)]
    for record in stream:
        first.append(record)
        if len(first) == 5:
            break

    assert values([*first, *stream]) == [b"%d" % n for n in range(10)]
    assert list(stream) == []
    with pytest.raises(StopIteration):
        next(stream)


def test_following_gives_what_is_there_and_then_what_comes(log: Storage) -> None:
    topic = log.create_topic("t", partitions=2)
    topic.append(b"old", partition=0)
    stop = threading.Event()
    seen: list[Record] = []

    def follow() -> None:
        for record in topic.follow(EARLIEST, stop=stop):
            seen.append(record)
            if len(seen) == 21:
                stop.set()

    follower = threading.Thread(target=follow)
    follower.start()
    for number in range(20):
        topic.append(b"%d" % number, partition=number % 2)
    follower.join(PATIENCE)

    assert not follower.is_alive()
    assert sorted((r.partition, r.offset) for r in seen) == [(0, o) for o in range(11)] + [(1, o) for o in range(10)]


def test_following_starts_at_the_end_and_ends_when_nothing_comes(log: Storage) -> None:
    topic = log.create_topic("t")
    topic.append(b"old", timestamp=1)
    stream = topic.follow(timeout=0.02)
    assert list(stream) == []

    topic.append(b"new", timestamp=9)

    assert values(stream) == [b"new"]
    assert values(topic.follow(EARLIEST, timeout=0)) == [b"old", b"new"]
    assert values(topic.follow(1, timeout=0)) == [b"new"]
    assert values(topic.follow(Position.at_time(5), timeout=0)) == [b"new"]
    assert values(topic.follow(LATEST, timeout=0)) == []


def test_following_stops_when_asked_even_with_more_to_read(log: Storage) -> None:
    topic = log.create_topic("t")
    stop = threading.Event()
    for _ in range(5):
        topic.append_many([b"x" * 1000] * 1500)
    stream = topic.follow(EARLIEST, stop=stop)
    next(stream)

    stop.set()

    assert len(list(stream)) < 7400
    closed = topic.follow(EARLIEST)
    next(closed)
    closed.close()
    assert list(closed) == []


@pytest.mark.slow
def test_followers_that_are_forgotten_leave_nothing_behind(log: Storage) -> None:
    topic = log.create_topic("t")
    topic.append(b"v")
    for _ in range(10):
        next(topic.follow(EARLIEST))
    with topic.follow(EARLIEST) as stream:
        next(stream)
        assert len(wal_of(topic).tail.wakers) == 1
    gc.collect()

    assert len(wal_of(topic).tail.wakers) == 0


def damaged(path: Path) -> None:
    """A topic of three sealed files of ten records each; the second file is damaged in the middle of its only frame."""
    with forebay.open(path, QUICK) as log:
        topic = log.create_topic("t")
        for file in range(3):
            topic.append_many([b"%d" % (10 * file + n) for n in range(10)])
            topic.rotate()
        until(lambda: len(list(path.glob("shards/*/*.idx"))) == 3)
    second = sorted(path.glob("shards/*/*.seg"))[1]
    content = bytearray(second.read_bytes())
    place = content.rindex(b"15")
    content[place] ^= 0xFF
    second.write_bytes(content)


def test_a_gap_raises_once_and_the_stream_goes_on_behind_it(tmp_path: Path) -> None:
    """The stream had been a generator, which an exception ends: asked again it said that there was nothing more."""
    damaged(tmp_path / "log")
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = log.topic("t")
        for stream in (topic.read(), topic.follow(EARLIEST, timeout=0)):
            seen = []
            with pytest.raises(DataLoss, match=r"default/t\[0\]: offsets \[10, 20\) damaged cannot be read.*on_gap"):
                for record in stream:
                    seen.append(record)  # noqa: PERF402  # what came before the gap is kept
            assert values(seen) == [b"%d" % n for n in range(10)]

            assert values(stream) == [b"%d" % n for n in range(20, 30)]


def test_whichever_caller_asks_learns_of_gaps_in_their_place(tmp_path: Path) -> None:
    damaged(tmp_path / "log")
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = log.topic("t")
        reported: list[object] = []

        def on_gap(partition: int, gap: Gap) -> None:
            reported.append((partition, gap))

        for record in topic.read(on_gap=on_gap):
            reported.append(record.offset)  # noqa: PERF401  # gaps come in between

        assert reported == [*range(10), (0, Gap(10, 20, Reason.DAMAGED)), *range(20, 30)]
        assert [b.num_rows for b in topic.read_arrow(15, on_gap=on_gap)] == [10]
        assert reported[-1] == (0, Gap(15, 20, Reason.DAMAGED))
        assert values(topic.read(20)) == [b"%d" % n for n in range(20, 30)]


def test_a_reader_sees_its_own_writes_in_every_class(log: Storage) -> None:
    for durability in ("ephemeral", "memory", "disk", "fsync"):
        topic = log.create_topic(durability, durability=durability)
        stream = topic.follow(EARLIEST, timeout=0)
        for number in range(20):
            offset = topic.append(b"%d" % number, timestamp=number)
            assert values(topic.read(offset)) == [b"%d" % number]
            assert values(stream) == [b"%d" % number]
            assert topic.offset_at_time(number) == offset


def test_a_stalled_reader_costs_the_writer_nothing_and_goes_on_from_files(tmp_path: Path) -> None:
    settings = quick(cache_bytes_max=8192, rotate_bytes_max=65_536)
    with Storage.open(str(tmp_path / "log"), settings) as log:
        topic = log.create_topic("t")
        topic.append(b"0")
        stalled = topic.follow(EARLIEST, timeout=0)
        assert next(stalled).value == b"0"

        for number in range(1, 2000):
            topic.append(b"%d" % number + b"x" * 100)

        wal = wal_of(topic)
        assert wal.tail.cache.bytes <= 8192
        assert wal.counters.rotations >= 3
        assert [record.offset for record in stalled] == list(range(1, 2000))


def test_a_follower_that_keeps_up_reads_from_memory(log: Storage) -> None:
    topic = log.create_topic("t")
    stream = topic.follow(timeout=0)
    counts = wal_of(topic).counters

    for number in range(500):
        topic.append(b"%d" % number)
        assert next(stream).offset == number

    assert counts.cache_hits >= 0.95 * (counts.cache_hits + counts.cache_misses) > 0


@pytest.mark.slow
def test_many_readers_at_their_own_pace_see_everything_while_files_are_sealed(tmp_path: Path) -> None:
    settings = quick(cache_bytes_max=4096, rotate_bytes_max=32_768)
    with Storage.open(str(tmp_path / "log"), settings) as log:
        topic = log.create_topic("t", partitions=2)
        seen: list[list[tuple[int, int]]] = [[] for _ in range(3)]
        total = 3000

        def read(number: int) -> None:
            for record in topic.follow(EARLIEST, timeout=PATIENCE):
                seen[number].append((record.partition, record.offset))
                if len(seen[number]) == total:
                    return

        readers = [threading.Thread(target=read, args=(number,)) for number in range(3)]
        for reader in readers:
            reader.start()
        for number in range(total):
            topic.append(b"x" * 50, partition=number % 2)
        for reader in readers:
            reader.join(PATIENCE)

        assert all(sorted(found) == [(p, o) for p in (0, 1) for o in range(total // 2)] for found in seen)
        assert all([o for p, o in found if p == 0] == list(range(total // 2)) for found in seen)


def test_a_disk_that_cannot_be_read_is_said_so_and_the_stream_can_be_asked_again(tmp_path: Path) -> None:
    disk = WatchedDisk()
    with Storage.open(str(tmp_path / "log"), quick(cache_bytes_max=0), disk=disk) as log:
        topic = log.create_topic("t")
        topic.append_many([b"a", b"b"])
        topic.append(b"c")
        stream = topic.read()

        def refuse(kind: str, path: str) -> None:
            if kind == "read":
                raise OSError(5, "input/output error", path)

        disk.meet = refuse
        with pytest.raises(Unavailable, match=r"default/t\[0\] cannot be read at offset 0.*try again"):
            next(stream)
        disk.meet = lambda kind, path: None

        assert values(stream) == [b"a", b"b", b"c"]


def test_what_does_not_fit_into_memory_is_evicted_oldest_first(tmp_path: Path) -> None:
    """The memory engine refused at its limit, for ever."""
    with forebay.open(":memory:", {"memory": {"bytes_max": 4096}}) as log:
        topic: Topic = log.create_topic("t")
        for number in range(200):
            topic.append(b"%03d" % number + b"x" * 97)

        kept = list(topic.read())
        assert values(kept)[-1] == b"199" + b"x" * 97
        assert 20 < len(kept) < 50
        offsets = topic.offsets()
        assert offsets.earliest == offsets.evict_floor == kept[0].offset
        gaps: list[Gap] = []
        assert len(list(topic.read(5, on_gap=lambda _, gap: gaps.append(gap)))) == len(kept)
        assert gaps == [Gap(5, kept[0].offset, Reason.CAP)]
        with pytest.raises(Invalid, match="memory.bytes_max"):
            topic.append(b"x" * 5000)


def test_a_time_that_lies_in_a_damaged_frame_leads_to_the_damage_not_past_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with Storage.open(str(path), quick(reframe_bytes_min=0)) as log:
        topic = log.create_topic("t")
        for number in range(10):
            topic.append(b"value %d" % number, timestamp=1_000 + number)
        topic.rotate()
        topic.append(b"late", timestamp=5_000)
    segment = min(path.glob("shards/*/*.seg"))
    segment.write_bytes(segment.read_bytes().replace(b"value 3", b"value ?"))
    gaps: list[Gap] = []

    with Storage.open(str(path), quick(reframe_bytes_min=0)) as log:
        found = list(log.topic("t").read(Position.at_time(1_003), on_gap=lambda _, gap: gaps.append(gap)))

    assert [record.offset for record in found] == list(range(4, 11))
    assert gaps == [Gap(3, 4, Reason.DAMAGED)]


def test_following_the_latest_misses_nothing_when_what_waited_is_refused(tmp_path: Path) -> None:
    """It began behind the appends that waited: those took their offsets in vain, and the next records were skipped."""
    disk = WatchedDisk()
    with Storage.open(str(tmp_path / "log"), quick(free_bytes_min=1), disk=disk) as log:
        topic = log.create_topic("t", durability="fsync")
        topic.append(b"first", timestamp=1)
        wal = wal_of(topic)
        with wal.committing:
            refused = [topic.append_nowait(b"refused") for _ in range(3)]
            streams = [topic.follow(start, timeout=0) for start in (LATEST, Position.at_time(2**41))]
            disk.free = 0
            inside(topic).look_at_free_space()
        for ack in refused:
            with pytest.raises(Unavailable):
                ack.result(PATIENCE)
        disk.free = None

        assert [topic.append(b"good %d" % n, timestamp=1) for n in range(3)] == [1, 2, 3]
        assert [values(stream) for stream in streams] == [[b"good 0", b"good 1", b"good 2"]] * 2


def test_following_the_latest_of_class_memory_begins_behind_what_was_acknowledged(log: Storage) -> None:
    topic = log.create_topic("t", durability="memory")
    for _ in range(3):
        topic.append(b"before")

    stream = topic.follow(timeout=0)
    topic.append(b"after")

    assert values(stream) == [b"after"]


def test_an_end_is_an_offset_in_one_partition_as_a_start_is(log: Storage) -> None:
    topic = log.create_topic("t", partitions=2)
    for read in (lambda: topic.read(stop=1), lambda: topic.read(1), lambda: topic.read_arrow(stop=1)):
        with pytest.raises(Invalid, match="name the partition"):
            read()
