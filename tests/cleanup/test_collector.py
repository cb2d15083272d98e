"""Why an object is kept: one case per row of the table, pure, so without a store; then what removes the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import msgspec
import pytest

from forebay.blobs import Stat
from forebay.cleanup import collector as judging
from forebay.cleanup.collector import RULES, Collector, Facts, Kept, judge
from forebay.errors import Unavailable
from forebay.format.files.segment import COMPACTED
from forebay.format.metadata.descriptor import Status
from forebay.testing.simulated.blobs import Fault, SimulatedBlobs
from forebay.testing.simulated.clock import ManualClock
from tests.support.environments.shard import GRACE_S, ShardEnvironment

SHARD: Final = f"{'ab' * 16}_0"
EXPORTED: Final = f"{SHARD}/3-{'c' * 32}.seg"
PARQUET: Final = f"{SHARD}/{COMPACTED}one.parquet"
LOADED: Final = f"{SHARD}/loads/load-1/0-0-ff.seg"
LISTED: Final = f"{'ab' * 16}/loads/load-1/manifest-1"
NOW_MS: Final = 10_000_000

OWNER: Final = Facts(old_before_ms=NOW_MS - GRACE_S * 1000, grace_s=GRACE_S, epoch=3)
"""What the owner in epoch 3 knows, when nothing speaks for any object."""
NO_OWNER: Final = replace(OWNER, epoch=None)


def row(name: str, key: str, facts: Facts, *kept: Kept, age_s: int = 2 * GRACE_S) -> Any:
    return pytest.param(Stat(key, 1, None, None, NOW_MS - age_s * 1000), facts, kept, id=name)


ROWS: Final = [
    row("an orphan of an export", EXPORTED, OWNER),
    row("the index of an orphan", EXPORTED.replace(".seg", ".idx"), OWNER),
    row("an orphan of a compaction", PARQUET, OWNER),
    row("a manifest that nothing names", f"{SHARD}/manifest-1", OWNER),
    row("young", EXPORTED, OWNER, Kept.YOUNG, age_s=GRACE_S - 1),
    row("as old as the grace, to the millisecond", EXPORTED, OWNER, Kept.YOUNG, age_s=GRACE_S),
    row("named by history", EXPORTED, replace(OWNER, named={EXPORTED}), Kept.NAMED),
    row("named by a table alone", PARQUET, replace(OWNER, tabled={PARQUET}), Kept.TABLED),
    row("still to be exported", EXPORTED, replace(OWNER, unexported={EXPORTED}), Kept.UNEXPORTED),
    row("made by a compaction under way", PARQUET, replace(OWNER, is_compacting=True), Kept.COMPACTING),
    row("an export beside a compaction", EXPORTED, replace(OWNER, is_compacting=True)),
    row("of the owner's own epoch", f"{SHARD}/3-aa.seg", OWNER),
    row("of an earlier epoch", f"{SHARD}/2-aa.seg", OWNER),
    row("of a later epoch", f"{SHARD}/4-aa.seg", OWNER, Kept.CLAIMABLE),
    row("of a later epoch with more digits", f"{SHARD}/10-aa.seg", OWNER, Kept.CLAIMABLE),
    row("a load that is under way", LOADED, OWNER, Kept.LOADING),
    row("a load that is over", LOADED, replace(OWNER, loads_over={"load-1"})),
    row("another load is over", LOADED, replace(OWNER, loads_over={"load-10"}), Kept.LOADING),
    row("the list of a load under way", LISTED, NO_OWNER, Kept.LOADING),
    row("the list of a load that is over", LISTED, replace(NO_OWNER, loads_over={"load-1"})),
    row("below loads, but of no load", f"{SHARD}/loads/x", replace(OWNER, loads_over={"x"}), Kept.LOADING),
    row("without an owner: an export", EXPORTED, NO_OWNER, Kept.CLAIMABLE),
    row("without an owner: an export that history has", EXPORTED, replace(NO_OWNER, outdated={EXPORTED})),
    row("without an owner: an orphan of a compaction", PARQUET, NO_OWNER),
    row("history lies elsewhere", PARQUET, replace(NO_OWNER, is_elsewhere=True), Kept.ELSEWHERE),
    row("just replaced", EXPORTED, replace(OWNER, is_rewritten=True), Kept.READ),
    row(
        "replaced within the grace",
        EXPORTED,
        replace(OWNER, is_rewritten=True, unneeded_s={EXPORTED: GRACE_S - 1.0}),
        Kept.READ,
    ),
    row("replaced before the grace", EXPORTED, replace(OWNER, is_rewritten=True, unneeded_s={EXPORTED: GRACE_S})),
    row(
        "another was replaced before", PARQUET, replace(OWNER, is_rewritten=True, unneeded_s={EXPORTED: 1e9}), Kept.READ
    ),
    row("of a deleted topic", EXPORTED, replace(OWNER, is_given_up=True, named={EXPORTED}, epoch=None)),
    row("of a deleted topic, young", EXPORTED, replace(OWNER, is_given_up=True), Kept.YOUNG, age_s=1),
    row("of a deleted topic, at once", EXPORTED, replace(OWNER, is_given_up=True, old_before_ms=None), age_s=0),
    # Two reasons at once: each of them alone would do.
    row(
        "named, and by a table too",
        PARQUET,
        replace(OWNER, named={PARQUET}, tabled={PARQUET}),
        Kept.NAMED,
        Kept.TABLED,
    ),
    row(
        "young, and a compaction is under way",
        PARQUET,
        replace(OWNER, is_compacting=True),
        Kept.YOUNG,
        Kept.COMPACTING,
        age_s=1,
    ),
    row("a load under way that history names", LOADED, replace(OWNER, named={LOADED}), Kept.NAMED, Kept.LOADING),
    row(
        "to be exported, of a later epoch",
        f"{SHARD}/4-aa.seg",
        replace(OWNER, unexported={f"{SHARD}/4-aa.seg"}),
        Kept.UNEXPORTED,
        Kept.CLAIMABLE,
    ),
    row("a reader is no second reason", EXPORTED, replace(OWNER, named={EXPORTED}, is_rewritten=True), Kept.NAMED),
]


@pytest.mark.parametrize(("stat", "facts", "kept"), ROWS)
def test_an_object_is_kept_for_these_reasons_and_no_others(stat: Stat, facts: Facts, kept: tuple[Kept, ...]) -> None:
    assert judge([stat], facts) == {stat.key: kept}


def _wrong() -> list[str]:
    """The rows that do not hold."""
    cases = [(case.id, *case.values) for case in ROWS]
    return [name for name, stat, facts, kept in cases if judge([stat], facts) != {stat.key: kept}]


@pytest.mark.parametrize(
    ("reason", "noticed_by"),
    [
        (Kept.YOUNG, "young"),
        (Kept.NAMED, "named by history"),
        (Kept.TABLED, "named by a table alone"),
        (Kept.UNEXPORTED, "still to be exported"),
        (Kept.COMPACTING, "made by a compaction under way"),
        (Kept.LOADING, "a load that is under way"),
        (Kept.CLAIMABLE, "of a later epoch"),
        (Kept.ELSEWHERE, "history lies elsewhere"),
        (Kept.READ, "just replaced"),
    ],
)
def test_a_reason_that_is_left_out_is_noticed(reason: Kept, noticed_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _wrong() == []
    if reason is Kept.READ:
        monkeypatch.setattr(judging, "_may_be_read", lambda key, facts: False)
    else:
        monkeypatch.setitem(RULES, reason, lambda stat, facts: False)

    assert noticed_by in _wrong()


def test_every_reason_has_a_rule() -> None:
    assert {*RULES, Kept.READ} == set(Kept)


def _environment() -> tuple[ShardEnvironment, SimulatedBlobs]:
    clock = ManualClock(seed=1)
    blobs = SimulatedBlobs(clock=clock)
    environment = ShardEnvironment(blobs=blobs, clock=clock)
    environment.append(5)
    environment.seal()
    environment.export()
    return environment, blobs


def test_a_look_removes_nothing_and_says_why_each_object_is_kept() -> None:
    environment, blobs = _environment()
    named = environment.keys()
    orphan = f"{environment.exporter().origin.prefix}1-{'0' * 32}.seg"
    blobs.put_if_absent(orphan, b"left behind")
    environment.clock.jump(2 * GRACE_S * 1000)
    young = orphan.replace("1-", "2-")
    blobs.put_if_absent(young, b"on its way")

    judged = Collector(environment.clock, GRACE_S).look(environment.scope())

    assert judged == {orphan: (), young: (Kept.YOUNG, Kept.CLAIMABLE), **dict.fromkeys(named, (Kept.NAMED,))}
    assert environment.keys() == {*named, orphan, young}


def test_the_log_says_how_many_objects_are_kept_and_why(caplog: pytest.LogCaptureFixture) -> None:
    environment, blobs = _environment()
    blobs.put_if_absent(f"{environment.exporter().origin.prefix}1-{'0' * 32}.seg", b"left behind")
    environment.clock.jump(2 * GRACE_S * 1000)

    with caplog.at_level("DEBUG", logger="forebay.cleanup.collector"):
        environment.collect()

    assert f"objects in {blobs.name}: 2 kept because history names it; 1 may go" in caplog.text


def test_while_everything_is_young_nothing_is_asked_for() -> None:
    environment, _ = _environment()

    def refuse() -> bool:
        raise AssertionError("the metadata store need not be asked")

    judged = Collector(environment.clock, GRACE_S).look(environment.scope(is_compacting=refuse))

    assert set(judged.values()) == {(Kept.YOUNG,)}


def _rewritten(environment: ShardEnvironment, **changes: object) -> None:
    """A compaction has just put another segment into the place of the only one."""
    catalog = environment.catalog()
    (piece,) = catalog.pieces()
    now = {"status": Status.COMPACTED, "created_at": environment.clock.now_ms(), **changes}
    assert catalog.replace([piece], msgspec.structs.replace(piece.descriptor, **now))


def test_a_removal_that_fails_does_not_begin_the_grace_of_the_others_again() -> None:
    environment, blobs = _environment()
    old = environment.keys()
    environment.clock.jump(10 * GRACE_S * 1000)
    _rewritten(environment, object_key=f"{environment.exporter().origin.prefix}{COMPACTED}one.parquet")
    collector = Collector(environment.clock, GRACE_S)
    assert collector.collect(environment.scope()) == []
    environment.clock.advance(GRACE_S)
    _rewritten(environment)
    blobs.inject(Fault.FAIL_BEFORE, method="delete", after=1)

    with pytest.raises(Unavailable):
        collector.collect(environment.scope())
    assert len(old & environment.keys()) == 1
    collector.collect(environment.scope())

    assert not old & environment.keys()
