"""A pipeline as its file declares it: sources, steps in SQL, sinks. Plain values; nothing here does anything."""

from __future__ import annotations

import enum
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from forebay.spark.pipelines.file.document import Place, Word
from forebay.spark.reading.columns import SPARK_TYPES
from forebay.spark.values.schema import TableColumn

RECORD_PREFIX: Final = "_"
"""Before the name of what a record has beside its value, where the value is decoded into columns of its own."""
CORRUPT: Final = "_corrupt"
"""The column that holds, as text, a value that does not fit the schema."""
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


class Mode(enum.StrEnum):
    """How a pipeline runs."""

    BATCH = "batch"
    """Once, over what there is."""
    STREAMING = "streaming"
    """From where it stopped, exactly once."""


class Format(enum.StrEnum):
    """What the values of a topic are."""

    RAW = "raw"
    TEXT = "text"
    JSON = "json"
    AVRO = "avro"


class FileFormat(enum.StrEnum):
    """What files are."""

    PARQUET = "parquet"
    CSV = "csv"
    JSON = "json"
    TEXT = "text"
    ICEBERG = "iceberg"
    """Those that the current snapshot of a catalog's table names."""


class BadRecords(enum.StrEnum):
    """What becomes of a value that does not fit the schema."""

    FAIL = "fail"
    DROP = "drop"
    KEEP = "keep"


class Output(enum.StrEnum):
    """Which rows of a streaming step are written: those that are final, or those that changed."""

    APPEND = "append"
    UPDATE = "update"


class TableFormat(enum.StrEnum):
    """What a table is."""

    PARQUET = "parquet"
    """A directory of Parquet files."""
    ICEBERG = "iceberg"
    """A table of the catalog that the settings name."""


class Overwrite(enum.StrEnum):
    """What a batch does where its table is already."""

    CREATE = "create"
    OVERWRITE = "overwrite"
    APPEND = "append"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """The columns of a value."""

    written: Word
    columns: tuple[TableColumn, ...]
    avro: Mapping[str, Any] | None = None

    @property
    def ddl(self) -> str:
        """The columns as Spark reads them."""
        return ", ".join(f"`{name.replace('`', '``')}` {kind}" for name, kind in self.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermark:
    """How late rows may be."""

    column: Word
    delay: Word


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSource:
    """One or several topics as a view."""

    name: Word
    topics: tuple[Word, ...]
    format: Format = Format.RAW
    schema: Schema | None = None
    starting: Word | None = None
    ending: Word | None = None
    watermark: Watermark | None = None
    bad_records: BadRecords = BadRecords.FAIL
    options: Mapping[Word, Word] = field(default_factory=dict)

    @property
    def columns(self) -> tuple[TableColumn, ...]:
        """The columns of the view."""
        record = tuple(TableColumn(name, kind) for name, kind in SPARK_TYPES.items())
        if self.format is Format.RAW:
            return record
        if self.format is Format.TEXT:
            return tuple(column._replace(type="string") if column.name == "value" else column for column in record)
        assert self.schema is not None
        beside = (TableColumn(RECORD_PREFIX + name, kind) for name, kind in record if name != "value")
        corrupt = (TableColumn(CORRUPT, "string"),) if self.bad_records is BadRecords.KEEP else ()
        return (*self.schema.columns, *beside, *corrupt)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSource:
    """Files as a view, the same for the whole run."""

    name: Word
    path: Word
    """As written, see `Pipeline.path_of`; of a catalog's table its name."""
    format: FileFormat = FileFormat.PARQUET
    schema: Schema | None = None
    options: Mapping[Word, Word] = field(default_factory=dict)

    @property
    def columns(self) -> tuple[TableColumn, ...] | None:
        """The columns of the view; `None` if only the files know."""
        if self.format is FileFormat.TEXT:
            return (TableColumn("value", "string"),)
        return self.schema.columns if self.schema is not None else None


Source: TypeAlias = TopicSource | FileSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewStep:
    """A query as a view."""

    name: Word
    sql: Word


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSink:
    """Rows of a view as records of a topic. Apart from the columns of `value`, each field is an expression in SQL."""

    name: Word
    view: Word
    topic: Word
    format: Format = Format.JSON
    value: tuple[Word, ...] = ()
    """The columns to encode, all if empty; for raw the expression that is the value."""
    key: Word | None = None
    tag: Word | None = None
    partition: Word | None = None
    timestamp: Word | None = None
    headers: Word | None = None
    schema: Schema | None = None
    output: Output = Output.APPEND
    options: Mapping[Word, Word] = field(default_factory=dict)

    @property
    def expressions(self) -> dict[str, Word]:
        """The columns of the records that are said by expressions."""
        said = {
            "key": self.key,
            "tag": self.tag,
            "partition": self.partition,
            "timestamp": self.timestamp,
            "headers": self.headers,
        }
        return {column: word for column, word in said.items() if word is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSink:
    """Rows of a view as a table."""

    name: Word
    view: Word
    path: Word
    """As written: the directory, see `Pipeline.path_of`; of a catalog's table its name."""
    format: TableFormat = TableFormat.PARQUET
    partition_by: tuple[Word, ...] = ()
    overwrite: Overwrite = Overwrite.CREATE


Sink: TypeAlias = TopicSink | TableSink


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """When a streaming pipeline looks for more."""

    available_now: bool = False
    """Once, until everything that is there now is done."""
    interval: Word | None = None
    """How often; as soon as the last time is done if not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Everything that a file declares, checked as far as the file goes."""

    file: str
    name: Word
    mode: Mode
    sources: tuple[Source, ...]
    steps: tuple[ViewStep, ...]
    sinks: tuple[Sink, ...]
    trigger: Trigger = Trigger()
    checkpoint: Word | None = None
    location: Mapping[Word, Word] = field(default_factory=dict)
    spark: Mapping[Word, Word] = field(default_factory=dict)

    def with_settings(self, settings: Mapping[str, str], source: str) -> Pipeline:
        """The pipeline with these settings of Spark's over its own; `source` is where they were given."""
        place = Place(source, 1, 1)
        given = {Word(name, place): Word(text, place) for name, text in settings.items()}
        return replace(self, spark={**self.spark, **given})

    def path_of(self, written: str) -> str:
        """A path in the file as it is meant: relative to where the file is. A URL is left alone."""
        if _SCHEME.match(written):
            return written
        return posixpath.normpath(posixpath.join(posixpath.dirname(posixpath.abspath(self.file)), written))

    def table_of(self, part: FileSource | TableSink) -> str:
        """What is read or written: the path, or of a catalog's table its name."""
        is_open = part.format in (FileFormat.ICEBERG, TableFormat.ICEBERG)
        return str(part.path) if is_open else self.path_of(part.path)

    def checkpoint_of(self, sink: Sink) -> str:
        """Where a sink keeps how far it has come."""
        assert self.checkpoint is not None
        return f"{self.path_of(self.checkpoint).rstrip('/')}/{sink.name}"

    @property
    def topic_sources(self) -> tuple[TopicSource, ...]:
        """The sources that are topics."""
        return tuple(source for source in self.sources if isinstance(source, TopicSource))

    @property
    def topic_sinks(self) -> tuple[TopicSink, ...]:
        """The sinks that are topics."""
        return tuple(sink for sink in self.sinks if isinstance(sink, TopicSink))
