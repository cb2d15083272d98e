"""Every crash that the simulated disk knows while the batch of a streaming query is attached, and then its replay.

The query repeats the batch after each crash, in segments of its own and cut in another way, as Spark does.
"""

from __future__ import annotations

from typing import Final

import pytest

from forebay.format.metadata.descriptor import LoadStatus
from forebay.format.metadata.keys import sink_key
from forebay.format.metadata.value import decode_value
from forebay.loads.book import LoadBook, SinkState
from forebay.loads.prepare import Sink, ready_to_offer
from forebay.testing.checks.invariants import Violation
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.crashes import CrashState, explore
from forebay.topics import Durability
from tests.history.attached import LOAD, Brought, LoadEnvironment, LoadOwner, broken, values
from tests.ledger import Ledger
from tests.support.environments.simulated import NAME
from tests.support.soak import SOAK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # far more than needed: a shared machine may be busy

STATES_MAX: Final = 16 if SOAK else 1
NAMES_MAX: Final = 8 if SOAK else 1
EVERY: Final = 1 if SOAK else 8
"""Of the steps, every so many-th."""
BATCHES: Final[list[Brought]] = [{0: values(0, 10), 1: values(1, 3)}, {1: values(2, 4)}]
ALL: Final[Brought] = {0: values(0, 10), 1: [*values(1, 3), *values(2, 4)]}


def _bring(node: LoadOwner, batch: int, load_id: str, per_segment: int) -> str | None:
    """What a driver does for a batch, up to the offer."""
    manifest = node.prepare(BATCHES[batch], load_id, per_segment)
    place, now = node.loads.store(), node.environment.clock.now_ms()
    sink = Sink(query_id="query", batch_id=batch)
    load = ready_to_offer(place, node.environment.spec, manifest, created_at=now, expires_at=None, sink=sink)
    return LoadBook(node.metadata, "/forebay", ManualClock()).offer_batch(load_id, load)


def _run(node: LoadOwner, name: str, per_segment: int) -> str:
    """Both batches, one after the other; the load that brought the last one."""
    for batch in range(len(BATCHES)):
        standing = _bring(node, batch, f"{name}-{batch}", per_segment)
        if standing is not None:
            assert node.settle(standing).status is LoadStatus.COMMITTED
    entry = node.environment.inner.get(sink_key("query", NAME.namespace, NAME.topic))
    assert entry is not None
    state, _ = decode_value(entry.value, SinkState)
    assert (state.batch_id, state.offered) == (len(BATCHES) - 1, None)
    return str(state.load_id)


@pytest.mark.parametrize("mode", ["local", "shared_fs"])
@pytest.mark.proves("I22")
def test_a_replay_after_any_crash_gives_every_record_once(mode: str, ledger: Ledger) -> None:
    environment = LoadEnvironment(mode, partitions=2, durability=Durability.FSYNC)
    node = environment.node()
    node.append(0, 2)
    node.shard(1)
    node.places.probe()
    begun = len(environment.disk.trace)
    last = _run(node, LOAD, 6)
    assert broken(environment, node, ALL, last) == []
    flaws: list[str] = []
    trace = environment.disk.trace
    for state in explore(trace, range(begun, len(trace) + 1, EVERY), states_max=STATES_MAX, names_max=NAMES_MAX):
        found = _replayed(state, mode)
        ledger.count("crash states", scenario="sink", damage=state.damage.value)
        ledger.violation("crash states", n=len(found), scenario="sink", damage=state.damage.value)
        flaws += [f"{state}: {flaw}" for flaw in found]
    assert flaws[:10] == []


def _replayed(state: CrashState, mode: str) -> list[Violation]:
    environment = LoadEnvironment.after(state, mode, partitions=2, durability=Durability.FSYNC)
    node = environment.node()
    for partition in (0, 1):
        node.shard(partition)
    last = _run(node, "replay", 4)
    for partition in (0, 1):
        node.append(partition)
    found = broken(environment, node, ALL, last)
    again = _run(node, "again", 5)
    if again != last:
        found.append(Violation("I22", f"{again} brought what {last} had brought"))
    found += broken(environment, node, ALL, last)
    node.close()
    return found
