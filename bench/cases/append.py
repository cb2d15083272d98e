"""Appends in batches, in process: 1000 records of 100 B, not waited for by the disk and synced each; 1 KiB in bulk.

The peers are libraries in the same process too. Servers stand beside the broker, in the case `http`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bench import payload, stores
from bench.plan import Contender, Figures, Plan
from bench.results import Result, at_least, result

KIB = 1024
SLOW = {"sqlite": 4}
"""By what the records of peers are divided that would take too long."""


def run(plan: Plan) -> Iterator[Result]:
    """All figures of the case."""
    for durable in (False, True):
        found = plan.compare(_contenders(plan, durable=durable))
        ours = found.pop("forebay")["rate"]
        peers = {name: figures.get("rate") for name, figures in found.items()}
        if durable:
            limits = [at_least(1.3, "lmdb"), at_least(5, "sqlite"), at_least(0.8, "bare loop")]
        else:
            limits = [at_least(1.3, "lmdb"), at_least(2, "rocksdb")]
        metric = f"append_many 1000 × 100 B, {'fsync' if durable else 'disk'}"
        yield result("append", metric, "records/s", ours, peers, limits)
    yield _bulk(plan)


def _contenders(plan: Plan, *, durable: bool) -> dict[str, Contender | None]:
    count = plan.sizes.durable_batches * payload.BATCH if durable else plan.sizes.bulk_records
    found: dict[str, Contender | None] = {
        "forebay": lambda: _embedded(plan, stores.Forebay, count, durable=durable),
        "bare loop": lambda: _embedded(plan, stores.BareFile, count, durable=durable),
    }
    for name, kind in stores.EMBEDDED.items():
        found[name] = _peer(plan, name, kind, count, durable=durable)
    found["lmdb, keys ready"] = _peer(plan, "lmdb", stores.LmdbKeyed, count, durable=durable)
    return found


def _peer(plan: Plan, name: str, kind: type[Any], count: int, *, durable: bool) -> Contender | None:
    if not plan.peers or not stores.available(name):
        return None
    return lambda: _embedded(plan, kind, max(1_000, count // SLOW.get(name, 1)), durable=durable)


def _embedded(plan: Plan, kind: type[Any], count: int, *, durable: bool) -> Figures:
    records = payload.values(max(count, plan.sizes.bulk_records))[:count]
    with stores.opened(kind, plan.fresh(), durable=durable) as store:
        return _timed(kind.__name__, store, records)


def _timed(name: str, store: stores.Store, records: Sequence[bytes]) -> Figures:
    prepared, first = [], 0
    for batch in payload.batches(records):
        prepared.append(store.prepare(batch, first))
        first += len(batch)
    begun = time.perf_counter()
    for batch in prepared:
        store.write(batch)
    elapsed = time.perf_counter() - begun
    payload.check(name, records, store.values())
    return {"rate": len(records) / elapsed}


def _bulk(plan: Plan) -> Result:
    """1 KiB records up to the last byte synced, against the same bytes in pieces of 1 MiB and one sync."""
    records = payload.values(plan.sizes.kilobyte_records, KIB)

    def ours() -> Figures:
        with stores.opened(stores.Forebay, plan.fresh(), durable=False) as store:
            begun = time.perf_counter()
            for batch in payload.batches(records):
                store.write(batch)
            store.topic.flush()
            elapsed = time.perf_counter() - begun
            payload.check("forebay", records, store.values())
        return {"rate": len(records) * KIB / elapsed / 1e6}

    def sequential() -> Figures:
        pieces = [b"".join(batch) for batch in payload.batches(records, KIB)]
        fd = os.open(plan.fresh() / "sequential", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            begun = time.perf_counter()
            for piece in pieces:
                os.write(fd, piece)
            os.fdatasync(fd)
            elapsed = time.perf_counter() - begun
            payload.check_count("sequential file", len(records) * KIB, os.fstat(fd).st_size)
        finally:
            os.close(fd)
        return {"rate": len(records) * KIB / elapsed / 1e6}

    found = plan.compare({"forebay": ours, "sequential write": sequential})
    peers = {"sequential write": found["sequential write"]["rate"]}
    limits = [at_least(0.8, "sequential write")]
    return result("append", "1 KiB records in bulk, flushed", "MB/s", found["forebay"]["rate"], peers, limits)
