"""One read shows a bulk load in all partitions or in none, wherever in its look the load is attached and committed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

import forebay.storage.topic
from forebay.aio import AsyncLog
from forebay.engines import ReadShard
from forebay.format.metadata.descriptor import LoadStatus
from forebay.records import Record
from forebay.storage import Topic
from forebay.storage.read_ends import PartitionEnd, ReadEnds, end_of, load_status
from tests.ledger import Ledger
from tests.spark.mixed import Mixed
from tests.support.environments import directories
from tests.support.soak import SOAK
from tests.support.waiting import PATIENCE

PARTITIONS: Final = 4
LOADED: Final = 3


class Looks:
    """Steps of a look, in each of which something may happen: asking a partition for its end, and for a load."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.steps = 0
        self.act: Callable[[int], None] = lambda step: None
        patch.setattr(forebay.storage.topic, "end_of", self._end_of)
        patch.setattr(forebay.storage.topic, "load_status", self._load_status)

    def _end_of(self, shard: ReadShard) -> PartitionEnd:
        self._step()
        return end_of(shard)

    def _load_status(self, shard: ReadShard, load_id: str) -> LoadStatus:
        self._step()
        found = load_status(shard, load_id)
        self._step()
        return found

    def _step(self) -> None:
        self.steps += 1
        self.act(self.steps)


def sizes(records: Iterator[Record]) -> list[int]:
    """How many records of each partition."""
    found = [0] * PARTITIONS
    for record in records:
        found[record.partition] += 1
    return found


def filled(root: Path) -> Mixed:
    mixed = Mixed(directories.local(root), partitions=PARTITIONS)
    for partition in range(PARTITIONS):
        mixed.filled.many(5, partition)
    mixed.load(LOADED)
    return mixed


def _rows(topic: Topic) -> list[int]:
    found = [0] * PARTITIONS
    for batch in topic.read_arrow():
        for partition in batch.column("partition").to_pylist():
            found[partition] += 1
    return found


FACES: Final[dict[str, Callable[[Topic], list[int]]]] = {
    "read": lambda topic: sizes(iter(topic.read())),
    "read_arrow": _rows,
}


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("handle", ["owner", "beside"])
def test_a_load_that_comes_at_any_step_of_a_look_is_seen_whole_or_not_at_all(
    handle: str, face: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ledger: Ledger
) -> None:
    mixed = filled(tmp_path)
    looks = Looks(monkeypatch)
    with mixed.environment.open("one", read_only=True) as beside:
        topic = mixed.filled.topic if handle == "owner" else beside.topic(mixed.topic)
        before, at, is_reached = FACES[face](topic)[0], 0, True
        while is_reached:
            at += 1
            looks.steps, reached = 0, list[int]()

            def load(step: int, at: int = at, reached: list[int] = reached) -> None:
                if step == at and not reached:
                    reached.append(step)
                    mixed.load(LOADED)

            looks.act = load
            seen = FACES[face](topic)
            looks.act = lambda step: None
            after = FACES[face](topic)
            is_reached = bool(reached)

            assert seen in ([before] * PARTITIONS, [before + LOADED] * PARTITIONS), f"step {at}: {seen}"
            assert after == [before + LOADED * is_reached] * PARTITIONS, f"step {at}: {after}"
            before = after[0]
            ledger.count("loads inside of a look", face=face, handle=handle)
    mixed.close()
    assert at > PARTITIONS


def test_a_look_up_ends_where_a_read_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = filled(tmp_path)
    topic, tag = mixed.filled.topic, "loaded"
    for partition in range(PARTITIONS):
        topic.append(b"v", tag=tag, partition=partition)
    monkeypatch.setattr(ReadEnds, "of", lambda ends, partitions, look, status: [0, *[10**6] * (PARTITIONS - 1)])

    assert [record.partition for record in topic.read_by_tag(tag)] == list(range(1, PARTITIONS))
    mixed.close()


def test_asking_again_reads_no_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = filled(tmp_path)
    topic = mixed.filled.topic
    topic.read_ends()
    asked: list[str] = []

    def status(shard: ReadShard, load_id: str) -> LoadStatus:
        asked.append(load_id)
        return LoadStatus.OFFERED

    monkeypatch.setattr(forebay.storage.topic, "load_status", status)

    assert topic.read_ends() == [5 + LOADED] * PARTITIONS and asked == []
    mixed.close()


def test_ends_are_right_wherever_a_load_goes_on() -> None:
    """Every order of what a load does and a look asks: attached to two partitions, committed, between any questions."""
    for first in range(5):
        for second in range(first, 5):
            for committed in range(second, 5):
                ends = ReadEnds().of([0, 1], *_answers(first, second, committed))
                assert ends in ([5, 5], [8, 8]), (first, second, committed)


def _answers(
    first: int, second: int, committed: int
) -> tuple[Callable[[int], PartitionEnd], Callable[[int, str], LoadStatus]]:
    """What partitions and loads answer, if a load is attached and committed after so many questions."""
    asked: list[int] = []

    def look(partition: int) -> PartitionEnd:
        is_attached = len(asked) >= (second if partition else first)
        asked.append(partition)
        return PartitionEnd(8 if is_attached else 5, {"load": 5} if is_attached else {})

    def status(partition: int, load_id: str) -> LoadStatus:
        return LoadStatus.COMMITTED if len(asked) > committed else LoadStatus.OFFERED

    return look, status


@pytest.mark.slow
@pytest.mark.parametrize("handle", ["owner", "beside", "aio"])
def test_no_read_of_a_tight_loop_shows_a_part_of_a_load(handle: str, tmp_path: Path, ledger: Ledger) -> None:
    mixed = filled(tmp_path)
    ended, torn, reads = threading.Event(), list[list[int]](), list[int]()

    def check(seen: list[int]) -> None:
        reads.append(1)
        if len(set(seen)) > 1:
            torn.append(seen)

    def read() -> None:
        if handle == "owner":
            _read_on(mixed.filled.topic)
        else:
            with mixed.environment.open("one", read_only=True) as beside:
                _read_on(beside.topic(mixed.topic))

    def _read_on(topic: Topic) -> None:
        while not ended.is_set():
            check(sizes(iter(topic.read())))

    async def read_async() -> None:
        async with AsyncLog(mixed.environment.root / "one", mixed.environment.settings, read_only=True) as log:
            topic = await log.topic(mixed.topic)
            while not ended.is_set():
                found = [0] * PARTITIONS
                async for record in topic.read():
                    found[record.partition] += 1
                check(found)

    thread = threading.Thread(target=(lambda: asyncio.run(read_async())) if handle == "aio" else read)
    thread.start()
    for _ in range(40 if SOAK else 10):
        mixed.load(LOADED)
    ended.set()
    thread.join(PATIENCE)
    mixed.close()
    ledger.count("reads beside loads", len(reads), handle=handle)
    assert torn == [] and reads
