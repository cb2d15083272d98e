"""Repairs a log after a failed write or sync: puts what was published into a fresh copy of the file and goes on there.

The failed descriptor is never tried again, since the system may have dropped its unsynced pages. Every
published frame is copied: read back and checked, or taken from the tail cache where the file no longer
gives it; what neither has becomes a named `lost` range. Frames that were never published are left
behind, so an append that failed is gone for good once this returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from forebay.appends.free_space import check_room
from forebay.appends.producer_window import ProducerWindow
from forebay.disk import Disk, File, write_all
from forebay.errors import Corrupt
from forebay.format.control.frames import encode_gap
from forebay.format.files.segment import HEADER_BYTES
from forebay.records import Bytes, Gap, Reason
from forebay.wal.files import FileList
from forebay.wal.scan import LogScan
from forebay.wal.tail import TailCache
from forebay.wal.walk import CHUNK_BYTES, ControlFrame, DataFrames, Unreadable, walk
from forebay.wal.writer import ActiveFile, Writer

TEMPORARY = ".healing.tmp"


class Rebuilt(NamedTuple):
    """What a log goes on with after it was repaired."""

    window: ProducerWindow
    """What the copy remembers of producers."""
    lost: list[Gap]
    """What readers had seen, and neither the file nor memory gave back."""


def rebuild(writer: Writer, files: FileList, cache: TailCache, head: int) -> Rebuilt:
    """Replace the active file by a durable copy of what readers have seen. On return the log is writable at `head`.

    An `OSError`, or `Unavailable` where there is no room for a copy, leaves everything as it was, to be tried again.
    """
    rebuilt = Rebuilt(ProducerWindow(writer.settings.producers_max, writer.settings.producer_appends_max), [])
    window, old = rebuilt.window, writer.active
    if old is None:
        window.extend(writer.window.entries())
        return rebuilt
    disk, path = writer.disk, old.path
    temporary = path + TEMPORARY
    if disk.exists(temporary):
        disk.unlink(temporary)
    check_room(disk, writer.place.directory, old.limit, f"{path} is copied to be written again")
    copy = disk.create(temporary)
    try:
        rebuilt.lost.extend(_copy(disk, old, copy, cache, head, writer))
        copy.sync()
    except OSError:
        # What is left on a full disk is needed more elsewhere.
        with contextlib.suppress(OSError):
            disk.unlink(temporary)
        raise
    finally:
        copy.close()
    # Commit point: the name now leads to the copy, which is complete and durable; the failed file is gone.
    disk.rename(temporary, path)
    disk.sync_directory(writer.place.directory)
    scan = LogScan(disk.open(path, writable=True), old.header, window)
    scan.run(scan.file.size(), proof=head)
    if scan.torn_bytes or scan.ends_damaged:
        raise Corrupt(f"{path} was rewritten and is not whole: the disk does not keep what it is given")
    renewed = ActiveFile(scan, old.created)
    files.replace(old, renewed)
    old.file.close()
    writer.restart_after_failure(renewed, scan)
    return rebuilt


def _copy(disk: Disk, old: ActiveFile, copy: File, cache: TailCache, head: int, writer: Writer) -> list[Gap]:
    """Fill the copy; the ranges that it can only name."""
    source = disk.open(old.path)
    waiting, position = bytearray(), 0
    lost: list[Gap] = []
    try:
        for data in _frames(source, old, cache, head, writer, lost):
            waiting += data
            if len(waiting) >= CHUNK_BYTES:
                write_all(copy, waiting, position)
                position += len(waiting)
                waiting = bytearray()
        write_all(copy, waiting, position)
    finally:
        source.close()
    return lost


def _frames(
    source: File, old: ActiveFile, cache: TailCache, head: int, writer: Writer, lost: list[Gap]
) -> Iterator[Bytes]:
    """The bytes of the copy: header and whole frames below `limit`, with gaps filled or named; and what ended.

    The named ones are added to `lost`.
    """
    yield source.read_at(HEADER_BYTES, 0)
    yield from _published(source, old, cache, head, writer, lost)
    # Said again: a frame without records may be lost unnoticed.
    yield from writer.removals.frames(writer.settings.frame_bytes_max, writer.stamp(old.salt_crc, head))


def _published(
    source: File, old: ActiveFile, cache: TailCache, head: int, writer: Writer, lost: list[Gap]
) -> Iterator[Bytes]:
    for step in walk(source, old.salt_crc, HEADER_BYTES, old.limit, expected=old.start, end=head):
        match step:
            case DataFrames() | ControlFrame():
                yield step.raw
            case Unreadable(gap=gap):
                yield from _missing(old, cache, gap.start, gap.stop, writer, lost)


def _missing(
    old: ActiveFile, cache: TailCache, start: int, stop: int, writer: Writer, lost: list[Gap]
) -> Iterator[Bytes]:
    """Frames for `[start, stop)` from the cache; a `lost` range where the cache has none."""
    while start < stop:
        held = cache.next_frame(start)
        found = min(stop, held.base) if held is not None else stop
        if found > start:
            stamp = writer.stamp(old.salt_crc, found) | {"durable": start}
            lost.append(Gap(start, found, Reason.LOST))
            yield encode_gap(lost[-1], **stamp)
        if held is not None and found < stop:
            yield held.data
        start = held.end if held is not None else stop
