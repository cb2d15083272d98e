"""Tokens: made once, revoked for ever, looked up without input or output, and their secrets shown nowhere."""

from __future__ import annotations

import copy
import hashlib
import logging
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from rich.pretty import pretty_repr

from forebay.clock import SystemClock
from forebay.definitions import FOLLOW_SECONDS
from forebay.disk import SystemDisk
from forebay.errors import Conflict, Indeterminate, Invalid, Unauthenticated, Unavailable, Unsupported
from forebay.format.metadata.keys import token_key
from forebay.format.metadata.value import decode_value, encode_value
from forebay.metadata import Delete, MemoryMetadata, Put
from forebay.metadata.sqlite import SqliteMetadata
from forebay.service.principals import AccessScope, Principal
from forebay.service.tokens import KEPT_DAYS, AccessToken, NewToken, TokenBook, Tokens, TokenState
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.metadata import Fault, FaultyMetadata
from tests.support.waiting import until

PREFIX = "/mine"


class TokenServer:
    """A process that looks tokens up, beside another one that makes and revokes them."""

    def __init__(self) -> None:
        self.inner = MemoryMetadata()
        self.clock = ManualClock(seed=3)
        self.metadata = FaultyMetadata(self.inner)
        self.book = TokenBook(self.metadata, PREFIX, self.clock)
        self.elsewhere = Tokens(self.inner, PREFIX, ManualClock(seed=4))

    def look(self, made: NewToken) -> Principal:
        return self.book.principal(made.secret.reveal())

    def calls(self, act: Callable[[], object]) -> dict[str, int]:
        self.metadata.calls = {}
        act()
        return self.metadata.calls


@pytest.fixture
def server() -> Iterator[TokenServer]:
    made = TokenServer()
    # Without the worker's thread: the test says when the store is asked.
    made.book.step()
    yield made
    made.book.close()


def create(tokens: Tokens, name: str = "billing", **given: int | None) -> NewToken:
    return tokens.create(name, scopes=["read", "write"], prefixes=["shop/"], **given)


def test_a_token_is_stored_with_the_hash_of_its_secret_and_nothing_else_of_it(server: TokenServer) -> None:
    made = server.elsewhere.create("billing", scopes=["write", "read", "read"], prefixes=["shop/", "/shop/", "bank/a"])
    secret = made.secret.reveal()

    assert re.fullmatch(r"fbt_[A-Za-z0-9_-]{43}", secret)
    entry = server.inner.get(token_key(made.token.token_id, prefix=PREFIX))
    assert entry is not None and entry.key == f"/mine/tokens/{made.token.token_id}"
    assert secret[4:].encode() not in entry.value
    stored, _ = decode_value(entry.value, AccessToken)
    assert stored == made.token
    assert stored.secret_sha256 == hashlib.sha256(secret.encode()).hexdigest()
    assert (stored.scopes, stored.prefixes) == (("read", "write"), ("bank/a", "shop/"))
    assert create(server.elsewhere).secret.reveal() != secret


def test_a_secret_leads_to_its_principal(server: TokenServer) -> None:
    made = create(server.elsewhere)
    server.book.step()

    assert server.look(made) == Principal(
        name="billing",
        scopes=frozenset({AccessScope.READ, AccessScope.WRITE}),
        prefixes=frozenset({"shop/"}),
        token_id=made.token.token_id,
    )


def test_of_two_tokens_of_one_name_the_operator_sees_which_is_in_use(server: TokenServer) -> None:
    old, new = create(server.elsewhere), create(server.elsewhere)
    server.book.step()

    assert server.look(old).name == server.look(new).name == "billing"
    assert (server.look(old).token_id, server.look(new).token_id) == (old.token.token_id, new.token.token_id)


