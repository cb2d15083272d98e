"""Sessions as leases: a key that etcd removes when its holder has given no sign of life for too long.

The holder counts by itself: from the *sending* of the last renewal that was answered, on a clock that goes on
while the machine sleeps, less a margin. So it gives up before another owner may take its place, whatever
becomes of the network. One thread per store renews all of its sessions.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading

from forebay.clock import Clock
from forebay.errors import ForebayError, Invalid, Unavailable
from forebay.locks import Rank, RankedLock
from forebay.metadata.etcd.gateway import Gateway
from forebay.metadata.etcd.keyspace import Keyspace, lease_from, session_of
from forebay.metadata.etcd.refusals import FAILED_PRECONDITION, NOT_FOUND, Refused
from forebay.metadata.etcd.wire import Acknowledgement, LeaseReply, Renewal, TransactionReply

RENEWALS_PER_LIFE = 3
_RETRY_S = 0.2
_IDLE_S = 60.0
_NAMES_MAX = 4
_JOIN_S = 2.0
_log = logging.getLogger(__name__)


class EtcdSession:
    """A session held by this process."""

    def __init__(self, leases: Leases, lease: int, *, sent_at: float, ttl_s: float) -> None:
        self._leases = leases
        self._id = session_of(lease) or ""
        self._ended = False
        self._is_over = False
        """etcd knows of its end too."""
        self.lease = lease
        self.ttl_s = ttl_s
        self.holds_s = ttl_s - leases.margin_s
        """How long it is relied on after each renewal."""
        self.renewed(sent_at)

    @property
    def id(self) -> str:
        return self._id

    def alive(self) -> bool:
        return not self._ended and self._leases.now() < self._deadline

    def close(self) -> None:
        self._ended = True
        if not self._is_over:
            self._leases.end(self)
            self._is_over = True

    def renewed(self, sent_at: float) -> None:
        """etcd has confirmed the lease in answer to what was sent then."""
        self._deadline = sent_at + self.holds_s
        # However large the margin is: several times before the session is given up.
        self.due_at = sent_at + self.holds_s / RENEWALS_PER_LIFE

    def lost(self) -> None:
        """etcd has said that the lease is over."""
        self._ended = self._is_over = True


class Leases:
    """The sessions of one store and the thread that renews them, begun with the first."""

    def __init__(self, gateway: Gateway, keyspace: Keyspace, clock: Clock, *, margin_s: float) -> None:
        self.margin_s = margin_s
        self._gateway = gateway
        self._keyspace = keyspace
        self._clock = clock
        self._held: dict[str, EtcdSession] = {}
        self._lock = RankedLock(Rank.STORE, "metadata.leases")
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, ttl_s: float) -> EtcdSession:
        """A new session. When it returns, everybody sees its key."""
        sent_at = self._clock.boottime()
        lease, granted_s = self.grant(math.ceil(ttl_s))
        if granted_s <= self.margin_s:
            self._revoke_quietly(lease)
            raise Invalid(f"ttl_s is {ttl_s}, not above the margin of {self.margin_s} s: no lease would ever hold")
        session = EtcdSession(self, lease, sent_at=sent_at, ttl_s=granted_s)
        put = {"key": self._keyspace.session_key(session.id), "value": b"", "lease": str(lease)}
        try:
            # May be repeated: no other process knows the key yet, and a second put changes nothing.
            self._gateway.call("/v3/kv/txn", {"success": [{"request_put": put}]}, TransactionReply, repeatable=True)
        except Refused as error:
            self._revoke_quietly(lease)
            if error.code == NOT_FOUND:
                raise Unavailable(f"session {session.id} ran out while it was being made: try again") from error
            raise error.as_error() from error
        except BaseException:
            self._revoke_quietly(lease)
            raise
        with self._lock:
            self._held[session.id] = session
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self.keep, name="forebay-leases", daemon=True)
                thread.start()
                self._thread = thread
        self._wake.set()
        return session

    def end(self, session: EtcdSession) -> None:
        """When it returns, the lease is over and its keys are gone."""
        if self._gateway.ended:
            return
        with self._lock:
            self._held.pop(session.id, None)
        try:
            self.revoke(session.lease)
        except Unavailable as error:
            raise Unavailable(
                f"session {session.id} is renewed no more, but etcd did not answer: its keys go within "
                f"{session.ttl_s:g} s ({error})"
            ) from error

    def end_all(self) -> list[ForebayError]:
        """End every session, each tried; gives what went wrong."""
        failures: list[ForebayError] = []
        for session in tuple(self._held.values()):
            try:
                session.close()
            except ForebayError as error:
                failures.append(error)
        return failures

    def stop(self) -> None:
        """Let the thread end; the gateway has ended before."""
        self._wake.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)

    def now(self) -> float:
        """The time that leases are counted in; for ever late once the store has ended."""
        return math.inf if self._gateway.ended else self._clock.boottime()

    def renew_due(self) -> float:
        """Renew what is due. Gives the seconds until something is due again."""
        with self._lock:
            held = tuple(self._held.values())
        for session in held:
            if session.due_at <= self._clock.boottime():
                self.renew(session)
        with self._lock:
            return min((session.due_at for session in self._held.values()), default=math.inf) - self._clock.boottime()

    def keep(self) -> None:
        while not self._gateway.ended:
            self._wake.clear()
            try:
                wait_s = self.renew_due()
            except Exception:
                # Nothing is promised without renewal: the sessions end by their deadlines, and the next begins again.
                _log.exception("sessions are renewed no more")
                raise
            if not self._gateway.ended:
                self._wake.wait(min(max(wait_s, 0.0), _IDLE_S))

    def renew(self, session: EtcdSession) -> None:
        sent_at = self._clock.boottime()
        timeout_s = min(self._gateway.timeout_s, max(1.0, session.holds_s / 4))
        try:
            reply = self._gateway.ask("/v3/lease/keepalive", {"ID": str(session.lease)}, Renewal, timeout_s=timeout_s)
        except ForebayError as error:
            if not self._gateway.ended:
                _log.warning("session %s is not renewed: %s", session.id, error)
            session.due_at = self._clock.boottime() + _RETRY_S
            return
        if reply.result.ttl_s > 0:
            session.renewed(sent_at)
            return
        _log.warning("session %s has ended: etcd has let its lease go", session.id)
        session.lost()
        with self._lock:
            self._held.pop(session.id, None)

    def grant(self, ttl_s: int) -> tuple[int, float]:
        for _ in range(_NAMES_MAX):
            lease = lease_from(self._clock.random_bytes(8))
            try:
                # A grant whose answer was lost leaves a lease without a use that ends by itself.
                request = {"ID": str(lease), "TTL": str(ttl_s)}
                granted = self._gateway.call("/v3/lease/grant", request, LeaseReply, repeatable=True)
            except Refused as error:
                if error.code != FAILED_PRECONDITION:
                    raise error.as_error() from error
                continue
            return lease, float(granted.ttl_s)
        raise Unavailable(f"etcd knows {_NAMES_MAX} new names of sessions already: try again")

    def revoke(self, lease: int) -> None:
        """When it returns, the lease is over, whichever process had it."""
        try:
            self._gateway.call("/v3/lease/revoke", {"ID": str(lease)}, Acknowledgement, repeatable=True)
        except Refused as error:
            if error.code != NOT_FOUND:
                raise error.as_error() from error

    def _revoke_quietly(self, lease: int) -> None:
        # A lease without a use ends by itself; what went wrong before matters more.
        with contextlib.suppress(ForebayError):
            self.revoke(lease)
