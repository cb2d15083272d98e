"""Which partition a record goes to: Kafka's key hash, round robin, or what the caller says.

Keys hash as in Kafka's Java client (murmur2), so that a topic copied from there keeps its keys together.
One key at a time in plain Python, many at once by column with numpy; both give the same numbers.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from forebay.errors import Invalid

Key: TypeAlias = bytes | bytearray | memoryview
Hashes: TypeAlias = npt.NDArray[np.int32]
Partitions: TypeAlias = npt.NDArray[np.int64]

_SEED = 0x9747B28C
_MULTIPLIER = 0x5BD1E995
_MASK = 0xFFFFFFFF
_POSITIVE = 0x7FFFFFFF
_ROWS_MIN = 16
"""Fewer keys than this are hashed one by one: a numpy step costs about as much as 16 plain ones."""


def murmur2(key: Key) -> int:
    """Kafka's murmur2 of `key`, as the signed 32-bit number that Java shows."""
    length = len(key)
    state = _SEED ^ length
    for word in struct.unpack_from(f"<{length // 4}I", key):
        mixed = word * _MULTIPLIER & _MASK
        mixed = (mixed ^ mixed >> 24) * _MULTIPLIER & _MASK
        state = state * _MULTIPLIER & _MASK ^ mixed
    tail = length % 4
    if tail:
        state = (state ^ int.from_bytes(key[length - tail :], "little")) * _MULTIPLIER & _MASK
    state = (state ^ state >> 13) * _MULTIPLIER & _MASK
    state ^= state >> 15
    return state - (1 << 32) if state > _POSITIVE else state


