"""From sealed files to history and back: exported once, verified, catalogued, read as one stream."""

from __future__ import annotations

import pytest

from forebay.errors import Corrupt, Fenced, ForebayError
from forebay.records import Gap, Reason
from forebay.wal.files import FileList, LogFile
from forebay.wal.sparse import SparseIndex
from tests.support.environments.shard import TOPIC, ShardEnvironment, expected, history_of, stream


def test_exported_history_reads_as_what_was_appended() -> None:
    environment = ShardEnvironment()
    for _ in range(3):
        environment.append(40)
        environment.seal()

    exported = environment.export()

    assert exported == 3
    with history_of(environment) as history:
        assert stream(history) == expected(0, 120)
        assert stream(history, 77) == expected(77, 120)
        assert history.offset_at_time(1_050) == 50
        assert history.offset_at_time(9_999) is None


def test_only_sealed_files_are_exported_and_each_once() -> None:
    environment = ShardEnvironment()
    environment.append(10)
    assert environment.export() == 0
    environment.seal()
    environment.append(5)

    assert environment.export() == 1
    assert environment.export() == 0

    assert environment.catalog().frontier().next == 10
    environment.seal()
    exporter = environment.exporter()
    exporter.exported = 10
    assert exporter.lag(environment.shard.wal.files)[:2] == (1, 5)
    assert exporter.export(environment.shard.wal.files) == 1
    assert exporter.lag(environment.shard.wal.files) == (0, 0, 0)


def test_a_gap_in_the_log_becomes_a_gap_in_history() -> None:
    environment = ShardEnvironment(durability="memory")
    environment.append(10)
    environment.shard.flush()
    environment.reopen()
    environment.append(5)
    environment.seal()
    start = environment.shard.offsets().next - 5

    environment.export()

    with history_of(environment) as history:
        assert stream(history) == [*expected(0, 10), Gap(10, start, Reason.LOST), *expected(start, start + 5)]


def test_a_file_that_changed_since_it_was_sealed_is_not_exported() -> None:
    environment = ShardEnvironment()
    environment.append(40)
    environment.seal()
    path = environment.shard.wal.files.all[0].path
    file = environment.disk.open(path, writable=True)
    file.write_at(b"!", 200)

    with pytest.raises(Corrupt, match="not exported"):
        environment.export()

    assert environment.catalog().frontier().next == 0
    assert list(environment.store.list()) == []


def test_a_zombie_exports_nothing_into_the_history() -> None:
    environment = ShardEnvironment()
    environment.append(10)
    environment.seal()
    environment.own(epoch=2)

    with pytest.raises(Fenced):
        environment.export(epoch=1)

    assert environment.catalog().frontier().next == 0


def test_orphans_are_swept_after_grace_and_never_what_the_catalog_names() -> None:
    environment = ShardEnvironment()
    environment.append(10)
    environment.seal()
    environment.export()
    environment.store.put_if_absent(f"{TOPIC}_0/1-{'0' * 32}.seg", b"left behind")
    named = environment.keys()

    environment.clock.advance(60)
    assert environment.collect() == []
    environment.clock.jump(7_200_000)
    swept = environment.collect()

    assert swept == [f"{TOPIC}_0/1-{'0' * 32}.seg"]
    assert environment.keys() == named - set(swept)
    with history_of(environment) as history:
        assert stream(history) == expected(0, 10)


def test_what_a_later_owner_has_put_there_is_not_swept_by_one_who_was_overtaken() -> None:
    """It may be about to be named: whichever caller was paused for as long as the grace does not know."""
    environment = ShardEnvironment()
    environment.append(10)
    environment.seal()
    environment.export()
    for epoch in (1, 2, 10):
        environment.store.put_if_absent(f"{TOPIC}_0/{epoch}-{'0' * 32}.seg", b"left behind, or about to be named")
    environment.clock.jump(7_200_000)

    assert environment.collect(environment.exporter(epoch=2)) == [
        f"{TOPIC}_0/{epoch}-{'0' * 32}.seg" for epoch in (1, 2)
    ]


def test_a_missing_object_is_a_named_error() -> None:
    environment = ShardEnvironment()
    environment.append(10)
    environment.seal()
    environment.export()
    for stat in list(environment.store.list()):
        environment.store.delete(stat.key)

    with history_of(environment) as history, pytest.raises(ForebayError, match=TOPIC):
        stream(history)


def test_an_empty_file_between_others_does_not_hold_the_export_up() -> None:
    """A crash inside a recovery may leave one behind; it is never sealed."""
    environment = ShardEnvironment()
    environment.append(10)
    environment.seal()
    first, begun = environment.shard.wal.files.all
    assert isinstance(begun, LogFile)
    empty = LogFile(begun.file, begun.header, index=SparseIndex(), gaps=[], frames=0, end=10, limit=begun.limit)
    environment.append(5)
    environment.seal()
    second = environment.shard.wal.files.all[1]

    exported = environment.exporter().export(FileList([first, empty, second]))

    assert exported == 2
    assert environment.catalog().frontier().next == 15
