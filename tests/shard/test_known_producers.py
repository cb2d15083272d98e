"""The next owner of a shard recognises repeats of what its producers sent to the owners before."""

from __future__ import annotations

from random import Random  # noqa: TID251  # seeded: the same run again
from typing import Final

import pytest

from forebay.errors import Conflict
from forebay.testing.checks.history import NOTE, AppendAnswered, AppendOutcome
from forebay.testing.contracts.engines import append_by
from tests.ledger import Ledger
from tests.protocol.environment import MODES, Node, OwnersEnvironment

APPENDS_MAX: Final = 4
"""So many appends of each producer the owners of these tests remember."""


def _offset_of_last(environment: OwnersEnvironment) -> int:
    reported = [
        note.payload
        for note in environment.disk.trace.notes()
        if note.kind == NOTE and isinstance(note.payload, AppendAnswered)
    ]
    assert reported[-1].outcome is AppendOutcome.ACKED
    return reported[-1].offset


def _produced_long_ago(mode: str) -> tuple[OwnersEnvironment, Node]:
    """The newest file has nothing of the producer but what is restated there of files before it."""
    environment = OwnersEnvironment(mode)
    node = environment.node("a")
    for sequence in range(2):
        node.append(producing=(7, sequence))
    node.export()
    node.append(3)
    node.export()
    node.append()
    return environment, node


@pytest.mark.parametrize("mode", MODES)
def test_a_producer_that_was_silent_for_files_is_known_after_a_move(mode: str) -> None:
    environment, node = _produced_long_ago(mode)
    node.seal()
    other = environment.node("b")

    assert other.shard.last_sequence(7) == 1
    other.append(producing=(7, 1))

    assert _offset_of_last(environment) == 1
    other.append(producing=(7, 2))
    assert _offset_of_last(environment) == 6


def test_it_is_known_after_a_take_over_as_far_as_it_was_exported() -> None:
    environment, node = _produced_long_ago("shared_fs")
    node.append(producing=(7, 2))
    node.die()
    other = environment.node("b")

    assert other.shard.last_sequence(7) == 1
    other.append(producing=(7, 0))

    assert _offset_of_last(environment) == 0


def test_sequences_that_leave_numbers_out_are_known_after_a_take_over_and_after_a_crash() -> None:
    environment = OwnersEnvironment("shared_fs")
    node = environment.node("a")
    for producer in (7, 2**63 + 7):
        append_by(node.shard, producer, 5, previous=-1)
        append_by(node.shard, producer, 9, previous=5)
    node.export()
    append_by(node.shard, 7, 20, previous=9)
    node.die()

    node = environment.node("a")
    assert [node.shard.last_sequence(producer) for producer in (7, 2**63 + 7)] == [20, 9]
    assert append_by(node.shard, 7, 20, previous=9) == 4
    node.die()

    other = environment.node("b")
    assert [other.shard.last_sequence(producer) for producer in (7, 2**63 + 7)] == [9, 9]
    assert [append_by(other.shard, 2**63 + 7, sequence) for sequence in (5, 9)] == [2, 3]
    with pytest.raises(Conflict, match="sent sequence 30 after 20, expected one after 9"):
        append_by(other.shard, 7, 30, previous=20)


def _answer(node: Node, producer: int, sequence: int, previous: int | None) -> int | None:
    try:
        return append_by(node.shard, producer, sequence, previous=previous)
    except Conflict:
        return None


@pytest.mark.parametrize("seed", range(6))
def test_owners_that_change_answer_as_a_single_one_would(seed: int, ledger: Ledger) -> None:
    """Random sequences, each naming what may be the one before it, over restarts, exports, moves and take-overs."""
    chance, environment = Random(seed), OwnersEnvironment("shared_fs")
    node, known = environment.node("a"), dict[int, dict[int, int]]()
    for _ in range(120):
        act = chance.choice(["append"] * 12 + ["export", "restart", "move", "take over"])
        if act == "append":
            producer = chance.choice((7, 8, 2**63 + 7))
            appends = known.setdefault(producer, {})
            last = max(appends, default=-1)
            sequence = chance.choice((last + chance.randrange(1, 6), chance.randrange(0, last + 9)))
            previous = chance.choice((last, last, None, -1, chance.randrange(-1, sequence + 1)))
            is_next = sequence > last and (sequence - 1 if previous is None else previous) == last
            found = _answer(node, producer, sequence, previous)
            if is_next:
                assert found is not None and found > max(max(each.values(), default=-1) for each in known.values())
                appends[sequence] = found
            else:
                remembered = sorted(appends)[-APPENDS_MAX:]
                assert found == (appends[sequence] if sequence in remembered else None), (producer, sequence, previous)
            act = "next" if is_next else "repeat" if found is not None else "conflict"
        elif act == "export":
            node.export()
        elif act == "restart":
            node.die()
            node = environment.node(node.name)
        else:
            if act == "move":
                node.seal()
            else:
                node.export()
                node.die()
            node = environment.node("b" if node.name == "a" else "a")
        ledger.count("producers over owners", act=act)