@pytest.mark.parametrize(
    "wrong", ["", "fbt_", "Bearer x", "fbt_" + "A" * 43, "fbt_" + "A" * 10_000, "\ud800", "\0", "☃"]
)
def test_anything_else_is_refused_in_the_same_words(server: TokenServer, wrong: str) -> None:
    made = create(server.elsewhere)
    server.book.step()

    refusals = set()
    for secret in (wrong, made.secret.reveal() + "x", made.secret.reveal()[:-1], made.secret.reveal().lower()):
        with pytest.raises(Unauthenticated) as refusal:
            server.book.principal(secret)
        refusals.add(str(refusal.value))
        assert refusal.value.detail == {}
    assert refusals == {"no valid token was given: send one that is neither expired nor revoked"}


def test_a_look_up_asks_the_store_nothing(server: TokenServer) -> None:
    made = create(server.elsewhere)
    server.book.step()

    assert server.calls(lambda: server.look(made)) == {}
    assert server.calls(server.book.step) == {}, "a step without changes polls the watch alone"


def test_a_revocation_by_another_process_is_obeyed_with_the_next_step(server: TokenServer) -> None:
    made, other = create(server.elsewhere), create(server.elsewhere, "audit")
    server.book.step()

    revoked = server.elsewhere.revoke(made.token.token_id)
    server.book.step()

    assert revoked.revoked_at is not None
    with pytest.raises(Unauthenticated):
        server.look(made)
    assert server.look(other).name == "audit"
    assert FOLLOW_SECONDS < 1
    assert server.elsewhere.revoke(made.token.token_id) == revoked, "once more changes nothing"


def test_a_token_expires_by_the_clock_without_a_step(server: TokenServer) -> None:
    made = create(server.elsewhere, expires_at=server.clock.now_ms() + 1000)
    server.book.step()

    server.clock.jump(999)
    assert server.look(made).name == "billing"
    server.clock.jump(1)
    with pytest.raises(Unauthenticated):
        server.look(made)


def test_before_the_first_look_callers_are_asked_to_wait() -> None:
    book = TokenBook(MemoryMetadata(), PREFIX, ManualClock(seed=1))

    with pytest.raises(Unavailable, match="not been read yet"):
        book.principal("fbt_x")


