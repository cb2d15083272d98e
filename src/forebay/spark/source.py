"""The Spark data source `forebay`: what Spark asks of a source, answered by the rooms beside this one.

Spark makes the source again from its options in processes of its own, and sends it between them: it holds
plain values only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceWriter
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from forebay.errors import Invalid
from forebay.spark.columns import SPARK_TYPES
from forebay.spark.options import ReadOptions, checked_columns, is_for_batch, is_for_stream, parse_columns
from forebay.spark.reader import Loaded, loaded_or_seen, reader_for
from forebay.spark.sink import ForebayStreamWriter, plan_stream_write
from forebay.spark.snapshot import Snapshot
from forebay.spark.streaming.reader import ForebayStreamReader
from forebay.spark.writing import plan_write

_TYPES: dict[str, DataType] = {
    "binary": BinaryType(),
    "string": StringType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "timestamp": TimestampType(),
    "array<struct<key:string,value:binary>>": ArrayType(
        StructType([StructField("key", StringType()), StructField("value", BinaryType())])
    ),
}


class ForebayDataSource(DataSource):
    """`spark.read.format("forebay").option("path", …).option("topic", …).load()`."""

    _loaded: Loaded | Snapshot | None = None

    @classmethod
    def name(cls) -> str:
        """The word for `format(…)`."""
        return "forebay"

    def schema(self) -> StructType:
        """The columns asked for. Called once, by `load()`: this is the moment that the DataFrame shows."""
        streaming = is_for_stream(self.options)
        options = ReadOptions.parse(self.options, streaming=streaming)
        if is_for_batch(self.options):
            self._loaded = Loaded.now(options)
        elif not streaming:
            self._loaded = loaded_or_seen(options)
        return spark_schema(options.columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch read of these columns."""
        options = ReadOptions.parse(self.options)
        columns = columns_of(schema, self.options)
        # With a schema of the user's own, Spark does not ask for ours, and the moment is now.
        loaded, self._loaded = self._loaded or Loaded.now(options), None
        if isinstance(loaded, Snapshot):
            loaded = Loaded.of(loaded, options)
        return reader_for(options, loaded, columns)

    def streamReader(self, schema: StructType) -> ForebayStreamReader:  # noqa: N802 - Spark's name
        """A stream of these columns."""
        return ForebayStreamReader(ReadOptions.parse(self.options, streaming=True), columns_of(schema, self.options))

    def writer(self, schema: StructType, overwrite: Any) -> DataSourceWriter:
        """A write of a DataFrame with these columns."""
        return plan_write(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: Any) -> ForebayStreamWriter:  # noqa: N802 - Spark's name
        """The sink of a streaming query with these columns."""
        return plan_stream_write(self.options, schema, overwrite=overwrite)


def spark_schema(columns: tuple[str, ...]) -> StructType:
    """The columns as Spark names them; all may be null, as in Spark's Kafka source."""
    return StructType([StructField(name, _TYPES[SPARK_TYPES[name]]) for name in columns])


def columns_of(schema: StructType, options: Mapping[str, str]) -> tuple[str, ...]:
    """The columns that a schema, ours or the user's, asks for."""
    columns = checked_columns(tuple(schema.names), "the schema")
    for asked, ours in zip(schema.fields, spark_schema(columns).fields, strict=True):
        if asked.dataType != ours.dataType or not asked.nullable:
            raise Invalid(
                f"the schema wants {asked.name} as {asked.dataType.simpleString()}"
                f"{'' if asked.nullable else ' not null'}: it is {SPARK_TYPES[asked.name]}; cast it after loading"
            )
    named = parse_columns(options["columns"]) if "columns" in options else columns
    if columns != named:
        raise Invalid(f"the schema has {', '.join(columns)} and the option columns {', '.join(named)}")
    return columns
