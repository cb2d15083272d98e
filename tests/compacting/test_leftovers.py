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
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from forebay.topics import ShardRef
from tests.compacting.directly import catalog_of, check_sound, compacted, kinds_of, shown
from tests.spark.mixed import Mixed
from tests.support.environments import directories
from tests.support.environments.directories import TOPIC, Environment

pytestmark = pytest.mark.slow


class Later(SystemClock):
    """Two days on: every grace is over."""

    def now_ms(self) -> int:
        return super().now_ms() + 2 * 86_400_000


def _compacted(environment: Environment) -> Mixed:
    """Two files of 100 records, as one Parquet segment."""
    mixed = Mixed(environment, partitions=1)
    for _ in range(2):
        mixed.filled.many(100)
        mixed.export()
    assert compacted(environment).figures["rewrites"] == 1
    return mixed


def _private(environment: Environment, name: str = "one") -> list[str]:
    """Parquet segments in a data directory, and their indexes."""
    return sorted(path.suffix for path in (environment.root / name / "loads").rglob("compacted/*"))


def _reopened(environment: Environment, name: str = "one") -> Storage:
    return Storage.open(environment.root / name, environment.settings, clock=Later())


# What lies in a data directory, and was copied into a store since


def test_copies_in_a_directory_go_once_the_topic_has_moved(tmp_path: Path) -> None:
    environment = directories.local(tmp_path)
    mixed = _compacted(environment)
    mixed.log.seal_topic(TOPIC)
    with environment.open("two") as other:
        topic = other.topic(TOPIC)
        assert (shown(topic), kinds_of(other, topic)) == (mixed.rows, [DescriptorKind.PARQUET])
        inside(mixed.log).collect_directory()
        assert _private(environment) == [".idx", ".parquet"], "those who began to read it go on"
        mixed.close()

        with _reopened(environment) as log:
            inside(log).collect_directory()

        assert _private(environment) == []
        assert shown(topic) == mixed.rows


def test_copies_in_a_directory_go_though_the_topic_stays(tmp_path: Path) -> None:
    environment = directories.local(tmp_path)
    mixed = _compacted(environment)
    mixed.log.seal_topic(TOPIC)
    mixed.log.unseal_topic(TOPIC)
    mixed.close()
    assert _private(environment) == [".idx", ".parquet"]

    with _reopened(environment) as log:
        topic = log.topic(TOPIC)
        topic.append(b"more", partition=0)
        # Or the background has been first.
        inside(log).collect(topic)

        assert _private(environment) == []
        assert shown(topic)[:-1] == mixed.rows


def test_grace_begins_when_the_copy_is_named(tmp_path: Path) -> None:
    """However long ago it was compacted."""
    environment = directories.local(tmp_path)
    mixed = _compacted(environment)
    catalog = catalog_of(mixed.log, mixed.filled.topic)
    (piece,) = catalog.pieces()
    assert catalog.replace([piece], msgspec.structs.replace(piece.descriptor, created_at=1))
    for path in (environment.root / "one" / "loads").rglob("compacted/*"):
        os.utime(path, (1, 1))

    mixed.log.seal_topic(TOPIC)
    inside(mixed.log).collect_directory()

    assert _private(environment) == [".idx", ".parquet"]
    mixed.close()


def test_history_that_lies_in_a_directory_stays_there(tmp_path: Path) -> None:
    environment = directories.local(tmp_path)
    mixed = _compacted(environment)
    mixed.close()

    with _reopened(environment) as log:
        inside(log).collect_directory()  # nobody has the topic open
        assert shown(log.topic(TOPIC)) == mixed.rows


@pytest.mark.parametrize("why", ["a compactor is at work", "a table names it"])
def test_copies_that_somebody_may_need_stay(tmp_path: Path, why: str) -> None:
    environment = directories.local(tmp_path)
    mixed = _compacted(environment)
    mixed.log.seal_topic(TOPIC)
    mixed.close()
    with _reopened(environment) as log:
        metadata, spec = directories.metadata_of(log), mixed.filled.topic.spec
        key = directories.keys_of(log, mixed.filled.topic).compactor
        tabled = TableObjects(metadata, "/forebay", spec.namespace, spec.topic, spec.topic_id, clock=ManualClock())
        places = inside(log).places
        if why == "a table names it":
            tabled.put([stat.key for stat in places.loads.list() if stat.key.endswith(".parquet")], places.loads)
        else:
            metadata.transaction([], [Put(key, b"compactor")])
        inside(log).collect_directory()
        assert _private(environment) == [".idx", ".parquet"]
        metadata.transaction([], [Delete(key)])
        tabled.put([], places.loads)

        inside(log).collect_directory()

        assert _private(environment) == []


# What compaction replaced, of a topic that nobody owns


@pytest.fixture
def unowned(tmp_path: Path) -> Iterator[Mixed]:
    """History of exported files and a bulk load, which nobody owns."""
    mixed = Mixed(directories.shared_fs(tmp_path), partitions=1)
    for _ in range(2):
        mixed.filled.many(100)
        mixed.export()
    mixed.load(50)
    mixed.filled.many(10)
    mixed.close()
    yield mixed


def _frames(environment: Environment) -> list[Path]:
    return sorted((environment.root / "store").rglob("*.seg"))


def _check(mixed: Mixed) -> None:
    check_sound(mixed.environment)
    with mixed.environment.open("one") as log:
        assert shown(log.topic(TOPIC)) == mixed.rows


