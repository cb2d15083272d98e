"""Which local files may go, now that history holds what they hold? And how one goes, so that no crash leaves a gap.

Knows files and the disk. The caller says what history covers; this frees copies and ends no record's life.
"""

from __future__ import annotations

import contextlib
from itertools import islice

from forebay.disk import Disk
from forebay.format.files.segment import index_name
from forebay.wal.files import FileList, SealedFile


def expired(
    files: FileList,
    covered_end: int,
    *,
    now_ms: int,
    now: float,
    time_s: float,
    bytes_max: int,
    grace_s: float,
) -> list[SealedFile]:
    """The sealed files that may go, oldest first: the front of `files`, all of it below `covered_end`.

    They are older than `time_s` or more than `bytes_max` holds, and no reader has used them within `grace_s` of the
    monotonic time `now`. The newest file never goes: it says where the log goes on. Looks at those that may go and at
    the first that may not, not at the others.
    """
    excess = files.held_bytes() - bytes_max
    gone: list[SealedFile] = []
    listed = files.all
    for file in islice(listed, max(len(listed) - 1, 0)):
        if not isinstance(file, SealedFile) or file.end > covered_end:
            break
        is_old = now_ms - file.footer.appended_max >= time_s * 1000
        is_read = file.read_last and now - file.read_last < grace_s
        if is_read or not (is_old or excess > 0):
            break
        gone.append(file)
        excess -= file.footer.segment_bytes
    return gone


def drop_file(disk: Disk, files: FileList, file: SealedFile) -> None:
    """Remove the oldest file. An `OSError` before it is gone leaves it where it was; it may be tried again."""
    directory = file.path.rpartition("/")[0]
    # Whatever went before is gone for good: else a crash could bring it back without this one, and leave a gap.
    disk.sync_directory(directory)
    with files.replacing:
        # Readers who miss it wait here, and find it off the list then.
        with contextlib.suppress(FileNotFoundError):
            disk.unlink(file.path)
        files.drop(file)
    file.close()
    with contextlib.suppress(OSError):
        # A leftover that the next opening removes.
        disk.unlink(index_name(file.path))
