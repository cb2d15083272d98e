"""Subscriptions of a log: consumers take records, and acknowledge each of them.

A subscription is served by the process that owns the shards of its topic: attaching a consumer acquires them, as an
append does. `Subscriptions` finds those of a log, `SubscriptionDriver` reads records for one of them and has stored how
far it has come, `Subscription` and `Consumer` are for callers that wait in their own thread. `aio` has the same two for
an event loop, over the same driver.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, Self, Unpack

import msgspec

from forebay.appends.queue import record_bytes
from forebay.arguments import SESSION_TIMEOUT_MS, checked_seconds, checked_session_timeout_ms
from forebay.clock import Clock
from forebay.engines import ReadShard
from forebay.errors import (
    Closed,
    Conflict,
    Corrupt,
    Indeterminate,
    Invalid,
    Unavailable,
    UnknownSubscription,
    UnsupportedFormat,
)
from forebay.locks import Rank, RankedLock
from forebay.metadata import RevisionIs
from forebay.meter import Labels, LogMeter, Metric, Sample
from forebay.pages import LOOP_BYTES_MAX, LOOP_RECORDS_MAX
from forebay.progress import Progress, ReaderName, check_not_reserved
from forebay.records import LATEST, DeliveredRecord, PeekedPage, Record, Start, SubscriptionLag
from forebay.settings import Settings
from forebay.storage.cursors import Cursors
from forebay.storage.deadletters import AloneAt, DeadLetters, DeadLetterSender, LetterSecrets, LogTopics, ensure_topic
from forebay.subscriptions.ahead import TakenAhead
from forebay.subscriptions.cursor import acked_of, window_of
from forebay.subscriptions.deadletters import checked_error
from forebay.subscriptions.definitions import SubscriptionStore
from forebay.subscriptions.dispatch import (
    Claimed,
    Dispatch,
    KeptPage,
    ServedPartition,
    WantedPage,
    records_of,
    slots_of,
)
from forebay.topics import (
    SubscriptionChanges,
    SubscriptionMode,
    SubscriptionOptions,
    SubscriptionSpec,
    TopicDispatch,
    TopicSpec,
)

if TYPE_CHECKING:
    from forebay.storage.topic import Topic

logger = logging.getLogger(__name__)

PAGE_BYTES: Final = LOOP_BYTES_MAX
"""About what is read ahead of a consumer at once."""
LOOK_S: Final = 0.5
"""So often a consumer looks unasked: for records, partitions that were added, and shards that were opened again."""
PEEKED_BYTES_MAX: Final = 4 * 1024 * 1024
"""About what a look at the first records brings; one record at least."""
UNACKED_MAX: Final = 1_000
TAKE_MAX: Final = LOOP_RECORDS_MAX
_GAUGES: Final = (
    Metric.SUBSCRIPTION_CONSUMERS,
    Metric.SUBSCRIPTION_HELD,
    Metric.SUBSCRIPTION_SPENT,
)


class Subscriptions:
    """The subscriptions of a log. Safe for concurrent use by threads."""

    def __init__(
        self,
        store: SubscriptionStore,
        cursors: Cursors,
        settings: Settings,
        clock: Clock,
        topics: LogTopics,
        meter: LogMeter,
    ) -> None:
        """`topics` are those of the log: dead letters go to others than the one that is subscribed to."""
        self.meter = meter
        self.letter_secrets = LetterSecrets(store)
        self._store = store
        self._cursors = cursors
        self._topics = topics
        self._replay_bytes_max = settings.wal.frame_bytes_max // 2
        self._busy: set[str] = set()
        """Topics whose dead letters are being replayed or purged."""
        self._careful_ms = 2 * settings.progress.flush_interval_ms
        self._clock = clock
        self._lock = RankedLock(Rank.LEAF, "storage.subscriptions")
        self._drivers: weakref.WeakValueDictionary[str, SubscriptionDriver] = weakref.WeakValueDictionary()
        """By the id of the subscription: all its handles and consumers in this process share one."""
        self._revision = 0
        self._revision_at = -LOOK_S
        """When the revision was asked for last."""

    def open(self, topic: Topic, name: str, start: Start, options: SubscriptionOptions) -> Subscription:
        """The subscription of this name, created if it is not there; `Conflict` if it is and has other options."""
        check_not_reserved(name)
        reader = ReaderName.of(topic.spec.namespace, topic.spec.topic, name)
        wanted = SubscriptionSpec.create(
            topic.spec,
            name,
            subscription_id=self._clock.random_bytes(16).hex(),
            created_at=self._clock.now_ms(),
            **options,
        )
        spec = self._store.get(reader, topic.spec.topic_id)
        while spec is None or spec.is_ending:
            if spec is not None:
                self.end(spec, topic.partitions)
            if wanted.dead_letter_topic is not None:
                self._store.check_no_circle(wanted)
                ensure_topic(self._topics, wanted.dead_letter_topic)
            spec = self._store.create(wanted, self._first_cursors(topic, start), topic.spec.dispatch)
        spec.check_options(options)
        return Subscription(self._driver(topic, spec))

    def get(self, topic: Topic, name: str) -> Subscription:
        """The subscription of this name; `UnknownSubscription` if the topic has none."""
        spec = self._store.get(ReaderName.of(topic.spec.namespace, topic.spec.topic, name), topic.spec.topic_id)
        if spec is None or spec.is_ending:
            raise UnknownSubscription(
                f"{topic.name} has no subscription {name}: create it, or look for its name among those of the topic",
                topic=topic.name,
            )
        return Subscription(self._driver(topic, spec))

    def delete(self, topic: Topic, name: str) -> None:
        """Remove the subscription of this name with its cursors; `UnknownSubscription` if the topic has none.

        Also one whose definition cannot be read: of it, no more than its name is known. Waits for the metadata store.
        """
        try:
            found = self.get(topic, name)
        except (Corrupt, UnsupportedFormat):
            self._delete_unreadable(topic, ReaderName.of(topic.spec.namespace, topic.spec.topic, name))
        else:
            found.delete()

    def _delete_unreadable(self, topic: Topic, name: ReaderName) -> None:
        """Remove the cursors of this name, then the definition, if it is still the one that cannot be read."""
        with self._lock:
            drivers = [driver for driver in self._drivers.values() if driver.name == name]
        for driver in drivers:
            driver.check_idle()
        entry = self._store.unreadable(name)
        if entry is not None:
            self._cursors.forget(name, topic.partitions, held=[RevisionIs(entry.key, entry.mod_revision)])
            self._store.remove_unreadable(entry)

    @staticmethod
    def _first_cursors(topic: Topic, start: Start) -> dict[int, Progress]:
        """Where a new subscription begins. One that delivers at most once has no place that is stored."""
        if topic.spec.dispatch is TopicDispatch.NON_RELIABLE:
            if start != LATEST:
                raise Invalid(
                    f'{topic.name} has dispatch "non_reliable": a subscription delivers what comes from now on, and '
                    "start cannot be chosen; read the topic to see earlier records"
                )
            return {}
        # Partitions that a mapping does not name begin at their first record, as in a read.
        starts = dict.fromkeys(range(topic.partitions), 0) | topic.starts(start)
        return {number: Progress(offset=at, incarnation=topic.spec.topic_id) for number, at in starts.items()}

    def dead_letters(self, topic: Topic, origin: SubscriptionSpec | None = None) -> DeadLetters:
        """The dead letters in a topic, or those of one subscription in it."""
        return DeadLetters(
            topic,
            self._topics,
            AloneAt(self._busy, self._lock, topic.name),
            self.letter_secrets,
            bytes_max=self._replay_bytes_max,
            origin=None if origin is None else (f"{origin.namespace}/{origin.topic}", origin.name),
        )

    def dead_letters_of(self, spec: SubscriptionSpec) -> DeadLetters:
        """The dead letters of a subscription; `Invalid` if it makes none."""
        if spec.dead_letter_topic is None:
            raise Invalid(
                f"the subscription {spec.name} of {spec.namespace}/{spec.topic} has on_spent {spec.on_spent}, and "
                'so no dead letters: create one with on_spent "dead_letter"'
            )
        return self.dead_letters(self._topics.topic(spec.dead_letter_topic), spec)

    def gauges(self) -> list[Sample]:
        """What is so now of the subscriptions that have consumers in this process. From memory alone.

        Those of topics that get numbers of their own have the label `topic`. For lags see `Lags`.
        """
        with self._lock:
            drivers = list(self._drivers.values())
        sums: dict[Labels, Counter[Metric]] = {(): Counter()}
        for driver in drivers:
            found = sums.setdefault(self.meter.topic_label(driver.topic.name), Counter())
            found[Metric.SUBSCRIPTION_CONSUMERS] += len(driver.dispatch.consumers)
            for stands in driver.dispatch.standing().values():
                found[Metric.SUBSCRIPTION_HELD] += stands.held
                found[Metric.SUBSCRIPTION_SPENT] += stands.spent
        return [Sample(metric, labels, found[metric]) for labels, found in sums.items() for metric in _GAUGES]

    def standing(self) -> dict[tuple[str, str], dict[int, tuple[int, int]]]:
        """Where the subscriptions with consumers here stand, by topic and name: cursor and what is done above it."""
        with self._lock:
            drivers = list(self._drivers.values())
        return {
            (driver.topic.name, driver.spec.name): {
                number: (stands.cursor, stands.done_above) for number, stands in driver.dispatch.standing().items()
            }
            for driver in drivers
        }

    def revision(self) -> int:
        """What changes with each subscription that is created or changed, in whichever process; some LOOK_S old.

        One read of the metadata store for all subscriptions. While the store cannot be reached, nothing has changed.
        """
        now = self._clock.monotonic()
        if now >= self._revision_at + LOOK_S:
            self._revision_at = now
            with contextlib.suppress(Unavailable, Indeterminate):
                self._revision = self._store.revision()
        return self._revision

    def of_topic(self, topic: TopicSpec) -> list[SubscriptionSpec]:
        """The definitions of all subscriptions of a topic, by name."""
        return self._store.of_topic(topic)

    def end(self, spec: SubscriptionSpec, partitions: int) -> None:
        """Remove the cursors and then the definition of a subscription that is marked as ending. May be repeated."""
        self._cursors.forget(ReaderName(spec.namespace, spec.topic, spec.name), partitions, spec.subscription_id)
        self._store.remove(spec)

    def _driver(self, topic: Topic, spec: SubscriptionSpec) -> SubscriptionDriver:
        with self._lock:
            driver = self._drivers.get(spec.subscription_id)
            if driver is None:
                driver = SubscriptionDriver(
                    topic, spec, self, self._store, self._cursors, self._clock, self._topics, self._careful_ms
                )
                self._drivers[spec.subscription_id] = driver
        return driver


class Fetched(NamedTuple):
    """Records that are on their way to a consumer, as `SubscriptionDriver.fetch` found them."""

    claim: Claimed
    records: dict[int, Record]
    """By offset; what is not here does not exist any more."""


class SubscriptionDriver:
    """Reads records for one subscription, delivers them, and stores how far it has come. Safe for threads.

    Whatever waits for disk or metadata runs in the caller's thread. `fetch_cached`, `deliver` and `give_back` never
    wait: they are for event loops.
    """

    def __init__(
        self,
        topic: Topic,
        spec: SubscriptionSpec,
        subscriptions: Subscriptions,
        store: SubscriptionStore,
        cursors: Cursors,
        clock: Clock,
        topics: LogTopics,
        careful_ms: int,
    ) -> None:
        self.topic = topic
        self.name = ReaderName(spec.namespace, spec.topic, spec.name)
        is_lossy = topic.spec.dispatch is TopicDispatch.NON_RELIABLE
        self.dispatch = Dispatch(spec, clock, is_lossy=is_lossy)
        self.clock = clock
        self._topics = topics
        self._subscriptions = subscriptions
        self._sender: DeadLetterSender | None = None
        self._send_to(spec.dead_letter_topic)
        self._store = store
        self._cursors = cursors
        self._careful_ms = careful_ms
        self._attaching = RankedLock(Rank.LOG, "storage.subscription")
        self._wired: dict[int, tuple[ReadShard, ServedPartition]] = {}
        """By partition, the shard that calls the waker of what is served."""
        self._look_at = 0.0
        self._partitions_served = 0
        """Where records are delivered at most once: how many partitions there were when the last one was served."""
        self._look_claimed_until = 0.0
        self._adopted = 0
        """The revision of all subscriptions whose definition this goes by at least."""

    @property
    def spec(self) -> SubscriptionSpec:
        """The definition that it goes by."""
        return self.dispatch.spec

    # Consumers

    def attach(self, name: str, unacked_max: int) -> int:
        """Attach a consumer to all partitions or to none; its number. Acquires the shards that are not owned yet."""
        with self._attaching:
            self._end_left()
            # A handle may outlive its subscription, and another process may have changed it.
            revision = self._subscriptions.revision()
            self._adopt(self._store.current(self.spec))
            self._adopted = revision
            if self._sender is not None:
                self._sender.create_topic()
            number = self.dispatch.attach(name, unacked_max)
            try:
                self._serve()
            except BaseException:
                self._detach(number)
                raise
        return number

    def detach(self, consumer: int) -> None:
        """A consumer leaves. When the last one has left, everything that was acknowledged is stored on return."""
        with self._attaching:
            self._detach(consumer)

    def _detach(self, consumer: int) -> None:
        is_last = self.dispatch.detach(consumer)
        self.note(self.dispatch.partitions)
        if is_last:
            self._end_serving()

    def _end_left(self) -> None:
        """Have windows end whose consumers were dropped without being closed. `_attaching` is held.

        What is stored speaks for the subscription from here on: it may be moved, altered or deleted.
        """
        if self.dispatch.partitions and not self.dispatch.consumers:
            self.note(self.dispatch.partitions)
            self._end_serving()

    def _end_serving(self) -> None:
        """No consumer is left: serve no partition, and store where all of them stand. `_attaching` is held."""
        if self._sender is not None:
            self._sender.send()
        for number in list(self._wired):
            self._unwire(number)
        self.dispatch.unserve()
        self._partitions_served = 0
        try:
            self.flush()
        except (Unavailable, Indeterminate) as error:
            logger.warning(
                "%s: where the subscription %s stands is not stored yet and is tried again; if this process ends "
                "before, records are delivered again: %s",
                self.topic.name,
                self.spec.name,
                error,
            )

    def flush(self) -> None:
        """On return everything that was acknowledged before is stored."""
        self._cursors.write(self.name, self.spec.topic_id)

    # Records

    def pull(self, consumer: int, count: int, bytes_max: int | None = None) -> list[DeliveredRecord]:
        """Up to `count` records that are due for the consumer, without waiting for more to come. See `fetch`."""
        while fetched := self.fetch(consumer, count, bytes_max):
            found = self.deliver(consumer, fetched)
            if found:
                return found
        return []

    def fetch(self, consumer: int, count: int, bytes_max: int | None = None) -> list[Fetched]:
        """Up to `count` records that are due for the consumer, without waiting for more to come; none if none is due.

        Of about `bytes_max` bytes at most, one at least: no more are read for it, and the others stay due. They are
        delivered by `deliver`; a caller that does not come to that calls `give_back`.
        """
        if self.clock.monotonic() >= self._look_at:
            self._look(consumer)
        self._catch_up()
        while True:
            if self._sender is not None:
                self._sender.send()
            claimed = self.dispatch.claim(consumer, count)
            if not claimed:
                if self._has_letters():
                    continue
                wanted = self.dispatch.wanted(consumer)
                if wanted is None:
                    return []
                self._read(wanted, count)
                continue
            fetched = self._fetched(consumer, claimed, bytes_max)
            if fetched:
                return fetched

    def fetch_cached(self, consumer: int, count: int, bytes_max: int | None = None) -> list[Fetched] | None:
        """As `fetch`, from memory alone; `None` where `fetch` has to be asked in a thread that may wait."""
        is_stored_first = self.dispatch.is_careful() and self.dispatch.has_work()
        if self._claims_look() or is_stored_first or self._has_letters():
            return None
        self._catch_up_cached()
        while not (claimed := self.dispatch.claim(consumer, count)):
            wanted = self.dispatch.wanted(consumer)
            if wanted is None:
                return []
            if not self._read_cached(wanted, count):
                return None
        found = [(claim, self._at_hand(claim)) for claim in claimed]
        if any(claim.is_careful or len(records) < len(claim.offsets) for claim, records in found):
            self.dispatch.give_back(consumer, claimed)
            return None
        at_hand = {claim.partition: records for claim, records in found}
        fetched = self._cut(consumer, claimed, lambda claim, _: at_hand[claim.partition], bytes_max)
        self.note(one.claim.partition for one in fetched)
        return fetched

    def deliver(self, consumer: int, fetched: Sequence[Fetched]) -> list[DeliveredRecord]:
        """Give the consumer what was fetched, and is still to be its own. Never waits."""
        records = {id(one.claim.served): one.records for one in fetched}
        handed = self.dispatch.hand_over(consumer, [one.claim for one in fetched])
        if self.dispatch.is_lossy:
            # Where records are delivered at most once, they are done, whatever becomes of them.
            for claim in handed:
                self.dispatch.gone(claim.served, claim.offsets)
        return self._counted_deliveries([Fetched(claim, records[id(claim.served)]) for claim in handed])

    def _has_letters(self) -> bool:
        """Whether dead letters are to be sent now."""
        return self._sender is not None and self.dispatch.has_letters()

    def _catch_up(self) -> None:
        """Where records are delivered at most once: leave out what lies too far behind."""
        for served, shard in self._open_and_lossy():
            self.dispatch.catch_up(served, shard.published())

    def _catch_up_cached(self) -> None:
        """As `_catch_up`, by what can be read now: what is only queued is not written, a thread does that."""
        for served, shard in self._open_and_lossy():
            self.dispatch.catch_up(served, shard.reach().head)
            # Where more is queued, memory has not got it, and so a thread is asked.
            served.has_news = True

    def _open_and_lossy(self) -> Iterator[tuple[ServedPartition, ReadShard]]:
        """The open shards of a topic whose records are delivered at most once; none of another topic."""
        if self.dispatch.is_lossy:
            for number, served in self.dispatch.partitions.items():
                shard = self.topic.shard_if_open(number)
                if shard is not None:
                    yield served, shard

    def _read(self, wanted: WantedPage, count: int) -> None:
        """Read on behind the window of a partition."""
        number = wanted.served.number
        try:
            ended = self._ended(number)
            page, reach = self.topic.batch_page(
                number, wanted.offset, records_max=max(count, LOOP_RECORDS_MAX), bytes_max=PAGE_BYTES
            )
            self._offer(wanted, KeptPage(page, ended), reach.head)
        except BaseException:
            wanted.served.has_news = True
            raise

    def _read_cached(self, wanted: WantedPage, count: int) -> bool:
        """As `_read`, from memory alone; false if memory has not got it."""
        number = wanted.served.number
        try:
            ended = self._ended(number)
            found = self.topic.batch_page_cached(
                number, wanted.offset, records_max=max(count, LOOP_RECORDS_MAX), bytes_max=PAGE_BYTES
            )
            if found is None:
                wanted.served.has_news = True
                return False
            self._offer(wanted, KeptPage(found[0], ended), found[1].head)
        except BaseException:
            wanted.served.has_news = True
            raise
        return True

    def _offer(self, wanted: WantedPage, kept: KeptPage, head: int) -> None:
        slots = slots_of(kept.page) if self.spec.mode is SubscriptionMode.KEY_SHARED else None
        self.dispatch.offer(wanted, kept, head, slots)

    def _ended(self, partition: int) -> object:
        """What has ended in the shard that is open; equal to nothing where none is."""
        shard = self.topic.shard_if_open(partition)
        return object() if shard is None else (shard, shard.ended())

    def _at_hand(self, claim: Claimed) -> dict[int, Record]:
        """Those of the claimed records that are in kept pages, unless records of the shard have ended since."""
        ended = self._ended(claim.partition)
        return records_of(claim._replace(pages=tuple(kept for kept in claim.pages if kept.ended == ended)))

    def _fetched(self, consumer: int, claimed: Sequence[Claimed], bytes_max: int | None) -> list[Fetched]:
        """What was claimed, with its records; what is gone is done, and what does not get here is due again."""
        try:
            fetched = self._cut(consumer, claimed, self._records_of, bytes_max)
            self.note(claim.partition for claim in claimed)
            if any(claim.is_careful for claim in claimed):
                self.flush()
        except BaseException:
            self.dispatch.give_back(consumer, claimed)
            raise
        for claim, records in fetched:
            gone = [offset for offset in claim.offsets if offset not in records]
            if gone:
                self.dispatch.gone(claim.served, gone)
        return [one for one in fetched if one.records]

    def _cut(
        self,
        consumer: int,
        claimed: Sequence[Claimed],
        find: Callable[[Claimed, int | None], dict[int, Record]],
        bytes_max: int | None,
    ) -> list[Fetched]:
        """What `find` finds of the claimed records, up to so many bytes, one at least; the others are given back."""
        kept: list[Fetched] = []
        left, is_first = bytes_max, True
        for claim in claimed:
            records = {} if left == 0 else find(claim, left)
            stop = 0 if left == 0 else len(claim.offsets)
            if left:
                stop, left = _fitting(claim, records, left, is_first=is_first)
            if stop < len(claim.offsets):
                self.dispatch.give_back(consumer, [claim.cut(stop, len(claim.offsets))])
            kept.append(Fetched(claim.cut(0, stop), records))
            is_first = is_first and not records
        return kept

    def _counted_deliveries(self, found: Sequence[Fetched]) -> list[DeliveredRecord]:
        """The records that are delivered, in order, counted for the metrics."""
        delivered = [one for claim, records in found for one in _in_order(claim, records)]
        meter, topic = self._subscriptions.meter, self.topic.name
        meter.add(Metric.SUBSCRIPTION_DELIVERIES, len(delivered), topic=topic)
        again = sum(one.attempt > 1 for one in delivered)
        if again:
            meter.add(Metric.SUBSCRIPTION_REDELIVERIES, again, topic=topic)
        return delivered

    def note_dead_letters(self, count: int) -> None:
        """So many spent records have arrived in the dead-letter topic."""
        self._subscriptions.meter.add(Metric.SUBSCRIPTION_DEAD_LETTERS, count, topic=self.topic.name)

    def records(self, served: ServedPartition, offsets: Sequence[int]) -> dict[int, Record]:
        """Those of these records that still exist, read from the topic."""
        return self._records_of(Claimed(served, list(offsets), [], ()))

    def _records_of(self, claim: Claimed, bytes_max: int | None = None) -> dict[int, Record]:
        """The claimed records that still exist. What the pages at hand have not got is read again.

        No further than to where the first of them have so many bytes.
        """
        found = self._at_hand(claim)
        missing = [offset for offset in claim.offsets if offset not in found]
        while missing and (bytes_max is None or _size_before(missing[0], found) < bytes_max):
            ended = self._ended(claim.partition)
            page, _ = self.topic.batch_page(
                claim.partition, missing[0], records_max=LOOP_RECORDS_MAX, bytes_max=PAGE_BYTES
            )
            kept = KeptPage(page, ended)
            self.dispatch.keep(claim.served, kept)
            found.update(records_of(claim._replace(offsets=missing, pages=(kept,))))
            missing = [offset for offset in missing if offset >= max(page.next, missing[0] + 1)]
        return found

    # What consumers have done

    def ack(self, consumer: int, done: Mapping[int, Sequence[int]]) -> int:
        """See `Consumer.ack`. Never waits."""
        return self._counted(consumer, self.dispatch.ack(consumer, done))

    def ack_delivered(self, consumer: int, done: Sequence[DeliveredRecord]) -> int:
        """See `Consumer.ack`. Never waits."""
        if len(done) != 1:
            return self.ack(consumer, by_partition(done))
        record = done[0].record
        counted, is_news = self.dispatch.ack_one(consumer, record.partition, record.offset, self._mark)
        if is_news:
            self._cursors.write_soon()
        if counted:
            self.dispatch.wake_after(consumer)
        return counted

    def ack_up_to(self, consumer: int, partition: int, offset: int) -> int:
        """See `Consumer.ack_cumulative`. Never waits."""
        return self._counted(consumer, {partition: self.dispatch.ack_up_to(consumer, partition, offset)})

    def nack(
        self,
        consumer: int,
        failed: Mapping[int, Sequence[int]],
        delay_ms: int | None,
        error: str | None = None,
        attempts: Mapping[int, Sequence[int]] | None = None,
    ) -> int:
        """See `Consumer.nack`. Never waits."""
        counted = self.dispatch.nack(consumer, failed, delay_ms, checked_error(error), attempts)
        return self._counted(consumer, counted, is_delayed=True)

    def give_back(self, consumer: int, fetched: Sequence[Fetched]) -> None:
        """What was fetched is not delivered: it is due again. Never waits."""
        self.dispatch.give_back(consumer, [one.claim for one in fetched])

    def take_back(self, consumer: int, delivered: Mapping[int, Mapping[int, int]]) -> None:
        """Deliveries, by partition and offset, did not reach their consumer: the records are due again. Never waits."""
        self.dispatch.give_back(consumer, self.dispatch.delivered(delivered))

    def taken_ahead(self, ahead: TakenAhead) -> int:
        """How many records a loop takes now. One where it matters which of them was out when a process ended.

        And one where what was taken counts as delivered, whatever becomes of it.
        """
        wanted = ahead.wanted(self.clock.monotonic())
        return 1 if self.dispatch.is_lossy or self.dispatch.is_careful() else wanted

    def _counted(self, consumer: int, counted: Mapping[int, int], *, is_delayed: bool = False) -> int:
        """Note what changed, and have others that wait look: there is room, or a key is free.

        With `is_delayed` all of them: a record may be due earlier than they wait.
        """
        changed = [partition for partition, count in counted.items() if count]
        if changed:
            self.note(changed)
            if is_delayed:
                self.dispatch.wake_all()
            else:
                self.dispatch.wake_after(consumer)
        return sum(counted.values())

    def note(self, partitions: Iterable[int]) -> None:
        """Have the flusher store where these partitions stand."""
        if self.dispatch.note(partitions, self._mark):
            self._cursors.write_soon()

    def _mark(self, served: ServedPartition) -> bool:
        """Have the flusher ask where a partition stands; whether that is news. Takes no lock and never waits.

        Where records are delivered at most once, no place is stored.
        """
        if self.dispatch.is_lossy:
            return False
        return self._cursors.mark(self.name, served.number, self.spec.topic_id, served)

    # Partitions

    def _claims_look(self) -> bool:
        """Whether it is time to look, and the caller is the one who has to: of a crowd, one goes to a thread."""
        now = self.clock.monotonic()
        if now < max(self._look_at, self._look_claimed_until):
            return False
        self._look_claimed_until = now + LOOK_S
        return True

    def _look(self, consumer: int) -> None:
        """Go by partitions that were added and shards that were opened again, and look for records unasked."""
        self._look_at = self.clock.monotonic() + LOOK_S
        with self._attaching:
            # It may have left meanwhile: without a consumer nothing is served.
            self.dispatch.check_attached(consumer)
            self._serve()
            self._adopt_changes()
        self.dispatch.look_again()

    def _adopt_changes(self) -> None:
        """Go by what another process has changed in the definition. `_attaching` is held."""
        revision = self._subscriptions.revision()
        if revision != self._adopted:
            with contextlib.suppress(Unavailable, Indeterminate):
                self._adopt(self._store.current(self.spec))
                self._adopted = revision

    def _adopt(self, spec: SubscriptionSpec) -> None:
        """Go by a definition from now on. `_attaching` is held.

        What becomes of spent records changes while no consumer is attached: else some could be on their way.
        """
        if self.dispatch.consumers:
            before = self.spec
            spec = msgspec.structs.replace(spec, on_spent=before.on_spent, dead_letter_topic=before.dead_letter_topic)
        else:
            self._send_to(spec.dead_letter_topic)
        self.dispatch.adopt(spec)

    def _send_to(self, topic: str | None) -> None:
        secrets = self._subscriptions.letter_secrets
        self._sender = None if topic is None else DeadLetterSender(self, self._topics, topic, secrets)

    def _serve(self) -> None:
        """Deliver from every partition of the topic, by the shard that is open now. `_attaching` is held."""
        for number in range(self.topic.partitions):
            shard = self.topic.shard_if_open(number)
            if shard is None:
                self.topic.acquire(number)
                shard = self.topic.shard_if_open(number)
            if shard is None:
                raise Unavailable(f"{self.topic.name}[{number}] is not open any more; try again", topic=self.topic.name)
            wired = self._wired.get(number)
            if wired is None or wired[0] is not shard:
                self._serve_by(number, shard)

    def _serve_by(self, number: int, shard: ReadShard) -> None:
        served = self.dispatch.partitions.get(number)
        if self.dispatch.is_lossy:
            served = served or self._serve_lossy(number, shard)
        elif served is None or served.epoch != shard.epoch:
            # Another process may have owned the partition and delivered from it: where it stands is what is stored. Not
            # served meanwhile: an acknowledgement that comes after this look would count for a window that ends.
            self.dispatch.unserve(number)
            progress = self._stored(number)
            dead = None if self._sender is None else self._sender.book(progress)
            window = window_of(self.spec, progress, epoch=shard.epoch)
            served = self.dispatch.serve(number, window, shard.epoch, self._careful_ms, dead)
            if self._sender is not None:
                self._sender.begin(served)
        self._unwire(number)
        # Noted first: an interrupt in between leaves a shard that is visited in vain when the consumer leaves.
        self._wired[number] = shard, served
        shard.wakers.add(served.published)

    def _serve_lossy(self, number: int, shard: ReadShard) -> ServedPartition:
        """Deliver what comes from now on; everything of a partition that was added while consumers are attached."""
        start = 0 if self.dispatch.partitions and number >= self._partitions_served else shard.published()
        self._partitions_served = max(self._partitions_served, self.topic.partitions)
        return self.dispatch.serve(number, window_of(self.spec, None, start), shard.epoch, 0)

    def _stored(self, number: int) -> Progress | None:
        """Where a partition stands, if that is stored or on its way; not what was of an earlier one of the name."""
        found = self._cursors.at(self.spec.name, self.topic.spec, number)
        return found if found is not None and found.is_of(self.spec.subscription_id) else None

    def store_run(self, number: int, run: str) -> None:
        """On return the cursor record names the run of a partition; `Unavailable` if another owner keeps it."""
        self.note([number])
        self.flush()
        stored = self._stored(number)
        if stored is None or stored.run != run:
            raise Unavailable(
                f"{self.topic.name}[{number}]: another process serves the subscription {self.spec.name} by now",
                topic=self.topic.name,
                partition=number,
            )

    def _unwire(self, number: int) -> None:
        wired = self._wired.pop(number, None)
        if wired is not None:
            shard, served = wired
            shard.wakers.discard(served.published)

    # What operators do

    def lag(self) -> list[SubscriptionLag]:
        """See `Subscription.lag`."""
        standing = self.dispatch.standing()
        found = []
        for number in range(self.topic.partitions):
            end = self.topic.lag_end(number)
            if number in standing:
                found.append(SubscriptionLag(partition=number, end=end, **standing[number]._asdict()))
            elif self.dispatch.is_lossy:
                found.append(SubscriptionLag(number, end, end))
            else:
                progress = self._stored(number)
                cursor = 0 if progress is None else progress.offset
                done = 0 if progress is None else len(acked_of(progress))
                found.append(SubscriptionLag(number, cursor, max(end, cursor), done))
        return found

    def peek(self, records_max: int, partition: int | None, bytes_max: int | None = None) -> PeekedPage:
        """See `Subscription.peek_page`."""
        checked_take(records_max)
        found: list[Record] = []
        size, most = 0, PEEKED_BYTES_MAX if bytes_max is None else min(bytes_max, PEEKED_BYTES_MAX)
        for number in range(self.topic.partitions) if partition is None else [partition]:
            for record in self._unfinished(number):
                size += _size_of(record)
                if found and (len(found) == records_max or size > most):
                    return PeekedPage(found, has_more=True)
                found.append(record)
        return PeekedPage(found, has_more=False)

    def _unfinished(self, number: int) -> Iterator[Record]:
        """The records of a partition that are not done, in order."""
        progress = self._progress(number)
        if progress is None and self.dispatch.is_lossy:
            return
        offset = 0 if progress is None else progress.offset
        done = None if progress is None else acked_of(progress)
        while True:
            page = self.topic.page(number, offset, records_max=LOOP_RECORDS_MAX, bytes_max=PAGE_BYTES)
            yield from (record for record in page.records if done is None or record.offset not in done)
            if page.next <= offset:
                return
            offset = page.next

    def _progress(self, number: int) -> Progress | None:
        served = self.dispatch.partitions.get(number)
        if served is not None:
            return served.progress()
        return None if self.dispatch.is_lossy else self._stored(number)

    def pause(self, *, paused: bool) -> None:
        """See `Subscription.pause` and `resume`."""
        with self._attaching:
            # Under the lock: a change that is stored later is not adopted before.
            self._adopt(self._store.change(self.spec, lambda spec: msgspec.structs.replace(spec, is_paused=paused)))

    def alter(self, changes: SubscriptionChanges) -> SubscriptionSpec:
        """See `Subscription.alter`."""

        def altered(spec: SubscriptionSpec) -> SubscriptionSpec:
            return spec.altered(self.topic.spec, changes)

        with self._attaching:
            stored = self._store.current(self.spec)
            wanted = altered(stored)
            if (wanted.on_spent, wanted.dead_letter_topic) != (stored.on_spent, stored.dead_letter_topic):
                self._check_idle("change what becomes of spent records")
                if wanted.dead_letter_topic is not None:
                    self._store.check_no_circle(wanted)
                    ensure_topic(self._topics, wanted.dead_letter_topic)
            spec = self._store.change(self.spec, altered)
            self._adopt(spec)
            return spec

    def seek(self, position: Start, partition: int | None) -> dict[int, int]:
        """See `Subscription.seek`."""
        if self.dispatch.is_lossy:
            raise Invalid(
                f'{self.topic.name} has dispatch "non_reliable": {self.spec.name} has no place that could be moved; '
                "read the topic to see earlier records"
            )
        with self._attaching:
            self._check_idle("seek")
            self._store.current(self.spec)
            found = {}
            for number, offset in self.topic.starts(position, partition).items():
                # Only the owner moves a subscription: one before it that is not aware of its end cannot undo this.
                self.topic.acquire(number)
                progress = Progress(
                    offset=offset,
                    incarnation=self.spec.topic_id,
                    epoch=self.topic.epoch(number),
                    subscription=self.spec.subscription_id,
                )
                self._cursors.reset(self.name, number, progress)
                if self.topic.epoch(number) != progress.epoch:
                    raise Unavailable(
                        f"{self.topic.name}[{number}] got another owner while {self.spec.name} was moved, which may "
                        "not know of it: look at its lag, and seek again",
                        topic=self.topic.name,
                        partition=number,
                    )
                found[number] = offset
        return found

    def dead_letters(self) -> DeadLetters:
        """See `Subscription.dead_letters`."""
        return self._subscriptions.dead_letters_of(self.spec)

    def delete(self) -> None:
        """See `Subscription.delete`."""
        with self._attaching:
            self._check_idle("delete it")
            spec = self._store.begin_deletion(self.spec)
            self._subscriptions.end(spec, self.topic.partitions)

    def check_idle(self) -> None:
        """`Conflict` while consumers are attached; else nothing is served on return."""
        with self._attaching:
            self._check_idle("delete it")

    def _check_idle(self, what: str) -> None:
        """`Conflict` while consumers are attached; else nothing is served on return. `_attaching` is held."""
        consumers = self.dispatch.consumers
        if consumers:
            raise Conflict(
                f"consumers are attached to the subscription {self.spec.name} of {self.topic.name} "
                f"({', '.join(consumers[:5])}): close them, then {what}",
                topic=self.topic.name,
            )
        self._end_left()


class Subscription:
    """One subscription of a topic. Made by `Topic.subscribe`; safe for concurrent use by threads."""

    def __init__(self, driver: SubscriptionDriver) -> None:
        self.driver = driver
        """For callers who wait in their own way."""

    @property
    def name(self) -> str:
        """What it is called."""
        return self.driver.spec.name

    @property
    def spec(self) -> SubscriptionSpec:
        """The definition that it goes by."""
        return self.driver.spec

    def __repr__(self) -> str:
        return f"<Subscription {self.name} of {self.driver.topic.name}, {self.spec.mode}>"

    def consumer(
        self, name: str = "", *, unacked_max: int = UNACKED_MAX, session_timeout_ms: int = SESSION_TIMEOUT_MS
    ) -> Consumer:
        """A consumer, for a `with` statement. It is given at most `unacked_max` records that it has not acknowledged.

        It is attached by `with`, or by its first `take`. That acquires the partitions of the topic, as an append does:
        `Moved` if another process owns one. In mode `exclusive` a second consumer is a `Conflict`.
        `session_timeout_ms` is for consumers of a broker: this one is there as long as its process.
        """
        checked_session_timeout_ms(session_timeout_ms)
        return Consumer(self.driver, name, unacked_max)

    def consumers(self) -> list[str]:
        """The names of the consumers that are attached in this process, the one that came first first."""
        return self.driver.dispatch.consumers

    def lag(self) -> list[SubscriptionLag]:
        """How far it has come in each partition, and how much is not done."""
        return self.driver.lag()

    def peek(
        self, records_max: int = 10, *, partition: int | None = None, bytes_max: int | None = None
    ) -> list[Record]:
        """The first records that are not done, without taking them.

        No more than about 4 MiB of them, or `bytes_max` bytes, and one at least.
        """
        return self.peek_page(records_max, partition=partition, bytes_max=bytes_max).records

    def peek_page(
        self, records_max: int = 10, *, partition: int | None = None, bytes_max: int | None = None
    ) -> PeekedPage:
        """As `peek`; says as well whether there are more."""
        return self.driver.peek(records_max, partition, bytes_max)

    def pause(self) -> None:
        """Deliver nothing more, also after a restart, until `resume`. What was delivered may be acknowledged."""
        self.driver.pause(paused=True)

    def resume(self) -> None:
        """Go on after `pause`."""
        self.driver.pause(paused=False)

    def alter(self, **changes: Unpack[SubscriptionChanges]) -> SubscriptionSpec:
        """Change how it delivers; its definition on return. What is not named stays as it is.

        Limits hold from now on, also for consumers that are attached, here and in other processes within a second:
        time-outs and delays that run stay as they are. Records that may be delivered more often than before are due
        again, and those that were delivered as often as they may be now are spent. `on_spent` and `dead_letter_topic`
        change only while no consumer is attached; else `Conflict`. The mode cannot be changed.
        """
        return self.driver.alter(changes)

    def seek(self, position: Start = LATEST, *, partition: int | None = None) -> dict[int, int]:
        """Go on at another place, also an earlier one, in one partition or all; where each stands now.

        `Conflict` while a consumer is attached. What was acknowledged there, and how often, is forgotten.
        """
        return self.driver.seek(position, partition)

    def dead_letters(self) -> DeadLetters:
        """The records that were delivered as often as they may be, if `on_spent` is `dead_letter`; else `Invalid`."""
        return self.driver.dead_letters()

    def flush(self) -> None:
        """On return every acknowledgement before is stored; else that takes `progress.flush_interval_ms`."""
        self.driver.flush()

    def delete(self) -> None:
        """Remove the subscription with its cursors; `Conflict` while a consumer is attached."""
        self.driver.delete()


class Consumer:
    """One consumer of a subscription, attached by `with` or by its first `take`.

    For one thread at a time, but for `ack` and `nack`, which any thread may call.
    """

    def __init__(self, driver: SubscriptionDriver, name: str, unacked_max: int) -> None:
        check_consumer(name, unacked_max)
        self._driver = driver
        self._name = name
        self._unacked_max = unacked_max
        self._attached: int | None = None
        self._is_closed = False
        self._woken = threading.Event()
        self._ahead = TakenAhead(unacked_max)

    def take(self, records_max: int = 100, *, wait_s: float = 0.0) -> list[DeliveredRecord]:
        """Up to `records_max` records that are due; waits for the first of them up to `wait_s` seconds.

        Each is to be acknowledged within the ack time-out of the subscription, or is delivered again.
        """
        count = checked_take(records_max)
        checked_seconds("wait_s", wait_s)
        # Of a loop that has ended and is not cleaned up yet.
        self._give_back_ahead()
        return self._take(count, wait_s)

    def _take(self, count: int, wait_s: float) -> list[DeliveredRecord]:
        self._attach()
        dispatch, clock, waker = self._driver.dispatch, self._driver.clock, self._woken.set
        deadline = clock.monotonic() + wait_s
        while True:
            self._woken.clear()
            is_leaving, number = True, self._number
            # Before the look: what comes after it wakes.
            dispatch.wait(number, waker)
            try:
                found = self._driver.pull(number, count)
                pause = pause_s(dispatch, deadline - clock.monotonic())
                if found or pause is None:
                    return found
                self._woken.wait(pause)
                is_leaving = False
            finally:
                dispatch.unwait(number, is_leaving=is_leaving)

    def __iter__(self) -> Iterator[DeliveredRecord]:
        return self.each()

    def each(self, *, wait_s: float | None = None) -> Iterator[DeliveredRecord]:
        """Records one by one as they come; ends when none came for `wait_s` seconds, or once it is closed.

        Takes as many ahead as the body does in a moment. Those that it has not got when the loop ends are due again at
        once, as if they had not been delivered.
        """
        wait_max = LOOK_S if wait_s is None else checked_seconds("wait_s", wait_s)
        clock, ahead = self._driver.clock, self._ahead
        self._give_back_ahead()
        try:
            while not self._is_closed:
                delivered = ahead.pop(clock.monotonic())
                if delivered is not None:
                    yield delivered
                    continue
                self._give_back_ahead()
                found = self._take(self._driver.taken_ahead(ahead), wait_max)
                if not found and wait_s is not None:
                    return
                ahead.put(found, clock.monotonic(), self._driver.spec.ack_timeout_ms)
        finally:
            self._give_back_ahead()

    def _give_back_ahead(self) -> None:
        left = self._ahead.clear()
        if left and self._attached is not None:
            self._driver.take_back(self._attached, deliveries_of(left))

    def ack(self, *done: DeliveredRecord) -> int:
        """These records are done and are not delivered again; how many of them counted.

        A record that has gone to another consumer meanwhile does not count: that one acknowledges it.
        """
        return self._driver.ack_delivered(self._number, done)

    def ack_cumulative(self, last: DeliveredRecord) -> int:
        """This record and all before it in its partition are done; how many that were. Not where records are shared."""
        return self._driver.ack_up_to(self._number, last.record.partition, last.record.offset)

    def nack(self, *failed: DeliveredRecord, delay_ms: int | None = None, error: str | None = None) -> int:
        """These could not be done: each is delivered again after `delay_ms`, else after the back-off.

        `error` says why, for whom the record may go to: it stands in the dead letter. How many of them counted: a
        record that was delivered again since does not.
        """
        offsets, attempts = by_partition(failed), attempts_by_partition(failed)
        return self._driver.nack(self._number, offsets, checked_delay(delay_ms), error, attempts)

    @property
    def lost(self) -> int:
        """How many offsets no consumer got since this one was attached: of a topic with dispatch `non_reliable`."""
        return 0 if self._attached is None else self._driver.dispatch.lost(self._attached)

    def close(self) -> None:
        """Leave; what was taken and not acknowledged is due for other consumers at once. Harmless when repeated.

        When the last consumer has left, everything that was acknowledged is stored on return.
        """
        self._is_closed = True
        self._give_back_ahead()
        number, self._attached = self._attached, None
        if number is not None:
            self._driver.detach(number)

    def __enter__(self) -> Self:
        self._attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _number(self) -> int:
        if self._attached is None:
            raise Closed(f'consumer "{self._name}" of the subscription {self._driver.spec.name} is not attached')
        return self._attached

    def _attach(self) -> None:
        if self._attached is None and not self._is_closed:
            number = self._driver.attach(self._name, self._unacked_max)
            # A consumer that is dropped without being closed leaves as well; there, no lock may be taken.
            weakref.finalize(self, self._driver.dispatch.abandon, number)
            self._attached = number
            if self._is_closed:
                # By another thread meanwhile, which found nothing to leave.
                self.close()


def check_consumer(name: str, unacked_max: int) -> None:
    """`Invalid` unless a consumer may have this name and this limit."""
    if not isinstance(name, str):
        raise Invalid(f"the name of a consumer is {type(name).__name__}, not str")
    if not isinstance(unacked_max, int) or isinstance(unacked_max, bool) or unacked_max < 1:
        raise Invalid(f"unacked_max is {unacked_max!r:.80}; allowed: from 1 on")


def by_partition(delivered: Sequence[DeliveredRecord]) -> dict[int, list[int]]:
    """The offsets of delivered records, by partition."""
    found: dict[int, list[int]] = {}
    for one in delivered:
        found.setdefault(one.record.partition, []).append(one.record.offset)
    return found


def deliveries_of(delivered: Sequence[DeliveredRecord]) -> dict[int, dict[int, int]]:
    """Which delivery each of the records is, by partition and offset."""
    found: dict[int, dict[int, int]] = {}
    for one in delivered:
        found.setdefault(one.record.partition, {})[one.record.offset] = one.attempt
    return found


def attempts_by_partition(delivered: Sequence[DeliveredRecord]) -> dict[int, list[int]]:
    """Which delivery each of the records is, by partition, in the order of `by_partition`."""
    found: dict[int, list[int]] = {}
    for one in delivered:
        found.setdefault(one.record.partition, []).append(one.attempt)
    return found


def checked_take(records_max: int) -> int:
    """How many records a caller wants; `Invalid` if that cannot be."""
    if not isinstance(records_max, int) or isinstance(records_max, bool) or records_max < 1:
        raise Invalid(f"records_max is {records_max!r:.80}; allowed: from 1 on")
    return min(records_max, TAKE_MAX)


def checked_delay(delay_ms: int | None) -> int | None:
    """How long a record waits; `Invalid` if that cannot be."""
    if delay_ms is None or (isinstance(delay_ms, int) and not isinstance(delay_ms, bool) and 0 <= delay_ms <= 2**40):
        return delay_ms
    raise Invalid(f"delay_ms is {delay_ms!r:.80}; allowed: 0 to {2**40}")


def pause_s(dispatch: Dispatch, left_s: float) -> float | None:
    """How long to wait before the next look, if no waker is called; `None` if the time is up."""
    if left_s <= 0:
        return None
    due = dispatch.due_ms()
    # Another consumer may take a record and stall: its time-out is seen in time, too.
    look = min(LOOK_S, max(0.01, dispatch.spec.ack_timeout_ms / 10_000))
    return min(left_s, look, look if due is None else max(0.001, due / 1000))


def _size_before(offset: int, records: Mapping[int, Record]) -> int:
    """About how many bytes those of the records have that lie before an offset."""
    return sum(_size_of(record) for at, record in records.items() if at < offset)


def _size_of(record: Record) -> int:
    return record_bytes(record.value, record.key, record.tag, record.headers)


def _fitting(claim: Claimed, records: Mapping[int, Record], room: int, *, is_first: bool) -> tuple[int, int]:
    """How many of the claimed offsets fit into so many bytes, and how many bytes are left then; one record at least."""
    for place, offset in enumerate(claim.offsets):
        record = records.get(offset)
        size = 0 if record is None else _size_of(record)
        # What lies behind records that fill the room was not looked for: it is not gone.
        if not is_first and (room == 0 or size > room):
            return place, 0
        if record is not None:
            is_first, room = False, max(0, room - size)
    return len(claim.offsets), room


def _in_order(claim: Claimed, records: Mapping[int, Record]) -> Iterator[DeliveredRecord]:
    for offset, attempt in zip(claim.offsets, claim.attempts, strict=True):
        record = records.get(offset)
        if record is not None:
            yield DeliveredRecord(record, attempt)
