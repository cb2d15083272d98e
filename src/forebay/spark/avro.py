"""Values that are Avro, turned into columns: each one datum of a known schema, or an error of its own.

Knows Arrow and an Avro library; knows nothing of Spark.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from forebay.errors import Unsupported


class AvroValues:
    """Decodes the values of one schema. `kind` is the struct that its records become."""

    def __init__(self, schema: Mapping[str, Any], kind: pa.StructType) -> None:
        try:
            import fastavro
        except ImportError as error:
            raise Unsupported(f'Avro values need fastavro ({error}): pip install "forebay[lake]"') from error
        self._schema = fastavro.parse_schema(dict(schema))
        self._kind = kind

    def decode(self, values: pa.Array) -> tuple[pa.StructArray, pa.StringArray]:
        """The records, and for each value that is none the reason instead; a value that is null has neither."""
        records: list[dict[str, Any] | None] = []
        errors: list[str | None] = []
        for value in values.to_pylist():
            record, error = self._decoded(value) if value is not None else (None, None)
            records.append(record)
            errors.append(error)
        made = self._placed(records, errors, 0, len(records))
        return made if made is not None else pa.array(records, self._kind), pa.array(errors, pa.string())

    def _decoded(self, value: bytes) -> tuple[dict[str, Any] | None, str | None]:
        import fastavro

        stream = io.BytesIO(value)
        try:
            record = fastavro.schemaless_reader(stream, self._schema, None)
        except Exception as error:  # noqa: BLE001 - the library raises whatever the bytes lead it to
            return None, f"not Avro of this schema: {type(error).__name__} {error}".strip()
        left = len(value) - stream.tell()
        if left:
            return None, f"not Avro of this schema: {left} bytes are left behind the record"
        assert isinstance(record, dict), "the schema is one of a record"
        return record, None

    def _placed(
        self, records: list[dict[str, Any] | None], errors: list[str | None], start: int, stop: int
    ) -> pa.StructArray | None:
        """The records `[start, stop)` as columns; `None` if some have no place there: each gets its error instead.

        All are tried together, then each half of those that fail: a batch of good records is one array.
        """
        try:
            return pa.array(records[start:stop], self._kind)
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            if stop - start == 1:
                records[start], errors[start] = None, f"has no place in its column: {error}"
                return None
        middle = (start + stop) // 2
        self._placed(records, errors, start, middle)
        self._placed(records, errors, middle, stop)
        return None
