"""Looking never acquires: what another directory holds is read as it is recorded, whether its owner lives or not."""

from __future__ import annotations

import asyncio
import linecache
import re
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import forebay
from forebay import (
    EARLIEST,
    LATEST,
    Closed,
    Conflict,
    DataLoss,
    ForebayError,
    Gap,
    Moved,
    Reason,
    Record,
    Storage,
    Topic,
    Unavailable,
)
from forebay.aio import AsyncLog, AsyncStream, AsyncTopic
from forebay.catalog import StoredState
from forebay.engines import OwnedShard, ReadShard, UnownedShards, readonly, unowned
from forebay.engines.segment import SegmentEngine
from forebay.storage.streams import Stream
from forebay.testing.inside import inside
from forebay.topics import ShardRef
from tests.looking import EXPORTED, GROUP, TOPIC, UNUSED, VALUES, begin_owner, end_owner, recorded, settings_of
from tests.storage.rig import in_thread, is_free, values
from tests.support.waiting import until


@pytest.fixture(scope="module", params=["wait", "die"], ids=["owner alive", "owner killed"])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where an owner has left, or still holds, three exported records and two that are on its disk alone."""
    root = tmp_path_factory.mktemp("root")
    owner = begin_owner(root, request.param)
    yield root
    end_owner(owner)


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    end_owner(begin_owner(tmp_path, "die"))
    return tmp_path


def opened(root: Path, name: str) -> Storage:
    return forebay.open(root / name, settings_of(root))


def states(root: Path) -> tuple[StoredState | None, StoredState | None]:
    return recorded(root), recorded(root, UNUSED)


def follow_and_stop(topic: Topic) -> list[bytes | None]:
    return values(topic.follow(EARLIEST, timeout=0))


def wake_and_leave(topic: Topic) -> None:
    topic.on_published(lambda: None)()


LOOKS: dict[str, Callable[[Topic], object]] = {
    "offsets": lambda topic: topic.offsets(),
    "read": lambda topic: list(topic.read()),
    "read_arrow": lambda topic: list(topic.read_arrow()),
    "follow": follow_and_stop,
    "follow the latest": lambda topic: list(topic.follow(timeout=0)),
    "read_by_key": lambda topic: list(topic.read_by_key(b"k", history=True)),
    "read_by_tag": lambda topic: list(topic.read_by_tag("t")),
    "offset_at_time": lambda topic: topic.offset_at_time(0),
    "resolve": lambda topic: topic.resolve(LATEST),
    "on_published": wake_and_leave,
    "last_sequence": lambda topic: topic.last_sequence(7),
    "recovery": lambda topic: topic.recovery(),
    "epoch": lambda topic: topic.epoch(),
    "failure": lambda topic: topic.failure(),
    "flush": lambda topic: topic.flush(),
    "rotate": lambda topic: topic.rotate(),
    "reader": lambda topic: (list(topic.reader(GROUP).read()), list(topic.reader("new").follow(timeout=0))),
    "ack": lambda topic: topic.reader("acking").ack_up_to(0),
    "reset": lambda topic: topic.reader("acking").reset(EARLIEST),
}

LOOKS_OF_A_LOG: dict[str, Callable[[Storage], object]] = {
    "topics": lambda log: log.topics(),
    "groups": lambda log: log.groups(),
    "lag": lambda log: log.group(GROUP).offsets(),
    "fetch": lambda log: log.group(GROUP).fetch(TOPIC),
    "commit": lambda log: log.group("committing").commit(TOPIC, 0),
    "cached commit": lambda log: log.group("committing").commit(TOPIC, 0, ack="cached"),
    "reset": lambda log: log.group("committing").reset(TOPIC, LATEST),
    "recover": lambda log: log.recover(),
    "limits in the background": lambda log: inside(log).workers.limits.step(),
    "history in the background": lambda log: inside(log).workers.history.step(),
    "clear_moved": lambda log: log.clear_moved(),
}

AWAITED_LOOKS: dict[str, Callable[[AsyncTopic], Awaitable[object]]] = {
    "offsets": lambda topic: topic.offsets(),
    "read": lambda topic: collected(topic.read()),
    "follow": lambda topic: collected(topic.follow(EARLIEST, timeout=0)),
    "read_by_key": lambda topic: collected(topic.read_by_key(b"k", history=True)),
    "offset_at_time": lambda topic: topic.offset_at_time(0),
    "reader": lambda topic: collected(topic.reader(GROUP).read()),
}


async def collected(stream: AsyncStream[forebay.Record]) -> list[forebay.Record]:
    return [record async for record in stream]


@pytest.mark.slow
@pytest.mark.parametrize("name", [TOPIC, UNUSED])
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.proves("I34")
def test_looking_at_a_topic_changes_no_epoch_and_no_state(root: Path, look: str, name: str) -> None:
    before = states(root)

    with opened(root, "b") as log:
        for _ in range(2):
            LOOKS[look](log.topic(name))

    assert states(root) == before


@pytest.mark.parametrize("look", LOOKS_OF_A_LOG)
@pytest.mark.proves("I34")
def test_looking_at_a_log_changes_no_epoch_and_no_state(root: Path, look: str) -> None:
    before = states(root)

    with opened(root, "b") as log:
        for _ in range(2):
            LOOKS_OF_A_LOG[look](log)

    assert states(root) == before


@pytest.mark.parametrize("look", AWAITED_LOOKS)
@pytest.mark.proves("I34")
def test_looking_in_an_event_loop_changes_no_epoch_and_no_state(root: Path, look: str) -> None:
    before = states(root)

    async def main() -> None:
        async with AsyncLog(root / "b", settings_of(root)) as log:
            for name in (TOPIC, UNUSED):
                await AWAITED_LOOKS[look](await log.topic(name))
            await log.group(GROUP).offsets()

    asyncio.run(main())

    assert states(root) == before


@pytest.mark.proves("I35")
def test_a_reader_elsewhere_sees_history_up_to_its_end_and_nothing_is_called_lost(root: Path) -> None:
    with opened(root, "b") as log:
        topic = log.topic(TOPIC)

        assert values(topic.read()) == VALUES[:EXPORTED]
        assert values(topic.read_by_key(b"k")) == VALUES[EXPORTED - 1 : EXPORTED]
        assert topic.offsets() == (0, 0, EXPORTED, EXPORTED, EXPORTED)
        assert str(topic.recovery()) == f"next offset {EXPORTED} by catalog, exact"
        assert topic.last_sequence(7) == EXPORTED - 1
        assert topic.last_sequence(8) is None
        lag = log.group(GROUP).offsets()[0]
        assert (lag.offset, lag.end, lag.lag) == (len(VALUES), EXPORTED, 0)


def test_what_the_holder_alone_can_do_is_refused_by_name_and_takes_nothing_over(root: Path) -> None:
    before = states(root)

    with opened(root, "b") as log:
        with pytest.raises(Moved, match=f"held by directory {re.escape(str(root / 'a'))} .*export it there"):
            log.export_topic(TOPIC)
        log.export_topic(UNUSED)
        with pytest.raises(forebay.Conflict, match="not owned here"):
            log.alter_topic(TOPIC, cap_records=2)
        assert log.alter_topic(UNUSED, cap_records=900).cap_records == 900

    assert states(root) == before


@pytest.mark.proves("I35")
def test_asking_for_the_lag_of_a_killed_owner_loses_no_record_of_it(killed: Path) -> None:
    """Seen from outside: the question took the topic over, and its owner found a hole where its records had been."""
    with opened(killed, "b") as log:
        log.group(GROUP).offsets()

    with opened(killed, "a") as owner:
        assert values(owner.topic(TOPIC).read()) == VALUES
        assert owner.topic(TOPIC).append(b"5") == len(VALUES)


def test_the_old_owner_comes_back_beside_those_who_look_and_they_go_on_with_what_it_exports(killed: Path) -> None:
    with opened(killed, "b") as log:
        stream = log.topic(TOPIC).follow(EARLIEST, timeout=60)
        assert [next(stream).value for _ in range(EXPORTED)] == VALUES[:EXPORTED]

        with opened(killed, "a") as owner:
            assert values(owner.topic(TOPIC).read()) == VALUES
            owner.topic(TOPIC).append(b"5")
            owner.export_topic(TOPIC)
            assert [next(stream).value for _ in range(3)] == [b"3", b"4", b"5"]


def test_an_append_takes_over_with_its_gap_and_streams_that_looked_go_on_in_the_new_owner(killed: Path) -> None:
    before = recorded(killed)
    assert before is not None
    gaps: list[Gap] = []
    with opened(killed, "b") as log:
        topic = log.topic(TOPIC)
        following = topic.follow(EARLIEST, timeout=60, on_gap=lambda _, gap: gaps.append(gap))
        bounded = topic.read()
        assert [next(following).value for _ in range(EXPORTED)] == VALUES[:EXPORTED]
        assert next(bounded).value == VALUES[0]

        taken_at = topic.append(b"new")

        after = recorded(killed)
        assert after is not None
        assert after.state.epoch == before.state.epoch + 1
        assert taken_at == before.state.reserved_end
        assert next(following).value == b"new"
        assert gaps == [Gap(EXPORTED, taken_at, Reason.LOST)]
        assert values(bounded) == VALUES[1:EXPORTED]
        assert topic.offsets().next == taken_at + 1
    with opened(killed, "a") as owner:
        with pytest.raises(DataLoss):
            list(owner.topic(TOPIC).read())
        assert owner.topic(TOPIC).offsets().next >= taken_at


@pytest.mark.parametrize("write", ["delete", "acquire", "seal"])
def test_other_writes_and_asking_by_name_take_over_too(killed: Path, write: str) -> None:
    before = recorded(killed)
    with opened(killed, "b") as log:
        if write == "delete":
            assert log.topic(TOPIC).delete_by_key(b"k") == EXPORTED
        elif write == "acquire":
            log.topic(TOPIC).acquire()
        else:
            log.seal_topic(TOPIC)

        after = recorded(killed)
        assert before is not None and after is not None
        assert after.state.epoch == before.state.epoch + 1
        assert after.state.holder == log.directory_id


@pytest.mark.slow
def test_an_append_to_what_a_living_owner_has_is_refused_and_looking_goes_on(tmp_path: Path) -> None:
    owner = begin_owner(tmp_path, "wait")
    before = states(tmp_path)
    with opened(tmp_path, "b") as log:
        topic = log.topic(TOPIC)
        assert values(topic.read()) == VALUES[:EXPORTED]
        with pytest.raises(Moved):
            topic.append(b"5")
        with pytest.raises(Moved):
            topic.acquire()
        assert values(topic.read()) == VALUES[:EXPORTED]
    assert states(tmp_path) == before
    end_owner(owner)


def test_looking_at_an_unused_topic_leaves_it_to_the_first_that_appends(tmp_path: Path) -> None:
    with opened(tmp_path, "a") as a, opened(tmp_path, "b") as b:
        a.create_topic(TOPIC)
        a.create_topic("rocks", engine="rocksdb")
        a.create_topic("memory", durability="ephemeral")
        streams: list[Stream[Record]] = []
        for name in (TOPIC, "rocks", "memory"):
            there = b.topic(name)
            assert there.offsets() == (0, 0, 0, 0, 0)
            assert list(there.read()) == list(there.follow(timeout=0)) == []
            assert there.offset_at_time(0) is None
            streams.append(there.follow(EARLIEST, timeout=0))

            assert a.topic(name).append(b"0") == 0

        assert b.topic(TOPIC).offsets().next == 0
        with pytest.raises(Moved):
            b.topic(TOPIC).append(b"1")
        refusals = [("rocks", Moved, "living session"), ("memory", Moved, "memory of its owner")]
        for (name, kind, said), follower in zip(refusals, streams[1:], strict=True):
            until(partial(_raises, kind, partial(list, follower)))
            with pytest.raises(kind, match=said):
                list(b.topic(name).read())
            with pytest.raises(Moved):
                b.topic(name).append(b"1")
        assert list(streams[0]) == []


class Struck:
    """Raises `KeyboardInterrupt` at the n-th line of unowned shards; `with` enters and leaves at once."""

    def __init__(self, line: int) -> None:
        self.is_over = False
        self._left = line

    def __call__(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in (unowned.__file__, readonly.__file__):
            return None
        if event == "line" and not self.is_over:
            source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            self._left -= not source.startswith("with ")
            if self._left == 0:
                self.is_over = True
                raise KeyboardInterrupt
        return self


def test_an_interrupt_as_a_shard_is_acquired_keeps_no_reader_of_its_history_waiting(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as log:
        for line in range(1, 100):
            topic = log.create_topic(f"t{line}")
            looked_at = inside(topic).read_shard()
            struck = Struck(line)
            sys.settrace(struck)
            try:
                topic.append(b"v")
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)

            def read(shard: ReadShard = looked_at) -> None:
                with suppress(Closed):
                    shard.read(0)

            reader = threading.Thread(target=read, daemon=True)
            reader.start()
            reader.join(20)
            assert not reader.is_alive(), line
            if not struck.is_over:
                assert line > 8, "every line was met"
                return


def test_a_follower_of_an_unused_topic_is_woken_by_the_appends_that_follow(tmp_path: Path) -> None:
    with opened(tmp_path, "a") as log:
        topic = log.create_topic(TOPIC, partitions=2)
        rung = threading.Event()
        leave = topic.on_published(rung.set)
        following = topic.following(EARLIEST)
        assert following.poll_seconds is not None
        assert following.next_page() is None

        topic.append(b"0", partition=0)
        assert rung.is_set()
        topic.append(b"1", partition=1)

        assert values([*(following.next_page() or ()), *(following.next_page() or ())]) == [b"0", b"1"]
        assert following.poll_seconds is None
        rung.clear()
        leave()
        topic.append(b"2", partition=0)
        assert not rung.is_set()


def test_a_waker_that_is_added_while_the_shard_changes_hands_is_called(tmp_path: Path) -> None:
    """The thread that added it had asked for the wakers before, and put it among those that nothing called any more."""
    with opened(tmp_path, "a") as log:
        topic = log.create_topic(TOPIC)
        wakers = inside(topic).read_shard().wakers
        topic.append(b"0")
        rung = threading.Event()

        wakers.add(rung.set)
        topic.append(b"1")
        assert rung.is_set()
        rung.clear()
        wakers.discard(rung.set)
        topic.append(b"2")
        assert not rung.is_set()


@pytest.mark.parametrize("is_added", [True, False])
def test_wakers_that_change_while_they_move_are_as_they_were_left(is_added: bool) -> None:  # noqa: FBT001
    rung = threading.Event()
    moving = unowned.MovingWakers()

    class Target(set[Callable[[], None]]):
        def update(self, *others: Any) -> None:
            # What another thread does between the two steps of the one that moves them.
            (moving.add if is_added else moving.discard)(rung.set)
            super().update(*others)

    target = Target()
    if not is_added:
        moving.add(rung.set)
    moving.move(target)
    assert (rung.set in target) == is_added


def test_a_record_that_is_published_before_the_wakers_moved_wakes_their_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread finds the shard that another one has just opened, and appends before readers were moved there."""
    with opened(tmp_path, "a") as log:
        topic = log.create_topic(TOPIC)
        rung, leave = threading.Event(), UnownedShards.leave
        lock = inside(log).engine.registry.lock(topic.spec.topic_id, 0)
        topic.on_published(lambda: rung.set() if in_thread(partial(is_free, lock)) else None)

        def late(shards: UnownedShards, ref: ShardRef, owned: OwnedShard | None) -> None:
            if owned is not None:
                in_thread(partial(topic.append, b"0"))
                assert not rung.is_set()
            leave(shards, ref, owned)

        monkeypatch.setattr(UnownedShards, "leave", late)
        inside(topic).shard()
        assert rung.is_set()


