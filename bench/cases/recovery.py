"""Killed with SIGKILL, opened again: from `open()` to the first append, in a process that has its imports done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bench import children, payload, stores
from bench.plan import Contender, Figures, Plan
from bench.results import Result, at_most, result


def run(plan: Plan) -> Iterator[Result]:
    """All figures of the case."""
    yield from _active(plan)
    yield from _history(plan)


def killed(plan: Plan, count: int, batch: int, *, rotates: bool) -> Path:
    """A data directory whose owner was killed after `count` records; each opening must be killed again."""

    def make(path: Path) -> None:
        made = children.run("write_and_die", path / "data", count, batch, rotates)
        payload.check_count("forebay", count, int(made["records"]))

    return plan.shared(f"{count} records by {batch}{' with history' if rotates else ''}", make) / "data"


def _active(plan: Plan) -> Iterator[Result]:
    """Everything in the active file."""
    count = plan.sizes.records
    contenders: dict[str, Contender | None] = {}
    for batch in (payload.BATCH, 1):
        path = killed(plan, count, batch, rotates=False)
        contenders[str(batch)] = _recovered(path, count, rotates=False)
    has_rocks = plan.peers and stores.available("rocksdb")
    contenders["rocksdb"] = _rocks(plan) if has_rocks else None
    found = plan.compare(contenders)
    peers = {"rocksdb": found["rocksdb"].get("seconds")}
    for batch, limit in ((payload.BATCH, 0.1), (1, 1.0)):
        metric = f"restart with {count:,} records written {'one by one' if batch == 1 else f'by {batch}'}"
        yield result("recovery", metric, "s", found[str(batch)]["seconds"], peers, [at_most(limit, "rocksdb")])


def _history(plan: Plan) -> Iterator[Result]:
    """Most of it sealed: the time should not depend on how much there is."""
    contenders: dict[str, Contender | None] = {}
    for count in plan.sizes.history:
        contenders[str(count)] = _recovered(killed(plan, count, payload.BATCH, rotates=True), count, rotates=True)
    found = plan.compare(contenders)
    limits = [at_most(1.5, "quickest")]
    least = min(figures["seconds"] for figures in found.values())
    for count in plan.sizes.history:
        metric = f"restart with a history of {count:,} records"
        yield result("recovery", metric, "s", found[str(count)]["seconds"], {"quickest": least}, limits)


def _recovered(path: Path, count: int, *, rotates: bool) -> Contender:
    def contender() -> Figures:
        figures = children.run("recover", path, rotates)
        if figures["offset"] < count:
            raise payload.Wrong(f"went on at {figures['offset']} though {count} records had been acknowledged")
        return {"seconds": figures["seconds"]}

    return contender


def _rocks(plan: Plan) -> Contender:
    count = plan.sizes.records

    def make(path: Path) -> None:
        children.run("rocks_write_and_die", path, count, payload.BATCH)

    source = plan.shared("rocksdb, killed", make)
    return lambda: {"seconds": children.run("rocks_recover", plan.copy(source), count)["seconds"]}
