"""A store in memory that passes the contract of the real ones, keeps a log of calls and fails on demand.

What a fault means is the seam's promise turned against the caller: after `Unavailable` nothing was done, after
`Indeterminate` either may be true or become true later, an answer may be that of a request delivered twice,
and a list may be old. Several handles may share one store (`another_process`).
"""

from __future__ import annotations

import enum
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from forebay.blobs.ahead import in_order, spans
from forebay.blobs.seam import (
    AHEAD,
    CHUNK_BYTES,
    BlobChanged,
    BlobMissing,
    Capabilities,
    Denied,
    Put,
    Stat,
    check_key,
    check_prefix,
    check_range,
)
from forebay.clock import Clock
from forebay.errors import Closed, Indeterminate, Unavailable, Unsupported
from forebay.records import Bytes
from forebay.testing.simulated.clock import ManualClock

T = TypeVar("T")


class Fault(enum.Enum):
    """What goes wrong with one call."""

    FAIL_BEFORE = "fail before"
    """Never reached the store: `Unavailable`, nothing done."""
    THROTTLED = "throttled (429, 503)"
    """`Unavailable`, nothing done."""
    CONFLICT = "conflict (409)"
    """Another request for the key is under way: `Unavailable`, nothing done."""
    PRECONDITION = "precondition failed (412)"
    """A read with an etag is answered that the object has changed."""
    DENIED = "denied (401, 403)"
    """`Denied`, nothing done."""
    BROKEN = "broken in the middle"
    """An upload or a read ends after its first piece: `Unavailable`, nothing done."""
    SERVER_ERROR = "server error (500), not done"
    """A write is `Indeterminate` and was not done; anything else is `Unavailable`."""
    FAIL_AFTER = "fail after success"
    """Done, but the answer is lost: `Indeterminate` (of a delete: `Unavailable`)."""
    LATE = "time-out, lands late"
    """The same, not done yet: it lands when `land` is called, or never."""
    DUPLICATE = "delivered twice"
    """Done twice, and the second answer is the one that comes: a create is answered "exists" for its own work."""


_ANY = frozenset({Fault.FAIL_BEFORE, Fault.THROTTLED, Fault.DENIED, Fault.SERVER_ERROR})
_WRITE = frozenset({Fault.FAIL_AFTER, Fault.LATE, Fault.DUPLICATE})
_REACHES: dict[str, frozenset[Fault]] = {
    "put_if_absent": _ANY | _WRITE | {Fault.CONFLICT},
    "upload": _ANY | _WRITE | {Fault.BROKEN},
    "delete": _ANY | _WRITE,
    "get_range": _ANY | {Fault.PRECONDITION},
    "get_ranges": _ANY | {Fault.PRECONDITION},
    "read": _ANY | {Fault.PRECONDITION, Fault.BROKEN},
    "list": _ANY,
    "stat": _ANY,
    "probe": _ANY,
    "abort_stale_uploads": _ANY,
}


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the seam; `key` is the prefix of a list."""

    index: int
    method: str
    key: str


def plan_faults(calls: Iterable[Call]) -> Iterator[tuple[Call, Fault]]:
    """Each fault at each call that can meet it: arm a fresh store with each in turn and run the same scenario."""
    for call in calls:
        for fault in sorted(_REACHES[call.method], key=lambda fault: fault.name):
            yield call, fault


class _Objects:
    """What all handles on one store share."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.kept: dict[str, tuple[bytes, Stat]] = {}
        self.calls: list[Call] = []
        self.faults: dict[int, Fault] = {}
        self.awaited: list[tuple[str, int, Fault]] = []
        self.late: list[Callable[[], object]] = []
        self.old_list: list[Stat] | None = None


