"""An Iceberg table as Spark reads it without a jar: the Parquet files of its current snapshot, by its own schema.

What Spark would read otherwise than the table means it is refused by name: deletes, columns that were renamed, types
it has no word for, files it cannot reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forebay.errors import Unavailable, Unsupported
from forebay.spark.place.addresses import FILE, literal
from forebay.spark.values.schema import quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyiceberg.schema import Schema
    from pyiceberg.table import Table
    from pyiceberg.types import IcebergType
    from pyspark.sql import DataFrame, SparkSession


_PLAIN: Final = {
    "boolean": "boolean",
    "int": "int",
    "long": "bigint",
    "float": "float",
    "double": "double",
    "date": "date",
    "timestamp": "timestamp_ntz",
    "timestamptz": "timestamp",
    "string": "string",
    "binary": "binary",
}
"""The types of Iceberg that Spark reads from Parquet, by their names there."""


@dataclass(frozen=True)
class TableFiles:
    """The columns of a table with Spark's types, and the addresses of its files."""

    columns: tuple[tuple[str, str], ...]
    files: tuple[str, ...]
    base: str | None = None
    """Where the folders begin that are columns, such as `day=7`, if some are: the files do not have those."""

    @property
    def ddl(self) -> str:
        """The columns as Spark reads a schema."""
        return ", ".join(f"{quoted(name)} {kind}" for name, kind in self.columns)

    def frame(self, spark: SparkSession, files: tuple[str, ...] | None = None) -> DataFrame:
        """The rows of all files, or of these; a column that a file does not have yet is null."""
        chosen = self.files if files is None else files
        if not chosen:
            return spark.createDataFrame([], self.ddl)
        # Looked up recursively, folders named a=b do not become columns: the files have them.
        name, value = ("basePath", self.base) if self.base is not None else ("recursiveFileLookup", "true")
        return spark.read.schema(self.ddl).option(name, value).parquet(*map(literal, chosen))


def files_of(table: Table) -> TableFiles:
    """The table as it is now. `Unsupported` says what Spark cannot read of it, `Unavailable` which file is away."""
    name = ".".join(table.name())
    columns = tuple((field.name, _type(name, field.name, field.field_type)) for field in table.schema().fields)
    _check_columns(table, name)
    tasks = list(table.scan().plan_files())
    if any(task.delete_files for task in tasks):
        raise Unsupported(f"{name} has files of deletes, which Spark would not heed: rewrite the table first")
    for task in tasks:
        if str(task.file.file_format.value).upper() != "PARQUET":
            raise Unsupported(f"{task.file.file_path} of {name} is no Parquet file: rewrite the table")
        check_reachable(name, task.file.file_path)
    return TableFiles(columns, tuple(sorted(task.file.file_path for task in tasks)))


def _type(table: str, column: str, kind: IcebergType) -> str:
    """The type as Spark writes it."""
    from pyiceberg.types import DecimalType, FixedType, ListType, MapType, StructType

    if isinstance(kind, StructType):
        fields = (f"{quoted(one.name)}: {_type(table, f'{column}.{one.name}', one.field_type)}" for one in kind.fields)
        return f"struct<{', '.join(fields)}>"
    if isinstance(kind, ListType):
        return f"array<{_type(table, column, kind.element_type)}>"
    if isinstance(kind, MapType):
        return f"map<{_type(table, column, kind.key_type)}, {_type(table, column, kind.value_type)}>"
    if isinstance(kind, DecimalType):
        return f"decimal({kind.precision},{kind.scale})"
    if isinstance(kind, FixedType):
        return "binary"
    found = _PLAIN.get(str(kind))
    if found is None:
        raise Unsupported(f"column {column} of {table} is {kind}, which Spark does not read: leave it out of the table")
    return found


def _check_columns(table: Table, name: str) -> None:
    """Columns are found by their names: each must always have had its own."""
    names: dict[int, str] = {}
    ids: dict[str, int] = {}
    for number, column in (pair for schema in table.schemas().values() for pair in _names(schema)):
        if names.setdefault(number, column) != column or ids.setdefault(column, number) != number:
            raise Unsupported(
                f"column {column} of {name} was renamed, or its name was given again, and files written before have "
                "the old one: rewrite the table first"
            )
    for field in table.schema().fields:
        if getattr(field, "initial_default", None) is not None:
            raise Unsupported(f"column {field.name} of {name} has a default that older files lack: rewrite the table")
    if table.spec().fields and "schema.name-mapping.default" in table.properties:
        raise Unsupported(f"{name} is partitioned and names files of others, which may lack columns: rewrite the table")


def _names(schema: Schema) -> Iterator[tuple[int, str]]:
    for number in sorted(schema.field_ids):
        column = schema.find_column_name(number)
        if column is not None:
            yield number, column


def check_reachable(table: str, path: str) -> None:
    """`Unsupported` or `Unavailable` if Spark cannot read the file at an address without further jars."""
    local = path.removeprefix(FILE).removeprefix("file:")
    if not local.startswith("/"):
        raise Unsupported(
            f"{path} of {table} is where Spark does not reach without further jars: read the table with another engine"
        )
    if not Path(local).exists():
        raise Unavailable(f"{path} of {table} is not there, seen from this machine: mount it, or mend the table")
