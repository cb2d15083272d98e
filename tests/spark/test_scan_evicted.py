"""Records that end between planning and reading: equal rows, a named failure, or counted where that was asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.errors import Unavailable
from forebay.settings import ExportSettings, RetentionSettings
from forebay.spark.reading.options import ReadOptions
from forebay.spark.reading.task import read_split
from forebay.testing.inside import inside
from tests.spark.mixed import TOPIC, Mixed
from tests.spark.topics import Row, rows_in, splits_of
from tests.support.environments import directories

pytestmark = pytest.mark.slow

NO_COPIES = RetentionSettings(time_s=0, bytes_max=0, grace_s=0)


@pytest.fixture(params=["local", "shared_fs", "compacted"])
def mixed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mixed]:
    """Three files of 100 records, the first two as Parquet perhaps, and ten records behind them."""
    if request.param == "local":
        environment = directories.local(tmp_path)
    else:
        environment = directories.shared_fs(tmp_path, export=ExportSettings(orphan_grace_s=0), retention=NO_COPIES)
    mixed = Mixed(environment, partitions=1)
    for number in range(3):
        mixed.filled.many(100)
        mixed.export()
        if number == 1 and request.param == "compacted":
            mixed.compact()
    mixed.filled.many(10)
    yield mixed
    mixed.close()


def _let_go(mixed: Mixed) -> None:
    """What lies below the floors goes for good, wherever it lies."""
    history = directories.shard_of(mixed.filled.topic).history
    history.retain()
    # Objects younger than a millisecond stay: and some go at once, by the thread in the background.
    while _objects(mixed) > {"local": 0, "shared_fs": 2}[mixed.environment.settings.storage.mode]:
        inside(mixed.log).collect(mixed.filled.topic)


def _objects(mixed: Mixed) -> int:
    return len(
        [path for path in (mixed.environment.root / "store").rglob("*") if path.suffix in (".seg", ".parquet", ".idx")]
    )


def _evict(mixed: Mixed, kept: int) -> None:
    mixed.log.alter_topic(TOPIC, cap_records=kept, allow_loss=True)
    shard = directories.shard_of(mixed.filled.topic)
    while shard.evict(2**50).reason is not None:
        pass
    assert shard.offsets().earliest == 310 - kept
    _let_go(mixed)


def _rows(mixed: Mixed, **options: str) -> Iterator[list[Row]]:
    """Plans; and once more asked, reads."""
    splits = splits_of(ReadOptions.parse({**mixed.options, **options}))
    yield []
    yield rows_in(batch for split in splits for batch in read_split(split))


def test_what_was_evicted_since_the_plan_is_named(mixed: Mixed) -> None:
    rows = _rows(mixed)
    next(rows)
    _evict(mixed, 60)

    with pytest.raises(Unavailable, match=r"shop/orders\[0\]: records of \[0, .*went since .*evicted \(cap\); load it"):
        next(rows)


def test_what_was_evicted_since_the_plan_is_counted_where_that_is_asked_for(
    mixed: Mixed, caplog: pytest.LogCaptureFixture
) -> None:
    rows = _rows(mixed, failOnDataLoss="false")
    next(rows)
    _evict(mixed, 60)

    found = next(rows)

    kept = found[0]["offset"]
    assert kept in (200, 250), "what is left of the file that the floor lies in may be shown or not"
    assert found == mixed.rows[kept:]
    counts = [int(count) for count in re.findall(r"evicted \(cap\); ([0-9]+) offsets skipped", caplog.text)]
    assert sum(counts) == kept


def test_what_the_floor_has_passed_and_is_there_still_is_shown(mixed: Mixed) -> None:
    rows = _rows(mixed)
    next(rows)
    mixed.filled.topic.delete_before(250, partition=0)

    assert next(rows) == mixed.rows


@pytest.mark.parametrize("fails", [True, False])
def test_what_was_deleted_before_an_offset_since_the_plan_is_named_or_counted(
    mixed: Mixed, caplog: pytest.LogCaptureFixture, *, fails: bool
) -> None:
    rows = _rows(mixed, failOnDataLoss=str(fails).lower())
    next(rows)
    mixed.filled.topic.delete_before(300, partition=0)
    _let_go(mixed)

    if fails:
        with pytest.raises(Unavailable, match=r"records of \[0, .*they were deleted; load it again"):
            next(rows)
        return
    found = next(rows)
    assert found == mixed.rows[found[0]["offset"] :]
    assert "they were deleted; " in caplog.text
