"""A metadata store in memory: the model of the others, and the store of logs that are never written.

All of it is one immutable `MemoryState`, replaced as a whole: a snapshot costs nothing and a test can
pair the state of any moment with any state of a disk. A change copies the few entries beside those that
it changes, however many there are. Knows no files and no time.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import TracebackType
from typing import Final, NamedTuple, Self

from forebay.errors import Closed
from forebay.locks import Rank, RankedCondition
from forebay.metadata.seam import (
    HISTORY_BYTES_MAX,
    HISTORY_CHANGES_MAX,
    Absent,
    Change,
    Compacted,
    Compare,
    Delete,
    DeleteRange,
    Entry,
    Exists,
    Operation,
    Outcome,
    Put,
    RevisionIs,
    SessionEnded,
    check_key,
    check_limit,
    check_prefix,
    check_transaction,
    check_ttl,
)

_session_numbers = itertools.count(1)

RUN_ENTRIES_MAX: Final = 256
"""So many entries at most are copied to change one of them."""


class _Run(NamedTuple):
    """Entries whose keys follow each other, with the keys beside them to search in."""

    keys: tuple[str, ...] = ()
    entries: tuple[Entry, ...] = ()

    def changed(self, key: str, entry: Entry | None) -> _Run:
        """With this entry at its key, or without any."""
        at = bisect_left(self.keys, key)
        behind = at + (self.keys[at : at + 1] == (key,))
        new = () if entry is None else (entry,)
        return _Run(
            (*self.keys[:at], *(one.key for one in new), *self.keys[behind:]),
            (*self.entries[:at], *new, *self.entries[behind:]),
        )

    def joined(self, other: _Run) -> _Run:
        """This one and the next."""
        return _Run(self.keys + other.keys, self.entries + other.entries)

    def split(self) -> list[_Run]:
        """None if it is empty, two halves if it is too long, else itself."""
        if len(self.keys) <= RUN_ENTRIES_MAX:
            return [self] if self.keys else []
        half = len(self.keys) // 2
        return [_Run(self.keys[:half], self.entries[:half]), _Run(self.keys[half:], self.entries[half:])]


class SortedEntries:
    """Entries by their keys, in order; never changed. One that follows another shares all runs that are the same."""

    __slots__ = ("_firsts", "runs")

    def __init__(self, runs: Sequence[_Run] = (), firsts: Sequence[str] = ()) -> None:
        """`firsts` is the first key of each run."""
        self.runs = tuple(runs)
        self._firsts = tuple(firsts)

    def get(self, key: str) -> Entry | None:
        """The entry of this key."""
        if not self.runs:
            return None
        run = self.runs[max(0, bisect_right(self._firsts, key) - 1)]
        at = bisect_left(run.keys, key)
        return run.entries[at] if run.keys[at : at + 1] == (key,) else None

    def under(self, prefix: str, start_after: str | None = None) -> Iterator[Entry]:
        """The entries whose keys start with `prefix` and lie behind `start_after`, in order."""
        for number in range(max(0, bisect_right(self._firsts, max(prefix, start_after or "")) - 1), len(self.runs)):
            run = self.runs[number]
            start = bisect_left(run.keys, prefix)
            if start_after is not None:
                start = max(start, bisect_right(run.keys, start_after))
            for entry in run.entries[start:]:
                if not entry.key.startswith(prefix):
                    return
                yield entry

    def after(self, changes: Iterable[Change]) -> SortedEntries:
        """These entries once the changes are made."""
        runs, firsts = list(self.runs), list(self._firsts)
        for change in changes:
            first = max(0, bisect_right(firsts, change.key) - 1)
            run = (runs[first] if runs else _Run()).changed(change.key, change.entry)
            behind = first + 1
            if len(run.keys) < RUN_ENTRIES_MAX // 8 and behind < len(runs):
                # Else many deletions would leave many short runs.
                run = run.joined(runs[behind])
                behind += 1
            pieces = run.split()
            runs[first:behind] = pieces
            firsts[first:behind] = [piece.keys[0] for piece in pieces]
        return SortedEntries(runs, firsts)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryState:
    """Everything a store holds at one moment; never changed, only followed by another."""

    revision: int = 0
    compacted: int = 0
    """Changes of this revision and of those before are no longer kept."""
    entries: SortedEntries = field(default_factory=SortedEntries)
    sessions: frozenset[str] = frozenset()
    history: tuple[Change, ...] = ()
    history_bytes: int = 0

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys, sorted."""
        return tuple(entry.key for entry in self.entries.under(""))

    def holds(self, compare: Compare) -> bool:
        if isinstance(compare, SessionEnded):
            return compare.session not in self.sessions
        entry = self.entries.get(compare.key)
        if isinstance(compare, Absent):
            return entry is None
        if isinstance(compare, Exists):
            return entry is not None
        if isinstance(compare, RevisionIs):
            return compare.mod_revision == (0 if entry is None else entry.mod_revision)
        return entry is not None and entry.value == compare.value

    def after(self, operations: Iterable[Operation]) -> MemoryState:
        """The state after these operations, one revision later if they change anything."""
        changes: dict[str, Change] = {}
        for operation in operations:
            if isinstance(operation, Put):
                changes[operation.key] = self._put(operation)
            else:
                changes.update((entry.key, self._deletion(entry.key)) for entry in self._meant(operation))
        return self._changed(tuple(changes.values()))

    def without_session(self, session: str) -> MemoryState:
        """The state after that session has ended: its keys are gone, in one revision."""
        owned = [Delete(entry.key) for entry in self.entries.under("") if entry.session == session]
        return replace(self, sessions=self.sessions - {session}).after(owned)

    def _meant(self, operation: Delete | DeleteRange) -> Iterable[Entry]:
        """What a deletion removes."""
        if isinstance(operation, DeleteRange):
            return self.entries.under(operation.prefix)
        entry = self.entries.get(operation.key)
        return () if entry is None else (entry,)

    def _put(self, put: Put) -> Change:
        if put.session is not None and put.session not in self.sessions:
            raise Closed(f"session {put.session} has ended: it can own no keys")
        old = self.entries.get(put.key)
        revision = self.revision + 1
        entry = Entry(
            key=put.key,
            value=put.value,
            create_revision=revision if old is None else old.create_revision,
            mod_revision=revision,
            session=put.session,
        )
        return Change(revision=revision, key=put.key, entry=entry)

    def _deletion(self, key: str) -> Change:
        return Change(revision=self.revision + 1, key=key, entry=None)

    def _changed(self, changes: tuple[Change, ...]) -> MemoryState:
        if not changes:
            return self
        return replace(
            self,
            revision=self.revision + 1,
            entries=self.entries.after(changes),
            history=self.history + changes,
            history_bytes=self.history_bytes + sum(map(_change_bytes, changes)),
        )._compacted()

    def _compacted(self) -> MemoryState:
        """Without the oldest quarter of the changes, in whole revisions, once there are too many."""
        if len(self.history) <= HISTORY_CHANGES_MAX and self.history_bytes <= HISTORY_BYTES_MAX:
            return self
        count, size, compacted = len(self.history), self.history_bytes, self.compacted
        for change in self.history:
            small_enough = count <= HISTORY_CHANGES_MAX * 3 // 4 and size <= HISTORY_BYTES_MAX * 3 // 4
            if small_enough and change.revision != compacted:
                break
            count, size, compacted = count - 1, size - _change_bytes(change), change.revision
        kept = self.history[len(self.history) - count :]
        return replace(self, history=kept, history_bytes=size, compacted=compacted)


