"""Scrub: sound history is called sound, each kind of damage is named where it is, and repair mends what it can."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession

import forebay
from forebay.catalog import ShardCatalog
from forebay.errors import Invalid, UnknownTopic
from forebay.inspection.findings import Severity
from forebay.spark.jobs import scrub
from forebay.spark.jobs.report import JobReport, refs_at
from forebay.spark.jobs.resume import Notes
from forebay.spark.place.location import Location
from forebay.spark.place.opening import opened
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from tests.cli.rig import flip
from tests.inspection.exported import KEYS, Exported
from tests.ledger import Ledger
from tests.spark.topics import SETTINGS, Filled

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def _errors(report: JobReport) -> list[str]:
    return [str(finding) for finding in report.findings if finding.severity is Severity.ERROR]


@pytest.fixture
def exported(tmp_path: Path) -> Exported:
    return Exported(tmp_path)


def _location(exported: Exported) -> Location:
    return Location.parse({"path": str(exported.shell.directory), "storage.handoff_root": str(exported.root)})


def test_files_of_a_directory_are_read_where_they_lie(spark: SparkSession, tmp_path: Path) -> None:
    with forebay.open(str(tmp_path / "data"), SETTINGS) as log:
        filled = Filled(log, "shop/orders", partitions=2)
        filled.every_tier()
        log.create_topic("shop/empty")
        for partition in range(2):
            shard = inside(filled.topic).segment(partition)
            shard.upkeep.seal_rotated()
            shard.history.catch_up()
        with_owner = scrub.run(spark, Location.of(tmp_path / "data"))

    location = Location.of(tmp_path / "data")
    report = scrub.run(spark, location, ["shop/orders"])
    victim = max((tmp_path / "data" / "shards").glob("*_1/*.seg"), key=lambda path: path.stat().st_size)
    flip(victim, victim.stat().st_size // 2)
    damaged = scrub.run(spark, location)

    assert with_owner.is_clean and with_owner.figures["objects"] == 6
    assert report.is_clean, report.lines()
    assert report.figures["objects"] == report.figures["sound"] == 6
    assert [part.partition for part in report.parts] == [0, 1]
    (error,) = _errors(damaged)
    assert "shop/orders[1]" in error and victim.name in error and "the frame is damaged" in error
    assert (damaged.figures["damaged"], damaged.figures["sound"]) == (1, 5)


def _flip_object(exported: Exported) -> str:
    flip(exported.object(1), -100)
    return "frame"


def _lose_object(exported: Exported) -> str:
    exported.object(1).unlink()
    return "the object is missing"


def _lose_index(exported: Exported) -> str:
    exported.object(1, ".idx").unlink()
    return "the index object is missing"


def _flip_footer(exported: Exported) -> str:
    flip(exported.object(1, ".idx"), -20)
    return "footer"


def _lose_descriptor(exported: Exported) -> str:
    second = exported.descriptors()[1]
    with exported.metadata() as metadata:
        from forebay.metadata import Delete  # noqa: PLC0415

        metadata.transaction([], [Delete(f"/forebay/storage/topics/shop/orders/0/segments/{second.start:020d}")])
    return "the catalog"


@pytest.mark.parametrize("harm", [_flip_object, _lose_object, _lose_index, _flip_footer, _lose_descriptor])
def test_each_harm_is_named(
    spark: SparkSession, exported: Exported, harm: Callable[[Exported], str], ledger: Ledger
) -> None:
    expected = harm(exported)

    report = scrub.run(spark, _location(exported), ["shop/orders"])

    ledger.count("harms")
    errors = _errors(report)
    assert errors and all("shop/orders[0]" in error for error in errors)
    assert any(expected in error for error in errors), errors
    assert not report.is_clean


def test_repair_mends_from_the_other_copy_and_says_so(spark: SparkSession, exported: Exported) -> None:
    sound = exported.content()
    flip(exported.object(0), -100)
    exported.object(2).unlink()
    exported.object(1, ".idx").unlink()
    harmed = exported.content()

    planned = scrub.run(spark, _location(exported), repair=True, dry_run=True)
    untouched = exported.content()
    done = scrub.run(spark, _location(exported), repair=True)

    assert untouched == harmed and harmed != sound
    assert not planned.is_clean and any("upload again" in line for line in planned.lines())
    assert done.is_clean, done.lines()
    assert sum("done: " in finding.what for finding in done.findings) >= 3
    assert {name: content for name, content in exported.content().items() if name.startswith("store/")} == {
        name: content for name, content in sound.items() if name.startswith("store/")
    }


def test_notes_let_a_run_go_on_where_another_ended(spark: SparkSession, exported: Exported, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    first = scrub.run(spark, _location(exported), notes=str(notes))
    flip(exported.object(1), -100)
    with notes.open("ab") as file:
        file.write(b'"cut sho')

    second = scrub.run(spark, _location(exported), notes=str(notes))
    lines = notes.read_bytes().splitlines()
    notes.write_bytes(b"".join(line + b"\n" for line in lines if exported.object(0).name.encode() in line))
    third = scrub.run(spark, _location(exported), notes=str(notes))

    assert first.figures["sound"] == first.figures["objects"] == 3
    assert (second.is_clean, second.figures["sound_before"]) == (True, 3), "what is noted is not read again"
    assert (third.is_clean, third.figures["sound_before"], third.figures["sound"]) == (False, 1, 1)


def test_what_the_owner_replaced_meanwhile_is_not_damaged(spark: SparkSession, exported: Exported) -> None:
    location = _location(exported)
    with opened(location) as found:
        (shard,) = [scrub.shard_at(found, ref) for ref in refs_at(found, [])]
    old = exported.object(1)
    with exported.metadata() as metadata:
        catalog = ShardCatalog(metadata, KEYS, "", clock=ManualClock())
        piece = catalog.pieces()[1]
        key = piece.descriptor.object_key.replace(".seg", "x.seg")
        assert catalog.replace([piece], msgspec.structs.replace(piece.descriptor, object_key=key))
    old.unlink()
    exported.root.joinpath(exported.descriptors()[0].object_key).unlink()

    scrub.examine_all(spark, location, [shard], Notes(None), quick=False, progress=None)

    assert [finding.offsets for finding in shard.findings] == [(0, 20)], "one is gone, the other was replaced"
    assert (shard.figures["sound"], shard.figures["damaged"]) == (1, 1)


def test_without_work_it_says_what_it_would_do(spark: SparkSession, exported: Exported) -> None:
    flip(exported.object(1), -100)

    report = scrub.run(spark, _location(exported), dry_run=True)

    assert report.is_clean and report.figures["objects"] == 3 and "sound" not in report.figures
    assert "to be examined" in report.summary


def test_a_quick_look_sees_what_is_missing_and_not_what_changed(spark: SparkSession, exported: Exported) -> None:
    flip(exported.object(1), 5000 if exported.object(1).stat().st_size > 20_000 else -100)
    unread = scrub.run(spark, _location(exported), quick=True)
    exported.object(0).unlink()

    report = scrub.run(spark, _location(exported), quick=True)

    assert len(_errors(report)) == len(_errors(unread)) + 1


def test_calls_that_make_no_sense_are_refused(spark: SparkSession, exported: Exported, tmp_path: Path) -> None:
    shared = Location.parse({"store": f"file://{exported.root}", "metadata": f"sqlite://{tmp_path}/none"})
    with pytest.raises(Invalid, match="repair needs the data directory"):
        scrub.run(spark, shared, repair=True)
    with pytest.raises(UnknownTopic, match="shop/none"):
        scrub.run(spark, _location(exported), ["shop/none"])
    (tmp_path / "notes").write_text("not notes\n")
    with pytest.raises(Invalid, match="does not hold the notes"):
        Notes(str(tmp_path / "notes"))
