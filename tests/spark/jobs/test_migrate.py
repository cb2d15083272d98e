"""Migrate: every record reads the same from the new store, wherever a run was ended; damage is not brought along."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import SparkSession

import forebay
from forebay.cleanup.tables import TableObjects
from forebay.errors import Invalid, Unavailable, Unsupported
from forebay.metadata import Put
from forebay.spark.jobs import migrate
from forebay.spark.jobs.compaction import compact
from forebay.spark.jobs.copying import copy
from forebay.spark.jobs.report import refs_at
from forebay.spark.jobs.units import UnitOutcome
from forebay.spark.place.location import Location
from forebay.spark.place.opening import opened
from forebay.testing.inside import inside
from tests.cli.rig import flip, snapshot
from tests.compacting.directly import AT_ONCE, Here
from tests.ledger import Ledger
from tests.support import servers
from tests.support.servers import ACCESS_KEY, BUCKET, SECRET_KEY, Server

pytestmark = pytest.mark.slow

S3 = """
storage: {{mode: object_store}}
store:
  backend: s3
  root: {bucket}/{prefix}
  options:
    endpoint: "{endpoint}"
    region: us-east-1
    allow_http: true
    access_key_id: "${{TEST_KEY}}"
    secret_access_key: "${{TEST_SECRET}}"