def test_what_was_replaced_goes_by_a_later_compaction_where_nobody_owns_the_topic(unowned: Mixed) -> None:
    environment = unowned.environment
    assert _frames(environment)
    first = compacted(environment)
    assert (first.summary, first.figures["objects_removed"]) == ("1 rewrite", 0), "readers may be at them"
    assert compacted(environment).summary == "nothing to do"

    with mock.patch.object(opening, "SystemClock", Later):
        report = compacted(environment)

    assert _frames(environment) == []
    assert report.is_clean and report.summary == f"{report.figures['objects_removed']} objects removed"
    assert compacted(environment).summary == "nothing to do"
    _check(unowned)


def test_a_run_that_finds_something_to_do_removes_what_was_replaced_before_too(unowned: Mixed) -> None:
    environment = unowned.environment
    compacted(environment)
    before = _frames(environment)
    with environment.open("one") as log:
        unowned.filled.topic = log.topic(TOPIC)
        for _ in range(2):
            unowned.filled.many(100)
            log.export_topic(TOPIC)

    with mock.patch.object(opening, "SystemClock", Later):
        report = compacted(environment)

    assert report.is_clean and report.figures["rewrites"] == 1
    assert before and not set(before) & set(_frames(environment))
    _check(unowned)


def test_an_owner_sweeps_its_own(unowned: Mixed) -> None:
    compacted(unowned.environment)
    before = _frames(unowned.environment)
    with unowned.environment.open("one") as log, mock.patch.object(opening, "SystemClock", Later):
        log.topic(TOPIC).offsets(0)
        assert compacted(unowned.environment).figures["objects_removed"] == 0
        for _ in range(2):
            log.topic(TOPIC).append_many([b"more"] * 100)
            log.export_topic(TOPIC)
        report = compacted(unowned.environment)
        assert (report.figures["rewrites"], report.figures["objects_removed"]) == (1, 0)

    assert before and set(before) <= set(_frames(unowned.environment))


def test_a_lease_that_another_holds_leaves_all_to_it(unowned: Mixed) -> None:
    environment = unowned.environment
    compacted(environment)
    before = _frames(environment)
    with environment.open("two") as log:
        key = directories.keys_of(log, unowned.filled.topic).compactor
        directories.metadata_of(log).transaction([], [Put(key, b"another")])

    with mock.patch.object(opening, "SystemClock", Later):
        report = compacted(environment)

    assert report.is_clean and report.summary == "nothing to do"
    assert before and _frames(environment) == before


def test_a_lease_that_is_lost_ends_the_sweep(unowned: Mixed) -> None:
    """What was listed since may be what the next compactor has made."""
    compacted(unowned.environment)
    before = _frames(unowned.environment)
    lost = mock.patch.object(Lease, "check", side_effect=Fenced("lost"))

    with mock.patch.object(opening, "SystemClock", Later), lost:
        report = compacted(unowned.environment)

    assert [finding.what for finding in report.findings] == ["what was replaced is not removed yet: lost"]
    assert before and _frames(unowned.environment) == before


def test_what_an_owner_may_name_yet_stays(unowned: Mixed) -> None:
    """An upload whose owner died before it was history: the next one finds the object, and names it."""
    environment, shard = unowned.environment, unowned.filled.topic.spec.topic_id + "_0"
    local = sorted((environment.root / "one" / "shards" / shard).glob("*.seg"))
    past, coming = local[0].read_bytes(), local[-1].read_bytes()
    for name, content in (("1-aa.seg", past), ("1-aa.idx", b""), ("1-bb.seg", coming), ("1-bb.idx", b"")):
        (environment.root / "store" / shard / name).write_bytes(content)
    for name in ("1-cc.seg", "1-dd.idx", "1-ee.manifest"):
        (environment.root / "store" / shard / name).write_bytes(bytes(100))
    compacted(environment)

    with mock.patch.object(opening, "SystemClock", Later):
        compacted(environment)

    left = sorted(path.name for path in (environment.root / "store" / shard).iterdir() if path.is_file())
    assert left == ["1-bb.idx", "1-bb.seg", "1-cc.seg", "1-dd.idx", "1-ee.manifest"]
    for name in left:
        (environment.root / "store" / shard / name).unlink()
    _check(unowned)


@pytest.mark.parametrize(
    ("lies", "place"), [("local:", 0), ("loads:", 2), ("s3", 0)], ids=["in the directory", "as a load", "elsewhere"]
)
def test_objects_of_what_lies_elsewhere_stay(unowned: Mixed, lies: str, place: int) -> None:
    """They may be copies that somebody is about to name. That of a load does not say which offsets it has."""
    shard = unowned.filled.topic.spec.topic_id + "_0"
    copy = f"{shard}/1-aa.seg"
    with unowned.environment.open("one") as log:
        catalog, places = catalog_of(log, unowned.filled.topic), inside(log).places
        assert places.store is not None
        below = {"loads:": unowned.environment.root / "store" / shard / "loads"}
        local = sorted(below.get(lies, unowned.environment.root / "one" / "shards" / shard).rglob("*.seg"))
        places.store.put_if_absent(copy, local[0].read_bytes())
        first = catalog.pieces()[place]
        assert (first.descriptor.load_id is not None) == (lies == "loads:")
        name = f"{lies}{log.directory_id}" if lies.endswith(":") else lies
        assert catalog.replace([first], msgspec.structs.replace(first.descriptor, store=name))
        ref = ShardRef(unowned.filled.topic.spec, 0)
        cleanup = ObjectCleanup(directories.metadata_of(log), log.settings, places, Later())

        assert cleanup.collect_shared(ref) == []
        assert catalog.replace([catalog.pieces()[place]], first.descriptor)
        assert cleanup.collect_shared(ref) == [copy]
