"""The bytes of an upload on their way to the library: counted and summed up, their end and their failure remembered.

Whether the source came to its end decides what a failed upload means: before it, nothing can have become visible.
Behind it, what is found under the key is compared with the sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from forebay.format.checksum import crc32
from forebay.records import Bytes


class Feed:
    """One upload's source."""

    def __init__(self, source: Iterable[Bytes]) -> None:
        self._source = iter(source)
        self.size = 0
        self._crc = 0
        self.ended = False
        self.failure: BaseException | None = None

    def first(self, bytes_max: int) -> list[Bytes]:
        """Pieces up to about `bytes_max`; all of them if `ended` is true afterwards."""
        pieces: list[Bytes] = []
        while self.size < bytes_max and (piece := self._next()) is not None:
            pieces.append(piece)
        return pieces

    def all(self, pieces: list[Bytes]) -> Iterator[Bytes]:
        """The given pieces and then the rest."""
        return chain(_drained(pieces), iter(self._next, None))

    def is_same(self, content: Iterable[bytes]) -> bool:
        """Whether these bytes are those that went through here."""
        size = crc = 0
        for piece in content:
            size, crc = size + len(piece), crc32(piece, crc)
        return (size, crc) == (self.size, self._crc)

    def _next(self) -> Bytes | None:
        while True:
            try:
                piece = next(self._source, None)
            except BaseException as error:
                self.failure = error
                raise
            if piece is None:
                self.ended = True
                return None
            length = piece.nbytes if isinstance(piece, memoryview) else len(piece)
            if length:
                self.size += length
                self._crc = crc32(piece, self._crc)
                return piece


def _drained(pieces: list[Bytes]) -> Iterator[Bytes]:
    """The pieces, each forgotten once it is handed over."""
    pieces.reverse()
    while pieces:
        yield pieces.pop()
