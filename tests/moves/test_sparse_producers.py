"""Producers whose sequences leave numbers out are recognised wherever a shard goes on from."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from forebay import Conflict
from forebay.appends.producer_window import ReservedProducer
from forebay.format.metadata.descriptor import SegmentDescriptor
from forebay.places import Places
from forebay.sealed import ByteSource
from forebay.storage import Storage, Topic
from tests.compacting.directly import check_sound, compacted, kinds_of
from tests.support.environments import directories
from tests.support.environments.directories import TOPIC, Environment

ROUTER: Final = ReservedProducer(2**63 + 7)
SENT: Final = ((5, -1), (9, 5), (10, None), (2**40, 10))
"""Sequences, and those they name as the previous ones."""


def _produce(log: Storage) -> dict[tuple[int, int], int]:
    """Appends of two producers in turns, in three files; their offsets."""
    topic = log.topic(TOPIC)
    offsets = {}
    for sequence, previous in SENT:
        for producer in (7, ROUTER):
            offsets[producer, sequence] = topic.append(
                b"%d" % sequence, producer=producer, sequence=sequence, previous=previous, partition=0
            )
        log.export_topic(TOPIC)
    topic.append(b"plain", partition=0)
    return offsets


def _check(topic: Topic, offsets: dict[tuple[int, int], int]) -> None:
    for (producer, sequence), offset in offsets.items():
        repeated = topic.append(b"%d" % sequence, producer=producer, sequence=sequence, partition=0)
        assert repeated == offset
    for producer in (7, ROUTER):
        assert topic.last_sequence(producer, 0) == 2**40
        for sequence, previous in ((7, 5), (2**41, 10), (2**41, None), (2**41, -1)):
            with pytest.raises(Conflict):
                topic.append(b"v", producer=producer, sequence=sequence, previous=previous, partition=0)
        assert topic.append(b"v", producer=producer, sequence=2**41, previous=2**40, partition=0) > max(
            offsets.values()
        )
    stored = [record.value for record in topic.read(partition=0)]
    assert stored == [b"%d" % sequence for sequence, _ in SENT for _ in "ab"] + [b"plain", b"v", b"v"]


def _restarted(environment: Environment) -> str:
    return "one"


def _sealed(environment: Environment) -> str:
    with environment.open("one") as log:
        log.seal_topic(TOPIC)
    return "two"


def _closed_and_gone(environment: Environment) -> str:
    """Clean shutdown has exported the tail; the directory is lost, and another takes over."""
    shutil.rmtree(environment.root / "one")
    return "two"


def _compacted(environment: Environment) -> str:
    with environment.open("one") as log:
        topic = log.topic(TOPIC)
        log.export_topic(TOPIC)
        compacted(environment)
        assert {kind.value for kind in kinds_of(log, topic)} == {"parquet"}
        log.seal_topic(TOPIC)
    return "two"


def _files_gone(environment: Environment) -> str:
    (shard,) = (environment.root / "one" / "shards").iterdir()
    shutil.rmtree(shard)
    return "one"


@pytest.mark.parametrize("after", [_restarted, _sealed, _closed_and_gone, _compacted, _files_gone])
def test_sequences_that_leave_numbers_out_are_known_after(after: Callable[[Environment], str], tmp_path: Path) -> None:
    environment = directories.shared_fs(tmp_path)
    with environment.open("one") as log:
        log.create_topic(TOPIC)
        offsets = _produce(log)

    name = after(environment)

    with environment.open(name) as log:
        _check(log.topic(TOPIC), offsets)
    check_sound(environment, name)


def test_they_are_known_where_history_stays_with_the_log(tmp_path: Path) -> None:
    environment = directories.local(tmp_path)
    with environment.open("one") as log:
        log.create_topic(TOPIC)
        offsets = _produce(log)
    with environment.open("one") as log:
        _check(log.topic(TOPIC), offsets)
    check_sound(environment, "one")


def test_their_records_are_copied(tmp_path: Path) -> None:
    environment = directories.local(tmp_path)
    with environment.open("one") as log:
        log.create_topic(TOPIC)
        offsets = _produce(log)
        log.copy_topic(TOPIC, log.create_topic("shop/copies").name)

        copied = [record.value for record in log.topic("shop/copies").read(partition=0)]
        assert copied == [record.value for record in log.topic(TOPIC).read(partition=0)]
        _check(log.topic(TOPIC), offsets)


def test_an_object_that_compaction_replaces_while_its_producers_are_read_is_looked_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next owner took the window for damaged, and refused every producer until an operator accepted that."""
    environment = directories.shared_fs(tmp_path)
    with environment.open("one") as log:
        log.create_topic(TOPIC)
        offsets = _produce(log)
        log.seal_topic(TOPIC)
    source = Places.source
    looked: list[SegmentDescriptor] = []

    def replaced(places: Places, descriptor: SegmentDescriptor) -> ByteSource:
        if not looked:
            looked.append(descriptor)
            compacted(environment)
            for path in (tmp_path / "store").rglob("*.seg"):
                path.unlink()
        return source(places, descriptor)

    monkeypatch.setattr(Places, "source", replaced)
    with environment.open("two") as log:
        _check(log.topic(TOPIC), offsets)
    assert looked


def test_an_object_that_is_lost_leaves_producers_unknown(tmp_path: Path) -> None:
    environment = directories.shared_fs(tmp_path)
    with environment.open("one") as log:
        log.create_topic(TOPIC)
        _produce(log)
        log.seal_topic(TOPIC)
    for path in (tmp_path / "store").rglob("*.seg"):
        path.unlink()

    with environment.open("two") as log, pytest.raises(Conflict, match="is not known, because"):
        log.topic(TOPIC).append(b"again", producer=7, sequence=5, previous=-1, partition=0)
