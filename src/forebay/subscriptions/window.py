"""The unfinished records of one partition of a subscription: which are due, with whom, and what is done.

A pure state machine over offsets: no payloads, no clock, no lock, no input or output. Each offset from the cursor to
the end of the window is in one state:

    offer ─▸ READY ── take ──▸ HELD by a consumer ── ack ──▸ DONE
               ▴                 │  ack time-out from `hand_over` on, or the consumer leaves: READY again
               └── DELAYED ◂─────┤  nack: READY again after a delay
                                 └▸ SPENT: delivered `deliveries_max` times; it is not delivered any more

The cursor is the first offset that is not done: everything below it is. Times are whole milliseconds of a clock that
never goes back. An unfinished record costs about 20 bytes in arrays, whatever its size.

Where the order of each key is kept, the records of a slot form a chain by offset. To take looks at the first ready
record of each slot that the consumer may have, and follows chains from there: records of keys that are with others are
not looked at, however many consumers there are.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from forebay.format.control.offsets import OffsetSet
from forebay.records import OFFSET_MAX

READY: Final = 0
HELD: Final = 1
DELAYED: Final = 2
DONE: Final = 3
SPENT: Final = 4

SLOTS: Final = 4096
"""Keys fall into so many slots; the records of one slot are with one consumer at a time."""
KEYLESS: Final = SLOTS
"""The slot of records without a key, which any consumer may have at any time."""
ATTEMPTS_MAX: Final = 65_535
_BLOCK: Final = 4096
_NEVER: Final = 2**62
_SPARE: Final = 64

T = TypeVar("T", bound=np.generic)

Indexes: TypeAlias = npt.NDArray[np.intp]
Slots: TypeAlias = npt.NDArray[np.uint16]
Mask: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowLimits:
    """How many records a window holds, and how a record that is not acknowledged is delivered again."""

    records_max: int = 4_000
    """Offsets from the cursor to the end of the window."""
    ack_timeout_ms: int = 30_000
    backoff_min_ms: int = 1_000
    """The delay after the first nack; each further one doubles it."""
    backoff_max_ms: int = 60_000
    deliveries_max: int | None = None


class Taken(NamedTuple):
    """Records that a consumer holds from now on: their offsets in order, and how often each was delivered by now."""

    offsets: list[int]
    attempts: list[int]


class WindowCounts(NamedTuple):
    """How many records of a window are in each state that is not `DONE`."""

    ready: int
    held: int
    delayed: int
    spent: int


class WindowCopy(NamedTuple):
    """What a window knows at one moment: its cursor, and of each offset from there to its end the state and attempts.

    To make one copies some bytes for each offset and nothing more, so that it is quick under a lock; what is to be
    stored is found out of the copy without one. Offsets are looked at by numpy alone: a million of them take
    milliseconds.
    """

    cursor: int
    state: npt.NDArray[np.uint8]
    tried: npt.NDArray[np.uint16]
    known_acked: OffsetSet
    """Offsets that an earlier process knew to be done; of these, those below the end are in `state`."""
    known_attempts: Mapping[int, int]

    @property
    def end(self) -> int:
        """The first offset that was not offered yet."""
        return self.cursor + len(self.state)

    def acked(self) -> OffsetSet:
        """The offsets above the cursor that are done, those not offered again yet included."""
        return OffsetSet.of(np.flatnonzero(self.state == DONE) + self.cursor) | self._known_above()

    def acked_ranges(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The same as ranges: where each begins and where it ends, in order."""
        starts, stops = (edges + self.cursor for edges in _runs(self.state == DONE))
        more_starts, more_stops = _ranges(self._known_above().offsets())
        return np.concatenate((starts, more_starts)), np.concatenate((stops, more_stops))

    def attempts(self, count: int) -> dict[int, int]:
        """How often unfinished records were delivered: of `count` of them, those delivered most often first."""
        places = np.flatnonzero((self.tried > 0) & (self.state != DONE))
        if len(places) > count:
            # By how often, then by place: one number of both is all different.
            order = (ATTEMPTS_MAX - self.tried[places].astype(np.int64)) * len(self.state) + places
            places = places[np.argpartition(order, count)[:count]]
        found = dict(zip((places + self.cursor).tolist(), self.tried[places].tolist(), strict=True))
        found.update((offset, tried) for offset, tried in self.known_attempts.items() if offset >= self.end)
        most = sorted(found.items(), key=lambda item: (-item[1], item[0]))[:count]
        return dict(sorted(most))

    def _known_above(self) -> OffsetSet:
        return self.known_acked.clipped(self.end, OFFSET_MAX)


