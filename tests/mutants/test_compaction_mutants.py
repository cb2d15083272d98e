"""Deliberate breaks of compaction: for each the checks must name the promise that it breaks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pytest

import forebay.catalog.shard
import forebay.columnar
import forebay.compacting.merging
import forebay.compacting.swapping
import forebay.export
from forebay.catalog.shard import Piece, ShardCatalog
from forebay.catalog.transact import Write, transact
from forebay.cleanup.collector import Collector, Judgement, Scope
from forebay.clock import Clock
from forebay.compacting.shard import ShardCompaction
from forebay.errors import ForebayError
from forebay.format.files.segment import index_name
from forebay.format.metadata.descriptor import SegmentDescriptor
from forebay.metadata import DeleteRange, MetadataStore
from tests.compacting.environment import CompactionEnvironment, Compactor
from tests.compacting.test_races import Interposed, exported_around_a_swap, swept_around_a_swap
from tests.ledger import Ledger
from tests.support.environments.shard import KEYS

Run = Callable[[CompactionEnvironment], None]


def _undisturbed(environment: CompactionEnvironment) -> None:
    Compactor(environment).run()


def _deleted_between(environment: CompactionEnvironment) -> None:
    going = Compactor(environment).steps()
    while next(going) != "write":
        pass
    environment.delete()
    list(going)


def _swept_between(environment: CompactionEnvironment) -> None:
    going = Compactor(environment).steps()
    while next(going) != "write":
        pass
    environment.sweep()
    with contextlib.suppress(ForebayError):
        list(going)


def _lease_lost_at_the_last_moment(environment: CompactionEnvironment) -> None:
    def lose() -> None:
        compactor.session.close()
        environment.sweep()

    compactor = Compactor(environment, Interposed(environment, lose))
    with contextlib.suppress(ForebayError):
        compactor.run()


def _swapped_inside_a_sweep(environment: CompactionEnvironment) -> None:
    """The compactor swaps and ends after each question of a sweep in turn; what is broken then is noted."""
    questions, is_reached = 0, True
    while is_reached:
        questions += 1
        other, is_reached = swept_around_a_swap(questions)
        environment.violations += other.broken()


def _swapped_inside_an_export(environment: CompactionEnvironment) -> None:
    environment.violations += exported_around_a_swap()


def _lease_not_compared(patch: pytest.MonkeyPatch) -> None:
    whole = ShardCatalog.replace

    def replaced(catalog: ShardCatalog, old: Sequence[Piece], new: SegmentDescriptor, **_: Any) -> bool:
        return whole(catalog, old, new)

    patch.setattr(ShardCatalog, "replace", replaced)


def _sweep_spares_nobody(patch: pytest.MonkeyPatch) -> None:
    look = Collector.look
    patch.setattr(Collector, "look", lambda self, scope: look(self, replace(scope, is_compacting=lambda: False)))
    patch.setattr(forebay.compacting.swapping, "check_stored", lambda store, piece: None)


def _compactors_asked_for_too_late(patch: pytest.MonkeyPatch) -> None:
    look = Collector.look

    def looked(collector: Collector, scope: Scope) -> Judgement:
        standing, pieces = scope.catalog.pieces(), scope.catalog.descriptors()
        read = SimpleNamespace(keys=scope.catalog.keys, pieces=lambda: standing, descriptors=lambda: pieces)
        return look(collector, replace(scope, catalog=cast(ShardCatalog, read)))

    patch.setattr(Collector, "look", looked)


def _end_of_history_not_compared(patch: pytest.MonkeyPatch) -> None:
    def careless(
        store: MetadataStore, read: Callable[[], Any], change: Callable[[Any], Any], *, what: str, clock: Clock
    ) -> Any:
        def without(found: Any) -> Any:
            wanted = change(found)
            if not isinstance(wanted, Write):
                return wanted
            compares = [compare for compare in wanted.compares if getattr(compare, "key", None) != KEYS.cur]
            return Write(compares, wanted.operations, wanted.result)

        return transact(store, read, without, what=what, clock=clock)

    patch.setattr(forebay.catalog.shard, "transact", careless)


def _vectors_dropped(patch: pytest.MonkeyPatch) -> None:
    whole = ShardCompaction.finish

    def finish(compaction: ShardCompaction, *arguments: Any) -> bool:
        done = whole(compaction, *arguments)
        compaction._catalog.store.transaction([], [DeleteRange(KEYS.deletes)])
        return done

    patch.setattr(ShardCompaction, "finish", finish)


def _last_row_forgotten(patch: pytest.MonkeyPatch) -> None:
    def living(rows: Any, table: pa.Table) -> pa.Table:
        return table.filter(pa.array(np.arange(table.num_rows) < table.num_rows - 1))

    patch.setattr(forebay.compacting.merging.MergedRows, "_living", living)


def _index_never_stored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(forebay.columnar, "index_name", lambda key: f"{index_name(key)}.other")
    patch.setattr(forebay.compacting.swapping, "check_stored", lambda store, piece: None)


class Mutant(NamedTuple):
    """A break, when it shows, and which promise it breaks."""

    breaks: Callable[[pytest.MonkeyPatch], None]
    run: Run
    invariant: str


MUTANTS: Final[dict[str, Mutant]] = {
    "the lease is not compared": Mutant(_lease_not_compared, _lease_lost_at_the_last_moment, "I18"),
    "the sweep spares nobody": Mutant(_sweep_spares_nobody, _swept_between, "I18"),
    "compactors are asked for after the catalog": Mutant(
        _compactors_asked_for_too_late, _swapped_inside_a_sweep, "I16"
    ),
    "the end of history is not compared": Mutant(_end_of_history_not_compared, _swapped_inside_an_export, "I32"),
    "the swap drops vectors": Mutant(_vectors_dropped, _deleted_between, "I23"),
    "a record is left out": Mutant(_last_row_forgotten, _undisturbed, "I6"),
    "the index is not there": Mutant(_index_never_stored, _undisturbed, "I18"),
}


def _named(environment: CompactionEnvironment) -> set[str]:
    """The promises that do not hold."""
    named = {violation.invariant for violation in environment.broken()}
    if not named & {"I16", "I18"}:
        found, wanted = environment.visible(), environment.expected()
        named |= {"I23"} if found.keys() & environment.deleted else set()
        named |= {"I6"} if wanted.keys() - found.keys() else set()
    return named


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_break_is_named(name: str, monkeypatch: pytest.MonkeyPatch, ledger: Ledger) -> None:
    mutant = MUTANTS[name]
    sound = CompactionEnvironment()
    mutant.run(sound)
    assert _named(sound) == set(), "without the break all holds"

    environment = CompactionEnvironment()
    mutant.breaks(monkeypatch)
    mutant.run(environment)

    assert mutant.invariant in _named(environment)
    ledger.count("mutants of compaction", invariant=mutant.invariant)
