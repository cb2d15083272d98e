"""How late the event loop came is shown to everyone who looks, for as long as a window lasts."""

from __future__ import annotations

from forebay.broker.traffic import LAG_WINDOW_SECONDS, LoopLag
from forebay.testing.simulated.clock import ManualClock


def test_the_longest_lag_of_a_window_is_shown_however_often_it_is_asked_for() -> None:
    """A look took it away: of two who asked, one saw it."""
    clock = ManualClock()
    lag = LoopLag(clock)
    assert lag.longest() == 0.0

    for late in (0.2, 3.0, 0.5):
        lag.note(late)
        clock.advance(1)

    assert [lag.longest(), lag.longest()] == [3.0, 3.0]
    clock.advance(LAG_WINDOW_SECONDS - 2.5)
    lag.note(0.1)
    assert lag.longest() == 3.0
    clock.advance(1)
    assert lag.longest() == 0.5, "the longest one is past, the next is not"
    clock.advance(LAG_WINDOW_SECONDS)
    assert lag.longest() == 0.0


def test_what_is_kept_is_bounded() -> None:
    clock = ManualClock()
    lag = LoopLag(clock)
    for number in range(10_000):
        lag.note(10_000.0 - number)
        clock.advance(0.1)

    assert len(lag) <= LAG_WINDOW_SECONDS / 0.1 + 1
