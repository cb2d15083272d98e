"""The index of a sealed file: what it says of keys, tags and sizes, and how little of it is read."""

from __future__ import annotations

import contextlib

import pytest

from forebay.appends.queue import record_bytes
from forebay.appends.ticket import Ticket
from forebay.disk import Disk, replace_file
from forebay.errors import Corrupt
from forebay.format.columns.rows import Columns, encode_columns
from forebay.format.files.segment import index_name
from forebay.format.frame.batch import decode
from forebay.format.frame.scan import FrameTable
from forebay.format.index.hashing import hash_bytes, hash_text
from forebay.format.index.lookups import LookupSections
from forebay.format.index.sections import (
    FOOTER_BYTES,
    SectionKind,
    decode_index,
    decode_sizes,
    encode_index,
    frame_entries,
    read_sections,
)
from forebay.sealed import INDEX_BYTES_FRONT, INDEX_BYTES_WHOLE, SealedSegment
from forebay.settings import WalSettings
from forebay.testing.simulated.disk import SimulatedDisk, SimulatedFile
from forebay.topics import Durability
from forebay.wal.files import LogFile, SealedFile
from forebay.wal.sealing import index_of
from forebay.wal.walk import DataFrames
from tests.wal.rig import Rig, Simulated, simulated

KEY, TAG = SectionKind.KEY_POSTINGS, SectionKind.TAG_POSTINGS
WIDE = WalSettings(free_bytes_min=0, reserve_records_min=8, cache_bytes_max=4096)


def _opened(disk: SimulatedDisk | None = None, settings: WalSettings = WIDE) -> Simulated:
    return Rig(disk or simulated(), Durability.FSYNC, settings=settings).open()


def append(rig: Simulated, keys: list[bytes | None], tags: list[str | None] | None = None) -> None:
    """One append; the value of each record is its place in it."""
    values = [b"%d" % place for place in range(len(keys))]
    columns = Columns(
        values=values, timestamps=[len(key or b"") + 7 * rig.wal.head for key in keys], keys=keys, tags=tags
    )
    rig.wal.acknowledge(rig.wal.stage_many(encode_columns(columns), None, Ticket()))


def _sealed(rig: Simulated) -> SealedFile:
    rig.wal.rotate()
    rig.shard.upkeep.seal_rotated()
    found = rig.wal.files.all[-2]
    assert isinstance(found, SealedFile)
    return found


def offsets_of(file: SealedSegment | LogFile, kind: SectionKind, wanted: int, start: int = 0) -> list[int]:
    """What the file records of a hash, which must be the same from both ends."""
    found = [offset for piece in file.find(kind, wanted, start) for offset in piece.tolist()]
    backwards = [piece.tolist() for piece in file.find_backwards(kind, wanted)]
    assert [offset for piece in reversed(backwards) for offset in piece if offset >= start] == found
    return found


def _content(disk: Disk, path: str) -> bytes:
    with contextlib.closing(disk.open(path)) as file:
        return file.read_at(file.size(), 0)


def make_old(disk: Disk, path: str) -> None:
    """Leave the index of a segment as it was written before there were look-ups."""
    decoded = decode_index(_content(disk, index_name(path)))
    assert isinstance(decoded, tuple)
    replace_file(disk, index_name(path), encode_index(*decoded))


