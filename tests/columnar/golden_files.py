"""Writes the golden Parquet segment of a format version, once: `python -m tests.columnar.golden_files`.

Files that exist are never written again: what a release wrote must stay readable.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from forebay.columnar import store_parquet
from forebay.format.files.segment import index_name
from forebay.testing.blobs import SimulatedBlobs
from tests.columnar.rows import FACTS, SPARSE

GOLDEN: Final = Path(__file__).parent / "golden" / "v1"
NAME: Final = "segment.parquet"


def write_missing() -> None:
    """Create the files, if they are not there yet."""
    GOLDEN.mkdir(parents=True, exist_ok=True)
    store = SimulatedBlobs()
    store_parquet(store, NAME, [append.table() for append in SPARSE], lambda: FACTS)
    for name in (NAME, index_name(NAME)):
        if not (GOLDEN / name).exists():
            (GOLDEN / name).write_bytes(store.contents[name])


if __name__ == "__main__":
    write_missing()
