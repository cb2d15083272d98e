"""A disk in memory that passes the contract of the real one, keeps a trace and fails on demand.

Knows what a process sees; what would be left after a crash is worked out from the trace by `crashes`.
Several simulated processes may share one disk (`another_process`); locks die with their process.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from forebay.records import Bytes
from forebay.testing.simulated import trace
from forebay.testing.simulated.clock import STARTED_MS
from forebay.testing.simulated.durability import DiskState
from forebay.testing.simulated.faults import Call, Fault, Faults, Match, PlannedFault
from forebay.testing.simulated.trace import ROOT, Image, Note, Operation, Trace
from forebay.testing.simulated.volume import Content, Volume

T = TypeVar("T")

ROOMY = 1 << 50


class SimulatedFile:
    """A `File` on a `SimulatedDisk`."""

    def __init__(self, disk: SimulatedDisk, path: str, content: Content, *, writable: bool) -> None:
        self.path = path
        self._disk = disk
        self._content = content
        self._writable = writable
        self._dirty = False
        self._closed = False
        self._opened_in = disk.releases

    def read_at(self, length: int, position: int) -> bytes:
        return self._disk.perform("read", self.path, lambda: self._held().read(length, position))

    def write_at(self, data: Bytes, position: int) -> int:
        with self._disk.mutex:
            content = self._changeable()
            self._dirty = True
            return self._disk.write(content, self.path, data, position)

    def truncate(self, size: int) -> None:
        def effect() -> None:
            content = self._changeable()
            self._dirty = True
            content.modified_ms = self._disk.now_ms
            self._disk.record(self._disk.volume.truncate(content, size))

        self._disk.perform("truncate", self.path, effect)

    def size(self) -> int:
        return self._disk.perform("size", self.path, lambda: len(self._held().data))

    def sync(self) -> None:
        with self._disk.mutex:
            self._disk.sync(self._held(), self.path)
            self._dirty = False

    def close(self) -> None:
        self._closed = True

    def _changeable(self) -> Content:
        content = self._held()
        if not self._writable:
            raise OSError(errno.EBADF, "opened for reading only", self.path)
        return content

    def _held(self) -> Content:
        """The file first opened. Without a descriptor it is looked up by name again, as on the real disk."""
        if self._closed:
            raise OSError(errno.EBADF, "this handle is closed", self.path)
        if self._opened_in != self._disk.releases:
            if not self._dirty and self._disk.volume.find(self.path) != self._content.inode:
                raise OSError(errno.ESTALE, "the name now belongs to another file", self.path)
            self._opened_in = self._disk.releases
        return self._content


class SimulatedLock:
    """A `Lock` on a `SimulatedDisk`."""

    def __init__(self, holders: dict[int, SimulatedLock], inode: int, owner: SimulatedDisk) -> None:
        self.owner = owner
        self._holders = holders
        self._inode = inode
        holders[inode] = self

    @property
    def identity(self) -> str:
        return f"{self.owner.boot}:{self._inode}"

    def release(self) -> None:
        if self._holders.get(self._inode) is self:
            del self._holders[self._inode]


class SimulatedDisk:
    """A `Disk` in memory. `trace` says what happened, `calls` what was called.

    `boot`, `free` and `now_ms` may be set: the name of this boot of the machine, the bytes still free, and the
    time that files changed from now on bear.
    """

    def __init__(
        self,
        *,
        directories: Iterable[str] = (),
        boot: str = "boot-1",
        free: int = ROOMY,
        shared_with: SimulatedDisk | None = None,
    ) -> None:
        self.releases = 0
        self.now_ms = STARTED_MS
        self._dead = False
        if shared_with is not None:
            self._share(shared_with)
            return
        self.mutex = threading.RLock()
        self.volume = Volume(Image(files={}, directories={ROOT: {}}), next_inode=ROOT + 1, free=free)
        for path in directories:
            self.volume.make_directory(path)
        self.trace = Trace(start=self.volume.image(), boot=boot)
        self._faults = Faults()
        self._holders: dict[int, SimulatedLock] = {}

    @classmethod
    def restored(cls, image: Image, history: Trace, *, free: int, next_inode: int) -> SimulatedDisk:
        """A disk that holds `image` and goes on with `history`."""
        disk = cls()
        disk.volume = Volume(image, next_inode=next_inode, free=free)
        disk.trace = history
        return disk

    def create(self, path: str) -> SimulatedFile:
        return self.perform("create", path, lambda: self._create(path))

    def open(self, path: str, *, writable: bool = False, scratch: bool = False) -> SimulatedFile:
        return self.perform(
            "open", path, lambda: SimulatedFile(self, path, self.volume.find_file(path), writable=writable)
        )

    def rename(self, source: str, target: str) -> None:
        self.perform("rename", target, lambda: self.record(self.volume.rename(source, target)))

    def link(self, source: str, target: str) -> None:
        self.perform("link", target, lambda: self.record(self.volume.link(source, target)))

    def unlink(self, path: str) -> None:
        self.perform("unlink", path, lambda: self.record(self.volume.unlink(path)))

    def make_directory(self, path: str) -> None:
        self.perform("make_directory", path, lambda: self.record(self.volume.make_directory(path)))

    def remove_directory(self, path: str) -> None:
        self.perform("remove_directory", path, lambda: self.record(self.volume.remove_directory(path)))

    def list_directory(self, path: str) -> list[str]:
        return self.perform(
            "list_directory", path, lambda: sorted(self.volume.directories[self.volume.find_directory(path)])
        )

    def exists(self, path: str) -> bool:
        return self.perform("exists", path, lambda: self.volume.exists(path))

    def sync_directory(self, path: str) -> None:
        self.perform("sync_directory", path, lambda: self.record(trace.SyncDirectory(self.volume.find_directory(path))))

    def sync_filesystem(self, path: str) -> None:
        def effect() -> None:
            self.volume.find(path)
            self.record(trace.SyncFilesystem())

        self.perform("sync_filesystem", path, effect)

    def lock(self, path: str) -> SimulatedLock | None:
        return self.perform("lock", path, lambda: self._lock(path))

    def is_locked(self, path: str) -> bool:
        def effect() -> bool:
            return self.volume.exists(path) and self.volume.find_file(path).inode in self._holders

        return self.perform("is_locked", path, effect)

    def modified_ms(self, path: str) -> int:
        return self.perform("modified_ms", path, lambda: self.volume.find_file(path).modified_ms)

    def free_bytes(self, path: str) -> int:
        def effect() -> int:
            self.volume.find(path)
            return self.volume.free

        return self.perform("free_bytes", path, effect)

    def identity(self, path: str) -> str:
        def effect() -> str:
            self.volume.find(path)
            return f"{self.boot}:1"

        return self.perform("identity", path, effect)

    @property
    def boot(self) -> str:
        """The name of this boot of the machine; settable, as a reboot changes it."""
        return self.trace.boot

    @boot.setter
    def boot(self, name: str) -> None:
        self.trace.boot = name

    @property
    def free(self) -> int:
        """Bytes that may still be written; settable."""
        return self.volume.free

    @free.setter
    def free(self, count: int) -> None:
        self.volume.free = count

    @property
    def calls(self) -> list[Call]:
        """Every call of the seam so far, those that failed included. Closing and releasing never fail nor count."""
        return [Call(index, kind, path) for index, (kind, path) in enumerate(self._faults.seen)]

    @property
    def calls_reached(self) -> int:
        """The index of the next call."""
        return len(self._faults.seen)

    def note(self, kind: str, payload: object = None) -> None:
        """Remember in the trace that this happened here, for instance an acknowledgement."""
        with self.mutex:
            self.trace.operations.append(Note(kind, payload))

    def fail_at(self, index: int, error: OSError | int, *, taken: int | None = None, after: bool = False) -> None:
        """Let one call fail. A write may take some bytes before it does; `after` fails what has been done."""
        self._faults.add(Fault(lambda call: call.index == index, _number(error), taken=taken, after=after))

    def fail_when(
        self,
        matches: Match,
        error: OSError | int,
        *,
        times: int | None = 1,
        taken: int | None = None,
        after: bool = False,
    ) -> None:
        """Let the next `times` calls that match fail (`None`: every one until `heal`)."""
        self._faults.add(Fault(matches, _number(error), times=times, taken=taken, after=after))

    def shorten_at(self, index: int, taken: int) -> None:
        """Let the write of this index take only so many bytes; whether the next one fails is another fault."""
        self._faults.add(Fault(lambda call: call.index == index, None, taken=taken))

    def plan(self, planned: PlannedFault) -> None:
        """Arm one fault of a sweep."""
        self._faults.add(planned.fault())

    def discard_failed(self, path: str) -> None:
        """Let the system drop the pages of `path` whose sync failed, as it may at any time: reads give what is left."""
        with self.mutex:
            content = self.volume.find_file(path)
            self.record(trace.Discard(content.inode))
            model = DiskState(self.trace.start)
            for operation in self.trace.operations:
                model.apply(operation)
            content.data = model.files[content.inode].live()

    def heal(self) -> None:
        """Take back every fault that has not struck yet."""
        self._faults.clear()

    def freeze(self) -> None:
        """Stop the world for this process: from now on every call is an error, so nothing later is acknowledged."""
        self._dead = True

    def another_process(self) -> SimulatedDisk:
        """The same disk as a second process sees it: same files, own handles, own locks."""
        return SimulatedDisk(shared_with=self)

    def end_process(self) -> None:
        """`freeze`, and give up the locks, as the system does when a process ends."""
        with self.mutex:
            self.freeze()
            for lock in [lock for lock in self._holders.values() if lock.owner is self]:
                lock.release()

    def release_idle(self) -> None:
        """Take the descriptors of all clean handles; each is opened again by name when next used."""
        self.releases += 1

    def perform(self, kind: str, path: str, effect: Callable[[], T]) -> T:
        """Count the call, let a waiting fault strike, else do it."""
        with self.mutex:
            struck = self._arrive(kind, path)
            if struck is None:
                return effect()
            call, fault = struck
            if fault.number is None:
                return effect()
            if fault.after:
                effect()
            raise fault.error(call)

    def record(self, operation: Operation | None) -> None:
        """Keep in the trace what has just been done; `None` was nothing."""
        if operation is not None:
            self.trace.operations.append(operation)

    def write(self, content: Content, path: str, data: Bytes, position: int) -> int:
        """One `write_at`: whole, cut short, or failing with a part of it done."""
        struck = self._arrive("write", path)
        limit = None if struck is None else struck[1].taken
        if struck is not None and struck[1].number is not None and not struck[1].after:
            limit = limit or 0
        content.modified_ms = self.now_ms
        written = self.volume.write(content, data, position, limit)
        if written.data:
            self.record(written)
        if struck is not None and struck[1].number is not None:
            raise struck[1].error(struck[0])
        return len(written.data)

    def sync(self, content: Content, path: str) -> None:
        """One `sync`. A failed one leaves what was unsynced in doubt for ever."""
        struck = self._arrive("sync", path)
        if struck is not None and struck[1].number is not None:
            done = struck[1].after
            self.record(trace.Sync(content.inode) if done else trace.SyncFailed(content.inode))
            raise struck[1].error(struck[0])
        self.record(trace.Sync(content.inode))

    def _arrive(self, kind: str, path: str) -> tuple[Call, Fault] | None:
        if self._dead:
            raise OSError(errno.EIO, "this simulated process has ended", path)
        return self._faults.meet(kind, path)

    def _create(self, path: str) -> SimulatedFile:
        created = self.volume.create(path)
        self.record(created)
        self.volume.files[created.inode].modified_ms = self.now_ms
        return SimulatedFile(self, path, self.volume.files[created.inode], writable=True)

    def _lock(self, path: str) -> SimulatedLock | None:
        if not self.volume.exists(path):
            self.record(self.volume.create(path))
        inode = self.volume.find_file(path).inode
        return None if inode in self._holders else SimulatedLock(self._holders, inode, self)

    def _share(self, other: SimulatedDisk) -> None:
        self.mutex, self.volume, self.trace = other.mutex, other.volume, other.trace
        self._faults, self._holders = other._faults, other._holders


def _number(error: OSError | int) -> int:
    number = error if isinstance(error, int) else error.errno or error.args[0]
    if not isinstance(number, int):
        raise ValueError("an injected error needs a number, as in OSError(errno.EIO)")
    return number
