"""Recognises repeated appends: the newest appends of the most recent idempotent producers of a shard.

Pure bookkeeping: knows sequences and offsets, nothing of files or threads. Two stages, because
a repeat may be answered only once its original is acknowledged: `expect` looks at what is
acknowledged *and* what is still on its way, `add` is called when an append is acknowledged.
Sequences of a producer rise; an append names the one before it, so they need not be dense.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Final, NamedTuple

from forebay.errors import Conflict
from forebay.format.control.frames import WindowEntry

NONE_BEFORE: Final = -1
"""Named as the previous sequence: the producer has appended nothing to this shard."""
ANY_BEFORE: Final = -2
"""Named as the previous sequence: any lower one, for a batch whose records fall into several partitions."""
CALL_IDS: Final = 2**62
"""Producers from this id on number their appends over all partitions of a topic, not in each: see `numbers_calls`."""
KEY_IDS: Final = 2**63
"""Producers from this id on stand for hashed keys. They are remembered apart, so that clients never displace them."""
ROUTER_IDS: Final = 2**63 + 2**62
"""Producers from this id on are routers, senders of dead letters, replays and copies, remembered apart once more."""


CHECKSUMS_MAX: Final = 64
"""So many of a producer's newest appends are compared with their repeats, besides by their number of records."""


class ReservedProducer(int):
    """The id of a producer that Forebay itself is. It may lie from `KEY_IDS` on, where no id of a caller may.

    Appends ask for the type. No id that comes from a caller, whichever way, is of it.
    """

    __slots__ = ()

    @classmethod
    def of_key(cls, digest: bytes) -> ReservedProducer:
        """The producer that stands for a hashed idempotency key."""
        return cls(KEY_IDS + int.from_bytes(digest) % (ROUTER_IDS - KEY_IDS))

    @classmethod
    def of_worker(cls, text: str) -> ReservedProducer:
        """The producer that a router, a sender of dead letters, a replay or a copy is; the text names it."""
        drawn = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        return cls(ROUTER_IDS + drawn % (2**64 - ROUTER_IDS))


def is_worker(producer: int | None) -> bool:
    """Whether a producer whose id was checked is one that copies records: a router, a sender of dead letters, …"""
    return producer is not None and producer >= ROUTER_IDS


class Producer:
    """The last appends of one producer, newest right, as runs of equal appends."""

    __slots__ = ("appends", "checksums", "runs")

    def __init__(self) -> None:
        self.runs: deque[WindowEntry] = deque()
        self.appends = 0
        self.checksums: dict[int, int] = {}
        """Of the newest appends that this process has seen, by sequence: the checksum of their records."""

    def last(self) -> int:
        """The highest sequence seen."""
        newest = self.runs[-1]
        return newest.sequence + newest.appends - 1

    def append_of(self, sequence: int) -> tuple[int, int] | None:
        """The first offset of that append and how many records it has, if it is still remembered."""
        for run in reversed(self.runs):
            if run.sequence <= sequence < run.sequence + run.appends:
                return run.offset + (sequence - run.sequence) * run.count, run.count
        return None

    def sequences(self) -> Iterator[int]:
        """The sequences that are remembered, oldest first."""
        for run in self.runs:
            yield from range(run.sequence, run.sequence + run.appends)

    def note(self, sequence: int, checksum: int) -> None:
        """Remember what an append held; forget the oldest beyond `CHECKSUMS_MAX`."""
        self.checksums[sequence] = checksum
        if len(self.checksums) > CHECKSUMS_MAX:
            del self.checksums[next(iter(self.checksums))]

    def add(self, entry: WindowEntry, appends_max: int) -> None:
        """Remember later appends; forget the oldest beyond the limit."""
        newest = self.runs[-1] if self.runs else None
        if newest is not None and _continues(newest, entry):
            self.runs[-1] = newest._replace(appends=newest.appends + entry.appends)
        else:
            self.runs.append(entry)
        self.appends += entry.appends
        while self.appends > appends_max:
            self._drop_oldest(self.appends - appends_max)

    def _drop_oldest(self, excess: int) -> None:
        oldest = self.runs.popleft()
        dropped = min(excess, oldest.appends)
        self.appends -= dropped
        if dropped < oldest.appends:
            self.runs.appendleft(
                oldest._replace(
                    sequence=oldest.sequence + dropped,
                    appends=oldest.appends - dropped,
                    offset=oldest.offset + dropped * oldest.count,
                )
            )


