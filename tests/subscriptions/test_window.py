"""The window of a subscription against a plain model, with consumers that come, go, stall and die."""

from __future__ import annotations

import random  # noqa: TID251  # seeded: the same run again
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.format.control.offsets import OffsetSet
from forebay.subscriptions.window import KEYLESS, Taken, WindowCounts, WindowLimits
from forebay.subscriptions.window import Window as WindowOnTheWay

LIMITS = WindowLimits(records_max=100, ack_timeout_ms=1000, backoff_min_ms=10, backoff_max_ms=50)
A, B, C = 1, 2, 3


class Window(WindowOnTheWay):
    """A window whose consumers have at once what they take."""

    def take(self, consumer: int, count: int, now: int) -> Taken:
        taken = super().take(consumer, count, now)
        assert all(self.hand_over(consumer, *taken, now))
        return taken


def window(count: int = 10, limits: WindowLimits = LIMITS, **known: object) -> Window:
    """A window with so many records from offset 0 on."""
    found = Window(0, limits, **known)  # type: ignore[arg-type]
    found.offer(0, [(0, count)], count)
    return found


def test_records_are_taken_in_order_once_and_the_cursor_follows_what_is_done_without_a_break() -> None:
    it = window(6)

    assert it.take(A, 4, 0) == Taken([0, 1, 2, 3], [1, 1, 1, 1])
    assert it.take(B, 4, 0).offsets == [4, 5]
    assert it.take(C, 4, 0).offsets == []

    assert it.ack(A, [1, 3, 3, 99]) == 2
    assert it.cursor == 0
    assert list(it.acked()) == [1, 3]
    assert it.ack(A, [0]) == 1
    assert it.cursor == 2
    assert it.ack(A, [2]) == 1
    assert (it.cursor, it.end, list(it.acked())) == (4, 6, [])


def test_what_is_not_acknowledged_in_time_is_due_again_and_counts_its_deliveries() -> None:
    it = window(2)
    it.take(A, 1, 0)

    assert it.due == 1000
    assert it.take(B, 5, 999).offsets == [1]
    assert it.take(B, 5, 1000) == Taken([0], [2])


def test_a_consumer_that_acks_late_harms_nothing() -> None:
    it = window(3)
    it.take(A, 3, 0)
    assert it.take(B, 1, 1000).offsets == [0]

    # 0 is with B by now; 1 is due again and was delivered to A before.
    assert it.ack(A, [0, 1]) == 1
    assert it.counts == WindowCounts(ready=1, held=1, delayed=0, spent=0)
    assert it.ack(B, [0]) == 1
    assert it.cursor == 2


def test_a_record_that_was_never_delivered_cannot_be_acknowledged() -> None:
    it = window(3)

    assert it.ack(A, [0, 1]) == 0
    assert it.ack_up_to(A, 2) == 0
    assert it.cursor == 0


def test_a_nack_delays_the_record_longer_each_time_or_as_long_as_it_says() -> None:
    it = window(1)
    now = 0
    for delay in (10, 20, 40, 50, 50):
        it.take(A, 1, now)
        assert it.nack(A, [0], now) == 1
        assert it.take(A, 1, now + delay - 1).offsets == []
        assert it.due == now + delay
        now += delay
    it.take(A, 1, now)
    it.nack(A, [0], now, 7)
    assert it.due == now + 7
    it.take(A, 1, now + 7)
    it.nack(A, [0], now + 7, 0)

    assert it.take(A, 1, now + 7).attempts == [8]
    assert it.nack(B, [0], now + 7) == 0


def test_what_a_consumer_held_is_due_at_once_when_it_leaves() -> None:
    it = window(4)
    it.take(A, 3, 0)
    it.ack(A, [1])

    assert it.release(A) == 2
    assert it.held_by(A) == 0
    assert it.take(B, 9, 1) == Taken([0, 2, 3], [2, 2, 1])


