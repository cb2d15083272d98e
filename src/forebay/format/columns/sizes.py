"""How many bytes a record counts for where a limit is in bytes. Knows layouts, no frames.

    size := 16 + value + key [+ 4 + tag] [+ (8 + name + value) per header]     a null has no bytes

The same for every way a record may be stored, compressed or not, so that a limit always means the
same records. An index holds the running total per data frame (`index.sections`, section sizes).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from forebay.format.columns import layout
from forebay.format.columns.layout import ColumnSpan, Layout

RECORD_BYTES: Final = 16
TAG_BYTES: Final = 4
HEADER_BYTES: Final = 8


def record_sizes(found: Layout, first: int, stop: int) -> npt.NDArray[np.int64]:
    """The size of each of the rows `[first, stop)`."""
    sizes = _lengths(found, found.value, first, stop) + RECORD_BYTES
    if found.key is not None:
        sizes += _lengths(found, found.key, first, stop)
    if found.tag is not None:
        sizes += _lengths(found, found.tag, first, stop)
        sizes += TAG_BYTES if found.tag.bits < 0 else TAG_BYTES * layout.validity(found.buffer, found.tag, first, stop)
    if found.names is not None and found.header_values is not None:
        rows = layout.offsets_at(found.buffer, found.lists, first, stop).astype(np.int64)
        total = HEADER_BYTES * rows
        for span in (found.names, found.header_values):
            total += layout.offsets_at(found.buffer, span.offsets, 0, int(rows[-1]))[rows]
        sizes += total[1:] - total[:-1]
    return sizes


def _lengths(found: Layout, span: ColumnSpan, first: int, stop: int) -> npt.NDArray[np.int64]:
    offsets = layout.offsets_at(found.buffer, span.offsets, first, stop).astype(np.int64)
    return offsets[1:] - offsets[:-1]
