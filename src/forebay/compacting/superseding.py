"""Which records did a later one with their key supersede? The part of the answer that one segment can give.

Offsets rise in a segment, so the last of a key in it supersedes all others there; whether a later segment supersedes
that one too is found by putting the answers of all segments together. Knows segments, no stores.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.columnar import ParquetSegment
from forebay.errors import Corrupt
from forebay.format.control.offsets import OffsetSet
from forebay.format.frame.batch import Batch
from forebay.records import Reason
from forebay.sealed import SealedSegment

PAGE_BYTES: Final = 4 * 1024 * 1024
KEYS: Final = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("aged", pa.bool_(), nullable=False),
    ]
)


class Superseding(NamedTuple):
    """What one segment says."""

    newest: pa.Table
    """The last live record of each key, with `KEYS`; `aged` if it may end."""
    superseded: OffsetSet
    """Records that another in the segment superseded and that may end."""


def superseding(segment: SealedSegment, ended: OffsetSet, earliest: int, appended_max: int) -> Superseding:
    """Look through the live records of a segment. Those appended after `appended_max` (ms) may not end."""
    parts = list(_keys(segment, appended_max))
    whole = pa.concat_tables([KEYS.empty_table(), *parts]).combine_chunks()
    offsets = whole.column("offset").to_numpy()
    live = offsets >= earliest
    if len(offsets):
        first, span = int(offsets[0]), int(offsets[-1]) + 1 - int(offsets[0])
        live &= ~ended.mask(first, span)[offsets - first]
    whole = whole.filter(pa.array(live))
    if not whole.num_rows:
        return Superseding(whole, OffsetSet())
    codes = pc.dictionary_encode(whole.column("key").combine_chunks()).indices.to_numpy()
    rows = np.arange(len(codes))
    last = np.zeros(int(codes.max()) + 1, dtype=np.int64)
    # Later rows overwrite earlier ones.
    last[codes] = rows
    is_last = last[codes] == rows
    aged = whole.column("aged").to_numpy()
    gone = whole.column("offset").to_numpy()[~is_last & aged]
    return Superseding(whole.filter(pa.array(is_last)), OffsetSet.of(gone))


def _keys(segment: SealedSegment, appended_max: int) -> Iterator[pa.Table]:
    """The records that have a key."""
    if isinstance(segment, ParquetSegment):
        for table in segment.tables(segment.start, segment.end, ["key", "offset", "appended_at"]):
            appended = table.column("appended_at").combine_chunks().cast(pa.int64()).to_numpy() // 1000
            yield _with_keys(
                table.column("key").combine_chunks(), table.column("offset").to_numpy(), appended, appended_max
            )
        return
    offset = segment.start
    while offset < segment.end:
        page = segment.read(offset, PAGE_BYTES).clipped(segment.end)
        if any(gap.reason is Reason.DAMAGED for gap in page.events):
            raise Corrupt(f"{segment.name} is damaged: which records are superseded is not known")
        for batch in page.batches:
            keys = batch.to_arrow(0, ["key"]).column("key")
            yield _with_keys(keys, np.arange(batch.base, batch.end), _appended(batch), appended_max)
        offset = page.next


def _appended(batch: Batch) -> np.typing.NDArray[np.int64]:
    return np.concatenate([np.full(part.records, part.at, np.int64) for part in batch.appended()])


def _with_keys(
    keys: pa.Array, offsets: np.typing.NDArray[np.int64], appended: np.typing.NDArray[np.int64], appended_max: int
) -> pa.Table:
    table = pa.Table.from_arrays([keys, pa.array(offsets), pa.array(appended <= appended_max)], schema=_LOOSE)
    return table.filter(keys.is_valid()).cast(KEYS)


_LOOSE: Final = pa.schema([pa.field("key", pa.binary()), *(KEYS.field(name) for name in ("offset", "aged"))])
