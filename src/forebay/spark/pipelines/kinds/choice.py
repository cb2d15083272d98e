"""The words `where` and `columns` of a source: which rows and which columns of it the view has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from forebay.spark.pipelines.failures import errors_at, require_column
from forebay.spark.pipelines.file.document import Fields, Flaws, Word, hint
from forebay.spark.values.schema import TableColumn, quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

CHOICE_WORDS: Final = ("where", "columns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Rows that meet a condition, and some columns, in their order; all of them if nothing is said."""

    where: Word | None = None
    columns: tuple[Word, ...] = ()

    @classmethod
    def parse(cls, fields: Fields) -> Choice:
        """What the file says; a column twice is a flaw."""
        columns = fields.words("columns")
        seen: set[str] = set()
        for word in columns:
            if word.lower() in seen:
                fields.flaws.add(word.place, f"columns of {fields.what} names {word} twice")
            seen.add(word.lower())
        return cls(where=fields.word("where"), columns=columns)

    @property
    def shown(self) -> str | None:
        """The condition, for the plan."""
        return str(self.where) if self.where is not None else None

    def check(self, flaws: Flaws, source: Word, known: Sequence[TableColumn]) -> None:
        """Note columns that a source does not have."""
        names = [name for name, _ in known]
        for word in self.columns:
            if word.lower() not in (name.lower() for name in names):
                why = hint(word, names, "the columns are")
                flaws.add(word.place, f"source {source} has no column {word}: {why}")

    def found(
        self, flaws: Flaws, source: Word, known: tuple[TableColumn, ...] | None
    ) -> tuple[TableColumn, ...] | None:
        """The chosen ones of the columns that a look has found, if it has; a choice that is not there is a flaw."""
        if known is None:
            return None
        self.check(flaws, source, known)
        return self.of(known)

    def of(self, known: tuple[TableColumn, ...]) -> tuple[TableColumn, ...]:
        """Those of the columns that are chosen, named as they are."""
        by_name = {column.name.lower(): column for column in known}
        return tuple(by_name[word.lower()] for word in self.columns if word.lower() in by_name) or known

    def rows(self, frame: DataFrame, source: Word) -> DataFrame:
        """The chosen rows and columns of a frame, by filters and projections of Spark's own, which its scans take."""
        if self.where is not None:
            with errors_at(self.where, f"where of source {source}"):
                frame = frame.where(str(self.where))
                _ = frame.schema  # where analysis is lazy, it happens now
        for word in self.columns:
            require_column(frame, word, source)
        return frame.select(*map(quoted, self.columns)) if self.columns else frame
