"""Compactions that end themselves with kill -9, each at another step.

`python -m tests.compacting.killed ROOT MODE STEP…`. Each is a fork of this process and works without Spark, which is
quick; the owner is another process.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from forebay.blobs.directory import DirectoryStore
from forebay.catalog import ShardCatalog
from forebay.compacting.shard import ShardCompaction
from tests.compacting.directly import compacted
from tests.support.environments import directories
from tests.support.processes import die_at

ENVIRONMENTS: Final[dict[str, Callable[[Path], directories.Environment]]] = {
    "local": directories.local,
    "shared_fs": directories.shared_fs,
}

STEPS: Final[dict[str, Callable[[], None]]] = {
    "with the lease": lambda: die_at(ShardCompaction, "outlook", call=2),
    "object written": lambda: die_at(DirectoryStore, "upload"),
    "index written": lambda: die_at(DirectoryStore, "upload", call=2),
    "before the swap": lambda: die_at(ShardCatalog, "_replaced", before=True),
    "behind the swap": lambda: die_at(ShardCatalog, "_replaced"),
    "in the second partition": lambda: die_at(ShardCatalog, "_replaced", before=True, call=2),
}


def main(root: str, mode: str, *steps: str) -> None:
    environment = ENVIRONMENTS[mode](Path(root))
    for step in steps:
        child = os.fork()
        if not child:
            STEPS[step]()
            compacted(environment)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (step, status)


if __name__ == "__main__":
    main(*sys.argv[1:])
