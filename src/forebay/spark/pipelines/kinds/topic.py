"""Topics as sources and sinks: records decoded into columns, and rows as records."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final

import yaml

from forebay.errors import Invalid
from forebay.spark.pipelines.decoding import decoded, encoded_avro
from forebay.spark.pipelines.failures import errors_at, require_column
from forebay.spark.pipelines.file.document import Fields, Flaws, Word, hint, option_place
from forebay.spark.pipelines.file.model import (
    CORRUPT,
    RECORD_PREFIX,
    BadRecords,
    Format,
    Mode,
    Output,
    Pipeline,
    Schema,
    Watermark,
)
from forebay.spark.pipelines.file.schemas import parse_ddl
from forebay.spark.pipelines.kinds.choice import CHOICE_WORDS, Choice
from forebay.spark.pipelines.kinds.tables import START_SECONDS
from forebay.spark.pipelines.outline import Extent, SourceOutline
from forebay.spark.pipelines.progress import may_have_begun
from forebay.spark.place.location import NAMES as PLACE_NAMES
from forebay.spark.place.location import Location
from forebay.spark.reading.columns import SPARK_TYPES
from forebay.spark.reading.options import NAMES, ReadOptions
from forebay.spark.reading.plan import narrowed
from forebay.spark.reading.view import load, load_or_look
from forebay.spark.reading.where import parse_where
from forebay.spark.values.avro import columns_of_avro, read_avro_schema
from forebay.spark.values.schema import TableColumn, quoted
from forebay.spark.writing.options import NAMES as WRITE_NAMES
from forebay.spark.writing.options import WriteOptions
from forebay.topics import Engine, TopicName, TopicSpec

if TYPE_CHECKING:
    from contextlib import ExitStack

    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from forebay.spark.pipelines.context import Context

_TIMES: Final = ("timestamp", "timestamp_ltz", "timestamp_ntz")
_OWN_OPTIONS: Final = {
    "topic": "topic",
    "topics": "topics",
    "startingoffsets": "startingOffsets",
    "endingoffsets": "endingOffsets",
    "columns": "columns",
}
"""Options of a read that have words of their own in a source."""
_NAMED_OPTION: Final = re.compile(r'option "([^"]+)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSource:
    """One or several topics as a view."""

    words: ClassVar[tuple[str, ...]] = ("topic", "topics")
    format_word: ClassVar[str | None] = None
    fields: ClassVar[tuple[str, ...]] = (
        "format",
        "schema",
        "startingOffsets",
        "endingOffsets",
        "watermark",
        "badRecords",
        "options",
        *CHOICE_WORDS,
    )
    streams: ClassVar = True

    name: Word
    topics: tuple[Word, ...]
    format: Format = Format.RAW
    schema: Schema | None = None
    starting: Word | None = None
    ending: Word | None = None
    watermark: Watermark | None = None
    bad_records: BadRecords = BadRecords.FAIL
    options: Mapping[Word, Word] = field(default_factory=dict)
    choice: Choice = field(default_factory=Choice)
    """`where` is over the columns of the record itself; `columns` are those of the view."""

    @classmethod
    def parse(cls, fields: Fields, name: Word, word: str, directory: str) -> TopicSource | None:
        topics = (*fields.words("topic")[:1], *fields.words("topics"))
        _check_names(fields.flaws, topics)
        kinds = {str(kind): kind for kind in Format}
        kind, is_known = fields.choice("format", kinds, Format.RAW), fields.is_one_of("format", kinds)
        schema = _schema(fields, kind, directory) if is_known else None
        marked = fields.mapping("watermark", "watermark", ("column", "delay"))
        watermark = _watermark(marked) if marked is not None else None
        if schema is None and kind in (Format.JSON, Format.AVRO):
            return None
        source = cls(
            name=name,
            topics=topics,
            format=kind,
            schema=schema,
            starting=fields.json("startingOffsets"),
            ending=fields.json("endingOffsets"),
            watermark=watermark,
            bad_records=fields.choice("badRecords", {str(kind): kind for kind in BadRecords}, BadRecords.FAIL),
            options=fields.options("options"),
            choice=Choice.parse(fields),
        )
        if is_known and "badRecords" in fields and kind not in (Format.JSON, Format.AVRO):
            fields.flaws.add(
                fields.place_of("badRecords"), f"badRecords does not go with format {kind}: nothing is decoded"
            )
        return source

    @property
    def columns(self) -> tuple[TableColumn, ...]:
        """The columns of the view."""
        return self.choice.of(self._promised)

    @property
    def _promised(self) -> tuple[TableColumn, ...]:
        """The columns of the view, if none are chosen."""
        record = tuple(TableColumn(name, kind) for name, kind in SPARK_TYPES.items())
        if self.format is Format.RAW:
            return record
        if self.format is Format.TEXT:
            return tuple(column._replace(type="string") if column.name == "value" else column for column in record)
        assert self.schema is not None
        beside = (TableColumn(RECORD_PREFIX + name, kind) for name, kind in record if name != "value")
        corrupt = (TableColumn(CORRUPT, "string"),) if self.bad_records is BadRecords.KEEP else ()
        return (*self.schema.columns, *beside, *corrupt)

    def reads(self, pipeline: Pipeline) -> tuple[str, ...]:
        return tuple(str(TopicName.parse(topic)) for topic in self.topics)

    def identities(self, pipeline: Pipeline, location: Location | None) -> tuple[str, ...]:
        return tuple(f"topic {topic}" for topic in self.reads(pipeline))

    def check(self, flaws: Flaws, pipeline: Pipeline) -> None:
        if pipeline.mode is Mode.STREAMING and self.ending is not None:
            flaws.add(self.ending.place, "endingOffsets belongs to a batch: a streaming pipeline has no end")
        if self.format in (Format.JSON, Format.AVRO) and self.schema is not None:
            taken = {f"{RECORD_PREFIX}{name}" for name in SPARK_TYPES if name != "value"}
            for name, _ in self.schema.columns:
                if name.lower() in taken:
                    flaws.add(
                        self.schema.written.place, f"schema has a column {name}: that is the record's own {name[1:]}"
                    )
        self.choice.check(flaws, self.name, self._promised)
        if self.choice.where is not None:
            self._check_where(flaws, self.choice.where)
        if self.watermark is not None:
            self._check_watermark(flaws, self.watermark.column)

    def _check_where(self, flaws: Flaws, where: Word) -> None:
        if any(name.lower() == "where" for name in self.options):
            flaws.add(where.place, f"where is given twice in source {self.name}: leave out that of the options")
        try:
            parse_where(where)
        except Invalid as error:
            flaws.add(where.place, f"source {self.name}: {error}; or filter the view in a step")

    def _check_watermark(self, flaws: Flaws, column: Word) -> None:
        kind = {name.lower(): kind for name, kind in self.columns}.get(column.lower())
        if kind is None:
            why = hint(column, [name for name, _ in self.columns], "the columns are")
            flaws.add(column.place, f"source {self.name} has no column {column}: {why}")
        elif kind not in _TIMES:
            flaws.add(column.place, f"watermark column {column} is {kind}: it must be a timestamp")

    def look(self, flaws: Flaws, context: Context) -> None:
        for topic in self.topics:
            _check_topic(flaws, topic, context)
        self._check_options(flaws, context)

    def _check_options(self, flaws: Flaws, context: Context) -> None:
        known = [name for name in NAMES if name.lower() not in _OWN_OPTIONS and name not in PLACE_NAMES]
        for name in self.options:
            if name.lower() in _OWN_OPTIONS:
                own = _OWN_OPTIONS[name.lower()]
                flaws.add(name.place, f"{name} has a word of its own: write `{own}:` in source {self.name}")
                return
            if name.lower() not in (one.lower() for one in known):
                flaws.add(name.place, f"{name!s} is not an option of a topic: {hint(name, known, 'the options are')}")
                return
        try:
            self._parsed_options(context)
        except Invalid as error:
            words = {"startingOffsets": self.starting, "endingOffsets": self.ending}
            named = _NAMED_OPTION.search(str(error))
            word = words.get(named[1]) if named is not None else None
            at = word.place if word is not None else option_place(self.options, str(error)) or self.name.place
            flaws.add(at, f"source {self.name}: {error}")

    def read_options(self, context: Context) -> dict[str, str]:
        """The options of the read behind it. Unless the file says otherwise, it begins with what there is."""
        options = {**context.place, "topic" if len(self.topics) == 1 else "topics": ",".join(self.topics)}
        options |= {str(name): str(text) for name, text in self.options.items()}
        if self.starting is not None:
            options["startingOffsets"] = str(self.starting)
        elif context.streams and not any(name.lower().startswith("starting") for name in options):
            options["startingOffsets"] = "earliest"
        if self.ending is not None:
            options["endingOffsets"] = str(self.ending)
        if self.choice.where is not None:
            options["where"] = str(self.choice.where)
        if self.choice.columns:
            options["columns"] = ",".join(self._record_columns())
        return options

    def _record_columns(self) -> list[str]:
        """What is read of the records: the chosen columns, and what decoding needs."""
        chosen = {name for name, _ in self.columns}
        if self.format in (Format.RAW, Format.TEXT):
            return [name for name in SPARK_TYPES if name in chosen]
        needed = {"value"} | ({"topic", "partition", "offset"} if self.bad_records is BadRecords.FAIL else set())
        return [name for name in SPARK_TYPES if name in needed or RECORD_PREFIX + name in chosen]

    def _parsed_options(self, context: Context) -> ReadOptions:
        return ReadOptions.parse(self.read_options(context), streaming=context.streams)

    def outline(self, context: Context) -> SourceOutline:
        marked = self.watermark
        return SourceOutline(
            name=str(self.name),
            reads=", ".join(self.topics),
            format=str(self.format),
            where=self.choice.shown,
            watermark=f"{marked.column} delayed by {marked.delay}" if marked is not None else None,
            extents=self._extents(context),
        )

    def _extents(self, context: Context) -> tuple[Extent, ...]:
        """What there is to read by the options, `where` among them; nothing where a stream goes on elsewhere and the
        topics lack that start.
        """
        pipeline, options = context.pipeline, self._parsed_options(context)
        # A sink that begins only now is refused by its query, if the start is not there.
        begun = context.streams and any(may_have_begun(pipeline.checkpoint_of(sink)) for sink in pipeline.sinks)
        snapshot, ranges = load_or_look(options) if begun else load(options)
        extents = []
        for shard, start, stop in narrowed(snapshot, ranges or (), options.where):
            view = snapshot.shards[shard]
            weight = sum(
                piece.bytes * (min(stop, piece.stop) - max(start, piece.start)) // (piece.stop - piece.start)
                for piece in view.pieces
                if piece.start < stop and piece.stop > start
            )
            extents.append(Extent(topic=view.topic, partition=view.partition, start=start, stop=stop, bytes=weight))
        return tuple(extents)

    def frame(self, spark: SparkSession, context: Context) -> DataFrame:
        reader = spark.readStream if context.streams else spark.read
        records = reader.format("forebay").options(**self.read_options(context)).load()
        frame = decoded(records, self)
        if self.choice.columns:
            frame = frame.select(*(quoted(name) for name, _ in self.columns))
        if self.watermark is not None:
            return self._marked(frame, self.watermark)
        return frame

    def _marked(self, frame: DataFrame, marked: Watermark) -> DataFrame:
        """The frame with its watermark. Spark splits the name there at dots, quoted or not: it gets one without."""
        (name,) = (name for name in frame.columns if name.lower() == marked.column.lower())
        plain = "watermark"
        while plain in (one.lower() for one in frame.columns):
            plain += "_"
        renamed = frame.withColumnRenamed(name, plain).withWatermark(plain, str(marked.delay))
        return renamed.withColumnRenamed(plain, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSink:
    """Rows of a view as records of a topic. Apart from the columns of `value`, each field is an expression in SQL."""

    words: ClassVar[tuple[str, ...]] = ("topic",)
    format_word: ClassVar[str | None] = None
    fields: ClassVar[tuple[str, ...]] = (
        "format",
        "value",
        "key",
        "tag",
        "partition",
        "timestamp",
        "headers",
        "schema",
        "output",
        "options",
    )
    exclusive: ClassVar = False

    name: Word
    view: Word
    target: Word
    format: Format = Format.JSON
    value: tuple[Word, ...] = ()
    """The columns to encode, all if empty; for raw the expression that is the value."""
    expressions: Mapping[str, Word] = field(default_factory=dict)
    """The columns of the records that are said by expressions."""
    schema: Schema | None = None
    output: Output = Output.APPEND
    options: Mapping[Word, Word] = field(default_factory=dict)

    @classmethod
    def parse(cls, fields: Fields, name: Word, view: Word, target: Word, directory: str) -> TopicSink:
        _check_name(fields.flaws, target)
        kinds = {str(kind): kind for kind in Format if kind is not Format.TEXT}
        kind = fields.choice("format", kinds, Format.JSON)
        value = fields.words("value")
        if kind is Format.RAW and len(value) != 1:
            fields.flaws.add(
                fields.place, f"value is missing in {fields.what} with format raw: write one column or expression"
            )
        schema = None
        if kind is Format.AVRO:
            schema = _schema(fields, kind, directory)
        elif "schema" in fields and fields.is_one_of("format", kinds):
            fields.flaws.add(fields.place_of("schema"), f"schema does not go with format {kind} in {fields.what}")
        said = {column: fields.word(column) for column in ("key", "tag", "partition", "timestamp", "headers")}
        return cls(
            name=name,
            view=view,
            target=target,
            format=kind,
            value=value,
            expressions={column: word for column, word in said.items() if word is not None},
            schema=schema,
            output=_output(fields),
            options=fields.options("options"),
        )

    @property
    def named(self) -> Sequence[Word]:
        return (*self.expressions.values(), *self.value)

    @property
    def elsewhere(self) -> str | None:
        return "has `output: update`" if self.output is Output.UPDATE else None

    def writes(self, pipeline: Pipeline) -> str:
        return str(TopicName.parse(self.target))

    def identity(self, pipeline: Pipeline, location: Location | None) -> str:
        return f"topic {self.writes(pipeline)}"

    def how(self, pipeline: Pipeline) -> str:
        return f"{self.format}, {self.output}" if pipeline.mode is Mode.STREAMING else str(self.format)

    def check(self, flaws: Flaws, pipeline: Pipeline) -> None:
        if pipeline.mode is Mode.BATCH and self.output is not Output.APPEND:
            flaws.add(self.name.place, f"output of sink {self.name} belongs to a streaming pipeline: leave it out")

    def look(self, flaws: Flaws, context: Context) -> None:
        _check_topic(flaws, self.target, context)
        known = [name for name in WRITE_NAMES if name not in (*PLACE_NAMES, "topic", "queryId", "batchId")]
        for name in self.options:
            if name not in known:
                way_out = hint(name, known, "the options are")
                flaws.add(name.place, f"{name!s} is not an option of a topic's sink: {way_out}")
                return
        try:
            WriteOptions.parse(self._write_options(context))
        except Invalid as error:
            flaws.add(option_place(self.options, str(error)) or self.name.place, f"sink {self.name}: {error}")

    def _write_options(self, context: Context) -> dict[str, str]:
        options = {str(name): str(text) for name, text in self.options.items()}
        return {**context.place, "topic": str(self.target), **options}

    def rows(self, frame: DataFrame) -> DataFrame:
        columns = {"value": self._value(frame)}
        for name, word in self.expressions.items():
            columns[name] = self._expression(frame, word, name)
        with errors_at(self.name, f"sink {self.name}"):
            rows = frame.select(*(column.alias(name) for name, column in columns.items()))
        return encoded_avro(rows, self.schema) if self.schema is not None else rows

    def _value(self, frame: DataFrame) -> Column:
        from pyspark.sql import functions as f

        if self.format is Format.RAW:
            return self._expression(frame, self.value[0], "value")
        for word in self.value:
            require_column(frame, word, self.view)
        names = [str(word) for word in self.value] or frame.columns
        struct = f.struct(*(f.col(quoted(name)) for name in names))
        if self.format is Format.JSON:
            return f.to_json(struct).cast("binary")
        return struct

    def _expression(self, frame: DataFrame, word: Word, name: str) -> Column:
        """The expression of a column of records, in the type that it must have."""
        from pyspark.sql import functions as f
        from pyspark.sql.types import BinaryType, MapType

        with errors_at(word, f"{name} of sink {self.name}"):
            column: Column = f.expr(str(word))
            kind: Any = frame.select(column).schema.fields[0].dataType
            if name in ("key", "value") and not isinstance(kind, BinaryType):
                return column.cast("string").cast("binary")
            if name == "headers" and isinstance(kind, MapType):
                column = f.map_entries(column)
            cast = {
                "tag": "string",
                "partition": "int",
                "timestamp": "timestamp",
                "headers": "array<struct<key:string,value:binary>>",
            }.get(name)
            column = column.cast(cast) if cast is not None else column
            _ = frame.select(column).schema
        return column

    def write(self, rows: DataFrame, context: Context) -> None:
        rows.write.format("forebay").options(**self._write_options(context)).mode("append").save()

    def stream(
        self, writer: DataStreamWriter, context: Context, started: Future[str], closing: ExitStack
    ) -> DataStreamWriter:
        options = self._write_options(context)
        if self.output is Output.APPEND:
            return writer.format("forebay").options(**options).outputMode("append")
        # Spark lets no source in Python take updates itself.
        return writer.foreachBatch(into_topic(options, started)).outputMode("update")


def into_topic(options: Mapping[str, str], started: Future[str]) -> Callable[[DataFrame, int], None]:
    """Brings each batch of a query into a topic once; the query's id is known once it has started."""

    def put(rows: DataFrame, number: int) -> None:
        batch = {"queryId": started.result(START_SECONDS), "batchId": str(number)}
        rows.write.format("forebay").options(**options, **batch).mode("append").save()

    return put


