"""Data directories that share a metadata store, in each mode of storage, and what tests ask of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from forebay.catalog import ShardCatalog, ShardKeys
from forebay.format.metadata.descriptor import SegmentDescriptor, ShardState
from forebay.format.metadata.value import decode_value
from forebay.metadata import MetadataStore
from forebay.records import Record
from forebay.settings import (
    MetadataSettings,
    RuntimeSettings,
    Settings,
    StorageSettings,
    StoreSettings,
    WalSettings,
)
from forebay.shard import SegmentShard
from forebay.storage import Storage, Topic
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from tests.support.servers import s3_settings

TOPIC: Final = "shop/orders"
RESERVED: Final = 64
WAL: Final = WalSettings(
    sync_interval_ms=20,
    mark_interval_ms=20,
    flush_interval_ms=5,
    free_bytes_min=0,
    reserve_records_min=RESERVED,
)
QUICK_RUN: Final = RuntimeSettings(maintenance_interval_ms=5)


@dataclass(frozen=True)
class Environment:
    """Some data directories below one root. What they share follows from the settings."""

    root: Path
    settings: Settings

    def open(self, name: str, *, read_only: bool = False, **groups: object) -> Storage:
        """The data directory of this name; `groups` replace whole groups of the settings."""
        return Storage.open(self.root / name, self.with_groups(**groups).settings, read_only=read_only)

    def with_groups(self, **groups: object) -> Environment:
        """The same directories under other settings."""
        return Environment(self.root, msgspec.structs.replace(self.settings, **groups))

    def files(self, name: str) -> list[str]:
        """The files of all shards in a directory, without those set aside."""
        shards = self.root / name / "shards"
        while True:
            with contextlib.suppress(FileNotFoundError):  # the background has removed a directory just then
                return sorted(str(path.relative_to(shards)) for path in shards.glob("*/*.seg"))

    def aside(self, name: str) -> list[Path]:
        """What was set aside there."""
        return sorted((self.root / name / "shards").glob("*/aside/*"))


def shared_fs(root: Path, **groups: object) -> Environment:
    """Directories on one machine, with a common SQLite file and a directory for history."""
    return _environment(
        root, storage=StorageSettings(mode="shared_fs"), store=StoreSettings(root=f"{root}/store"), **groups
    )


def local(root: Path, *, handoff: bool = True) -> Environment:
    """Directories that keep their history where it was written, and meet in a directory when a topic moves."""
    return _environment(root, storage=StorageSettings(handoff_root=f"{root}/handoff" if handoff else None))


def object_store(root: Path, endpoint: str, folder: str, **groups: object) -> Environment:
    """History in a bucket of a real S3 server."""
    store = s3_settings(endpoint, folder, retries_max=1, request_timeout_ms=5_000)
    return _environment(root, storage=StorageSettings(mode="object_store"), store=store, **groups)


def in_etcd(
    environment: Environment,
    endpoints: tuple[str, ...],
    prefix: str = "/forebay",
    *,
    ttl_s: int = 60,
    request_timeout_ms: int = 10_000,
) -> Environment:
    """The same with its metadata in etcd. No lease ends because a busy machine renews it late, unless it is short."""
    metadata = MetadataSettings(
        backend="etcd",
        endpoints=endpoints,
        prefix=prefix,
        lease_ttl_s=ttl_s,
        lease_margin_s=1,
        request_timeout_ms=request_timeout_ms,
    )
    return environment.with_groups(metadata=metadata)


def _environment(root: Path, **groups: object) -> Environment:
    settled = {"wal": WAL, "runtime": QUICK_RUN, "metadata": MetadataSettings(path=f"{root}/shared.sqlite")}
    return Environment(root, Settings(**{**settled, **groups}))  # type: ignore[arg-type]


def metadata_of(log: Storage) -> MetadataStore:
    """What the log shares with others."""
    return inside(log).metadata


def id_of(log: Storage) -> str:
    """The id of the data directory."""
    assert log.directory_id is not None
    return log.directory_id


def shard_of(topic: Topic, partition: int = 0) -> SegmentShard:
    """The open shard below a partition."""
    return inside(topic).segment(partition)


def keys_of(log: Storage, topic: Topic, partition: int = 0) -> ShardKeys:
    """Where the facts of a partition stand."""
    return ShardKeys(topic.spec.namespace, topic.spec.topic, partition, log.settings.metadata.prefix)


def state_of(log: Storage, topic: Topic, partition: int = 0) -> ShardState:
    """The recorded state of a partition."""
    entry = metadata_of(log).get(keys_of(log, topic, partition).state)
    assert entry is not None
    return decode_value(entry.value, ShardState)[0]


def pieces_of(log: Storage, topic: Topic, partition: int = 0) -> list[SegmentDescriptor]:
    """What is catalogued of a partition."""
    return ShardCatalog(
        metadata_of(log), keys_of(log, topic, partition), topic.spec.topic_id, clock=ManualClock()
    ).descriptors()


def clear_up(log: Storage) -> None:
    """Let the background do now what is due now and then."""
    inside(log).clear_moved()


def told(records: Iterable[Record]) -> list[tuple[int, bytes | None]]:
    """Offsets with values."""
    return [(record.offset, record.value) for record in records]


def numbers(first: int, stop: int) -> list[tuple[int, bytes]]:
    """Records whose value is their offset."""
    return [(offset, b"%d" % offset) for offset in range(first, stop)]
