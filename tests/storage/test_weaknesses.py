"""Weaknesses of other systems that concern the surface: each is shut here, and a test says so by its name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import forebay
from forebay import EARLIEST, Closed, Storage, Unavailable, UnknownTopic
from forebay.appends.queue import QueuedRecord
from forebay.appends.ticket import Ticket
from forebay.definitions import Definitions
from forebay.metadata import MemoryMetadata, SqliteMetadata
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.disk import SimulatedDisk
from forebay.testing.simulated.metadata import Fault, FaultyMetadata
from forebay.topics import TopicName
from tests.engines.homes import MemoryHome, SegmentHome
from tests.storage.rig import QUICK, quick, values, wal_of


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Storage]:
    with forebay.open(tmp_path / "log", QUICK) as log:
        yield log


def test_two_thousand_records_appended_at_once_can_be_read_from_the_first(log: Storage) -> None:
    for durability in ("ephemeral", "memory", "disk", "fsync"):
        topic = log.create_topic(durability, durability=durability)
        many = [b"%d" % n for n in range(2000)]
        topic.append_many(many)
        assert values(topic.read(0)) == many
        assert values(topic.follow(0, timeout=0)) == many


def test_a_reader_that_lags_behind_the_cache_goes_on_and_its_stream_does_not_end(tmp_path: Path) -> None:
    with Storage.open(str(tmp_path / "log"), quick(cache_bytes_max=4096)) as log:
        topic = log.create_topic("t")
        stream = topic.follow(EARLIEST, timeout=0)
        for round_ in range(5):
            topic.append_many([b"x" * 100] * 500)
            assert next(stream).offset == round_ * 500
            assert len(list(stream)) == 499
        assert wal_of(topic).tail.cache.bytes <= 500 * 120


def test_a_restart_goes_on_behind_the_last_record_and_not_at_zero(tmp_path: Path) -> None:
    for life in range(4):
        with forebay.open(tmp_path / "log", QUICK) as log:
            assert log.create_topic("t", exist_ok=True).append(b"%d" % life) == life


@pytest.mark.parametrize("method", ["get", "range", "transaction"])
def test_a_metadata_store_that_fails_is_not_taken_for_a_new_topic(tmp_path: Path, method: str) -> None:
    metadata = FaultyMetadata(MemoryMetadata())
    clock = ManualClock()
    definitions = Definitions(metadata, "/forebay", clock)
    name = TopicName("shop", "orders")

    def spec() -> object:
        return definitions.new_spec(name, partitions=1, durability=None, engine=None, compression="none")

    created = definitions.create(spec(), exist_ok=False).spec  # type: ignore[arg-type]
    for call in (
        lambda: definitions.get(name),
        definitions.all,
        lambda: definitions.create(spec(), exist_ok=True),  # type: ignore[arg-type]
        lambda: definitions.is_current(created),
    ):
        metadata.inject(Fault.FAIL_BEFORE, method=method)
        asked = metadata.calls.get(method, 0)
        try:
            call()
        except Unavailable:
            pass
        else:
            assert metadata.calls.get(method, 0) == asked, "a failed read was taken for an answer"
        metadata.heal()

    assert definitions.get(name) == created
    assert definitions.all() == [created]


@pytest.mark.parametrize("method", ["get", "transaction"])
def test_a_shard_whose_state_cannot_be_read_is_not_begun_again(method: str) -> None:
    for home in (
        MemoryHome(metadata=FaultyMetadata(MemoryMetadata())),
        SegmentHome(SimulatedDisk(directories=["/s"]), "/s", "disk", metadata=FaultyMetadata(MemoryMetadata())),
    ):
        engine = home.open()
        engine.open_shard(home.ref())
        shard = engine.open_shard(home.ref())
        first = shard.acknowledge(shard.stage_one(_entry(b"v"), 17))
        engine.close()
        metadata = home.metadata
        assert isinstance(metadata, FaultyMetadata)
        again = home.open()
        metadata.inject(Fault.FAIL_BEFORE, method=method)

        with pytest.raises(Unavailable, match="injected"):
            again.open_shard(home.ref())

        shard = again.open_shard(home.ref())
        assert shard.acknowledge(shard.stage_one(_entry(b"w"), 17)) > first
        again.close()


def test_a_log_whose_metadata_fails_refuses_and_creates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = log.create_topic("t", partitions=2)
        topic.append(b"v", partition=0)
        with monkeypatch.context() as broken:

            def fail(self: SqliteMetadata, key: str) -> None:
                raise Unavailable("the store is out of reach")

            broken.setattr(SqliteMetadata, "get", fail)
            for call in (
                lambda: log.topic("t"),
                lambda: topic.append(b"v", partition=1),
                lambda: log.delete_topic("t"),
            ):
                with pytest.raises(Unavailable, match="out of reach"):
                    call()
            assert topic.append(b"w", partition=0) == 1

        assert topic.append(b"v", partition=1) == 0
        with pytest.raises(UnknownTopic):
            log.topic("u")


def test_a_reader_of_an_fsync_topic_never_sees_what_a_crash_may_take() -> None:
    """Each record is looked for at the moment its sync begins, and must not be there yet."""
    disk = SimulatedDisk(directories=["/s"])
    home = SegmentHome(disk, "/s", "fsync", clock=ManualClock())
    engine = home.open()
    shard = engine.open_shard(home.ref())
    seen: list[int] = []
    sync = disk.sync

    def looked(*arguments: object) -> None:
        with suppress(Closed):  # The last sync, of the checkpoint, follows the end of the log: a read shows nothing.
            page = shard.read(0)
            seen.append(page.next)
            assert page.next == len(acked), "shown before it was durable"
        sync(*arguments)  # type: ignore[arg-type]

    acked: list[int] = []
    disk.sync = looked  # type: ignore[method-assign,assignment]
    for number in range(20):
        acked.append(shard.acknowledge(shard.stage_one(_entry(b"%d" % number), 17)))
        assert shard.read(0).next == len(acked)

    assert len(seen) >= 20
    engine.close()


def test_the_metadata_owner_named_in_an_error_is_the_one_that_lives(tmp_path: Path) -> None:
    metadata = MemoryMetadata()
    first, second = MemoryHome(metadata=metadata), MemoryHome(metadata=metadata)
    engine = first.open()
    engine.open_shard(first.ref())

    with pytest.raises(Unavailable, match="owned by the living session .* try again then"):
        second.open().open_shard(second.ref())


def _entry(value: bytes) -> QueuedRecord:
    return QueuedRecord(value, None, None, (), 1, None, Ticket())
