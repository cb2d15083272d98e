"""Deliberate breaks of the order in which a process looks at what others change: the checks must see each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

from forebay.metadata import Change, Watch
from forebay.storage.owner import OwnerBackend
from forebay.testing.checks.invariants import Violation
from forebay.testing.simulated.others import SharedMetadata
from forebay.topics import ShardRef
from tests.ledger import Ledger
from tests.mutants.breach import Breach
from tests.protocol.test_order_of_looks import lost_changes_of_tokens, stale_definitions

pytestmark = pytest.mark.slow


class LateWatch:
    """A watch that begins with the first question: after the look that it should have come before."""

    def __init__(self, begin: Callable[[], Watch]) -> None:
        self._begin = begin
        self._watch: Watch | None = None

    def poll(self, timeout_s: float) -> list[Change]:
        if self._watch is None:
            self._watch = self._begin()
        return self._watch.poll(timeout_s)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()


def _watch_after_the_look(patch: pytest.MonkeyPatch) -> None:
    watch = SharedMetadata.watch
    patch.setattr(SharedMetadata, "watch", lambda store, prefix, _=None: LateWatch(lambda: watch(store, prefix)))


def _deletions_not_noticed(patch: pytest.MonkeyPatch) -> None:
    def go_on(owner: OwnerBackend, ref: ShardRef) -> None:
        """The shard stays open."""

    patch.setattr(OwnerBackend, "end_deleted", go_on)


def _definitions() -> list[Violation]:
    with pytest.MonkeyPatch.context() as patch:
        return list(stale_definitions(patch))


MUTANTS: Final = (
    Breach(
        "tokens are looked at before the watch", _watch_after_the_look, lambda: list(lost_changes_of_tokens()), "tokens"
    ),
    Breach("definitions are looked at before the watch", _watch_after_the_look, _definitions, "I10"),
    Breach("the owner goes on after a deletion elsewhere", _deletions_not_noticed, _definitions, "I10"),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_checks_name_what_a_break_of_the_order_breaks(
    mutant: Breach, monkeypatch: pytest.MonkeyPatch, ledger: Ledger
) -> None:
    mutant.check_sound()
    mutant.check_caught(monkeypatch, ledger)
