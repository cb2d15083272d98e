"""What every `StorageEngine` must do. Knows the two Protocols of the seam and nothing of how records are kept.

Inherit `EngineContract` and give it a fixture `home`: an `EngineHome`, where engines can be opened one after
the other on the same lasting state. What a crash leaves is no part of this suite.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Protocol, TypeAlias

import pytest

from forebay.appends.queue import Producing, QueuedRecord, record_bytes
from forebay.appends.ticket import Ticket
from forebay.engines import ByName, NewRecord, OwnedShard, StorageEngine
from forebay.errors import Closed, Conflict, Invalid, Unavailable
from forebay.pages import Page
from forebay.records import OFFSET_MAX, Gap, Reason, Record
from forebay.shard.deletes import DeleteBefore, RangeDelete
from forebay.topics import ShardRef

NamedEngine: TypeAlias = ByName[StorageEngine]
"""An engine with its operations by shard name, which the suites call."""
PAGES_MAX = 10_000
MANY = 5_000
THREADS = 16
APPENDS = 40


class EngineHome(Protocol):
    """Where an engine keeps its state, through as many lives as the test wants."""

    forgets: bool
    """Records end with the engine; their offsets do not."""

    def open(self) -> NamedEngine:
        """The engine, with whatever the one before it left. It must have been closed."""

    def ref(self, partition: int = 0) -> ShardRef:
        """A shard that this engine may be asked for."""


def steps_of(
    engine: NamedEngine, ref: ShardRef, start: int = 0, *, records_max: int = 1_000, bytes_max: int = 1 << 20
) -> list[Record | Gap]:
    """All records and gaps from `start` on, in order, page by page; fails if a page does not lead on."""
    steps: list[Record | Gap] = []
    offset = start
    for _ in range(PAGES_MAX):
        page = engine.read_by_offset(ref, offset, records_max=records_max, bytes_max=bytes_max)
        pieces: list[Record | Gap] = [r for batch in page.batches for r in batch.records(ref.partition)]
        assert len(pieces) <= records_max
        if page.next == offset:
            assert not pieces and not page.events
            return steps
        steps += sorted([*pieces, *page.events], key=lambda piece: _span(piece)[0])
        assert page.next > offset
        offset = page.next
        assert _span(steps[-1])[1] == offset
    raise AssertionError(f"more than {PAGES_MAX} pages")


def _contents(page: Page) -> tuple[list[Record], list[Gap], int]:
    return [record for batch in page.batches for record in batch.records(0)], page.events, page.next


def _span(piece: Record | Gap) -> tuple[int, int]:
    return (piece.start, piece.stop) if isinstance(piece, Gap) else (piece.offset, piece.offset + 1)


def records_of(engine: NamedEngine, ref: ShardRef, start: int = 0, **limits: int) -> list[Record]:
    """As `steps_of` where no gap is expected."""
    steps = steps_of(engine, ref, start, **limits)
    assert [step for step in steps if isinstance(step, Gap)] == []
    return [step for step in steps if isinstance(step, Record)]


def values_of(records: Sequence[Record]) -> list[bytes | None]:
    """The values alone."""
    return [record.value for record in records]


def stage_by(
    shard: OwnedShard,
    producer: int,
    sequence: int,
    value: bytes = b"v",
    *,
    previous: int | None = None,
    generation: int | None = None,
) -> Ticket:
    """Queue one record of an idempotent producer."""
    entry = QueuedRecord(value, None, None, (), 1, Producing(producer, sequence, previous, generation), Ticket())
    return shard.stage_one(entry, record_bytes(value, None, None, ()))


def append_by(
    shard: OwnedShard, producer: int, sequence: int, value: bytes = b"v", *, previous: int | None = None
) -> int:
    """Append one record of an idempotent producer."""
    return shard.acknowledge(stage_by(shard, producer, sequence, value, previous=previous))


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(0)`, `work(1)`, … at the same time; raises what one of them raised."""
    failures: list[BaseException] = []
    start = threading.Barrier(count)

    def run(number: int) -> None:
        try:
            start.wait(60)
            work(number)
        except BaseException as error:  # noqa: BLE001  # handed to the test
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


