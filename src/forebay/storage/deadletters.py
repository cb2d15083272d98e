"""Dead letters of a log: spent records are sent to their topic, each once, and are listed, replayed and purged there.

`DeadLetterSender` sends for one subscription, in the threads of its consumers. `DeadLetters` is for operators. Both
append as idempotent producers of the part of the producer window that routers have, so that clients never displace
them.
"""

from __future__ import annotations

import hmac
import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from forebay.appends.producer_window import NONE_BEFORE, ReservedProducer
from forebay.appends.queue import record_bytes
from forebay.arguments import checked_partition
from forebay.decoders import decoder
from forebay.errors import Conflict, Corrupt, ForebayError, Full, Invalid, Moved, Unavailable, UnknownTopic
from forebay.pages import LOOP_BYTES_MAX, LOOP_RECORDS_MAX
from forebay.partitioning import partition_of_key
from forebay.progress import Progress, ReservedReader, SpentNote
from forebay.records import EARLIEST, DeadLetter, DeliveryState, LetterPage, LetterPlace, Record, check_offset
from forebay.subscriptions.deadletters import (
    HOPS_MAX,
    LastArrived,
    SendingFailure,
    SpentBook,
    SpentRecord,
    is_circling,
    is_sealed,
    letter_headers,
    parse_letter,
    sealed,
)
from forebay.subscriptions.definitions import SubscriptionStore
from forebay.subscriptions.dispatch import DueLetter, ServedPartition
from forebay.topics import TopicName

logger = logging.getLogger(__name__)

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
REPLAY_READER: Final = ReservedReader("forebay.replay")
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


