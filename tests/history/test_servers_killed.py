"""Real servers that die under an export or a reader: that is named, appends go on, and later everything is there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from forebay.appends.ticket import Ticket
from forebay.blobs import BlobStore, Stat, open_store
from forebay.catalog import ShardCatalog
from forebay.clock import SystemClock
from forebay.disk import SystemDisk
from forebay.errors import ForebayError, Indeterminate, Unavailable
from forebay.format.columns.rows import Columns, encode_columns
from forebay.format.metadata.descriptor import ShardState
from forebay.format.metadata.value import encode_value
from forebay.history import History, Objects
from forebay.metadata import Compare, Operation, Outcome, Put
from forebay.metadata.etcd import EtcdMetadata
from forebay.records import Bytes
from forebay.settings import MIB, MetadataSettings
from forebay.testing.checks.catalogs import check_history, from_blobs, keys_of
from forebay.testing.checks.invariants import Violation
from forebay.testing.checks.moves import RecordingMetadata
from tests.ledger import Ledger
from tests.support import servers
from tests.support.environments.shard import KEYS, TOPIC, ShardEnvironment
from tests.support.etcd import Cluster, running
from tests.support.ports import free_ports
from tests.support.servers import Server, s3_settings

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("history-servers")]

VALUE_BYTES: Final = MIB
KILL_AFTER_S: Final = (0.0, 0.001, 0.003, 0.01)


class Bucket:
    """An S3 server that can be ended at once and started again in its place."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ports = free_ports(8)
        self._running = contextlib.ExitStack()
        self.endpoint = ""
        self.start()

    def start(self) -> None:
        server: Server = self._running.enter_context(servers.seaweed(self._directory, ports=self._ports))
        self.endpoint = server.endpoint

    def kill(self) -> None:
        self._running.close()

    def store(self, folder: str) -> BlobStore:
        return open_store(s3_settings(self.endpoint, folder, retries_max=1), disk=SystemDisk())


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    bucket = Bucket(tmp_path_factory.mktemp("seaweed"))
    yield bucket
    bucket.kill()


class Large(ShardEnvironment):
    """A shard of large records, so that its objects go up in parts and come down in several ranges."""

    def append(self, count: int) -> None:
        for _ in range(count):
            offset = self.shard.offsets().next
            value = b"%d " % offset + bytes([offset % 251]) * VALUE_BYTES
            columns = encode_columns(Columns(values=[value], timestamps=[1_000 + offset]))
            self.shard.acknowledge(self.shard.stage_many(columns, None, Ticket()))
            self.shard.commit()
            self.appended[offset] = value

    def flaws(self, catalog: ShardCatalog | None = None) -> list[Violation]:
        """What does not hold of the history as it lies there."""
        catalog = catalog or self.catalog()
        pieces, frontier = catalog.descriptors(), catalog.frontier().next
        return check_history(self.acked(), pieces, frontier, from_blobs(self.store), self.local_files())


def large(store: BlobStore, files: int, records: int) -> Large:
    environment = Large(blobs=store)
    for _ in range(files):
        environment.append(records)
        environment.seal()
    return environment


def pages(history: History, offset: int) -> Iterator[tuple[int, bytes | None]]:
    """Records from an offset on; holes are none of theirs and fail."""
    while (page := history.read(offset, VALUE_BYTES)).next > offset:
        assert page.events == []
        for batch in page.batches:
            yield from enumerate(batch.values(), start=batch.base)
        offset = page.next


@contextlib.contextmanager
def history_of(environment: ShardEnvironment, catalog: ShardCatalog | None = None) -> Iterator[History]:
    objects = Objects(environment.store, read_ahead_bytes=4 * MIB)
    try:
        yield History(catalog or environment.catalog(), objects.segment)
    finally:
        objects.close()


def everything(environment: ShardEnvironment, catalog: ShardCatalog | None = None) -> dict[int, bytes | None]:
    with history_of(environment, catalog) as history:
        return dict(pages(history, 0))


@pytest.mark.parametrize("piece", [7, 11], ids=["in the middle", "at the last piece"])
def test_a_server_killed_in_mid_upload_costs_an_export_and_nothing_else(
    piece: int, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, ledger: Ledger
) -> None:
    environment = large(bucket.store(f"upload-{piece}"), files=2, records=12)
    upload, armed = environment.store.upload, [piece + 12]

    def breaking(key: str, source: Iterable[Bytes]) -> Stat:
        def pieces() -> Iterator[Bytes]:
            for each in source:
                if armed and not armed[0]:
                    armed.clear()
                    bucket.kill()
                elif armed:
                    armed[0] -= 1
                yield each

        return upload(key, pieces())

    monkeypatch.setattr(environment.store, "upload", breaking)
    exporter = environment.exporter()

    with pytest.raises((Unavailable, Indeterminate), match=r"s3://.*\.seg"):
        exporter.export(environment.shard.wal.files)
    environment.append(3)
    environment.seal()
    assert not armed
    assert environment.catalog().frontier().next == 12
    bucket.start()
    assert environment.flaws() == []

    exporter.export(environment.shard.wal.files)

    assert environment.flaws() == []
    assert everything(environment) == environment.appended and len(environment.appended) == 27
    assert environment.keys() == keys_of(environment.catalog().descriptors())
    ledger.count("servers killed", server="S3", moment="upload")


