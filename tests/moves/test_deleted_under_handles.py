"""A topic that another process deletes while it is used: its handles end and acknowledge nothing."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict

import pytest

from forebay import EARLIEST, LATEST, Record, Storage, Topic, UnknownTopic
from forebay.aio import AsyncLog
from forebay.catalog import read_state
from forebay.cleanup import deleted_topics
from forebay.disk.descriptors import SystemFile
from forebay.engines.rocksdb.database import RocksDatabase
from forebay.metadata import Compare, Operation, Outcome, SqliteMetadata
from forebay.storage.acks import Ack, BatchAck
from forebay.storage.cursors import Reader
from forebay.storage.subscriptions import Consumer, Subscription
from forebay.testing.inside import inside
from tests.ledger import Ledger
from tests.storage.rig import in_thread
from tests.support.environments import directories
from tests.support.environments.directories import TOPIC, Environment, keys_of, metadata_of
from tests.support.waiting import PATIENCE, async_until, until

pytestmark = pytest.mark.slow


class Options(TypedDict, total=False):
    """What is created."""

    durability: str
    engine: str


CLASSES: list[Options] = [
    {"durability": "memory"},
    {"durability": "disk"},
    {"durability": "fsync"},
    {"durability": "ephemeral"},
    {"durability": "disk", "engine": "rocksdb"},
]
NAMES = ["memory", "disk", "fsync", "ephemeral", "rocksdb"]


@pytest.fixture(params=["local", "shared_fs"])
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> Environment:
    return directories.local(tmp_path) if request.param == "local" else directories.shared_fs(tmp_path)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deletion waits for an owner that lives as long as it takes: a busy machine is no owner that is silent."""
    monkeypatch.setattr(deleted_topics, "OWNER_SECONDS", PATIENCE)


def delete(log: Storage, *, again: bool) -> None:
    log.delete_topic(TOPIC)
    if again:
        log.create_topic(TOPIC)


def appends(topic: Topic) -> dict[str, Callable[[], object]]:
    """Every way to append through a handle, each until it is acknowledged."""
    return {
        "append": lambda: topic.append(b"1"),
        "append_many": lambda: topic.append_many([b"1", b"2"]),
        "append_nowait": lambda: topic.append_nowait(b"1").result(PATIENCE),
        "append_many_nowait": lambda: topic.append_many_nowait([b"1", b"2"]).result(PATIENCE),
        "producer": lambda: topic.append(b"1", producer=7, sequence=0),
    }


@pytest.mark.parametrize(
    ("options", "again"),
    [*((option, True) for option in CLASSES), (CLASSES[1], False)],
    ids=[*NAMES, "disk, not created again"],
)
def test_no_append_is_acknowledged_once_the_deletion_has_returned(
    environment: Environment,
    options: Options,
    again: bool,  # noqa: FBT001
) -> None:
    with environment.open("A") as a, environment.open("B") as b:
        topic = a.create_topic(TOPIC, partitions=2, **options)
        topic.append(b"0", partition=0)
        delete(b, again=again)

        for act in appends(topic).values():
            with pytest.raises(UnknownTopic, match="was deleted"):
                act()
        if again:
            assert list(b.topic(TOPIC).read()) == []


@pytest.mark.parametrize("options", CLASSES, ids=NAMES)
def test_appends_that_go_on_beside_a_deletion_end_with_it(
    environment: Environment, options: Options, ledger: Ledger
) -> None:
    with environment.open("A") as a, environment.open("B") as b:
        topic = a.create_topic(TOPIC, **options)
        begun, returned = threading.Semaphore(0), threading.Event()

        def append_until_refused(act: Callable[[], object]) -> tuple[int, int]:
            """How many were acknowledged, and how many of those that began after the deletion had returned."""
            acknowledged = late = 0
            while True:
                is_late = returned.is_set()
                try:
                    act()
                except UnknownTopic:
                    return acknowledged, late
                acknowledged += 1
                late += is_late
                begun.release()

        acts = [act for name, act in appends(topic).items() if name != "producer"]
        with ThreadPoolExecutor(len(acts)) as threads:
            ends = [threads.submit(append_until_refused, act) for act in acts]
            for _ in range(100):
                assert begun.acquire(timeout=PATIENCE)
            delete(b, again=True)
            returned.set()
            found = [end.result(PATIENCE) for end in ends]

        ledger.count("appends", n=sum(acknowledged for acknowledged, _ in found), beside="deletion")
        assert [late for _, late in found] == [0] * len(found)
        assert list(b.topic(TOPIC).read()) == []


