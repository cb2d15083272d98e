"""Look-ups by key and tag over the tiers of a shard: growing, rotated, sealed and dropped files, history, loads."""

from __future__ import annotations

import contextlib
import random  # noqa: TID251  # seeded: the same run again
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from forebay.appends.ticket import Ticket
from forebay.blobs.blocks import ReadAhead
from forebay.disk import replace_file
from forebay.errors import Corrupt
from forebay.format.columns.rows import ColumnBytes, Columns, encode_columns
from forebay.format.control.frames import NO_FLOOR, Floor
from forebay.format.control.offsets import OffsetSet
from forebay.format.files.segment import index_name
from forebay.format.index import lookups as index_lookups
from forebay.format.index import lookups as posted
from forebay.format.index.hashing import Hashes
from forebay.format.index.lookups import Sought
from forebay.format.index.sections import SectionKind
from forebay.format.metadata.descriptor import LoadStanding, LoadStatus
from forebay.format.metadata.keys import load_key
from forebay.format.metadata.value import encode_value
from forebay.history import History, Objects
from forebay.loads.prepare import LoadPlace, descriptors_of, manifest_of, write_segment
from forebay.metadata import Put
from forebay.pages import Page
from forebay.records import Bytes, Gap, Reason
from forebay.shard.lookups import Lookups
from forebay.shard.tiers import NOTHING, Ended, Tiers
from forebay.testing.contracts.lookups import offsets_of, paged
from forebay.wal.files import LogFile, SealedFile
from forebay.wal.recovery.survey import CHECKPOINT_NAME
from forebay.wal.retention import drop_file
from tests.ledger import Ledger
from tests.support.environments.shard import KEYS, TOPIC, ShardEnvironment
from tests.wal.test_indexes import make_old

pytestmark = pytest.mark.slow

ENTRIES: Final = (b"", b"a", b"a\0", b"ab", b"k" * 1_024, b"k" * 1_025, b"k" * 1_024 + b"l", b"rare")
FRAME_ROWS: Final = 240
TAGS: Final = ("", "a", "a/b", "á", "t" * 2_000)


class Past(NamedTuple):
    """History that is known in full."""

    exported: int
    history: History


class Written(NamedTuple):
    """What a record was appended with."""

    key: bytes | None
    tag: str | None


