"""Tables and files that a pipeline reads: whether they are there, and their columns, found without Spark."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from forebay.errors import Invalid, Unavailable, Unsupported
from forebay.spark.pipelines.file.document import Flaws, flawed, hint
from forebay.spark.pipelines.file.model import FileFormat, FileSource, Pipeline
from forebay.spark.place.location import Location
from forebay.spark.tables.catalog import look_up_table, table_names
from forebay.spark.tables.files import TableFiles, files_of
from forebay.spark.values.schema import TableColumn

_GLOB: Final = re.compile(r"[*?\[{]")
_MERGED: Final = "mergeschema"


def look_at_source(
    flaws: Flaws, pipeline: Pipeline, source: FileSource, location: Location
) -> tuple[TableColumn, ...] | None:
    """The columns of a source as far as they can be found here; what is wrong with it is a flaw with its line."""
    if source.format is FileFormat.ICEBERG:
        return _open_table(flaws, source, location)
    path = pipeline.path_of(source.path)
    if not path.startswith("/") or _GLOB.search(path):
        return None
    if not Path(path).exists():
        flaws.add(
            source.path.place, f"source {source.name}: there is no {path}; a path is relative to the pipeline's file"
        )
        return None
    if source.format is not FileFormat.PARQUET or _MERGED in (name.lower() for name in source.options):
        return None
    return _parquet(flaws, source, Path(path))


def table_files(location: Location, source: FileSource) -> TableFiles:
    """A table of the catalog as it is now; `Flawed` with the line if it went since it was checked."""
    table = look_up_table(location, str(source.path))
    if table is None:
        flawed(source.path.place, f"source {source.name}: the table {source.path} is gone")
    return files_of(table)


def _open_table(flaws: Flaws, source: FileSource, location: Location) -> tuple[TableColumn, ...] | None:
    try:
        table = look_up_table(location, str(source.path))
        if table is None:
            way_out = hint(source.path, table_names(location), "the tables are")
            flaws.add(source.path.place, f"there is no table {source.path} in the catalog of {location}: {way_out}")
            return None
        return tuple(TableColumn(name, kind) for name, kind in files_of(table).columns)
    except (Invalid, Unavailable, Unsupported) as error:
        flaws.add(source.path.place, f"source {source.name}: {error}")
        return None


def _parquet(flaws: Flaws, source: FileSource, path: Path) -> tuple[TableColumn, ...] | None:
    """The columns of the first file, and those in the names of the folders above it, as Spark finds them."""
    found = _first_file(path)
    if found is None:
        flaws.add(source.path.place, f"source {source.name}: {path} holds no Parquet file")
        return None
    try:
        schema = pq.read_schema(found)
    except (pa.ArrowException, OSError) as error:
        flaws.add(source.path.place, f"source {source.name}: {found} is no Parquet file: {error}")
        return None
    folders = [part.partition("=")[0] for part in found.relative_to(path).parts[:-1] if "=" in part]
    columns = [TableColumn(field.name, _type(field.type)) for field in schema if field.name not in folders]
    return (*columns, *(TableColumn(name, "") for name in folders))


def _first_file(path: Path) -> Path | None:
    """A file of a directory that Spark would read; the path itself if it is one."""
    if path.is_file():
        return path
    for entry in sorted(path.iterdir()):
        # Spark passes over hidden names, but for folders that are columns.
        if entry.name.startswith(".") or (entry.name.startswith("_") and "=" not in entry.name):
            continue
        found = _first_file(entry)
        if found is not None:
            return found
    return None


def _type(kind: pa.DataType) -> str:
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import from_arrow_type

    try:
        return str(from_arrow_type(kind).simpleString())
    except PySparkException:
        return str(kind)
