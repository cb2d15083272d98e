"""One cursor across history, files, cache and live records: it never skips and never repeats, whatever goes away."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec
import pytest

from forebay import EARLIEST, Moved, Position, Storage, Topic, Unavailable
from forebay.format.files.segment import index_name
from forebay.format.metadata.value import encode_value
from forebay.metadata import Put
from forebay.settings import RetentionSettings
from tests.ledger import Ledger
from tests.support.environments import directories
from tests.support.environments.directories import (
    TOPIC,
    WAL,
    Environment,
    keys_of,
    metadata_of,
    numbers,
    pieces_of,
    shard_of,
    told,
)
from tests.support.soak import SOAK
from tests.support.waiting import PATIENCE, until

RECORDS: Final = 200_000 if SOAK else 4_000
# Few syncs: whichever caller asks for a new file waits for the one that is under way.
SMALL: Final = msgspec.structs.replace(WAL, rotate_bytes_max=4096, cache_bytes_max=4096, sync_interval_ms=2_000)
NOTHING_KEPT: Final = RetentionSettings(time_s=0, bytes_max=0, grace_s=0)


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return directories.shared_fs(tmp_path, wal=SMALL, retention=NOTHING_KEPT)


@pytest.fixture
def log(environment: Environment) -> Iterator[Storage]:
    with environment.open("A") as log:
        yield log


def fill(log: Storage, topic: Topic, files: int, records: int = 10) -> None:
    """So many files of history, and as many records again that are not."""
    for _ in range(files):
        append(topic, records)
        log.export_topic(TOPIC)
    append(topic, records)


def append(topic: Topic, count: int) -> None:
    first = topic.offsets().next
    topic.append_many(
        [b"%d" % n for n in range(first, first + count)], timestamps=[1000 + n for n in range(first, first + count)]
    )


def test_a_stream_begins_in_history_and_ends_in_the_newest_record(log: Storage) -> None:
    topic = log.create_topic(TOPIC)
    fill(log, topic, files=4)
    assert shard_of(topic).history.retain() == 4
    assert shard_of(topic).wal.files.begins == 40

    assert told(topic.read()) == numbers(0, 50)
    assert told(topic.read(37)) == numbers(37, 50)
    assert told(topic.read(5, stop=43)) == numbers(5, 43)
    assert told(topic.follow(0, timeout=0)) == numbers(0, 50)
    topic.flush()
    assert topic.offsets()._asdict() == {"earliest": 0, "evict_floor": 0, "durable": 50, "exported": 40, "next": 50}


def test_a_reader_in_the_middle_of_files_that_go_away_steps_back_to_history(log: Storage) -> None:
    topic = log.create_topic(TOPIC)
    fill(log, topic, files=4)
    stream = topic.read()
    seen = [next(stream) for _ in range(15)]
    assert shard_of(topic).history.retain() == 4

    seen += stream

    assert told(seen) == numbers(0, 50)


def test_a_time_is_found_in_whichever_tier_it_lies(log: Storage) -> None:
    topic = log.create_topic(TOPIC)
    fill(log, topic, files=4)
    for _ in range(2):
        for offset in (0, 9, 10, 25, 39, 40, 49):
            assert topic.offset_at_time(1000 + offset) == offset
        assert topic.offset_at_time(0) == 0
        assert topic.offset_at_time(1050) is None
        assert told(topic.read(Position.at_time(1033))) == numbers(33, 50)
        shard_of(topic).history.retain()
    assert shard_of(topic).wal.files.begins == 40


def test_what_left_the_disk_is_read_after_a_restart(environment: Environment) -> None:
    with environment.open("A") as log:
        topic = log.create_topic(TOPIC)
        fill(log, topic, files=3)
        assert shard_of(topic).history.retain() == 3
    with environment.open("A") as log:
        topic = log.topic(TOPIC)
        assert topic.recovery().clean
        assert topic.recovery().damage == ()
        assert told(topic.read()) == numbers(0, 40)
        append(topic, 5)
        assert told(topic.read(EARLIEST)) == numbers(0, 45)


def test_files_that_another_caller_reads_are_kept_for_a_while(environment: Environment) -> None:
    without_cache = msgspec.structs.replace(SMALL, cache_bytes_max=0)
    patient = RetentionSettings(time_s=0, bytes_max=0, grace_s=3600)
    with environment.open("A", retention=patient, wal=without_cache) as log:
        topic = log.create_topic(TOPIC)
        fill(log, topic, files=3)
        assert told(topic.read(10, stop=12)) == numbers(10, 12)
        assert shard_of(topic).history.retain() == 1, "only what lies before the one that is read"
        assert told(topic.read()) == numbers(0, 40)
    with environment.open("A") as log:
        topic = log.topic(TOPIC)
        topic.offsets()
        assert shard_of(topic).history.retain() >= 2, "no reader has them open now"
        assert told(topic.read()) == numbers(0, 40)


def test_what_is_not_in_the_store_never_leaves_the_disk(log: Storage, environment: Environment) -> None:
    topic = log.create_topic(TOPIC)
    fill(log, topic, files=2)
    topic.rotate()
    shard_of(topic).upkeep.seal_rotated()
    append(topic, 10)
    oldest = environment.root / "store" / pieces_of(log, topic)[0].object_key
    held = oldest.read_bytes()
    oldest.unlink()

    assert shard_of(topic).history.retain() == 0, "where the store does not have it, the front stays"
    assert told(topic.read()) == numbers(0, 40)
    oldest.write_bytes(held[:-1])
    assert shard_of(topic).history.retain() == 0
    assert told(topic.read()) == numbers(0, 40)
    log.export_topic(TOPIC)
    assert shard_of(topic).history.retain() == 0
    assert shard_of(topic).wal.files.begins == 0


def test_what_the_store_has_without_its_index_never_leaves_the_disk(log: Storage, environment: Environment) -> None:
    topic = log.create_topic(TOPIC)
    fill(log, topic, files=2)
    index = environment.root / "store" / index_name(pieces_of(log, topic)[0].object_key)
    held = index.read_bytes()
    for harm in (index.unlink, lambda: index.write_bytes(held[:-1])):
        harm()
        assert shard_of(topic).history.retain() == 0
        assert told(topic.read()) == numbers(0, 30)
    index.write_bytes(held)
    assert shard_of(topic).history.retain() == 2
    assert told(topic.read()) == numbers(0, 30)


def test_what_history_has_in_other_bytes_never_leaves_the_disk(log: Storage) -> None:
    """However whole that object is: it is no copy of the file."""
    topic = log.create_topic(TOPIC)
    fill(log, topic, files=2)
    other = msgspec.structs.replace(pieces_of(log, topic)[0], content_hash="00" * 16)
    metadata_of(log).transaction([], [Put(keys_of(log, topic).segment(0), encode_value(other))])

    assert shard_of(topic).history.retain() == 0
    assert told(topic.read()) == numbers(0, 30)


def test_a_follower_at_the_head_goes_on_through_a_seal_and_its_taking_back(log: Storage) -> None:
    topic = log.create_topic(TOPIC)
    append(topic, 5)
    stop = threading.Event()
    seen: list[tuple[int, bytes | None]] = []

    def follow() -> None:
        seen.extend((record.offset, record.value) for record in topic.follow(0, stop=stop))

    thread = threading.Thread(target=follow)
    thread.start()
    until(lambda: len(seen) == 5)
    log.seal_topic(TOPIC)
    with pytest.raises(Moved, match="was sealed here at offset 5: use it where it is now"):
        topic.append(b"refused")
    log.unseal_topic(TOPIC)
    topic.append(b"5")
    until(lambda: len(seen) == 6)
    stop.set()
    thread.join(30)

    assert seen == [*numbers(0, 5), (5, b"5")]


def test_a_reader_beside_the_owner_finds_in_the_store_what_left_the_disk(
    environment: Environment, log: Storage
) -> None:
    topic = log.create_topic(TOPIC)
    fill(log, topic, files=3)
    with environment.open("A", read_only=True) as beside:
        seen = beside.topic(TOPIC)
        stream = seen.follow(0, timeout=0)
        first = [next(stream) for _ in range(12)]
        assert shard_of(topic).history.retain() == 3
        append(topic, 10)

        until(lambda: seen.offsets().next == 50)
        assert told([*first, *stream]) == numbers(0, 50)
        assert told(seen.read()) == numbers(0, 50)
        assert seen.offset_at_time(1003) == 3
        assert seen.offsets().exported == 30


class Traffic:
    """A topic under appends, rotation, exports and retention at once, until so many records are in."""

    def __init__(self, log: Storage, topic: Topic) -> None:
        self.dropped = 0
        self._rounds = 0
        self._log = log
        self._topic = topic
        self._written = threading.Event()

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self._written.is_set()

    def write(self) -> None:
        try:
            for first in range(0, RECORDS, 20):
                self._topic.append_many([b"%d" % n for n in range(first, first + 20)])
                if first % 400 == 0:
                    # The round after the present one has exported all that is in by now, and dropped its files.
                    rounds = self._rounds
                    until(lambda: self._rounds >= rounds + 2 or self._rounds < 0)  # noqa: B023 - waited for at once
                    if self._rounds < 0:
                        return
        finally:
            self._written.set()

    def keep(self) -> None:
        try:
            while not self.is_over:
                try:
                    self._log.export_topic(TOPIC)
                except Unavailable:
                    continue  # a sync was under way
                self.dropped += shard_of(self._topic).history.retain()
                self._rounds += 1
        except BaseException:
            self._rounds = -1  # the writer waits for no more
            raise


def followed(topic: Topic) -> int:
    """Read to the last record; every one must come once, in order. How many there were."""
    expected = 0
    for record in topic.follow(0, timeout=PATIENCE):
        assert (record.offset, record.value) == (expected, b"%d" % expected)
        expected += 1
        if expected == RECORDS:
            break
    return expected


def read_again_and_again(topic: Topic, traffic: Traffic) -> int:
    """Bounded reads from the first record on until all are written; how many the last had."""
    while True:
        is_last, expected = traffic.is_over, 0
        for record in topic.read():
            assert (record.offset, record.value) == (expected, b"%d" % expected)
            expected += 1
        if is_last:
            return expected


@pytest.mark.slow
@pytest.mark.proves("I7")
def test_no_reader_skips_or_repeats_while_files_come_and_go(
    environment: Environment, log: Storage, ledger: Ledger
) -> None:
    topic = log.create_topic(TOPIC)
    traffic = Traffic(log, topic)
    with environment.open("A", read_only=True) as beside, ThreadPoolExecutor(8) as threads:
        topic.append_many([])
        readers: list[Callable[[], int]] = [
            lambda: followed(topic),
            lambda: followed(topic),
            lambda: followed(beside.topic(TOPIC)),
            lambda: read_again_and_again(topic, traffic),
        ]
        work = [threads.submit(traffic.write), threads.submit(traffic.keep)]
        counts = [threads.submit(reader) for reader in readers]
        for job in reversed(work):
            job.result(PATIENCE)
        for count in counts:
            assert count.result(PATIENCE) == RECORDS

    assert traffic.dropped >= 9
    ledger.count("records read across tiers", n=RECORDS * len(readers))
    ledger.count("files dropped under readers", n=traffic.dropped)
