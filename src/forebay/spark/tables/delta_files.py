"""A Delta table as Spark reads it without a jar: the Parquet files of its current version, by its own schema.

What Spark would read otherwise than the table means it is refused by name: deleted rows inside of files, columns that
are called otherwise in the files, partitions that are not in the names of folders, files it cannot reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import msgspec

from forebay.errors import Unsupported
from forebay.spark.place.location import Location
from forebay.spark.tables.delta import DeltaLakeTable
from forebay.spark.tables.files import TableFiles, check_reachable

if TYPE_CHECKING:
    from deltalake import DeltaTable

_HARMLESS: Final = frozenset({"deletionVectors", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck", "variantType"})
"""Features that need nothing of a reader of Parquet files; deleted rows are looked for apart."""
_NULL_FOLDER: Final = "__HIVE_DEFAULT_PARTITION__"


def look_up_delta(location: Location, name: str) -> TableFiles | None:
    """The table as it is now, `None` if there is none; nothing is made.

    `Unsupported` says what Spark cannot read of it, `Unavailable` which file is away.
    """
    table = DeltaLakeTable(location, name)
    return files_of_delta(table) if table.look() else None


def files_of_delta(table: DeltaLakeTable) -> TableFiles:
    """The table as it was last looked at."""
    _check_features(table)
    files = table.files()
    partitions = list(table.table.metadata().partition_columns)
    for address, action in files.items():
        check_reachable(table.name, address)
        if partitions:
            _check_folders(table, address, action["partition"])
    base = table.address if partitions and files else None
    return TableFiles(_columns(table.table), tuple(sorted(files)), base)


def _columns(table: DeltaTable) -> tuple[tuple[str, str], ...]:
    """The columns with Spark's types: the log of a table has them as Spark itself writes a schema."""
    from pyspark.sql.types import StructType

    schema = StructType.fromJson(msgspec.json.decode(table.schema().to_json()))
    return tuple((field.name, field.dataType.simpleString()) for field in schema.fields)


def _check_features(table: DeltaLakeTable) -> None:
    protocol, configuration = table.table.protocol(), table.table.metadata().configuration
    for feature in protocol.reader_features or ():
        if feature not in _HARMLESS and not (feature == "columnMapping" and not _is_mapped(configuration)):
            raise Unsupported(
                f"the Delta table {table.name} has {feature}, which Spark does not read without further jars: "
                "rewrite the table without it"
            )
    if _is_mapped(configuration):
        raise Unsupported(f"the Delta table {table.name} calls columns otherwise in its files: rewrite the table first")
    if "deletionVectors" in (protocol.reader_features or ()) and any(
        batch.num_rows for batch in table.table.deletion_vectors()
    ):
        raise Unsupported(
            f"the Delta table {table.name} has rows that are deleted inside of files, which Spark would show: run "
            "REORG TABLE … APPLY (PURGE) first"
        )


def _is_mapped(configuration: Mapping[str, str]) -> bool:
    return configuration.get("delta.columnMapping.mode", "none") != "none"


def _check_folders(table: DeltaLakeTable, address: str, values: Mapping[str, Any]) -> None:
    """Spark takes the values of partitions from the names of folders: they must say what the log says."""
    below = address.removeprefix(f"{table.address}/").split("/")[:-1]
    # As Spark reads them: a letter beyond Latin-1 that is quoted becomes several.
    said = dict(unquote(folder, encoding="latin-1").split("=", 1) for folder in below if "=" in folder)
    known = {name: _NULL_FOLDER if value is None else _text(value) for name, value in values.items()}
    if said != known:
        raise Unsupported(
            f"{address} of the Delta table {table.name} does not lie in folders that name its partition {known}: "
            "rewrite the table first"
        )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