class Library:
    """A shard with records of known keys and tags, and look-ups over it."""

    def __init__(self, seed: int = 1) -> None:
        self.environment = ShardEnvironment()
        self.written: dict[int, Written] = {}
        self.ended = NOTHING
        self.chance = random.Random(seed)
        objects = Objects(self.environment.store)
        self.close = objects.close
        self.history = History(self.environment.catalog(), objects.segment)

    @property
    def lookups(self) -> Lookups:
        wal = self.environment.shard.wal
        past = Past(self.environment.catalog().frontier().next, self.history)
        return Lookups(wal, Tiers(wal, past), lambda: self.ended)

    def some(self, count: int) -> list[Written]:
        """Records to append, with few of the last key."""
        return [
            Written(self.chance.choice((None, *ENTRIES[:-1])), self.chance.choice((None, *TAGS))) for _ in range(count)
        ]

    def append(self, written: list[Written]) -> None:
        """One append."""
        wal = self.environment.shard.wal
        first = wal.head
        ticket = wal.stage_many(columns_of(written, first), None, Ticket())
        assert wal.acknowledge(ticket) == first
        self.written.update(enumerate(written, first))

    def fill(self, files: int, appends: int = 12) -> None:
        """So many sealed files, of frames of many sizes."""
        for _ in range(files):
            for _ in range(appends):
                self.append(self.some(self.chance.choice((1, 1, 3, 40))))
            self.environment.seal()

    def drop(self, files: int) -> None:
        """Let the first local files go, whose records are history."""
        for file in self.environment.shard.wal.files.all[:files]:
            assert isinstance(file, SealedFile)
            drop_file(self.environment.disk, self.environment.shard.wal.files, file)

    def load(self, written: list[Written], status: LoadStatus) -> int:
        """Attach records behind everything, as a load of two segments; the first of their offsets."""
        environment = self.environment
        environment.seal()
        environment.export()
        half = len(written) // 2
        segments = []
        start = environment.catalog().frontier().next
        for token, part in (("a", written[:half]), ("b", written[half:])):
            columns = columns_of(part, start if token == "a" else start + half)
            segment = write_segment(
                environment.store, LoadPlace("load", TOPIC, 0), token, [columns], clock=environment.clock
            )
            assert segment is not None
            segments.append((0, segment))
        manifest = manifest_of("load", TOPIC, segments)
        pieces = descriptors_of(manifest, 0, start, epoch=1, store="directory", leader="me", created_at=0)
        self.conclude(status)
        environment.catalog().extend(1, pieces)
        environment.shard.wal.skip_to_history(start + len(written))
        return start

    def conclude(self, status: LoadStatus) -> None:
        """Say how the load stands."""
        standing = encode_value(LoadStanding(status=status, topic_id=TOPIC))
        self.environment.metadata.transaction([], [Put(load_key("load", prefix=KEYS.prefix), standing)])

    def offsets(self, chosen: Callable[[Written], bool], start: int = 0) -> list[int]:
        """Where such records are."""
        return [offset for offset, written in self.written.items() if offset >= start and chosen(written)]

    def check(self) -> None:
        """Every look-up gives what was written, and nothing else."""
        look, head = self.lookups, self.environment.shard.wal.head
        for key in (*ENTRIES, b"unknown"):
            expected = self.offsets(lambda written, key=key: written.key == key)  # type: ignore[misc]
            assert self.found(partial(look.read_by_key, key, history=True)) == expected
            newest = look.read_by_key(key)
            assert newest.next == head
            assert [(batch.base, batch.count) for batch in newest.batches] == [(place, 1) for place in expected[-1:]]
            assert list(look.offsets(Sought.of_key(key))[0]) == expected
        for tag in (*TAGS, "b"):
            expected = self.offsets(lambda written, tag=tag: written.tag == tag)  # type: ignore[misc]
            limits = self.chance.choice(({"records_max": 1}, {"records_max": 7}, {"bytes_max": 1}, {"bytes_max": 500}))
            assert self.found(partial(look.read_by_tag, tag, **limits)) == expected

    def found(self, look_up: Callable[[int], Page], start: int = 0) -> list[int]:
        """The offsets of all pages, where the records are as they were written and no gap is reported."""
        records, gaps = paged(look_up, start)
        assert gaps == []
        for record in records:
            assert (record.key, record.tag) == self.written[record.offset]
            assert record.value == b"%d" % record.offset
        return offsets_of(records)


def columns_of(written: list[Written], first: int) -> ColumnBytes:
    """The columns of an append at `first`."""
    values = [b"%d" % offset for offset in range(first, first + len(written))]
    keys, tags = zip(*written, strict=True)
    return encode_columns(Columns(values=values, timestamps=[1] * len(values), keys=keys, tags=tags))


@pytest.fixture
def library() -> Iterator[Library]:
    found = Library()
    yield found
    found.close()


def test_look_ups_over_growing_rotated_and_sealed_files(library: Library) -> None:
    library.check()
    library.append([Written(b"rare", "a")])
    library.check()
    library.fill(4)
    library.append(library.some(30))
    library.check()
    library.environment.shard.rotate()
    library.append(library.some(50))
    assert sum(isinstance(file, LogFile) for file in library.environment.shard.wal.files.all) == 2
    library.check()
    library.environment.reopen()
    library.append(library.some(1))
    library.check()


def test_look_ups_go_on_in_history_where_local_files_are_gone(library: Library) -> None:
    library.append([Written(b"rare", None)])
    library.fill(12, appends=4)
    library.environment.export()
    library.append(library.some(20))
    for _ in range(4):
        library.drop(3)
        library.check()
    assert library.environment.shard.wal.files.begins != 0


