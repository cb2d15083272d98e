"""Copies of topics, from any engine to any other: once each, whole, whatever interrupts them."""

from __future__ import annotations

import random  # noqa: TID251  # seeded: the same run again
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import forebay
from forebay import Conflict, Gap, Invalid, Reason, Record, Storage, Topic, Unavailable, UnknownTopic
from forebay.partitioning import partition_of_key
from forebay.progress import ReservedReader
from forebay.storage import copying
from forebay.testing.inside import inside
from tests.ledger import Ledger
from tests.storage.rig import QUICK, values
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.slow

ENGINES = ["memory", "rocksdb", "segment"]


def filled(topic: Topic, count: int = 30, seed: int = 0) -> Topic:
    """Records of every shape, in all partitions."""
    chance = random.Random(seed)
    for number in range(count):
        topic.append(
            None if number % 7 == 3 else b"%d" % number,
            key=None if number % 5 == 0 else b"k%d" % chance.randrange(6),
            tag="even" if number % 2 == 0 else None,
            headers=[("h", b"1"), ("h", None)] if number % 3 == 0 else None,
            timestamp=1_000 + chance.randrange(50),
            partition=number % topic.partitions,
        )
    return topic


def shape(record: Record) -> tuple[object, ...]:
    """Everything but its place."""
    return (record.timestamp, record.key, record.value, record.tag, record.headers)


def shapes(topic: Topic, partition: int) -> list[tuple[object, ...]]:
    return [shape(record) for record in topic.read(partition=partition)]


@pytest.mark.parametrize("source", ENGINES)
@pytest.mark.parametrize("target", ENGINES)
def test_records_go_from_any_engine_to_any_other_with_all_they_have(tmp_path: Path, source: str, target: str) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log:
        one = filled(log.create_topic("one", engine=source, partitions=3))
        two = log.create_topic("two", engine=target, partitions=3)

        assert log.copy_topic("one", "two") == (30, 30, 30, [])
        assert [shapes(two, number) for number in range(3)] == [shapes(one, number) for number in range(3)]

        one.append(b"later", partition=1)
        assert log.copy_topic("one", "two") == (1, 31, 31, [])
        assert log.copy_topic("one", "two") == (0, 31, 31, [])


@pytest.mark.parametrize(("before", "after"), [(3, 8), (8, 3), (1, 100), (2, 1)])
def test_with_another_number_of_partitions_keys_hash_and_keep_their_order(before: int, after: int) -> None:
    with forebay.open(":memory:") as log:
        one = log.create_topic("one", partitions=before)
        for number in range(400):
            one.append(b"%d" % number, key=b"k%d" % (number % 150))
        two = log.create_topic("two", partitions=after)

        assert log.copy_topic("one", "two")[:3] == (400, 400, 400)

        last: dict[bytes, int] = {}
        for record in two.read():
            assert record.key is not None and record.partition == partition_of_key(record.key, after)
            assert int(record.value or b"") > last.get(record.key, -1)
            last[record.key] = int(record.value or b"")


class Interrupted(Exception):
    """What falls into the middle of a copy."""


@pytest.mark.parametrize("partitions", [2, 5])
def test_a_copy_that_is_interrupted_anywhere_goes_on_and_doubles_nothing(
    monkeypatch: pytest.MonkeyPatch, ledger: Ledger, partitions: int
) -> None:
    monkeypatch.setattr(copying, "BATCH_RECORDS", 4)
    with forebay.open(":memory:") as log:
        one = filled(log.create_topic("one", partitions=2))
        log.create_topic("whole", partitions=partitions)
        log.copy_topic("one", "whole")
        expected = [shapes(log.topic("whole"), number) for number in range(partitions)]
        steps = 0
        for calls in range(1, 200):
            name = f"two-{calls}"
            two = log.create_topic(name, partitions=partitions)
            if not _cut_short(log, name, calls, monkeypatch):
                break
            steps = calls
            log.copy_topic("one", name)
            assert [shapes(two, number) for number in range(partitions)] == expected, calls
            assert one.offsets(0).next == 15
        ledger.count("places where a copy was cut short", steps, partitions=str(partitions))
        assert steps > 20


