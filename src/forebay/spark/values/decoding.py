"""Values as typed columns: the one place where records become rows, for lake and for pipelines.

A row is bad if its value does not fit the schema. Lake puts it *apart*, in a side table with the reason (`Decoding`). A
pipeline decodes with `with_columns` and then says what becomes of bad rows: `failing`, `without_bad`, or it keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import Invalid
from forebay.spark.values.avro import AvroValues, columns_of_avro, read_avro_schema
from forebay.spark.values.schema import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType


SOURCE_COLUMNS: Final = ("topic", "partition", "offset", "timestamp", "key", "tag", "value")
CORRUPT: Final = "_corrupt"
"""The column that says what is wrong with a value, null where it fits."""
PREFIX: Final = "_"
"""What the columns of a record begin with, beside those of its value."""
_TEXT_SHOWN: Final = 200
_STAMP: Final = pa.timestamp("us", "UTC")
PLACE: Final = (
    pa.field("_partition", pa.int32()),
    pa.field("_offset", pa.int64()),
    pa.field("_timestamp", _STAMP),
    pa.field("_key", pa.binary()),
    pa.field("_tag", pa.string()),
)
"""Where a row comes from: in every table, before its own columns."""
BAD_SCHEMA: Final = pa.schema(
    [
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", _STAMP),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("error", pa.string()),
    ]
)
NO_VALUE: Final = "the record has no value"
NO_FIT: Final = "the value is not JSON of this schema"


class Parted(NamedTuple):
    """The rows of one batch: those of the table, and those of its side table."""

    good: pa.RecordBatch
    bad: pa.RecordBatch


class Decoding(Protocol):
    """One way to decode. Plain: it travels to the executors."""

    @property
    def schema(self) -> pa.Schema:
        """Of the table."""

    def select(self, frame: DataFrame) -> DataFrame:
        """What tasks get of the source's rows."""

    def part(self, batch: pa.RecordBatch) -> Parted:
        """What a task makes of it."""


def decoding(kind: str, schema: str | None) -> Decoding:
    """How values of this kind are decoded: `json` and `avro` by a schema, `raw` as the bytes they are.

    The schema of `json` is Spark's DDL, given as such or in a file; that of `avro` a file in JSON. `Invalid` names
    what is wrong with it.
    """
    if kind == "raw":
        if schema is not None:
            raise Invalid('values of format "raw" are left as they are and take no schema: leave it out')
        return RawDecoding()
    if schema is None:
        raise Invalid(f'values of format "{kind}" need a schema: name a file, or write "id BIGINT, total DOUBLE"')
    if kind == "avro":
        return AvroDecoding.read(schema)
    if kind == "json":
        return JsonDecoding.parse(schema)
    raise Invalid(f'format is "{kind}": values are decoded as json, avro or raw')


@dataclass(frozen=True)
class RawDecoding:
    """The value as it is; one that is null is a row like any other."""

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([*PLACE, pa.field("value", pa.binary())])

    def select(self, frame: DataFrame) -> DataFrame:
        return frame.select(*SOURCE_COLUMNS)

    def part(self, batch: pa.RecordBatch) -> Parted:
        nothing = pa.nulls(batch.num_rows, pa.string())
        return parted(batch, [batch.column("value")], nothing, self.schema)