def test_what_did_not_reach_its_consumer_was_not_delivered() -> None:
    it = window(2)
    it.take(A, 2, 0)

    assert it.give_back(A, [0, 1], [1, 1]) == 2
    assert it.take(A, 2, 0).attempts == [1, 1]


def test_what_is_given_back_late_is_not_the_delivery_that_was_made_since() -> None:
    it = window(2)
    it.take(A, 2, 0)
    assert it.take(A, 2, 1000) == Taken([0, 1], [2, 2])

    assert it.give_back(A, [0, 1], [1, 1]) == 0

    assert it.held_by(A) == 2
    assert it.ack(A, [0, 1]) == 2


def on_the_way(deliveries_max: int) -> WindowOnTheWay:
    """A window with three records, two of which A has taken and did not get yet."""
    it = WindowOnTheWay(0, WindowLimits(records_max=10, ack_timeout_ms=1000, deliveries_max=deliveries_max))
    it.offer(0, [(0, 3)], 3)
    assert it.take(A, 2, 0) == Taken([0, 1], [1, 1])
    return it


def test_the_ack_time_out_begins_when_the_consumer_gets_the_record() -> None:
    it = on_the_way(1)
    assert it.due is None
    assert it.tick(10**6) == 0

    assert it.hand_over(A, [0, 1], [1, 1], 10**6) == [True, True]

    assert it.due == 10**6 + 1000
    assert it.tick(10**6 + 999) == 0
    assert it.tick(10**6 + 1000) == 2
    assert it.spent() == [0, 1]


def test_what_was_on_its_way_to_a_consumer_that_leaves_was_not_delivered() -> None:
    it = on_the_way(1)
    it.hand_over(A, [0], [1], 0)

    assert it.release(A) == 2

    assert it.spent() == [0]
    assert it.take(B, 9, 0) == Taken([1, 2], [1, 1])
    assert it.hand_over(A, [0, 1], [1, 1], 0) == [False, False]


def test_what_is_on_its_way_may_be_done_and_is_not_refused() -> None:
    it = on_the_way(1)

    assert it.nack(A, [0, 1], 0) == 0
    assert it.ack(A, [0]) == 1

    assert it.hand_over(A, [0, 1, 2, 99], [1, 1, 1, 1], 0) == [False, True, False, False]
    assert it.nack(A, [0, 1], 0) == 1
    assert it.spent() == [1]


@pytest.mark.parametrize("how", ["nack", "time-out", "leave"])
def test_a_record_is_delivered_no_more_often_than_it_may_be(how: str) -> None:
    it = window(2, WindowLimits(records_max=10, ack_timeout_ms=1000, deliveries_max=2))
    now = 0
    for _ in range(2):
        assert it.take(A, 1, now).offsets == [0]
        if how == "nack":
            it.nack(A, [0], now, 0)
        elif how == "time-out":
            now += 1000
            it.tick(now)
        else:
            it.release(A)

    assert it.take(A, 5, now).offsets == [1]
    assert it.spent() == [0] == it.leading_spent()
    assert it.attempts_of(0) == 2
    assert it.finish([0]) == 1
    assert it.cursor == 1


def test_a_spent_record_leads_once_all_before_it_is_done() -> None:
    it = window(4, WindowLimits(records_max=10, ack_timeout_ms=1000, deliveries_max=1))
    it.take(A, 4, 0)
    it.nack(A, [1, 3], 0)

    assert (it.spent(), it.leading_spent()) == ([1, 3], [])
    it.ack(A, [0])
    assert it.leading_spent() == [1]
    it.ack(A, [2])
    assert it.leading_spent() == [1, 3]


def test_a_cumulative_ack_covers_all_before_and_nothing_of_another_consumer() -> None:
    it = window(6)
    it.take(A, 2, 0)
    it.take(B, 3, 0)
    it.nack(B, [2], 0)

    assert it.ack_up_to(A, 4) == 0
    assert it.ack_up_to(B, 3) == 2
    assert (it.cursor, list(it.acked())) == (0, [2, 3])
    assert it.ack_up_to(A, 1) == 2
    assert it.cursor == 4
    assert it.ack_up_to(A, 99) == 0


