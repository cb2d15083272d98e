"""The registry of open shards: each is opened once and closed once, and a shard that hangs delays no other."""

from __future__ import annotations

import linecache
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from forebay.engines.registry import Registry
from forebay.errors import Closed, Unavailable
from forebay.topics import ShardRef
from tests.engines.homes import TOPIC_ID, spec_of
from tests.storage.test_workers import Gate
from tests.support.waiting import PATIENCE

SPEC = spec_of("disk")
A, B = ShardRef(SPEC, 0), ShardRef(SPEC, 1)


class Shard:
    """Counts how often it was closed."""

    def __init__(self, ref: ShardRef) -> None:
        self.ref = ref
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def closed(shard: Shard | None) -> None:
    if shard is not None:
        shard.close()


class Slow:
    """Opens shards, and stays in the middle of one."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.opened: list[Shard] = []

    def __call__(self, ref: ShardRef) -> Shard:
        if ref == A:
            self.gate.wait()
        self.opened.append(Shard(ref))
        return self.opened[-1]


def give_up(registry: Registry[Shard], ref: ShardRef, closing: Callable[[Shard | None], None] = closed) -> None:
    registry.give_up(ref.spec.topic_id, ref.partition, closing)


def test_a_shard_is_opened_and_given_up_while_another_hangs() -> None:
    registry, opening = Registry[Shard](), Slow()
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(registry.open, A, opening)
        with opening.gate.reached_here():
            b = registry.open(B, opening)
            give_up(registry, B)
            again = registry.open(B, opening)
            assert registry.shards() == [again]
            assert b.closed == 1 and again is not b
        assert first.result(PATIENCE) is registry.find(TOPIC_ID, 0)


def test_threads_that_open_one_shard_at_once_get_the_same_and_it_is_opened_once() -> None:
    registry, opening = Registry[Shard](), Slow()
    with ThreadPoolExecutor(8) as threads:
        found = [threads.submit(registry.open, A, opening) for _ in range(8)]
        with opening.gate.reached_here():
            pass
        assert {id(one.result(PATIENCE)) for one in found} == {id(opening.opened[0])}
    assert len(opening.opened) == 1


def test_a_thread_that_opens_a_shard_while_it_is_given_up_waits_until_it_is_closed() -> None:
    registry, opening, closing = Registry[Shard](), Slow(), Gate()
    opening.gate.open()
    before = registry.open(A, opening)

    def slowly(shard: Shard | None) -> None:
        closing.wait()
        closed(shard)

    with ThreadPoolExecutor(2) as threads:
        ended = threads.submit(give_up, registry, A, slowly)
        with closing.reached_here():
            assert registry.find(TOPIC_ID, 0) is None
            after = threads.submit(registry.open, A, opening)
            registry.open(B, opening)
            assert not after.done()
        ended.result(PATIENCE)
        assert after.result(PATIENCE) is not before
    assert before.closed == 1


def test_a_worker_gives_up_only_the_very_shard_that_it_means() -> None:
    """A shard that was opened since, and one that another thread is at, stay as they are."""
    registry, opening = Registry[Shard](), Slow()
    opening.gate.open()
    lost = registry.open(B, opening)
    assert not registry.give_up_this(lost, lambda: False, closed), "it is worked on"
    assert registry.find(TOPIC_ID, 1) is lost and lost.closed == 0
    give_up(registry, B)
    opened = registry.open(B, opening)

    assert registry.give_up_this(lost, lambda: pytest.fail("it is out already"), closed)

    assert registry.find(TOPIC_ID, 1) is opened and opened.closed == 0
    with ThreadPoolExecutor(1) as threads, registry.lock(TOPIC_ID, 1):
        busy = threads.submit(registry.give_up_this, opened, lambda: True, closed)
        assert not busy.result(PATIENCE), "another thread is at the shard: the worker does not wait"
    assert registry.give_up_this(opened, lambda: True, closed)
    assert registry.find(TOPIC_ID, 1) is None and (lost.closed, opened.closed) == (1, 1)


def test_a_shard_that_cannot_be_opened_is_tried_again_by_the_next_caller() -> None:
    registry = Registry[Shard]()

    def failing(ref: ShardRef) -> Shard:
        raise OSError("not now")

    with pytest.raises(OSError, match="not now"):
        registry.open(A, failing)

    assert registry.open(A, Shard) is registry.find(TOPIC_ID, 0)


def test_closing_waits_for_a_shard_that_is_being_opened_and_closes_it_last() -> None:
    registry, opening = Registry[Shard](), Slow()
    order: list[int] = []
    b = registry.open(B, opening)

    def note(shard: Shard) -> None:
        order.append(shard.ref.partition)
        shard.close()

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(registry.open, A, opening)
        with opening.gate.reached_here():
            ending = threads.submit(registry.close, note)
            while not b.closed:
                assert not ending.done()
        ending.result(PATIENCE)
        assert first.result(PATIENCE).closed == 1
    assert order == [1, 0]
    with pytest.raises(Closed, match="this engine is closed"):
        registry.open(ShardRef(SPEC, 2), opening)


def test_background_work_skips_a_shard_that_is_open_or_in_use() -> None:
    registry, opening = Registry[Shard](), Slow()
    done: list[str] = []
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(registry.open, A, opening)
        with opening.gate.reached_here():
            registry.if_idle(A, lambda: done.append("in use"))
            registry.if_idle(B, lambda: done.append("closed"))
        first.result(PATIENCE)
    registry.if_idle(A, lambda: done.append("open"))
    assert done == ["closed"]


def test_a_caller_waits_for_a_worker_that_is_at_what_a_closed_shard_has_left() -> None:
    """Found by a run: the caller went on while files were still being removed."""
    registry, working, done = Registry[Shard](), Gate(), list[str]()

    def work() -> None:
        working.wait()
        done.append("worker")

    with ThreadPoolExecutor(2) as threads:
        worker = threads.submit(registry.if_idle, A, work)
        with working.reached_here():
            caller = threads.submit(registry.if_closed, A, lambda: done.append("caller"))
            assert not caller.done()
        worker.result(PATIENCE)
        caller.result(PATIENCE)
    assert done == ["worker", "caller"]


@pytest.mark.parametrize("call", ["open", "give_up", "close"])
def test_a_signal_that_comes_inside_an_opening_is_refused_and_does_not_hang(call: str) -> None:
    registry = Registry[Shard]()
    refused: list[str] = []
    calls: dict[str, Callable[[], object]] = {
        "open": lambda: registry.open(A, Shard),
        "give_up": lambda: give_up(registry, A),
        "close": lambda: registry.close(closed),
    }

    def interrupted(ref: ShardRef) -> Shard:
        with pytest.raises(Unavailable, match="a signal handler interrupted this thread") as raised:
            calls[call]()
        refused.append(str(raised.value))
        return Shard(ref)

    assert registry.open(A, interrupted) is registry.find(TOPIC_ID, 0)
    assert len(refused) == 1


def test_no_lock_stays_behind() -> None:
    registry = Registry[Shard]()
    lock = weakref.ref(registry.lock(TOPIC_ID, 0))
    assert lock() is None
    registry.open(A, Shard)
    lock = weakref.ref(registry.lock(TOPIC_ID, 0))
    give_up(registry, A)
    # A ranked lock that is checked is remembered by its thread until it takes the next one.
    registry.drop(Shard(A))

    assert lock() is None and registry.shards() == []


class Struck:
    """Raises `KeyboardInterrupt` at the n-th line of the registry. `with` lines enter and leave in one step."""

    def __init__(self, line: int) -> None:
        self.is_over = False
        self._left = line

    def __call__(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.endswith("engines/registry.py"):
            return None
        if event == "line" and not self.is_over:
            source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            self._left -= not source.startswith("with ")
            if self._left == 0:
                self.is_over = True
                raise KeyboardInterrupt
        return self


def test_an_interrupt_at_any_line_leaves_the_registry_usable() -> None:
    for line in range(1, 100):
        registry = Registry[Shard]()
        struck = Struck(line)
        sys.settrace(struck)
        try:
            registry.open(A, Shard)
            give_up(registry, A)
            registry.open(A, Shard)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        if not struck.is_over:
            assert line > 15, "every line was met"
            return

        # In another thread: a lock that was left taken would keep it waiting.
        thread = threading.Thread(target=registry.open, args=(A, Shard), daemon=True)
        thread.start()
        thread.join(PATIENCE)
        assert registry.find(TOPIC_ID, 0) is not None, line
        give_up(registry, A)
        assert registry.shards() == []