metadata: {{path: {metadata}}}
wal: {{free_bytes_min: 0}}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers.moto(tmp_path_factory.mktemp("moto")) as started:
        yield started


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units are done in this process: for what is not about Spark."""

    def local(spark: object, units: Sequence[Any], work: Callable[[Any], Any], **_: object) -> Iterator[Any]:
        for unit in units:
            try:
                yield UnitOutcome(unit, work(unit), None)
            except Exception as error:  # noqa: BLE001 - as a task does
                yield UnitOutcome(unit, None, str(error))

    monkeypatch.setattr(migrate, "spread", local)


def _shared(tmp_path: Path, name: str) -> dict[str, Any]:
    return {
        "storage": {"mode": "shared_fs"},
        "store": {"backend": "directory", "root": str(tmp_path / name)},
        "metadata": {"path": str(tmp_path / "data" / "metadata.sqlite")},
        "wal": {"free_bytes_min": 0},
    }


LOCAL: dict[str, Any] = {"wal": {"free_bytes_min": 0}}


def _file(tmp_path: Path, name: str, settings: dict[str, Any]) -> Path:
    import yaml  # noqa: PLC0415

    file = tmp_path / f"{name}.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def _fill(path: Path, settings: dict[str, Any], *, sealed: bool = True) -> list[bytes | None]:
    with forebay.open(str(path), settings) as log:
        topic = log.create_topic("shop/orders", partitions=2, exist_ok=True)
        for round_ in range(3):
            for partition in range(2):
                values = [b"%d-%d-%d" % (round_, partition, number) for number in range(50)]
                topic.append_many(values, keys=[b"k"] * 50, partition=partition)
            topic.rotate()
        topic.delete_by_offset(3, 5, partition=0)
        if sealed:
            log.seal_topic("shop/orders")
        else:
            log.export_topic("shop/orders")
    return _values(path, settings)


def _values(path: Path, settings: dict[str, Any]) -> list[bytes | None]:
    with forebay.open(str(path), settings, read_only=True) as log:
        topic = log.topic("shop/orders")
        return [record.value for partition in range(2) for record in topic.read(partition=partition)]


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_files_of_a_directory_become_objects_and_the_topic_goes_on(spark: SparkSession, tmp_path: Path) -> None:
    data = tmp_path / "data"
    before = _fill(data, LOCAL)
    new = _shared(tmp_path, "new")
    to = Location.of(data, _file(tmp_path, "new", new))

    planned = migrate.run(spark, Location.of(data), to, dry_run=True)
    untouched = (tmp_path / "new").exists()
    report = migrate.run(spark, Location.of(data), to, ["shop/orders"])
    again = migrate.run(spark, Location.of(data), to, ["shop/orders"])

    assert planned.figures["objects"] == 6 and not untouched
    assert report.is_clean and report.figures["copied"] == 6, report.lines()
    assert again.is_clean and "copied" not in again.figures
    for file in (data / "shards").rglob("*.seg"):
        file.rename(file.with_suffix(".gone"))
    assert _values(data, new) == before and len(before) == 298
    for file in (data / "shards").rglob("*.gone"):
        file.rename(file.with_suffix(".seg"))
    with forebay.open(str(data), new) as log:
        log.topic("shop/orders").append(b"later", partition=1)
    assert _values(data, new) == [*before, b"later"]


def _bucket(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Location:
    """Settings that name the server."""
    monkeypatch.setenv("TEST_KEY", ACCESS_KEY)
    monkeypatch.setenv("TEST_SECRET", SECRET_KEY)
    metadata = tmp_path / "data" / "metadata.sqlite"
    text = S3.format(bucket=BUCKET, prefix=tmp_path.name, endpoint=server.endpoint, metadata=metadata)
    (tmp_path / "new.yaml").write_text(text)
    return Location.parse({"settings": str(tmp_path / "new.yaml")})


def test_objects_go_from_a_directory_to_s3_whatever_ends_a_run(
    tmp_path: Path, server: Server, here: None, monkeypatch: pytest.MonkeyPatch, ledger: Ledger
) -> None:
    data, old = tmp_path / "data", _shared(tmp_path, "old")
    to = _bucket(tmp_path, server, monkeypatch)
    before = _fill(data, old)
    location = Location.of(data, _file(tmp_path, "old", old))
    new = to.settings()
    calls: list[int] = []

    def copy_or_end(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) in (3, 8):
            raise KeyboardInterrupt
        return copy(*arguments)

    monkeypatch.setattr(migrate, "copy", copy_or_end)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            migrate.run(None, location, to)  # type: ignore[arg-type]
        ledger.count("interruptions", at="copy")
        assert _values(data, old) == before, "the old store is named until all of a partition is copied"
    switched = migrate.Migration.switch_shard

    def ended(*arguments: Any) -> bool:
        switched(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(migrate.Migration, "switch_shard", ended)
        migrate.run(None, location, to)  # type: ignore[arg-type]
    ledger.count("interruptions", at="switch")
    report = migrate.run(None, location, to)  # type: ignore[arg-type]
    kept = snapshot(tmp_path / "old")
    with forebay.open(str(data), new, read_only=True) as log:
        topic = log.topic("shop/orders")
        found = [record.value for partition in range(2) for record in topic.read(partition=partition)]
    removed = migrate.run(None, location, to, remove_old=True)  # type: ignore[arg-type]

    assert report.is_clean and found == before
    assert len([name for name in kept if name.endswith(".seg")]) == 6
    assert removed.is_clean and int(removed.figures["removed"] or 0) >= 12
    assert not [name for name in snapshot(tmp_path / "old") if name.endswith((".seg", ".idx"))]
    (tmp_path / "data" / "shards").rename(tmp_path / "aside")
    (tmp_path / "data" / "shards").mkdir()
    with forebay.open(str(data), new, read_only=True) as log:
        topic = log.topic("shop/orders")
        assert [record.value for p in range(2) for record in topic.read(partition=p)] == before


def test_between_directories_the_catalog_stays_as_it_is(tmp_path: Path, here: None) -> None:
    data, old, new = tmp_path / "data", _shared(tmp_path, "old"), _shared(tmp_path, "new")
    before = _fill(data, old)
    location, to = (Location.of(data, _file(tmp_path, name, found)) for name, found in (("o", old), ("n", new)))

    report = migrate.run(None, location, to, remove_old=True)  # type: ignore[arg-type]

    assert report.is_clean and report.figures["copied"] == 6
    (data / "shards").rename(tmp_path / "aside")
    (data / "shards").mkdir()
    assert _values(data, new) == before


def test_between_directories_an_index_keeps_the_name_that_the_catalog_has_for_it(tmp_path: Path, here: None) -> None:
    """Found by review: one that was made anew could not be found in the new store."""
    data, old, new = tmp_path / "data", _shared(tmp_path, "old"), _shared(tmp_path, "new")
    before = _fill(data, old)
    location, to = (Location.of(data, _file(tmp_path, name, found)) for name, found in (("o", old), ("n", new)))
    with opened(location, read_only=False) as found:
        for ref in refs_at(found, []):
            for piece in (catalog := found.catalog(ref)).pieces():
                key = piece.descriptor.index_object.replace(".idx", "-0123456789abcdef.idx")
                (tmp_path / "old" / piece.descriptor.index_object).rename(tmp_path / "old" / key)
                assert catalog.replace([piece], msgspec.structs.replace(piece.descriptor, index_key=key))

    assert migrate.run(None, location, to, remove_old=True).is_clean  # type: ignore[arg-type]

    (data / "shards").rename(tmp_path / "aside")
    (data / "shards").mkdir()
    assert _values(data, new) == before


@pytest.mark.parametrize("step", ["switch", "remove_old"])
def test_what_is_compacted_meanwhile_stays_in_the_old_store(
    tmp_path: Path, here: None, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Found by review: between directories the partition was taken for migrated all the same."""
    data, old, new = tmp_path / "data", _shared(tmp_path, "old"), _shared(tmp_path, "new")
    before = _fill(data, old)
    location, to = (Location.of(data, _file(tmp_path, name, found)) for name, found in (("o", old), ("n", new)))
    real = getattr(migrate.Migration, step)

    def late(self: migrate.Migration, *given: Any) -> None:
        assert compact(Here(location), location, [], rules=AT_ONCE).figures["rewrites"] == 2
        real(self, *given)

    monkeypatch.setattr(migrate.Migration, step, late)
    report = migrate.run(None, location, to, remove_old=True)  # type: ignore[arg-type]
    monkeypatch.undo()

    assert len(report.findings) == 2 and not report.figures.get("removed", 0)
    (data / "shards").rename(tmp_path / "aside")
    (data / "shards").mkdir()
    assert _values(data, old) == before


