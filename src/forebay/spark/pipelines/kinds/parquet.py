"""Directories of Parquet files as sources and sinks: the table that needs no catalog."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from forebay.spark.pipelines.failures import require_column
from forebay.spark.pipelines.file.document import Fields, Flaws, Word
from forebay.spark.pipelines.file.model import Output, Overwrite, Pipeline
from forebay.spark.pipelines.kinds.choice import CHOICE_WORDS, Choice
from forebay.spark.pipelines.kinds.files import look_at_files
from forebay.spark.pipelines.kinds.tables import check_overwrite, how_written, parse_overwrite
from forebay.spark.pipelines.outline import SourceOutline
from forebay.spark.place.addresses import canonical
from forebay.spark.place.location import Location
from forebay.spark.tables.staged import StagedTable
from forebay.spark.values.schema import TableColumn

if TYPE_CHECKING:
    from concurrent.futures import Future
    from contextlib import ExitStack

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from forebay.spark.pipelines.context import Context

FORMAT: Final = "parquet"
SINK_LOG: Final = "_spark_metadata"
"""Where Spark notes the files that a stream has brought into a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetSource:
    """A directory of Parquet files as a view."""

    words: ClassVar[tuple[str, ...]] = ("table",)
    format_word: ClassVar[str | None] = FORMAT
    fields: ClassVar[tuple[str, ...]] = ("format", "options", *CHOICE_WORDS)
    streams: ClassVar = False

    name: Word
    path: Word
    """As written, see `Pipeline.path_of`."""
    options: Mapping[Word, Word] = field(default_factory=dict)
    choice: Choice = field(default_factory=Choice)

    @classmethod
    def parse(cls, fields: Fields, name: Word, word: str, directory: str) -> ParquetSource | None:
        path = fields.required(word, "customers")
        if path is None:
            return None
        return cls(name=name, path=path, options=fields.options("options"), choice=Choice.parse(fields))

    @property
    def columns(self) -> tuple[TableColumn, ...] | None:
        return None

    def reads(self, pipeline: Pipeline) -> tuple[str, ...]:
        return (pipeline.path_of(self.path),)

    def identities(self, pipeline: Pipeline, location: Location | None) -> tuple[str, ...]:
        return tuple(map(canonical, self.reads(pipeline)))

    def check(self, flaws: Flaws, pipeline: Pipeline) -> None:
        """Nothing more: its words were checked one by one."""

    def look(self, flaws: Flaws, context: Context) -> tuple[TableColumn, ...] | None:
        columns = look_at_files(flaws, self.name, self.path, self.options, context.pipeline, is_parquet=True)
        return self.choice.found(flaws, self.name, columns)

    def outline(self, context: Context) -> SourceOutline:
        return SourceOutline(
            name=str(self.name), reads=self.reads(context.pipeline)[0], format=FORMAT, where=self.choice.shown
        )

    def frame(self, spark: SparkSession, context: Context) -> DataFrame:
        reader = spark.read
        for name, text in self.options.items():
            reader = reader.option(str(name), str(text))
        return self.choice.rows(reader.parquet(context.pipeline.path_of(self.path)), self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetSink:
    """Rows of a view as a directory of Parquet files."""

    words: ClassVar[tuple[str, ...]] = ("table",)
    format_word: ClassVar[str | None] = FORMAT
    fields: ClassVar[tuple[str, ...]] = ("format", "partitionBy", "write")
    exclusive: ClassVar = True
    output: ClassVar = Output.APPEND
    elsewhere: ClassVar[str | None] = None

    name: Word
    view: Word
    target: Word
    """As written, see `Pipeline.path_of`."""
    partition_by: tuple[Word, ...] = ()
    overwrite: Overwrite = Overwrite.CREATE

    @classmethod
    def parse(cls, fields: Fields, name: Word, view: Word, target: Word, directory: str) -> ParquetSink:
        overwrite = parse_overwrite(fields)
        if overwrite is Overwrite.APPEND:
            fields.flaws.add(
                fields.place_of("write"),
                "write append is for `format: iceberg` or `delta`, which add as a whole; to add to a directory again "
                "and again write `mode: streaming` with `trigger: availableNow`",
            )
        names = fields.words("partitionBy")
        return cls(name=name, view=view, target=target, partition_by=names, overwrite=overwrite)

    @property
    def named(self) -> tuple[Word, ...]:
        return self.partition_by

    def writes(self, pipeline: Pipeline) -> str:
        return pipeline.path_of(self.target)

    def identity(self, pipeline: Pipeline, location: Location | None) -> str:
        return canonical(self.writes(pipeline))

    def how(self, pipeline: Pipeline) -> str:
        return how_written(pipeline, FORMAT, self.overwrite)

    def check(self, flaws: Flaws, pipeline: Pipeline) -> None:
        check_overwrite(flaws, pipeline, self.name, self.overwrite)

    def look(self, flaws: Flaws, context: Context) -> None:
        path = Path(self.writes(context.pipeline))
        if not path.is_absolute():
            if not context.streams:
                flaws.add(
                    self.target.place,
                    f"{self.target}: a batch writes its table into a directory, which it can replace at once; for a "
                    "URL write `mode: streaming` with `trigger: availableNow`",
                )
        elif path.exists() and context.streams:
            self._look_at_stream(flaws, path, context.pipeline.checkpoint_of(self))
        elif path.exists() and self.overwrite is Overwrite.CREATE:
            flaws.add(self.target.place, f"{path} is there already: write `write: overwrite`, or name a new table")
        elif path.exists() and not _is_table(path):
            flaws.add(self.target.place, f"{path} holds more than a table of Parquet files: it is not overwritten")

    def _look_at_stream(self, flaws: Flaws, path: Path, checkpoint: str) -> None:
        if (path / SINK_LOG).exists() and not Path(checkpoint, "metadata").exists():
            # Spark would take the batches of the new checkpoint for ones that are there already, and drop them.
            flaws.add(
                self.target.place,
                f"{path} was filled from another checkpoint than {checkpoint}, and would take nothing from this one: "
                "go on with that checkpoint, or name a new table",
            )
        elif not (path / SINK_LOG).exists() and any(path.iterdir()):
            flaws.add(self.target.place, f"{path} is there and was not filled by a stream: name a new table")

    def rows(self, frame: DataFrame) -> DataFrame:
        for word in self.partition_by:
            require_column(frame, word, self.view)
        return frame

    def write(self, rows: DataFrame, context: Context) -> None:
        names = [str(name) for name in self.partition_by]

        def fill(stage: str) -> None:
            (rows.write.partitionBy(*names) if names else rows.write).parquet(stage)

        table = StagedTable(self.writes(context.pipeline))
        table.replace(fill, overwrite=self.overwrite is Overwrite.OVERWRITE)

    def stream(
        self, writer: DataStreamWriter, context: Context, started: Future[str], closing: ExitStack
    ) -> DataStreamWriter:
        # Spark's log of the files, beside them, knows each batch.
        names = [str(name) for name in self.partition_by]
        writer = writer.format("parquet").option("path", self.writes(context.pipeline)).outputMode("append")
        return writer.partitionBy(*names) if names else writer


def _is_table(path: Path) -> bool:
    """Whether a directory holds Parquet files, or partitions with such, and nothing else."""
    if not path.is_dir() or (path / SINK_LOG).exists():
        return False
    return all(
        _is_table(entry) if entry.is_dir() else entry.suffix in (".parquet", ".crc") or entry.name == "_SUCCESS"
        for entry in path.iterdir()
    )
