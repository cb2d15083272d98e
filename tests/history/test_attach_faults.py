"""Metadata, stores and disks that fail in the middle of an attach: repeated until done, it ends as if they had not."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import Final

import pytest

from forebay.appends.queue import Paused
from forebay.appends.ticket import Ticket
from forebay.catalog.transact import ATTEMPTS
from forebay.errors import ForebayError, Indeterminate
from forebay.format.columns.rows import encode_rows
from forebay.format.metadata.descriptor import LoadStatus
from forebay.loads.book import LoadBook
from forebay.testing.checks.catalogs import Ending, ending_of, runs_converge
from forebay.testing.checks.invariants import Violation
from forebay.testing.inside import inside
from forebay.testing.simulated.blobs import Fault, SimulatedBlobs, plan_faults
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.metadata import Fault as MetadataFault
from tests.history.attached import LOAD, LoadEnvironment, LoadOwner, broken, tolerated, values
from tests.ledger import Ledger
from tests.support.soak import SOAK

pytestmark = pytest.mark.slow

EVERY: Final = 1 if SOAK else 3
"""Of the pairs of faults, every so many-th."""
BROUGHT: Final = {0: values(0, 30), 1: values(1, 5)}


class Run:
    """A load of two partitions that is offered, and ready to be attached."""

    def __init__(self, mode: str = "shared_fs") -> None:
        self.blobs = SimulatedBlobs()
        self.environment = LoadEnvironment(mode, partitions=2, blobs=self.blobs)
        self.node = self.environment.node()
        self.node.append(0, 3)
        self.node.append(1)
        self.node.offer(BROUGHT, per_segment=20)
        self.begun = (dict(self.environment.faulty.calls), len(self.blobs.calls), self.environment.disk.calls_reached)

    def attach(self) -> bool:
        return tolerated(lambda: self.node.loads.attach(LOAD))

    def finish(self) -> list[Violation]:
        """Whatever failed works again: go on until it is done, and append behind it."""
        self.environment.faulty.heal()
        self.blobs.heal()
        self.environment.disk.heal()
        for shard in self.node.engine.shards():
            shard.upkeep.maintain()
        self.node.settle()
        for partition in (0, 1):
            self.node.append(partition)
        return broken(self.environment, self.node, BROUGHT)

    def close(self) -> None:
        self.node.close()

    def try_appends(self) -> None:
        """Refused while it is not known what the load has got, else at an offset that it never gets."""
        for partition in (0, 1):
            with contextlib.suppress(Paused):
                self.node.append(partition)

    def ending(self) -> Ending:
        pieces = [piece for partition in (0, 1) for piece in self.environment.catalog(partition).descriptors()]
        return ending_of(pieces, self.blobs.contents)


def _undisturbed() -> Ending:
    run = Run()
    assert run.attach()
    for partition in (0, 1):
        run.node.append(partition)
    assert broken(run.environment, run.node, BROUGHT) == []
    return run.ending()


UNDISTURBED: Final = _undisturbed()


def _metadata_faults() -> Iterator[tuple[str, int, MetadataFault]]:
    run = Run()
    assert run.attach()
    for method, reached in run.environment.faulty.calls.items():
        faults = list(MetadataFault) if method == "transaction" else [MetadataFault.FAIL_BEFORE]
        for place in range(reached - run.begun[0].get(method, 0)):
            yield from ((method, place, fault) for fault in faults)


@pytest.mark.parametrize("between", ["nothing", "appends"])
@pytest.mark.parametrize("times", [1, ATTEMPTS + 1])
@pytest.mark.parametrize("landing", ["at once", "at the end", "never"])
def test_metadata_that_fails_at_any_call_leaves_one_history(
    times: int, landing: str, between: str, ledger: Ledger
) -> None:
    for method, place, fault in _metadata_faults():
        run = Run()
        run.environment.faulty.inject(fault, method=method, after=place, count=times)
        run.attach()
        if landing == "at once":
            run.environment.faulty.land()
        if between == "appends":
            run.environment.faulty.heal()
            run.try_appends()
        flaws = run.finish()
        if landing == "at the end":
            run.environment.faulty.land()
            flaws += broken(run.environment, run.node, BROUGHT)
        if between == "nothing":
            flaws += runs_converge(UNDISTURBED, run.ending())
        ledger.count("attach through metadata faults", method=method, fault=fault.value)
        ledger.violation("attach through metadata faults", n=len(flaws), method=method, fault=fault.value)
        run.close()
        assert flaws == [], (method, place, fault)


def test_a_store_that_fails_at_any_call_leaves_the_same_history(ledger: Ledger) -> None:
    run = Run()
    assert run.attach()
    for call, fault in plan_faults(run.blobs.calls[run.begun[1] :]):
        run = Run()
        run.blobs.fail_at(call.index, fault)
        run.attach()
        if fault is Fault.LATE:
            run.blobs.land()
        flaws = [*run.finish(), *runs_converge(UNDISTURBED, run.ending())]
        ledger.count("attach through store faults", method=call.method, fault=fault.value)
        ledger.violation("attach through store faults", n=len(flaws), method=call.method, fault=fault.value)
        run.close()
        assert flaws == [], (call, fault)


@pytest.mark.parametrize("mode", ["local", "shared_fs"])
def test_a_disk_that_fails_at_any_call_leaves_a_history_without_a_gap(mode: str, ledger: Ledger) -> None:
    run = Run(mode)
    assert run.attach()
    for index in range(run.begun[2], run.environment.disk.calls_reached, EVERY):
        run = Run(mode)
        run.environment.disk.fail_at(index, errno.EIO)
        run.attach()
        flaws = run.finish()
        ledger.count("attach through disk faults", mode=mode)
        ledger.violation("attach through disk faults", n=len(flaws), mode=mode)
        run.close()
        assert flaws == [], index


def _unsure(node: LoadOwner, environment: LoadEnvironment) -> None:
    """Attach, so that every transaction for it times out."""
    before = environment.faulty.calls["transaction"]
    environment.faulty.inject(MetadataFault.TIME_OUT, after=0, count=ATTEMPTS)
    with pytest.raises(Indeterminate):
        node.loads.attach(LOAD)
    assert environment.faulty.calls["transaction"] == before + ATTEMPTS


def _ready() -> tuple[LoadEnvironment, LoadOwner]:
    environment = LoadEnvironment()
    node = environment.node()
    node.append(count=3)
    node.shard().flush()
    node.shard().rotate()
    node.shard().upkeep.seal_rotated()
    node.shard().history.catch_up()
    node.offer({0: values(0, 10)})
    return environment, node


def test_appends_wait_while_it_is_not_known_whether_the_load_was_attached() -> None:
    environment, node = _ready()
    _unsure(node, environment)
    staged = encode_rows([(b"early", None, None, (), 0)])
    for _ in range(3):
        inside(node.loads).of(node.shard()).resolve()
        with pytest.raises(Paused, match="is being attached"):
            node.shard().wal.stage_many(staged, None, Ticket())

    environment.faulty.land()
    inside(node.loads).of(node.shard()).resolve()

    assert node.append() == [13]
    assert node.settle().status is LoadStatus.COMMITTED
    assert broken(environment, node, {0: values(0, 10)}) == []


def test_appends_go_on_once_a_load_that_may_be_attached_is_given_up() -> None:
    environment, node = _ready()
    _unsure(node, environment)
    LoadBook(environment.inner, "/forebay", ManualClock()).give_up(LOAD)

    node.settle()

    assert node.append() == [3]
    assert all(not outcome.succeeded for outcome in environment.faulty.land())
    assert node.append() == [4]
    assert broken(environment, node, {0: values(0, 10)}) == []


def test_a_load_that_landed_and_was_then_given_up_leaves_its_offsets_empty() -> None:
    environment, node = _ready()
    _unsure(node, environment)
    assert [outcome.succeeded for outcome in environment.faulty.land()] == [True] + [False] * (ATTEMPTS - 1)
    LoadBook(environment.inner, "/forebay", ManualClock()).give_up(LOAD)

    node.settle()

    assert node.append() == [13]
    assert broken(environment, node, {0: values(0, 10)}) == []


def test_an_owner_that_is_replaced_while_it_is_unsure_stops(ledger: Ledger) -> None:
    environment, node = _ready()
    _unsure(node, environment)
    shard = node.shard()
    node.owner_session.session.close()
    other = environment.node("b")
    other.append()

    assert all(not outcome.succeeded for outcome in environment.faulty.land())
    with pytest.raises(ForebayError):
        inside(node.loads).of(shard).resolve()

    assert shard.wal.fenced is not None
    assert other.settle().status is LoadStatus.COMMITTED
    assert broken(environment, other, {0: values(0, 10)}) == []
    ledger.count("zombie attaches refused")


def test_a_log_that_cannot_go_on_for_now_is_brought_there_later() -> None:
    environment, node = _ready()
    wal = node.shard().wal
    plain = wal.skip_to_history
    wal.skip_to_history = lambda stop: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no room"))  # type: ignore[method-assign]
    assert not tolerated(lambda: node.loads.attach(LOAD))
    assert node.paused() == [0]
    with pytest.raises(Paused):
        node.append()
    wal.skip_to_history = plain  # type: ignore[method-assign]

    node.settle()

    assert node.append() == [13]
    assert broken(environment, node, {0: values(0, 10)}) == []
