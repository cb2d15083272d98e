"""The small parts of the log, each by itself: window, queue, cache, sparse index, list of files."""

from __future__ import annotations

import errno
import tracemalloc
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.appends.budget import QueueBudget
from forebay.appends.producer_window import ProducerWindow
from forebay.appends.queue import AppendQueue, Producing, QueuedRecord, QueueFull
from forebay.appends.ticket import Ticket
from forebay.clock import SystemClock
from forebay.errors import Closed, Conflict
from forebay.format.columns.rows import Columns, encode_columns
from forebay.format.control.frames import WindowEntry
from forebay.format.files.segment import segment_name
from forebay.format.frame.batch import encode_data_frame
from forebay.meter import ShardCounts
from forebay.testing.simulated.disk import SimulatedDisk
from forebay.wal.files import READ_ATTEMPTS, Attempts, FileList, LogFile, SealedFile
from forebay.wal.sparse import ENTRY_BYTES, SparseIndex
from forebay.wal.tail import CacheBudget, CachedFrame, TailCache
from tests.wal.rig import SMALL


def _window() -> ProducerWindow:
    return ProducerWindow(producers_max=2, appends_max=3)


def test_the_window_answers_a_remembered_repeat_with_its_offset() -> None:
    window = _window()
    window.extend([WindowEntry(7, 0, 1, 2, 10), WindowEntry(7, 1, 1, 1, 20)])

    assert window.expect(7, 0, None, None, 2) == 10
    assert window.expect(7, 1, None, None) == 20
    assert window.expect(7, 2, None, None) is None


def test_the_window_refuses_what_is_out_of_step_or_forgotten() -> None:
    window = _window()
    window.extend(WindowEntry(7, sequence, 1, 1, 10 * sequence) for sequence in range(5))

    with pytest.raises(Conflict, match="expected 5"):
        window.expect(7, 6, None, None)
    with pytest.raises(Conflict, match="no longer remembered"):
        window.expect(7, 1, None, None)
    with pytest.raises(Conflict, match="starts at sequence 0"):
        window.expect(8, 1, None, None)
    assert window.expect(7, 2, None, None) == 20


def test_the_window_forgets_the_producer_that_was_silent_longest() -> None:
    window = _window()
    for producer in (1, 2, 1, 3):
        window.add(WindowEntry(producer, (window.last_sequence(producer) or -1) + 1, 1, 1, producer))

    assert [window.last_sequence(producer) for producer in (1, 2, 3)] == [0, None, 0]


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), max_size=40))
def test_a_window_restated_from_its_entries_answers_alike(appends: list[tuple[int, int]]) -> None:
    window, offset = _window(), 0
    for producer, count in appends:
        last = window.last_sequence(producer)
        window.add(WindowEntry(producer, 0 if last is None else last + 1, 1, count, offset))
        offset += count

    restated = _window()
    restated.extend(window.entries())

    assert list(restated.entries()) == list(window.entries())
    for producer in range(1, 5):
        assert restated.last_sequence(producer) == window.last_sequence(producer)


def _queue(**settings: int) -> AppendQueue:
    return AppendQueue(5, ProducerWindow(10, 10), msgspec.structs.replace(SMALL, **settings), QueueBudget(1 << 30))


def _entry(producing: Producing | None = None) -> QueuedRecord:
    return QueuedRecord(b"v", None, None, (), 0, producing, Ticket())


def _stage(queue: AppendQueue, producing: Producing | None = None) -> Ticket:
    return queue.stage_one(_entry(producing), 17)


def test_the_queue_gives_offsets_in_order_and_keeps_an_append_of_many_whole() -> None:
    queue = _queue()
    columns = encode_columns(Columns(values=[b"a", b"b"], timestamps=[0, 0]))

    offsets = [_stage(queue).offset, queue.stage_many(columns, None, Ticket()).offset, _stage(queue).offset]
    queue.take()

    assert offsets == [5, 6, 8]
    assert [(frame.base, frame.end) for frame in queue.taken] == [(5, 6), (6, 8), (8, 9)]
    assert queue.next == 9 and queue.is_empty


