"""How long one append takes at a steady pace, by one thread; and how many of them fit into a second."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bench import payload, stores
from bench.plan import Contender, Figures, Plan
from bench.results import Limit, Result, at_least, at_most, result

WARM = 2_000


def run(plan: Plan) -> Iterator[Result]:
    """All figures of the case."""
    for durability, rate, p99_max in (("memory", 100_000, 5.0), ("disk", 20_000, 50.0)):
        contenders: dict[str, Contender | None] = {
            "forebay": _paced(plan, durability, "append", rate),
            "bare write": _paced_bare(plan, rate),
        }
        found = plan.compare(contenders)
        for metric in ("p50", "p99", "p99.9", "p99 from the due time"):
            limits: list[Limit] = [at_most(p99_max)] if metric == "p99" else []
            peers = {"bare write": found["bare write"][metric]}
            name = f"append, {durability}, {rate // 1000} k/s, {metric}"
            yield result("latency", name, "µs", found["forebay"][metric], peers, limits)
    yield from _rates(plan)


def _rates(plan: Plan) -> Iterator[Result]:
    """As fast as it goes."""
    contenders: dict[str, Contender | None] = {"bare write": _flat_out_bare(plan)}
    for durability in ("memory", "disk"):
        contenders[f"append, {durability}"] = _flat_out(plan, durability, "append")
        contenders[f"append_nowait, {durability}"] = _flat_out(plan, durability, "append_nowait")
    found = plan.compare(contenders)
    bare = {"bare write": found.pop("bare write")["rate"]}
    for name, figures in found.items():
        limits = [at_least(0.8, "bare write")] if name == "append, disk" else []
        yield result("latency", f"{name}, one thread, flat out", "records/s", figures["rate"], bare, limits)


def _paced(plan: Plan, durability: str, verb: str, rate: int) -> Contender:
    def contender() -> Figures:
        count = int(rate * plan.sizes.paced_seconds)
        records = payload.values(count + WARM)
        with stores.opened_ours(plan.fresh(), durability) as topic:
            figures = _pace(getattr(topic, verb), records, rate)
            topic.flush()
            payload.check("forebay", records, (record.value or b"" for record in topic.read()))
        return figures

    return contender


def _paced_bare(plan: Plan, rate: int) -> Contender:
    def contender() -> Figures:
        records = payload.values(int(rate * plan.sizes.paced_seconds) + WARM)
        with stores.opened(stores.BareFile, plan.fresh(), durable=False) as store:
            prepared = [store.prepare([value], 0) for value in records]
            figures = _pace(store.write, prepared, rate)
            payload.check("bare write", records, store.values())
        return figures

    return contender


def _pace(call: Callable[[Any], object], arguments: Any, rate: int) -> Figures:
    """Calls at their due times, one thread; each is timed by itself and from when it was due."""
    for argument in arguments[:WARM]:
        call(argument)
    paced = arguments[WARM:]
    now = time.perf_counter_ns
    step = 1_000_000_000 / rate
    taken = np.zeros(len(paced), np.int64)
    late = np.zeros(len(paced), np.int64)
    begun = now()
    for number, argument in enumerate(paced):
        due = begun + int(number * step)
        while (start := now()) < due:
            pass
        call(argument)
        end = now()
        taken[number] = end - start
        late[number] = end - due
    points = {"p50": 50.0, "p99": 99.0, "p99.9": 99.9}
    figures = {name: float(np.percentile(taken, point)) / 1000 for name, point in points.items()}
    return figures | {"p99 from the due time": float(np.percentile(late, 99)) / 1000}


def _flat_out(plan: Plan, durability: str, verb: str) -> Contender:
    def contender() -> Figures:
        # Below the limit of the queue, so that append_nowait is never refused.
        records = payload.values(max(1_000, plan.sizes.bulk_records // 10))
        with stores.opened_ours(plan.fresh(), durability) as topic:
            topic.append(b"first")
            call = getattr(topic, verb)
            begun = time.perf_counter()
            for value in records:
                call(value)
            elapsed = time.perf_counter() - begun
            topic.flush()
            payload.check("forebay", records, (record.value or b"" for record in topic.read(1)))
        return {"rate": len(records) / elapsed}

    return contender


def _flat_out_bare(plan: Plan) -> Contender:
    """A `write(2)` per record and nothing else, of as many bytes as our frame has."""

    def contender() -> Figures:
        records = payload.values(max(1_000, plan.sizes.bulk_records // 10))
        path = plan.fresh()
        with stores.opened(stores.BareFile, path, durable=False) as store:
            prepared = [store.prepare([value], 0) for value in records]
            fd = os.open(path / "bare", os.O_WRONLY)
            try:
                begun = time.perf_counter()
                for frame in prepared:
                    os.write(fd, frame)
                elapsed = time.perf_counter() - begun
            finally:
                os.close(fd)
            payload.check("bare write", records, store.values())
        return {"rate": len(records) / elapsed}

    return contender
