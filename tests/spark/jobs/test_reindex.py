"""Reindex: indexes without look-ups, damaged or missing ones become what sealing writes today; nothing else changes."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession

from forebay import manifests
from forebay.catalog import ShardCatalog
from forebay.cleanup.collector import Collector, Scope
from forebay.clock import SystemClock
from forebay.format.metadata.descriptor import DescriptorKind
from forebay.inspection.segments import without_lookups
from forebay.spark.jobs import reindex, scrub
from forebay.spark.place.location import Location
from forebay.spark.place.opening import Opened, opened
from forebay.testing.simulated.clock import ManualClock
from forebay.topics import ShardRef
from tests.cli.rig import flip
from tests.inspection.exported import KEYS, Exported

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


@pytest.fixture
def exported(tmp_path: Path) -> Exported:
    return Exported(tmp_path)


def _location(exported: Exported) -> Location:
    return Location.parse({"path": str(exported.shell.directory), "storage.handoff_root": str(exported.root)})


def _make_old(exported: Exported, place: int) -> bytes:
    """Give a segment the index that a version without look-ups wrote; what it had before."""
    path = exported.object(place, ".idx")
    whole = path.read_bytes()
    plain = without_lookups(whole)
    path.write_bytes(plain)
    with exported.metadata() as metadata:
        catalog = ShardCatalog(metadata, KEYS, "", clock=ManualClock())
        piece = catalog.pieces()[place]
        assert catalog.replace([piece], msgspec.structs.replace(piece.descriptor, index_bytes=len(plain)))
    return whole


def _indexes(exported: Exported) -> list[bytes]:
    with opened(_location(exported)) as found:
        (spec,) = found.topics([])
        pieces = found.catalog(ShardRef(spec, 0)).descriptors()
        return [(exported.root / piece.index_object).read_bytes() for piece in pieces]


def test_every_index_becomes_what_it_would_be_today(spark: SparkSession, exported: Exported) -> None:
    whole = _indexes(exported)
    _make_old(exported, 0)
    old = exported.object(0, ".idx").read_bytes()
    flip(exported.object(1, ".idx"), 70)
    exported.object(2, ".idx").unlink()

    planned = reindex.run(spark, _location(exported), dry_run=True)
    untouched = not exported.object(2, ".idx").exists()
    report = reindex.run(spark, _location(exported), ["shop/orders"])
    again = reindex.run(spark, _location(exported))

    assert planned.figures == {"segments": 3, "to_be_rebuilt": 3} and untouched
    assert report.is_clean, report.lines()
    assert report.figures == {"segments": 3, "rebuilt": 3, "without_lookups": 1, "damaged": 2}
    assert _indexes(exported) == whole
    assert exported.object(0, ".idx").read_bytes() == old, "an index is never overwritten by another"
    assert again.figures == {"segments": 3, "sound": 3}
    assert scrub.run(spark, _location(exported)).is_clean


def test_what_a_manifest_lists_gets_a_new_manifest(spark: SparkSession, exported: Exported) -> None:
    whole = _make_old(exported, 1)
    with opened(_location(exported), read_only=False) as found:
        (spec,) = found.topics([])
        catalog = found.catalog(ShardRef(spec, 0))
        pieces = catalog.pieces()
        store = found.stores.of("directory")
        listed = [piece.descriptor for piece in pieces]
        manifest = manifests.write(store, f"{spec.topic_id}_0/", listed, store_name="directory", created_at=1)
        assert catalog.replace(pieces, manifest)

    report = reindex.run(spark, _location(exported))

    assert report.is_clean and report.figures["rebuilt"] == 1
    assert _indexes(exported)[1] == whole
    with opened(_location(exported)) as found:
        (piece,) = found.catalog(ShardRef(spec, 0)).pieces()
    assert piece.descriptor.kind is DescriptorKind.MANIFEST and piece.descriptor != manifest


def test_a_damaged_segment_gets_no_index(spark: SparkSession, exported: Exported) -> None:
    exported.object(1, ".idx").unlink()
    flip(exported.object(1), -100)

    report = reindex.run(spark, _location(exported))

    (finding,) = report.findings
    assert "is damaged itself" in finding.what and finding.offsets == (20, 40)
    assert not exported.object(1, ".idx").exists() and report.figures["sound"] == 2


def _scope(found: Opened, ref: ShardRef) -> Scope:
    """What the owner of the shard collects, which has nothing left to export."""
    store, catalog = found.stores.of("directory"), found.catalog(ref)
    return Scope(store=store, prefix=f"{ref.id}/", catalog=catalog, is_compacting=lambda: False, epoch=1)


def test_the_index_that_is_not_named_any_more_is_swept(spark: SparkSession, exported: Exported) -> None:
    _make_old(exported, 0)
    old = exported.object(0, ".idx")
    reindex.run(spark, _location(exported))
    before = _indexes(exported)
    os.utime(old, (0, 0))
    with opened(_location(exported), read_only=False) as found:
        (spec,) = found.topics([])
        clock = ManualClock(now_ms=SystemClock().now_ms())
        collector, scope = Collector(clock, 20_000), _scope(found, ShardRef(spec, 0))

        lately = collector.collect(scope)
        clock.advance(20_001)
        swept = collector.collect(scope)

    assert lately == [], "whoever planned a read before goes on with it"
    assert [key.rpartition("/")[2] for key in swept] == [old.name]
    assert _indexes(exported) == before


def test_a_new_index_does_not_go_with_that_of_a_run_which_was_killed(exported: Exported) -> None:
    """Found by review: both had one name, and who had found the old one unneeded removed the new one."""
    _make_old(exported, 0)
    with opened(_location(exported), read_only=False) as found:
        (spec,) = found.topics([])
        ref = ShardRef(spec, 0)
        catalog = found.catalog(ref)
        piece = catalog.pieces()[0]
        unit = reindex.Indexed(str(spec.name), 0, ref.id, piece.descriptor)
        killed = reindex.judge(found.location, unit, rebuild=True)
        assert killed.key is not None
        os.utime(exported.root / killed.key, (0, 0))

        def name_another() -> list[str]:
            made = reindex.judge(found.location, unit, rebuild=True)
            named = msgspec.structs.replace(piece.descriptor, index_key=made.key, index_bytes=made.bytes)
            assert catalog.replace([piece], named)
            return []

        scope = dataclasses.replace(_scope(found, ref), tabled=name_another)
        assert Collector(found.clock, 3600).collect(scope) == [killed.key]

    assert len(_indexes(exported)) == 3
