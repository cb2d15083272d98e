"""Deletion vectors: the deleted offsets of a shard's history, as the metadata store holds them. Knows no store.

    {"start": 1048576, "count": 3, "generation": 7, "bitmap": "OzAAAAEAAgABAAIAAwA="}

Stored with `value`, one per window of 2**20 shard offsets, under the key of its start. `bitmap` is the
roaring bitmap of the deleted offsets, counted from `start`, in base64. `generation` rises with every
change, so that a reader can say which state of the deletes its answer is of. At most 200 KiB.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from forebay.errors import Corrupt
from forebay.format.control.offsets import WINDOW, OffsetSet, decode_bitmap, encode_bitmap
from forebay.format.frame.batch import Batch
from forebay.format.metadata.value import Unknown, decode_value, encode_value
from forebay.records import OFFSET_MAX, Bytes, Gap, Reason

VECTOR_BYTES_MAX: Final = 200 * 1024
"""No stored vector is larger."""


class DeletionVector(msgspec.Struct, frozen=True, kw_only=True):
    """The `count` deleted offsets of the window at `start`."""

    start: int
    count: int
    generation: int
    bitmap: bytes


def vectors_of(deleted: OffsetSet, generation: int) -> list[DeletionVector]:
    """The vectors of all windows that hold a deleted offset, in order."""
    return [
        DeletionVector(start=start, count=len(bitmap), generation=generation, bitmap=encode_bitmap(bitmap))
        for start, bitmap in deleted.windows()
    ]


def deleted_by(vectors: Iterable[DeletionVector]) -> OffsetSet:
    """All offsets that the vectors name; `Corrupt` if one contradicts itself."""
    windows = {}
    for vector in vectors:
        bitmap = decode_bitmap(vector.bitmap, vector.count)
        in_place = vector.start % WINDOW == 0 and 0 <= vector.start < OFFSET_MAX
        if not bitmap or not in_place or bitmap.max() >= WINDOW or vector.start in windows:
            raise Corrupt(f"the deletion vector at {vector.start} is not of one window of {WINDOW} offsets")
        windows[vector.start] = bitmap
    return OffsetSet(windows)


def merge(vector: DeletionVector | None, deleted: OffsetSet, start: int) -> DeletionVector | None:
    """The vector of the window at `start` with these offsets added, one generation on.

    `None` if there is nothing to store: what is deleted there is in the vector already.
    """
    stored = OffsetSet() if vector is None else deleted_by([vector])
    joined = stored | deleted.clipped(start, start + WINDOW)
    if len(joined) == len(stored):
        return None
    (found,) = vectors_of(joined, 1 if vector is None else vector.generation + 1)
    return found


def encode_vector(vector: DeletionVector, unknown: Unknown | None = None) -> bytes:
    """The stored bytes of a vector, with the unknown fields of the one it replaces."""
    stored = encode_value(vector, unknown=unknown)
    assert len(stored) <= VECTOR_BYTES_MAX
    return stored


def decode_vector(stored: Bytes) -> tuple[DeletionVector, Unknown]:
    """A vector whose bitmap was checked, and what this version does not know of it."""
    vector, unknown = decode_value(stored, DeletionVector)
    deleted_by([vector])
    return vector, unknown


def live_mask(deleted: OffsetSet, first: int, count: int) -> npt.NDArray[np.bool_]:
    """For each offset of `[first, first + count)` whether its record was not deleted."""
    return ~deleted.mask(first, count)


def without(batch: Batch, deleted: OffsetSet) -> tuple[list[Batch], list[Gap]]:
    """The records of a batch that were not deleted, and where the others were; both in order, nothing is copied."""
    if not deleted.count_in(batch.base, batch.end):
        return [batch], []
    live = live_mask(deleted, batch.base, batch.count)
    edges = np.flatnonzero(live[1:] != live[:-1]) + 1
    places = (np.concatenate([[0], edges, [batch.count]]) + batch.base).tolist()
    kept: list[Batch] = []
    gone: list[Gap] = []
    is_live = bool(live[0])
    for start, stop in pairwise(places):
        if is_live:
            kept.append(batch.slice(start, stop))
        else:
            gone.append(Gap(start, stop, Reason.DELETED))
        is_live = not is_live
    return kept, gone
