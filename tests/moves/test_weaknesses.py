"""Weaknesses of other systems that concern history and moves: each is shut here, and a test says so by its name."""

from __future__ import annotations

import contextlib
import enum
import errno
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from forebay import Corrupt, ForebayError, Indeterminate, Moved, Storage, Topic, Unavailable
from forebay.blobs import Stat
from forebay.blobs.directory import DirectoryStore
from forebay.format.metadata.descriptor import Phase
from forebay.metadata import SqliteMetadata
from forebay.records import Bytes, Record
from tests.ledger import Ledger
from tests.storage.rig import WatchedDisk
from tests.support.environments import directories
from tests.support.environments.directories import (
    TOPIC,
    Environment,
    id_of,
    numbers,
    pieces_of,
    shard_of,
    state_of,
    told,
)
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.slow

CALLS: Final = ("get", "range", "transaction")


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return directories.shared_fs(tmp_path)


def fill(log: Storage, name: str = TOPIC, count: int = 22) -> Topic:
    topic = log.create_topic(name, durability="fsync")
    topic.append_many([b"%d" % number for number in range(count)])
    return topic


def files_of(environment: Environment, topic: Topic) -> set[str]:
    return {path for path in environment.files("A") if path.startswith(topic.spec.topic_id)}


class Moment(enum.Enum):
    BEFORE = "before it is done"
    AFTER = "after it is done"


@contextlib.contextmanager
def failing(number: int, moment: Moment) -> Iterator[Callable[[], bool]]:
    """The metadata call of this number, counted from here on in this thread, fails; gives whether it has."""
    counter, here = itertools.count(), threading.get_ident()
    struck: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            plain = getattr(SqliteMetadata, name)

            def call(
                *arguments: object, _plain: Callable[..., object] = plain, _name: str = name, **named: object
            ) -> object:
                strikes = threading.get_ident() == here and next(counter) == number
                if strikes and moment is Moment.BEFORE:
                    struck.append(_name)
                    raise Unavailable("the metadata store is out of reach")
                answer = _plain(*arguments, **named)
                if strikes:
                    struck.append(_name)
                    raise Indeterminate("no answer from the metadata store")
                return answer

            patch.setattr(SqliteMetadata, name, call)
        yield lambda: bool(struck)


@pytest.mark.parametrize("moment", Moment)
def test_a_metadata_error_at_any_call_is_not_taken_for_a_new_topic(
    environment: Environment, moment: Moment, ledger: Ledger
) -> None:
    with environment.open("A") as a, environment.open("B") as b:
        for number in itertools.count():
            name = f"t{number}"
            fill(a, name)
            a.seal_topic(name)
            with failing(number, moment) as struck:
                try:
                    first = b.topic(name).append(b"22")
                except (Unavailable, Indeterminate):
                    first = b.topic(name).append(b"22")
            assert first in (22, 23), "not at 0, and one in doubt is there at most once"
            assert told(b.topic(name).read(0, stop=23)) == numbers(0, 23)
            if not struck():
                break
            ledger.count("metadata faults", step="take-over")
        assert number > 5


@pytest.mark.parametrize("moment", Moment)
def test_nothing_is_cleared_and_nothing_given_up_before_the_seal_is_recorded(
    environment: Environment, moment: Moment, ledger: Ledger
) -> None:
    with environment.open("A") as a, environment.open("B") as b:
        for number in itertools.count():
            name = f"t{number}"
            topic = fill(a, name)
            before = files_of(environment, topic)
            with failing(number, moment) as struck, contextlib.suppress(Unavailable, Indeterminate):
                a.seal_topic(name, target=id_of(b))
            if not struck():
                break
            ledger.count("metadata faults", step="seal")
            assert files_of(environment, topic) >= before, "local files are still there"
            (sealed,) = a.seal_topic(name, target=id_of(b))
            assert (sealed.phase, sealed.next_offset) == (Phase.SEALED, 22)
            assert told(b.topic(name).read()) == numbers(0, 22)
            assert [(piece.start, piece.end) for piece in pieces_of(b, topic)] == [(0, 22)]
        assert number > 8


@pytest.mark.parametrize("moment", Moment)
def test_a_seal_that_failed_leaves_a_topic_that_takes_appends(environment: Environment, moment: Moment) -> None:
    with environment.open("A") as a:
        for number in itertools.count():
            name = f"t{number}"
            topic = fill(a, name)
            refused = False
            with failing(number, moment) as struck:
                try:
                    a.seal_topic(name)
                except (Unavailable, Indeterminate):
                    refused = True
            if not struck():
                break
            if not refused or state_of(a, topic).phase is Phase.SEALED:
                a.unseal_topic(name)
            assert topic.append(b"22") == 22
            assert told(topic.read()) == numbers(0, 23)


