"""Topics that come and go leave nothing behind in the memory of a log that stays open."""

from __future__ import annotations

import gc
import types
import weakref
from collections import deque
from functools import partial
from pathlib import Path

import pytest

import forebay
from forebay import Settings, Storage
from forebay.clock import SystemClock
from forebay.format.columns.rows import encode_rows
from forebay.loads.prepare import LoadPlace, manifest_of, write_segment
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from tests.storage.rig import QUICK, in_thread
from tests.support.soak import SOAK
from tests.support.waiting import until

TOPICS = 12
CONTAINERS = (dict, list, set, deque, weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
NOT_OF_THE_LOG = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.FrameType)


def containers(log: Storage) -> dict[str, int]:
    """How many entries each container has that an object of the log holds as an attribute, by class and name."""
    found: dict[str, int] = {}
    seen = {id(log)}
    left: list[object] = [log]
    while left:
        at = left.pop()
        if type(at).__module__.startswith("forebay."):
            names = {**getattr(at, "__dict__", {})}
            for name in (name for kind in type(at).__mro__ for name in getattr(kind, "__slots__", ())):
                names[name] = getattr(at, name, None)
            for name, value in names.items():
                if isinstance(value, CONTAINERS):
                    place = f"{type(at).__name__}.{name}"
                    found[place] = found.get(place, 0) + len(value)
        for inner in gc.get_referents(at):
            if id(inner) not in seen and not isinstance(inner, NOT_OF_THE_LOG):
                seen.add(id(inner))
                left.append(inner)
    return found


def churn(log: Storage, engine: str, first: int, count: int) -> None:
    """Create topics, use each as a consumer group does, alter and delete it."""
    durability = "ephemeral" if engine == "memory" else "disk"
    for number in range(first, first + count):
        topic = log.create_topic(f"t{number}", partitions=2, engine=engine, durability=durability)
        topic.append(b"v", partition=0)
        topic.append(b"w", partition=1)
        log.group("g").commit(f"t{number}", 1, ack="cached")
        log.group("g").offsets()
        log.alter_topic(f"t{number}", ttl_ms=10_000_000)
        log.delete_topic(f"t{number}")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["segment", "rocksdb", "memory"])
def test_entries_of_a_topic_end_with_it(tmp_path: Path, engine: str) -> None:
    with forebay.open(str(tmp_path), QUICK) as log:
        churn(log, engine, 0, 3)
        gc.collect()
        before = containers(log)
        churn(log, engine, 3, TOPICS)
        gc.collect()
        # Adds up what shards that are gone have counted, as opening the next shard does.
        log.status()
        after = containers(log)

    assert {name: after[name] for name in after if after[name] >= before.get(name, 0) + TOPICS} == {}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["segment", "rocksdb", "memory"])
def test_the_shard_of_a_deleted_topic_goes(tmp_path: Path, engine: str) -> None:
    durability = "ephemeral" if engine == "memory" else "disk"
    with forebay.open(str(tmp_path), QUICK) as log:
        topic = log.create_topic("t", engine=engine, durability=durability)
        topic.append(b"v")
        shard = weakref.ref(inside(topic).shard(0))
        assert shard() is not None

        log.delete_topic("t")

        # A background worker may be at its last step with it.
        until(lambda: gc.collect() is not None and shard() is None)


def load(log: Storage, name: str, load_id: str) -> None:
    """Attach a bulk load of one record."""
    topic_id = log.topic(name).spec.topic_id
    place = LoadPlace(load_id, topic_id, 0)
    made = write_segment(
        log.loads.store().store, place, "0-0", [encode_rows([(b"load", None, None, (), 1)])], clock=SystemClock()
    )
    assert made is not None
    log.loads.offer(name, manifest_of(load_id, topic_id, [(0, made)]), expires_at=None)
    assert [attached.partition for attached in log.loads.attach(load_id).attached] == [0]


@pytest.mark.slow
def test_a_shard_that_attached_loads_goes_when_its_topic_is_deleted_or_sealed(tmp_path: Path) -> None:
    settings = {**QUICK, "storage": {"handoff_root": str(tmp_path / "handoff")}}
    with forebay.open(str(tmp_path / "log"), settings) as log:
        shards = []
        for number in range(2):
            topic = log.create_topic(f"t{number}")
            topic.append(b"v")
            for again in range(2):
                load(log, f"t{number}", f"{number}{again}".rjust(32, "0"))
            shards.append(weakref.ref(inside(topic).shard(0)))
            assert [record.value for record in topic.read(forebay.EARLIEST)] == [b"v", b"load", b"load"]

        log.delete_topic("t0")
        log.seal_topic("t1")

        until(lambda: gc.collect() is not None and [shard() for shard in shards] == [None, None])


def test_a_topic_that_was_sealed_here_and_deleted_leaves_no_entry(tmp_path: Path) -> None:
    settings = {**QUICK, "storage": {"handoff_root": str(tmp_path / "handoff")}}
    with forebay.open(str(tmp_path / "log"), settings) as log:
        log.create_topic("t").append(b"v")
        log.seal_topic("t")
        log.delete_topic("t")

        assert inside(log).entries()["given up"] == 0


