"""Kafka's key hash by table and by property; the turns of keyless records."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import Invalid
from forebay.partitioning import (
    Partitioner,
    murmur2,
    murmur2_column,
    murmur2_many,
    partition_of_key,
    partition_of_producer,
    resolve_named,
)

KAFKA_VECTORS = [
    (b"21", -973932308),
    (b"foobar", -790332482),
    (b"a-little-bit-long-string", -985981536),
    (b"a-little-bit-longer-string", -1486304829),
    (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
    (b"abc", 479470107),
]


@pytest.mark.parametrize(("key", "expected"), KAFKA_VECTORS)
def test_keys_hash_as_in_kafka(key: bytes, expected: int) -> None:
    assert murmur2(key) == expected
    assert murmur2(memoryview(key)) == expected
    assert murmur2_many([key] * 20).tolist() == [expected] * 20
    assert partition_of_key(key, 7) == (expected & 0x7FFFFFFF) % 7


@given(st.lists(st.binary(max_size=40), max_size=80))
def test_many_keys_hash_as_one_by_one(keys: list[bytes]) -> None:
    assert murmur2_many(keys).tolist() == [murmur2(key) for key in keys]


def test_a_few_long_keys_among_many_short_ones_hash_as_one_by_one() -> None:
    keys = [bytes([row % 251]) * (row % 23) for row in range(500)] + [b"\xff" * 5_000, b"x" * 70_001]

    assert murmur2_many(keys).tolist() == [murmur2(key) for key in keys]


def test_a_column_need_not_start_at_its_buffer() -> None:
    values = b"unused" + b"".join(key for key, _ in KAFKA_VECTORS)
    offsets = np.cumsum([6] + [len(key) for key, _ in KAFKA_VECTORS]).astype(np.int32)

    assert murmur2_column(values, offsets).tolist() == [expected for _, expected in KAFKA_VECTORS]


def test_keyless_records_take_turns() -> None:
    partitioner = Partitioner(3)

    assert [partitioner.choose(None) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_turns_are_even_under_concurrent_calls() -> None:
    partitioner = Partitioner(4)
    chosen: list[int] = []
    threads = [
        threading.Thread(target=lambda: chosen.extend([partitioner.choose(None) for _ in range(1_000)]))
        for _ in range(4)
    ]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert set(Counter(chosen).values()) == {1_000}


@given(st.integers(1, 2**64 - 1), st.integers(1, 1024))
def test_an_idempotent_producer_without_keys_stays_in_one_partition(producer: int, partitions: int) -> None:
    first, second = Partitioner(partitions), Partitioner(partitions)
    first.choose(None)

    assert first.choose(None, producer=producer) == second.choose(None, producer=producer)
    assert first.choose_many(None, 5, producer=producer) == partition_of_producer(producer, partitions)


def test_a_key_goes_before_the_producer_and_the_caller_before_both() -> None:
    partitioner = Partitioner(8)

    assert partitioner.choose(b"42", producer=9) == partition_of_key(b"42", 8)
    assert partitioner.choose(b"42", partition=5, producer=9) == 5
    assert partitioner.choose_many([b"42"], 1, partition=5) == 5
    assert partitioner.choose(b"") == partition_of_key(b"", 8)


@given(st.lists(st.none() | st.binary(max_size=12), min_size=1, max_size=40), st.integers(2, 12))
def test_many_records_go_where_each_key_says_and_keyless_ones_together(keys: list[bytes | None], count: int) -> None:
    chosen = Partitioner(count).choose_many(keys, len(keys))

    assert not isinstance(chosen, int)
    assert chosen.tolist() == [0 if key is None else partition_of_key(key, count) for key in keys]


def test_one_partition_takes_everything() -> None:
    assert Partitioner(1).choose_many([b"a", None], 2) == 0
    assert Partitioner(1).choose_many(None, 2) == 0


def test_wrong_partitions_and_key_counts_are_refused() -> None:
    for partition in (-1, 4):
        with pytest.raises(Invalid, match="this topic has 0 to 3"):
            Partitioner(4).choose(None, partition=partition)
    with pytest.raises(Invalid, match="1 keys for 2 records"):
        Partitioner(4).choose_many([b"a"], 2)


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(-1, 7), st.sampled_from([None, b"a", b"b", b"c"])), min_size=1, max_size=30),
    st.none() | st.integers(0, 7),
)
def test_records_that_name_a_partition_go_there_and_the_others_as_if_alone(
    partitions: int, records: list[tuple[int, bytes | None]], partition: int | None
) -> None:
    named = np.array([number for number, _ in records])
    keys = [key for _, key in records]

    def chosen() -> list[int]:
        one, each = resolve_named(partition, named, partitions)
        found = Partitioner(partitions).choose_many(keys, len(keys), partition=one, producer=9, named=each)
        return [found] * len(keys) if isinstance(found, int) else found.tolist()

    is_beyond = any(number >= partitions for number in named) or (partition is not None and partition >= partitions)
    contradicts = partition is not None and any(number not in (-1, partition) for number in named)
    if is_beyond or contradicts:
        with pytest.raises(Invalid, match="partition"):
            chosen()
        return
    others = Partitioner(partitions).choose_many(keys, len(keys), partition=partition, producer=9)
    alone = [others] * len(keys) if isinstance(others, int) else others.tolist()
    assert chosen() == [number if number >= 0 else by_key for number, by_key in zip(named, alone, strict=True)]