@dataclass(frozen=True)
class JsonDecoding:
    """JSON objects by Spark's own parser. A field that is missing is null, one of another type makes a bad row."""

    ddl: str
    schema: pa.Schema
    required: tuple[str, ...]
    """Fields that the schema says are never null."""

    @classmethod
    def parse(cls, schema: str) -> JsonDecoding:
        fields = _fields(_ddl(schema))
        required = tuple(field.name for field in fields if not field.nullable)
        written = pa.schema([*PLACE, *(field.with_nullable(True) for field in fields)])
        return cls(_ddl(schema), written, required)

    def select(self, frame: DataFrame) -> DataFrame:
        from pyspark.sql import functions as f
        from pyspark.sql.types import StringType, StructType

        # The raw value travels on only where it is needed: with a bad row.
        wanted = StructType([*_struct(self.ddl).fields]).add(CORRUPT, StringType())
        parsed = frame.withColumn("_parsed", _parsed_json(wanted))
        text = f.col(f"_parsed.{CORRUPT}")
        is_bad = f.col("value").isNull() | text.isNotNull()
        for name in self.required:
            is_bad = is_bad | f.col(f"_parsed.{quoted(name)}").isNull()
        kept = f.when(is_bad, f.col("value")).alias("value")
        return parsed.select(*SOURCE_COLUMNS[:-1], kept, f.col("value").isNull().alias("_none"), "_parsed")

    def part(self, batch: pa.RecordBatch) -> Parted:
        parsed = batch.column("_parsed")
        columns = [parsed.field(place) for place in range(parsed.type.num_fields)]
        corrupt = columns.pop()
        errors = pc.if_else(pc.is_valid(corrupt), NO_FIT, pa.scalar(None, pa.string()))
        for name in self.required:
            place = parsed.type.get_field_index(name)
            missing = pc.and_(pc.is_null(columns[place]), pc.is_null(errors))
            errors = pc.if_else(missing, f"{name} is null or missing", errors)
        errors = pc.if_else(batch.column("_none"), NO_VALUE, errors)
        return parted(batch, columns, errors, self.schema)


@dataclass(frozen=True)
class AvroDecoding:
    """One Avro record for each value, without a header."""

    avro: Mapping[str, Any]
    schema: pa.Schema

    @classmethod
    def read(cls, path: str) -> AvroDecoding:
        avro = read_avro_schema(path)
        columns = columns_of_avro(avro)
        fields = _fields(", ".join(f"{quoted(name)} {kind}" for name, kind in columns))
        return cls(avro, pa.schema([*PLACE, *(field.with_nullable(True) for field in fields)]))

    def select(self, frame: DataFrame) -> DataFrame:
        return frame.select(*SOURCE_COLUMNS)

    def part(self, batch: pa.RecordBatch) -> Parted:
        fields = list(self.schema)[len(PLACE) :]
        values = AvroValues(self.avro, pa.struct(fields))
        records, errors = values.decode(batch.column("value"))
        errors = pc.if_else(pc.is_null(batch.column("value")), NO_VALUE, errors)
        return parted(batch, [records.field(place) for place in range(len(fields))], errors, self.schema)


def with_columns(frame: DataFrame, ddl: str, avro: Mapping[str, Any] | None = None) -> DataFrame:
    """Records with the columns of their values, as JSON or by an Avro schema, and `CORRUPT` behind them.

    The other columns of the records follow, with a prefix. A record without a value has nulls, and is no bad row.
    """
    from pyspark.sql import functions as f

    beside = [f.col(name).alias(PREFIX + name) for name in frame.columns if name != "value"]
    if avro is None:
        parsed = frame.select(_parsed_json(f"{ddl}, {CORRUPT} STRING").alias("value"), *beside)
    else:
        parsed = _from_avro(frame.select("value", *beside), ddl, avro)
    return parsed.select("value.*", *(name for name in parsed.columns if name != "value"))


def without_bad(rows: DataFrame) -> DataFrame:
    """The rows whose value fits."""
    from pyspark.sql import functions as f

    return rows.filter(f.col(CORRUPT).isNull()).drop(CORRUPT)


def failing(rows: DataFrame, what: str) -> DataFrame:
    """All rows; a query fails at the first whose value does not fit, and names its place and `what` it is of."""
    from pyspark.sql import functions as f

    fits = f.col(CORRUPT).isNull()
    shown = f.format_string(
        f"{what}: a value does not fit its schema, at %s[%d] offset %d: %s",
        *(f.col(PREFIX + name) for name in ("topic", "partition", "offset")),
        f.substring(CORRUPT, 1, _TEXT_SHOWN),
    )
    return rows.filter(f.when(fits, f.lit(True)).otherwise(f.raise_error(shown).cast("boolean"))).drop(CORRUPT)


