"""The shared file system does not answer when a process starts: that is a warning, and export catches up."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest

from forebay.blobs.directory import UPLOADS
from forebay.disk import SystemDisk
from forebay.disk.descriptors import SystemFile
from forebay.errors import Unavailable, Unsupported
from forebay.settings import Settings
from forebay.spark.place.location import Location
from forebay.spark.place.opening import opened
from forebay.storage import Storage
from tests.storage.rig import QUICK


class Mounted(SystemDisk):
    """A disk on which one directory is a mount that can be away."""

    def __init__(self, mount: Path) -> None:
        super().__init__()
        self._mount = str(mount)
        self.is_away = False

    def exists(self, path: str) -> bool:
        self._reach(path)
        return super().exists(path)

    def create(self, path: str) -> SystemFile:
        self._reach(path)
        return super().create(path)

    def sync_directory(self, path: str) -> None:
        self._reach(path)
        super().sync_directory(path)

    def _reach(self, path: str) -> None:
        if self.is_away and path.startswith(self._mount):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)


@pytest.mark.parametrize("mode", ["shared_fs", "local"])
def test_a_process_starts_while_the_shared_file_system_is_away(
    mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = str(tmp_path / "mount" / "history")
    place = {"store": {"root": root}} if mode == "shared_fs" else {"storage": {"handoff_root": root}}
    settings = Settings.load(overrides={**QUICK, "storage": {"mode": mode}, **place})
    disk = Mounted(tmp_path / "mount")
    try:
        disk.is_away = True
        with caplog.at_level(logging.WARNING), Storage.open(tmp_path / "log", settings, disk=disk) as log:
            assert "history is not exported for now, appends go on" in caplog.text
            topic = log.create_topic("orders")
            topic.append_many([b"0", b"1"])
            disk.is_away = False

            if mode == "shared_fs":
                log.export_topic("orders")
                assert topic.offsets().exported == 2
            log.seal_topic("orders")

        assert len(list(tmp_path.glob("mount/history/*_0/*.seg"))) == 1
    finally:
        disk.abandon()


class Careless(Mounted):
    """A mount on which a link replaces what has the name already."""

    def link(self, source: str, target: str) -> None:
        if super().exists(target):
            self.unlink(target)
        super().link(source, target)


def test_no_topic_is_given_up_by_a_mount_that_was_away_and_keeps_no_promises(tmp_path: Path) -> None:
    disk = Careless(tmp_path / "mount")
    settings = Settings.load(overrides={**QUICK, "storage": {"handoff_root": str(tmp_path / "mount")}})
    try:
        disk.is_away = True
        with Storage.open(tmp_path / "log", settings, disk=disk) as log:
            topic = log.create_topic("orders")
            topic.append(b"0")
            disk.is_away = False

            with pytest.raises(Unsupported, match="a second writer was let to create the same name"):
                log.seal_topic("orders")

            assert topic.append(b"1") == 1, "the seal was taken back"
    finally:
        disk.abandon()


def test_an_empty_directory_in_the_place_of_a_mount_with_history_begins_no_second_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, mounted = tmp_path / "history", tmp_path / "mounted"
    settings = Settings.load(overrides={**QUICK, "storage": {"mode": "shared_fs"}, "store": {"root": str(root)}})
    with Storage.open(tmp_path / "log", settings) as log:
        log.create_topic("orders").append(b"0")
        log.export_topic("orders")
    root.rename(mounted)
    root.mkdir()

    with caplog.at_level(logging.WARNING), Storage.open(tmp_path / "log", settings) as log:
        topic = log.topic("orders")
        topic.append(b"1")
        with pytest.raises(Unavailable, match="is empty, and the catalog names history in it: mount it"):
            log.export_topic("orders")

        with pytest.raises(Unavailable, match="is empty, and the catalog names history in it: mount it"):
            log.loads.store()

        assert "history is not exported for now, appends go on" in caplog.text
        assert list(root.iterdir()) == []
        root.rmdir()
        mounted.rename(root)
        log.export_topic("orders")
        assert topic.offsets().exported == 2
        assert [record.value for record in topic.read()] == [b"0", b"1"]


def test_a_machine_that_does_not_see_the_mount_brings_nothing(tmp_path: Path) -> None:
    """A worker of Spark would put its part where no other process looks, and call it done."""
    root = tmp_path / "history"
    groups = {**QUICK, "storage": {"mode": "shared_fs"}, "store": {"root": str(root)}}
    Storage.open(tmp_path / "log", Settings.load(overrides=groups)).close()
    root.rename(tmp_path / "mounted")

    location = Location.parse({"path": f"{tmp_path}/log", "storage.mode": "shared_fs", "store.root": str(root)})
    with opened(location) as found:
        with pytest.raises(Unavailable, match=f"{root} is no store: mount it"):
            found.new_objects().store.upload("k", [b"1"])
        assert not root.exists()
        (tmp_path / "mounted").rename(root)
        assert found.new_objects().store.upload("k", [b"1"]).size == 1


def test_a_copy_of_the_objects_alone_is_the_store(tmp_path: Path) -> None:
    root = tmp_path / "history"
    settings = Settings.load(overrides={**QUICK, "storage": {"mode": "shared_fs"}, "store": {"root": str(root)}})
    with Storage.open(tmp_path / "log", settings) as log:
        log.create_topic("orders").append(b"0")
        log.export_topic("orders")
    shutil.rmtree(root / UPLOADS)

    with Storage.open(tmp_path / "log", settings) as log:
        log.topic("orders").append(b"1")
        log.export_topic("orders")
        assert log.topic("orders").offsets().exported == 2
