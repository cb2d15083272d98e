"""Sealed files made history: verified, uploaded and catalogued, beside a plain upload; and what it holds in memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from bench import children, exports, payload
from bench.plan import Contender, Figures, Plan
from bench.results import Result, at_most, result
from forebay.blobs import BlobStore
from forebay.settings import GIB

KILOBYTE = 1024
EXTRA_MB_MAX = 64


def run(plan: Plan) -> Iterator[Result]:
    """All figures of the case."""
    records = payload.values(plan.sizes.kilobyte_records, KILOBYTE)
    log = exports.sealed_log(plan, records)
    large = exports.sealed_log(plan, records, times=plan.sizes.export_times, file_bytes=4 * GIB)
    with exports.s3_server(plan) as endpoint:
        places = {"directory": str(plan.shared("export store", lambda path: None)), "s3": endpoint}
        for kind, place in places.items():
            if place is not None:
                yield _speed(plan, kind, place, log)
                yield from _memory(plan, kind, place, large)


def _speed(plan: Plan, kind: str, place: str, log: Path) -> Result:
    with exports.opened_store(kind, place) as store:
        contenders: dict[str, Contender | None] = {
            "forebay": _export(plan, store, log),
            "plain upload": _upload(store, log) if plan.peers else None,
        }
        found = plan.compare(contenders)
    peers = {"plain upload": found["plain upload"].get("ms")}
    return result("export", f"10 MB to {kind}", "ms", found["forebay"]["ms"], peers)


def _export(plan: Plan, store: BlobStore, log: Path) -> Contender:
    records = payload.values(plan.sizes.kilobyte_records, KILOBYTE)

    def contender() -> Figures:
        with (
            exports.opened_topic(log) as topic,
            exports.opened_catalog(plan.fresh(), topic.spec.topic_id) as catalog,
        ):
            begun = time.perf_counter()
            exporter = exports.export(topic, catalog, store)
            elapsed = time.perf_counter() - begun
            with exports.opened_history(catalog, store) as history:
                payload.check("export", records, exports.values_of(history))
            for stat in list(store.list(exporter.origin.prefix)):
                store.delete(stat.key)
        return {"ms": _ms_of_ten(elapsed, exporter.bytes)}

    return contender


def _upload(store: BlobStore, log: Path) -> Contender:
    return lambda: {"ms": _ms_of_ten(*exports.plain_upload(store, log))}


def _ms_of_ten(seconds: float, size: int) -> float:
    return seconds * 1000 / (size / 10e6)


def _memory(plan: Plan, kind: str, place: str, log: Path) -> Iterator[Result]:
    """All in one file: nothing of it may be held for its size."""
    count = plan.sizes.kilobyte_records * plan.sizes.export_times
    catalog = plan.shared(f"catalog of the large export to {kind}", lambda path: None)
    figures = children.run("export_weighed", log, catalog, kind, place)
    payload.check_count("export", count, int(figures["records"]))
    size = f"{figures['bytes'] / 1e9:.2f} GB in one file"
    limits = [at_most(EXTRA_MB_MAX)]
    yield result("export", f"{size} to {kind}: memory over the base", "MB", figures["extra"], {}, limits)
    figures = children.run("history_weighed", log, catalog, kind, place)
    payload.check_count("history", count, int(figures["records"]))
    yield result("export", f"{size} read back from {kind}: memory over the base", "MB", figures["extra"], {}, limits)