def test_look_ups_find_what_was_indexed_before_there_were_postings(library: Library) -> None:
    library.fill(3)
    for file in library.environment.shard.wal.files.all[:3]:
        make_old(library.environment.disk, file.path)
        file.close()
    library.check()
    library.environment.export()
    library.drop(2)
    library.check()


@pytest.mark.parametrize("dropped", [0, 2])
def test_look_ups_find_loaded_records_at_the_offsets_that_they_were_given(library: Library, dropped: int) -> None:
    library.fill(2)
    brought = [*library.some(50), Written(b"rare", "a")]
    start = library.load(brought, LoadStatus.COMMITTED)
    library.written.update(enumerate(brought, start))
    library.append(library.some(30))
    library.drop(dropped)

    library.check()

    assert library.found(partial(library.lookups.read_by_key, b"rare", history=True)) == [start + 50]


def test_look_ups_stand_before_a_load_that_is_not_committed(library: Library) -> None:
    library.append([Written(b"k", "t")])
    brought = [Written(b"k", "t")] * 4
    start = library.load(brought, LoadStatus.OFFERED)
    library.append([Written(b"k", "t"), Written(b"other", None)])
    look = library.lookups

    assert library.found(partial(look.read_by_tag, "t")) == [0]
    assert look.read_by_key(b"k", history=True).next == start
    assert look.read_by_key(b"k", start, history=True) == Page([], [], start)
    assert look.read_by_key(b"k").batches[0].base == start + 4
    assert list(look.offsets(Sought.of_key(b"k"))[0]) == [0, start + 4]

    library.conclude(LoadStatus.COMMITTED)
    library.written.update(enumerate(brought, start))
    assert library.found(partial(look.read_by_tag, "t")) == list(range(6))


def test_look_ups_pass_a_load_that_was_abandoned(library: Library) -> None:
    library.append([Written(b"k", "t")])
    start = library.load([Written(b"k", "t")] * 4, LoadStatus.ABANDONED)
    library.append([Written(b"k", "t")])

    assert library.found(partial(library.lookups.read_by_tag, "t")) == [0, start + 4]


