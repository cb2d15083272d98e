"""Jobs through a broker: the same as beside it, each row once however often they run and whatever is killed."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import forebay
from forebay.bulk import BulkLoad
from forebay.client.blocking import RemoteLoads
from forebay.clock import SystemClock
from forebay.errors import Conflict, Forbidden, ForebayError, Invalid, Unauthenticated, UnknownTopic, Unsupported
from forebay.service.tokens import Tokens
from forebay.spark.jobs import backfill, compaction, lake, migrate, profile, reindex, scrub
from forebay.spark.jobs.backfill import Files
from forebay.spark.jobs.report import JobReport
from forebay.spark.place.location import Location
from forebay.spark.tables.catalog import open_catalog
from forebay.spark.tables.delta import DeltaLakeTable
from tests.cli.rig import COMMAND
from tests.spark.mixed import TOPIC
from tests.spark.served import Restarted, ServedMixed
from tests.spark.topics import SETTINGS
from tests.support.brokers import running_broker, server_settings
from tests.support.environments import directories

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

SCHEMA: Final = "id BIGINT NOT NULL"


@pytest.fixture(params=["local", "shared_fs"])
def mixed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServedMixed]:
    mixed = ServedMixed(directories.local(tmp_path) if request.param == "local" else directories.shared_fs(tmp_path))
    yield mixed
    mixed.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedMixed]:
    mixed = ServedMixed(directories.local(tmp_path))
    yield mixed
    mixed.close()


@pytest.fixture(params=["local", "shared_fs"])
def restarted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Restarted]:
    shared = ("storage.mode=shared_fs", f"store.root={tmp_path / 'store'}")
    broker = Restarted(tmp_path / "data", *(shared if request.param == "shared_fs" else ()))
    yield broker
    with broker.command:
        pass


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Three Parquet files with 100 orders each."""
    folder = tmp_path / "old"
    folder.mkdir()
    for number in range(3):
        ids = list(range(number * 100, number * 100 + 100))
        pq.write_table(pa.table({"id": ids, "key": [f"c{i % 7}" for i in ids]}), folder / f"part-{number}.parquet")
    return folder


def beside(mixed: ServedMixed) -> Location:
    return Location.parse({name: text for name, text in mixed.options.items() if name != "topic"})


def through(mixed: ServedMixed, **options: str) -> Location:
    return Location.parse({"broker": mixed.broker.url, **options})


def ids_of(topic: Any) -> list[int]:
    return sorted(
        json.loads(record.value or b"")["id"]
        for number in range(topic.partitions)
        for record in topic.read(partition=number)
    )


def test_a_profile_counts_the_same_as_beside_the_broker(
    spark: SparkSession, mixed: ServedMixed, tmp_path: Path
) -> None:
    mixed.every_tier()
    mixed.filled.topic.append(b"late", key=b"key-1", timestamp=mixed.filled.rows[0]["timestamp"] - 5_000, partition=1)
    expected = profile.run(spark, beside(mixed), [TOPIC])
    notes = str(tmp_path / "notes")

    first = profile.run(spark, through(mixed), [TOPIC], resume=notes)
    second = profile.run(spark, through(mixed), resume=notes)
    planned = profile.run(spark, through(mixed), dry_run=True)

    assert expected.figures["records"] == len(mixed.rows) + 1
    assert not first.findings
    for found in (first, second):
        assert (found.figures, found.parts) == (expected.figures, expected.parts)
    assert planned.parts == profile.run(spark, beside(mixed), dry_run=True).parts
    chosen: Any = {"where": "key = 'key-1' AND partition = 1", "columns": "key"}
    some = profile.run(spark, through(mixed), [TOPIC], **chosen, resume=notes)
    assert some.parts == profile.run(spark, beside(mixed), [TOPIC], **chosen).parts
    assert some.figures["records"] == 1 + sum(row["key"] == b"key-1" and row["partition"] == 1 for row in mixed.rows)
    assert (tmp_path / "notes").stat().st_size, "what does not change was noted"


