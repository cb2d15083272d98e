"""What only the RocksDB engine has to fear: power loss, its own files, readers beside removal, what it remembers."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from random import Random  # noqa: TID251  # seeded: the same run again
from typing import Any

import pytest
import rocksdict

from forebay.appends.producer_window import ProducerWindow
from forebay.appends.queue import AppendQueue, QueuedRecord
from forebay.appends.ticket import Ticket
from forebay.clock import SystemClock
from forebay.disk import SystemDisk
from forebay.engines import ByName, NewRecord
from forebay.engines.rocksdb import RocksEngine
from forebay.engines.rocksdb.database import RocksBatch, RocksDatabase, View
from forebay.engines.rocksdb.layout import Keys
from forebay.engines.rocksdb.shard import RocksShard
from forebay.errors import Closed, Conflict, Corrupt, ForebayError, Unavailable
from forebay.format.control.frames import WindowEntry
from forebay.records import Gap, Reason, Record
from forebay.settings import Settings
from forebay.shard.deletes import RangeDelete
from forebay.testing.contracts.engines import append_by, in_threads, steps_of
from forebay.testing.contracts.lookups import keyed, offsets_of
from forebay.testing.inside import inside
from forebay.topics import ShardRef
from tests.engines.audit import violations
from tests.engines.homes import SETTINGS
from tests.engines.lookup_homes import RocksHome, rocks_home
from tests.support.waiting import until


class Elsewhere(SystemDisk):
    """The disk after the machine was started again."""

    def identity(self, path: str) -> str:
        return "another boot"


def numbers(engine: ByName[RocksEngine], ref: ShardRef) -> list[int | Gap]:
    """What a reader finds, records by their offsets."""
    return [step if isinstance(step, Gap) else step.offset for step in steps_of(engine, ref)]


@pytest.mark.parametrize("durability", ["disk", "fsync"])
def test_after_another_boot_only_what_was_synced_goes_on_exactly(tmp_path: Path, durability: str) -> None:
    """Class disk may have lost its tail with the power: its offsets are not given out again."""
    home = rocks_home(str(tmp_path / "rocksdb"), durability)
    engine, ref = home.open(), home.ref()
    engine.batch_write(ref, [NewRecord(b"v", n) for n in range(5)])
    shutil.copytree(tmp_path / "rocksdb", tmp_path / "copy")
    engine.close()
    home.path, home.disk = str(tmp_path / "copy"), Elsewhere()
    again = home.open()

    shard = again.open_shard(ref)
    if durability == "fsync":
        assert shard.decision.exact
        assert again.write(ref, NewRecord(b"v", 5)) == 5
        assert numbers(again, ref) == list(range(6))
    else:
        reserved = 5 + SETTINGS.wal.reserve_records_min
        assert shard.decision.gap == Gap(5, reserved, Reason.LOST)
        assert numbers(again, ref) == [0, 1, 2, 3, 4, Gap(5, reserved, Reason.LOST)]
        assert (shard.lag_end(), shard.offsets().next) == (5, reserved)
        again.close()
        again = home.open()
        assert again.open_shard(ref).lag_end() == 5
        assert again.write(ref, NewRecord(b"v", 9)) == reserved
        assert again.open_shard(ref).lag_end() == reserved + 1
        assert again.get_offset_by_timestamp(ref, 5) == reserved
        assert again.delete_before(ref, 100) == 5
        assert numbers(again, ref) == [Gap(0, 100, Reason.DELETED), Gap(100, reserved, Reason.LOST), reserved]
    again.close()
    assert violations(home.path, ref) == []
    third = home.open()
    assert third.open_shard(ref).decision.clean
    third.close()


def test_a_database_without_its_metadata_is_a_conflict(tmp_path: Path) -> None:
    home = rocks_home(str(tmp_path / "rocksdb"), "disk")
    engine = home.open()
    engine.write(home.ref(), NewRecord(b"v", 1))
    engine.close()
    other = rocks_home(str(tmp_path / "rocksdb"), "disk")

    for _ in range(2):
        engine = other.open()
        with pytest.raises(Conflict, match="the metadata store does not know the shard"):
            engine.open_shard(other.ref())
        engine.close()
    engine = home.open()
    assert engine.write(home.ref(), NewRecord(b"v", 1)) == 1
    engine.close()


@pytest.mark.parametrize("kind", ["log", "sst"])
def test_damaged_files_are_named_and_never_served(tmp_path: Path, kind: str) -> None:
    """A flipped byte in the middle, of what is not in a table yet and of what is."""
    home = rocks_home(str(tmp_path / "rocksdb"), "disk")
    engine, ref = home.open(), home.ref()
    for number in range(500):
        engine.write(ref, NewRecord(b"%d" % number * 50, 1))
    if kind == "log":
        shutil.copytree(tmp_path / "rocksdb", tmp_path / "copy")
    engine.close()
    if kind == "sst":
        shutil.copytree(tmp_path / "rocksdb", tmp_path / "copy")
    file = max((tmp_path / "copy").glob(f"*.{kind}"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)

    home.path = str(tmp_path / "copy")
    engine = home.open()
    with pytest.raises(Corrupt, match="database is damaged.*restore"):
        steps_of(engine, ref)
    engine.close()


def test_look_ups_and_deletes_name_damage_too(tmp_path: Path) -> None:
    """Nothing is found or deleted in part, as on the other engines."""
    home = rocks_home(str(tmp_path / "rocksdb"), "disk")
    engine, ref = home.open(), home.ref()
    for number in range(500):
        engine.write(ref, NewRecord(b"%d" % number * 50, 1, b"k", "t"))
    engine.close()
    file = max((tmp_path / "rocksdb").glob("*.sst"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)

    engine = home.open()
    for look in (
        lambda: engine.read_by_key(ref, b"k", history=True),
        lambda: engine.read_by_tag(ref, "t"),
        lambda: engine.delete_by_key(ref, b"k"),
        lambda: engine.delete_by_tag(ref, "t"),
    ):
        with pytest.raises(Corrupt, match="database is damaged.*restore"):
            look()
    engine.close()


def test_two_engines_on_one_database_are_refused(tmp_path: Path) -> None:
    home = rocks_home(str(tmp_path / "rocksdb"), "disk")
    engine = home.open()
    engine.create_shard(home.ref())
    database = RocksDatabase(home.path, SystemDisk())
    with pytest.raises(Unavailable, match="lock"):
        database.get(b"key")
    engine.close()
    assert database.get(b"key") is None
    database.close()


@pytest.mark.slow
def test_what_producers_did_outlives_the_engine_and_is_bounded(tmp_path: Path) -> None:
    settings = Settings.load(overrides={"wal": {"producer_appends_max": 4, "producers_max": 3, "free_bytes_min": 0}})
    home = RocksHome(str(tmp_path / "rocksdb"), "disk", settings=settings)
    ref, chance = home.ref(), Random(3)
    model = ProducerWindow(3, 4)
    for _ in range(12):
        engine = home.open()
        shard = engine.engine.open_shard(ref)
        assert sorted(inside(shard).window.entries()) == sorted(model.entries())
        for _ in range(chance.randrange(12)):
            producer = chance.randrange(1, 6) + chance.choice((0, 2**63))
            last = model.last_sequence(producer)
            previous = -1 if last is None else last
            sequence = previous + chance.randrange(1, 4)
            offset = append_by(shard, producer, sequence, previous=previous)
            model.add(WindowEntry(producer, sequence, 1, 1, offset))
            assert append_by(shard, producer, sequence) == offset
        engine.close()
        database = RocksDatabase(home.path, SystemDisk())
        with database.view() as view:
            rows = list(view.rows(*Keys(ref.spec.topic_id, ref.partition).window))
        database.close()
        assert len(rows) == sum(entry.appends for entry in model.entries())


def test_a_deleted_shard_leaves_nothing_in_the_database(tmp_path: Path) -> None:
    home = rocks_home(str(tmp_path / "rocksdb"), "disk")
    engine = home.open()
    for partition in (0, 1):
        shard = engine.open_shard(home.ref(partition))
        engine.batch_write(home.ref(partition), [NewRecord(b"v", 1, b"k", "t")] * 200)
        append_by(shard, 7, 0)
        shard.delete(RangeDelete(10, 20))
    engine.delete_shard(home.ref(0))
    engine.close()

    database = RocksDatabase(home.path, SystemDisk())
    with database.view() as view:
        prefixes = {key[:20] for key, _ in view.rows(b"\0", b"\xff" * 32)}
    assert prefixes == {Keys(home.ref().spec.topic_id, 1).start}
    database.close()


@pytest.mark.slow
def test_readers_beside_deletes_and_evictions_see_a_stream_without_a_gap(tmp_path: Path) -> None:
    """Readers take no lock: a floor that moves while they read must not look like damage."""
    home = RocksHome(str(tmp_path / "rocksdb"), "disk", waiting=SystemClock())
    ref = home.ref(cap_records=400)
    engine = home.open()
    stop = threading.Event()

    def work(number: int) -> None:
        if number == 0:
            for turn in range(20):
                engine.batch_write(ref, [NewRecord(b"%d" % n, n, b"k%d" % (n % 7), "t") for n in range(100)])
                engine.delete_by_key(ref, b"k%d" % (turn % 7))
                engine.open_shard(ref).evict(0)
            stop.set()
        while not stop.is_set():
            steps = steps_of(engine, ref, records_max=50)
            records = [step for step in steps if isinstance(step, Record)]
            assert {step.reason for step in steps if isinstance(step, Gap)} <= {Reason.CAP, Reason.DELETED}
            assert all(record.value == b"%d" % (record.offset % 100) for record in records)
            page = engine.read_by_key(ref, b"k3", history=True, records_max=10)
            assert all(batch.keys() == [b"k3"] for batch in page.batches)
            engine.get_offset_by_timestamp(ref, 50)

    in_threads(4, work)
    engine.close()
    assert violations(home.path, ref) == []


def test_a_floor_that_moves_before_the_view_is_taken_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = rocks_home(str(tmp_path / "rocksdb"), "disk")
    engine, ref = home.open(), home.ref(cap_records=10)
    engine.batch_write(ref, [NewRecord(b"v", 1)] * 30)
    shard, view = engine.open_shard(ref), inside(engine.engine).database.view

    def late() -> View:
        monkeypatch.undo()
        shard.evict(0)
        return view()

    monkeypatch.setattr(inside(engine.engine).database, "view", late)
    page = shard.read(5)

    assert (page.events, page.next) == ([Gap(5, 20, Reason.CAP)], 30)
    engine.close()


@pytest.mark.parametrize("durability", ["disk", "fsync"])
def test_a_reservation_is_synced_with_the_records_it_is_for_and_class_fsync_always(
    tmp_path: Path, durability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings.load(overrides={"wal": {"reserve_records_min": 5, "free_bytes_min": 0}})
    home = RocksHome(str(tmp_path / "rocksdb"), durability, settings=settings)
    engine, ref = home.open(), home.ref()
    shard = engine.open_shard(ref)
    write, syncs = inside(engine.engine).database.write, list[bool]()

    def watched(batch: RocksBatch, *, sync: bool) -> None:
        syncs.append(sync)
        write(batch, sync=sync)

    monkeypatch.setattr(inside(engine.engine).database, "write", watched)
    for _ in range(13):
        engine.write(ref, NewRecord(b"v", 1))
    shard.delete(RangeDelete(0, 1))
    engine.close()

    always = durability == "fsync"
    assert syncs == [always or number % 6 == 0 for number in range(13)] + [always, True]


def test_reading_and_closing_at_once_ends_in_answers_or_in_closed(tmp_path: Path) -> None:
    home = rocks_home(str(tmp_path / "rocksdb"), "disk")
    ref = home.ref()
    for _ in range(3):
        engine = home.open()
        engine.batch_write(ref, [NewRecord(b"v", 1, b"k")] * 100)

        def work(number: int, engine: ByName[RocksEngine] = engine) -> None:
            try:
                while True:
                    if number == 0:
                        engine.close()
                    keyed(engine, ref, b"k", records_max=9)
                    engine.write(ref, NewRecord(b"v", 1))
            except Closed:
                return

        in_threads(4, work)
    engine = home.open()
    assert len(keyed(engine, ref, b"k")) == 300
    engine.close()


def _staged(shard: RocksShard) -> Ticket:
    return shard.stage_one(QueuedRecord(b"v", None, None, (), 1, None, Ticket()), 17)


def test_an_append_beside_the_end_of_a_shard_is_written_before_it_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One written later would stand behind the note that the shard ended in order."""
    home = rocks_home(str(tmp_path / "rocksdb"), "disk")
    engine, ref = home.open(), home.ref()
    engine.write(ref, NewRecord(b"v", 1))
    shard, commit = engine.open_shard(ref), RocksShard.commit
    assert isinstance(shard, RocksShard)

    def late(ending: RocksShard) -> None:
        commit(ending)
        _staged(ending)

    monkeypatch.setattr(RocksShard, "commit", late)
    with pytest.raises(Closed):
        shard.end("is closed", clean=True)
    monkeypatch.undo()
    shard.end("is closed", clean=True)
    assert shard.offsets().next == 1
    engine.close()


