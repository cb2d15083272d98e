"""Directories that cannot be used: each says what is wrong and what to do, and nothing in them is changed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

import forebay
from forebay import Corrupt, ForebayError, Invalid, Storage, Unavailable, UnsupportedFormat
from forebay.directory import LogDirectory
from forebay.disk import SystemDisk
from forebay.testing.simulated.clock import ManualClock
from tests.storage.rig import QUICK, WatchedDisk, digest, quick, values

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound log, to be copied."""
    path = tmp_path_factory.mktemp("kept") / "log"
    with forebay.open(path, QUICK) as log:
        topic = log.create_topic("t")
        topic.append_many([b"%d" % n for n in range(10)])
        topic.rotate()
        topic.append(b"10")
    return path


@pytest.fixture
def path(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept, tmp_path / "log"))


def refused(path: Path, kind: type[ForebayError], said: str, *, without: tuple[str, ...] = ()) -> None:
    """Opening is refused, for reading as for writing, with that error, and every byte stays."""
    for read_only in (False, True):
        before = digest(path, without=without) if path.is_dir() else {"": path.read_bytes().hex()}
        with pytest.raises(kind, match=said):
            forebay.open(path, QUICK, read_only=read_only)
        assert (digest(path, without=without) if path.is_dir() else {"": path.read_bytes().hex()}) == before


def test_a_file_in_place_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"precious")

    refused(tmp_path / "file", Invalid, f"{tmp_path}/file is not a .*directory")
    with pytest.raises((Invalid, Unavailable), match=f"{tmp_path}/file/below"):
        forebay.open(tmp_path / "file" / "below", QUICK)


def test_a_directory_that_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")

    refused(tmp_path / "photos", Invalid, "is not a Forebay data directory")
    assert os.listdir(tmp_path / "photos") == ["cat.jpg"]


def test_a_directory_that_does_not_exist_is_made_for_writing_only(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="no forebay.json"):
        forebay.open(tmp_path / "a" / "b", QUICK, read_only=True)
    assert not (tmp_path / "a").exists()

    forebay.open(tmp_path / "a" / "b", QUICK).close()


def test_a_directory_of_a_newer_version(path: Path) -> None:
    (path / "forebay.json").write_text('{"format": 2, "id": "x", "new": true}')

    refused(path, UnsupportedFormat, "has format 2, this version knows up to 1: upgrade")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": "1"}', b"\xff\xfe", b'{"id": "x"}', b"x" * 9000])
def test_a_damaged_marker(path: Path, content: bytes) -> None:
    (path / "forebay.json").write_bytes(content)

    refused(path, Corrupt, "forebay.json is damaged.*restore it from a backup")


def test_a_missing_marker_of_a_directory_with_a_log(path: Path) -> None:
    (path / "forebay.json").unlink()

    before = digest(path)
    with pytest.raises(Corrupt, match="forebay.json is missing: restore"):
        forebay.open(path, QUICK)
    assert digest(path) == before
    with pytest.raises(Invalid, match="no forebay.json"):
        forebay.open(path, QUICK, read_only=True)


@pytest.mark.parametrize("how", ["missing", "empty"])
def test_a_lost_metadata_store_is_not_taken_for_a_new_one(path: Path, how: str) -> None:
    """It had been made again, and every topic was gone."""
    (path / "metadata.sqlite").unlink()
    if how == "empty":
        (path / "metadata.sqlite").touch()
    before = digest(path)

    with pytest.raises(Corrupt, match="metadata.sqlite is missing or empty: restore it from a backup"):
        forebay.open(path, QUICK)

    assert digest(path) == before
    with pytest.raises(ForebayError):
        forebay.open(path, QUICK, read_only=True)


