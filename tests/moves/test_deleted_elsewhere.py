"""A topic that was deleted while a directory was offline leaves nothing there once that directory is opened again."""

from __future__ import annotations

from pathlib import Path

import pytest

import forebay
from forebay import Unavailable
from forebay.disk import SystemDisk
from forebay.engines.rocksdb.auditing import stored_shards
from forebay.engines.rocksdb.database import RocksDatabase
from forebay.format.metadata.keys import late_key
from forebay.inspection import verify
from forebay.storage import Storage
from forebay.storage.background.history import FIRST_SWEEP_SECONDS
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from tests.history.test_attach_storage import prepared
from tests.ledger import Ledger
from tests.moves.test_refusals import Died, dying
from tests.support.environments import directories
from tests.support.environments.directories import TOPIC, Environment, clear_up, metadata_of
from tests.support.waiting import until

pytestmark = pytest.mark.slow


class TimedEnvironment:
    """Directories with one clock."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.clock = ManualClock()

    def open(self, name: str) -> Storage:
        return Storage.open(self.environment.root / name, self.environment.settings, clock=self.clock)

    def outlast_grace(self, log: Storage) -> None:
        """What is due once the grace of deleted topics is over."""
        self.clock.advance(self.environment.settings.export.orphan_grace_s + 1)
        inside(log).remove_late_objects()

    def remains(self, name: str) -> list[str]:
        """What is left of topics in the directory: files, and rows of the database."""
        directory = self.environment.root / name
        found = [path.name for path in (directory / "shards").iterdir()]
        database = RocksDatabase(str(directory / "rocksdb"), SystemDisk(), read_only=True)
        if database.is_made:
            found += [topic_id for topic_id, _ in stored_shards(database)]
        database.close()
        return found


def notes(log: Storage) -> int:
    """How many deleted topics are still remembered."""
    return len(metadata_of(log).range(late_key("", prefix=log.settings.metadata.prefix)))


@pytest.mark.parametrize("engine", ["segment", "rocksdb"])
@pytest.mark.parametrize("handoff", ["handoff", ""])
def test_files_of_a_directory_that_was_offline_past_the_grace_go_when_it_opens(
    tmp_path: Path, engine: str, handoff: str
) -> None:
    timed = TimedEnvironment(directories.local(tmp_path, handoff=bool(handoff)))
    with timed.open("A") as a:
        a.create_topic(TOPIC, engine=engine, partitions=2).append_many([b"%d" % n for n in range(20)])
    with timed.open("B") as b:
        b.delete_topic(TOPIC)
        timed.outlast_grace(b)
        clear_up(b)
        assert notes(b) == 1
    assert timed.remains("A") != []
    found = verify(str(tmp_path / "A"), timed.environment.settings, disk=SystemDisk(), clock=timed.clock)
    assert found.findings == [], "that they are there is known"

    with timed.open("A") as a:
        clear_up(a)

        assert notes(a) == 0
        assert a.topics() == []
    assert timed.remains("A") == []


@pytest.mark.parametrize("mode", ["shared_fs", "local"])
def test_files_of_an_earlier_owner_go_when_it_opens(tmp_path: Path, mode: str) -> None:
    timed = TimedEnvironment(directories.shared_fs(tmp_path) if mode == "shared_fs" else directories.local(tmp_path))
    with timed.open("A") as a:
        a.create_topic(TOPIC).append_many([b"0", b"1"])
        if mode == "local":
            a.seal_topic(TOPIC)
    with timed.open("B") as b:
        b.topic(TOPIC).append(b"2")
    assert timed.remains("A") != []
    with timed.open("C") as c:
        c.delete_topic(TOPIC)
        timed.outlast_grace(c)
    with timed.open("B") as b:
        clear_up(b)
        timed.outlast_grace(b)
    assert timed.remains("B") == []

    with timed.open("A") as a:
        clear_up(a)

        assert notes(a) == 0
    assert timed.remains("A") == []


@pytest.mark.parametrize("mode", ["shared_fs", "local"])
def test_what_bulk_loads_brought_goes_with_the_topic(tmp_path: Path, mode: str) -> None:
    timed = TimedEnvironment(directories.shared_fs(tmp_path) if mode == "shared_fs" else directories.local(tmp_path))
    with timed.open("A") as a:
        topic = a.create_topic(TOPIC)
        a.loads.offer(TOPIC, prepared(a, topic, "one", 8), None)
        a.loads.attach("one")
    with timed.open("B") as b:
        b.delete_topic(TOPIC)
    with timed.open("A") as a:
        clear_up(a)

    left = [path for path in tmp_path.rglob("*") if path.is_file() and topic.spec.topic_id in str(path)]
    assert left == []


def test_objects_that_landed_late_go_though_no_process_lives_for_long(tmp_path: Path) -> None:
    timed = TimedEnvironment(directories.shared_fs(tmp_path))
    with timed.open("A") as a:
        topic = a.create_topic(TOPIC)
        a.delete_topic(TOPIC)
    late = tmp_path / "store" / f"{topic.spec.topic_id}_0" / "late.seg"
    late.parent.mkdir(parents=True, exist_ok=True)
    late.write_bytes(b"on its way when the topic was deleted")
    timed.clock.advance(timed.environment.settings.export.orphan_grace_s + 1)

    with timed.open("A") as a:
        timed.clock.advance(FIRST_SWEEP_SECONDS)
        clear_up(a)

        assert notes(a) == 0
    assert not late.exists()


def test_objects_of_a_topic_that_was_deleted_while_their_mount_was_away_go_once_it_is_back(tmp_path: Path) -> None:
    timed = TimedEnvironment(directories.shared_fs(tmp_path))
    store, mounted = tmp_path / "store", tmp_path / "mounted"
    with timed.open("A") as a:
        for name in (TOPIC, "another"):
            a.create_topic(name).append(b"0")
            a.export_topic(name)
        topic = a.topic(TOPIC)
    store.rename(mounted)
    store.mkdir()
    with timed.open("A") as a:
        a.delete_topic(TOPIC)
        with pytest.raises(Unavailable, match="is no store: mount it"):
            timed.outlast_grace(a)
        assert notes(a) == 1
        store.rmdir()
        mounted.rename(store)
        timed.outlast_grace(a)
        assert notes(a) == 0
    assert list(store.glob(f"{topic.spec.topic_id}*/*")) == []


def test_of_a_topic_that_only_its_deleter_had_nothing_is_remembered(tmp_path: Path) -> None:
    for number, environment in enumerate((directories.local(tmp_path, handoff=False), directories.shared_fs(tmp_path))):
        timed = TimedEnvironment(environment)
        with timed.open(f"A{number}") as a:
            a.create_topic(TOPIC).append(b"0")
            a.delete_topic(TOPIC)
            timed.outlast_grace(a)

            assert notes(a) == 0


@pytest.mark.parametrize("engine", ["segment", "rocksdb"])
def test_an_open_shard_of_a_topic_that_was_deleted_elsewhere_stops(tmp_path: Path, engine: str) -> None:
    timed = TimedEnvironment(directories.local(tmp_path))
    with timed.open("A") as a, timed.open("B") as b:
        topic = a.create_topic(TOPIC, engine=engine)
        topic.append(b"0")
        b.delete_topic(TOPIC)
        clear_up(a)

        with pytest.raises((forebay.Closed, forebay.UnknownTopic), match="was deleted"):
            topic.append(b"1")
        # Once the upkeep has given up the shard, its files go.
        until(lambda: not inside(a).engine.shards())
        clear_up(a)
    assert timed.remains("A") == []


def test_an_open_ephemeral_topic_that_was_deleted_elsewhere_stops(tmp_path: Path) -> None:
    timed = TimedEnvironment(directories.local(tmp_path, handoff=False))
    with timed.open("A") as a, timed.open("B") as b:
        topic = a.create_topic(TOPIC, durability="ephemeral")
        topic.append(b"0")
        b.delete_topic(TOPIC)
        clear_up(a)

        with pytest.raises(forebay.UnknownTopic):
            topic.append(b"1")
        assert notes(a) == 0


@pytest.mark.parametrize("when", ["before", "behind"])
def test_whichever_caller_dies_over_a_deletion_it_reaches_every_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, ledger: Ledger
) -> None:
    for call in range(40):
        timed = TimedEnvironment(directories.local(tmp_path / str(call)))
        (tmp_path / str(call)).mkdir()
        with timed.open("A") as a:
            a.create_topic(TOPIC).append(b"0")
        with timed.open("B") as b:
            dying(monkeypatch, metadata_of(b), call, behind=when == "behind")
            died = False
            try:
                b.delete_topic(TOPIC)
            except Died:
                died = True
            monkeypatch.undo()
        with timed.open("B") as b:
            if b.topics():
                b.delete_topic(TOPIC)
            timed.outlast_grace(b)
        with timed.open("A") as a:
            clear_up(a)
            timed.outlast_grace(a)
            assert (a.topics(), notes(a)) == ([], 0)
        assert timed.remains("A") == []
        ledger.count("states", scenario="deletion elsewhere")
        if not died:
            assert call > 3
            return
    raise AssertionError("a deletion ends")


def test_whichever_caller_ends_a_deletion_without_a_store_leaves_the_objects_to_those_who_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed, storeless = (
        TimedEnvironment(directories.local(tmp_path)),
        TimedEnvironment(directories.local(tmp_path, handoff=False)),
    )
    storeless.clock = timed.clock
    with timed.open("C") as c:
        c.create_topic(TOPIC).append(b"0")
        c.seal_topic(TOPIC)
    with timed.open("A") as a:
        dying(monkeypatch, metadata_of(a), 2, behind=True)
        with pytest.raises(Died):
            a.delete_topic(TOPIC)
        monkeypatch.undo()
        assert notes(a) == 1
    with storeless.open("B") as b:
        assert inside(b).deletions.notes.deleting() == []
    assert list((tmp_path / "handoff").rglob("*.seg")) != []

    with timed.open("A") as a:
        timed.outlast_grace(a)

    assert list((tmp_path / "handoff").rglob("*.seg")) == []
