"""Iceberg tables of the catalog in the settings, as sources and sinks."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from forebay.errors import Invalid, Unavailable, Unsupported
from forebay.spark.pipelines.file.document import Fields, Flaws, Word, flawed, hint
from forebay.spark.pipelines.file.model import Output, Overwrite, Pipeline
from forebay.spark.pipelines.kinds.choice import CHOICE_WORDS, Choice
from forebay.spark.pipelines.kinds.tables import (
    TableBatches,
    check_absent,
    check_overwrite,
    check_table_name,
    how_written,
    parse_overwrite,
    parse_table,
    write_batch,
    write_stream,
)
from forebay.spark.pipelines.outline import SourceOutline
from forebay.spark.place.location import Location
from forebay.spark.tables.catalog import look_up_table, table_names
from forebay.spark.tables.files import files_of
from forebay.spark.tables.formats import ICEBERG
from forebay.spark.tables.open_table import OpenTable
from forebay.spark.values.schema import TableColumn

if TYPE_CHECKING:
    from contextlib import ExitStack

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from forebay.spark.pipelines.context import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class IcebergSource:
    """A table as it is when the run begins."""

    words: ClassVar[tuple[str, ...]] = ("table",)
    format_word: ClassVar[str | None] = ICEBERG
    fields: ClassVar[tuple[str, ...]] = ("format", *CHOICE_WORDS)
    streams: ClassVar = False

    name: Word
    table: Word
    choice: Choice = field(default_factory=Choice)

    @classmethod
    def parse(cls, fields: Fields, name: Word, word: str, directory: str) -> IcebergSource | None:
        found = parse_table(fields, word, check_table_name)
        return cls(name=name, table=found[0], choice=found[1]) if found is not None else None

    @property
    def columns(self) -> tuple[TableColumn, ...] | None:
        return None

    def reads(self, pipeline: Pipeline) -> tuple[str, ...]:
        return (str(self.table),)

    def identities(self, pipeline: Pipeline, location: Location | None) -> tuple[str, ...]:
        return (f"{ICEBERG} {self.table}",)

    def check(self, flaws: Flaws, pipeline: Pipeline) -> None:
        """Nothing more: its words were checked one by one."""

    def look(self, flaws: Flaws, context: Context) -> tuple[TableColumn, ...] | None:
        location = context.location
        try:
            table = look_up_table(location, str(self.table))
            if table is None:
                way_out = hint(self.table, table_names(location), "the tables are")
                flaws.add(self.table.place, f"there is no table {self.table} in the catalog of {location}: {way_out}")
                return None
            columns = tuple(TableColumn(name, kind) for name, kind in files_of(table).columns)
        except (Invalid, Unavailable, Unsupported) as error:
            flaws.add(self.table.place, f"source {self.name}: {error}")
            return None
        return self.choice.found(flaws, self.name, columns)

    def outline(self, context: Context) -> SourceOutline:
        return SourceOutline(name=str(self.name), reads=str(self.table), format=ICEBERG, where=self.choice.shown)

    def frame(self, spark: SparkSession, context: Context) -> DataFrame:
        table = look_up_table(context.location, str(self.table))
        if table is None:
            flawed(self.table.place, f"source {self.name}: the table {self.table} is gone")
        return self.choice.rows(files_of(table).frame(spark), self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class IcebergSink:
    """Rows of a view as rows of a table, which one commit adds as a whole."""

    words: ClassVar[tuple[str, ...]] = ("table",)
    format_word: ClassVar[str | None] = ICEBERG
    fields: ClassVar[tuple[str, ...]] = ("format", "write")
    exclusive: ClassVar = True
    output: ClassVar = Output.APPEND
    elsewhere: ClassVar[str | None] = "is a stream into Iceberg"
    named: ClassVar[tuple[Word, ...]] = ()

    name: Word
    view: Word
    target: Word
    overwrite: Overwrite = Overwrite.CREATE

    @classmethod
    def parse(cls, fields: Fields, name: Word, view: Word, target: Word, directory: str) -> IcebergSink:
        check_table_name(fields, target)
        return cls(name=name, view=view, target=target, overwrite=parse_overwrite(fields))

    def writes(self, pipeline: Pipeline) -> str:
        return str(self.target)

    def identity(self, pipeline: Pipeline, location: Location | None) -> str:
        return f"{ICEBERG} {self.target}"

    def how(self, pipeline: Pipeline) -> str:
        return how_written(pipeline, ICEBERG, self.overwrite)

    def check(self, flaws: Flaws, pipeline: Pipeline) -> None:
        check_overwrite(flaws, pipeline, self.name, self.overwrite)

    def look(self, flaws: Flaws, context: Context) -> None:
        if not context.streams and self.overwrite is Overwrite.CREATE:
            check_absent(flaws, self.target, self._opened(context))

    def rows(self, frame: DataFrame) -> DataFrame:
        return frame

    def write(self, rows: DataFrame, context: Context) -> None:
        write_batch(rows, self._opened(context), self.overwrite)

    def _opened(self, context: Context) -> OpenTable:
        return OpenTable(context.location, str(self.target), table_format=ICEBERG)

    def stream(
        self, writer: DataStreamWriter, context: Context, started: Future[str], closing: ExitStack
    ) -> DataStreamWriter:
        batches = TableBatches(context.location, str(self.target), ICEBERG, started)
        return write_stream(writer, batches, closing)
