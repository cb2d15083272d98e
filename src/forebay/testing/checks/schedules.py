"""Several processes in one, of which one goes on at a time, as a schedule says.

`LockStep` runs each in a thread of its own, from one pause to the next; stores pause before and after their
calls, so that a schedule can stop a process inside an operation and let another overtake it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from forebay.blobs import BlobStore, Capabilities, Put, Stat
from forebay.blobs.seam import AHEAD, CHUNK_BYTES
from forebay.metadata import Compare, Entry, MetadataStore, Operation, Outcome, Session, Watch
from forebay.records import Bytes

T = TypeVar("T")

WAIT_SECONDS = 60.0
"""A task that does not come to its next pause by then hangs."""


class Abandoned(BaseException):
    """The schedule is over and this task is not needed any more."""


class _Task:
    def __init__(self, name: str, work: Callable[[], None], schedule: LockStep) -> None:
        self.name = name
        self.go = threading.Semaphore(0)
        self.done = False
        self.error: BaseException | None = None
        self._work = work
        self._schedule = schedule
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        self.go.acquire()
        try:
            self._schedule.check()
            self._work()
        except Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again where the schedule is run
            self.error = error
        self.done = True
        self._schedule.back.release()


class LockStep:
    """Tasks of which one runs at a time, from one pause to the next. Whatever is not a task never pauses."""

    def __init__(self) -> None:
        self.back = threading.Semaphore(0)
        self.steps = 0
        self._tasks: dict[str, _Task] = {}
        self._ended = False

    def begin(self, name: str, work: Callable[[], None]) -> None:
        """A task that waits for its first step."""
        assert name not in self.waiting
        task = self._tasks[name] = _Task(name, work, self)
        task.thread.start()

    @property
    def waiting(self) -> list[str]:
        """The tasks that can go on."""
        return [name for name, task in self._tasks.items() if not task.done]

    def step(self, name: str) -> None:
        """Let this task run to its next pause, or to its end; raises what it raised."""
        task = self._tasks[name]
        self.steps += 1
        task.go.release()
        assert self.back.acquire(timeout=WAIT_SECONDS), f"{name} does not come back"
        if task.error is not None:
            raise task.error

    def pause(self) -> None:
        """Called inside a task: let others run first."""
        task = self._tasks.get(threading.current_thread().name)
        if task is None or task.thread is not threading.current_thread():
            return
        self.check()
        self.back.release()
        task.go.acquire()
        self.check()

    def check(self) -> None:
        """Called inside a task: stop it if the schedule is over."""
        if self._ended:
            raise Abandoned

    def end(self) -> None:
        """Stop all that are waiting, wherever they are."""
        self._ended = True
        for name in self.waiting:
            task = self._tasks[name]
            task.go.release()
            task.thread.join(WAIT_SECONDS)


class PausingSession:
    """A session that may be believed to live after its end, as by a process whose clock stands still."""

    def __init__(self, inner: Session, pause: Callable[[], None]) -> None:
        self._inner = inner
        self._pause = pause
        self.is_blind = False

    @property
    def id(self) -> str:
        return self._inner.id

    def alive(self) -> bool:
        self._pause()
        alive = self.is_blind or self._inner.alive()
        self._pause()
        return alive

    def close(self) -> None:
        self._inner.close()


class PausingMetadata:
    """A `MetadataStore` that lets others run before each call, and after each transaction."""

    def __init__(self, inner: MetadataStore, pause: Callable[[], None]) -> None:
        self._inner = inner
        self._pause = pause
        self.sessions: list[PausingSession] = []
        self.is_about_to_write = False
        """The process stands right before a transaction."""

    def get(self, key: str) -> Entry | None:
        self._pause()
        return self._inner.get(key)

    def range(self, prefix: str, *, start_after: str | None = None, limit: int | None = None) -> list[Entry]:
        self._pause()
        return self._inner.range(prefix, start_after=start_after, limit=limit)

    def transaction(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        self.is_about_to_write = True
        self._pause()
        self.is_about_to_write = False
        outcome = self._inner.transaction(compares, operations)
        self._pause()
        return outcome

    def watch(self, prefix: str, from_revision: int | None = None) -> Watch:
        return self._inner.watch(prefix, from_revision)

    def session(self, ttl_s: float) -> PausingSession:
        self._pause()
        self.sessions.append(PausingSession(self._inner.session(ttl_s), self._pause))
        return self.sessions[-1]

    def session_alive(self, session: str) -> bool:
        self._pause()
        return self._inner.session_alive(session)

    def end_session(self, session: str) -> None:
        self._pause()
        self._inner.end_session(session)

    def revision(self) -> int:
        return self._inner.revision()

    def close(self) -> None:
        self._inner.close()

    def abandon(self) -> None:
        self._inner.abandon()


class PausingBlobs:
    """A `BlobStore` that lets others run before each call, and after each that changes something."""

    def __init__(self, inner: BlobStore, pause: Callable[[], None]) -> None:
        self.name = inner.name
        self._inner = inner
        self._pause = pause

    def put_if_absent(self, key: str, data: Bytes) -> Put:
        return self._changing(lambda: self._inner.put_if_absent(key, data))

    def upload(self, key: str, source: Iterable[Bytes]) -> Stat:
        return self._changing(lambda: self._inner.upload(key, source))

    def get_range(self, key: str, start: int, stop: int, *, etag: str | None = None) -> bytes:
        self._pause()
        return self._inner.get_range(key, start, stop, etag=etag)

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]], *, etag: str | None = None) -> list[bytes]:
        self._pause()
        return self._inner.get_ranges(key, ranges, etag=etag)

    def read(
        self,
        key: str,
        start: int,
        stop: int,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        ahead: int = AHEAD,
        etag: str | None = None,
    ) -> Iterator[bytes]:
        self._pause()
        return self._inner.read(key, start, stop, chunk_bytes=chunk_bytes, ahead=ahead, etag=etag)

    def list(self, prefix: str = "") -> Iterator[Stat]:
        self._pause()
        return self._inner.list(prefix)

    def stat(self, key: str) -> Stat | None:
        self._pause()
        return self._inner.stat(key)

    def delete(self, key: str) -> None:
        self._changing(lambda: self._inner.delete(key))

    def probe(self, *, seconds_max: float | None = None) -> Capabilities:
        return self._inner.probe(seconds_max=seconds_max)

    def abort_stale_uploads(self, older_than_s: float) -> int:
        return self._inner.abort_stale_uploads(older_than_s)

    def close(self) -> None:
        """The objects are there for the others still."""

    def _changing(self, change: Callable[[], T]) -> T:
        self._pause()
        done = change()
        self._pause()
        return done
