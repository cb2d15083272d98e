"""The disk: the only room that touches files. It knows paths and bytes, nothing of what they mean.

`Disk`, `File` and `Lock` are Protocols; `SystemDisk` is the machine's disk. The simulated one with
crash states and faults lives in `forebay.testing`. Errors are `OSError`s, as the system gives them;
turning them into errors of ours is the caller's work.
"""

from forebay.disk.seam import Disk, File, Lock, SyncFailedBefore
from forebay.disk.system import SystemDisk
from forebay.disk.writing import make_directories, replace_file, write_all, write_rest

__all__ = [
    "Disk",
    "File",
    "Lock",
    "SyncFailedBefore",
    "SystemDisk",
    "make_directories",
    "replace_file",
    "write_all",
    "write_rest",
]
