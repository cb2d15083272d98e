"""Whether the parts of a pipeline fit together: names, views, columns, what goes with its mode. Opens nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from forebay.spark.pipelines.file.document import Flaws, Word, hint
from forebay.spark.pipelines.file.model import Mode, Pipeline, ViewStep
from forebay.spark.pipelines.file.queries import Reference, understood
from forebay.spark.values.schema import TableColumn

if TYPE_CHECKING:
    from forebay.spark.pipelines.kinds.protocol import PipelineSink, PipelineSource
    from forebay.spark.place.location import Location


def check_pipeline(pipeline: Pipeline) -> None:
    """Raise `Flawed` with a line for everything that does not fit, as far as the file alone shows."""
    flaws = Flaws()
    note_flaws(flaws, pipeline)
    flaws.raise_if_any()


def note_flaws(flaws: Flaws, pipeline: Pipeline) -> None:
    """Note everything that does not fit, as far as the file alone shows."""
    _check_names(flaws, [view.name for view in _views(pipeline)], "a source or a step")
    _check_names(flaws, [sink.name for sink in pipeline.sinks], "a sink")
    _check_views(flaws, pipeline)
    for source in pipeline.sources:
        source.check(flaws, pipeline)
    for sink in pipeline.sinks:
        sink.check(flaws, pipeline)
        check_columns(flaws, sink, _columns(sink, pipeline))
    check_targets(flaws, pipeline, None)
    # Which topic feeds a sink follows from the rest.
    if not flaws.found and pipeline.mode is Mode.STREAMING:
        _check_streams(flaws, pipeline)


def unused(pipeline: Pipeline) -> tuple[str, ...]:
    """Sources and steps that reach no sink."""
    read = _reads(pipeline)
    reached = {name for sink in pipeline.sinks for name in (sink.view.lower(), *_reachable(sink.view.lower(), read))}
    return tuple(str(view.name) for view in _views(pipeline) if view.name.lower() not in reached)


def _views(pipeline: Pipeline) -> list[PipelineSource | ViewStep]:
    return [*pipeline.sources, *pipeline.steps]


def _check_names(flaws: Flaws, names: Sequence[Word], what: str) -> None:
    seen: dict[str, Word] = {}
    for name in names:
        first = seen.setdefault(name.lower(), name)
        if first is not name:
            flaws.add(name.place, f"{name} is already the name of {what} in line {first.place.line}")


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


def check_columns(flaws: Flaws, sink: PipelineSink, columns: Sequence[TableColumn] | None) -> None:
    """Report columns that a sink names, and the source that it takes as it is does not have, if those are known."""
    if columns is None:
        return
    for word in sink.named:
        if word.isidentifier() and word.lower() not in (name.lower() for name, _ in columns):
            why = hint(word, [name for name, _ in columns], "the columns are")
            flaws.add(word.place, f"{sink.view} has no column {word}: {why}")


def _columns(sink: PipelineSink, pipeline: Pipeline) -> tuple[TableColumn, ...] | None:
    """The columns that a sink writes, if it takes a source as it is; else only Spark knows."""
    for source in pipeline.sources:
        if source.name.lower() == sink.view.lower():
            return source.columns
    return None


def check_targets(flaws: Flaws, pipeline: Pipeline, location: Location | None) -> None:
    """Note a table that two sinks write, or that a source reads and a sink writes, however each names it.

    Some names, such as those of tables in a warehouse, are known by a location alone.
    """
    taken: dict[str, PipelineSink] = {}
    for sink in (sink for sink in pipeline.sinks if sink.exclusive):
        first = taken.setdefault(sink.identity(pipeline, location), sink)
        if first is not sink:
            flaws.add(sink.target.place, f"sink {first.name} writes the same table: give each its own")
    for written, sink in taken.items():
        for source in pipeline.sources:
            if written in source.identities(pipeline, location):
                flaws.add(sink.target.place, f"source {source.name} reads the table that sink {sink.name} writes")


def _check_streams(flaws: Flaws, pipeline: Pipeline) -> None:
    streamed = {source.name.lower(): source for source in pipeline.sources if source.streams}
    unread = {step.name.lower() for step in pipeline.steps if understood(step.sql).unread is not None}
    read = _reads(pipeline)
    for sink in pipeline.sinks:
        reached = (sink.view.lower(), *_reachable(sink.view.lower(), read))
        feeding = [streamed[name] for name in reached if name in streamed]
        if not feeding and unread.isdisjoint(reached):
            flaws.add(sink.view.place, f"no topic feeds sink {sink.name}: write `mode: batch`, or read a topic")
        for source in feeding:
            if sink.identity(pipeline, None) in source.identities(pipeline, None):
                flaws.add(
                    sink.target.place,
                    f"sink {sink.name} writes {sink.target}, which its source {source.name} reads: endless",
                )