def test_the_window_is_bounded_from_the_cursor_on_and_moves_with_it() -> None:
    it = Window(0, WindowLimits(records_max=4))
    assert it.offer(0, [(0, 100)], 100) == 4
    assert it.room == 0
    it.take(A, 9, 0)
    it.ack(A, [1, 2, 3])
    assert it.offer(4, [(4, 100)], 100) == 4

    it.ack(A, [0])

    assert it.offer(4, [(4, 100)], 100) == 8
    assert it.take(A, 9, 0).offsets == [4, 5, 6, 7]


def test_offsets_without_a_record_are_done_and_a_long_gap_before_the_first_record_needs_no_room() -> None:
    it = Window(0, WindowLimits(records_max=4))

    it.offer(0, [(10**9, 10**9 + 1), (10**9 + 3, 10**9 + 4)], 10**9 + 4)

    assert (it.cursor, it.end) == (10**9, 10**9 + 4)
    assert it.take(A, 9, 0).offsets == [10**9, 10**9 + 3]
    it.ack(A, [10**9])
    assert it.cursor == 10**9 + 3
    it.ack(A, [10**9 + 3])
    it.offer(10**9 + 4, [], 2 * 10**9)
    assert it.cursor == it.end == 2 * 10**9


@pytest.mark.parametrize("start", [0, 3, 6, 100])
def test_a_page_that_does_not_begin_where_the_window_ends_changes_nothing(start: int) -> None:
    it = window(5)
    it.take(A, 2, 0)

    assert it.offer(start, [(start, start + 5)], start + 5) == 5

    assert it.take(A, 9, 0).offsets == [2, 3, 4]
    it.ack(A, range(5))
    assert it.offer(start, [(start, start + 5)], start + 5) == 5
    assert (it.cursor, it.end) == (5, 5)


def test_what_an_earlier_process_knew_is_applied_when_the_records_come() -> None:
    before = WindowLimits(records_max=10, deliveries_max=3)
    it = Window(5, before, acked=OffsetSet.of([6, 9]), attempts={5: 2, 7: 3, 9: 1, 11: 1})
    assert list(it.acked()) == [6, 9]
    assert it.attempts(2) == {5: 2, 7: 3}

    it.offer(5, [(5, 8)], 8)

    assert list(it.acked()) == [6, 9]
    assert it.take(A, 9, 0) == Taken([5], [3])
    assert it.spent() == [7]
    it.offer(8, [(8, 12)], 12)
    assert it.take(A, 9, 0) == Taken([8, 10, 11], [1, 1, 2])
    assert it.attempts(64) == {5: 3, 7: 3, 8: 1, 10: 1, 11: 2}


# Keys


def keyed(*slots: int) -> Window:
    it = Window(0, LIMITS, by_key=True)
    it.offer(0, [(0, len(slots))], len(slots), np.array(slots, np.uint16))
    return it


def test_the_records_of_a_key_are_with_one_consumer_at_a_time() -> None:
    it = keyed(1, 1, 2, 1, 2)

    assert it.take(A, 1, 0).offsets == [0]
    assert it.take(B, 9, 0).offsets == [2, 4]
    assert it.take(A, 9, 0).offsets == [1, 3]
    it.ack(A, [0, 1])
    it.offer(5, [(5, 7)], 7, np.array([1, 2], np.uint16))
    assert it.take(B, 9, 0).offsets == [6]
    it.ack(A, [3])
    assert it.take(B, 9, 0).offsets == [5]


def test_the_records_of_a_key_wait_for_an_earlier_one_that_was_delayed() -> None:
    it = keyed(1, 2, 1)
    it.take(A, 1, 0)
    it.nack(A, [0], 0, 30)

    assert it.take(A, 9, 0).offsets == [1]
    assert it.take(B, 9, 29).offsets == []
    assert it.take(B, 9, 30).offsets == [0, 2]


