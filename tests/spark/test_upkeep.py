"""Upkeep of open tables: what is expired goes with its files, what is named stays, whichever process is about."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.table import Table

from forebay.clock import SystemClock
from forebay.settings import TableSettings
from forebay.spark.tables import upkeep
from forebay.spark.tables.upkeep import EXPIRED, expire, own_folder, properties_of, remove_strays

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([("number", pa.int64())])
LATER_MS = 10**15


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    found = load_catalog("test", type="sql", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}")
    found.create_namespace("shop")
    yield found
    found.close()


def made(catalog: Catalog, name: str = "shop.orders", **properties: str) -> Table:
    table = catalog.create_table(name, SCHEMA)
    with table.transaction() as changing:
        changing.set_properties({**properties_of(table), **properties})
    return table


def commit(table: Table, number: int) -> str:
    """Add a file with one row, as a job does; its address."""
    folder = own_folder(table, "data/lake")
    Path(folder.removeprefix("file://")).mkdir(parents=True, exist_ok=True)
    address = f"{folder}/{number:032x}.parquet"
    pq.write_table(pa.table({"number": [number]}, SCHEMA), address.removeprefix("file://"))
    table.add_files([address])
    return address


def numbers(table: Table) -> list[int]:
    table.refresh()
    return sorted(table.scan().to_arrow()["number"].to_pylist())


def metadata_files(table: Table, pattern: str) -> set[str]:
    return {path.as_uri() for path in Path(f"{table.location()}/metadata".removeprefix("file://")).glob(pattern)}


def manifests(table: Table) -> set[str]:
    """Manifests and lists in the directory; without those that kept commits wrote and merged at once."""
    commits = {snapshot.manifest_list[-41:-5] for snapshot in table.snapshots()}
    present, named = metadata_files(table, "*.avro"), reachable(table)
    assert named <= present
    return named | {address for address in present if address.rpartition("/")[2][:36] not in commits}


def reachable(table: Table) -> set[str]:
    """The manifests and lists that snapshots name."""
    lists = {snapshot.manifest_list for snapshot in table.snapshots()}
    return lists | {one.manifest_path for snapshot in table.snapshots() for one in snapshot.manifests(table.io)}


def test_the_oldest_snapshots_go_with_what_only_they_named(catalog: Catalog) -> None:
    table = made(catalog, **{"commit.manifest.min-count-to-merge": "3"})
    for number in range(12):
        commit(table, number)
    tagged = table.snapshots()[1].snapshot_id
    table.manage_snapshots().create_tag(tagged, "audit").commit()
    newest = [snapshot.snapshot_id for snapshot in table.snapshots()[-4:]]
    before = metadata_files(table, "*.avro")

    assert expire(table, TableSettings(snapshots_kept_max=4), 0, at_least=8) == 0
    assert len(table.snapshots()) == 12
    assert expire(table, TableSettings(snapshots_kept_max=4), 0) == 7

    assert {snapshot.snapshot_id for snapshot in table.snapshots()} == {tagged, *newest}
    assert manifests(table) == reachable(table) < before
    assert numbers(table) == list(range(12)), "no row goes with a snapshot"
    assert table.scan(snapshot_id=tagged).to_arrow().num_rows == 2
    assert EXPIRED not in table.properties
    assert expire(table, TableSettings(snapshots_kept_max=4), 0) == 0


def test_snapshots_go_by_age_and_the_current_one_never_does(catalog: Catalog) -> None:
    table = made(catalog)
    for number in range(3):
        commit(table, number)
    first = table.snapshots()[0].timestamp_ms

    assert expire(table, TableSettings(snapshots_kept_s=10), first + 9_999) == 0
    assert expire(table, TableSettings(snapshots_kept_s=10), LATER_MS) == 2

    assert [snapshot.snapshot_id for snapshot in table.snapshots()] == [table.metadata.current_snapshot_id]
    assert numbers(table) == [0, 1, 2]


def test_a_snapshot_is_kept_from_the_moment_when_another_took_its_place(catalog: Catalog) -> None:
    """One that was current for weeks went with the second commit behind it, under the readers who had just begun."""
    table = made(catalog)
    commit(table, 0)
    while SystemClock().now_ms() < table.snapshots()[0].timestamp_ms + 5:
        pass
    for number in (1, 2):
        commit(table, number)
    first, second, _ = table.snapshots()
    kept, settings = 10_000, TableSettings(snapshots_kept_s=10)

    assert expire(table, settings, first.timestamp_ms + kept) == 0
    assert expire(table, settings, second.timestamp_ms + kept - 1) == 0
    assert expire(table, settings, second.timestamp_ms + kept) in (1, 2)
    assert table.snapshot_by_id(first.snapshot_id) is None


@pytest.mark.parametrize("files", [0, 1, 4])
def test_an_expiry_that_was_cut_short_is_finished_by_the_next(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    table = made(catalog, **{"commit.manifest.min-count-to-merge": "2"})
    for number in range(6):
        commit(table, number)
    real, calls = upkeep.delete_file, list[int]()

    def interrupted(*arguments: Any) -> None:
        if len(calls) == files:
            raise KeyboardInterrupt
        calls.append(1)
        real(*arguments)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(upkeep, "delete_file", interrupted)
        expire(table, TableSettings(snapshots_kept_max=1), 0)
    again = catalog.load_table("shop.orders")
    left = manifests(again) - reachable(again)
    assert left
    assert EXPIRED in again.properties
    commit(again, 6)

    expire(again, TableSettings(snapshots_kept_max=10), 0)

    assert manifests(again) == reachable(again)
    assert EXPIRED not in again.properties
    assert numbers(again) == list(range(7))


def test_versions_of_the_metadata_do_not_pile_up(catalog: Catalog) -> None:
    table = made(catalog, **{"write.metadata.previous-versions-max": "3"})

    for number in range(10):
        commit(table, number)
        expire(table, TableSettings(snapshots_kept_max=2), 0)

    assert len(metadata_files(table, "*.metadata.json")) == 4
    assert len(table.snapshots()) == 2
    assert len(table.inspect.manifests()) <= 10
    assert numbers(table) == list(range(10))


def test_what_was_chosen_for_a_table_stays(catalog: Catalog) -> None:
    table = catalog.create_table("shop.chosen", SCHEMA, properties={"commit.manifest-merge.enabled": "false"})

    assert properties_of(table) == {"write.metadata.delete-after-commit.enabled": "true"}


def aged(address: str, seconds: float) -> Path:
    path = Path(address.removeprefix("file://"))
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_bytes(b"left")
    os.utime(path, (seconds, seconds))
    return path


def test_files_that_no_snapshot_names_go_after_their_grace(catalog: Catalog) -> None:
    table = made(catalog)
    named = [aged(commit(table, number), 1_000) for number in range(3)]
    folder = own_folder(table, "data/lake")
    old, young = aged(f"{folder}/{'a' * 32}.parquet", 1_000), aged(f"{folder}/{'b' * 32}.parquet", 1_900)
    foreign = aged(f"{folder}/readme.txt", 1_000)
    begun = aged(f"{folder}/.uploads/x", 1_000)
    behind = catalog.load_table("shop.orders")
    named.append(aged(commit(table, 3), 1_000))

    assert remove_strays(behind, folder, grace_s=500, now_ms=2_000_000) == 1

    assert not old.exists()
    assert not begun.exists()
    assert all(path.exists() for path in (young, foreign, *named))
    assert remove_strays(table, folder, grace_s=100, now_ms=2_000_000) == 1
    assert not young.exists()
    assert numbers(table) == [0, 1, 2, 3]


def test_files_of_an_expired_overwrite_go_and_those_of_kept_snapshots_stay(catalog: Catalog) -> None:
    table = made(catalog)
    first = aged(commit(table, 0), 1_000)
    table.delete("number == 0")
    second = aged(commit(table, 1), 1_000)
    folder = own_folder(table, "data/lake")

    assert remove_strays(table, folder, grace_s=0, now_ms=LATER_MS) == 0
    expire(table, TableSettings(snapshots_kept_max=1), 0)
    assert remove_strays(table, folder, grace_s=0, now_ms=LATER_MS) == 1

    assert (first.exists(), second.exists()) == (False, True)


def test_a_table_that_shares_its_location_with_another_touches_its_own_files_alone(catalog: Catalog) -> None:
    old = made(catalog)
    kept = [aged(commit(old, number), 1_000) for number in range(3)]
    catalog.rename_table("shop.orders", "shop.archive")
    new = made(catalog)
    assert new.location() == old.location()
    for number in range(10, 13):
        commit(new, number)

    expire(new, TableSettings(snapshots_kept_max=1), 0)
    assert remove_strays(new, own_folder(new, "data/lake"), grace_s=0, now_ms=LATER_MS) == 0

    assert all(path.exists() for path in kept)
    archive = catalog.load_table("shop.archive")
    assert (numbers(archive), numbers(new)) == ([0, 1, 2], [10, 11, 12])
    assert [archive.scan(snapshot_id=one.snapshot_id).to_arrow().num_rows for one in archive.snapshots()] == [1, 2, 3]
