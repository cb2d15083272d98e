"""Dead letters of a log: spent records are sent to their topic, each once, and are listed, replayed and purged there.

`DeadLetterSender` sends for one subscription, in the threads of its consumers. `DeadLetters` is for operators. Both
append as idempotent producers of the part of the producer window that routers have, so that clients never displace
them.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from forebay.appends.producer_window import NONE_BEFORE, ROUTER_IDS
from forebay.appends.queue import record_bytes
from forebay.arguments import checked_partition
from forebay.decoders import decoder
from forebay.errors import Conflict, Corrupt, ForebayError, Full, Invalid, Moved, Unavailable, UnknownTopic
from forebay.pages import LOOP_BYTES_MAX, LOOP_RECORDS_MAX
from forebay.partitioning import partition_of_key
from forebay.progress import Progress, SpentNote
from forebay.records import EARLIEST, DeadLetter, DeliveryState, LetterPage, LetterPlace, Record, check_offset
from forebay.subscriptions.deadletters import (
    LastArrived,
    SendingFailure,
    SpentBook,
    SpentRecord,
    letter_headers,
    parse_letter,
)
from forebay.subscriptions.dispatch import DueLetter, ServedPartition
from forebay.topics import TopicName

if TYPE_CHECKING:
    from forebay.storage.subscriptions import SubscriptionDriver
    from forebay.storage.topic import Topic

LETTERS_MAX: Final = 100
"""Spent records that are sent before they count as done."""
REPLAY_MAX: Final = 64
"""Dead letters that are replayed at once: their offsets fit into the note beside a cursor."""
PURGE_MAX: Final = 10_000
"""Dead letters that are purged at once: their offsets alone are kept."""
LISTED_BYTES_MAX: Final = 4 * 1024 * 1024
"""About what a list of dead letters holds; one letter at least."""
REPLAY_READER: Final = "forebay.replay"
"""The reader whose cursors in a dead-letter topic say what a replay was doing when it ended."""


class AloneAt:
    """Entered by one call at a time for each topic; another one is a `Conflict` at once. Safe for threads."""

    def __init__(self, busy: set[str], lock: threading.Lock, topic: str) -> None:
        self._busy = busy
        self._lock = lock
        self._topic = topic

    def __enter__(self) -> None:
        with self._lock:
            if self._topic in self._busy:
                raise Conflict(
                    f"dead letters of {self._topic} are being replayed or purged: try again when that is over",
                    topic=self._topic,
                )
            self._busy.add(self._topic)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._busy.discard(self._topic)


class LogTopics(Protocol):
    """The topics of a log, found and created by name."""

    def topic(self, name: str | TopicName) -> Topic:
        """A topic that exists; else `UnknownTopic`."""

    def create_topic(self, name: str | TopicName, *, exist_ok: bool = False) -> Topic:
        """Create a topic, as the log does it without further options."""


class DeadLetterSender:
    """Sends the spent records of one subscription to its dead-letter topic: in order, each once.

    For any thread, also for several at once. The dead-letter topic remembers what has arrived: each partition of the
    source is an idempotent producer there, whose sequence is the offset in the source. A record is sent once everything
    before it is done, or has been sent; so what the topic has says how far an earlier process had come.
    """

    def __init__(self, driver: SubscriptionDriver, topics: LogTopics, destination: str) -> None:
        self._driver = driver
        self._topics = topics
        self._destination = destination

    def create_topic(self) -> None:
        """Have the dead-letter topic there; made if it is missing."""
        ensure_topic(self._topics, self._destination)

    def book(self, progress: Progress | None) -> SpentBook:
        """What is known of the spent records of a partition whose cursor is stored so."""
        if progress is None or isinstance(progress.run, msgspec.UnsetType):
            return SpentBook(self._driver.clock.random_bytes(8).hex(), (), is_stored=False)
        notes: Sequence[SpentNote] = () if isinstance(progress.spent, msgspec.UnsetType) else progress.spent
        return SpentBook(progress.run, notes, is_stored=True)

    def begin(self, served: ServedPartition) -> None:
        """Pass over what an earlier process has sent. If that is not known now, it is asked before the first send."""
        assert served.dead is not None
        if not served.dead.is_stored:
            # A run that is not stored has sent nothing.
            return
        try:
            self._ask(served, self._topics.topic(self._destination))
        except ForebayError as error:
            self._driver.dispatch.end_letters(served, self._failure(error))

    def send(self) -> None:
        """Send what is to be sent now. What fails is kept as the failure of the partition, and tried again later."""
        dispatch = self._driver.dispatch
        while (due := dispatch.take_letters(LETTERS_MAX)) is not None:
            served, letters = due
            assert served.dead is not None
            failure: SendingFailure | None = None
            try:
                self._send(served, letters)
            except ForebayError as error:
                served.dead.arrived = None
                failure = self._failure(error)
            except BaseException:
                served.dead.arrived = None
                raise
            finally:
                dispatch.end_letters(served, failure)
            self._driver.note([served.number])

    def _send(self, served: ServedPartition, letters: Sequence[DueLetter]) -> None:
        dead, dispatch = served.dead, self._driver.dispatch
        assert dead is not None
        if not dead.is_stored:
            # Before the first record is sent: after a crash the same run goes on, and knows what it has sent.
            self._driver.store_run(served.number, dead.run)
            dead.is_stored = True
        destination = self._topics.topic(self._destination)
        arrived = dead.arrived
        if arrived is None or arrived.topic_id != destination.spec.topic_id:
            arrived = self._ask(served, destination)
        left = [letter for letter in letters if letter.offset >= arrived.stop]
        records = self._driver.records(served.number, [letter.offset for letter in left])
        self._append(destination, arrived, served, [letter for letter in left if letter.offset in records], records)
        # Commit point: the records are durable in the dead-letter topic, and count as done from here on.
        dispatch.letters_arrived(served, [letter.offset for letter in left], len(records))
        self._driver.note_dead_letters(len(records))

    def _append(
        self,
        destination: Topic,
        arrived: LastArrived,
        served: ServedPartition,
        letters: Sequence[DueLetter],
        records: Mapping[int, Record],
    ) -> None:
        """Append dead letters one after the other; on return they are synced, whatever the durability class."""
        assert served.dead is not None
        spec, at = self._driver.spec, self._driver.clock.now_ms()
        producer = sender_of(spec.subscription_id, served.number, served.dead.run)
        last: int | None = None
        for letter in letters:
            record = records[letter.offset]
            place = place_of(record, destination.partitions)
            if last not in (None, place):
                # What has arrived in one partition vouches for all before it: those must not be lost in another.
                destination.flush()
            spent = SpentRecord(record, letter.attempts, letter.note.reason, letter.note.error)
            destination.append(
                record.value,
                key=record.key,
                tag=record.tag,
                headers=letter_headers(spent, self._driver.topic.name, spec.name, at),
                timestamp=record.timestamp,
                partition=place,
                producer=producer,
                sequence=letter.offset,
                previous=arrived.offsets.get(place, NONE_BEFORE),
            )
            arrived.offsets[place] = letter.offset
            last = place
        if last is not None:
            destination.flush()

    def _ask(self, served: ServedPartition, destination: Topic) -> LastArrived:
        """What the dead-letter topic has of a partition; everything before it is done."""
        assert served.dead is not None
        destination.acquire()
        producer = sender_of(self._driver.spec.subscription_id, served.number, served.dead.run)
        lasts = {place: destination.last_sequence(producer, place) for place in range(destination.partitions)}
        offsets = {place: last for place, last in lasts.items() if last is not None}
        served.dead.arrived = arrived = LastArrived(destination.spec.topic_id, offsets)
        self._driver.dispatch.skip_to(served, arrived.stop)
        return arrived

    def _failure(self, error: ForebayError) -> SendingFailure:
        if isinstance(error, UnknownTopic) and error.topic == self._destination:
            message = f'the dead-letter topic is gone; create it: "forebay topic create {self._destination}"'
            return SendingFailure(DeliveryState.DEAD_LETTERS_DELETED, message)
        if isinstance(error, Full):
            return SendingFailure(DeliveryState.DEAD_LETTERS_FULL, str(error))
        if isinstance(error, Moved):
            return SendingFailure(DeliveryState.DEAD_LETTERS_ELSEWHERE, str(error))
        return SendingFailure(DeliveryState.DEAD_LETTERS_FAILING, str(error))


class _ReplayNote(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letters of one partition that are being replayed."""

    target: str
    target_id: str
    partitions: int
    """How many partitions the target had: a record that is replayed again finds the same one."""
    sequence: int
    """The sequence of the appends, one to each partition of the target that gets some."""
    offsets: tuple[int, ...]


