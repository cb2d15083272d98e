"""Cost must grow with the work: double the records, double the time; and many topics cost what they hold."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from bench import children, payload, stores
from bench.cases.read import exhaust
from bench.plan import Contender, Figures, Plan
from bench.results import Limit, Result, at_most, result


def run(plan: Plan) -> Iterator[Result]:
    """All figures of the case."""
    yield from _growth(plan)
    yield from _topics(plan)


def _growth(plan: Plan) -> Iterator[Result]:
    sizes = plan.sizes.growth
    contenders: dict[str, Contender | None] = {str(count): _append_and_read(plan, count) for count in sizes}
    found = plan.compare(contenders)
    for metric in ("append", "read"):
        least = found[str(sizes[0])][metric]
        for count in sizes[1:]:
            # As many times the records: that many times the time, and a fifth.
            peers = {"in proportion": least * count / sizes[0]}
            ours = found[str(count)][metric]
            name = f"{metric} {count:,} records, {count // sizes[0]} × the least"
            yield result("scale", name, "s", ours, peers, [at_most(1.2, "in proportion")])


def _append_and_read(plan: Plan, count: int) -> Contender:
    def contender() -> Figures:
        records = payload.values(max(plan.sizes.growth))[:count]
        batches = payload.batches(records)
        with stores.opened(stores.Forebay, plan.fresh(), durable=False) as store:
            begun = time.perf_counter()
            for batch in batches:
                store.write(batch)
            store.topic.flush()
            middle = time.perf_counter()
            exhaust(store.read())
            end = time.perf_counter()
            payload.check("forebay", records, store.values())
        return {"append": middle - begun, "read": end - middle}

    return contender


def topics_opened(plan: Plan, count: int) -> Figures:
    """What it takes to open many topics whose owner was killed; measured once in a run."""

    def make(path: Path) -> None:
        children.run("make_topics", path / "data", count)

    path = plan.shared(f"{count} topics", make)
    if count not in plan.opened:
        plan.opened[count] = children.run("open_topics", path / "data", count, plan.sizes.idle_seconds)
    return plan.opened[count]


def _topics(plan: Plan) -> Iterator[Result]:
    for count in plan.sizes.topics:
        figures = topics_opened(plan, count)
        limits: list[Limit] = [at_most(10)] if count == max(plan.sizes.topics) else []
        yield result("scale", f"open {count:,} topics after a kill", "s", figures["open"], {}, limits)
        yield result("scale", f"append one record to each of {count:,} topics", "s", figures["append"])
        yield result("scale", f"{count:,} idle topics: share of a core", "share", figures["idle"])
