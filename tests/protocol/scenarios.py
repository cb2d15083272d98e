"""What owners do with a shard in the crash and fault tests: small runs that reach every step of each protocol.

Each can be finished by whichever caller comes after it was broken off, and says what must hold then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from forebay.format.metadata.descriptor import Phase
from forebay.testing.catalogs import frames_of, keys_of
from forebay.testing.history import AppendOutcome
from forebay.testing.invariants import Violation
from forebay.topics import ShardRef
from forebay.wal.recovery.resume import ASIDE
from tests.protocol.ground import GRACE_S
from tests.protocol.world import Node, World


class Scenario(NamedTuple):
    """`run` is what gets interrupted; `finish` repeats it in a new process until it is done."""

    name: str
    modes: tuple[str, ...]
    before: Callable[[World], list[Node]]
    """The processes that are alive when `run` begins."""
    run: Callable[[World, list[Node]], None]
    finish: Callable[[World, str], list[Node]]
    """By the directory of that name; the processes alive then, the owner first, if there is one."""
    by: tuple[str, ...]
    """Who may finish it."""
    exact: tuple[str, ...] = ()
    """Who of them finishes it without a gap in the stream."""
    check: Callable[[World], list[Violation]] = lambda _: []


def seal_and_pass(world: World, name: str, to: str) -> list[Node]:
    """Seal by `name`, whatever was done of it before; then `to` goes on."""
    sealing, node = world.node(name), world.node(to)
    state = world.state
    if state is None or state.phase is not Phase.SEALED:
        sealing.seal()
    node.append()
    return [node, sealing]


# Sealing


def _two_files(world: World) -> list[Node]:
    """One file that is history, one that is sealed, one that is written, and a producer to be remembered."""
    node = world.node("a")
    node.append(3)
    node.append(producing=(1, 0))
    node.consume(2)
    node.export()
    node.append(2)
    node.rotate()
    node.consume(3)
    node.append(producing=(1, 1))
    return [node]


def _empty_topic(world: World) -> list[Node]:
    node = world.node("a")
    assert node.shard.offsets().next == 0
    return [node]


def _seal(_: World, nodes: list[Node]) -> None:
    nodes[0].seal()


def _sealed(world: World, name: str) -> list[Node]:
    """Whichever caller it is in the end: a shard that can be sealed, and goes on elsewhere."""
    if name == "a":
        return seal_and_pass(world, "a", "b")
    node = world.node("b")
    if node.append() is AppendOutcome.ACKED:
        return [node]
    # In mode local only the old owner can bring it to its end.
    return seal_and_pass(world, "a", "b")


# Export and retention


def _three_files(world: World) -> list[Node]:
    [node] = _two_files(world)
    node.rotate()
    node.append(2)
    node.rotate()
    node.append()
    return [node]


def _export_and_retain(_: World, nodes: list[Node]) -> None:
    node = nodes[0]
    node.shard.history.step()
    node.shard.history.retain()
    node.export()
    node.append()
    node.consume()
    node.shard.history.retain()


def _exported(world: World, name: str) -> list[Node]:
    node = world.node(name)
    node.append()
    node.export()
    node.append()
    node.shard.history.retain()
    return [node]


def _only_the_newest_file_is_left(world: World) -> list[Violation]:
    owner = world.state
    assert owner is not None and owner.holder is not None
    logs = [name for name in world.log_files(owner.holder) if name.endswith(".seg") and ASIDE not in name]
    return [] if len(logs) == 1 else [Violation("I22", f"retention left {logs}")]


# Taking over


def _died_in_turn(world: World) -> list[Node]:
    """B has died with records that are not history, and after it A."""
    early = world.node("b")
    early.append(2)
    early.export()
    early.append()
    early.consume()
    early.die()
    node = world.node("a")
    node.append(3)
    node.export()
    node.append(2)
    node.consume(2)
    node.die()
    return [world.node("b")]


def _take_over(_: World, nodes: list[Node]) -> None:
    node = nodes[0]
    node.append()
    node.consume()
    node.append(2)


def _taken_over(world: World, name: str) -> list[Node]:
    node = world.node(name)
    node.append()
    return [node]


def _old_files_are_kept_apart(world: World) -> list[Violation]:
    """The owner in the end goes on with files of its own time; what others had not exported can be salvaged."""
    state = world.state
    assert state is not None and state.holder is not None
    names = [name for name in world.log_files(state.holder) if name.endswith(".seg") and ASIDE not in name]
    old = [name for name in names if int(name.rpartition("-")[2].removesuffix(".seg"), 16) < state.holder_since]
    broken = [Violation("I20", f"epoch {state.epoch} goes on with files of others: {old}")] if old else []
    kept = [content for holder in "abc" for content in world.log_files(holder).values()] + [*world.objects().values()]
    copies = {copy for content in kept for copy in frames_of(content).records}
    history = world.history()
    promised = [append for append in history.acked if history.must_survive(append)]
    missing = [append for append in promised if not copies.issuperset(append.records)]
    return broken + [Violation("I17", f"no directory has {append.records} any more") for append in missing]


# Deleting


def _spread_over_tiers(world: World) -> list[Node]:
    """Objects of two owners, files of both, and something set aside."""
    [node] = _two_files(world)
    node.seal()
    other = world.node("b")
    other.append(2)
    other.export()
    other.append()
    other.consume(4)
    return [other, node]


def _delete(_: World, nodes: list[Node]) -> None:
    nodes[0].delete()


def _deleted(world: World, name: str) -> list[Node]:
    nodes = [world.node(name), *(world.node(other) for other in "ab" if other != name)]
    nodes[0].delete()
    for node in nodes:
        node.clear_moved()
    # What was on its way when the deletion began has landed by then.
    world.clock.advance(world.settings.export.orphan_grace_s + 1)
    nodes[0].deletions.sweep_late()
    # What a crash brought back of probes goes as what it left of uploads does.
    world.store().abort_stale_uploads(world.settings.export.orphan_grace_s)
    return []


def _nothing_is_left(world: World) -> list[Violation]:
    left = [*world.log_files("a"), *world.log_files("b"), *world.objects(), *world.inner.snapshot().keys]
    return [Violation("I22", f"of a deleted topic is left: {left}")] if left else []


# Going there and back


def _to_b_and_sealed(world: World) -> list[Node]:
    """A had it, B has sealed it; A still has its files of before."""
    [node] = _two_files(world)
    node.seal()
    other = world.node("b")
    other.append(2)
    other.seal()
    node.die()
    other.die()
    return [world.node("a")]


def _come_back(_: World, nodes: list[Node]) -> None:
    nodes[0].append()
    nodes[0].consume()
    nodes[0].append(2)


def _came_back(world: World, name: str) -> list[Node]:
    node = world.node(name)
    if node.append() is not AppendOutcome.ACKED:
        # In mode local, once A has it, only A can go on or give it up.
        return seal_and_pass(world, "a", "b")
    return [node]


def _moved(world: World) -> list[Node]:
    [node] = _two_files(world)
    node.seal()
    other = world.node("b")
    other.append()
    return [node, other]


def _clear_away(_: World, nodes: list[Node]) -> None:
    nodes[0].clear_moved()


def _cleared_away(world: World, name: str) -> list[Node]:
    owner, other = world.node("b"), world.node("a")
    owner.append()
    other.clear_moved()
    if name == "b":
        return [owner, other]
    owner.seal()
    other.append()
    return [other, owner]


def _a_has_nothing(world: World) -> list[Violation]:
    state = world.state
    assert state is not None
    names = list(world.log_files("a")) if state.holder == "b" else []
    return [Violation("I22", f"of a shard that moved is left: {names}")] if names else []


def orphans_are_swept(world: World, owner: Node) -> list[Violation]:
    """After its grace the store holds what the catalog names, and nothing else."""
    world.clock.advance(3 * GRACE_S)
    world.disk.now_ms = world.clock.now_ms()
    owner.cleanup.collect_owned(owner.shard)
    needed = keys_of(world.catalog.descriptors())
    left = {key for key in world.objects() if key.startswith(ShardRef(world.ref.spec, 0).id)} - needed
    return [Violation("I18", f"orphans that were not swept: {sorted(left)}")] if left else []


BOTH: Final = ("shared_fs", "local")
SHARED: Final = ("shared_fs",)

SCENARIOS: Final = (
    Scenario("seal", BOTH, _two_files, _seal, _sealed, ("a", "b"), ("a",)),
    Scenario("seal of an empty topic", BOTH, _empty_topic, _seal, _sealed, ("a", "b"), ("a",)),
    Scenario(
        "export and retention",
        SHARED,
        _three_files,
        _export_and_retain,
        _exported,
        ("a", "b"),
        ("a",),
        _only_the_newest_file_is_left,
    ),
    Scenario(
        "take-over", SHARED, _died_in_turn, _take_over, _taken_over, ("a", "b", "c"), (), _old_files_are_kept_apart
    ),
    Scenario("deletion", BOTH, _spread_over_tiers, _delete, _deleted, ("a", "b"), (), _nothing_is_left),
    Scenario(
        "coming back",
        BOTH,
        _to_b_and_sealed,
        _come_back,
        _came_back,
        ("a", "b"),
        (),
        _old_files_are_kept_apart,
    ),
    Scenario("clear away", BOTH, _moved, _clear_away, _cleared_away, ("a", "b"), ("a", "b"), _a_has_nothing),
)