class _KeySlots:
    """With which consumer the records of each slot are, so that a key is never with two at once, and where they are."""

    def __init__(self) -> None:
        self._holder = np.zeros(SLOTS + 1, np.int64)
        self._held = np.zeros(SLOTS + 1, np.int32)
        self._delayed = np.zeros(SLOTS + 1, np.int32)
        self.first = np.full(SLOTS + 1, _NEVER, np.int64)
        """The first ready offset of each slot, `_NEVER` if it has none."""
        self.last = np.full(SLOTS + 1, -1, np.int64)
        """The last offset of each slot that was offered."""

    def open_to(self, consumer: int) -> Indexes:
        """The slots with ready records that a consumer may take: no other has a record of it, and none is delayed."""
        return np.flatnonzero(self._due() & ((self._held == 0) | (self._holder == consumer)))

    def has_free(self) -> bool:
        """Whether a slot has ready records that any consumer may take."""
        return bool((self._due() & (self._held == 0)).any())

    def due_holders(self) -> list[int]:
        """The consumers that have a record of a slot with ready ones, which no other may take."""
        holders: list[int] = np.unique(self._holder[self._due() & (self._held > 0)]).tolist()
        return holders

    def _due(self) -> Mask:
        due: Mask = (self.first != _NEVER) & (self._delayed == 0)
        return due

    def hold(self, consumer: int, slots: Slots) -> None:
        self._holder[slots] = consumer
        self._count(self._held, slots, 1)

    def unhold(self, slots: Slots) -> None:
        self._count(self._held, slots, -1)

    def unhold_one(self, slot: int) -> None:
        if slot != KEYLESS:
            self._held[slot] -= 1

    def delay(self, slots: Slots) -> None:
        self._count(self._delayed, slots, 1)

    def undelay(self, slots: Slots) -> None:
        self._count(self._delayed, slots, -1)

    @staticmethod
    def _count(counts: npt.NDArray[np.int32], slots: Slots, change: int) -> None:
        np.add.at(counts, slots, change)
        counts[KEYLESS] = 0


