"""`python -m bench [CASE …] [--json] [--large]`: run, check, print, keep."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from bench import report
from bench.cases import CASES
from bench.plan import LARGE, SHORT, TOY, Plan, Sizes, scratch
from bench.results import Result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases named, or all."""
    options = _options(arguments)
    if options.page:
        report.write_page()
        return 0
    sizes = TOY if options.toy else SHORT if options.short else LARGE if options.large else Sizes()
    if options.rounds:
        sizes = replace(sizes, rounds=options.rounds)
    kept = not (options.toy or options.short or options.alone)
    with scratch(options.directory) as root:
        alone = options.alone or options.toy
        plan = Plan(sizes, Path(root), peers=not options.alone, servers=not alone)
        plan.say = _say if sys.stderr.isatty() else plan.say
        for name in options.cases or CASES:
            _run(plan, name, is_json=options.json, is_kept=kept)
    if kept:
        report.write_page()
    return 0


def _run(plan: Plan, name: str, *, is_json: bool, is_kept: bool) -> None:
    """Run a case, print it, and keep it at once: a later case that fails takes nothing away."""
    clock = report.Clock(name)
    results: list[Result] = []
    for found in CASES[name](plan):
        results.append(found)
        if is_json:
            print(msgspec.json.encode(found).decode(), flush=True)
    run = clock.run(plan.sizes.rounds)
    if not is_json:
        print(report.table(results))
        print(f"{name}: {len(results)} figures; {run}", flush=True)
    if is_kept:
        report.keep(results, run)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"one of: {', '.join(CASES)}; all if none is named")
    parser.add_argument("--json", action="store_true", help="one object per line instead of a table")
    parser.add_argument("--large", action="store_true", help="also a history of 100 million records")
    parser.add_argument("--alone", action="store_true", help="without peers; results are not kept")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, no servers; results are not kept")
    parser.add_argument("--short", action="store_true", help="small sizes, with all peers; results are not kept")
    parser.add_argument(
        "--page", action="store_true", help="run nothing: make the pages from the results that are kept"
    )
    parser.add_argument("--rounds", type=int, help="rounds of each comparison (5)")
    parser.add_argument("--directory", help="where to write; a temporary directory below it is used and removed")
    options = parser.parse_args(arguments)
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"there is no case {', '.join(sorted(unknown))}: choose from {', '.join(CASES)}")
    return options


def _say(line: str) -> None:
    print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