def test_the_keys_of_a_consumer_that_leaves_go_on_in_order_with_another() -> None:
    it = keyed(1, 1, 1)
    it.take(A, 2, 0)
    assert it.take(B, 9, 0).offsets == []

    it.release(A)

    assert it.take(B, 1, 0) == Taken([0], [2])
    assert it.take(C, 9, 0).offsets == []
    assert it.take(B, 9, 0).offsets == [1, 2]


def test_records_without_a_key_go_to_any_consumer() -> None:
    it = keyed(KEYLESS, KEYLESS, KEYLESS)

    assert it.take(A, 1, 0).offsets == [0]
    it.nack(A, [0], 0)
    assert it.take(B, 1, 0).offsets == [1]
    assert it.take(C, 9, 0).offsets == [2]


@pytest.mark.parametrize("others", [1, 40])
def test_a_take_looks_at_no_record_of_keys_that_are_with_others(others: int) -> None:
    """Each record is looked at once or twice until it is done, however many consumers ask in vain meanwhile."""
    count, keys = 4_000, 64
    it = Window(0, WindowLimits(records_max=count), by_key=True)
    for first in range(0, count, 500):
        offsets = np.arange(first, first + 500)
        it.offer(first, [(first, first + 500)], first + 500, (offsets % keys).astype(np.uint16))
    done = 0

    while done < count:
        holding = [it.take(consumer, 16, 0).offsets for consumer in range(1, 5)]
        assert any(holding)
        assert [taken for consumer in range(10, 10 + others) for taken in it.take(consumer, 16, 0).offsets] == []
        done += sum(it.ack(consumer, taken) for consumer, taken in enumerate(holding, 1))

    assert it.examined <= 2 * count + keys


def test_the_first_ready_record_of_a_key_is_found_whatever_became_of_those_before() -> None:
    it = keyed(1, 1, 1, 1, 1, 2)
    assert it.take(A, 3, 0).offsets == [0, 1, 2]

    # Back in another order, one is done by a late ack, and the arrays move on.
    it.nack(A, [2], 0, 0)
    it.nack(A, [0], 0, 0)
    it.ack(A, [0, 1])
    it.offer(6, [(6, 90)], 90, np.full(84, 1, np.uint16))

    assert it.cursor == 2
    assert it.take(B, 4, 0).offsets == [2, 3, 4, 5]
    assert it.take(C, 9, 0).offsets == []
    it.ack(B, [2, 3, 4])
    assert it.take(C, 2, 0).offsets == [6, 7]


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_an_ack_of_one_record_does_what_an_ack_of_many_does(seed: int, *, by_key: bool) -> None:
    """A record named twice is acknowledged by the way of many: two windows that go the two ways stay alike."""
    chance, now = random.Random(seed), 0
    limits = WindowLimits(records_max=40, ack_timeout_ms=20, backoff_min_ms=3, backoff_max_ms=8, deliveries_max=4)
    one, many = Window(0, limits, by_key=by_key), Window(0, limits, by_key=by_key)

    for _ in range(300):
        now += chance.randrange(6)
        consumer, offset, count = (
            chance.choice((A, B, C)),
            one.cursor + chance.randrange(-2, 24),
            chance.randrange(1, 9),
        )
        end = one.end + count
        slots = np.array([chance.choice((1, 2, 3, KEYLESS)) for _ in range(count)], np.uint16) if by_key else None
        match chance.randrange(6):
            case 0:
                one.offer(one.end, [(one.end, end)], end, slots)
                many.offer(many.end, [(many.end, end)], end, slots)
            case 1:
                assert one.take(consumer, count, now) == many.take(consumer, count, now)
            case 2:
                assert one.nack(consumer, [offset], now) == many.nack(consumer, [offset], now)
            case _:
                assert one.ack(consumer, [offset]) == many.ack(consumer, [offset, offset])
        assert (one.cursor, one.end, one.counts, one.due) == (many.cursor, many.end, many.counts, many.due)
        assert [one.held_by(each) for each in (A, B, C)] == [many.held_by(each) for each in (A, B, C)]
        assert list(one.acked()) == list(many.acked()) and one.attempts(99) == many.attempts(99)
        assert one.is_free(now) == many.is_free(now) and one.due_holders() == many.due_holders()