def test_a_full_queue_refuses_and_uses_no_offset_but_takes_the_first_append_of_any_size() -> None:
    queue = _queue(queue_records_max=2, queue_bytes_max=4096)
    queue.stage_one(_entry(), 1_000_000)

    with pytest.raises(QueueFull):
        _stage(queue)
    assert queue.next == 6


def test_a_repeat_of_an_append_on_its_way_finishes_with_it_and_knows_its_offset() -> None:
    queue = _queue()
    original = _stage(queue, Producing(1, 0))
    repeat = _stage(queue, Producing(1, 0))
    assert (repeat.offset, repeat.done) == (original.offset, False)

    queue.take()
    queue.acknowledge()

    assert original.done and repeat.done
    assert original.result() == repeat.result() == 5
    assert _stage(queue, Producing(1, 0)).result() == 5


def test_a_repeat_of_an_append_that_fails_fails_with_it_and_is_not_remembered() -> None:
    queue = _queue()
    original, repeat = _stage(queue, Producing(1, 0)), _stage(queue, Producing(1, 0))
    queue.take()

    queue.fail(Closed("gone"), Closed("gone"), 5)

    for ticket in (original, repeat):
        with pytest.raises(Closed):
            ticket.result()
    assert _stage(queue, Producing(1, 0)).offset == 5


def test_finishing_again_after_it_was_cut_short_counts_no_append_twice() -> None:
    queue = _queue()
    ticket = _stage(queue, Producing(1, 0))
    queue.take()
    taken = list(queue.taken)

    queue.acknowledge()
    queue.taken = taken
    queue.acknowledge()

    assert ticket.done
    assert [entry.appends for entry in queue.window.entries()] == [1]


