"""A read that was planned before a key was erased and its bytes were removed: it says so, and shows none of them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

import pytest

from forebay.errors import Unavailable
from forebay.spark.reading.options import ReadOptions
from forebay.spark.reading.task import read_split
from tests.spark.mixed import TOPIC
from tests.spark.served import ServedMixed
from tests.spark.topics import splits_of
from tests.support.environments import directories

pytestmark = pytest.mark.slow

COUNT: Final = 300
ERASED: Final = range(7, COUNT, 50)
TIERS: Final = ("Parquet", "frames in the store", "sealed files", "the active file")


def _brought(mixed: ServedMixed, tier: str) -> None:
    """The records lie in this tier, and in no other."""
    if tier in ("Parquet", "frames in the store"):
        mixed.export()
    if tier == "Parquet":
        mixed.compact()
    if tier == "sealed files":
        mixed.filled.seal()
    mixed.log.run_retention()


@pytest.mark.parametrize("way", ["path", "broker"])
@pytest.mark.parametrize("mode", ["local", "shared_fs"])
@pytest.mark.parametrize("tier", TIERS)
def test_a_read_that_was_planned_before_an_erasure_ends_with_what_happened_and_what_to_do(
    tier: str, mode: str, way: str, tmp_path: Path
) -> None:
    environment = directories.local(tmp_path) if mode == "local" else directories.shared_fs(tmp_path)
    with contextlib.closing(ServedMixed(environment, partitions=1)) as mixed:
        keys = [b"anna" if number in ERASED else b"%d" % number for number in range(COUNT)]
        mixed.filled.topic.append_many([b"v"] * COUNT, keys=keys, partition=0)
        _brought(mixed, tier)
        options = mixed.options if way == "path" else mixed.by_broker
        strict = splits_of(ReadOptions.parse(options))
        lenient = splits_of(ReadOptions.parse({**options, "failOnDataLoss": "false"}))

        assert mixed.log.erase_key(TOPIC, b"anna", now=True).remains == ()

        with pytest.raises(Unavailable, match=r"records of \[7, 8\) went .* they were deleted; load it again"):
            list(read_split(strict[0]))
        wanted = [key for key in keys if key != b"anna"]
        for splits in (lenient, splits_of(ReadOptions.parse(options))):
            batches = [batch for split in splits for batch in read_split(split)]
            assert [key for batch in batches for key in batch.column("key").to_pylist()] == wanted