def _output(fields: Fields) -> Output:
    node = fields.node("output")
    if isinstance(node, yaml.ScalarNode) and node.value == "complete":
        fields.flaws.add(
            fields.place_of("output"),
            "output complete would append the whole result again and again: write `output: update` and give a key",
        )
    outputs: Mapping[str, Output] = {**{str(one): one for one in Output}, "complete": Output.APPEND}
    return fields.choice("output", outputs, Output.APPEND)


def _watermark(fields: Fields) -> Watermark | None:
    column, delay = fields.required("column", "at"), fields.required("delay", "10 minutes")
    fields.duration("delay")
    return Watermark(column=column, delay=delay) if column is not None and delay is not None else None


def _check_names(flaws: Flaws, topics: Sequence[Word]) -> None:
    """Each is a name, and of another topic than those before it: one topic may be written in two ways."""
    seen: set[TopicName] = set()
    for topic in topics:
        try:
            name = TopicName.parse(topic)
        except Invalid as error:
            flaws.add(topic.place, str(error))
            continue
        if name in seen:
            flaws.add(topic.place, f"{topic} is the topic {name}, which stands before it: name each topic once")
        seen.add(name)


def _check_name(flaws: Flaws, topic: Word) -> None:
    try:
        TopicName.parse(topic)
    except Invalid as error:
        flaws.add(topic.place, str(error))