def _parsed_json(schema: StructType | str) -> Column:
    """The column `value` as JSON of a schema whose last field is `CORRUPT`."""
    from pyspark.sql import functions as f

    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT}
    return f.from_json(f.col("value").cast("string"), schema, options)


def _from_avro(frame: DataFrame, ddl: str, avro: Mapping[str, Any]) -> DataFrame:
    """The rows with their column `value` as a struct, with `CORRUPT` as its last field."""
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StringType, StructType

    schema = _struct(ddl)
    nested = StructType([*schema.fields]).add(CORRUPT, StringType())
    result = StructType().add("value", nested)
    for field in frame.schema.fields:
        if field.name != "value":
            result.add(field.name, field.dataType)
    return frame.mapInArrow(_reading(avro, pa.struct(list(to_arrow_schema(schema, timezone="UTC")))), result)


def _reading(
    avro: Mapping[str, Any], struct: pa.StructType
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What a task does to decode: a function of plain values, sent to it."""

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        values = AvroValues(avro, struct)
        kind = pa.struct([*struct, pa.field(CORRUPT, pa.string())])
        for batch in batches:
            records, faults = values.decode(batch.column("value"))
            columns = [records.field(place) for place in range(struct.num_fields)]
            nested = pa.StructArray.from_arrays([*columns, faults], fields=list(kind))
            others = [name for name in batch.schema.names if name != "value"]
            yield pa.RecordBatch.from_arrays(
                [nested, *(batch.column(name) for name in others)], names=["value", *others]
            )

    return read


def parted(batch: pa.RecordBatch, columns: Sequence[pa.Array], errors: pa.Array, schema: pa.Schema) -> Parted:
    """Rows with these columns where there is no error, bad rows with the value where there is one."""
    place = [batch.column(field.name.removeprefix("_")) for field in PLACE]
    arrays = [_cast(array, field.type) for array, field in zip([*place, *columns], schema, strict=True)]
    rows = pa.RecordBatch.from_arrays(arrays, schema=schema)
    is_good = pc.is_null(errors)
    if errors.null_count == len(errors):
        return Parted(rows, pa.RecordBatch.from_pylist([], schema=BAD_SCHEMA))
    found = {**{name: batch.column(name) for name in SOURCE_COLUMNS}, "error": errors}
    bad = pa.RecordBatch.from_arrays([_cast(found[field.name], field.type) for field in BAD_SCHEMA], schema=BAD_SCHEMA)
    return Parted(rows.filter(is_good), bad.filter(pc.invert(is_good)))


def _cast(array: pa.Array, kind: pa.DataType) -> pa.Array:
    return array if array.type == kind else array.cast(kind)


def _ddl(schema: str) -> str:
    """The schema, from a file if it is the name of one."""
    if " " in schema.strip() or not Path(schema).suffix:
        return schema
    try:
        return Path(schema).read_text()
    except OSError as error:
        raise Invalid(f"cannot read the schema {schema}: {error.strerror or error}") from error


def _struct(ddl: str) -> StructType:
    from pyspark.errors import PySparkException
    from pyspark.sql.types import StructType

    try:
        found = StructType.fromDDL(ddl)
    except PySparkException as error:
        said = str(error).strip().partition("\n")[0]
        raise Invalid(f"{ddl[:200]!r} is no schema of columns ({said}): write id BIGINT, total DOUBLE") from error
    if not isinstance(found, StructType):
        raise Invalid(f"{ddl[:200]!r} is a type and no schema of columns: write id BIGINT, total DOUBLE")
    return found


def _fields(ddl: str) -> list[pa.Field]:
    """The columns of a schema, as the files will have them."""
    from pyspark.sql.pandas.types import to_arrow_schema

    fields = list(to_arrow_schema(_struct(ddl), timezone="UTC"))
    names = [field.name.lower() for field in fields]
    taken = {field.name for field in PLACE} | {CORRUPT}
    for name in names:
        if name in taken or names.count(name) > 1:
            raise Invalid(f"the schema has a column {name} that the table has already: give it another name")
    return fields