class DeadLetters:
    """The dead letters in a topic: of one subscription, or of all. Safe for concurrent use by threads.

    Made by `Subscription.dead_letters` and `Topic.dead_letters`.
    """

    def __init__(
        self,
        topic: Topic,
        topics: LogTopics,
        alone: AloneAt,
        *,
        bytes_max: int,
        origin: tuple[str, str] | None = None,
    ) -> None:
        """`alone` is entered by a call that removes letters; `origin` is the topic and subscription whose they are."""
        self._topic = topic
        self._topics = topics
        self._alone = alone
        self._bytes_max = bytes_max
        self._origin = origin

    @property
    def topic(self) -> str:
        """The topic that they lie in."""
        return self._topic.name

    def letters(
        self, records_max: int = 100, *, after: LetterPlace | None = None, bytes_max: int | None = None
    ) -> list[DeadLetter]:
        """Up to `records_max` dead letters, by partition and offset; with `after`, those behind that place.

        No more than about 4 MiB of them, or `bytes_max` bytes, and one at least: to see all, go on behind the last one
        until none comes.
        """
        return self.page(records_max, after=after, bytes_max=bytes_max).letters

    def page(
        self, records_max: int = 100, *, after: LetterPlace | None = None, bytes_max: int | None = None
    ) -> LetterPage:
        """As `letters`; says as well whether there are more behind them."""
        if not isinstance(records_max, int) or isinstance(records_max, bool) or records_max < 1:
            raise Invalid(f"records_max is {records_max!r:.80}; allowed: from 1 on")
        found: list[DeadLetter] = []
        size, most = 0, LISTED_BYTES_MAX if bytes_max is None else min(bytes_max, LISTED_BYTES_MAX)
        first = LetterPlace(0, 0) if after is None else LetterPlace(after.partition, after.offset + 1)
        for number in range(first.partition, self._topic.partitions):
            for letter in self._each(number, first.offset if number == first.partition else 0):
                size += _size(letter)
                if found and (len(found) == records_max or size > most):
                    return LetterPage(found, has_more=True)
                found.append(letter)
        return LetterPage(found, has_more=False)

    def get(self, offset: int, partition: int = 0) -> DeadLetter:
        """The dead letter at a place; `Invalid` if there is none."""
        check_offset(offset)
        found = self._at(LetterPlace(checked_partition(partition), offset))
        if found is None:
            raise Invalid(
                f"{self.topic}[{partition}] has no dead letter at offset {offset}: it was replayed or purged, or is of "
                "another subscription"
            )
        return found

    def replay(self, places: Iterable[LetterPlace] | None = None, *, to: str | TopicName | None = None) -> int:
        """Append dead letters to the topic they come from, or to another one, and remove them here; how many.

        All that are here now, or those at `places`; what is not here any more is passed over. A record goes back as it
        was, into its own partition; elsewhere its key chooses the partition. Each is appended exactly once, also if
        this is killed half-way and run again: a replay first finishes the one before it. If the target refuses them
        (`Full`, `Invalid`), those that it has are removed, the others stay, and may be replayed elsewhere.
        """
        target = None if to is None else TopicName.parse(to)
        if target is not None and str(target) == self.topic:
            raise Invalid(f"{self.topic} would be replayed into itself: name another topic, or none for their origin")
        chosen = _by_partition(places)
        with self._alone:
            self._topic.acquire()
            ends = {number: self._topic.offsets(number).next for number in range(self._topic.partitions)}
            replayed = 0
            for number, end in ends.items():
                replayed += self._finish(number)
                for batch in self._batches(self._chosen(number, end, chosen), target):
                    replayed += self._replay(number, batch, target, replayed)
            self._topic.reader(REPLAY_READER).forget()
            return replayed

    def purge(self, places: Iterable[LetterPlace] | None = None) -> int:
        """Delete the dead letters that are here now, or those at `places`; how many."""
        chosen = _by_partition(places)
        with self._alone:
            self._topic.acquire()
            ends = {number: self._topic.offsets(number).next for number in range(self._topic.partitions)}
            return sum(self._purge(number, self._chosen(number, end, chosen)) for number, end in ends.items())

    def _purge(self, partition: int, letters: Iterator[DeadLetter]) -> int:
        """Delete dead letters of a partition, some after the other: there may be more of them than fit into memory."""
        deleted = 0
        while offsets := [letter.place.offset for letter in islice(letters, PURGE_MAX)]:
            deleted += self._delete(partition, offsets)
        return deleted

    # Finding

    def _each(self, partition: int, offset: int, end: int | None = None) -> Iterator[DeadLetter]:
        while end is None or offset < end:
            page = self._topic.page(partition, offset, records_max=LOOP_RECORDS_MAX, bytes_max=LOOP_BYTES_MAX)
            for record in page.records:
                letter = self._letter(record)
                if letter is not None and (end is None or record.offset < end):
                    yield letter
            if page.next <= offset:
                return
            offset = page.next

    def _chosen(self, partition: int, end: int, chosen: Mapping[int, Sequence[int]] | None) -> Iterator[DeadLetter]:
        """The dead letters of a partition that a call is about."""
        if chosen is None:
            yield from self._each(partition, 0, end)
            return
        for offset in chosen.get(partition, ()):
            letter = self._at(LetterPlace(partition, offset))
            if letter is not None:
                yield letter

    def _at(self, place: LetterPlace) -> DeadLetter | None:
        record = self._record_at(place)
        return None if record is None else self._letter(record)

    def _record_at(self, place: LetterPlace) -> Record | None:
        partition, offset = place
        if not 0 <= partition < self._topic.partitions or offset >= self._topic.offsets(partition).next:
            return None
        page = self._topic.page(partition, offset, records_max=1, bytes_max=1)
        return next((record for record in page.records if record.offset == offset), None)

    def _letter(self, record: Record) -> DeadLetter | None:
        letter = parse_letter(record)
        is_ours = letter is not None and self._origin in (None, (letter.topic, letter.subscription))
        return letter if is_ours else None

    # Replaying

    def _batches(self, letters: Iterator[DeadLetter], target: TopicName | None) -> Iterator[list[DeadLetter]]:
        """Dead letters that go to one topic, as many as an append can bring."""
        batch: list[DeadLetter] = []
        size = 0
        for letter in letters:
            length = _size(letter)
            is_full = len(batch) == REPLAY_MAX or size + length > self._bytes_max
            if batch and (is_full or (target is None and letter.topic != batch[0].topic)):
                yield batch
                batch, size = [], 0
            batch.append(letter)
            size += length
        if batch:
            yield batch

    def _replay(self, partition: int, batch: Sequence[DeadLetter], to: TopicName | None, before: int) -> int:
        """Note what is replayed, then do it; how many. `before` were replayed by this call already."""
        target = self._topics.topic(batch[0].topic if to is None else to)
        if target.name == self.topic:
            raise Invalid(f"dead letters in {self.topic} come from it: name a topic to replay them into")
        producer = replayer_of(self._topic.spec.topic_id, partition, target.spec.topic_id)
        try:
            target.acquire()
        except Moved as error:
            raise error.restated(
                f"dead letters of {self.topic}[{partition}] stay ({before} were replayed): their target has another "
                f"owner: {error}; or replay them into a topic that this process owns (to=, --to), or have one process "
                'own both topics ("forebay topic move")'
            ) from error
        lasts = [target.last_sequence(producer, place) for place in range(target.partitions)]
        note = _ReplayNote(
            target=target.name,
            target_id=target.spec.topic_id,
            partitions=target.partitions,
            sequence=max((last for last in lasts if last is not None), default=-1) + 1,
            offsets=tuple(letter.place.offset for letter in batch),
        )
        # From here on a replay that is run again finds out which of these have arrived.
        self._topic.reader(REPLAY_READER).reset(EARLIEST, partition, msgspec.json.encode(note).decode())
        try:
            return self._go_on(partition, note, target, batch)
        except (Full, Invalid) as error:
            arrived = self._take_back(partition, note, batch)
            raise error.restated(
                f"{target.name} refuses dead letters of {self.topic}[{partition}] between offsets {note.offsets[0]} "
                f"and {note.offsets[-1]}, which stay ({before + arrived} were replayed): {error}; replay them again "
                "when that is mended, or into another topic"
            ) from error

    def _finish(self, partition: int) -> int:
        """Finish what a replay was doing that was killed; how many dead letters that were.

        What its target refuses is not done: the target may be full for good, and these may be for another one now.
        """
        text = self._topic.reader(REPLAY_READER).note(partition)
        if not text:
            return 0
        try:
            note = decoder(_ReplayNote).decode(text)
        except msgspec.MsgspecError as error:
            raise Corrupt(
                f"what a replay of {self.topic}[{partition}] was doing cannot be read ({text!a:.80}): see what "
                f'arrived, then run "forebay group delete {REPLAY_READER}"'
            ) from error
        try:
            target = self._topics.topic(note.target)
        except UnknownTopic:
            return 0
        if target.spec.topic_id != note.target_id:
            # What had arrived went with the topic. The dead letters are here, and are replayed as if they never were.
            return 0
        # Of whichever subscription: the one before may have been about others.
        stored = [self._record_at(LetterPlace(partition, offset)) for offset in note.offsets]
        found = [letter for record in stored if record is not None and (letter := parse_letter(record)) is not None]
        try:
            return self._go_on(partition, note, target, found)
        except (Full, Invalid):
            return self._take_back(partition, note, found)
        except Unavailable as error:
            raise error.restated(
                f"an earlier replay of {self.topic}[{partition}] into {note.target} is not finished, and what has "
                f"arrived there cannot be asked now: {error}"
            ) from error

    def _take_back(self, partition: int, note: _ReplayNote, letters: Sequence[DeadLetter]) -> int:
        """The target refuses dead letters: remove those that it has, and note of the others that they stay; how many.

        Only after a refusal, which says that nothing of the append was done, nor will be.
        """
        arrived: list[DeadLetter] = []
        try:
            target = self._topics.topic(note.target)
            if target.spec.topic_id == note.target_id:
                arrived = [
                    letter
                    for place, part in _parts(note, letters).items()
                    if self._has(target, partition, note, place)
                    for letter in part
                ]
                target.flush()
        except UnknownTopic:
            # What had arrived went with the topic.
            arrived = []
        deleted = self._delete(partition, sorted(letter.place.offset for letter in arrived))
        self._topic.reader(REPLAY_READER).reset(EARLIEST, partition)
        return deleted

    def _has(self, target: Topic, partition: int, note: _ReplayNote, place: int) -> bool:
        """Whether a partition of the target has what the replay was to append there."""
        last = target.last_sequence(replayer_of(self._topic.spec.topic_id, partition, note.target_id), place)
        return last is not None and last >= note.sequence

    def _go_on(self, partition: int, note: _ReplayNote, target: Topic, letters: Sequence[DeadLetter]) -> int:
        """Append those dead letters that have not arrived, and delete all of them; how many."""
        producer = replayer_of(self._topic.spec.topic_id, partition, note.target_id)
        target.acquire()
        for place, part in _parts(note, letters).items():
            if self._has(target, partition, note, place):
                continue
            last, records = target.last_sequence(producer, place), [letter.record for letter in part]
            target.append_many(
                [record.value for record in records],
                keys=[record.key for record in records],
                tags=[record.tag for record in records],
                headers=[record.headers for record in records],
                timestamps=[record.timestamp for record in records],
                partition=place,
                producer=producer,
                sequence=note.sequence,
                previous=NONE_BEFORE if last is None else last,
            )
        target.flush()
        # Commit point: all of them are durable in the target.
        return self._delete(partition, [letter.place.offset for letter in letters])

    def _delete(self, partition: int, offsets: Sequence[int]) -> int:
        """Remove dead letters, durably on return; how many there were."""
        if not offsets:
            return 0
        deleted = sum(self._topic.delete_by_offset(start, stop, partition) for start, stop in _ranges(offsets))
        self._topic.flush()
        return deleted


