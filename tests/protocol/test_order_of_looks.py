"""What a process remembers of a store that others change: whichever call they come between, the next look corrects it.

Each of these looks has an order that makes it so: first the watch, then the look; first what is on its way, then what
is stored. The tests let another process act before each call of the look.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from forebay.cleanup import deleted_topics
from forebay.clock import Clock
from forebay.errors import Unauthenticated, UnknownTopic
from forebay.metadata import MemoryMetadata
from forebay.progress import Progress, ProgressStore, ReaderName
from forebay.service.tokens import NewToken, TokenBook, Tokens
from forebay.settings import ProgressSettings
from forebay.storage.cursors import Cursors
from forebay.testing.checks.invariants import Violation
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.others import SharedMetadata
from forebay.topics import TopicName, TopicSpec
from tests.ledger import Ledger
from tests.support.environments.peers import Peers

TOPIC = "shop/orders"
PREFIX = "/forebay"


def lost_changes_of_tokens() -> Iterator[Violation]:
    """A token is revoked and another created before each call of three looks; after one look more, both must hold."""
    for call in itertools.count():
        store, clock = MemoryMetadata(), ManualClock()
        others = Tokens(store, PREFIX, clock)
        old = _token(others)
        mine = SharedMetadata(store)
        book = TokenBook(mine, PREFIX, clock)
        made: list[NewToken] = []

        def revoke_and_create(others: Tokens = others, old: NewToken = old, made: list[NewToken] = made) -> None:
            others.revoke(old.token.token_id)
            made.append(_token(others))

        mine.before(call, revoke_and_create)
        for _ in range(3):
            book.step()
        if not mine.has_acted:
            book.close()
            return
        book.step()
        if _is_accepted(book, old):
            yield Violation("tokens", f"a token that was revoked before call {call} is accepted")
        if not _is_accepted(book, made[0]):
            yield Violation("tokens", f"a token that was created before call {call} is not accepted")
        book.close()


def _token(tokens: Tokens) -> NewToken:
    return tokens.create("anna", scopes=["read"], prefixes=["*"])


def _is_accepted(book: TokenBook, made: NewToken) -> bool:
    try:
        book.principal(made.secret.reveal())
    except Unauthenticated:
        return False
    return True


def test_a_token_that_is_revoked_or_created_between_any_two_calls_is_known_after_the_next_look(ledger: Ledger) -> None:
    found = list(lost_changes_of_tokens())
    ledger.violation("interleavings", n=len(found))
    assert found == []


def stale_answers_of_cursors() -> Iterator[Violation]:
    """The flusher writes what was committed before each call of a question: no answer lies below the commit."""
    name = ReaderName("shop", "orders", "g")
    spec = TopicSpec.create(
        TopicName.parse(TOPIC),
        topic_id="ab" * 16,
        created_at=0,
        partitions=1,
        durability=None,
        engine=None,
        compression="none",
    )
    questions: list[Callable[[Cursors], object]] = [
        lambda cursors: cursors.at("g", spec, 0),
        lambda cursors: cursors.commit(name, 0, Progress(offset=3, incarnation=spec.topic_id), ack="cached"),
    ]
    for ask in questions:
        for call in itertools.count():
            mine, clock = SharedMetadata(MemoryMetadata()), ManualClock()
            cursors = _cursors(mine, clock)
            for offset in (2, 5):
                cursors.commit(name, 0, Progress(offset=offset, incarnation=spec.topic_id), ack="cached")
            cursors.worker.stop()
            mine.before(call, cursors.flush)
            answer = ask(cursors)
            if not mine.has_acted:
                break
            at = answer.offset if isinstance(answer, Progress) else answer
            if at != 5:
                yield Violation("I25", f"asked while the flusher wrote before call {call}, a cursor at 5 was {answer}")


def _cursors(metadata: SharedMetadata, clock: Clock) -> Cursors:
    return Cursors(ProgressStore(metadata, PREFIX, clock), ProgressSettings(flush_interval_ms=600_000), clock)


def test_a_cursor_that_is_being_written_is_never_shown_further_back(ledger: Ledger) -> None:
    found = list(stale_answers_of_cursors())
    ledger.violation("interleavings", n=len(found))
    assert found == []


def stale_definitions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Violation]:
    """Another process deletes a topic, or deletes and creates it, before each call of the looks that follow changes."""
    monkeypatch.setattr(deleted_topics, "OWNER_SECONDS", 0.0)
    for is_again in (False, True):
        for call in itertools.count():
            found = _deleted_before(call, Peers(), is_again=is_again)
            if found is None:
                break
            yield from found


def _deleted_before(call: int, peers: Peers, *, is_again: bool) -> list[Violation] | None:
    """What is wrong after the topic was deleted before this call; `None` if there is no such call."""
    a, b = peers.open("A"), peers.open("B")
    handle = a.log.create_topic(TOPIC)
    handle.append(b"0")
    inside(a.log).lose_changes()

    def change() -> None:
        b.log.delete_topic(TOPIC)
        if is_again:
            b.log.create_topic(TOPIC)

    a.metadata.before(call, change)
    for _ in range(2):
        inside(a.log).follow_changes()
    if not a.metadata.has_acted:
        peers.close()
        return None
    inside(a.log).end_deleted()
    found = []
    if not _is_ended(lambda: handle.append(b"1")):
        found.append(Violation("I10", f"an append to a topic that was deleted before call {call} was acknowledged"))
    known = inside(a.log).definitions.known(TopicName.parse(TOPIC))
    if known is not None and known.topic_id == handle.spec.topic_id:
        found.append(Violation("definitions", f"a topic that was deleted before call {call} is remembered"))
    peers.close()
    return found


def _is_ended(act: Callable[[], object]) -> bool:
    try:
        act()
    except UnknownTopic:
        return True
    return False


@pytest.mark.slow
def test_a_topic_that_is_deleted_between_any_two_calls_is_known_to_be_after_the_next_look(
    monkeypatch: pytest.MonkeyPatch, ledger: Ledger
) -> None:
    found = list(stale_definitions(monkeypatch))
    ledger.violation("interleavings", n=len(found))
    assert found == []
