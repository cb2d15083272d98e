"""The records that everybody writes, and how it is checked that they came back."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice

VALUE_BYTES = 100
BATCH = 1_000
PIECE = 100_000


class Wrong(Exception):
    """A contender lost or changed what it was given: its figure would be worthless."""


@lru_cache(maxsize=4)
def values(count: int, size: int = VALUE_BYTES) -> Sequence[bytes]:
    """Distinct values, the same in every run."""
    chance = random.Random(size)
    found: list[bytes] = []
    while len(found) < count:
        # In pieces: one call gives no more than 256 MiB.
        blob = chance.randbytes(min(PIECE, count - len(found)) * size)
        found += [blob[start : start + size] for start in range(0, len(blob), size)]
    return found


def batches(records: Sequence[bytes], size: int = BATCH) -> list[Sequence[bytes]]:
    """The records in batches."""
    return [records[start : start + size] for start in range(0, len(records), size)]


def check(name: str, expected: Sequence[bytes], found: Iterable[bytes]) -> None:
    """Exactly these values, in this order."""
    stream = iter(found)
    for first in range(0, len(expected), 10_000):
        part = expected[first : first + 10_000]
        if list(islice(stream, len(part))) != part:
            raise Wrong(f"{name} does not hold the records from {first} on as they were written")
    if next(stream, None) is not None:
        raise Wrong(f"{name} holds more than the {len(expected)} records that were written")


def check_repeated(name: str, batch: Sequence[bytes], times: int, found: Iterable[bytes]) -> None:
    """Exactly this batch, so many times."""
    stream, expected = iter(found), list(batch)
    for number in range(times):
        if list(islice(stream, len(expected))) != expected:
            raise Wrong(f"{name} does not hold batch {number} of {times} as it was written")
    if next(stream, None) is not None:
        raise Wrong(f"{name} holds more than {times} batches of {len(expected)} records")


def check_each(name: str, batch: Sequence[bytes], times: int, found: Iterable[bytes]) -> None:
    """Each of these distinct values so many times, in any order: where batches of several connections mix."""
    if Counter(found) != dict.fromkeys(batch, times):
        raise Wrong(f"{name} does not hold each of {len(batch)} records {times} times")


def check_count(name: str, expected: int, found: int) -> None:
    """As many as were written."""
    if expected != found:
        raise Wrong(f"{name} holds {found} records, {expected} were written")
