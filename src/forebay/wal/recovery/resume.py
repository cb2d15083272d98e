"""Opens a shard's log where recovery decided that it goes on: leaves its directory sound, and gives a writable log.

Every step may be repeated after a crash in the middle of it. What is cut is first copied to `aside/`;
what is kept is synced before a reader sees it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from forebay.appends.free_space import check_room
from forebay.appends.producer_window import ProducerWindow
from forebay.clock import Clock
from forebay.disk import Disk, File, make_directories, replace_file, write_all
from forebay.format.files.live import Live
from forebay.format.files.segment import INDEX_SUFFIX, parse_segment_name
from forebay.records import Gap, Reason
from forebay.settings import RuntimeSettings, WalSettings
from forebay.topics import Durability
from forebay.wal.bounds import MemoryBounds
from forebay.wal.files import FileList, LogFile, walked
from forebay.wal.log import Wal
from forebay.wal.recovery.survey import CHECKPOINT_NAME, TEMPORARY_SUFFIX, Survey
from forebay.wal.scan import LogScan
from forebay.wal.tail import LIVE_NAME, LiveFile, read_live
from forebay.wal.walk import CHUNK_BYTES
from forebay.wal.writer import ActiveFile, ShardPlace, Writer

logger = logging.getLogger(__name__)

ASIDE = "aside"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where the log goes on: at `next_offset`, behind `gap` if there is one.

    What lies between the end of the local log and there, `gap` apart, is held by the history.
    """

    next_offset: int
    gap: Gap | None = None
    set_aside: bool = False
    """The local files are no part of the log that begins."""

    @property
    def history_end(self) -> int:
        """What lies below is in the local log or in the history."""
        return self.gap.start if self.gap is not None else self.next_offset


def resume(
    facts: Survey,
    start: Start,
    place: ShardPlace,
    settings: WalSettings,
    *,
    disk: Disk,
    clock: Clock,
    durability: Durability,
    zstd_level: int | None = None,
    reserve: Callable[[int], int] | None = None,
    reserved_end: int = 0,
    window: ProducerWindow | None = None,
    still_owner: Callable[[], bool] | None = None,
    on_dirty: Callable[[], None] = lambda: None,
    bounds: MemoryBounds | None = None,
) -> Wal:
    """The shard's log, ready. Writes nothing where nothing needs repair.

    `reserve` makes a reservation durable outside, of which `reserved_end` is the present one; else the log does.
    `window` has the producers if no local log has. `still_owner` is asked before each acknowledgement. `on_dirty` is
    called when there may be work for `Upkeep`. `bounds` are those of the process, if the log is not alone.
    """
    assert start.gap is None or start.gap.reason is not Reason.HISTORY
    if start.set_aside:
        facts = _emptied(disk, facts, settings)
    if facts.is_empty and window is not None:
        facts.window = window
    _drop_leftovers(disk, facts)
    files = FileList([*facts.sealed, *map(walked, facts.logs[:-1])], clock)
    writer = Writer(
        place,
        settings,
        disk=disk,
        clock=clock,
        files=files,
        window=facts.window,
        zstd_level=zstd_level,
        reserve=reserve,
        on_short=on_dirty,
    )
    if reserve is not None:
        writer.note_reserved(reserved_end)
    _take_up(writer, files, facts, start)
    if facts.is_empty:
        # One that has a file in it got its own name made durable before.
        make_directories(disk, place.directory)
    assert writer.next == start.next_offset
    live, bounds = _live(writer, facts.live), bounds or MemoryBounds.of(RuntimeSettings(), clock)
    return Wal(writer, files, bounds, durability=durability, live=live, on_dirty=on_dirty, still_owner=still_owner)


def _live(writer: Writer, found: Live | None) -> LiveFile:
    """The shard's `live` file, brought up to date. `found` is what it held at the survey."""
    disk, directory, files = writer.disk, writer.place.directory, writer.files.all
    live = LiveFile(disk, directory)
    newest = files[-1] if files else None
    if isinstance(newest, LogFile) and _is_outdated(found, newest):
        # Other processes go by it from now on: it must not promise what recovery has cut.
        live.publish(newest, writer.place.epoch, writer.durable)
    return live


def set_aside(disk: Disk, directory: str) -> list[str]:
    """Move the log in this directory, which no process has open, to its `aside/`; where its files are then.

    May be repeated after a crash in the middle. The newest segment goes after all others, so that until it is
    gone a survey shows whose log it was.
    """
    names = disk.list_directory(directory) if disk.exists(directory) else []
    segments = sorted(name for name in names if parse_segment_name(name) is not None)
    beside = [name for name in names if name in (LIVE_NAME, CHECKPOINT_NAME) or name.endswith(INDEX_SUFFIX)]
    moved: list[str] = []
    for step in (segments[:-1], segments[-1:], beside):
        if step:
            moved += _move_aside(disk, directory, step)
    return moved


def _move_aside(disk: Disk, directory: str, names: list[str]) -> list[str]:
    """Move these files; on return that is durable."""
    aside = f"{directory}/{ASIDE}"
    make_directories(disk, aside)
    taken = set(disk.list_directory(aside))
    moved: list[str] = []
    for name in names:
        free = (other for number in itertools.count() if (other := f"{name}.{number}" if number else name) not in taken)
        moved.append(f"{aside}/{next(free)}")
        disk.rename(f"{directory}/{name}", moved[-1])
    disk.sync_directory(aside)
    disk.sync_directory(directory)
    return moved


