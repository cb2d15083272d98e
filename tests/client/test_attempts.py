"""When a call is repeated, after which pause, and which error ends it."""

from __future__ import annotations

import pytest

from forebay.client.lanes import BY_KEY, ProducerLanes
from forebay.client.transport import PAUSE_MAX_S, CallAttempts, HttpCall, RefusedCall
from forebay.errors import (
    Closed,
    Conflict,
    ForebayError,
    Full,
    Indeterminate,
    Invalid,
    Moved,
    NotReady,
    PartitionOutcomes,
    Throttled,
    Unavailable,
    UnknownTopic,
)
from forebay.testing.simulated.clock import ManualClock

POST = HttpCall(method="POST", path="/v1/x")
GET = HttpCall(method="GET", path="/v1/x")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def attempts(clock: ManualClock, call: HttpCall = POST) -> CallAttempts:
    return CallAttempts(call, "http://broker", 60.0, clock)


@pytest.mark.parametrize("error", [Unavailable("x"), NotReady("x"), Throttled("x"), Closed("x"), Indeterminate("x")])
def test_what_is_refused_for_now_is_tried_again(clock: ManualClock, error: ForebayError) -> None:
    assert 0 < attempts(clock).pause_after(RefusedCall(error, None)) < 1


@pytest.mark.parametrize("error", [Invalid("x"), Conflict("x"), Moved("x"), Full("x"), ForebayError("x")])
def test_what_is_refused_for_good_is_raised(clock: ManualClock, error: ForebayError) -> None:
    with pytest.raises(type(error)) as raised:
        attempts(clock).pause_after(RefusedCall(error, None))

    assert raised.value is error


def test_a_log_that_was_closed_here_is_not_asked_again(clock: ManualClock) -> None:
    with pytest.raises(Closed):
        attempts(clock).pause_after(Closed("closed here"))


def test_the_broker_says_when_to_come_back(clock: ManualClock) -> None:
    assert attempts(clock).pause_after(RefusedCall(Throttled("x"), 7)) == 7


def test_pauses_grow_to_a_limit(clock: ManualClock) -> None:
    tried = attempts(clock)
    pauses = [tried.pause_after(Unavailable("x")) for _ in range(20)]

    assert pauses[0] < 0.02
    assert PAUSE_MAX_S / 2 <= pauses[-1] <= PAUSE_MAX_S


def test_when_the_time_is_up_the_last_reason_is_raised(clock: ManualClock) -> None:
    tried = attempts(clock)
    tried.pause_after(Unavailable("once"))
    clock.advance(60)

    with pytest.raises(NotReady, match="tried 2 times in 60 s: recovering") as raised:
        tried.pause_after(RefusedCall(NotReady("recovering", replay_progress=0.4), 1))
    assert raised.value.replay_progress == 0.4


@pytest.mark.parametrize(("call", "kind"), [(POST, Indeterminate), (GET, Unavailable)])
def test_a_change_whose_answer_was_lost_is_in_doubt_when_the_time_is_up(
    clock: ManualClock, call: HttpCall, kind: type[ForebayError]
) -> None:
    tried = attempts(clock, call)
    tried.pause_after(Indeterminate("lost"))
    clock.advance(60)

    with pytest.raises(kind):
        tried.pause_after(Unavailable("not there"))


def test_a_refusal_after_a_lost_answer_says_not_that_nothing_was_done(clock: ManualClock) -> None:
    tried = attempts(clock)
    tried.pause_after(Indeterminate("lost"))

    with pytest.raises(Indeterminate, match="may have done it") as raised:
        tried.pause_after(RefusedCall(Conflict("out of step", topic="shop/orders"), None))
    assert isinstance(raised.value.__cause__, Conflict)
    assert raised.value.topic == "shop/orders"
    with pytest.raises(UnknownTopic):
        tried.pause_after(RefusedCall(UnknownTopic("gone"), None))


def test_what_the_last_answer_says_of_each_partition_outlives_the_repeats(clock: ManualClock) -> None:
    away, full = Unavailable("away", partition=1), Full("full", partition=2)
    records = ((0, 7), (1, None), (2, None))
    last = Indeterminate("1 is there").with_outcome(PartitionOutcomes(((0, 7, 1),), {1: away, 2: full}, records))
    for lost, kind in ((None, Unavailable), (Indeterminate("lost"), Indeterminate)):
        tried = attempts(clock)
        for failure in (lost, last) if lost is not None else (last,):
            tried.pause_after(RefusedCall(failure, None))
        clock.advance(60)

        with pytest.raises(Indeterminate, match="tried") as raised:
            tried.pause_after(RefusedCall(last, None))

        outcome = raised.value.append_outcome
        assert outcome is not None
        assert (outcome.ranges, outcome.records) == (((0, 7, 1),), records)
        assert (type(outcome.failures[1]), outcome.failures[2]) == (kind, full)
        assert outcome.failures[1].partition == 1


def test_lanes_of_appends_at_the_same_time_are_not_shared(clock: ManualClock) -> None:
    lanes = ProducerLanes(clock)
    first, second, keyed = lanes.take(0), lanes.take(0), lanes.take(BY_KEY)
    assert len({first.producer, second.producer, keyed.producer}) == 3
    assert all(1 <= lane.producer < 2**63 for lane in (first, second, keyed))

    first.sequence += 1
    lanes.give_back(0, first)

    assert lanes.take(0) is first
    assert lanes.take(1) is not second
