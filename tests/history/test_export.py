"""From sealed files to history and back: exported once, verified, catalogued, read as one stream."""

from __future__ import annotations

import pytest

from forebay.errors import Corrupt, Fenced, ForebayError
from forebay.records import Gap, Reason
from forebay.wal.files import FileList, LogFile
from forebay.wal.sparse import SparseIndex
from tests.history.house import TOPIC, House, expected, history_of, stream


def test_exported_history_reads_as_what_was_appended() -> None:
    house = House()
    for _ in range(3):
        house.append(40)
        house.seal()

    exported = house.export()

    assert exported == 3
    with history_of(house) as history:
        assert stream(history) == expected(0, 120)
        assert stream(history, 77) == expected(77, 120)
        assert history.offset_at_time(1_050) == 50
        assert history.offset_at_time(9_999) is None


def test_only_sealed_files_are_exported_and_each_once() -> None:
    house = House()
    house.append(10)
    assert house.export() == 0
    house.seal()
    house.append(5)

    assert house.export() == 1
    assert house.export() == 0

    assert house.catalog().frontier().next == 10
    house.seal()
    exporter = house.exporter()
    exporter.exported = 10
    assert exporter.lag(house.shard.wal.files)[:2] == (1, 5)
    assert exporter.export(house.shard.wal.files) == 1
    assert exporter.lag(house.shard.wal.files) == (0, 0, 0)


def test_a_gap_in_the_log_becomes_a_gap_in_history() -> None:
    house = House(durability="memory")
    house.append(10)
    house.shard.flush()
    house.reopen()
    house.append(5)
    house.seal()
    start = house.shard.offsets().next - 5

    house.export()

    with history_of(house) as history:
        assert stream(history) == [*expected(0, 10), Gap(10, start, Reason.LOST), *expected(start, start + 5)]


def test_a_file_that_changed_since_it_was_sealed_is_not_exported() -> None:
    house = House()
    house.append(40)
    house.seal()
    path = house.shard.wal.files.all[0].path
    file = house.disk.open(path, writable=True)
    file.write_at(b"!", 200)

    with pytest.raises(Corrupt, match="not exported"):
        house.export()

    assert house.catalog().frontier().next == 0
    assert list(house.store.list()) == []


def test_a_zombie_exports_nothing_into_the_history() -> None:
    house = House()
    house.append(10)
    house.seal()
    house.own(epoch=2)

    with pytest.raises(Fenced):
        house.export(epoch=1)

    assert house.catalog().frontier().next == 0


def test_orphans_are_swept_after_grace_and_never_what_the_catalog_names() -> None:
    house = House()
    house.append(10)
    house.seal()
    house.export()
    house.store.put_if_absent(f"{TOPIC}_0/1-{'0' * 32}.seg", b"left behind")
    named = house.keys()

    house.clock.advance(60)
    assert house.collect() == []
    house.clock.jump(7_200_000)
    swept = house.collect()

    assert swept == [f"{TOPIC}_0/1-{'0' * 32}.seg"]
    assert house.keys() == named - set(swept)
    with history_of(house) as history:
        assert stream(history) == expected(0, 10)


def test_what_a_later_owner_has_put_there_is_not_swept_by_one_who_was_overtaken() -> None:
    """It may be about to be named: whichever caller was paused for as long as the grace does not know."""
    house = House()
    house.append(10)
    house.seal()
    house.export()
    for epoch in (1, 2, 10):
        house.store.put_if_absent(f"{TOPIC}_0/{epoch}-{'0' * 32}.seg", b"left behind, or about to be named")
    house.clock.jump(7_200_000)

    assert house.collect(house.exporter(epoch=2)) == [f"{TOPIC}_0/{epoch}-{'0' * 32}.seg" for epoch in (1, 2)]


def test_a_missing_object_is_a_named_error() -> None:
    house = House()
    house.append(10)
    house.seal()
    house.export()
    for stat in list(house.store.list()):
        house.store.delete(stat.key)

    with history_of(house) as history, pytest.raises(ForebayError, match=TOPIC):
        stream(history)


def test_an_empty_file_between_others_does_not_hold_the_export_up() -> None:
    """A crash inside a recovery may leave one behind; it is never sealed."""
    house = House()
    house.append(10)
    house.seal()
    first, begun = house.shard.wal.files.all
    assert isinstance(begun, LogFile)
    empty = LogFile(begun.file, begun.header, index=SparseIndex(), gaps=[], frames=0, end=10, limit=begun.limit)
    house.append(5)
    house.seal()
    second = house.shard.wal.files.all[1]

    exported = house.exporter().export(FileList([first, empty, second]))

    assert exported == 2
    assert house.catalog().frontier().next == 15
