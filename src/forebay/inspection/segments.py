"""One segment file under examination: every frame, every checksum, and its index against its bytes.

Knows files and formats; knows nothing of the files beside it beyond the proof it is given.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from forebay.appends.producer_window import ProducerWindow
from forebay.disk import Disk, File
from forebay.errors import Corrupt, UnsupportedFormat
from forebay.format.files.segment import HEADER_BYTES, SegmentHeader, decode_header, index_name, parse_segment_name
from forebay.format.frame.head import Verdict
from forebay.format.index import sections as index_format
from forebay.format.index.sections import FrameEntries
from forebay.inspection.findings import UPGRADE, Report, Severity
from forebay.records import Gap, Reason
from forebay.wal.files import LogFile
from forebay.wal.scan import LogScan
from forebay.wal.sealing import index_of
from forebay.wal.sparse import SparseIndex
from forebay.wal.walk import Unreadable

RESTORE = "restore the file from a backup; readers get this range reported as damaged"
REPAIR = 'run "forebay repair"'
SEALED_SO = "was damaged already when it was sealed, and the operator went on without it"
"""No file is sealed with damage else, unless nothing that can be read is lost by it: see `Upkeep.seal_rotated`."""
UNDONE = "restore the file from a backup, or delete again what should not be there"


class StoredIndex(NamedTuple):
    """An index file as it is: its bytes, and what they say."""

    content: bytes
    footer: index_format.Footer
    entries: FrameEntries
    gaps: list[Gap]

    @property
    def previous_end(self) -> int:
        """Where the file before this one must end."""
        leading = (gap.start for gap in self.gaps if gap.stop == self.footer.start)
        return next(leading, self.footer.start)


@dataclass(slots=True, kw_only=True)
class Examined:
    """What one file turned out to be."""

    name: str
    start: int
    end: int
    previous_end: int
    frames: int
    sealed: bool
    epoch: int = 0
    earliest: int = 0
    torn_bytes: int = 0
    content_hash: str = ""
    """Of the first `bytes` as they are, whatever an index says of them; empty if they cannot be walked."""
    bytes: int = 0
    damage: list[Gap] = field(default_factory=list)
    catalogued: list[Gap] = field(default_factory=list)
    """What it leaves to the history."""


class SegmentExam:
    """The examination of one file. Findings go to the report; what cannot be examined gives `None`."""

    def __init__(self, disk: Disk, directory: str, name: str, shard: str, report: Report) -> None:
        self._disk = disk
        self._path = f"{directory}/{name}"
        self._name = name
        self._shard = shard
        self._report = report
        self.index_is_newer = False
        """The index cannot be read because a newer version wrote it; nothing is wrong with it."""

    def header(self, file: File, shard_id: str) -> SegmentHeader | None:
        """The header, once it checks and fits the file's name and directory."""
        header = decode_header(file.read_at(HEADER_BYTES, 0))
        if header is Verdict.NEWER:
            self._error("was written by a newer version", UPGRADE)
            return None
        if isinstance(header, Verdict):
            self._error(f"its header is {header.value}, so none of its frames can be checked", RESTORE, byte=0)
            return None
        if parse_segment_name(self._name) != (header.start, header.epoch):
            self._error(
                f"says inside that it starts at {header.start} in epoch {header.epoch}", "give it its own name back"
            )
            return None
        if header.shard_id != shard_id:
            self._error(f"belongs to shard {header.shard_id}", "move it back to that shard's directory")
            return None
        return header

    def sealed(self, file: File, header: SegmentHeader, index: StoredIndex) -> Examined:
        """A file with an index: its bytes must be those that were sealed."""
        footer, size = index.footer, file.size()
        examined = Examined(
            name=self._name,
            start=footer.start,
            end=footer.end,
            previous_end=index.previous_end,
            frames=footer.frames,
            sealed=True,
            epoch=footer.epoch_max,
            catalogued=[gap for gap in index.gaps if gap.reason is Reason.HISTORY],
        )
        if (footer.start, footer.epoch) != (header.start, header.epoch):
            self._error(f"its index is of another file, {footer.start} of epoch {footer.epoch}", REPAIR)
            return examined
        if size > footer.segment_bytes:
            self._note(Severity.WARNING, f"has {size - footer.segment_bytes} bytes behind the sealed ones")
        log = log_file(file, header, end=footer.end, limit=min(size, footer.segment_bytes))
        known = [gap for gap in index.gaps if gap.reason is Reason.DAMAGED]
        for gap in known:
            self._report.add(
                Severity.NOTE, SEALED_SO, RESTORE, shard=self._shard, file=self._path, offsets=(gap.start, gap.stop)
            )
        if size < footer.segment_bytes:
            self._error(f"ends at byte {size}, {footer.segment_bytes - size} bytes too early", RESTORE, byte=size)
            examined.damage.append(Gap(footer.end, footer.end, Reason.DAMAGED))
        self._compare(log, index, known, examined)
        return examined

    def _compare(self, log: LogFile, index: StoredIndex, known: list[Gap], examined: Examined) -> None:
        """Work the index out again and hold it against the stored one, which names the whole file by its hash."""
        try:
            content, footer = index_of(log)
        except (Corrupt, UnsupportedFormat) as error:
            self._error(f"a frame whose checksum holds cannot be read: {error}", RESTORE)
            examined.damage.append(Gap(log.start, log.end, Reason.DAMAGED))
            return
        self._report.frames += footer.frames
        self._report.records += footer.records
        examined.content_hash, examined.bytes = footer.content_hash.hex(), footer.segment_bytes
        is_cut = bool(examined.damage)
        examined.damage += known
        if index.content in (content, without_lookups(content)):
            return
        stored = index.footer
        exchanged = (footer.segment_crc, footer.content_hash) != (stored.segment_crc, stored.content_hash)
        damaged = self._places(log, known, severity=Severity.ERROR) if exchanged else []
        examined.damage += damaged
        if is_cut or any(gap not in known for gap in damaged):
            return
        what = "its index does not fit its frames"
        if exchanged:
            what = (
                f"all {'other ' if known else ''}frames are whole, but the file is not the one that was sealed "
                f"(crc {footer.segment_crc:08x}, sealed with {stored.segment_crc:08x})"
            )
        # Of a file with damage the index is the witness of what it held: it is not made again.
        self._error(what + _first_difference(index.entries, content), RESTORE if known else REPAIR)

    def log(self, file: File, header: SegmentHeader, *, size: int, proof: int, published: bool) -> Examined:
        """A file without an index. With `published` its owner says that all of it is whole."""
        scan = LogScan(file, header, ProducerWindow(1, 1))
        try:
            scan.run(size, proof=proof)
        except Corrupt as error:
            self._error(f"contradicts itself: {error}", RESTORE)
        except UnsupportedFormat as error:
            self._error(str(error), UPGRADE)
        if not scan.opened:
            self._error("has no state frame, so it does not say what came before it", RESTORE, byte=HEADER_BYTES)
        log = log_file(file, header, end=scan.end, limit=scan.stop if scan.stop else size)
        damage = [gap for gap in scan.gaps if gap.reason is Reason.DAMAGED]
        self._places(log, [], severity=Severity.NOTE, lost={place.byte for place in scan.blind if place.proven})
        if scan.ends_damaged:
            gap = damage[-1]
            self._error("had been durable further than this", RESTORE, byte=scan.stop, offsets=(gap.start, gap.stop))
        if scan.torn_bytes:
            self._torn(scan, published=published)
        content_hash = self._count(log)
        return Examined(
            name=self._name,
            start=scan.start,
            end=scan.end,
            previous_end=scan.previous_end,
            frames=scan.frames,
            sealed=False,
            epoch=scan.state_epoch,
            earliest=scan.removals.floor.earliest,
            torn_bytes=scan.torn_bytes,
            content_hash=content_hash,
            bytes=log.limit,
            damage=damage,
            catalogued=[gap for gap in scan.gaps if gap.reason is Reason.HISTORY],
        )

    def _torn(self, scan: LogScan, *, published: bool) -> None:
        what = f"ends in {scan.torn_bytes} torn bytes"
        if published:
            self._error(f"{what}, although its owner has published them", RESTORE, byte=scan.stop)
        else:
            step = "nothing to do: they were never acknowledged, and the next opening sets them aside"
            self._report.add(Severity.NOTE, what, step, shard=self._shard, file=self._path, byte=scan.stop)

    def _count(self, log: LogFile) -> str:
        """Count what is there; the hash of its bytes, empty if they cannot be read."""
        try:
            footer = index_of(log)[1]
        except (Corrupt, UnsupportedFormat) as error:
            self._error(f"a frame whose checksum holds cannot be read: {error}", RESTORE)
            return ""
        self._report.frames += footer.frames
        self._report.records += footer.records
        return footer.content_hash.hex()

    def _places(self, log: LogFile, known: list[Gap], *, severity: Severity, lost: Collection[int] = ()) -> list[Gap]:
        """Report what is not whole below the limit. `severity` is for places that no record stood in.

        A crash may take an unsynced control frame and leave those behind it; the log steps over such a place. At those
        that are `lost`, by their bytes, it had been durable, and no copy of it is left.
        """
        found = []
        for place in damaged_places(log):
            byte, gap, verdict = place.byte, place.gap, place.verdict
            if verdict is Verdict.NEWER:
                self._error("has a frame of a newer version", UPGRADE, byte=byte)
            elif byte in lost:
                what = "frames without records are damaged: deletes and floors that they recorded are undone"
                self._error(what, UNDONE, byte=byte, offsets=(gap.start, gap.stop))
            elif gap.start == gap.stop and severity is not Severity.ERROR:
                what = "a frame without records is not whole"
                # Deletes are written twice: most often the other copy is whole.
                step = "nothing to do, unless deleted records are back: then delete them again"
                self._report.add(severity, what, step, shard=self._shard, file=self._path, byte=byte)
                continue
            elif gap not in known:
                self._error(f"the frame is {verdict.value}", RESTORE, byte=byte, offsets=(gap.start, gap.stop))
            found.append(gap)
        return found

    def index(self) -> StoredIndex | None:
        """The index file, if it can be read and holds by its own checksums."""
        path = index_name(self._path)
        file = self._disk.open(path)
        try:
            content = file.read_at(file.size(), 0)
            decoded = index_format.decode_index(content)
        except Corrupt as error:
            self._report.add(Severity.ERROR, str(error), REPAIR, shard=self._shard, file=path)
            return None
        finally:
            file.close()
        if decoded is Verdict.NEWER:
            self.index_is_newer = True
            self._report.add(Severity.ERROR, "was written by a newer version", UPGRADE, shard=self._shard, file=path)
            return None
        if isinstance(decoded, Verdict):
            what = f"its footer is {decoded.value}"
            byte = max(0, len(content) - index_format.FOOTER_BYTES)
            self._report.add(Severity.ERROR, what, REPAIR, shard=self._shard, file=path, byte=byte)
            return None
        return StoredIndex(content, *decoded)

    def _note(self, severity: Severity, what: str) -> None:
        self._report.add(severity, what, "nothing to do: no reader looks there", shard=self._shard, file=self._path)

    def _error(
        self, what: str, next_step: str, *, byte: int | None = None, offsets: tuple[int, int] | None = None
    ) -> None:
        self._report.add(
            Severity.ERROR, what, next_step, shard=self._shard, file=self._path, byte=byte, offsets=offsets
        )


def damaged_places(log: LogFile) -> Iterator[Unreadable]:
    """Each place below the limit that holds no whole frame."""
    return (step for step in log.walk() if isinstance(step, Unreadable))


def log_file(file: File, header: SegmentHeader, *, end: int, limit: int) -> LogFile:
    """The first `limit` bytes of a segment as a log that is to be walked."""
    return LogFile(file, header, index=SparseIndex(), gaps=[], frames=0, end=end, limit=limit)


def without_lookups(content: bytes) -> bytes:
    """The same index as versions wrote it that had no look-ups; where one is stored, it is sound too."""
    decoded = index_format.decode_index(content)
    assert not isinstance(decoded, Verdict), "it was worked out just now"
    return index_format.encode_index(*decoded)


def _first_difference(stored: FrameEntries, content: bytes) -> str:
    decoded = index_format.decode_index(content)
    if isinstance(decoded, Verdict):
        return ""
    entries = decoded[1]
    if len(stored) != len(entries):
        return f": {len(stored)} entries for {len(entries)} frames"
    different = np.flatnonzero(stored != entries)
    return f": entry {int(different[0])} differs" if len(different) else ""
