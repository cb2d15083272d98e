"""Deliberate breaks of reads over all partitions: the steps of a look must find each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from forebay.client.topics import ReadEnd, TopicCalls
from forebay.format.metadata.descriptor import LoadStatus
from forebay.shard.history import ShardHistory
from forebay.storage.read_ends import PartitionEnd, ReadEnds
from tests.client.test_read_ends import LoadedBroker
from tests.client.test_read_ends import test_all_ends_come_from_one_answer as check_one_answer
from tests.storage.test_read_ends import LOADED, PARTITIONS, Looks, filled, sizes
from tests.support.brokers import running_broker

Look = Callable[[int], PartitionEnd]
Status = Callable[[int, str], LoadStatus]


def _one_after_the_other(patch: pytest.MonkeyPatch) -> None:
    def ends(reads: ReadEnds, partitions: Sequence[int], look: Look, status: Status) -> list[int]:
        return [look(partition).end for partition in partitions]

    patch.setattr(ReadEnds, "of", ends)


def _loads_not_noted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShardHistory, "note_load", lambda history, load_id, start: None)


@pytest.mark.parametrize("broken", [_one_after_the_other, _loads_not_noted])
def test_a_look_that_may_be_torn_is_found(
    broken: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = filled(tmp_path)
    looks, topic = Looks(monkeypatch), mixed.filled.topic
    sizes(iter(topic.read()))
    broken(monkeypatch)
    torn = False
    for at in range(1, PARTITIONS + 1):
        looks.steps = 0
        looks.act = lambda step, at=at: mixed.load(LOADED) if step == at else None  # type: ignore[misc]
        torn |= len(set(sizes(iter(topic.read())))) > 1
        looks.act = lambda step: None
    mixed.close()
    assert torn


@pytest.mark.slow
def test_a_client_that_asks_for_the_ends_one_after_the_other_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def one_by_one(topic: TopicCalls, partitions: Sequence[int]) -> dict[int, ReadEnd]:
        found = {number: await topic.offsets(number) for number in partitions}
        return {number: ReadEnd(offsets, offsets.next) for number, offsets in found.items()}

    monkeypatch.setattr(TopicCalls, "read_ends", one_by_one)

    with running_broker(tmp_path / "log") as broker, pytest.raises(AssertionError):
        check_one_answer("read", LoadedBroker(broker).filled(), monkeypatch)
