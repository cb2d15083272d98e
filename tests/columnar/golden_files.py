"""Writes the golden Parquet segments of a format version, once: `python -m tests.columnar.golden_files`.

Files that exist are never written again: what a release wrote must stay readable.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from forebay.columnar import store_parquet
from forebay.format.files.segment import index_name
from forebay.testing.simulated.blobs import SimulatedBlobs
from tests.columnar.rows import FACTS, SPARSE

GOLDEN: Final = Path(__file__).parent / "golden" / "v1"
NAMES: Final = ("segment.parquet", "delta.parquet", "ids.parquet")
"""The same rows: with plain values as they were written first, with values by lengths, and with ids of columns."""


def write_missing() -> None:
    """Create the files, if they are not there yet."""
    GOLDEN.mkdir(parents=True, exist_ok=True)
    store = SimulatedBlobs()
    for name in NAMES:
        store_parquet(store, name, [append.table() for append in SPARSE], lambda: FACTS)
        for written in (name, index_name(name)):
            if not (GOLDEN / written).exists():
                (GOLDEN / written).write_bytes(store.contents[written])


if __name__ == "__main__":
    write_missing()
