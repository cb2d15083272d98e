"""What every engine that deletes and evicts must do: exactly which records end, and what readers see of it.

Inherit `RemovalContract` and give it a fixture `home`: a `LookupHome`.
"""

from __future__ import annotations

import threading
from functools import partial

import pytest

from forebay.appends.queue import record_bytes
from forebay.engines.by_name import NewRecord
from forebay.errors import Full, Invalid
from forebay.format.control.offsets import OffsetSet
from forebay.reading import Cursor
from forebay.records import OFFSET_MAX, Gap, Reason, Record
from forebay.shard.deletes import DeleteOffsets
from forebay.shard.limits import Evicted
from forebay.testing.contracts.engines import NamedEngine, append_by, in_threads, steps_of
from forebay.testing.contracts.lookups import LookupHome, keyed, offsets_of, paged, tagged
from forebay.topics import ShardRef

NUMBERS = 300
APPENDS_BESIDE = 300
"""So often each thread appends beside deletes at the most: on a busy machine a delete must not chase them for ever."""


def numbered(engine: NamedEngine, ref: ShardRef, count: int = NUMBERS) -> None:
    """Records whose key, tag and time follow from their offset, in appends of every size."""
    records = [NewRecord(b"%d" % n, n, b"k%d" % (n % 3), f"t{n % 5}", (("n", b"%d" % n),)) for n in range(count)]
    at, size = 0, 1
    while at < count:
        engine.batch_write(ref, records[at : at + size])
        at, size = at + size, size * 2 % 100 + 1


def live(engine: NamedEngine, ref: ShardRef, start: int = 0, **limits: int) -> list[int]:
    """The offsets that a reader is given; every record must be the one that was numbered so."""
    steps = steps_of(engine, ref, start, **limits)
    records = [step for step in steps if isinstance(step, Record)]
    assert all(record.value == b"%d" % record.offset for record in records)
    assert all(record.headers == (("n", record.value),) for record in records)
    return offsets_of(records)


def gaps_of(engine: NamedEngine, ref: ShardRef, start: int = 0) -> list[Gap]:
    """The gaps that a reader gets; what was deleted is none."""
    gaps: list[Gap] = []
    shard = engine.open_shard(ref)
    cursor = Cursor(shard, start, name="t", partition=0, on_gap=lambda _, gap: gaps.append(gap))
    while cursor.pull(bytes_max=500):
        pass
    assert cursor.next == max(shard.offsets().next, start)
    return gaps


def without(*gone: range, count: int = NUMBERS) -> list[int]:
    """All numbers but these."""
    return [number for number in range(count) if not any(number in part for part in gone)]