def test_appends_of_an_event_loop_end_with_the_topic(environment: Environment) -> None:
    async def run() -> None:
        async with AsyncLog(environment.root / "A", environment.settings) as a:
            topic = await a.create_topic(TOPIC)
            await topic.append(b"0")
            deleting = asyncio.create_task(asyncio.to_thread(lambda: delete(b, again=True)))
            acknowledged = 0
            with pytest.raises(UnknownTopic, match="was deleted"):
                while True:
                    is_late = deleting.done()
                    await asyncio.wait_for(topic.append(b"1"), PATIENCE)
                    assert not is_late
                    acknowledged += 1
            await deleting
            for act in (
                lambda: topic.append(b"1"),
                lambda: topic.append_many([b"1", b"2"]),
                lambda: topic.append_nowait(b"1"),
                lambda: topic.append_many_nowait([b"1", b"2"]),
            ):
                with pytest.raises(UnknownTopic, match="was deleted"):
                    made = await asyncio.wait_for(act(), PATIENCE)
                    assert isinstance(made, Ack | BatchAck), "what was waited for would have been refused"
                    await asyncio.to_thread(made.result, PATIENCE)
            await async_until(lambda: not inside(a.blocking).engine.shards())

    with environment.open("B") as b:
        asyncio.run(run())
        assert list(b.topic(TOPIC).read()) == []


def _looks(
    topic: Topic, reader: Reader, first: Record, subscription: Subscription, consumer: Consumer
) -> list[Callable[[], object]]:
    """What callers ask of a topic by things that they were given before."""
    return [
        lambda: list(topic.read()),
        lambda: list(topic.read_by_key(b"k")),
        topic.offsets,
        lambda: topic.last_sequence(7),
        lambda: topic.delete_before(1),
        topic.flush,
        topic.rotate,
        topic.acquire,
        lambda: list(reader.read()),
        lambda: reader.ack(first),
        lambda: reader.reset(EARLIEST),
        lambda: consumer.take(1),
        subscription.peek,
        lambda: topic.subscribe("other"),
        lambda: topic.dead_letters().letters(),
    ]


@pytest.mark.parametrize("again", [False, True], ids=["deleted", "created again"])
def test_who_reads_through_a_handle_is_told(environment: Environment, again: bool) -> None:  # noqa: FBT001
    with environment.open("A") as a, environment.open("B") as b:
        topic = a.create_topic(TOPIC)
        for _ in range(4):
            topic.append(b"0", key=b"k", producer=None)
        reader = topic.reader("r")
        first = next(reader.read())
        reader.ack(first)
        subscription = topic.subscribe("s", start=EARLIEST)
        consumer = subscription.consumer("c")
        held = consumer.take(4)
        stream, names = topic.follow(LATEST), reader.follow()
        for _ in range(3):
            next(names)

        waiting = [
            lambda: next(stream),
            lambda: next(names),
            lambda: consumer.take(1, wait_s=PATIENCE),
        ]
        with ThreadPoolExecutor(len(waiting)) as threads:
            ends = [threads.submit(act) for act in waiting]
            delete(b, again=again)
            for end in ends:
                with pytest.raises(UnknownTopic, match="was deleted"):
                    end.result(PATIENCE)

        for act in _looks(topic, reader, first, subscription, consumer):
            with pytest.raises(UnknownTopic, match="was deleted"):
                act()
        consumer.ack(*held)
        consumer.close()
        if again:
            new = b.topic(TOPIC)
            assert new.reader("r").offset() is None
            assert new.subscriptions() == []
            assert list(new.read()) == []


