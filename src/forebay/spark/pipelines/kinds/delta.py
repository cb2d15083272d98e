"""Delta tables as sources and sinks: by their path, or by their name in the warehouse of the settings."""

from __future__ import annotations

import contextlib
import re
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final

from forebay.errors import Invalid, Unavailable, Unsupported
from forebay.spark.pipelines.file.document import Fields, Flaws, Word, flawed
from forebay.spark.pipelines.file.model import Output, Overwrite, Pipeline
from forebay.spark.pipelines.kinds.choice import CHOICE_WORDS, Choice
from forebay.spark.pipelines.kinds.tables import TableBatches, check_overwrite, how_written, parse_overwrite
from forebay.spark.pipelines.outline import SourceOutline
from forebay.spark.tables.delta_files import look_up_delta
from forebay.spark.tables.formats import DELTA
from forebay.spark.tables.open_table import OpenTable
from forebay.spark.values.schema import TableColumn

if TYPE_CHECKING:
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
        table = fields.required(word, "shop.customers")
        if table is None:
            return None
        _check_name(fields, table)
        return cls(name=name, table=table, choice=Choice.parse(fields))

    @property
    def columns(self) -> tuple[TableColumn, ...] | None:
        return None

    def reads(self, pipeline: Pipeline) -> tuple[str, ...]:
        return (_full_name(pipeline, self.table),)

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
        self.choice.check(flaws, self.name, columns)
        return self.choice.of(columns)

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

    def how(self, pipeline: Pipeline) -> str:
        return how_written(pipeline, DELTA, self.overwrite)

    def check(self, flaws: Flaws, pipeline: Pipeline) -> None:
        check_overwrite(flaws, pipeline, self.name, self.overwrite)

    def look(self, flaws: Flaws, context: Context) -> None:
        if context.streams or self.overwrite is not Overwrite.CREATE:
            return
        with contextlib.closing(self._opened(context)) as table:
            if table.table.look():
                flaws.add(
                    self.target.place, f"{self.target} is there already: write `write: append` or `write: overwrite`"
                )

    def rows(self, frame: DataFrame) -> DataFrame:
        return frame

    def write(self, rows: DataFrame, context: Context) -> None:
        with contextlib.closing(self._opened(context)) as table:
            table.tidy()
            table.put(rows, overwrite=self.overwrite is Overwrite.OVERWRITE)

    def _opened(self, context: Context) -> OpenTable:
        return OpenTable(context.location, self.writes(context.pipeline), table_format=DELTA)

    def stream(
        self, writer: DataStreamWriter, context: Context, started: Future[str], closing: contextlib.ExitStack
    ) -> DataStreamWriter:
        batches = TableBatches(context.location, self.writes(context.pipeline), DELTA, started)
        closing.callback(batches.close)
        return writer.foreachBatch(batches.put).outputMode("append")


def _full_name(pipeline: Pipeline, written: Word) -> str:
    """A path as it is meant, relative to the file; a name as it is."""
    return pipeline.path_of(written) if "/" in written else str(written)


def _check_name(fields: Fields, name: Word) -> None:
    if not _NAME.fullmatch(name):
        fields.flaws.add(name.place, f"{name} is not a table: write NAMESPACE.NAME, or a path such as ./{name}")
