"""The seam itself: what every other room may ask of a metadata store, as Protocols and values.

A store is a sorted map from keys (`str`) to values (`bytes`) with one global revision, changed only by
transactions that compare before they write. Sessions own keys that vanish when the session ends.
Memory, SQLite and etcd keep the same rules, which one contract suite in `forebay.testing` states:

- The revision rises by one with each transaction that changed something, and with each session that
  ended and owned keys; it never goes back, also not across restarts. A store that others share may rise between.
- A read that fails raises. Only a read that returns may say that a key is absent.
- `Unavailable` means that nothing was done, `Indeterminate` that the transaction happened once or not at
  all, `Closed` that this handle (or the session given) has ended, `Invalid` that the call breaks a limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TypeAlias

from forebay.errors import Invalid, Unavailable

OPERATIONS_MAX = 100
"""Comparisons, and likewise operations, of one transaction."""
TRANSACTION_BYTES_MAX = 512 * 1024
"""Keys and values of one transaction, comparisons included."""
HISTORY_CHANGES_MAX = 4_096
"""Changes kept for watches; older ones are compacted."""
HISTORY_BYTES_MAX = 16 * 1024 * 1024
"""Keys and values kept for watches."""


class Compacted(Unavailable):
    """The changes asked for are no longer kept: list again, then watch from the revision taken before listing."""

    @classmethod
    def before(cls, start: int, compacted: int) -> Compacted:
        """The error for a watch that stands at `start` where everything up to `compacted` is gone."""
        return cls(
            f"changes from revision {start} on are asked for, but those up to {compacted} are no longer kept: "
            "list again, then watch from the revision taken before listing"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One key as stored. `session` names the session that owns it, if any."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    session: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What one revision did to one key: the new entry, or `None` where it was deleted."""

    revision: int
    key: str
    entry: Entry | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Whether all comparisons held, and the store's revision after the transaction."""

    succeeded: bool
    revision: int


@dataclass(frozen=True, slots=True)
class Absent:
    """Holds if there is no such key."""

    key: str


@dataclass(frozen=True, slots=True)
class Exists:
    """Holds if there is such a key."""

    key: str


@dataclass(frozen=True, slots=True)
class RevisionIs:
    """Holds if the key was last changed by this revision; 0 stands for an absent key."""

    key: str
    mod_revision: int


@dataclass(frozen=True, slots=True)
class ValueIs:
    """Holds if the key exists with exactly this value."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """Holds if this session has ended or never was."""

    session: str


@dataclass(frozen=True, slots=True)
class Put:
    """Set the key. With `session`, it vanishes when that session ends; without, it belongs to none from now on."""

    key: str
    value: bytes
    session: str | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove the key; nothing happens if it is absent."""

    key: str


@dataclass(frozen=True, slots=True)
class DeleteRange:
    """Remove every key that starts with `prefix`; counts as one operation, however many there are."""

    prefix: str


Compare: TypeAlias = Absent | Exists | RevisionIs | ValueIs | SessionEnded
Operation: TypeAlias = Put | Delete | DeleteRange


class Session(Protocol):
    """A life that others can watch end: by `close`, or by the death of its process."""

    @property
    def id(self) -> str:
        """Its name, never used again by another."""

    def alive(self) -> bool:
        """Whether this process may still act for the session. A local test: no I/O, cheap enough for every ack."""

    def close(self) -> None:
        """When it returns, the session has ended for everyone and its keys are gone; harmless when repeated."""


