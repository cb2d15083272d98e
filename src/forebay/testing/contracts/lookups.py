"""What every engine with look-ups must do: by key, by tag, by time; and the offsets of groups.

Inherit `LookupContract` and give it a fixture `home`: a `LookupHome`. Deletes and eviction are in `removals`.
"""

from __future__ import annotations

import random  # noqa: TID251  # seeded: the same run again
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import pytest

from forebay.appends.queue import record_bytes
from forebay.engines.by_name import NewRecord
from forebay.errors import Invalid
from forebay.pages import Page
from forebay.records import OFFSET_MAX, Gap, Record
from forebay.testing.contracts.engines import PAGES_MAX, NamedEngine, values_of
from forebay.testing.simulated.clock import ManualClock
from forebay.topics import ShardRef

TAGS = ("a", "a/b", "a/", "/a", "aa", "A", "á", "a\0", "a\0b", "t" * 300, "t" * 299 + "u")
KEYS = (b"", b"\0", b"\0\0", b"a", b"a\0", b"a\xff", b"\xff", b"\xff" * 8, b"k" * 254, b"k" * 255, b"k" * 254 + b"l")
MANY = 3_000


class LookupHome(Protocol):
    """Where such an engine keeps its state, through as many lives as the test wants."""

    forgets: bool
    """Records end with the engine; their offsets do not."""
    clock: ManualClock
    """When records are appended."""

    def open(self) -> NamedEngine:
        """The engine, with whatever the one before it left. It must have been closed."""

    def ref(self, partition: int = 0, **limits: int | str | None) -> ShardRef:
        """A shard of a topic with these limits; the same topic whatever they are."""


def paged(look_up: Callable[[int], Page], start: int = 0) -> tuple[list[Record], list[Gap]]:
    """All that a look-up gives, page by page, and the gaps it reported; fails if a page does not lead on."""
    records: list[Record] = []
    gaps: list[Gap] = []
    at = start
    for _ in range(PAGES_MAX):
        page = look_up(at)
        found = [record for batch in page.batches for record in batch.records(0)]
        offsets = [record.offset for record in found]
        assert offsets == sorted(set(offsets))
        assert not offsets or (at <= offsets[0] and offsets[-1] < page.next)
        records += found
        gaps += page.events
        if page.next == at:
            assert not found
            return records, gaps
        assert page.next > at
        at = page.next
    raise AssertionError(f"more than {PAGES_MAX} pages")


def keyed(engine: NamedEngine, ref: ShardRef, key: bytes, start: int = 0, **limits: int) -> list[Record]:
    """Every record of a key, where no gap is expected."""
    records, gaps = paged(partial(engine.read_by_key, ref, key, history=True, **limits), start)
    assert gaps == []
    return records


def tagged(engine: NamedEngine, ref: ShardRef, tag: str, start: int = 0, **limits: int) -> list[Record]:
    """Every record of a tag, where no gap is expected."""
    records, gaps = paged(partial(engine.read_by_tag, ref, tag, **limits), start)
    assert gaps == []
    return records


def offsets_of(records: list[Record]) -> list[int]:
    """The offsets alone."""
    return [record.offset for record in records]