def test_a_reader_whose_server_is_killed_goes_on_at_the_same_record(bucket: Bucket, ledger: Ledger) -> None:
    environment = large(bucket.store("read"), files=2, records=12)
    environment.export()
    seen: list[tuple[int, bytes | None]] = []

    with history_of(environment) as history:
        reader = pages(history, 0)
        seen += [next(reader) for _ in range(4)]
        bucket.kill()
        with pytest.raises(Unavailable, match=r"s3://.*cannot read .*\.seg"):
            seen.extend(reader)
        stood_at = len(seen)
        with pytest.raises(Unavailable):
            next(pages(history, stood_at))
        bucket.start()
        seen.extend(pages(history, stood_at))

    assert 4 <= stood_at < 24
    assert seen == list(environment.appended.items())
    ledger.count("servers killed", server="S3", moment="read")


def test_while_the_store_is_away_appends_go_on_and_later_everything_is_exported(bucket: Bucket, ledger: Ledger) -> None:
    environment = large(bucket.store("away"), files=1, records=2)
    exporter = environment.exporter()
    files = environment.shard.wal.files
    exporter.export(files)

    bucket.kill()
    for attempt in range(1, 4):
        environment.append(2)
        environment.seal()
        with pytest.raises(Unavailable, match="s3://"):
            exporter.export(files)
        assert exporter.lag(files).files == attempt
    assert environment.catalog().frontier().next == 2
    bucket.start()

    assert exporter.export(files) == 3
    assert exporter.lag(files).files == 0
    assert environment.flaws() == []
    assert everything(environment) == environment.appended and len(environment.appended) == 8
    assert environment.keys() == keys_of(environment.catalog().descriptors())
    ledger.count("servers killed", server="S3", moment="between")


class Deadly(RecordingMetadata):
    """etcd, whose leader is killed so many seconds after a transaction is sent, as long as there are any left."""

    def __init__(self, inner: EtcdMetadata, cluster: Cluster) -> None:
        super().__init__(inner)
        self._cluster = cluster
        self.delays: list[float] = []

    def transaction(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        if not self.delays:
            return super().transaction(compares, operations)
        leader = self._cluster.members[self._cluster.leader()]
        timer = threading.Timer(self.delays.pop(), leader.kill)
        timer.start()
        try:
            return super().transaction(compares, operations)
        finally:
            timer.join()


@contextlib.contextmanager
def etcd_of(cluster: Cluster) -> Iterator[EtcdMetadata]:
    settings = MetadataSettings(backend="etcd", endpoints=cluster.endpoints, request_timeout_ms=30_000)
    metadata = EtcdMetadata.open(settings, clock=SystemClock())
    try:
        yield metadata
    finally:
        with contextlib.suppress(ForebayError):
            metadata.close()


def test_a_leader_killed_in_mid_transaction_leaves_the_catalog_whole(tmp_path: Path, ledger: Ledger) -> None:
    environment = ShardEnvironment()
    with running(tmp_path, 3) as cluster, etcd_of(cluster) as etcd:
        etcd.transaction([], [Put(KEYS.state, encode_value(ShardState(incarnation=TOPIC, epoch=1)))])
        deadly = Deadly(etcd, cluster)
        exporter = environment.exporter(catalog=environment.catalog(deadly))
        for delay in KILL_AFTER_S:
            environment.append(10)
            environment.seal()
            deadly.delays.append(delay)
            with contextlib.suppress(Unavailable, Indeterminate):
                exporter.export(environment.shard.wal.files)
            assert deadly.delays == []
            cluster.start_all()
            exporter.export(environment.shard.wal.files)
            ledger.count("servers killed", server="etcd", moment="transaction")

        catalog = environment.catalog(etcd)
        pieces = catalog.descriptors()
        flaws = check_history(
            environment.acked(),
            pieces,
            catalog.frontier().next,
            from_blobs(environment.store),
            environment.local_files(),
        )
        assert flaws == []
        assert [piece.end for piece in pieces] == [10, 20, 30, 40]
        assert everything(environment, catalog) == environment.appended
