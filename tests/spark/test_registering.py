"""Compacted history as an Iceberg table: it names the files of history, no more, no less, and keeps what it names."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from pyiceberg.table import Table

from forebay.cleanup.tables import TableObjects
from forebay.errors import Conflict, Unsupported
from forebay.spark.jobs import register
from forebay.spark.jobs.report import JobReport
from forebay.spark.place.location import Location
from forebay.spark.place.opening import opened
from forebay.spark.tables.catalog import find_table, identifier, look_up_table, open_catalog
from forebay.spark.tables.commit import OFFSETS
from forebay.spark.tables.iceberg import IcebergTable
from forebay.topics import TopicName
from tests.compacting.directly import AT_ONCE, compacted, location_of
from tests.spark.mixed import TOPIC, Mixed
from tests.spark.topics import Row
from tests.support.environments.directories import Environment, local, shared_fs

pytestmark = pytest.mark.slow

NAME = TopicName.parse(TOPIC)


@pytest.fixture(params=["local", "shared_fs"])
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> Environment:
    return local(tmp_path) if request.param == "local" else shared_fs(tmp_path)


def registered(environment: Environment, *, kept_s: int | None = None, dry_run: bool = False) -> JobReport:
    location = location_of(environment)
    if kept_s is not None:
        overrides = (*location.overrides, ("table.snapshots_kept_s", str(kept_s)))
        location = Location(path=location.path, settings_text=location.settings_text, overrides=overrides)
    return register.run(location, TOPIC, dry_run=dry_run)


def table_of(environment: Environment) -> Table:
    found = find_table(open_catalog(location_of(environment)), identifier(NAME))
    assert found is not None
    return found


def offsets_in(table: Table) -> set[tuple[int, int]]:
    rows = table.scan(selected_fields=("partition", "offset")).to_arrow().to_pylist()
    assert len(rows) == len({(row["partition"], row["offset"]) for row in rows})
    return {(row["partition"], row["offset"]) for row in rows}


def objects_kept(environment: Environment) -> frozenset[str]:
    with opened(location_of(environment)) as found:
        spec = found.definitions.get(NAME)
        places = found.places
        prefix = found.settings.metadata.prefix
        tabled = TableObjects(found.metadata, prefix, NAME.namespace, NAME.topic, spec.topic_id, clock=found.clock)
        return tabled.objects(places.store if found.settings.is_shared and places.store is not None else places.loads)


def shown(table: Table) -> dict[str, list[list[int]]]:
    snapshot = table.current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    found: dict[str, list[list[int]]] = msgspec.json.decode(snapshot.summary.additional_properties[OFFSETS])
    return found


def below(rows: list[Row], runs: dict[str, list[list[int]]]) -> set[tuple[int, int]]:
    """The records of a topic in these offsets."""
    return {
        (row["partition"], row["offset"])
        for row in rows
        if any(start <= row["offset"] < stop for start, stop in runs[str(row["partition"])])
    }


def test_a_table_names_the_compacted_history_and_says_which_offsets_it_is(environment: Environment) -> None:
    mixed = Mixed(environment)
    mixed.every_tier()
    compacted(environment, [TOPIC])

    planned = registered(environment, dry_run=True)
    assert look_up_table(location_of(environment), identifier(NAME)) is None
    report = registered(environment)

    table = table_of(environment)
    assert planned.figures["added"] == report.figures["added"] == len(list(table.scan().plan_files()))
    runs = shown(table)
    assert all(run[0][0] == 0 and run[-1][1] >= 3200 for run in runs.values())
    assert offsets_in(table) == below(mixed.rows, runs)
    values = {row["value"] for row in mixed.rows if row["partition"] == 1 and row["offset"] < 1000}
    assert set(table.scan("partition == 1 and offset < 1000").to_arrow().column("value").to_pylist()) == values
    mixed.close()


def test_a_second_registration_adds_nothing(environment: Environment) -> None:
    mixed = Mixed(environment)
    mixed.every_tier()
    compacted(environment, [TOPIC])
    registered(environment)
    before = table_of(environment).current_snapshot()

    again = registered(environment)

    assert (again.figures["added"], again.figures["removed"]) == (0, 0)
    assert "nothing to do" in again.summary
    assert table_of(environment).current_snapshot() == before
    mixed.close()


def in_a_table(environment: Environment) -> tuple[Mixed, frozenset[str]]:
    """A topic of every tier whose compacted history a table names; the objects that the table keeps."""
    mixed = Mixed(environment)
    mixed.every_tier()
    compacted(environment, [TOPIC])
    registered(environment)
    return mixed, objects_kept(environment)


def test_files_that_a_kept_snapshot_names_are_kept_and_go_when_it_is_expired(tmp_path: Path) -> None:
    environment = shared_fs(tmp_path)
    mixed, first = in_a_table(environment)
    before = table_of(environment).current_snapshot()
    assert before is not None
    mixed.delete(0, 0, 1500)
    mixed.delete(1, 0, 1500)
    compacted(environment, [TOPIC], rules=AT_ONCE)

    registered(environment)

    table, runs = table_of(environment), shown(table_of(environment))
    assert offsets_in(table) == below(mixed.rows, runs)
    assert first < objects_kept(environment)
    old = table.scan(snapshot_id=before.snapshot_id, selected_fields=("offset",)).to_arrow()
    assert old.num_rows > len(offsets_in(table))

    expired = registered(environment, kept_s=0)
    assert expired.figures["snapshots expired"] == 1
    assert objects_kept(environment).isdisjoint(first)
    assert offsets_in(table_of(environment)) == below(mixed.rows, runs)
    mixed.close()


def test_a_snapshot_that_was_cut_short_is_made_by_the_next_registration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = shared_fs(tmp_path)
    mixed = Mixed(environment)
    mixed.every_tier()
    compacted(environment, [TOPIC])
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(IcebergTable, "expire", _interrupt)
        registered(environment)
    noted = objects_kept(environment)

    report = registered(environment)

    assert report.figures["added"] == 0
    assert objects_kept(environment) == noted
    assert offsets_in(table_of(environment)) == below(mixed.rows, shown(table_of(environment)))
    mixed.close()


def _interrupt(*_: object) -> int:
    raise KeyboardInterrupt


def test_what_is_noted_before_the_snapshot_is_let_go_of_if_it_never_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = shared_fs(tmp_path)
    mixed = Mixed(environment)
    mixed.every_tier()
    compacted(environment, [TOPIC])
    changes = iter([0, 1])
    real = register.change_of

    def changed(*arguments: object) -> object:
        if next(changes) == 1:
            return real(*arguments)._replace(added=["file:///another"])  # type: ignore[arg-type]
        return real(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patched, pytest.raises(Conflict, match="compacted meanwhile"):
        patched.setattr(register, "change_of", changed)
        registered(environment)
    noted = objects_kept(environment)
    assert noted
    assert table_of(environment).current_snapshot() is None

    assert registered(environment).figures["added"] == len(noted)
    mixed.close()


def test_a_topic_without_history_is_refused_by_name(tmp_path: Path) -> None:
    environment = local(tmp_path)
    with environment.open("one") as log:
        log.create_topic(TOPIC, durability="ephemeral")

    with pytest.raises(Unsupported, match="shop/orders lives on engine"):
        registered(environment)


def test_the_history_that_a_tag_names_outlives_an_expiry(tmp_path: Path) -> None:
    environment = shared_fs(tmp_path)
    mixed, first = in_a_table(environment)
    table = table_of(environment)
    tagged = table.snapshots()[0]
    table.manage_snapshots().create_tag(tagged.snapshot_id, "audit").commit()
    rows = table.scan(selected_fields=("offset",)).to_arrow().num_rows
    mixed.delete(0, 0, 1500)
    compacted(environment, [TOPIC], rules=AT_ONCE)

    expired = registered(environment, kept_s=0)

    assert expired.figures["snapshots expired"] == 0, "what a tag names is kept"
    assert first < objects_kept(environment)
    old = table_of(environment).scan(snapshot_id=tagged.snapshot_id, selected_fields=("offset",)).to_arrow()
    assert old.num_rows == rows
    mixed.close()
