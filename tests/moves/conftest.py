"""One S3 server and one etcd for all tests of moves, and directories in each mode of storage."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from forebay.catalog import ShardKeys
from forebay.metadata import Compare, MetadataStore, Operation, Outcome, Put, SqliteMetadata
from forebay.metadata.etcd import EtcdMetadata
from forebay.testing.checks.invariants import Violation
from forebay.testing.checks.moves import Operations, commits_of, nothing_of_older_epochs, one_epoch_at_a_time
from tests.history.test_servers_killed import Bucket
from tests.ledger import Ledger
from tests.support.environments import directories
from tests.support.environments.directories import Environment
from tests.support.etcd import Cluster, running

WITH_SERVERS = (pytest.mark.slow, pytest.mark.xdist_group("moves-servers"))


@pytest.fixture(scope="session")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    """A real S3 server; who stops it starts it again."""
    bucket = Bucket(tmp_path_factory.mktemp("seaweed"))
    yield bucket
    bucket.kill()


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("etcd"), 1) as cluster:
        yield cluster


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> str:
    """A prefix that no other test uses."""
    return re.sub(r"[^a-zA-Z0-9]+", "-", request.node.nodeid).strip("-")[-90:]


@pytest.fixture(
    params=[
        "local",
        "shared_fs",
        pytest.param("object_store", marks=WITH_SERVERS),
        pytest.param("object_store, etcd", marks=WITH_SERVERS),
    ]
)
def environment(request: pytest.FixtureRequest, tmp_path: Path, folder: str) -> Environment:
    """Directories between which a topic can move, in each mode."""
    if request.param == "local":
        return directories.local(tmp_path)
    if request.param == "shared_fs":
        return directories.shared_fs(tmp_path)
    environment = directories.object_store(tmp_path, request.getfixturevalue("bucket").endpoint, folder)
    if request.param == "object_store":
        return environment
    return directories.in_etcd(environment, request.getfixturevalue("etcd").endpoints, f"/{folder}")


@pytest.fixture(autouse=True)
def committed(monkeypatch: pytest.MonkeyPatch, ledger: Ledger) -> Iterator[list[Operations]]:
    """Whatever a test does, no transaction of this process breaks I19 or I20. One that forges a state clears them."""
    committed: list[Operations] = []
    lock = threading.RLock()
    for kind in (SqliteMetadata, EtcdMetadata):

        def watched(
            store: MetadataStore,
            compares: Sequence[Compare],
            operations: Sequence[Operation],
            plain: Callable[..., Outcome] = kind.transaction,
        ) -> Outcome:
            with lock:
                outcome = plain(store, compares, operations)
                if outcome.succeeded:
                    committed.append(tuple(operations))
                return outcome

        monkeypatch.setattr(kind, "transaction", watched)
    yield committed
    flaws = [str(flaw) for keys in _shards_in(committed) for flaw in _flaws(keys, committed)]
    ledger.count("transactions watched (I19, I20)", n=len(committed))
    ledger.violation("transactions watched (I19, I20)", n=len(flaws))
    assert flaws == []


def _flaws(keys: ShardKeys, committed: list[Operations]) -> list[Violation]:
    commits = commits_of(keys, committed)
    return [*one_epoch_at_a_time(commits), *nothing_of_older_epochs(commits)]


def _shards_in(committed: list[Operations]) -> list[ShardKeys]:
    keys = {op.key for operations in committed for op in operations if isinstance(op, Put)}
    found = (re.fullmatch(r"(.*)/storage/topics/([^/]+)/([^/]+)/(\d+)/state", key) for key in sorted(keys))
    return [ShardKeys(match[2], match[3], int(match[4]), match[1]) for match in found if match]
