"""A repeat finds its first attempt although partitions were added since, whichever way it comes and whoever waits."""

from __future__ import annotations

import asyncio
import random  # noqa: TID251  # seeded: the same schedules in every run
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest

import forebay
import forebay.aio
from forebay import Unavailable
from forebay.appends.producer_window import CALL_IDS, KEY_IDS, ReservedProducer
from forebay.partitioning import partition_of_key, partition_of_producer
from forebay.storage import Storage, Topic
from forebay.storage.append import Appender
from tests.ledger import Ledger
from tests.storage.rig import QUICK
from tests.support.soak import sampled

ENGINES: Final[dict[str, dict[str, Any]]] = {
    "segment": {},
    "memory class": {"durability": "memory"},
    "rocksdb": {"engine": "rocksdb"},
    "ephemeral": {"durability": "ephemeral"},
}
KEYS: Final = [b"%d" % number for number in range(8)]


@pytest.fixture(params=ENGINES)
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Storage, Topic]]:
    with forebay.open(tmp_path / "log", QUICK) as log:
        yield log, log.create_topic("t", partitions=4, **ENGINES[request.param])


def _stored(topic: Topic) -> list[bytes]:
    return sorted(record.value or b"" for record in topic.read())


@pytest.mark.parametrize("producer", [CALL_IDS, ReservedProducer(KEY_IDS), KEY_IDS - 1])
def test_a_repeated_call_is_found_where_its_keys_were(log: tuple[Storage, Topic], producer: int) -> None:
    storage, topic = log
    calls = [[b"%d" % number] for number in range(8)] + [KEYS[:3], KEYS]
    ids: dict[str, Any] = {"producer": producer}
    first = [list(topic.append_many(keys, keys=keys, sequence=place, **ids)) for place, keys in enumerate(calls)]
    stored = _stored(topic)
    assert any(partition_of_key(key, 4) != partition_of_key(key, 8) for key in KEYS)

    for partitions in (8, 11):
        storage.alter_topic("t", partitions=partitions)
        again = [list(topic.append_many(keys, keys=keys, sequence=place, **ids)) for place, keys in enumerate(calls)]
        rows = [pa.record_batch({"value": keys, "key": keys}) for keys in calls]
        arrow = [list(topic.append_arrow(batch, sequence=place, **ids)) for place, batch in enumerate(rows)]

        assert again == first == arrow
        assert _stored(topic) == stored
    following = list(topic.append_many([b"new"] * 8, keys=KEYS, sequence=len(calls), **ids))
    assert list(topic.append_many([b"new"] * 8, keys=KEYS, sequence=len(calls), **ids)) == following
    assert len(_stored(topic)) == len(stored) + 8


def test_a_producer_without_keys_goes_on_where_it_was(log: tuple[Storage, Topic]) -> None:
    storage, topic = log
    producer = next(one for one in range(1, 99) if partition_of_producer(one, 4) != partition_of_producer(one, 8))
    first = topic.append(b"0", producer=producer, sequence=0)
    storage.alter_topic("t", partitions=8)

    assert topic.append(b"0", producer=producer, sequence=0) == first
    assert list(topic.append_many([b"1", b"2"], producer=producer, sequence=1)) == [first + 1, first + 2]
    assert topic.append_nowait(b"3", producer=producer, sequence=2).result(60) == first + 3
    assert _stored(topic) == [b"0", b"1", b"2", b"3"]


def test_a_producer_that_counts_in_each_partition_by_itself_is_taken_at_its_word(log: tuple[Storage, Topic]) -> None:
    storage, topic = log
    key = next(key for key in KEYS if partition_of_key(key, 4) != partition_of_key(key, 8))
    topic.append(b"old", key=key, producer=7, sequence=0)
    storage.alter_topic("t", partitions=8)

    topic.append(b"new", key=key, producer=7, sequence=0)

    assert _stored(topic) == [b"new", b"old"]


def test_an_append_that_partitions_overtake_is_refused_and_comes_in_once(
    log: tuple[Storage, Topic],
) -> None:
    """Between the choice of a partition and the queue: the repeat has looked where the first attempt comes in later."""
    storage, topic = log
    key = next(key for key in KEYS if partition_of_key(key, 4) != partition_of_key(key, 8))
    prepared = topic.appender.prepare_many([b"v"], keys=[key], producer=CALL_IDS, sequence=0)
    storage.alter_topic("t", partitions=8)
    (repeat,) = topic.append_many([b"v"], keys=[key], producer=CALL_IDS, sequence=0)

    with pytest.raises(Unavailable, match="send it again"):
        topic.appender.batch(prepared)

    assert list(topic.append_many([b"v"], keys=[key], producer=CALL_IDS, sequence=0)) == [repeat]
    assert _stored(topic) == [b"v"]


