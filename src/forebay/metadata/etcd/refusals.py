"""What an error of etcd means for who asked: was anything done, and is it worth asking again?

Only an error that comes before a proposal, or out of applying it, says that nothing was done. Whatever else
goes wrong once a request is on its way leaves its outcome open. Pure.
"""

from __future__ import annotations

import msgspec

from forebay.decoders import decoder
from forebay.errors import ForebayError, Invalid, Unavailable
from forebay.metadata.etcd.wire import FailureReply, StreamFailure

NOT_FOUND = 5
FAILED_PRECONDITION = 9
_OUT_OF_RANGE = 11
_PERMISSION_DENIED = 7
_UNAUTHENTICATED = 16
_FINAL = {3, NOT_FOUND, 6, _PERMISSION_DENIED, FAILED_PRECONDITION, _OUT_OF_RANGE, 12, _UNAUTHENTICATED}
"""Codes that come before a proposal or out of applying it: invalid argument, not found, already exists, …"""
_ELSEWHERE = (
    "etcdserver: no leader",
    "etcdserver: not leader",
    "etcdserver: too many requests",
    "etcdserver: rpc not supported for learner",
)
"""Said by a member before it has done anything; another, or the same a moment later, may help."""
_LOGIN = (
    "etcdserver: invalid auth token",
    "etcdserver: revision of auth store is old",
)
_NO_USER = "etcdserver: user name is empty"
_NO_SPACE = "etcdserver: mvcc: database space exceeded"
_COMPACTED = "etcdserver: mvcc: required revision has been compacted"


class NotDone(Exception):
    """Nothing was done; another member may do it."""


class AnswerLost(Exception):
    """The request was sent and its outcome is not known."""


class LoginNeeded(Exception):
    """Nothing was done; the token is no longer good."""


class Refused(Exception):
    """etcd's last word: nothing was done, and asking again will not help."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    @property
    def is_compacted(self) -> bool:
        return self.message == _COMPACTED

    @property
    def is_in_the_future(self) -> bool:
        return self.code == _OUT_OF_RANGE and not self.is_compacted

    def as_error(self) -> ForebayError:
        """For who has no better use for it."""
        if self.message == _NO_SPACE:
            return Unavailable(
                f'etcd is full ("{self.message}"): compact and defragment it, then disarm its alarm; reads go on'
            )
        if self.message == _NO_USER:
            return Invalid(f'etcd wants to know who asks ("{self.message}"): set metadata.user and metadata.password')
        if self.code == _PERMISSION_DENIED:
            return Invalid(
                f'etcd does not permit this ("{self.message}"): grant the user of metadata.user reading and writing '
                "of every key that begins with metadata.prefix"
            )
        return Invalid(f'etcd refuses the request ("{self.message}", code {self.code})')


def failure_of(status: int, body: bytes) -> NotDone | AnswerLost | LoginNeeded | Refused:
    """What a reply other than 200 means."""
    try:
        reply = decoder(FailureReply, strict=False).decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        # Not etcd's own words: something between us and it, which may have passed the request on.
        return AnswerLost(f"status {status}: {body[:100]!r}")
    if isinstance(reply.error, StreamFailure):
        return failure_by(reply.error.grpc_code, reply.error.message)
    return failure_by(reply.code, reply.error)


def failure_by(code: int, message: str) -> NotDone | AnswerLost | LoginNeeded | Refused:
    """What an error of etcd means."""
    if message in _LOGIN:
        return LoginNeeded(message)
    if message in _ELSEWHERE:
        return NotDone(message)
    if code in _FINAL or message == _NO_SPACE:
        return Refused(code, message)
    return AnswerLost(f"{message} (code {code})")
