"""Gathers the facts of one log file in one walk, for recovery and for readers; changes nothing.

Knows frames and files; decides nothing but "torn or damaged": the log ends at the first frame that
is not whole, unless something further on proves that this place had been durable. Then it is damage,
which is named and stepped over, never cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from forebay.appends.producer_window import ProducerWindow
from forebay.disk import File
from forebay.errors import Corrupt, UnsupportedFormat
from forebay.format.checksum import salted
from forebay.format.control.frames import State, WindowEntry, decode_gap, decode_mark, decode_state
from forebay.format.files.checkpoint import CleanFile
from forebay.format.files.segment import HEADER_BYTES, SegmentHeader
from forebay.format.frame.encoding import runs_of
from forebay.format.frame.head import FrameHead, Kind, Verdict
from forebay.format.frame.scan import FrameTable, scan_frames
from forebay.records import Bytes, Gap, Reason
from forebay.sealed import FRAME_BYTES_LIMIT
from forebay.wal.removals import KINDS, Blind, Removals, UnpairedCopies, has_clean_mark, is_recorded_elsewhere
from forebay.wal.sparse import SparseIndex
from forebay.wal.walk import ControlFrame, DataFrames, Unreadable, walk


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
        """Places without records that are not whole, where a delete may have stood that no other frame repeats."""
        self.removals = Removals()
        self._unpaired = UnpairedCopies()
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
        self.size, self.stop = size, max(self.stop, HEADER_BYTES)
        end = max(self.end, self.reserved_end)
        for step in walk(self.file, self._salt_crc, self.stop, size, expected=self.end, end=end):
            match step:
                case DataFrames():
                    self._take_data(step)
                case ControlFrame():
                    self._take_frame(step)
                case Unreadable():
                    if not self._steps_over(step, proof):
                        return
                    self.stop = step.stop
                    continue
            if on_bytes is not None:
                on_bytes(step.stop - self.stop)
            self.stop = step.stop
        if self.end < proof:
            self._end_at(proof)

    def recall(self, last: CleanFile, position: int) -> None:
        """Know what the checkpoint of a clean stop says of this file, as if it had been walked up to byte `position`.

        Raises `Corrupt` or `UnsupportedFormat` if that is not whole.
        """
        found = scan_frames(last.control, 0, self._salt_crc, FRAME_BYTES_LIMIT)
        if found.verdict is not Verdict.WHOLE or found.stop != len(last.control):
            raise Corrupt(f"{self.file.path}: what its checkpoint says of it is not whole")
        for head, place in zip(found.heads, found.positions, strict=True):
            self._take_control(head, last.control, place)
        for offset, place in zip(last.offsets, last.positions, strict=True):
            self.index.add(offset, place, None)
        self.frames, self.end, self.durable = last.frames, last.end, last.end
        self.stop = self.size = position
        self.clean = self.closed = True

    def _take_data(self, data: DataFrames) -> None:
        self._unpaired.copies.clear()
        self.clean = self.closed = False
        if isinstance(data.frames, FrameTable):
            self._take_table(data.frames, data.origin)
        else:
            self._take_records(data.frames, data.origin + data.position, data.buffer, data.position)
        self.durable = max(self.durable, data.durable)

    def _take_frame(self, control: ControlFrame) -> None:
        head, buffer, position = control.head, control.buffer, control.position
        self._unpaired.take(head, buffer, position)
        self.clean = self.clean and head.kind in KINDS
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
        self.end = int(ends[-1])

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

    def _steps_over(self, place: Unreadable, proof: int) -> bool:
        """Whether the log goes on behind a place that is not whole; else it ends there, torn or damaged."""
        if place.verdict is Verdict.NEWER:
            raise self._newer(place.byte)
        expected = self.end
        proven = max(self._durable_behind(place), proof)
        if place.is_followed and place.gap.stop == expected:
            # No offset is missing: a frame without records was lost, such as a mark whose sync failed.
            self._note_blind(place, is_proven=proven > expected)
            return True
        if proven <= expected:
            # Right behind a clean mark this is still a clean stop: no record follows one before it is taken back.
            self.torn_bytes = self.size - place.byte
            return False
        self.clean = False
        if not place.is_followed:
            self._end_at(proof)
            return False
        self.gaps.append(place.gap)
        self.window.lose()
        self.end = place.gap.stop
        return True

    def _note_blind(self, place: Unreadable, *, is_proven: bool) -> None:
        lost = place.stop - place.byte
        rest = self.file.read_at(self.size - place.byte, place.byte)
        behind = scan_frames(rest, lost, self._salt_crc, FRAME_BYTES_LIMIT)
        if not is_recorded_elsewhere(self._unpaired.copies, rest, behind):
            proven = is_proven or has_clean_mark(rest, behind)
            self.blind.append(Blind(place.byte, lost, self.end, proven))
        self._unpaired.copies.clear()

    def _end_at(self, proof: int) -> None:
        """Offsets up to `proof` had been durable and are not here."""
        self.gaps.append(Gap(self.end, proof, Reason.DAMAGED))
        self.window.lose()
        self.end = proof
        self.ends_damaged = True
        self.clean = False

    def _durable_behind(self, place: Unreadable) -> int:
        """The highest durable mark of all frames behind a place that is not whole; 0 without any."""
        if not place.is_followed:
            return 0
        proven, end = 0, max(self.end, self.reserved_end)
        for step in walk(self.file, self._salt_crc, place.stop, self.size, expected=self.end, end=end):
            match step:
                case DataFrames():
                    proven = max(proven, step.durable)
                case ControlFrame():
                    proven = max(proven, step.head.durable)
                case Unreadable():
                    # The walk proper comes to it later; a frame that it cannot judge proves nothing.
                    if step.verdict is Verdict.NEWER:
                        raise self._newer(step.byte)
        return proven

    def _newer(self, byte: int) -> UnsupportedFormat:
        return UnsupportedFormat(f"{self.file.path} has at byte {byte} a frame of a newer version: upgrade")
