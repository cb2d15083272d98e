"""What only the memory engine has to fear."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

import forebay
from forebay import Settings, Storage
from forebay.clock import SystemClock


class RingingClock(SystemClock):
    """The machine's clock, which calls `ring` each time before it says the time."""

    def __init__(self) -> None:
        super().__init__()
        self.ring: Callable[[], None] = lambda: None

    def now_ms(self) -> int:
        self.ring()
        return super().now_ms()


def test_an_append_by_a_signal_inside_an_append_is_refused_and_no_offset_given_out_twice() -> None:
    """The handler runs in the thread that appends, so the lock lets it in: it must be refused by name."""
    refused: list[str] = []
    clock = RingingClock()
    with Storage.open(":memory:", Settings(), clock=clock) as log:
        topic = log.create_topic("t")

        def interrupt() -> None:
            clock.ring = lambda: None
            signal.raise_signal(signal.SIGUSR1)

        def answer(number: int, frame: object) -> None:
            with pytest.raises(forebay.Unavailable) as caught:
                topic.append(b"inside", timestamp=1)
            refused.append(str(caught.value))

        clock.ring = interrupt
        before = signal.signal(signal.SIGUSR1, answer)
        try:
            assert topic.append(b"outside", timestamp=1) == 0
        finally:
            signal.signal(signal.SIGUSR1, before)

        assert len(refused) == 1
        assert [record.value for record in topic.read()] == [b"outside"]