@pytest.mark.parametrize("step", ["acknowledge", "fail"])
def test_an_append_whose_answer_is_interrupted_twice_is_answered_by_the_next_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    home, is_written = rocks_home(str(tmp_path / "rocksdb"), "disk"), step == "acknowledge"
    engine, ref = home.open(), home.ref()
    engine.write(ref, NewRecord(b"v", 1))
    shard = engine.open_shard(ref)
    assert isinstance(shard, RocksShard)
    ticket = _staged(shard)

    def strikes(*_: object) -> None:
        raise KeyboardInterrupt

    def fails(_: RocksBatch, *, sync: bool) -> None:
        raise OSError(5, "EIO")

    with monkeypatch.context() as patch:
        patch.setattr(AppendQueue, step, strikes)
        if not is_written:
            patch.setattr(inside(engine.engine).database, "write", fails)
        with pytest.raises(KeyboardInterrupt):
            shard.commit()

    shard.commit()

    assert ticket.done
    assert (ticket.error is None) is is_written
    assert (shard.failure is None) is is_written
    engine.close()


def test_what_is_written_becomes_durable_soon(tmp_path: Path) -> None:
    settings = Settings.load(overrides={"wal": {"sync_interval_ms": 1, "free_bytes_min": 0}})
    home = RocksHome(str(tmp_path / "rocksdb"), "disk", settings=settings, waiting=SystemClock())
    engine, ref = home.open(), home.ref()
    for number in range(5):
        engine.write(ref, NewRecord(b"v", 1))
        until(lambda: engine.open_shard(ref).offsets().durable > number)  # noqa: B023 - waited for at once
    engine.close()


