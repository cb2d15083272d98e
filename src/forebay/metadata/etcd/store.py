"""The metadata store in etcd: what the seam promises, said in etcd's transactions, leases and watches.

Reads ask the majority. A transaction is sent once; if its answer is lost it is `Indeterminate`, because it
may still land. Every session is a leased key, so "that session has ended" is compared within a transaction
like any other key.
"""

from __future__ import annotations

import logging
import re
import ssl
import weakref
from collections.abc import Sequence
from functools import cache

from forebay.clock import Clock
from forebay.errors import Closed, Invalid, Unavailable
from forebay.metadata.etcd.gateway import Gateway
from forebay.metadata.etcd.keyspace import Keyspace, KeySpan, lease_of
from forebay.metadata.etcd.leases import EtcdSession, Leases
from forebay.metadata.etcd.refusals import NOT_FOUND, Refused
from forebay.metadata.etcd.watch import EtcdWatch
from forebay.metadata.etcd.wire import (
    KeyValue,
    RangeReply,
    TransactionReply,
    key_request,
    span_request,
    transaction_request,
)
from forebay.metadata.seam import (
    Compare,
    Entry,
    Operation,
    Outcome,
    Put,
    check_limit,
    check_prefix,
    check_transaction,
    check_ttl,
)
from forebay.settings import MetadataSettings

PAGE_KEYS_MAX = 1_000
_RANGE_TRIES_MAX = 5
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_VERSION_MIN = (3, 5, 3)
_log = logging.getLogger(__name__)


