"""A log that was closed in order opens without a walk: its checkpoint says what a walk over the newest file would find.

The owner writes that down at a clean stop, after the last sync. The next opening believes it only if the newest file
still is that file: same salt, same length, the very clean mark as its last frame, and its first state whole. Else the
file is walked, as it is without a checkpoint. A clean mark is taken back before a record is written behind it
(decision 0006): a file that has grown is longer, so an older checkpoint is not believed for it.

Knows frames and files; changes nothing on disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from forebay.appends.producer_window import ProducerWindow
from forebay.disk import File
from forebay.errors import Corrupt, UnsupportedFormat
from forebay.format.checksum import salted
from forebay.format.control.frames import State, decode_mark, decode_state, encode_gap, encode_state
from forebay.format.files.checkpoint import Checkpoint, CleanFile
from forebay.format.files.live import Live
from forebay.format.files.segment import HEADER_BYTES, SegmentHeader, decode_header, parse_segment_name
from forebay.format.frame.head import FrameHead, Kind, Verdict, read_frame
from forebay.records import Reason
from forebay.sealed import FRAME_BYTES_LIMIT
from forebay.wal.scan import LogScan

if TYPE_CHECKING:
    from forebay.wal.writer import ActiveFile, Writer

INDEX_STEP_BYTES = 64 * 1024
"""So far apart are the frames whose places are written down."""
CONTROL_BYTES_MAX = 1024 * 1024
"""Larger windows and deletes are not written down: the next opening walks the file."""
FIRST_READ_BYTES = 4096
"""The first state of a file is read in one read of this size, or whole if it is larger."""


def clean_file(writer: Writer) -> CleanFile | UnsetType:
    """What the next opening is to know of the newest file. The log was closed in order; its files may be closed."""
    active = writer.active
    if active is None or not active.clean_mark or _has_damage(writer, active):
        return UNSET
    stamp = writer.stamp(active.salt_crc)
    floor, frame_bytes_max = writer.removals.floor, writer.settings.frame_bytes_max
    state = State(
        reserved_end=writer.reserved_end,
        previous_end=active.opened_behind,
        earliest=floor.earliest,
        evict_floor=floor.evict_floor,
        identity="",
        window=tuple(writer.window.entries()),
        restated=True,
    )
    control = [
        *encode_state(state, frame_bytes_max=frame_bytes_max, **stamp | {"epoch": active.state_epoch}),
        *(encode_gap(gap, **stamp) for gap in active.gaps),
        *writer.removals.frames(frame_bytes_max, stamp),
    ]
    if sum(map(len, control)) > CONTROL_BYTES_MAX:
        return UNSET
    offsets, positions = active.index.thinned(INDEX_STEP_BYTES)
    return CleanFile(
        start=active.start,
        epoch=active.header.epoch,
        salt=active.header.salt,
        mark=active.clean_mark,
        end=writer.end,
        frames=active.frames,
        control=b"".join(control),
        offsets=offsets,
        positions=positions,
    )


def _has_damage(writer: Writer, active: ActiveFile) -> bool:
    """Whether damage in the file is known: each opening walks it, says so, and knows what the window lacks."""
    damaged = any(gap.reason is Reason.DAMAGED for gap in active.gaps)
    return active.has_blind or writer.window.is_partial or damaged


def recalled(file: File, window: ProducerWindow, checkpoint: Checkpoint | None, live: Live | None) -> LogScan | None:
    """The facts of the newest file, without a walk; `None` if it is not as a clean stop left it."""
    if checkpoint is None or not checkpoint.clean or isinstance(checkpoint.last, UnsetType):
        return None
    last, position = checkpoint.last, checkpoint.clean_position
    if live is not None and (live.doubtful or live.durable > last.end):
        return None
    header = decode_header(file.read_at(HEADER_BYTES, 0))
    if isinstance(header, Verdict) or file.size() != position or checkpoint.durable != last.end:
        return None
    if not _is_of(last, header, file) or not _is_opened(file, header) or not _ends_clean(file, position, header, last):
        return None
    scan = LogScan(file, header, window)
    try:
        scan.recall(last, position)
    except (Corrupt, UnsupportedFormat):
        window.clear()
        return None
    return scan


def _is_of(last: CleanFile, header: SegmentHeader, file: File) -> bool:
    """Whether it is the file that the checkpoint describes, under its own name."""
    named = parse_segment_name(file.path.rpartition("/")[2])
    described = (last.start, last.epoch)
    return described == named == (header.start, header.epoch) and last.salt == header.salt


def _ends_clean(file: File, position: int, header: SegmentHeader, last: CleanFile) -> bool:
    """Whether the file ends in the very mark of the checkpoint, and that mark says the same."""
    head = read_frame(last.mark, 0, salted(header.salt), FRAME_BYTES_LIMIT)
    if not isinstance(head, FrameHead) or head.kind != Kind.MARK or head.length != len(last.mark):
        return False
    if not decode_mark(last.mark, 0, head) or (head.base, head.durable) != (last.end, last.end):
        return False
    return bytes(file.read_at(len(last.mark), position - len(last.mark))) == last.mark


def _is_opened(file: File, header: SegmentHeader) -> bool:
    """Whether the state that the file begins with is whole: no later walk could use the file without it."""
    for length in (FIRST_READ_BYTES, FRAME_BYTES_LIMIT):
        data = bytes(file.read_at(length, HEADER_BYTES))
        head = read_frame(data, 0, salted(header.salt), FRAME_BYTES_LIMIT)
        if isinstance(head, FrameHead):
            return head.kind == Kind.STATE and decode_state(data, 0, head).restated
        if head is not Verdict.TORN:
            return False
    return False
