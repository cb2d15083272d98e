"""One subscription as a process serves it: its consumers, and a window for each partition.

Says which records go to which consumer, who waits for more, and what is to be stored. Reads no records and waits for
nothing: a driver asks `wanted` what to read, hands pages to `offer`, reads what `claim` names, and gives its consumer
what `hand_over` leaves of that. Every call is short, so that an event loop may make it.

A driver waits between these calls, and meanwhile a partition may come to be served by another window. So each call
names the `ServedPartition` that it is about, never its number: what is about one that is served no more has no effect.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Final, NamedTuple

import numpy as np

from forebay.clock import Clock
from forebay.errors import Closed, Conflict, Invalid
from forebay.format.frame.batch import Batch
from forebay.locks import Rank, RankedLock
from forebay.pages import Page
from forebay.partitioning import murmur2_column
from forebay.progress import ATTEMPTS_STORED_MAX, Progress, SpentNote
from forebay.records import DeliveryState, Gap, Reason, Record, SpentReason
from forebay.subscriptions.cursor import limits_of, progress_of
from forebay.subscriptions.deadletters import SendingFailure, SpentBook
from forebay.subscriptions.window import KEYLESS, SLOTS, Slots, Window
from forebay.topics import OnSpent, SubscriptionMode, SubscriptionSpec

logger = logging.getLogger(__name__)

LETTERS_RETRY_MS: Final = 1_000
"""So long spent records wait that could not be sent to their dead-letter topic."""
LOST_LOG_MS: Final = 10_000
"""So often a line in the log says how much slow consumers have missed."""
BETWEEN_MAX: Final = 8
"""Records that lie closer than so are made together, with those between them: that is quicker than each alone."""
PAGES_KEPT_MAX: Final = 4
"""Pages of a partition that are kept until their records are delivered; what is older is read again."""


class KeptPage(NamedTuple):
    """A page whose records wait for consumers. Of no use once what has ended in its shard is not as it was before."""

    page: Page
    ended: object
    """See `ReadShard.ended`."""


class WantedPage(NamedTuple):
    """A page that is to be read for a window: from the offset on at which it ended."""

    served: ServedPartition
    offset: int


class Claimed(NamedTuple):
    """Records of one partition that are on their way to a consumer, and pages that may have them."""

    served: ServedPartition
    offsets: list[int]
    attempts: list[int]
    pages: tuple[KeptPage, ...]
    is_careful: bool = False
    """Whether these deliveries are to be stored before they are made: see `Dispatch.is_careful`."""

    @property
    def partition(self) -> int:
        """The number of the partition."""
        return self.served.number

    def cut(self, start: int, stop: int) -> Claimed:
        """Some of the records."""
        return self._replace(offsets=self.offsets[start:stop], attempts=self.attempts[start:stop])

    def kept(self, is_kept: Sequence[bool]) -> Claimed:
        """Those of the records of which it is said so."""
        return self._replace(
            offsets=list(compress(self.offsets, is_kept)), attempts=list(compress(self.attempts, is_kept))
        )


class PartitionStanding(NamedTuple):
    """How far a subscription has come in a partition: see `SubscriptionLag`."""

    cursor: int
    done_above: int
    held: int
    delayed: int
    spent: int
    state: DeliveryState
    failure: str | None
    dead_letters: int
    lost: int


class DueLetter(NamedTuple):
    """A spent record that is to be sent to the dead-letter topic now."""

    offset: int
    attempts: int
    note: SpentNote


class _Attached(NamedTuple):
    name: str
    unacked_max: int
    lost_before: int
    """What the subscription had lost before the consumer came."""


class ServedPartition:
    """One partition of a subscription that is served. The lock of its `Dispatch` guards the window and the pages."""

    def __init__(
        self,
        dispatch: Dispatch,
        number: int,
        window: Window,
        epoch: int,
        careful_ms: int,
        dead: SpentBook | None,
    ) -> None:
        self._dispatch = dispatch
        self.number = number
        self.window = window
        self.epoch = epoch
        self.careful_ms = careful_ms
        self.careful_until_ms = dispatch.now_ms() + careful_ms
        self.dead = dead
        """What is known of its spent records, if those go to a dead-letter topic."""
        self.lost = 0
        self.has_news = True
        """Whether there may be records behind the window. Any thread sets it, without the lock."""
        self.pages: deque[KeptPage] = deque(maxlen=PAGES_KEPT_MAX)
        """The one that was used last is the last."""
        self.is_blocked = False

    def use_pages(self, offsets: Sequence[int]) -> None:
        """Records at these offsets, in order, are delivered now: the pages that have them are of use. With the lock."""
        for kept in [kept for kept in self.pages if _has_any(kept.page, offsets)]:
            self.pages.remove(kept)
            self.pages.append(kept)

    def published(self) -> None:
        """A waker of the shard: records have come. Runs in the thread of a writer, without a lock."""
        self.has_news = True
        self._dispatch.wake()

    def progress(self) -> Progress:
        """What is to be stored now. For the thread that writes cursors."""
        return self._dispatch.progress(self)


class Dispatch:
    """The consumers and windows of one subscription. Safe for threads; nothing is read or written under its lock."""

    def __init__(self, spec: SubscriptionSpec, clock: Clock, *, is_lossy: bool = False) -> None:
        """With `is_lossy` a record is delivered at most once, and those a slow consumer misses are counted."""
        self._spec = spec
        self._clock = clock
        self.is_lossy = is_lossy
        self._lost = 0
        self._lost_logged_ms = -LOST_LOG_MS
        self._lock = RankedLock(Rank.LEAF, "subscriptions.dispatch")
        self._consumers: dict[int, _Attached] = {}
        """By number, in the order in which they came."""
        self._numbers = 0
        self._abandoned: deque[int] = deque()
        self._served: dict[int, ServedPartition] = {}
        self._sending: dict[int, ServedPartition] = {}
        """By partition, whose letters are on their way: it may be served no more by now."""
        self._turn = 0
        self._waiting: OrderedDict[int, Callable[[], None]] = OrderedDict()
        """By consumer, in the order in which they came to wait. Each call of it is one step for all threads."""
        self._full: dict[int, Callable[[], None]] = {}
        """Those that wait and could not take a record that comes: they hold all they may, or deliveries pause."""
        self._reports: deque[tuple[str, tuple[object, ...]]] = deque()
        """Lines for the operator, logged once the lock is free."""

    @property
    def spec(self) -> SubscriptionSpec:
        """The definition that it goes by."""
        return self._spec

    def adopt(self, spec: SubscriptionSpec) -> None:
        """Go by this definition from now on: it was paused, resumed or altered."""
        with self._lock:
            is_limited = limits_of(spec) != limits_of(self._spec)
            self._spec = spec
            for served in self._served.values() if is_limited else ():
                served.window.limit(limits_of(spec), () if served.dead is None else served.dead.sending)
                # There may be room now that was not there.
                served.has_news = True
                self._see_to_spent(served, SpentReason.ACK_TIMEOUT)
        self._report()
        self.wake_all()

    def now_ms(self) -> int:
        """The time that windows go by."""
        return int(self._clock.monotonic() * 1000)

    # Consumers

    def check_attached(self, consumer: int) -> None:
        """`Closed` unless this consumer is attached."""
        with self._lock:
            self._check(consumer)

    @property
    def consumers(self) -> list[str]:
        """The names of the consumers that are attached, in the order in which they came."""
        with self._lock:
            self._leave_abandoned()
            return [attached.name for attached in self._consumers.values()]

    def attach(self, name: str, unacked_max: int) -> int:
        """Attach a consumer; its number. `Conflict` if the subscription is exclusive and has one."""
        with self._lock:
            self._leave_abandoned()
            if self._spec.mode is SubscriptionMode.EXCLUSIVE and self._consumers:
                (other,) = self._consumers.values()
                raise Conflict(
                    f"the subscription {self._spec.name} of {self._topic} is exclusive, and consumer "
                    f'"{other.name}" is attached: close that one first, or use mode "failover" or "shared"',
                    topic=self._topic,
                )
            self._numbers += 1
            self._consumers[self._numbers] = _Attached(name, unacked_max, self._lost)
            return self._numbers

    def detach(self, consumer: int) -> bool:
        """A consumer leaves: what it holds is due for the others at once. Whether none is left."""
        with self._lock:
            self._leave(consumer)
            self._leave_abandoned()
            is_last = not self._consumers
        self._report()
        self.wake_all()
        return is_last

    def abandon(self, consumer: int) -> None:
        """A consumer was dropped without being closed; it leaves at the next call of another. Takes no lock."""
        self._abandoned.append(consumer)

    # Partitions

    @property
    def partitions(self) -> dict[int, ServedPartition]:
        """The partitions that are served, by number."""
        with self._lock:
            return dict(self._served)

    def serve(
        self, number: int, window: Window, epoch: int, careful_ms: int, dead: SpentBook | None = None
    ) -> ServedPartition:
        """Deliver a partition from this window, in place of one that was served before. See `is_careful`."""
        served = ServedPartition(self, number, window, epoch, careful_ms, dead)
        with self._lock:
            self._served[number] = served
        return served

    def unserve(self, number: int | None = None) -> None:
        """Do not serve a partition any more, or any of them."""
        with self._lock:
            if number is None:
                self._served.clear()
            else:
                self._served.pop(number, None)

    def note(self, partitions: Iterable[int], mark: Callable[[ServedPartition], bool]) -> bool:
        """Have `mark` note of those that are served that they have moved; whether that was news for one of them.

        It is called under the lock, is quick and takes none. So nothing is noted of a window that is served no more:
        what is stored of the next one stays.
        """
        with self._lock:
            marked = [mark(self._served[number]) for number in partitions if number in self._served]
        return any(marked)

    def progress(self, served: ServedPartition) -> Progress:
        """What is to be stored of a partition, as it stands when this begins.

        Under the lock the window is copied; the bytes are made of the copy without it, while consumers go on.
        """
        with self._lock:
            window, spec, dead = served.window.copied(), self._spec, served.dead
            if dead is None:
                run, letters_to, notes = None, None, []
            else:
                run, letters_to, notes = dead.run, dead.letters_to, dead.notes
        return progress_of(window, spec, served.epoch, run=run, letters_to=letters_to, spent=notes)

    def standing(self) -> dict[int, PartitionStanding]:
        """How far each partition has come that is served."""
        with self._lock:
            return {number: self._standing(served) for number, served in self._served.items()}

    def is_careful(self) -> bool:
        """Whether deliveries are to be stored before they are made.

        So it is in the first moments after a start: a record that ends the process when it is delivered counts its
        deliveries all the same. A process that lives longer has stored by then where it stands. The moments last
        while records that were out when an earlier process ended are delivered, one at a time, and are answered.
        """
        now = self.now_ms()
        return any(_is_careful(served, now) for served in self.partitions.values())

    # Deliveries

    def claim(self, consumer: int, count: int) -> list[Claimed]:
        """Up to `count` records that are due for a consumer, which holds them from now on.

        The caller reads them and calls `hand_over`, or `give_back` if it could not.
        """
        now = self.now_ms()
        claimed: list[Claimed] = []
        with self._lock:
            self._leave_abandoned()
            # First, and of all partitions: what a consumer holds too long does not count as held any more.
            self._end_times(now)
            left = self._allowed(consumer, count)
            in_turn = list(self._in_turn(now))
            suspected = [served for served in self._served.values() if _has_suspects(served, now)]
            if suspected:
                # One at a time, those first that may have ended the process before this one: the records beside one
                # that ends it are not to count as delivered with it, each time.
                is_any_out = any(served.window.counts.held for served in self._served.values())
                left = 0 if is_any_out else min(left, 1)
                in_turn.sort(key=lambda served: served not in suspected)
            for served in in_turn:
                if left <= 0:
                    break
                limit, is_careful = left, _is_careful(served, now)
                if is_careful:
                    # So many are stored first. Not fewer where others are held: a wait ends with what is due.
                    limit = min(left, ATTEMPTS_STORED_MAX)
                taken = served.window.take(consumer, limit, now)
                if taken.offsets:
                    served.use_pages(taken.offsets)
                    claimed.append(Claimed(served, *taken, tuple(served.pages), is_careful))
                    left -= len(taken.offsets)
                if not served.window.counts.ready:
                    served.pages.clear()
            self._turn += 1
        self._report()
        return claimed

    def hand_over(self, consumer: int, claimed: Iterable[Claimed]) -> list[Claimed]:
        """The consumer gets the claimed records now; those of them that it is still to get.

        The others are not its own any more: it has left, another window serves the partition, or they are done.
        """
        now = self.now_ms()
        handed = []
        with self._lock:
            for claim in claimed if consumer in self._consumers else ():
                if self.is_lossy:
                    # No other consumer gets them, also if the window has passed over them meanwhile.
                    handed.append(claim)
                elif self._is_served(claim.served):
                    held = claim.served.window.hand_over(consumer, claim.offsets, claim.attempts, now)
                    handed.append(claim if all(held) else claim.kept(held))
        return [claim for claim in handed if claim.offsets]

    def wanted(self, consumer: int) -> WantedPage | None:
        """A page that is to be read for a consumer; `None` if there is none.

        The caller reads it and calls `offer`, or sets `has_news` of the partition if it could not.
        """
        now = self.now_ms()
        with self._lock:
            if self._allowed(consumer, 1) > 0:
                for served in self._in_turn(now):
                    if served.has_news and served.window.room > 0:
                        # Before the read: what comes during it is news again.
                        served.has_news = False
                        return WantedPage(served, served.window.end)
        return None

    def look_again(self) -> None:
        """There may be records behind every window."""
        for served in self.partitions.values():
            served.has_news = True

    def offer(self, wanted: WantedPage, kept: KeptPage, head: int, slots: Slots | None) -> None:
        """Take in the page that was wanted; `head` is the end of the partition.

        It counts for the window that it was read for, and only if that still ends where the page begins.
        """
        page, served = kept.page, wanted.served
        records = [(batch.base, batch.end) for batch in page.batches]
        with self._lock:
            if not self._is_served(served):
                return
            before = served.window.end
            end = served.window.offer(wanted.offset, records, page.next, slots)
            if end > before and page.batches:
                served.pages.append(kept)
            # There is more to read, or the window is full and the rest is read later, or another page came first. One
            # without a step forward ends at a bulk load that is not committed yet.
            if end < page.next or before < end < head or before != wanted.offset:
                served.has_news = True
            self._name_gaps(served, page.events, before, end)
            self._see_to_spent(served, SpentReason.PROCESS_ENDED)
            holders = served.window.due_holders()
        for consumer in holders:
            # The caller may not take what it has read of their keys.
            self._wake_consumer(consumer)
        self._report()

    def keep(self, served: ServedPartition, kept: KeptPage) -> None:
        """A page was read again, for records that were claimed: others of it may be claimed next."""
        with self._lock:
            if served.window.counts.ready and kept.page.batches:
                served.pages.append(kept)

    def ack(self, consumer: int, done: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """Offsets by partition are done; how many of them counted."""
        with self._lock:
            self._check(consumer)
            self._answered(done)
            return {
                number: self._ack(self._served[number], consumer, offsets)
                for number, offsets in done.items()
                if number in self._served
            }

    def ack_one(
        self, consumer: int, partition: int, offset: int, mark: Callable[[ServedPartition], bool]
    ) -> tuple[int, bool]:
        """As `ack` of one record, and `note` of its partition if that counted: whether it did, and what `mark` says.

        One step under the lock: loops acknowledge record by record.
        """
        with self._lock:
            self._check(consumer)
            served = self._served.get(partition)
            if served is None:
                return 0, False
            self._answered((partition,))
            counted = self._ack(served, consumer, (offset,))
            return counted, counted > 0 and mark(served)

    def ack_up_to(self, consumer: int, partition: int, offset: int) -> int:
        """All of a partition up to a record is done; how many records that is. Only where one consumer gets all."""
        if not self._spec.mode.has_one:
            raise Invalid(
                f'mode "{self._spec.mode}" delivers to several consumers, and none knows that all before offset '
                f"{offset} is done: acknowledge each record"
            )
        with self._lock:
            self._check(consumer)
            self._answered([partition])
            served = self._served.get(partition)
            if served is None:
                return 0
            kept = () if served.dead is None else served.dead.sending
            counted = served.window.ack_up_to(consumer, offset, kept)
            self._see_to_spent(served, SpentReason.ACK_TIMEOUT)
            return counted

    def nack(
        self,
        consumer: int,
        failed: Mapping[int, Sequence[int]],
        delay_ms: int | None,
        error: str | None = None,
        attempts: Mapping[int, Sequence[int]] | None = None,
    ) -> dict[int, int]:
        """Offsets by partition could not be done, for the reason `error`; how many of them the consumer held.

        `attempts` says which delivery of each is meant: see `Window.nack`.
        """
        now = self.now_ms()
        counted = {}
        with self._lock:
            self._check(consumer)
            self._answered(failed)
            for number, offsets in failed.items():
                served = self._served.get(number)
                if served is not None:
                    if served.dead is not None:
                        served.dead.said(offsets, error)
                    meant = None if attempts is None else attempts.get(number)
                    counted[number] = served.window.nack(consumer, offsets, now, delay_ms, meant)
                    self._see_to_spent(served, SpentReason.NACK)
        self._report()
        return counted

    def give_back(self, consumer: int, claimed: Iterable[Claimed]) -> None:
        """Records that were claimed did not reach the consumer: they are due again, as if they never had been."""
        with self._lock:
            for claim in claimed:
                if self._is_served(claim.served):
                    back = claim.served.window.give_back(consumer, claim.offsets, claim.attempts)
                    self._see_to_spent(claim.served, SpentReason.ACK_TIMEOUT)
                    if self.is_lossy:
                        # The others counted as delivered already.
                        self._lose(claim.served, len(claim.offsets) - back)
        self._report()
        self.wake_after(consumer)

    def delivered(self, attempts: Mapping[int, Mapping[int, int]]) -> list[Claimed]:
        """Deliveries by partition and offset, as those that were claimed, for `give_back`."""
        with self._lock:
            return [
                Claimed(self._served[number], list(meant), list(meant.values()), ())
                for number, meant in attempts.items()
                if number in self._served
            ]

    def gone(self, served: ServedPartition, offsets: Sequence[int]) -> None:
        """Records that were to be delivered are done: they were deleted or evicted, or count as delivered."""
        with self._lock:
            if self._is_served(served):
                served.window.finish(offsets)

    # Dead letters

    def has_letters(self) -> bool:
        """Whether a spent record is to be sent to the dead-letter topic now."""
        now = self.now_ms()
        with self._lock:
            return any(self._sends(served, now) for served in self._served.values())

    def take_letters(self, count: int) -> tuple[ServedPartition, list[DueLetter]] | None:
        """Up to `count` spent records of one partition that are to be sent now, in order; `None` if there are none.

        Until `end_letters` they are on their way: no other call gets one, and an acknowledgement does not count.
        """
        now = self.now_ms()
        with self._lock:
            for served in self._served.values():
                if served.dead is not None and self._sends(served, now):
                    offsets = served.window.leading_spent()[:count]
                    served.dead.begin(offsets)
                    self._sending[served.number] = served
                    window, note = served.window, served.dead.note
                    return served, [DueLetter(at, window.attempts_of(at), note(at)) for at in offsets]
        return None

    def begin_asking(self, served: ServedPartition) -> bool:
        """Whether the caller may ask what the dead-letter topic has of a partition; it calls `end_letters` then.

        Not while letters are on their way, also those that were taken for a window before this one: it may get more
        than it has. And none is sent meanwhile.
        """
        with self._lock:
            if served.number in self._sending:
                return False
            self._sending[served.number] = served
            return True

    def letters_arrived(self, served: ServedPartition, offsets: Sequence[int], sent: int) -> None:
        """Spent records are done: `sent` of them have arrived in the dead-letter topic, the others are gone."""
        assert served.dead is not None
        with self._lock:
            served.window.finish(offsets)
            served.dead.done(offsets)
            served.dead.sent += sent

    def skip_to(self, served: ServedPartition, stop: int) -> None:
        """Everything below `stop` is done: an earlier process had come so far."""
        with self._lock:
            served.window.skip_to(stop)
            if served.dead is not None:
                served.dead.found(served.window.spent(), SpentReason.PROCESS_ENDED)

    def end_letters(self, served: ServedPartition, failure: SendingFailure | None) -> None:
        """Nothing is on its way any more; what keeps the rest back, if anything. The rest is tried again later."""
        assert served.dead is not None
        with self._lock:
            before, served.dead.failure = served.dead.failure, failure
            served.dead.retry_at_ms = 0 if failure is None else self.now_ms() + LETTERS_RETRY_MS
            served.dead.end()
            if self._sending.get(served.number) is served:
                del self._sending[served.number]
        if failure is not None and (before is None or before.state is not failure.state):
            logger.warning(
                "%s[%d]: spent records of the subscription %s wait for the topic %s, and are sent again soon: %s",
                self._topic,
                served.number,
                self._spec.name,
                self._spec.dead_letter_topic,
                failure.message,
            )
        self.wake()

    # What is lost, where a record is delivered at most once

    def catch_up(self, served: ServedPartition, head: int) -> None:
        """The partition ends at `head`: what lies too far behind is not delivered any more, and counts as lost."""
        with self._lock:
            if self._is_served(served):
                self._lose(served, served.window.skip_to(head - self._spec.window_records_max))
                if head > served.window.end:
                    # The waker of the append may not have been called yet.
                    served.has_news = True
        self._report()

    def lost(self, consumer: int) -> int:
        """How many offsets no consumer got since this one was attached."""
        with self._lock:
            attached = self._consumers.get(consumer)
            return 0 if attached is None else self._lost - attached.lost_before

    # Waiting

    def due_ms(self) -> int | None:
        """How many milliseconds from now the next delay or time-out ends, if there is one."""
        now = self.now_ms()
        due = [served.window.due for served in self.partitions.values()]
        return min((max(0, at - now) for at in due if at is not None), default=None)

    def wait(self, consumer: int, waker: Callable[[], None]) -> None:
        """Have `waker` called once, by any thread, when a look is worth it. It is quick and takes no lock."""
        if not self._spec.mode.has_one:
            with self._lock:
                if self._allowed(consumer, 1) <= 0:
                    # It could not take what comes, and would keep it from another that waits.
                    self._full[consumer] = waker
                    return
        self._waiting[consumer] = waker

    def unwait(self, consumer: int, *, is_leaving: bool) -> None:
        """Do not call its waker any more. One that leaves has another look if there is something left."""
        self._waiting.pop(consumer, None)
        self._full.pop(consumer, None)
        if is_leaving and self._waiting and not self._spec.mode.has_one and self.has_work():
            self.wake()

    def wake(self) -> None:
        """Have one that waits look, or all where one consumer gets everything. Takes no lock."""
        if self._spec.mode.has_one:
            self.wake_all()
            return
        try:
            _, waker = self._waiting.popitem(last=False)
        except KeyError:
            return
        waker()

    def wake_after(self, consumer: int) -> None:
        """A consumer has less than before: it may take more, and another what waited for its keys or for room."""
        if not self._waiting and not self._full:
            return
        self._wake_consumer(consumer)
        if self._waiting and self.has_work():
            self.wake()

    def wake_all(self) -> None:
        """Have all that wait look, and see for how long they wait next."""
        for waiting in (self._waiting, self._full):
            # As many as wait now: one that is called may wait again at once.
            for consumer in list(waiting):
                waker = waiting.pop(consumer, None)
                if waker is not None:
                    waker()

    def _wake_consumer(self, consumer: int) -> None:
        for waiting in (self._waiting, self._full):
            waker = waiting.pop(consumer, None)
            if waker is not None:
                waker()

    def has_work(self) -> bool:
        """Whether there are records that any consumer may take, or may be behind a window."""
        now = self.now_ms()
        with self._lock:
            return not self._spec.is_paused and any(
                served.window.is_free(now) or (served.has_news and served.window.room > 0)
                for served in self._in_turn(now)
            )

    # How. The lock is held.

    @property
    def _topic(self) -> str:
        return f"{self._spec.namespace}/{self._spec.topic}"

    def _is_served(self, served: ServedPartition) -> bool:
        """Whether this very window delivers its partition."""
        return self._served.get(served.number) is served

    def _check(self, consumer: int) -> None:
        if consumer not in self._consumers:
            raise Closed(f"this consumer of the subscription {self._spec.name} of {self._topic} is closed")

    def _leave(self, consumer: int) -> None:
        if self._consumers.pop(consumer, None) is not None:
            for served in self._served.values():
                served.window.release(consumer)
                self._see_to_spent(served, SpentReason.CONSUMER_LEFT)

    def _leave_abandoned(self) -> None:
        while self._abandoned:
            self._leave(self._abandoned.popleft())

    def _end_times(self, now: int) -> None:
        """End the delays and time-outs that are over, also where nothing is delivered now."""
        for served in self._served.values():
            if served.window.tick(now):
                self._see_to_spent(served, SpentReason.ACK_TIMEOUT)

    def _allowed(self, consumer: int, count: int) -> int:
        """How many of so many records the consumer may take."""
        self._check(consumer)
        if self._spec.is_paused or (self._spec.mode.has_one and next(iter(self._consumers)) != consumer):
            return 0
        held = sum(served.window.held_by(consumer) for served in self._served.values())
        return min(count, self._consumers[consumer].unacked_max - held)

    def _in_turn(self, now: int) -> Iterator[ServedPartition]:
        """The partitions that deliver, another one first each time."""
        served = list(self._served.values())
        for place in range(len(served)):
            one = served[(self._turn + place) % len(served)]
            if not one.is_blocked and (one.has_news or one.window.is_due(now)):
                yield one

    def _answered(self, numbers: Iterable[int]) -> None:
        """Records of these partitions are answered: while some are suspect there, their time begins again."""
        for number in numbers:
            served = self._served.get(number)
            if served is not None and served.window.may_have_suspects and _has_suspects(served, now := self.now_ms()):
                served.careful_until_ms = now + served.careful_ms

    def _ack(self, served: ServedPartition, consumer: int, offsets: Sequence[int]) -> int:
        if served.dead is None:
            counted = served.window.ack(consumer, offsets)
            if served.is_blocked:
                self._see_to_spent(served, SpentReason.ACK_TIMEOUT)
            return counted
        offsets = [offset for offset in offsets if offset not in served.dead.sending]
        counted = served.window.ack(consumer, offsets)
        served.dead.done(offsets)
        return counted

    def _lose(self, served: ServedPartition, count: int) -> None:
        """So many offsets are not delivered to any consumer. Logged now and then."""
        if not count:
            return
        served.lost += count
        self._lost += count
        now = self.now_ms()
        if now - self._lost_logged_ms >= LOST_LOG_MS:
            self._lost_logged_ms = now
            self._reports.append(
                (
                    "%s[%d]: the consumers of %s are too slow, and %d offsets of the topic were delivered to none of "
                    'them so far; add consumers, raise window_records_max, or use dispatch "reliable"',
                    (self._topic, served.number, self._spec.name, self._lost),
                )
            )

    def _standing(self, served: ServedPartition) -> PartitionStanding:
        window, dead = served.window, served.dead
        counts, failure = window.counts, dead.failure if dead is not None else None
        if self._spec.is_paused:
            state = DeliveryState.PAUSED
        elif served.is_blocked:
            state = DeliveryState.BLOCKED
        else:
            state = DeliveryState.DELIVERING if failure is None else failure.state
        return PartitionStanding(
            window.cursor,
            window.acked_count(),
            counts.held,
            counts.delayed,
            counts.spent,
            state,
            None if failure is None else failure.message,
            0 if dead is None else dead.sent,
            served.lost,
        )

    def _see_to_spent(self, served: ServedPartition, reason: SpentReason) -> None:
        """Do with records that were delivered as often as they may be what the subscription says.

        `reason` is why those are spent that were not before.
        """
        spent = served.window.counts.spent
        if served.dead is not None:
            if spent != served.dead.count:
                served.dead.found(served.window.spent(), reason)
        elif self._spec.on_spent is OnSpent.DROP and spent:
            offsets = served.window.spent()
            served.window.finish(offsets)
            self._reports.append(
                (
                    "%s[%d]: the subscription %s drops %d records that were delivered %s times, the first at offset "
                    "%d; read them there, or raise deliveries_max",
                    (self._topic, served.number, self._spec.name, spent, self._spec.deliveries_max, offsets[0]),
                )
            )
        elif self._spec.on_spent is OnSpent.BLOCK and bool(spent) != served.is_blocked:
            served.is_blocked = bool(spent)
            if spent:
                self._reports.append(
                    (
                        "%s[%d]: the subscription %s delivers nothing more of this partition: the record at offset %d "
                        "was delivered %s times and is not done; close its consumers and seek to that offset to try "
                        "again, or behind it to leave it out",
                        (
                            self._topic,
                            served.number,
                            self._spec.name,
                            served.window.spent()[0],
                            self._spec.deliveries_max,
                        ),
                    )
                )

    def _sends(self, served: ServedPartition, now: int) -> bool:
        """Whether spent records of a partition are to be sent to the dead-letter topic now, and none is on its way.

        Not while those of a window before this one are: each would be sent by both.
        """
        dead = served.dead
        return (
            dead is not None
            and served.number not in self._sending
            and now >= dead.retry_at_ms
            and served.window.counts.spent > 0
            and bool(served.window.leading_spent())
        )

    def _name_gaps(self, served: ServedPartition, gaps: Sequence[Gap], start: int, stop: int) -> None:
        for gap in gaps:
            low, high = max(gap.start, start), min(gap.stop, stop)
            if low < high and gap.reason is not Reason.SKIPPED:
                if self.is_lossy:
                    self._lose(served, high - low)
                    continue
                self._reports.append(
                    (
                        "%s[%d]: the subscription %s goes on behind offsets [%d, %d), which are gone: %s",
                        (self._topic, served.number, self._spec.name, low, high, gap.reason.name.lower()),
                    )
                )

    def _report(self) -> None:
        """Log what the operator should know. The lock is not held."""
        while self._reports:
            try:
                line, fields = self._reports.popleft()
            except IndexError:
                return
            logger.warning(line, *fields)


def slots_of(page: Page) -> Slots:
    """The slot of each record of a page, by its key. For a driver, without the lock: it takes time."""
    return np.concatenate([_slots(batch) for batch in page.batches]) if page.batches else np.empty(0, np.uint16)


def records_of(claimed: Claimed) -> dict[int, Record]:
    """Those of the claimed records that its pages have, by offset. For a driver, without the lock: it takes time."""
    wanted = claimed.offsets
    found: dict[int, Record] = {}
    for batch in [batch for kept in claimed.pages for batch in kept.page.batches]:
        inside = wanted[bisect_left(wanted, batch.base) : bisect_left(wanted, batch.end)]
        for first, last in _near(inside):
            part = batch.slice(first, last + 1)
            found.update((record.offset, record) for record in part.each_record(claimed.partition))
    return found if len(found) == len(wanted) else {offset: found[offset] for offset in wanted if offset in found}


def _near(offsets: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first and the last of those that lie close to each other: fewer records between than a part is worth."""
    begin = 0
    for place in range(1, len(offsets) + 1):
        if place == len(offsets) or offsets[place] - offsets[place - 1] > BETWEEN_MAX:
            yield offsets[begin], offsets[place - 1]
            begin = place


def _has_any(page: Page, offsets: Sequence[int]) -> bool:
    """Whether a page reaches over one of these offsets, which are in order."""
    place = bisect_left(offsets, page.batches[0].base)
    return place < len(offsets) and offsets[place] < page.next


def _slots(batch: Batch) -> Slots:
    keys = batch.key_strip()
    if keys is None:
        return np.full(batch.count, KEYLESS, np.uint16)
    slots = (murmur2_column(keys.filling, keys.offsets) & (SLOTS - 1)).astype(np.uint16)
    if keys.present is not None:
        slots[~keys.present] = KEYLESS
    return slots


def _is_careful(served: ServedPartition, now: int) -> bool:
    return now < served.careful_until_ms


def _has_suspects(served: ServedPartition, now: int) -> bool:
    """Whether records of a partition are to be delivered one at a time: see `Dispatch.is_careful`."""
    return _is_careful(served, now) and served.window.has_suspects()
