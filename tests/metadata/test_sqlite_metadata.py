"""The store in an SQLite file, within one process: the contract, damage, versions, locks, read-only handles."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from forebay.clock import SystemClock
from forebay.disk import SystemDisk
from forebay.errors import Closed, Corrupt, Invalid, Unavailable, Unsupported, UnsupportedFormat
from forebay.metadata import Delete, Exists, MetadataStore, Put, SessionEnded, SqliteMetadata
from forebay.testing.contracts.metadata import MetadataContract
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "metadata.sqlite")


def open_store(path: str, *, busy_timeout_ms: int = 5_000, read_only: bool = False) -> SqliteMetadata:
    return SqliteMetadata(
        path, disk=SystemDisk(), clock=SystemClock(), busy_timeout_ms=busy_timeout_ms, read_only=read_only
    )


class TestSqliteMetadata(MetadataContract):
    @pytest.fixture
    def store(self, path: str) -> Iterator[MetadataStore]:
        with closing(open_store(path)) as store:
            yield store

    @pytest.fixture
    def restart(self, path: str) -> Callable[[MetadataStore], MetadataStore]:
        def restarted(store: MetadataStore) -> MetadataStore:
            store.close()
            return open_store(path)

        return restarted


def test_two_handles_see_each_other(path: str) -> None:
    with closing(open_store(path)) as one, closing(open_store(path)) as two:
        with two.watch("a") as watch:
            one.transaction([], [Put("a", b"1")])

            assert two.get("a") == one.get("a")
            assert [change.key for change in watch.poll(10.0)] == ["a"]
        assert two.transaction([Exists("a")], [Delete("a")]).succeeded
        assert one.get("a") is None


def test_a_session_of_another_handle_is_alive_until_that_ends(path: str) -> None:
    with closing(open_store(path)) as one:
        two = open_store(path)
        session = two.session(30.0)
        two.transaction([], [Put("leased", b"", session=session.id)])

        assert one.session_alive(session.id)
        assert one.get("leased") is not None
        assert not one.transaction([SessionEnded(session.id)], []).succeeded
        two.close()

        assert not one.session_alive(session.id)
        assert one.range("") == []


def test_lock_files_of_ended_and_forgotten_sessions_go(path: str, tmp_path: Path) -> None:
    with closing(open_store(path)) as store:
        session = store.session(30.0)
        assert [file.stem for file in (tmp_path / "sessions").iterdir()] == [session.id]
        (tmp_path / "sessions" / "forgotten.lock").touch()

        with closing(open_store(path)) as other:
            assert [file.stem for file in (tmp_path / "sessions").iterdir()] == [session.id]
            assert other.session_alive(session.id)

    assert list((tmp_path / "sessions").iterdir()) == []


def test_a_clock_that_stands_still_ends_a_wait_all_the_same(path: str) -> None:
    with closing(SqliteMetadata(path, disk=SystemDisk(), clock=ManualClock())) as store, store.watch("a") as watch:
        assert watch.poll(0.1) == []


@pytest.mark.parametrize("name", ["with space", "per%cent", "quest?ion#mark", "name'quote", "ünï", ":colon:"])
def test_any_file_name_will_do(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / name)
    with closing(open_store(path)) as store:
        store.transaction([], [Put("a", b"")])

    assert (tmp_path / name).stat().st_size > 0
    with closing(open_store(f"//{path}", read_only=True)) as store:
        assert store.get("a") is not None


def test_memory_is_no_file() -> None:
    for path in ("", ":memory:"):
        with pytest.raises(Invalid, match="use MemoryMetadata"):
            open_store(path)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="absent/m.*check that it exists"):
        open_store(str(tmp_path / "absent" / "m"))
    with pytest.raises(Unavailable, match="there is no metadata database .*check the path"):
        open_store(str(tmp_path / "absent"), read_only=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"not a database at all" * 100, b"SQLite format 3\0" + b"\xff" * 5_000, b"short"])
def test_a_file_that_is_no_database_is_refused_and_left_alone(path: str, content: bytes) -> None:
    Path(path).write_bytes(content)

    for read_only in (False, True):
        with pytest.raises(Corrupt, match="metadata.sqlite is not a whole metadata database.*keep a copy"):
            open_store(path, read_only=read_only)

    assert Path(path).read_bytes() == content


def test_a_database_of_somebody_else_is_refused_and_left_alone(path: str) -> None:
    with closing(sqlite3.connect(path)) as foreign:
        foreign.execute("CREATE TABLE theirs (x)")
        foreign.commit()
    before = Path(path).read_bytes()

    with pytest.raises(Corrupt, match="not a metadata database of Forebay.*name another path"):
        open_store(path)

    assert Path(path).read_bytes() == before


def test_a_damaged_page_is_an_error_and_never_an_absent_key(path: str) -> None:
    with closing(open_store(path)) as store:
        for number in range(200):
            store.transaction([], [Put(f"k/{number}", b"v" * 500)])
        assert store.damage() == []
    whole = Path(path).read_bytes()
    damaged = bytearray(whole)
    for page in range(1, len(whole) // 4096):
        damaged[page * 4096 : page * 4096 + 200] = b"\xa5" * 200
    Path(path).write_bytes(damaged)

    with pytest.raises(Corrupt, match="metadata.sqlite is not a whole"), closing(open_store(path)) as store:
        assert store.damage() != []
        store.get("k/100")


def test_a_database_cut_short_is_an_error(path: str) -> None:
    with closing(open_store(path)) as store:
        for number in range(100):
            store.transaction([], [Put(f"k/{number}", b"v" * 2_000)])
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole[: len(whole) // 3])

    with pytest.raises(Corrupt), closing(open_store(path)) as store:
        store.range("k/")


def test_a_lost_revision_counter_is_an_error(path: str) -> None:
    open_store(path).close()
    with closing(sqlite3.connect(path)) as vandal:
        vandal.execute("DELETE FROM state")
        vandal.commit()

    with closing(open_store(path)) as store, pytest.raises(Corrupt, match="lost its revision counter"):
        store.revision()


def test_a_newer_schema_is_not_corrupt_but_refused(path: str) -> None:
    open_store(path).close()
    with closing(sqlite3.connect(path)) as later:
        later.execute("PRAGMA user_version = 2")
        later.commit()

    for read_only in (False, True):
        with pytest.raises(UnsupportedFormat, match="schema 2, this Forebay reads up to 1.*upgrade"):
            open_store(path, read_only=read_only)


def test_a_database_locked_beyond_the_time_out_is_unavailable_and_reads_go_on(path: str) -> None:
    with closing(open_store(path, busy_timeout_ms=50)) as store:
        revision = store.transaction([], [Put("a", b"1")]).revision
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")

            with pytest.raises(Unavailable, match="busy in another process.*try again"):
                store.transaction([], [Put("a", b"2")])
            with pytest.raises(Unavailable):
                store.session(30.0)
            assert store.get("a") is not None
            other.execute("ROLLBACK")

        assert store.revision() == revision
        assert store.transaction([], [Put("a", b"2")]).revision == revision + 1


def test_a_session_that_cannot_be_ended_in_the_database_still_lets_go_of_its_lock(path: str) -> None:
    with closing(open_store(path)) as witness:
        store = open_store(path, busy_timeout_ms=20)
        sessions = [store.session(30.0), store.session(30.0)]
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(Unavailable):
                store.close()

        assert [witness.session_alive(session.id) for session in sessions] == [False, False]
        with pytest.raises(Closed):
            store.get("a")


def test_a_read_only_handle_reads_and_watches_and_changes_nothing(path: str) -> None:
    with closing(open_store(path)) as owner:
        session = owner.session(30.0)
        owner.transaction([], [Put("a", b"1"), Put("leased", b"", session=session.id)])
        with closing(open_store(path, read_only=True)) as reader, reader.watch("b") as watch:
            owner.transaction([], [Put("b", b"2")])

            assert [entry.key for entry in reader.range("")] == ["a", "b", "leased"]
            assert [change.key for change in watch.poll(10.0)] == ["b"]
            assert reader.session_alive(session.id)
            for call in (lambda: reader.transaction([], []), lambda: reader.session(30.0)):
                with pytest.raises(Unsupported, match="opened read-only"):
                    call()
            owner.close()

            assert [entry.key for entry in reader.range("")] == ["a", "b"]


def test_a_read_only_handle_waits_for_an_owner_that_has_only_begun(path: str) -> None:
    Path(path).touch()

    with pytest.raises(Unavailable, match="has not finished creating it"):
        open_store(path, read_only=True)


def test_many_handles_may_create_the_file_at_once(path: str) -> None:
    barrier = threading.Barrier(4)
    revisions: list[int] = []

    def create(name: str) -> None:
        barrier.wait()
        with closing(open_store(path)) as store:
            revisions.append(store.transaction([], [Put(name, b"")]).revision)

    threads = [threading.Thread(target=create, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(revisions) == [1, 2, 3, 4]


def test_a_file_that_goes_away_is_not_begun_anew(path: str, tmp_path: Path) -> None:
    with closing(open_store(path)) as store:
        store.transaction([], [Put("a", b"")])
        inside(store).database.rest()
        inside(store).database.go_on()
        (tmp_path / "metadata.sqlite").rename(tmp_path / "elsewhere")

        with pytest.raises(Unavailable):
            store.get("a")
        with pytest.raises(Unavailable):
            store.transaction([], [Put("a", b"")])

        assert not (tmp_path / "metadata.sqlite").exists()


def test_a_look_for_dead_sessions_takes_no_write_turn_while_all_live(path: str) -> None:
    """Every process that watched took one each half second, and each made the others wait."""
    clock = ManualClock()
    with closing(SqliteMetadata(path, disk=SystemDisk(), clock=clock)) as one, closing(open_store(path)) as two:
        session = two.session(10.0)
        two.transaction([], [Put("leased", b"", session=session.id)])
        with closing(sqlite3.connect(path, isolation_level=None)) as other, one.watch("leased") as watch:
            other.execute("BEGIN IMMEDIATE")
            clock.advance(1.0)

            assert watch.poll(0) == []
            assert one.session_alive(session.id)
            assert [entry.key for entry in one.range("")] == ["leased"]
            assert one.get("leased") is not None
            other.execute("ROLLBACK")


def test_a_session_that_dies_is_found_by_the_next_look(path: str) -> None:
    clock, disk = ManualClock(), SystemDisk()
    with closing(SqliteMetadata(path, disk=SystemDisk(), clock=clock)) as one:
        two = SqliteMetadata(path, disk=disk, clock=SystemClock())
        session = two.session(10.0)
        two.transaction([], [Put("leased", b"", session=session.id)])
        with one.watch("leased") as watch:
            two.abandon()
            disk.abandon()
            clock.advance(1.0)

            assert [(change.key, change.entry) for change in watch.poll(0)] == [("leased", None)]
            assert not one.session_alive(session.id)