def _emptied(disk: Disk, facts: Survey, settings: WalSettings) -> Survey:
    """The facts once the local files are set aside."""
    for scan in facts.logs:
        scan.file.close()
    for file in facts.sealed:
        file.close()
    moved = set_aside(disk, facts.directory)
    logger.warning("%s: %d files are set aside in %s", facts.directory, len(moved), ASIDE)
    return Survey(
        directory=facts.directory,
        leftovers=facts.leftovers,
        window=ProducerWindow(settings.producers_max, settings.producer_appends_max),
    )


def _is_outdated(live: Live | None, newest: LogFile) -> bool:
    if live is None or live.doubtful:
        return True
    return (live.file_start, live.end) != (newest.start, newest.end) or live.position > newest.limit


def _take_up(writer: Writer, files: FileList, facts: Survey, start: Start) -> None:
    """Go on in the newest file, or with none."""
    last = facts.last
    if last is None:
        writer.resume_at(start.history_end, start.gap)
        return
    _make_durable(writer.disk, last, doubtful=facts.doubtful)
    _resume(writer, files, last, start, writer.clock)
    if facts.is_short and writer.active is None:
        # Now, and not with the first append: nothing else says what is missing once `live` is written again.
        writer.create(writer.next, reserving=False)


def _resume(writer: Writer, files: FileList, last: LogScan, start: Start, clock: Clock) -> None:
    if last.end < start.history_end:
        _resume(writer, files, last, Start(next_offset=last.end), clock)
        writer.skip_to(start.history_end, start.gap, reserving=False)
        return
    opens_history = last.frames == 0 and any(gap.reason is Reason.HISTORY for gap in last.gaps)
    if (start.gap is None or opens_history) and not last.ends_damaged:
        active = ActiveFile(last, clock.monotonic())
        files.add(active)
        # What the history holds before it must not become part of the gap: that goes into this file, then.
        writer.resume(active, last, start.gap)
        return
    if last.is_bare and not last.ends_damaged:
        # A file without records only opened this place; the next one will say all that it said.
        gap = start.gap or Gap(last.end, start.next_offset, last.gaps[-1].reason)
        writer.resume_behind(last, Gap(last.previous_end, start.next_offset, gap.reason), obsolete=True)
        return
    files.add(walked(last))
    writer.resume_behind(last, start.gap)


def _drop_leftovers(disk: Disk, facts: Survey) -> None:
    for name in facts.leftovers:
        with contextlib.suppress(FileNotFoundError):
            disk.unlink(f"{facts.directory}/{name}")


def _make_durable(disk: Disk, last: LogScan, *, doubtful: bool) -> None:
    """Set the torn tail aside, cut it, and make what stays durable before anyone reads it.

    So are the names: a file that was removed, and whose removal is not durable, would be there again after a power cut,
    as the newest one, and what this one got since would count for nothing. A clean mark is written behind that.
    """
    directory, _, name = last.path.rpartition("/")
    if last.torn_bytes and not last.ends_damaged:
        rest = _rest(last.file, last.stop)
        check_room(disk, directory, len(rest), f"the torn end of {last.path} is copied to {ASIDE} before it is cut off")
        make_directories(disk, f"{directory}/{ASIDE}")
        replace_file(disk, f"{directory}/{ASIDE}/{name}.{last.stop}", rest)
        last.file.truncate(last.stop)
        last.torn_bytes = 0
    elif last.clean and not last.removals.is_some and not doubtful:
        return
    if doubtful:
        _copy(disk, last)
    try:
        last.file.sync()
    except OSError:
        _doubt(disk, last)
        raise
    disk.sync_directory(directory)


def _doubt(disk: Disk, last: LogScan) -> None:
    """A sync of the newest file has failed: the next opening in this life of the machine must copy it.

    The system reports that once: another sync would succeed and make nothing durable.
    """
    directory = last.path.rpartition("/")[0]
    shown = Live(last.state_epoch, last.header.epoch, last.start, last.stop, last.durable, last.end, sequence=1)
    live = read_live(disk, directory)
    if live is not None:
        shown = live if live.file_start == last.start else shown._replace(durable=max(live.durable, last.durable))
    LiveFile(disk, directory).doubt(shown)


def _copy(disk: Disk, last: LogScan) -> None:
    """Put a durable copy in the place of a file of which a sync has failed.

    The system reports that once and takes the pages for clean then: another sync would make nothing durable. They are
    not written again in place, because what is durable of them must not be touched.
    """
    check_room(disk, last.path.rpartition("/")[0], last.file.size(), f"{last.path} is copied, for a sync of it failed")
    copy = disk.create(last.path + TEMPORARY_SUFFIX)
    try:
        position = 0
        while data := last.file.read_at(CHUNK_BYTES, position):
            write_all(copy, data, position)
            position += len(data)
        copy.sync()
    except OSError:
        # What is left on a full disk is needed more elsewhere.
        with contextlib.suppress(OSError):
            disk.unlink(copy.path)
        raise
    finally:
        copy.close()
    disk.rename(copy.path, last.path)
    disk.sync_directory(last.path.rpartition("/")[0])
    last.file.close()
    last.file = disk.open(last.path, writable=True)


def _rest(file: File, position: int) -> bytes:
    return file.read_at(max(0, file.size() - position), position)
