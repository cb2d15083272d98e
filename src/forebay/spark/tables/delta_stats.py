"""What the log of a Delta table says of a Parquet file: how many rows it has, and between which values they lie.

Readers leave out files by it. Taken from the footer of the file; what the footer does not say is left out. Knows
neither tables nor deltalake.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def stats_of(file: Any) -> str:
    """The statistics of an open Parquet file, as an action of the log has them."""
    found = pq.ParquetFile(file)
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for place, name in enumerate(found.schema.names):
        if found.schema.column(place).path != name:
            continue  # inside of another column
        kind = found.schema_arrow.field(name).type
        if not (pa.types.is_integer(kind) or pa.types.is_timestamp(kind)):
            continue
        ranges = _ranges(found.metadata, place)
        if ranges is None:
            continue
        nulls[name] = sum(count for count, _, _ in ranges)
        known = [(low, high) for _, low, high in ranges if low is not None]
        if known:
            least[name] = _least(min(low for low, _ in known))
            high = _greatest(max(high for _, high in known))
            if high is not None:
                greatest[name] = high
    stats = {"numRecords": found.metadata.num_rows, "minValues": least, "maxValues": greatest, "nullCount": nulls}
    return json.dumps(stats)


def _ranges(metadata: pq.FileMetaData, place: int) -> list[tuple[int, Any, Any]] | None:
    """Nulls, least and greatest value of a column in each row group; `None` if one does not say."""
    found = []
    for number in range(metadata.num_row_groups):
        column = metadata.row_group(number).column(place)
        stats = column.statistics
        if stats is None or not stats.has_null_count:
            return None
        if stats.has_min_max:
            try:
                found.append((stats.null_count, stats.min, stats.max))
            except OverflowError:
                return None  # a time before the year 1 or behind 9999: Python has none such
        elif stats.null_count == column.num_values:
            found.append((stats.null_count, None, None))
        else:
            return None
    return found


def _least(value: Any) -> Any:
    return _shown(value) if isinstance(value, datetime) else value


def _greatest(value: Any) -> Any:
    if not isinstance(value, datetime):
        return value
    # Readers keep milliseconds of a time: the greatest is the next one. Behind the last one there is none: left out.
    last = datetime.max.replace(tzinfo=value.tzinfo) - timedelta(microseconds=999)
    return _shown(value + timedelta(microseconds=999)) if value <= last else None


def _shown(value: datetime) -> str:
    moment = value if value.tzinfo is None else value.astimezone(UTC)
    return f"{moment.isoformat(timespec='milliseconds').removesuffix('+00:00')}{'' if value.tzinfo is None else 'Z'}"
