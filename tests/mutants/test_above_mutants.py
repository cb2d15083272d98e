"""Deliberate breaks of routers, dead letters and their replay: for each the checks must name the promise."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import pytest

import forebay
import forebay.arguments
import forebay.storage.deadletters
from forebay import EARLIEST, Invalid
from forebay.aio.topic import AsyncTopic
from forebay.appends.producer_window import ROUTER_IDS
from forebay.routers import Routers
from forebay.routers.book import reader_of
from forebay.routers.mover import Mover
from forebay.storage import Topic
from forebay.storage.deadletters import DeadLetters, DeadLetterSender
from forebay.testing.checks.invariants import Violation
from forebay.testing.simulated.damage import CrashDamage
from forebay.testing.simulated.disk import SimulatedDisk
from tests.ledger import Ledger
from tests.mutants.breach import Breach
from tests.protocol.above import SCENARIOS, crashes
from tests.subscriptions.test_vouching import FORGED
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # far more than needed: a shared machine may be busy

STATES_MAX: Final = 60
RUNS_MAX: Final = 8
"""Threads decide in each run what a power loss may take."""


def _crashing(name: str, *classes: str) -> list[Violation]:
    """The violations after power losses that take whatever was not synced, at some moments of a scenario."""
    scenario, disk = SCENARIOS[name](), SimulatedDisk()
    scenario.run(disk, (classes[0], classes[1]))
    states = [state for state in crashes(disk) if state.damage is CrashDamage.OLD]
    step = max(1, len(states) // STATES_MAX)
    violations: list[Violation] = []
    for state in itertools.islice(reversed(states), 0, None, step):
        violations += list(scenario.check(state))
        if violations:
            break
    return violations


def _altered_while_idle() -> list[Violation]:
    """A record that is appended after the rule was changed, by a process that does not run the router."""
    violations: list[Violation] = []
    with forebay.open(":memory:") as log:
        source, target, running = log.create_topic("a"), log.create_topic("b"), Routers(log)
        running.create("r", sources=["a"], destination="b", start=EARLIEST, tags=["0", "end"])
        with running.running():
            for number in range(3):
                source.append(b"%d" % number, tag=str(number))
                # One that every rule takes says that all before it were judged.
                Routers(log).alter("r", tags=[str(number + 1), "end"])
                source.append(b"%d" % (number + 1), tag=str(number + 1))
                source.append(b"end", tag="end")
                until(partial(_ends, target, number + 1))
                if b"%d" % (number + 1) not in _values(target):
                    violations.append(Violation("altered", f"{number + 1} was judged by a rule of before"))
    return violations


def _ends(topic: Topic, count: int) -> bool:
    return _values(topic).count(b"end") == count


def _values(topic: Topic) -> list[bytes | None]:
    return [record.value for record in topic.read()]


def _pushed_out() -> list[Violation]:
    """Callers append with ids that are the router's, and what it had routed is routed again."""
    with forebay.open(":memory:", {"wal": {"producers_max": 4}}) as log:
        source, target, routers = log.create_topic("a"), log.create_topic("b"), Routers(log)
        routers.create("r", sources=["a"], destination="b", start=EARLIEST)
        source.append(b"0")
        with routers.running():
            until(lambda: _values(target) == [b"0"])
        reader_of(routers.get("r"), source).reset(EARLIEST, 0, note="1 1")
        for producer in range(ROUTER_IDS, ROUTER_IDS + 8):
            try:
                target.append(b"other", producer=producer, sequence=0)
            except Invalid:
                continue
        with routers.running():
            source.append(b"1")
            until(lambda: b"1" in _values(target))
        found = Counter(_values(target))
    return [Violation("routed", "0 is there twice")] if found[b"0"] > 1 else []


