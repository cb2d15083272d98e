"""Files as sources: what Spark reads of a path, as it is when the run begins."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

import pyarrow as pa
import pyarrow.parquet as pq

from forebay.spark.pipelines.file.document import Fields, Flaws, Word
from forebay.spark.pipelines.file.model import Pipeline, Schema
from forebay.spark.pipelines.file.schemas import parse_ddl
from forebay.spark.pipelines.kinds.choice import CHOICE_WORDS, Choice
from forebay.spark.pipelines.outline import SourceOutline
from forebay.spark.place.addresses import canonical
from forebay.spark.place.location import Location
from forebay.spark.values.schema import TableColumn

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from forebay.spark.pipelines.context import Context

_GLOB: Final = re.compile(r"[*?\[{]")
_MERGED: Final = "mergeschema"


class FileFormat(enum.StrEnum):
    """What files are."""

    PARQUET = "parquet"
    CSV = "csv"
    JSON = "json"
    TEXT = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSource:
    """Files as a view."""

    words: ClassVar[tuple[str, ...]] = ("files",)
    format_word: ClassVar[str | None] = None
    fields: ClassVar[tuple[str, ...]] = ("format", "schema", "options", *CHOICE_WORDS)
    streams: ClassVar = False

    name: Word
    path: Word
    """As written, see `Pipeline.path_of`."""
    format: FileFormat = FileFormat.PARQUET
    schema: Schema | None = None
    options: Mapping[Word, Word] = field(default_factory=dict)
    choice: Choice = field(default_factory=Choice)

    @classmethod
    def parse(cls, fields: Fields, name: Word, word: str, directory: str) -> FileSource | None:
        path = fields.required(word, "customers.csv")
        formats = {str(one): one for one in FileFormat}
        if "format" not in fields:
            fields.flaws.add(
                fields.place, f"format is missing in {fields.what} of files: write one of {', '.join(formats)}"
            )
        chosen = fields.choice("format", formats, FileFormat.PARQUET)
        written = fields.word("schema")
        schema = parse_ddl(fields, written) if written is not None else None
        is_sure = "format" in fields and fields.is_one_of("format", formats)
        if is_sure and written is not None and chosen not in (FileFormat.CSV, FileFormat.JSON):
            fields.flaws.add(written.place, f"schema does not go with {chosen} files: they have their own")
        if path is None:
            return None
        return cls(
            name=name,
            path=path,
            format=chosen,
            schema=schema,
            options=fields.options("options"),
            choice=Choice.parse(fields),
        )

    @property
    def columns(self) -> tuple[TableColumn, ...] | None:
        known = self._known
        return self.choice.of(known) if known is not None else None

    @property
    def _known(self) -> tuple[TableColumn, ...] | None:
        """The columns of the files, as far as the file of the pipeline says them."""
        if self.format is FileFormat.TEXT:
            return (TableColumn("value", "string"),)
        return self.schema.columns if self.schema is not None else None

    def reads(self, pipeline: Pipeline) -> tuple[str, ...]:
        return (pipeline.path_of(self.path),)

    def identities(self, pipeline: Pipeline, location: Location | None) -> tuple[str, ...]:
        return tuple(map(canonical, self.reads(pipeline)))

    def check(self, flaws: Flaws, pipeline: Pipeline) -> None:
        if self._known is not None:
            self.choice.check(flaws, self.name, self._known)

    def look(self, flaws: Flaws, context: Context) -> tuple[TableColumn, ...] | None:
        is_parquet = self.format is FileFormat.PARQUET
        columns = look_at_files(flaws, self.name, self.path, self.options, context.pipeline, is_parquet=is_parquet)
        return self.choice.found(flaws, self.name, columns)

    def outline(self, context: Context) -> SourceOutline:
        return SourceOutline(
            name=str(self.name), reads=self.reads(context.pipeline)[0], format=str(self.format), where=self.choice.shown
        )

    def frame(self, spark: SparkSession, context: Context) -> DataFrame:
        reader = spark.read.format(str(self.format))
        if self.schema is not None:
            reader = reader.schema(self.schema.ddl)
        elif self.format is FileFormat.CSV:
            reader = reader.option("header", "true").option("inferSchema", "true")
        for name, text in self.options.items():
            reader = reader.option(str(name), str(text))
        return self.choice.rows(reader.load(context.pipeline.path_of(self.path)), self.name)


def look_at_files(
    flaws: Flaws, name: Word, written: Word, options: Mapping[Word, Word], pipeline: Pipeline, *, is_parquet: bool
) -> tuple[TableColumn, ...] | None:
    """The columns of files as far as they can be found here; a path that leads nowhere is a flaw with its line."""
    path = pipeline.path_of(written)
    if not path.startswith("/") or _GLOB.search(path):
        return None
    if not Path(path).exists():
        flaws.add(written.place, f"source {name}: there is no {path}; a path is relative to the pipeline's file")
        return None
    if not is_parquet or _MERGED in (option.lower() for option in options):
        return None
    found = _first_file(Path(path))
    if found is None:
        flaws.add(written.place, f"source {name}: {path} holds no Parquet file")
        return None
    try:
        return _parquet_columns(Path(path), found)
    except (pa.ArrowException, OSError) as error:
        flaws.add(written.place, f"source {name}: {found} is no Parquet file: {error}")
        return None


def _parquet_columns(path: Path, found: Path) -> tuple[TableColumn, ...]:
    """The columns of a file, and those in the names of the folders above it, as Spark finds them."""
    schema = pq.read_schema(found)
    folders = [part.partition("=")[0] for part in found.relative_to(path).parts[:-1] if "=" in part]
    columns = [TableColumn(field.name, _type(field.type)) for field in schema if field.name not in folders]
    return (*columns, *(TableColumn(name, "") for name in folders))


def _first_file(path: Path) -> Path | None:
    """A file of a directory that Spark would read; the path itself if it is one."""
    if path.is_file():
        return path
    for entry in sorted(path.iterdir()):
        # Spark passes over hidden names, but for folders that are columns.
        if entry.name.startswith(".") or (entry.name.startswith("_") and "=" not in entry.name):
            continue
        found = _first_file(entry)
        if found is not None:
            return found
    return None


def _type(kind: pa.DataType) -> str:
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import from_arrow_type

    try:
        return str(from_arrow_type(kind).simpleString())
    except PySparkException:
        return str(kind)
