"""A deliberate break, and the check that must name what it breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import pytest

from forebay.testing.checks.invariants import Violation, names_of
from tests.ledger import Ledger


class Breach(NamedTuple):
    """A break of the code, and what shows it: without the break nothing, with it the name of a promise."""

    name: str
    apply: Callable[[pytest.MonkeyPatch], None]
    show: Callable[[], Iterable[Violation]]
    invariant: str

    def check_sound(self) -> None:
        assert list(self.show()) == [], "without the break nothing is wrong"

    def check_caught(self, monkeypatch: pytest.MonkeyPatch, ledger: Ledger) -> None:
        self.apply(monkeypatch)
        found = names_of(self.show())

        ledger.count("mutants caught", n=int(self.invariant in found))
        assert self.invariant in found
