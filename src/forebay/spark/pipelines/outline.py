"""What a pipeline would do if it ran now, shown without Spark: offsets and bytes to read, steps, sinks, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from forebay.errors import ForebayError
from forebay.spark.pipelines.context import Context, look_around, place_of
from forebay.spark.pipelines.file.checking import note_flaws, unused
from forebay.spark.pipelines.file.document import Flawed, Flaws
from forebay.spark.pipelines.file.model import Mode, Pipeline
from forebay.spark.pipelines.file.queries import understood
from forebay.spark.pipelines.progress import standing
from forebay.spark.values.schema import TableColumn

if TYPE_CHECKING:
    from forebay.spark.pipelines.kinds.protocol import PipelineSink, PipelineSource


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
    where: str | None = None
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
    flaws = Flaws()
    note_flaws(flaws, pipeline)
    try:
        place = place_of(pipeline, given)
        context = Context(pipeline=pipeline, place=place)
        _ = context.topics
    except Flawed as error:
        raise Flawed(*error.flaws, *flaws.lines()) from error
    except ForebayError:
        # Where the topics are cannot be opened: what is wrong with the file is known all the same.
        flaws.raise_if_any()
        raise
    found = look_around(context, flaws)
    return Outline(
        pipeline=str(pipeline.name),
        file=pipeline.file,
        mode=str(pipeline.mode),
        location=place,
        sources=tuple(_source(context, source, found.get(source.name.lower())) for source in pipeline.sources),
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


def _source(context: Context, source: PipelineSource, found: tuple[TableColumn, ...] | None) -> SourceOutline:
    columns = source.columns or found
    names = tuple(f"{name} {kind}".rstrip() for name, kind in columns) if columns is not None else None
    return msgspec.structs.replace(source.outline(context), columns=names)


def _sink(pipeline: Pipeline, sink: PipelineSink) -> SinkOutline:
    checkpoint = pipeline.checkpoint_of(sink) if pipeline.mode is Mode.STREAMING else None
    stands = standing(checkpoint) if checkpoint is not None else None
    return SinkOutline(
        name=str(sink.name),
        view=str(sink.view),
        writes=sink.writes(pipeline),
        how=sink.how(pipeline),
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
    if source.where is not None:
        lines.append(f"              where {source.where}")
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