def murmur2_many(keys: Sequence[Key]) -> Hashes:
    """`murmur2` of each key."""
    lengths = np.fromiter(map(len, keys), np.int64, len(keys))
    offsets = np.zeros(len(keys) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return murmur2_column(b"".join(keys), offsets)


def murmur2_column(values: Key, offsets: npt.NDArray[np.integer]) -> Hashes:
    """`murmur2` of each `values[offsets[i]:offsets[i + 1]]`, a binary column in Arrow's layout."""
    starts = offsets[:-1].astype(np.int64)
    lengths = offsets[1:].astype(np.int64) - starts
    if len(lengths) and (lengths == lengths[0]).all():
        longest_first = None
    else:
        longest_first = np.argsort(-lengths, kind="stable")
        starts, lengths = starts[longest_first], lengths[longest_first]
    # Four bytes behind the end, so that a word may be loaded where only a tail of a key is left.
    padded = bytes(values) + bytes(4)
    words = np.ndarray((len(padded) - 3,), "<u4", padded, strides=(1,))
    state = np.uint32(_SEED) ^ lengths.astype(np.uint32)
    rest = _mix_words(state, words, starts, lengths)
    _finish(state, words, starts, lengths)
    found = state.view(np.int32)
    for row in range(rest):
        found[row] = murmur2(padded[starts[row] : starts[row] + lengths[row]])
    if longest_first is None:
        return found
    hashes = np.empty(len(starts), np.int32)
    hashes[longest_first] = found
    return hashes


def _mix_words(
    state: npt.NDArray[np.uint32],
    words: npt.NDArray[np.uint32],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
) -> int:
    """Mix whole words, one position of all keys at a time; how many leading rows were left unfinished."""
    multiplier = np.uint32(_MULTIPLIER)
    counts = lengths // 4
    position = 0
    active = int(np.count_nonzero(counts > 0))
    while active >= _ROWS_MIN:
        mixed = words[starts[:active] + 4 * position] * multiplier
        mixed ^= mixed >> np.uint32(24)
        mixed *= multiplier
        state[:active] *= multiplier
        state[:active] ^= mixed
        position += 1
        active = int(np.searchsorted(-counts, -position, side="left"))
    return active


def _finish(
    state: npt.NDArray[np.uint32],
    words: npt.NDArray[np.uint32],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
) -> None:
    multiplier = np.uint32(_MULTIPLIER)
    tails = lengths % 4
    kept = (np.uint32(1) << (8 * tails).astype(np.uint32)) - np.uint32(1)
    with_tail = (state ^ words[starts + lengths - tails] & kept) * multiplier
    np.copyto(state, with_tail, where=tails > 0)
    state ^= state >> np.uint32(13)
    state *= multiplier
    state ^= state >> np.uint32(15)


def partition_of_key(key: Key, partitions: int) -> int:
    """Where Kafka's default partitioner puts this key."""
    return (murmur2(key) & _POSITIVE) % partitions


def partitions_of_key(key: Key, partitions: int, earlier: Sequence[int]) -> list[int]:
    """Where the records of a key are that went by its hash: today's partition first, then those of generations before.

    `earlier` are the numbers of partitions that the topic had, oldest first. Every generation only added partitions,
    so what a key has in an older place was appended earlier.
    """
    counts = (partitions, *reversed(earlier))
    return list(dict.fromkeys(partition_of_key(key, count) for count in counts))


def partitions_of_keys(values: Key, offsets: npt.NDArray[np.integer], partitions: int) -> Partitions:
    """`partition_of_key` of each `values[offsets[i]:offsets[i + 1]]`, a binary column in Arrow's layout."""
    return (murmur2_column(values, offsets) & _POSITIVE).astype(np.int64) % partitions


def partition_of_producer(producer: int, partitions: int) -> int:
    """Where the keyless records of an idempotent producer go: a function of its id alone, so that a
    repeated append meets the same shard, and so its own first attempt, after any restart."""
    return partition_of_key(struct.pack("<Q", producer), partitions)


def check_partition(partition: int, partitions: int) -> None:
    """Raise `Invalid` unless a topic with so many partitions has this one."""
    if not 0 <= partition < partitions:
        raise Invalid(f"partition is {partition}; this topic has 0 to {partitions - 1}")


def resolve_named(
    partition: int | None, named: Partitions | None, partitions: int
) -> tuple[int | None, Partitions | None]:
    """The partition that a call names for all its records, and those that they name, as one number if that is enough.

    `named` has an entry for each record, -1 for one that names none. `Invalid` for a partition that a topic with so
    many does not have, and for a record that names another one than the call.
    """
    if partition is not None:
        check_partition(partition, partitions)
    if named is None:
        return partition, None
    if int(named.max()) >= partitions:
        row = int(np.argmax(named >= partitions))
        raise Invalid(f"record {row} names partition {named[row]}; this topic has 0 to {partitions - 1}")
    wanted = int(named[0]) if partition is None else partition
    others = named != wanted if partition is None else (named >= 0) & (named != wanted)
    if not others.any():
        return (wanted, None) if wanted >= 0 else (None, None)
    if partition is None:
        return None, named
    row = int(np.argmax(others))
    raise Invalid(f"record {row} names partition {named[row]}, and the call names {partition}: give one of them")


def placed_by(named: Partitions, others: int | Partitions) -> Partitions:
    """The partition that each record names, and those of `others` for records that name none (-1)."""
    return np.where(named >= 0, named, others)


class Partitioner:
    """Chooses partitions for one topic handle. Safe for concurrent calls."""

    def __init__(self, *counts: int, turns: Iterator[int] | None = None) -> None:
        """`counts` are how many partitions the topic has, and had before any were added, the newest first.

        `turns` counts the records and batches without a key; handles that share it continue one sequence.
        """
        self.counts = counts
        self._turns = itertools.count() if turns is None else turns

    @property
    def partitions(self) -> int:
        """How many partitions there are."""
        return self.counts[0]

    def choose(self, key: Key | None, *, partition: int | None = None, producer: int = 0) -> int:
        """One record's partition: the one asked for, else by key, else by producer (0 means none), else in turn."""
        if partition is not None:
            return self._checked(partition)
        if key is None and not producer:
            # As `partitions`, without that call: most single appends come by here.
            return next(self._turns) % self.counts[0]
        if key is not None:
            return partition_of_key(key, self.partitions)
        return self._keyless(producer)

    def choose_many(
        self,
        keys: Sequence[Key | None] | None,
        count: int,
        *,
        partition: int | None = None,
        producer: int = 0,
        named: Partitions | None = None,
    ) -> int | Partitions:
        """The partitions of one call's records: a single number where all go together, else one per record.

        Keyless records of one call stay together, so that an append without keys is one atomic batch. `partition` and
        `named` are as `resolve_named` gives them.
        """
        if partition is not None:
            return self._checked(partition)
        if named is not None:
            return placed_by(named, self.choose_many(keys, count, producer=producer))
        if keys is None:
            return self._keyless(producer)
        if len(keys) != count:
            raise Invalid(f"{len(keys)} keys for {count} records: give one key, or None, for each")
        if self.partitions == 1:
            return 0
        chosen = (murmur2_many([b"" if key is None else key for key in keys]) & _POSITIVE).astype(np.int64)
        chosen %= self.partitions
        keyless = [row for row, key in enumerate(keys) if key is None]
        if keyless:
            chosen[keyless] = self._keyless(producer)
        return chosen

    def choose_column(
        self,
        keys: Key,
        offsets: npt.NDArray[np.integer],
        present: npt.NDArray[np.bool_] | None,
        *,
        producer: int = 0,
    ) -> Partitions:
        """As `choose_many`, for a column of keys in Arrow's layout; `present` says which of them are not null."""
        chosen = partitions_of_keys(keys, offsets, self.partitions)
        if present is not None:
            chosen[~present] = self._keyless(producer)
        return chosen

    def _keyless(self, producer: int) -> int:
        if producer:
            return partition_of_producer(producer, self.partitions)
        return next(self._turns) % self.partitions

    def _checked(self, partition: int) -> int:
        check_partition(partition, self.partitions)
        return partition