@pytest.mark.parametrize("options", [*CLASSES[:3], CLASSES[4]], ids=[*NAMES[:3], NAMES[4]])
def test_an_append_that_hangs_in_the_disk_beside_the_deletion_is_not_acknowledged_when_it_comes_back(
    environment: Environment,
    options: Options,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(deleted_topics, "OWNER_SECONDS", 0.05)
    with environment.open("A") as a, environment.open("B") as b:
        topic = a.create_topic(TOPIC, **options)
        topic.append(b"0")
        topic.flush()
        hangs, goes_on = threading.Event(), threading.Event()
        kind, name = (RocksDatabase, "write") if "engine" in options else (SystemFile, "write_at")
        plain = getattr(kind, name)

        def hang(*args: object, **named: object) -> object:
            hangs.set()
            assert goes_on.wait(PATIENCE)
            return plain(*args, **named)

        monkeypatch.setattr(kind, name, hang)
        with ThreadPoolExecutor(1) as threads:

            def append_and_flush() -> None:
                topic.append(b"1")
                topic.flush()

            append = threads.submit(append_and_flush)
            assert hangs.wait(PATIENCE)
            with caplog.at_level(logging.WARNING):
                b.delete_topic(TOPIC)
            assert "has not said that it has stopped" in caplog.text
            # The owner has seen it, and waits for the thread that hangs.
            until(lambda: inside(a).has_left(topic))
            goes_on.set()
            with pytest.raises(UnknownTopic, match="was deleted"):
                append.result(PATIENCE)
        with pytest.raises(UnknownTopic, match="was deleted"):
            topic.append(b"2")


def test_a_deletion_waits_for_no_owner_that_is_gone(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    with environment.open("B") as b:
        a = environment.open("A")
        a.create_topic(TOPIC).append(b"0")
        inside(a).kill()
        looks: list[str] = []
        alive = SqliteMetadata.session_alive

        def counted(store: SqliteMetadata, session: str) -> bool:
            looks.append(session)
            return alive(store, session)

        monkeypatch.setattr(SqliteMetadata, "session_alive", counted)
        b.delete_topic(TOPIC)
        assert len(looks) == 1, "asked once, and not waited for"
        b.create_topic(TOPIC).append(b"1")


def test_an_owner_that_cannot_look_holds_a_deletion_up_for_a_moment_and_stops_once_it_can(
    environment: Environment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(deleted_topics, "OWNER_SECONDS", 0.05)
    with environment.open("A") as a, environment.open("B") as b:
        topic = a.create_topic(TOPIC)
        topic.append(b"0")
        with inside(a).changes_held_back():
            with caplog.at_level(logging.WARNING):
                delete(b, again=True)
            assert "has not said that it has stopped" in caplog.text

        def is_refused() -> bool:
            try:
                topic.append(b"1")
            except UnknownTopic:
                return True
            return False

        until(is_refused)
        assert list(b.topic(TOPIC).read()) == []


@pytest.mark.parametrize("again", [False, True], ids=["deleted", "created again"])
@pytest.mark.parametrize("options", [CLASSES[1], *CLASSES[3:]], ids=[NAMES[1], *NAMES[3:]])
def test_a_shard_that_is_first_opened_while_its_topic_is_deleted_does_not_stay(
    tmp_path: Path,
    options: Options,
    again: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The deletion begins and ends between the look at the definition and the acquisition, and leaves no note."""
    environment = directories.local(tmp_path, handoff=False)
    with environment.open("A") as a, environment.open("B") as b:
        topic = a.create_topic(TOPIC, **options)
        key = keys_of(a, topic).state
        plain, is_first = SqliteMetadata.transaction, [True]

        def overtaken(store: SqliteMetadata, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
            if is_first and any(compare.key == key for compare in compares if hasattr(compare, "key")):
                is_first.clear()
                in_thread(lambda: b.delete_topic(TOPIC))
            return plain(store, compares, operations)

        monkeypatch.setattr(SqliteMetadata, "transaction", overtaken)

        def is_refused() -> bool:
            try:
                topic.append(b"1")
            except UnknownTopic:
                return True
            return False

        until(is_refused)
        assert is_first == []
        if again:
            # Whether or not the other process has cleared up by now.
            new = b.create_topic(TOPIC)
            new.append(b"2")
            assert [record.value for record in new.read()] == [b"2"]
            with pytest.raises(UnknownTopic, match="was deleted"):
                topic.append(b"3")
        else:
            until(lambda: not inside(a).engine.shards())
            until(lambda: read_state(metadata_of(b), key) is None)


def test_a_topic_that_its_owner_deletes_while_another_process_reads_it_ends_there(tmp_path: Path) -> None:
    environment = directories.shared_fs(tmp_path)
    with environment.open("A") as a, environment.open("B") as b:
        a.create_topic(TOPIC).append(b"0")
        a.export_topic(TOPIC)
        there = b.topic(TOPIC)
        assert len(list(there.read())) == 1
        stream = there.follow(LATEST)
        with ThreadPoolExecutor(1) as threads:
            end = threads.submit(lambda: next(stream))
            a.delete_topic(TOPIC)
            with pytest.raises(UnknownTopic):
                end.result(PATIENCE)
        with pytest.raises(UnknownTopic):
            there.append(b"1")