def _forged() -> list[Violation]:
    """A record with the headers of a dead letter, in a topic whose letters are replayed."""
    with forebay.open(":memory:") as log:
        ledger, topic = log.create_topic("payments/ledger"), log.create_topic("a")
        topic.append(b"pay mallory", headers=FORGED)
        topic.dead_letters().replay()
        return [Violation("forged", f"{value!r} was written") for value in _values(ledger)]


def _without_flush_in(owner: type, step: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Nothing is flushed by this step, before what relies on it is stored."""

    def apply(patched: pytest.MonkeyPatch) -> None:
        flush, whole = Topic.flush, getattr(owner, step)
        inside: list[str] = []

        def skipped(topic: Topic) -> None:
            if not inside:
                flush(topic)

        def stepped(*arguments: Any) -> Any:
            inside.append(step)
            try:
                return whole(*arguments)
            finally:
                inside.pop()

        patched.setattr(Topic, "flush", skipped)
        patched.setattr(owner, step, stepped)

    return apply


def _letters_not_gone(patched: pytest.MonkeyPatch) -> None:
    """Letters that were replayed are not removed durably."""
    _without_flush_in(DeadLetters, "_delete")(patched)


def _switched_without_flush(patched: pytest.MonkeyPatch) -> None:
    async def flush(topic: AsyncTopic) -> None:
        await asyncio.sleep(0)

    patched.setattr(AsyncTopic, "flush", flush)


def _cursor_before_it_is_durable(patched: pytest.MonkeyPatch) -> None:
    whole: Callable[..., Any] = AsyncTopic.offsets

    async def offsets(topic: AsyncTopic, partition: int = 0) -> Any:
        found = await whole(topic, partition)
        return found._replace(durable=found.next)

    patched.setattr(AsyncTopic, "offsets", offsets)


def _looked_before_the_wait(patched: pytest.MonkeyPatch) -> None:
    """Records go by the rule that was known before they came."""

    async def look(mover: Mover) -> bool:
        await asyncio.sleep(0)
        return True

    patched.setattr(Mover, "look", look)


def _ids_let_in(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(forebay.arguments, "PRODUCER_MAX", 2**64 - 1)


def _seals_believed(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(forebay.storage.deadletters, "is_sealed", lambda *_: True)


def _show(name: str, *classes: str) -> Callable[[], Sequence[Violation]]:
    return lambda: next(filter(None, (_crashing(name, *classes) for _ in range(RUNS_MAX))), [])


_UNSYNCED_LETTERS: Final = _without_flush_in(DeadLetterSender, "_append")
_UNSYNCED_REPLAY: Final = _without_flush_in(DeadLetters, "_go_on")
MUTANTS: Final = (
    Breach("rule looked up before the wait", _looked_before_the_wait, _altered_while_idle, "altered"),
    Breach("reserved ids let in", _ids_let_in, _pushed_out, "routed"),
    Breach("a forged letter is replayed", _seals_believed, _forged, "forged"),
    Breach("letters count before a sync", _UNSYNCED_LETTERS, _show("dead letters", "fsync", "disk"), "lost"),
    Breach("letters in memory count", _UNSYNCED_LETTERS, _show("dead letters", "fsync", "memory"), "lost"),
    Breach("replayed before a sync", _UNSYNCED_REPLAY, _show("replay", "disk", "fsync"), "replay"),
    Breach("letters come back after a replay", _letters_not_gone, _show("replay", "fsync", "disk"), "replay"),
    Breach("rule switched before a sync", _switched_without_flush, _show("routers", "fsync", "disk"), "routed"),
    Breach("router's cursor before a sync", _cursor_before_it_is_durable, _show("routers", "fsync", "disk"), "routed"),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_checks_name_the_promise_that_a_break_of_routers_or_letters_breaks(
    mutant: Breach, monkeypatch: pytest.MonkeyPatch, ledger: Ledger
) -> None:
    if mutant.invariant in ("altered", "forged"):
        mutant.check_sound()  # crashes without a break are tried elsewhere
    mutant.check_caught(monkeypatch, ledger)
