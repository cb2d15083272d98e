"""What a pipeline would do if it ran now, shown without Spark: offsets and bytes to read, steps, sinks, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from forebay.spark.pipelines.file.checking import check_pipeline, unused
from forebay.spark.pipelines.file.model import (
    FileSource,
    Mode,
    Pipeline,
    Sink,
    Source,
    TableSink,
    TopicSource,
)
from forebay.spark.pipelines.file.queries import understood
from forebay.spark.pipelines.progress import may_have_begun, standing
from forebay.spark.pipelines.surroundings import check_surroundings, place_of, read_options
from forebay.spark.reading.options import ReadOptions
from forebay.spark.reading.view import load, load_or_look
from forebay.spark.values.schema import TableColumn


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """Offsets `[start, stop)` of one partition, in about so many bytes."""

    topic: str
    partition: int
    start: int
    stop: int
    bytes: int


class SourceOutline(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A source: its columns as far as they are known, and what there is to read."""

    name: str
    reads: str
    format: str
    columns: tuple[str, ...] | None = None
    watermark: str | None = None
    extents: tuple[Extent, ...] = ()

    @property
    def records(self) -> int:
        """How many offsets there are to read."""
        return sum(extent.stop - extent.start for extent in self.extents)

    @property
    def bytes(self) -> int:
        """About how many bytes."""
        return sum(extent.bytes for extent in self.extents)


class StepOutline(msgspec.Struct, frozen=True, kw_only=True):
    """A step and the views it reads."""

    name: str
    reads: tuple[str, ...]
    sql: str


