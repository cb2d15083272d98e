"""How much one body may hold."""

from __future__ import annotations

from typing import NamedTuple

from forebay.errors import TooLarge


class BodyLimits(NamedTuple):
    """What a body may hold: bytes once it is decompressed, and records."""

    bytes_max: int
    records_max: int

    def check_bytes(self, size: int) -> None:
        """`TooLarge` for so many bytes."""
        if size > self.bytes_max:
            raise TooLarge(f"a body of {size} bytes; the limit is {self.bytes_max}: send less", limit=self.bytes_max)

    def check_records(self, count: int) -> None:
        """`TooLarge` for so many records."""
        if count > self.records_max:
            raise TooLarge(
                f"{count} records in one body; the limit is {self.records_max}: send fewer", limit=self.records_max
            )