def test_a_profile_names_the_topic_that_is_not_there_or_has_no_history(spark: SparkSession, mixed: ServedMixed) -> None:
    mixed.log.create_topic("shop/memory", durability="ephemeral")

    with pytest.raises(UnknownTopic, match="shop/none"):
        profile.run(spark, through(mixed), ["shop/none"])
    with pytest.raises(Unsupported, match='lives on engine "memory" and has no history'):
        profile.run(spark, through(mixed), ["shop/memory"])
    assert {part.topic for part in profile.run(spark, through(mixed)).parts} == {TOPIC}


class LakeTable:
    """Runs of lake into one kind of target, and the rows that are there."""

    def __init__(self, spark: SparkSession, kind: str, root: Path) -> None:
        self._spark = spark
        self._kind = kind
        self._root = root
        self.own = {"table.warehouse": str(root / "warehouse")}

    def run(self, location: Location, **options: Any) -> JobReport:
        targets: dict[str, dict[str, Any]] = {
            "directory": {"directory": str(self._root / "files")},
            "iceberg": {"table": "shop.typed"},
            "delta": {"table": str(self._root / "delta"), "table_format": "delta"},
        }
        return lake.run(self._spark, location, TOPIC, schema=SCHEMA, **targets[self._kind], **options)

    def rows(self) -> list[tuple[int, int, int]]:
        """Partition, offset and id of each."""
        found = self._table().select(["_partition", "_offset", "id"]).to_pylist()
        return sorted((row["_partition"], row["_offset"], row["id"]) for row in found)

    def _table(self) -> pa.Table:
        if self._kind == "directory":
            return pq.read_table(str(self._root / "files" / "data"))
        if self._kind == "delta":
            table = DeltaLakeTable(Location.of(self._root / "unused"), str(self._root / "delta"))
            assert table.look()
            return table.table.to_pyarrow_table()
        catalog = open_catalog(Location.parse({"path": str(self._root / "unused"), **self.own}))
        try:
            return catalog.load_table("shop.typed").scan().to_arrow()
        finally:
            catalog.close()


def append_orders(mixed: ServedMixed, start: int, stop: int) -> None:
    for number in range(start, stop):
        value = b"no json" if number % 9 == 4 else b'{"id": %d}' % number
        mixed.filled.topic.append(value, partition=number % 2)


