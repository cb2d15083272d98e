"""Topics of a log: created, found, listed and deleted; a deletion is finished whatever happens to it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import forebay
from forebay import EARLIEST, Conflict, Invalid, Storage, Unavailable, UnknownTopic, Unsupported
from forebay.storage.background.jobs import JOBS
from forebay.testing.contracts.engines import in_threads
from tests.storage.rig import QUICK, WatchedDisk, quick, values


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "log")


def shard_directories(path: str) -> list[str]:
    return sorted(entry.name for entry in (Path(path) / "shards").iterdir())


def test_a_name_is_one_name_however_it_is_written(path: str) -> None:
    with forebay.open(path, QUICK) as log:
        topic = log.create_topic("/shop/orders")
        plain = log.create_topic("orders")

        assert (topic.name, plain.name) == ("shop/orders", "default/orders")
        assert log.topic("shop/orders").spec == topic.spec == log.topic("/shop/orders").spec
        assert log.topic("default/orders").spec == plain.spec == log.topic("/orders").spec
        for name in ("shop/orders", "/shop/orders", "orders", "/default/orders"):
            with pytest.raises(Conflict, match="exists already.*exist_ok"):
                log.create_topic(name)


def test_the_name_of_a_listed_definition_can_be_used_in_every_call(path: str) -> None:
    with forebay.open(path, QUICK) as log:
        log.create_topic("shop/orders").append(b"paid")
        [spec] = log.topics()
        group = log.group("billing")

        assert values(log.topic(spec.name).read()) == [b"paid"]
        assert log.create_topic(spec.name, exist_ok=True).spec == spec
        assert log.alter_topic(spec.name, cap_records=10).cap_records == 10
        assert group.commit(spec.name, 1) == 1 == group.fetch(spec.name)
        assert (group.note(spec.name), group.reset(spec.name, 0)) == ("", {0: 0})
        copy = log.create_topic("shop/copy").spec
        assert log.copy_topic(spec.name, copy.name).copied == 1
        log.export_topic(spec.name)
        log.seal_topic(spec.name)
        log.unseal_topic(spec.name)
        log.delete_topic(spec.name)
        assert [str(left.name) for left in log.topics()] == ["shop/copy"]


def test_topics_are_listed_by_name_with_their_definition(path: str) -> None:
    with forebay.open(path, QUICK) as log:
        log.create_topic("b", partitions=3, durability="fsync")
        log.create_topic("a/z", compression="zstd:3")
        log.create_topic("a/ephemeral", durability="ephemeral")

    with forebay.open(path, QUICK, read_only=True) as log:
        assert [(str(s.name), s.partitions, str(s.durability), s.compression) for s in log.topics()] == [
            ("a/ephemeral", 1, "ephemeral", "none"),
            ("a/z", 1, "disk", "zstd:3"),
            ("default/b", 3, "fsync", "none"),
        ]
        with pytest.raises(Unsupported, match="memory of its owner"):
            log.topic("a/ephemeral")


def test_exist_ok_gives_the_topic_as_it_is(path: str) -> None:
    with forebay.open(path, QUICK) as log:
        log.create_topic("t", partitions=3).append(b"v", partition=2)

        again = log.create_topic("t", partitions=1, durability="fsync", exist_ok=True)

        assert (again.partitions, again.spec.durability) == (3, "disk")
        assert values(again.read()) == [b"v"]


def test_of_many_that_create_one_topic_at_once_one_succeeds(path: str) -> None:
    with forebay.open(path, QUICK) as log:
        created: list[str] = []

        def create(_: int) -> None:
            try:
                created.append(log.create_topic("t").spec.topic_id)
            except Conflict:
                log.create_topic("t", exist_ok=True).append(b"v")

        in_threads(8, create)

        assert len(created) == 1
        assert values(log.topic("t").read()) == [b"v"] * 7


def test_a_deleted_topic_is_unknown_and_its_files_are_gone(path: str) -> None:
    with forebay.open(path, QUICK) as log:
        kept = log.create_topic("kept")
        kept.append(b"kept")
        topic = log.create_topic("t", partitions=3)
        for partition in (0, 1):
            topic.append(b"v", partition=partition)
        topic.rotate()
        stream = topic.follow(EARLIEST)
        assert next(stream).value == b"v"

        log.delete_topic("/default/t")

        for call in (lambda: log.topic("t"), lambda: log.delete_topic("t")):
            with pytest.raises(UnknownTopic, match="no topic default/t"):
                call()
        assert [spec.topic for spec in log.topics()] == ["kept"]
        assert shard_directories(path) == [f"{kept.spec.topic_id}_0"]
        for partition in range(3):
            with pytest.raises(UnknownTopic, match="was deleted"):
                topic.append(b"v", partition=partition)
        with pytest.raises(UnknownTopic, match="was deleted"):
            list(stream)
        assert values(kept.read()) == [b"kept"]


def test_the_handle_of_a_deleted_topic_does_not_bring_it_back(path: str) -> None:
    """A partition that had not been used yet was opened again, and blocked the next topic of that name."""
    with forebay.open(path, QUICK) as log:
        old = log.create_topic("t", partitions=2)
        log.delete_topic("t")
        with pytest.raises(UnknownTopic):
            old.append(b"v", partition=1)

        new = log.create_topic("t", partitions=2)
        assert [new.append(b"new", partition=1), new.append(b"new", partition=0)] == [0, 0]

        with pytest.raises(UnknownTopic):
            old.append(b"v", partition=1)
        assert new.spec.topic_id != old.spec.topic_id
        assert values(new.read()) == [b"new", b"new"]


def test_a_topic_created_again_is_empty_whatever_the_class(path: str) -> None:
    for durability in ("ephemeral", "memory", "disk", "fsync"):
        with forebay.open(path, QUICK) as log:
            log.create_topic("t", durability=durability).append_many([b"old"] * 3)
            log.delete_topic("t")
            assert list(log.create_topic("t", durability=durability).read()) == []
        with forebay.open(path, QUICK) as log:
            assert log.topic("t").append(b"new") == 0
            assert values(log.topic("t").read()) == [b"new"]
            log.delete_topic("t")


def test_creating_and_deleting_one_topic_in_threads_leaves_a_sound_one(path: str) -> None:
    """Two threads that finished one deletion wiped the state of the topic created between them."""
    with forebay.open(path, QUICK) as log:

        def churn(_: int) -> None:
            for _ in range(6):
                try:
                    log.create_topic("t", exist_ok=True).append(b"v")
                    log.delete_topic("t")
                except (UnknownTopic, forebay.Closed, Conflict):
                    pass

        in_threads(4, churn)
        log.create_topic("t", exist_ok=True).append(b"last")

    with forebay.open(path, QUICK) as log:
        assert values(log.topic("t").read())[-1] == b"last"
        assert shard_directories(path) == [f"{log.topic('t').spec.topic_id}_0"]


@pytest.mark.parametrize("kind", ["unlink", "remove_directory", "sync_directory"])
def test_a_deletion_that_the_disk_interrupts_is_finished_at_the_next_opening(path: str, kind: str) -> None:
    disk = WatchedDisk()

    def refuse(call: str, where: str) -> None:
        if call == kind:
            raise OSError(5, "input/output error", where)

    with Storage.open(path, quick(), disk=disk) as log:
        log.create_topic("kept").append(b"kept")
        log.create_topic("t", partitions=2).append_many([b"v"] * 9, keys=[b"%d" % n for n in range(9)])
        disk.meet = refuse

        log.delete_topic("t")

        with pytest.raises(UnknownTopic):
            log.topic("t")
        with pytest.raises(Unavailable, match="not gone yet; try again"):
            log.create_topic("t")
        other = log.create_topic("other")
        if kind == "sync_directory":
            with pytest.raises(Unavailable, match=r"other\[0\] cannot be opened"):
                other.append(b"v")
        else:
            other.append(b"v")
        disk.meet = lambda call, where: None
        other.append(b"works")

    with forebay.open(path, QUICK) as log:
        assert shard_directories(path) == sorted(f"{log.topic(name).spec.topic_id}_0" for name in ("kept", "other"))
        assert log.create_topic("t").append(b"new") == 0
        assert values(log.topic("kept").read()) == [b"kept"]


def test_a_deletion_waits_for_upkeep_of_the_shard(path: str) -> None:
    disk = WatchedDisk()
    syncing, go_on = threading.Event(), threading.Event()

    def hold(kind: str, where: str) -> None:
        if kind == "sync" and where.endswith(".seg") and threading.current_thread().name == JOBS:
            syncing.set()
            assert go_on.wait(60)

    with Storage.open(path, quick(), disk=disk) as log:
        topic = log.create_topic("t")
        disk.meet = hold
        topic.append(b"v")
        assert syncing.wait(60)
        deleting = threading.Thread(target=log.delete_topic, args=("t",))
        deleting.start()

        go_on.set()
        deleting.join(60)

        assert shard_directories(path) == []


def test_an_ephemeral_topic_keeps_its_name_and_offsets_and_loses_its_records(path: str) -> None:
    with forebay.open(path, QUICK) as log:
        topic = log.create_topic("t", durability="ephemeral")
        last = topic.append_many([b"v"] * 5)[-1]
        assert len(list(topic.read())) == 5

    with forebay.open(path, QUICK) as log:
        topic = log.topic("t")
        assert list(topic.read()) == []
        assert topic.append(b"new") > last
        assert values(topic.read()) == [b"new"]
        gaps: list[forebay.Gap] = []
        assert values(topic.read(0, on_gap=lambda _, gap: gaps.append(gap))) == [b"new"]
        assert [(gap.start, gap.reason) for gap in gaps] == [(0, forebay.Reason.LOST)]


def test_what_is_not_offered_says_what_is(path: str) -> None:
    with forebay.open(path, QUICK) as log:
        with pytest.raises(Unsupported, match="replicated.*fsync"):
            log.create_topic("t", durability="replicated")
        with pytest.raises(Unsupported, match="rocksdb.*fsync"):
            log.create_topic("t", engine="rocksdb", durability="memory")
        with pytest.raises(Invalid, match="needs engine"):
            log.create_topic("t", engine="memory", durability="fsync")
        assert log.topics() == []


def test_topics_are_listed_page_by_page(path: str) -> None:
    with forebay.open(path, QUICK) as log:
        names = ["a/x", "shop-old/orders", "shop/carts", "shop/orders", "shop/orders-2"]
        for name in names:
            log.create_topic(name)
        pages: list[list[str]] = []
        after: str | None = None
        while page := [str(spec.name) for spec in log.topics(after=after, limit=2)]:
            pages.append(page)
            after = page[-1]

        assert pages == [names[:2], names[2:4], names[4:]]
        assert [str(spec.name) for spec in log.topics("shop/")] == names[2:]
        assert [str(spec.name) for spec in log.topics("shop/or", after="shop/orders")] == names[4:]
        assert log.topics("none/") == []
        with pytest.raises(Invalid, match="limit is 0"):
            log.topics(limit=0)
