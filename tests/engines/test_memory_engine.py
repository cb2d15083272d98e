"""What only the memory engine has to fear."""

from __future__ import annotations

import linecache
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

import forebay
from forebay import Settings, Storage
from forebay.clock import SystemClock
from forebay.engines import memory


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


class Struck:
    """Raises `KeyboardInterrupt` at the n-th line of the engine where Python looks for one: not before a release."""

    def __init__(self, line: int) -> None:
        self.is_over = False
        self._left = line

    def __call__(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_filename != memory.__file__:
            return None
        if event == "line" and not self.is_over:
            source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            self._left -= not source.startswith(("with ", "lock.release()", "try:  # noqa"))
            if self._left == 0:
                self.is_over = True
                raise KeyboardInterrupt
        return self


def test_an_interrupt_at_any_line_of_a_read_from_memory_leaves_the_shard_free() -> None:
    """A lock that was taken in one step and given back in the next stayed taken: no other thread could append."""
    with forebay.open(":memory:") as log:
        topic = log.create_topic("t")
        topic.append(b"0")
        for line in range(1, 100):
            struck = Struck(line)
            sys.settrace(struck)
            try:
                topic.read_cached(0, 0)
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            if not struck.is_over:
                assert line > 5, "every line was met"
                return
            other = threading.Thread(target=topic.append, args=(b"v",), daemon=True)
            other.start()
            other.join(20)
            assert not other.is_alive(), line
