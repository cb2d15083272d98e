"""Deliberate breaks of deletes: for each the checks must name the promise that it breaks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

import forebay.engines.rocksdb.removal
from forebay.engines.rocksdb.removal import Removal
from forebay.records import OFFSET_MAX
from forebay.shard.deletes import Deletes
from forebay.shard.lookups import Lookups
from forebay.testing.checks.invariants import Violation, names_of
from tests.engines.inside_deletes import (
    DELETES,
    between_pieces,
    bounded_by_the_head,
    rocks,
    segments,
    under_the_look,
    while_waiting,
    write,
)
from tests.ledger import Ledger


def _under_the_look(by: str, _: str) -> list[Violation]:
    """A record comes while the look is under way that finds what is to be deleted."""
    engine, ref, disk = segments()
    under_the_look(disk, partial(write, engine, ref))
    return list(bounded_by_the_head(engine, ref, DELETES[by]))


def _while_waiting(by: str, _: str) -> list[Violation]:
    """A record comes while the delete waits for one before it."""
    engine, ref, _disk = segments()
    while_waiting(engine.open_shard(ref), partial(write, engine, ref))
    return list(bounded_by_the_head(engine, ref, DELETES[by]))


def _between_pieces(by: str, path: str) -> list[Violation]:
    """A record comes when the first piece of the delete is done."""
    engine, ref = rocks(path)
    between_pieces(engine.open_shard(ref), partial(write, engine, ref))
    try:
        return list(bounded_by_the_head(engine, ref, DELETES[by]))
    finally:
        engine.close()


# The breaks.


def _look_without_bound(patch: pytest.MonkeyPatch) -> None:
    matches = Lookups._matches

    def unbounded(lookups: Lookups, sought: Any, ended: Any, start: int, head: int, *, waiting: bool) -> Any:
        return matches(lookups, sought, ended, start, head if waiting else OFFSET_MAX, waiting=waiting)

    patch.setattr(Lookups, "_matches", unbounded)


def _begun_without_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Deletes, "_begin", lambda deletes: OFFSET_MAX)


def _pieces_without_bound(patch: pytest.MonkeyPatch) -> None:
    found = Removal.delete_found
    patch.setattr(Removal, "delete_found", lambda removal, prefix, stop: found(removal, prefix, OFFSET_MAX))


class Mutant(NamedTuple):
    """A break, what shows it, and the promise that must be named."""

    name: str
    apply: Callable[[pytest.MonkeyPatch], None]
    show: Callable[[str, str], list[Violation]]
    by: str
    invariant: str = "I23"


MUTANTS: Final = [
    *[
        Mutant(f"by {by}: a repeated look has no bound", _look_without_bound, _under_the_look, by)
        for by in ("key", "tag")
    ],
    Mutant("by range: no bound at the call", _begun_without_bound, _while_waiting, "range"),
    *[Mutant(f"by {by}: pieces have no bound", _pieces_without_bound, _between_pieces, by) for by in ("key", "tag")],
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_checks_name_the_promise_that_a_break_breaks(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ledger: Ledger
) -> None:
    monkeypatch.setattr(forebay.engines.rocksdb.removal, "PIECE_RECORDS", 2)
    assert mutant.show(mutant.by, str(tmp_path / "sound")) == [], "without the break nothing is wrong"

    mutant.apply(monkeypatch)
    found = names_of(mutant.show(mutant.by, str(tmp_path / "broken")))

    ledger.count("mutants caught", n=int(mutant.invariant in found))
    assert mutant.invariant in found
