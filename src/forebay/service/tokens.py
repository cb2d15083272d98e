"""Tokens of callers: made and revoked in the metadata store, looked up in memory.

A token stands for a name, scopes and topic prefixes. Its secret is shown once, when the token is made; the store has
only the SHA-256 of it. `Tokens` changes what is stored. `TokenBook` answers for every call who the caller is, from
memory: a worker follows the store. No secret appears in logs, errors, `repr` or pickles.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import re
from bisect import bisect_right
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Final, NamedTuple, NoReturn

import msgspec
from msgspec import Meta

from forebay.catalog.entries import UnreadableValue, decode_entry, readable, refused
from forebay.catalog.transact import Done, Write, transact
from forebay.clock import Clock
from forebay.definitions import FOLLOW_SECONDS
from forebay.errors import (
    Conflict,
    ForebayError,
    Invalid,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from forebay.format.metadata.keys import token_key, tokens_prefix
from forebay.format.metadata.value import encode_value
from forebay.locks import Rank, RankedLock
from forebay.metadata import Absent, Compacted, Delete, Entry, MetadataStore, Put, RevisionIs, Watch
from forebay.service.principals import AccessScope, Principal, parse_prefix
from forebay.workers import STOP_SECONDS, Worker, WorkerStatus

logger = logging.getLogger(__name__)

SECRET_BEGIN: Final = "fbt_"
"""How every secret begins, so that people and scanners recognise one."""
SECRET_BYTES: Final = 32
SECRET_CHARACTERS_MAX: Final = 128
"""A longer text is no secret and is not hashed."""
NAME_CHARACTERS_MAX: Final = 100
PREFIXES_MAX: Final = 100
KEPT_DAYS: Final = 30
"""For so long a list still shows a token that has ended; then it may be removed."""

_ID_BYTES: Final = 8
_NAME: Final = re.compile(rf"[A-Za-z0-9._-]{{1,{NAME_CHARACTERS_MAX}}}")


class TokenState(StrEnum):
    """Whether a token is accepted."""

    VALID = "valid"
    EXPIRED = "expired"
    REVOKED = "revoked"


class AccessToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token as stored, without its secret. Times are milliseconds since 1970 UTC."""

    token_id: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
    name: str
    """Whom it stands for. Tokens of one name are one principal, so that one can replace another."""
    secret_sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    scopes: tuple[AccessScope, ...]
    prefixes: tuple[str, ...]
    created_at: int
    expires_at: int | None = None
    revoked_at: int | None = None

    @property
    def principal(self) -> Principal:
        """Who shows its secret."""
        return Principal(
            name=self.name,
            scopes=frozenset(self.scopes),
            prefixes=frozenset(self.prefixes),
            token_id=self.token_id,
        )

    def state(self, now_ms: int) -> TokenState:
        """Whether it is accepted at this time."""
        if self.revoked_at is not None:
            return TokenState.REVOKED
        return TokenState.EXPIRED if self.expires_at is not None and self.expires_at <= now_ms else TokenState.VALID

    def __repr__(self) -> str:
        return f"AccessToken(token_id={self.token_id!r}, name={self.name!r})"

    def __rich_repr__(self) -> list[tuple[str, object]]:
        return [("token_id", self.token_id), ("name", self.name)]


class TokenSecret:
    """The secret of a new token, to be shown once. It hides from `repr`, `str` and formatting, and is not pickled."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The secret itself, for its owner alone."""
        return self._text

    def __repr__(self) -> str:
        return "TokenSecret((hidden))"

    def __reduce__(self) -> NoReturn:
        raise Unsupported("the secret of a token is not pickled or copied: reveal it where it was made, once")


class NewToken(NamedTuple):
    """A token that was made just now, with the only copy of its secret."""

    token: AccessToken
    secret: TokenSecret


def draft_token(
    clock: Clock, name: str, *, scopes: Iterable[str], prefixes: Iterable[str], expires_at: int | None = None
) -> NewToken:
    """A token that is stored nowhere yet, with the only copy of its secret; `Invalid` if it could not be used."""
    drawn = base64.urlsafe_b64encode(clock.random_bytes(SECRET_BYTES)).decode().rstrip("=")
    token = AccessToken(
        token_id=clock.random_bytes(_ID_BYTES).hex(),
        name=_name(name),
        secret_sha256=_digest(f"{SECRET_BEGIN}{drawn}").hex(),
        scopes=tuple(sorted({AccessScope.parse(scope) for scope in scopes})),
        prefixes=tuple(sorted({parse_prefix(prefix) for prefix in prefixes})),
        created_at=clock.now_ms(),
        expires_at=expires_at,
    )
    _check(token)
    return NewToken(token, TokenSecret(f"{SECRET_BEGIN}{drawn}"))


