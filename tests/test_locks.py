"""Locks refuse to be taken out of the order of their ranks, and cost nothing where the order is not checked."""

from __future__ import annotations

import ast
import re
import threading
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from forebay.locks import Rank, RankedCondition, RankedLock, RankedRLock, check_order, violations

ROOT: Final = Path(__file__).parents[1]
SOURCES: Final = sorted((ROOT / "src").rglob("*.py"))
LOCKS_OF_THEIR_OWN: Final = {"cli", "spark", "testing", "locks.py"}
UNRANKED: Final = {
    "src/forebay/appends/callbacks.py",  # a mark of one thread that no other sees
    "src/forebay/appends/waiting.py",  # made by one thread to be woken once
    "src/forebay/decoders.py",  # taken last of all: nothing but msgspec runs under it
}


def test_a_lock_is_taken_after_those_of_a_lower_rank() -> None:
    outer, inner = RankedLock(Rank.COMMIT, "outer"), RankedLock(Rank.QUEUE, "inner")

    with outer, inner:
        pass
    with inner:
        pass

    assert violations() == []


@pytest.mark.parametrize("rank", [Rank.COMMIT, Rank.QUEUE])
def test_a_lock_of_the_same_or_a_higher_rank_refuses_to_be_outer(rank: Rank) -> None:
    outer, inner = RankedLock(rank, "outer"), RankedRLock(Rank.COMMIT, "inner")

    with outer, pytest.raises(AssertionError, match=r"inner \(COMMIT\) is taken under outer"), inner:
        pass

    (found,) = violations()
    assert "inner (COMMIT) is taken under outer" in found and __name__.rpartition(".")[2] in found


def test_only_a_lock_that_may_is_taken_again_by_its_holder() -> None:
    once, again = RankedLock(Rank.LEAF, "once"), RankedRLock(Rank.COMMIT, "again")

    with again, again:
        pass
    with once, pytest.raises(AssertionError, match="once is taken again"), once:
        pass

    assert len(violations()) == 1
    assert not once.locked()


def test_a_condition_is_checked_as_its_lock_is_and_gives_it_back_while_it_waits() -> None:
    leaf, condition = RankedLock(Rank.LEAF, "leaf"), RankedCondition(Rank.COMMIT, "condition")

    with condition:
        assert not condition.wait(0.0)
    with leaf, pytest.raises(AssertionError, match="condition"), condition:
        pass

    assert len(violations()) == 1


def test_a_lock_that_is_not_waited_for_may_be_taken_in_any_order_and_counts_from_then_on() -> None:
    outer, inner = RankedLock(Rank.COMMIT, "outer"), RankedLock(Rank.LEAF, "inner")

    with inner:
        assert outer.acquire(blocking=False)
        assert not outer.acquire(blocking=False)
        outer.release()
    assert outer.acquire(timeout=1)
    with pytest.raises(AssertionError, match="registry"), RankedLock(Rank.REGISTRY, "registry"):
        pass
    outer.release()

    assert len(violations()) == 1


def test_what_another_thread_holds_does_not_count() -> None:
    held, other = RankedLock(Rank.LEAF, "held"), RankedLock(Rank.COMMIT, "other")
    gate, taken = threading.Event(), threading.Event()

    def hold() -> None:
        with held:
            taken.set()
            gate.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    with other:
        gate.set()
    thread.join()

    assert violations() == []


def test_where_the_order_is_not_checked_the_locks_are_pythons_own() -> None:
    check_order(on=False)

    assert type(RankedLock(Rank.LEAF, "plain")) is type(threading.Lock())
    assert type(RankedRLock(Rank.LEAF, "plain")) is type(threading.RLock())


@pytest.mark.slow
def test_every_lock_is_listed_with_its_rank_and_every_listed_one_exists() -> None:
    listed = re.findall(r"^\| ([A-Z]+) \| `([\w.]+)` \|", (ROOT / "docs" / "locks.md").read_text(), re.MULTILINE)
    made = [lock for path in SOURCES for lock in _ranked(path)]

    assert len(listed) == len(set(listed))
    assert sorted(set(made)) == sorted(listed)
    assert [rank for rank, _ in listed] == sorted((rank for rank, _ in listed), key=lambda name: Rank[name])


def test_the_core_makes_no_lock_without_a_rank() -> None:
    made = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in SOURCES
        if path.relative_to(ROOT / "src").parts[1] not in LOCKS_OF_THEIR_OWN
        for call in _calls(path)
        if ast.unparse(call.func) in ("threading.Lock", "threading.RLock", "threading.Semaphore")
    ]

    assert [place for place in made if place.rpartition(":")[0] not in UNRANKED] == []


def _ranked(path: Path) -> list[tuple[str, str]]:
    """Rank and name of each lock that a module makes."""
    return [
        (call.args[0].attr, call.args[1].value)
        for call in _calls(path)
        if ast.unparse(call.func) in ("RankedLock", "RankedRLock", "RankedCondition")
        and isinstance(call.args[0], ast.Attribute)
        and isinstance(call.args[1], ast.Constant)
        and isinstance(call.args[1].value, str)
    ]


@cache
def _calls(path: Path) -> list[ast.Call]:
    """The calls of a module that may make a lock."""
    text = path.read_text()
    if "threading" not in text and "forebay.locks" not in text:
        return []
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
