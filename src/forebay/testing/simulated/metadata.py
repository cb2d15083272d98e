"""A metadata store with faults asked for by name, around any store that works.

What a fault means is the seam's promise turned against the caller: `Unavailable` must have done nothing,
after `Indeterminate` either may be true, and a watch may be late or may have to begin again.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from forebay.errors import Indeterminate, Unavailable
from forebay.metadata import Change, Compacted, Compare, Entry, MetadataStore, Operation, Outcome, Session, Watch


class Fault(enum.Enum):
    """What goes wrong with one call."""

    FAIL_BEFORE = "fail before"
    """`Unavailable`, nothing done. The only fault of a read."""
    FAIL_AFTER = "fail after"
    """Done, but the answer is lost: `Indeterminate`."""
    TIME_OUT = "time out"
    """`Indeterminate`, not done yet: it lands when `land` is called, or never."""


class FaultyMetadata:
    """A `MetadataStore` that does what the inner one does, apart from the faults that were asked for.

    `calls` counts what was asked of each method, for sweeps over every call of a scenario.
    """

    def __init__(self, inner: MetadataStore) -> None:
        self.inner = inner
        self.calls: dict[str, int] = {}
        self._faults: dict[tuple[str, int], Fault] = {}
        self._late: deque[tuple[Sequence[Compare], Sequence[Operation]]] = deque()
        self._watches: list[FaultyWatch] = []
        self._stale = False

    def inject(self, fault: Fault, *, method: str = "transaction", after: int = 0, count: int = 1) -> None:
        """Let `count` calls of `method` fail, once `after` further calls of it went well."""
        if fault is not Fault.FAIL_BEFORE and method != "transaction":
            raise ValueError(f"{fault} is a fault of transactions; a {method} can only fail before")
        first = self.calls.get(method, 0) + after
        self._faults.update({(method, first + step): fault for step in range(count)})

    def heal(self) -> None:
        """Take back every fault that has not struck yet."""
        self._faults.clear()

    def land(self) -> list[Outcome]:
        """Let the transactions that timed out reach the store now, in their order."""
        late, self._late = self._late, deque()
        return [self.inner.transaction(compares, operations) for compares, operations in late]

    def hold_watches_back(self) -> None:
        """From now on watches see nothing new, as if behind a slow network."""
        self._stale = True

    def let_watches_go(self) -> None:
        """Watches see everything again, from where they stood."""
        self._stale = False

    def compact_watches(self) -> None:
        """Every open watch has lost its place: its next `poll` raises `Compacted`."""
        for watch in self._watches:
            watch.compacted = True

    def get(self, key: str) -> Entry | None:
        self._meet("get")
        return self.inner.get(key)

    def range(self, prefix: str, *, start_after: str | None = None, limit: int | None = None) -> list[Entry]:
        self._meet("range")
        return self.inner.range(prefix, start_after=start_after, limit=limit)

    def transaction(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        fault = self._meet("transaction")
        if fault is Fault.TIME_OUT:
            self._late.append((tuple(compares), tuple(operations)))
            raise Indeterminate("injected: the transaction timed out; it may still land")
        outcome = self.inner.transaction(compares, operations)
        if fault is Fault.FAIL_AFTER:
            raise Indeterminate("injected: the answer to a transaction was lost")
        return outcome

    def watch(self, prefix: str, from_revision: int | None = None) -> FaultyWatch:
        self._meet("watch")
        watch = FaultyWatch(self.inner.watch(prefix, from_revision), is_stale=lambda: self._stale)
        self._watches.append(watch)
        return watch

    def session(self, ttl_s: float) -> Session:
        self._meet("session")
        return self.inner.session(ttl_s)

    def session_alive(self, session: str) -> bool:
        self._meet("session_alive")
        return self.inner.session_alive(session)

    def end_session(self, session: str) -> None:
        self._meet("end_session")
        self.inner.end_session(session)

    def revision(self) -> int:
        self._meet("revision")
        return self.inner.revision()

    def close(self) -> None:
        self.inner.close()

    def abandon(self) -> None:
        self.inner.abandon()

    def _meet(self, method: str) -> Fault | None:
        """Count the call and give its fault, having raised the one that all methods know."""
        number = self.calls.get(method, 0)
        self.calls[method] = number + 1
        fault = self._faults.pop((method, number), None)
        if fault is Fault.FAIL_BEFORE:
            raise Unavailable(f"injected: {method} number {number} did not reach the store")
        return fault


class FaultyWatch:
    """A watch that may be held back or lose its place."""

    def __init__(self, inner: Watch, *, is_stale: Callable[[], bool]) -> None:
        self._inner = inner
        self._is_stale = is_stale
        self.compacted = False

    @property
    def revision(self) -> int:
        return self._inner.revision

    def poll(self, timeout_s: float) -> list[Change]:
        if self.compacted:
            raise Compacted("injected: this watch has lost its place; list again")
        return [] if self._is_stale() else self._inner.poll(timeout_s)

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
