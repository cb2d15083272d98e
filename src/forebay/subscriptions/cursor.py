"""What is stored of a window: the cursor, what is done above it, and how often the others were delivered."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from pyroaring import BitMap

from forebay.errors import Corrupt
from forebay.format.control.offsets import OffsetSet, decode_bitmap, encode_bitmap
from forebay.progress import ACKED_BYTES_MAX, ATTEMPTS_STORED_MAX, AckedAbove, Progress, SpentNote
from forebay.records import OFFSET_MAX
from forebay.subscriptions.window import Window, WindowLimits
from forebay.topics import SubscriptionMode, SubscriptionSpec

_SPREAD_MAX = 2**32
"""A stored bitmap counts from the cursor and has no larger number."""


def progress_of(
    window: Window, incarnation: str, epoch: int, *, run: str | None = None, spent: Sequence[SpentNote] = ()
) -> Progress:
    """The cursor record of a window; with a dead-letter topic, of which run it is and why records are spent.

    Where the acknowledged offsets above the cursor take too much room, the highest are left out: after a restart their
    records are delivered again.
    """
    return Progress(
        offset=window.cursor,
        incarnation=incarnation,
        epoch=epoch,
        acked=_acked_above(window),
        attempts=tuple(window.attempts(ATTEMPTS_STORED_MAX).items()),
        run=msgspec.UNSET if run is None else run,
        spent=tuple(spent[:ATTEMPTS_STORED_MAX]) if spent else msgspec.UNSET,
    )


def window_of(spec: SubscriptionSpec, progress: Progress | None, start: int = 0) -> Window:
    """The window that goes on where the cursor record says; from `start` on in a partition that has none yet."""
    return Window(
        start if progress is None else progress.offset,
        limits_of(spec),
        by_key=spec.mode is SubscriptionMode.KEY_SHARED,
        acked=None if progress is None else acked_of(progress),
        attempts=None
        if progress is None or isinstance(progress.attempts, msgspec.UnsetType)
        else dict(progress.attempts),
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
    return OffsetSet.of([acked.base + place for place in bitmap]).clipped(progress.offset, OFFSET_MAX)


def _acked_above(window: Window) -> AckedAbove:
    places = [offset - window.cursor for offset in window.acked() if offset - window.cursor < _SPREAD_MAX]
    bitmap = encode_bitmap(BitMap(places))
    while len(bitmap) > ACKED_BYTES_MAX:
        places = places[: len(places) * 3 // 4]
        bitmap = encode_bitmap(BitMap(places))
    return AckedAbove(base=window.cursor, count=len(places), bitmap=bitmap)