def _continues(newest: WindowEntry, entry: WindowEntry) -> bool:
    return (
        entry.count == newest.count
        and entry.sequence == newest.sequence + newest.appends
        and entry.offset == newest.offset + newest.appends * newest.count
    )


class Recalled(NamedTuple):
    """What a shard knows of a producer, and of one of its appends."""

    last: int
    """Its highest sequence, on its way or acknowledged."""
    records: int | None
    """How many records the append has; `None` if it is not remembered, or was never here."""


class ProducerWindow:
    """(producer, sequence) → original offset for the most recent producers of a shard.

    Three parts of `producers_max` producers each: clients, hashed keys, routers. Each producer has at most
    `appends_max` runs. Appends that follow one another in sequence and offset share a run; one behind left-out
    sequences, or behind records of others, begins a new one. So a producer costs about 2 KB at the least, and 160 bytes
    for each of its remembered appends at the most.
    """

    def __init__(self, producers_max: int, appends_max: int) -> None:
        self._parts: tuple[OrderedDict[int, Producer], ...] = (OrderedDict(), OrderedDict(), OrderedDict())
        """Clients, keys, routers; in each the producer that has been silent longest first."""
        self._producers_max = producers_max
        self._appends_max = appends_max
        self.is_partial = False
        """Appends may be missing, of producers that are not known here: damage has taken them."""

    def expect(
        self,
        producer: int,
        sequence: int,
        previous: int | None,
        last_queued: int | None,
        count: int = 1,
        checksum: int | None = None,
    ) -> int | None:
        """`None` if this is the producer's next append, the original offset if it is a remembered repeat.

        `previous` is the sequence that the producer's last append to this shard had: `None` for the one before
        `sequence`, `NONE_BEFORE` if there was no append, `ANY_BEFORE` if any lower one will do. `last_queued` is the
        producer's newest sequence still on its way to the disk. Anything else is a `Conflict`: accepting it could
        store a record twice or hide that one is missing.
        """
        known = self._part(producer).get(producer)
        recalled = self.recall(producer, sequence, last_queued)
        last = NONE_BEFORE if recalled is None else recalled.last
        if sequence > last:
            if previous is None:
                previous = sequence - 1
            if previous in (last, ANY_BEFORE):
                return None
            raise _out_of_step(producer, sequence, previous, last)
        original = known.append_of(sequence) if known else None
        if original is None:
            raise Conflict(
                f"producer {producer} repeats sequence {sequence}, older than its last {self._appends_max} appends, or "
                f"never sent to this partition before sequence {last}: its offset is no longer remembered; read the "
                "topic to find it",
                producer=producer,
                sequence=sequence,
                kind="too_old",
            )
        check_repeat(producer, sequence, original[1], count)
        if known is not None:
            check_content(producer, sequence, known.checksums.get(sequence), checksum)
        return original[0]

    def recall(self, producer: int, sequence: int, last_queued: int | None = None) -> Recalled | None:
        """What is known of the producer and of its append with this sequence; `None` if it is not known here.

        `Conflict` where damage may have taken it.
        """
        known = self._part(producer).get(producer)
        if known is not None:
            append = known.append_of(sequence)
            last = known.last() if last_queued is None else last_queued
            return Recalled(last, None if append is None else append[1])
        if last_queued is not None:
            return Recalled(last_queued, None)
        if self.is_partial:
            raise Conflict(
                f"whether producer {producer} repeats sequence {sequence} is not known, because the log or its history "
                'is damaged where its appends may be: nothing is stored. Run "forebay verify", put right what it names '
                "and open the log again before more is appended; or go on with "
                '"forebay topic export NAME --accept-damage" (accept_damage=True): then producers that are not known '
                "begin at 0, and a repeat of theirs is stored again",
                producer=producer,
                sequence=sequence,
                kind="undecided",
            )
        return None

    def add(self, entry: WindowEntry, checksum: int | None = None) -> None:
        """Remember acknowledged appends. Forgets the producer that has been silent longest beyond the limit.

        `checksum` is that of the records of one append, where it is known.
        """
        part = self._part(entry.producer)
        known = part.get(entry.producer) or Producer()
        known.add(entry, self._appends_max)
        if checksum is not None:
            known.note(entry.sequence, checksum)
        # Only now: a producer in the window has at least one append, whatever interrupts this.
        part[entry.producer] = known
        part.move_to_end(entry.producer)
        if len(part) > self._producers_max:
            part.popitem(last=False)

    def extend(self, entries: Iterable[WindowEntry]) -> None:
        """Add many, in the order in which they were acknowledged."""
        for entry in entries:
            self.add(entry)

    def restore(self, found: ProducerWindow) -> None:
        """Go by what another window knows, as the log does that it was read from; checksums stay where both agree."""
        checksums = {
            producer: known.checksums for part in self._parts for producer, known in part.items() if known.checksums
        }
        self.clear()
        self.extend(found.entries())
        for producer, noted in checksums.items():
            known = self._part(producer).get(producer)
            if known is not None:
                last = known.last()
                known.checksums = {sequence: checksum for sequence, checksum in noted.items() if sequence <= last}

    @property
    def producers(self) -> int:
        """How many producers are known."""
        return sum(map(len, self._parts))

    def lose(self) -> None:
        """Appends cannot be read: forget all before them, and refuse producers that do not appear behind them."""
        self.clear()
        self.is_partial = True

    def clear(self) -> None:
        """Forget everything."""
        for part in self._parts:
            part.clear()

    def last_sequence(self, producer: int) -> int | None:
        """The producer's newest acknowledged sequence."""
        known = self._part(producer).get(producer)
        return known.last() if known else None

    def entries(self) -> Iterator[WindowEntry]:
        """Everything remembered; of each part the longest silent first, so that `extend` rebuilds the same window."""
        for part in self._parts:
            for known in part.values():
                yield from known.runs

    def sequences_to_forget(self, producer: int, added: Sequence[int]) -> Iterator[int]:
        """The oldest sequences of a producer that go when it adds these: no more than the limit are remembered."""
        known = self._part(producer).get(producer)
        appends = (known.appends if known else 0) + len(added)
        return islice(chain(known.sequences() if known else (), added), max(0, appends - self._appends_max))

    def producers_to_forget(self, added: Collection[int]) -> Iterator[int]:
        """The producers that have been silent longest, of as many as go when these append."""
        for number, part in enumerate(self._parts):
            new = sum(producer not in part for producer in added if _part_of(producer) == number)
            excess = len(part) + new - self._producers_max
            if new and excess > 0:
                yield from islice((producer for producer in part if producer not in added), excess)

    def _part(self, producer: int) -> OrderedDict[int, Producer]:
        return self._parts[_part_of(producer)]


