"""How much may be under way: admitted, refused before it counts, and released exactly once."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import Throttled, TooLarge
from forebay.service.quotas import BURST_SECONDS, Admission, QuotaCounts, Quotas, RateBucket
from forebay.settings import MIB, ServerSettings
from forebay.testing.simulated.clock import ManualClock

QUIET = QuotaCounts(requests=0, bytes=0, streams=0, consumers=0, principals=0, admitted=0)


def quotas(clock: ManualClock | None = None, **limits: int) -> Quotas:
    return Quotas(ServerSettings(**limits), clock or ManualClock(seed=1))  # type: ignore[arg-type]


def under_way(quotas: Quotas) -> tuple[int, int, int]:
    counts = quotas.counts()
    return counts.requests, counts.bytes, counts.streams


def test_what_is_under_way_counts_and_then_no_longer() -> None:
    here = quotas()

    with here.request("a", 100), here.request("b", 20), here.stream("a"), here.consumer("a"):
        assert here.counts().consumers == 1
        assert under_way(here) == (2, 120, 1)
        assert here.counts().principals == 2
    assert here.counts() == QuotaCounts(requests=0, bytes=0, streams=0, consumers=0, principals=0, admitted=4)


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ({"requests_per_principal_max": 2}, "requests_per_principal_max"),
        ({"requests_max": 2, "requests_per_principal_max": 2}, "requests_per_principal_max"),
    ],
)
def test_one_request_too_many_is_refused_and_counts_nothing(limits: dict[str, int], name: str) -> None:
    here = quotas(None, **limits)

    with here.request("a", 1), here.request("a", 1):
        with pytest.raises(Throttled, match="try again in 1 s") as refusal, here.request("a", 1):
            raise AssertionError("it was refused")
        assert under_way(here) == (2, 2, 0)
        with here.stream("a"):
            assert under_way(here) == (2, 2, 1)
    assert refusal.value.detail == {"limit": f"server.{name}", "retry_after_s": 1.0}
    assert here.counts().refused == {f"server.{name}": 1}
    assert under_way(here) == (0, 0, 0)


def test_a_principal_at_its_limit_leaves_room_for_others_and_the_process_has_its_own() -> None:
    here = quotas(requests_max=3, requests_per_principal_max=2, streams_max=2, streams_per_principal_max=1)

    full = "server.requests_max is reached: the server has 3"
    with (
        here.request("a"),
        here.request("a"),
        here.request("b"),
        pytest.raises(Throttled, match=full),
        here.request("c"),
    ):
        pass
    with here.stream("a"):
        with pytest.raises(Throttled, match="server.streams_per_principal_max is reached: a has 1"), here.stream("a"):
            pass
        with here.stream("b"), pytest.raises(Throttled, match="server.streams_max"), here.stream("c"):
            pass
    assert under_way(here) == (0, 0, 0) and here.counts().principals == 0


def test_bytes_in_memory_are_bounded_for_each_and_for_all() -> None:
    here = quotas(body_bytes_max=MIB, bytes_in_flight_per_principal_max=2 * MIB, bytes_in_flight_max=3 * MIB)

    with here.request("a", MIB), here.request("a", MIB):
        with pytest.raises(Throttled, match="bytes_in_flight_per_principal_max"), here.request("a", 1):
            pass
        full = pytest.raises(Throttled, match="bytes_in_flight_max")
        with here.request("a"), here.request("b", MIB), full, here.request("c", 1):
            pass
    assert under_way(here) == (0, 0, 0)


def test_a_body_that_is_too_large_is_refused_for_good() -> None:
    here = quotas(body_bytes_max=1024)

    with here.request("a", 1024):
        pass
    with (
        pytest.raises(TooLarge, match="server.body_bytes_max allows 1024: send less") as refusal,
        here.request("a", 1025),
    ):
        pass
    assert (refusal.value.size, refusal.value.limit) == (1025, 1024)
    assert here.counts().refused == {"server.body_bytes_max": 1}


def test_a_body_of_unknown_length_counts_as_it_comes_and_all_of_it_is_released() -> None:
    here = quotas(body_bytes_max=1024)

    with here.request("a") as admission:
        for _ in range(4):
            admission.grow(256)
        assert under_way(here) == (1, 1024, 0)
        with pytest.raises(TooLarge) as refusal:
            admission.grow(1)
        assert refusal.value.size == 1025
        assert under_way(here) == (1, 1024, 0)
    assert under_way(here) == (0, 0, 0)


def test_a_failure_inside_releases_once() -> None:
    here = quotas()

    with pytest.raises(ZeroDivisionError), here.request("a", 7) as admission:
        admission.grow(3)
        raise ZeroDivisionError
    assert under_way(here) == (0, 0, 0)
    with pytest.raises(AssertionError, match="entered once"), admission:
        pass


def test_a_call_that_is_cancelled_releases_once() -> None:
    here = quotas()

    async def call(begun: asyncio.Event) -> None:
        with here.request("a", 7), here.stream("a"):
            begun.set()
            await asyncio.Event().wait()

    async def program() -> tuple[int, int, int]:
        begun = asyncio.Event()
        task = asyncio.create_task(call(begun))
        await begun.wait()
        during = under_way(here)
        task.cancel()
        await asyncio.wait([task])
        return during

    assert asyncio.run(program()) == (1, 7, 1)
    assert under_way(here) == (0, 0, 0)


def test_an_admission_that_is_never_entered_does_not_count() -> None:
    here = quotas()

    here.request("a", 5)
    here.stream("a")

    assert here.counts() == QUIET


def test_a_rate_lets_a_burst_through_and_says_when_to_come_again() -> None:
    clock = ManualClock(seed=1)
    here = quotas(clock, requests_per_second_max=10)

    for _ in range(int(10 * BURST_SECONDS)):
        with here.request("a"):
            pass
    with pytest.raises(Throttled, match="requests_per_second_max is reached: a has used up its rate") as refusal:
        here.request("a").__enter__()
    assert refusal.value.retry_after_s == pytest.approx(0.1)
    with here.request("b"), here.stream("a"):
        pass

    clock.advance(refusal.value.retry_after_s or 0.0)
    with here.request("a"):
        pass
    assert here.counts().principals == 2, "what they have used counts still"
    clock.advance(60)
    with here.stream("a"), here.stream("b"):
        pass
    assert here.counts().principals == 0


def test_a_rate_of_bytes_counts_bodies_also_while_they_come() -> None:
    clock = ManualClock(seed=1)
    here = quotas(clock, bytes_per_second_max=1000)

    with here.request("a", 1500) as admission:
        admission.grow(500)
        with pytest.raises(Throttled) as refusal:
            admission.grow(500)
        assert refusal.value.limit == "server.bytes_per_second_max"
        assert refusal.value.retry_after_s == pytest.approx(0.5)
        clock.advance(0.5)
        admission.grow(500)
    assert under_way(here) == (0, 0, 0)


def test_more_than_a_burst_is_let_through_once_and_paid_off() -> None:
    bucket = RateBucket(10, now=0.0)

    assert bucket.wait_s(500, 0.0) == 0.0
    bucket.take(500, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(48.1)
    assert bucket.wait_s(1, 48.1) == 0.0
    assert not bucket.is_full(48.1) and bucket.is_full(50.0)


@given(st.integers(1, 10**9), st.integers(1, 10**9), st.floats(0, 10**7))
def test_a_caller_that_waits_as_long_as_it_was_asked_to_is_not_refused_again(
    rate: int, amount: int, now: float
) -> None:
    bucket = RateBucket(rate, now)
    bucket.take(amount * 3, now)

    assert bucket.wait_s(amount, now + bucket.wait_s(amount, now)) == 0.0


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 30)), max_size=60))
def test_no_schedule_gets_more_than_burst_and_rate(steps: list[tuple[float, int]]) -> None:
    rate, now, taken = 10.0, 0.0, 0
    bucket = RateBucket(rate, now)

    for pause, amount in steps:
        now += pause
        if bucket.wait_s(amount, now) == 0.0:
            bucket.take(amount, now)
            taken += amount
        assert taken <= rate * BURST_SECONDS + rate * now + 30


@pytest.mark.parametrize(
    ("total", "below", "name"), [(100, 10, "topics_per_principal_max"), (1000, 9, "topics_max"), (999, 9, None)]
)
def test_topics_are_counted_below_prefixes_and_in_all(total: int, below: int, name: str | None) -> None:
    here = quotas(topics_max=1000, topics_per_principal_max=10)

    if name is None:
        here.check_topics(total=total, below=below)
        return
    with pytest.raises(Throttled, match="delete some, or raise it") as refusal:
        here.check_topics(total=total, below=below)
    assert (refusal.value.limit, refusal.value.retry_after_s) == (f"server.{name}", None)
    assert here.counts().refused == {f"server.{name}": 1}


@given(st.data())
def test_whatever_comes_and_goes_nothing_is_left(data: st.DataObject) -> None:
    here = quotas(requests_max=6, requests_per_principal_max=3, streams_max=4, streams_per_principal_max=2)
    entered: list[Admission] = []

    for _ in range(data.draw(st.integers(0, 40))):
        is_leaving: bool = data.draw(st.booleans())
        if is_leaving and entered:
            entered.pop(data.draw(st.integers(0, len(entered) - 1))).__exit__(None, None, None)
            continue
        who, size = data.draw(st.sampled_from("abc")), data.draw(st.integers(0, 9))
        admission = here.request(who, size) if data.draw(st.booleans()) else here.stream(who)
        try:
            entered.append(admission.__enter__())
        except Throttled:
            continue
        counts = here.counts()
        assert counts.requests <= 6 and counts.streams <= 4
    for admission in entered:
        admission.__exit__(None, None, None)

    assert under_way(here) == (0, 0, 0) and here.counts().principals == 0


def test_an_answer_takes_the_place_of_a_body_and_is_released_with_it() -> None:
    here = quotas()

    with here.request("a", 100) as admission:
        admission.hold(5_000)
        assert under_way(here) == (1, 5_000, 0)
        admission.hold(20)
        assert under_way(here) == (1, 20, 0)
    assert under_way(here) == (0, 0, 0)


def test_an_answer_is_refused_beside_others_but_not_by_itself_nor_when_the_call_is_done() -> None:
    here = quotas(body_bytes_max=MIB, bytes_in_flight_per_principal_max=2 * MIB, bytes_in_flight_max=3 * MIB)

    with here.request("a") as alone:
        alone.hold(9 * MIB)
        assert under_way(here) == (1, 9 * MIB, 0)
    with here.request("a", MIB), here.request("a") as second, here.request("b") as third:
        with pytest.raises(Throttled, match="bytes_in_flight_per_principal_max"):
            second.hold(MIB + 1)
        assert under_way(here) == (3, MIB, 0)
        second.hold(MIB)
        with pytest.raises(Throttled, match="bytes_in_flight_max"):
            third.hold(MIB + 1)
        third.hold(MIB + 1, is_done=True)
        assert under_way(here) == (3, 3 * MIB + 1, 0)
    assert under_way(here) == (0, 0, 0)


def test_answers_whose_size_can_be_chosen_share_the_room() -> None:
    here = quotas(body_bytes_max=MIB, bytes_in_flight_per_principal_max=2 * MIB, bytes_in_flight_max=2 * MIB)

    with here.request("a") as first, here.request("a") as second, here.request("b") as third, here.request("b") as last:
        assert first.reserve(64 * MIB) == MIB
        assert first.reserve(64 * MIB) == MIB, "in place of what it held"
        assert second.reserve(64 * MIB) == MIB // 2
        assert third.reserve(1000) == 1000
        third.hold(MIB // 2)
        with pytest.raises(Throttled):
            last.reserve(MIB)
    assert under_way(here) == (0, 0, 0)
