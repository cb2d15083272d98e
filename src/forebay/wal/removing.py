"""What ended in a shard's log: deleted offsets and floors, written, restated by every new file, and read back.

Knows frames and the log that they are written to; knows nothing of the records that ended, nor of history.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.errors import Fenced, Indeterminate, Unavailable
from forebay.format.control import NO_FLOOR, Floor, decode_delete, decode_floor, encode_delete, encode_floor, higher
from forebay.format.frame import FrameHead, Kind
from forebay.format.offsets import OffsetSet

if TYPE_CHECKING:
    from forebay.wal.log import Wal

KINDS = (Kind.DELETE, Kind.FLOOR)


class Removals:
    """Deletes that only the log knows of, and the floors. Both only grow, but for deletes that history has taken."""

    __slots__ = ("deletes", "floor")

    def __init__(self, deletes: OffsetSet | None = None, floor: Floor = NO_FLOOR) -> None:
        self.deletes = deletes if deletes is not None else OffsetSet()
        self.floor = floor

    @property
    def is_some(self) -> bool:
        """Whether there is anything to tell."""
        return bool(len(self.deletes)) or self.floor != NO_FLOOR

    def add(self, others: Removals) -> None:
        """These hold too."""
        self.deletes = self.deletes | others.deletes
        self.floor = higher(self.floor, others.floor)

    def take(self, head: FrameHead, buffer: bytes, position: int) -> None:
        """Note what the whole frame of one of `KINDS` at `position` says."""
        if head.kind == Kind.DELETE:
            self.deletes = self.deletes | decode_delete(buffer, position, head)
        else:
            self.floor = higher(self.floor, decode_floor(buffer, position, head))

    def frames(self, frame_bytes_max: int, stamp: dict[str, int]) -> list[bytes]:
        """Frames that say all of it, twice; none where nothing has ended.

        Where a damaged frame had no records, no offset is missing that would tell what it said.
        """
        frames = encode_delete(self.deletes, frame_bytes_max=frame_bytes_max, **stamp)
        if self.floor != NO_FLOOR:
            frames.append(encode_floor(self.floor, **stamp))
        return [*frames, *frames]


def write_removals(wal: Wal, removals: Removals) -> None:
    """End these records, published before, and move the floors; on return the log says so, as its class asks.

    Raises `Unavailable` if nothing was written, and `Indeterminate` if it is not known what will be found.
    """
    wal.group.refuse_inside()
    with wal.committing:
        wal.check_writable()
        if wal.failure is not None:
            raise Unavailable(f"{wal.writer.place}: nothing is deleted, the log is read-only ({wal.failure})")
        trouble = wal.attempt(lambda: _write(wal, removals))
        if trouble is not None:
            if wal.failure is None:
                raise Unavailable(f"{wal.writer.place}: nothing is deleted ({trouble}); try again")
            raise Indeterminate(
                f"{wal.writer.place}: the log failed while a delete was being written ({wal.failure}): what it names "
                "may or may not be gone; repeat it"
            )
        wal.writer.removals.add(removals)
        wal.show_end()
        wal.note_dirty()
    wal.wake()
    wal.group.call_back()


def _write(wal: Wal, removals: Removals) -> None:
    active = wal.writer.remove(removals)
    if wal.policy.syncs_before_ack:
        wal.writer.sync()
    if wal.still_owner is not None and not wal.still_owner():
        raise Fenced(f"{wal.writer.place}: the lease ended before the delete was acknowledged")
    # From here on a healed log keeps it, and other processes see it.
    active.publish(active.end)
