"""What kinds of tables have in common: the name of one, the word `write`, and each batch of a stream once."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from forebay.spark.pipelines.file.document import Fields, Flaws, Word
from forebay.spark.pipelines.file.model import Mode, Overwrite, Pipeline
from forebay.spark.place.location import Location
from forebay.spark.tables.open_table import OpenTable, QueryBatch

if TYPE_CHECKING:
    from concurrent.futures import Future

    from pyspark.sql import DataFrame

START_SECONDS: Final = 120
"""How long a first batch waits for the id of the query that it belongs to."""
_NAME: Final = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)+")


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
