"""Whether the parts of a pipeline fit together: names, views, columns, what goes with its mode. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from forebay.spark.pipelines.file.document import Flaws, Word, hint
from forebay.spark.pipelines.file.model import (
    RECORD_PREFIX,
    Format,
    Mode,
    Output,
    Overwrite,
    Pipeline,
    Sink,
    Source,
    TableSink,
    TopicSink,
    TopicSource,
    ViewStep,
)
from forebay.spark.pipelines.file.queries import Reference, understood
from forebay.spark.values.schema import TableColumn
from forebay.topics import TopicName

_TIMES: Final = ("timestamp", "timestamp_ltz", "timestamp_ntz")


def check_pipeline(pipeline: Pipeline) -> None:
    """Raise `Flawed` with a line for everything that does not fit, as far as the file alone shows."""
    flaws = Flaws()
    _check_names(flaws, [*pipeline.sources, *pipeline.steps], "a source or a step")
    _check_names(flaws, pipeline.sinks, "a sink")
    _check_views(flaws, pipeline)
    for source in pipeline.topic_sources:
        _check_source(flaws, source, pipeline.mode)
    for sink in pipeline.sinks:
        _check_sink(flaws, sink, pipeline)
    _check_targets(flaws, pipeline)
    flaws.raise_if_any()
    if pipeline.mode is Mode.STREAMING:
        _check_streams(flaws, pipeline)
    flaws.raise_if_any()


def unused(pipeline: Pipeline) -> tuple[str, ...]:
    """Sources and steps that reach no sink."""
    read = _reads(pipeline)
    reached = {name for sink in pipeline.sinks for name in (sink.view.lower(), *_reachable(sink.view.lower(), read))}
    return tuple(str(view.name) for view in (*pipeline.sources, *pipeline.steps) if view.name.lower() not in reached)


def _check_names(flaws: Flaws, parts: Sequence[Source | ViewStep] | Sequence[Sink], what: str) -> None:
    seen: dict[str, Word] = {}
    for part in parts:
        first = seen.setdefault(part.name.lower(), part.name)
        if first is not part.name:
            flaws.add(part.name.place, f"{part.name} is already the name of {what} in line {first.place.line}")


def _check_views(flaws: Flaws, pipeline: Pipeline) -> None:
    known = [str(source.name) for source in pipeline.sources]
    later = [str(step.name) for step in pipeline.steps]
    read = _reads(pipeline)
    for step in pipeline.steps:
        del later[0]
        query = understood(step.sql)
        for reference in query.references if query.unread is None else ():
            fault = _fault(step, reference, known, later, read)
            if fault is not None:
                flaws.add(step.sql.place_of(reference.line, reference.column), fault)
        known.append(str(step.name))
    for sink in pipeline.sinks:
        if sink.view.lower() not in (name.lower() for name in known):
            why = hint(sink.view, known, "the sources and steps are")
            flaws.add(sink.view.place, f"there is no source or step {sink.view}: {why}")


def _fault(
    step: ViewStep, reference: Reference, known: Sequence[str], later: Sequence[str], read: Mapping[str, set[str]]
) -> str | None:
    """Why a step may not read what it names; `None` if it may."""
    name, own = reference.name.lower(), step.name.lower()
    if name in (one.lower() for one in known):
        return None
    if name == own:
        return f"step {step.name} reads itself: a step reads only what stands above it"
    if name not in (one.lower() for one in later):
        return f"there is no source or step {reference.name}: {hint(reference.name, known, 'above it stand')}"
    if own in _reachable(name, read):
        return f"steps {step.name} and {reference.name} read each other in a circle: a step reads only what is above it"
    return f"step {step.name} reads {reference.name}, which stands below it: move {reference.name} up"


def _reads(pipeline: Pipeline) -> dict[str, set[str]]:
    """What each step names, in small letters."""
    return {
        step.name.lower(): {reference.name.lower() for reference in understood(step.sql).references}
        for step in pipeline.steps
    }


def _reachable(start: str, read: Mapping[str, set[str]]) -> set[str]:
    """Everything that a view reads, by whatever way."""
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        for name in read.get(waiting.pop(), set()) - reached:
            reached.add(name)
            waiting.append(name)
    return reached


def _check_source(flaws: Flaws, source: TopicSource, mode: Mode) -> None:
    if mode is Mode.STREAMING and source.ending is not None:
        flaws.add(source.ending.place, "endingOffsets belongs to a batch: a streaming pipeline has no end")
    taken = {
        f"{RECORD_PREFIX}{name}" for name in ("key", "topic", "partition", "offset", "timestamp", "headers", "tag")
    }
    if source.format in (Format.JSON, Format.AVRO) and source.schema is not None:
        for name, _ in source.schema.columns:
            if name.lower() in taken:
                flaws.add(
                    source.schema.written.place, f"schema has a column {name}: that is the record's own {name[1:]}"
                )
    if source.watermark is None:
        return
    column, columns = source.watermark.column, {name.lower(): kind for name, kind in source.columns}
    kind = columns.get(column.lower())
    if kind is None:
        why = hint(column, [name for name, _ in source.columns], "the columns are")
        flaws.add(column.place, f"source {source.name} has no column {column}: {why}")
    elif kind not in _TIMES:
        flaws.add(column.place, f"watermark column {column} is {kind}: it must be a timestamp")


def _check_sink(flaws: Flaws, sink: Sink, pipeline: Pipeline) -> None:
    if isinstance(sink, TopicSink):
        if pipeline.mode is Mode.BATCH and sink.output is not Output.APPEND:
            flaws.add(sink.name.place, f"output of sink {sink.name} belongs to a streaming pipeline: leave it out")
    elif pipeline.mode is Mode.STREAMING and sink.overwrite is not Overwrite.CREATE:
        flaws.add(sink.name.place, f"write of sink {sink.name} belongs to a batch: a stream adds to its table")
    check_columns(flaws, sink, _columns(sink, pipeline))


def check_columns(flaws: Flaws, sink: Sink, columns: Sequence[TableColumn] | None) -> None:
    """Report columns that a sink names, and the source that it takes as it is does not have, if those are known."""
    if columns is None:
        return
    named = [*sink.expressions.values(), *sink.value] if isinstance(sink, TopicSink) else sink.partition_by
    for word in named:
        if word.isidentifier() and word.lower() not in (name.lower() for name, _ in columns):
            why = hint(word, [name for name, _ in columns], "the columns are")
            flaws.add(word.place, f"{sink.view} has no column {word}: {why}")


def _columns(sink: Sink, pipeline: Pipeline) -> tuple[TableColumn, ...] | None:
    """The columns that a sink writes, if it takes a source as it is; else only Spark knows."""
    for source in pipeline.sources:
        if source.name.lower() == sink.view.lower():
            return source.columns
    return None


def _check_targets(flaws: Flaws, pipeline: Pipeline) -> None:
    tables: dict[str, TableSink] = {}
    for sink in pipeline.sinks:
        if isinstance(sink, TableSink):
            first = tables.setdefault(pipeline.table_of(sink), sink)
            if first is not sink:
                flaws.add(sink.path.place, f"sink {first.name} writes the same table: give each its own")
    for path, sink in tables.items():
        for source in pipeline.sources:
            if not isinstance(source, TopicSource) and pipeline.table_of(source) == path:
                flaws.add(sink.path.place, f"source {source.name} reads the table that sink {sink.name} writes")


def _check_streams(flaws: Flaws, pipeline: Pipeline) -> None:
    streamed = {source.name.lower(): source for source in pipeline.topic_sources}
    unread = {step.name.lower() for step in pipeline.steps if understood(step.sql).unread is not None}
    read = _reads(pipeline)
    for sink in pipeline.sinks:
        reached = (sink.view.lower(), *_reachable(sink.view.lower(), read))
        feeding = [streamed[name] for name in reached if name in streamed]
        if not feeding and unread.isdisjoint(reached):
            flaws.add(sink.view.place, f"no topic feeds sink {sink.name}: write `mode: batch`, or read a topic")
        for source in _loops(sink, feeding):
            assert isinstance(sink, TopicSink)
            flaws.add(
                sink.topic.place, f"sink {sink.name} writes {sink.topic}, which its source {source.name} reads: endless"
            )


def _loops(sink: Sink, feeding: Sequence[TopicSource]) -> Iterator[TopicSource]:
    if isinstance(sink, TopicSink):
        target = TopicName.parse(sink.topic)
        yield from (source for source in feeding if target in (TopicName.parse(topic) for topic in source.topics))
