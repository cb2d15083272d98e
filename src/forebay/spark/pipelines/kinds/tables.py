"""What kinds of tables have in common: the name of one in a catalog, and the word `write`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from forebay.spark.pipelines.file.document import Fields, Flaws, Word
from forebay.spark.pipelines.file.model import Mode, Overwrite, Pipeline

if TYPE_CHECKING:
    pass

START_SECONDS: Final = 120
"""How long a first batch waits for the id of the query that it belongs to."""
_NAME: Final = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)+")


def parse_overwrite(fields: Fields) -> Overwrite:
    """What a batch does where its table is already."""
    return fields.choice("write", {str(one): one for one in Overwrite}, Overwrite.CREATE)


def check_table_name(fields: Fields, name: Word) -> None:
    """Note a name that no table of a catalog has."""
    if not _NAME.fullmatch(name):
        fields.flaws.add(name.place, f"{name} is not the name of a table: write NAMESPACE.NAME")


def check_overwrite(flaws: Flaws, pipeline: Pipeline, name: Word, overwrite: Overwrite) -> None:
    """Note the word `write` in a stream."""
    if pipeline.mode is Mode.STREAMING and overwrite is not Overwrite.CREATE:
        flaws.add(name.place, f"write of sink {name} belongs to a batch: a stream adds to its table")


def how_written(pipeline: Pipeline, format_word: str, overwrite: Overwrite) -> str:
    """For the plan."""
    return format_word if pipeline.mode is Mode.STREAMING else f"{format_word}, {overwrite}"
