"""Dead letters: what is known of spent records, and how one is written into its dead-letter topic and read again.

Pure: nothing is appended or read here. A dead letter is the record as it was, with headers behind its own that say
where it comes from and why it is there. The last header is a seal over all of it, made with a secret that only the
processes of the log know: any caller can write the other headers, and none can write this one.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from forebay.progress import SpentNote
from forebay.records import OFFSET_MAX, DeadLetter, DeliveryState, Headers, LetterPlace, Record, SpentReason

ORIGIN_TOPIC: Final = "forebay-origin-topic"
"""The first of the headers of a dead letter: those of the record itself are before it."""
ORIGIN_PARTITION: Final = "forebay-origin-partition"
ORIGIN_OFFSET: Final = "forebay-origin-offset"
SUBSCRIPTION: Final = "forebay-subscription"
ATTEMPTS: Final = "forebay-attempts"
REASON: Final = "forebay-reason"
DEAD_AT: Final = "forebay-dead-at"
ERROR: Final = "forebay-error"
SEAL: Final = "forebay-seal"
"""The last header of a dead letter."""
ERROR_CHARACTERS_MAX: Final = 500
"""What is kept of what a consumer says about a record."""


HOPS_MAX: Final = 16
"""A record that was a dead letter so often goes in a circle: it is sent no more."""

ERRORS_KEPT_MAX: Final = 1_000
"""Of so many records of a partition it is known what consumers said last about them."""


class SendingFailure(NamedTuple):
    """What keeps spent records from their dead-letter topic."""

    state: DeliveryState
    message: str


class LastArrived(NamedTuple):
    """What a dead-letter topic has of a run."""

    topic_id: str
    offsets: dict[int, int]
    """By its partitions, the last offset of the source that it has got; the sender adds to it."""

    @property
    def stop(self) -> int:
        """Everything of the source below this offset is done, or has arrived."""
        return max(self.offsets.values(), default=-1) + 1


class SpentBook:
    """What is known of the spent records of one partition that wait for their dead-letter topic.

    `run` names this stay at the partition: it is another one after a seek, and for another dead-letter topic. For one
    thread at a time.
    """

    def __init__(self, run: str, letters_to: str, notes: Iterable[SpentNote], *, is_stored: bool) -> None:
        self.run = run
        self.letters_to = letters_to
        """The topic that has what was sent in this run."""
        self.is_stored = is_stored
        """Whether the cursor record names the run. Until it does, nothing may be sent."""
        self.arrived: LastArrived | None = None
        """What the dead-letter topic has of this run; `None` until it was asked, and after each failure."""
        self.failure: SendingFailure | None = None
        self.retry_at_ms = 0
        self.sent = 0
        """How many records were sent since the partition is served."""
        self._sending: frozenset[int] = frozenset()
        self._notes: dict[int, SpentNote] = {}
        self._stored = {note.offset: note for note in notes}
        """What an earlier process knew of records that were not offered yet."""
        self._errors: dict[int, str] = {}

    def begin_run(self, run: str, letters_to: str) -> None:
        """Send to another topic from now on. All that the one before has got is known to be done."""
        self.run, self.letters_to, self.is_stored, self.arrived = run, letters_to, False, None

    def said(self, offsets: Sequence[int], error: str | None) -> None:
        """A consumer refused these records, and says why."""
        if error is None:
            return
        for offset in offsets:
            self._errors.pop(offset, None)
            self._errors[offset] = error
        while len(self._errors) > ERRORS_KEPT_MAX:
            del self._errors[next(iter(self._errors))]

    def found(self, spent: Sequence[int], reason: SpentReason) -> None:
        """These records are spent, and no others; those that were not so before are for this reason."""
        known = self._stored | self._notes
        self._notes = {at: known.get(at) or SpentNote(at, reason, self._errors.get(at)) for at in spent}
        self._stored = {at: note for at, note in self._stored.items() if at not in self._notes}

    def done(self, offsets: Sequence[int]) -> None:
        """These records are done."""
        for offset in offsets if self._errors or self._notes else ():
            self._errors.pop(offset, None)
            self._notes.pop(offset, None)

    @property
    def count(self) -> int:
        """Of how many records it is known that they are spent."""
        return len(self._notes)

    @property
    def notes(self) -> list[SpentNote]:
        """Why each record is spent, by offset."""
        return [note for _, note in sorted((self._stored | self._notes).items())]

    def note(self, offset: int) -> SpentNote:
        """Why a record is spent."""
        return self._notes.get(offset) or SpentNote(offset, SpentReason.PROCESS_ENDED)

    @property
    def sending(self) -> frozenset[int]:
        """The records that are on their way: each counts as done only once it has arrived."""
        return self._sending

    def begin(self, offsets: Sequence[int]) -> None:
        """Send these from now on. None is on its way: those behind are sent once they have arrived."""
        assert not self._sending
        self._sending = frozenset(offsets)

    def end(self) -> None:
        """Nothing is on its way any more."""
        self._sending = frozenset()


class SpentRecord(NamedTuple):
    """A record that goes to the dead-letter topic."""

    record: Record
    attempts: int
    reason: SpentReason
    error: str | None


def letter_headers(spent: SpentRecord, topic: str, subscription: str, at: int) -> Headers:
    """The headers of a dead letter: those of the record, and behind them what is known of it."""
    own: list[tuple[str, bytes | None]] = [
        (ORIGIN_TOPIC, topic.encode()),
        (ORIGIN_PARTITION, b"%d" % spent.record.partition),
        (ORIGIN_OFFSET, b"%d" % spent.record.offset),
        (SUBSCRIPTION, subscription.encode()),
        (ATTEMPTS, b"%d" % spent.attempts),
        (REASON, spent.reason.encode()),
        (DEAD_AT, b"%d" % at),
    ]
    if spent.error is not None:
        own.append((ERROR, spent.error.encode(errors="replace")))
    return (*spent.record.headers, *own)


def sealed(headers: Headers, record: Record, topic_id: str, secret: bytes) -> Headers:
    """The headers of a dead letter with the seal behind them, for the dead-letter topic with this id."""
    return (*headers, (SEAL, _seal(headers, record, topic_id, secret)))


def is_sealed(stored: Record, topic_id: str, secret: bytes | None) -> bool:
    """Whether a record of the dead-letter topic with this id is just as a subscription has sent it there."""
    if secret is None or not stored.headers or stored.headers[-1][0] != SEAL:
        return False
    *headers, (_, said) = stored.headers
    return hmac.compare_digest(said or b"", _seal(tuple(headers), stored, topic_id, secret))


def _seal(headers: Headers, record: Record, topic_id: str, secret: bytes) -> bytes:
    """Over all that a dead letter is but its place, which it has only once it is appended."""
    content = msgspec.msgpack.encode((topic_id, record.timestamp, record.key, record.value, record.tag, headers))
    return hmac.digest(secret, content, "sha256").hex().encode()


def is_circling(record: Record) -> bool:
    """Whether a record was a dead letter as often as it may be: each time has left its headers."""
    return sum(name == ORIGIN_TOPIC for name, _ in record.headers) >= HOPS_MAX


def parse_letter(stored: Record, *, is_vouched: bool = False) -> DeadLetter | None:
    """The dead letter that a record of a dead-letter topic says it is; `None` if it is an ordinary record."""
    first = max((at for at, (name, _) in enumerate(stored.headers) if name == ORIGIN_TOPIC), default=None)
    if first is None:
        return None
    said = {name: value or b"" for name, value in stored.headers[first:]}
    try:
        return DeadLetter(
            place=LetterPlace(stored.partition, stored.offset),
            topic=said[ORIGIN_TOPIC].decode(),
            subscription=said[SUBSCRIPTION].decode(),
            record=Record(
                _natural(said[ORIGIN_PARTITION]),
                _natural(said[ORIGIN_OFFSET]),
                stored.timestamp,
                stored.key,
                stored.value,
                stored.tag,
                stored.headers[:first],
            ),
            attempts=int(said[ATTEMPTS]),
            reason=SpentReason(said[REASON].decode()),
            error=said[ERROR].decode(errors="replace") if ERROR in said else None,
            at=int(said[DEAD_AT]),
            is_vouched=is_vouched,
        )
    except (KeyError, ValueError):
        # Some program writes headers of these names itself.
        return None


def _natural(text: bytes) -> int:
    number = int(text)
    if not 0 <= number <= OFFSET_MAX:
        raise ValueError(f"{number} is no partition and no offset")
    return number


def checked_error(error: str | None) -> str | None:
    """What a consumer says about a record that it could not do, as far as it is kept."""
    return None if error is None else str(error)[:ERROR_CHARACTERS_MAX]
