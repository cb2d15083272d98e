"""Where a shard goes on: one case per row of the decision table. Pure, so no disk and no store."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from forebay.errors import Conflict, DataLoss, ForebayError, UnknownTopic
from forebay.format.metadata.descriptor import Phase, ShardState
from forebay.records import Gap, Reason
from forebay.shard import NextSource, RecoveryDecision, Situation, decide
from forebay.topics import Durability

ME, OTHER = "me", "another"
TOPIC = "ab" * 16


@dataclass(frozen=True)
class Facts:
    """A local log, as a survey would record it."""

    end: int = 0
    begins: int = 0
    epoch: int = 0
    reserved_end: int = 0
    identity: str = "boot 1"
    is_short: bool = False
    clean: bool = False
    torn_bytes: int = 0
    damage: list[Gap] = field(default_factory=list)
    is_empty: bool = False


NO_LOG = Facts(is_empty=True)
LOG = Facts(end=21, epoch=3, reserved_end=100)


def state(**changes: object) -> ShardState:
    fields: dict[str, object] = {"incarnation": TOPIC, "epoch": 3, "holder": ME, "holder_since": 1, "owner": "gone"}
    return ShardState(**{**fields, **changes})  # type: ignore[arg-type]


def here(durability: Durability = Durability.FSYNC, *, frontier: int = 0, shared: bool = True) -> Situation:
    return Situation("shop/orders[0]", durability, "boot 1", ME, frontier, shared)


def lost(start: int, stop: int) -> Gap:
    return Gap(start, stop, Reason.LOST)


SEALED = {"phase": Phase.SEALED, "next_offset": 22, "owner": None}

ROWS = [
    pytest.param(NO_LOG, state(**SEALED), here(frontier=22), (22, NextSource.SEALED, None, False), id="sealed, no log"),
    pytest.param(
        Facts(end=22, epoch=3),
        state(**SEALED),
        here(frontier=22),
        (22, NextSource.SEALED, None, False),
        id="sealed, own log",
    ),
    pytest.param(
        Facts(end=9, epoch=1),
        state(**SEALED, holder=OTHER, holder_since=2),
        here(frontier=22),
        (22, NextSource.SEALED, None, True),
        id="sealed by another, old log",
    ),
    pytest.param(
        Facts(end=22, epoch=1),
        state(**SEALED, holder=OTHER, holder_since=2),
        here(frontier=22),
        (22, NextSource.SEALED, None, True),
        id="sealed by another, a log that ends there by chance",
    ),
    pytest.param(
        Facts(end=9, epoch=3),
        state(**SEALED),
        here(frontier=22),
        (22, NextSource.SEALED, None, False),
        id="sealed behind what was attached",
    ),
    pytest.param(LOG, state(), here(frontier=10), (21, NextSource.LOCAL, None, False), id="open, mine, exact"),
    pytest.param(
        LOG,
        state(),
        here(Durability.MEMORY, shared=False),
        (100, NextSource.LOCAL, lost(21, 100), False),
        id="open, mine, not exact",
    ),
    pytest.param(
        LOG,
        state(reserved_in_log=True),
        here(Durability.MEMORY),
        (100, NextSource.LOCAL, lost(21, 100), False),
        id="open, mine, not exact, not shared before",
    ),
    pytest.param(
        LOG,
        state(reserved_end=21),
        here(Durability.MEMORY, frontier=21),
        (21, NextSource.LOCAL, None, False),
        id="open, mine, not exact, the rest was given back",
    ),
    pytest.param(
        LOG,
        state(reserved_end=300),
        here(Durability.MEMORY),
        (300, NextSource.LOCAL, lost(21, 300), False),
        id="open, mine, reserved in the store",
    ),
    pytest.param(
        LOG, state(), here(frontier=30), (30, NextSource.CATALOG, None, False), id="open, mine, behind the catalog"
    ),
    pytest.param(
        LOG,
        state(reserved_end=100),
        here(Durability.MEMORY, frontier=30),
        (100, NextSource.CATALOG, lost(30, 100), False),
        id="open, mine, behind the catalog, not exact",
    ),
    pytest.param(
        LOG,
        state(epoch=5, holder=OTHER, holder_since=4, reserved_end=90),
        here(frontier=40),
        (90, NextSource.CATALOG, lost(40, 90), True),
        id="open, another's, own old files",
    ),
    pytest.param(
        NO_LOG,
        state(holder=OTHER, reserved_end=90),
        here(frontier=90),
        (90, NextSource.CATALOG, None, False),
        id="open, another's, all exported",
    ),
    pytest.param(NO_LOG, state(), here(), (0, NextSource.EMPTY, None, False), id="open, no log, nothing reserved"),
    pytest.param(
        NO_LOG,
        state(reserved_end=64),
        here(frontier=20),
        (64, NextSource.CATALOG, lost(20, 64), False),
        id="open, no log",
    ),
    pytest.param(
        LOG, state(phase=Phase.SEALING), here(frontier=10), (21, NextSource.LOCAL, None, False), id="sealing, as open"
    ),
    pytest.param(
        NO_LOG,
        state(next_offset=22),
        here(frontier=22, shared=False),
        (22, NextSource.CATALOG, None, False),
        id="local, taken after a seal and nothing written yet",
    ),
    pytest.param(NO_LOG, None, here(), (0, NextSource.EMPTY, None, False), id="absent, none"),
]


@pytest.mark.parametrize(("facts", "before", "situation", "expected"), ROWS)
def test_a_shard_goes_on_where_its_row_says(
    facts: Facts, before: ShardState | None, situation: Situation, expected: tuple[int, NextSource, Gap | None, bool]
) -> None:
    decision = decide(facts, before, situation)

    assert (decision.next_offset, decision.source, decision.gap, decision.set_aside) == expected


@pytest.mark.parametrize(
    ("facts", "before", "situation", "error"),
    [
        pytest.param(Facts(end=30, epoch=3), state(**SEALED), here(), Conflict, id="sealed, log ends behind it"),
        pytest.param(Facts(end=23, epoch=3), state(**SEALED), here(), Conflict, id="sealed, log has one record more"),
        pytest.param(LOG, state(phase=Phase.DELETING), here(), UnknownTopic, id="deleting"),
        pytest.param(LOG, None, here(), Conflict, id="absent, some"),
        pytest.param(
            LOG, state(epoch=5, holder=OTHER, holder_since=4), here(shared=False), Conflict, id="local, another's"
        ),
        pytest.param(NO_LOG, state(), here(frontier=9, shared=False), DataLoss, id="local, history but no log"),
    ],
)
def test_a_contradiction_is_refused(
    facts: Facts, before: ShardState | None, situation: Situation, error: type[ForebayError]
) -> None:
    with pytest.raises(error, match="shop/orders"):
        decide(facts, before, situation)


@pytest.mark.parametrize(
    ("durability", "identity", "clean", "exact"),
    [
        (Durability.FSYNC, "boot 0", False, True),
        (Durability.DISK, "boot 1", False, True),
        (Durability.DISK, "boot 0", False, False),
        (Durability.MEMORY, "boot 1", False, False),
        (Durability.MEMORY, "boot 0", True, True),
        (Durability.DISK, "boot 0", True, True),
    ],
)
def test_the_end_is_exact_by_class_boot_and_clean_stop(
    durability: Durability, identity: str, *, clean: bool, exact: bool
) -> None:
    facts = Facts(end=21, epoch=3, reserved_end=100, identity=identity, clean=clean)

    decision = decide(facts, state(reserved_end=100), here(durability))

    assert decision.exact is exact
    assert decision.gap == (None if exact else lost(21, 100))


@pytest.mark.parametrize(
    ("begins", "covered", "damage"), [(0, 0, ()), (10, 10, ()), (10, 4, (Gap(4, 10, Reason.DAMAGED),))]
)
def test_the_front_of_the_log_may_be_gone_only_where_history_has_it(
    begins: int, covered: int, damage: tuple[Gap, ...]
) -> None:
    facts = Facts(begins=begins, end=21, epoch=3)

    assert decide(facts, state(), here(frontier=12)._replace(covered=covered)).damage == damage


def test_a_log_that_ends_below_the_frontier_stays_and_goes_on_behind_it() -> None:
    decision = decide(LOG, state(), here(frontier=30))

    assert (decision.next_offset, decision.continued_at, decision.gap) == (30, 21, None)


def test_an_epoch_acquired_without_writing_still_counts_as_mine() -> None:
    written_in_epoch_3 = LOG
    acquired_twice_since = state(epoch=5, holder=ME, holder_since=2)

    decision = decide(written_in_epoch_3, acquired_twice_since, here())

    assert decision.source is NextSource.LOCAL


def test_a_decision_reads_as_a_sentence() -> None:
    decision = RecoveryDecision(next_offset=100, source=NextSource.LOCAL, exact=False, gap=lost(21, 100), torn_bytes=7)

    assert str(decision) == (
        "next offset 100 by local continuity, tail not exact, gap [21, 100) lost, 7 torn bytes set aside"
    )
