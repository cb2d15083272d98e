"""Which job begins next: shares of keys and callers, turns, suspects and deadlines, with time by hand and no thread."""

from __future__ import annotations

import pytest

from forebay import Unavailable
from forebay.executor import KeyedJob, Schedule, WorkClass

READ = WorkClass(name="read", threads=8, slow_s=1.0)
JOB = WorkClass(name="job", threads=2, slow_s=5.0, per_key=1)
FEW = 3


def job(key: str, caller: str = "", kind: WorkClass = READ, deadline: float | None = None) -> KeyedJob:
    return KeyedJob(kind=kind, key=key, caller=caller, deadline=deadline)


def added(schedule: Schedule[KeyedJob], *jobs: KeyedJob) -> list[KeyedJob]:
    for each in jobs:
        schedule.add(each)
    return list(jobs)


def begun(schedule: Schedule[KeyedJob], now: float = 0.0) -> list[KeyedJob]:
    """All jobs that may begin at this time."""
    found = []
    while schedule.can_take():
        taken = schedule.take(now)
        assert taken is not None
        found.append(taken)
    assert schedule.take(now) is None
    return found


def keys(jobs: list[KeyedJob]) -> list[object]:
    return [each.key for each in jobs]


def test_a_key_has_its_share_of_a_class_and_others_have_the_rest() -> None:
    schedule: Schedule[KeyedJob] = Schedule()
    added(schedule, *(job("hung") for _ in range(20)), *(job(f"k{number}") for number in range(4)))
    assert sorted(map(str, keys(begun(schedule)))) == ["hung", "hung", "k0", "k1", "k2", "k3"]


def test_a_class_has_no_more_threads_than_it_has() -> None:
    schedule: Schedule[KeyedJob] = Schedule()
    first, *_ = added(schedule, *(job(f"k{number}") for number in range(20)))
    assert len(begun(schedule)) == READ.threads
    schedule.end(first)
    assert keys(begun(schedule)) == [f"k{READ.threads}"]


def test_a_full_class_holds_up_no_other_class() -> None:
    schedule: Schedule[KeyedJob] = Schedule()
    added(schedule, *(job(f"k{number}", kind=JOB) for number in range(5)), job("k0"))
    assert [each.kind for each in begun(schedule)] == [JOB, JOB, READ]


def test_a_caller_has_its_share_and_one_that_stands_for_many_has_all() -> None:
    schedule: Schedule[KeyedJob] = Schedule(crowds=("", "anonymous"))
    added(schedule, *(job(f"a{number}", "a") for number in range(9)), job("b0", "b"))
    assert keys(begun(schedule)) == ["a0", "b0", "a1"]
    added(schedule, *(job(f"n{number}", "anonymous") for number in range(9)))
    assert keys(begun(schedule)) == [f"n{number}" for number in range(5)]


def test_callers_take_turns_and_so_do_the_keys_of_each() -> None:
    schedule: Schedule[KeyedJob] = Schedule()
    full = added(schedule, *(job(f"full{number}") for number in range(READ.threads)))
    begun(schedule)
    added(schedule, job("x", "a"), job("x", "a"), job("y", "a"), job("z", "b"), job("w", "c"))
    found = []
    for each in full[:5]:
        schedule.end(each)
        found += [(one.caller, one.key) for one in begun(schedule)]
    assert found == [("a", "x"), ("b", "z"), ("c", "w"), ("a", "y")], "and a has its share then"


def test_jobs_of_one_key_and_caller_begin_in_the_order_they_came() -> None:
    schedule: Schedule[KeyedJob] = Schedule()
    jobs = added(schedule, *(job("k", kind=JOB) for _ in range(4)))
    order = []
    for _ in jobs:
        [one] = begun(schedule)
        order.append(one)
        schedule.end(one)
    assert order == jobs


def test_a_slow_job_no_longer_counts_and_another_begins_in_its_place() -> None:
    schedule: Schedule[KeyedJob] = Schedule()
    added(schedule, *(job(f"hung{number}") for number in range(READ.threads)))
    begun(schedule, now=10.0)
    schedule.add(job("other"))
    assert schedule.give_up_slow(10.9) == []
    assert begun(schedule, 10.9) == []
    assert len(schedule.give_up_slow(11.0)) == schedule.given_up == READ.threads
    assert keys(begun(schedule, 11.0)) == ["other"]


