"""A frame of a few kilobytes that says truly that it holds more than any frame may: it is never unpacked."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

import forebay.format.frame.batch
import forebay.wal.writer
from forebay.errors import ForebayError
from forebay.format.columns.rows import Columns, encode_columns
from forebay.format.frame.batch import RAW_BYTES_MAX, encode_data_frame
from forebay.format.index.lookups import Sought
from forebay.inspection import dump
from forebay.testing.checks.invariants import Violation
from forebay.topics import Durability
from tests.wal.rig import DIRECTORY, Rig, Simulated, simulated

BOMB_BYTES_MAX: Final = 16 * 1024
UNPACKED_BYTES: Final = RAW_BYTES_MAX + 8
MEMORY_BYTES_MAX: Final = 8 * 1024 * 1024


def bomb(**fields: Any) -> bytes:
    """A whole frame of one record, whose columns are a little larger than a frame's may be."""
    frame = bytes(encode_data_frame(**{**fields, "zstd_level": 3, "columns": _columns()}))
    assert len(frame) < BOMB_BYTES_MAX
    return frame


def _row_bomb(salt_crc: int, base: int, epoch: int, durable: int, appended_at: int, *_: Any) -> bytes:
    return bomb(salt_crc=salt_crc, base=base, epoch=epoch, durable=durable, appended_at=appended_at, runs=())


def _columns() -> Any:
    return encode_columns(Columns(values=[bytes(UNPACKED_BYTES)], timestamps=[0]))


def mined(durability: Durability, patch: pytest.MonkeyPatch) -> Simulated:
    """A log of three records, the second of which is the bomb."""
    rig = Rig(simulated(), durability).open()
    rig.append()
    with patch.context() as inside:
        inside.setattr(forebay.wal.writer, "encode_row_frame", _row_bomb)
        inside.setattr(forebay.wal.writer, "encode_data_frame", bomb)
        rig.append()
    rig.append()
    return rig


def _pages(rig: Simulated) -> None:
    at = 0
    while (page := rig.read(at, 1 << 20)).next > at:
        for batch in page.batches:
            batch.to_arrow(0)
        at = page.next


def _cold(rig: Simulated) -> None:
    rig.wal.tail.cache.clear()
    _pages(rig)


def _sealed(rig: Simulated) -> None:
    rig.wal.rotate()
    rig.shard.upkeep.seal_rotated()
    _pages(rig)


def _recovered(rig: Simulated) -> None:
    again = Rig(rig.disk, rig.durability, epoch=rig.epoch).open()
    _pages(again)


def _looked_up(rig: Simulated) -> None:
    rig.shard.lookups.offsets(Sought.of_key(b"k"))
    rig.wal.offset_at_time(0)


def _dumped(rig: Simulated) -> None:
    for name in rig.disk.list_directory(DIRECTORY):
        if name.endswith(".seg"):
            list(dump(rig.disk, f"{DIRECTORY}/{name}", records=True))


READERS: Final[dict[str, Callable[[Simulated], None]]] = {
    "cached": _pages,
    "cold": _cold,
    "sealing": _sealed,
    "recovery": _recovered,
    "look-ups": _looked_up,
    "dump": _dumped,
}


def stays_packed(rig: Simulated, read: Callable[[Simulated], None]) -> Iterator[Violation]:
    """I30: whatever is read, memory stays bounded; what cannot be read is a gap or an error by name."""
    tracemalloc.start()
    try:
        with contextlib.suppress(ForebayError):
            read(rig)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    if peak > MEMORY_BYTES_MAX:
        yield Violation("I30", f"a frame of less than {BOMB_BYTES_MAX} bytes took {peak} bytes of memory")
