"""Resynchronising: where do frames go on behind damage? Knows frame heads, no columns and no disk.

Any 8-byte boundary may be the place. What cannot be a header is sorted out by its offset and length
alone; the rest is checked by crc. Bytes that imitate headers by the thousand, each claiming a long
body, must not make that slow, so a crowd of candidates is checked with the crcs of prefixes.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from forebay.format.checksum import crc32, shifted_crcs
from forebay.format.frame.head import BODY_MIN, HEAD_SIZE, FrameHead, Verdict, read_frame
from forebay.format.frame.scan import header_crcs
from forebay.records import Bytes

_BLOCK_BYTES: Final = 256 * 1024
_CROWD_FACTOR: Final = 4


def resync(
    buffer: Bytes, position: int, salt_crc: int, frame_bytes_max: int, expected: int, reserved_end: int
) -> int | None:
    """The next place after `position` where a frame with a base in `[expected, reserved_end]` checks.

    Only 8-byte boundaries of the buffer are tried. A frame of a newer version counts: it is no gap.
    """
    first = (position // 8 + 1) * 8
    block = _BLOCK_BYTES
    while len(buffer) - first >= HEAD_SIZE:
        places = _candidates(buffer, first, first + block, frame_bytes_max, expected, reserved_end)
        found = _first_whole(buffer, places, salt_crc, frame_bytes_max)
        if found is not None:
            return found
        # Growing blocks: a near frame is found at once, and a crowd's prefixes are read few times.
        first += block
        block *= 2
    return None


def _candidates(
    buffer: Bytes, first: int, stop: int, frame_bytes_max: int, expected: int, reserved_end: int
) -> npt.NDArray[np.int64]:
    """Boundaries in `[first, stop)` whose bytes could be the header of a frame that ends inside the buffer."""
    count = min(stop - first, len(buffer) - first - 8) // 8
    words = np.frombuffer(buffer, "<u8", count=count + 1, offset=first)
    base, length = words[:-1], words[1:] & np.uint64(0xFFFFFFFF)
    likely = (base >= np.uint64(expected)) & (base <= np.uint64(reserved_end))
    likely &= (length >= np.uint64(BODY_MIN)) & (length <= np.uint64(frame_bytes_max)) & (length & np.uint64(7) == 0)
    places = np.flatnonzero(likely)
    ends = places * 8 + first + 16 + length[places].astype(np.int64)
    return places[ends <= len(buffer)] * 8 + first


def _first_whole(buffer: Bytes, places: npt.NDArray[np.int64], salt_crc: int, frame_bytes_max: int) -> int | None:
    """The first candidate whose crc holds."""
    if not len(places):
        return None
    heads = np.frombuffer(buffer, "<u8", count=len(buffer) // 8)
    base, sizes = heads[places >> 3], heads[(places >> 3) + 1]
    lengths = sizes & np.uint64(0xFFFFFFFF)
    if int(lengths.sum()) > _CROWD_FACTOR * len(buffer):
        whole = _crowd(buffer, places, base, lengths, salt_crc) == sizes >> np.uint64(32)
        places = places[whole]
    for place in places.tolist():
        head = read_frame(buffer, place, salt_crc, frame_bytes_max)
        if head is Verdict.NEWER or isinstance(head, FrameHead):
            return int(place)
    return None


def _crowd(
    buffer: Bytes,
    places: npt.NDArray[np.int64],
    base: npt.NDArray[np.uint64],
    lengths: npt.NDArray[np.uint64],
    salt_crc: int,
) -> npt.NDArray[np.uint32]:
    """The crc of every candidate in one pass over the bytes, however much their bodies overlap.

    With P(x) the crc of the bytes before x: crc(body, seed) = P(end) ^ shifted(P(start) ^ seed, length).
    """
    starts = places + 16
    ends = starts + lengths.astype(np.int64)
    stops, order = np.unique(np.concatenate([starts, ends]), return_inverse=True)
    view = memoryview(buffer)
    crc, before = 0, 0
    prefixes = np.empty(len(stops), dtype=np.uint32)
    for index, stop in enumerate(stops.tolist()):
        crc = crc32(view[before:stop], crc)
        prefixes[index] = crc
        before = stop
    at_start, at_end = prefixes[order[: len(places)]], prefixes[order[len(places) :]]
    seeds = header_crcs(base, lengths, salt_crc)
    return at_end ^ shifted_crcs(at_start ^ seeds, lengths)
