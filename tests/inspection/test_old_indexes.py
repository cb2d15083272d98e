"""Indexes written before there were look-ups are sound, and are mended as they were."""

from __future__ import annotations

import contextlib
from typing import Final

from forebay.directory import FORMAT, LogDirectory, Marker
from forebay.disk import Disk
from forebay.format.files.segment import index_name
from forebay.inspection.directory import ExpectedShard
from forebay.inspection.history.catalog import HistoryPlaces
from forebay.inspection.repair import repair_shard
from forebay.inspection.verify.shard import verify_shard
from forebay.places import Stores
from forebay.settings import Settings, StorageSettings
from forebay.topics import TopicName, TopicSpec
from tests.support.environments.shard import (
    DIRECTORY,
    KEYS,
    SETTINGS,
    TOPIC,
    ShardEnvironment,
    expected,
    history_of,
    stream,
)
from tests.wal.test_indexes import make_old

SPEC: Final = TopicSpec.create(TopicName("shop", "orders"), topic_id=TOPIC, created_at=0, durability="fsync")
PLACE: Final = ExpectedShard(f"{TOPIC}_0", "shop/orders[0]", DIRECTORY, SPEC, 0)


def _exported() -> ShardEnvironment:
    """Two files exported with old indexes, and an active one."""
    environment = ShardEnvironment()
    for _ in range(2):
        environment.append(20)
        environment.seal()
    for file in environment.shard.wal.files.all[:2]:
        make_old(environment.disk, file.path)
    environment.append(5)
    environment.export()
    environment.shard.upkeep.close()
    return environment


def _mended(environment: ShardEnvironment, *, apply: bool) -> tuple[list[str], int]:
    """What is wrong, and how many steps a repair takes."""
    settings = Settings(storage=StorageSettings(handoff_root="/store"))
    directory = LogDirectory("/data", Marker(FORMAT, "me"), None)
    with contextlib.closing(Stores(directory, settings, disk=environment.disk, clock=environment.clock)) as stores:
        history = HistoryPlaces.of(PLACE, environment.metadata, stores, KEYS.prefix)
        assert history is not None
        report = verify_shard(environment.disk, PLACE, None, owned=False, history=history)
        steps = repair_shard(
            PLACE, SETTINGS, disk=environment.disk, clock=environment.clock, apply=apply, history=history
        )
    return [] if report.is_clean else [str(finding) for finding in report.findings], len(steps)


def _flip(disk: Disk, path: str) -> bytes:
    with contextlib.closing(disk.open(path, writable=True)) as file:
        before = file.read_at(file.size(), 0)
        file.write_at(bytes([before[70] ^ 0x10]), 70)
        file.sync()
    return before


def test_old_indexes_are_sound_on_both_sides() -> None:
    assert _mended(_exported(), apply=False) == ([], 0)


def test_an_old_index_in_the_store_is_rebuilt_as_the_catalog_knows_it() -> None:
    environment = _exported()
    path = f"/store/{index_name(environment.catalog().descriptors()[1].object_key)}"
    before = _flip(environment.disk, path)
    environment.disk.unlink(f"/store/{environment.catalog().descriptors()[0].object_key}")

    wrong, _ = _mended(environment, apply=True)

    assert len(wrong) >= 2
    assert _mended(environment, apply=False) == ([], 0)
    with contextlib.closing(environment.disk.open(path)) as file:
        assert file.read_at(file.size(), 0) == before
    with history_of(environment) as history:
        assert stream(history) == expected(0, 40)
