"""A file of history that is not there, as one that its owner has just dropped, keeps only its own shard back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compacting.directly import compacted
from tests.moves import rig
from tests.spark.mixed import Mixed


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_file_that_is_gone_is_named_and_the_other_shards_are_done(tmp_path: Path, *, dry_run: bool) -> None:
    land = rig.local(tmp_path)
    mixed = Mixed(land, partitions=2)
    for partition in (0, 1):
        for _ in range(2):
            mixed.filled.many(50, partition)
            mixed.export()
        # Whether records ended in a file is found out before anything is written.
        mixed.delete(partition, 10, 20)
    for path in (land.root / "one" / "shards").glob("*_0/00000000000000000000-*"):
        path.unlink()

    report = compacted(land, dry_run=dry_run)

    assert [(finding.shard, "No such file" in finding.what) for finding in report.findings] == [
        ("shop/orders[0]", True)
    ]
    assert [part.partition for part in report.parts] == [1] and report.figures["rewrites"] == 1
    mixed.close()