# The model


@dataclass
class Plain:
    """One record, as simple as can be."""

    slot: int
    state: str = "ready"
    attempts: int = 0
    holder: int = 0
    due: int = 0


class WindowMachine(RuleBasedStateMachine):
    """Any sequence of calls gives what a dictionary of records gives."""

    by_key = False
    limits = WindowLimits(records_max=12, ack_timeout_ms=20, backoff_min_ms=3, backoff_max_ms=8, deliveries_max=3)

    def __init__(self) -> None:
        super().__init__()
        self.window = Window(0, self.limits, by_key=self.by_key)
        self.plain: dict[int, Plain | None] = {}
        """What is in the window; `None` for what is done."""
        self.cursor = 0
        self.now = 0
        self.had: set[int] = set()
        """Offsets that have a record."""
        self.stored: tuple[int, OffsetSet, dict[int, int]] = (0, OffsetSet(), {})
        """The cursor record."""
        self.sent: list[int] = []
        """Offsets of dead letters, in the order in which they arrived."""

    @property
    def end(self) -> int:
        return self.cursor + len(self.plain)

    # Records come

    @rule(
        runs=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), max_size=3),
        slot_numbers=st.lists(st.sampled_from([0, 1, 2, KEYLESS]), min_size=1, max_size=5),
    )
    def offer(self, runs: list[tuple[int, int]], slot_numbers: list[int]) -> None:
        at, ranges = self.end, []
        for gap, count in runs:
            ranges.append((at + gap, at + gap + count))
            at += gap + count
        offsets = [offset for start, stop in ranges for offset in range(start, stop)]
        slots = [slot_numbers[offset % len(slot_numbers)] for offset in offsets]
        slot_of = dict(zip(offsets, slots, strict=True))
        if not self.plain:
            self.cursor = offsets[0] if offsets else at
        stop = min(at, self.cursor + self.limits.records_max)
        for offset in range(self.end, stop):
            self.plain[offset] = Plain(slot_of[offset]) if offset in slot_of else None
            if offset in slot_of:
                self.had.add(offset)
        self._trim()

        end = self.window.offer(self.window.end, ranges, at, np.array(slots, np.uint16) if self.by_key else None)

        assert end == self.end

    # Consumers

    @rule(consumer=st.sampled_from([A, B, C]), count=st.integers(0, 5))
    def take(self, consumer: int, count: int) -> None:
        self._tick()
        expected: list[tuple[int, int]] = []
        for offset in sorted(self.plain):
            record = self.plain[offset]
            if record is None or record.state != "ready" or len(expected) == count:
                continue
            if self._is_free(record, consumer):
                record.state, record.holder = "held", consumer
                record.attempts += 1
                record.due = self.now + self.limits.ack_timeout_ms
                expected.append((offset, record.attempts))

        taken = self.window.take(consumer, count, self.now)

        assert list(zip(taken.offsets, taken.attempts, strict=True)) == expected

    @rule(consumer=st.sampled_from([A, B, C]), which=st.sets(st.integers(-1, 14)))
    def ack(self, consumer: int, which: set[int]) -> None:
        offsets = [self.cursor + number for number in which]
        done = [offset for offset in offsets if self._may_finish(consumer, self.plain.get(offset))]
        for offset in done:
            self.plain[offset] = None
        self._trim()

        assert self.window.ack(consumer, offsets) == len(done)

    @rule(consumer=st.sampled_from([A, B, C]), number=st.integers(-1, 14))
    def ack_up_to(self, consumer: int, number: int) -> None:
        last = self.cursor + number
        record = self.plain.get(last)
        done = []
        if last in self.plain and (record is None or self._may_finish(consumer, record)):
            done = [
                offset
                for offset, other in self.plain.items()
                if offset <= last and other is not None and not (other.state == "held" and other.holder != consumer)
            ]
        for offset in done:
            self.plain[offset] = None
        self._trim()

        assert self.window.ack_up_to(consumer, last) == len(done)

    @rule(
        consumer=st.sampled_from([A, B, C]),
        which=st.sets(st.integers(-1, 14)),
        delay=st.one_of(st.none(), st.integers(0, 9)),
    )
    def nack(self, consumer: int, which: set[int], delay: int | None) -> None:
        offsets = [self.cursor + number for number in which]
        held = self._held(consumer, offsets)
        for record in held:
            backoff = min(self.limits.backoff_min_ms * 2 ** (record.attempts - 1), self.limits.backoff_max_ms)
            wait = backoff if delay is None else delay
            self._end(record)
            if record.state == "ready" and wait:
                record.state, record.due = "delayed", self.now + wait

        assert self.window.nack(consumer, offsets, self.now, delay) == len(held)

    @rule(consumer=st.sampled_from([A, B, C]), which=st.sets(st.integers(-1, 14)))
    def give_back(self, consumer: int, which: set[int]) -> None:
        offsets = [self.cursor + number for number in which]
        # Of every other record it is an earlier delivery.
        attempts = [(record.attempts if (record := self.plain.get(offset)) else 1) - offset % 2 for offset in offsets]
        held = self._held(consumer, [offset for offset in offsets if offset % 2 == 0])
        for record in held:
            record.state = "ready"
            record.attempts -= 1

        assert self.window.give_back(consumer, offsets, attempts) == len(held)

    @rule(consumer=st.sampled_from([A, B, C]))
    def leave(self, consumer: int) -> None:
        held = self._held(consumer, list(self.plain))
        for record in held:
            self._end(record)

        assert self.window.release(consumer) == len(held)

    @rule(which=st.sets(st.integers(-1, 14)))
    def finish(self, which: set[int]) -> None:
        offsets = [self.cursor + number for number in which]
        done = [offset for offset in offsets if self.plain.get(offset) is not None]
        for offset in done:
            self.plain[offset] = None
        self._trim()

        assert self.window.finish(offsets) == len(done)

    @rule(passed=st.integers(1, 12))
    def stall(self, passed: int) -> None:
        self.now += passed

    @rule()
    def tick(self) -> None:
        due = self.window.due
        changed = self._tick()

        assert self.window.tick(self.now) == changed
        assert changed == 0 or (due is not None and due <= self.now)

    @precondition(lambda self: not self.by_key)
    @rule()
    def restart(self) -> None:
        """Another process goes on by the cursor record: what was held is due again, with its deliveries."""
        acked, attempts = self.window.acked(), self.window.attempts(64)
        cursor, end = self.window.cursor, self.window.end
        present = [offset for offset, record in self.plain.items() if record is not None]
        for record in self.plain.values():
            if record is not None:
                record.state = "held"
                self._end(record)

        self.window = Window(cursor, self.limits, acked=acked, attempts=attempts)
        self.window.offer(cursor, [(offset, offset + 1) for offset in present], end)

    # Dead letters

    @rule(count=st.integers(1, 3))
    def send(self, count: int) -> None:
        """Spent records go to the dead-letter topic, those that have nothing unfinished before them."""
        leading = []
        for offset, record in self.plain.items():
            if record is not None and record.state != "spent":
                break
            if record is not None:
                leading.append(offset)

        assert self.window.leading_spent() == leading
        for offset in leading[:count]:
            assert not self.sent or offset > self.sent[-1], "a dead letter is sent twice, or out of order"
            self.sent.append(offset)
            self.plain[offset] = None
        self._trim()
        assert self.window.finish(leading[:count]) == len(leading[:count])

    @rule(ahead=st.integers(-2, 5))
    def skip(self, ahead: int) -> None:
        """A slow consumer of a lossy topic goes on further ahead."""
        stop = self.cursor + ahead
        unheld = [
            offset
            for offset in range(self.cursor, stop)
            if offset >= self.end or ((record := self.plain[offset]) is not None and record.state != "held")
        ]
        self._skip_to(stop)

        assert self.window.skip_to(stop) == len(unheld)

    @rule()
    def store(self) -> None:
        self.stored = self.window.cursor, self.window.acked(), self.window.attempts(64)

    @precondition(lambda self: not self.by_key)
    @rule()
    def crash(self) -> None:
        """Another process goes on by an older cursor record; the dead-letter topic says how far this one had come."""
        cursor, acked, attempts = self.stored
        end = min(self.end, cursor + self.limits.records_max)
        self.cursor, self.plain = cursor, {}
        for offset in range(cursor, end):
            if offset in self.had and offset not in acked:
                self.plain[offset] = record = Plain(KEYLESS, "held", attempts.get(offset, 0))
                self._end(record)
            else:
                self.plain[offset] = None
        present = [offset for offset, record in self.plain.items() if record is not None]
        self._trim()
        if not self.plain:
            self.cursor = max(end, cursor)
        self.window = Window(cursor, self.limits, acked=acked, attempts=attempts)
        self.window.offer(cursor, [(offset, offset + 1) for offset in present], end)
        stop = max(self.sent, default=-1) + 1
        self._skip_to(stop)
        self.window.skip_to(stop)

    # What holds at all times

    @invariant()
    def the_window_is_as_the_model(self) -> None:
        states = [record.state for record in self.plain.values() if record is not None]
        assert (self.window.cursor, self.window.end) == (self.cursor, self.end)
        assert self.window.counts == tuple(states.count(state) for state in ("ready", "held", "delayed", "spent"))
        above = [offset for offset in self.window.acked() if offset < self.end]
        assert above == [offset for offset, record in self.plain.items() if record is None]
        spent = [offset for offset, record in self.plain.items() if record is not None and record.state == "spent"]
        assert self.window.spent() == spent
        assert {offset: count for offset, count in self.window.attempts(64).items() if offset < self.end} == {
            offset: record.attempts for offset, record in self.plain.items() if record is not None and record.attempts
        }
        for consumer in (A, B, C):
            assert self.window.held_by(consumer) == len(self._held(consumer, list(self.plain)))

    @invariant()
    def no_key_is_with_two_consumers(self) -> None:
        if self.by_key:
            held = [record for record in self.plain.values() if record is not None and record.state == "held"]
            pairs = {(record.slot, record.holder) for record in held if record.slot != KEYLESS}
            assert len(pairs) == len({slot for slot, _ in pairs})

    # How the model works

    def _is_free(self, record: Plain, consumer: int) -> bool:
        if not self.by_key or record.slot == KEYLESS:
            return True
        same = [other for other in self.plain.values() if other is not None and other.slot == record.slot]
        with_another = any(other.state == "held" and other.holder != consumer for other in same)
        return not with_another and not any(other.state == "delayed" for other in same)

    def _may_finish(self, consumer: int, record: Plain | None) -> bool:
        if record is None:
            return False
        return record.holder == consumer if record.state == "held" else record.attempts > 0

    def _held(self, consumer: int, offsets: list[int]) -> list[Plain]:
        records = [record for offset in offsets if (record := self.plain.get(offset)) is not None]
        return [record for record in records if record.state == "held" and record.holder == consumer]

    def _end(self, record: Plain) -> None:
        record.state = "spent" if record.attempts >= (self.limits.deliveries_max or 10**9) else "ready"

    def _tick(self) -> int:
        over = [
            record
            for record in self.plain.values()
            if record is not None and record.state in ("held", "delayed") and record.due <= self.now
        ]
        for record in over:
            if record.state == "held":
                self._end(record)
            else:
                record.state = "ready"
        return len(over)

    def _skip_to(self, stop: int) -> None:
        for offset in range(self.cursor, min(stop, self.end)):
            self.plain[offset] = None
        self._trim()
        if not self.plain:
            self.cursor = max(self.cursor, stop)

    def _trim(self) -> None:
        while self.plain and self.plain[self.cursor] is None:
            del self.plain[self.cursor]
            self.cursor += 1


