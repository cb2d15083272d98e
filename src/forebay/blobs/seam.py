"""The seam itself: what every other room may ask of the place where sealed segments are kept.

Knows nothing of how it is done. Objects are immutable: small ones are put once under a name that any process may
try to take, large ones go up under a name unique to their content. Nothing is visible before it is whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from forebay.errors import Conflict, Invalid, Unavailable
from forebay.records import Bytes

KEY_LENGTH_MAX = 800
CHUNK_BYTES = 4 * 1024 * 1024
AHEAD = 2
_PART = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


class BlobMissing(Conflict):
    """The store answered that no object has this key."""


class BlobChanged(Conflict):
    """The object under this key is not the one whose etag was given."""


class Denied(Unavailable):
    """The store knows us not, or does not let us do this: look at the credentials and their rights."""


class Stat(NamedTuple):
    """One object. `etag` names its content, `version` is the store's own name for it, where it has one."""

    key: str
    size: int
    etag: str | None
    version: str | None
    modified_ms: int


class Put(NamedTuple):
    """The outcome of `put_if_absent`, true if this call created the object; `stat` is what the key holds now."""

    created: bool
    stat: Stat

    def __bool__(self) -> bool:
        return self.created


class Capabilities(NamedTuple):
    """What a probe found. `notes` say in words what is missing and what that means."""

    store: str
    exclusive_create: bool
    notes: tuple[str, ...] = ()


class BlobStore(Protocol):
    """Objects by key (`a/b/c`, relative; else `Invalid`). Safe for threads; not to be used after a fork.

    Every call may raise `Unavailable` (not now, nothing was done), `Denied`, or `Closed`.
    """

    name: str
    """Which store this is, for messages; without secrets."""

    def put_if_absent(self, key: str, data: Bytes) -> Put:
        """Create a small object, unless the key is taken.

        When it returns, the object is durable and whole. Of all that try at once exactly one creates it.
        Raises `Indeterminate` if it cannot be known whether this call created what is there, or will yet:
        compare by content.
        """

    def upload(self, key: str, source: Iterable[Bytes]) -> Stat:
        """Store a large object from pieces of any size, holding only a few parts of it in memory.

        When it returns, the object is durable and whole under its key; before, nothing of it is visible, and
        if the source raises nothing ever is. The key must be unique to the content, so that it may be repeated:
        what the key held before is replaced as a whole. `Indeterminate`: it may still appear.
        """

    def get_range(self, key: str, start: int, stop: int, *, etag: str | None = None) -> bytes:
        """The bytes `[start, stop)`, fewer only at the end of the object, none behind it.

        Raises `BlobMissing`, and `BlobChanged` if an `etag` is given and the object has another.
        """

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]], *, etag: str | None = None) -> list[bytes]:
        """Several ranges as by `get_range`, in the order asked for, fetched a few at a time."""

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
        """The bytes `[start, stop)` in order, in chunks of `chunk_bytes`, up to `ahead` of them fetched before needed.

        At most `store.read_ahead_bytes` are fetched ahead of the chunk being waited for. Errors as by `get_range`.
        """

    def list(self, prefix: str = "") -> Iterator[Stat]:
        """Every object below the folder `prefix` (`a/b` and `a/b/` are the same), page by page, in no promised order.

        Whatever was stored before the call is listed, each once; what comes or goes meanwhile may be.
        """

    def stat(self, key: str) -> Stat | None:
        """The object, or `None` if the store answered that there is none."""

    def delete(self, key: str) -> None:
        """When it returns, no object has this key; fine if none had.

        After an error it may have been done, or may yet be: repeat it, and never give the key to other content.
        """

    def probe(self, *, seconds_max: float | None = None) -> Capabilities:
        """Try what the promises above rest on; `Unsupported` names what this store does not do. Leaves nothing.

        One that does not answer is `Unavailable`. With `seconds_max` each request is given up after so long, however
        patient the settings are.
        """

    def abort_stale_uploads(self, older_than_s: float) -> int:
        """Clear away what interrupted uploads left behind, if older than this; how many were cleared."""

    def close(self) -> None:
        """Give back what is held. Later calls raise `Closed`; harmless when repeated."""


def check_key(key: str) -> str:
    """The key, if it is one."""
    if is_key(key):
        return key
    raise Invalid(
        f"{key[:100]!r} is no key of an object: write parts of letters, digits, `.`, `_`, `-` joined by `/`, "
        f"none empty or beginning with a dot, at most {KEY_LENGTH_MAX} characters"
    )


def is_key(key: str) -> bool:
    """Whether the key is one; others in the same bucket are none of ours."""
    return len(key) <= KEY_LENGTH_MAX and all(_PART.fullmatch(part) for part in key.split("/"))


def check_prefix(prefix: str) -> str:
    """The folder without a slash at its end; empty for all."""
    folder = prefix.removesuffix("/")
    return check_key(folder) if folder else ""


def check_range(start: int, stop: int) -> None:
    """Refuse ranges that are none."""
    if not 0 <= start <= stop:
        raise Invalid(f"[{start}, {stop}) is no range of bytes")
