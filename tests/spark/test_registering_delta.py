"""Compacted history as a Delta table: it names the files of history, and neither it nor other tools harm them."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaError

from forebay.errors import Conflict
from forebay.spark.jobs import register
from forebay.spark.jobs.report import JobReport
from forebay.spark.place.location import Location
from forebay.spark.tables.commit import TableChange, commit
from forebay.spark.tables.delta import DeltaLakeTable
from forebay.spark.tables.delta_files import look_up_delta
from tests.cli.rig import Shell
from tests.compacting.directly import AT_ONCE, compacted, location_of
from tests.spark.mixed import TOPIC, Mixed, settings_file
from tests.spark.test_registering import below, objects_kept
from tests.support.environments.directories import Environment, local, shared_fs

pytestmark = pytest.mark.slow


@pytest.fixture(params=["local", "shared_fs"])
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> Environment:
    return local(tmp_path) if request.param == "local" else shared_fs(tmp_path)


def filled(environment: Environment) -> Mixed:
    """A topic with history in Parquet, and a newest record in the log alone."""
    mixed = Mixed(environment)
    for count in (120, 80):
        for partition in range(2):
            mixed.filled.many(count, partition)
        mixed.export()
    mixed.delete(0, 10, 20)
    compacted(environment, [TOPIC], rules=AT_ONCE)
    mixed.filled.singles(1, 0)
    return mixed


def registered(environment: Environment, *, table_format: str = "delta", kept_s: int = 7 * 86_400) -> JobReport:
    location = location_of(environment)
    overrides = (*location.overrides, ("table.snapshots_kept_s", str(kept_s)))
    chosen = Location(path=location.path, settings_text=location.settings_text, overrides=overrides)
    return register.run(chosen, TOPIC, table_format=table_format)


def table_of(environment: Environment) -> DeltaLakeTable:
    table = DeltaLakeTable(location_of(environment), ("shop", "orders"))
    assert table.look()
    return table


def offsets_in(table: DeltaTable) -> set[tuple[int, int]]:
    rows = pa.table(table.scan(columns=["partition", "offset"])).to_pylist()
    assert len(rows) == len({(row["partition"], row["offset"]) for row in rows})
    return {(row["partition"], row["offset"]) for row in rows}


def test_the_table_names_the_compacted_history_and_every_reader_shows_it(environment: Environment) -> None:
    mixed = filled(environment)
    planned = register.run(location_of(environment), TOPIC, table_format="delta", dry_run=True)
    assert not DeltaLakeTable(location_of(environment), ("shop", "orders")).look()

    first, again = registered(environment), registered(environment)

    table = table_of(environment)
    assert planned.figures["added"] == first.figures["added"] == len(table.files()) > 0
    assert (again.figures["added"], again.figures["removed"]) == (0, 0)
    assert "nothing to do" in again.summary
    (shown,) = table.commits()
    runs = {str(partition): [list(one) for one in found] for partition, found in shown.items()}
    assert offsets_in(table.table) == below(mixed.rows, runs)
    assert all(not address.startswith(table.address) for address in table.files()), "nothing is copied"
    asked = "SELECT value FROM t WHERE partition = 1 AND offset < 100"
    rows = pa.table(QueryBuilder().register("t", table.table).execute(asked).read_all())
    counted = duckdb.from_arrow(table.table.scan()).aggregate("count(*), max(partition)").fetchone()
    assert counted == (len(below(mixed.rows, runs)), 1)
    values = {row["value"] for row in mixed.rows if row["partition"] == 1 and row["offset"] < 100}
    assert set(rows["value"].to_pylist()) == values
    listed = look_up_delta(location_of(environment), "shop.orders")
    assert listed is not None
    files = [pq.ParquetFile(file.removeprefix("file://")).metadata.num_rows for file in listed.files]
    assert sum(files) == len(offsets_in(table.table)) and dict(listed.columns)["timestamp"] == "timestamp"
    mixed.close()


def test_what_kept_versions_and_the_iceberg_table_name_is_kept(tmp_path: Path) -> None:
    environment = shared_fs(tmp_path)
    mixed = filled(environment)
    registered(environment)
    first = objects_kept(environment)
    before = table_of(environment).table.version()
    rows_before = offsets_in(table_of(environment).table)
    mixed.delete(0, 0, 100)
    mixed.delete(1, 0, 100)
    compacted(environment, [TOPIC], rules=AT_ONCE)

    registered(environment, table_format="iceberg", kept_s=0)
    assert first < objects_kept(environment), "a version of the Delta table names the old ones"
    second = registered(environment)

    assert second.figures["removed"] == second.figures["added"] != 0
    assert first < objects_kept(environment), "so does the version before this one"
    assert len(offsets_in(table_of(environment).table)) < len(rows_before)
    old = DeltaTable(table_of(environment).address.removeprefix("file://"), version=before)
    assert offsets_in(old) == rows_before, "time travel works while the version is kept"
    registered(environment, kept_s=0)
    assert objects_kept(environment).isdisjoint(first)
    assert objects_kept(environment) and offsets_in(table_of(environment).table)
    mixed.close()


def test_vacuum_and_optimize_of_other_programs_leave_history_alone(environment: Environment) -> None:
    mixed = filled(environment)
    registered(environment)
    table = table_of(environment)
    files, rows = table.files().keys(), offsets_in(table.table)
    mixed.delete(1, 0, 30)
    compacted(environment, [TOPIC], rules=AT_ONCE)
    registered(environment)

    table.look()
    table.table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False, full=True)
    assert all(Path(address.removeprefix("file://")).exists() for address in files)
    table.look()
    with pytest.raises(DeltaError, match="outside table root"):
        table.table.optimize.compact(target_size=10**9)
    with pytest.raises(DeltaError, match="outside table root"):
        table.table.delete("offset = 50")
    commit(table, TableChange(removed=frozenset(list(table.files())[:1])), basis=table.version)

    assert registered(environment).figures["added"] == 1
    assert len(offsets_in(table_of(environment).table)) == len(rows) - 30, (
        "the table names history again, and that alone"
    )
    mixed.close()


def test_a_registration_killed_behind_its_commit_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = shared_fs(tmp_path)
    mixed = filled(environment)

    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    for step in ("attempt", "expire"):  # before the commit, and behind it
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(DeltaLakeTable, step, interrupt)
            registered(environment)
        assert objects_kept(environment), "noted first: no sweep takes what a commit names"

    report = registered(environment)
    assert report.figures["added"] == 0 and len(list(table_of(environment).commits())) == 1
    assert offsets_in(table_of(environment).table)
    mixed.close()


def test_a_table_that_another_program_changes_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = shared_fs(tmp_path)
    mixed = filled(environment)
    really = DeltaLakeTable.attempt
    others: list[int] = []

    def overtaken(table: DeltaLakeTable, change: TableChange) -> None:
        if not others:
            others.append(1)
            other = table_of(environment)
            really(other, TableChange(added=change.added[:1]))
        really(table, change)

    monkeypatch.setattr(DeltaLakeTable, "attempt", overtaken)
    with pytest.raises(Conflict, match=r"shop\.orders was changed by another job meanwhile: run it again"):
        registered(environment)
    registered(environment)

    table = table_of(environment)
    assert len(pa.table(table.table.scan())) == len(offsets_in(table.table))
    mixed.close()


def test_the_command_registers_and_refuses_a_format_by_name(tmp_path: Path) -> None:
    environment = local(tmp_path)
    filled(environment).close()
    shell, words = Shell(tmp_path / "one"), ("table", "register", TOPIC, "--settings", settings_file(environment))

    assert "register: table shop.orders names" in shell.ok(*words, "--table-format", "delta").out
    assert "take one of iceberg, delta" in shell.run(*words, "--table-format", "hudi").err
    assert offsets_in(table_of(environment).table)