def test_a_handle_that_outlives_its_topic_keeps_no_entry_and_says_that_it_ended(tmp_path: Path) -> None:
    with forebay.open(str(tmp_path), QUICK) as log:
        handles = []
        for number in range(TOPICS):
            handles.append(log.create_topic(f"t{number}"))
            handles[-1].append(b"v")
            log.delete_topic(f"t{number}")

        for handle in handles:
            with pytest.raises(forebay.UnknownTopic, match="was deleted"):
                handle.append(b"v")

        entries = inside(log).entries()
        assert entries["open shards"] == entries["handles"] == 0


def test_a_topic_of_the_same_name_has_its_own_entries_when_the_first_is_deleted(tmp_path: Path) -> None:
    """Twice the same name: the second life is followed by its handles and its cached commits, the first by none."""
    with forebay.open(str(tmp_path), QUICK) as log:
        for _ in range(3):
            old = log.create_topic("t")
            old.append(b"v")
            log.group("g").commit("t", 1, ack="cached")
            log.group("g").offsets()
            log.delete_topic("t")
        topic = log.create_topic("t")
        topic.append(b"v")
        log.group("g").commit("t", 1, ack="cached")

        log.alter_topic("t", ttl_ms=1_000_000)

        assert topic.spec.ttl_ms == 1_000_000 and old.spec.ttl_ms is None
        assert log.group("g").fetch("t") == 1
        entries = inside(log).entries()
        assert entries["newest definitions"] == entries["handles"] == 1


def churn_elsewhere(owner: Storage, here: Storage, first: int, count: int) -> list[forebay.Topic]:
    """Topics that one process creates and deletes, each read by another one in between; the handles of that one."""
    handles = []
    for number in range(first, first + count):
        topic = owner.create_topic(f"t{number}", partitions=2)
        topic.append(b"v", partition=0)
        handles.append(here.topic(f"t{number}"))
        list(handles[-1].read())
        assert handles[-1].offsets(1).earliest == 0
        here.group("g").commit(f"t{number}", 0, ack="cached")
        here.group("g").offsets()
        owner.delete_topic(f"t{number}")
        inside(here).follow_changes()
    return handles


@pytest.mark.slow
@pytest.mark.parametrize("count", [TOPICS, *([200] if SOAK else [])])
@pytest.mark.parametrize("place", ["beside", "elsewhere"])
def test_topics_that_another_process_creates_and_deletes_leave_nothing_here(
    tmp_path: Path, place: str, count: int
) -> None:
    """What a reader had opened of them stayed open, and its descriptors with it, until the log was closed."""
    settings = Settings.load(
        overrides={
            **QUICK,
            "metadata": {"path": str(tmp_path / "shared.sqlite")},
            "storage": {"mode": "shared_fs"},
            "store": {"root": str(tmp_path / "store")},
        }
    )
    is_beside = place == "beside"
    with (
        Storage.open(tmp_path / "owner", settings) as owner,
        Storage.open(
            tmp_path / ("owner" if is_beside else "here"), settings, read_only=is_beside, clock=ManualClock()
        ) as here,
    ):
        churn_elsewhere(owner, here, 0, 3)
        gc.collect()
        before = containers(here)
        handles = churn_elsewhere(owner, here, 3, count)
        for handle in handles:
            with pytest.raises(forebay.UnknownTopic):
                list(handle.read())
        gc.collect()
        after = containers(here)

    grown = {name: after[name] for name in after if after[name] >= before.get(name, 0) + count}
    assert grown == {}


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_topic_that_is_deleted_while_no_watch_is_open_leaves_nothing(tmp_path: Path, *, is_made_again: bool) -> None:
    settings = Settings.load(overrides={**QUICK, "metadata": {"path": str(tmp_path / "shared.sqlite")}})
    with (
        Storage.open(tmp_path / "owner", settings) as owner,
        Storage.open(tmp_path / "owner", settings, read_only=True, clock=ManualClock()) as here,
    ):
        owner.create_topic("t").append(b"v")
        inside(here).follow_changes()
        assert len(list(here.topic("t").read())) == 1
        assert inside(here).entries()["handles"] == inside(here).followed() == 1
        inside(here).lose_changes()

        owner.delete_topic("t")
        if is_made_again:
            owner.create_topic("t")
        inside(here).follow_changes()

        assert inside(here).entries()["handles"] == inside(here).followed() == 0


def test_a_shard_that_a_thread_is_opening_is_left_with_the_next_step(tmp_path: Path) -> None:
    """The thread had found the topic before, and would leave a shard that nothing closes before the log."""
    with (
        Storage.open(tmp_path / "owner", Settings.load(overrides=QUICK)) as owner,
        Storage.open(tmp_path / "owner", Settings.load(overrides=QUICK), read_only=True, clock=ManualClock()) as here,
    ):
        owner.create_topic("t").append(b"v")
        inside(here).follow_changes()
        topic = here.topic("t")
        with inside(here).shard_lock(topic):
            inside(topic).read_shard()
            in_thread(partial(owner.delete_topic, "t"))
            in_thread(inside(here).follow_changes)
            assert inside(here).followed() == 1
        inside(here).follow_changes()
        assert inside(here).followed() == inside(here).entries()["handles"] == 0
