"""Runs of migrate that end themselves with kill -9, each at another step, and one that does not.

`python -m tests.spark.jobs.migrate_child DATA OLD NEW STEP…`: settings files of the old and the new store. Objects are
copied here, without Spark, and each run is a fork of this process, to be quick.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from forebay import manifests
from forebay.blobs import DirectoryStore
from forebay.spark.jobs import migrate
from forebay.spark.jobs.units import UnitOutcome
from forebay.spark.place.location import Location
from tests.support.processes import die_at

STEPS: dict[str, Callable[[], None]] = {
    "object stored": lambda: die_at(DirectoryStore, "upload", call=3),
    "before the switch": lambda: die_at(migrate.Migration, "switch", before=True),
    "manifest stored": lambda: die_at(manifests, "write"),
    "one partition switched": lambda: die_at(migrate.Migration, "switch_shard"),
    "before old objects go": lambda: die_at(migrate.Migration, "remove_old", before=True),
    "an old object gone": lambda: die_at(DirectoryStore, "delete", call=2),
}


def here(spark: object, units: Sequence[Any], work: Callable[[Any], Any], **_: object) -> Iterator[Any]:
    """Units done in this process."""
    for unit in units:
        yield UnitOutcome(unit, work(unit), None)


def run(path: str, old: str, new: str) -> None:
    vars(migrate)["spread"] = here
    location = Location.of(path, old)
    remove_old = location.settings().is_shared
    report = migrate.run(None, location, Location.of(path, new), remove_old=remove_old)  # type: ignore[arg-type]
    assert report.is_clean, report.lines()


def main(path: str, old: str, new: str, *steps: str) -> None:
    for step in steps:
        child = os.fork()
        if not child:
            STEPS[step]()
            run(path, old, new)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (step, status)
    run(path, old, new)


if __name__ == "__main__":
    main(*sys.argv[1:])
