"""A process that has everything imported and forks one writer after the other, each to be killed.

Reads one JSON object per line (a `Life`), forks a child that lives it, and writes lines to its output:
`born <pid>`, `ack <value> <offset>` from the child's threads, `dead <exit code>` once the child is gone.
Forking from here costs a few milliseconds; a fresh interpreter would cost most of a second per kill.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import sys
import threading
from typing import Final

import msgspec

from forebay.disk import File
from forebay.disk.system import SystemDisk
from forebay.errors import ForebayError
from forebay.records import Bytes
from forebay.settings import WalSettings
from forebay.topics import Durability
from tests.wal.rig import Rig, stage

SETTINGS: Final = WalSettings(
    free_bytes_min=0,
    rotate_bytes_max=8192,
    reserve_records_min=64,
    sync_interval_ms=5,
    mark_interval_ms=5,
    cache_bytes_max=4096,
)
THREADS: Final = 3


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is to do: append from several threads until it is killed.

    `kind` and `suffix` name the disk call at whose `count`-th turn it kills itself; `fail` makes one write
    fail first, so that there is something to heal.
    """

    directory: str
    durability: str
    epoch: int
    kind: str = ""
    suffix: str = ""
    count: int = 1
    fail: bool = False


class FatalFile:
    """A file whose calls may be the last thing the process does."""

    def __init__(self, file: File, disk: FatalDisk) -> None:
        self.path = file.path
        self._file = file
        self._disk = disk

    def read_at(self, length: int, position: int) -> bytes:
        return self._file.read_at(length, position)

    def write_at(self, data: Bytes, position: int) -> int:
        if self._disk.fails(self.path):
            self._file.write_at(bytes(data)[:9], position)
            raise OSError(errno.EIO, "injected", self.path)
        return self._file.write_at(data, position)

    def truncate(self, size: int) -> None:
        self._disk.reach("truncate", self.path)
        self._file.truncate(size)

    def size(self) -> int:
        return self._file.size()

    def sync(self) -> None:
        self._disk.reach("sync", self.path)
        self._file.sync()

    def close(self) -> None:
        self._file.close()


class FatalDisk(SystemDisk):
    """The machine's disk, with a chosen call at which the process kills itself."""

    def __init__(self, life: Life) -> None:
        super().__init__()
        self._life = life
        self._left = life.count
        self._failures = 20 if life.fail else 0

    def create(self, path: str) -> FatalFile:  # type: ignore[override]
        return FatalFile(super().create(path), self)

    def open(self, path: str, *, writable: bool = False, scratch: bool = False) -> FatalFile:  # type: ignore[override]
        return FatalFile(super().open(path, writable=writable, scratch=scratch), self)

    def rename(self, source: str, target: str) -> None:
        self.reach("rename", source)
        super().rename(source, target)
        self.reach("renamed", source)

    def reach(self, kind: str, path: str) -> None:
        """Die here, if this is the place."""
        if kind == self._life.kind and path.endswith(self._life.suffix):
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def fails(self, path: str) -> bool:
        """Whether this write is the one that fails."""
        if not self._failures or not path.endswith(".seg"):
            return False
        self._failures -= 1
        return self._failures == 0


def live(life: Life) -> None:
    """Open the shard and append for ever, with upkeep beside."""
    rig = Rig(
        FatalDisk(life),
        Durability(life.durability),
        epoch=life.epoch,
        settings=SETTINGS,
        directory=life.directory,
        seed=str(os.getpid()),
    ).open()
    say(f"open {rig.epoch}")
    for thread in range(THREADS):
        threading.Thread(target=_append, args=(rig, f"{life.epoch}.{thread}"), daemon=True).start()
    while True:
        rig.clock.advance(0.01)
        rig.shard.upkeep.maintain()


def _append(rig: Rig[FatalDisk], name: str) -> None:
    number = 0
    while True:
        number += 1
        values = [f"{name}.{number}.{place}".encode() for place in range(1 + number % 3)]
        with contextlib.suppress(ForebayError):
            offset = rig.wal.acknowledge(stage(rig.wal, values, None, number))
            say(f"ack {b','.join(values).decode()} {offset}")


def say(line: str) -> None:
    """One line in one write, so that lines of several threads never mix."""
    os.write(1, f"{line}\n".encode())


def main() -> None:
    logging.disable()
    decoder = msgspec.json.Decoder(Life)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                live(decoder.decode(line))
            finally:
                os._exit(1)
        say(f"born {pid}")
        _, status = os.waitpid(pid, 0)
        say(f"dead {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main()
