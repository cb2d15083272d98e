"""Objects that nobody needs any more go also where no owner sweeps them, and nothing goes that may be named again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import msgspec
import pytest

from forebay.cleanup.objects import ObjectCleanup
from forebay.cleanup.tables import TableObjects
from forebay.clock import SystemClock
from forebay.errors import Fenced
from forebay.format.metadata.descriptor import DescriptorKind
from forebay.metadata import Delete, Put
from forebay.metadata.leases import Lease
from forebay.spark.place import opening
from forebay.storage import Storage
from forebay.testing.clock import ManualClock
from forebay.testing.inside import inside
from forebay.topics import ShardRef
from tests.compacting.directly import catalog_of, check_sound, compacted, kinds_of, shown
from tests.moves import rig
from tests.moves.rig import TOPIC, Land
from tests.spark.mixed import Mixed

pytestmark = pytest.mark.slow


class Later(SystemClock):
    """Two days on: every grace is over."""

    def now_ms(self) -> int:
        return super().now_ms() + 2 * 86_400_000


def _compacted(land: Land) -> Mixed:
    """Two files of 100 records, as one Parquet segment."""
    mixed = Mixed(land, partitions=1)
    for _ in range(2):
        mixed.filled.many(100)
        mixed.export()
    assert compacted(land).figures["rewrites"] == 1
    return mixed


def _private(land: Land, name: str = "one") -> list[str]:
    """Parquet segments in a data directory, and their indexes."""
    return sorted(path.suffix for path in (land.root / name / "loads").rglob("compacted/*"))


def _reopened(land: Land, name: str = "one") -> Storage:
    return Storage.open(land.root / name, land.settings, clock=Later())


# What lies in a data directory, and was copied into a store since


def test_copies_in_a_directory_go_once_the_topic_has_moved(tmp_path: Path) -> None:
    land = rig.local(tmp_path)
    mixed = _compacted(land)
    mixed.log.seal_topic(TOPIC)
    with land.open("two") as other:
        topic = other.topic(TOPIC)
        assert (shown(topic), kinds_of(other, topic)) == (mixed.rows, [DescriptorKind.PARQUET])
        inside(mixed.log).collect_directory()
        assert _private(land) == [".idx", ".parquet"], "those who began to read it go on"
        mixed.close()

        with _reopened(land) as log:
            inside(log).collect_directory()

        assert _private(land) == []
        assert shown(topic) == mixed.rows


def test_copies_in_a_directory_go_though_the_topic_stays(tmp_path: Path) -> None:
    land = rig.local(tmp_path)
    mixed = _compacted(land)
    mixed.log.seal_topic(TOPIC)
    mixed.log.unseal_topic(TOPIC)
    mixed.close()
    assert _private(land) == [".idx", ".parquet"]

    with _reopened(land) as log:
        topic = log.topic(TOPIC)
        topic.append(b"more", partition=0)
        # Or the background has been first.
        inside(log).collect(topic)

        assert _private(land) == []
        assert shown(topic)[:-1] == mixed.rows


def test_grace_begins_when_the_copy_is_named(tmp_path: Path) -> None:
    """However long ago it was compacted."""
    land = rig.local(tmp_path)
    mixed = _compacted(land)
    catalog = catalog_of(mixed.log, mixed.filled.topic)
    (piece,) = catalog.pieces()
    assert catalog.replace([piece], msgspec.structs.replace(piece.descriptor, created_at=1))
    for path in (land.root / "one" / "loads").rglob("compacted/*"):
        os.utime(path, (1, 1))

    mixed.log.seal_topic(TOPIC)
    inside(mixed.log).collect_directory()

    assert _private(land) == [".idx", ".parquet"]
    mixed.close()


def test_history_that_lies_in_a_directory_stays_there(tmp_path: Path) -> None:
    land = rig.local(tmp_path)
    mixed = _compacted(land)
    mixed.close()

    with _reopened(land) as log:
        inside(log).collect_directory()  # nobody has the topic open
        assert shown(log.topic(TOPIC)) == mixed.rows


@pytest.mark.parametrize("why", ["a compactor is at work", "a table names it"])
def test_copies_that_somebody_may_need_stay(tmp_path: Path, why: str) -> None:
    land = rig.local(tmp_path)
    mixed = _compacted(land)
    mixed.log.seal_topic(TOPIC)
    mixed.close()
    with _reopened(land) as log:
        metadata, spec = rig.metadata_of(log), mixed.filled.topic.spec
        key = rig.keys_of(log, mixed.filled.topic).compactor
        tabled = TableObjects(metadata, "/forebay", spec.namespace, spec.topic, spec.topic_id, clock=ManualClock())
        places = inside(log).places
        if why == "a table names it":
            tabled.put([stat.key for stat in places.loads.list() if stat.key.endswith(".parquet")], places.loads)
        else:
            metadata.transaction([], [Put(key, b"compactor")])
        inside(log).collect_directory()
        assert _private(land) == [".idx", ".parquet"]
        metadata.transaction([], [Delete(key)])
        tabled.put([], places.loads)

        inside(log).collect_directory()

        assert _private(land) == []


# What compaction replaced, of a topic that nobody owns


@pytest.fixture
def unowned(tmp_path: Path) -> Iterator[Mixed]:
    """History of exported files and a bulk load, which nobody owns."""
    mixed = Mixed(rig.shared_fs(tmp_path), partitions=1)
    for _ in range(2):
        mixed.filled.many(100)
        mixed.export()
    mixed.load(50)
    mixed.filled.many(10)
    mixed.close()
    yield mixed


def _frames(land: Land) -> list[Path]:
    return sorted((land.root / "store").rglob("*.seg"))


def _check(mixed: Mixed) -> None:
    check_sound(mixed.land)
    with mixed.land.open("one") as log:
        assert shown(log.topic(TOPIC)) == mixed.rows


def test_what_was_replaced_goes_by_a_later_compaction_where_nobody_owns_the_topic(unowned: Mixed) -> None:
    land = unowned.land
    assert _frames(land)
    first = compacted(land)
    assert (first.summary, first.figures["objects_removed"]) == ("1 rewrite", 0), "readers may be at them"
    assert compacted(land).summary == "nothing to do"

    with mock.patch.object(opening, "SystemClock", Later):
        report = compacted(land)

    assert _frames(land) == []
    assert report.is_clean and report.summary == f"{report.figures['objects_removed']} objects removed"
    assert compacted(land).summary == "nothing to do"
    _check(unowned)


def test_a_run_that_finds_something_to_do_removes_what_was_replaced_before_too(unowned: Mixed) -> None:
    land = unowned.land
    compacted(land)
    before = _frames(land)
    with land.open("one") as log:
        unowned.filled.topic = log.topic(TOPIC)
        for _ in range(2):
            unowned.filled.many(100)
            log.export_topic(TOPIC)

    with mock.patch.object(opening, "SystemClock", Later):
        report = compacted(land)

    assert report.is_clean and report.figures["rewrites"] == 1
    assert before and not set(before) & set(_frames(land))
    _check(unowned)


def test_an_owner_sweeps_its_own(unowned: Mixed) -> None:
    compacted(unowned.land)
    before = _frames(unowned.land)
    with unowned.land.open("one") as log, mock.patch.object(opening, "SystemClock", Later):
        log.topic(TOPIC).offsets(0)
        assert compacted(unowned.land).figures["objects_removed"] == 0
        for _ in range(2):
            log.topic(TOPIC).append_many([b"more"] * 100)
            log.export_topic(TOPIC)
        report = compacted(unowned.land)
        assert (report.figures["rewrites"], report.figures["objects_removed"]) == (1, 0)

    assert before and set(before) <= set(_frames(unowned.land))


def test_a_lease_that_another_holds_leaves_all_to_it(unowned: Mixed) -> None:
    land = unowned.land
    compacted(land)
    before = _frames(land)
    with land.open("two") as log:
        key = rig.keys_of(log, unowned.filled.topic).compactor
        rig.metadata_of(log).transaction([], [Put(key, b"another")])

    with mock.patch.object(opening, "SystemClock", Later):
        report = compacted(land)

    assert report.is_clean and report.summary == "nothing to do"
    assert before and _frames(land) == before


def test_a_lease_that_is_lost_ends_the_sweep(unowned: Mixed) -> None:
    """What was listed since may be what the next compactor has made."""
    compacted(unowned.land)
    before = _frames(unowned.land)
    lost = mock.patch.object(Lease, "check", side_effect=Fenced("lost"))

    with mock.patch.object(opening, "SystemClock", Later), lost:
        report = compacted(unowned.land)

    assert [finding.what for finding in report.findings] == ["what was replaced is not removed yet: lost"]
    assert before and _frames(unowned.land) == before


def test_what_an_owner_may_name_yet_stays(unowned: Mixed) -> None:
    """An upload whose owner died before it was history: the next one finds the object, and names it."""
    land, shard = unowned.land, unowned.filled.topic.spec.topic_id + "_0"
    local = sorted((land.root / "one" / "shards" / shard).glob("*.seg"))
    past, coming = local[0].read_bytes(), local[-1].read_bytes()
    for name, content in (("1-aa.seg", past), ("1-aa.idx", b""), ("1-bb.seg", coming), ("1-bb.idx", b"")):
        (land.root / "store" / shard / name).write_bytes(content)
    for name in ("1-cc.seg", "1-dd.idx", "1-ee.manifest"):
        (land.root / "store" / shard / name).write_bytes(bytes(100))
    compacted(land)

    with mock.patch.object(opening, "SystemClock", Later):
        compacted(land)

    left = sorted(path.name for path in (land.root / "store" / shard).iterdir() if path.is_file())
    assert left == ["1-bb.idx", "1-bb.seg", "1-cc.seg", "1-dd.idx", "1-ee.manifest"]
    for name in left:
        (land.root / "store" / shard / name).unlink()
    _check(unowned)


@pytest.mark.parametrize(
    ("lies", "place"), [("local:", 0), ("loads:", 2), ("s3", 0)], ids=["in the directory", "as a load", "elsewhere"]
)
def test_objects_of_what_lies_elsewhere_stay(unowned: Mixed, lies: str, place: int) -> None:
    """They may be copies that somebody is about to name. That of a load does not say which offsets it has."""
    shard = unowned.filled.topic.spec.topic_id + "_0"
    copy = f"{shard}/1-aa.seg"
    with unowned.land.open("one") as log:
        catalog, places = catalog_of(log, unowned.filled.topic), inside(log).places
        assert places.store is not None
        below = {"loads:": unowned.land.root / "store" / shard / "loads"}
        local = sorted(below.get(lies, unowned.land.root / "one" / "shards" / shard).rglob("*.seg"))
        places.store.put_if_absent(copy, local[0].read_bytes())
        first = catalog.pieces()[place]
        assert (first.descriptor.load_id is not None) == (lies == "loads:")
        name = f"{lies}{log.directory_id}" if lies.endswith(":") else lies
        assert catalog.replace([first], msgspec.structs.replace(first.descriptor, store=name))
        ref = ShardRef(unowned.filled.topic.spec, 0)
        cleanup = ObjectCleanup(rig.metadata_of(log), log.settings, places, Later())

        assert cleanup.collect_shared(ref) == []
        assert catalog.replace([catalog.pieces()[place]], first.descriptor)
        assert cleanup.collect_shared(ref) == [copy]