@pytest.mark.parametrize("how", ["garbage", "cut", "not ours"])
def test_a_damaged_metadata_store(path: Path, how: str) -> None:
    store = path / "metadata.sqlite"
    if how == "not ours":
        store.unlink()
        with sqlite3.connect(store) as connection:
            connection.execute("CREATE TABLE other (x)")
        connection.close()
    else:
        content = store.read_bytes()
        store.write_bytes(b"\0garbage" * 512 if how == "garbage" else content[: len(content) // 2 + 100])
    before = digest(path, without=("metadata.sqlite-wal", "metadata.sqlite-shm"))

    with pytest.raises(ForebayError, match="metadata.sqlite"), forebay.open(path, QUICK) as log:
        log.topics()

    assert digest(path, without=("metadata.sqlite-wal", "metadata.sqlite-shm")) == before


def test_a_segment_of_a_newer_version_refuses_its_topic_alone(path: Path) -> None:
    with forebay.open(path, QUICK) as log:
        log.create_topic("other").append(b"v")
        newest = sorted(path.glob(f"shards/{log.topic('t').spec.topic_id}_0/*.seg"))[-1]
    content = bytearray(newest.read_bytes())
    content[4:6] = (99).to_bytes(2, "little")
    newest.write_bytes(content)
    before = newest.read_bytes()

    with forebay.open(path, QUICK) as log:
        with pytest.raises(ForebayError, match=newest.name):
            log.topic("t").append(b"v")
        with pytest.raises(ForebayError, match=newest.name):
            log.recover().raise_failed()
        assert values(log.topic("other").read()) == [b"v"]
    assert newest.read_bytes() == before


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("kind", ["make_directory", "create", "rename", "sync_directory", "lock", "list_directory"])
def test_a_directory_that_may_not_be_written(tmp_path: Path, kind: str, number: int) -> None:
    disk = WatchedDisk()
    path = tmp_path / "log"

    def refuse(call: str, where: str) -> None:
        if call == kind:
            raise OSError(number, os.strerror(number), where)

    disk.meet = refuse
    with pytest.raises(Unavailable, match=f"{tmp_path}.*{os.strerror(number)}"):
        Storage.open(str(path), quick(), disk=disk)

    disk.meet = lambda call, where: None
    with Storage.open(str(path), quick(), disk=disk) as log:
        assert log.create_topic("t").append(b"v") == 0


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("kind", ["create", "write", "rename", "sync", "sync_directory", "open"])
def test_a_log_that_can_no_longer_be_written_keeps_what_it_has_and_recovers(
    tmp_path: Path, kind: str, number: int
) -> None:
    disk = WatchedDisk()

    def refuse(call: str, where: str) -> None:
        if call == kind and "/shards/" in where:
            raise OSError(number, os.strerror(number), where)

    with Storage.open(str(tmp_path / "log"), quick(), disk=disk) as log:
        topic = log.create_topic("t", durability="fsync")
        topic.append(b"before")
        disk.meet = refuse
        acked = []
        for turn in range(3):
            try:
                if turn == 1:
                    topic.rotate()
                topic.append(b"%d" % turn)
                acked.append(b"%d" % turn)
            except ForebayError as error:
                assert "default/t[0]" in str(error)
        disk.meet = lambda call, where: None
        topic.flush()
        topic.append(b"after")

        assert [value for value in values(topic.read()) if value is not None] == [b"before", *acked, b"after"]

    with Storage.open(str(tmp_path / "log"), quick(), disk=disk) as log:
        assert values(log.topic("t").read()) == [b"before", *acked, b"after"]


def _elsewhere(tmp_path: Path) -> dict[str, object]:
    return {**QUICK, "wal": {**QUICK.get("wal", {}), "dir": str(tmp_path / "mount" / "wal")}}


@pytest.mark.parametrize("read_only", [False, True])
def test_log_files_elsewhere_that_are_not_mounted(*, read_only: bool, tmp_path: Path) -> None:
    """An empty place would look like a log that lost everything."""
    settings = _elsewhere(tmp_path)
    with forebay.open(tmp_path / "log", settings) as log:
        log.create_topic("t").append(b"v")
    (tmp_path / "mount").rename(tmp_path / "unmounted")

    for _ in ("no mount point", "an empty one"):
        with pytest.raises(
            Unavailable, match=f"keeps its log files in {tmp_path}/mount/wal, and they are not there.*mounted"
        ):
            forebay.open(tmp_path / "log", read_only=read_only)
        (tmp_path / "mount" / "wal").mkdir(parents=True, exist_ok=True)

    shutil.rmtree(tmp_path / "mount")
    (tmp_path / "unmounted").rename(tmp_path / "mount")
    with forebay.open(tmp_path / "log") as log:
        assert values(log.topic("t").read()) == [b"v"]


def test_log_files_of_two_directories_in_one_place(tmp_path: Path) -> None:
    """Each would take the other's files for its own: they would be set aside, or removed as moved."""
    settings = _elsewhere(tmp_path)
    with forebay.open(tmp_path / "log", settings) as log:
        with pytest.raises(
            Invalid, match=f"wal.dir {tmp_path}/mount/wal holds the log files of {tmp_path}/log: .*its own"
        ):
            forebay.open(tmp_path / "other", settings)
        log.create_topic("t").append(b"v")
    (tmp_path / "log" / "forebay.json").unlink()
    with pytest.raises(Invalid, match="wal.dir .* has files in it: name an empty or a new directory"):
        forebay.open(tmp_path / "other", settings)
    assert not (tmp_path / "other" / "forebay.json").exists()


def test_log_files_of_another_directory_in_the_place_of_ours(tmp_path: Path) -> None:
    forebay.open(tmp_path / "log", _elsewhere(tmp_path)).close()
    (tmp_path / "mount").rename(tmp_path / "unmounted")
    forebay.open(tmp_path / "other", _elsewhere(tmp_path)).close()

    for read_only in (False, True):
        with pytest.raises(Invalid, match=f"holds the log files of {tmp_path}/other: restore the right ones"):
            forebay.open(tmp_path / "log", read_only=read_only)


def test_a_claim_whose_directory_was_never_finished_is_taken_over(tmp_path: Path) -> None:
    forebay.open(tmp_path / "log", _elsewhere(tmp_path)).close()
    (tmp_path / "log" / "forebay.json").unlink()

    with forebay.open(tmp_path / "other", _elsewhere(tmp_path)) as log:
        assert log.create_topic("t").append(b"v") == 0


def test_a_damaged_claim_is_named(tmp_path: Path) -> None:
    forebay.open(tmp_path / "log", _elsewhere(tmp_path)).close()
    (tmp_path / "mount" / "wal" / "shards.json").write_text("{")

    with pytest.raises(Corrupt, match=r"shards\.json is damaged .*restore it from a backup"):
        forebay.open(tmp_path / "log")


@pytest.mark.parametrize("before", ["below the directory", "there, without a word whose they are"])
def test_log_files_that_were_moved_elsewhere_are_taken(before: str, tmp_path: Path) -> None:
    """As the refusal of another wal.dir says, and as directories have it that were made before there were claims."""
    place = tmp_path / "mount" / "wal"
    with forebay.open(tmp_path / "log", QUICK if before.startswith("below") else _elsewhere(tmp_path)) as log:
        log.create_topic("t").append(b"v")
    if before.startswith("below"):
        place.parent.mkdir()
        (tmp_path / "log" / "shards").rename(place)
        marker = tmp_path / "log" / "forebay.json"
        marker.write_text(json.dumps({**json.loads(marker.read_text()), "shards": str(place)}))
    else:
        (place / "shards.json").unlink()

    with forebay.open(tmp_path / "log", read_only=True) as beside:
        assert values(beside.topic("t").read()) == [b"v"]
    with forebay.open(tmp_path / "log", _elsewhere(tmp_path)) as log:
        assert values(log.topic("t").read()) == [b"v"]
    with pytest.raises(Invalid, match="holds the log files of"):
        forebay.open(tmp_path / "other", _elsewhere(tmp_path))


class _Between(SystemDisk):
    """Does something once, just before the first claim is written."""

    def __init__(self, doing: Callable[[], object]) -> None:
        super().__init__()
        self._doing: Callable[[], object] | None = doing

    def rename(self, source: str, target: str) -> None:
        if target.endswith("shards.json") and self._doing is not None:
            doing, self._doing = self._doing, None
            doing()
        super().rename(source, target)


def test_two_new_directories_that_claim_one_place_at_once(tmp_path: Path) -> None:
    place = str(tmp_path / "wal")

    def second() -> None:
        with pytest.raises(Unavailable):
            LogDirectory.take(tmp_path / "b", SystemDisk(), ManualClock(), place)

    LogDirectory.take(tmp_path / "a", _Between(second), ManualClock(), place).release()

    with pytest.raises(Invalid, match=f"holds the log files of {tmp_path}/a"):
        LogDirectory.take(tmp_path / "b", SystemDisk(), ManualClock(), place)
    assert [left.name for left in (tmp_path / "wal").iterdir()] == ["shards.json"]


def test_log_files_where_they_lie_anyway_are_not_elsewhere(tmp_path: Path) -> None:
    """Else a directory cut short while it was made would look like a log without its marker."""
    path = tmp_path / "log"
    named = {**QUICK, "wal": {**QUICK["wal"], "dir": str(path / "shards")}}
    with forebay.open(path, named) as log:
        assert log.create_topic("t").append(b"v") == 0

    assert not (path / "shards" / "shards.json").exists()
    for settings in (named, QUICK):
        with forebay.open(path, settings) as log:
            assert values(log.topic("t").read()) == [b"v"]
