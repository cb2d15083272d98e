"""What a pipeline finds around it before Spark starts: its location, topics, options, files and tables.

Looks and changes nothing.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from forebay.errors import Invalid
from forebay.spark.pipelines.file.checking import check_columns
from forebay.spark.pipelines.file.document import Flaws, Place, Word, flawed, hint
from forebay.spark.pipelines.file.model import (
    Mode,
    Overwrite,
    Pipeline,
    TableFormat,
    TableSink,
    TopicSink,
    TopicSource,
)
from forebay.spark.pipelines.source_tables import look_at_source
from forebay.spark.place.location import NAMES as PLACE_NAMES
from forebay.spark.place.location import Location
from forebay.spark.place.reading import opened_to_read
from forebay.spark.reading.options import NAMES, ReadOptions
from forebay.spark.tables.catalog import look_up_table
from forebay.spark.values.schema import TableColumn
from forebay.spark.writing.options import NAMES as WRITE_NAMES
from forebay.spark.writing.options import WriteOptions
from forebay.topics import Engine, TopicName, TopicSpec

SINK_LOG: Final = "_spark_metadata"
"""Where Spark notes the files that a stream has brought into a table."""
_PATHS: Final = ("path", "settings", "tokenFile", "verify")
_OWN_OPTIONS: Final = {
    "topic": "topic",
    "topics": "topics",
    "startingoffsets": "startingOffsets",
    "endingoffsets": "endingOffsets",
}
"""Options of a read that have words of their own in a source."""
_NAMED_OPTION: Final = re.compile(r'option "([^"]+)"')


def place_of(pipeline: Pipeline, given: Mapping[str, str] | None) -> dict[str, str]:
    """The options that say where topics are: those given here, else those of the file.

    Raises `Flawed` with the line of the location if they lead nowhere.
    """
    if given is not None:
        Location.parse(given)
        # Spark's processes may be elsewhere.
        return {name: posixpath.abspath(text) if name in _PATHS else text for name, text in given.items()}
    place = {str(name): str(text) for name, text in pipeline.location.items()}
    for name in _PATHS:
        if name in place:
            place[name] = pipeline.path_of(place[name])
    try:
        Location.parse(place)
    except Invalid as error:
        flawed(_option_place(pipeline.location, str(error)) or pipeline.name.place, f"location: {error}")
    return place


def read_options(pipeline: Pipeline, source: TopicSource, place: Mapping[str, str]) -> dict[str, str]:
    """The options of the read behind a source. Unless it says otherwise, it begins with what there is."""
    options = {**place, "topic" if len(source.topics) == 1 else "topics": ",".join(source.topics)}
    options |= {str(name): str(text) for name, text in source.options.items()}
    if source.starting is not None:
        options["startingOffsets"] = str(source.starting)
    elif pipeline.mode is Mode.STREAMING and not any(name.lower().startswith("starting") for name in options):
        options["startingOffsets"] = "earliest"
    if source.ending is not None:
        options["endingOffsets"] = str(source.ending)
    return options


def check_surroundings(pipeline: Pipeline, place: Mapping[str, str]) -> dict[str, tuple[TableColumn, ...]]:
    """Raise `Flawed` with a line for every topic, option, file and table that is not as it must be.

    The columns that were found in tables, by the names of sources.
    """
    flaws = Flaws()
    found: dict[str, tuple[TableColumn, ...]] = {}
    _check_topics(flaws, pipeline, Location.parse(place))
    for source in pipeline.sources:
        if isinstance(source, TopicSource):
            _check_options(flaws, pipeline, source, place)
            continue
        columns = look_at_source(flaws, pipeline, source, Location.parse(place))
        if columns is not None:
            found[source.name.lower()] = columns
    for sink in pipeline.sinks:
        check_columns(flaws, sink, found.get(sink.view.lower()))
        if isinstance(sink, TableSink) and sink.format is TableFormat.ICEBERG:
            _check_open_table(flaws, pipeline, sink, Location.parse(place))
        elif isinstance(sink, TableSink):
            _check_table(flaws, pipeline, sink)
        else:
            _check_write_options(flaws, sink, place)
    for name in pipeline.spark:
        if not name.startswith("spark."):
            flaws.add(name.place, f"{name} is not a setting of Spark: they begin with `spark.`")
    flaws.raise_if_any()
    return found


def _check_topics(flaws: Flaws, pipeline: Pipeline, location: Location) -> None:
    with opened_to_read(location) as found:
        known = {spec.name: spec for spec in found.specs()}
    words = [topic for source in pipeline.topic_sources for topic in source.topics]
    words += [sink.topic for sink in pipeline.topic_sinks]
    for word in words:
        spec = known.get(TopicName.parse(word))
        if spec is None:
            way_out = hint(word, [str(name) for name in known], "the topics are")
            flaws.add(word.place, f'there is no topic {word} in {location}: {way_out} (see "forebay topic create")')
        elif spec.engine is not Engine.SEGMENT:
            flaws.add(word.place, _private(spec))


def _private(spec: TopicSpec) -> str:
    return (
        f'{spec.name} lives on engine "{spec.engine}", which only its owner can open: Spark takes topics on engine '
        '"segment"; copy it with "forebay topic copy"'
    )


def _check_options(flaws: Flaws, pipeline: Pipeline, source: TopicSource, place: Mapping[str, str]) -> None:
    # The option columns is not for here: a view has the columns that it promises.
    known = [name for name in NAMES if name.lower() not in _OWN_OPTIONS and name not in (*PLACE_NAMES, "columns")]
    for name in source.options:
        if name.lower() in _OWN_OPTIONS:
            own = _OWN_OPTIONS[name.lower()]
            flaws.add(name.place, f"{name} has a word of its own: write `{own}:` in source {source.name}")
            return
        if name.lower() not in (one.lower() for one in known):
            flaws.add(name.place, f"{name!s} is not an option of a topic: {hint(name, known, 'the options are')}")
            return
    try:
        ReadOptions.parse(read_options(pipeline, source, place), streaming=pipeline.mode is Mode.STREAMING)
    except Invalid as error:
        words = {"startingOffsets": source.starting, "endingOffsets": source.ending}
        named = _NAMED_OPTION.search(str(error))
        word = words.get(named[1]) if named is not None else None
        at = word.place if word is not None else _option_place(source.options, str(error)) or source.name.place
        flaws.add(at, f"source {source.name}: {error}")


def _check_write_options(flaws: Flaws, sink: TopicSink, place: Mapping[str, str]) -> None:
    known = [name for name in WRITE_NAMES if name not in (*PLACE_NAMES, "topic", "queryId", "batchId")]
    for name in sink.options:
        if name not in known:
            flaws.add(
                name.place, f"{name!s} is not an option of a topic's sink: {hint(name, known, 'the options are')}"
            )
            return
    try:
        WriteOptions.parse(write_options(sink, place))
    except Invalid as error:
        flaws.add(_option_place(sink.options, str(error)) or sink.name.place, f"sink {sink.name}: {error}")


def write_options(sink: TopicSink, place: Mapping[str, str]) -> dict[str, str]:
    """The options of the write behind a sink."""
    return {**place, "topic": str(sink.topic), **{str(name): str(text) for name, text in sink.options.items()}}


def _option_place(options: Mapping[Word, Word], message: str) -> Place | None:
    """Where the option stands that a message names."""
    named = _NAMED_OPTION.search(message)
    lowered = {name.lower(): name.place for name in options}
    if named is not None and named[1].lower() in lowered:
        return lowered[named[1].lower()]
    return next(iter(lowered.values()), None)


def _check_table(flaws: Flaws, pipeline: Pipeline, sink: TableSink) -> None:
    path = Path(pipeline.path_of(sink.path))
    if not path.is_absolute():
        if pipeline.mode is Mode.BATCH:
            flaws.add(
                sink.path.place,
                f"{sink.path}: a batch writes its table into a directory, which it can replace at once; for a URL "
                "write `mode: streaming` with `trigger: availableNow`",
            )
        return
    if not path.exists():
        return
    if pipeline.mode is Mode.STREAMING:
        begun = Path(pipeline.checkpoint_of(sink), "metadata").exists()
        if (path / SINK_LOG).exists() and not begun:
            # Spark would take the batches of the new checkpoint for ones that are there already, and drop them.
            flaws.add(
                sink.path.place,
                f"{path} was filled from another checkpoint than {pipeline.checkpoint_of(sink)}, and would take "
                "nothing from this one: go on with that checkpoint, or name a new table",
            )
        elif not (path / SINK_LOG).exists() and any(path.iterdir()):
            flaws.add(sink.path.place, f"{path} is there and was not filled by a stream: name a new table")
    elif sink.overwrite is Overwrite.CREATE:
        flaws.add(sink.path.place, f"{path} is there already: write `write: overwrite`, or name a new table")
    elif not is_table(path):
        flaws.add(sink.path.place, f"{path} holds more than a table of Parquet files: it is not overwritten")


def _check_open_table(flaws: Flaws, pipeline: Pipeline, sink: TableSink, location: Location) -> None:
    if pipeline.mode is Mode.BATCH and sink.overwrite is Overwrite.CREATE and look_up_table(location, sink.path):
        flaws.add(sink.path.place, f"{sink.path} is there already: write `write: append` or `write: overwrite`")


def is_table(path: Path) -> bool:
    """Whether a directory holds Parquet files, or partitions with such, and nothing else."""
    if not path.is_dir() or (path / SINK_LOG).exists():
        return False
    return all(
        is_table(entry) if entry.is_dir() else entry.suffix in (".parquet", ".crc") or entry.name == "_SUCCESS"
        for entry in path.iterdir()
    )
