"""Look-ups, deletes, limits and alterations of topics, through the log, on every engine that has them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import LATEST, Conflict, Full, Gap, Invalid, Position, Reason, Storage, Topic, Unavailable, Unsupported
from forebay.pages import Page
from forebay.partitioning import partition_of_key
from forebay.settings import Settings
from forebay.storage.background import limits
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from tests.storage.rig import QUICK, values
from tests.support.environments.directories import shard_of
from tests.support.waiting import until

pytestmark = pytest.mark.slow

ENGINES = ["memory", "rocksdb", "segment"]
OFFSETS_MAX = 2**63 - 1


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def log(tmp_path: Path, clock: ManualClock) -> Iterator[Storage]:
    with Storage.open(tmp_path / "log", Settings.load(overrides=QUICK), clock=clock) as log:
        yield log


def filled(topic: Topic, count: int = 12) -> Topic:
    """Records `0`, `1`, … with keys `k0` to `k3` and tags `a`, `a/b`, `c`."""
    for number in range(count):
        topic.append(b"%d" % number, key=b"k%d" % (number % 4), tag=("a", "a/b", "c")[number % 3])
    return topic


def counted_calls(monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> list[str]:
    """A list that grows by the name with each call of the method."""
    calls: list[str] = []
    before = getattr(kind, name)

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        return before(*arguments, **options)

    monkeypatch.setattr(kind, name, counted)
    return calls


def test_read_by_key_and_read_by_tag_over_partitions(log: Storage, engine: str) -> None:
    topic = filled(log.create_topic("t", engine=engine, partitions=3))

    assert values(topic.read_by_key(b"k1")) == [b"9"]
    assert values(topic.read_by_key(b"k1", history=True)) == [b"1", b"5", b"9"]
    assert values(topic.read_by_key(b"k9")) == values(topic.read_by_key(b"", history=True)) == []
    assert sorted(values(topic.read_by_tag("a")), key=int) == [b"0", b"3", b"6", b"9"]  # type: ignore[arg-type]
    assert values(topic.read_by_tag("a/")) == []
    place = partition_of_key(b"k1", 3)
    other = (place + 1) % 3
    assert values(topic.read_by_key(b"k1", partition=other, history=True)) == []
    assert {record.partition for record in topic.read_by_key(b"k1", history=True)} == {place}
    assert {record.partition for record in topic.read_by_tag("c", partition=other)} <= {other}


def test_a_look_up_ends_where_the_topic_ended_when_it_began(log: Storage, engine: str) -> None:
    topic = log.create_topic("t", engine=engine)
    topic.append_many([b"x" * 1000] * 3000, keys=[b"k"] * 3000)
    stream = topic.read_by_key(b"k", history=True)
    first = next(stream)
    topic.append(b"late", key=b"k")

    rest = list(stream)

    assert [record.offset for record in (first, *rest)] == list(range(3000)), "more than a page, each record once"
    assert values(topic.read_by_key(b"k")) == [b"late"]


def test_a_key_is_found_where_it_lay_before_partitions_were_added(log: Storage, engine: str) -> None:
    topic = log.create_topic("t", engine=engine, partitions=2)
    keys = [b"key-%d" % number for number in range(40)]
    for key in keys:
        topic.append(b"old", key=key)
    for partitions in (3, 5, 9):
        assert log.alter_topic("t", partitions=partitions).partitions == partitions
        for key in keys[::2]:
            topic.append(b"%d" % partitions, key=key)

    for number, key in enumerate(keys):
        expected = [b"old"] if number % 2 else [b"old", b"3", b"5", b"9"]
        assert values(topic.read_by_key(key)) == expected[-1:], key
        found = values(topic.read_by_key(key, history=True))
        assert sorted(found, key=str) == sorted(expected, key=str)
        if len({partition_of_key(key, count) for count in (2, 3, 5, 9)}) == 4:
            assert found == expected
    assert topic.delete_by_key(keys[0]) == 4
    assert (topic.spec.generation, topic.spec.earlier) == (4, (2, 3, 5))


def test_deletes_are_counted_silent_and_point_in_time(log: Storage, engine: str) -> None:
    topic = filled(log.create_topic("t", engine=engine))
    gaps: list[Gap] = []

    assert topic.delete_by_key(b"k0") == 3
    assert topic.delete_by_key(b"k0") == topic.delete_by_key(b"none") == 0
    assert topic.delete_by_tag("c") == 3
    assert topic.delete_by_offset(9, 11) == 2
    assert topic.delete_before(3) == 1

    assert values(topic.read(0, on_gap=lambda _, gap: gaps.append(gap))) == [b"3", b"6", b"7"]
    assert gaps == []
    assert topic.offsets().earliest == 3
    topic.append(b"new", key=b"k0", tag="c")
    assert values(topic.read_by_key(b"k0")) == values(topic.read_by_tag("c")) == [b"new"]


def test_delete_by_key_reaches_records_in_a_partition_of_the_callers_choice(log: Storage, engine: str) -> None:
    topic = log.create_topic("t", engine=engine, partitions=4)
    for partition in range(4):
        topic.append(b"v", key=b"k", partition=partition)

    assert topic.delete_by_key(b"k", partition=1) == 1
    assert topic.delete_by_key(b"k") == 3
    assert values(topic.read()) == []


@pytest.mark.parametrize("lasting", ENGINES[1:])
def test_deletes_and_floors_survive_a_restart(tmp_path: Path, lasting: str) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = filled(log.create_topic("t", engine=lasting, durability="fsync", cap_records=8))
        topic.delete_by_key(b"k3")
        inside(log).workers.limits.step()
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic, gaps = log.topic("t"), list[Gap]()
        found = values(topic.read(0, on_gap=lambda _, gap: gaps.append(gap)))
        assert found == [b"4", b"5", b"6", b"8", b"9", b"10"]
        assert gaps == [Gap(0, 4, Reason.CAP)]
        assert topic.spec.cap_records == 8


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda t: t.read_by_key(None), "key is None"),
        (lambda t: t.read_by_key("text"), "encode it first"),
        (lambda t: t.read_by_key(b"k", partition=2), "partition is 2"),
        (lambda t: t.read_by_tag(None), "tag is None"),
        (lambda t: t.read_by_tag(""), "1 to 1024"),
        (lambda t: t.delete_by_key(1), "not bytes"),
        (lambda t: t.delete_by_tag(b"x"), "not str"),
        (lambda t: t.delete_by_tag("x", partition="0"), "not int"),
        (lambda t: t.delete_by_offset(5, 3, 0), "ends before it begins"),
        (lambda t: t.delete_by_offset(0, 3), "name the partition"),
        (lambda t: t.delete_before(-1, 0), "allowed: 0"),
        (lambda t: t.delete_before(1), "name the partition"),
        (lambda t: t.delete_before(OFFSETS_MAX + 1, 0), "allowed: 0"),
    ],
)
def test_what_is_wrong_is_refused_and_nothing_deleted(log: Storage, call: object, told: str) -> None:
    topic = filled(log.create_topic("t", engine="memory", partitions=2))
    with pytest.raises(Invalid, match=told):
        call(topic)  # type: ignore[operator]
    assert len(list(topic.read())) == 12


def test_beside_the_owner_nothing_is_deleted_evicted_or_altered(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = filled(log.create_topic("t", cap_records=5, cleanup="compact", compact_lag_ms=0))
        with forebay.open(tmp_path / "log", QUICK, read_only=True) as beside:
            theirs = beside.topic("t")
            assert len(list(theirs.read())) == 12
            with pytest.raises(Unsupported, match="the process that owns the directory"):
                theirs.delete_by_tag("a")
            with pytest.raises(Unsupported, match="the process that owns the directory"):
                theirs.delete_before(1)
            with pytest.raises(Unsupported, match="read-only"):
                beside.alter_topic("t", partitions=3)
            inside(beside).follow_changes()
            assert "forebay-limits" not in {worker.name for worker in beside.workers()}
        assert len(list(topic.read())) == 12


# Limits


def test_limits_are_applied_in_the_background_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {**QUICK, "retention": {"evict_interval_s": 1}}
    caplog.set_level(logging.INFO, "forebay.storage.background.limits")
    with forebay.open(tmp_path / "log", settings) as log:
        topics = [filled(log.create_topic(engine, engine=engine, cap_records=5)) for engine in ENGINES]
        until(lambda: all(topic.offsets().evict_floor == 7 for topic in topics))
        assert all(len(list(topic.read())) == 5 for topic in topics)
    reported = [record.getMessage() for record in caplog.records]
    for engine in ENGINES:
        assert any(f"default/{engine}[0]: evicted 7 records" in line and "(cap)" in line for line in reported)


def test_an_append_never_evicts(log: Storage, engine: str) -> None:
    topic = filled(log.create_topic("t", engine=engine, cap_records=5))

    assert topic.offsets().evict_floor == 0
    inside(log).workers.limits.step()
    assert topic.offsets().evict_floor == 7


def test_a_clock_that_jumps_takes_a_share_at_a_time_and_is_reported(
    log: Storage, clock: ManualClock, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    topic = filled(log.create_topic("t", engine=engine, ttl_ms=60_000))
    clock.jump(3_600_000)
    left = []
    for _ in range(3):
        inside(log).workers.limits.step()
        left.append(len(list(topic.read())))

    assert left == [6, 3, 2]
    assert any("is the clock right?" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(("percent", "left"), [(1, [11, 10, 9]), (25, [9, 7, 6]), (100, [0, 0, 0])])
def test_the_share_that_one_pass_ends_because_of_time_is_a_setting(
    tmp_path: Path, clock: ManualClock, engine: str, percent: int, left: list[int]
) -> None:
    chosen = {**QUICK, "retention": {"evict_share_percent": percent}}
    with Storage.open(tmp_path / "log", Settings.load(overrides=chosen), clock=clock) as log:
        topic = filled(log.create_topic("t", engine=engine, ttl_ms=3_600_000))
        clock.jump(3_600_000)
        found = []
        for ttl_ms in (60_000, 50_000, 40_000):
            # Also by a definition that was altered since.
            log.alter_topic("t", ttl_ms=ttl_ms, allow_loss=True)
            inside(log).workers.limits.step()
            found.append(len(list(topic.read())))

    assert found == left


def test_a_topic_that_refuses_new_records_says_so_and_takes_them_again(log: Storage, engine: str) -> None:
    topic = filled(log.create_topic("t", engine=engine, cap_records=12, on_full="reject_new"))

    with pytest.raises(Full, match="cap_records 12"):
        topic.append(b"too much")
    inside(log).workers.limits.step()
    assert topic.offsets().earliest == 0
    assert topic.delete_before(2) == 2
    assert topic.append(b"fits") == 12


def test_superseded_records_end_once_they_are_old_and_never_the_newest(
    log: Storage, clock: ManualClock, engine: str
) -> None:
    topic = log.create_topic("t", engine=engine, cleanup="compact", compact_lag_ms=60_000)
    filled(topic, 8)
    topic.append(b"keyless")
    inside(log).workers.limits.step()
    assert len(list(topic.read())) == 9, "none is old enough"
    clock.advance(30)
    topic.append_many([b"8", b"9"], keys=[b"k0", b"k1"])
    clock.advance(30)
    inside(log).workers.limits.step()

    assert values(topic.read()) == [b"6", b"7", b"keyless", b"8", b"9"]
    assert values(topic.read_by_key(b"k0", history=True)) == [b"8"]
    topic.append(b"young", key=b"k2")
    inside(log).workers.limits.step()
    assert values(topic.read_by_key(b"k2", history=True)) == [b"6", b"young"], "it goes when the young one is old"
    clock.advance(60)
    inside(log).workers.limits.step()
    assert values(topic.read()) == [b"7", b"keyless", b"8", b"9", b"young"]


def test_compaction_leaves_what_is_superseded_but_young(log: Storage, clock: ManualClock, engine: str) -> None:
    topic = log.create_topic("t", engine=engine, cleanup="compact", compact_lag_ms=60_000)
    topic.append(b"old", key=b"k")
    clock.advance(60)
    topic.append(b"young", key=b"k")
    topic.append(b"newest", key=b"k")
    inside(log).workers.limits.step()
    assert values(topic.read()) == [b"young", b"newest"]


def test_a_pass_of_compaction_ends_its_records_by_one_transaction(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = {"storage": {"mode": "shared_fs"}, "store": {"root": str(tmp_path / "history")}}
    settings = Settings.load(overrides={**QUICK, **shared, "metadata": {"path": str(tmp_path / "m.sqlite")}})
    transactions = []
    with Storage.open(tmp_path / "log", settings, clock=clock) as log:
        calls = counted_calls(monkeypatch, type(log.metadata), "transaction")
        for count in (40, 400):
            topic = log.create_topic(f"t{count}", cleanup="compact", compact_lag_ms=60_000)
            topic.append_many([b"%d" % n for n in range(count)], keys=[b"k%d" % (n % 20) for n in range(count)])
            log.export_topic(topic.name)
            topic.append_many([b"in the log"] * 20, keys=[b"k%d" % n for n in range(20)])
            clock.advance(60)
            calls.clear()

            inside(log).workers.limits.step()
            transactions.append(len(calls))
            assert values(topic.read()) == [b"in the log"] * 20

    assert transactions == [1, 1]


def test_what_a_pass_found_before_a_key_that_cannot_be_read_ends(
    log: Storage, engine: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = filled(log.create_topic("t", engine=engine, cleanup="compact", compact_lag_ms=60_000))
    clock.advance(60)
    (shard,) = inside(log).shards()
    read_by_key = shard.read_by_key

    def failing(key: bytes, *arguments: Any, **options: Any) -> Page:
        if key == b"k2":
            raise Unavailable("not now")
        return read_by_key(key, *arguments, **options)

    monkeypatch.setattr(shard, "read_by_key", failing)
    inside(log).workers.limits.step()
    assert values(topic.read()) == [b"2", b"3", b"6", b"7", b"8", b"9", b"10", b"11"]
    monkeypatch.undo()
    inside(log).workers.limits.step()
    assert values(topic.read()) == [b"8", b"9", b"10", b"11"]


def test_compaction_goes_by_when_each_record_of_a_rewritten_frame_was_appended(
    tmp_path: Path, clock: ManualClock
) -> None:
    settings = Settings.load(overrides=QUICK)
    with Storage.open(tmp_path / "log", settings, clock=clock) as log:
        topic = log.create_topic("t", cleanup="compact", compact_lag_ms=60_000)
        topic.append(b"old", key=b"k")
        clock.advance(60)
        topic.append_many([b"young", b"newest"], keys=[b"k", b"k"])
        shard_of(topic).rotate()
        shard_of(topic).upkeep.seal_rotated()
    with Storage.open(tmp_path / "log", settings, clock=clock) as log:
        topic = log.topic("t")
        (batch,) = shard_of(topic).read(0).batches
        assert [run.records for run in batch.appended()] == [1, 2]
        inside(log).workers.limits.step()
        assert values(topic.read()) == [b"young", b"newest"]


def test_compaction_is_reported_goes_page_by_page_and_begins_anew_with_each_life(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "forebay.storage.background.limits")
    monkeypatch.setattr(limits, "PASS_PAGES", 1)
    settings = Settings.load(overrides=QUICK)
    with Storage.open(tmp_path / "log", settings, clock=clock) as log:
        topic = log.create_topic("t", engine="rocksdb", cleanup="compact", compact_lag_ms=0)
        for _ in range(30):
            topic.append_many([b"x" * 100_000] * 2, keys=[b"a", b"b"])
    with Storage.open(tmp_path / "log", settings, clock=clock) as log:
        topic = log.topic("t")
        inside(log).workers.limits.step()
        assert topic.offsets().next == 60, "opened"
        left = [len(list(topic.read()))]
        while left[-1] > 2:
            inside(log).workers.limits.step()
            left.append(len(list(topic.read())))
            assert left[-1] < left[-2]
    assert len(left) > 3
    assert any("compacted" in record.getMessage() for record in caplog.records)


# Alterations


def test_every_handle_goes_by_what_was_altered(log: Storage, engine: str) -> None:
    first, second = log.create_topic("t", engine=engine), log.topic("t")
    filled(first)

    altered = log.alter_topic("t", partitions=4, cap_records=20, ttl_ms=1000, cleanup="compact", compact_lag_ms=5)

    assert first.spec == second.spec == log.topic("t").spec == altered
    assert (second.partitions, second.spec.generation) == (4, 2)
    assert second.append(b"v", partition=3) == 0
    log.alter_topic("t", cap_records=14, on_full="reject_new")
    with pytest.raises(Full):
        first.append_many([b"v"] * 3, partition=0)
    log.alter_topic("t", cap_records=None, on_full="discard_old")
    assert first.append_many([b"v"] * 30, partition=0)[-1] == 41


def test_an_old_look_at_the_definition_does_not_undo_a_newer_one(log: Storage) -> None:
    topic = log.create_topic("t", engine="memory")
    before = inside(log).definitions.look(topic.spec.name)
    log.alter_topic("t", partitions=3)
    inside(log).adopt(before)
    assert topic.partitions == 3 and topic.append(b"v", partition=2) == 0


def test_an_alteration_that_changes_nothing_is_fine(log: Storage) -> None:
    topic = log.create_topic("t", engine="memory", cap_records=5)
    assert log.alter_topic("t") == log.alter_topic("t", partitions=1, cap_records=5) == topic.spec


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"cap_records": 11}, "holds 12 offsets"),
        ({"cap_bytes": 20}, "bytes"),
        ({"ttl_ms": 1000}, "older records"),
        ({"cleanup": "compact", "compact_lag_ms": 1000}, "older records.*what of them is superseded"),
    ],
)
def test_what_would_lose_records_at_once_asks_for_a_word(
    log: Storage, clock: ManualClock, engine: str, changes: dict[str, int | str], told: str
) -> None:
    topic = filled(log.create_topic("t", engine=engine))
    clock.advance(1)

    with pytest.raises(Conflict, match=f"{told}.*allow_loss=True"):
        log.alter_topic("t", **changes)  # type: ignore[arg-type]
    inside(log).workers.limits.step()
    assert len(list(topic.read())) == 12
    compacted = {"cleanup": "compact", "compact_lag_ms": 1001}
    for enough in ({"cap_records": 12}, {"cap_bytes": 10_000}, compacted, {"ttl_ms": 1002}):
        log.alter_topic("t", **enough)
    inside(log).workers.limits.step()
    assert len(list(topic.read())) == 12
    log.alter_topic("t", allow_loss=True, **{"compact_lag_ms": 999, **changes})  # type: ignore[arg-type]
    inside(log).workers.limits.step()
    assert len(list(topic.read())) < 12


def test_a_cap_that_refuses_loses_nothing_until_it_discards(log: Storage, engine: str) -> None:
    topic = filled(log.create_topic("t", engine=engine))
    log.alter_topic("t", cap_records=3, on_full="reject_new")
    inside(log).workers.limits.step()
    assert len(list(topic.read())) == 12
    with pytest.raises(Conflict, match="holds 12 offsets"):
        log.alter_topic("t", on_full="discard_old")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"partitions": 1}, "can only be added"),
        ({"partitions": 1025}, "1 to 1024"),
        ({"partitions": True}, "1 to 1024"),
        ({"cap_records": 0}, "cap_records is 0"),
        ({"cap_bytes": "1"}, "cap_bytes is '1'"),
        ({"ttl_ms": -5}, "ttl_ms is -5"),
        ({"on_full": "reject_new"}, "needs a cap"),
        ({"on_full": "explode"}, "use one of discard_old, reject_new"),
        ({"cleanup": "wash"}, "use one of delete, compact"),
        ({"compact_lag_ms": None}, "compact_lag_ms is None"),
        ({"engine": "memory"}, "engine of a topic cannot be changed"),
    ],
)
def test_impossible_alterations_are_refused(log: Storage, changes: dict[str, object], told: str) -> None:
    topic = log.create_topic("t", engine="memory", partitions=2)
    before = topic.spec
    with pytest.raises(Invalid, match=told):
        log.alter_topic("t", **changes)  # type: ignore[arg-type]
    assert log.topic("t").spec == before


def test_of_many_that_alter_at_once_every_change_holds(log: Storage) -> None:
    topic = log.create_topic("t", engine="memory")
    names = ["cap_records", "cap_bytes", "ttl_ms", "compact_lag_ms"]
    threads = [threading.Thread(target=log.alter_topic, args=("t",), kwargs={name: 1000}) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [getattr(topic.spec, name) for name in names] == [1000] * 4
    assert log.topic("t").spec == topic.spec


def test_another_process_and_another_log_learn_of_it(tmp_path: Path) -> None:
    settings = {**QUICK, "retention": {"evict_interval_s": 1}}
    with forebay.open(tmp_path / "log", settings) as log:
        log.create_topic("t")
        with forebay.open(tmp_path / "log", settings, read_only=True) as beside:
            topic = beside.topic("t")
            assert topic.offsets().next == 0
            log.alter_topic("t", partitions=2)
            log.topic("t").append(b"v", partition=1)
            until(lambda: topic.partitions == 2)
            assert values(topic.read()) == [b"v"]
            with pytest.raises(Unsupported, match="read-only"):
                beside.alter_topic("t", partitions=3)


def test_a_topic_on_segment_files_learns_by_its_own_upkeep(tmp_path: Path) -> None:
    settings = {**QUICK, "metadata": {"path": str(tmp_path / "shared.sqlite")}, "retention": {"evict_interval_s": 1}}
    with forebay.open(tmp_path / "a", settings) as here, forebay.open(tmp_path / "b", settings) as there:
        topic = here.create_topic("t")
        topic.append(b"v")
        there.alter_topic("t", partitions=3)
        until(lambda: topic.partitions == 3)


def test_a_use_of_the_topic_does_no_metadata_look_up(log: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = filled(log.create_topic("t", engine="memory", cap_records=100))
    asked: list[str] = []
    found = inside(log).metadata.get

    def get(key: str) -> object:
        asked.append(key)
        return found(key)

    monkeypatch.setattr(inside(log).metadata, "get", get)
    filled(topic)
    list(topic.read_by_key(b"k1", history=True))
    assert asked == []


# Retention on demand


def test_retention_runs_when_asked_and_says_what_it_removed(log: Storage, engine: str) -> None:
    capped = filled(log.create_topic("capped", engine=engine, cap_records=5))
    filled(log.create_topic("other", engine=engine, cap_records=5))

    one = log.run_retention(capped.spec.name)

    assert (one.evicted, one.compacted) == (7, 0)
    assert (capped.offsets().evict_floor, log.topic("other").offsets().evict_floor) == (7, 0)
    assert log.run_retention().evicted == 7 and log.run_retention() == (0, 0, 0)


def test_retention_on_demand_removes_local_copies_and_superseded_records(tmp_path: Path) -> None:
    settings = {
        **QUICK,
        "storage": {"mode": "shared_fs"},
        "store": {"root": str(tmp_path / "history")},
        "metadata": {"path": str(tmp_path / "m.sqlite")},
        "retention": {"time_s": 0, "bytes_max": 0, "grace_s": 0, "check_interval_s": 3600, "evict_interval_s": 3600},
    }
    with forebay.open(tmp_path / "a", settings) as log:
        topic = log.create_topic("t", cleanup="compact", compact_lag_ms=0)
        topic.append_many([b"old", b"new"], keys=[b"k", b"k"])
        log.export_topic("t")
    with forebay.open(tmp_path / "a", settings) as log:
        removed = log.run_retention()

        assert (removed.compacted, removed.files) == (1, 1)
        assert values(log.topic("t").read()) == [b"new"]
        assert not list((tmp_path / "a").rglob("00000000000000000000-*.seg"))


def test_retention_leaves_what_another_directory_has(tmp_path: Path) -> None:
    settings = {
        **QUICK,
        "storage": {"mode": "shared_fs"},
        "store": {"root": str(tmp_path / "history")},
        "metadata": {"path": str(tmp_path / "m.sqlite")},
    }
    with forebay.open(tmp_path / "a", settings) as a:
        topic = filled(a.create_topic("t", cap_records=5))
        epoch = topic.epoch()
    with forebay.open(tmp_path / "b", settings) as b:
        assert b.run_retention("t") == (0, 0, 0)
    with forebay.open(tmp_path / "a", settings) as a:
        assert a.topic("t").epoch() == epoch + 1
        assert a.run_retention("t").evicted == 7


# From a place on, and no more than so many


def test_look_ups_begin_where_they_are_asked_to_and_end_after_so_many(log: Storage, engine: str) -> None:
    topic = log.create_topic("t", engine=engine)
    for number in range(12):
        topic.append(
            b"%d" % number, key=b"k" if number % 2 else b"other", tag="eu" if number % 3 else "us", timestamp=number
        )
    keyed, tagged = [1, 3, 5, 7, 9, 11], [1, 2, 4, 5, 7, 8, 10, 11]

    def offsets(records: Iterable[forebay.Record]) -> list[int]:
        return [record.offset for record in records]

    for start in range(13):
        for limit in (None, 0, 1, 2, 100):
            by_key = topic.read_by_key(b"k", history=True, start=start, limit=limit)
            by_tag = topic.read_by_tag("eu", start=start, limit=limit)
            assert offsets(by_key) == [offset for offset in keyed if offset >= start][:limit], (start, limit)
            assert offsets(by_tag) == [offset for offset in tagged if offset >= start][:limit], (start, limit)
            assert offsets(by_key) == offsets(by_tag) == [], "a stream that has ended stays so"
        assert offsets(topic.read_by_key(b"k", start=start)) == ([11] if start <= 11 else [])
    assert offsets(topic.read_by_tag("eu", start=Position.at_time(6))) == [7, 8, 10, 11]
    assert offsets(topic.read_by_key(b"k", history=True, start=LATEST)) == []
    assert offsets(topic.read_by_key(b"k", limit=0)) == []
    with pytest.raises(Invalid, match="ends at offset 12, and start is 13"):
        topic.read_by_tag("eu", start=13)
    for bad in (-1, True, 1.0, "1"):
        with pytest.raises(Invalid, match="limit is"):
            topic.read_by_tag("eu", limit=bad)  # type: ignore[arg-type]


def test_look_ups_over_partitions_begin_in_each_where_they_are_asked_to(log: Storage, engine: str) -> None:
    topic = log.create_topic("t", engine=engine, partitions=3)
    for number in range(9):
        topic.append(b"%d" % number, tag="eu", partition=number % 3)

    assert values(topic.read_by_tag("eu", start={0: 1, 2: 2})) == [b"3", b"6", b"8"]
    assert values(topic.read_by_tag("eu", start=2, partition=1)) == [b"7"]
    assert values(topic.read_by_tag("eu", limit=4)) == [b"0", b"3", b"6", b"1"]
    with pytest.raises(Invalid, match="name the partition"):
        topic.read_by_tag("eu", start=1)
    with pytest.raises(Invalid, match="name the partition"):
        topic.read_by_key(b"k", start=1)