def _check_topic(flaws: Flaws, topic: Word, context: Context) -> None:
    spec = context.topics.get(TopicName.parse(topic))
    if spec is None:
        way_out = hint(topic, [str(name) for name in context.topics], "the topics are")
        flaws.add(
            topic.place, f'there is no topic {topic} in {context.location}: {way_out} (see "forebay topic create")'
        )
    elif spec.engine is not Engine.SEGMENT:
        flaws.add(topic.place, _private(spec))


def _private(spec: TopicSpec) -> str:
    return (
        f'{spec.name} lives on engine "{spec.engine}", which only its owner can open: Spark takes topics on engine '
        '"segment"; copy it with "forebay topic copy"'
    )


def _schema(fields: Fields, kind: Format, directory: str) -> Schema | None:
    """The schema of a value; json and avro need one, the others have none."""
    if kind not in (Format.JSON, Format.AVRO):
        if "schema" in fields:
            fields.flaws.add(
                fields.place_of("schema"), f"schema does not go with format {kind}: its values stay as they are"
            )
        return None
    if "schema" not in fields:
        example = "order_id STRING, amount DOUBLE" if kind is Format.JSON else "order.avsc"
        fields.flaws.add(
            fields.place, f"schema is missing in {fields.what} with format {kind}: write `schema: {example}`"
        )
        return None
    word = fields.word("schema")
    if word is None:
        return None
    return parse_ddl(fields, word) if kind is Format.JSON else _avro(fields, word, directory)


def _avro(fields: Fields, word: Word, directory: str) -> Schema | None:
    try:
        schema = read_avro_schema(posixpath.join(directory, word))
        return Schema(written=word, columns=columns_of_avro(schema), avro=schema)
    except Invalid as error:
        fields.flaws.add(word.place, str(error))
        return None
