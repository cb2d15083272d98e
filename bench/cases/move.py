"""A topic moved to another data directory: from its sealing here to the first append there, nothing exported before."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

import forebay
from bench import exports, payload
from bench.plan import Contender, Figures, Plan
from bench.results import Result, result
from forebay.settings import GIB

KILOBYTE = 1024
MODES = {"directory": "shared_fs", "s3": "object_store"}


def run(plan: Plan) -> Iterator[Result]:
    """All figures of the case."""
    sizes = {plan.sizes.moved_records: 1, plan.sizes.kilobyte_records: plan.sizes.export_times}
    with exports.s3_server(plan) as endpoint:
        places = {"directory": str(plan.shared("moved", lambda path: None)), "s3": endpoint}
        for kind, place in places.items():
            if place is not None:
                for count, times in sizes.items():
                    yield _moved(plan, kind, place, payload.values(count, KILOBYTE), times)


def _moved(plan: Plan, kind: str, place: str, values: Sequence[bytes], times: int) -> Result:
    log = exports.sealed_log(plan, values, times=times, file_bytes=4 * GIB)
    with exports.opened_store(kind, place) as store:
        contenders: dict[str, Contender | None] = {
            "forebay": _move(plan, kind, place, values, times),
            "plain upload": (lambda: {"s": exports.plain_upload(store, log)[0]}) if plan.peers else None,
        }
        found = plan.compare(contenders)
    size = len(values) * times * KILOBYTE
    name = f"{size / 1e6:,.0f} MB not exported, by {kind}: from seal to first append elsewhere"
    return result("move", name, "s", found["forebay"]["s"], {"plain upload": found["plain upload"].get("s")})


def _move(plan: Plan, kind: str, place: str, values: Sequence[bytes], times: int) -> Contender:
    rounds = itertools.count()

    def contender() -> Figures:
        root = plan.fresh()
        store = exports.settings_of(kind, place, f"move-{len(values)}-{next(rounds)}")
        settings: dict[str, Any] = {
            "storage": {"mode": MODES[kind]},
            "metadata": {"path": str(root / "metadata.sqlite")},
            "wal": {"rotate_bytes_max": 4 * GIB},
            "store": msgspec.to_builtins(store),
        }
        with forebay.open(str(root / "a"), settings) as here, forebay.open(str(root / "b"), settings) as there:
            topic = here.create_topic("bench/t", durability="disk")
            for _ in range(times):
                for batch in payload.batches(values):
                    topic.append_many(batch)
            begun = time.perf_counter()
            here.seal_topic("bench/t")
            moved = there.topic("bench/t")
            offset = moved.append(b"first elsewhere")
            elapsed = time.perf_counter() - begun
            payload.check_count("move (next offset)", len(values) * times, offset)
            expected = [*(list(values) * times), b"first elsewhere"]
            payload.check("move", expected, (record.value or b"" for record in moved.read()))
            there.delete_topic("bench/t")
        return {"s": elapsed}

    return contender
