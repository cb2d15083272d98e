"""What owners do with a shard in the crash and fault tests: small runs that reach every step of each protocol.

Each can be finished by whichever caller comes after it was broken off, and says what must hold then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from forebay.format.metadata.descriptor import Phase
from forebay.testing.checks.catalogs import frames_of, keys_of
from forebay.testing.checks.history import AppendOutcome
from forebay.testing.checks.invariants import Violation
from forebay.topics import ShardRef
from forebay.wal.recovery.resume import ASIDE
from tests.protocol.environment import Node, OwnersEnvironment
from tests.support.environments.simulated import GRACE_S


class InterruptedScenario(NamedTuple):
    """`run` is what gets interrupted; `finish` repeats it in a new process until it is done."""

    name: str
    modes: tuple[str, ...]
    before: Callable[[OwnersEnvironment], list[Node]]
    """The processes that are alive when `run` begins."""
    run: Callable[[OwnersEnvironment, list[Node]], None]
    finish: Callable[[OwnersEnvironment, str], list[Node]]
    """By the directory of that name; the processes alive then, the owner first, if there is one."""
    by: tuple[str, ...]
    """Who may finish it."""
    exact: tuple[str, ...] = ()
    """Who of them finishes it without a gap in the stream."""
    check: Callable[[OwnersEnvironment], list[Violation]] = lambda _: []


def seal_and_pass(environment: OwnersEnvironment, name: str, to: str) -> list[Node]:
    """Seal by `name`, whatever was done of it before; then `to` goes on."""
    sealing, node = environment.node(name), environment.node(to)
    state = environment.state
    if state is None or state.phase is not Phase.SEALED:
        sealing.seal()
    node.append()
    return [node, sealing]


# Sealing


def _two_files(environment: OwnersEnvironment) -> list[Node]:
    """One file that is history, one that is sealed, one that is written, and a producer to be remembered."""
    node = environment.node("a")
    node.append(3)
    node.append(producing=(1, 0))
    node.consume(2)
    node.export()
    node.append(2)
    node.rotate()
    node.consume(3)
    node.append(producing=(1, 1))
    return [node]


def _empty_topic(environment: OwnersEnvironment) -> list[Node]:
    node = environment.node("a")
    assert node.shard.offsets().next == 0
    return [node]


def _seal(_: OwnersEnvironment, nodes: list[Node]) -> None:
    nodes[0].seal()


def _sealed(environment: OwnersEnvironment, name: str) -> list[Node]:
    """Whichever caller it is in the end: a shard that can be sealed, and goes on elsewhere."""
    if name == "a":
        return seal_and_pass(environment, "a", "b")
    node = environment.node("b")
    if node.append() is AppendOutcome.ACKED:
        return [node]
    # In mode local only the old owner can bring it to its end.
    return seal_and_pass(environment, "a", "b")


# Export and retention


def _three_files(environment: OwnersEnvironment) -> list[Node]:
    [node] = _two_files(environment)
    node.rotate()
    node.append(2)
    node.rotate()
    node.append()
    return [node]


def _export_and_retain(_: OwnersEnvironment, nodes: list[Node]) -> None:
    node = nodes[0]
    node.shard.history.step()
    node.shard.history.retain()
    node.export()
    node.append()
    node.consume()
    node.shard.history.retain()


def _exported(environment: OwnersEnvironment, name: str) -> list[Node]:
    node = environment.node(name)
    node.append()
    node.export()
    node.append()
    node.shard.history.retain()
    return [node]


def _only_the_newest_file_is_left(environment: OwnersEnvironment) -> list[Violation]:
    owner = environment.state
    assert owner is not None and owner.holder is not None
    logs = [name for name in environment.log_files(owner.holder) if name.endswith(".seg") and ASIDE not in name]
    return [] if len(logs) == 1 else [Violation("I22", f"retention left {logs}")]


# Taking over


def _died_in_turn(environment: OwnersEnvironment) -> list[Node]:
    """B has died with records that are not history, and after it A."""
    early = environment.node("b")
    early.append(2)
    early.export()
    early.append()
    early.consume()
    early.die()
    node = environment.node("a")
    node.append(3)
    node.export()
    node.append(2)
    node.consume(2)
    node.die()
    return [environment.node("b")]


def _take_over(_: OwnersEnvironment, nodes: list[Node]) -> None:
    node = nodes[0]
    node.append()
    node.consume()
    node.append(2)


def _taken_over(environment: OwnersEnvironment, name: str) -> list[Node]:
    node = environment.node(name)
    node.append()
    return [node]


def _old_files_are_kept_apart(environment: OwnersEnvironment) -> list[Violation]:
    """The owner in the end goes on with files of its own time; what others had not exported can be salvaged."""
    state = environment.state
    assert state is not None and state.holder is not None
    names = [name for name in environment.log_files(state.holder) if name.endswith(".seg") and ASIDE not in name]
    old = [name for name in names if int(name.rpartition("-")[2].removesuffix(".seg"), 16) < state.holder_since]
    broken = [Violation("I20", f"epoch {state.epoch} goes on with files of others: {old}")] if old else []
    kept = [content for holder in "abc" for content in environment.log_files(holder).values()] + [
        *environment.objects().values()
    ]
    copies = {copy for content in kept for copy in frames_of(content).records}
    history = environment.history()
    promised = [append for append in history.acked if history.must_survive(append)]
    missing = [append for append in promised if not copies.issuperset(append.records)]
    return broken + [Violation("I17", f"no directory has {append.records} any more") for append in missing]


# Deleting


def _spread_over_tiers(environment: OwnersEnvironment) -> list[Node]:
    """Objects of two owners, files of both, and something set aside."""
    [node] = _two_files(environment)
    node.seal()
    other = environment.node("b")
    other.append(2)
    other.export()
    other.append()
    other.consume(4)
    return [other, node]


def _delete(_: OwnersEnvironment, nodes: list[Node]) -> None:
    nodes[0].delete()


def _deleted(environment: OwnersEnvironment, name: str) -> list[Node]:
    nodes = [environment.node(name), *(environment.node(other) for other in "ab" if other != name)]
    nodes[0].delete()
    for node in nodes:
        node.clear_moved()
    # What was on its way when the deletion began has landed by then.
    environment.clock.advance(environment.settings.export.orphan_grace_s + 1)
    nodes[0].deletions.sweep_late()
    # What a crash brought back of probes goes as what it left of uploads does.
    environment.store().abort_stale_uploads(environment.settings.export.orphan_grace_s)
    return []


def _nothing_is_left(environment: OwnersEnvironment) -> list[Violation]:
    left = [
        *environment.log_files("a"),
        *environment.log_files("b"),
        *environment.objects(),
        *environment.inner.snapshot().keys,
    ]
    return [Violation("I22", f"of a deleted topic is left: {left}")] if left else []


# Going there and back


def _to_b_and_sealed(environment: OwnersEnvironment) -> list[Node]:
    """A had it, B has sealed it; A still has its files of before."""
    [node] = _two_files(environment)
    node.seal()
    other = environment.node("b")
    other.append(2)
    other.seal()
    node.die()
    other.die()
    return [environment.node("a")]


def _come_back(_: OwnersEnvironment, nodes: list[Node]) -> None:
    nodes[0].append()
    nodes[0].consume()
    nodes[0].append(2)


def _came_back(environment: OwnersEnvironment, name: str) -> list[Node]:
    node = environment.node(name)
    if node.append() is not AppendOutcome.ACKED:
        # In mode local, once A has it, only A can go on or give it up.
        return seal_and_pass(environment, "a", "b")
    return [node]


def _moved(environment: OwnersEnvironment) -> list[Node]:
    [node] = _two_files(environment)
    node.seal()
    other = environment.node("b")
    other.append()
    return [node, other]


def _clear_away(_: OwnersEnvironment, nodes: list[Node]) -> None:
    nodes[0].clear_moved()


def _cleared_away(environment: OwnersEnvironment, name: str) -> list[Node]:
    owner, other = environment.node("b"), environment.node("a")
    owner.append()
    other.clear_moved()
    if name == "b":
        return [owner, other]
    owner.seal()
    other.append()
    return [other, owner]


def _a_has_nothing(environment: OwnersEnvironment) -> list[Violation]:
    state = environment.state
    assert state is not None
    names = list(environment.log_files("a")) if state.holder == "b" else []
    return [Violation("I22", f"of a shard that moved is left: {names}")] if names else []


def orphans_are_swept(environment: OwnersEnvironment, owner: Node) -> list[Violation]:
    """After its grace the store holds what the catalog names, and nothing else."""
    environment.clock.advance(3 * GRACE_S)
    environment.disk.now_ms = environment.clock.now_ms()
    owner.cleanup.collect_owned(owner.shard)
    needed = keys_of(environment.catalog.descriptors())
    left = {key for key in environment.objects() if key.startswith(ShardRef(environment.ref.spec, 0).id)} - needed
    return [Violation("I18", f"orphans that were not swept: {sorted(left)}")] if left else []


BOTH: Final = ("shared_fs", "local")
SHARED: Final = ("shared_fs",)

SCENARIOS: Final = (
    InterruptedScenario("seal", BOTH, _two_files, _seal, _sealed, ("a", "b"), ("a",)),
    InterruptedScenario("seal of an empty topic", BOTH, _empty_topic, _seal, _sealed, ("a", "b"), ("a",)),
    InterruptedScenario(
        "export and retention",
        SHARED,
        _three_files,
        _export_and_retain,
        _exported,
        ("a", "b"),
        ("a",),
        _only_the_newest_file_is_left,
    ),
    InterruptedScenario(
        "take-over", SHARED, _died_in_turn, _take_over, _taken_over, ("a", "b", "c"), (), _old_files_are_kept_apart
    ),
    InterruptedScenario("deletion", BOTH, _spread_over_tiers, _delete, _deleted, ("a", "b"), (), _nothing_is_left),
    InterruptedScenario(
        "coming back",
        BOTH,
        _to_b_and_sealed,
        _come_back,
        _came_back,
        ("a", "b"),
        (),
        _old_files_are_kept_apart,
    ),
    InterruptedScenario("clear away", BOTH, _moved, _clear_away, _cleared_away, ("a", "b"), ("a", "b"), _a_has_nothing),
)
