"""A pipeline file turned into a `Pipeline`, or refused with the line of everything that is wrong in it.

Reads the file and the Avro schemas it names. Whether topics and columns exist is found out elsewhere.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import Final

import yaml

from forebay.errors import Invalid
from forebay.spark.pipelines.file.document import Fields, Flaws, Word, read_document
from forebay.spark.pipelines.file.model import (
    BadRecords,
    FileFormat,
    FileSource,
    Format,
    Mode,
    Output,
    Overwrite,
    Pipeline,
    Schema,
    Sink,
    Source,
    TableFormat,
    TableSink,
    TopicSink,
    TopicSource,
    Trigger,
    ViewStep,
    Watermark,
)
from forebay.spark.values.avro import columns_of_avro, read_avro_schema
from forebay.spark.values.schema import Malformed, columns_of
from forebay.topics import TopicName

_PIPELINE: Final = ("name", "mode", "trigger", "checkpoint", "location", "spark", "sources", "steps", "sinks")
_TOPIC_SOURCE: Final = (
    "topic",
    "topics",
    "format",
    "schema",
    "startingOffsets",
    "endingOffsets",
    "watermark",
    "badRecords",
    "options",
)
_FILE_SOURCE: Final = ("table", "files", "format", "schema", "options")
_SOURCE: Final = ("name", *dict.fromkeys((*_TOPIC_SOURCE, *_FILE_SOURCE)))
_TOPIC_SINK: Final = (
    "topic",
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
_TABLE_SINK: Final = ("table", "format", "partitionBy", "write")
_SINK: Final = ("name", "from", *dict.fromkeys((*_TOPIC_SINK, *_TABLE_SINK)))
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}")
_TABLE: Final = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)+")
_DURATION: Final = re.compile(
    r"(\d+\s*(ms|milliseconds?|seconds?|minutes?|hours?|days?|weeks?)\s*)+", re.IGNORECASE | re.ASCII
)
_OTHER_TRIGGERS: Final = {
    "once": "once takes everything in one batch, however large: write `trigger: availableNow`, which takes several",
    "continuous": "continuous is not offered: write `trigger: {processingTime: 1 second}`",
}


def load_pipeline(path: str) -> Pipeline:
    """The pipeline that a file declares; `Flawed` has a line for each thing that is wrong."""
    flaws = Flaws()
    fields = read_document(path, flaws, what="the pipeline", known=_PIPELINE)
    directory = posixpath.dirname(posixpath.abspath(path))
    name = _name(fields, "revenue")
    mode = fields.choice("mode", {str(mode): mode for mode in Mode}, Mode.BATCH)
    sources = [_source(one, directory) for one in fields.items("sources", "a source", _SOURCE)]
    steps = [_step(one) for one in fields.items("steps", "a step", ("name", "sql"))]
    sinks = [_sink(one, directory) for one in fields.items("sinks", "a sink", _SINK)]
    for kind in ("sources", "sinks"):
        if kind not in fields:
            flaws.add(fields.place, f"{kind} are missing in the pipeline: write `{kind}:` with a list below")
    trigger, checkpoint = _trigger(fields), fields.word("checkpoint")
    _check_mode(fields, mode)
    location, spark = fields.options("location"), fields.options("spark")
    flaws.raise_if_any()
    assert name is not None
    return Pipeline(
        file=path,
        name=name,
        mode=mode,
        sources=tuple(source for source in sources if source is not None),
        steps=tuple(step for step in steps if step is not None),
        sinks=tuple(sink for sink in sinks if sink is not None),
        trigger=trigger,
        checkpoint=checkpoint,
        location=location,
        spark=spark,
    )


def _check_mode(fields: Fields, mode: Mode) -> None:
    if mode is Mode.BATCH:
        for word in ("trigger", "checkpoint"):
            if word in fields:
                fields.flaws.add(
                    fields.place_of(word),
                    f"{word} belongs to a streaming pipeline: write `mode: streaming`, or leave it out",
                )
    elif "checkpoint" not in fields:
        fields.flaws.add(
            fields.place_of("mode"),
            "checkpoint is missing: a streaming pipeline keeps there how far it came; write `checkpoint: DIRECTORY`",
        )


def _name(fields: Fields, example: str) -> Word | None:
    name = fields.required("name", example)
    if name is not None and not _NAME.fullmatch(name):
        fields.flaws.add(
            name.place, f"name of {fields.what} is {str(name)!r:.80}: write a letter, then letters, digits and _"
        )
    return name


def _named(fields: Fields, kind: str, example: str) -> Word | None:
    """The name of a part, by which errors in it are reported."""
    name = _name(fields, example)
    if name is not None:
        fields.what = f"{kind} {name}"
    return name


def _trigger(fields: Fields) -> Trigger:
    node = fields.node("trigger")
    if node is None:
        return Trigger()
    if isinstance(node, yaml.ScalarNode):
        word = fields.word("trigger")
        if word == "availableNow":
            return Trigger(available_now=True)
        if word is not None:
            fields.flaws.add(word.place, _wrong_trigger(word))
        return Trigger()
    known = ("availableNow", "processingTime", *_OTHER_TRIGGERS)
    inner = fields.mapping("trigger", "trigger", known)
    assert inner is not None
    for other, way_out in _OTHER_TRIGGERS.items():
        if other in inner:
            fields.flaws.add(inner.place_of(other), way_out)
    if "availableNow" in inner and "processingTime" in inner:
        fields.flaws.add(
            inner.place_of("processingTime"), "availableNow and processingTime exclude each other: give one"
        )
    interval = _duration(inner, "processingTime")
    now = inner.truth("availableNow", default=False)
    return Trigger(available_now=now, interval=interval)


def _wrong_trigger(word: Word) -> str:
    if word in _OTHER_TRIGGERS:
        return _OTHER_TRIGGERS[word]
    return f"trigger is {str(word)!r:.80}: write `availableNow` or `{{processingTime: 10 seconds}}`"


def _duration(fields: Fields, name: str) -> Word | None:
    word = fields.word(name)
    if word is not None and not _DURATION.fullmatch(word.strip()):
        fields.flaws.add(word.place, f"{name} of {fields.what} is {str(word)!r:.80}: write a time such as 10 seconds")
    return word


def _source(fields: Fields, directory: str) -> Source | None:
    name = _named(fields, "source", "orders")
    kinds = [kind for kind in ("topic", "topics", "table", "files") if kind in fields]
    if len(kinds) != 1:
        said = f"has {' and '.join(kinds)}" if kinds else "says nothing of where it reads"
        fields.flaws.add(fields.place, f"{fields.what} {said}: give one of topic, topics, table, files")
        return None
    is_topic = kinds[0] in ("topic", "topics")
    _check_kind(fields, kinds[0], _TOPIC_SOURCE if is_topic else _FILE_SOURCE)
    found = _topic_source(fields, name, directory) if is_topic else _file_source(fields, name, kinds[0])
    return found if name is not None else None


def _check_kind(fields: Fields, kind: str, known: tuple[str, ...]) -> None:
    """What belongs to another kind of source or sink is refused by name."""
    for word in dict.fromkeys((*_SOURCE, *_SINK)):
        if word in fields and word not in ("name", "from", *known):
            fields.flaws.add(fields.place_of(word), f"{word} does not go with {kind} in {fields.what}")


def _topic_source(fields: Fields, name: Word | None, directory: str) -> TopicSource | None:
    topics = (*fields.words("topic")[:1], *fields.words("topics"))
    for topic in topics:
        _check_topic(fields.flaws, topic)
    kind = fields.choice("format", {str(kind): kind for kind in Format}, Format.RAW)
    schema = _schema(fields, kind, directory)
    marked = fields.mapping("watermark", "watermark", ("column", "delay"))
    watermark = _watermark(marked) if marked is not None else None
    if name is None or (schema is None and kind in (Format.JSON, Format.AVRO)):
        return None
    source = TopicSource(
        name=name,
        topics=topics,
        format=kind,
        schema=schema,
        starting=fields.json("startingOffsets"),
        ending=fields.json("endingOffsets"),
        watermark=watermark,
        bad_records=fields.choice("badRecords", {str(kind): kind for kind in BadRecords}, BadRecords.FAIL),
        options=fields.options("options"),
    )
    if "badRecords" in fields and kind not in (Format.JSON, Format.AVRO):
        fields.flaws.add(
            fields.place_of("badRecords"), f"badRecords does not go with format {kind}: nothing is decoded"
        )
    return source


def _watermark(fields: Fields) -> Watermark | None:
    column, delay = fields.required("column", "at"), fields.required("delay", "10 minutes")
    _duration(fields, "delay")
    return Watermark(column=column, delay=delay) if column is not None and delay is not None else None


def _check_topic(flaws: Flaws, topic: Word) -> None:
    try:
        TopicName.parse(topic)
    except Invalid as error:
        flaws.add(topic.place, str(error))


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
    return _ddl(fields, word) if kind is Format.JSON else _avro(fields, word, directory)


def _ddl(fields: Fields, word: Word) -> Schema | None:
    try:
        return Schema(written=word, columns=columns_of(word))
    except Malformed as error:
        fields.flaws.add(word.place_of(error.line, error.column), f"schema of {fields.what}: {error}")
        return None


def _avro(fields: Fields, word: Word, directory: str) -> Schema | None:
    try:
        schema = read_avro_schema(posixpath.join(directory, word))
        return Schema(written=word, columns=columns_of_avro(schema), avro=schema)
    except Invalid as error:
        fields.flaws.add(word.place, str(error))
        return None


def _file_source(fields: Fields, name: Word | None, kind: str) -> FileSource | None:
    path = fields.required(kind, "customers.parquet")
    formats: dict[str, FileFormat] = {str(one): one for one in FileFormat if one is not FileFormat.ICEBERG}
    if kind == "table":
        formats = {str(one): one for one in (FileFormat.PARQUET, FileFormat.ICEBERG)}
    elif "format" not in fields:
        fields.flaws.add(
            fields.place, f"format is missing in {fields.what} of files: write one of {', '.join(formats)}"
        )
    chosen = fields.choice("format", formats, FileFormat.PARQUET)
    written = fields.word("schema")
    schema = _ddl(fields, written) if written is not None else None
    if written is not None and chosen not in (FileFormat.CSV, FileFormat.JSON):
        fields.flaws.add(written.place, f"schema does not go with {chosen} files: they have their own")
    if chosen is FileFormat.ICEBERG and "options" in fields:
        fields.flaws.add(fields.place_of("options"), "options do not go with format iceberg")
    if chosen is FileFormat.ICEBERG and path is not None:
        _check_table_name(fields, path)
    if name is None or path is None:
        return None
    return FileSource(name=name, path=path, format=chosen, schema=schema, options=fields.options("options"))


def _step(fields: Fields) -> ViewStep | None:
    name, sql = _named(fields, "step", "revenue"), fields.required("sql", "SELECT …")
    return ViewStep(name=name, sql=sql) if name is not None and sql is not None else None


def _sink(fields: Fields, directory: str) -> Sink | None:
    name, view = _named(fields, "sink", "revenue_topic"), fields.required("from", "a source or a step")
    kinds = [kind for kind in ("topic", "table") if kind in fields]
    if len(kinds) != 1:
        said = "has topic and table" if kinds else "says nothing of where it writes"
        fields.flaws.add(fields.place, f"{fields.what} {said}: give one of topic, table")
        return None
    _check_kind(fields, kinds[0], _TOPIC_SINK if kinds[0] == "topic" else _TABLE_SINK)
    target = fields.word(kinds[0])
    if name is None or view is None or target is None:
        return None
    if kinds[0] == "topic":
        return _topic_sink(fields, name, view, target, directory)
    return _table_sink(fields, name, view, target)


def _table_sink(fields: Fields, name: Word, view: Word, target: Word) -> TableSink:
    kind = fields.choice("format", {str(one): one for one in TableFormat}, TableFormat.PARQUET)
    overwrite = fields.choice("write", {str(one): one for one in Overwrite}, Overwrite.CREATE)
    if kind is TableFormat.ICEBERG:
        if "partitionBy" in fields:
            fields.flaws.add(fields.place_of("partitionBy"), "partitionBy does not go with format iceberg")
        _check_table_name(fields, target)
    elif overwrite is Overwrite.APPEND:
        fields.flaws.add(
            fields.place_of("write"),
            "write append is for `format: iceberg`, which adds as a whole; to add to a directory again and again write "
            "`mode: streaming` with `trigger: availableNow`",
        )
    return TableSink(
        name=name,
        view=view,
        path=target,
        format=kind,
        partition_by=fields.words("partitionBy"),
        overwrite=overwrite,
    )


def _check_table_name(fields: Fields, name: Word) -> None:
    if not _TABLE.fullmatch(name):
        fields.flaws.add(name.place, f"{name} is not the name of a table: write NAMESPACE.NAME")


def _topic_sink(fields: Fields, name: Word, view: Word, topic: Word, directory: str) -> TopicSink:
    _check_topic(fields.flaws, topic)
    formats = {str(kind): kind for kind in Format if kind is not Format.TEXT}
    kind = fields.choice("format", formats, Format.JSON)
    value = fields.words("value")
    if kind is Format.RAW and len(value) != 1:
        fields.flaws.add(
            fields.place, f"value is missing in {fields.what} with format raw: write one column or expression"
        )
    schema = None
    if kind is Format.AVRO:
        schema = _schema(fields, kind, directory)
    elif "schema" in fields:
        fields.flaws.add(fields.place_of("schema"), f"schema does not go with format {kind} in {fields.what}")
    _check_output(fields)
    outputs: Mapping[str, Output] = {**{str(one): one for one in Output}, "complete": Output.APPEND}
    return TopicSink(
        name=name,
        view=view,
        topic=topic,
        format=kind,
        value=value,
        key=fields.word("key"),
        tag=fields.word("tag"),
        partition=fields.word("partition"),
        timestamp=fields.word("timestamp"),
        headers=fields.word("headers"),
        schema=schema,
        output=fields.choice("output", outputs, Output.APPEND),
        options=fields.options("options"),
    )


def _check_output(fields: Fields) -> None:
    node = fields.node("output")
    if isinstance(node, yaml.ScalarNode) and node.value == "complete":
        fields.flaws.add(
            fields.place_of("output"),
            "output complete would append the whole result again and again: write `output: update` and give a key",
        )