def test_jobs_at_suspect_keys_begin_last_and_never_more_than_the_share_of_the_key() -> None:
    schedule: Schedule[KeyedJob] = Schedule()
    [hung] = added(schedule, job("hung"))
    begun(schedule)
    schedule.give_up_slow(1.0)
    more = added(schedule, job("hung"), job("hung"), *(job(f"k{number}") for number in range(3)))
    assert keys(begun(schedule, 1.0)) == ["k0", "k1", "k2", "hung"]
    assert begun(schedule, 5.0) == []
    schedule.end(hung)
    assert begun(schedule, 5.0) == [more[1]]


def test_a_key_whose_jobs_have_come_back_is_suspect_no_more() -> None:
    schedule: Schedule[KeyedJob] = Schedule()
    first, second = added(schedule, job("k"), job("k"))
    begun(schedule)
    schedule.give_up_slow(1.0)
    late = job("k")
    schedule.add(late)
    assert schedule.is_suspect(late)
    schedule.end(first)
    assert schedule.is_suspect(late)
    schedule.end(second)
    assert not schedule.is_suspect(late)
    assert schedule.given_up == 0
    assert begun(schedule, 1.0) == [late]


def test_a_suspect_key_of_one_class_is_not_one_of_another() -> None:
    schedule: Schedule[KeyedJob] = Schedule()
    added(schedule, job("k", kind=JOB))
    begun(schedule)
    schedule.give_up_slow(5.0)
    read = job("k")
    schedule.add(read)
    assert not schedule.is_suspect(read)


def test_beyond_the_limit_no_thread_is_given_up_and_jobs_at_suspect_keys_are_refused_at_once() -> None:
    schedule: Schedule[KeyedJob] = Schedule(given_up_max=FEW)
    hung = added(schedule, *(job(f"hung{number}") for number in range(READ.threads)))
    begun(schedule)
    waiting = job("hung0")
    schedule.add(waiting)
    assert len(schedule.give_up_slow(1.0)) == FEW
    assert schedule.is_degraded
    with pytest.raises(Unavailable, match="calls at hung0 do not come back"):
        schedule.add(job("hung0"))
    added(schedule, *(job(f"k{number}") for number in range(FEW)))
    assert keys(begun(schedule, 1.0)) == ["k0", "k1", "k2"], "those that wait already do not begin either"
    schedule.end(hung[0])
    assert not schedule.is_degraded
    schedule.end(hung[READ.threads - 1])
    assert begun(schedule, 1.0) == [waiting]


def test_a_job_that_has_not_begun_by_its_deadline_waits_no_more() -> None:
    schedule: Schedule[KeyedJob] = Schedule()
    added(schedule, job("k", kind=JOB))
    begun(schedule)
    late, later, patient = added(
        schedule, job("k", kind=JOB, deadline=30.0), job("k", kind=JOB, deadline=31.0), job("k", kind=JOB)
    )
    assert schedule.refuse_late(29.9) == []
    assert schedule.refuse_late(30.0) == [late]
    assert schedule.refuse_late(99.0) == [later]
    assert schedule.refuse_all() == [patient]
    assert not schedule.has_waiting()


def test_a_job_that_has_begun_has_no_deadline() -> None:
    schedule: Schedule[KeyedJob] = Schedule()
    added(schedule, job("k", deadline=1.0))
    begun(schedule)
    assert schedule.refuse_late(2.0) == []


def test_a_job_that_is_withdrawn_leaves_its_line_once() -> None:
    schedule: Schedule[KeyedJob] = Schedule()
    first, second = added(schedule, job("k", "a", JOB), job("k", "a", JOB))
    assert schedule.withdraw(first)
    assert not schedule.withdraw(first)
    assert begun(schedule) == [second]
    assert not schedule.withdraw(second), "it has begun"
    assert not schedule.has_waiting()


def test_jobs_that_may_begin_do_not_count_as_waiting() -> None:
    schedule: Schedule[KeyedJob] = Schedule(crowds=("", "all"))
    added(schedule, *(job(f"k{number}", "a") for number in range(5)))
    assert (schedule.waiting(READ, "a"), schedule.waiting(JOB, "a"), schedule.waiting(READ, "b")) == (3, 0, 0)
    begun(schedule)
    assert schedule.waiting(READ, "a") == 3
    added(schedule, *(job("k", "all") for _ in range(5)))
    assert schedule.waiting(READ, "all") == 3, "the rest of them waits for its key"
    begun(schedule)
    added(schedule, *(job(f"more{number}", "all") for number in range(9)))
    assert schedule.waiting(READ, "all") == 8, "and of these for the class"
