"""A job that dies by kill -9 within its Spark part, driver, JVM and worker together, when some tasks have done theirs.

`python -m tests.spark.jobs.killed_job JOB MOMENT TASKS DIRECTORY TARGET` dies once so many tasks have `begun`, or have
`done` their work and not said so. JOB is `lake`, with a directory or `table` as TARGET, or `migrate`, with a
settings file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pyarrow as pa

import forebay.spark
from forebay.spark.jobs import frames, lake, migrate
from forebay.spark.jobs.copying import CopiedObjects, Errand, copy
from forebay.spark.place.location import Location
from forebay.spark.reading.plan import plan
from forebay.spark.tables.file_writer import Outlet
from forebay.spark.values.decoding import Decoding
from tests.spark.stream_child import SETTINGS
from tests.support.processes import die_together, die_with_all

TOPIC: Final = "shop/orders"
_WHEN: Final = "FOREBAY_KILLED_WHEN"


def come_to(moment: str) -> None:
    """Die if it is time; in a task."""
    when, tasks, directory = os.environ[_WHEN].split(" ", 2)
    if moment == when:
        Path(directory, os.urandom(8).hex()).touch()
        if len(list(Path(directory).iterdir())) >= int(tasks):
            die_with_all()


class DyingOutlet(Outlet):
    """Writes what a task of lake writes."""

    def written(self, decoding: Decoding, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        held = [batch for batch in batches if batch.num_rows]
        if held:
            come_to("begun")
        reported = list(Outlet.written(self, decoding, held))
        if held:
            come_to("done")
        yield from reported


def dying_copy(old: Location, new: Location, errand: Errand) -> CopiedObjects:
    """Copies what a task of migrate copies."""
    come_to("begun")
    copied = copy(old, new, errand)
    come_to("done")
    return copied


def run(spark: Any, job: str, data: Path, target: str) -> Any:
    """Run the job to its end."""
    if job == "migrate":
        return migrate.run(spark, Location.of(data), Location.of(data, target), [TOPIC])
    place = {"table": "shop.raw"} if target == "table" else {"directory": target}
    # Several tasks for each commit, however little there is to do.
    with mock.patch.object(frames, "plan", partial(plan, partitions_min=4)):
        return lake.run(spark, Location.of(data), TOPIC, format="raw", commit_records=150, **place)  # type: ignore[arg-type]


def main(job: str, moment: str, tasks: str, directory: str, target: str) -> None:
    counted = Path(directory, f"tasks-{moment}-{tasks}")
    counted.mkdir()
    die_together()
    os.environ[_WHEN] = f"{moment} {tasks} {counted}"
    vars(lake)["Outlet"], vars(migrate)["copy"] = DyingOutlet, dying_copy
    spark = forebay.spark.session("a job that dies", master="local[2]", settings=SETTINGS)
    run(spark, job, Path(directory, "data"), target)


if __name__ == "__main__":
    main(*sys.argv[1:])
