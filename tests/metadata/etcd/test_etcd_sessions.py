"""Sessions that end: a process that starts again has its shards at once, and what a lost session closed comes back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import pytest

from forebay import Moved, Storage, Unavailable
from forebay.testing.inside import inside
from forebay.topics import ShardRef, refs_of
from tests.moves.children import OwnerChild, environment_of
from tests.support.environments.directories import TOPIC, Environment, metadata_of, numbers, state_of, told
from tests.support.etcd import Cluster
from tests.support.soak import SOAK
from tests.support.waiting import until

LEASE_S: Final = 300
"""No lease ends by itself while a test runs."""
PARTITIONS: Final = 200 if SOAK else 60


@pytest.fixture
def environment(tmp_path: Path, cluster: Cluster) -> Environment:
    return environment_of(tmp_path, cluster.endpoints, ttl_s=LEASE_S)


def _texts(first: int, stop: int) -> list[str]:
    return [str(number) for number in range(first, stop)]


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_process_that_is_killed_and_started_at_once_has_its_shards_at_once(
    environment: Environment, cluster: Cluster, deaths: int
) -> None:
    """Its lease would last for minutes."""
    for death in range(deaths):
        with OwnerChild(environment.root, "A", cluster.endpoints, ttl_s=LEASE_S) as owner:
            if not death:
                owner.do("create", "fsync")
            assert owner.do("append", *_texts(10 * death, 10 * death + 10)) == f"acked {10 * death}"
            owner.kill()

    with environment.open("A") as a:
        assert not a.recover().failed
        topic = a.topic(TOPIC)
        assert topic.append(b"%d" % (10 * deaths)) == 10 * deaths
        assert told(topic.read()) == numbers(0, 10 * deaths + 1)


def test_another_directory_waits_for_the_lease_of_a_killed_process(environment: Environment, cluster: Cluster) -> None:
    with OwnerChild(environment.root, "A", cluster.endpoints, ttl_s=LEASE_S) as owner:
        owner.do("create", "fsync")
        owner.do("append", *_texts(0, 10))
        owner.kill()
    with environment.open("B") as b, pytest.raises(Moved, match="living session"):
        b.topic(TOPIC).append(b"late")


def test_a_copied_directory_does_not_end_the_session_of_the_living_original(environment: Environment) -> None:
    with environment.open("A") as a:
        topic = a.create_topic(TOPIC, durability="fsync")
        topic.append(b"0")
        session = state_of(a, topic).owner
        assert session is not None and (environment.root / "A" / "session.json").exists()
        shutil.copytree(environment.root / "A", environment.root / "copy")

        with environment.open("copy") as copy:
            assert metadata_of(copy).session_alive(session)
            with pytest.raises(Unavailable, match="living session"):
                copy.topic(TOPIC).append(b"twice")

        assert topic.append(b"1") == 1


def _open_again(log: Storage, refs: list[ShardRef]) -> bool:
    """Whether every shard is open in a session that lives."""
    found = [inside(log).engine.find(ref) for ref in refs]
    return all(shard is not None and not shard.is_session_over and shard.wal.fenced is None for shard in found)


def test_shards_of_a_lost_session_are_opened_again_together_and_unasked(
    environment: Environment, cluster: Cluster
) -> None:
    with environment.open("A") as a:
        topic = a.create_topic(TOPIC, durability="fsync", partitions=PARTITIONS)
        for partition in range(PARTITIONS):
            topic.append(b"%d" % partition, partition=partition)
        refs, before = refs_of(topic.spec), state_of(a, topic).owner

        for lease in cluster.call("lease/leases").get("leases", []):
            cluster.call("lease/revoke", {"ID": lease["ID"]})
        inside(a).lose_session()

        until(lambda: _open_again(a, refs))
        owners = {state_of(a, topic, partition).owner for partition in range(PARTITIONS)}
        assert len(owners) == 1 and before not in owners
        assert [topic.append(b"next", partition=partition) for partition in range(PARTITIONS)] == [1] * PARTITIONS
