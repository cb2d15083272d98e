"""Records as rows of columns, and rows as records: what the formats of a pipeline mean in Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from forebay.spark.pipelines.file.model import CORRUPT, RECORD_PREFIX, BadRecords, Format, Schema
from forebay.spark.values.avro import AvroValues
from forebay.spark.values.schema import TableColumn

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from forebay.spark.pipelines.kinds.topic import TopicSource

_TEXT_SHOWN: Final = 200


def decoded(frame: DataFrame, source: TopicSource) -> DataFrame:
    """The records of a source with the columns it promises."""
    from pyspark.sql import functions as f

    if source.format is Format.RAW:
        return frame
    if source.format is Format.TEXT:
        return frame.withColumn("value", f.col("value").cast("string"))
    assert source.schema is not None
    beside = [f.col(name).alias(RECORD_PREFIX + name) for name in frame.columns if name != "value"]
    if source.format is Format.JSON:
        options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT}
        whole = f"{source.schema.ddl}, {CORRUPT} STRING"
        parsed = frame.select(f.from_json(f.col("value").cast("string"), whole, options).alias("value"), *beside)
    else:
        parsed = _from_avro(frame.select("value", *beside), source.schema)
    rows = parsed.select("value.*", *(name for name in parsed.columns if name != "value"))
    return _judged(rows, source)


def _judged(rows: DataFrame, source: TopicSource) -> DataFrame:
    """Rows whose value did not fit are treated as the source says."""
    from pyspark.sql import functions as f

    fits = f.col(CORRUPT).isNull()
    if source.bad_records is BadRecords.KEEP:
        return rows.select(*(name for name, _ in source.columns))
    if source.bad_records is BadRecords.DROP:
        return rows.filter(fits).drop(CORRUPT)
    shown = f.format_string(
        f"source {source.name}: a value does not fit its schema, at %s[%d] offset %d: %s",
        *(f.col(RECORD_PREFIX + name) for name in ("topic", "partition", "offset")),
        f.substring(CORRUPT, 1, _TEXT_SHOWN),
    )
    return rows.filter(f.when(fits, f.lit(True)).otherwise(f.raise_error(shown).cast("boolean"))).drop(CORRUPT)


def _from_avro(frame: DataFrame, schema: Schema) -> DataFrame:
    assert schema.avro is not None
    columns = [TableColumn(name, kind.dataType.simpleString()) for name, kind in _fields(frame) if name != "value"]
    beside = ", ".join(f"`{name}` {kind}" for name, kind in columns)
    nested = ", ".join(f"`{name}`: {kind}" for name, kind in (*schema.columns, TableColumn(CORRUPT, "string")))
    reading = _reading(schema.avro, _arrow_struct(schema.ddl))
    return frame.mapInArrow(reading, f"value struct<{nested}>, {beside}")


def _fields(frame: DataFrame) -> Iterator[tuple[str, Any]]:
    yield from ((field.name, field) for field in frame.schema.fields)


def _arrow_struct(ddl: str) -> pa.StructType:
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    parsed = StructType.fromDDL(ddl)
    assert isinstance(parsed, StructType)
    return pa.struct(list(to_arrow_schema(parsed, timezone="UTC")))


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


def encoded_avro(frame: DataFrame, schema: Schema) -> DataFrame:
    """The rows with their column `value`, a struct, as Avro."""
    assert schema.avro is not None
    kinds = ((name, "binary" if name == "value" else field.dataType.simpleString()) for name, field in _fields(frame))
    return frame.mapInArrow(_writing(schema.avro), ", ".join(f"`{name}` {kind}" for name, kind in kinds))


def _writing(avro: Mapping[str, Any]) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import io

        import fastavro

        parsed = fastavro.parse_schema(dict(avro))

        def encoded(record: Any) -> bytes | None:
            if record is None:
                return None
            stream = io.BytesIO()
            fastavro.schemaless_writer(stream, parsed, record, strict=True)
            return stream.getvalue()

        for batch in batches:
            place = batch.schema.get_field_index("value")
            values = pa.array([encoded(record) for record in batch.column(place).to_pylist()], pa.binary())
            yield batch.set_column(place, "value", values)

    return write
