"""kill -9 of a compaction at each of its steps: the owner goes on, the next run ends what was begun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from forebay.format.metadata.descriptor import DescriptorKind
from tests.compacting.directly import check_sound, collect_without_grace, compacted, kinds_of, shown
from tests.compacting.killed import ENVIRONMENTS, STEPS
from tests.ledger import Ledger
from tests.spark.mixed import Mixed
from tests.support.environments.directories import Environment
from tests.support.soak import SOAK

CASES: Final = (
    [(mode, [step]) for mode in ENVIRONMENTS for step in STEPS]
    if SOAK
    else [("shared_fs", ["before the swap", "behind the swap"])]
)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "steps"), CASES, ids=[f"{mode}-{steps[0]}" for mode, steps in CASES])
def test_killed_compaction_is_ended_by_the_next(tmp_path: Path, mode: str, steps: list[str], ledger: Ledger) -> None:
    environment = ENVIRONMENTS[mode](tmp_path)
    mixed = Mixed(environment, partitions=2)
    for _ in range(3):
        for partition in range(2):
            mixed.filled.many(200, partition)
        mixed.export()
    mixed.delete(0, 150, 250)

    for step in steps:
        subprocess.run(
            [sys.executable, "-m", "tests.compacting.killed", str(tmp_path), mode, step], check=True, timeout=100
        )
        ledger.count("kills of a compaction", step=step, mode=mode)
        assert shown(mixed.filled.topic) == mixed.rows
        mixed.delete(1, 10, 20)
        mixed.filled.many(100)
        _sweep(mixed)
        assert shown(mixed.filled.topic) == mixed.rows
    mixed.export()

    report = compacted(environment)

    assert report.is_clean, report.lines()
    _sweep(mixed)
    for partition in range(2):
        # What came meanwhile may be too little to be added.
        assert kinds_of(mixed.log, mixed.filled.topic, partition)[0] is DescriptorKind.PARQUET
    assert shown(mixed.filled.topic) == mixed.rows
    assert compacted(environment).summary == "nothing to do"
    mixed.close()
    check_sound(environment)
    assert _objects(environment) == 2, "nothing is left of those that were killed"
    again = environment.open("one")
    assert shown(again.topic(mixed.topic)) == mixed.rows
    again.close()


def _sweep(mixed: Mixed) -> None:
    """As if the time of grace were over for everything."""
    for partition in range(2):
        collect_without_grace(mixed.log, mixed.filled.topic, partition)


def _objects(environment: Environment) -> int:
    return len([path for path in environment.root.rglob("*.parquet") if "aside" not in path.parts])
