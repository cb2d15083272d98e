"""What only the memory engine has to fear."""

from __future__ import annotations

import linecache
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest

import forebay
from forebay import Settings, Storage
from forebay.clock import SystemClock
from forebay.engines import memory, memory_records


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

    def __init__(self, line: int, *files: str) -> None:
        self.is_over = False
        self._left = line
        self._files = files or (memory.__file__,)

    def __call__(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in self._files:
            return None
        if event == "line" and not self.is_over:
            source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            self._left -= not source.startswith(("with ", "lock.release()", "try:"))
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


def _interrupted(line: int, step: Callable[[], object]) -> bool:
    """Whether the step has so many lines: then Ctrl-C came there."""
    struck = Struck(line, memory.__file__, memory_records.__file__)
    sys.settrace(struck)
    try:
        step()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return struck.is_over


def test_an_append_that_is_interrupted_at_any_line_is_in_as_a_whole_or_not_at_all() -> None:
    """The window knew appends whose records were not in, and keys led to the records of later appends."""
    for line in range(1, 300):
        with forebay.open(":memory:") as log:
            topic = log.create_topic("t")
            topic.append(b"0", key=b"a", tag="a")
            once = partial(topic.append, b"1", key=b"k", tag="t", producer=7, sequence=0)
            was_struck = _interrupted(line, once)
            is_in = topic.offsets().next == 2
            assert topic.last_sequence(7) == (0 if is_in else None), line
            topic.append(b"2", key=b"other", tag="other")

            assert once() == (1 if is_in else 2), line
            assert [record.value for record in topic.read()] == ([b"0", b"1", b"2"] if is_in else [b"0", b"2", b"1"])
            for found in (topic.read_by_key(b"k", history=True), topic.read_by_tag("t")):
                assert [record.value for record in found] == [b"1"], line
            assert topic.offset_at_time(0) == 0
            if not was_struck:
                assert line > 30, "every line was met"
                return
    pytest.fail("an append has more lines than expected")


def test_an_eviction_that_is_interrupted_at_any_line_leaves_what_it_has_dropped_or_not() -> None:
    settings = Settings.load(overrides={"memory": {"bytes_max": 4096}})
    for line in range(1, 600):
        with Storage.open(":memory:", settings, clock=SystemClock()) as log:
            topic = log.create_topic("t")
            topic.append_many([b"x" * 100] * 8, keys=[b"k"] * 8)
            topic.append_many([b"x" * 100] * 8, keys=[b"k"] * 8)
            was_struck = _interrupted(line, partial(topic.append, b"y" * 2000, key=b"k"))
            topic.append(b"last", key=b"k")

            seen = [record.offset for record in topic.read(on_gap=lambda *_: None)]
            assert [record.offset for record in topic.read_by_key(b"k", history=True, on_gap=lambda *_: None)] == seen
            assert seen == list(range(topic.offsets().earliest, topic.offsets().next)), line
            if not was_struck:
                return
    pytest.fail("an append has more lines than expected")
