"""Records as rows of columns, and rows as records: what the formats of a pipeline mean in Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from forebay.spark.pipelines.file.model import BadRecords, Format, Schema
from forebay.spark.values.decoding import failing, with_columns, without_bad
from forebay.spark.values.schema import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from forebay.spark.pipelines.kinds.topic import TopicSource


def decoded(frame: DataFrame, source: TopicSource) -> DataFrame:
    """The records of a source with the columns it promises."""
    from pyspark.sql import functions as f

    is_text = source.format is Format.TEXT
    if source.format is Format.RAW or (is_text and "value" not in (name for name, _ in source.columns)):
        return frame
    if is_text:
        return frame.withColumn("value", f.col("value").cast("string"))
    assert source.schema is not None
    rows = with_columns(frame, source.schema.ddl, source.schema.avro if source.format is Format.AVRO else None)
    if source.bad_records is BadRecords.KEEP:
        return rows.select(*(quoted(name) for name, _ in source.columns))
    if source.bad_records is BadRecords.DROP:
        return without_bad(rows)
    return failing(rows, f"source {source.name}")


def encoded_avro(frame: DataFrame, schema: Schema) -> DataFrame:
    """The rows with their column `value`, a struct, as Avro."""
    assert schema.avro is not None
    kinds = (
        (field.name, "binary" if field.name == "value" else field.dataType.simpleString())
        for field in frame.schema.fields
    )
    return frame.mapInArrow(_writing(schema.avro), ", ".join(f"{quoted(name)} {kind}" for name, kind in kinds))


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