def test_keys_that_share_a_hash_are_distinguished(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    def columns(_: Bytes, offsets: npt.NDArray[np.int32]) -> Hashes:
        return np.full(len(offsets) - 1, 7, dtype=np.uint64)

    monkeypatch.setattr(posted, "hash_column", columns)
    monkeypatch.setattr(index_lookups, "hash_bytes", lambda _: 7)
    library.append([Written(b"rare", "rare")])
    library.fill(3)
    library.environment.export()
    library.drop(1)
    library.append(library.some(40))

    library.check()


def test_a_tag_of_thousands_is_found_in_every_tier(library: Library) -> None:
    for _ in range(2):
        library.append([Written(None, "a"), Written(b"a", "a"), Written(b"b", None)] * 2_000)
        library.environment.seal()
    library.environment.export()
    library.drop(1)
    library.append([Written(None, "a")] * 10)
    look = library.lookups

    expected = library.offsets(lambda written: written.tag == "a")
    assert library.found(partial(look.read_by_tag, "a")) == expected
    assert library.found(partial(look.read_by_tag, "a"), 5_500) == library.offsets(lambda w: w.tag == "a", 5_500)
    library.ended = Ended(OffsetSet.of_range(3_000, 12_000), NO_FLOOR)
    assert look.read_by_key(b"a").batches[0].base == 2_998


def test_what_a_log_file_has_lost_is_found_in_history(library: Library) -> None:
    for _ in range(3):
        library.append([Written(b"k", "t")] * 4)
        library.append([Written(b"other", None)] * 4)
    library.environment.seal()
    library.environment.export()
    path = library.environment.shard.wal.files.all[0].path
    library.append([Written(b"k", "t")])
    library.environment.shard.upkeep.close()
    for name in (index_name(path), f"{path.rpartition('/')[0]}/{CHECKPOINT_NAME}"):
        library.environment.disk.unlink(name)
    with contextlib.closing(library.environment.disk.open(path, writable=True)) as raw:
        raw.write_at(bytes(8), raw.size() // 2)
    library.environment.reopen()

    file = library.environment.shard.wal.files.all[0]
    assert isinstance(file, LogFile) and Reason.DAMAGED in {gap.reason for gap in file.gaps}
    library.check()
    assert library.found(partial(library.lookups.read_by_tag, "t")) == [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24]


def test_ended_records_are_not_found_and_eviction_is_reported(library: Library) -> None:
    library.append([Written(b"k", "t")] * 10)
    library.environment.seal()
    library.append([Written(b"k", "t")] * 10)
    look = library.lookups
    library.ended = Ended(OffsetSet.of([0, 12, 18, 19]), NO_FLOOR)
    assert library.found(partial(look.read_by_tag, "t", records_max=3)) == [*range(1, 12), *range(13, 18)]
    assert look.read_by_key(b"k").batches[0].base == 17
    assert look.read_by_key(b"k", 18) == Page([], [], 20)
    assert list(look.offsets(Sought.of_tag("t"))[0]) == [*range(1, 12), *range(13, 18)]

    library.ended = Ended(OffsetSet.of([12]), Floor(11, 10, Reason.TTL))
    records, gaps = paged(partial(look.read_by_key, b"k", history=True))
    assert (offsets_of(records), gaps) == ([11, *range(13, 20)], [Gap(0, 10, Reason.TTL)])
    assert look.read_by_key(b"k", 4).events == [Gap(4, 10, Reason.TTL)]
    assert look.read_by_key(b"k", 10).events == []

    library.ended = Ended(OffsetSet(), Floor(20, 0, None))
    assert look.read_by_tag("t") == Page([], [], 20)
    assert look.read_by_key(b"k") == Page([], [], 20)


def test_a_match_that_cannot_be_read_is_reported_unless_history_has_it(library: Library) -> None:
    library.append([Written(b"k", "t")] * 3)
    library.environment.seal()
    library.append([Written(b"k", "t")])
    path = library.environment.shard.wal.files.all[0].path
    library.environment.shard.upkeep.close()
    with contextlib.closing(library.environment.disk.open(path, writable=True)) as raw:
        before = raw.read_at(8, raw.size() - 8)
        raw.write_at(bytes(8), raw.size() - 8)
    library.environment.reopen()

    records, gaps = paged(partial(library.lookups.read_by_tag, "t"))
    assert (offsets_of(records), gaps) == ([3], [Gap(0, 3, Reason.DAMAGED)])
    assert library.lookups.read_by_key(b"k").events == []
    library.ended = Ended(OffsetSet.of([3]), NO_FLOOR)
    assert library.lookups.read_by_key(b"k") == Page([], [Gap(0, 3, Reason.DAMAGED)], 4)

    library.ended = NOTHING
    for content in (before, bytes(8)):
        with contextlib.closing(library.environment.disk.open(path, writable=True)) as raw:
            raw.write_at(content, raw.size() - 8)
        library.environment.export()
    assert library.found(partial(library.lookups.read_by_tag, "t")) == [0, 1, 2, 3]


def test_a_file_that_goes_away_under_a_look_up_is_found_in_history(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.fill(2)
    library.environment.export()
    library.append(library.some(5))
    plain = SealedFile.find
    gone: list[str] = []

    def going(file: SealedFile, kind: SectionKind, wanted: int, start: int = 0) -> Iterator[npt.NDArray[np.int64]]:
        if not gone:
            gone.append(file.path)
            drop_file(library.environment.disk, library.environment.shard.wal.files, file)
        return plain(file, kind, wanted, start)

    monkeypatch.setattr(SealedFile, "find", going)
    expected = library.offsets(lambda written: written.key == b"a")
    assert library.found(partial(library.lookups.read_by_key, b"a", history=True)) == expected
    assert gone


def test_history_that_is_not_there_is_an_error_and_no_answer(library: Library) -> None:
    library.fill(2)
    library.environment.export()
    library.drop(1)
    first = library.environment.catalog().descriptors()[0]
    library.environment.disk.unlink(f"/store/{index_name(first.object_key)}")

    with pytest.raises(Corrupt, match="forebay verify"):
        library.lookups.read_by_key(b"a", history=True)


def test_postings_that_are_damaged_are_an_error_and_no_answer(library: Library) -> None:
    library.fill(1)
    file = library.environment.shard.wal.files.all[0]
    with contextlib.closing(library.environment.disk.open(index_name(file.path))) as raw:
        content = raw.read_at(raw.size(), 0)
    replace_file(library.environment.disk, index_name(file.path), content[:-140] + bytes(12) + content[-128:])

    with pytest.raises(Corrupt):
        library.lookups.read_by_tag("a")


def test_an_open_shard_finds_what_is_not_deleted(library: Library) -> None:
    shard = library.environment.shard
    library.append([Written(b"k", "t")] * 5)

    found, unread = shard.lookups.offsets(Sought.of_key(b"k"))
    assert shard.deletes.delete(found - OffsetSet.of([1, 2])) == 3
    assert unread == []

    assert library.found(partial(shard.read_by_tag, "t")) == [1, 2]
    assert shard.read_by_key(b"k").batches[0].base == 2


def test_a_cold_look_up_reads_a_hundredth_of_history_at_most(
    library: Library, monkeypatch: pytest.MonkeyPatch, ledger: Ledger
) -> None:
    environment, files = library.environment, 20
    for file in range(files):
        for frame in range(24):
            environment.shard.acknowledge(environment.shard.stage_many(_customers(file * 24 + frame), None, Ticket()))
        environment.seal()
    environment.export()
    library.drop(files)
    total = sum(piece.bytes for piece in environment.catalog().descriptors())
    read: list[int] = []
    plain = environment.store.get_range

    def counted(key: str, start: int, stop: int, *, etag: str | None = None) -> bytes:
        found = plain(key, start, stop, etag=etag)
        read.append(len(found))
        return found

    monkeypatch.setattr(environment.store, "get_range", counted)
    look, shares = library.lookups, []
    for number in (1, FRAME_ROWS - 1, 50_000, files * 24 * FRAME_ROWS - 1):
        key = b"customer-%07d" % number
        for look_up, count in (
            (partial(look.read_by_key, key), 1),
            (partial(look.read_by_key, key, history=True), 1),
            (partial(look.read_by_tag, f"tag-{number // 10}"), 10),
            (partial(look.read_by_key, b"nobody"), 0),
        ):
            library.history.close()
            read.clear()
            assert len(paged(look_up)[0]) == count
            shares.append(sum(read) / total)
    assert max(shares) < 0.01
    # Two frames that adjoin: nothing is read ahead of them.
    monkeypatch.delattr(ReadAhead, "read_at")
    assert look.read_by_key(b"often", history=True, records_max=1).next == 1
    ledger.count("cold look-ups in 20 segments", n=len(shares))
    ledger.count("bytes that the dearest of them read, of a million", n=round(1e6 * max(shares)))


def _customers(frame: int) -> ColumnBytes:
    """A frame of records of about 1 KiB."""
    numbers = range(frame * FRAME_ROWS, (frame + 1) * FRAME_ROWS)
    return encode_columns(
        Columns(
            values=[b"v" * 1_000] * FRAME_ROWS,
            timestamps=[1] * FRAME_ROWS,
            keys=[b"often", *(b"customer-%07d" % number for number in numbers[1:])],
            tags=[f"tag-{number // 10}" for number in numbers],
        )
    )
