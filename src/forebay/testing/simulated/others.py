"""A metadata store of one process among several: before any of its calls another may act, or the process may die.

Around any store that works. A sweep runs one operation again and again, with the other process before its first call,
before its second, and so on: what an operation may not take for granted between two of its calls comes to light.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from forebay.metadata import Change, Compare, Entry, MetadataStore, Operation, Outcome, Session, Watch


class Killed(BaseException):
    """The process has come to its end: no handler of an error runs in it, and no call of it reaches the store."""


class SharedMetadata:
    """One process's handle on a store that several share; `close` ends what is this process's alone."""

    def __init__(self, inner: MetadataStore) -> None:
        self.inner = inner
        self.calls = 0
        """How many calls have come to the store."""
        self._due: tuple[int, Callable[[], object]] | None = None
        """Before which call another process acts, and what it does."""
        self._has_died = False
        self._sessions: list[Session] = []

    def before(self, call: int, act: Callable[[], object]) -> None:
        """Have another process act before the call of this number, counted from now on; 0 is the next one."""
        self._due = (self.calls + call, act)

    def die_before(self, call: int) -> None:
        """Have the process die before the call of this number. Its sessions are over then."""
        self.before(call, self.die)

    def die(self) -> None:
        """End the process now: for every other one its sessions are over."""
        self._has_died = True
        for session in self._sessions:
            session.close()

    @property
    def has_acted(self) -> bool:
        """Whether the operation came to the call that was waited for."""
        return self._due is None

    def get(self, key: str) -> Entry | None:
        self._meet()
        return self.inner.get(key)

    def range(self, prefix: str, *, start_after: str | None = None, limit: int | None = None) -> list[Entry]:
        self._meet()
        return self.inner.range(prefix, start_after=start_after, limit=limit)

    def transaction(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        self._meet()
        return self.inner.transaction(compares, operations)

    def watch(self, prefix: str, from_revision: int | None = None) -> Watch:
        self._meet()
        return SharedWatch(self.inner.watch(prefix, from_revision), self._meet)

    def session(self, ttl_s: float) -> Session:
        self._meet()
        session = self.inner.session(ttl_s)
        self._sessions.append(session)
        return session

    def session_alive(self, session: str) -> bool:
        self._meet()
        return self.inner.session_alive(session)

    def end_session(self, session: str) -> None:
        self._meet()
        self.inner.end_session(session)

    def revision(self) -> int:
        self._meet()
        return self.inner.revision()

    def close(self) -> None:
        for session in self._sessions:
            session.close()

    def abandon(self) -> None:
        self.die()

    def _meet(self) -> None:
        if self._has_died:
            raise Killed("this process has died")
        number, self.calls = self.calls, self.calls + 1
        if self._due is not None and number == self._due[0]:
            _, act = self._due
            self._due = None
            _in_another_thread(act)
            if self._has_died:
                raise Killed(f"this process died before call {number}")


class SharedWatch:
    """A watch whose questions count as calls of its process."""

    def __init__(self, inner: Watch, meet: Callable[[], None]) -> None:
        self._inner = inner
        self._meet = meet

    @property
    def revision(self) -> int:
        return self._inner.revision

    def poll(self, timeout_s: float) -> list[Change]:
        self._meet()
        return self._inner.poll(timeout_s)

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _in_another_thread(act: Callable[[], object]) -> None:
    """What another process does is done by another thread: it holds no lock of this one. Its exception is raised."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            failed.append(error)

    thread = threading.Thread(target=run, name="another process")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