class Writers:
    """Threads that append until they learn that the topic has moved."""

    def __init__(self, topic: Topic, count: int = 4) -> None:
        self.acked: dict[int, bytes] = {}
        self.others: list[ForebayError] = []
        self._topic = topic
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._append, args=(number,)) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def go_on(self) -> None:
        """Return once some more are in."""
        count = len(self.acked)
        until(lambda: len(self.acked) > count + 20 or self.others)

    def join(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _append(self, thread: int) -> None:
        for number in itertools.count():
            value = b"%d.%d" % (thread, number)
            try:
                self.acked[self._topic.append(value)] = value
            except Moved:
                if self._stop.is_set():
                    return
            except ForebayError as error:
                self.others.append(error)
                return


@pytest.mark.parametrize("durability", ["memory", "disk", "fsync"])
def test_the_end_of_a_seal_is_known_when_the_last_writer_has_stopped(
    environment: Environment, durability: str, ledger: Ledger
) -> None:
    with environment.open("A") as a, environment.open("B") as b:
        topic = a.create_topic(TOPIC, durability=durability)
        writers = Writers(topic)
        until(lambda: len(writers.acked) > 50)

        (sealed,) = a.seal_topic(TOPIC, target=id_of(b))
        taken = b.topic(TOPIC)
        after = taken.append(b"after")
        writers.join()

        assert writers.others == []
        assert after == sealed.next_offset
        assert sorted(writers.acked) == list(range(sealed.next_offset)), "each acknowledged below the end, none after"
        assert dict(told(taken.read())) == {**writers.acked, after: b"after"}
        ledger.count("appends racing a seal", n=len(writers.acked))


def test_a_topic_sealed_and_taken_back_under_load_loses_nothing(environment: Environment, ledger: Ledger) -> None:
    with environment.open("A") as a:
        topic = a.create_topic(TOPIC)
        writers = Writers(topic)
        for round_ in range(8):
            writers.go_on()
            a.seal_topic(TOPIC)
            a.unseal_topic(TOPIC)
            ledger.count("seals under load")
            assert writers.others == [], f"round {round_}"
        writers.go_on()
        a.seal_topic(TOPIC)
        writers.join()
        assert writers.others == []
        a.unseal_topic(TOPIC)
        assert dict(told(topic.read())) == writers.acked


def test_of_two_who_want_a_sealed_topic_one_gets_it(environment: Environment, ledger: Ledger) -> None:
    with environment.open("A") as a, environment.open("B") as b, ThreadPoolExecutor(2) as threads:
        for number in range(12):
            name = f"t{number}"
            fill(a, name)
            a.seal_topic(name)
            a.unseal_topic(name)
            ready = threading.Barrier(2)

            def take(log: Storage, name: str = name, ready: threading.Barrier = ready) -> int | None:
                topic = log.topic(name)
                ready.wait(PATIENCE)
                with contextlib.suppress(Moved):
                    return topic.append(b"22")
                return None

            offsets = [job.result(PATIENCE) for job in [threads.submit(take, log) for log in (a, b)]]
            assert sorted(offsets, key=str) == [22, None]
            winner = a if offsets[0] is not None else b
            assert told(winner.topic(name).read()) == numbers(0, 23)
            ledger.count("races for a sealed topic")


@pytest.mark.parametrize("damage", ["missing", "replaced", "shorter"])
def test_the_last_object_of_history_is_missed_by_name(environment: Environment, damage: str) -> None:
    with environment.open("A") as a, environment.open("B") as b:
        topic = fill(a)
        a.export_topic(TOPIC)
        topic.append_many([b"22", b"23"])
        a.seal_topic(TOPIC, target=id_of(b))
        taken = b.topic(TOPIC)
        assert taken.append(b"24") == 24
        spoil(environment.root / "store" / pieces_of(b, taken)[-1].object_key, damage)

        stream, seen = taken.read(), list[Record]()
        with pytest.raises(Corrupt, match=r"offset 22|\.seg"):
            seen.extend(stream)
        assert told(seen) == numbers(0, 22)
        assert told(taken.read(24)) == numbers(24, 25)
        assert taken.append(b"25") == 25


@pytest.mark.parametrize("damage", ["missing", "replaced", "shorter"])
def test_a_seal_does_not_trust_that_what_was_exported_is_still_there(environment: Environment, damage: str) -> None:
    with environment.open("A") as a, environment.open("B") as b:
        topic = fill(a)
        a.export_topic(TOPIC)
        spoil(environment.root / "store" / pieces_of(a, topic)[0].object_key, damage)

        with pytest.raises(Corrupt, match=r"is not what was exported: it is not sealed; run"):
            a.seal_topic(TOPIC, target=id_of(b))

        assert topic.append(b"22") == 22, "the local copy is still there, and so is its owner"
        assert told(topic.read()) == numbers(0, 23)
        with pytest.raises(Moved):
            b.topic(TOPIC).append(b"x")


def spoil(path: Path, damage: str) -> None:
    content = path.read_bytes()
    path.unlink()
    if damage == "replaced":
        path.write_bytes(content[:-20] + bytes(20))
    if damage == "shorter":
        path.write_bytes(content[:-20])


def test_a_seal_waits_for_an_export_that_is_under_way(
    environment: Environment, monkeypatch: pytest.MonkeyPatch, ledger: Ledger
) -> None:
    uploading, go_on = threading.Event(), threading.Event()
    upload = DirectoryStore.upload

    def slowly(store: DirectoryStore, key: str, source: Iterable[Bytes]) -> Stat:
        uploading.set()
        assert go_on.wait(60)
        return upload(store, key, source)

    with environment.open("A") as a, environment.open("B") as b, ThreadPoolExecutor(2) as threads:
        topic = fill(a)
        monkeypatch.setattr(DirectoryStore, "upload", slowly)
        export = threads.submit(a.export_topic, TOPIC)
        assert uploading.wait(60)
        seal = threads.submit(a.seal_topic, TOPIC)
        until(lambda: state_of(a, topic).phase is Phase.SEALING)
        assert not seal.done()
        go_on.set()

        with contextlib.suppress(ForebayError):
            export.result(60)
        assert seal.result(60)[0].next_offset == 22
        taken = b.topic(TOPIC)
        assert [(piece.start, piece.end) for piece in pieces_of(b, taken)] == [(0, 22)]
        assert told(taken.read()) == numbers(0, 22)
    ledger.count("seals during an export")


def test_a_shard_that_cannot_write_is_not_sealed_until_it_can(environment: Environment) -> None:
    disk, broken = WatchedDisk(), threading.Event()

    def meet(kind: str, path: str) -> None:
        if broken.is_set() and "/A/shards/" in path and kind in ("write", "sync", "create"):
            raise OSError(errno.EIO, "on purpose", path)

    disk.meet = meet
    with Storage.open(environment.root / "A", environment.settings, disk=disk) as a, environment.open("B") as b:
        topic = fill(a)
        broken.set()
        with pytest.raises((Unavailable, Indeterminate)):
            topic.append(b"in doubt")
        assert topic.failure() is not None

        with pytest.raises((Unavailable, OSError)):
            a.seal_topic(TOPIC, target=id_of(b))
        assert state_of(a, topic).phase is not Phase.SEALED
        with pytest.raises(Moved):
            b.topic(TOPIC).append(b"x")

        broken.clear()
        until(lambda: _sealed(a, id_of(b)))
        taken = b.topic(TOPIC)
        records = told(taken.read(on_gap=lambda _, gap: None))
        assert records[:22] == numbers(0, 22)
        assert {value for _, value in records[22:]} <= {b"in doubt"}


def _sealed(log: Storage, target: str) -> bool:
    with contextlib.suppress(Unavailable):
        return bool(log.seal_topic(TOPIC, target=target))
    return False


def test_history_is_not_written_twice_by_owners_in_a_row(environment: Environment) -> None:
    with environment.open("A") as a, environment.open("B") as b:
        topic = fill(a)
        a.seal_topic(TOPIC)
        objects = {path.name: path.stat().st_mtime_ns for path in (environment.root / "store").rglob("*.seg")}
        taken = b.topic(TOPIC)
        taken.append(b"22")
        b.seal_topic(TOPIC)
        a.unseal_topic(TOPIC)
        assert topic.append(b"23") == 23
        a.export_topic(TOPIC)

        now = {path.name: path.stat().st_mtime_ns for path in (environment.root / "store").rglob("*.seg")}
        assert now.items() >= objects.items(), "no object is ever written again"
        assert [(piece.start, piece.end) for piece in pieces_of(a, topic)] == [(0, 22), (22, 23), (23, 24)]
        assert shard_of(topic).history.exported == 24