class LetterSecrets:
    """By what the dead letters of a log are sealed, as this process knows it. Safe for threads; its calls may wait."""

    def __init__(self, store: SubscriptionStore) -> None:
        self._store = store
        self._secret: bytes | None = None
        """It never changes once it is there."""

    def made(self) -> bytes:
        """For one that sends or replays: drawn if there is none yet."""
        if self._secret is None:
            self._secret = self._store.make_letter_secret()
        return self._secret

    def known(self) -> bytes | None:
        """For one that only looks; `None` if no letter was ever sealed."""
        if self._secret is None:
            self._secret = self._store.letter_secret()
        return self._secret


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

    def __init__(self, driver: SubscriptionDriver, topics: LogTopics, destination: str, secrets: LetterSecrets) -> None:
        self._driver = driver
        self._topics = topics
        self._destination = destination
        self._secrets = secrets

    def create_topic(self) -> None:
        """Have the dead-letter topic there; made if it is missing."""
        ensure_topic(self._topics, self._destination)

    def book(self, progress: Progress | None) -> SpentBook:
        """What is known of the spent records of a partition whose cursor is stored so."""
        if progress is None or isinstance(progress.run, msgspec.UnsetType):
            return SpentBook(self._new_run(), self._destination, (), is_stored=False)
        notes: Sequence[SpentNote] = () if isinstance(progress.spent, msgspec.UnsetType) else progress.spent
        to = self._destination if isinstance(progress.letters_to, msgspec.UnsetType) else progress.letters_to
        return SpentBook(progress.run, to, notes, is_stored=True)

    def begin(self, served: ServedPartition) -> None:
        """Pass over what an earlier process has sent. If that is not known now, it is asked before the first send."""
        assert served.dead is not None
        if not served.dead.is_stored or not self._driver.dispatch.begin_asking(served):
            # A run that is not stored has sent nothing; what is on its way has not arrived.
            return
        failure: SendingFailure | None = None
        try:
            if self._end_other_run(served) is None:
                self._ask(served, self._topics.topic(self._destination))
        except ForebayError as error:
            failure = self._failure(error)
        finally:
            self._driver.dispatch.end_letters(served, failure)

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
        done = self._end_other_run(served) or 0
        if not dead.is_stored:
            # Before the first record is sent: after a crash the same run goes on, and knows what it has sent.
            self._driver.store_run(served.number, dead.run)
            dead.is_stored = True
        destination = self._topics.topic(self._destination)
        arrived = dead.arrived
        if arrived is None or arrived.topic_id != destination.spec.topic_id:
            arrived = self._ask(served, destination)
        left = [letter for letter in letters if letter.offset >= max(done, arrived.stop)]
        records = self._driver.records(served, [letter.offset for letter in left])
        for offset in [offset for offset, record in records.items() if is_circling(record)]:
            del records[offset]
            logger.warning(
                "%s[%d]: the record at offset %d was a dead letter %d times before, and is not sent to %s again: some "
                "program or router brings dead letters back; read it there, and end that way",
                self._driver.topic.name,
                served.number,
                offset,
                HOPS_MAX,
                self._destination,
            )
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
        spec, at, secret = self._driver.spec, self._driver.clock.now_ms(), self._secrets.made()
        producer = sender_of(spec.subscription_id, served.number, served.dead.run)
        last: int | None = None
        for letter in letters:
            record = records[letter.offset]
            place = place_of(record, destination.partitions)
            if last not in (None, place):
                # What has arrived in one partition vouches for all before it: those must not be lost in another.
                destination.flush()
            spent = SpentRecord(record, letter.attempts, letter.note.reason, letter.note.error)
            headers = letter_headers(spent, self._driver.topic.name, spec.name, at)
            destination.append(
                record.value,
                key=record.key,
                tag=record.tag,
                headers=sealed(headers, record, destination.spec.topic_id, secret),
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

    def _end_other_run(self, served: ServedPartition) -> int | None:
        """Where another dead-letter topic got letters before this one: pass over what it has, and begin a new run.

        Everything below the answer is done; `None` if the run is one for this topic. Without this, letters that had
        arrived when the dead-letter topic was altered, but were not known to, would be sent to both.
        """
        dead = served.dead
        assert dead is not None
        if dead.letters_to == self._destination:
            return None
        stop = 0
        if dead.is_stored:
            try:
                stop = self._ask(served, self._topics.topic(dead.letters_to)).stop
            except UnknownTopic as error:
                if error.topic != dead.letters_to:
                    raise
                # What it had is gone with it.
            except ForebayError as error:
                raise Unavailable(
                    f"what {dead.letters_to}, the dead-letter topic before, has got is not known, and would be sent "
                    f"twice: {error}; delete that topic if it is not needed"
                ) from error
        dead.begin_run(self._new_run(), self._destination)
        return stop

    def _new_run(self) -> str:
        return self._driver.clock.random_bytes(8).hex()

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
    seal: str = ""
    """Made with the secret of the log: a caller that may move cursors in the topic cannot have others replayed."""

    def sealed(self, topic_id: str, partition: int, secret: bytes) -> _ReplayNote:
        """The note with its seal, for a partition of the dead-letter topic with this id."""
        content = msgspec.msgpack.encode((topic_id, partition, msgspec.structs.replace(self, seal="")))
        return msgspec.structs.replace(self, seal=hmac.digest(secret, content, "sha256").hex())

    def is_sealed(self, topic_id: str, partition: int, secret: bytes) -> bool:
        """Whether a replay of this log has made the note."""
        return hmac.compare_digest(self.seal, self.sealed(topic_id, partition, secret).seal)


class DeadLetters:
    """The dead letters in a topic: of one subscription, or of all. Safe for concurrent use by threads.

    Made by `Subscription.dead_letters` and `Topic.dead_letters`.
    """

    def __init__(
        self,
        topic: Topic,
        topics: LogTopics,
        alone: AloneAt,
        secrets: LetterSecrets,
        *,
        bytes_max: int,
        origin: tuple[str, str] | None = None,
    ) -> None:
        """`alone` is entered by a call that removes letters; `origin` is the topic and subscription whose they are."""
        self._topic = topic
        self._topics = topics
        self._alone = alone
        self._secrets = secrets
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
        until none comes. Records that only have the headers of a dead letter are among them, and are not `is_vouched`:
        another writer of the topic may have made them, or a version that sealed none.
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

    def replay(
        self,
        places: Iterable[LetterPlace] | None = None,
        *,
        to: str | TopicName | None = None,
        origins: Iterable[str | TopicName] = (),
    ) -> int:
        """Append dead letters to the topic they come from, or to another one, and remove them here; how many.

        All that are here now, or those at `places`; what is not here any more is passed over. A record goes back as it
        was, into its own partition; elsewhere its key chooses the partition. Each is appended exactly once, also if
        this is killed half-way and run again: a replay first finishes the one before it. If the target refuses them
        (`Full`, `Invalid`), those that it has are removed, the others stay, and may be replayed elsewhere.

        A record that is not `is_vouched` is replayed only if `origins` names the topic it says it comes from: any
        writer of this topic may have made it. Else it is passed over; `Invalid` if it is one of `places`.
        """
        allowed = _names(origins)
        target = None if to is None else TopicName.parse(to)
        if target is not None and str(target) == self.topic:
            raise Invalid(f"{self.topic} would be replayed into itself: name another topic, or none for their origin")
        chosen = _by_partition(places)
        with self._alone:
            self._topic.acquire()
            ends = {number: self._topic.offsets(number).next for number in range(self._topic.partitions)}
            replayed = 0
            passed_over: Counter[str] = Counter()
            if chosen is not None:
                self._check_vouched(ends, chosen, allowed)
            for number, end in ends.items():
                replayed += self._finish(number, allowed)
                letters = _trusted(self._chosen(number, end, chosen), allowed, passed_over)
                for batch in self._batches(letters, target):
                    replayed += self._replay(number, batch, target, replayed)
            self._topic.reader(REPLAY_READER).forget()
            for origin, count in passed_over.items():
                logger.warning("%d records of %s stay: %s", count, self.topic, _not_vouched(origin))
            return replayed

    def _check_vouched(
        self, ends: Mapping[int, int], chosen: Mapping[int, Sequence[int]], allowed: Collection[str]
    ) -> None:
        """`Invalid` if one of the letters that a caller has chosen may not be replayed."""
        for number, end in ends.items():
            for letter in self._chosen(number, end, chosen):
                if not letter.is_vouched and letter.topic not in allowed:
                    raise Invalid(
                        f"{self.topic}[{number}] at offset {letter.place.offset}: {_not_vouched(letter.topic)}"
                    )

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
        letter = self._parsed(record)
        is_ours = letter is not None and self._origin in (None, (letter.topic, letter.subscription))
        return letter if is_ours else None

    def _parsed(self, record: Record) -> DeadLetter | None:
        is_vouched = is_sealed(record, self._topic.spec.topic_id, self._secrets.known())
        return parse_letter(record, is_vouched=is_vouched)

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
        ).sealed(self._topic.spec.topic_id, partition, self._secrets.made())
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

    def _finish(self, partition: int, allowed: Collection[str]) -> int:
        """Finish what a replay was doing that was killed; how many dead letters that were.

        What its target refuses is not done: the target may be full for good, and these may be for another one now. A
        note without a seal, as earlier versions made it, is gone by only where `allowed` names each origin.
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
        found = [letter for record in stored if record is not None and (letter := self._parsed(record)) is not None]
        self._check_note(partition, note, found, allowed)
        try:
            return self._go_on(partition, note, target, found)
        except (Full, Invalid):
            return self._take_back(partition, note, found)
        except Unavailable as error:
            raise error.restated(
                f"an earlier replay of {self.topic}[{partition}] into {note.target} is not finished, and what has "
                f"arrived there cannot be asked now: {error}"
            ) from error

    def _check_note(
        self, partition: int, note: _ReplayNote, letters: Sequence[DeadLetter], allowed: Collection[str]
    ) -> None:
        """`Invalid` for a note that no replay of this log has made, unless its letters may go where they come from."""
        if note.is_sealed(self._topic.spec.topic_id, partition, self._secrets.made()):
            return
        unnamed = sorted({letter.topic for letter in letters} - set(allowed))
        if unnamed:
            raise Invalid(
                f"a replay of {self.topic}[{partition}] into {note.target} is noted as unfinished, and nothing says "
                "that this log has begun it: if an earlier version has, finish it by naming the origins (origins=, "
                f'--origin): {", ".join(unnamed)}; else run "forebay group delete {REPLAY_READER}"'
            )

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


def _names(topics: Iterable[str | TopicName]) -> frozenset[str]:
    """The topics that a caller names."""
    return frozenset(str(TopicName.parse(name)) for name in topics)


def _trusted(
    letters: Iterator[DeadLetter], allowed: Collection[str], passed_over: Counter[str]
) -> Iterator[DeadLetter]:
    """The letters that may be replayed; the others are counted by the topic they say they come from."""
    for letter in letters:
        if letter.is_vouched or letter.topic in allowed:
            yield letter
        else:
            passed_over[letter.topic] += 1


def _not_vouched(origin: str) -> str:
    return (
        f"it says that it is a dead letter of {origin}, and nothing vouches for that; look at it, then name the origin "
        f"to have it replayed (origins=, --origin {origin}), or delete it"
    )


def ensure_topic(topics: LogTopics, name: str) -> None:
    """Create a topic if it is missing."""
    try:
        topics.topic(name)
    except UnknownTopic:
        topics.create_topic(name, exist_ok=True)


def place_of(record: Record, partitions: int) -> int:
    """The partition for a record that comes from another topic: by its key, else by the partition it comes from."""
    return record.partition % partitions if record.key is None else partition_of_key(record.key, partitions)


def sender_of(subscription_id: str, partition: int, run: str) -> ReservedProducer:
    """The idempotent producer that one run of a subscription in a partition is in its dead-letter topic."""
    return ReservedProducer.of_worker(f"dead letters/{subscription_id}/{partition}/{run}")


def replayer_of(topic_id: str, partition: int, target_id: str) -> ReservedProducer:
    """The idempotent producer that the replay of a partition of a dead-letter topic is in another topic."""
    return ReservedProducer.of_worker(f"replay/{topic_id}/{partition}/{target_id}")


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
