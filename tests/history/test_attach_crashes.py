"""Every crash that the simulated disk knows, at every step of an attach: recovery finds nothing of it, or all.

The metadata store survives each crash as it stood at that moment: its transactions are noted in the trace.
"""

from __future__ import annotations

from typing import Final

import pytest

from forebay.format.metadata.descriptor import LoadStatus
from forebay.records import Gap
from forebay.testing.checks.catalogs import catalog_is_contiguous, objects_are_whole
from forebay.testing.checks.invariants import Violation, names_follow_bytes
from forebay.testing.simulated.crashes import CrashState, explore
from forebay.topics import Durability
from tests.history.attached import LoadEnvironment, LoadOwner, broken, fetching, values
from tests.ledger import Ledger
from tests.protocol.consuming import missed_by_consumers
from tests.support.soak import SOAK, sampled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # far more than needed: a shared machine may be busy

STATES_MAX: Final = 32 if SOAK else 1
NAMES_MAX: Final = 16 if SOAK else 2
BROUGHT: Final = {0: values(0, 10), 1: values(1, 3)}
MODES: Final = ("local", "shared_fs")


def _ready(mode: str, durability: Durability) -> tuple[LoadEnvironment, LoadOwner]:
    environment = LoadEnvironment(mode, partitions=2, durability=durability)
    node = environment.node()
    # The other partition is empty: there is no file yet that could show where its log goes on.
    node.append(0, 2)
    node.shard(1)
    node.consume(0)
    node.places.probe()
    node.offer(BROUGHT, per_segment=6)
    return environment, node


def _attach(node: LoadOwner) -> None:
    _attach_one(node)
    _go_on(node)


def _attach_one(node: LoadOwner) -> None:
    node.loads._attach("load-1", node.environment.load(), [node.shard(0)])
    node.append(0)
    # It stands before what is not committed, and learns of nothing behind that.
    node.consume(0)


def _go_on(node: LoadOwner) -> None:
    node.settle()
    for partition in (0, 1):
        node.consume(partition)
        node.append(partition)


def _give_up(node: LoadOwner) -> None:
    _attach_one(node)
    node.loads.abandon("load-1")
    _go_on(node)


@pytest.mark.parametrize("scenario", [_attach, _give_up])
@pytest.mark.parametrize("durability", [Durability.FSYNC, *([Durability.DISK] if SOAK else [])])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.proves("I15", "I16", "I17", "I18", "I19", "I20", "I22")
def test_no_crash_of_an_attach_breaks_a_promise(
    mode: str, durability: Durability, scenario: object, ledger: Ledger
) -> None:
    environment, node = _ready(mode, durability)
    trace = environment.disk.trace
    begun = len(trace)
    scenario(node)  # type: ignore[operator]
    assert broken(environment, node, BROUGHT) == []
    # What a probe of the file system leaves for an instant means nothing to any caller.
    assert [flaw for flaw in names_follow_bytes(trace) if ".probe" not in flaw.message] == []
    name = "attach" if scenario is _attach else "attach given up"
    digests: set[bytes] = set()
    flaws: list[str] = []
    states = explore(trace, range(begun, len(trace) + 1), states_max=STATES_MAX, names_max=NAMES_MAX)
    for state in sampled(states, one_in=2, seed=f"{mode} {durability} {name}"):
        digests.add(state.digest())
        ledger.count("crash states", scenario=name, damage=state.damage.value)
        found = _recovered(state, mode, durability)
        ledger.violation("crash states", n=len(found), scenario=name, damage=state.damage.value)
        flaws += [f"{state}: {flaw}" for flaw in found]
    ledger.count("distinct crash states", n=len(digests), scenario=name)
    assert flaws[:10] == []


def _recovered(state: CrashState, mode: str, durability: Durability) -> list[Violation]:
    """What is wrong at that moment, after recovery, and after it all went on."""
    environment = LoadEnvironment.after(state, mode, partitions=2, durability=durability)
    found: list[Violation] = []
    for partition in (0, 1):
        catalog = environment.catalog(partition)
        pieces = catalog.descriptors()
        found += catalog_is_contiguous(pieces, catalog.frontier().next)
        found += objects_are_whole(pieces, fetching(state.files(), None))
    node = environment.node()
    for partition in (0, 1):
        node.shard(partition)
    node.settle()
    ended = environment.load().status
    for partition in (0, 1):
        node.append(partition)
    found += broken(environment, node, BROUGHT)
    streams = [node.stream(partition) for partition in (0, 1)]
    for partition, stream in enumerate(streams):
        node.consume(partition)
        records = [step for step in stream if not isinstance(step, Gap)]
        found += missed_by_consumers(environment.disk.trace.notes(), records, partition)
    node.close()
    again = environment.node()
    for partition in (0, 1):
        if again.stream(partition) != streams[partition]:
            found.append(Violation("I11", f"[{partition}] reads differently after another restart"))
    again.close()
    if ended is LoadStatus.OFFERED:
        found.append(Violation("I22", "the load is not over"))
    return found
