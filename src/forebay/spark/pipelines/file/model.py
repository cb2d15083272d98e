"""A pipeline as its file declares it: sources, steps in SQL, sinks. Plain values; what sources and sinks do is up to
their kinds.
"""

from __future__ import annotations

import enum
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from forebay.spark.pipelines.file.document import Place, Word
from forebay.spark.values.schema import TableColumn, quoted

if TYPE_CHECKING:
    from forebay.spark.pipelines.kinds.protocol import PipelineSink, PipelineSource

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


class BadRecords(enum.StrEnum):
    """What becomes of a value that does not fit the schema."""

    FAIL = "fail"
    DROP = "drop"
    KEEP = "keep"


class Output(enum.StrEnum):
    """Which rows of a streaming step are written: those that are final, or those that changed."""

    APPEND = "append"
    UPDATE = "update"


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
        return ", ".join(f"{quoted(name)} {kind}" for name, kind in self.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermark:
    """How late rows may be."""

    column: Word
    delay: Word


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewStep:
    """A query as a view."""

    name: Word
    sql: Word


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
    sources: tuple[PipelineSource, ...]
    steps: tuple[ViewStep, ...]
    sinks: tuple[PipelineSink, ...]
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

    def checkpoint_of(self, sink: PipelineSink) -> str:
        """Where a sink keeps how far it has come."""
        assert self.checkpoint is not None
        return f"{self.path_of(self.checkpoint).rstrip('/')}/{sink.name}"
