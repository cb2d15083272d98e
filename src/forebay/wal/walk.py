"""Reads a log file frame by frame and goes on behind damage. Every walk over frames is a loop over `walk`.

A walk gives three kinds of steps: data frames, control frames, and bytes that hold no whole frame. A loop handles
all three in one `match`, which the type checker keeps complete: none can pass over damage without saying so.
Knows frames and bytes; changes nothing and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from forebay.format.control.frames import decode_state
from forebay.format.frame.batch import Batch, decode
from forebay.format.frame.encoding import runs_of
from forebay.format.frame.head import HEADER, FrameHead, Kind, Verdict
from forebay.format.frame.resynchronisation import resync
from forebay.format.frame.scan import FrameTable, Scan, scan_frames
from forebay.format.frame.small_frames import batches_of
from forebay.records import OFFSET_MAX, Gap, Reason, Run
from forebay.sealed import FRAME_BYTES_LIMIT, ByteSource

CHUNK_BYTES = 4 * 1024 * 1024
OFFSETS_AHEAD = 2**33
"""How far above the highest known offset a frame behind damage may lie."""


class DataFrames(NamedTuple):
    """Whole data frames: one, or a table of many that follow each other and have no producers."""

    buffer: bytes
    origin: int
    """The byte of the file at which `buffer` begins. Positions of frames are in `buffer`."""
    position: int
    frames: FrameHead | FrameTable
    ends_read: bool
    """The next step needs another read of the file."""

    @property
    def end(self) -> int:
        """The offset behind all records."""
        frames = self.frames
        if isinstance(frames, FrameTable):
            return int((frames.base.view(np.int64) + frames.count).max())
        return frames.end

    @property
    def durable(self) -> int:
        """The highest durable mark."""
        frames = self.frames
        return int(frames.durable.max()) if isinstance(frames, FrameTable) else frames.durable

    @property
    def stop(self) -> int:
        """The byte of the file behind the last frame."""
        return self.origin + self._stop

    @property
    def raw(self) -> bytes:
        """The frames as they were written."""
        return self.buffer[self.position : self._stop]

    @property
    def _stop(self) -> int:
        frames = self.frames
        if isinstance(frames, FrameTable):
            return int(frames.position[-1] + frames.length[-1])
        return self.position + frames.length

    def each(self) -> Iterator[tuple[FrameHead, int]]:
        """Every frame by itself: its head and its position."""
        if not isinstance(self.frames, FrameTable):
            yield self.frames, self.position
            return
        for position, *head in zip(*[field.tolist() for field in self.frames], strict=True):
            yield FrameHead(*head), position

    def batches(self) -> Iterator[tuple[Batch, int]]:
        """The records in few batches, each with the bytes that its frames take."""
        if isinstance(self.frames, FrameTable):
            yield from batches_of(self.buffer, self.frames)
        else:
            yield decode(self.buffer, self.position, self.frames), self.frames.length

    def runs(self) -> list[Run]:
        """The appends that the records came in; none if no append had a producer."""
        return [] if isinstance(self.frames, FrameTable) else runs_of(self.buffer, self.position, self.frames)


class ControlFrame(NamedTuple):
    """One whole frame without records, of any kind."""

    buffer: bytes
    origin: int
    position: int
    head: FrameHead
    ends_read: bool

    @property
    def stop(self) -> int:
        """The byte of the file behind the frame."""
        return self.origin + self.position + self.head.length

    @property
    def raw(self) -> bytes:
        """The frame as it was written."""
        return self.buffer[self.position : self.position + self.head.length]


class Unreadable(NamedTuple):
    """Bytes that hold no whole frame."""

    byte: int
    stop: int
    """The byte at which whole frames go on, or the end of the walk."""
    gap: Gap
    """The offsets whose records stood there. It is empty where only a control frame is lost."""
    verdict: Verdict
    is_followed: bool
    """A whole frame stands at `stop`, perhaps of a newer version."""


Step: TypeAlias = DataFrames | ControlFrame | Unreadable


def walk(
    source: ByteSource,
    salt_crc: int,
    start: int,
    stop: int,
    *,
    expected: int,
    end: int,
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[Step]:
    """The bytes `[start, stop)` step by step; at least `chunk_bytes` are read together.

    No frame holds an offset below `expected`. `end` is the offset that the bytes are known to reach: where nothing
    whole follows damage, all records up to there are lost.
    """
    position, want = start, chunk_bytes
    state: ControlFrame | None = None
    while position < stop:
        buffer = bytes(source.read_at(min(want, stop - position), position))
        scan = scan_frames(buffer, 0, salt_crc, FRAME_BYTES_LIMIT)
        # A file may be shorter than it should be: then no larger read gives more.
        is_cut = scan.verdict is Verdict.TORN and len(buffer) == want and position + want < stop
        if is_cut and not scan.stop:
            want *= 2
            continue
        for step in _whole(buffer, position, scan):
            if isinstance(step, DataFrames):
                expected = max(expected, step.end)
            else:
                expected = max(expected, step.head.end)
                state = step if step.head.kind == Kind.STATE else state
            yield step
        position, want = position + scan.stop, chunk_bytes
        if is_cut or (buffer and scan.verdict is Verdict.WHOLE):
            continue
        rest = source.read_at(stop - position, position)
        bound = min(OFFSET_MAX, max(end, expected, _reserved_end(state)) + OFFSETS_AHEAD)
        found = resync(rest, 0, salt_crc, FRAME_BYTES_LIMIT, expected, bound)
        base = max(end, expected) if found is None else int(HEADER.unpack_from(rest, found)[0])
        yield Unreadable(
            byte=position,
            stop=stop if found is None else position + found,
            gap=Gap(expected, base, Reason.DAMAGED),
            verdict=scan.verdict if buffer else Verdict.TORN,
            is_followed=found is not None,
        )
        if found is None:
            return
        position, expected = position + found, base


def _reserved_end(state: ControlFrame | None) -> int:
    """The offsets that the owner had reserved by the last state frame. It is decoded only where damage follows."""
    return decode_state(state.buffer, state.position, state.head).reserved_end if state is not None else 0


def _whole(buffer: bytes, origin: int, scan: Scan) -> Iterator[DataFrames | ControlFrame]:
    parts = list(_parts(scan))
    for number, (frames, position) in enumerate(parts, start=1):
        ends_read = number == len(parts)
        if isinstance(frames, FrameTable) or frames.kind == Kind.DATA:
            yield DataFrames(buffer, origin, position, frames, ends_read)
        else:
            yield ControlFrame(buffer, origin, position, frames, ends_read)


def _parts(scan: Scan) -> Iterator[tuple[FrameTable | FrameHead, int]]:
    """Everything in order: many data frames without producers as a table, any other by itself."""
    if not scan.is_table:
        yield from zip(scan.heads, scan.positions, strict=True)
        return
    table = scan.table
    plain = (table.kind == int(Kind.DATA)) & (table.run_count == 0)
    edges: list[int] = (np.flatnonzero(plain[1:] != plain[:-1]) + 1).tolist()
    for first, stop in pairwise([0, *edges, len(plain)]):
        rows = FrameTable(*[field[first:stop] for field in table])
        if stop > first and plain[first]:
            yield rows, int(rows.position[0])
            continue
        for position, *head in zip(*[field.tolist() for field in rows], strict=True):
            yield FrameHead(*head), position
