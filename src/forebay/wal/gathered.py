"""A page in the making: frames of a file become batches, whatever is missing between them a named hole.

Knows frames and pages; knows nothing of the disk.
"""

from __future__ import annotations

import numpy as np

from forebay.format.batch import Batch, decode
from forebay.format.control import decode_gap
from forebay.format.frame import FrameHead, Kind, Verdict, read_frame
from forebay.pages import Page
from forebay.records import Gap, Reason
from forebay.wal.scan import FRAME_BYTES_LIMIT, Piece


class Gathered:
    """Everything from `offset` on, until about `bytes_max` are there."""

    def __init__(self, offset: int, bytes_max: int) -> None:
        self.next = offset
        self._left = bytes_max
        self._batches: list[Batch] = []
        self._gaps: list[Gap] = []

    def take(self, piece: Piece) -> bool:
        """Add the frames of a piece; true once the page is full."""
        for head, position in zip(piece.heads, piece.positions, strict=True):
            if head.kind == Kind.DATA:
                if head.base + head.count > self.next and self._records(head, piece.buffer, position):
                    return True
            elif head.kind == Kind.GAP:
                self.hole(decode_gap(piece.buffer, position, head))
        return False

    def _records(self, head: FrameHead, buffer: bytes, position: int) -> bool:
        if self._batches and self._left < head.length:
            return True
        if head.base > self.next:
            # Between two whole frames there is no byte for these offsets: only stepping over damage leaves that.
            self.hole(Gap(self.next, head.base, Reason.DAMAGED))
        self._left -= head.length
        batch = decode(buffer, position, head)
        self._batches.append(batch.slice(self.next, batch.end) if batch.base < self.next else batch)
        self.next = batch.end
        return False

    def known_frame(self, entry: np.void, buffer: bytes, origin: int, salt_crc: int) -> None:
        """Add the frame that an index names; one that is not whole is a hole."""
        first, count = int(entry["offset"]), int(entry["count"])
        position = int(entry["position"]) - origin
        head = read_frame(buffer, position, salt_crc, FRAME_BYTES_LIMIT)
        if isinstance(head, Verdict) or head.base != first or head.count != count:
            self.hole(Gap(first, first + count, Reason.DAMAGED))
            return
        batch = decode(buffer, position, head)
        self._batches.append(batch.slice(self.next, batch.end) if batch.base < self.next else batch)
        self.next = batch.end

    def hole(self, gap: Gap) -> None:
        """Add a hole, as far as it lies ahead."""
        if gap.stop > self.next:
            self._gaps.append(gap._replace(start=self.next))
            self.next = gap.stop

    def page(self) -> Page:
        """What has been gathered."""
        return Page(self._batches, self._gaps, self.next)