def test_appends_that_fail_are_all_finished_although_the_failing_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a refusal is handled: those who wait for the other appends must not wait for ever."""
    queue = _queue()
    tickets = [_stage(queue) for _ in range(3)]
    queue.take()
    tickets.append(_stage(queue))
    finish = Ticket.finish

    def interrupted(ticket: Ticket, *args: Any) -> None:
        if ticket is tickets[1]:
            monkeypatch.setattr(Ticket, "finish", finish)
            raise KeyboardInterrupt
        finish(ticket, *args)

    monkeypatch.setattr(Ticket, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        queue.fail(Closed("written"), Closed("queued"), 9)
    assert [ticket.done for ticket in tickets] == [True, False, False, False]

    queue.take()

    assert all(ticket.done for ticket in tickets)
    assert queue.next == 9


def _frame(base: int, count: int, size: int = 10) -> CachedFrame:
    columns = encode_columns(Columns(values=[b"x" * size] * count, timestamps=[base] * count))
    data = encode_data_frame(
        salt_crc=0, base=base, epoch=1, durable=0, appended_at=0, runs=[], columns=columns, zstd_level=None
    )
    return CachedFrame(base, base + count, data)


def test_the_cache_gives_everything_since_an_offset_and_the_watermark() -> None:
    cache = TailCache(1 << 20, CacheBudget(1 << 30, SystemClock()), ShardCounts())
    cache.add([_frame(0, 3), _frame(3, 2)])

    batches, watermark = cache.read_cached_since(1)

    assert [(batch.base, batch.end) for batch in batches] == [(1, 3), (3, 5)]
    assert watermark == 5
    assert cache.read_cached_since(5) == ([], 5)


def test_the_cache_stays_within_its_limit_and_drops_the_oldest() -> None:
    cache = TailCache(1000, CacheBudget(1 << 30, SystemClock()), ShardCounts())
    for base in range(50):
        cache.add([_frame(base, 1)])
        assert cache.bytes <= 1000

    held = cache.next_frame(0)
    assert held is not None and held.base > 0
    assert cache.frames_from(0, 100) == []
    assert [frame.base for frame in cache.frames_from(held.base, 1 << 20)] == list(range(held.base, 50))


def test_a_jump_in_offsets_empties_the_cache() -> None:
    cache = TailCache(1 << 20, CacheBudget(1 << 30, SystemClock()), ShardCounts())
    cache.add([_frame(0, 3)])
    cache.add([_frame(10, 1)])

    assert cache.frames_from(0, 100) == []
    assert [frame.base for frame in cache.frames_from(10, 100)] == [10]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3 * ENTRY_BYTES), st.integers(0, 50)), min_size=1))
def test_the_sparse_index_never_points_behind_what_is_looked_for(frames: list[tuple[int, int, int]]) -> None:
    index, offset, position = SparseIndex(), 0, 64
    placed: list[tuple[int, int, int]] = []
    for count, length, time in frames:
        index.add(offset, position, time)
        placed.append((offset, position, time))
        offset, position = offset + count, position + length

    for base, place, _ in placed:
        found = index.position_of(base)
        assert found is not None and found <= place
    for wanted in range(52):
        first = next((place for _, place, time in placed if time >= wanted), None)
        found = index.position_at_time(wanted)
        assert (found is None) == (first is None)
        assert found is None or (first is not None and found <= first)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3 * ENTRY_BYTES)), min_size=1), st.integers(0, 100))
def test_frames_that_are_noted_together_are_found_as_those_that_are_noted_one_by_one(
    frames: list[tuple[int, int]], apart: int
) -> None:
    bases = np.cumsum([0, *(count for count, _ in frames)])[:-1]
    places = np.cumsum([64, *(length for _, length in frames)])[:-1]
    index = SparseIndex()
    for base, place in zip(bases[:apart].tolist(), places[:apart].tolist(), strict=True):
        index.add(base, place, 0)
    index.add_many(bases[apart:], places[apart:])

    for base, place in zip(bases.tolist(), places.tolist(), strict=True):
        found = index.position_of(base)
        assert found is not None and place - 2 * ENTRY_BYTES < found <= place
        assert found in places


class Replaced:
    """A file in whose place another comes whenever it is looked at, so many times."""

    def __init__(self, files: FileList, times: int) -> None:
        self.start, self.end = 0, 1
        self._files = files
        self._times = times

    def offset_at_time(self, timestamp: int) -> int:
        if self._times:
            self._files.all = (cast(LogFile, Replaced(self._files, self._times - 1)),)
            raise OSError(errno.EBADF, "this handle is closed")
        return timestamp


def test_a_look_at_files_is_repeated_while_others_take_their_places() -> None:
    """Where the log rotates every moment, three times were not enough for a look at all of it."""
    files = FileList()
    files.all = (cast(LogFile, Replaced(files, 20)),)

    assert files.offset_at_time(7) == 7


def test_a_look_that_fails_where_no_file_was_replaced_is_given_up() -> None:
    files = FileList()
    attempts = Attempts(files)
    gone, full = OSError(errno.ENOENT, "gone"), OSError(errno.EIO, "broken")

    assert [attempts.again(gone) for _ in range(READ_ATTEMPTS)] == [True] * (READ_ATTEMPTS - 1) + [False]
    assert not Attempts(files).again(full)


def test_a_sealed_file_that_was_not_read_takes_a_few_hundred_bytes() -> None:
    """Each took a kilobyte: 10,000 topics seal 2,000 files in a minute."""
    disk, directory = SimulatedDisk(), "/data/shards/" + "7" * 32 + "_0"
    paths = [f"{directory}/{segment_name(start, 1)}" for start in range(1000, 101_000, 1000)]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        files = [SealedFile(disk, path, start, start + 1000) for start, path in enumerate(paths, 1000)]
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()

    assert [file.path for file in files] == paths
    assert taken < 400 * len(files)
