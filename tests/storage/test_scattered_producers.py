"""A batch that falls into several partitions is recognised in each: a repeat adds what is missing and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest

import forebay
from forebay import Conflict, Indeterminate, Invalid
from forebay.partitioning import partition_of_key
from forebay.storage import Storage, Topic
from forebay.testing.inside import inside
from tests.storage.rig import QUICK, quick, wal_of

ROOT: Final = Path(__file__).parents[2]
PARTITIONS: Final = 3
KEYS: Final = [b"%d" % number for number in range(12)]


def _batch(sequence: int) -> list[bytes]:
    return [b"%d-%s" % (sequence, key) for key in KEYS]


def _send(topic: Topic, sequence: int, *, producer: int = 7, keys: Sequence[bytes] = KEYS) -> list[int]:
    return list(topic.append_many(_batch(sequence)[: len(keys)], keys=keys, producer=producer, sequence=sequence))


def _stored(topic: Topic) -> list[bytes]:
    return sorted(record.value or b"" for record in topic.read())


@pytest.fixture(params=["segment", "rocksdb", "memory"])
def topic(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Topic]:
    with forebay.open(tmp_path / "log", QUICK) as log:
        options = {"durability": "ephemeral"} if request.param == "memory" else {"engine": request.param}
        yield log.create_topic("t", partitions=PARTITIONS, **options)


def test_a_repeated_batch_gets_its_offsets_and_stores_nothing(topic: Topic) -> None:
    first = [_send(topic, sequence) for sequence in range(3)]

    assert [_send(topic, sequence) for sequence in range(3)] == first
    assert _stored(topic) == sorted(value for sequence in range(3) for value in _batch(sequence))


def test_batches_need_not_fall_into_the_same_partitions(topic: Topic) -> None:
    one, other = (next([key] for key in KEYS if partition_of_key(key, PARTITIONS) == number) for number in (0, 1))
    _send(topic, 0, keys=one)
    _send(topic, 1)
    last = _send(topic, 2, keys=other)

    assert _send(topic, 2, keys=other) == last
    with pytest.raises(Conflict, match="never sent to this partition before sequence 2"):
        _send(topic, 0, keys=other)


def test_rows_of_arrow_are_recognised_in_the_same_way(topic: Topic) -> None:
    batch = pa.record_batch({"value": _batch(4), "key": KEYS})

    first = list(topic.append_arrow(batch, producer=7, sequence=4))

    assert list(topic.append_arrow(batch, producer=7, sequence=4)) == first == _send(topic, 4)
    assert _stored(topic) == sorted(_batch(4))


def test_a_split_batch_is_recognised_if_no_partition_gets_two_parts(topic: Topic) -> None:
    first = topic.append_many(_batch(0), keys=KEYS, producer=7, sequence=0, atomic=False)

    assert list(topic.append_many(_batch(0), keys=KEYS, producer=7, sequence=0, atomic=False)) == list(first)


def test_previous_is_of_one_partition(topic: Topic) -> None:
    with pytest.raises(Invalid, match="the records fall into 3: name the partition"):
        topic.append_many(_batch(9), keys=KEYS, producer=7, sequence=9, previous=-1)
    offsets = topic.append_many(_batch(9), keys=KEYS, producer=7, sequence=9, previous=-1, partition=1)

    assert list(topic.append_many(_batch(9), keys=KEYS, producer=7, sequence=9, partition=1)) == list(offsets)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"previous": 3}, "previous needs both"),
        ({"producer": 1, "sequence": 4, "previous": 4}, "previous is 4; allowed: -1 for none, to below sequence 4"),
        ({"producer": 1, "sequence": 4, "previous": -2}, "previous is -2"),
        ({"producer": 1, "sequence": 4, "previous": "3"}, "previous is '3'"),
    ],
)
def test_a_previous_sequence_that_cannot_be_is_invalid(options: dict[str, Any], said: str) -> None:
    with forebay.open(":memory:") as log:
        topic = log.create_topic("t")
        for append in (topic.append, topic.append_nowait):
            with pytest.raises(Invalid, match=said):
                append(b"v", **options)
        with pytest.raises(Invalid, match=said):
            topic.append_many([b"v"], **options)
        with pytest.raises(Invalid, match=said):
            topic.append_arrow(pa.record_batch({"value": [b"v"]}), **options)


@pytest.mark.plain_locks
def test_a_batch_that_one_partition_refused_is_completed_by_its_repeat(tmp_path: Path) -> None:
    with Storage.open(str(tmp_path / "log"), quick(queue_records_max=4, append_timeout_ms=0)) as log:
        topic = log.create_topic("t", partitions=PARTITIONS)
        _send(topic, 0)
        with wal_of(topic, 1).committing:
            acks = [topic.append_nowait(b"full", partition=1) for _ in range(4)]
            with pytest.raises(Indeterminate, match="or all of it with the same producer and sequence"):
                _send(topic, 1)
        for ack in acks:
            ack.result(60)

        offsets = _send(topic, 1)

        assert _send(topic, 1) == offsets
        assert _stored(topic) == sorted([*_batch(0), *_batch(1), *[b"full"] * 4])


def _killed(path: str, partition: int) -> None:
    """Run in a process of its own, which ends before it commits the part of the second batch in this partition."""
    with forebay.open(path, QUICK) as log:
        topic = log.create_topic("t", partitions=PARTITIONS, durability="fsync")
        _send(topic, 0)
        shard = inside(topic).segment(partition)
        shard.acknowledge = lambda ticket: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment,return-value]
        _send(topic, 1)


@pytest.mark.slow
@pytest.mark.parametrize("partition", range(PARTITIONS))
def test_a_batch_cut_short_by_a_kill_between_partitions_is_completed_by_its_repeat(
    partition: int, tmp_path: Path
) -> None:
    path = str(tmp_path / "log")
    code = f"from {__name__} import _killed; _killed({path!r}, {partition})"
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=60)
    assert child.returncode == -signal.SIGKILL

    with forebay.open(path, QUICK) as log:
        topic = log.topic("t")
        cut = [topic.last_sequence(7, number) for number in range(PARTITIONS)]
        assert cut[partition] == 0
        _send(topic, 1)

        assert _stored(topic) == sorted([*_batch(0), *_batch(1)])
        assert [topic.last_sequence(7, number) for number in range(PARTITIONS)] == [1, 1, 1]
