"""What kinds of tables have in common: the words of one, a batch into it, and each batch of a stream once."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from forebay.spark.pipelines.file.document import Fields, Flaws, Word
from forebay.spark.pipelines.file.model import Mode, Overwrite, Pipeline
from forebay.spark.pipelines.kinds.choice import Choice
from forebay.spark.place.location import Location
from forebay.spark.tables.open_table import OpenTable, QueryBatch

if TYPE_CHECKING:
    from concurrent.futures import Future

    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

START_SECONDS: Final = 120
"""How long a first batch waits for the id of the query that it belongs to."""
_NAME: Final = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)+")


def parse_table(fields: Fields, word: str, check: Callable[[Fields, Word], None]) -> tuple[Word, Choice] | None:
    """The table that a source names by `word`, and what it takes of it; `None` if it names none.

    `check` notes a name that no table of the format has.
    """
    table = fields.required(word, "shop.customers")
    if table is None:
        return None
    check(fields, table)
    return table, Choice.parse(fields)


def parse_overwrite(fields: Fields) -> Overwrite:
    """What a batch does where its table is already."""
    return fields.choice("write", {str(one): one for one in Overwrite}, Overwrite.CREATE)


def check_table_name(fields: Fields, name: Word) -> None:
    """Note a name that no table of a catalog has."""
    if not _NAME.fullmatch(name):
        fields.flaws.add(name.place, f"{name} is not the name of a table: write NAMESPACE.NAME")


def check_overwrite(flaws: Flaws, pipeline: Pipeline, name: Word, overwrite: Overwrite) -> None:
    """Note the word `write` in a stream."""
    if pipeline.mode is Mode.STREAMING and overwrite is not Overwrite.CREATE:
        flaws.add(name.place, f"write of sink {name} belongs to a batch: a stream adds to its table")


def how_written(pipeline: Pipeline, format_word: str, overwrite: Overwrite) -> str:
    """For the plan."""
    return format_word if pipeline.mode is Mode.STREAMING else f"{format_word}, {overwrite}"


def check_absent(flaws: Flaws, target: Word, opened: OpenTable) -> None:
    """Note a table that is there, and close it."""
    with contextlib.closing(opened):
        if opened.table.look():
            flaws.add(target.place, f"{target} is there already: write `write: append` or `write: overwrite`")


def write_batch(rows: DataFrame, opened: OpenTable, overwrite: Overwrite) -> None:
    """Bring the rows of a batch into a table, and close it."""
    with contextlib.closing(opened):
        if overwrite is Overwrite.CREATE:
            # There was none when the run looked: one that has come since is another's.
            opened.put(rows, new=True)
            return
        opened.tidy()
        opened.put(rows, overwrite=overwrite is Overwrite.OVERWRITE)


def write_stream(writer: DataStreamWriter, batches: TableBatches, closing: contextlib.ExitStack) -> DataStreamWriter:
    """The writer of a query whose batches go into a table; `closing` closes that."""
    closing.callback(batches.close)
    return writer.foreachBatch(batches.put).outputMode("append")


class TableBatches:
    """Brings each batch of a query into a table once, over one connection. `close` it behind the query.

    Spark calls `put` for one batch after the other, in threads of its own.
    """

    def __init__(self, location: Location, name: str, table_format: str, started: Future[str]) -> None:
        """`started` gives the query's id, once it has started."""
        self._location = location
        self._name = name
        self._format = table_format
        self._started = started
        self._table: OpenTable | None = None

    def put(self, rows: DataFrame, number: int) -> None:
        """Add the rows of a batch; the table is opened, and tidied, for the first."""
        batch = QueryBatch(self._started.result(START_SECONDS), number)
        if self._table is None:
            self._table = OpenTable(self._location, self._name, table_format=self._format)
            self._table.tidy()
        self._table.put(rows, batch=batch)

    def close(self) -> None:
        """Give the connection back."""
        table, self._table = self._table, None
        if table is not None:
            table.close()
