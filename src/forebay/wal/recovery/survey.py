"""States the facts of a shard's directory after any kind of stop: which files there are, and where the log ends.

Changes nothing, so that every process may run it at any time. Sealed files are known by their names and the
checkpoint; the newest file is walked in full, and so are files that were not sealed in time. An owner may trust the
checkpoint of a log that was closed in order, and walk nothing. Knows frames and the disk; knows nothing of topics,
metadata or what is to be done about the facts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forebay.appends.producer_window import ProducerWindow
from forebay.disk import Disk, File
from forebay.errors import Corrupt, UnsupportedFormat
from forebay.format.files.checkpoint import Checkpoint, decode_checkpoint
from forebay.format.files.live import Live
from forebay.format.files.segment import (
    HEADER_BYTES,
    INDEX_SUFFIX,
    SegmentHeader,
    decode_header,
    index_name,
    parse_segment_name,
    segment_name,
)
from forebay.format.frame.head import Verdict
from forebay.records import Gap, Reason
from forebay.settings import WalSettings
from forebay.wal.clean import recalled
from forebay.wal.files import SealedFile, read_footer
from forebay.wal.removals import Blind
from forebay.wal.scan import LogScan
from forebay.wal.tail import LIVE_NAME, read_live

CHECKPOINT_NAME = "checkpoint"
TEMPORARY_SUFFIX = ".tmp"

Progress = Callable[[int], None]


@dataclass(slots=True, kw_only=True)
class Survey:
    """The facts. `end` is the end of the last whole frame; `logs` are files without an index, oldest first."""

    directory: str
    sealed: list[SealedFile] = field(default_factory=list)
    logs: list[LogScan] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    """Names of files that an interrupted step left half-made, or that hold nothing and are not needed."""
    damage: list[Gap] = field(default_factory=list)
    doubtful: bool = False
    """A write or sync of the newest file has failed: though it can be read, the disk may not have all of it."""
    is_short: bool = False
    """The system has dropped what it could not sync: in this life of the machine readers have seen more of it."""
    begins: int = 0
    """The first offset that the files answer for. What lay before it they do not show."""
    live: Live | None = None
    """What the owner before published last, if there is anything to go by."""
    window: ProducerWindow

    @property
    def is_empty(self) -> bool:
        return not self.logs and not self.sealed

    @property
    def last(self) -> LogScan | None:
        """The newest file."""
        return self.logs[-1] if self.logs else None

    @property
    def end(self) -> int:
        return self.logs[-1].end if self.logs else 0

    @property
    def epoch(self) -> int:
        """The epoch of the newest state frame; 0 without a log."""
        return self.logs[-1].state_epoch if self.logs else 0

    @property
    def reserved_end(self) -> int:
        return self.logs[-1].reserved_end if self.logs else 0

    @property
    def identity(self) -> str:
        """The boot and mount under which the newest records were written."""
        state = self.logs[-1].state if self.logs else None
        return state.identity if state is not None else ""

    @property
    def clean(self) -> bool:
        """The log was closed in order and nothing has touched it since."""
        return bool(self.logs) and self.logs[-1].clean

    @property
    def undone(self) -> tuple[Blind, ...]:
        """Damaged places of the newest file that may have held deletes: it restates those of the files before."""
        return tuple(self.logs[-1].blind) if self.logs else ()

    @property
    def torn_bytes(self) -> int:
        return self.logs[-1].torn_bytes if self.logs else 0


def survey(
    disk: Disk,
    directory: str,
    settings: WalSettings,
    on_bytes: Progress | None = None,
    *,
    writable: bool = True,
    trusting: bool = False,
) -> Survey:
    """State what is there. `on_bytes` is given the bytes walked; with `writable` the newest file is open for it.

    With `trusting`, a log that was closed in order is not walked: its newest file is as its checkpoint says. Damage
    inside it shows when it is read.
    """
    window = ProducerWindow(settings.producers_max, settings.producer_appends_max)
    facts = Survey(directory=directory, window=window)
    names = disk.list_directory(directory) if disk.exists(directory) else []
    segments = sorted(name for name in names if parse_segment_name(name) is not None)
    facts.leftovers = _leftovers(names, segments)
    if not segments:
        return facts
    live = facts.live = read_live(disk, directory)
    newest_file = disk.open(f"{directory}/{segments[-1]}", writable=writable)
    checkpoint = read_checkpoint(disk, directory) if CHECKPOINT_NAME in names else None
    proof = max(live.durable if live else 0, checkpoint.durable if checkpoint else 0)
    known = recalled(newest_file, window, checkpoint, live) if trusting else None
    newest = known or _scan_newest(newest_file, window, proof, on_bytes)
    if live is not None and live.doubtful and live.file_start == newest.start:
        facts.doubtful, facts.is_short = True, newest.end < live.end
    files: list[SealedFile | LogScan] = [newest]
    indexed = indexed_files(disk, directory, segments[:-1])
    # From the newest back: each file says up to where the one before it had been durable.
    for name in reversed(segments[:-1]):
        found = indexed.get(name) or _scan(disk, f"{directory}/{name}", files[-1].previous_end, on_bytes)
        if found is not None:
            files.append(found)
    files.reverse()
    _link(facts, files)
    return facts


def _leftovers(names: Sequence[str], segments: Sequence[str]) -> list[str]:
    """What only an interrupted step leaves: half-made files, and what stood beside segments that are gone."""
    beside = {index_name(segment) for segment in segments}
    beside |= {LIVE_NAME, CHECKPOINT_NAME} if segments else set()
    suspect = [name for name in names if name in (LIVE_NAME, CHECKPOINT_NAME) or name.endswith(INDEX_SUFFIX)]
    orphans = [name for name in suspect if name not in beside]
    return [name for name in names if name.endswith(TEMPORARY_SUFFIX)] + orphans


def has_log(disk: Disk, directory: str) -> bool:
    """Whether there is any log file in this directory."""
    return disk.exists(directory) and any(map(parse_segment_name, disk.list_directory(directory)))


def tail_bytes(disk: Disk, directory: str) -> int:
    """About how many bytes a survey of this directory will walk: the size of the newest file."""
    try:
        names = disk.list_directory(directory)
    except FileNotFoundError:
        return 0
    segments = [name for name in names if parse_segment_name(name) is not None]
    if not segments:
        return 0
    file = disk.open(f"{directory}/{max(segments)}")
    try:
        return file.size()
    finally:
        file.close()


def _scan_newest(file: File, window: ProducerWindow, proof: int, on_bytes: Progress | None) -> LogScan:
    path = file.path
    header = _header(file)
    if isinstance(header, Verdict):
        raise Corrupt(f"{path} has a {header.value} header, so where the log ends is unknown: restore it from a backup")
    # The newest file alone rebuilds the window: its first state frame restates all that came before.
    scan = LogScan(file, header, window)
    scan.run(file.size(), proof=proof, on_bytes=on_bytes)
    if not scan.opened:
        raise Corrupt(f"{path} has no state frame, so where the log ends is unknown: restore it from a backup")
    return scan


def _scan(disk: Disk, path: str, proof: int, on_bytes: Progress | None) -> LogScan | None:
    """Walk an older file. One whose header is gone holds nothing that can be checked: `None`."""
    file = disk.open(path)
    header = _header(file)
    if isinstance(header, Verdict):
        file.close()
        return None
    scan = LogScan(file, header, ProducerWindow(1, 1))
    scan.run(file.size(), proof=proof, on_bytes=on_bytes)
    return scan


def _header(file: File) -> SegmentHeader | Verdict:
    header = decode_header(file.read_at(HEADER_BYTES, 0))
    if header is Verdict.NEWER:
        raise UnsupportedFormat(f"{file.path} was written by a newer version: upgrade")
    if isinstance(header, SegmentHeader):
        _check_name(file.path, header)
    return header


def _check_name(path: str, header: SegmentHeader) -> None:
    named = parse_segment_name(path.rpartition("/")[2])
    if named != (header.start, header.epoch):
        raise Corrupt(
            f"{path} says inside that it starts at {header.start} in epoch {header.epoch}: it was renamed; "
            "give it its own name back"
        )


def _link(facts: Survey, files: list[SealedFile | LogScan]) -> None:
    """Sort the files into the facts and name what is missing between them."""
    expected = facts.begins = files[0].previous_end if files[0].start else 0
    for file in files:
        previous = expected if file.start == expected else file.previous_end
        if previous < expected:
            expected = _void(facts, previous, file)
        if previous > expected:
            facts.damage.append(Gap(expected, previous, Reason.DAMAGED))
        if isinstance(file, LogScan):
            facts.logs.append(file)
            facts.damage += [gap for gap in file.gaps if gap.reason is Reason.DAMAGED]
        else:
            facts.sealed.append(file)
        expected = file.end


def _void(facts: Survey, previous_end: int, file: SealedFile | LogScan) -> int:
    """Frames of an earlier file at or above `previous_end` count for nothing; the end of what counts."""
    before = facts.logs[-1] if facts.logs else None
    if before is not None and before.is_bare and before.previous_end <= previous_end:
        # It only opened a place that `file` has opened again, further on.
        facts.leftovers.append(before.path.rpartition("/")[2])
        facts.logs.pop().file.close()
        return before.previous_end
    if before is None or before.header.start > previous_end:
        raise Corrupt(f'{file.path} overlaps the file before it at offset {previous_end}: run "forebay verify"')
    before.end = previous_end
    return previous_end


def indexed_files(disk: Disk, directory: str, segments: Sequence[str]) -> dict[str, SealedFile]:
    """Sealed files: those the checkpoint lists, and those whose index has a sound footer that fits."""
    if not segments:
        return {}
    present = set(disk.list_directory(directory))
    checkpoint = read_checkpoint(disk, directory) if CHECKPOINT_NAME in present else None
    listed = {segment_name(entry.start, entry.epoch): entry for entry in (checkpoint.files if checkpoint else ())}
    sealed: dict[str, SealedFile] = {}
    for name in segments:
        if index_name(name) not in present:
            continue
        entry = listed.get(name)
        if entry is not None:
            sealed[name] = SealedFile(disk, f"{directory}/{name}", entry.start, entry.end)
            continue
        footer = read_footer(disk, f"{directory}/{index_name(name)}")
        if footer is not None and (footer.start, footer.epoch) == parse_segment_name(name):
            sealed[name] = SealedFile(disk, f"{directory}/{name}", footer.start, footer.end)
    return sealed


def read_checkpoint(disk: Disk, directory: str) -> Checkpoint | None:
    """The summary written at a clean stop, or when one of the last files was sealed; `None` if it cannot be used."""
    file = disk.open(f"{directory}/{CHECKPOINT_NAME}")
    try:
        found = decode_checkpoint(file.read_at(file.size(), 0))
    finally:
        file.close()
    return found if isinstance(found, Checkpoint) else None