class Tokens:
    """The tokens in the metadata store. Each call reads or writes the store, in the caller's thread, without a lock."""

    def __init__(self, store: MetadataStore, prefix: str, clock: Clock) -> None:
        """`prefix` is `metadata.prefix`."""
        self._store = store
        self._prefix = prefix
        self._clock = clock

    def create(
        self, name: str, *, scopes: Iterable[str], prefixes: Iterable[str], expires_at: int | None = None
    ) -> NewToken:
        """Make a token; see `draft_token` and `add`."""
        made = draft_token(self._clock, name, scopes=scopes, prefixes=prefixes, expires_at=expires_at)
        self.add(made.token)
        return made

    def add(self, token: AccessToken) -> None:
        """Store a new token.

        After `Indeterminate` a token of this name may be stored whose secret is lost: list and revoke it.
        """
        key, value = token_key(token.token_id, prefix=self._prefix), encode_value(token)

        def put(entry: Entry | None) -> Write[None] | Done[None]:
            if entry is None:
                return Write([Absent(key)], [Put(key, value)], None)
            if entry.value != value:
                raise Conflict(f"token {token.token_id} exists already: create it again, it then gets another id")
            return Done(None)

        what = f"token {token.name} is not created"
        transact(self._store, lambda: self._store.get(key), put, what=what, clock=self._clock)

    def all(self) -> list[AccessToken]:
        """Every token as stored, also revoked and expired ones, oldest first; those that cannot be read are logged."""
        entries = self._store.range(tokens_prefix(prefix=self._prefix))
        found = [token for _, token in readable(entries, AccessToken)]
        return sorted(found, key=lambda token: (token.created_at, token.token_id))

    def unreadable(self) -> dict[str, UnreadableValue]:
        """The tokens that cannot be read, by id: no server accepts one of them, and each can be revoked."""
        below = tokens_prefix(prefix=self._prefix)
        found = {entry.key: refused(entry, AccessToken) for entry in self._store.range(below)}
        return {
            key.removeprefix(below): UnreadableValue(key, error) for key, error in found.items() if error is not None
        }

    def remove_unreadable(self, token_id: str) -> None:
        """Remove a token that cannot be read, which no server accepts; `Conflict` if it is another by now."""
        key = token_key(token_id, prefix=self._prefix)
        entry = self._store.get(key)
        if entry is None or refused(entry, AccessToken) is None:
            raise Conflict(f"token {token_id!a:.80} can be read, or is gone: revoke it again")
        if not self._store.transaction([RevisionIs(key, entry.mod_revision)], [Delete(key)]).succeeded:
            raise Conflict(f"token {token_id!a:.80} was changed at the same time: revoke it again")

    def revoke(self, token_id: str) -> AccessToken:
        """On return the token is revoked for ever; each server obeys within a second. Fine if it was before."""
        key = token_key(token_id, prefix=self._prefix)

        def revoked(entry: Entry | None) -> Write[AccessToken] | Done[AccessToken]:
            if entry is None:
                raise Invalid(f'there is no token {token_id!a:.80}: "forebay token list" shows the ids of all tokens')
            token, unknown = decode_entry(entry, AccessToken)
            if token.revoked_at is not None:
                return Done(token)
            ended = msgspec.structs.replace(token, revoked_at=self._clock.now_ms())
            # Commit point: from here on every server that reads the store refuses the token.
            put = Put(key, encode_value(ended, unknown=unknown))
            return Write([RevisionIs(key, entry.mod_revision)], [put], ended)

        what = f"token {token_id!a:.80} is not revoked"
        return transact(self._store, lambda: self._store.get(key), revoked, what=what, clock=self._clock)

    def prune(self) -> list[AccessToken]:
        """Remove the tokens that ended, by revocation or expiry, over `KEPT_DAYS` ago; which ones."""
        before = self._clock.now_ms() - KEPT_DAYS * 86_400_000
        removed = []
        for token in self.all():
            ends = [at for at in (token.revoked_at, token.expires_at) if at is not None]
            if ends and min(ends) < before:
                # None of them is accepted any more, and no change makes one valid again: no need to compare.
                self._store.transaction([], [Delete(token_key(token.token_id, prefix=self._prefix))])
                removed.append(token)
        return removed


class _Accepted(NamedTuple):
    """What a look-up needs of a token that is not revoked."""

    digest: bytes
    principal: Principal
    expires_at: int | None

    @classmethod
    def of(cls, token: AccessToken) -> _Accepted:
        return cls(bytes.fromhex(token.secret_sha256), token.principal, token.expires_at)


class _Edition(NamedTuple):
    """All tokens that are not revoked, as they were read at one time."""

    number: int
    by_digest: dict[bytes, _Accepted]
    by_id: dict[str, _Accepted]
    expiries: list[int]
    """When they expire, in order."""

    @classmethod
    def of(cls, tokens: Iterable[AccessToken], number: int) -> _Edition:
        accepted = [_Accepted.of(token) for token in tokens if token.revoked_at is None]
        expiries = sorted(one.expires_at for one in accepted if one.expires_at is not None)
        by_id = {one.principal.token_id: one for one in accepted if one.principal.token_id is not None}
        return cls(number, {one.digest: one for one in accepted}, by_id, expiries)


