"""A file of history that is not there, as one that its owner has just dropped, keeps only its own shard back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compacting.directly import compacted
from tests.spark.mixed import Mixed
from tests.support.environments import directories


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_file_that_is_gone_is_named_and_the_other_shards_are_done(tmp_path: Path, *, dry_run: bool) -> None:
    environment = directories.local(tmp_path)
    mixed = Mixed(environment, partitions=2)
    for partition in (0, 1):
        for _ in range(2):
            mixed.filled.many(50, partition)
            mixed.export()
        mixed.delete(partition, 10, 20)
    for path in (environment.root / "one" / "shards").glob("*_0/00000000000000000000-*"):
        path.unlink()

    report = compacted(environment, dry_run=dry_run)

    # What is only planned is not looked into.
    named = [] if dry_run else [("shop/orders[0]", True)]
    assert [(finding.shard, "No such file" in finding.what) for finding in report.findings] == named
    assert [part.figures["rewrites"] for part in report.parts] == [int(dry_run), 1]
    mixed.close()


def test_a_partition_that_no_caller_has_had_yet_has_nothing_to_do(tmp_path: Path) -> None:
    environment = directories.local(tmp_path)
    with environment.open("one") as log:
        log.create_topic("shop/orders", partitions=2).append(b"first", partition=1)
        log.create_topic("shop/kept", cleanup="compact")
        log.export_topic("shop/orders")

        report = compacted(environment)

    assert report.is_clean and report.summary == "nothing to do", report.lines()
