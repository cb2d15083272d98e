"""The word `schema`: columns as Spark writes them."""

from __future__ import annotations

from forebay.spark.pipelines.file.document import Fields, Word
from forebay.spark.pipelines.file.model import Schema
from forebay.spark.values.schema import Malformed, columns_of


def parse_ddl(fields: Fields, word: Word) -> Schema | None:
    """The columns; `None`, and a flaw with the very place, if the text is no schema."""
    try:
        return Schema(written=word, columns=columns_of(word))
    except Malformed as error:
        fields.flaws.add(word.place_of(error.line, error.column), f"schema of {fields.what}: {error}")
        return None
