"""What a kind of source or sink is to the rest of a pipeline: parse, check, look, plan, read or write.

A kind is one file of this room with a class for its sources, one for its sinks, or both; the room's `__init__` lists
them. Objects of these classes are what the file declares, frozen: they hold nothing that must be closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

from forebay.spark.pipelines.file.model import Output

if TYPE_CHECKING:
    from concurrent.futures import Future
    from contextlib import ExitStack

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from forebay.spark.pipelines.context import Context
    from forebay.spark.pipelines.file.document import Fields, Flaws, Word
    from forebay.spark.pipelines.file.model import Pipeline
    from forebay.spark.pipelines.outline import SourceOutline
    from forebay.spark.place.location import Location
    from forebay.spark.values.schema import TableColumn


class Part(Protocol):
    """What sources and sinks have in common."""

    words: ClassVar[tuple[str, ...]]
    """One of these in the file makes it a part of this kind, or of another with the same words and another format."""
    format_word: ClassVar[str | None]
    """What `format` says of this kind; `None` if the words alone make it one."""
    fields: ClassVar[tuple[str, ...]]
    """The other words that go with it, beside `name` and `from`."""

    @property
    def name(self) -> Word: ...


class PipelineSource(Part, Protocol):
    """A view of the pipeline."""

    streams: ClassVar[bool]
    """Whether a streaming pipeline follows it; the others are read as they are when the run begins."""

    @classmethod
    def parse(cls, fields: Fields, name: Word, word: str, directory: str) -> Self | None:
        """The source that the file declares by `word`; what is wrong is noted in `fields.flaws`.

        `None` if it cannot be made, which is a flaw too. `directory` is that of the file.
        """

    @property
    def columns(self) -> tuple[TableColumn, ...] | None:
        """The columns of the view; `None` if only what is read knows."""

    def reads(self, pipeline: Pipeline) -> tuple[str, ...]:
        """The full names of what is read."""

    def identities(self, pipeline: Pipeline, location: Location | None) -> tuple[str, ...]:
        """What is read, by the identities that sinks have for what they write."""

    def check(self, flaws: Flaws, pipeline: Pipeline) -> None:
        """Note what does not fit together, as far as the file alone shows."""

    def look(self, flaws: Flaws, context: Context) -> tuple[TableColumn, ...] | None:
        """Note what is not there, without Spark, and changing nothing. The columns, as far as they are found."""

    def outline(self, context: Context) -> SourceOutline:
        """What would be read now; its columns are added to it."""

    def frame(self, spark: SparkSession, context: Context) -> DataFrame:
        """The rows, as a stream if it `streams` and the pipeline is one."""


class PipelineSink(Part, Protocol):
    """A target of the pipeline."""

    exclusive: ClassVar[bool]
    """Whether it has its target to itself: no other sink writes it, no source reads it."""

    @classmethod
    def parse(cls, fields: Fields, name: Word, view: Word, target: Word, directory: str) -> Self | None:
        """The sink that the file declares; what is wrong is noted in `fields.flaws`."""

    @property
    def view(self) -> Word:
        """The source or step whose rows it gets."""

    @property
    def target(self) -> Word:
        """What it writes, as the file says it."""

    @property
    def output(self) -> Output:
        """Which rows of a stream it takes."""

    @property
    def named(self) -> Sequence[Word]:
        """The columns and expressions that it names."""

    @property
    def elsewhere(self) -> str | None:
        """Why it cannot be streamed into by a Spark Connect server, which calls no function of its client."""

    def writes(self, pipeline: Pipeline) -> str:
        """The full name of what it writes."""

    def identity(self, pipeline: Pipeline, location: Location | None) -> str:
        """What it writes, the same however it is named; without a location, as far as the file alone shows."""

    def how(self, pipeline: Pipeline) -> str:
        """Format and manner, in words for the plan."""

    def check(self, flaws: Flaws, pipeline: Pipeline) -> None:
        """Note what does not fit together, as far as the file alone shows."""

    def look(self, flaws: Flaws, context: Context) -> None:
        """Note what stands in the way, without Spark, and changing nothing."""

    def rows(self, frame: DataFrame) -> DataFrame:
        """The rows of its view as it writes them; `Flawed` with the line if that cannot be."""

    def write(self, rows: DataFrame, context: Context) -> None:
        """Write the rows of a batch: all of them when it returns, or none if it raises."""

    def stream(
        self, writer: DataStreamWriter, context: Context, started: Future[str], closing: ExitStack
    ) -> DataStreamWriter:
        """The writer of a query that brings each row once, whatever is killed. `started` gives the query's id once it
        runs; what must be closed behind the query goes into `closing`.
        """