class SinkOutline(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sink, and where it goes on if it has begun."""

    name: str
    view: str
    writes: str
    how: str
    checkpoint: str | None = None
    batch: int | None = None
    committed: bool | None = None
    offsets: dict[str, dict[int, int]] = msgspec.field(default_factory=dict)


class Outline(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All of it."""

    pipeline: str
    file: str
    mode: str
    location: dict[str, str]
    sources: tuple[SourceOutline, ...]
    steps: tuple[StepOutline, ...]
    sinks: tuple[SinkOutline, ...]
    trigger: str | None = None
    notes: tuple[str, ...] = ()

    def plain(self) -> Any:
        """For JSON."""
        return msgspec.to_builtins(self)

    def lines(self) -> list[str]:
        """For a person."""
        head = f"pipeline {self.pipeline} ({self.mode}{f', trigger {self.trigger}' if self.trigger else ''})"
        lines = [head, f"  location  {', '.join(f'{name} {text}' for name, text in self.location.items())}"]
        for source in self.sources:
            lines += _source_lines(source)
        lines += [f"  step      {step.name}: reads {', '.join(step.reads) or 'nothing'}" for step in self.steps]
        for sink in self.sinks:
            lines += _sink_lines(sink)
        return [*lines, *(f"  note      {note}" for note in self.notes)]


def outline(pipeline: Pipeline, given: Mapping[str, str] | None = None) -> Outline:
    """Everything that can be known without Spark, checked on the way; `Flawed` has a line for all that is wrong."""
    check_pipeline(pipeline)
    place = place_of(pipeline, given)
    found = check_surroundings(pipeline, place)
    return Outline(
        pipeline=str(pipeline.name),
        file=pipeline.file,
        mode=str(pipeline.mode),
        location=place,
        sources=tuple(_source(pipeline, source, place, found) for source in pipeline.sources),
        steps=tuple(
            StepOutline(
                name=str(step.name),
                reads=tuple(dict.fromkeys(reference.name for reference in understood(step.sql).references)),
                sql=str(step.sql),
            )
            for step in pipeline.steps
        ),
        sinks=tuple(_sink(pipeline, sink) for sink in pipeline.sinks),
        trigger=_trigger(pipeline),
        notes=(*(f"{name} reaches no sink and is not read" for name in unused(pipeline)), *_unread(pipeline)),
    )


def _unread(pipeline: Pipeline) -> Iterator[str]:
    """The steps whose SQL is known to Spark alone."""
    for step in pipeline.steps:
        unread = understood(step.sql).unread
        if unread is not None:
            at = step.sql.place_of(unread.line, unread.column)
            yield f"step {step.name} is not checked before Spark reads it: {unread.why}, at {at.line}:{at.column}"


def _source(
    pipeline: Pipeline, source: Source, place: Mapping[str, str], found: Mapping[str, tuple[TableColumn, ...]]
) -> SourceOutline:
    columns = source.columns or found.get(source.name.lower())
    names = tuple(f"{name} {kind}".rstrip() for name, kind in columns) if columns is not None else None
    if isinstance(source, FileSource):
        return SourceOutline(
            name=str(source.name), reads=pipeline.table_of(source), format=str(source.format), columns=names
        )
    marked = source.watermark
    return SourceOutline(
        name=str(source.name),
        reads=", ".join(source.topics),
        format=str(source.format),
        columns=names,
        watermark=f"{marked.column} delayed by {marked.delay}" if marked is not None else None,
        extents=_extents(pipeline, source, place),
    )


def _extents(pipeline: Pipeline, source: TopicSource, place: Mapping[str, str]) -> tuple[Extent, ...]:
    """What there is to read by the options; nothing where a stream goes on elsewhere and the topics lack that start."""
    streams = pipeline.mode is Mode.STREAMING
    options = ReadOptions.parse(read_options(pipeline, source, place), streaming=streams)
    # A sink that begins only now is refused by its query, if the start is not there.
    begun = streams and any(may_have_begun(pipeline.checkpoint_of(sink)) for sink in pipeline.sinks)
    snapshot, ranges = load_or_look(options) if begun else load(options)
    extents = []
    for shard, start, stop in ranges or ():
        view = snapshot.shards[shard]
        weight = sum(
            piece.bytes * (min(stop, piece.stop) - max(start, piece.start)) // (piece.stop - piece.start)
            for piece in view.pieces
            if piece.start < stop and piece.stop > start
        )
        extents.append(Extent(topic=view.topic, partition=view.partition, start=start, stop=stop, bytes=weight))
    return tuple(extents)


def _sink(pipeline: Pipeline, sink: Sink) -> SinkOutline:
    streams = pipeline.mode is Mode.STREAMING
    checkpoint = pipeline.checkpoint_of(sink) if streams else None
    stands = standing(checkpoint) if checkpoint is not None else None
    if isinstance(sink, TableSink):
        writes = pipeline.table_of(sink)
        how = str(sink.format) if streams else f"{sink.format}, {sink.overwrite}"
    else:
        writes, how = str(sink.topic), f"{sink.format}, {sink.output}" if streams else str(sink.format)
    return SinkOutline(
        name=str(sink.name),
        view=str(sink.view),
        writes=writes,
        how=how,
        checkpoint=checkpoint,
        batch=stands.batch if stands is not None else None,
        committed=stands.committed if stands is not None else None,
        offsets=stands.offsets if stands is not None else {},
    )


def _trigger(pipeline: Pipeline) -> str | None:
    if pipeline.mode is Mode.BATCH:
        return None
    if pipeline.trigger.available_now:
        return "availableNow"
    return (
        f"processingTime {pipeline.trigger.interval}"
        if pipeline.trigger.interval is not None
        else "as soon as possible"
    )


def _source_lines(source: SourceOutline) -> list[str]:
    marked = f", watermark {source.watermark}" if source.watermark is not None else ""
    size = f": {source.records:,} offsets, {source.bytes:,} bytes" if source.extents else ""
    lines = [f"  source    {source.name}: {source.reads} as {source.format}{marked}{size}"]
    lines += [
        f"              {extent.topic}[{extent.partition}]: offsets {extent.start} to {extent.stop}, "
        f"{extent.bytes:,} bytes"
        for extent in source.extents
    ]
    if source.columns is not None:
        lines.append(f"              columns {', '.join(source.columns)}")
    return lines


def _sink_lines(sink: SinkOutline) -> list[str]:
    lines = [f"  sink      {sink.name}: {sink.view} to {sink.writes} ({sink.how})"]
    if sink.checkpoint is not None:
        lines.append(f"              checkpoint {sink.checkpoint}: {_standing(sink)}")
    return lines


def _standing(sink: SinkOutline) -> str:
    if sink.batch is None:
        return "new"
    reached = [f"{topic}[{number}] at {at}" for topic, points in sink.offsets.items() for number, at in points.items()]
    after = f"goes on behind batch {sink.batch}" if sink.committed else f"does batch {sink.batch} again"
    return f"{after}{f', {chr(44).join(reached)}' if reached else ''}"
