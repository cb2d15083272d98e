"""Subscriptions for callers of a server: with rights, and with consumers that live in sessions.

A caller reaches its consumer by one request after the other, so the server remembers the consumer in between. Every
request renews the session. Once none was under way for the time that the session may last, the consumer has left: what
it held is due for others. For one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import repeat
from typing import Final, NamedTuple, TypeAlias, TypeVar

from forebay.aio.subscriptions import AsyncConsumer, AsyncSubscription
from forebay.aio.topic import AsyncTopic
from forebay.errors import Conflict, Invalid, UnknownConsumer, UnknownSubscription, UnknownTopic
from forebay.progress import check_not_reserved
from forebay.records import DeliveredRecord, Start
from forebay.service.principals import AccessScope, Principal, check_may
from forebay.service.quotas import Quotas
from forebay.storage.subscriptions import deliveries_of
from forebay.topics import (
    OnSpent,
    SubscriptionChanges,
    SubscriptionOptions,
    SubscriptionSpec,
    TopicName,
    dead_letter_name,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

RECORD_BYTES: Final = 64
"""What a record takes beside its key and value, about."""
ANSWERED_AT_ONCE: Final = 1_000
"""Offsets that are acknowledged or refused in one turn of the event loop: about a millisecond."""

Offsets: TypeAlias = Mapping[int, Sequence[int]]
"""Offsets by partition."""


class SubscriptionRef(NamedTuple):
    """A subscription as a request names it."""

    topic: TopicName
    name: str
    id: str | None = None
    """Its incarnation, for a caller that means no later one of the same name."""


class TakenRecords(NamedTuple):
    """What a pull of a consumer has taken."""

    records: list[DeliveredRecord]
    pull: int
    """The number of the pull among those of the consumer."""


class ConsumerSession:
    """One consumer that a caller has attached, from request to request. For one event loop.

    One pull goes on at a time: a later one takes its place, for the caller has given the earlier one up.
    """

    def __init__(
        self, who: Principal, spec: SubscriptionSpec, consumer: AsyncConsumer, timeout_s: float, held: ExitStack
    ) -> None:
        """`held` is left when the session is over."""
        self.spec = spec
        self.principal = who.name
        self.timeout_s = timeout_s
        self._consumer = consumer
        self._held = held
        self._is_closed = False
        self._users = 0
        self._used_at = asyncio.get_running_loop().time()
        self._pulls = 0
        self._taking: asyncio.Task[list[DeliveredRecord]] | None = None
        self._sequence: int | None = None
        """Of the last pull that had one."""
        self._answered: Mapping[int, Mapping[int, int]] = {}
        """The deliveries that pull was answered with, by partition and offset."""
        self._repeated = 0
        """The number of the last pull whose deliveries a repeat has given back."""

    @contextmanager
    def used(self) -> Iterator[None]:
        """A request of the caller is under way: the session lasts at least so long."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            self._used_at = asyncio.get_running_loop().time()

    def left_s(self) -> float:
        """For how many seconds the session lasts at least, without a further request; 0.0 if it is over."""
        if self._users:
            return self.timeout_s
        return max(0.0, self._used_at + self.timeout_s - asyncio.get_running_loop().time())

    async def pull(
        self, records_max: int, *, bytes_max: int, wait_s: float, sequence: int | None = None
    ) -> TakenRecords:
        """Up to so many records that are due; waits for the first. `Conflict` once a later pull has begun.

        Repeated with the same `sequence`, because its answer was lost, it first gives back what that answer had: those
        records are due as if they had not been delivered. A pull that is cancelled has taken nothing.
        """
        number = await self.begin_pull(sequence)
        self._taking = taking = asyncio.ensure_future(
            self._consumer.take(records_max, wait_s=wait_s, bytes_max=bytes_max)
        )
        try:
            await asyncio.wait((taking,))
        except asyncio.CancelledError:
            # The caller has gone.
            if not taking.cancel():
                self._return(taking)
            raise
        self._check_latest(number)
        self._taking = None
        found = taking.result()
        if sequence is not None:
            self._answered = deliveries_of(found)
        return TakenRecords(found, number)

    async def begin_pull(self, sequence: int | None) -> int:
        """End the pull that is under way, and give back what a lost answer had; the number of the pull that begins.

        Before records are refused by a repeated pull: else it would refuse the delivery of the lost answer, too.
        """
        self._check_open()
        if sequence is not None and self._sequence is not None and sequence < self._sequence:
            raise Conflict(
                f"this pull has the sequence {sequence}, and one with {self._sequence} came before: count up",
                topic=self._topic,
                expected=self._sequence + 1,
            )
        self._pulls += 1
        number = self._pulls
        await self._end_taking()
        self._check_latest(number)
        answered, self._answered = self._answered, {}
        if sequence is not None:
            if sequence == self._sequence:
                self._consumer.take_back(answered)
                self._repeated = number - 1
            self._sequence = sequence
        return number

    def return_all(self, taken: TakenRecords) -> None:
        """Records that were pulled cannot be sent: they are due as if they had not been delivered.

        Unless a repeat of the pull has given them back already, and may have taken them itself.
        """
        if self._is_closed or taken.pull <= self._repeated:
            return
        if taken.pull == self._pulls:
            # A repeat has nothing to give back.
            self._answered = {}
        self._consumer.take_back(deliveries_of(taken.records))

    async def ack(self, done: Offsets, up_to: Mapping[int, int]) -> int:
        """These offsets are done, and everything up to those; how many records counted."""
        self._check_open()
        counted = 0
        async for part in _in_turns(_slices(done)):
            self._check_open()
            counted += self._consumer.ack_offsets(part)
        async for part in _in_turns(_slices({partition: (last,) for partition, last in up_to.items()})):
            self._check_open()
            counted += sum(self._consumer.ack_offset_up_to(partition, last) for partition, (last,) in part.items())
        return counted

    async def nack(
        self, failed: Offsets, delay_ms: int | None, error: str | None, attempts: Offsets | None = None
    ) -> int:
        """These could not be done, for this reason; how many of them the consumer held.

        With `attempts`, one for each offset, a record that was delivered again since does not count.
        """
        self._check_open()
        meant: Iterable[Offsets | None] = repeat(None)
        if attempts is not None:
            _check_attempts(failed, attempts)
            meant = _slices({partition: attempts[partition] for partition in failed})
        counted = 0
        async for part, numbers in _in_turns(zip(_slices(failed), meant, strict=False)):
            self._check_open()
            counted += self._consumer.nack_offsets(part, delay_ms, error, numbers)
        return counted

    def take_back(self, unused: Offsets, attempts: Offsets | None) -> int:
        """These were pulled and not looked at: they are due as if they had not been delivered; how many were named."""
        self._check_open()
        if attempts is None:
            raise Invalid("is_unused is about deliveries: give the attempts beside the offsets")
        _check_attempts(unused, attempts)
        self._consumer.take_back(
            {number: dict(zip(offsets, attempts[number], strict=True)) for number, offsets in unused.items() if offsets}
        )
        return sum(map(len, unused.values()))

    @property
    def lost(self) -> int:
        """How many offsets no consumer got since this one was attached: where records are delivered at most once."""
        return self._consumer.lost

    async def close(self) -> None:
        """The consumer leaves: what it holds is due for others. Harmless when repeated."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._taking is not None:
            self._taking.cancel()
        try:
            await self._consumer.close()
        finally:
            self._held.close()

    async def _end_taking(self) -> None:
        """Have the pull that is under way end without taking anything."""
        earlier, self._taking = self._taking, None
        if earlier is None:
            return
        earlier.cancel()
        # By a callback: the caller of this one may go away, too.
        earlier.add_done_callback(self._return)
        await asyncio.wait((earlier,))
        # What a thread has claimed for it comes back first: records stay in order.
        await self._consumer.until_idle()

    def _return(self, taking: asyncio.Task[list[DeliveredRecord]]) -> None:
        """What a take has come to did not reach the caller."""
        if not taking.cancelled() and taking.exception() is None and not self._is_closed:
            self._consumer.take_back(deliveries_of(taking.result()))

    @property
    def _topic(self) -> str:
        return f"{self.spec.namespace}/{self.spec.topic}"

    def _check_open(self) -> None:
        if self._is_closed:
            raise UnknownConsumer(f"this consumer of {self.spec.name} has left: attach it again", topic=self._topic)

    def _check_latest(self, number: int) -> None:
        """Return if no later pull has begun than this one, and the consumer is still attached."""
        self._check_open()
        if number != self._pulls:
            raise Conflict(
                f"a later pull of this consumer of {self.spec.name} has taken the place of this one", topic=self._topic
            )


def _check_attempts(offsets: Offsets, attempts: Offsets) -> None:
    """`Invalid` unless each offset has the number of its delivery."""
    for partition, some in offsets.items():
        if len(attempts.get(partition, ())) != len(some):
            raise Invalid(f"attempts of partition {partition} are not as many as its offsets: one for each")


def _slices(named: Offsets) -> Iterator[dict[int, Sequence[int]]]:
    """The same, so many offsets at a time as neither the event loop nor another consumer notices."""
    part: dict[int, Sequence[int]] = {}
    size = 0
    for partition, offsets in named.items():
        for begin in range(0, len(offsets), ANSWERED_AT_ONCE):
            piece = offsets[begin : begin + ANSWERED_AT_ONCE]
            if size + len(piece) > ANSWERED_AT_ONCE:
                yield part
                part, size = {}, 0
            part[partition] = piece
            size += len(piece)
    if part:
        yield part


async def _in_turns(parts: Iterable[T]) -> AsyncIterator[T]:
    """One after the other, with a turn of the event loop between them."""
    for number, part in enumerate(parts):
        if number:
            await asyncio.sleep(0)
        yield part


_Key: TypeAlias = tuple[TopicName, str, str]
"""Topic, subscription and consumer, as requests name them."""


class _Attempt(NamedTuple):
    """A consumer that is being attached."""

    subscription_id: str
    """A subscription that is made again has the name of the one before, and another id."""
    task: asyncio.Task[ConsumerSession]


class ServedSubscriptions:
    """The subscriptions of a server and the sessions of their consumers. For one event loop.

    A caller that may read a topic may do everything with its subscriptions: they are places of readers, as groups have.
    """

    def __init__(
        self,
        readable: Callable[[Principal, TopicName], Awaitable[AsyncTopic]],
        topic: Callable[[TopicName], Awaitable[AsyncTopic]],
        quotas: Quotas,
    ) -> None:
        """`readable` gives a topic to a caller that may read it, if this server serves it; `topic` gives any."""
        self._readable = readable
        self._topic = topic
        self._quotas = quotas
        self._sessions: dict[_Key, ConsumerSession] = {}
        self._attaching: dict[_Key, _Attempt] = {}
        """A repeated call waits for the same attempt, if that is one for the same subscription."""
        self._ending: dict[asyncio.Task[None], _Key] = {}
        """Consumers that are leaving, which takes a thread a moment."""

    async def of_topic(self, who: Principal, topic: TopicName) -> list[SubscriptionSpec]:
        """The definitions of all subscriptions of a topic."""
        return await (await self._readable(who, topic)).subscriptions()

    async def create(
        self, who: Principal, ref: SubscriptionRef, start: Start, options: SubscriptionOptions
    ) -> SubscriptionSpec:
        """Create a subscription, or find the one that is there; its definition.

        One that sends spent records to a topic needs `write` there, and `admin` if it has to be created.
        """
        check_not_reserved(ref.name)
        topic = await self._readable(who, ref.topic)
        if options.get("on_spent") == OnSpent.DEAD_LETTER:
            try:
                found = (await topic.subscription(ref.name)).spec
            except UnknownSubscription:
                await self._check_dead_letters(who, ref, options)
            else:
                # Not created below, even if it is deleted now: the rights were not asked for.
                found.check_options(options)
                return found
        return (await topic.subscribe(ref.name, start=start, **options)).spec

    async def _check_dead_letters(self, who: Principal, ref: SubscriptionRef, options: SubscriptionOptions) -> None:
        given = options.get("dead_letter_topic")
        await self._check_may_send(who, _dead_letters(ref) if given is None else TopicName.parse(given))

    async def _check_may_send(self, who: Principal, name: TopicName) -> None:
        """`Forbidden` unless a caller may have spent records written to a topic."""
        check_may(who, AccessScope.WRITE, name)
        try:
            await self._topic(name)
        except UnknownTopic:
            check_may(who, AccessScope.ADMIN, name)

    async def get(self, who: Principal, ref: SubscriptionRef) -> AsyncSubscription:
        """A subscription that exists; `UnknownSubscription` if there is none, `Conflict` if it is not the one meant."""
        topic = await self._readable(who, ref.topic)
        try:
            found = await topic.subscription(ref.name)
        except UnknownSubscription as error:
            if ref.id is None:
                raise
            raise self._deleted(ref) from error
        if ref.id is not None and found.spec.subscription_id != ref.id:
            raise self._deleted(ref)
        return found

    async def alter(self, who: Principal, ref: SubscriptionRef, changes: SubscriptionChanges) -> SubscriptionSpec:
        """Change how a subscription delivers; its definition on return.

        A call that says that spent records go to a topic needs the same rights as one that creates a subscription so.
        """
        topic, found = await self._readable(who, ref.topic), await self.get(who, ref)
        to = found.spec.altered(topic.spec, changes).dead_letter_topic
        if to is not None and changes.keys() & {"on_spent", "dead_letter_topic"}:
            await self._check_may_send(who, TopicName.parse(to))
            # This very one, also if the subscription is altered by another caller meanwhile.
            changes = {**changes, "dead_letter_topic": to}
        return await found.alter(**changes)

    async def delete(self, who: Principal, ref: SubscriptionRef) -> None:
        """Remove a subscription; `Conflict` while consumers are attached.

        One whose definition cannot be read is removed by its name alone, for a caller that does not say which it means.
        """
        if ref.id is None:
            await (await self._readable(who, ref.topic)).delete_subscription(ref.name)
        else:
            await (await self.get(who, ref)).delete()

    # Consumers

    async def attach(
        self, who: Principal, ref: SubscriptionRef, consumer: str, *, name: str, unacked_max: int, timeout_s: float
    ) -> ConsumerSession:
        """Attach a consumer; the same again if the caller has attached it already.

        Waits for those that are leaving: one whose session is over does not keep itself out of an exclusive
        subscription, nor another.
        """
        key = (ref.topic, ref.name, consumer)
        subscription = await self.get(who, ref)
        while await self._end_earlier(key, subscription.spec):
            # What was waited for took its time: another subscription may have the name by now.
            subscription = await self.get(who, ref)
        session = self._sessions.get(key)
        if session is None:
            attempt = self._attaching.get(key)
            if attempt is None:
                task = asyncio.create_task(
                    self._attach(who, subscription, key, name=name, unacked_max=unacked_max, timeout_s=timeout_s)
                )
                attempt = self._attaching[key] = _Attempt(subscription.spec.subscription_id, task)
                task.add_done_callback(partial(self._attached, key))
            session = await asyncio.shield(attempt.task)
        if session.principal != who.name:
            raise Conflict(f"another caller has attached consumer {consumer} to {ref.name}: choose another id")
        with session.used():
            return session

    async def session(self, who: Principal, ref: SubscriptionRef, consumer: str) -> ConsumerSession:
        """The consumer that this caller has attached; `UnknownConsumer` if it has not, or the session is over."""
        topic = await self._readable(who, ref.topic)
        key = (ref.topic, ref.name, consumer)
        session = self._sessions.get(key)
        if session is not None and session.spec.topic_id != topic.spec.topic_id:
            await self._end(key, session)
            session = None
        if session is None or session.principal != who.name:
            raise UnknownConsumer(
                f"no consumer {consumer!a:.80} is attached to the subscription {ref.name!a:.80} of {ref.topic}: its "
                "session is over, or this server has started since; attach it again",
                topic=str(ref.topic),
            )
        return session

    async def detach(self, who: Principal, ref: SubscriptionRef, consumer: str) -> None:
        """A consumer leaves. Harmless when repeated."""
        await self._readable(who, ref.topic)
        key = (ref.topic, ref.name, consumer)
        session = self._sessions.get(key)
        if session is not None and session.principal == who.name:
            await self._end(key, session)

    async def close(self) -> None:
        """End all sessions; what was acknowledged is stored on return. For the end of the server."""
        for attempt in list(self._attaching.values()):
            await asyncio.wait((attempt.task,))
        for key, session in list(self._sessions.items()):
            self._end_soon(key, session)
        if self._ending:
            await asyncio.wait(list(self._ending))

    async def _attach(
        self,
        who: Principal,
        subscription: AsyncSubscription,
        key: _Key,
        *,
        name: str,
        unacked_max: int,
        timeout_s: float,
    ) -> ConsumerSession:
        with ExitStack() as held:
            held.enter_context(self._quotas.consumer(who.name))
            consumer = subscription.consumer(name, unacked_max=unacked_max, who=who.name)
            await consumer.__aenter__()
            session = ConsumerSession(who, subscription.spec, consumer, timeout_s, held.pop_all())
        self._sessions[key] = session
        self._look(key, session)
        return session

    def _attached(self, key: _Key, attaching: asyncio.Task[ConsumerSession]) -> None:
        del self._attaching[key]
        if not attaching.cancelled():
            # An error that no caller waits for is not worth a complaint of the event loop.
            attaching.exception()

    def _look(self, key: _Key, session: ConsumerSession) -> None:
        """End the session if it is over; else look again when it may be."""
        if self._sessions.get(key) is not session:
            return
        left_s = session.left_s()
        if left_s:
            asyncio.get_running_loop().call_later(left_s, self._look, key, session)
            return
        topic, subscription, consumer = key
        logger.info(
            "%s: consumer %s of the subscription %s has sent nothing for %.3g s and counts as gone: what it held is "
            "due for others; it may attach again",
            topic,
            consumer,
            subscription,
            session.timeout_s,
        )
        self._end_soon(key, session)

    def _end_soon(self, key: _Key, session: ConsumerSession) -> None:
        """Have a consumer leave, in a task of its own."""
        if self._sessions.get(key) is session:
            del self._sessions[key]
        ending = asyncio.create_task(session.close())
        self._ending[ending] = key
        ending.add_done_callback(self._ended)

    def _ended(self, ending: asyncio.Task[None]) -> None:
        topic, subscription, consumer = self._ending.pop(ending)
        if not ending.cancelled() and (error := ending.exception()) is not None:
            logger.warning("%s: consumer %s of %s has left, not in order: %s", topic, consumer, subscription, error)

    async def _end(self, key: _Key, session: ConsumerSession) -> None:
        """Return when a consumer has left; it goes on to leave if the caller goes away meanwhile."""
        self._end_soon(key, session)
        await self._until_left(key)

    async def _until_left(self, key: _Key) -> bool:
        """Return when no consumer of this subscription is about to leave any more; whether it took time."""
        leaving = [task for task, other in self._ending.items() if other[:2] == key[:2]]
        if leaving:
            await asyncio.wait(leaving)
        return bool(leaving)

    async def _end_earlier(self, key: _Key, spec: SubscriptionSpec) -> bool:
        """Have what keeps a consumer from this very subscription end; whether it took time.

        That is consumers that are leaving, and the consumer of an earlier subscription of the name, attached or about
        to be: another process has deleted that one, which does not know the consumers of this process.
        """
        if await self._until_left(key):
            return True
        attempt, session = self._attaching.get(key), self._sessions.get(key)
        if attempt is not None and attempt.subscription_id != spec.subscription_id:
            await asyncio.wait((attempt.task,))
            return True
        if session is not None and session.spec.subscription_id != spec.subscription_id:
            await self._end(key, session)
            return True
        return False

    @staticmethod
    def _deleted(ref: SubscriptionRef) -> Conflict:
        return Conflict(
            f"the subscription {ref.name} of {ref.topic} was deleted: subscribe again", topic=str(ref.topic)
        )


def _dead_letters(ref: SubscriptionRef) -> TopicName:
    """Where spent records of a subscription go that names no topic for them."""
    return dead_letter_name(ref.topic.namespace, ref.topic.topic, ref.name)
