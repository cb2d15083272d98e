"""Random schedules in which consumers leave, owners change, places move and topics go while a slow step is under way.

Every step that waits has a gate (`simulated.py`): the read of a page, the hand-over of what a thread has read, a
look-up, the store of a cursor, the send of a dead letter, the acquisition of a shard. Threads stand at such gates while
others do whatever may end what the step was begun for.
"""

from __future__ import annotations

import random  # noqa: TID251  # seeded: the same run again
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import product
from typing import Final, cast

import pytest

from forebay.errors import ForebayError, Unavailable
from forebay.format.metadata.keys import topic_key
from forebay.metadata import Delete
from forebay.records import EARLIEST, DeliveryState, Start
from forebay.storage import cursors, subscriptions
from forebay.storage.subscriptions import Fetched, SubscriptionDriver
from forebay.subscriptions import dispatch
from forebay.subscriptions.cursor import acked_of
from forebay.topics import SubscriptionOptions
from tests.ledger import Ledger
from tests.subscriptions.simulated import (
    ACK_TIMEOUT_MS,
    LONG,
    PARTITIONS,
    PREFIX,
    RECORDS,
    BeforeTake,
    BrokenPromise,
    GivenRecord,
    PeerKilled,
    SimulatedConsumer,
    SimulatedPeer,
    SimulatedWorld,
    batches,
)
from tests.support.baton import Baton, BatonLock
from tests.support.soak import SOAK

MODES: Final = ("exclusive", "failover", "shared", "key_shared")
SPENT: Final = (None, "dead_letter", "drop", "block")
PER_CASE: Final = 12_500 if SOAK else 625
"""Schedules for each of the sixteen cases: ten thousand in all."""
THREADS: Final = 3
STEPS: Final = 6

GATES: Final = ("read", "hand-over", "look-up", "store", "acquire", "letter")
EVENTS: Final = (
    "detach",
    "epoch change",
    "seek",
    "alter",
    "new subscription",
    "new topic",
    "new partition",
    "kill",
    "cancellation",
    "failure",
)


