"""Topics that come and go: what stays of them in memory, and what the deletion of a large one costs another."""

from __future__ import annotations

from collections.abc import Iterator

from bench import children
from bench.plan import Plan
from bench.results import Result, at_most, result

CACHE_BYTES_MAX = 64 * 1024 * 1024


def run(plan: Plan) -> Iterator[Result]:
    """All figures of the case."""
    yield from _come_and_go(plan)
    yield from _in_use(plan)
    yield from _beside_a_deletion(plan)


def _come_and_go(plan: Plan) -> Iterator[Result]:
    count = plan.sizes.churned
    for engine in ("segment", "rocksdb", "memory", "in memory"):
        figures = children.run("churn", plan.fresh() / "data", count, engine)
        name = f"{count:,} topics created, appended to and deleted, engine {engine}"
        # Against what was resident after the first tenth of them.
        early = {"a tenth": figures["early"]}
        yield result("churn", f"{name}: resident", "MB", figures["resident"], early, [at_most(1.05, "a tenth")])
        yield result("churn", f"{name}: each", "ms", figures["milliseconds"])


def _in_use(plan: Plan) -> Iterator[Result]:
    count = max(plan.sizes.topics)
    figures = children.run("topics_in_use", plan.fresh() / "data", count, CACHE_BYTES_MAX)
    name = f"{count:,} topics, appended to and read in turn, runtime.cache_bytes_max 64 MiB"
    limit = CACHE_BYTES_MAX / 1e6 + 300
    yield result("churn", f"{name}: resident over the base", "MB", figures["resident"], {}, [at_most(limit)])
    yield result("churn", f"{name}: appended", "MB", figures["appended"])
    yield result("churn", f"{name}: in caches", "MB", figures["cached"], {}, [at_most(CACHE_BYTES_MAX / 1e6 * 1.1)])


def _beside_a_deletion(plan: Plan) -> Iterator[Result]:
    count = plan.sizes.deleted_objects
    figures = children.run("create_beside_deletion", plan.fresh(), count)
    name = f"create a topic while one of {count:,} objects is deleted"
    for metric in ("median", "slowest"):
        alone = {"alone": figures[f"{metric} alone"]}
        yield result("churn", f"{name}: {metric}", "ms", figures[metric], alone, [at_most(100)])
    yield result("churn", f"{name}: the deletion", "s", figures["deletion"])