def ensure_topic(topics: LogTopics, name: str) -> None:
    """Create a topic if it is missing."""
    try:
        topics.topic(name)
    except UnknownTopic:
        topics.create_topic(name, exist_ok=True)


def place_of(record: Record, partitions: int) -> int:
    """The partition for a record that comes from another topic: by its key, else by the partition it comes from."""
    return record.partition % partitions if record.key is None else partition_of_key(record.key, partitions)


def sender_of(subscription_id: str, partition: int, run: str) -> int:
    """The idempotent producer that one run of a subscription in a partition is in its dead-letter topic."""
    return _producer(f"dead letters/{subscription_id}/{partition}/{run}")


def replayer_of(topic_id: str, partition: int, target_id: str) -> int:
    """The idempotent producer that the replay of a partition of a dead-letter topic is in another topic."""
    return _producer(f"replay/{topic_id}/{partition}/{target_id}")


def _producer(text: str) -> int:
    drawn = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return ROUTER_IDS + drawn % (2**64 - ROUTER_IDS)


def _parts(note: _ReplayNote, letters: Sequence[DeadLetter]) -> dict[int, list[DeadLetter]]:
    """The partitions of the target that a replay goes to: home where they come from, else by the key."""
    parts: dict[int, list[DeadLetter]] = {}
    for letter in letters:
        is_home = letter.topic == note.target and letter.record.partition < note.partitions
        place = letter.record.partition if is_home else place_of(letter.record, note.partitions)
        parts.setdefault(place, []).append(letter)
    return parts


def _size(letter: DeadLetter) -> int:
    record = letter.record
    return record_bytes(record.value, record.key, record.tag, record.headers)


def _by_partition(places: Iterable[LetterPlace] | None) -> dict[int, list[int]] | None:
    """The places that a caller has chosen, checked, in order and once each; `None` for all."""
    if places is None:
        return None
    chosen: dict[int, set[int]] = {}
    for partition, offset in places:
        check_offset(offset)
        chosen.setdefault(checked_partition(partition), set()).add(offset)
    return {partition: sorted(offsets) for partition, offsets in chosen.items()}


def _ranges(offsets: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Offsets in order, as ranges."""
    start = previous = offsets[0]
    for offset in offsets[1:]:
        if offset != previous + 1:
            yield start, previous + 1
            start = offset
        previous = offset
    yield start, previous + 1