class RemovalContract:
    """The suite. A test's name is its claim."""

    # Deletes

    def test_delete_by_offset_ends_exactly_that_range(self, engine: NamedEngine, ref: ShardRef) -> None:
        numbered(engine, ref)

        assert engine.delete_by_offset(ref, 10, 150) == 140
        assert engine.delete_by_offset(ref, 0, 20) == 10
        assert engine.delete_by_offset(ref, 149, 151) == 1
        assert engine.delete_by_offset(ref, 0, 151) == 0
        assert engine.delete_by_offset(ref, 200, 200) == 0

        assert live(engine, ref) == without(range(151))
        assert gaps_of(engine, ref) == []
        assert offsets_of(keyed(engine, ref, b"k0")) == [n for n in without(range(151)) if n % 3 == 0]
        assert offsets_of(tagged(engine, ref, "t1")) == [n for n in without(range(151)) if n % 5 == 1]

    def test_delete_by_key_and_delete_by_tag_end_every_match_and_no_other(
        self, engine: NamedEngine, ref: ShardRef
    ) -> None:
        numbered(engine, ref)

        assert engine.delete_by_key(ref, b"k1") == 100
        assert engine.delete_by_tag(ref, "t2") == 40
        assert engine.delete_by_key(ref, b"k1") == engine.delete_by_tag(ref, "t2") == 0

        left = [n for n in range(NUMBERS) if n % 3 != 1 and n % 5 != 2]
        assert live(engine, ref) == left
        assert keyed(engine, ref, b"k1") == tagged(engine, ref, "t2") == []
        assert offsets_of(keyed(engine, ref, b"k0")) == [n for n in left if n % 3 == 0]
        assert offsets_of(tagged(engine, ref, "t4", records_max=7)) == [n for n in left if n % 5 == 4]
        assert gaps_of(engine, ref) == []

    def test_scattered_offsets_are_deleted_by_one_call(self, engine: NamedEngine, ref: ShardRef) -> None:
        numbered(engine, ref)
        engine.delete_by_offset(ref, 100, 120)
        engine.delete_before(ref, 20)
        shard = engine.open_shard(ref)

        scattered = [*range(0, 290, 7), 150, 151, 152, 299, 300, 10_000_000]
        gone = {at for at in scattered if at in without(range(100, 120), range(20))}
        assert shard.delete(DeleteOffsets(OffsetSet.of(scattered))) == len(gone)
        assert shard.delete(DeleteOffsets(OffsetSet.of(scattered))) == shard.delete(DeleteOffsets(OffsetSet())) == 0

        left = [at for at in without(range(100, 120), range(20)) if at not in gone]
        assert live(engine, ref) == left
        assert offsets_of(keyed(engine, ref, b"k0")) == [n for n in left if n % 3 == 0]
        assert offsets_of(tagged(engine, ref, "t1")) == [n for n in left if n % 5 == 1]
        assert gaps_of(engine, ref) == []
        assert engine.write(ref, NewRecord(b"300", 300, b"k0", "t0", (("n", b"300"),))) == 300
        assert live(engine, ref) == [*left, 300]

    def test_the_newest_of_a_key_is_the_newest_that_is_left(self, engine: NamedEngine, ref: ShardRef) -> None:
        numbered(engine, ref)

        for newest in (297, 294, 291):
            assert engine.read_by_key(ref, b"k0").batches[0].base == newest
            assert engine.delete_by_offset(ref, newest, newest + 1) == 1
        assert engine.write(ref, NewRecord(b"300", 1, b"k0")) == 300
        assert engine.read_by_key(ref, b"k0").batches[0].base == 300

    def test_deleting_what_is_not_there_is_fine(self, engine: NamedEngine, ref: ShardRef) -> None:
        for _ in range(2):
            assert engine.delete_by_key(ref, b"k") == engine.delete_by_tag(ref, "t") == 0
            assert engine.delete_by_offset(ref, 5, 10) == engine.delete_by_offset(ref, 0, OFFSET_MAX) == 0
            assert engine.delete_before(ref, 0) == 0
        assert engine.delete_before(ref, 10) == 0
        assert engine.open_shard(ref).offsets()[:2] == (0, 0)
        assert engine.write(ref, NewRecord(b"0", 1)) == 0

    def test_pages_full_of_deleted_records_lead_on(self, engine: NamedEngine, ref: ShardRef) -> None:
        numbered(engine, ref)
        engine.delete_by_offset(ref, 3, 250)
        engine.delete_by_offset(ref, 280, 300)

        for limits in ({"records_max": 1}, {"records_max": 3}, {"bytes_max": 1}, {"bytes_max": 200}):
            assert live(engine, ref, **limits) == without(range(3, 250), range(280, 300))
            assert live(engine, ref, 100, **limits) == list(range(250, 280))
        page = engine.read_by_offset(ref, 285, records_max=1, bytes_max=1)
        assert page == ([], [Gap(285, 300, Reason.DELETED)], 300)

    def test_a_delete_reaches_no_later_record(self, engine: NamedEngine, ref: ShardRef) -> None:
        engine.write(ref, NewRecord(b"0", 1, b"k", "t"))
        engine.delete_by_key(ref, b"k")
        engine.delete_by_tag(ref, "t")
        engine.delete_by_offset(ref, 0, OFFSET_MAX)
        engine.delete_before(ref, OFFSET_MAX)

        assert engine.write(ref, NewRecord(b"1", 1, b"k", "t")) == 1
        assert offsets_of(keyed(engine, ref, b"k")) == offsets_of(tagged(engine, ref, "t")) == [1]

    def test_deletes_among_appends_end_what_came_before_and_nothing_behind(
        self, engine: NamedEngine, ref: ShardRef
    ) -> None:
        """I23: what was acknowledged before the call is gone on return, what is appended behind it stays."""
        stop = threading.Event()
        bounds: list[tuple[int, int]] = []
        ended = 0

        def work(number: int) -> None:
            nonlocal ended
            if number == 0:
                for _ in range(15):
                    before = engine.open_shard(ref).published()
                    ended += engine.delete_by_key(ref, b"k")
                    bounds.append((before, engine.open_shard(ref).published()))
                    assert all(offset >= before for offset in offsets_of(keyed(engine, ref, b"k")))
                stop.set()
            for _ in range(APPENDS_BESIDE):
                if not stop.is_set():
                    engine.batch_write(ref, [NewRecord(b"v", 1, b"k"), NewRecord(b"v", 1, b"o")])

        in_threads(4, work)

        head = engine.open_shard(ref).published()
        left = offsets_of(keyed(engine, ref, b"k"))
        assert set(range(bounds[-1][1] + bounds[-1][1] % 2, head, 2)) <= set(left)
        assert ended + len(left) == head // 2
        assert offsets_of(keyed(engine, ref, b"o")) == list(range(1, head, 2))

    def test_delete_before_moves_earliest_in_silence_and_never_back(self, engine: NamedEngine, ref: ShardRef) -> None:
        numbered(engine, ref)
        engine.delete_by_offset(ref, 5, 10)

        assert engine.delete_before(ref, 37) == 32
        assert engine.delete_before(ref, 36) == 0
        assert engine.open_shard(ref).offsets()[:2] == (37, 0)
        assert live(engine, ref) == live(engine, ref, 20) == without(range(37))
        assert gaps_of(engine, ref) == []
        assert offsets_of(keyed(engine, ref, b"k0"))[0] == 39
        assert engine.delete_before(ref, OFFSET_MAX) == NUMBERS - 37
        assert engine.open_shard(ref).offsets()[:2] == (NUMBERS, 0)
        assert live(engine, ref) == []
        assert engine.write(ref, NewRecord(b"300", 1, None, None, (("n", b"300"),))) == NUMBERS
        assert live(engine, ref) == [NUMBERS]

    def test_times_lead_to_the_first_live_record(self, engine: NamedEngine, ref: ShardRef) -> None:
        times = [n * 37 % 211 for n in range(NUMBERS)]
        engine.batch_write(ref, [NewRecord(b"%d" % n, time) for n, time in enumerate(times)])
        gone: list[range] = []
        for part in (range(100, 180), range(2, 3), range(40, 64), range(64, 100), range(190, 300), range(30)):
            engine.delete_by_offset(ref, part.start, part.stop)
            gone.append(part)
            for asked in range(-1, 215, 3):
                expected = next((n for n in without(*gone) if times[n] >= asked), None)
                assert engine.get_offset_by_timestamp(ref, asked) == expected
        engine.delete_before(ref, 185)
        assert engine.get_offset_by_timestamp(ref, 0) == 185

    def test_ranges_that_are_none_are_refused(self, engine: NamedEngine, ref: ShardRef) -> None:
        with pytest.raises(Invalid, match="ends before it begins"):
            engine.delete_by_offset(ref, 5, 4)
        for offset in (-1, OFFSET_MAX + 1, True, None):
            with pytest.raises(Invalid, match="offset is"):
                engine.delete_before(ref, offset)  # type: ignore[arg-type]
        with pytest.raises(Invalid, match="key is"):
            engine.delete_by_key(ref, None)  # type: ignore[arg-type]

    # Eviction

    def test_cap_records_keeps_so_many_offsets(self, engine: NamedEngine, home: LookupHome) -> None:
        ref = home.ref(cap_records=100)
        numbered(engine, ref)
        engine.delete_by_offset(ref, 0, 50)
        engine.delete_by_offset(ref, 250, 300)
        shard = engine.open_shard(ref)
        assert live(engine, ref)[0] == 50

        evicted = shard.evict(home.clock.now_ms())

        assert evicted._replace(bytes=0) == Evicted(200, 150, 0, Reason.CAP)
        assert shard.offsets()[:2] == (200, 200)
        assert live(engine, ref, 200) == list(range(200, 250))
        assert gaps_of(engine, ref, 120) == [Gap(120, 200, Reason.CAP)]
        assert shard.evict(home.clock.now_ms()) == Evicted(200)

    def test_cap_bytes_keeps_what_fits_and_always_the_newest(self, engine: NamedEngine, home: LookupHome) -> None:
        size = record_bytes(b"x" * 84, None, None, ())
        ref = home.ref(cap_bytes=10 * size + size // 2)
        shard = engine.open_shard(ref)
        for count in (1, 7, 3, 20, 4):
            engine.batch_write(ref, [NewRecord(b"x" * 84, 1)] * count)
        engine.delete_by_offset(ref, 27, 29)
        engine.delete_by_offset(ref, 4, 6)

        assert shard.evict(0) == Evicted(25, 23, 25 * size, Reason.CAP)
        assert shard.evict(0) == Evicted(25)
        engine.write(ref, NewRecord(b"y" * 5_000, 1))
        assert shard.evict(0) == Evicted(35, 8, 10 * size, Reason.CAP)
        assert shard.offsets()[:2] == (35, 35)
        assert engine.delete_before(ref, 36) == 1
        assert shard.evict(0) == Evicted(35)

    def test_ttl_ends_the_front_up_to_the_first_that_stays(self, engine: NamedEngine, home: LookupHome) -> None:
        ref = home.ref(ttl_ms=1_000)
        shard = engine.open_shard(ref)
        begun = home.clock.now_ms()
        for count in (20, 30, 10):
            engine.batch_write(ref, [NewRecord(b"v", 1)] * count)
            home.clock.jump(400 if count == 20 else -100)
        engine.batch_write(ref, [NewRecord(b"v", 1)] * 100)

        assert shard.evict(begun + 999) == Evicted(0)
        assert shard.evict(begun + 1_000)._replace(bytes=0) == Evicted(20, 20, 0, Reason.TTL)
        assert shard.evict(begun + 1_399) == Evicted(20), "what is behind one that stays, stays"
        assert shard.evict(begun + 1_400)._replace(bytes=0) == Evicted(90, 70, 0, Reason.TTL, held_back=True)
        assert shard.offsets()[:2] == (90, 90)
        assert gaps_of(engine, ref) == [Gap(0, 90, Reason.TTL)]

    def test_one_pass_ends_no_more_than_a_share_because_of_time(self, engine: NamedEngine, home: LookupHome) -> None:
        """I31: a clock that jumps ahead must not end everything at once."""
        ref = home.ref(ttl_ms=1_000)
        shard = engine.open_shard(ref)
        numbered(engine, ref, 100)
        engine.delete_by_offset(ref, 10, 20)
        far = home.clock.now_ms() + 10**12

        ended = [shard.evict(far)._replace(bytes=0) for _ in range(9)]

        floors = [55, 77, 88, 94, 97, 98, 99, 100, 100]
        assert [evicted.floor for evicted in ended] == floors
        assert [evicted.records for evicted in ended] == [45, 22, 11, 6, 3, 1, 1, 1, 0]
        assert [evicted.held_back for evicted in ended] == [True] * 7 + [False] * 2
        assert shard.offsets().next == 100

    def test_a_tombstone_is_reported_once_whatever_lay_below_it(self, engine: NamedEngine, home: LookupHome) -> None:
        ref = home.ref(cap_records=100)
        numbered(engine, ref)
        engine.delete_before(ref, 30)
        engine.delete_by_offset(ref, 60, 90)
        engine.open_shard(ref).evict(0)
        engine.delete_before(ref, 210)

        for start in (0, 29, 50, 199):
            assert gaps_of(engine, ref, start) == [Gap(start, 200, Reason.CAP)]
            records, gaps = paged(partial(engine.read_by_key, ref, b"k0", history=True, records_max=3), start)
            assert gaps == [Gap(start, 200, Reason.CAP)]
            assert offsets_of(records) == list(range(210, NUMBERS, 3))
            assert engine.read_by_tag(ref, "t0", start).events == gaps
        for start in (200, 205, 210):
            assert gaps_of(engine, ref, start) == []
            assert engine.read_by_key(ref, b"k0", start).events == []
        assert engine.open_shard(ref).offsets()[:2] == (210, 200)

    def test_evicted_records_are_in_no_index(self, engine: NamedEngine, home: LookupHome) -> None:
        ref = home.ref(cap_records=2)
        numbered(engine, ref)
        engine.open_shard(ref).evict(0)

        assert [engine.read_by_key(ref, b"k%d" % n, 298).batches != [] for n in range(3)] == [False, True, True]
        assert engine.read_by_key(ref, b"k0").batches == []
        assert engine.get_offset_by_timestamp(ref, 0) == 298
        assert engine.delete_by_key(ref, b"k0") == 0

    def test_a_topic_that_rejects_is_full_at_its_cap_and_uses_no_offset(
        self, engine: NamedEngine, home: LookupHome
    ) -> None:
        ref = home.ref(cap_records=10, on_full="reject_new", ttl_ms=1_000)
        shard = engine.open_shard(ref)
        sequences = [append_by(shard, 7, n) for n in range(3)]
        engine.batch_write(ref, [NewRecord(b"v", 1)] * 7)

        with pytest.raises(Full, match="is full.*above cap_records 10.*discard_old"):
            engine.write(ref, NewRecord(b"v", 1))
        with pytest.raises(Full):
            append_by(shard, 7, 3)
        assert append_by(shard, 7, 2) == sequences[2], "a repeat needs no room"
        assert shard.offsets().next == 10
        assert shard.evict(home.clock.now_ms()) == Evicted(0), "caps evict nothing here"
        engine.delete_by_offset(ref, 5, 6)
        with pytest.raises(Full):
            engine.write(ref, NewRecord(b"v", 1))
        engine.delete_before(ref, 3)
        assert engine.batch_write(ref, [NewRecord(b"v", 1)] * 3) == [10, 11, 12]
        with pytest.raises(Full):
            engine.write(ref, NewRecord(b"v", 1))
        home.clock.advance(1)
        assert shard.evict(home.clock.now_ms()).reason is Reason.TTL
        assert append_by(shard, 7, 3) == 13

    def test_a_topic_that_rejects_counts_bytes_exactly(self, engine: NamedEngine, home: LookupHome) -> None:
        size = record_bytes(b"x" * 10, b"k", "t", (("h", b"v"),))
        ref = home.ref(cap_bytes=5 * size, on_full="reject_new")
        record = NewRecord(b"x" * 10, 1, b"k", "t", (("h", b"v"),))

        with pytest.raises(Full, match="cap_bytes"):
            engine.batch_write(ref, [record] * 6)
        assert engine.batch_write(ref, [record] * 4) == [0, 1, 2, 3]
        with pytest.raises(Full):
            engine.write(ref, record._replace(value=b"x" * 11))
        assert engine.write(ref, record) == 4

    # Lives

    def test_deletes_and_floors_outlive_the_engine(self, home: LookupHome) -> None:
        """I23, I24: nothing comes back, no floor goes back; where records end with the engine, offsets do not."""
        ref = home.ref(cap_records=200)
        engine = home.open()
        numbered(engine, ref)
        if home.forgets:
            engine.close()
            engine = home.open()
            assert engine.write(ref, NewRecord(b"new", 1)) >= 300
            assert offsets_of(keyed(engine, ref, b"k0", 0)) == []
            engine.close()
            return
        engine.delete_by_key(ref, b"k1")
        engine.open_shard(ref).evict(0)
        engine.delete_before(ref, 120)
        engine.delete_by_offset(ref, 290, 300)
        expected = live(engine, ref, 100), gaps_of(engine, ref, 10), engine.open_shard(ref).offsets()[:2]
        for _ in range(2):
            engine.close()
            engine = home.open()
            found = live(engine, ref, 100), gaps_of(engine, ref, 10), engine.open_shard(ref).offsets()[:2]
            assert found == expected
            assert expected[2] == (120, 100)
            assert offsets_of(keyed(engine, ref, b"k0", 120)) == [n for n in expected[0] if n % 3 == 0]
            assert [engine.get_offset_by_timestamp(ref, n) for n in (0, 121, 289, 290)] == [120, 122, None, None]
            assert engine.open_shard(ref).evict(0) == Evicted(100)
        engine.write(ref, NewRecord(b"300", 1))
        assert engine.open_shard(ref).evict(0) == Evicted(100)
        engine.close()
