"""The open formats by their names: a new one is a module and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from forebay.errors import Invalid
from forebay.spark.place.location import Location
from forebay.spark.tables.commit import FormatTable
from forebay.spark.tables.delta import DeltaLakeTable
from forebay.spark.tables.iceberg import IcebergTable

ICEBERG: Final = "iceberg"
DELTA: Final = "delta"
FORMATS: Final[Mapping[str, Callable[[Location, str | tuple[str, str]], FormatTable]]] = {
    ICEBERG: IcebergTable,
    DELTA: DeltaLakeTable,
}


def open_format(kind: str, location: Location, name: str | tuple[str, str]) -> FormatTable:
    """The table of a name, neither looked at nor made yet. `Invalid` if there is no such format, or no such name."""
    if kind not in FORMATS:
        raise Invalid(f'table format "{kind}" is not known: take one of {", ".join(FORMATS)}')
    return FORMATS[kind](location, name)
