"""Profile: its figures equal a plain computation over the same records, over all tiers, and the page shows them."""

from __future__ import annotations

import base64
import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import forebay
from forebay.disk import SystemDisk
from forebay.errors import Invalid
from forebay.records import Gap, Reason
from forebay.spark.jobs import profile
from forebay.spark.jobs.frames import look_at
from forebay.spark.jobs.profile.tallies import LATE_SECONDS, Tally, merged, size_at, tallied
from forebay.spark.jobs.report import JobReport
from forebay.spark.jobs.units import UnitOutcome
from forebay.spark.place.location import Location
from forebay.testing.inside import inside
from tests.spark.topics import SETTINGS, Filled, Row, flip_a_bit, noted_reads, skip_offsets


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def log(path: Path) -> Iterator[forebay.Storage]:
    with forebay.open(str(path), SETTINGS) as opened:
        yield opened


def test_a_page_that_cannot_be_written_leaves_nothing_open(
    log: forebay.Storage, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disks: list[SystemDisk] = []
    closed: list[SystemDisk] = []

    class Noted(SystemDisk):
        def __init__(self) -> None:
            super().__init__()
            disks.append(self)

        def close(self) -> None:
            closed.append(self)
            super().close()

    monkeypatch.setattr(profile, "SystemDisk", Noted)
    without_topics: Any = None  # nothing is counted, so Spark is not asked

    for html in (tmp_path / "missing" / "page.html", tmp_path / "page.html"):
        with contextlib.suppress(FileNotFoundError):
            profile.run(without_topics, Location.of(path), html=str(html))

    assert disks == closed
    assert len(disks) == 2
    assert (tmp_path / "page.html").exists()
    assert not (tmp_path / "missing").exists()


def _expected(rows: list[Row], partition: int) -> dict[str, Any]:
    mine = [row for row in rows if row["partition"] == partition]
    newest, late, most = 0, 0, 0
    for row in mine:
        behind = max(0, newest - row["timestamp"])
        late, most = late + (behind > 0), max(most, behind)
        newest = max(newest, row["timestamp"])
    span = (max(row["timestamp"] for row in mine) - min(row["timestamp"] for row in mine)) / 1000
    return {
        "records": len(mine),
        "bytes": sum(len(row["key"] or b"") + len(row["value"] or b"") for row in mine),
        "records_per_s": round(len(mine) / span, 3),
        "without_key": sum(row["key"] is None for row in mine),
        "without_value": sum(row["value"] is None for row in mine),
        "late": late,
        "late_max_s": most / 1000,
    }


def _fill(log: forebay.Storage) -> Filled:
    """Every tier, two files of history, and records that come late."""
    filled = Filled(log, "shop/orders", partitions=2)
    filled.every_tier()
    for partition in range(2):
        shard = inside(filled.topic).segment(partition)
        shard.upkeep.seal_rotated()
        shard.history.catch_up()
    for partition, behind in ((0, 5_000), (0, 50_000_000), (1, 90_000_000)):
        timestamp = filled.rows[0]["timestamp"] + 80_000_000 - behind
        value, key = b"late", b"key-1"
        offset = filled.topic.append(value, key=key, tag="late", timestamp=timestamp, partition=partition)
        row: Row = {"key": key, "value": value, "tag": "late", "headers": [], "timestamp": timestamp}
        filled.rows.append({**row, "partition": partition, "offset": offset})
    return filled


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_figures_equal_a_plain_computation(
    spark: SparkSession, log: forebay.Storage, path: Path, tmp_path: Path
) -> None:
    filled = _fill(log)
    filled.topic.delete_by_offset(10, 20, partition=0)
    kept = [row for row in filled.rows if row["partition"] != 0 or not 10 <= row["offset"] < 20]
    page, notes = tmp_path / "profile.html", tmp_path / "notes"

    report = profile.run(spark, Location.of(path), ["shop/orders"], html=str(page), resume=str(notes))
    known = notes.read_bytes()
    again = profile.run(spark, Location.of(path), resume=str(notes))

    assert report.is_clean, report.lines()
    first, second, whole = report.parts
    for part in (first, second):
        assert part.partition is not None
        expected = _expected(kept, part.partition)
        assert {name: part.figures[name] for name in expected} == expected
    assert (first.figures["deleted"], first.figures["without_record"]) == (10, 0)
    keys = Counter(row["key"] for row in kept if row["key"] is not None)
    hottest = max(keys.values())
    assert whole.figures["keys"] == len(keys) == 17
    assert whole.figures["hottest_share"] == round(hottest / len(kept), 4)
    assert whole.figures["tags"] == len({row["tag"] for row in kept if row["tag"] is not None})
    assert again.parts == report.parts and notes.read_bytes() == known, "history is not counted twice"
    assert known.count(b"\n") == 2
    _check_page(page.read_text())


def _check_page(text: str) -> None:
    images = [base64.b64decode(image) for image in re.findall(r'src="data:image/png;base64,([^"]+)"', text)]
    assert len(images) == 7 and all(image.startswith(b"\x89PNG") and len(image) > 5_000 for image in images)
    assert re.findall(r'alt="([^"]+)"', text)[-1] == "Records by how far behind a newer one they come"
    assert "<h2>shop/orders</h2>" in text and not re.search(r"https?://", text)


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_without_work_it_says_what_it_would_read_and_damage_is_a_finding(
    spark: SparkSession, log: forebay.Storage, path: Path, tmp_path: Path
) -> None:
    filled = Filled(log, "shop/orders")
    filled.many(100)
    log.create_topic("shop/empty")

    planned = profile.run(spark, Location.of(path), html=str(tmp_path / "page.html"), dry_run=True)
    empty = profile.run(spark, Location.of(path), ["shop/empty"], html=str(tmp_path / "empty.html"))

    assert planned.figures["offsets"] == 100 and not (tmp_path / "page.html").exists()
    assert empty.is_clean and empty.parts[0].figures["records"] == 0
    filled.topic.append(b"to be damaged")
    log.seal_topic("shop/orders")
    flip_a_bit(path / "shards", b"to be damaged")
    damaged = profile.run(spark, Location.of(path), ["shop/orders"])
    (finding,) = damaged.findings
    assert finding.shard == "shop/orders[0]" and "101 records cannot be read" in finding.what


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_a_condition_and_columns_choose_what_is_counted(
    spark: SparkSession, log: forebay.Storage, path: Path, tmp_path: Path
) -> None:
    """Compared with a plain computation; counts of one choice are not taken for those of another, or of all."""
    filled = _fill(log)
    filled.topic.delete_by_offset(10, 20, partition=0)
    tags, notes = ("tag-2-é", "late"), str(tmp_path / "notes")
    since = sorted(row["timestamp"] for row in filled.rows)[len(filled.rows) // 3]
    where = f"tag IN ('tag-2-é', 'late') AND timestamp >= timestamp_millis({since})"
    kept = [
        row
        for row in filled.rows
        if row["tag"] in tags and row["timestamp"] >= since and not (row["partition"] == 0 and 10 <= row["offset"] < 20)
    ]

    whole = profile.run(spark, Location.of(path), ["shop/orders"], resume=notes)
    page = tmp_path / "some.html"
    some = [
        profile.run(spark, Location.of(path), ["shop/orders"], where=where, html=str(page), resume=notes)
        for _ in range(2)
    ]
    keys = profile.run(spark, Location.of(path), ["shop/orders"], where=where, columns="key, offset", resume=notes)
    none = profile.run(spark, Location.of(path), ["shop/orders"], where="topic = 'shop/other'")
    again = profile.run(spark, Location.of(path), ["shop/orders"], resume=notes)

    assert some[0].parts == some[1].parts and whole.parts == again.parts
    assert some[0].is_clean, some[0].lines()
    *parts, topic = some[0].parts
    counted = Counter(row["key"] for row in kept if row["key"] is not None)
    for part, narrow in zip(parts, keys.parts, strict=False):
        assert part.partition is not None and any(row["partition"] == part.partition for row in kept)
        expected = _expected(kept, part.partition)
        assert {name: part.figures[name] for name in expected} == expected
        assert "deleted" not in part.figures and "without_record" not in part.figures
        assert narrow.figures["bytes"] == sum(
            len(row["key"] or b"") for row in kept if row["partition"] == part.partition
        )
        assert "without_value" not in narrow.figures
    assert topic.figures["keys"] == keys.parts[-1].figures["keys"] == len(counted)
    assert topic.figures["tags"] == len({row["tag"] for row in kept}) and "tags" not in keys.parts[-1].figures
    assert f"counted where {where}" in some[0].summary and "where tag IN (" in page.read_text()
    assert keys.summary.endswith("by key, timestamp")
    assert [part.figures["records"] for part in none.parts[:2]] == [0, 0]


def _here(spark: object, units: Sequence[Any], work: Any, **_: object) -> list[UnitOutcome[Any, Any]]:
    """What tasks do, done in this process."""
    return [UnitOutcome(unit, work(unit), None) for unit in units]


def test_damage_beside_a_known_loss_is_a_finding_with_a_condition_as_without(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a condition, what else could not be read in a partition with a known loss was a line in the log alone."""
    with forebay.open(str(path), SETTINGS) as log:
        filled = Filled(log, "shop/orders")
        filled.many(100)
        filled.seal()
    skip_offsets(path, filled.topic.spec, Gap(100, 150, Reason.LOST))
    with forebay.open(str(path), SETTINGS) as log:
        filled.topic = log.topic("shop/orders")
        filled.many(50)
        filled.seal()
        filled.topic.append(b"to be damaged")
        log.seal_topic("shop/orders")
    monkeypatch.setattr(profile, "spread", _here)
    spark: Any = None  # keys are not counted: it is not asked
    options: list[dict[str, Any]] = [{}, {"where": "offset >= 0"}, {"where": "offset >= 0", "resume": f"{tmp_path}/n"}]

    def reports() -> list[JobReport]:
        found = [profile.run(spark, Location.of(path), ["shop/orders"], columns=["value"], **o) for o in options]
        assert len({report.figures["records"] for report in found}) == 1
        return found

    for report in reports():
        assert report.is_clean and report.figures["records"] == 152, report.lines()
    (tmp_path / "n").unlink()  # what was counted before is not read again
    flip_a_bit(path / "shards", b"to be damaged")
    for report in (*reports(), *reports()):
        (finding,) = report.findings
        assert (finding.shard, finding.what) == ("shop/orders[0]", "1 records cannot be read")
    elsewhere = profile.run(spark, Location.of(path), ["shop/orders"], columns=["value"], where="offset < 120")
    assert elsewhere.is_clean and elsewhere.figures["records"] == 100


@pytest.mark.slow
def test_a_condition_is_counted_without_the_segments_that_cannot_meet_it(
    log: forebay.Storage, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = _fill(log)
    read = noted_reads(monkeypatch)

    monkeypatch.setattr(profile, "spread", _here)
    spark: Any = None  # keys are not counted: it is not asked

    def count(where: str) -> tuple[int, int, int]:
        """Records that were counted, looked at, and offsets that a dry run names."""
        read.clear()
        options: Any = {"where": where, "columns": ["value"]}
        report = profile.run(spark, Location.of(path), ["shop/orders"], **options)
        assert report.is_clean, report.lines()
        planned = profile.run(spark, Location.of(path), ["shop/orders"], **options, dry_run=True)
        assert isinstance(report.figures["records"], int) and isinstance(planned.figures["offsets"], int)
        return report.figures["records"], sum(read), planned.figures["offsets"]

    def expected(chosen: Callable[[Row], bool]) -> int:
        return sum(chosen(row) for row in filled.rows)

    whole = len(filled.rows)
    assert count("offset >= 0") == (whole, whole, whole)
    found, looked_at, planned = count("partition = 1 AND offset < 100")
    assert (found, planned) == (100, 100) and looked_at < whole / 2
    first = sorted(row["timestamp"] for row in filled.rows if row["partition"] == 0)[50]
    found, looked_at, planned = count(f"timestamp < timestamp_millis({first})")
    assert found == expected(lambda row: row["timestamp"] < first) > 0
    assert looked_at < whole and planned < whole
    found, looked_at, planned = count("tag = 'late'")
    assert found == 3 and looked_at < whole / 2
    with pytest.raises(Invalid, match="value is not compared where the records lie"):
        count("value = 'x'")
    with pytest.raises(Invalid, match="names 'keys': the columns are"):
        profile.run(spark, Location.of(path), columns=["keys"])


def test_stretches_know_the_newest_time_before_them(log: forebay.Storage, path: Path) -> None:
    filled = _fill(log)
    (view, _) = look_at(Location.of(path), "shop/orders").shards

    found = profile.stretches(view)

    assert [(stretch.start, stretch.stop) for stretch in found] == [(0, 5_740), (5_740, view.next)]
    before = [row["timestamp"] for row in filled.rows if row["partition"] == 0 and row["offset"] < 5_740]
    assert found[1].newest == max(before) and found[0].name and not found[1].name


def _batch(times: list[int], sizes: list[int | None]) -> pa.RecordBatch:
    columns = {
        "key": pa.array([b"k"] * len(times), pa.binary()),
        "value": pa.array([None if size is None else b"x" * size for size in sizes], pa.binary()),
        "timestamp": pa.array([time * 1000 for time in times], pa.timestamp("us", "UTC")),
        "headers": pa.nulls(len(times), pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        "tag": pa.array([None] * len(times), pa.string()),
    }
    return pa.RecordBatch.from_pydict(columns)


def test_counts_of_parts_are_counts_of_the_whole() -> None:
    times = [1_000, 2_000, 1_500, 9_000, 8_000, 70_000, 3_000]
    sizes = [0, 1, 127, 128, None, 1023, 1]
    whole = tallied([_batch(times, sizes)], bucket_ms=10_000)

    parts = [
        tallied([_batch(times[:3], sizes[:3])], bucket_ms=10_000),
        tallied([_batch(times[3:5], sizes[3:5]), _batch(times[5:], sizes[5:])], bucket_ms=10_000, newest=2_000),
    ]

    assert merged(parts) == whole
    assert whole.times == {0: (6, 263), 70_000: (1, 1024)}
    assert whole.late == (4, 2, 0, 0, 1, 0, 0, 0) and len(whole.late) == len(LATE_SECONDS) + 1
    assert whole.late_max_ms == 67_000
    assert whole.sizes == {1: 4, 7: 1, 8: 1, 10: 1}
    assert (size_at(whole.sizes, 0.5), size_at(whole.sizes, 0.99), size_at({}, 0.5)) == (2, 1024, 0)
    assert merged([]) == Tally()