class TokenBook:
    """Who a caller is, by the secret that it shows: from memory, kept to what the metadata store says by a worker.

    Any thread looks up, without a lock. The worker's thread asks the watch of the store every `FOLLOW_SECONDS`, and
    reads all tokens again when one has changed: they are few and change seldom. While the store does not answer, the
    tokens known last are accepted, and expire as they would; a line in the log says so.
    """

    def __init__(self, store: MetadataStore, prefix: str, clock: Clock) -> None:
        self._store = store
        self._prefix = prefix
        self._clock = clock
        self._edition: _Edition | None = None
        """Replaced as a whole. `None` before the first look at the store."""
        self._watch: Watch | None = None
        self._is_away = False
        """Whether the last look has failed, which was logged."""
        self._following = RankedLock(Rank.ROUND, "service.tokens")
        """Held by the thread that asks the store; others leave it to that one."""
        self._worker = Worker("forebay-tokens", self.step, clock=clock, interval_s=FOLLOW_SECONDS)

    def start(self) -> None:
        """Read the tokens, in the caller's thread, and follow changes from then on; raises what the store raises."""
        with self._following:
            self._follow()
        self._worker.start()

    def principal(self, secret: str) -> Principal:
        """Who shows this secret; `Unauthenticated` if no valid token has it, `Unavailable` before `start`."""
        edition = self._edition
        if edition is None:
            raise Unavailable("tokens have not been read yet: try again in a second")
        digest = _digest(secret) if len(secret) <= SECRET_CHARACTERS_MAX else b""
        found = edition.by_digest.get(digest)
        # A look-up by digest says nothing about the secret by its time; the comparison keeps that so for any mapping.
        if found is None or not hmac.compare_digest(found.digest, digest):
            raise Unauthenticated(_REFUSED)
        return self._valid(found)

    def present(self, principal: Principal) -> Principal:
        """The same caller with the rights that its token has now; `Unauthenticated` if it is not accepted any more."""
        found = None
        if self._edition is not None and principal.token_id is not None:
            found = self._edition.by_id.get(principal.token_id)
        if found is None:
            raise Unauthenticated(_REFUSED)
        return self._valid(found)

    def edition(self) -> object:
        """A value that is another one once tokens were read again, or one has expired."""
        edition = self._edition
        return None if edition is None else (edition.number, bisect_right(edition.expiries, self._clock.now_ms()))

    def _valid(self, found: _Accepted) -> Principal:
        if found.expires_at is not None and found.expires_at <= self._clock.now_ms():
            raise Unauthenticated(_REFUSED)
        return found.principal

    def step(self) -> None:
        """Go by what has changed. Asks the metadata store; called by the worker's thread, and by tests."""
        if not self._following.acquire(blocking=False):
            return
        try:
            self._follow()
            self._is_away = False
        except ForebayError as error:
            if not self._is_away:
                logger.warning("changes to tokens are not seen for now, and those known before are accepted: %s", error)
            self._is_away = True
            self._worker.note_failure(error)
        finally:
            self._following.release()

    def status(self) -> WorkerStatus:
        """How the worker fares: whether changes are followed."""
        return self._worker.status()

    def close(self) -> None:
        """Stop following; harmless when repeated. What is known stays known."""
        self._worker.stop()
        is_ours = self._following.acquire(timeout=STOP_SECONDS)
        try:
            self._end_watch()
        finally:
            if is_ours:
                self._following.release()

    def _follow(self) -> None:
        """Read all tokens if one has changed, or if none were read since the watch began."""
        try:
            if self._watch is not None and not self._has_changed(self._watch):
                return
            if self._watch is None:
                # First the watch, then the look: a change in between is seen twice rather than never.
                self._watch = self._store.watch(tokens_prefix(prefix=self._prefix))
            tokens = Tokens(self._store, self._prefix, self._clock).all()
        except BaseException:
            # What the watch has handed out may not have been looked at: the next call looks at everything.
            self._end_watch()
            raise
        self._edition = _Edition.of(tokens, 0 if self._edition is None else self._edition.number + 1)

    def _has_changed(self, watch: Watch) -> bool:
        """Whether a token may have changed since the last call."""
        try:
            return bool(watch.poll(0))
        except Compacted:
            self._end_watch()
            return True

    def _end_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()


_REFUSED: Final = "no valid token was given: send one that is neither expired nor revoked"


def _name(name: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise Invalid(
            f"{name!a:.120} is not a name for a token: use 1 to {NAME_CHARACTERS_MAX} of A-Z a-z 0-9 . _ -, and never "
            "a secret"
        )
    return name


def _check(token: AccessToken) -> None:
    if not token.scopes:
        raise Invalid(f"a token for {token.name} without a scope could do nothing: give {', '.join(AccessScope)}")
    if not 1 <= len(token.prefixes) <= PREFIXES_MAX:
        raise Invalid(
            f"a token for {token.name} has {len(token.prefixes)} topic prefixes: give 1 to {PREFIXES_MAX}, "
            'such as "shop/", or "*" for every topic'
        )
    if token.state(token.created_at) is not TokenState.VALID:
        raise Invalid(f"a token for {token.name} would have expired already: name a later time")


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
