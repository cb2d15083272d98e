"""How many bytes history takes: frames as they are, frames with zstd, and Parquet after compaction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from forebay.testing.simulated.clock import ManualClock
from tests.compacting.directly import catalog_of, compacted
from tests.ledger import Ledger
from tests.support.environments import directories
from tests.support.environments.directories import Environment
from tests.support.soak import SOAK

EVENTS: Final = 500_000 if SOAK else 30_000
BATCH: Final = 1_000
TIME: Final = 1_700_000_000_000
TYPES: Final = ("page_view", "add_to_cart", "order_placed", "payment")
COUNTRIES: Final = ("DE", "FR", "NL", "US")
DEVICES: Final = ("ios", "android", "web")
PATHS: Final = ("/cart", "/checkout", "/search", "/product", "/account/orders")


def events() -> list[tuple[bytes, bytes, int]]:
    """Key, value and time of each: clicks and orders of a shop, with ids that say nothing of each other."""
    chance = ManualClock(seed=7)
    found = []
    for number in range(EVENTS):
        below: list[int] = np.frombuffer(chance.random_bytes(48), "<u4").tolist()
        customer = f"c-{below[0] % 20_000:06d}"
        prices = below[8 : 8 + below[7] % 3]
        event = {
            "event_id": chance.random_bytes(16).hex(),
            "type": TYPES[below[1] % len(TYPES)],
            "occurred_at": f"2023-11-14T22:{number // 60 % 60:02d}:{number % 60:02d}.{below[2] % 1000:03d}Z",
            "customer": {"id": customer, "country": COUNTRIES[below[3] % 4], "tier": below[3] % 7},
            "page": {"path": PATHS[below[4] % 5], "referrer": "https://shop.example/", "ms": below[5] % 3_000},
            "items": [{"sku": f"SKU-{price % 3_000:05d}", "price": price % 20_000 / 100} for price in prices],
            "device": DEVICES[below[6] % 3],
        }
        found.append((customer.encode(), json.dumps(event).encode(), TIME + number * 37))
    return found


def stored(
    environment: Environment, topic_name: str, compression: str, made: list[tuple[bytes, bytes, int]]
) -> tuple[int, int]:
    """Bytes of the segments, and with their indexes, of a topic with these events; then it is compacted."""
    with environment.open("one") as log:
        topic = log.create_topic(topic_name, compression=compression)
        for first in range(0, len(made), BATCH):
            keys, values, times = (list(column) for column in zip(*made[first : first + BATCH], strict=True))
            topic.append_many(values, keys=keys, timestamps=times)
            if first % (8 * BATCH) == 0:
                log.export_topic(topic_name)
        log.export_topic(topic_name)
        pieces = catalog_of(log, topic).descriptors()
        return sum(piece.bytes for piece in pieces), sum(piece.bytes + piece.index_bytes for piece in pieces)


@pytest.mark.slow
def test_compacted_history_takes_less_than_frames(tmp_path: Path, ledger: Ledger) -> None:
    environment, made = directories.shared_fs(tmp_path), events()
    plain, plain_whole = stored(environment, "shop/plain", "none", made)
    zstd, zstd_whole = stored(environment, "shop/zstd", "zstd", made)
    compacted(environment, ["shop/plain"])
    with environment.open("one") as log:
        pieces = catalog_of(log, log.topic("shop/plain")).descriptors()
    parquet, parquet_whole = (
        sum(piece.bytes for piece in pieces),
        sum(piece.bytes + piece.index_bytes for piece in pieces),
    )

    for what, size in (("frames", plain_whole), ("zstd frames", zstd_whole), ("compacted", parquet_whole)):
        ledger.count("bytes of 1,000 JSON events with indexes", n=size * 1_000 // EVENTS, stored=what)
    ledger.count("compacted history, percent", n=round(100 * parquet_whole / plain_whole), of="uncompressed frames")
    ledger.count("compacted history, percent", n=round(100 * parquet_whole / zstd_whole), of="zstd frames")
    assert parquet_whole <= 0.4 * plain_whole
    assert parquet <= 0.4 * plain and parquet < zstd
