"""History read from an S3 server on loopback, beside a plain ranged download of the same bytes from it."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench import exports, payload
from bench.plan import Contender, Figures, Plan
from bench.results import Result, at_least, at_most, result
from forebay.blobs import BlobStore
from forebay.catalog import ShardCatalog
from forebay.format.metadata.descriptor import SegmentDescriptor
from forebay.history import BLOCK_BYTES, BLOCKS_AHEAD, FIRST_BYTES, History

OPENINGS = 20
ONE_BY_ONE = "ranges one by one"
TWICE = "ranges twice as large"
AHEAD = "ranges fetched ahead"


def run(plan: Plan) -> Iterator[Result]:
    """All figures of the case."""
    records = payload.values(plan.sizes.records)
    log = exports.sealed_log(plan, records)
    with exports.s3_server(plan) as endpoint:
        places = {"directory": str(plan.shared("history store", lambda path: None)), "s3": endpoint}
        for kind, place in places.items():
            if place is not None:
                with exports.opened_store(kind, place) as store:
                    yield from _figures(plan, kind, store, log)


def _figures(plan: Plan, kind: str, store: BlobStore, log: Path) -> Iterator[Result]:
    place = plan.shared(f"catalog of {kind}", lambda path: None)
    with exports.opened_topic(log) as topic, exports.opened_catalog(place, topic.spec.topic_id) as catalog:
        exports.export(topic, catalog, store)
        contenders: dict[str, Contender | None] = {
            "forebay": _scan(plan, catalog, store),
            ONE_BY_ONE: _download(catalog, store, _one_by_one) if plan.peers else None,
            TWICE: _download(catalog, store, _twice) if plan.peers else None,
            AHEAD: _download(catalog, store, _ahead) if plan.peers else None,
        }
        found = plan.compare(contenders)
        ours = found["forebay"]
        peers = {name: found[name].get("bytes") for name in (ONE_BY_ONE, TWICE, AHEAD)}
        limits = [at_least(0.7, name) for name in peers] if kind == "s3" else []
        yield result("history", f"read from {kind}, to batches", "MB/s", ours["bytes"], peers, limits)
        yield result("history", f"read from {kind}, to records", "records/s", ours["records"])
        openings = plan.compare({"forebay": _openings(plan, catalog, store)})["forebay"]
        for name, most in (("cold", 50), ("hot", 2)):
            metric = f"first record from {kind}, {name}"
            peer = {"one range of as many bytes": openings["range"]}
            yield result("history", metric, "ms", openings[name], peer, [at_most(most)])


def _scan(plan: Plan, catalog: ShardCatalog, store: BlobStore) -> Contender:
    records = payload.values(plan.sizes.records)

    def contender() -> Figures:
        size = sum(piece.bytes for piece in catalog.descriptors())
        with exports.opened_history(catalog, store) as history:
            begun = time.perf_counter()
            found = sum(batch.end - batch.base for batch in exports.batches_of(history))
            to_batches = time.perf_counter() - begun
        with exports.opened_history(catalog, store) as history:
            begun = time.perf_counter()
            as_records = sum(1 for batch in exports.batches_of(history) for _ in batch.records(0))
            to_records = time.perf_counter() - begun
        with exports.opened_history(catalog, store) as history:
            payload.check("history", records, exports.values_of(history))
        payload.check_count("history (batches)", len(records), found)
        payload.check_count("history (records)", len(records), as_records)
        return {"bytes": size / to_batches / 1e6, "records": len(records) / to_records}

    return contender


def _download(
    catalog: ShardCatalog, store: BlobStore, chunks: Callable[[BlobStore, str, int], Iterator[bytes]]
) -> Contender:
    def contender() -> Figures:
        pieces = catalog.descriptors()
        begun = time.perf_counter()
        found = sum(len(chunk) for piece in pieces for chunk in chunks(store, piece.object_key, piece.bytes))
        elapsed = time.perf_counter() - begun
        payload.check_count("download", sum(piece.bytes for piece in pieces), found)
        return {"bytes": found / elapsed / 1e6}

    return contender


def _one_by_one(store: BlobStore, key: str, size: int, range_bytes: int = BLOCK_BYTES) -> Iterator[bytes]:
    for start in range(0, size, range_bytes):
        yield store.get_range(key, start, min(start + range_bytes, size))


def _twice(store: BlobStore, key: str, size: int) -> Iterator[bytes]:
    return _one_by_one(store, key, size, 2 * BLOCK_BYTES)


def _ahead(store: BlobStore, key: str, size: int) -> Iterator[bytes]:
    """As many ranges under way at once as the reader of history has."""
    return store.read(key, 0, size, chunk_bytes=BLOCK_BYTES, ahead=BLOCKS_AHEAD)


def _openings(plan: Plan, catalog: ShardCatalog, store: BlobStore) -> Contender:
    """From asking to the first record somewhere: by a new reader (cold), and by one that has read here before (hot)."""
    records = payload.values(plan.sizes.records)
    chance = random.Random(1)

    def first(history: History) -> float:
        offset = chance.randrange(len(records))
        begun = time.perf_counter()
        value = next(exports.batches_of(history, offset)).values()[0]
        elapsed = time.perf_counter() - begun
        payload.check("history", [records[offset]], [value or b""])
        return elapsed * 1000

    def cold() -> float:
        begun = time.perf_counter()
        with exports.opened_history(catalog, store) as history:
            opened = (time.perf_counter() - begun) * 1000
            return opened + first(history)

    def plain(piece: SegmentDescriptor) -> float:
        start = chance.randrange(max(1, piece.bytes - FIRST_BYTES))
        begun = time.perf_counter()
        store.get_range(piece.object_key, start, start + FIRST_BYTES)
        return (time.perf_counter() - begun) * 1000

    def contender() -> Figures:
        pieces = catalog.descriptors()
        with exports.opened_history(catalog, store) as history:
            for piece in pieces:
                history.read(piece.start)
            hot = [first(history) for _ in range(OPENINGS)]
        return {
            "cold": statistics.median(cold() for _ in range(OPENINGS)),
            "hot": statistics.median(hot),
            "range": statistics.median(plain(chance.choice(pieces)) for _ in range(OPENINGS)),
        }

    return contender