def _change_bytes(change: Change) -> int:
    return len(change.key) + (0 if change.entry is None else len(change.entry.value))


class MemoryMetadata:
    """A `MetadataStore` that ends with its process. Sessions end by `close` or by `end_session`."""

    def __init__(self, state: MemoryState | None = None) -> None:
        self._state = MemoryState() if state is None else state
        self._changed = RankedCondition(Rank.STORE, "metadata.memory")
        self._own_sessions: list[MemorySession] = []
        self._closed = False

    def get(self, key: str) -> Entry | None:
        check_key(key)
        return self.snapshot().entries.get(key)

    def range(self, prefix: str, *, start_after: str | None = None, limit: int | None = None) -> list[Entry]:
        check_prefix(prefix)
        check_limit(limit)
        return list(islice(self.snapshot().entries.under(prefix, start_after), limit))

    def transaction(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        check_transaction(compares, operations)
        self.snapshot()  # Refuses an abandoned store before the condition, which a fork may have left locked.
        with self._changed:
            state = self.snapshot()
            if not all(map(state.holds, compares)):
                return Outcome(succeeded=False, revision=state.revision)
            return Outcome(succeeded=True, revision=self._become(state.after(operations)).revision)

    def watch(self, prefix: str, from_revision: int | None = None) -> MemoryWatch:
        check_prefix(prefix)
        return MemoryWatch(self, prefix, self.revision() + 1 if from_revision is None else from_revision)

    def session(self, ttl_s: float) -> MemorySession:
        check_ttl(ttl_s)
        self.snapshot()
        with self._changed:
            session = MemorySession(self, f"{next(_session_numbers):032x}")
            state = self.snapshot()
            self._become(replace(state, sessions=state.sessions | {session.id}))
            self._own_sessions.append(session)
            return session

    def session_alive(self, session: str) -> bool:
        return session in self.snapshot().sessions

    def revision(self) -> int:
        return self.snapshot().revision

    def close(self) -> None:
        for session in () if self._closed else tuple(self._own_sessions):
            session.close()
        self.abandon()

    def abandon(self) -> None:
        self._closed = True
        # A forked child may find the condition locked by a thread it does not have: there is no thread to wake then.
        if self._changed.acquire(blocking=False):
            self._changed.notify_all()
            self._changed.release()

    def snapshot(self) -> MemoryState:
        """The state as of now; it costs nothing and never changes."""
        if self._closed:
            raise Closed("this metadata store is closed: open another")
        return self._state

    def restore(self, state: MemoryState) -> None:
        """Become what it was when `state` was taken."""
        with self._changed:
            self.snapshot()
            self._become(state)

    def end_session(self, session: str) -> None:
        """See `MetadataStore`. For tests also of a process that lives: as if it had died."""
        with self._changed:
            self._become(self.snapshot().without_session(session))

    def end_all_sessions(self) -> None:
        """Let every process be dead, as after a crash of the machine."""
        for session in sorted(self.snapshot().sessions):
            self.end_session(session)

    def _become(self, state: MemoryState) -> MemoryState:
        self._state = state
        self._changed.notify_all()
        return state

    def wait_until(self, arrived: Callable[[MemoryState], bool], timeout_s: float) -> None:
        """Return once `arrived` is true of the state, or when the time is up."""
        with self._changed:
            self._changed.wait_for(lambda: arrived(self.snapshot()), timeout_s)


class MemorySession:
    """A session of a `MemoryMetadata`."""

    def __init__(self, store: MemoryMetadata, session: str) -> None:
        self._store = store
        self._id = session

    @property
    def id(self) -> str:
        return self._id

    def alive(self) -> bool:
        try:
            return self._store.session_alive(self._id)
        except Closed:
            return False

    def close(self) -> None:
        if self.alive():
            self._store.end_session(self._id)


class MemoryWatch:
    """A watch of a `MemoryMetadata`."""

    def __init__(self, store: MemoryMetadata, prefix: str, start: int) -> None:
        self._store: MemoryMetadata | None = store
        self._prefix = prefix
        self._next = start

    @property
    def revision(self) -> int:
        return self._next - 1

    def poll(self, timeout_s: float) -> list[Change]:
        if self._store is None:
            raise Closed("this watch is closed: open another")
        found: list[Change] = []

        def arrived(state: MemoryState) -> bool:
            found.extend(self._take(state))
            return bool(found)

        self._store.wait_until(arrived, timeout_s)
        return found

    def _take(self, state: MemoryState) -> list[Change]:
        if self._next <= state.compacted:
            raise Compacted.before(self._next, state.compacted)
        start = bisect_left(state.history, self._next, key=lambda change: change.revision)
        self._next = max(self._next, state.revision + 1)
        return [change for change in state.history[start:] if change.key.startswith(self._prefix)]

    def close(self) -> None:
        self._store = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
