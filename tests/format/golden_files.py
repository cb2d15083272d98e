"""Writes the golden files of a format version, once: `python -m tests.format.golden_files`.

A file that exists is never written again. Were the bytes of a version to change, data on disk could
no longer be read: that needs a new version and a new directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.format.samples import artefacts

GOLDEN: Final = Path(__file__).parent / "golden" / "v1"


def write_missing() -> list[str]:
    """Create the files that are not there yet and give their names."""
    GOLDEN.mkdir(parents=True, exist_ok=True)
    missing = {name: artefact for name, artefact in artefacts().items() if not (GOLDEN / name).exists()}
    for name, artefact in missing.items():
        (GOLDEN / name).write_bytes(artefact.encoded)
    return sorted(missing)


if __name__ == "__main__":
    write_missing()