def test_a_large_append_is_looked_up_by_small_entries(tmp_path: Path) -> None:
    home = rocks_home(str(tmp_path / "rocksdb"), "disk")
    engine, ref = home.open(), home.ref()
    engine.batch_write(ref, [NewRecord(b"x" * 500, n, b"k%d" % n, "t") for n in range(5_000)])

    assert offsets_of(keyed(engine, ref, b"k4321")) == [4321]
    engine.close()
    database = RocksDatabase(home.path, SystemDisk())
    with database.view() as view:
        sizes = [len(value) for _, value in view.rows(*Keys(ref.spec.topic_id, 0).entries)]
    assert max(sizes) < 64 * 1024
    database.close()


def test_less_free_space_than_asked_for_refuses_appends_and_not_reads(tmp_path: Path) -> None:
    settings = Settings.load(overrides={"wal": {"free_bytes_min": 2**40}})
    home = RocksHome(str(tmp_path / "rocksdb"), "disk", settings=settings)
    engine, ref = home.open(), home.ref()

    with pytest.raises(Unavailable, match="free_bytes_min"):
        engine.write(ref, NewRecord(b"v", 1))
    assert engine.read_by_offset(ref, 0).next == 0
    assert engine.open_shard(ref).failure is None
    engine.close()


class _Refusing:
    """A database of RocksDB that answers one call with an error."""

    def __init__(self, inner: Any, refused: str) -> None:
        self._inner = inner
        self._refused = refused

    def __getattr__(self, name: str) -> Any:
        if name == self._refused:
            raise RuntimeError(f"{name} was refused")
        return getattr(self._inner, name)


