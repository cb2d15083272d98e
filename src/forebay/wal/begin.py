"""Act on what recovery decided: leave the directory sound and hand over a log that takes appends.

Every step may be repeated after a crash in the middle of it. What is cut is first copied to `aside/`;
what is kept is synced before anybody sees it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from forebay.clock import Clock
from forebay.disk import Disk, File, make_directories, replace_file
from forebay.format.live import Live
from forebay.records import Gap
from forebay.settings import WalSettings
from forebay.topics import Durability
from forebay.wal.active import ActiveFile
from forebay.wal.files import FileList, LogFile, walked
from forebay.wal.live import LiveFile, read_live
from forebay.wal.log import Wal
from forebay.wal.scan import LogScan
from forebay.wal.survey import Survey
from forebay.wal.writer import Floors, ShardPlace, Writer

ASIDE = "aside"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where the log goes on: at `next_offset`, behind `gap` if there is one."""

    next_offset: int
    gap: Gap | None = None


def begin(
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
) -> Wal:
    """The shard's log, ready. Writes nothing where nothing needs repair."""
    _drop_leftovers(disk, facts)
    files = FileList([*facts.sealed, *map(walked, facts.logs[:-1])])
    writer = Writer(
        place,
        settings,
        disk=disk,
        clock=clock,
        files=files,
        window=facts.window,
        zstd_level=zstd_level,
        reserve=reserve,
    )
    if facts.last is not None:
        _settle(disk, facts.last)
        _resume(writer, files, facts.last, start, clock)
    elif start.next_offset:
        writer.end = writer.durable = start.gap.start if start.gap is not None else start.next_offset
        writer.opening_gap = start.gap
    if reserve is not None:
        writer.reserved_end = reserved_end
    if facts.is_empty:
        # One that has a file in it got its own name made durable before.
        make_directories(disk, place.directory)
    assert writer.next == start.next_offset
    live = LiveFile(disk, place.directory)
    newest = files.all[-1] if files.all else None
    if isinstance(newest, LogFile) and _is_outdated(read_live(disk, place.directory), newest):
        # Other processes go by it from now on: it must not promise what recovery has cut.
        live.publish(newest, writer)
    return Wal(writer, files, durability=durability, live=live)


def _is_outdated(live: Live | None, newest: LogFile) -> bool:
    return live is None or (live.file_start, live.end) != (newest.start, newest.end) or live.position > newest.limit


def _resume(writer: Writer, files: FileList, last: LogScan, start: Start, clock: Clock) -> None:
    state = last.state
    assert state is not None
    writer.floors = Floors(state.earliest, state.evict_floor)
    if start.gap is None and not last.ends_damaged:
        active = ActiveFile(last, clock.monotonic())
        files.add(active)
        writer.resume(active, last)
        return
    writer.resume_behind(last.end, last.reserved_end)
    if last.frames == 0 and not last.ends_damaged:
        # A file without records only opened this place; the next one will say all that it said.
        writer.end = writer.durable = last.previous_end
        writer.obsolete = last.path
        gap = start.gap or Gap(last.end, start.next_offset, last.gaps[-1].reason)
        writer.opening_gap = Gap(last.previous_end, start.next_offset, gap.reason)
        return
    files.add(walked(last))
    writer.opening_gap = start.gap


def _drop_leftovers(disk: Disk, facts: Survey) -> None:
    for name in facts.leftovers:
        with contextlib.suppress(FileNotFoundError):
            disk.unlink(f"{facts.directory}/{name}")


def _settle(disk: Disk, last: LogScan) -> None:
    """Set the torn tail aside, cut it, and make what stays durable before anyone reads it."""
    if last.torn_bytes and not last.ends_damaged:
        directory, _, name = last.path.rpartition("/")
        make_directories(disk, f"{directory}/{ASIDE}")
        replace_file(disk, f"{directory}/{ASIDE}/{name}.{last.stop}", _rest(last.file, last.stop))
        last.file.truncate(last.stop)
        last.torn_bytes = 0
        last.file.sync()
    elif not last.clean:
        last.file.sync()


def _rest(file: File, position: int) -> bytes:
    return file.read_at(max(0, file.size() - position), position)
