"""A made-up shop: orders by the million, the same ones at every run."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import NamedTuple

COUNTRIES = ("de", "fr", "nl", "at", "pl", "it")
ITEMS = ("lamp", "chair", "desk", "rug", "shelf", "plant", "clock", "mirror")
BATCH = 1000
START_MS = 1_790_000_000_000


class Batch(NamedTuple):
    """Orders by column, as `append_many` takes them, and what they are worth in cents."""

    values: list[bytes]
    keys: list[bytes]
    tags: list[str]
    timestamps: list[int]
    cents: int


def batches(count: int) -> Iterator[Batch]:
    """`count` orders in batches of a thousand."""
    chance = random.Random(7)
    made = 0
    while made < count:
        size = min(BATCH, count - made)
        yield _batch(chance, made, size)
        made += size


def _batch(chance: random.Random, first: int, size: int) -> Batch:
    values, keys, tags, timestamps, total = [], [], [], [], 0
    for number in range(first, first + size):
        customer = int(chance.random() ** 2 * 50_000)
        cents = 500 + int(chance.random() * 40_000)
        order = {"order": number, "customer": customer, "item": chance.choice(ITEMS), "cents": cents}
        values.append(json.dumps(order, separators=(",", ":")).encode())
        keys.append(b"%d" % customer)
        tags.append(COUNTRIES[customer % len(COUNTRIES)])
        timestamps.append(START_MS + number * 3)
        total += cents
    return Batch(values, keys, tags, timestamps, total)
