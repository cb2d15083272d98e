"""Scanning: all whole frames of a buffer, in order. Knows frame heads, no columns and no disk.

Two ways, same answer. Large frames are read one by one: the crc of their bodies is all that counts.
Small ones, down to one record each, are taken together: lengths are followed first, then heads are
gathered and checked as arrays, and only the crc of each body is a call of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from itertools import chain
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from forebay.format.checksum import crc32
from forebay.format.head import (
    BODY_MIN,
    CODEC_MAX,
    COLUMNS_MAX,
    FORMAT_VERSION,
    HEAD_SIZE,
    MUST_UNDERSTAND,
    FrameHead,
    Kind,
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
_UNPACK_LENGTH: Final = struct.Struct("<I").unpack_from
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


class _Stretch(NamedTuple):
    """Frames of one length, one behind the other."""

    position: int
    step: int
    frames: int


class _Walk(NamedTuple):
    """Where frames begin if every length is true, and the verdict on the place behind them."""

    stretches: list[_Stretch]
    frames: int
    stop: int
    verdict: Verdict


def _walk(buffer: Bytes, start: int, frame_bytes_max: int) -> _Walk:
    """Follow the lengths. Once several are equal, look ahead for more of the same at once."""
    stretches: list[_Stretch] = []
    total = len(buffer)
    words = np.frombuffer(buffer, "<u4", count=max(0, total - start) // 4, offset=min(start, total))
    position, frames, window = start, 0, _RUN_MIN
    first, step, run = start, 0, 0
    verdict = Verdict.WHOLE
    while position < total:
        if total - position < HEAD_SIZE:
            verdict = judge_short(buffer, position, total - position, frame_bytes_max)
            break
        length = _UNPACK_LENGTH(buffer, position + 8)[0]
        if length < BODY_MIN or length & 7 or length > frame_bytes_max:
            verdict = Verdict.DAMAGED
            break
        if total - position < length + 16:
            verdict = Verdict.TORN
            break
        if length + 16 != step:
            if run:
                stretches.append(_Stretch(first, step, run))
            first, step, run, window = position, length + 16, 0, _RUN_MIN
        more = 1
        if run >= _STREAK:
            more = _equal_ahead(words[(position - start) // 4 :], step, min(window, (total - position) // step))
            window = min(window * 2, _RUN_MAX)
        run += more
        frames += more
        position += more * step
    if run:
        stretches.append(_Stretch(first, step, run))
    return _Walk(stretches, frames, position, verdict)


def _equal_ahead(words: npt.NDArray[np.uint32], step: int, frames: int) -> int:
    """How many of the next `frames` places, a step apart, bear the same length; the first one does."""
    same = words[2 :: step // 4][:frames] == step - 16
    return frames if same.all() else int(np.argmin(same))


def _scan_together(buffer: Bytes, walk: _Walk, salt_crc: int) -> Scan:
    places = [np.arange(s.position, s.position + s.step * s.frames, s.step, dtype=np.int64) for s in walk.stretches]
    position = np.concatenate(places)
    words = np.frombuffer(
        buffer, "<u8", count=(len(buffer) - walk.stretches[0].position) // 8, offset=walk.stretches[0].position
    )
    place = (position - walk.stretches[0].position) >> 3
    base, sizes, shape, epochs, durable, appended = (words[place + column] for column in range(6))
    seeds = header_crcs(base, sizes & _LOW, salt_crc)
    bodies = chain.from_iterable(_bodies(buffer, stretch) for stretch in walk.stretches)
    crcs = np.fromiter(map(crc32, bodies, seeds.tolist()), dtype=np.uint32, count=len(position))
    damaged = crcs != (sizes >> _HALF).astype(np.uint32)
    newer = _newer(shape)
    table = FrameTable(
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
    bad = damaged | newer
    if not bad.any():
        return Scan(walk.stop, walk.verdict, table)
    first = int(np.argmax(bad))
    verdict = Verdict.DAMAGED if damaged[first] else Verdict.NEWER
    return Scan(int(position[first]), verdict, FrameTable(*[field[:first] for field in table]))


_LOW: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)


def _byte(words: Words, place: int) -> Field:
    return ((words >> np.uint64(8 * place)) & np.uint64(0xFF)).view(np.int64)


def _newer(shape: Words) -> npt.NDArray[np.bool_]:
    """Which frames this version must not read."""
    kind = _byte(shape, 1)
    unknown = (_byte(shape, 0) != FORMAT_VERSION) | (_byte(shape, 2) > CODEC_MAX) | (_byte(shape, 3) > COLUMNS_MAX)
    return np.asarray(unknown | ((kind >= MUST_UNDERSTAND) & (kind != int(Kind.GAP))))


def _bodies(buffer: Bytes, stretch: _Stretch) -> Iterable[Bytes]:
    """The bodies of frames of one length, copied out by `struct` in groups, or as views where that would copy much."""
    position, step, frames = stretch
    view = memoryview(buffer)
    if step > 2 * _FRAME_SMALL:
        return [view[p + 16 : p + step] for p in range(position, position + step * frames, step)]
    if frames < _GROUP // 8:
        return [bytes(buffer[p + 16 : p + step]) for p in range(position, position + step * frames, step)]
    rest = frames % _GROUP
    middle = position + step * (frames - rest)
    groups: Iterator[tuple[bytes, ...]] = _group(step, _GROUP).iter_unpack(view[position:middle])
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