class LookupContract:
    """The suite. A test's name is its claim."""

    @pytest.fixture
    def engine(self, home: LookupHome) -> Iterator[NamedEngine]:
        engine = home.open()
        yield engine
        engine.close()

    @pytest.fixture
    def ref(self, home: LookupHome) -> ShardRef:
        return home.ref()

    # Keys

    def test_read_by_key_gives_the_newest_and_the_earlier_ones_are_still_there(
        self, engine: NamedEngine, ref: ShardRef
    ) -> None:
        for number in range(5):
            engine.write(ref, NewRecord(b"%d" % number, 1, b"k"))
            engine.write(ref, NewRecord(b"other", 1, b"o"))

        page = engine.read_by_key(ref, b"k")

        assert [values_of(batch.records(0)) for batch in page.batches] == [[b"4"]]
        assert (page.events, page.next) == ([], 10)
        assert values_of(keyed(engine, ref, b"k")) == [b"%d" % number for number in range(5)]
        assert offsets_of(paged(partial(engine.read_by_offset, ref))[0]) == list(range(10))

    def test_keys_match_exactly_and_none_is_no_key(self, engine: NamedEngine, ref: ShardRef) -> None:
        engine.batch_write(ref, [NewRecord(b"none", 1)] + [NewRecord(key, 1, key) for key in KEYS])
        for key in KEYS:
            engine.write(ref, NewRecord(key + b"!", 1, key))

        for key in KEYS:
            assert values_of(keyed(engine, ref, key)) == [key, key + b"!"]
        assert keyed(engine, ref, b"unknown") == []
        assert engine.read_by_key(ref, b"unknown") == Page([], [], 1 + 2 * len(KEYS))

    def test_the_newest_of_a_key_below_the_start_is_not_given(self, engine: NamedEngine, ref: ShardRef) -> None:
        engine.write(ref, NewRecord(b"v", 1, b"k"))
        engine.write(ref, NewRecord(b"v", 1))

        assert engine.read_by_key(ref, b"k", 0).batches[0].base == 0
        assert engine.read_by_key(ref, b"k", 1) == Page([], [], 2)
        assert engine.read_by_key(ref, b"k", OFFSET_MAX) == Page([], [], OFFSET_MAX)

    # Tags

    def test_read_by_tag_matches_exactly(self, engine: NamedEngine, ref: ShardRef) -> None:
        engine.batch_write(ref, [NewRecord(tag.encode(), 1, None, tag) for tag in TAGS] + [NewRecord(b"none", 1)])
        engine.batch_write(ref, [NewRecord(b"again", 1, None, tag) for tag in TAGS])

        for tag in TAGS:
            assert values_of(tagged(engine, ref, tag)) == [tag.encode(), b"again"]
        assert tagged(engine, ref, "b") == []

    def test_a_record_comes_back_whole_from_every_look_up(self, engine: NamedEngine, ref: ShardRef) -> None:
        headers = (("h", b"1"), ("h", None))
        written = [
            NewRecord(None, -5, b"k", "t", headers),
            NewRecord(b"", 0, b"k", "t"),
            NewRecord(bytes(range(256)), 2**62, b"k", "t", headers),
        ]
        engine.batch_write(ref, [NewRecord(b"before", 1), *written, NewRecord(b"behind", 1)])

        for found in (keyed(engine, ref, b"k"), tagged(engine, ref, "t")):
            assert [NewRecord(r.value, r.timestamp, r.key, r.tag, r.headers) for r in found] == written
            assert offsets_of(found) == [1, 2, 3]

    # Pages

    def test_look_ups_are_paged_by_records_and_by_bytes_and_nothing_is_skipped(
        self, engine: NamedEngine, ref: ShardRef
    ) -> None:
        for number in range(60):
            engine.batch_write(ref, [NewRecord(b"x" * 50, 1, b"k", "t"), NewRecord(b"y", 1, b"o", "o")] * (number % 3))
        expected = offsets_of(keyed(engine, ref, b"k"))
        assert len(expected) == 60
        size = record_bytes(b"x" * 50, b"k", "t", ())

        for records_max in (1, 2, 7, 59, 60, 61):
            assert offsets_of(keyed(engine, ref, b"k", records_max=records_max)) == expected
            page = engine.read_by_tag(ref, "t", records_max=records_max)
            assert sum(batch.count for batch in page.batches) == min(records_max, 60)
        for bytes_max in (1, size - 1, size, 3 * size, 1_000):
            assert offsets_of(tagged(engine, ref, "t", bytes_max=bytes_max)) == expected
            page = engine.read_by_key(ref, b"k", history=True, bytes_max=bytes_max)
            assert sum(batch.count for batch in page.batches) == max(1, bytes_max // size)
        assert offsets_of(keyed(engine, ref, b"k", expected[30])) == expected[30:]
        assert offsets_of(keyed(engine, ref, b"k", expected[30] + 1)) == expected[31:]

    def test_the_first_match_comes_through_whatever_the_limit(self, engine: NamedEngine, ref: ShardRef) -> None:
        engine.write(ref, NewRecord(b"-", 1))
        for _ in range(2):
            engine.write(ref, NewRecord(b"x" * 100_000, 1, b"k", "t"))

        for look_up, following in (
            (partial(engine.read_by_key, ref, b"k", history=True), 2),
            (partial(engine.read_by_tag, ref, "t"), 2),
            (partial(engine.read_by_key, ref, b"k"), 3),
        ):
            page = look_up(0, records_max=1, bytes_max=1)
            assert [batch.count for batch in page.batches] == [1]
            assert page.next == following

    def test_a_look_up_that_finds_nothing_leads_to_the_head(self, engine: NamedEngine, ref: ShardRef) -> None:
        assert engine.read_by_tag(ref, "t") == Page([], [], 0)
        engine.batch_write(ref, [NewRecord(b"v", 1)] * MANY)

        assert engine.read_by_tag(ref, "t", records_max=1) == Page([], [], MANY)
        assert engine.read_by_key(ref, b"k", history=True, bytes_max=1) == Page([], [], MANY)
        assert engine.read_by_tag(ref, "t", MANY + 5) == Page([], [], MANY + 5)

    def test_indexes_by_offset_key_tag_and_timestamp_agree_with_reading_everything(
        self, engine: NamedEngine, ref: ShardRef
    ) -> None:
        chance = random.Random(4)
        written = [
            NewRecord(b"%d" % number, 1, chance.choice([None, b"a", b"b"]), chance.choice([None, "x", "y", "z"]))
            for number in range(MANY)
        ]
        at = 0
        while at < MANY:
            count = chance.choice([1, 1, 2, 50, 700])
            engine.batch_write(ref, written[at : at + count])
            at += count

        for key in (b"a", b"b"):
            expected = [offset for offset, record in enumerate(written) if record.key == key]
            assert offsets_of(keyed(engine, ref, key)) == expected
            assert engine.read_by_key(ref, key).batches[0].base == expected[-1]
        for tag in ("x", "y", "z"):
            expected = [offset for offset, record in enumerate(written) if record.tag == tag]
            assert offsets_of(tagged(engine, ref, tag, records_max=37)) == expected

    def test_what_is_no_key_no_tag_and_no_limit_is_refused(self, engine: NamedEngine, ref: ShardRef) -> None:
        for key in (None, "k", 5, bytearray(b"k")):
            with pytest.raises(Invalid, match="key is"):
                engine.read_by_key(ref, key)  # type: ignore[arg-type]
        for tag in (None, b"t", 5):
            with pytest.raises(Invalid, match="tag is"):
                engine.read_by_tag(ref, tag)  # type: ignore[arg-type]
        for start in (-1, OFFSET_MAX + 1, True, None):
            with pytest.raises(Invalid, match="offset is"):
                engine.read_by_key(ref, b"k", start)  # type: ignore[arg-type]
        with pytest.raises(Invalid, match="at least 1"):
            engine.read_by_tag(ref, "t", records_max=0)

    # Times

    def test_a_time_is_exact_in_any_order_of_times(self, engine: NamedEngine, ref: ShardRef) -> None:
        """The first record, by offset, whose time is at or after the one asked for."""
        chance = random.Random(5)
        times: list[int] = []
        for _ in range(30):
            base = chance.randrange(-1_000, 1_000)
            times += [base + chance.randrange(40) for _ in range(chance.choice([1, 5, 64, 65, 300]))]
        at = 0
        while at < len(times):
            count = chance.choice([1, 3, 64, 100, 500])
            engine.batch_write(ref, [NewRecord(b"v", time) for time in times[at : at + count]])
            at += count

        for asked in [*range(-1_050, 1_100, 7), *times[:50]]:
            expected = next((offset for offset, time in enumerate(times) if time >= asked), None)
            assert engine.get_offset_by_timestamp(ref, asked) == expected

    def test_a_time_is_exact_among_thousands_in_one_millisecond_across_lives(self, home: LookupHome) -> None:
        ref = home.ref()
        for life, size in enumerate((1, 63, 64, 4_000, 130, 1)):
            engine = home.open()
            engine.batch_write(ref, [NewRecord(b"v", life)] * size)
            engine.close()
        engine = home.open()

        firsts = [None] * 6 if home.forgets else [0, 1, 64, 128, 4_128, 4_258]
        assert [engine.get_offset_by_timestamp(ref, life) for life in range(6)] == firsts
        assert engine.get_offset_by_timestamp(ref, 6) is None
        engine.close()

    # Groups

    def test_commit_offset_and_get_offset_by_group_agree_and_never_go_back(
        self, home: LookupHome, ref: ShardRef
    ) -> None:
        engine = home.open()
        assert engine.get_offset_by_group(ref, "g") is None
        assert engine.commit_offset(ref, "g", 5, "note") == 5
        assert engine.commit_offset(ref, "g", 3) == 5
        assert engine.commit_offset(ref, "other", 1) == 1
        assert engine.get_offset_by_group(home.ref(1), "g") is None
        engine.close()

        engine = home.open()
        standing = engine.get_offset_by_group(ref, "g")
        assert standing is not None
        assert (standing.offset, standing.note) == (5, "note")
        engine.close()

    def test_odd_names_and_places_of_groups_are_refused(self, engine: NamedEngine, ref: ShardRef) -> None:
        for group in ("", "a/b", "..", "a b", "x" * 101, "\N{SNOWMAN}"):
            with pytest.raises(Invalid, match="not a reader's name"):
                engine.commit_offset(ref, group, 1)
        for offset in (-1, OFFSET_MAX + 1, True):
            with pytest.raises(Invalid, match="offset is"):
                engine.commit_offset(ref, "g", offset)
        with pytest.raises(Invalid, match="note"):
            engine.commit_offset(ref, "g", 1, "x" * 5_000)
