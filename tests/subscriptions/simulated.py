"""A subscription of two simulated processes, with a gate inside each step that waits; and what must be so at all times.

Windows, dispatch, driver, cursors and dead letters are the real ones. Topics, the metadata store and time are
simulated, so that a schedule costs a few milliseconds. `SimulatedWorld` knows what each consumer was given and has
acknowledged. It checks every cursor when it is stored, and every record when it is delivered.
"""

from __future__ import annotations

import random  # noqa: TID251  # seeded: the same run again
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple, cast

import msgspec

import forebay
from forebay.appends.producer_window import NONE_BEFORE
from forebay.errors import Conflict, Moved, Unavailable, UnknownSubscription, UnknownTopic
from forebay.format.frame.batch import Batch
from forebay.format.metadata.keys import progress_key, topic_key
from forebay.format.metadata.value import decode_value, encode_value
from forebay.metadata import Compare, Delete, Entry, MemoryMetadata, MetadataStore, Operation, Outcome, Put
from forebay.meter import LogMeter
from forebay.pages import Page, Reach
from forebay.progress import Progress, ProgressStore
from forebay.records import EARLIEST, Headers, Start
from forebay.settings import Settings
from forebay.storage import Topic
from forebay.storage.cursors import Cursors
from forebay.storage.subscriptions import Subscription, SubscriptionDriver, Subscriptions
from forebay.subscriptions.cursor import acked_of
from forebay.subscriptions.deadletters import ATTEMPTS, ORIGIN_OFFSET, ORIGIN_PARTITION
from forebay.subscriptions.definitions import SubscriptionStore
from forebay.testing.simulated.clock import ManualClock
from forebay.topics import OnSpent, SubscriptionOptions, TopicName, TopicSpec
from tests.support.baton import Baton

SETTINGS: Final = Settings()
RECORDS: Final = 24
PARTITIONS: Final = 2
ACK_TIMEOUT_MS: Final = 1_000
NAME: Final = "shop/orders"
SUBSCRIPTION: Final = "billing"
PREFIX: Final = "/forebay"
LONG: Final = ("read", "hand-over")
"""Steps that always take their time: others must get far meanwhile to end what they are for."""
AWAY: Final = 0.01
"""How often the metadata store, or the dead-letter topic, does not answer."""


class PeerKilled(BaseException):
    """The process in whose thread this is raised was killed."""


class BrokenPromise(AssertionError):
    """A promise is broken."""


class EraPlace(NamedTuple):
    """A record of a subscription, from its creation or one seek to the next."""

    era: int
    partition: int
    offset: int


@cache
def batches() -> tuple[Batch, ...]:
    """The records of each partition; those of all schedules are the same."""
    with forebay.open(":memory:") as log:
        topic = log.create_topic(NAME, partitions=PARTITIONS + 1)
        for partition in range(PARTITIONS + 1):
            keys: list[bytes | None] = [None if number % 5 == 0 else b"k%d" % (number % 3) for number in range(RECORDS)]
            topic.append_many([b"%d" % number for number in range(RECORDS)], keys=keys, partition=partition)
        pages = [topic.batch_page(number, 0, records_max=1000, bytes_max=10**6)[0] for number in range(PARTITIONS + 1)]
    return tuple(batch for page in pages for batch in page.batches)