def test_a_repeat_follows_a_first_attempt_that_is_on_its_way(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log", QUICK) as storage:
        topic = storage.create_topic("t", partitions=4)
        key = next(key for key in KEYS if partition_of_key(key, 4) != partition_of_key(key, 8))
        appender: Appender = topic.appender
        batch = appender.prepared(appender.prepare_many([b"v"], keys=[key], producer=CALL_IDS, sequence=0))
        topic.acquire()
        for share in batch.shares:
            found = topic.shard_if_open(share.partition)
            assert found is not None
            share.stage(found)  # type: ignore[arg-type]
        storage.alter_topic("t", partitions=8)

        (offset,) = topic.append_many([b"v"], keys=[key], producer=CALL_IDS, sequence=0)

        assert batch.shares[0].ticket.offset == offset
        assert _stored(topic) == [b"v"]


def test_the_event_loop_finds_them_too_and_opens_nothing_itself(tmp_path: Path) -> None:
    async def send(topic: forebay.aio.AsyncTopic, number: int, *, keyed: bool = True) -> list[Any]:
        rows = {"value": [b"v%d" % number] * 2, **({"key": [b"%d" % number] * 2} if keyed else {})}
        keys = [b"%d" % number] * 2 if keyed else None
        # Without keys the producer decides: one that has not appended before would be new here.
        ids: dict[str, Any] = {"producer": CALL_IDS + number * 2 + keyed, "sequence": 0}
        return [
            list(await topic.append_many(rows["value"], keys=keys, **ids)),
            list(await topic.append_arrow(pa.record_batch(rows), **ids)),
        ]

    async def run() -> None:
        async with forebay.aio.open(tmp_path / "log", QUICK) as log:
            topic = await log.create_topic("t", partitions=4)
            first = [await send(topic, number, keyed=keyed) for number in range(6) for keyed in (True, False)]
            await log.alter_topic("t", partitions=8)
        # Nothing is open in the next life: to place a repeat the shards of its first attempt are opened by workers.
        async with forebay.aio.open(tmp_path / "log", QUICK) as log:
            topic = await log.topic("t")
            again = [await send(topic, number, keyed=keyed) for number in range(6) for keyed in (True, False)]
            assert again == first
            assert len([record async for record in topic.read()]) == 24

    asyncio.run(run())


@pytest.mark.slow
def test_every_call_is_stored_once_however_often_partitions_are_added_and_it_is_repeated(
    tmp_path: Path, ledger: Ledger
) -> None:
    for seed in sampled(range(60), one_in=8, seed="added partitions"):
        rng = random.Random(seed)
        engine = ENGINES[rng.choice([*ENGINES][:3])]
        made: dict[tuple[int, int], tuple[list[bytes], list[bytes] | None, list[int]]] = {}
        partitions = rng.randint(1, 4)
        with forebay.open(tmp_path / f"log{seed}", QUICK) as storage:
            storage.create_topic("t", partitions=partitions, **engine)
        for _ in range(3):
            with forebay.open(tmp_path / f"log{seed}", QUICK) as storage:
                topic = storage.topic("t")
                for _ in range(25):
                    act = rng.random()
                    if act < 0.1 and partitions < 12:
                        partitions += rng.randint(1, 3)
                        storage.alter_topic("t", partitions=partitions)
                        continue
                    if act < 0.5 and made:
                        producer, sequence = rng.choice([*made])
                    else:
                        producer = CALL_IDS + rng.randrange(6)
                        sequence = max([last for one, last in made if one == producer], default=-1) + 1
                    values, keys, offsets = made.get((producer, sequence), _drawn(rng, producer, sequence))
                    got = list(topic.append_many(values, keys=keys, producer=producer, sequence=sequence))
                    assert sorted(offsets) in ([], sorted(got)), (seed, producer, sequence)
                    made[producer, sequence] = (values, keys, got)
                    ledger.count("calls over added partitions", kind="repeated" if offsets else "new")
                assert _stored(topic) == sorted(value for values, _, _ in made.values() for value in values), seed


def _drawn(rng: random.Random, producer: int, sequence: int) -> tuple[list[bytes], list[bytes] | None, list[int]]:
    """A call: a producer has keys always, or never."""
    values = [b"%d-%d-%d" % (producer, sequence, place) for place in range(rng.randint(1, 4))]
    return values, None if producer % 3 == 0 else [rng.choice(KEYS) for _ in values], []