def test_readers_in_other_threads_go_on_while_the_topic_is_taken_over(killed: Path) -> None:
    taken = threading.Event()
    found: list[list[bytes | None]] = []
    failed: list[BaseException] = []

    def read(topic: Topic) -> None:
        try:
            while not taken.is_set():
                read = values(topic.read(on_gap=lambda *_: None))
                assert read[:EXPORTED] == VALUES[:EXPORTED]
                assert topic.offsets().next >= EXPORTED
            found.append(values(topic.read(on_gap=lambda *_: None)))
        except BaseException as error:
            failed.append(error)
            raise

    with opened(killed, "b") as log:
        threads = [threading.Thread(target=read, args=(log.topic(TOPIC),)) for _ in range(3)]
        for thread in threads:
            thread.start()
        log.topic(TOPIC).append(b"new")
        taken.set()
        for thread in threads:
            thread.join()

    assert failed == []
    assert found == [[*VALUES[:EXPORTED], b"new"]] * 3


@pytest.mark.plain_locks
def test_a_shard_that_changes_hands_between_the_look_and_the_opening_is_not_taken(
    killed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only this directory's own shard is opened by looking, also where that stops being so in between."""
    may_own = SegmentEngine.may_own
    taken: list[StoredState | None] = []

    def late(engine: SegmentEngine, ref: ShardRef) -> bool:
        found = may_own(engine, ref)
        if not taken:
            taken.append(None)
            with opened(killed, "b") as other:
                other.topic(TOPIC).append(b"new")
            taken[0] = recorded(killed)
        return found

    with opened(killed, "a") as owner:
        monkeypatch.setattr(SegmentEngine, "may_own", late)
        with pytest.raises(forebay.Unavailable, match="changed hands"):
            owner.topic(TOPIC).offsets()
        assert owner.topic(TOPIC).offsets().next >= EXPORTED

    assert recorded(killed) == taken[0]


def test_a_stream_goes_on_from_history_after_its_topic_was_sealed_here(tmp_path: Path) -> None:
    with opened(tmp_path, "a") as a, opened(tmp_path, "b") as b:
        topic = a.create_topic(TOPIC)
        topic.append_many(VALUES)
        stream = topic.follow(EARLIEST, timeout=60)
        assert next(stream).value == VALUES[0]

        a.seal_topic(TOPIC, target=b.directory_id)
        before = recorded(tmp_path)

        assert [next(stream).value for _ in VALUES[1:]] == VALUES[1:]
        assert values(topic.read()) == VALUES
        assert recorded(tmp_path) == before
        with pytest.raises(Moved):
            topic.append(b"5")
        assert b.topic(TOPIC).append(b"5") == 5
        b.export_topic(TOPIC)
        assert next(stream).value == b"5"


def test_a_topic_that_is_deleted_elsewhere_is_unknown_to_those_who_look(tmp_path: Path) -> None:
    with opened(tmp_path, "a") as a, opened(tmp_path, "b") as b:
        a.create_topic(TOPIC).append_many(VALUES)
        a.export_topic(TOPIC)
        there = b.topic(TOPIC)
        assert values(there.read()) == VALUES

        a.delete_topic(TOPIC)

        until(lambda: _raises(forebay.UnknownTopic, lambda: list(there.read())))
        with pytest.raises(forebay.UnknownTopic):
            b.topic(TOPIC)


def _raises(kind: type[Exception], call: Callable[[], object]) -> bool:
    try:
        call()
    except kind:
        return True
    return False


@pytest.fixture
def beside_memory(tmp_path: Path) -> Iterator[Path]:
    """Where directory `a` is open with a topic in its memory and one in its log, and a group that reads both."""
    with opened(tmp_path, "a") as log:
        for name, durability in (("shop/carts", "ephemeral"), (TOPIC, "fsync")):
            log.create_topic(name, durability=durability).append_many([b"0", b"1", b"2"])
            log.group(GROUP).commit(name, 2)
        log.export_topic(TOPIC)
        yield tmp_path


@pytest.mark.parametrize("directory", ["b", None], ids=["owner of another directory", "without a directory"])
def test_the_lag_of_a_group_is_known_but_for_the_topic_in_the_memory_of_another(
    beside_memory: Path, directory: str | None
) -> None:
    path = beside_memory / directory if directory is not None else None

    with forebay.open(path, settings_of(beside_memory), read_only=directory is None) as log:
        carts, orders = log.group(GROUP).offsets()
        assert log.group(GROUP).fetch("shop/carts") == 2

    assert orders.lag == 1
    assert orders == (TOPIC, 0, 2, 3, "", None)
    assert carts[:5] == ("shop/carts", 0, 2, None, "") and carts.lag is None
    assert "lives in the memory of its owner" in str(carts.failure)


def test_the_lag_of_a_group_in_an_event_loop_is_known_but_for_the_topic_in_the_memory_of_another(
    beside_memory: Path,
) -> None:
    async def main() -> list[int | None]:
        async with AsyncLog(beside_memory / "b", settings_of(beside_memory)) as log:
            return [place.lag for place in await log.group(GROUP).offsets()]

    assert asyncio.run(main()) == [None, 1]


def test_a_topic_in_the_memory_of_a_gone_owner_is_had_altered_and_taken_over_in_an_event_loop(tmp_path: Path) -> None:
    with opened(tmp_path, "a") as log:
        log.create_topic("shop/carts", durability="ephemeral").append(b"0")

    async def main() -> None:
        async with AsyncLog(tmp_path / "b", settings_of(tmp_path)) as log:
            for topic in (await log.topic("shop/carts"), await log.create_topic("shop/carts", exist_ok=True)):
                with pytest.raises(Moved, match="an append here takes it over"):
                    await topic.offsets()
            assert (await log.alter_topic("shop/carts", partitions=2)).partitions == 2
            offset = await topic.append(b"1", partition=0)
            assert [record.offset async for record in topic.read(offset, partition=0)] == [offset]

    asyncio.run(main())


def test_a_flush_of_what_another_owner_has_replaced_is_refused(tmp_path: Path) -> None:
    """Once the shard was given up, a flush looked at history and returned, though the appended record was lost."""
    with opened(tmp_path, "a") as a, opened(tmp_path, "b") as b:
        topic = a.create_topic(TOPIC, durability="disk", on_owner_loss="take_over")
        topic.append(b"0")
        topic.flush()
        inside(a).lose_session()
        b.topic(TOPIC).acquire()
        with pytest.raises(ForebayError):
            topic.append(b"1")
        until(lambda: not inside(a).shards())

        for _ in range(2):
            with pytest.raises(Moved, match="has another owner"):
                topic.flush()

        b.seal_topic(TOPIC)
        topic.append(b"2")
        topic.flush()
        a.seal_topic(TOPIC)
        topic.flush()


def test_a_topic_in_the_database_of_another_directory_is_had_and_altered_in_an_event_loop(tmp_path: Path) -> None:
    with opened(tmp_path, "a") as log:
        log.create_topic("shop/carts", engine="rocksdb").append(b"0")

    async def main() -> None:
        async with AsyncLog(tmp_path / "b", settings_of(tmp_path)) as log:
            topic = await log.topic("shop/carts")
            assert (await log.alter_topic("shop/carts", partitions=2)).partitions == 2
            with pytest.raises(Conflict, match="its records lie there"):
                await topic.append(b"1", partition=0)

    asyncio.run(main())


def test_retention_goes_on_behind_a_topic_that_was_deleted_and_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, "a") as a, opened(tmp_path, "b") as b:
        for name in ("a/deleted", "b/failing", "c/sound"):
            a.create_topic(name, cap_records=1).append_many([b"0", b"1"])
        specs, failing = a.topics(), inside(a.topic("b/failing")).shard()
        b.delete_topic("a/deleted")
        monkeypatch.setattr(a, "topics", lambda: specs)

        def refuse(now_ms: int) -> object:
            raise Unavailable("not now")

        with monkeypatch.context() as patch:
            patch.setattr(failing, "evict", refuse)
            with pytest.raises(Unavailable, match="not now"):
                a.run_retention()

        assert a.topic("c/sound").offsets().earliest == 1
        assert a.run_retention().evicted == 1
    with pytest.raises(Closed):
        a.run_retention()