class KeyedMachine(WindowMachine):
    """The same, with the order of keys kept."""

    by_key = True


class HastyMachine(WindowMachine):
    """The same, where a record is delivered once and is spent then."""

    limits = WindowLimits(records_max=12, ack_timeout_ms=20, backoff_min_ms=3, backoff_max_ms=8, deliveries_max=1)


TestHastyWindow = HastyMachine.TestCase
TestHastyWindow.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestWindow = WindowMachine.TestCase
TestWindow.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestKeyedWindow = KeyedMachine.TestCase
TestKeyedWindow.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


def step_of(it: WindowMachine, chance: random.Random) -> None:
    """One step, most often that consumers take and acknowledge."""
    consumer = chance.choice([A, B, C])
    which = {number for number in range(13) if chance.random() < 0.4}
    runs = [(chance.choice([0, 0, 0, 2]), chance.randint(1, 4)) for _ in range(2)]
    slots = [chance.choice([0, 1, 2, KEYLESS]) for _ in range(5)]
    steps: list[tuple[int, Callable[[], None]]] = [
        (6, lambda: it.offer(runs, slots)),
        (9, lambda: it.take(consumer, chance.randint(1, 4))),
        (6, lambda: it.ack(consumer, which)),
        (1, lambda: it.ack_up_to(consumer, chance.randint(0, 4))),
        (4, lambda: it.nack(consumer, which, chance.choice([None, 0, 5]))),
        (1, lambda: it.give_back(consumer, which)),
        (1, lambda: it.leave(consumer)),
        (4, lambda: it.stall(chance.randint(1, 6))),
        (3, lambda: it.send(chance.randint(1, 3))),
        (1, it.store),
        (1, lambda: it.skip(chance.randint(-1, 3))),
    ]
    if not it.by_key:
        steps += [(1, it.restart), (1, it.crash)]
    (chosen,) = chance.choices([step for _, step in steps], [weight for weight, _ in steps])
    chosen()


@pytest.mark.parametrize("machine", [WindowMachine, KeyedMachine, HastyMachine])
def test_consumers_come_and_go_stall_and_die(machine: type[WindowMachine]) -> None:
    """Long schedules: consumers take and acknowledge most of the time, and something else happens now and then."""
    for seed in range(12):
        chance = random.Random(seed)
        it = machine()
        for _ in range(150):
            step_of(it, chance)
            it.the_window_is_as_the_model()
            it.no_key_is_with_two_consumers()


# Memory


@pytest.mark.slow
@pytest.mark.parametrize("by_key", [False, True])
def test_a_million_unacknowledged_records_cost_tens_of_megabytes(*, by_key: bool) -> None:
    count, step = 1_000_000, 100_000
    slots = (np.arange(step) % 4096).astype(np.uint16)
    it = Window(0, WindowLimits(records_max=count), by_key=by_key)

    for first in range(0, count, step):
        it.offer(first, [(first, first + step)], first + step, slots if by_key else None)
        it.take(A, step, 0)

    assert it.counts.held == count
    assert sum(sys.getsizeof(field) for field in vars(it).values()) < 32 * 1024 * 1024
    assert it.ack(A, range(1, count, 2)) == count // 2
    assert it.release(A) == count // 2
