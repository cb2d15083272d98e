"""What a system with the same three engines got wrong: each weakness is a test here, and none of the engines has it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay
from forebay import Gap, Reason, Storage, Topic
from forebay.progress import ReaderName
from forebay.settings import Settings
from forebay.testing.contracts.engines import in_threads
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from tests.storage.rig import QUICK, values

NOW = 1_700_000_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW)


@pytest.fixture
def log(tmp_path: Path, clock: ManualClock) -> Iterator[Storage]:
    with Storage.open(tmp_path / "log", Settings.load(overrides=QUICK), clock=clock) as log:
        yield log


@pytest.fixture(params=["memory", "rocksdb", "segment"])
def topic(request: pytest.FixtureRequest, log: Storage) -> Topic:
    return log.create_topic("t", engine=request.param)


def test_group_offsets_are_not_acknowledged_before_they_are_durable(log: Storage, topic: Topic, tmp_path: Path) -> None:
    """Whatever the process may hold in memory: what is on disk at the acknowledgement has the offset."""
    topic.append_many([b"v"] * 9)
    for offset in (3, 8):
        assert log.group("g").commit("t", offset, note="so far") == offset
        crashed = tmp_path / f"crashed-{offset}"
        shutil.copytree(tmp_path / "log", crashed, ignore=shutil.ignore_patterns("rocksdb", "lock"))

        with forebay.open(crashed, QUICK, read_only=True) as found:
            spec = found.topics()[0]
            stored = inside(found).progress.get(ReaderName(spec.namespace, spec.topic, "g"), 0, spec.topic_id)
            assert stored is not None
            assert (stored.offset, stored.note) == (offset, "so far")


def test_tag_a_does_not_match_tag_a_slash_b(topic: Topic) -> None:
    tags = ["a", "a/b", "a/b/c", "ab", "b/a", "A", "a/"]
    topic.append_many([tag.encode() for tag in tags], tags=tags)

    assert [values(topic.read_by_tag(tag)) for tag in tags] == [[tag.encode()] for tag in tags]
    assert topic.delete_by_tag("a") == 1
    assert values(topic.read_by_tag("a/b")) == [b"a/b"]


def test_the_time_look_up_is_to_the_millisecond_and_not_to_the_second(topic: Topic) -> None:
    topic.append_many([b"v"] * 1000, timestamps=[NOW + n for n in range(1000)])

    assert [topic.offset_at_time(NOW + n) for n in (-1, 0, 1, 499, 999, 1000)] == [0, 0, 1, 499, 999, None]


def test_a_key_written_again_does_not_delete_its_history(topic: Topic) -> None:
    for number in range(5):
        topic.append(b"%d" % number, key=b"same")

    expected = [b"0", b"1", b"2", b"3", b"4"]
    assert values(topic.read()) == values(topic.read_by_key(b"same", history=True)) == expected
    assert values(topic.read_by_key(b"same")) == [b"4"]


def test_deletes_are_supported_by_every_engine(topic: Topic) -> None:
    topic.append_many([b"%d" % n for n in range(10)], keys=[b"k%d" % (n % 5) for n in range(10)], tags=["t"] * 10)

    assert topic.delete_by_key(b"k1") == 2
    assert topic.delete_by_offset(2, 4) == 2
    assert topic.delete_before(1) == 1
    assert values(topic.read()) == [b"4", b"5", b"7", b"8", b"9"]
    assert topic.delete_by_tag("t") == 5
    assert values(topic.read()) == []


def test_paging_is_not_stuck_on_expired_records(log: Storage, topic: Topic, clock: ManualClock) -> None:
    """More pages of them than one read takes, expired by time, and then deleted up to the last record."""
    topic.append_many([b"x" * 2000] * 1500, keys=[b"k"] * 1500)
    clock.advance(3600)
    topic.append_many([b"x" * 2000] * 1500, keys=[b"k"] * 1500)
    topic.append(b"last", key=b"k")
    log.alter_topic("t", ttl_ms=1_800_000, allow_loss=True)
    inside(log).workers.limits.step()
    reported: list[Gap] = []

    assert len(list(topic.read(0, on_gap=lambda _, gap: reported.append(gap)))) == 1501
    assert reported == [Gap(0, 1500, Reason.TTL)]
    assert topic.delete_by_offset(1500, 3000) == 1500
    assert values(topic.read(0, on_gap=lambda _, gap: None)) == values(topic.read(1500)) == [b"last"]
    shard, at, pages = inside(topic).shard(0), 0, 0
    while at < 3001:
        page = shard.read(at, 1000)
        assert page.next > at, "every page leads on"
        at, pages = page.next, pages + 1
    assert pages < 3001


def test_replies_of_merged_writes_are_not_mixed_up(topic: Topic) -> None:
    reported: dict[int, bytes] = {}

    def append(number: int) -> None:
        sent = [b"%d.%d" % (number, turn) for turn in range(50)]
        acks = [(topic.append_nowait(value), value) for value in sent]
        reported.update({ack.result(60): value for ack, value in acks})

    in_threads(8, append)

    assert reported == {record.offset: record.value for record in topic.read()}
    assert len(reported) == 400
