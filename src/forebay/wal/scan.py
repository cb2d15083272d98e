"""What stands in a log file? Walk its frames from the front and tell facts; change nothing.

Knows frames and files; decides nothing but "torn or damaged": the log ends at the first frame that
is not whole, unless something further on proves that this place had been durable. Then it is damage,
which is named and stepped over, never cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from forebay.appends.producer_window import ProducerWindow
from forebay.disk import File
from forebay.errors import Corrupt, UnsupportedFormat
from forebay.format.checkpoint import CleanFile
from forebay.format.checksum import salted
from forebay.format.control import State, WindowEntry, decode_gap, decode_mark, decode_state
from forebay.format.frame import HEADER, FrameHead, Kind, Scan, Verdict, resync, runs_of, scan_frames
from forebay.format.scan import FrameTable
from forebay.format.segment import HEADER_BYTES, SegmentHeader
from forebay.records import OFFSET_MAX, Bytes, Gap, Reason
from forebay.sealed import FRAME_BYTES_LIMIT, ByteSource
from forebay.wal.blind import Blind, Told, has_clean_mark, is_told
from forebay.wal.removing import KINDS, Removals
from forebay.wal.sparse import SparseIndex

CHUNK_BYTES = 4 * 1024 * 1024
OFFSETS_AHEAD = 2**33
"""How far above the expected offset a frame behind a damaged place may lie."""


class Piece(NamedTuple):
    """Whole frames read together. `positions` are in `buffer`, which begins at byte `origin` of the file."""

    buffer: bytes
    origin: int
    scan: Scan
    stop: int
    """The byte of the file behind the last whole frame."""
    verdict: Verdict
    """What stands there; `WHOLE` if the end was reached or more pieces follow."""

    @property
    def heads(self) -> list[FrameHead]:
        return self.scan.heads

    @property
    def positions(self) -> list[int]:
        return self.scan.positions

    @property
    def end(self) -> int:
        """The offset behind all frames; 0 without any."""
        if self.scan.is_table:
            table = self.scan.table
            return int((table.base.view(np.int64) + table.count).max(initial=0))
        return max((head.end for head in self.scan.heads), default=0)

    def parts(self) -> Iterator[FrameTable | tuple[FrameHead, int]]:
        """Everything in order: many data frames without producers as a table, any other as head and position."""
        if not self.scan.is_table:
            yield from zip(self.scan.heads, self.scan.positions, strict=True)
            return
        table = self.scan.table
        plain = (table.kind == int(Kind.DATA)) & (table.run_count == 0)
        edges: list[int] = (np.flatnonzero(plain[1:] != plain[:-1]) + 1).tolist()
        for first, stop in pairwise([0, *edges, len(plain)]):
            rows = FrameTable(*[field[first:stop] for field in table])
            if stop > first and plain[first]:
                yield rows
                continue
            for position, *head in zip(*[field.tolist() for field in rows], strict=True):
                yield FrameHead(*head), position


def pieces_of(
    file: ByteSource, salt_crc: int, start: int, stop: int, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[Piece]:
    """The frames of `[start, stop)` in bounded pieces, up to the first place that is not whole."""
    position, want = start, chunk_bytes
    while position < stop:
        buffer = bytes(file.read_at(min(want, stop - position), position))
        scan = scan_frames(buffer, 0, salt_crc, FRAME_BYTES_LIMIT)
        # A file may be shorter than it should be: then no larger read gives more.
        ended = len(buffer) < want or position + want >= stop
        if scan.verdict is Verdict.TORN and not ended:
            if not scan.stop:
                want *= 2
                continue
            yield Piece(buffer, position, scan, position + scan.stop, Verdict.WHOLE)
        else:
            verdict = Verdict.TORN if not buffer else scan.verdict
            yield Piece(buffer, position, scan, position + scan.stop, verdict)
            if verdict is not Verdict.WHOLE:
                return
        position, want = position + scan.stop, chunk_bytes


def note_producers(window: ProducerWindow, head: FrameHead, buffer: Bytes, position: int) -> None:
    """Remember the appends of a data frame that may be repeated."""
    offset = head.base
    for run in runs_of(buffer, position, head) if head.run_count else ():
        if run.producer:
            window.add(WindowEntry(run.producer, run.sequence, 1, run.count, offset))
        offset += run.count


def note_state(window: ProducerWindow, state: State) -> None:
    """Remember what a state frame says of appends that may be repeated."""
    if state.restated:
        window.clear()
    window.extend(state.window)


def is_bare(frames: int, gaps: Sequence[Gap]) -> bool:
    """Whether a file with so many data frames and these gaps holds no record, nor did in a frame that is damaged."""
    return not frames and not any(gap.reason is Reason.DAMAGED for gap in gaps)


class LogScan:
    """The facts of one log file, gathered in one pass."""

    def __init__(self, file: File, header: SegmentHeader, window: ProducerWindow) -> None:
        self.file = file
        self.header = header
        self.end = header.start
        self.index = SparseIndex()
        self.window = window
        self.state: State | None = None
        self.state_epoch = 0
        self.reserved_end = 0
        self.durable = 0
        self.clean = False
        """Nothing follows the mark of a clean stop, but deletes and floors."""
        self.closed = False
        """No record follows the mark of a clean stop, though other frames may."""
        self.gaps: list[Gap] = []
        self.blind: list[Blind] = []
        """Places without records that are not whole, where a delete may have stood that is told nowhere else."""
        self.removals = Removals()
        self._told = Told()
        self.frames = 0
        self.stop = 0
        self.size = 0
        self.torn_bytes = 0
        self.ends_damaged = False
        self.opened = False
        """The state that a file begins with was found: it restates what came before."""
        self.previous_end = header.start
        self._salt_crc = salted(header.salt)

    @property
    def path(self) -> str:
        return self.file.path

    @property
    def start(self) -> int:
        return self.header.start

    @property
    def is_bare(self) -> bool:
        """No record stands in the file, nor did one in a frame that is damaged now."""
        return is_bare(self.frames, self.gaps)

    def run(self, size: int, *, proof: int, on_bytes: Callable[[int], None] | None = None) -> None:
        """Walk the file up to byte `size`, from where the last walk ended.

        `proof` is an offset known from elsewhere to have been durable.
        """
        self.size = size
        position = self.stop = max(self.stop, HEADER_BYTES)
        while position < size:
            verdict = Verdict.WHOLE
            for piece in pieces_of(self.file, self._salt_crc, position, size):
                self._take(piece)
                if on_bytes is not None:
                    on_bytes(piece.stop - position)
                position, verdict = piece.stop, piece.verdict
            self.stop = position
            if verdict is Verdict.WHOLE:
                break
            if verdict is Verdict.NEWER:
                raise UnsupportedFormat(f"{self.file.path} has at byte {position} a frame of a newer version: upgrade")
            resumed = self._beyond(position, proof)
            if resumed is None:
                return
            position = resumed
        if self.end < proof:
            self._end_at(proof)

    def recall(self, last: CleanFile, position: int) -> None:
        """Know what was told of this file at a clean stop, as if it had been walked up to byte `position`.

        Raises `Corrupt` or `UnsupportedFormat` if what was told is not whole.
        """
        told = scan_frames(last.control, 0, self._salt_crc, FRAME_BYTES_LIMIT)
        if told.verdict is not Verdict.WHOLE or told.stop != len(last.control):
            raise Corrupt(f"{self.file.path}: what its checkpoint tells of it is not whole")
        for head, place in zip(told.heads, told.positions, strict=True):
            self._take_control(head, last.control, place)
        for offset, place in zip(last.offsets, last.positions, strict=True):
            self.index.add(offset, place, None)
        self.frames, self.end, self.durable = last.frames, last.end, last.end
        self.stop = self.size = position
        self.clean = self.closed = True

    def _take(self, piece: Piece) -> None:
        buffer, origin = piece.buffer, piece.origin
        for part in piece.parts():
            if isinstance(part, FrameTable):
                self._take_table(part, origin)
                self._told.copies.clear()
                continue
            head, position = part
            self._told.take(head, buffer, position)
            self.clean = self.clean and head.kind in KINDS
            if head.kind == Kind.DATA:
                self._take_records(head, origin + position, buffer, position)
            else:
                self._take_control(head, buffer, position)
            self.durable = max(self.durable, head.durable)

    def _take_table(self, table: FrameTable, origin: int) -> None:
        """Many small frames without producers."""
        bases = table.base.view(np.int64)
        ends = bases + table.count
        expected = np.concatenate([[self.end], ends[:-1]])
        if (bases != expected).any():
            row = int(np.argmax(bases != expected))
            raise self._contradiction(origin + int(table.position[row]), int(bases[row]), int(expected[row]))
        self.index.add_many(bases, table.position + origin)
        self.frames += len(bases)
        self.clean = self.closed = False
        self.end = int(ends[-1])
        self.durable = max(self.durable, int(table.durable.max()))

    def _contradiction(self, place: int, found: int, expected: int) -> Corrupt:
        return Corrupt(
            f"{self.file.path} at byte {place} goes on with offset {found}, expected {expected}: "
            'the file contradicts itself; run "forebay verify"'
        )

    def _take_records(self, head: FrameHead, place: int, buffer: bytes, position: int) -> None:
        if head.base != self.end:
            raise self._contradiction(place, head.base, self.end)
        self.index.add(head.base, place, None)
        note_producers(self.window, head, buffer, position)
        self.frames += 1
        self.closed = False
        self.end = head.base + head.count

    def _take_control(self, head: FrameHead, buffer: bytes, position: int) -> None:
        if head.kind == Kind.STATE:
            state = decode_state(buffer, position, head)
            if state.restated:
                self.opened = True
                self.previous_end = state.previous_end
            note_state(self.window, state)
            self.state = state
            self.state_epoch = head.epoch
            self.reserved_end = max(self.reserved_end, state.reserved_end)
        elif head.kind == Kind.GAP:
            gap = decode_gap(buffer, position, head)
            self.gaps.append(gap)
            self.end = max(self.end, gap.stop)
        elif head.kind == Kind.MARK:
            self.clean = decode_mark(buffer, position, head)
            self.closed = self.closed or self.clean
        elif head.kind in KINDS:
            self.removals.take(head, buffer, position)

    def _beyond(self, position: int, proof: int) -> int | None:
        """A place that is not whole: `None` if the log ends there, else where it goes on behind the damage."""
        buffer = self.file.read_at(self.size - position, position)
        expected = self.end
        found, proven = self._frames_behind(buffer, expected)
        if found is not None and HEADER.unpack_from(buffer, found)[0] == expected:
            # No offset is missing: a frame without records was lost, such as a mark whose sync failed.
            self._note_blind(position, buffer, found, is_proven=max(proven, proof) > expected)
            return position + found
        if max(proven, proof) <= expected:
            # Right behind a clean mark this is still a clean stop: no record follows one before it is taken back.
            self.torn_bytes = self.size - position
            return None
        self.clean = False
        if found is None:
            self._end_at(proof)
            return None
        base = HEADER.unpack_from(buffer, found)[0]
        if base > expected:
            self.gaps.append(Gap(expected, base, Reason.DAMAGED))
            self.window.lose()
        self.end = base
        return position + found

    def _note_blind(self, position: int, buffer: Bytes, found: int, *, is_proven: bool) -> None:
        behind = scan_frames(buffer, found, self._salt_crc, FRAME_BYTES_LIMIT)
        if not is_told(self._told.copies, buffer, behind):
            proven = is_proven or has_clean_mark(buffer, behind)
            self.blind.append(Blind(position, found, self.end, proven))
        self._told.copies.clear()

    def _end_at(self, proof: int) -> None:
        """Offsets up to `proof` had been durable and are not here."""
        self.gaps.append(Gap(self.end, proof, Reason.DAMAGED))
        self.window.lose()
        self.end = proof
        self.ends_damaged = True
        self.clean = False

    def _frames_behind(self, buffer: bytes, expected: int) -> tuple[int | None, int]:
        """The first whole frame behind the start of `buffer`, and the highest durable mark of all that follow."""
        bound = min(OFFSET_MAX, max(self.reserved_end, expected) + OFFSETS_AHEAD)
        first: int | None = None
        place, proven = 0, 0
        while (found := resync(buffer, place, self._salt_crc, FRAME_BYTES_LIMIT, expected, bound)) is not None:
            first = found if first is None else first
            scan = scan_frames(buffer, found, self._salt_crc, FRAME_BYTES_LIMIT)
            if not scan.heads:
                raise UnsupportedFormat(f"{self.file.path} has a frame of a newer version: upgrade")
            proven = max([proven, *(head.durable for head in scan.heads)])
            place = scan.stop
        return first, proven
