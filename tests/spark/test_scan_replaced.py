"""A Parquet segment that is compacted again and swept while a task reads it by parts: no row is missed in silence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.errors import Unavailable
from forebay.format.parquet import file as parquet
from forebay.spark.reading import task
from forebay.spark.reading.filters import Condition, Filters
from forebay.spark.reading.options import ReadOptions
from forebay.spark.reading.pieces import PieceReader
from forebay.spark.reading.plan import plan
from forebay.spark.reading.snapshot import Part, Split
from forebay.spark.reading.task import OffsetRun, read_split, wanted_runs
from forebay.spark.reading.view import load
from tests.spark.mixed import Mixed
from tests.support.environments import directories


def _planned(mixed: Mixed, *keys: bytes) -> list[Split]:
    options = ReadOptions.parse(mixed.options)
    snapshot, ranges = load(options)
    filters = Filters((Condition("key", "in", keys),))
    return plan(snapshot, ranges, columns=("key", "offset"), filters=filters)


@pytest.mark.slow
@pytest.mark.proves("I32")
def test_what_went_since_the_plan_is_named_in_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "GROUP_BYTES", 1000)
    mixed = Mixed(directories.shared_fs(tmp_path), partitions=1)
    for base in (0, 100):
        keys = [b"%d" % number for number in range(base, base + 100)]
        mixed.filled.topic.append_many(keys, keys=keys, partition=0)
        mixed.export()
    mixed.compact()
    splits = _planned(mixed, b"10", b"190")
    (old,) = (tmp_path / "store").rglob("*.parquet")

    def compacted_again(reader: PieceReader, part: Part, filters: Filters) -> Iterator[OffsetRun]:
        runs = list(wanted_runs(reader, part, filters))
        assert len(runs) == 2, "the keys lie far from each other"
        reader.close_open()
        mixed.delete(0, 190, 191)
        mixed.compact()
        old.unlink()
        yield from runs

    monkeypatch.setattr(task, "wanted_runs", compacted_again)

    with pytest.raises(Unavailable, match=r"records of \[190, 191\) went since this was loaded"):
        [row for split in splits for batch in read_split(split) for row in batch.to_pylist()]
    mixed.close()


@pytest.mark.parametrize("mode", ["local", "shared_fs"])
def test_what_lies_elsewhere_by_now_is_found_by_a_filter_too(tmp_path: Path, mode: str) -> None:
    environment = directories.local(tmp_path) if mode == "local" else directories.shared_fs(tmp_path)
    mixed = Mixed(environment, partitions=1)
    for base in (0, 100):
        keys = [b"%d" % number for number in range(base, base + 100)]
        mixed.filled.topic.append_many(keys, keys=keys, partition=0)
        mixed.export()
    mixed.filled.topic.append(b"last", partition=0)
    splits = _planned(mixed, b"10", b"190")
    mixed.compact()
    if mode == "local":
        assert directories.shard_of(mixed.filled.topic).history.retain() == 2
    for path in [path for suffix in ("seg", "idx") for path in (tmp_path / "store").rglob(f"*.{suffix}")]:
        if "compacted" not in str(path):
            path.unlink()

    rows = [row["offset"] for split in splits for batch in read_split(split) for row in batch.to_pylist()]

    assert rows == [10, 190]
    mixed.close()
