"""What a task of `profile` counts while it reads, and how counts of many tasks become one. Pure arithmetic on Arrow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

COLUMNS: Final = ("key", "value", "timestamp", "headers", "tag")
"""What is counted of a record. All but the time may be left out: then there is nothing to count of it."""
TAGS_MAX: Final = 1_000
"""Kept of one task; rarer ones count as others."""
LATE_SECONDS: Final = (0, 1, 10, 60, 600, 3_600, 86_400)
"""Upper bounds of lateness; what is later counts as one more."""
BEFORE_ALL: Final = -(2**62)


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """Counts over some records of one partition. `late` are those that come behind a newer one, by how far."""

    records: int = 0
    key_bytes: int = 0
    value_bytes: int = 0
    without_key: int = 0
    without_value: int = 0
    with_headers: int = 0
    time_min: int | None = None
    time_max: int | None = None
    sizes: dict[int, int] = msgspec.field(default_factory=dict)
    """Records by the bit length of key and value together: up to 2**n bytes."""
    times: dict[int, tuple[int, int]] = msgspec.field(default_factory=dict)
    """Records and bytes by the start of their time bucket, in ms."""
    tags: dict[str, int] = msgspec.field(default_factory=dict)
    late: tuple[int, ...] = (0,) * (len(LATE_SECONDS) + 1)
    late_max_ms: int = 0
    missing: int = 0
    """Offsets of history that could not be read, as far as those were looked at."""


def tallied(batches: Iterable[pa.RecordBatch], *, bucket_ms: int, newest: int = BEFORE_ALL) -> Tally:
    """The counts of these records, which come in order; `newest` is the latest time before them."""
    total = Tally()
    for batch in batches:
        if batch.num_rows:
            total = merged([total, _of(batch, bucket_ms, newest)])
            newest = max(newest, total.time_max or BEFORE_ALL)
    return total


def merged(tallies: Iterable[Tally]) -> Tally:
    """All of them together."""
    found = [tally for tally in tallies if tally.records]
    if len(found) <= 1:
        return found[0] if found else Tally()
    times: dict[int, tuple[int, int]] = {}
    for tally in found:
        for start, (records, size) in tally.times.items():
            before = times.get(start, (0, 0))
            times[start] = (before[0] + records, before[1] + size)
    return Tally(
        records=sum(tally.records for tally in found),
        key_bytes=sum(tally.key_bytes for tally in found),
        value_bytes=sum(tally.value_bytes for tally in found),
        without_key=sum(tally.without_key for tally in found),
        without_value=sum(tally.without_value for tally in found),
        with_headers=sum(tally.with_headers for tally in found),
        time_min=min(tally.time_min for tally in found if tally.time_min is not None),
        time_max=max(tally.time_max for tally in found if tally.time_max is not None),
        sizes=_summed(tally.sizes for tally in found),
        times=times,
        tags=_most_common(_summed(tally.tags for tally in found)),
        late=tuple(map(sum, zip(*(tally.late for tally in found), strict=True))),
        late_max_ms=max(tally.late_max_ms for tally in found),
    )


def size_at(sizes: Mapping[int, int], share: float) -> int:
    """A size, a power of two, that this share of the records does not exceed."""
    wanted, seen = share * sum(sizes.values()), 0
    for bits in sorted(sizes):
        seen += sizes[bits]
        if seen >= wanted:
            return 0 if bits == 0 else 2**bits
    return 0


def _of(batch: pa.RecordBatch, bucket_ms: int, newest: int) -> Tally:
    nothing = np.zeros(batch.num_rows, np.int64)
    there = {name: batch.column(name) for name in batch.schema.names}
    keys, values = (_lengths(there[name]) if name in there else nothing for name in ("key", "value"))
    # Spark's type has microseconds, records have milliseconds.
    times = batch.column("timestamp").cast(pa.int64()).to_numpy(zero_copy_only=False) // 1000
    sizes = keys + values
    before = np.maximum.accumulate(np.concatenate([[newest], times]))[:-1]
    late = np.maximum(0, before - times)
    bits = np.zeros(len(sizes), np.int64)
    np.ceil(np.log2(np.maximum(sizes, 1)), out=bits, casting="unsafe")
    bits[sizes > 0] = np.maximum(bits[sizes > 0], 1)
    return Tally(
        records=batch.num_rows,
        key_bytes=int(keys.sum()),
        value_bytes=int(values.sum()),
        without_key=there["key"].null_count if "key" in there else 0,
        without_value=there["value"].null_count if "value" in there else 0,
        with_headers=len(batch) - there["headers"].null_count if "headers" in there else 0,
        time_min=int(times.min()),
        time_max=int(times.max()),
        sizes=_counted(bits),
        times=_by_time(times, sizes, bucket_ms),
        tags=_tags(there["tag"]) if "tag" in there else {},
        late=_late(late),
        late_max_ms=int(late.max()),
    )


def _lengths(column: pa.Array) -> npt.NDArray[np.int64]:
    found = pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
    return np.asarray(found, np.int64)


def _counted(numbers: npt.NDArray[np.int64]) -> dict[int, int]:
    found, counts = np.unique(numbers, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def _by_time(times: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], bucket_ms: int) -> dict[int, tuple[int, int]]:
    starts, places, counts = np.unique(times // bucket_ms * bucket_ms, return_inverse=True, return_counts=True)
    filled = np.bincount(places, weights=sizes, minlength=len(starts)).astype(np.int64)
    rows = zip(starts.tolist(), counts.tolist(), filled.tolist(), strict=True)
    return {start: (count, size) for start, count, size in rows}


def _tags(column: pa.Array) -> dict[str, int]:
    counted = pc.value_counts(column.drop_null())
    found = {row["values"]: row["counts"] for row in counted.to_pylist()}
    return _most_common(found)


def _late(late: npt.NDArray[np.int64]) -> tuple[int, ...]:
    places = np.searchsorted(np.asarray(LATE_SECONDS) * 1000, late, side="left")
    return tuple(np.bincount(places, minlength=len(LATE_SECONDS) + 1).tolist())


def _summed(counts: Iterable[Mapping[str, int]] | Iterable[Mapping[int, int]]) -> dict[Any, int]:
    total: Counter[Any] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)


def _most_common(tags: Mapping[str, int]) -> dict[str, int]:
    if len(tags) <= TAGS_MAX:
        return dict(tags)
    kept = dict(Counter(tags).most_common(TAGS_MAX - 1))
    kept["…"] = sum(tags.values()) - sum(kept.values())
    return kept