class GatedStore:
    """The metadata store as one process reaches it: a gate before and behind each call."""

    def __init__(self, world: SimulatedWorld, process: SimulatedPeer) -> None:
        self._world = world
        self._process = process

    def get(self, key: str) -> Entry | None:
        self._gate("look-up")
        found = self._world.metadata.get(key)
        self._gate("look-up", can_fail=False)
        return found

    def range(self, prefix: str, **options: Any) -> list[Entry]:
        self._gate("look-up")
        return self._world.metadata.range(prefix, **options)

    def transaction(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        self._gate("store")
        outcome = self._world.metadata.transaction(compares, operations)
        if outcome.succeeded:
            for operation in operations:
                self._world.stored(operation)
        self._gate("store", can_fail=False)
        return outcome

    def _gate(self, what: str, *, can_fail: bool = True) -> None:
        self._world.gate(what, self._process, can_fail=can_fail)


class SimulatedLog:
    """The records of one topic, and who owns its shards."""

    def __init__(self, spec: TopicSpec) -> None:
        self.spec = spec
        self.heads = [0] * (PARTITIONS + 1)
        self.gone: set[tuple[int, int]] = set()
        self.epochs = [0] * (PARTITIONS + 1)
        self.owners: list[SimulatedPeer | None] = [None] * (PARTITIONS + 1)
        self.is_deleted = False
        self.shards: dict[tuple[SimulatedPeer, int], SimulatedShard] = {}

    def page(self, partition: int, offset: int, records_max: int) -> Page:
        head = self.heads[partition]
        stop = min(head, offset + records_max)
        if stop <= offset:
            return Page([], [], offset)
        whole, found, first = batches()[partition], list[Batch](), offset
        for at in range(offset, stop + 1):
            if at == stop or (partition, at) in self.gone:
                if at > first:
                    found.append(whole.slice(first, at))
                first = at + 1
        return Page(found, [], stop)


class SimulatedShard:
    """One partition as its owner has it open."""

    def __init__(self, log: SimulatedLog, partition: int, epoch: int) -> None:
        self._log = log
        self._partition = partition
        self.epoch = epoch
        self.wakers: set[Callable[[], None]] = set()

    def ended(self) -> object:
        return sum(place[0] == self._partition for place in self._log.gone)

    def reach(self) -> Reach:
        return Reach(0, 0, self._log.heads[self._partition])

    def published(self) -> int:
        return self._log.heads[self._partition]


class SimulatedTopic:
    """A topic as one process has it."""

    def __init__(self, world: SimulatedWorld, process: SimulatedPeer, log: SimulatedLog) -> None:
        self._world = world
        self._process = process
        self._log = log
        self.name = NAME

    @property
    def spec(self) -> TopicSpec:
        return self._log.spec

    @property
    def partitions(self) -> int:
        return self._log.spec.partitions

    def shard_if_open(self, partition: int) -> SimulatedShard | None:
        self._check()
        return self._log.shards.get((self._process, partition))

    def acquire(self, partition: int) -> None:
        self._world.gate("acquire", self._process)
        self._check()
        log, owner = self._log, self._log.owners[partition]
        if owner is self._process and (owner, partition) in log.shards:
            return
        if owner is not None and owner is not self._process and not owner.is_dead:
            if not self._world.is_calm and self._world.chance.random() < 0.5:
                raise Moved(f"{NAME}[{partition}] is owned by another process", topic=NAME)
            log.shards.pop((owner, partition), None)
        log.epochs[partition] += 1
        log.owners[partition] = self._process
        if log.epochs[partition] > 1:
            self._world.unclear.add(self._world.place(partition, 0)[:2])
        log.shards[self._process, partition] = SimulatedShard(log, partition, log.epochs[partition])
        self._world.happened("epoch change")
        self._world.gate("acquire", self._process, can_fail=False)

    def epoch(self, partition: int) -> int:
        shard = self.shard_if_open(partition)
        return 0 if shard is None else shard.epoch

    def batch_page(self, partition: int, offset: int, *, records_max: int, bytes_max: int) -> tuple[Page, Reach]:
        self._world.gate("read", self._process)
        self._check()
        shard = self._log.shards.get((self._process, partition))
        if shard is None:
            raise Moved(f"{NAME}[{partition}] is not open any more", topic=NAME)
        page, reach = self._log.page(partition, offset, self._world.page_records), shard.reach()
        self._world.gate("read", self._process)
        return page, reach

    def batch_page_cached(
        self, partition: int, offset: int, *, records_max: int, bytes_max: int
    ) -> tuple[Page, Reach] | None:
        shard = self.shard_if_open(partition)
        if shard is None or self._world.chance.random() < 0.5:
            return None
        return self._log.page(partition, offset, self._world.page_records), shard.reach()

    def starts(self, start: Start, partition: int | None = None) -> dict[int, int]:
        self._check()
        numbers = range(self.partitions) if partition is None else [partition]
        if isinstance(start, int):
            return {number: min(start, self._log.heads[number]) for number in numbers}
        return {number: 0 if start is EARLIEST else self._log.heads[number] for number in numbers}

    def _check(self) -> None:
        if self._log.is_deleted:
            raise UnknownTopic(f"{NAME} was deleted", topic=NAME)


class SimulatedLetters:
    """The dead-letter topic as one process has it: what it has stays, whoever has appended it."""

    partitions = 1

    def __init__(self, world: SimulatedWorld, process: SimulatedPeer, name: str) -> None:
        self._world = world
        self._process = process
        self.name = name
        self.spec = TopicSpec(namespace="shop", topic="letters", topic_id="f" * 32, partitions=1)

    def acquire(self) -> None:
        self._world.gate("letter", self._process)

    def flush(self) -> None:
        self._world.gate("letter", self._process)

    def last_sequence(self, producer: int, partition: int) -> int | None:
        self._world.gate("letter", self._process)
        return self._world.last_letters.get(producer)

    def append(
        self, value: bytes | None, *, headers: Headers, producer: int, sequence: int, previous: int, **_: Any
    ) -> None:
        self._world.gate("letter", self._process)
        last = self._world.last_letters.get(producer, NONE_BEFORE)
        if sequence > last:
            if previous != last:
                raise Conflict(f"the producer stands at {last}, not at {previous}")
            self._world.last_letters[producer] = sequence
            self._world.letter(dict(headers))
        self._world.gate("letter", self._process)


class SimulatedPeer:
    """One process, with its subscriptions."""

    def __init__(self, world: SimulatedWorld, name: str) -> None:
        self.world = world
        self.name = name
        self.is_dead = False
        self.workers: list[SimulatedConsumer] = []
        store = cast(MetadataStore, GatedStore(world, self))
        clock = world.clock
        self.cursors = Cursors(ProgressStore(store, PREFIX, clock), SETTINGS.progress, clock)
        self.cursors.worker.stop()
        self.store = SubscriptionStore(store, PREFIX, clock)
        self.subscriptions = Subscriptions(self.store, self.cursors, SETTINGS, clock, cast(Any, self), LogMeter(clock))
        self._topics: dict[str, Topic] = {}
        self._known: list[Subscription] = []
        """Else the garbage collector would decide which of them go on with an earlier one, and runs would differ."""

    def topic(self, name: str | TopicName) -> Topic:
        """The topic of the subscription, or the dead-letter topic."""
        if str(name) != NAME:
            return cast(Topic, SimulatedLetters(self.world, self, str(name)))
        log = self.world.log
        if log.is_deleted:
            raise UnknownTopic(f"{NAME} was deleted", topic=NAME)
        return self._topics.setdefault(log.spec.topic_id, cast(Topic, SimulatedTopic(self.world, self, log)))

    def create_topic(self, name: str | TopicName, *, exist_ok: bool = False) -> Topic:
        return self.topic(name)

    def subscription(self) -> Subscription:
        """The subscription, made if it is not there."""
        try:
            found = self.subscriptions.get(self.topic(NAME), SUBSCRIPTION)
        except UnknownSubscription:
            found = self.subscriptions.open(self.topic(NAME), SUBSCRIPTION, EARLIEST, self.world.options)
        self._known.append(found)
        return found


class GivenRecord(NamedTuple):
    """A record that a consumer was given."""

    place: EraPlace
    attempt: int
    epoch: int
    until_s: float


class SimulatedConsumer:
    """A consumer, and what it was given."""

    def __init__(self, process: SimulatedPeer, driver: SubscriptionDriver, number: int) -> None:
        self.process = process
        self.driver = driver
        self.number = number
        self.held: dict[tuple[int, int], GivenRecord] = {}
        self.before: list[GivenRecord] = []
        self.is_taking = self.is_leaving = False


class SimulatedWorld:
    """Everything that both processes share, and what was given, acknowledged and stored."""

    def __init__(self, chance: random.Random, baton: Baton, options: SubscriptionOptions) -> None:
        """The locks of what is made here are those of the baton."""
        self.chance = chance
        self.clock = ManualClock(seed=chance.randrange(2**32))
        self.baton = baton
        self.metadata = MemoryMetadata()
        self.options = options
        self.page_records = self.chance.choice([1, 2, 3, 100])
        self.seen: Counter[tuple[str, str]] = Counter()
        """How often something happened while a thread stood at a gate, by both."""
        self.story: list[str] = []
        """What has happened, for whom a schedule fails."""
        self.is_calm = True
        """Whether every call is answered."""
        self.last_letters: dict[int, int] = {}
        self.eras: dict[tuple[str, int], tuple[int, int]] = {}
        """By topic id and partition, the number of the era and where it began."""
        self.subscription: object = None
        """The id of the subscription that is there, or was there last."""
        self.firsts: dict[tuple[str, int], int] = {}
        """By topic id and partition, the number of the first era."""
        self.done: set[EraPlace] = set()
        """What was acknowledged, and counted."""
        self.acking: Counter[tuple[int, int]] = Counter()
        """By partition and offset, acknowledgements that are under way."""
        self.acked_in: dict[EraPlace, int] = {}
        """In which epoch it was acknowledged, of what was."""
        self.deliveries: Counter[EraPlace] = Counter()
        self.delivering: Counter[tuple[int, int]] = Counter()
        """By partition and offset, deliveries that are under way."""
        self.dead: dict[EraPlace, int] = {}
        self.unclear: set[tuple[int, int]] = set()
        """Eras and partitions whose deliveries were begun in several epochs: some of them were not made."""
        self.overtaken: set[tuple[int, int]] = set()
        """Eras and partitions that began after their owner had changed."""
        self.topics = 0
        self.log = self.new_log()
        self.processes = [SimulatedPeer(self, "a"), SimulatedPeer(self, "b")]

    # Topics

    def new_log(self) -> SimulatedLog:
        """Define the topic, in place of one that was deleted."""
        self.topics += 1
        spec = TopicSpec(namespace="shop", topic="orders", topic_id=f"{self.topics:032x}", partitions=PARTITIONS)
        self.define(spec)
        return SimulatedLog(spec)

    def define(self, spec: TopicSpec) -> None:
        key = topic_key(spec.namespace, spec.topic, prefix=PREFIX)
        self.metadata.transaction([], [Put(key, encode_value(spec))])

    # Steps that wait

    def gate(self, what: str, process: SimulatedPeer, *, can_fail: bool = True) -> None:
        """A step of a process waits, and may fail, or end with the process."""
        self.baton.gate(what, is_long=what in LONG)
        if process.is_dead:
            raise PeerKilled
        if can_fail and not self.is_calm and self.chance.random() < AWAY:
            self.happened("failure")
            raise Unavailable(f"{what}: no answer")

    def happened(self, what: str) -> None:
        """Something that may end what threads at gates are at."""
        self.story.append(f"{self.baton.number}: {what}, while {self.baton.parked} wait")
        for gate in self.baton.parked:
            self.seen[gate, what] += 1

    # What must be so

    def place(self, partition: int, offset: int) -> EraPlace:
        era, _ = self.eras.get((self.log.spec.topic_id, partition), (0, 0))
        return EraPlace(era, partition, offset)

    def progress(self, partition: int) -> Progress | None:
        entry = self.metadata.get(progress_key("shop", "orders", SUBSCRIPTION, partition, prefix=PREFIX))
        found = None if entry is None else decode_value(entry.value, Progress)[0]
        return found if found is not None and found.incarnation == self.log.spec.topic_id else None

    def stored(self, operation: Operation) -> None:
        """A value is stored: a cursor of a window counts what is done, any other one begins an era."""
        below = f"{PREFIX}/progress/shop/orders/{SUBSCRIPTION}/"
        if isinstance(operation, Delete) or not isinstance(operation, Put) or not operation.key.startswith(below):
            return
        progress, partition = decode_value(operation.value, Progress)[0], int(operation.key.removeprefix(below))
        if isinstance(progress.acked, msgspec.UnsetType):
            era = len(self.eras) + sum(number for number, _ in self.eras.values()) + 1
            self.eras[progress.incarnation, partition] = era, progress.offset
            self.firsts.setdefault((progress.incarnation, partition), era)
            self.subscription = progress.subscription
            if progress.epoch not in (0, self.log.epochs[partition]):
                # Another process has become the owner while this seek was stored, and goes on by what it has read.
                self.overtaken.add((era, partition))
            self.story.append(f"{self.baton.number}: era {era} of partition {partition} begins at {progress.offset}")
            return
        if progress.incarnation != self.log.spec.topic_id:
            return
        era, base = self.eras.get((progress.incarnation, partition), (0, 0))
        covered = {*range(base, progress.offset), *(at for at in acked_of(progress) if at >= base)}
        skipped = [at for at in sorted(covered) if not self.is_done(EraPlace(era, partition, at))]
        if skipped:
            raise BrokenPromise(
                f"a cursor of partition {partition} is stored at {progress.offset}, and {skipped} are not done"
            )

    def is_done(self, place: EraPlace) -> bool:
        """Whether a record needs no delivery any more."""
        _, partition, offset = place
        if place in self.done or (partition, offset) in self.log.gone or self.acking[partition, offset]:
            return True
        if place[:2] in self.overtaken:
            return True
        return place in self.dead or self._may_be_dropped(place)

    def _may_be_dropped(self, place: EraPlace) -> bool:
        most = self.options.get("deliveries_max")
        if self.options.get("on_spent") != OnSpent.DROP or most is None:
            return False
        made = self.deliveries[place] + self.delivering[place[1:]]
        return made >= most or place[:2] in self.unclear

    def letter(self, headers: Mapping[str, bytes | None]) -> None:
        """A dead letter has arrived."""
        place = self.place(int(headers[ORIGIN_PARTITION] or b""), int(headers[ORIGIN_OFFSET] or b""))
        self.dead[place] = attempts = int(headers[ATTEMPTS] or b"")
        made = self.deliveries[place] + self.delivering[place[1:]]
        # One of an earlier era may come late.
        is_first = self.firsts.get((self.log.spec.topic_id, place.partition)) == place.era
        if is_first and place[:2] not in self.unclear and made < attempts and self.topics == 1:
            raise BrokenPromise(f"{place} is a dead letter after {made} deliveries, and says {attempts}")

    def took(self, worker: SimulatedConsumer, taken: Sequence[forebay.DeliveredRecord], before: BeforeTake) -> None:
        """Records were delivered by a take that began when this was so."""
        for one in taken:
            partition, offset = one.record.partition, one.record.offset
            place, epoch = self.place(partition, offset), self.log.epochs[partition]
            if before.is_still_so(self, partition) and self.log.owners[partition] is worker.process:
                self._check_delivery(worker, place, before, epoch)
            else:
                # By a window whose partition had another owner since: what that one did is not known to it yet.
                self.unclear.add(place[:2])
            self.deliveries[place] += 1
            given = GivenRecord(place, one.attempt, epoch, before.now_s + ACK_TIMEOUT_MS / 1000)
            worker.held[partition, offset] = given
            worker.before.append(given)

    def _check_delivery(self, worker: SimulatedConsumer, place: EraPlace, before: BeforeTake, epoch: int) -> None:
        _, partition, offset = place
        progress = before.progress[partition]
        if progress is None and partition < PARTITIONS:
            # The subscription is being deleted.
            return
        base = self.eras.get((self.log.spec.topic_id, partition), (0, 0))[1]
        if offset < base and place[:2] not in self.overtaken:
            raise BrokenPromise(f"{place} is delivered, and lies below where its era began")
        # What an owner before it has stored after this one had looked is not known to it.
        is_own = progress is not None and progress.epoch == epoch
        if progress is not None and is_own and (offset < progress.offset or offset in acked_of(progress)):
            raise BrokenPromise(f"{place} is delivered, and its cursor was stored at {progress.offset}")
        if before.acked_in.get(place) == epoch:
            raise BrokenPromise(f"{place} is delivered, and was acknowledged before")
        for other in worker.process.workers:
            held = other.held.get((partition, offset))
            if other is worker or held is None or other.is_leaving or other.driver is not worker.driver:
                continue
            if held.place == place and held.epoch == epoch and self.clock.monotonic() < held.until_s:
                raise BrokenPromise(f"{place} is with two consumers")


class BeforeTake(NamedTuple):
    """What was so when a take began."""

    log: SimulatedLog
    subscription: str
    """The id of the one that delivers."""
    now_s: float
    epochs: list[int | None]
    """Of the windows that deliver."""
    eras: list[int]
    progress: list[Progress | None]
    acked_in: dict[EraPlace, int]

    @classmethod
    def of(cls, world: SimulatedWorld, driver: SubscriptionDriver) -> BeforeTake:
        numbers, served = range(PARTITIONS + 1), driver.dispatch.partitions
        return cls(
            world.log,
            driver.spec.subscription_id,
            world.clock.monotonic(),
            [served[number].epoch if number in served else None for number in numbers],
            [world.place(number, 0).era for number in numbers],
            [world.progress(number) for number in numbers],
            dict(world.acked_in),
        )

    def is_still_so(self, world: SimulatedWorld, partition: int) -> bool:
        """Whether the window of a partition is that of the present owner and subscription, and no era began since."""
        is_same = self.log is world.log and self.epochs[partition] == world.log.epochs[partition]
        return (
            is_same
            and self.subscription == world.subscription
            and self.eras[partition] == world.place(partition, 0).era
        )