class SimulatedBlobs:
    """A `BlobStore` in memory. With `honours_create=False` a second create overwrites, as some stores let it."""

    def __init__(
        self, *, clock: Clock | None = None, honours_create: bool = True, shared_with: SimulatedBlobs | None = None
    ) -> None:
        self.name = "simulated store"
        self._clock = clock or ManualClock()
        self._honours_create = honours_create
        self._shared: _Objects = shared_with._shared if shared_with is not None else _Objects()
        self._closed = False

    @property
    def calls(self) -> list[Call]:
        """Every call so far, those that failed included, on all handles."""
        return list(self._shared.calls)

    @property
    def contents(self) -> dict[str, bytes]:
        """What the store holds now; looking is no call."""
        with self._shared.lock:
            return {key: data for key, (data, _) in self._shared.kept.items()}

    def another_process(self) -> SimulatedBlobs:
        """The same objects by another handle."""
        return SimulatedBlobs(clock=self._clock, honours_create=self._honours_create, shared_with=self)

    def fail_at(self, index: int, fault: Fault) -> None:
        """Let the call of this index fail; see `plan_faults`."""
        self._shared.faults[index] = fault

    def inject(self, fault: Fault, *, method: str, after: int = 0, count: int = 1) -> None:
        """Let `count` calls of `method` fail, once `after` further calls of it went well."""
        if fault not in _REACHES[method]:
            raise ValueError(f"{fault.value} is no fault of {method}")
        # Those behind the first wait for it, and so count from where it struck.
        self._shared.awaited += [(method, after, fault), *[(method, 0, fault)] * (count - 1)]

    def heal(self) -> None:
        """Take back every fault that has not struck yet."""
        self._shared.faults.clear()
        self._shared.awaited.clear()

    def land(self) -> int:
        """Let what timed out reach the store now, in its order; how many requests did."""
        with self._shared.lock:
            late, self._shared.late = self._shared.late, []
            for effect in late:
                effect()
            return len(late)

    def hold_lists_back(self) -> None:
        """From now on lists show what is there now, as if behind a slow index."""
        with self._shared.lock:
            self._shared.old_list = [stat for _, stat in self._shared.kept.values()]

    def let_lists_go(self) -> None:
        """Lists are true again."""
        self._shared.old_list = None

    def put_if_absent(self, key: str, data: Bytes) -> Put:
        content = bytes(data)
        return self._write("put_if_absent", key, lambda: self._create(key, content))

    def upload(self, key: str, source: Iterable[Bytes]) -> Stat:
        fault = self._meet("upload", key)
        pieces: list[bytes] = []
        for piece in source:
            pieces.append(bytes(piece))
            if fault is Fault.BROKEN:
                raise Unavailable(f"injected: the upload of {key} broke off")
        content = b"".join(pieces)
        return self._struck(fault, "upload", key, lambda: self._keep(key, content))

    def get_range(self, key: str, start: int, stop: int, *, etag: str | None = None) -> bytes:
        check_range(start, stop)
        self._meet("get_range", key, etag=etag)
        return self._content(key, etag)[start:stop]

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]], *, etag: str | None = None) -> list[bytes]:
        for start, stop in ranges:
            check_range(start, stop)
        self._meet("get_ranges", key, etag=etag)
        content = self._content(key, etag)
        return [content[start:stop] for start, stop in ranges]

    def read(
        self,
        key: str,
        start: int,
        stop: int,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        ahead: int = AHEAD,  # unused: nothing here takes time
        etag: str | None = None,
    ) -> Iterator[bytes]:
        check_range(start, stop)
        pieces = spans(start, stop, chunk_bytes)
        fault = self._meet("read", key, etag=etag)
        content = self._content(key, etag)
        for data in in_order(lambda first, end: content[first:end], pieces):
            yield data
            if fault is Fault.BROKEN:
                raise Unavailable(f"injected: the answer broke off while {key} was read")

    def list(self, prefix: str = "") -> Iterator[Stat]:
        folder = check_prefix(prefix)
        self._meet("list", folder)
        with self._shared.lock:
            present = [stat for _, stat in self._shared.kept.values()]
            shown = self._shared.old_list if self._shared.old_list is not None else present
            found = sorted(stat for stat in shown if not folder or stat.key.startswith(f"{folder}/"))
        yield from found

    def stat(self, key: str) -> Stat | None:
        self._meet("stat", key)
        with self._shared.lock:
            kept = self._shared.kept.get(key)
        return kept[1] if kept is not None else None

    def delete(self, key: str) -> None:
        self._write("delete", key, lambda: self._remove(key))

    def probe(self, *, seconds_max: float | None = None) -> Capabilities:
        self._meet("probe", "")
        if not self._honours_create:
            raise Unsupported(f"{self.name} let the same key be created twice: take a store that honours If-None-Match")
        return Capabilities(store=self.name, exclusive_create=True)

    def abort_stale_uploads(self, older_than_s: float) -> int:
        """Nothing is ever half there; what may still land is not called back either, as no caller could."""
        self._meet("abort_stale_uploads", "")
        return 0

    def close(self) -> None:
        self._closed = True

    def _meet(self, method: str, key: str, *, etag: str | None = None) -> Fault | None:
        """Note the call and give its fault, having raised those that all methods know."""
        if self._closed:
            raise Closed(f"{self.name} was closed: open another")
        if method not in ("list", "probe", "abort_stale_uploads"):
            check_key(key)
        with self._shared.lock:
            call = Call(len(self._shared.calls), method, key)
            self._shared.calls.append(call)
            fault = self._shared.faults.pop(call.index, None) or self._awaited(method)
        if fault in (Fault.FAIL_BEFORE, Fault.THROTTLED, Fault.CONFLICT):
            raise Unavailable(f"injected: {fault.value} at {method} {key}")
        if fault is Fault.DENIED:
            raise Denied(f"injected: {fault.value} at {method} {key}")
        if fault is Fault.SERVER_ERROR:
            kind = Indeterminate if method in ("put_if_absent", "upload") else Unavailable
            raise kind(f"injected: {fault.value} at {method} {key}")
        if fault is Fault.PRECONDITION and etag is not None:
            raise BlobChanged(f"injected: {key} is not the object it was")
        return fault

    def _awaited(self, method: str) -> Fault | None:
        for place, (wanted, after, fault) in enumerate(self._shared.awaited):
            if wanted == method:
                if after == 0:
                    del self._shared.awaited[place]
                    return fault
                self._shared.awaited[place] = (wanted, after - 1, fault)
                return None
        return None

    def _write(self, method: str, key: str, effect: Callable[[], T]) -> T:
        return self._struck(self._meet(method, key), method, key, effect)

    def _struck(self, fault: Fault | None, method: str, key: str, effect: Callable[[], T]) -> T:
        """Do it, or what the fault makes of it."""
        unheard = Unavailable if method == "delete" else Indeterminate
        with self._shared.lock:
            if fault is Fault.LATE:
                self._shared.late.append(effect)
                raise unheard(f"injected: {method} {key} timed out; it may still land")
            if fault is Fault.DUPLICATE:
                effect()
            done = effect()
        if fault is Fault.FAIL_AFTER:
            raise unheard(f"injected: the answer to {method} {key} was lost")
        return done

    def _create(self, key: str, content: bytes) -> Put:
        kept = self._shared.kept.get(key)
        if kept is not None and self._honours_create:
            return Put(False, kept[1])
        return Put(True, self._keep(key, content))

    def _keep(self, key: str, content: bytes) -> Stat:
        etag = hashlib.blake2b(content, digest_size=12).hexdigest()
        stat = Stat(key, len(content), etag, None, self._clock.now_ms())
        self._shared.kept[key] = (content, stat)
        return stat

    def _remove(self, key: str) -> None:
        self._shared.kept.pop(key, None)

    def _content(self, key: str, etag: str | None) -> bytes:
        with self._shared.lock:
            kept = self._shared.kept.get(key)
        if kept is None:
            raise BlobMissing(f"{self.name} has no object {key}")
        if etag is not None and kept[1].etag != etag:
            raise BlobChanged(f"{self.name}: {key} is not the object it was (etag {kept[1].etag}, expected {etag})")
        return kept[0]