def orders(start: int, stop: int) -> list[tuple[int, int, int]]:
    return sorted((number % 2, number // 2, number) for number in range(start, stop) if number % 9 != 4)


@pytest.mark.parametrize("kind", ["directory", "iceberg", "delta"])
def test_lake_brings_each_record_once_by_whichever_way(
    spark: SparkSession, mixed: ServedMixed, tmp_path: Path, kind: str
) -> None:
    table = LakeTable(spark, kind, tmp_path / "lake")
    broker = through(mixed, **table.own)
    append_orders(mixed, 0, 60)
    mixed.export()
    append_orders(mixed, 60, 100)

    planned = table.run(broker, dry_run=True)
    first = table.run(broker, commit_records=60)
    again = table.run(broker)
    append_orders(mixed, 100, 140)
    mixed.compact()
    by_files = Location.parse({**{k: v for k, v in mixed.options.items() if k != "topic"}, **table.own})
    beside_it = table.run(by_files)
    append_orders(mixed, 140, 150)
    last = table.run(broker)

    assert planned.figures == {"offsets": 100} and first.figures["commits"] == 2
    assert [report.figures["rows"] for report in (first, again, beside_it, last)] == [
        len(orders(0, 100)),
        0,
        len(orders(100, 140)),
        len(orders(140, 150)),
    ]
    assert first.figures["bad_rows"] == 100 - len(orders(0, 100))
    assert table.rows() == orders(0, 150)


@pytest.mark.parametrize("kind", ["directory", "iceberg", "delta"])
def test_of_two_runs_of_lake_that_bring_the_same_one_is_refused(
    spark: SparkSession, served: ServedMixed, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a broker there is no lease: a whole run passes between what another one wrote and its commit."""
    table = LakeTable(spark, kind, tmp_path / "lake")
    append_orders(served, 0, 50)
    write_files = lake.LakeRun.write_files

    def overtaken(run: lake.LakeRun, *arguments: Any) -> Any:
        written = write_files(run, *arguments)
        monkeypatch.undo()
        append_orders(served, 50, 60)
        table.run(through(served, **table.own))
        return written

    monkeypatch.setattr(lake.LakeRun, "write_files", overtaken)

    with pytest.raises(Conflict, match="run it again"):
        table.run(through(served, **table.own))

    assert table.rows() == orders(0, 60)
    append_orders(served, 60, 70)
    assert table.run(through(served, **table.own)).figures["rows"] == len(orders(60, 70))
    assert table.rows() == orders(0, 70)


def test_lake_through_a_broker_says_where_tables_are_to_be(
    spark: SparkSession, served: ServedMixed, tmp_path: Path
) -> None:
    append_orders(served, 0, 2)

    with pytest.raises(Invalid, match="name a directory in table.warehouse, which a location behind a broker"):
        LakeTable(spark, "iceberg", tmp_path / "lake").run(through(served))


def test_a_backfill_comes_once_by_whichever_way(spark: SparkSession, mixed: ServedMixed, files: Path) -> None:
    source, broker = Files(paths=(str(files),)), through(mixed)
    columns = {"key": "key", "value": "to_json(struct(id))"}

    def run(location: Location, **options: Any) -> JobReport:
        return backfill.run(spark, location, TOPIC, source, columns=columns, files_each=2, **options)

    planned = run(broker, dry_run=True)
    nothing_yet = ids_of(mixed.filled.topic)
    first = run(broker, backfill_id="old_orders.1")
    again = [run(location, backfill_id="old_orders.1") for location in (broker, beside(mixed))]

    assert (planned.figures, nothing_yet) == ({"records": 300, "loads": 2, "loads_before": 0}, [])
    assert first.figures == {"records": 300, "loads": 2, "loads_before": 0}
    assert sum(int(part.figures["records"] or 0) for part in first.parts) == 300
    assert [report.figures for report in again] == [{"records": 0, "loads": 2, "loads_before": 2}] * 2
    assert ids_of(mixed.filled.topic) == list(range(300))
    with pytest.raises(Conflict, match="backfill old_orders.1 into shop/orders brings other rows"):
        backfill.run(spark, broker, TOPIC, source, columns=columns, backfill_id="old_orders.1")
    assert [run(location).figures["records"] for location in (beside(mixed), broker)] == [300, 0]
    assert ids_of(mixed.filled.topic) == sorted([*range(300)] * 2)


def test_a_backfill_comes_once_although_the_broker_is_killed_between_offer_and_attach(
    spark: SparkSession, restarted: Restarted, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with restarted.log() as log:
        log.create_topic(TOPIC, partitions=2)
    location = Location.at_broker(restarted.command.url)
    attach, attached = RemoteLoads.attach, list[str]()

    def killed_first(loads: RemoteLoads, name: str) -> BulkLoad:
        attached.append(name)
        if len(attached) in (1, 3):
            restarted.kill()
        if len(attached) == 3:
            raise KeyboardInterrupt  # the job ends too, and does not know what became of its load
        return attach(loads, name)

    def run() -> JobReport:
        return backfill.run(spark, location, TOPIC, Files(paths=(str(files),)), files_each=1)

    monkeypatch.setattr(RemoteLoads, "attach", killed_first)
    with pytest.raises(KeyboardInterrupt):
        run()
    run()
    last = run()

    assert last.figures == {"records": 0, "loads": 3, "loads_before": 3}
    restarted.kill()
    with restarted.log() as log:
        assert ids_of(log.topic(TOPIC)) == list(range(300))


def test_two_runs_of_one_backfill_at_once_bring_its_rows_once(
    spark: SparkSession, served: ServedMixed, files: Path
) -> None:
    failures: list[ForebayError] = []

    def run() -> None:
        try:
            backfill.run(spark, through(served), TOPIC, Files(paths=(str(files),)), files_each=1)
        except ForebayError as error:  # the other one is at a later load
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run()

    assert len(failures) < 2, failures
    assert ids_of(served.filled.topic) == list(range(300))


def test_jobs_that_rewrite_history_are_refused_in_words(tmp_path: Path) -> None:
    spark: Any = None  # it is not asked
    location = Location.at_broker("http://127.0.0.1:9")

    for run in (compaction.run, scrub.run, reindex.run):
        with pytest.raises(Unsupported, match="needs the files themselves: do it where the data directory is"):
            run(spark, location)
    with pytest.raises(Unsupported, match="needs the files themselves"):
        migrate.run(spark, location, Location.parse({"path": str(tmp_path), "store": f"file://{tmp_path / 'store'}"}))


@pytest.fixture
def secrets(tmp_path: Path) -> dict[str, str]:
    """Tokens by what they may do, each in a file of that name; the topic has two orders."""
    with forebay.open(tmp_path / "data", SETTINGS) as log:
        log.create_topic(TOPIC).append_many([b'{"id": 1}', b'{"id": 2}'])
        tokens = Tokens(log.metadata, server_settings().metadata.prefix, SystemClock())
        made = {
            name: tokens.create(name, scopes=scopes, prefixes=["shop/"]).secret.reveal()
            for name, scopes in (("reads", ["read"]), ("both", ["read", "write"]))
        }
    for name, secret in made.items():
        (tmp_path / name).write_text(secret)
    return made


def test_jobs_need_a_token_and_show_it_nowhere(
    spark: SparkSession, tmp_path: Path, files: Path, secrets: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong").write_text("fbt_wrong")
    source, said = Files(paths=(str(files),)), list[str]()
    with running_broker(tmp_path / "data", server_settings(access="tokens")) as broker:
        by = {name: Location.at_broker(broker.url, token_file=str(tmp_path / name)) for name in (*secrets, "wrong")}
        for location in (by["wrong"], Location.at_broker(broker.url)):
            with pytest.raises(Unauthenticated) as refused:
                profile.run(spark, location, [TOPIC])
            said.append(str(refused.value))
        with pytest.raises(Forbidden):
            backfill.run(spark, by["reads"], TOPIC, source)

        reports = [
            profile.run(spark, by["reads"], [TOPIC]),
            lake.run(spark, by["reads"], TOPIC, directory=str(tmp_path / "lake"), schema=SCHEMA),
            backfill.run(spark, by["both"], TOPIC, source, columns={"value": "to_json(struct(id))"}),
        ]
        said += [report.json() for report in reports]

    assert [report.figures.get("records", report.figures.get("rows")) for report in reports] == [2, 2, 300]
    seen = "".join((*capfd.readouterr(), *said))
    assert not [secret for secret in (*secrets.values(), "fbt_wrong") if secret in seen]


@pytest.mark.slow
def test_a_command_finds_its_token_in_the_environment_and_shows_it_nowhere(
    tmp_path: Path, secrets: dict[str, str]
) -> None:
    """In a process of its own: Spark's workers have the environment that it was started with."""
    environment = {**os.environ, "FOREBAY_TOKEN": secrets["reads"]}
    with running_broker(tmp_path / "data", server_settings(access="tokens")) as broker:
        words = ["history", "profile", TOPIC, "--url", broker.url, "--master", "local[1]", "--verbose"]
        ended = subprocess.run([*COMMAND, *words], env=environment, capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1].startswith("profile: 2 records of 1 topics counted")
    assert secrets["reads"] not in ended.stdout + ended.stderr