def numbers_calls(producer: int) -> bool:
    """Whether one sequence of this producer names one call, whichever partitions its records fall into.

    So do the producers of clients, and those that stand for hashed keys. Other producers count in each partition by
    itself: there the same sequence in two partitions names two appends.
    """
    return CALL_IDS <= producer < ROUTER_IDS


def _part_of(producer: int) -> int:
    """Which part of a window remembers this producer."""
    return (producer >= KEY_IDS) + (producer >= ROUTER_IDS)


def _out_of_step(producer: int, sequence: int, previous: int, last: int) -> Conflict:
    after = "" if previous == sequence - 1 else f" after {previous}"
    expected = f"one after {last}" if after else f"{last + 1}"
    return Conflict(
        f"producer {producer} sent sequence {sequence}{after}, expected {expected}: "
        "sequences rise by one per partition, or name the one before; send the missing appends first"
        if last >= 0
        else f"producer {producer} is not known here and sent sequence {sequence}{after}: a producer starts at "
        "sequence 0, or names -1 as the previous one; take a new producer id to start over",
        producer=producer,
        sequence=sequence,
        expected=last + 1,
        kind="out_of_order" if last >= 0 else "unknown_producer",
    )


def check_content(producer: int, sequence: int, original: int | None, checksum: int | None) -> None:
    """`Conflict` if a repeat has other records than its original, as far as both checksums are known."""
    if original is not None and checksum is not None and original != checksum:
        raise Conflict(
            f"producer {producer} repeats sequence {sequence} with other records than it was sent with first, which "
            "are stored: a repeat has the same records; give a new append the next sequence",
            producer=producer,
            sequence=sequence,
            kind="other_records",
        )


def check_repeat(producer: int, sequence: int, original: int, count: int) -> None:
    """`Conflict` if a repeat has another number of records than its original: then it is no repeat."""
    if original != count:
        raise Conflict(
            f"producer {producer} repeats sequence {sequence} with {count} records, but it was an append of {original}"
            ": a repeat has the same records; give a new append the next sequence",
            producer=producer,
            sequence=sequence,
            kind="other_records",
        )
