"""Deliberate breaks of transactions: a comparison that is left out must show when another process comes in between."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import pytest

from forebay.cleanup import deleted_topics
from forebay.metadata import Compare, Operation, Outcome, SessionEnded
from forebay.testing.simulated.others import SharedMetadata
from tests.ledger import Ledger
from tests.protocol.between_calls import broken_between

pytestmark = pytest.mark.slow


def _without_comparing(keys: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Transactions do not compare keys like these: what was read may be stale when it is written back."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        transaction = SharedMetadata.transaction

        def blind(store: SharedMetadata, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
            kept = [one for one in compares if isinstance(one, SessionEnded) or not re.search(keys, one.key)]
            return transaction(store, kept, operations)

        patch.setattr(SharedMetadata, "transaction", blind)

    return apply


class StaleWrite(NamedTuple):
    """A break, and the operation and the other process that must show it."""

    name: str
    apply: Callable[[pytest.MonkeyPatch], None]
    operation: str
    other: str


BREAKS: Final = (
    StaleWrite("a definition is altered", _without_comparing("/topics/shop/orders$"), "alter", "deletes"),
    StaleWrite(
        "a subscription is altered", _without_comparing("/subscriptions/"), "alter subscription", "unsubscribes"
    ),
    StaleWrite("a router is altered", _without_comparing("/routers/r"), "alter router", "drops the router"),
    StaleWrite("a paused router is altered", _without_comparing("/routers/r"), "alter router", "pauses the router"),
    StaleWrite("a cursor is moved", _without_comparing("/progress/"), "commit", "commits"),
    StaleWrite("a token is revoked", _without_comparing("/tokens/"), "revoke", "revokes"),
    StaleWrite("a load is attached", _without_comparing("/loads/"), "attach", "gives the load up"),
    StaleWrite("a state is changed", _without_comparing("/state$"), "append", "deletes and creates again"),
)


@pytest.mark.parametrize("stale", BREAKS, ids=lambda stale: stale.name)
def test_what_is_written_by_a_stale_look_is_seen(
    stale: StaleWrite, monkeypatch: pytest.MonkeyPatch, ledger: Ledger
) -> None:
    monkeypatch.setattr(deleted_topics, "OWNER_SECONDS", 0.0)
    assert not any(broken_between(stale.operation, stale.other)), "without the break nothing is wrong"

    stale.apply(monkeypatch)
    is_seen = any(broken_between(stale.operation, stale.other))

    ledger.count("mutants caught", n=int(is_seen))
    assert is_seen