def test_while_somebody_compacts_nothing_is_switched_or_removed(tmp_path: Path, here: None) -> None:
    data, old, new = tmp_path / "data", _shared(tmp_path, "old"), _shared(tmp_path, "new")
    _fill(data, old)
    location, to = (Location.of(data, _file(tmp_path, name, found)) for name, found in (("o", old), ("n", new)))
    with opened(location, read_only=False) as found:
        busy, _ = (found.catalog(ref).keys.compactor for ref in refs_at(found, []))
        found.metadata.transaction([], [Put(busy, b"compaction of shop/orders[0]")])

    report = migrate.run(None, location, to, remove_old=True)  # type: ignore[arg-type]

    (finding,) = report.findings
    assert "waits for compaction of shop/orders[0]" in finding.what
    assert [part.figures.get("removed") for part in report.parts] == [None, 6]


@pytest.mark.parametrize("kind", ["where topics are handed over", "another path to it"])
def test_the_old_store_by_another_name_loses_nothing(tmp_path: Path, here: None, kind: str) -> None:
    """Found by review: each object was taken for its own copy, and all of them were removed as old ones."""
    data, new = tmp_path / "data", _shared(tmp_path, "new")
    (tmp_path / "store").mkdir()
    (tmp_path / "new").symlink_to(tmp_path / "store")
    local = {**LOCAL, "storage": {"handoff_root": str(tmp_path / "new")}}
    old = local if kind == "where topics are handed over" else _shared(tmp_path, "store")
    before = _fill(data, old)
    location, to = (Location.of(data, _file(tmp_path, name, found)) for name, found in (("o", old), ("n", new)))
    objects = snapshot(tmp_path / "store")

    with pytest.raises(Invalid, match="is the old store itself"):
        migrate.run(None, location, to, remove_old=True)  # type: ignore[arg-type]

    assert snapshot(tmp_path / "store") == objects
    assert migrate.run(None, location, to).is_clean  # type: ignore[arg-type]
    assert _values(data, new) == before


def test_a_directory_that_others_also_met_in_is_left_in_several_runs(tmp_path: Path, here: None) -> None:
    """Found by review: both stores have one name, and the list in the new one was looked for in the old alone."""
    data, new = tmp_path / "data", _shared(tmp_path, "new")
    old = {**LOCAL, "storage": {"handoff_root": str(tmp_path / "old")}}
    _fill(data, old)
    with forebay.open(str(data), old) as log:
        log.unseal_topic("shop/orders")
        for partition in range(2):
            log.topic("shop/orders").append(b"more", partition=partition)
        log.export_topic("shop/orders")
    before = _values(data, old)
    location, to = (Location.of(data, _file(tmp_path, name, found)) for name, found in (("o", old), ("n", new)))

    reports = [
        migrate.run(None, location, to, remove_old=remove_old)  # type: ignore[arg-type]
        for remove_old in (False, True, True)
    ]

    assert all(report.is_clean for report in reports)
    assert [report.figures.get("copied", 0) for report in reports] == [8, 0, 0]
    assert not list((tmp_path / "old").rglob("*.seg"))
    assert _values(data, new) == before