@pytest.mark.parametrize("method", ["watch", "range"])
def test_while_the_store_is_away_the_tokens_known_last_are_accepted(
    server: TokenServer, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = create(server.elsewhere)
    server.book.step()
    server.metadata.compact_watches()
    server.metadata.inject(Fault.FAIL_BEFORE, method=method, count=2)
    server.elsewhere.revoke(made.token.token_id)

    server.book.step()
    server.book.step()

    assert server.look(made).name == "billing"
    assert [record.message for record in caplog.records if "not seen for now" in record.message] == [
        caplog.messages[0]
    ], "said once"
    assert server.book.status().failures == 2
    server.book.step()
    with pytest.raises(Unauthenticated):
        server.look(made)


def test_a_look_that_fails_after_the_watch_has_said_so_is_made_up_for(server: TokenServer) -> None:
    made = create(server.elsewhere)
    server.metadata.inject(Fault.FAIL_BEFORE, method="range")

    server.book.step()
    with pytest.raises(Unauthenticated):
        server.look(made)
    server.book.step()

    assert server.look(made).name == "billing"


def test_a_watch_that_lost_its_place_begins_again_at_once(
    server: TokenServer, caplog: pytest.LogCaptureFixture
) -> None:
    made = create(server.elsewhere)
    server.metadata.compact_watches()

    server.book.step()

    assert server.look(made).name == "billing" and caplog.records == []


def test_a_start_that_fails_can_be_repeated() -> None:
    metadata = FaultyMetadata(MemoryMetadata())
    metadata.inject(Fault.FAIL_BEFORE, method="range")
    book = TokenBook(metadata, PREFIX, SystemClock())
    with pytest.raises(Unavailable):
        book.start()
    made = create(Tokens(metadata, PREFIX, SystemClock()))

    book.start()

    assert book.principal(made.secret.reveal()).name == "billing"
    book.close()
    book.close()
    assert book.principal(made.secret.reveal()).name == "billing"


def test_another_process_revokes_while_the_worker_follows(tmp_path: Path) -> None:
    clock = SystemClock()

    def opened() -> SqliteMetadata:
        return SqliteMetadata(str(tmp_path / "m.sqlite"), disk=SystemDisk(), clock=clock)

    here, there = opened(), opened()
    book, tokens = TokenBook(here, PREFIX, clock), Tokens(there, PREFIX, clock)
    made = create(tokens)
    book.start()
    assert book.principal(made.secret.reveal()).name == "billing"

    tokens.revoke(made.token.token_id)
    until(lambda: _is_refused(book, made))

    book.close()
    here.close()
    there.close()


def _is_refused(book: TokenBook, made: NewToken) -> bool:
    try:
        book.principal(made.secret.reveal())
    except Unauthenticated:
        return True
    return False


def test_a_token_that_cannot_be_read_is_refused_and_keeps_no_other_out(
    server: TokenServer, caplog: pytest.LogCaptureFixture
) -> None:
    made, other = create(server.elsewhere), create(server.elsewhere, "audit")
    key = token_key(made.token.token_id, prefix=PREFIX)
    server.inner.transaction([], [Put(key, encode_value(made.token, min_reader=9))])
    server.book.step()

    assert server.look(other).name == "audit"
    with pytest.raises(Unauthenticated):
        server.look(made)
    assert f"left out: {key}" in caplog.text
    assert [token.name for token in server.elsewhere.all()] == ["audit"]
    server.inner.transaction([], [Delete(key)])
    server.book.step()
    assert server.look(other).name == "audit"


def test_fields_of_a_newer_version_survive_a_revocation(server: TokenServer) -> None:
    made = create(server.elsewhere)
    key = token_key(made.token.token_id, prefix=PREFIX)

    class Newer(AccessToken, frozen=True, kw_only=True):
        colour: str

    fields = {name: getattr(made.token, name) for name in made.token.__struct_fields__}
    server.inner.transaction([], [Put(key, encode_value(Newer(**fields, colour="red")))])

    server.elsewhere.revoke(made.token.token_id)

    entry = server.inner.get(key)
    assert entry is not None and decode_value(entry.value, AccessToken)[1].fields == {"colour": "red"}


@pytest.mark.parametrize("fault", [Fault.FAIL_AFTER, Fault.TIME_OUT])
def test_a_creation_or_revocation_whose_answer_is_lost_happens_once(server: TokenServer, fault: Fault) -> None:
    here = Tokens(server.metadata, PREFIX, server.clock)
    server.metadata.inject(fault)
    made = create(here)
    server.metadata.land()
    assert [token.token_id for token in here.all()] == [made.token.token_id]

    server.metadata.inject(fault)
    here.revoke(made.token.token_id)
    server.metadata.land()
    server.book.step()
    with pytest.raises(Unauthenticated):
        server.look(made)


def test_a_creation_whose_outcome_stays_unknown_shows_no_secret(server: TokenServer) -> None:
    here = Tokens(server.metadata, PREFIX, server.clock)
    server.metadata.inject(Fault.TIME_OUT, count=100)

    with pytest.raises(Indeterminate, match="token billing is not created") as refusal:
        create(here)

    assert "fbt_" not in str(refusal.value)


def test_an_id_that_is_taken_is_refused_and_the_other_token_stays(server: TokenServer) -> None:
    first = create(Tokens(server.inner, PREFIX, ManualClock(seed=9)))

    with pytest.raises(Conflict, match="exists already"):
        create(Tokens(server.inner, PREFIX, ManualClock(seed=9)), "other")

    assert server.elsewhere.all() == [first.token]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": ""}, "is not a name for a token"),
        ({"name": "a b"}, "is not a name for a token"),
        ({"name": "a" * 101}, "is not a name for a token"),
        ({"scopes": []}, "without a scope could do nothing"),
        ({"scopes": ["root"]}, "scope is 'root'"),
        ({"prefixes": []}, "has 0 topic prefixes: give 1 to 100"),
        ({"prefixes": [f"n{number}/" for number in range(101)]}, "has 101 topic prefixes"),
        ({"prefixes": ["shop"]}, "is not a topic prefix"),
        ({"expires_at": 0}, "would have expired already"),
    ],
)
def test_what_makes_no_token_is_refused_and_nothing_is_stored(
    server: TokenServer, given: dict[str, object], message: str
) -> None:
    asked = {"name": "billing", "scopes": ["read"], "prefixes": ["shop/"], **given}
    with pytest.raises(Invalid, match=message):
        server.elsewhere.create(asked.pop("name"), **asked)  # type: ignore[arg-type]

    assert server.elsewhere.all() == []


