"""What a commit of rows to an Iceberg table asks of its catalog, its manifests and its columns. No Spark runs here."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.io.pyarrow import _check_pyarrow_schema_compatible
from pyiceberg.manifest import ManifestFile
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

import forebay
from forebay.errors import Conflict, Invalid
from forebay.spark.pipelines.kinds.tables import TableBatches
from forebay.spark.place.location import Location
from forebay.spark.tables.catalog import DATABASE, look_up_table
from forebay.spark.tables.delta_files import look_up_delta
from forebay.spark.tables.file_writer import Written, write_rows
from forebay.spark.tables.files import files_of
from forebay.spark.tables.formats import DELTA, FORMATS, ICEBERG, open_format
from forebay.spark.tables.lake_table import TableTarget
from forebay.spark.tables.open_table import OpenTable, QueryBatch, schema_of
from forebay.spark.tables.targets import TableBatch as LakeBatch
from tests.spark.topics import SETTINGS

NAME = "shop.copy"


class Rows:
    """A DataFrame as far as a table asks: its columns, and tasks over its rows."""

    def __init__(self, **columns: pa.Array) -> None:
        self._rows = pa.RecordBatch.from_pydict(columns)
        self.schema: StructType = from_arrow_schema(self._rows.schema)

    def mapInArrow(self, task: Callable[[Iterator[Any]], Iterable[Any]], _: str) -> Rows:  # noqa: N802 - Spark's name
        made = pa.Table.from_batches(task(iter([self._rows])))
        return Rows(**{name: made.column(name).combine_chunks() for name in made.column_names})

    def collect(self) -> list[Any]:
        return [type("Row", (), row) for row in self._rows.to_pylist()]


@pytest.fixture
def location(tmp_path: Path) -> Location:
    with forebay.open(str(tmp_path / "data"), SETTINGS):
        pass
    return Location.of(tmp_path / "data")


def _ids(*numbers: int) -> Any:
    return Rows(id=pa.array(numbers, pa.int64()))


def _found(location: Location) -> list[Any]:
    table = look_up_table(location, NAME)
    assert table is not None
    return sorted(table.scan().to_arrow().column(0).to_pylist())


def _connections(location: Location) -> int:
    """How often this process has the catalog database of `location` open; other tests may have left theirs open."""
    opened = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    inside = Path(str(location.path)).resolve()
    return sum(path.name.startswith(DATABASE) and path.is_relative_to(inside) for path in opened)


@pytest.mark.slow
def test_a_stream_has_one_connection_and_gives_it_back(location: Location) -> None:
    started: Future[str] = Future()
    started.set_result("query")
    gc.disable()
    try:
        with closing(TableBatches(location, NAME, ICEBERG, started)) as batches:
            for number in (*range(10), 3, 9):
                batches.put(_ids(number), number)
                assert _connections(location) <= 1
        assert _connections(location) == 0
    finally:
        gc.enable()

    assert _found(location) == list(range(10))


def test_a_table_that_was_never_written_into_is_closed_too(location: Location) -> None:
    TableBatches(location, NAME, ICEBERG, Future()).close()
    OpenTable(location, NAME).close()

    assert _connections(location) == 0


@pytest.fixture
def manifests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The manifests that were opened."""
    opened: list[str] = []
    really = ManifestFile.fetch_manifest_entry

    def fetch(manifest: ManifestFile, *args: Any, **more: Any) -> Any:
        opened.append(manifest.manifest_path)
        return really(manifest, *args, **more)

    monkeypatch.setattr(ManifestFile, "fetch_manifest_entry", fetch)
    return opened


def test_a_batch_opens_no_manifest_of_the_table_and_comes_once(location: Location, manifests: list[str]) -> None:
    counts = []
    with closing(OpenTable(location, NAME)) as table:
        for number in range(8):
            manifests.clear()
            table.put(_ids(number), batch=QueryBatch("query", number))
            counts.append(len(manifests))
        for number in (7, 0, 5):
            table.put(_ids(number), batch=QueryBatch("query", number))

    assert set(counts) == {0}
    assert _found(location) == list(range(8))