def _batch(database: RocksDatabase, key: bytes, value: bytes) -> RocksBatch:
    """A batch that nothing refers to after its write: it would keep the database open."""
    batch = database.batch()
    batch.put(key, value)
    return batch


@pytest.mark.parametrize("refused", ["get", "get_column_family", "get_column_family_handle", "WriteOptions"])
def test_an_open_that_fails_at_any_step_leaves_the_database_free_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """The half-opened database stayed open: every later open found its lock held by this very process."""
    database = RocksDatabase(str(tmp_path / "rocksdb"), SystemDisk())
    made = rocksdict.Rdict
    if refused == "WriteOptions":
        monkeypatch.setattr(rocksdict, "WriteOptions", lambda: 1 / 0)
    else:
        monkeypatch.setattr(rocksdict, "Rdict", lambda *args, **kwargs: _Refusing(made(*args, **kwargs), refused))
    for _ in range(2):
        with pytest.raises(Unavailable):
            database.open()

    monkeypatch.undo()
    database.write(_batch(database, b"key", b"value"), sync=True)
    database.close()

    again = RocksDatabase(str(tmp_path / "rocksdb"), SystemDisk())
    assert again.get(b"key") == b"value"
    again.close()


def test_errors_of_the_package_are_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    database = RocksDatabase(str(tmp_path / "file"), SystemDisk())
    with pytest.raises((ForebayError, OSError)):
        database.get(b"key")
    database.close()
    with pytest.raises(Closed):
        database.get(b"key")
