"""One object as a source of bytes, read in ranges."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Range: TypeAlias = Callable[[int, int], bytes]
"""The bytes `[start, stop)` of one object."""


class ObjectBytes:
    """The bytes of one object; each read is a request, and nothing is held."""

    def __init__(self, fetch: Range, size: int) -> None:
        self._fetch = fetch
        self._size = size

    def size(self) -> int:
        """How many there are."""
        return self._size

    def read_at(self, length: int, position: int) -> bytes:
        """Up to `length` bytes from `position`; fewer only at the end."""
        return self._fetch(position, min(position + length, self._size))

    def close(self) -> None:
        """Nothing is held."""
