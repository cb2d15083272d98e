"""The Spark data source `forebay`: what Spark asks of a source, answered by the rooms beside this one.

Spark makes the source anew from its options in processes of its own, and sends it between them: it holds
plain values only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
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

from forebay.errors import Invalid, Unsupported
from forebay.spark.columns import SPARK_TYPES
from forebay.spark.options import ReadOptions, checked_columns
from forebay.spark.scan import read_split
from forebay.spark.snapshot import Snapshot, look, plan

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

    _snapshot: Snapshot | None = None

    @classmethod
    def name(cls) -> str:
        """The word for `format(…)`."""
        return "forebay"

    def schema(self) -> StructType:
        """The columns asked for. Called once, by `load()`: this is the moment that the DataFrame shows."""
        options = ReadOptions.parse(self.options)
        self._snapshot = look(options)
        return spark_schema(options.columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch read of these columns."""
        options = ReadOptions.parse(self.options)
        columns = _columns_of(schema)
        if "columns" in self.options and columns != options.columns:
            raise Invalid(f"the schema has {', '.join(columns)} and the option columns {', '.join(options.columns)}")
        # With a schema of the user's own, Spark does not ask for ours, and the moment is now.
        return ForebayReader(options, self._snapshot or look(options), columns)

    def streamReader(self, schema: StructType) -> NoReturn:  # noqa: N802 - Spark's name
        """Not offered yet."""
        raise Unsupported("readStream is not offered yet by the forebay source: use spark.read")

    def writer(self, schema: StructType, overwrite: Any) -> NoReturn:
        """Not offered yet."""
        raise Unsupported("writing is not offered yet by the forebay source: append with forebay.open(…) in Python")

    def streamWriter(self, schema: StructType, overwrite: Any) -> NoReturn:  # noqa: N802 - Spark's name
        """Not offered yet."""
        raise Unsupported("writeStream is not offered yet by the forebay source: append with forebay.open(…) in Python")


class ForebayReader(DataSourceReader):
    """One planned read. Pickled to the executors."""

    def __init__(self, options: ReadOptions, snapshot: Snapshot, columns: tuple[str, ...]) -> None:
        self._options = options
        self._snapshot = snapshot
        self._columns = columns

    def partitions(self) -> list[InputPartition]:
        """One for each task."""
        return [InputPartition(split) for split in plan(self._snapshot, self._options, self._columns)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of a task; where there is nothing to read, Spark makes one task without a split."""
        return iter(()) if partition.value is None else read_split(partition.value)


def spark_schema(columns: tuple[str, ...]) -> StructType:
    """The columns as Spark names them; all may be null, as in Spark's Kafka source."""
    return StructType([StructField(name, _TYPES[SPARK_TYPES[name]]) for name in columns])


def _columns_of(schema: StructType) -> tuple[str, ...]:
    """The columns that a schema, ours or the user's, asks for."""
    columns = checked_columns(tuple(schema.names), "the schema")
    for asked, ours in zip(schema.fields, spark_schema(columns).fields, strict=True):
        if asked.dataType != ours.dataType or not asked.nullable:
            raise Invalid(
                f"the schema wants {asked.name} as {asked.dataType.simpleString()}"
                f"{'' if asked.nullable else ' not null'}: it is {SPARK_TYPES[asked.name]}; cast it after loading"
            )
    return columns