@pytest.mark.parametrize("old", [False, True], ids=["postings in the index", "an index without postings"])
@pytest.mark.parametrize("reframed", [True, False])
def test_a_sealed_file_shows_where_each_key_and_tag_is(*, old: bool, reframed: bool) -> None:
    settings = WIDE if reframed else WalSettings(free_bytes_min=0, reframe_bytes_min=0, cache_bytes_max=4096)
    rig = _opened(settings=settings)
    append(rig, [b"before"] * 3)
    _sealed(rig)
    keys: list[bytes | None] = [b"", None, b"a", b"b", b"k" * 5_000] * 20
    tags: list[str | None] = [None, "x", "x/y"] * 33 + ["\N{SNOWMAN}"]
    for place in range(0, 100, 4):
        append(rig, keys[place : place + 4], tags[place : place + 4])
    sealed = _sealed(rig)
    if old:
        make_old(rig.disk, sealed.path)
        sealed.close()

    for key in {key for key in keys if key is not None}:
        expected = [3 + place for place, found in enumerate(keys) if found == key]
        assert offsets_of(sealed, KEY, hash_bytes(key)) == expected
        assert offsets_of(sealed, KEY, hash_bytes(key), expected[3] + 1) == expected[4:]
    for tag in {tag for tag in tags if tag is not None}:
        assert offsets_of(sealed, TAG, hash_text(tag)) == [
            3 + place for place, found in enumerate(tags) if found == tag
        ]
    assert offsets_of(sealed, KEY, hash_bytes(b"unknown")) == []
    assert offsets_of(sealed, KEY, hash_text("x/y")) == []


def test_an_index_has_the_bytes_of_all_records() -> None:
    rig = _opened()
    append(rig, [b"key", None], ["tag", None])
    append(rig, [b"k"])
    content = _content(rig.disk, index_name(_sealed(rig).path))

    found = read_sections(lambda position, length: content[position : position + length], len(content))

    assert isinstance(found, tuple)
    section = next(section for section in found[1] if section.kind == SectionKind.SIZES)
    sizes = decode_sizes(content[section.position : section.position + section.length], section)
    expected = [
        record_bytes(b"0", b"key", "tag", ()),
        record_bytes(b"1", None, None, ()),
        record_bytes(b"0", b"k", None, ()),
    ]
    assert int(sizes[-1]) == sum(expected)


def test_an_index_of_many_small_frames_is_that_of_each_by_itself() -> None:
    rig = _opened()
    keys: list[bytes | None] = [b"k%d" % number for number in range(40)]
    alone: list[list[bytes | None]] = [[key] for key in keys]
    groups: list[list[bytes | None]] = [*alone, keys, [None, b"x"], *alone, [None], [b"y"]]
    for group in groups:
        append(rig, group)
    log = rig.wal.files.all[-1]
    assert isinstance(log, LogFile)
    content = index_of(log)[0]
    rows, lookups = [], LookupSections(0)
    data = [step for step in log.walk() if isinstance(step, DataFrames)]
    assert any(isinstance(step.frames, FrameTable) for step in data)
    for step in data:
        for head, place in step.each():
            batch = decode(step.buffer, place, head)
            times = batch.timestamps().tolist()
            rows.append((head.base, step.origin + place, head.length, head.count, min(times), max(times)))
            lookups.add(batch)
    assert len(rows) == 84

    decoded = decode_index(content)

    assert isinstance(decoded, tuple)
    assert decoded[1].tolist() == frame_entries(rows).tolist()
    assert content == encode_index(decoded[0], frame_entries(rows), [], lookups.sections())