class Schedule:
    """One run: threads do what is drawn, until each has done so much; then one consumer takes all the rest."""

    def __init__(self, chance: random.Random, baton: Baton, options: SubscriptionOptions) -> None:
        self.world = SimulatedWorld(chance, baton, options)
        self.chance = chance

    def run(self) -> None:
        world = self.world
        world.log.heads[:] = [self.chance.randrange(RECORDS // 2) for _ in world.log.heads]
        self.attach(world.processes[0])
        for _ in range(self.chance.randrange(4)):
            # What is taken here stays unacknowledged for a while: pages are read far behind the cursor.
            self.take()
        world.is_calm = False
        world.baton.run([self.work] * THREADS)
        self.finish()

    def work(self) -> None:
        """What one thread does."""
        steps: list[tuple[int, Callable[[], None]]] = [
            (10, self.take),
            (5, self.answer),
            (4, self.come),
            (2, self.leave),
            (3, self.relieve),
            (1, self.drop),
            (2, self.seek),
            (1, self.alter),
            (2, self.flush),
            (2, self.append),
            (2, self.wait),
            (1, self.delete_record),
            (1, self.add_partition),
            (1, self.ack_late),
            (1, self.kill),
            (1, self.subscribe_again),
        ]
        if self.chance.random() < 0.1:
            steps.append((1, self.create_again))
        ending = [*steps, (20, self.relieve), (8, self.seek), (4, self.subscribe_again)]
        for _ in range(STEPS):
            drawn = ending if set(LONG) & set(self.world.baton.parked) else steps
            if "letter" in self.world.baton.parked:
                drawn = [*drawn, (10, self.kill)]
            (step,) = self.chance.choices([step for _, step in drawn], [weight for weight, _ in drawn])
            with suppress(ForebayError, PeerKilled):
                # Consumers are closed, topics deleted, stores away: what a step leaves is checked.
                step()

    # What consumers do

    def process(self) -> SimulatedPeer:
        return self.world.processes[self.chance.random() < 0.25]

    def worker(self) -> SimulatedConsumer | None:
        """One that no thread takes for."""
        found = [each for process in self.world.processes for each in process.workers if not each.is_taking]
        return self.chance.choice(found) if found else None

    def come(self) -> None:
        process = self.process()
        if len(process.workers) < 3:
            self.attach(process)

    def attach(self, process: SimulatedPeer) -> None:
        driver = process.subscription().driver
        number = driver.attach("c", self.chance.choice([3, 100, 100]))
        process.workers.append(SimulatedConsumer(process, driver, number))

    def take(self) -> None:
        worker = self.worker()
        if worker is None:
            return
        worker.is_taking = True
        try:
            self._take(worker, self.chance.randint(1, 6))
        finally:
            worker.is_taking = False

    def _take(self, worker: SimulatedConsumer, count: int) -> None:
        """In a thread; or as in an event loop, where a take may be cancelled while a thread reads for it."""
        world, driver, number = self.world, worker.driver, worker.number
        before, is_loop = BeforeTake.of(world, driver), self.chance.random() < 0.5
        fetched = driver.fetch_cached(number, count) if is_loop else None
        if fetched is None:
            fetched = driver.fetch(number, count)
            world.gate("hand-over", worker.process, can_fail=False)
        if is_loop and self.chance.random() < 0.2:
            world.happened("cancellation")
            driver.give_back(number, fetched)
            return
        self.deliver(worker, fetched, before)

    def deliver(self, worker: SimulatedConsumer, fetched: Sequence[Fetched], before: BeforeTake) -> None:
        places = [(one.claim.partition, offset) for one in fetched for offset in one.claim.offsets]
        uncounted = self.uncounted(worker, fetched)
        self.world.delivering.update(places)
        try:
            delivered = worker.driver.deliver(worker.number, fetched)
            if uncounted & {(one.record.partition, one.record.offset) for one in delivered}:
                raise BrokenPromise(f"deliveries of {uncounted} are made before they are stored")
            self.world.took(worker, delivered, before)
        finally:
            self.world.delivering.subtract(places)

    def uncounted(self, worker: SimulatedConsumer, fetched: Sequence[Fetched]) -> set[tuple[int, int]]:
        """Records whose deliveries are to be stored before they are made, and are not."""
        found = set[tuple[int, int]]()
        if self.world.log.is_deleted:
            return found
        for claim in [one.claim for one in fetched if one.claim.is_careful]:
            progress = self.world.progress(claim.partition)
            is_served = worker.driver.dispatch.partitions.get(claim.partition) is claim.served
            if not is_served or progress is None or progress.epoch != claim.served.epoch:
                continue
            if progress.subscription != worker.driver.spec.subscription_id:
                continue
            counted = dict(progress.attempts) if isinstance(progress.attempts, tuple) else {}
            for offset, attempt in zip(claim.offsets, claim.attempts, strict=True):
                is_done = offset < progress.offset or offset in acked_of(progress)
                if counted.get(offset, 0) < attempt and not is_done:
                    found.add((claim.partition, offset))
        return found

    def answer(self) -> None:
        worker = self.worker()
        for at, given in list(worker.held.items()) if worker is not None else ():
            assert worker is not None
            if self.chance.random() < 0.5:
                self.ack(worker, given)
            elif self.chance.random() < 0.5:
                worker.held.pop(at, None)
                worker.driver.nack(worker.number, {at[0]: [at[1]]}, self.chance.choice([0, 50]), None)

    def ack(self, worker: SimulatedConsumer, given: GivenRecord) -> None:
        world, (_, partition, offset) = self.world, given.place
        worker.held.pop((partition, offset), None)
        world.acking[partition, offset] += 1
        try:
            before = BeforeTake.of(world, worker.driver)
            if worker.driver.ack(worker.number, {partition: [offset]}) and before.subscription == world.subscription:
                # In one that was deleted meanwhile it counts for nothing.
                world.done.add(world.place(partition, offset))
                if before.is_still_so(world, partition):
                    world.acked_in[world.place(partition, offset)] = world.log.epochs[partition]
        finally:
            world.acking[partition, offset] -= 1

    def ack_late(self) -> None:
        worker = self.worker()
        if worker is not None and worker.before:
            self.ack(worker, self.chance.choice(worker.before))

    def leave(self) -> None:
        process = self.process()
        if process.workers:
            worker = self.chance.choice(process.workers)
            worker.is_leaving = True
            process.workers.remove(worker)
            self.world.happened("detach")
            worker.driver.detach(worker.number)

    def relieve(self) -> None:
        """All consumers of a process leave, and another one comes."""
        process = self.process()
        while process.workers:
            worker = process.workers.pop()
            worker.is_leaving = True
            self.world.happened("detach")
            worker.driver.detach(worker.number)
        self.attach(process)

    def drop(self) -> None:
        """A consumer is dropped without being closed."""
        process = self.process()
        if process.workers:
            worker = process.workers.pop()
            worker.is_leaving = True
            worker.driver.dispatch.abandon(worker.number)

    # What others do

    def seek(self) -> None:
        process = self.process()
        while process.workers:
            worker = process.workers.pop()
            worker.is_leaving = True
            worker.driver.detach(worker.number)
        subscription = process.subscription()
        self.world.happened("seek")
        to: Start = EARLIEST if self.chance.random() < 0.5 else self.chance.randrange(RECORDS)
        subscription.seek(to, partition=self.chance.randrange(2))
        self.attach(process)

    def alter(self) -> None:
        subscription = self.process().subscription()
        self.world.happened("alter")
        if self.chance.random() < 0.5:
            subscription.alter(window_records_max=self.chance.choice([2, 10, 4000]))
        elif self.chance.random() < 0.5:
            subscription.pause()
        else:
            subscription.resume()

    def flush(self) -> None:
        self.process().cursors.flush()

    def append(self) -> None:
        log, partition = self.world.log, self.chance.randrange(PARTITIONS)
        log.heads[partition] = min(RECORDS, log.heads[partition] + self.chance.randint(1, 5))
        for (_, number), shard in list(log.shards.items()):
            for waker in list(shard.wakers) if number == partition else ():
                waker()

    def wait(self) -> None:
        self.world.clock.advance(self.chance.choice([0.01, 0.2, 0.6, ACK_TIMEOUT_MS / 1000]))

    def delete_record(self) -> None:
        self.world.log.gone.add((self.chance.randrange(PARTITIONS), self.chance.randrange(RECORDS)))

    def add_partition(self) -> None:
        log = self.world.log
        if log.spec.partitions == PARTITIONS and not log.is_deleted:
            log.spec = log.spec.altered(partitions=PARTITIONS + 1)
            self.world.define(log.spec)
            self.world.happened("new partition")

    def kill(self) -> None:
        place = self.chance.randrange(2)
        process = self.world.processes[place]
        if any(worker.is_taking for worker in process.workers) and self.chance.random() < 0.5:
            process.is_dead = True
            for key in [key for key in self.world.log.shards if key[0] is process]:
                del self.world.log.shards[key]
            self.world.processes[place] = SimulatedPeer(self.world, process.name)
            self.world.happened("kill")

    def subscribe_again(self) -> None:
        """By a process without consumers; another one may have some."""
        process = self.chance.choice(self.world.processes)
        if not process.workers:
            subscription = process.subscription()
            subscription.delete()
            self.world.happened("new subscription")
            process.subscription()

    def create_again(self) -> None:
        world = self.world
        if world.log.is_deleted:
            return
        log = world.log
        log.is_deleted = True
        log.shards.clear()
        world.metadata.transaction([], [Delete(topic_key("shop", "orders", prefix=PREFIX))])
        with suppress(ForebayError, PeerKilled):
            for process in world.processes:
                process.cursors.forget_topic(log.spec)
            world.processes[0].store.forget_topic(log.spec)
        again = world.new_log()
        again.heads[:] = [self.chance.randrange(RECORDS // 2) for _ in again.heads]
        world.log = again
        world.happened("new topic")

    # What is left

    def finish(self) -> None:
        """Everybody leaves, and one consumer that works takes all the rest."""
        world = self.world
        world.is_calm = True
        for process in world.processes:
            for worker in process.workers:
                with suppress(ForebayError):
                    worker.driver.detach(worker.number)
            process.workers.clear()
            process.cursors.flush()
        process = SimulatedPeer(world, "last")
        world.processes = [process]
        subscription = process.subscription()
        subscription.resume()
        subscription.alter(window_records_max=4000)
        if world.options.get("deliveries_max") is not None:
            subscription.alter(deliveries_max=1000)
        while not process.workers:
            with suppress(ForebayError):
                self.attach(process)
        (worker,) = process.workers
        for _ in range(60):
            if not self.left(worker.driver):
                break
            before = BeforeTake.of(world, worker.driver)
            with suppress(Unavailable):
                self.deliver(worker, worker.driver.fetch(worker.number, 100), before)
            for given in list(worker.held.values()):
                self.ack(worker, given)
            world.clock.advance(0.6)
        for partition in range(world.log.spec.partitions):
            _, base = world.eras.get((world.log.spec.topic_id, partition), (0, 0))
            for offset in range(base, world.log.heads[partition]):
                place = world.place(partition, offset)
                if not world.is_done(place):
                    raise BrokenPromise(f"{place} is skipped: {subscription.driver.dispatch.standing()[partition]}")

    def left(self, driver: SubscriptionDriver) -> int:
        """How many offsets are not done."""
        heads, stands = self.world.log.heads, driver.dispatch.standing()
        assert not any(stand.state is DeliveryState.PAUSED for stand in stands.values())
        return sum(max(0, heads[number] - stand.cursor - stand.done_above) for number, stand in stands.items())


def options_of(mode: str, on_spent: str | None) -> SubscriptionOptions:
    options: dict[str, object] = {"mode": mode, "ack_timeout_ms": ACK_TIMEOUT_MS, "backoff_min_ms": 10}
    if on_spent is not None:
        options |= {"deliveries_max": 2, "on_spent": on_spent}
    return cast(SubscriptionOptions, options)


def _lock_of(baton: Baton, _rank: object, _name: str) -> BatonLock:
    return BatonLock(baton)


def run_schedules(monkeypatch: pytest.MonkeyPatch, mode: str, on_spent: str | None, count: int) -> list[Schedule]:
    """Run so many schedules; each must keep every promise."""
    found = []
    batches()  # with locks of its own
    for number in range(count):
        chance = random.Random(f"{mode} {on_spent} {number}")
        baton = Baton(chance, at_gates=chance.choice([0.2, 0.5]), at_locks=chance.choice([0.0, 0.05]))
        for module in (dispatch, subscriptions, cursors):
            monkeypatch.setattr(module, "RankedLock", partial(_lock_of, baton))
        schedule = Schedule(chance, baton, options_of(mode, on_spent))
        try:
            schedule.run()
        except BaseException as error:
            error.add_note(f"{mode}, on_spent {on_spent}, schedule {number}")
            for line in schedule.world.story:
                error.add_note(line)
            raise
        found.append(schedule)
    return found


@cache
def pairs_of(mode: str, on_spent: str | None) -> Counter[tuple[str, str]]:
    """What happened inside which gate, and how often, in the schedules of a case; each of them keeps every promise."""
    found = Counter[tuple[str, str]]()
    with pytest.MonkeyPatch.context() as patched:
        for schedule in run_schedules(patched, mode, on_spent, PER_CASE):
            found.update(schedule.world.seen)
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("on_spent", SPENT)
@pytest.mark.parametrize("mode", MODES)
def test_no_record_is_skipped_and_none_below_its_cursor_is_delivered(
    mode: str, on_spent: str | None, ledger: Ledger
) -> None:
    found = pairs_of(mode, on_spent)

    ledger.count("gated schedules", n=PER_CASE, mode=mode)
    for (gate, event), number in found.items():
        ledger.count("events inside a gate", n=number, gate=gate, event=event)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_event_has_happened_inside_every_gate() -> None:
    """By itself it runs all schedules; behind the test before it counts what they have done."""
    found = Counter[tuple[str, str]]()
    for mode, on_spent in product(MODES, SPENT):
        found.update(pairs_of(mode, on_spent))

    never = {(gate, event) for gate, event in product(GATES, EVENTS) if not found[gate, event]}
    assert never == set()
    assert {gate for gate, _ in found} == set(GATES), "a gate has no name here"
    assert {event for _, event in found} == set(EVENTS), "an event has no name here"