def test_what_was_compacted_in_a_directory_stays_for_those_who_read_it(tmp_path: Path, here: None) -> None:
    data, new = tmp_path / "data", _shared(tmp_path, "new")
    _fill(data, LOCAL, sealed=False)
    location, to = Location.of(data), Location.of(data, _file(tmp_path, "new", new))
    assert compact(Here(location), location, [], rules=AT_ONCE).is_clean
    with opened(location, read_only=False) as found:
        for ref in refs_at(found, []):
            catalog = found.catalog(ref)
            for piece in catalog.pieces():
                assert catalog.replace([piece], msgspec.structs.replace(piece.descriptor, created_at=1))
    copies = sorted((data / "loads").rglob("compacted/*"))
    for path in copies:
        os.utime(path, (1, 1))

    assert migrate.run(None, location, to).is_clean  # type: ignore[arg-type]
    with forebay.open(str(data), new) as log:
        inside(log).collect_directory()

    assert copies and sorted((data / "loads").rglob("compacted/*")) == copies


FROM_FILES = ("object stored", "before the switch", "manifest stored", "one partition switched")
FROM_STORE = ("object stored", "before old objects go", "an old object gone")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "steps"), [("files", FROM_FILES), ("store", FROM_STORE)])
def test_kills_at_every_step_cost_no_record(tmp_path: Path, kind: str, steps: tuple[str, ...], ledger: Ledger) -> None:
    data, new = tmp_path / "data", _shared(tmp_path, "new")
    old = LOCAL if kind == "files" else _shared(tmp_path, "old")
    before = _fill(data, old)
    files = [str(_file(tmp_path, name, found)) for name, found in (("old", old), ("new", new))]

    child = [sys.executable, "-m", "tests.spark.jobs.migrate_child", str(data), *files, *steps]
    ended = subprocess.run(child, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr
    ledger.count("kills", len(steps), source=kind)
    (data / "shards").rename(tmp_path / "aside")
    (data / "shards").mkdir()
    assert _values(data, new) == before
    assert not list((tmp_path / "old").rglob("*.seg"))


def test_damage_stays_behind_and_its_partition_is_not_switched(tmp_path: Path, here: None) -> None:
    data = tmp_path / "data"
    _fill(data, LOCAL)
    victim = min((data / "shards").glob("*_1/*.seg"))
    flip(victim, -60)
    to = Location.of(data, _file(tmp_path, "new", _shared(tmp_path, "new")))

    report = migrate.run(None, Location.of(data), to)  # type: ignore[arg-type]

    (finding,) = report.findings
    assert finding.shard == "shop/orders[1]" and "is not what was catalogued" in finding.what
    assert [part.figures.get("switched") for part in report.parts] == [True, None]
    assert not list((tmp_path / "new").rglob(f"*{victim.stem}*"))


def test_what_cannot_be_migrated_is_refused_by_name(tmp_path: Path, here: None) -> None:
    data, new = tmp_path / "data", _shared(tmp_path, "new")
    _fill(data, LOCAL, sealed=False)
    location, to = Location.of(data), Location.of(data, _file(tmp_path, "new", new))
    with forebay.open(str(data), LOCAL) as log:
        log.topic("shop/orders").append(b"more")
        with pytest.raises(Unavailable, match=r"shop/orders\[0\] is owned by session"):
            migrate.run(None, location, to)  # type: ignore[arg-type]
    with pytest.raises(Invalid, match="have no store"):
        migrate.run(None, location, location)  # type: ignore[arg-type]
    with pytest.raises(Invalid, match="name the same store"):
        migrate.run(None, to, to)  # type: ignore[arg-type]
    other = {**new, "metadata": {"path": str(tmp_path / "other.sqlite")}}
    with pytest.raises(Unsupported, match="name other metadata"):
        migrate.run(None, location, Location.of(data, _file(tmp_path, "x", other)))  # type: ignore[arg-type]
    with opened(location, read_only=False) as found:
        (spec,) = found.topics([])
        store = found.stores.of(f"local:{found.holder}")
        tabled = TableObjects(found.metadata, "/forebay", "shop", "orders", spec.topic_id, clock=found.clock)
        tabled.put(["a/b.parquet"], store)
    with pytest.raises(Unsupported, match="has an open table"):
        migrate.run(None, location, to)  # type: ignore[arg-type]