class Watch(Protocol):
    """Changes under one prefix, each once, in the order of their revisions. For one thread at a time."""

    @property
    def revision(self) -> int:
        """Every change up to and including this revision was handed out; to go on later, watch from the next."""

    def poll(self, timeout_s: float) -> list[Change]:
        """The next changes, whole revisions and no more than the store keeps; empty if none came in time.

        Raises `Compacted` if changes that were not handed out yet are no longer kept.
        """

    def close(self) -> None:
        """End the watch; harmless when repeated."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class MetadataStore(Protocol):
    """The rules above. Safe for concurrent calls from threads; a read sees every transaction that returned before."""

    def get(self, key: str) -> Entry | None:
        """The entry as of now, or `None` if the store says there is none."""

    def range(self, prefix: str, *, start_after: str | None = None, limit: int | None = None) -> list[Entry]:
        """The entries whose keys start with `prefix` and lie behind `start_after`, sorted by code point.

        One consistent state; at most `limit`, and fewer only if there are no more.
        """

    def transaction(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        """If all comparisons hold, do all operations, else none.

        When it returns with success, all of it is durable and visible to everyone, as one revision.
        A key may be put once only, and not be deleted in the same transaction.
        """

    def watch(self, prefix: str, from_revision: int | None = None) -> Watch:
        """The changes under `prefix` from that revision on, or those after this call."""

    def session(self, ttl_s: float) -> Session:
        """A new session. Where the store cannot see a process die, it ends `ttl_s` after its last sign of life."""

    def session_alive(self, session: str) -> bool:
        """Whether that session, of whichever process, has not ended."""

    def end_session(self, session: str) -> None:
        """End a session of a process that the caller knows to be gone: no one waits for its time to live.

        Nothing if it has ended. A store that sees processes die by itself has nothing to do.
        """

    def revision(self) -> int:
        """The revision of the newest change."""

    def close(self) -> None:
        """End the sessions and watches of this handle; later calls raise `Closed`. Harmless when repeated."""

    def abandon(self) -> None:
        """Forget everything without touching the store, as a forked child must; later calls raise `Closed`."""


def check_key(key: str) -> None:
    """Raise `Invalid` unless every store can hold this key."""
    if not isinstance(key, str) or not key:
        raise Invalid(f"a metadata key is a text of at least one character, not {key!r}")
    check_prefix(key)


def check_prefix(prefix: str) -> None:
    """Raise `Invalid` unless keys may start with this; the empty prefix means all keys."""
    if not isinstance(prefix, str) or "\0" in prefix:
        raise Invalid(f"a metadata key is a text without NUL, not {prefix!r:.100}")
    try:
        prefix.encode()
    except UnicodeEncodeError as error:
        raise Invalid(f"metadata key {prefix!a:.100} cannot be written as UTF-8") from error


def check_limit(limit: int | None) -> None:
    """Raise `Invalid` for a page that could hold nothing."""
    if limit is not None and limit < 1:
        raise Invalid(f"limit is {limit}; give at least 1, or None for all")


def check_ttl(ttl_s: float) -> None:
    """Raise `Invalid` for a session that would be over at once."""
    if not 0 < ttl_s <= 86_400:
        raise Invalid(f"ttl_s is {ttl_s}; allowed: above 0, up to 86400 seconds")


def check_transaction(compares: Sequence[Compare], operations: Sequence[Operation]) -> None:
    """Raise `Invalid`, naming the limit, unless every store can take this transaction."""
    for kind, count in (("comparisons", len(compares)), ("operations", len(operations))):
        if count > OPERATIONS_MAX:
            raise Invalid(f"{count} {kind} in one transaction; the limit is {OPERATIONS_MAX}")
    size = sum(map(_compare_bytes, compares)) + sum(map(_operation_bytes, operations))
    if size > TRANSACTION_BYTES_MAX:
        raise Invalid(f"{size} bytes in one transaction; the limit is {TRANSACTION_BYTES_MAX}")
    _check_keys_once(operations)


def prefix_end(prefix: str) -> str | None:
    """The smallest text behind every text that starts with `prefix`; `None` if there is none."""
    for position in range(len(prefix) - 1, -1, -1):
        code = ord(prefix[position]) + 1
        if code <= 0x10FFFF:
            # Between the last character before the surrogates and the first behind them lies no other.
            return prefix[:position] + chr(0xE000 if code == 0xD800 else code)
    return None


def _compare_bytes(compare: Compare) -> int:
    if isinstance(compare, SessionEnded):
        return len(compare.session)
    check_key(compare.key)
    return len(compare.key.encode()) + (_value_bytes(compare.value) if isinstance(compare, ValueIs) else 0)


def _operation_bytes(operation: Operation) -> int:
    if isinstance(operation, DeleteRange):
        check_prefix(operation.prefix)
        return len(operation.prefix.encode())
    check_key(operation.key)
    return len(operation.key.encode()) + (_value_bytes(operation.value) if isinstance(operation, Put) else 0)


def _value_bytes(value: bytes) -> int:
    if not isinstance(value, bytes):
        raise Invalid(f"a metadata value is bytes, not {type(value).__name__}")
    return len(value)


def _check_keys_once(operations: Iterable[Operation]) -> None:
    # As etcd does: within one revision a key has one fate, else the order of a watch would have no meaning.
    put: set[str] = set()
    deleted: set[str] = set()
    ranges: list[str] = []
    for operation in operations:
        if isinstance(operation, DeleteRange):
            ranges.append(operation.prefix)
        elif isinstance(operation, Delete):
            deleted.add(operation.key)
        elif operation.key in put:
            raise Invalid(f"key {operation.key!r} is put twice in one transaction")
        else:
            put.add(operation.key)
    for key in put:
        if key in deleted or any(key.startswith(prefix) for prefix in ranges):
            raise Invalid(f"key {key!r} is put and deleted in one transaction")
