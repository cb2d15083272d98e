"""Messages name a data directory by its path: each owner records where its directory lies."""

from __future__ import annotations

from pathlib import Path

import pytest

import forebay
from forebay import Moved, Settings
from forebay.errors import Unavailable
from forebay.format.metadata.keys import directory_key, prefix_of_state, shard_of_state, state_key
from forebay.metadata import MemoryMetadata, Put
from forebay.shard.directories import DirectoryPlace, directory_name, record_directory


class AwayMetadata(MemoryMetadata):
    """A store that answers nothing."""

    def get(self, key: str) -> None:
        raise Unavailable(f"{key} cannot be asked for")


def test_a_directory_is_named_by_its_path_its_host_and_its_id() -> None:
    store = MemoryMetadata()
    record_directory(store, "/forebay", "ab12", DirectoryPlace(path="/srv/north", host=""))
    record_directory(store, "/forebay", "cd34", DirectoryPlace(path="/srv/south", host="beta"))

    assert directory_name(store, "/forebay", "ab12") == "directory /srv/north (ab12)"
    assert directory_name(store, "/forebay", "cd34") == "directory /srv/south on beta (cd34)"
    assert directory_name(store, "/other", "ab12") == "directory ab12"

    record_directory(store, "/forebay", "ab12", DirectoryPlace(path="/srv/moved", host=""))

    assert directory_name(store, "/forebay", "ab12") == "directory /srv/moved (ab12)"


def test_a_record_that_cannot_be_read_leaves_the_id() -> None:
    store = MemoryMetadata()
    store.transaction([], [Put(directory_key("ab12"), b"no value of ours")])

    assert directory_name(store, "/forebay", "ab12") == "directory ab12"
    assert directory_name(AwayMetadata(), "/forebay", "ab12") == "directory ab12"
    record_directory(AwayMetadata(), "/forebay", "ab12", DirectoryPlace(path="/srv/north", host=""))


@pytest.mark.parametrize("prefix", ["/forebay", "/a/storage/topics/b", ""])
def test_the_key_of_a_state_shows_its_prefix_and_its_shard(prefix: str) -> None:
    key = state_key("shop", "orders", 3, prefix=prefix)

    assert (prefix_of_state(key), shard_of_state(key)) == (prefix, "shop/orders[3]")


def test_a_refusal_names_topic_partition_and_path_and_no_key(tmp_path: Path) -> None:
    shared = Settings.load(
        overrides={
            "storage": {"mode": "shared_fs"},
            "store": {"root": str(tmp_path / "history")},
            "metadata": {"path": str(tmp_path / "m.sqlite")},
        }
    )
    with forebay.open(tmp_path / "north", shared) as north, forebay.open(tmp_path / "south", shared) as south:
        north.create_topic("shop/orders").append(b"paid")

        with pytest.raises(Moved) as refused:
            south.topic("shop/orders").append(b"paid")

    assert str(refused.value).startswith("shop/orders[0] is owned by the living session")
    assert f"in directory {tmp_path}/north ({north.directory_id})" in str(refused.value)
    assert "/storage/topics/" not in str(refused.value)
