"""Time: the machine's, and the one turned by hand."""

from __future__ import annotations

from forebay.clock import Clock, SystemClock
from forebay.testing.simulated.clock import ManualClock


def test_clocks_of_the_machine_do_not_go_back() -> None:
    clock: Clock = SystemClock()
    before = (clock.monotonic(), clock.boottime())

    after = (clock.monotonic(), clock.boottime())

    assert before[0] <= after[0]
    assert before[1] <= after[1]


def test_a_machine_that_sleeps_stops_its_timers_but_not_its_leases() -> None:
    clock = ManualClock()
    started_ms = clock.now_ms()

    clock.advance(2.0)
    clock.suspend(60.0)

    assert clock.monotonic() == 2.0
    assert clock.boottime() == 62.0
    assert clock.now_ms() == started_ms + 62_000


def test_a_jump_of_the_wall_clock_moves_nothing_else() -> None:
    clock = ManualClock()

    clock.jump(-5_000)

    assert (clock.monotonic(), clock.boottime()) == (0.0, 0.0)
