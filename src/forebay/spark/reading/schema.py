"""The columns of a topic as Spark names and types them."""

from __future__ import annotations

from collections.abc import Mapping

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
from forebay.spark.reading.columns import SPARK_TYPES
from forebay.spark.reading.options import checked_columns, parse_columns

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
