"""Pages of a partition by offset: what they hold, where they end, and what an event loop gets from memory alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import forebay
from forebay import Gap, Invalid, Moved, Reason
from forebay.format.frame import batch
from forebay.storage import Storage
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from tests.storage.rig import WatchedDisk, quick, values, wal_of

ENGINES = [("segment", "fsync"), ("segment", "memory"), ("rocksdb", "fsync"), (None, "ephemeral")]


@pytest.mark.parametrize(("engine", "durability"), ENGINES)
def test_pages_lead_from_the_first_record_to_the_head(tmp_path: Path, engine: str | None, durability: str) -> None:
    with forebay.open(tmp_path, quick()) as log:
        topic = log.create_topic("t", partitions=2, engine=engine, durability=durability)
        assert topic.page(1, 0) == ([], [], 0, 0, 0, 0)
        topic.append_many([b"%d" % number for number in range(10)], partition=1)

        first = topic.page(1, 0, records_max=4)
        rest = topic.page(1, first.next)

        assert (values(first.records), first.next, first.head, first.caught_up) == (
            [b"0", b"1", b"2", b"3"],
            4,
            10,
            False,
        )
        assert [record.offset for record in rest.records] == [4, 5, 6, 7, 8, 9]
        assert {record.partition for record in rest.records} == {1}
        assert rest.caught_up
        assert topic.page(1, 10).caught_up
        assert topic.page(1, 0, bytes_max=1).records
        with pytest.raises(Invalid, match="ends at offset 10, and start is 11"):
            topic.page(1, 11)
        with pytest.raises(Invalid, match="at least 1"):
            topic.page(1, 0, records_max=0)
        with pytest.raises(Invalid):
            topic.page(2, 0)


def test_gaps_and_floors_are_in_the_page_and_deleted_records_in_none(tmp_path: Path) -> None:
    with forebay.open(tmp_path, quick()) as log:
        topic = log.create_topic("t", cap_records=4)
        topic.append_many([b"%d" % number for number in range(10)])
        log.run_retention()
        topic.delete_by_offset(7, 8)

        for page in (topic.page(0, 2), topic.read_cached(0, 2)):
            assert page is not None
            assert page.gaps == [Gap(2, 6, Reason.CAP)]
            assert (page.next, page.earliest, page.evict_floor) == (6, 6, 6)
        page = topic.page(0, 6)
        assert [record.offset for record in page.records] == [6, 8, 9]
        assert (page.gaps, page.caught_up) == ([], True)
        assert topic.read_cached(0, 6) == page


def test_what_is_read_from_memory_touches_no_disk_and_waits_for_no_commit(tmp_path: Path) -> None:
    disk = WatchedDisk()
    with Storage.open(tmp_path, quick(sync_interval_ms=60_000, mark_interval_ms=60_000), disk=disk) as log:
        topic = log.create_topic("t", durability="disk")
        topic.append_many([b"0", b"1"])
        before = disk.calls.copy()
        with inside(topic).group().lock:
            page, end = topic.read_cached(0, 1), topic.read_cached(0, 2)

        assert page is not None and values(page.records) == [b"1"] and page.caught_up
        assert end == ([], [], 2, 2, 0, 0)
        assert disk.calls == before
        assert topic.read_cached(0, 3) is None

        wal_of(topic).tail.cache.clear()
        assert topic.read_cached(0, 0) is None
        assert values(topic.page(0, 0).records) == [b"0", b"1"]


def test_what_only_waits_in_the_queue_is_left_to_a_read_that_may_commit(tmp_path: Path) -> None:
    with forebay.open(tmp_path, quick(flush_interval_ms=60_000)) as log:
        topic = log.create_topic("t", durability="memory")
        topic.append(b"the first reserves offsets, and is written for that")
        topic.append(b"1")

        assert topic.read_cached(0, 1) is None
        assert values(topic.page(0, 1).records) == [b"1"]
        assert topic.read_cached(0, 2) is not None


def test_memory_answers_nothing_while_a_shard_is_not_open_or_its_lock_is_held(tmp_path: Path) -> None:
    with forebay.open(tmp_path, quick()) as log:
        log.create_topic("t").append(b"0")
    with forebay.open(tmp_path, quick()) as log:
        topic = log.topic("t")
        assert topic.read_cached(0, 0) is None
        assert values(topic.page(0, 0).records) == [b"0"]

        memory = log.create_topic("m", durability="ephemeral")
        memory.append(b"0")
        assert memory.read_cached(0, 0) is not None

        async def beside() -> object:
            with inside(memory).held_memory():
                return await asyncio.to_thread(memory.read_cached, 0, 0)

        assert asyncio.run(beside()) is None


def test_a_page_by_column_holds_what_the_page_of_records_does(tmp_path: Path) -> None:
    async def use() -> None:
        async with forebay.aio.open(tmp_path, quick()) as log:
            topic = await log.create_topic("t", partitions=2)
            await topic.append_many([b"%d" % number for number in range(10)], partition=1)
            await topic.delete_by_offset(3, 5, 1)
            for cleared in (False, True):
                if cleared:
                    inside(topic).wal(1).tail.cache.clear()
                page, reach = await topic.batch_page(1, 2, records_max=4, bytes_max=1 << 20)
                records = [record for batch in page.batches for record in batch.records(1)]
                whole = await topic.page(1, 2, records_max=4)
                assert (records, page.events, page.next) == (whole.records, whole.gaps, whole.next)
                assert (reach.earliest, reach.evict_floor, reach.head) == (0, 0, 10)
            with pytest.raises(Invalid, match="ends at offset 10"):
                await topic.batch_page(1, 11, records_max=1, bytes_max=1)

    asyncio.run(use())


def test_pages_of_an_asyncio_topic_are_those_of_the_topic(tmp_path: Path) -> None:
    async def use() -> None:
        async with forebay.aio.open(tmp_path, quick()) as log:
            topic = await log.create_topic("t")
            await topic.append(b"0")
            cached = topic.read_cached(0, 0)
            assert cached is not None and values(cached.records) == [b"0"]
            assert await topic.page(0, 0) == cached
            inside(topic).wal().tail.cache.clear()
            assert topic.read_cached(0, 0) is None
            assert await topic.page(0, 0) == cached

    asyncio.run(use())


def test_a_page_of_a_shard_that_was_moved_away_is_that_of_its_history(tmp_path: Path) -> None:
    shared = {
        "storage": {"mode": "shared_fs"},
        "store": {"root": f"{tmp_path}/store"},
        "metadata": {"path": f"{tmp_path}/shared.sqlite"},
    }
    with forebay.open(tmp_path / "a", shared) as a, forebay.open(tmp_path / "b", shared) as b:
        topic = a.create_topic("t")
        topic.append(b"0")
        a.seal_topic("t", target=b.directory_id)
        b.topic("t").append(b"1")

        page = topic.page(0, 0)

        assert (values(page.records), page.caught_up) == ([b"0"], True)
        with pytest.raises(Moved):
            topic.append(b"refused")


def test_what_takes_long_to_decompress_is_no_work_for_an_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with forebay.open(tmp_path, quick()) as log:
        topic = log.create_topic("t", compression="zstd")
        topic.append(b"small" * 100)
        topic.append(bytes(4 << 20))
        assert topic.read_cached(0, 0, bytes_max=1000) is not None

        def unpack(*_: object) -> bytes:
            raise AssertionError("decompressed in an event loop")

        with monkeypatch.context() as patch:
            patch.setattr(batch, "decompress", unpack)
            # What it holds is known by what it claims.
            assert topic.read_cached(0, 1) is None
        assert [len(record.value or b"") for record in topic.page(0, 1).records] == [4 << 20]


@pytest.mark.parametrize("place", ["memory", "file", "sealed"])
def test_compressed_frames_count_in_a_page_with_what_they_hold(tmp_path: Path, place: str) -> None:
    """A page of 1 MiB could hold a thousand small frames of 8 MiB each."""
    with forebay.open(tmp_path, quick()) as log:
        topic = log.create_topic("t", compression="zstd", durability="fsync")
        for _ in range(10):
            # So much of it does not get smaller that the frame stays as it is when its file is sealed.
            topic.append(ManualClock(seed=1).random_bytes(40_000) + bytes(1 << 20))
        if place == "sealed":
            log.export_topic("t")
        if place == "memory":
            assert len(topic.page(0, 0, bytes_max=3 << 20).records) <= 3
    if place != "memory":
        with forebay.open(tmp_path, quick()) as log:
            topic = log.topic("t")
            found = topic.page(0, 0, bytes_max=3 << 20)
            assert 1 <= len(found.records) <= 4
            assert found.next == len(found.records)
            assert len(list(topic.read())) == 10
