"""What goes over etcd's JSON gateway: requests and replies as values. Pure: no network, no time.

Bytes travel as base64, 64-bit numbers as texts, and a field that is zero or false is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from forebay.metadata.etcd.keyspace import Keyspace, KeySpan, lease_of, session_of
from forebay.metadata.seam import (
    Absent,
    Change,
    Compare,
    Delete,
    DeleteRange,
    Entry,
    Exists,
    Operation,
    Put,
    RevisionIs,
    SessionEnded,
)

Request: TypeAlias = dict[str, Any]


class Header(msgspec.Struct, frozen=True):
    """What every reply begins with."""

    revision: int = 0


class KeyValue(msgspec.Struct, frozen=True):
    """One key as etcd keeps it."""

    key: bytes
    value: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0
    lease: int = 0

    @property
    def name(self) -> str:
        # Keys of other programs may be no text; they are shown, not understood.
        return self.key.decode(errors="surrogateescape")

    @property
    def entry(self) -> Entry:
        return Entry(
            key=self.name,
            value=self.value,
            create_revision=self.create_revision,
            mod_revision=self.mod_revision,
            session=session_of(self.lease),
        )


class RangeReply(msgspec.Struct, frozen=True):
    """The answer to `span_request` and `key_request`."""

    header: Header
    kvs: tuple[KeyValue, ...] = ()
    more: bool = False


class TransactionReply(msgspec.Struct, frozen=True):
    """The answer to `transaction_request`."""

    header: Header
    succeeded: bool = False


class LeaseReply(msgspec.Struct, frozen=True):
    """A lease as granted or renewed; a renewed lease without time left is gone."""

    header: Header
    ttl_s: int = msgspec.field(name="TTL", default=0)


class Renewal(msgspec.Struct, frozen=True):
    """The answer to a renewal, the first and only part of a stream."""

    result: LeaseReply


class Token(msgspec.Struct, frozen=True):
    """The answer to a login."""

    token: str


class Acknowledgement(msgspec.Struct, frozen=True):
    """An answer of which nothing is needed but that it came."""


class Event(msgspec.Struct, frozen=True):
    """One change within a watch."""

    kv: KeyValue
    type: str = "PUT"

    @property
    def change(self) -> Change:
        deleted = self.type == "DELETE"
        return Change(revision=self.kv.mod_revision, key=self.kv.name, entry=None if deleted else self.kv.entry)


class WatchReply(msgspec.Struct, frozen=True):
    """One message of a watch."""

    created: bool = False
    canceled: bool = False
    compact_revision: int = 0
    cancel_reason: str = ""
    events: tuple[Event, ...] = ()


class StreamFailure(msgspec.Struct, frozen=True):
    """An error within a stream, or in place of one."""

    grpc_code: int = 2
    message: str = ""


class WatchMessage(msgspec.Struct, frozen=True):
    """One line of a watch."""

    result: WatchReply | None = None
    error: StreamFailure | None = None


class FailureReply(msgspec.Struct, frozen=True):
    """An error in place of a reply."""

    error: str | StreamFailure
    code: int = 2


def key_request(key: bytes, *, count_only: bool = False) -> Request:
    """One key, as the majority has it at this moment."""
    return {"key": key, "count_only": count_only}


def span_request(span: KeySpan, *, limit: int, revision: int = 0, keys_only: bool = False) -> Request:
    """Keys in their order; as of `revision`, or as of now for 0."""
    return {
        "key": span.start,
        "range_end": span.end,
        "limit": str(limit),
        "revision": str(revision),
        "keys_only": keys_only,
    }


def watch_request(span: KeySpan, start: int) -> Request:
    return {"create_request": {"key": span.start, "range_end": span.end, "start_revision": str(start)}}


def transaction_request(keyspace: Keyspace, compares: Sequence[Compare], operations: Sequence[Operation]) -> Request:
    request = {
        "compare": [_comparison(keyspace, compare) for compare in compares],
        "success": _operations(keyspace, operations),
    }
    if not operations:
        # Without a read that asks the majority, a member would answer out of what it happens to know.
        asking = [{"request_range": key_request(keyspace.sessions.encode(), count_only=True)}]
        request |= {"success": asking, "failure": asking}
    return request


def _comparison(keyspace: Keyspace, compare: Compare) -> Request:
    if isinstance(compare, SessionEnded):
        return _comparison_of(keyspace.session_key(compare.session), "CREATE", "EQUAL", create_revision="0")
    key = keyspace.key(compare.key)
    if isinstance(compare, Absent):
        return _comparison_of(key, "CREATE", "EQUAL", create_revision="0")
    if isinstance(compare, Exists):
        return _comparison_of(key, "CREATE", "GREATER", create_revision="0")
    if isinstance(compare, RevisionIs):
        return _comparison_of(key, "MOD", "EQUAL", mod_revision=str(compare.mod_revision))
    return _comparison_of(key, "VALUE", "EQUAL", value=compare.value)


def _comparison_of(key: bytes, target: str, result: str, **operand: object) -> Request:
    return {"key": key, "target": target, "result": result, **operand}


def _operations(keyspace: Keyspace, operations: Sequence[Operation]) -> list[Request]:
    written: list[Request] = []
    around: list[str] = []
    for operation in operations:
        if isinstance(operation, Put):
            put: Request = {"key": keyspace.key(operation.key), "value": operation.value}
            if operation.session is not None:
                put["lease"] = str(lease_of(operation.session))
            written.append({"request_put": put})
        elif isinstance(operation, Delete):
            written.append({"request_delete_range": {"key": keyspace.key(operation.key)}})
        elif keyspace.covers_sessions(operation.prefix):
            around.append(operation.prefix)
        else:
            written += _deletions(keyspace, operation)
    if around:
        # All of them begin like the session keys, so the shortest covers the others: one operation becomes two at most.
        written += _deletions(keyspace, DeleteRange(min(around, key=len)))
    return written


def _deletions(keyspace: Keyspace, operation: DeleteRange) -> list[Request]:
    spans = keyspace.spans(operation.prefix)
    return [{"request_delete_range": {"key": span.start, "range_end": span.end}} for span in spans if not span.is_empty]