class EngineContract:
    """The suite. A test's name is its claim."""

    timestamps: ClassVar = (5, 3, 9, 9, 1, 12)

    @pytest.fixture
    def engine(self, home: EngineHome) -> Iterator[NamedEngine]:
        engine = home.open()
        yield engine
        engine.close()

    @pytest.fixture
    def ref(self, home: EngineHome) -> ShardRef:
        return home.ref()

    # Shards

    def test_create_shard_again_keeps_what_it_holds(self, engine: NamedEngine, ref: ShardRef) -> None:
        engine.create_shard(ref)
        engine.write(ref, NewRecord(b"kept", 1))

        engine.create_shard(ref)

        assert values_of(records_of(engine, ref)) == [b"kept"]
        assert engine.open_shard(ref) is engine.open_shard(ref)

    def test_list_shard_tells_of_shards_and_an_unknown_one_gives_nothing(
        self, engine: NamedEngine, home: EngineHome
    ) -> None:
        assert engine.list_shard("no such shard") == engine.list_shard() == []

        engine.create_shard(home.ref(0))
        engine.write(home.ref(1), NewRecord(b"v", 1))

        assert [status.ref for status in engine.list_shard()] == [home.ref(0), home.ref(1)]
        [status] = engine.list_shard(home.ref(1).id)
        assert (status.ref, status.offsets.next) == (home.ref(1), 1)

    def test_delete_shard_ends_its_records_and_no_other(self, engine: NamedEngine, home: EngineHome) -> None:
        for partition in (0, 1):
            engine.write(home.ref(partition), NewRecord(b"v", 1))
        shard = engine.open_shard(home.ref(0))

        engine.delete_shard(home.ref(0))

        assert engine.list_shard(home.ref(0).id) == []
        assert values_of(records_of(engine, home.ref(1))) == [b"v"]
        with pytest.raises(Closed):
            shard.read(0)

    def test_delete_shard_of_what_is_not_there_is_fine(self, engine: NamedEngine, ref: ShardRef) -> None:
        engine.delete_shard(ref)
        engine.create_shard(ref)
        engine.delete_shard(ref)
        engine.delete_shard(ref)

    def test_a_closed_engine_says_so(self, home: EngineHome) -> None:
        engine = home.open()
        shard = engine.open_shard(home.ref())
        engine.close()
        engine.close()

        for call in (
            lambda: engine.open_shard(home.ref(1)),
            lambda: engine.write(home.ref(), NewRecord(b"v", 1)),
            lambda: shard.read(0),
            shard.flush,
        ):
            with pytest.raises(Closed):
                call()

    # Appending

    def test_write_and_batch_write_give_contiguous_offsets(self, engine: NamedEngine, ref: ShardRef) -> None:
        assert engine.write(ref, NewRecord(b"0", 1)) == 0
        assert engine.batch_write(ref, [NewRecord(b"%d" % n, 1) for n in (1, 2, 3)]) == [1, 2, 3]
        assert engine.batch_write(ref, []) == []
        assert engine.write(ref, NewRecord(b"4", 1)) == 4

        records = records_of(engine, ref)
        assert [(record.offset, record.value) for record in records] == [(n, b"%d" % n) for n in range(5)]
        assert engine.open_shard(ref).offsets().next == 5

    def test_batch_write_is_all_or_nothing(self, engine: NamedEngine, ref: ShardRef) -> None:
        engine.write(ref, NewRecord(b"before", 1))
        wrong: list[NewRecord] = [NewRecord(b"a", 1), NewRecord("b", 1)]  # type: ignore[arg-type]

        with pytest.raises(Exception):  # noqa: B017  # the engine is promised checked input, so any refusal will do
            engine.batch_write(ref, wrong)

        assert engine.write(ref, NewRecord(b"after", 1)) == 1
        assert values_of(records_of(engine, ref)) == [b"before", b"after"]

    def test_every_part_of_a_record_comes_back(self, engine: NamedEngine, ref: ShardRef) -> None:
        written = [
            NewRecord(None, -5),
            NewRecord(b"", 0),
            NewRecord(b"value", 2**62, b"key", "tag", (("h", b"1"), ("h", None), ("\N{SNOWMAN}", b""))),
            NewRecord(bytes(range(256)), 7, b"", "t\N{LATIN SMALL LETTER A WITH ACUTE}g", ()),
        ]

        engine.batch_write(ref, written)
        for record in written:
            engine.write(ref, record)

        records = records_of(engine, ref)
        found = [NewRecord(r.value, r.timestamp, r.key, r.tag, r.headers) for r in records]
        assert found == written * 2
        assert records[0].value is None
        assert records[1].value == b""

    # Reading

    def test_read_by_offset_past_the_end_is_empty(self, engine: NamedEngine, ref: ShardRef) -> None:
        engine.write(ref, NewRecord(b"v", 1))

        for offset in (1, 2, 1_000_000, OFFSET_MAX):
            page = engine.read_by_offset(ref, offset)
            assert (page.batches, page.events, page.next) == ([], [], offset)

    def test_read_by_offset_begins_inside_a_batch(self, engine: NamedEngine, ref: ShardRef) -> None:
        engine.batch_write(ref, [NewRecord(b"%d" % n, n) for n in range(10)])

        assert values_of(records_of(engine, ref, 7)) == [b"7", b"8", b"9"]

    def test_limits_cut_pages_and_nothing_is_skipped(self, engine: NamedEngine, ref: ShardRef) -> None:
        for size in (1, 7, 3, 20, 1):
            engine.batch_write(ref, [NewRecord(b"x" * 100, 1)] * size)

        for records_max in (1, 2, 5, 31, 32, 1_000):
            assert len(records_of(engine, ref, records_max=records_max)) == 32
        for bytes_max in (1, 150, 1_000, 10_000):
            assert len(records_of(engine, ref, bytes_max=bytes_max)) == 32
        assert engine.read_by_offset(ref, 2, records_max=3).next == 5

    def test_the_first_record_comes_through_whatever_the_limit(self, engine: NamedEngine, ref: ShardRef) -> None:
        engine.write(ref, NewRecord(b"x" * 100_000, 1))
        engine.write(ref, NewRecord(b"y" * 100_000, 1))

        page = engine.read_by_offset(ref, 0, records_max=1, bytes_max=1)

        assert page.next == 1
        assert [record.value for record in page.batches[0].records(0)] == [b"x" * 100_000]

    def test_what_is_read_from_memory_is_what_is_read(self, engine: NamedEngine, ref: ShardRef) -> None:
        shard = engine.open_shard(ref)
        assert shard.read_cached(0) == ([], [], 0)
        engine.batch_write(ref, [NewRecord(b"%d" % n, n) for n in range(10)])
        engine.write(ref, NewRecord(b"10", 10))
        before = shard.ended()
        engine.write(ref, NewRecord(b"11", 11))
        assert shard.ended() == before
        shard.delete(RangeDelete(2, 4))
        shard.commit()
        assert shard.ended() != before

        for offset in range(12):
            cached, page = shard.read_cached(offset, 1), shard.read(offset, 1)
            assert cached is None or _contents(cached) == _contents(page)
        assert shard.read_cached(12) == ([], [], 12)
        assert shard.reach() == (0, 0, 12)

        shard.delete(DeleteBefore(6))
        cached = shard.read_cached(0)
        assert cached is None or _contents(cached) == _contents(shard.read(0))
        assert shard.reach() == (6, 0, 12)

    def test_what_is_no_offset_and_no_limit_is_refused(self, engine: NamedEngine, ref: ShardRef) -> None:
        for offset in (-1, OFFSET_MAX + 1, True, "0", 1.0, None):
            with pytest.raises(Invalid, match="offset is"):
                engine.read_by_offset(ref, offset)  # type: ignore[arg-type]
        for limits in ({"records_max": 0}, {"bytes_max": 0}, {"records_max": -1}):
            with pytest.raises(Invalid, match="at least 1"):
                engine.read_by_offset(ref, 0, **limits)

    def test_waiting_ends_with_a_record_or_with_the_time(self, engine: NamedEngine, ref: ShardRef) -> None:
        shard = engine.open_shard(ref)
        assert not shard.wait(0, 0.0)
        woken = threading.Event()
        shard.wakers.add(woken.set)
        found: list[bool] = []
        waiter = threading.Thread(target=lambda: found.append(shard.wait(0, 60)))
        waiter.start()

        engine.write(ref, NewRecord(b"v", 1))
        waiter.join(60)

        assert found == [True]
        assert woken.is_set()
        assert shard.wait(0, 0.0)
        assert not shard.wait(1, 0.0)

    def test_new_records_begin_before_what_only_waits(self, engine: NamedEngine, ref: ShardRef) -> None:
        shard = engine.open_shard(ref)
        engine.batch_write(ref, [NewRecord(b"v", 1)] * 3)
        assert shard.published() == 3

        ticket = stage_by(shard, 1, 0)
        assert shard.published() == (4 if shard.is_held(ticket) else 3)
        shard.commit()
        assert shard.published() == 4

    # Times

    def test_get_offset_by_timestamp_gives_the_first_record_at_or_after_it(
        self, engine: NamedEngine, ref: ShardRef
    ) -> None:
        for timestamp in self.timestamps:
            engine.write(ref, NewRecord(b"v", timestamp))

        for asked in range(-1, 14):
            expected = next((n for n, timestamp in enumerate(self.timestamps) if timestamp >= asked), None)
            assert engine.get_offset_by_timestamp(ref, asked) == expected

    def test_a_time_is_exact_among_thousands_in_one_millisecond(self, engine: NamedEngine, ref: ShardRef) -> None:
        engine.batch_write(ref, [NewRecord(b"v", 10)] * MANY)
        engine.batch_write(ref, [NewRecord(b"v", 10)] * 99 + [NewRecord(b"v", 11)] * MANY)
        engine.open_shard(ref).rotate()
        engine.batch_write(ref, [NewRecord(b"v", 12)])

        asked = {9: 0, 10: 0, 11: MANY + 99, 12: 2 * MANY + 99, 13: None}
        assert {time: engine.get_offset_by_timestamp(ref, time) for time in asked} == asked

    def test_an_empty_shard_has_no_time(self, engine: NamedEngine, ref: ShardRef) -> None:
        assert engine.get_offset_by_timestamp(ref, 0) is None

    # Producers

    def test_a_repeated_append_gets_its_original_offset(self, engine: NamedEngine, ref: ShardRef) -> None:
        shard = engine.open_shard(ref)
        first = [append_by(shard, 7, sequence, b"%d" % sequence) for sequence in range(3)]
        engine.write(ref, NewRecord(b"other", 1))

        assert [append_by(shard, 7, sequence, b"%d" % sequence) for sequence in range(3)] == first
        with pytest.raises(Conflict, match="other records"):
            append_by(shard, 7, 2, b"another")
        assert append_by(shard, 7, 3) == 4
        assert shard.last_sequence(7) == 3
        assert shard.last_sequence(8) is None
        assert len(records_of(engine, ref)) == 5

    def test_an_append_that_is_looked_for_does_not_come_in_behind_the_look(
        self, engine: NamedEngine, ref: ShardRef
    ) -> None:
        shard = engine.open_shard(ref)
        stage_by(shard, 7, 0, generation=1)
        shard.commit()
        stage_by(shard, 7, 1, generation=1)

        assert shard.recall(Producing(7, 1, generation=2)) == (1, 1)
        assert shard.recall(Producing(7, 5, generation=2)) == (1, None)
        assert shard.recall(Producing(8, 0, generation=2)) is None
        shard.commit()
        with pytest.raises(Unavailable, match="send it again"):
            stage_by(shard, 8, 0, generation=1)
        assert stage_by(shard, 7, 1, generation=1).offset == 1
        stage_by(shard, 8, 0, generation=2)
        append_by(shard, 9, 0)
        assert shard.offsets().next == 4

    def test_sequences_may_leave_numbers_out_if_each_names_the_one_before(
        self, engine: NamedEngine, ref: ShardRef
    ) -> None:
        shard = engine.open_shard(ref)
        for producer in (7, 2**63 + 7):
            offsets = [
                append_by(shard, producer, sequence, previous=previous)
                for sequence, previous in ((5, -1), (9, 5), (10, None), (2**40, 10))
            ]

            assert [append_by(shard, producer, sequence) for sequence in (5, 9, 10, 2**40)] == offsets
            assert shard.last_sequence(producer) == 2**40
            for sequence, previous in ((2**41, 10), (2**41, None), (2**41, -1), (7, 5), (4, -1)):
                with pytest.raises(Conflict):
                    append_by(shard, producer, sequence, previous=previous)
        assert shard.offsets().next == 8

    def test_a_sequence_out_of_step_is_a_conflict(self, engine: NamedEngine, ref: ShardRef) -> None:
        shard = engine.open_shard(ref)
        with pytest.raises(Conflict, match="starts at sequence 0"):
            append_by(shard, 7, 5)
        for sequence in range(20):
            append_by(shard, 7, sequence)

        shard.commit()
        with pytest.raises(Conflict, match="expected 20"):
            append_by(shard, 7, 21)
        with pytest.raises(Conflict, match="no longer remembered"):
            append_by(shard, 7, 0)

        assert len(records_of(engine, ref)) == 20

    def test_a_repeat_beside_its_original_gets_the_same_offset(self, engine: NamedEngine, ref: ShardRef) -> None:
        shard = engine.open_shard(ref)
        for sequence in range(10):
            offsets: list[int] = []
            in_threads(8, lambda _, s=sequence, o=offsets: o.append(append_by(shard, 7, s)))  # type: ignore[misc]
            assert offsets == [sequence] * 8

        original, repeat = stage_by(shard, 7, 10), stage_by(shard, 7, 10)
        assert shard.acknowledge(repeat) == shard.acknowledge(original) == 10
        assert len(records_of(engine, ref)) == 11

    # Lives

    def test_no_offset_is_given_out_twice(self, home: EngineHome, ref: ShardRef) -> None:
        before: list[int] = []
        for life in range(3):
            engine = home.open()
            before += [engine.write(ref, NewRecord(b"%d" % life, 1)) for _ in range(3)]
            assert engine.open_shard(ref).decision.next_offset <= before[-3]
            engine.close()
        engine = home.open()
        last = engine.write(ref, NewRecord(b"last", 1))

        assert before == sorted(set(before))
        assert last > before[-1]
        steps = steps_of(engine, ref)
        if home.forgets:
            assert isinstance(steps[0], Gap)
            assert steps[0] == Gap(0, last, Reason.LOST)
            assert [step.offset for step in steps[1:] if isinstance(step, Record)] == [last]
        else:
            assert [step.offset for step in steps if isinstance(step, Record)] == [*before, last]
        engine.close()

    # Threads

    def test_many_threads_on_one_shard_lose_and_double_nothing(self, engine: NamedEngine, ref: ShardRef) -> None:
        self._append_in_threads(engine, [ref])

    def test_shards_are_written_side_by_side(self, engine: NamedEngine, home: EngineHome) -> None:
        self._append_in_threads(engine, [home.ref(0), home.ref(1)])

    def _append_in_threads(self, engine: NamedEngine, refs: Sequence[ShardRef]) -> None:
        answered: list[list[tuple[int, int, bytes]]] = [[] for _ in range(THREADS)]

        def append(number: int) -> None:
            partition = number % len(refs)
            for turn in range(APPENDS):
                value = b"%d.%d" % (number, turn)
                if turn % 4:
                    offsets = [engine.write(refs[partition], NewRecord(value, 1))]
                else:
                    offsets = engine.batch_write(refs[partition], [NewRecord(value, 1)] * 3)
                answered[number] += [(partition, offset, value) for offset in offsets]

        in_threads(THREADS, append)

        for partition, ref in enumerate(refs):
            found = [(partition, record.offset, record.value) for record in records_of(engine, ref)]
            assert found == sorted(entry for entries in answered for entry in entries if entry[0] == partition)
            assert [offset for _, offset, _ in found] == list(range(len(found)))
        assert all([offset for _, offset, _ in entries] == sorted(o for _, o, _ in entries) for entries in answered)
