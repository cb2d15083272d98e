"""What is stored of a window: the cursor, what is done above it, and how often the others were delivered."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from pyroaring import BitMap

from forebay.errors import Corrupt
from forebay.format.control.offsets import OffsetSet, decode_bitmap, encode_bitmap
from forebay.progress import ACKED_BYTES_MAX, ATTEMPTS_STORED_MAX, AckedAbove, Progress, SpentNote
from forebay.records import OFFSET_MAX
from forebay.subscriptions.window import Window, WindowCopy, WindowLimits
from forebay.topics import SubscriptionMode, SubscriptionSpec

_SPREAD_MAX = 2**32
"""A stored bitmap counts from the cursor and has no larger number."""
_RANGES_MAX = ACKED_BYTES_MAX // 2
"""Each range takes two bytes of a stored bitmap at least: more of them never fit."""


def progress_of(
    window: WindowCopy,
    spec: SubscriptionSpec,
    epoch: int,
    *,
    run: str | None = None,
    letters_to: str | None = None,
    spent: Sequence[SpentNote] = (),
) -> Progress:
    """The cursor record of a window; with a dead-letter topic, of which run it is and why records are spent.

    Where the acknowledged offsets above the cursor take too much room, the highest are left out: after a restart their
    records are delivered again. Takes time for a large window: no lock is to be held.
    """
    return Progress(
        offset=window.cursor,
        incarnation=spec.topic_id,
        epoch=epoch,
        subscription=spec.subscription_id,
        acked=_acked_above(window),
        attempts=tuple(window.attempts(ATTEMPTS_STORED_MAX).items()),
        run=msgspec.UNSET if run is None else run,
        letters_to=msgspec.UNSET if letters_to is None else letters_to,
        spent=tuple(spent[:ATTEMPTS_STORED_MAX]) if spent else msgspec.UNSET,
    )


def window_of(spec: SubscriptionSpec, progress: Progress | None, start: int = 0, epoch: int | None = None) -> Window:
    """The window that goes on where the cursor record says; from `start` on in a partition that has none yet.

    A record of another `epoch` of the shard is one of an earlier owner, which may have ended in any way.
    """
    return Window(
        start if progress is None else progress.offset,
        limits_of(spec),
        by_key=spec.mode is SubscriptionMode.KEY_SHARED,
        acked=None if progress is None else acked_of(progress),
        attempts=None
        if progress is None or isinstance(progress.attempts, msgspec.UnsetType)
        else dict(progress.attempts),
        is_next_life=progress is not None and epoch is not None and progress.epoch != epoch,
    )


def limits_of(spec: SubscriptionSpec) -> WindowLimits:
    """What a window goes by."""
    return WindowLimits(
        records_max=spec.window_records_max,
        ack_timeout_ms=spec.ack_timeout_ms,
        backoff_min_ms=spec.backoff_min_ms,
        backoff_max_ms=spec.backoff_max_ms,
        deliveries_max=spec.deliveries_max,
    )


def acked_of(progress: Progress) -> OffsetSet:
    """The offsets above the cursor that are done; `Corrupt` if they are not readable."""
    acked = progress.acked
    if isinstance(acked, msgspec.UnsetType):
        return OffsetSet()
    bitmap = decode_bitmap(acked.bitmap, acked.count)
    if bitmap and acked.base + bitmap.max() >= OFFSET_MAX:
        raise Corrupt(f"the cursor at {progress.offset} has acknowledged offsets that cannot be")
    # Those below were acknowledged when the cursor stood lower; a reader of the same name may have moved it since.
    places = np.frombuffer(bitmap.to_array(), np.uint32).astype(np.int64)
    return OffsetSet.of(places + acked.base).clipped(progress.offset, OFFSET_MAX)


def _acked_above(window: WindowCopy) -> AckedAbove:
    starts, stops = window.acked_ranges()
    starts, stops = starts[:_RANGES_MAX] - window.cursor, np.minimum(stops[:_RANGES_MAX] - window.cursor, _SPREAD_MAX)
    ranges = [(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True) if start < stop]
    while True:
        places = BitMap()
        for start, stop in ranges:
            places.add_range(start, stop)
        bitmap = encode_bitmap(places)
        if len(bitmap) <= ACKED_BYTES_MAX:
            return AckedAbove(base=window.cursor, count=len(places), bitmap=bitmap)
        del ranges[len(ranges) * 3 // 4 :]
