"""What a shard leaves behind goes only on what is recorded: of this very topic, in these very bytes, elsewhere too."""

from __future__ import annotations

from typing import Final, cast

import msgspec
import pytest

from forebay.catalog import ShardCatalog
from forebay.cleanup.deleted_topics import forget_shard, mark_deleting
from forebay.cleanup.moved_shards import clear_away, remove_files
from forebay.disk import Disk
from forebay.errors import Fenced, UnknownTopic
from forebay.format.metadata.descriptor import Phase, SegmentDescriptor, ShardState
from forebay.format.metadata.value import encode_value
from forebay.metadata import MemoryMetadata, Put
from forebay.shard import Owner, Wanted, acquire
from forebay.shard.ownership import change_state, give_back, reserve_in_state
from forebay.testing.simulated.clock import ManualClock
from forebay.wal.recovery.resume import ASIDE
from tests.protocol.environment import KEYS, MODES, Node, OwnersEnvironment
from tests.support.environments.simulated import TOPIC_ID

NEW: Final = "cd" * 16


def _created_anew() -> MemoryMetadata:
    """Another topic of the name of a deleted one, with an owner."""
    store = MemoryMetadata()
    state = ShardState(incarnation=NEW, epoch=1, owner="session", holder="a")
    store.transaction([], [Put(KEYS.state, encode_value(state)), Put(KEYS.cur, b"of the new one")])
    return store


def test_the_deletion_of_a_topic_leaves_one_created_anew_alone() -> None:
    store = _created_anew()
    before = store.range("")

    assert mark_deleting(store, KEYS.state, TOPIC_ID, ManualClock()) is None
    forget_shard(store, KEYS.state, TOPIC_ID, ManualClock())

    assert store.range("") == before


def test_an_owner_can_change_nothing_once_the_deletion_is_recorded() -> None:
    store = MemoryMetadata()
    owner = Owner(store.session(10).id, "a")
    [(_, epoch)] = acquire(store, [Wanted(KEYS.state, TOPIC_ID)], owner, clock=ManualClock())

    state = mark_deleting(store, KEYS.state, TOPIC_ID, ManualClock())

    assert state is not None and (state.phase, state.owner) == (Phase.DELETING, owner.session)
    with pytest.raises(Fenced):
        change_state(
            store,
            Wanted(KEYS.state, TOPIC_ID),
            epoch,
            lambda state: msgspec.structs.replace(state, reserved_end=9),
            clock=ManualClock(),
        )
    with pytest.raises(Fenced):
        ShardCatalog(store, KEYS, TOPIC_ID, clock=ManualClock()).owned(epoch)
    with pytest.raises(UnknownTopic):
        acquire(store, [Wanted(KEYS.state, TOPIC_ID)], owner, clock=ManualClock())
    assert mark_deleting(store, KEYS.state, TOPIC_ID, ManualClock()) == state, "may be repeated"


def test_an_owner_of_a_deleted_topic_can_change_nothing_of_a_later_one_in_the_same_epoch() -> None:
    """Each topic counts epochs from 1: an owner that has not seen the deletion is fenced by the id of its topic."""
    store = _created_anew()
    old, before = Wanted(KEYS.state, TOPIC_ID), store.range("")

    with pytest.raises(Fenced, match="the topic was deleted"):
        reserve_in_state(store, old, 1, clock=ManualClock())(1_000_000)
    with pytest.raises(Fenced):
        change_state(
            store, old, 1, lambda state: msgspec.structs.replace(state, phase=Phase.SEALED), clock=ManualClock()
        )

    assert store.range("") == before


def test_an_acquisition_of_a_deleted_topic_is_not_given_back_over_a_later_one_in_the_same_epoch() -> None:
    store = _created_anew()
    before = store.range("")

    give_back(store, KEYS.state, ShardState(incarnation=TOPIC_ID, epoch=0), 1)

    assert store.range("") == before


def _one_file(mode: str) -> tuple[OwnersEnvironment, Node, str]:
    """A shard whose only file is history and whose owner has let go of it; where its files lie."""
    environment = OwnersEnvironment(mode)
    node = environment.node("a")
    node.append(3)
    node.export()
    directory = node.engine.directory_of(environment.ref)
    node.engine.retire(environment.ref)
    return environment, node, directory


def _bend(environment: OwnersEnvironment, **fields: object) -> None:
    piece: SegmentDescriptor = msgspec.structs.replace(environment.catalog.descriptors()[0], **fields)
    environment.inner.transaction([], [Put(KEYS.segment(0), encode_value(piece))])


def _clear(environment: OwnersEnvironment, directory: str) -> bool:
    return clear_away(environment.disk, directory, environment.catalog, environment.settings.wal)


def test_files_go_where_history_has_their_very_bytes() -> None:
    environment, _, directory = _one_file("shared_fs")

    assert _clear(environment, directory)

    assert environment.log_files("a") == {}


@pytest.mark.parametrize("mode", MODES)
def test_files_stay_apart_where_history_has_other_bytes_or_has_them_only_here(mode: str) -> None:
    environment, _, directory = _one_file(mode)
    before = {content for name, content in environment.log_files("a").items() if name.endswith(".seg")}
    if mode == "shared_fs":
        _bend(environment, content_hash="00" * 16)

    assert not _clear(environment, directory)

    kept = {content for name, content in environment.log_files("a").items() if f"/{ASIDE}/" in name}
    assert kept >= before
    assert not [name for name in environment.log_files("a") if f"/{ASIDE}/" not in name]


def test_a_file_that_another_thread_has_removed_does_not_keep_the_others() -> None:
    """The caller that deletes a topic and the clean-up, which finds the deletion noted, may be at it at once."""
    environment = OwnersEnvironment("local")
    node = environment.node("a")
    node.append(3)
    node.rotate()
    node.append(3)
    directory = node.engine.directory_of(environment.ref)
    disk = environment.disk
    assert len(disk.list_directory(directory)) > 1

    class Beside:
        """Shows the disk as it was before the other removed its first file."""

        def __getattr__(self, name: str) -> object:
            return getattr(disk, name)

        def list_directory(self, path: str) -> list[str]:
            found = disk.list_directory(path)
            if path == directory:
                disk.unlink(f"{path}/{found[0]}")
            return found

    remove_files(cast(Disk, Beside()), node.engine.directory, environment.ref.id)

    assert not disk.exists(directory)