class Window:
    """The state machine. For one thread at a time.

    What an earlier process knew comes in by `acked` (offsets above the cursor that are done) and `attempts` (how often
    others were delivered); it is applied when those offsets are offered. With `by_key` the order of each key is kept:
    `offer` is given the slots of the records. With `is_next_life` the process before may have ended by one of
    those that were delivered: see `has_suspects`.
    """

    def __init__(
        self,
        cursor: int,
        limits: WindowLimits,
        *,
        by_key: bool = False,
        acked: OffsetSet | None = None,
        attempts: Mapping[int, int] | None = None,
        is_next_life: bool = False,
    ) -> None:
        self._limits = limits
        self._base = cursor
        self._low = 0
        self._high = 0
        self._known_acked = OffsetSet() if acked is None else acked
        self._known_attempts = dict(attempts or {})
        self._suspects = set(self._known_attempts) if is_next_life else set()
        """Those that were with a consumer when an earlier process ended; `has_suspects` removes what is cleared."""
        self._keys = _KeySlots() if by_key else None
        self._state: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._attempts: npt.NDArray[np.uint16] = np.empty(0, np.uint16)
        self._holder: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._due: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._slot: npt.NDArray[np.uint16] = np.empty(0, np.uint16)
        self._link: npt.NDArray[np.uint32] = np.empty(0, np.uint32)
        """By how much the next record of the same slot lies behind; 0 if none was offered yet."""
        self._counts = [0, 0, 0, 0, 0]
        self._held_by: dict[int, int] = {}
        self._first_ready = cursor
        """No offset below is `READY`."""
        self._first_due = _NEVER
        """Nothing changes by time before."""
        self.examined = 0
        """How many records were looked at so far to find those that consumers took."""

    @property
    def cursor(self) -> int:
        """The first offset that is not done."""
        return self._base + self._low

    @property
    def end(self) -> int:
        """The first offset that was not offered yet."""
        return self._base + self._high

    @property
    def limits(self) -> WindowLimits:
        """What it goes by."""
        return self._limits

    @property
    def room(self) -> int:
        """How many more offsets it takes now."""
        return self.limits.records_max - (self._high - self._low)

    @property
    def counts(self) -> WindowCounts:
        """How its records fare."""
        return WindowCounts(*(self._counts[state] for state in (READY, HELD, DELAYED, SPENT)))

    @property
    def due(self) -> int | None:
        """When the next time-out or delay may end; asking `tick` earlier changes nothing."""
        return None if self._first_due == _NEVER else self._first_due

    def is_due(self, now: int) -> bool:
        """Whether a record is ready, or may be so by now."""
        return self._counts[READY] > 0 or now >= self._first_due

    def is_free(self, now: int) -> bool:
        """Whether a record is ready that any consumer may take, or may be so by now."""
        return now >= self._first_due or (self._counts[READY] > 0 and (self._keys is None or self._keys.has_free()))

    def due_holders(self) -> list[int]:
        """The consumers that may take ready records which no other may take: they hold earlier ones of the slot."""
        return [] if self._keys is None or not self._counts[READY] else self._keys.due_holders()

    @property
    def may_have_suspects(self) -> bool:
        """Whether `has_suspects` need be asked: false once all of them were cleared."""
        return bool(self._suspects)

    def has_suspects(self) -> bool:
        """Whether there are records that were out when an earlier process ended, and have had no answer since.

        One of them may be what has ended it. An answer of either kind says that it has not this time.
        """
        for offset in list(self._suspects):
            is_past = offset < self.cursor
            if is_past or (offset < self.end and self._state[offset - self._base] in (DONE, SPENT, DELAYED)):
                self._suspects.discard(offset)
        return bool(self._suspects)

    def held_by(self, consumer: int) -> int:
        """How many records a consumer holds."""
        return self._held_by.get(consumer, 0)

    # What comes in

    def offer(self, start: int, records: Sequence[tuple[int, int]], stop: int, slots: Slots | None = None) -> int:
        """Take in the offsets from `start` to `stop`: the ranges `records` have a record each, the others have none.

        Returns the new end, which lies before `stop` if the window is full. What does not begin where the window ends
        is not taken in: the offsets between would count as done. `slots` are those of all records, in order.
        """
        if start != self.end:
            return self.end
        if self._low == self._high:
            self._jump(next((max(start, self.end) for start, end in records if end > self.end), max(stop, self.end)))
        start = self.end
        stop = min(stop, self.cursor + self.limits.records_max)
        if stop <= start:
            return start
        first = self._make_room(stop - start)
        self._high = first + stop - start
        self._state[first : self._high] = DONE
        self._attempts[first : self._high] = 0
        before = 0
        for begin, end in records:
            low, high = max(begin, start), min(end, stop)
            if low < high:
                self._state[first + low - start : first + high - start] = READY
                if slots is not None:
                    part = slots[before + low - begin : before + high - begin]
                    self._slot[first + low - start : first + high - start] = part
            before += end - begin
        self._restore(start, first)
        if self._keys is not None:
            self._chain(self._keys, first)
        self._counts[READY] += int(np.count_nonzero(self._state[first : self._high] == READY))
        self._advance()
        return self.end

    def _restore(self, start: int, first: int) -> None:
        """Bring back what an earlier process knew of the offsets that were just offered."""
        state, stop = self._state[first : self._high], self.end
        if len(self._known_acked):
            state[self._known_acked.mask(start, stop - start)] = DONE
            self._known_acked = self._known_acked.clipped(stop, OFFSET_MAX)
        for offset in [offset for offset in self._known_attempts if offset < stop]:
            attempts = self._known_attempts.pop(offset)
            if offset >= start and state[offset - start] == READY:
                self._attempts[first + offset - start] = min(attempts, ATTEMPTS_MAX)
                if self._is_last(attempts):
                    state[offset - start] = SPENT
                    self._counts[SPENT] += 1

    def _chain(self, keys: _KeySlots, first: int) -> None:
        """Put the records from this place on, which were just offered, behind those of their slots."""
        places = np.flatnonzero(self._state[first : self._high] != DONE) + first
        if not len(places):
            return
        places = places[np.argsort(self._slot[places], kind="stable")]
        slots = self._slot[places]
        is_new = np.concatenate(([True], slots[1:] != slots[:-1]))
        self._link[places] = 0
        self._link[places[:-1][~is_new[1:]]] = np.diff(places)[~is_new[1:]]
        before = keys.last[slots[is_new]] - self._base
        is_there = before >= self._low
        self._link[before[is_there]] = (places[is_new] - before)[is_there]
        keys.last[slots] = places + self._base
        ready = self._state[places] == READY
        np.minimum.at(keys.first, slots[ready], places[ready] + self._base)

    def _is_last(self, attempts: int) -> bool:
        return self.limits.deliveries_max is not None and attempts >= self.limits.deliveries_max

    def limit(self, limits: WindowLimits, kept: Collection[int] = ()) -> None:
        """Go by other limits from now on; time-outs and delays that run stay as they are.

        A record that was delivered as often as it may be now is spent, unless a consumer holds it. One that may be
        delivered more often is due again, but for those of `kept`.
        """
        self._limits = limits
        live = np.arange(self._low, self._high)
        state, tried = self._state[live], self._attempts[live] > 0
        last = np.zeros(len(live), np.bool_)
        if limits.deliveries_max is not None:
            last = tried & (self._attempts[live] >= limits.deliveries_max)
        again = live[(state == SPENT) & ~last]
        self._make_ready(again[~np.isin(again + self._base, list(kept))], SPENT)
        spent = live[(state == READY) & last]
        self._change(spent, READY, SPENT)
        self._pass_unready(spent)
        delayed = live[(state == DELAYED) & last]
        if self._keys is not None:
            self._keys.undelay(self._slot[delayed])
        self._change(delayed, DELAYED, SPENT)

    # What consumers do

    def take(self, consumer: int, count: int, now: int) -> Taken:
        """Up to `count` records that are due, by offset; the consumer holds them from now on.

        They are on their way: `hand_over` begins their ack time-out. One that never gets there (`give_back`, or the
        consumer leaves before) was not delivered.
        """
        self.tick(now)
        found = self._ready_for(consumer, count)
        if not len(found):
            return Taken([], [])
        self._change(found, READY, HELD)
        self._holder[found] = consumer
        self._due[found] = _NEVER
        self._attempts[found] = np.minimum(self._attempts[found].astype(np.int64) + 1, ATTEMPTS_MAX)
        self._held_by[consumer] = self._held_by.get(consumer, 0) + len(found)
        if self._keys is not None:
            self._keys.hold(consumer, self._slot[found])
        return Taken((found + self._base).tolist(), self._attempts[found].tolist())

    def hand_over(self, consumer: int, offsets: Sequence[int], attempts: Sequence[int], now: int) -> list[bool]:
        """The consumer gets these records now, in these deliveries; for each, whether it is still to get it.

        It is not if the record is done by now, or another delivery of it was begun since.
        """
        found = np.asarray(offsets, np.int64) - self._base
        is_held = self._is_held(consumer, found, attempts)
        held = found[is_held]
        if len(held):
            self._due[held] = now + self.limits.ack_timeout_ms
            self._first_due = min(self._first_due, now + self.limits.ack_timeout_ms)
        return [bool(one) for one in is_held]

    def ack(self, consumer: int, offsets: Sequence[int]) -> int:
        """These records are done; how many of them were not before.

        Counts for records that the consumer holds, or held before they came to be ready again. One that another
        consumer holds by now is that one's to acknowledge: a late ack changes nothing.
        """
        if len(offsets) == 1 and (is_done := self._ack_held(consumer, offsets[0])) is not None:
            return is_done
        found = self._within(offsets)
        return self._finish(found[self._may_finish(consumer, found)])

    def _ack_held(self, consumer: int, offset: int) -> bool | None:
        """One record that a consumer holds is done, if it is this one; `None` for a record that none holds.

        Without arrays: a loop acknowledges record by record, and an array of one costs as much as one of hundreds.
        """
        place = offset - self._base
        if not self._low <= place < self._high or self._state.item(place) != HELD:
            return None
        if self._holder.item(place) != consumer:
            return False
        self._lower_held(consumer, 1)
        if self._keys is not None:
            self._keys.unhold_one(self._slot.item(place))
        self._counts[HELD] -= 1
        self._state[place] = DONE
        if place == self._low:
            self._advance_one()
        return True

    def ack_up_to(self, consumer: int, offset: int, kept: Collection[int] = ()) -> int:
        """This record, which the consumer was given, and all before it are done, but for `kept`; how many were not."""
        if not self.cursor <= offset < self.end:
            return 0
        last = self._within([offset])
        if self._state[last[0]] != DONE and not self._may_finish(consumer, last)[0]:
            return 0
        found = np.arange(self._low, last[0] + 1)
        foreign = (self._state[found] == HELD) & (self._holder[found] != consumer)
        if kept:
            foreign |= np.isin(found + self._base, list(kept))
        return self._finish(found[~foreign & (self._state[found] != DONE)])

    def nack(
        self,
        consumer: int,
        offsets: Sequence[int],
        now: int,
        delay_ms: int | None = None,
        attempts: Sequence[int] | None = None,
    ) -> int:
        """The consumer could not do these: each is due again after the delay, or a back-off; how many it held.

        With `attempts`, one for each offset, a record counts only if that very delivery is the one that the consumer
        holds: a refusal that comes late, or twice, is not about a later one.
        """
        if attempts is not None:
            offsets = [at for at, number in zip(offsets, attempts, strict=True) if self._is_attempt(at, number)]
        found = self._held(consumer, offsets)
        # What is on its way cannot be refused yet.
        found = found[self._due[found] != _NEVER]
        self._unhold(found, consumer)
        spent, again = self._parted(found)
        self._change(spent, HELD, SPENT)
        if delay_ms == 0:
            self._make_ready(again, HELD)
        elif len(again):
            delays = self._backoff(again) if delay_ms is None else np.full(len(again), delay_ms, np.int64)
            self._change(again, HELD, DELAYED)
            self._due[again] = now + delays
            self._first_due = min(self._first_due, now + int(delays.min()))
            if self._keys is not None:
                self._keys.delay(self._slot[again])
        return len(found)

    def give_back(self, consumer: int, offsets: Sequence[int], attempts: Sequence[int]) -> int:
        """These deliveries did not reach the consumer: the records are due again as if they had not been begun.

        Returns how many of them the consumer held: a record that was delivered again since stays as it is.
        """
        places = np.asarray(offsets, np.int64) - self._base
        found = places[self._is_held(consumer, places, attempts)]
        self._unhold(found, consumer)
        self._take_back(found)
        return len(found)

    def release(self, consumer: int) -> int:
        """The consumer has left: what it held is due at once; how many records that is.

        What was on its way to it was not delivered.
        """
        live = slice(self._low, self._high)
        found = np.flatnonzero((self._state[live] == HELD) & (self._holder[live] == consumer)) + self._low
        self._unhold(found, consumer)
        is_coming = self._due[found] == _NEVER
        self._take_back(found[is_coming])
        self._end_delivery(found[~is_coming])
        return len(found)

    def tick(self, now: int) -> int:
        """End the delays and time-outs that are over; how many records are due again or spent by that."""
        if now < self._first_due:
            return 0
        live = slice(self._low, self._high)
        waits = np.flatnonzero((self._state[live] == HELD) | (self._state[live] == DELAYED)) + self._low
        over = waits[self._due[waits] <= now]
        held = over[self._state[over] == HELD]
        self._unhold_all(held)
        delayed = over[self._state[over] == DELAYED]
        if self._keys is not None:
            self._keys.undelay(self._slot[delayed])
        self._make_ready(delayed, DELAYED)
        self._end_delivery(held)
        left = waits[self._due[waits] > now]
        self._first_due = int(self._due[left].min()) if len(left) else _NEVER
        return len(over)

    def finish(self, offsets: Sequence[int]) -> int:
        """These need no delivery any more: the records are gone, or were put elsewhere; how many were not done."""
        found = self._within(offsets)
        return self._finish(found[self._state[found] != DONE])

    def skip_to(self, stop: int) -> int:
        """Everything below `stop` is done, also what was not offered yet.

        Returns how many offsets of it were neither done nor with a consumer.
        """
        if stop <= self.cursor:
            return 0
        found = np.arange(self._low, min(self._high, stop - self._base))
        found = found[self._state[found] != DONE]
        skipped = int(np.count_nonzero(self._state[found] != HELD)) + max(0, stop - self.end)
        self._finish(found)
        if stop > self.end:
            self._jump(stop)
        return skipped

    # What it knows

    def leading_spent(self) -> list[int]:
        """The spent records that have no other unfinished record before them, in order."""
        live = self._state[self._low : self._high]
        other = np.flatnonzero((live != DONE) & (live != SPENT))
        stop = int(other[0]) if len(other) else len(live)
        return (np.flatnonzero(live[:stop] == SPENT) + self.cursor).tolist()

    def spent(self) -> list[int]:
        """All spent records, in order."""
        return (np.flatnonzero(self._state[self._low : self._high] == SPENT) + self.cursor).tolist()

    def _is_attempt(self, offset: int, number: int) -> bool:
        return self.cursor <= offset < self.end and self.attempts_of(offset) == min(number, ATTEMPTS_MAX)

    def attempts_of(self, offset: int) -> int:
        """How often a record of the window was delivered."""
        return int(self._attempts[offset - self._base])

    def copied(self) -> WindowCopy:
        """What is known now, which stays as it is while the window goes on."""
        live = slice(self._low, self._high)
        return WindowCopy(
            self.cursor,
            self._state[live].copy(),
            self._attempts[live].copy(),
            self._known_acked,
            dict(self._known_attempts),
        )

    def acked(self) -> OffsetSet:
        """The offsets above the cursor that are done, those not offered again yet included."""
        return self.copied().acked()

    def acked_count(self) -> int:
        """How many those are."""
        done = int(np.count_nonzero(self._state[self._low : self._high] == DONE))
        return done + self._known_acked.count_in(self.end, OFFSET_MAX)

    def attempts(self, count: int) -> dict[int, int]:
        """See `WindowCopy.attempts`."""
        return self.copied().attempts(count)

    # How

    def _within(self, offsets: Sequence[int]) -> Indexes:
        """Where those of the offsets lie that are in the window; each once."""
        found: Indexes = np.asarray(offsets, np.int64) - self._base
        if (found[1:] <= found[:-1]).any():
            found = np.unique(found)
        inside: Indexes = found[(found >= self._low) & (found < self._high)]
        return inside

    def _held(self, consumer: int, offsets: Sequence[int]) -> Indexes:
        found = self._within(offsets)
        held: Indexes = found[(self._state[found] == HELD) & (self._holder[found] == consumer)]
        return held

    def _is_held(self, consumer: int, found: Indexes, attempts: Sequence[int]) -> Mask:
        """Of each place, also one outside of the window, whether the consumer holds its record by this delivery."""
        inside: Mask = (found >= self._low) & (found < self._high)
        places = np.where(inside, found, self._low)
        if not inside.any():
            return inside
        is_meant = self._attempts[places] == np.minimum(np.asarray(attempts, np.int64), ATTEMPTS_MAX)
        held: Mask = inside & (self._state[places] == HELD) & (self._holder[places] == consumer) & is_meant
        return held

    def _take_back(self, found: Indexes) -> None:
        """Deliveries of these were begun and not made, and no consumer holds the records any more."""
        self._attempts[found] -= 1
        self._end_delivery(found)

    def _may_finish(self, consumer: int, found: Indexes) -> Mask:
        state = self._state[found]
        own: Mask = (state == HELD) & (self._holder[found] == consumer)
        free: Mask = (state != HELD) & (state != DONE) & (self._attempts[found] > 0)
        return own | free

    def _ready_for(self, consumer: int, count: int) -> Indexes:
        """The first ready records that the consumer may have."""
        if self._keys is not None:
            return self._first_of(self._keys, self._keys.open_to(consumer), count)
        parts: list[Indexes] = []
        wanted = count
        at = max(self._first_ready - self._base, self._low)
        while at < self._high and wanted > 0:
            stop = min(self._high, at + _BLOCK)
            ready = np.flatnonzero(self._state[at:stop] == READY) + at
            parts.append(ready[:wanted])
            at = stop if len(ready) <= wanted else int(ready[wanted])
            wanted -= len(parts[-1])
        self._first_ready = self._base + at
        return np.concatenate(parts) if parts else np.empty(0, np.intp)

    def _first_of(self, keys: _KeySlots, slots: Indexes, count: int) -> Indexes:
        """The first ready records of these slots, by offset; they are not the first of their slots any more."""
        if len(slots) > count:
            # A slot that begins behind so many others has none of them.
            slots = slots[np.argpartition(keys.first[slots], count)[:count]]
        # Each step looks at single records: a view of an array is quicker there than the array.
        first, link, state = keys.first.data, self._link.data, self._state.data
        base, ready = self._base, READY
        nearest = sorted(zip((keys.first[slots] - base).tolist(), slots.tolist(), strict=True))
        found: list[int] = []
        self.examined += len(nearest)
        while nearest and len(found) < count:
            place, slot = nearest[0]
            found.append(place)
            while step := link[place]:
                place += step
                self.examined += 1
                if state[place] == ready:
                    heapq.heapreplace(nearest, (place, slot))
                    break
            else:
                heapq.heappop(nearest)
                first[slot] = _NEVER
        for place, slot in nearest:
            first[slot] = place + base
        return np.array(found, np.intp)

    def _pass_unready(self, found: Indexes) -> None:
        """These were ready and are so no more, and no consumer took them: others are the first of their slots."""
        if self._keys is not None and len(found):
            for slot in np.unique(self._slot[found]).tolist():
                first = int(self._keys.first[slot])
                if self._state[first - self._base] != READY:
                    self._keys.first[slot] = self._ready_after(first)

    def _ready_after(self, offset: int) -> int:
        """The next ready record of the same slot; `_NEVER` if there is none."""
        place = offset - self._base
        while step := int(self._link[place]):
            place += step
            if self._state[place] == READY:
                return place + self._base
        return _NEVER

    def _backoff(self, found: Indexes) -> npt.NDArray[np.int64]:
        doublings = np.minimum(self._attempts[found].astype(np.int64) - 1, 30)
        delays: npt.NDArray[np.int64] = self.limits.backoff_min_ms * 2**doublings
        return np.minimum(delays, self.limits.backoff_max_ms)

    def _parted(self, found: Indexes) -> tuple[Indexes, Indexes]:
        """Those that were delivered as often as they may be, and the others."""
        if self.limits.deliveries_max is None:
            return found[:0], found
        last = self._attempts[found] >= self.limits.deliveries_max
        return found[last], found[~last]

    def _end_delivery(self, found: Indexes) -> None:
        """A delivery ended without an answer: due again at once, unless it was the last."""
        spent, again = self._parted(found)
        self._change(spent, HELD, SPENT)
        self._make_ready(again, HELD)

    def _make_ready(self, found: Indexes, before: int) -> None:
        if len(found):
            self._change(found, before, READY)
            self._first_ready = min(self._first_ready, self._base + int(found.min()))
            if self._keys is not None:
                np.minimum.at(self._keys.first, self._slot[found], found + self._base)

    def _unhold(self, found: Indexes, consumer: int) -> None:
        """The consumer holds these no more; their state is changed next."""
        if not len(found):
            return
        self._lower_held(consumer, len(found))
        if self._keys is not None:
            self._keys.unhold(self._slot[found])

    def _lower_held(self, consumer: int, count: int) -> None:
        left = self._held_by[consumer] - count
        if left:
            self._held_by[consumer] = left
        else:
            del self._held_by[consumer]

    def _unhold_all(self, found: Indexes) -> None:
        """As `_unhold`, of records that different consumers may hold."""
        holder = self._holder[found]
        for consumer in set(holder.tolist()):
            self._unhold(found[holder == consumer], consumer)

    def _finish(self, found: Indexes) -> int:
        state = self._state[found]
        self._unhold_all(found[state == HELD])
        if self._keys is not None:
            self._keys.undelay(self._slot[found[state == DELAYED]])
        for before, number in enumerate(np.bincount(state, minlength=len(self._counts)).tolist()):
            self._counts[before] -= number
        self._state[found] = DONE
        self._pass_unready(found[state == READY])
        self._advance()
        return len(found)

    def _change(self, found: Indexes, before: int, after: int) -> None:
        self._state[found] = after
        self._counts[before] -= len(found)
        self._counts[after] += len(found)

    def _advance(self) -> None:
        """Move the cursor over what is done."""
        size = _SPARE
        while self._low < self._high:
            block = self._state[self._low : min(self._high, self._low + size)]
            unfinished = block != DONE
            if unfinished.any():
                self._low += int(unfinished.argmax())
                break
            self._low += len(block)
            size = _BLOCK
        if self._low == self._high:
            self._jump(self.end)

    def _advance_one(self) -> None:
        """As `_advance`, where the first record is done: mostly the next one is not."""
        self._low += 1
        if self._low == self._high or self._state.item(self._low) == DONE:
            self._advance()

    def _jump(self, cursor: int) -> None:
        """Go on at this offset, with nothing unfinished; memory of a large window is given back."""
        self._base, self._low, self._high = cursor, 0, 0
        self._first_ready, self._first_due = cursor, _NEVER
        if len(self._state) > _BLOCK:
            self._allot(0)

    def _make_room(self, count: int) -> int:
        """Have room for so many offsets behind the end; where they begin."""
        if self._high + count > len(self._state):
            needed = self._high - self._low + count
            self._allot(max(len(self._state), needed + needed // 4 + _SPARE))
        return self._high

    def _allot(self, capacity: int) -> None:
        """Move what is unfinished to the beginning of arrays of this size."""
        live = slice(self._low, self._high)
        count = self._high - self._low

        def moved(array: npt.NDArray[T]) -> npt.NDArray[T]:
            again = np.empty(capacity, array.dtype)
            again[:count] = array[live]
            return again

        self._state, self._attempts = moved(self._state), moved(self._attempts)
        self._holder, self._due = moved(self._holder), moved(self._due)
        if self._keys is not None:
            self._slot, self._link = moved(self._slot), moved(self._link)
        self._base += self._low
        self._low, self._high = 0, count


def _runs(are: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where each run of places that are so begins and ends. By its edges: these are few where runs are long."""
    framed = np.zeros(len(are) + 2, np.bool_)
    framed[1:-1] = are
    edges = np.flatnonzero(framed[1:] != framed[:-1])
    return edges[::2], edges[1::2]


def _ranges(offsets: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where the ranges of these offsets, which are in order, begin and end."""
    if not len(offsets):
        return offsets, offsets
    breaks = np.flatnonzero(np.diff(offsets) != 1)
    return offsets[np.concatenate(([0], breaks + 1))], offsets[np.concatenate((breaks, [len(offsets) - 1]))] + 1
