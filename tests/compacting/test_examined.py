"""Parquet segments of history under verify, repair and dump."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.clock import SystemClock
from forebay.disk import SystemDisk
from forebay.format.files.segment import index_name
from forebay.format.parquet import file as parquet_format
from forebay.inspection import repair, verify
from forebay.inspection.dump import dump
from forebay.inspection.findings import Severity
from forebay.inspection.steps import Action
from tests.compacting.directly import catalog_of, check_sound, compacted
from tests.spark.mixed import Mixed
from tests.support.environments import directories
from tests.support.environments.directories import Environment


@pytest.fixture
def disk() -> Iterator[SystemDisk]:
    found = SystemDisk()
    yield found
    found.close()


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return directories.shared_fs(tmp_path)


@pytest.fixture
def segment(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A closed directory whose history is one Parquet segment with some row groups; where that lies."""
    monkeypatch.setattr(parquet_format, "GROUP_BYTES", 20_000)
    mixed = Mixed(environment, partitions=1)
    for _ in range(3):
        mixed.filled.many(300)
        mixed.export()
    compacted(environment)
    (piece,) = catalog_of(mixed.log, mixed.filled.topic).descriptors()
    mixed.close()
    return Path(str(environment.settings.store.root)) / piece.object_key


def test_sound_segment_is_found_sound(environment: Environment, segment: Path) -> None:
    check_sound(environment)


def test_damage_names_the_row_group_and_its_offsets(environment: Environment, segment: Path, disk: SystemDisk) -> None:
    items = [item for item in dump(disk, str(segment)) if item["kind"] == "row group"]
    second = items[1]
    with segment.open("r+b") as file:
        file.seek(second["position"] + 5)
        file.write(b"\xff\x00\xff")

    report = verify(str(environment.root / "one"), environment.settings, disk=disk, clock=SystemClock())

    (finding,) = [found for found in report.findings if found.severity is Severity.ERROR]
    assert finding.what == "the row group is damaged" and finding.file.endswith(segment.name)
    assert finding.offsets == (second["offset"], second["offset"] + second["count"])
    steps = repair(str(environment.root / "one"), environment.settings, disk=disk, clock=SystemClock())
    assert [step.action for step in steps] == [Action.CANNOT]


@pytest.mark.parametrize("how", ["missing", "garbled"])
def test_index_is_rebuilt(environment: Environment, segment: Path, disk: SystemDisk, how: str) -> None:
    index = Path(index_name(str(segment)))
    before = index.read_bytes()
    if how == "missing":
        index.unlink()
    else:
        index.write_bytes(before[:100] + b"\xff" + before[101:])
    report = verify(str(environment.root / "one"), environment.settings, disk=disk, clock=SystemClock())
    assert [finding.severity for finding in report.findings] == [Severity.ERROR]

    repair(str(environment.root / "one"), environment.settings, disk=disk, clock=SystemClock(), apply=True)

    assert index.read_bytes() == before
    check_sound(environment)


def test_segment_that_is_missing_or_another_is_reported(
    environment: Environment, segment: Path, disk: SystemDisk
) -> None:
    content = segment.read_bytes()
    segment.write_bytes(content[:-20])
    (shorter,) = verify(str(environment.root / "one"), environment.settings, disk=disk, clock=SystemClock()).findings[
        :1
    ]
    segment.unlink()
    (missing,) = verify(str(environment.root / "one"), environment.settings, disk=disk, clock=SystemClock()).findings

    assert "bytes, catalogued with" in shorter.what
    assert missing.what == "the object is missing"


def test_dump_shows_what_a_segment_holds(segment: Path, disk: SystemDisk) -> None:
    items = list(dump(disk, str(segment), records=True))

    assert items[0]["kind"] == "parquet" and items[0]["records"] == 900 and items[0]["end"] == 900
    assert [item["offset"] for item in items if item["kind"] == "record"] == list(range(900))
    groups = [item for item in items if item["kind"] == "row group"]
    assert len(groups) > 2 and sum(group["rows"] for group in groups) == 900
    entries = [item for item in dump(disk, index_name(str(segment))) if item["kind"] == "entry"]
    assert [entry["offset"] for entry in entries] == [group["offset"] for group in groups]
