"""Where things lie in etcd: keys as they are, and under `<prefix>/sessions/` one leased key per session.

Session keys belong to the store alone: no range, watch or deletion of a caller sees or touches them.
Pure: knows bytes and their order, no network.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from forebay.errors import Invalid
from forebay.metadata.seam import check_key, check_prefix, prefix_end

NO_END = b"\0"
"""As the end of a span, in etcd's own way: every key from the start on."""
_SESSION = re.compile(r"[0-9a-f]{16}")
_LEASE_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class KeySpan:
    """The keys from `start` on and before `end`."""

    start: bytes
    end: bytes

    @property
    def is_empty(self) -> bool:
        return self.end not in (NO_END, b"") and self.start >= self.end

    def behind(self, key: bytes) -> KeySpan:
        """What of it lies behind `key`."""
        return KeySpan(max(self.start, key + b"\0"), self.end)


class Keyspace:
    """The keys of one installation, whose session keys begin with `prefix`."""

    def __init__(self, prefix: str) -> None:
        check_prefix(prefix)
        self.sessions = f"{prefix}/sessions/"

    def session_key(self, session: str) -> bytes:
        return self.sessions.encode() + session.encode(errors="surrogatepass")

    def key(self, key: str) -> bytes:
        """The bytes of a caller's key."""
        check_key(key)
        self._refuse_sessions(key)
        return key.encode()

    def is_hidden(self, key: str) -> bool:
        return key.startswith(self.sessions)

    def spans(self, prefix: str) -> list[KeySpan]:
        """What a caller means by `prefix`: one span, or the two around the session keys."""
        check_prefix(prefix)
        self._refuse_sessions(prefix)
        whole = span_of(prefix)
        if not self.covers_sessions(prefix):
            return [whole]
        hidden = span_of(self.sessions)
        return [KeySpan(whole.start, hidden.start), KeySpan(hidden.end, whole.end)]

    def covers_sessions(self, prefix: str) -> bool:
        return self.sessions.startswith(prefix)

    def _refuse_sessions(self, key: str) -> None:
        if self.is_hidden(key):
            raise Invalid(f"{key!r:.200} lies under {self.sessions!r}, which the store keeps for its sessions")


def span_of(prefix: str) -> KeySpan:
    """All keys that start with `prefix`."""
    end = prefix_end(prefix)
    return KeySpan(prefix.encode() or b"\0", NO_END if end is None else end.encode())


def session_of(lease: int) -> str | None:
    """The session whose lease this is; leases of others have such a name too."""
    return f"{lease:016x}" if lease else None


def lease_of(session: str) -> int | None:
    """The lease of a session, or `None` for a text that names none."""
    lease = int(session, 16) if _SESSION.fullmatch(session) else 0
    return lease if 0 < lease <= _LEASE_MAX else None


def lease_from(random: bytes) -> int:
    """A lease number made of eight random bytes."""
    return int.from_bytes(random, "big") & _LEASE_MAX or 1
