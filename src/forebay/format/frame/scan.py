"""Scanning: all whole frames of a buffer, in order. Knows frame heads, no columns and no disk.

Two ways, same answer. Large frames are read one by one: the crc of their bodies is all that counts.
Small ones, down to one record each, are taken together: lengths are followed first, then heads are
gathered and checked as arrays, and only the crc of each body is a call of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from itertools import chain, pairwise, repeat
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from forebay.format.checksum import crc32
from forebay.format.frame.head import (
    BODY_MIN,
    CODEC_MAX,
    FORMAT_VERSION,
    HEAD_SIZE,
    MUST_MAX,
    MUST_MIN,
    MUST_UNDERSTAND,
    FrameHead,
    Verdict,
    judge_short,
    read_frame,
)
from forebay.records import Bytes

_FRAMES_MANY: Final = 64
_FRAME_SMALL: Final = 2048
_GROUP: Final = 64
_STREAK: Final = 8
_RUN_MIN: Final = 64
_RUN_MAX: Final = 65_536
_NEW_HEAD: Final[Any] = partial(tuple.__new__, FrameHead)

Words: TypeAlias = npt.NDArray[np.uint64]
Field: TypeAlias = npt.NDArray[Any]
"""64-bit integers: unsigned for offsets, else signed."""


class FrameTable(NamedTuple):
    """Whole frames by field: where each lies, then the fields of `FrameHead`."""

    position: Field
    base: Field
    length: Field
    kind: Field
    codec: Field
    columns: Field
    count: Field  # type: ignore[assignment]
    epoch: Field
    run_count: Field
    durable: Field
    appended_at: Field


class Scan:
    """The whole frames from a place on, where they stop, and what stands there.

    They come as lists or as a table; the one that was not at hand is made when first asked for.
    """

    __slots__ = ("_heads", "_positions", "_table", "stop", "verdict")

    def __init__(self, stop: int, verdict: Verdict, found: FrameTable | tuple[list[int], list[FrameHead]]) -> None:
        self.stop = stop
        self.verdict = verdict
        """WHOLE if the buffer ended exactly behind a frame."""
        self._table: FrameTable | None = None
        self._positions: list[int] | None = None
        self._heads: list[FrameHead] | None = None
        if isinstance(found, FrameTable):
            self._table = found
        else:
            self._positions, self._heads = found

    @property
    def is_table(self) -> bool:
        """Whether the table is at hand: there are many frames and they are small."""
        return self._table is not None

    @property
    def positions(self) -> list[int]:
        """Where each frame begins in the buffer."""
        if self._positions is None:
            self._positions = self.table.position.tolist()
        return self._positions

    @property
    def heads(self) -> list[FrameHead]:
        """The head of each frame."""
        if self._heads is None:
            self._heads = list(map(_NEW_HEAD, zip(*[field.tolist() for field in self.table[1:]], strict=True)))
        return self._heads

    @property
    def table(self) -> FrameTable:
        """All frames by field: for a million small ones the cheap way to look at them."""
        if self._table is None:
            self._table = _tabulated(self.positions, self.heads)
        return self._table


def _tabulated(positions: list[int], heads: list[FrameHead]) -> FrameTable:
    rows = list(zip(*[(position, *head) for position, head in zip(positions, heads, strict=True)], strict=True))
    unsigned = {FrameTable._fields.index("base"), FrameTable._fields.index("durable")}
    fields = rows or [()] * len(FrameTable._fields)
    return FrameTable(*[np.array(f, dtype=np.uint64 if i in unsigned else np.int64) for i, f in enumerate(fields)])


def scan_frames(buffer: Bytes, start: int, salt_crc: int, frame_bytes_max: int) -> Scan:
    """Every whole frame from `start` on, up to the first place that holds none."""
    walk = _walk(buffer, start, frame_bytes_max)
    if walk.frames < _FRAMES_MANY or walk.stop - start > walk.frames * _FRAME_SMALL:
        return _scan_each(buffer, start, salt_crc, frame_bytes_max)
    return _scan_together(buffer, walk, salt_crc)


def _scan_each(buffer: Bytes, start: int, salt_crc: int, frame_bytes_max: int) -> Scan:
    heads: list[FrameHead] = []
    positions: list[int] = []
    position = start
    total = len(buffer)
    verdict = Verdict.WHOLE
    while position < total:
        head = read_frame(buffer, position, salt_crc, frame_bytes_max)
        if isinstance(head, Verdict):
            verdict = head
            break
        heads.append(head)
        positions.append(position)
        position += head.length
    return Scan(position, verdict, (positions, heads))


class _Walk(NamedTuple):
    """Where frames begin if every length is true, and the verdict on the place behind them.

    A stretch of frames of one length is a range, any other a list of places.
    """

    stretches: list[range | list[int]]
    frames: int
    stop: int
    verdict: Verdict


def _walk(buffer: Bytes, start: int, frame_bytes_max: int) -> _Walk:
    """Follow the lengths. Once several are equal, look ahead for more of the same at once."""
    places: list[int] = []
    stretches: list[range | list[int]] = [places]
    total = len(buffer)
    words = np.frombuffer(buffer, "<u4", count=max(0, total - start) // 4, offset=min(start, total))
    lengths = words.astype(np.uint32, copy=False).data
    position, last, step, streak, window = start, total - HEAD_SIZE, 0, 0, _RUN_MIN
    verdict = Verdict.WHOLE
    while position <= last:
        length = lengths[(position - start >> 2) + 2]
        if length < BODY_MIN or length & 7 or length > frame_bytes_max:
            verdict = Verdict.DAMAGED
            break
        if position + length + 16 > total:
            verdict = Verdict.TORN
            break
        if length + 16 != step:
            step, streak, window = length + 16, 0, _RUN_MIN
        elif streak < _STREAK:
            streak += 1
        else:
            run = _equal_ahead(words[(position - start) // 4 :], step, min(window, (total - position) // step))
            places = []
            stretches += (range(position, position + run * step, step), places)
            position += run * step
            window = min(window * 2, _RUN_MAX)
            continue
        places.append(position)
        position += step
    else:
        if position < total:
            verdict = judge_short(buffer, position, total - position, frame_bytes_max)
    frames = sum(map(len, stretches))
    return _Walk([stretch for stretch in stretches if stretch], frames, position, verdict)


def _equal_ahead(words: npt.NDArray[np.uint32], step: int, frames: int) -> int:
    """How many of the next `frames` places, a step apart, bear the same length; the first one does."""
    same = words[2 :: step // 4][:frames] == step - 16
    return frames if same.all() else int(np.argmin(same))


def _scan_together(buffer: Bytes, walk: _Walk, salt_crc: int) -> Scan:
    start = walk.stretches[0][0]
    position = np.concatenate([_array(stretch) for stretch in walk.stretches])
    words = np.frombuffer(buffer, "<u8", count=(len(buffer) - start) // 8, offset=start)
    place = (position - start) >> 3
    base, sizes, shape, epochs, durable, appended = (words[place + column] for column in range(6))
    seeds = header_crcs(base, sizes & _LOW, salt_crc)
    ends = [stretch[0] for stretch in walk.stretches[1:]] + [walk.stop]
    bodies = chain.from_iterable(map(_bodies, repeat(buffer), walk.stretches, ends))
    crcs = np.fromiter(map(crc32, bodies, seeds.tolist()), dtype=np.uint32, count=len(position))
    damaged = crcs != (sizes >> _HALF).astype(np.uint32)
    newer = _newer(shape)
    table = _table(position, base, sizes, shape, epochs, durable, appended)
    bad = damaged | newer
    if not bad.any():
        return Scan(walk.stop, walk.verdict, table)
    first = int(np.argmax(bad))
    verdict = Verdict.DAMAGED if damaged[first] else Verdict.NEWER
    return Scan(int(position[first]), verdict, FrameTable(*[field[:first] for field in table]))


def table_at(buffer: Bytes, position: npt.NDArray[np.int64]) -> FrameTable:
    """The frames that are known to stand, whole, at these places; each a multiple of 8."""
    words = np.frombuffer(buffer, "<u8", count=len(buffer) // 8)
    place = position >> 3
    return _table(position, *[words[place + column] for column in range(6)])


def _table(
    position: Field, base: Words, sizes: Words, shape: Words, epochs: Words, durable: Words, appended: Words
) -> FrameTable:
    """Heads by field, from the first six words of each frame."""
    return FrameTable(
        position,
        base,
        ((sizes & _LOW) + np.uint64(16)).view(np.int64),
        _byte(shape, 1),
        _byte(shape, 2),
        _byte(shape, 3),
        (shape >> _HALF).view(np.int64),
        (epochs & _LOW).view(np.int64),
        (epochs >> _HALF).view(np.int64),
        durable,
        appended.view(np.int64),
    )


_LOW: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)


def _byte(words: Words, place: int) -> Field:
    return ((words >> np.uint64(8 * place)) & np.uint64(0xFF)).view(np.int64)


def _newer(shape: Words) -> npt.NDArray[np.bool_]:
    """Which frames this version must not read."""
    kind = _byte(shape, 1)
    unknown = (_byte(shape, 0) != FORMAT_VERSION) | (_byte(shape, 2) > CODEC_MAX)
    return np.asarray(unknown | ((kind >= MUST_UNDERSTAND) & (kind < MUST_MIN)) | (kind > MUST_MAX))


def _array(stretch: range | list[int]) -> npt.NDArray[np.int64]:
    if isinstance(stretch, range):
        return np.arange(stretch.start, stretch.stop, stretch.step, dtype=np.int64)
    return np.array(stretch, dtype=np.int64)


def _bodies(buffer: Bytes, stretch: range | list[int], end: int) -> Iterable[Bytes]:
    """The bodies of frames that stand one behind the other up to `end`.

    Those of one length are copied out by `struct` in groups, at a third of the cost of slicing.
    """
    if isinstance(stretch, list):
        return [buffer[start + 16 : stop] for start, stop in pairwise([*stretch, end])]
    view = memoryview(buffer)
    step, rest = stretch.step, len(stretch) % _GROUP
    middle = end - rest * step
    groups: Iterator[tuple[bytes, ...]] = _group(step, _GROUP).iter_unpack(view[stretch[0] : middle])
    return chain(chain.from_iterable(groups), _group(step, rest).unpack_from(view, middle) if rest else ())


@lru_cache(maxsize=1024)
def _group(step: int, frames: int) -> struct.Struct:
    return struct.Struct(f"16x{step - 16}s" * frames)


def header_crcs(base: Words, length: Words, salt_crc: int) -> npt.NDArray[np.uint32]:
    """The crc of each frame's first 12 header bytes, counted from the salt's.

    A crc is linear: that of 12 bytes is the exclusive or of what each pair of them adds.
    """
    tables = _pair_tables()
    pair = np.uint64(0xFFFF)
    found = np.full(len(base), crc32(bytes(12), salt_crc), dtype=np.uint32)
    for place in range(6):
        word = base if place < 4 else length
        found ^= tables[place].take(((word >> np.uint64(16 * (place % 4))) & pair).view(np.int64))
    return found


@lru_cache(maxsize=1)
def _pair_tables() -> list[npt.NDArray[np.uint32]]:
    """For each of the six byte pairs of a 12-byte message and each of its values: what it adds to the crc."""
    zero = crc32(bytes(12))
    tables = []
    for place in range(6):
        low, high = (
            np.array([crc32(bytes(n) + bytes([v]) + bytes(11 - n)) ^ zero for v in range(256)], dtype=np.uint32)
            for n in (2 * place, 2 * place + 1)
        )
        tables.append((high[:, None] ^ low[None, :]).ravel())
    return tables