def test_of_two_who_commit_at_once_one_is_refused(location: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are not looked for in the table: that each batch comes once rests on its note and on the commit alone."""
    with closing(OpenTable(location, NAME)) as one, closing(OpenTable(location, NAME)) as other:
        one.put(_ids(0), batch=QueryBatch("query", 0))
        commit = one.commit

        def behind_the_other(*args: Any, **more: Any) -> None:
            other.put(_ids(1), batch=QueryBatch("query", 1))
            commit(*args, **more)

        monkeypatch.setattr(one, "commit", behind_the_other)
        with pytest.raises(Conflict, match="was changed by another job meanwhile: run it again"):
            one.put(_ids(1), batch=QueryBatch("query", 1))
        monkeypatch.undo()
        one.put(_ids(1), batch=QueryBatch("query", 1))

    assert _found(location) == [0, 1]


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_a_new_table_is_made_by_one_alone_and_takes_no_rows_of_others_meanwhile(
    location: Location, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """`write: create` added its rows to a table that had come between the look and the write."""
    with (
        closing(OpenTable(location, NAME, table_format=kind)) as one,
        closing(OpenTable(location, NAME, table_format=kind)) as other,
    ):
        one.put(_ids(0), new=True)
        for table in (one, other):
            with pytest.raises(Conflict, match=r"shop\.copy is there already, and nothing was added to it"):
                table.put(_ids(1), new=True)
    assert _rows(location, NAME, kind) == [0]

    with (
        closing(OpenTable(location, "shop.next", table_format=kind)) as one,
        closing(OpenTable(location, "shop.next", table_format=kind)) as other,
    ):
        commit = one.commit

        def behind_the_other(*args: Any, **more: Any) -> None:
            other.put(_ids(7))
            commit(*args, **more)

        monkeypatch.setattr(one, "commit", behind_the_other)
        with pytest.raises(Conflict, match="was changed by another job meanwhile"):
            one.put(_ids(1), new=True)
    assert _rows(location, "shop.next", kind) == [7]


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_of_many_that_make_a_new_table_at_once_one_does(location: Location, kind: str) -> None:
    together = threading.Barrier(4)

    def put(number: int) -> bool:
        with closing(OpenTable(location, NAME, table_format=kind)) as table:
            together.wait(60)
            try:
                table.put(_ids(number), new=True)
            except Conflict:
                return False
            return True

    with closing(OpenTable(location, "shop.other", table_format=kind)) as other:
        other.put(_ids(0))  # the catalog itself is there
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(put, range(4)))

    assert made.count(True) == 1
    assert _rows(location, NAME, kind) == [made.index(True)]


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_a_new_table_whose_rows_fail_is_not_there_and_the_next_run_makes_it_with_other_columns(
    location: Location, kind: str
) -> None:
    """`write: create` that failed half-way left an empty table, which the next run took for another's."""

    class Failing(Rows):
        """One task writes its file, and then the job fails."""

        def mapInArrow(self, task: Callable[[Iterator[Any]], Iterable[Any]], _: str) -> Rows:  # noqa: N802
            list(task(iter([self._rows])))
            raise OSError("the second task failed")

    failing: Any = Failing(wrong=pa.array([1], pa.int64()))
    for _ in range(2):
        with (
            closing(OpenTable(location, NAME, table_format=kind)) as table,
            pytest.raises(OSError, match="second task"),
        ):
            table.put(failing, new=True)
        with closing(open_format(kind, location, NAME)) as seen:
            assert not seen.look()
    if kind == ICEBERG:  # its folder is of one run alone
        assert not list(Path(str(location.path)).rglob("*.parquet"))

    with closing(OpenTable(location, NAME, table_format=kind)) as table:
        table.put(_ids(1, 2), new=True)
        table.put(_ids(3))
    assert _rows(location, NAME, kind) == [1, 2, 3]


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_a_new_table_without_rows_is_made_and_one_that_another_made_empty_is_not_taken(
    location: Location, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with closing(OpenTable(location, NAME, table_format=kind)) as table:
        table.put(_ids(), new=True)
    assert _rows(location, NAME, kind) == []

    with (
        closing(OpenTable(location, "shop.next", table_format=kind)) as one,
        closing(OpenTable(location, "shop.next", table_format=kind)) as other,
    ):
        commit = one.commit

        def behind_the_other(*args: Any, **more: Any) -> None:
            other.make(schema_of(_ids(7)))
            commit(*args, **more)

        monkeypatch.setattr(one, "commit", behind_the_other)
        with pytest.raises(Conflict, match="was changed by another job meanwhile"):
            one.put(_ids(1), new=True)
    assert _rows(location, "shop.next", kind) == []


def _rows(location: Location, name: str, kind: str) -> list[Any]:
    found = look_up_delta(location, name) if kind == DELTA else files_of(_present(location, name))
    assert found is not None
    return sorted(row for file in found.files for row in pq.read_table(file.removeprefix("file://"))["id"].to_pylist())


def _present(location: Location, name: str) -> Any:
    table = look_up_table(location, name)
    assert table is not None
    return table


class _Held:
    """A lease that lasts."""

    def check(self) -> None:
        pass


def test_a_topic_in_a_table_opens_no_manifest_and_comes_once(location: Location, manifests: list[str]) -> None:
    schema, lease = pa.schema([("id", pa.int64())]), _Held()
    counts = []
    with closing(TableTarget(location, NAME, schema)) as target:
        target.recover()
        for number in range(6):
            rows = pa.RecordBatch.from_pydict({"id": [number]}, schema=schema)
            (reported,) = write_rows(location, target.folders()[0], schema, [rows])
            files = tuple(Written(**row) for row in reported.to_pylist())
            batch = LakeBatch(topic="shop/orders", topic_id="t", offsets={0: (number, number + 1)}, files=files)
            manifests.clear()
            target.commit(batch, lease)
            counts.append(len(manifests))
            target.commit(batch, lease)

    assert set(counts) == {0}
    assert _found(location) == list(range(6))


INNER = pa.struct([("a", pa.int32())])
COLUMNS: dict[str, pa.DataType] = {
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "boolean": pa.bool_(),
    "date": pa.date32(),
    "timestamptz": pa.timestamp("us", "UTC"),
    "decimal(9, 2)": pa.decimal128(9, 2),
    "decimal(12, 2)": pa.decimal128(12, 2),
    "struct": INNER,
    "struct, wider": pa.struct([("a", pa.int64())]),
    "struct, other": pa.struct([("a", pa.string())]),
    "struct, more": pa.struct([("a", pa.int32()), ("b", pa.int32())]),
    "list": pa.list_(pa.int32()),
    "list, other": pa.list_(pa.string()),
    "map": pa.map_(pa.string(), pa.int64()),
    "map, other": pa.map_(pa.string(), pa.bool_()),
}


def test_a_column_of_another_type_is_refused_by_table_column_and_both_types(location: Location) -> None:
    with closing(OpenTable(location, NAME)) as table:
        table.put(Rows(id=pa.array([1], pa.int64()), name=pa.array(["a"])))  # type: ignore[arg-type]

        for _ in range(2):
            with pytest.raises(
                Invalid,
                match=r"column id of the table shop\.copy is long, and the rows have string: cast it, or name another",
            ):
                table.put(Rows(id=pa.array(["x"]), name=pa.array(["a"])))  # type: ignore[arg-type]
        # In another order, and narrower: it fits.
        table.put(Rows(name=pa.array(["b"]), id=pa.array([2], pa.int32())))  # type: ignore[arg-type]

    assert _found(location) == [1, 2]


@pytest.mark.parametrize("theirs", COLUMNS)
def test_what_is_refused_is_what_pyiceberg_would_refuse(location: Location, theirs: str) -> None:
    """Only then: what a table takes, it goes on taking."""
    with closing(OpenTable(location, NAME)) as opened:
        opened.make(pa.schema([("x", COLUMNS[theirs])]))
        table = look_up_table(location, NAME)

        refused = [ours for ours, kind in COLUMNS.items() if not _takes(opened, kind)]

    expected = [ours for ours, kind in COLUMNS.items() if not _would_take(table, kind)]
    assert refused == expected
    assert theirs not in refused


def _takes(table: OpenTable, kind: pa.DataType) -> bool:
    try:
        table.make(pa.schema([("x", kind)]))
    except Invalid as error:
        assert f"column x of the table {NAME} is" in str(error)
        return False
    return True


def _would_take(table: Any, kind: pa.DataType) -> bool:
    try:
        _check_pyarrow_schema_compatible(table.schema(), pa.schema([("x", kind)]))
    except ValueError:
        return False
    return True
