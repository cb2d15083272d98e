"""A log that goes on behind offsets which history holds and it does not. Knows the writer; publishes nothing."""

from __future__ import annotations

from forebay.records import Gap, Reason
from forebay.wal.writer import Writer


def skip_to_history(writer: Writer, stop: int) -> None:
    """History holds everything below `stop`: go on there, in a new file. If it fails, nothing has changed.

    On return the file and its name are durable, and the hole before it says who has those offsets.
    """
    writer.drop_stray()
    writer.sync()
    old, before = writer.active, (writer.end, writer.durable, writer.opening_gap, writer.obsolete)
    start = writer.opening_gap.start if writer.opening_gap is not None else writer.end
    try:
        if old is not None and old.is_bare:
            # It only opened this place; the next one says all that it said.
            start, writer.obsolete = old.previous_end, old.path
        writer.end = writer.durable = start
        writer.opening_gap = Gap(start, stop, Reason.HISTORY)
        writer.create(stop)
    finally:
        if writer.active is old:
            writer.end, writer.durable, writer.opening_gap, writer.obsolete = before
    if old is not None and not old.is_bare:
        old.limit = old.position
    elif old is not None:
        writer.files.forget(old.path)
        old.close()