def test_opening_and_reading_reads_no_postings(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = _opened()
    append(rig, [b"%d" % number for number in range(8_000)], ["t"] * 8_000)
    path = index_name(_sealed(rig).path)
    append(rig, [b"behind"])
    rig.shard.upkeep.close()
    size = len(_content(rig.disk, path))
    assert size > 3 * INDEX_BYTES_WHOLE
    read: list[int] = []
    plain = SimulatedFile.read_at

    def noted(file: SimulatedFile, length: int, position: int) -> bytes:
        found = plain(file, length, position)
        if file.path == path:
            read.append(len(found))
        return found

    monkeypatch.setattr(SimulatedFile, "read_at", noted)
    rig.open()
    opening = sum(read)
    assert len(rig.reading().records) == 8_001
    assert sum(read) <= INDEX_BYTES_FRONT + FOOTER_BYTES
    assert opening <= FOOTER_BYTES
    sealed = rig.wal.files.all[0]
    assert isinstance(sealed, SealedFile)
    before = sum(read)
    assert offsets_of(sealed, KEY, hash_bytes(b"77")) == [77]
    assert sum(read) - before < size // 3


def test_a_damaged_posting_is_never_a_wrong_answer() -> None:
    rig = _opened()
    append(rig, [b"%d" % number for number in range(3_000)])
    sealed = _sealed(rig)
    path = index_name(sealed.path)
    whole = _content(rig.disk, path)
    outcomes = set()
    for place in range(0, len(whole), 997):
        replace_file(rig.disk, path, whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        sealed.close()
        try:
            assert offsets_of(sealed, KEY, hash_bytes(b"1234")) == [1234]
            outcomes.add("right")
        except Corrupt:
            outcomes.add("named")
    assert outcomes == {"right", "named"}


def test_a_file_whose_frames_go_back_is_not_sealed() -> None:
    rig = _opened()
    append(rig, [b"a"])
    log = rig.wal.files.all[-1]
    assert isinstance(log, LogFile)
    first = log.file.read_at(log.limit - 64, 64)
    rig.wal.rotate()
    with contextlib.closing(rig.disk.open(log.path, writable=True)) as file:
        file.write_at(first, log.limit)
    log.limit += len(first)
    log.frames = 1

    rig.shard.upkeep.seal_rotated()

    assert rig.wal.files.all[0].path == log.path
    assert isinstance(rig.wal.files.all[0], LogFile)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 7, 200])
def test_a_growing_file_shows_where_each_key_and_tag_is(count: int) -> None:
    rig = _opened()
    keys = [b"%d" % (number % 5) for number in range(1_000)]
    for place in range(0, 1_000, count):
        append(rig, [*keys[place : place + count]], ["t"] * len(keys[place : place + count]))
        if place % 3 == 0:
            log = rig.wal.files.all[-1]
            wanted = keys[place]
            expected = [offset for offset in range(min(1_000, place + count)) if keys[offset] == wanted]
            assert isinstance(log, LogFile)
            assert offsets_of(log, KEY, hash_bytes(wanted)) == expected
            assert offsets_of(log, TAG, hash_text("t"), place) == list(range(place, min(1_000, place + count)))
    rig.wal.rotate()
    rotated = rig.wal.files.all[-2]
    assert isinstance(rotated, LogFile)
    assert len(offsets_of(rotated, KEY, hash_bytes(b"3"))) == 200


def test_a_growing_file_is_read_once_for_its_postings(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = _opened()
    append(rig, [b"%d" % number for number in range(20_000)])
    log = rig.wal.files.all[-1]
    assert isinstance(log, LogFile)
    assert offsets_of(log, KEY, hash_bytes(b"7")) == [7]
    append(rig, [b"7"])
    read: list[int] = []
    plain = SimulatedFile.read_at

    def noted(file: SimulatedFile, length: int, position: int) -> bytes:
        read.append(length)
        return plain(file, length, position)

    monkeypatch.setattr(SimulatedFile, "read_at", noted)
    assert offsets_of(log, KEY, hash_bytes(b"7")) == [7, 20_000]
    assert sum(read) < 1_000


def test_postings_step_over_gaps_and_damage() -> None:
    rig = _opened()
    for _ in range(3):
        append(rig, [b"k"] * 10)
    log = rig.wal.files.all[-1]
    assert isinstance(log, LogFile)
    middle = log.index.position_of(10) or 0
    frame = (log.limit - 64) // 3
    with contextlib.closing(rig.disk.open(log.path, writable=True)) as file:
        file.write_at(b"\xff", max(middle, 64) + frame + frame // 2)

    found = offsets_of(log, KEY, hash_bytes(b"k"))

    assert set(range(20, 30)) <= set(found) <= set(range(30))
    assert len(found) == 20
