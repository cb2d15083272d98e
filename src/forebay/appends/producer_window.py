"""Which appends of which producers does this shard remember? The idempotence window.

Pure bookkeeping: knows sequences and offsets, nothing of files or threads. Two stages, because
a repeat may be answered only once its original is acknowledged: `expect` looks at what is
acknowledged *and* what is still on its way, `add` is called when an append is acknowledged.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator

from forebay.errors import Conflict
from forebay.format.control.frames import WindowEntry


class Producer:
    """The last appends of one producer, newest right, as runs of equal appends."""

    __slots__ = ("appends", "runs")

    def __init__(self) -> None:
        self.runs: deque[WindowEntry] = deque()
        self.appends = 0

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


class ProducerWindow:
    """(producer, sequence) → original offset for the most recent producers of a shard."""

    def __init__(self, producers_max: int, appends_max: int) -> None:
        self._producers: OrderedDict[int, Producer] = OrderedDict()
        self._producers_max = producers_max
        self._appends_max = appends_max
        self.is_partial = False
        """Appends may be missing, of producers that are not known here: damage has taken them."""

    def expect(self, producer: int, sequence: int, last_queued: int | None, count: int = 1) -> int | None:
        """`None` if this is the producer's next append, the original offset if it is a remembered repeat.

        `last_queued` is the producer's newest sequence still on its way to the disk. Anything else is a
        `Conflict`: accepting it could store a record twice or hide that one is missing.
        """
        known = self._producers.get(producer)
        if known is None and last_queued is None and self.is_partial:
            raise Conflict(
                f"whether producer {producer} repeats sequence {sequence} is not known, because the log or its history "
                'is damaged where its appends may be: nothing is stored. Run "forebay verify", put right what it names '
                "and open the log again before more is appended; or go on with "
                '"forebay topic export NAME --accept-damage" (accept_damage=True): then producers that are not known '
                "begin at 0, and a repeat of theirs is stored again",
                producer=producer,
                sequence=sequence,
            )
        last = last_queued if last_queued is not None else (known.last() if known else -1)
        if sequence == last + 1:
            return None
        if sequence > last:
            raise Conflict(
                f"producer {producer} sent sequence {sequence}, expected {last + 1}: "
                "sequences rise by one per partition; send the missing appends first"
                if last >= 0
                else f"producer {producer} is not known here and sent sequence {sequence}: "
                "a producer starts at sequence 0; take a new producer id to start over",
                producer=producer,
                sequence=sequence,
                expected=last + 1,
            )
        original = known.append_of(sequence) if known else None
        if original is None:
            raise Conflict(
                f"producer {producer} repeats sequence {sequence}, older than its last {self._appends_max} appends: "
                "its offset is no longer remembered; read the topic to find it",
                producer=producer,
                sequence=sequence,
            )
        check_repeat(producer, sequence, original[1], count)
        return original[0]

    def add(self, entry: WindowEntry) -> None:
        """Remember acknowledged appends. Forgets the producer that has been silent longest beyond the limit."""
        known = self._producers.get(entry.producer) or Producer()
        known.add(entry, self._appends_max)
        # Only now: a producer in the window has at least one append, whatever interrupts this.
        self._producers[entry.producer] = known
        self._producers.move_to_end(entry.producer)
        if len(self._producers) > self._producers_max:
            self._producers.popitem(last=False)

    def extend(self, entries: Iterable[WindowEntry]) -> None:
        """Add many, in the order in which they were acknowledged."""
        for entry in entries:
            self.add(entry)

    @property
    def producers(self) -> int:
        """How many producers are known."""
        return len(self._producers)

    def lose(self) -> None:
        """Appends cannot be read: forget all before them, and refuse producers that do not appear behind them."""
        self._producers.clear()
        self.is_partial = True

    def clear(self) -> None:
        """Forget everything."""
        self._producers.clear()

    def last_sequence(self, producer: int) -> int | None:
        """The producer's newest acknowledged sequence."""
        known = self._producers.get(producer)
        return known.last() if known else None

    def entries(self) -> Iterator[WindowEntry]:
        """Everything remembered, longest silent producer first, so that `extend` rebuilds the same window."""
        for known in self._producers.values():
            yield from known.runs


def check_repeat(producer: int, sequence: int, original: int, count: int) -> None:
    """`Conflict` if a repeat has another number of records than its original: then it is no repeat."""
    if original != count:
        raise Conflict(
            f"producer {producer} repeats sequence {sequence} with {count} records, but it was an append of {original}"
            ": a repeat has the same records; give a new append the next sequence",
            producer=producer,
            sequence=sequence,
        )
