"""A process of its own that uploads a large object and reads it: `python -m tests.blobs.large_objects ENDPOINT FOLDER`.

It says, as JSON, how many bytes went each way and how much more memory it held meanwhile than before. Nothing else that
ran in the same process can have a part in that.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Final

from forebay.blobs import open_store
from forebay.disk import SystemDisk
from forebay.settings import MIB
from tests.support.servers import s3_settings

LARGE_BYTES: Final = 256 * MIB
_ROOT: Final = Path(__file__).parents[2]


def moved(endpoint: str, folder: str) -> dict[str, int]:
    """What the process says: bytes written and read, and the most memory beyond that of its beginning, for each."""
    command = [sys.executable, "-m", "tests.blobs.large_objects", endpoint, folder]
    said: dict[str, int] = json.loads(subprocess.run(command, cwd=_ROOT, check=True, capture_output=True).stdout)
    return said


def _most_bytes() -> int:
    """The most memory that this process has ever held; the kernel counts kilobytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(endpoint: str, folder: str) -> None:
    """Upload and read; the peak of a process only grows, so that what it grew by is what a part needed."""
    store = open_store(s3_settings(endpoint, folder, part_bytes=8 * MIB), disk=SystemDisk())
    store.put_if_absent("first", bytes(MIB))
    before = _most_bytes()
    stat = store.upload("large.seg", (bytes([number % 256]) * MIB for number in range(LARGE_BYTES // MIB)))
    written = _most_bytes()
    lengths = [len(chunk) for chunk in store.read("large.seg", 0, LARGE_BYTES, chunk_bytes=2 * MIB, ahead=8)]
    read = _most_bytes()
    store.delete("large.seg")
    answer = {"written": stat.size, "read": sum(lengths), "writing": written - before, "reading": read - before}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