def test_a_token_that_is_not_there_cannot_be_revoked(server: TokenServer) -> None:
    with pytest.raises(Invalid, match="there is no token 'abc': \"forebay token list\""):
        server.elsewhere.revoke("abc")


def test_tokens_are_listed_oldest_first_with_their_state(server: TokenServer) -> None:
    clock = ManualClock(seed=5)
    tokens = Tokens(server.inner, PREFIX, clock)
    expiring = create(tokens, "a", expires_at=clock.now_ms() + 10)
    clock.jump(1)
    revoked = create(tokens, "b", expires_at=clock.now_ms() + 10)
    clock.jump(1)
    create(tokens, "a")
    tokens.revoke(revoked.token.token_id)
    clock.jump(20)

    assert [(token.name, token.state(clock.now_ms())) for token in tokens.all()] == [
        ("a", TokenState.EXPIRED),
        ("b", TokenState.REVOKED),
        ("a", TokenState.VALID),
    ]
    assert expiring.token.state(clock.now_ms()) is TokenState.EXPIRED


def test_a_secret_is_shown_nowhere(server: TokenServer, caplog: pytest.LogCaptureFixture) -> None:
    made = create(server.elsewhere)
    server.book.step()
    secret, digest = made.secret.reveal(), made.token.secret_sha256
    server.look(made)
    logging.getLogger("forebay").warning("%s %r", made.secret, made)

    shown = [repr(made), str(made.secret), f"{made.secret}", repr(made.token), str(made.token), pretty_repr(made)]
    shown += [repr(server.book), repr(server.look(made)), caplog.text, repr(vars(server.elsewhere))]
    for text in shown:
        assert secret not in text and digest not in text

    for act in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(Unsupported, match="is not pickled or copied") as refusal:
            act(made.secret)
        assert secret not in str(refusal.value)
    assert secret[4:].encode() not in pickle.dumps(made.token)
    assert secret not in msgspec.json.encode(made.token).decode()


def test_tokens_that_ended_long_ago_are_removed_and_no_others(server: TokenServer) -> None:
    day_ms = 86_400_000
    tokens = Tokens(server.inner, PREFIX, server.clock)
    now = server.clock.now_ms()
    valid = create(tokens, "valid")
    later = create(tokens, "later", expires_at=now + 100 * day_ms)
    expired = create(tokens, "expired", expires_at=now + day_ms)
    revoked = create(tokens, "revoked", expires_at=now + 100 * day_ms)
    tokens.revoke(revoked.token.token_id)

    server.clock.advance(KEPT_DAYS * 86_400 - 1)
    lately = create(tokens, "lately")
    tokens.revoke(lately.token.token_id)
    assert tokens.prune() == []
    server.clock.advance(2 * 86_400)

    assert {token.name for token in tokens.prune()} == {"expired", "revoked"}
    assert {token.name for token in tokens.all()} == {"valid", "later", "lately"}
    server.book.step()
    assert {server.look(made).name for made in (valid, later)} == {"valid", "later"}
    with pytest.raises(Unauthenticated):
        server.look(expired)
