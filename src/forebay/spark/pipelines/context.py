"""What a pipeline is given to work with: where its topics and tables are; and whether all it needs is there.

Looks and changes nothing.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from forebay.errors import Invalid
from forebay.spark.pipelines.file.checking import check_columns, check_targets
from forebay.spark.pipelines.file.document import Flaws, flawed, option_place
from forebay.spark.pipelines.file.model import Mode, Pipeline
from forebay.spark.place.location import Location
from forebay.spark.place.reading import opened_to_read
from forebay.spark.values.schema import TableColumn
from forebay.topics import TopicName, TopicSpec

_PATHS: Final = ("path", "settings", "tokenFile", "verify")


@dataclass(frozen=True, kw_only=True)
class Context:
    """A pipeline at its place. Made for one look or one run: what it has found, it does not look for again."""

    pipeline: Pipeline
    place: Mapping[str, str]
    """The options that say where topics are."""

    @property
    def streams(self) -> bool:
        """Whether the pipeline is a stream."""
        return self.pipeline.mode is Mode.STREAMING

    @cached_property
    def location(self) -> Location:
        """Where topics and tables are."""
        return Location.parse(self.place)

    @cached_property
    def topics(self) -> Mapping[TopicName, TopicSpec]:
        """The topics that there are."""
        with opened_to_read(self.location) as found:
            return {spec.name: spec for spec in found.specs()}


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
        flawed(option_place(pipeline.location, str(error)) or pipeline.name.place, f"location: {error}")
    return place


def look_around(context: Context, flaws: Flaws) -> dict[str, tuple[TableColumn, ...]]:
    """Raise `Flawed` with a line for every topic, option, file and table that is not as it must be.

    And with those that `flaws` has already: all are shown at once. The columns that were found in tables, by the names
    of sources.
    """
    pipeline = context.pipeline
    found: dict[str, tuple[TableColumn, ...]] = {}
    _ = context.topics  # a location that does not open is the first thing to know
    for source in pipeline.sources:
        columns = source.look(flaws, context)
        if columns is not None:
            found[source.name.lower()] = columns
    for sink in pipeline.sinks:
        check_columns(flaws, sink, found.get(sink.view.lower()))
        sink.look(flaws, context)
    for name in pipeline.spark:
        if not name.startswith("spark."):
            flaws.add(name.place, f"{name} is not a setting of Spark: they begin with `spark.`")
    flaws.raise_if_any()
    check_targets(flaws, pipeline, context.location)
    flaws.raise_if_any()
    return found