def _cut_short(log: Storage, name: str, calls: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Copy until so many effects have happened, before or after the last; false if there are fewer."""
    left = [calls]

    def counted(effect: Callable[..., object]) -> Callable[..., object]:
        def act(*args: object, **kwargs: object) -> object:
            left[0] -= 1
            if left[0] == 0:
                raise Interrupted
            found = effect(*args, **kwargs)
            left[0] -= 1
            if left[0] == 0:
                raise Interrupted
            return found

        return act

    with monkeypatch.context() as patch:
        patch.setattr(Topic, "append_many", counted(Topic.append_many))
        patch.setattr(forebay.Reader, "reset", counted(forebay.Reader.reset))
        try:
            log.copy_topic("one", name)
        except Interrupted:
            return True
    return False


CHILD = """
import os, sys, threading, forebay
from forebay.storage import copying
copying.BATCH_RECORDS = 20
log = forebay.open(sys.argv[1])
def on_records(count, seen=[0]):
    seen[0] += count
    if seen[0] >= int(sys.argv[2]):
        os.kill(os.getpid(), 9)
log.copy_topic("one", "two", on_records=on_records)
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["rocksdb", "segment"])
def test_a_copy_that_is_killed_goes_on(tmp_path: Path, engine: str) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log:
        filled(log.create_topic("one", partitions=2), 200)
        log.create_topic("two", engine=engine, partitions=2, durability="fsync")
    for at in ("60", "100"):
        words = [sys.executable, "-c", CHILD, str(tmp_path / "log"), at]
        assert subprocess.run(words, check=False, timeout=PATIENCE).returncode == -9
    with forebay.open(tmp_path / "log", QUICK) as log:
        copied = log.copy_topic("one", "two")
        assert (copied.source, copied.target) == (200, 200) and copied.copied < 100
        assert [shapes(log.topic("two"), n) for n in (0, 1)] == [shapes(log.topic("one"), n) for n in (0, 1)]


def test_what_was_deleted_evicted_or_lost_is_not_copied_and_reported(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log:
        one = filled(log.create_topic("one", engine="rocksdb", cap_records=20))
        inside(log).workers.limits.step()
        one.delete_by_tag("even")
        log.create_topic("two")

        copied = log.copy_topic("one", "two")

        assert copied == (10, 10, 10, [(0, Gap(0, 10, Reason.CAP))])
        assert values(log.topic("two").read()) == values(one.read(10))


def test_records_that_went_between_two_attempts_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "BATCH_RECORDS", 10)
    with forebay.open(tmp_path / "log", QUICK) as log:
        one = filled(log.create_topic("one", engine="rocksdb"))
        two = log.create_topic("two")
        assert _cut_short(log, "two", 8, monkeypatch), "the second batch has arrived, and nobody knows"
        one.delete_by_offset(12, 30)

        copied = log.copy_topic("one", "two")

        assert (copied.source, copied.target) == (12, 20)
        assert [record.offset for record in two.read()] == list(range(20))


def test_what_cannot_be_copied_is_refused(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log:
        one = filled(log.create_topic("one"))
        with pytest.raises(Invalid, match="into itself"):
            log.copy_topic("one", "default/one")
        with pytest.raises(UnknownTopic):
            log.copy_topic("one", "none")
        two = log.create_topic("two", engine="memory", cap_records=20, on_full="reject_new")
        with pytest.raises(Unavailable, match="cap_records 20"):
            log.copy_topic("one", "two")
        log.alter_topic("two", cap_records=None, on_full="discard_old")
        assert log.copy_topic("one", "two").target == 30
        # A memory that forgot what arrived cannot be gone on with.
        reader = one.reader(ReservedReader(f"copy-{two.spec.topic_id}"))
        reader.reset(4, note="9 1 0:7")
        with pytest.raises(Conflict, match="copy into a new topic"):
            log.copy_topic("one", "two")
