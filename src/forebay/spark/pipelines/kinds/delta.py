"""Delta tables as sources and sinks: by their path, or by their name in the warehouse of the settings."""

from __future__ import annotations

import re
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final

from forebay.errors import Invalid, Unavailable, Unsupported
from forebay.spark.pipelines.file.document import Fields, Flaws, Word, flawed
from forebay.spark.pipelines.file.model import Output, Overwrite, Pipeline
from forebay.spark.pipelines.kinds.choice import CHOICE_WORDS, Choice
from forebay.spark.pipelines.kinds.tables import (
    TableBatches,
    check_absent,
    check_overwrite,
    how_written,
    parse_overwrite,
    parse_table,
    write_batch,
    write_stream,
)
from forebay.spark.pipelines.outline import SourceOutline
from forebay.spark.place.addresses import canonical
from forebay.spark.place.location import Location
from forebay.spark.tables.delta import address_of_table
from forebay.spark.tables.delta_files import look_up_delta
from forebay.spark.tables.formats import DELTA
from forebay.spark.tables.open_table import OpenTable
from forebay.spark.values.schema import TableColumn

if TYPE_CHECKING:
    from contextlib import ExitStack

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from forebay.spark.pipelines.context import Context

_NAME: Final = re.compile(r"[A-Za-z0-9_]+\.[A-Za-z0-9_]+|.*/.*")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSource:
    """A table as it is when the run begins."""

    words: ClassVar[tuple[str, ...]] = ("table",)
    format_word: ClassVar[str | None] = DELTA
    fields: ClassVar[tuple[str, ...]] = ("format", *CHOICE_WORDS)
    streams: ClassVar = False

    name: Word
    table: Word
    choice: Choice = field(default_factory=Choice)

    @classmethod
    def parse(cls, fields: Fields, name: Word, word: str, directory: str) -> DeltaSource | None:
        found = parse_table(fields, word, _check_name)
        return cls(name=name, table=found[0], choice=found[1]) if found is not None else None

    @property
    def columns(self) -> tuple[TableColumn, ...] | None:
        return None

    def reads(self, pipeline: Pipeline) -> tuple[str, ...]:
        return (_full_name(pipeline, self.table),)

    def identities(self, pipeline: Pipeline, location: Location | None) -> tuple[str, ...]:
        return (_identity(self.reads(pipeline)[0], location),)

    def check(self, flaws: Flaws, pipeline: Pipeline) -> None:
        """Nothing more: its words were checked one by one."""

    def look(self, flaws: Flaws, context: Context) -> tuple[TableColumn, ...] | None:
        (table,) = self.reads(context.pipeline)
        try:
            found = look_up_delta(context.location, table)
        except (Invalid, Unavailable, Unsupported) as error:
            flaws.add(self.table.place, f"source {self.name}: {error}")
            return None
        if found is None:
            flaws.add(
                self.table.place,
                f"source {self.name}: there is no Delta table {table}; a path is relative to the pipeline's file, "
                "NAMESPACE.NAME is one in the warehouse of the settings",
            )
            return None
        columns = tuple(TableColumn(name, kind) for name, kind in found.columns)
        return self.choice.found(flaws, self.name, columns)

    def outline(self, context: Context) -> SourceOutline:
        return SourceOutline(
            name=str(self.name), reads=self.reads(context.pipeline)[0], format=DELTA, where=self.choice.shown
        )

    def frame(self, spark: SparkSession, context: Context) -> DataFrame:
        found = look_up_delta(context.location, self.reads(context.pipeline)[0])
        if found is None:
            flawed(self.table.place, f"source {self.name}: the table {self.table} is gone")
        return self.choice.rows(found.frame(spark), self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSink:
    """Rows of a view as rows of a table, which one commit adds as a whole."""

    words: ClassVar[tuple[str, ...]] = ("table",)
    format_word: ClassVar[str | None] = DELTA
    fields: ClassVar[tuple[str, ...]] = ("format", "write")
    exclusive: ClassVar = True
    output: ClassVar = Output.APPEND
    elsewhere: ClassVar[str | None] = "is a stream into Delta"
    named: ClassVar[tuple[Word, ...]] = ()

    name: Word
    view: Word
    target: Word
    overwrite: Overwrite = Overwrite.CREATE

    @classmethod
    def parse(cls, fields: Fields, name: Word, view: Word, target: Word, directory: str) -> DeltaSink:
        _check_name(fields, target)
        return cls(name=name, view=view, target=target, overwrite=parse_overwrite(fields))

    def writes(self, pipeline: Pipeline) -> str:
        return _full_name(pipeline, self.target)

    def identity(self, pipeline: Pipeline, location: Location | None) -> str:
        return _identity(self.writes(pipeline), location)

    def how(self, pipeline: Pipeline) -> str:
        return how_written(pipeline, DELTA, self.overwrite)

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
        return OpenTable(context.location, self.writes(context.pipeline), table_format=DELTA)

    def stream(
        self, writer: DataStreamWriter, context: Context, started: Future[str], closing: ExitStack
    ) -> DataStreamWriter:
        batches = TableBatches(context.location, self.writes(context.pipeline), DELTA, started)
        return write_stream(writer, batches, closing)


def _full_name(pipeline: Pipeline, written: Word) -> str:
    """A path as it is meant, relative to the file; a name as it is."""
    return pipeline.path_of(written) if "/" in written else str(written)


def _identity(name: str, location: Location | None) -> str:
    """The place of a table; of one in the warehouse its name, as long as that is not known."""
    if "/" in name:
        return canonical(name)
    return f"{DELTA} {name}" if location is None else canonical(address_of_table(location, name))


def _check_name(fields: Fields, name: Word) -> None:
    if not _NAME.fullmatch(name):
        fields.flaws.add(name.place, f"{name} is not a table: write NAMESPACE.NAME, or a path such as ./{name}")