class EtcdMetadata:
    """A `MetadataStore` in the etcd that `gateway` reaches; session keys lie under `<prefix>/sessions/`."""

    def __init__(
        self, gateway: Gateway, *, clock: Clock, prefix: str = "/forebay", lease_margin_s: float = 2.0
    ) -> None:
        self._gateway = gateway
        self._keyspace = Keyspace(prefix)
        self._leases = Leases(gateway, self._keyspace, clock, margin_s=lease_margin_s)
        self._watches: weakref.WeakSet[EtcdWatch] = weakref.WeakSet()

    @classmethod
    def open(cls, settings: MetadataSettings, *, clock: Clock) -> EtcdMetadata:
        """The store that `settings` name. When it returns, a majority of etcd has answered."""
        gateway = Gateway(
            settings.endpoints,
            clock=clock,
            request_timeout_s=settings.request_timeout_ms / 1000,
            tls=_tls(settings),
            user=settings.user,
            password=settings.password,
        )
        store = cls(gateway, clock=clock, prefix=settings.prefix, lease_margin_s=settings.lease_margin_s)
        try:
            store.revision()
            warn_of_version(gateway.version())
        except BaseException:
            gateway.close()
            raise
        return store

    def get(self, key: str) -> Entry | None:
        reply = self._read(key_request(self._keyspace.key(key)))
        return reply.kvs[0].entry if reply.kvs else None

    def range(self, prefix: str, *, start_after: str | None = None, limit: int | None = None) -> list[Entry]:
        check_limit(limit)
        spans = self._keyspace.spans(prefix)
        if start_after is not None:
            check_prefix(start_after)
            spans = [span.behind(start_after.encode()) for span in spans]
        spans = [span for span in spans if not span.is_empty]
        for _ in range(_RANGE_TRIES_MAX):
            try:
                return [found.entry for found in self._pages(spans, limit)]
            except Refused as error:
                # The state that the first page was of is gone: begin again with a newer one.
                if not error.is_compacted:
                    raise error.as_error() from error
        raise Unavailable(f"{prefix!r:.200} was compacted {_RANGE_TRIES_MAX} times while it was listed: try again")

    def transaction(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        check_transaction(compares, operations)
        sessions = {operation.session for operation in operations if isinstance(operation, Put) and operation.session}
        nobodies = {session for session in sessions if lease_of(session) is None}
        request = transaction_request(self._keyspace, compares, () if nobodies else operations)
        try:
            reply = self._gateway.call("/v3/kv/txn", request, TransactionReply, repeatable=not operations)
        except Refused as error:
            if error.code == NOT_FOUND:
                raise _ended(sessions) from error
            raise error.as_error() from error
        if reply.succeeded and nobodies:
            raise _ended(nobodies)
        return Outcome(succeeded=reply.succeeded, revision=reply.header.revision)

    def watch(self, prefix: str, from_revision: int | None = None) -> EtcdWatch:
        self._keyspace.spans(prefix)
        start = self.revision() + 1 if from_revision is None else from_revision
        self._gateway.refuse_if_ended()
        watch = EtcdWatch(self._gateway, self._keyspace, prefix, start)
        self._watches.add(watch)
        return watch

    def session(self, ttl_s: float) -> EtcdSession:
        check_ttl(ttl_s)
        return self._leases.begin(ttl_s)

    def session_alive(self, session: str) -> bool:
        return bool(self._read(key_request(self._keyspace.session_key(session))).kvs)

    def end_session(self, session: str) -> None:
        lease = lease_of(session)
        # Only a lease that holds a session key of ours: a number from a file may be another program's by now.
        if lease is not None and self.session_alive(session):
            self._leases.revoke(lease)

    def revision(self) -> int:
        return self._read(key_request(self._keyspace.sessions.encode(), count_only=True)).header.revision

    def close(self) -> None:
        if self._gateway.guard.is_forked:
            return
        failures = [] if self._gateway.ended else self._leases.end_all()
        self._gateway.end()
        for watch in tuple(self._watches):
            watch.close()
        self._leases.stop()
        self._gateway.close()
        if failures:
            raise failures[0]

    def abandon(self) -> None:
        self._gateway.abandon()

    def _read(self, request: dict[str, object]) -> RangeReply:
        return self._gateway.ask("/v3/kv/range", request, RangeReply)

    def _pages(self, spans: Sequence[KeySpan], limit: int | None) -> list[KeyValue]:
        """The keys of these spans as of one revision, that of the first page."""
        found: list[KeyValue] = []
        revision = 0
        for span in spans:
            rest: KeySpan | None = span
            while rest is not None and (limit is None or len(found) < limit):
                count = PAGE_KEYS_MAX if limit is None else min(PAGE_KEYS_MAX, limit - len(found))
                request = span_request(rest, limit=count, revision=revision)
                page = self._gateway.call("/v3/kv/range", request, RangeReply, repeatable=True)
                revision = revision or page.header.revision
                found += page.kvs
                rest = rest.behind(page.kvs[-1].key) if page.more else None
        return found


def _ended(sessions: set[str]) -> Closed:
    names = " or ".join(sorted(sessions))
    return Closed(f"session {names} has ended: it can own no keys")


def _tls(settings: MetadataSettings) -> ssl.SSLContext | None:
    """How etcd's certificates are checked and which is shown to it; `None` if nothing is encrypted."""
    plain = [endpoint for endpoint in settings.endpoints if endpoint.startswith("http:")]
    if plain and (settings.tls_ca or settings.tls_cert):
        raise Invalid(f"metadata.tls_… is set, but {plain[0]} is not encrypted: write https://")
    if plain and settings.password:
        _log.warning("the password of etcd's user %s goes unencrypted to %s", settings.user, plain[0])
    if len(plain) == len(settings.endpoints):
        return None
    try:
        context = ssl.create_default_context(cafile=settings.tls_ca)
        if settings.tls_cert is not None:
            context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as error:
        files = ", ".join(filter(None, (settings.tls_ca, settings.tls_cert, settings.tls_key)))
        raise Invalid(f"cannot use the certificates {files}: {error.strerror or error}") from error
    return context


@cache
def warn_of_version(version: str | None) -> None:
    """Once in a process: a command opens several stores of one cluster."""
    match = _VERSION.match(version or "")
    if match is not None and tuple(map(int, match.groups())) < _VERSION_MIN:
        _log.warning("etcd %s may come back from a crash with inconsistent members: use 3.5.3 or newer", version)
