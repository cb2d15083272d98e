"""The processes of a schedule as children of this one, each with its background at work, killed by SIGKILL.

A child dies between two steps, or inside one: before a call of the metadata store or of the disk that the schedule
chose. They are forked by a server that has imported everything before (`forkserver`), so a life costs little.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from forebay.cleanup import deleted_topics
from forebay.clock import SystemClock
from forebay.disk import SystemDisk
from forebay.disk.descriptors import SystemFile
from forebay.errors import ForebayError
from forebay.metadata import MetadataStore, SqliteMetadata
from forebay.metadata.etcd import EtcdMetadata
from forebay.metadata.open_store import open_metadata
from forebay.storage import Storage
from forebay.testing.inside import inside
from tests.protocol.two_processes import ChildDied, ScheduledOwner
from tests.support.environments import directories
from tests.support.environments.directories import Environment
from tests.support.etcd import Cluster
from tests.support.processes import die
from tests.support.waiting import PATIENCE

P = ParamSpec("P")
R = TypeVar("R")

_FORKED: Final = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload([__name__])


class LeapingClock(SystemClock):
    """The machine's clock, and some time more."""

    leap_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.leap_ms


class ScheduledChild(ScheduledOwner):
    """A process whose background is at work, by a clock that can leap."""

    def __init__(self, environment: Environment, name: str) -> None:
        self._clock = LeapingClock()
        super().__init__(Storage.open(environment.root / name, environment.settings, clock=self._clock))

    def settle(self) -> None:
        # First: a worker that waits for the processor in the midst of a step would wake up days later.
        inside(self.log).workers.stop()
        self._clock.leap_ms += 1_000 * (self.log.settings.export.orphan_grace_s + 1)
        super().settle()


class Fuse:
    """Ends this process before a call of a seam that was chosen."""

    def __init__(self) -> None:
        self._left: int | None = None

    def light(self, calls: int) -> None:
        """Burn for so many calls."""
        self._left = calls

    def guard(self, kind: Any, *names: str) -> None:
        """Count the calls of these methods."""
        for name in names:
            setattr(kind, name, self._burning(getattr(kind, name)))

    def _burning(self, whole: Callable[P, R]) -> Callable[P, R]:
        def counted(*arguments: P.args, **options: P.kwargs) -> R:
            if self._left is not None:
                if self._left == 0:
                    die()
                self._left -= 1
            return whole(*arguments, **options)

        return counted


def environment_of(root: Path, mode: str, endpoints: tuple[str, ...]) -> Environment:
    """Two directories below a root as all processes see them."""
    environment = directories.local(root) if mode == "local" else directories.shared_fs(root)
    return directories.in_etcd(environment, endpoints, f"/{root.name}") if endpoints else environment


def live(pipe: Connection, environment: Environment, name: str) -> None:
    """The life of a child: it does what it is told, one step after the other, until it is told to close."""
    deleted_topics.OWNER_SECONDS = 0.0  # type: ignore[misc]  # a deletion waits for no other process here
    fuse = Fuse()
    for store in (SqliteMetadata, EtcdMetadata):
        fuse.guard(store, "get", "range", "transaction")
    fuse.guard(SystemFile, "write_at", "sync")
    fuse.guard(SystemDisk, "create", "rename", "link", "unlink", "sync_directory")
    process = ScheduledChild(environment, name)
    pipe.send(inside(process.log).session_id)
    with contextlib.suppress(EOFError):  # the parent is gone
        while True:
            step, calls, arguments, options = pipe.recv()
            if step is None:
                break
            if calls is not None:
                fuse.light(calls)
            try:
                answer = getattr(process, step)(*arguments, **options)
            except ForebayError as error:
                answer = error
            pipe.send(answer)
    process.log.close()


class Child:
    """The parent's side of one."""

    def __init__(self, environment: Environment, name: str) -> None:
        self._pipe, theirs = _FORKED.Pipe()
        self._process: ForkServerProcess = _FORKED.Process(target=live, args=(theirs, environment, name), daemon=True)
        self._process.start()
        theirs.close()
        self._calls: int | None = None
        self.session: str = self._heard()

    def light(self, calls: int) -> None:
        """Have it die inside its next step, before that call."""
        self._calls = calls

    def do(self, step: str | None, *arguments: object, **options: object) -> Any:
        """Have it do something; its answer."""
        calls, self._calls = self._calls, None
        try:
            self._pipe.send((step, calls, arguments, options))
            answer = self._heard()
        except BrokenPipeError:
            self.kill()
            raise ChildDied from None
        if isinstance(answer, ForebayError):
            raise answer
        return answer

    def close(self) -> None:
        """Close its log, in order, and wait until it is gone; `ChildDied` if that did not work any more."""
        self._pipe.send((None, None, (), {}))
        self._process.join(PATIENCE)
        self._pipe.close()
        if self._process.exitcode != 0:
            raise ChildDied

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self._process.kill()
        self._process.join(PATIENCE)
        self._pipe.close()

    def _heard(self) -> Any:
        try:
            assert self._pipe.poll(PATIENCE), "the child does not answer"
            return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self.kill()
            raise ChildDied from None


class ChildStage:
    """Each process is a child, on a real disk, with SQLite or etcd."""

    def __init__(self, root: Path, mode: str, etcd: Cluster | None = None) -> None:
        self._environment = environment_of(root, mode, etcd.endpoints if etcd else ())
        self._etcd = etcd
        self._children: dict[str, Child] = {}

    def open(self, name: str) -> None:
        self._children[name] = Child(self._environment, name)

    def do(
        self, name: str, step: Callable[Concatenate[ScheduledOwner, P], R], *arguments: P.args, **options: P.kwargs
    ) -> R:
        try:
            answer: R = self._children[name].do(step.__name__, *arguments, **options)
        except ChildDied:
            self._end_session(self._children.pop(name))
            raise
        return answer

    def end(self, name: str) -> None:
        child = self._children.pop(name)
        try:
            child.close()
        except ChildDied:
            self._end_session(child)
            raise

    def kill(self, name: str) -> None:
        child = self._children.pop(name)
        child.kill()
        self._end_session(child)

    def die_inside(self, name: str, call: int) -> bool:
        self._children[name].light(call)
        return True

    def let_pass(self) -> None:
        """The children follow what changes, and settle by a clock that leaps."""

    def stored(self) -> list[str]:
        store = self._opened()
        try:
            return [entry.key for entry in store.range(f"{self._environment.settings.metadata.prefix}/")]
        finally:
            store.close()

    def close(self) -> None:
        for child in self._children.values():
            child.kill()

    def _opened(self) -> MetadataStore:
        settings = self._environment.settings.metadata
        return open_metadata(settings, settings.path or "", disk=SystemDisk(), clock=SystemClock())

    def _end_session(self, child: Child) -> None:
        """etcd sees no process die: the time to live of its session is over."""
        if self._etcd is not None:
            store = self._opened()
            store.end_session(child.session)
            store.close()
