"""What topics cost that nobody uses: memory over the base, descriptors, threads."""

from __future__ import annotations

from collections.abc import Iterator

from bench import children
from bench.cases.scale import topics_opened
from bench.plan import Plan
from bench.results import Result, at_most, result


def run(plan: Plan) -> Iterator[Result]:
    """All figures of the case."""
    count = max(plan.sizes.topics)
    figures = topics_opened(plan, count)
    idle = f"{count:,} idle topics"
    yield result("memory", f"{idle}: resident over the base", "MB", figures["resident"], {}, [at_most(300)])
    few = f"{idle}, runtime.descriptors_max {children.FEW_DESCRIPTORS}"
    yield result("memory", f"{few}: open descriptors", "count", figures["descriptors"], {}, [at_most(200)])
    yield result("memory", f"{idle}: threads", "count", figures["threads"], {}, [at_most(4)])
