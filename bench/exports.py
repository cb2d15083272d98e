"""Logs whose files are all sealed, the stores they are exported to, and the history that they become there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import forebay
from bench import payload
from bench.plan import Plan
from forebay.blobs import BlobStore, open_store
from forebay.catalog import ShardCatalog, ShardKeys
from forebay.clock import SystemClock
from forebay.disk import SystemDisk
from forebay.export import Exporter, Origin
from forebay.format.metadata.descriptor import ShardState
from forebay.format.metadata.value import encode_value
from forebay.history import History, Objects
from forebay.metadata import Put, SqliteMetadata
from forebay.settings import MIB, StoreSettings
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from tests.support import servers

FILE_BYTES = 64 * MIB
KEYS = ShardKeys("bench", "t", 0, "/forebay")
VOLUMES = 250


def sealed_log(plan: Plan, values: Sequence[bytes], *, times: int = 1, file_bytes: int = FILE_BYTES) -> Path:
    """A log that holds the values, so many times, in sealed files of about this size."""

    def make(path: Path) -> None:
        with forebay.open(str(path / "data"), {"wal": {"rotate_bytes_max": file_bytes}}) as log:
            topic = log.create_topic("bench/t", durability="disk")
            for _ in range(times):
                for batch in payload.batches(values):
                    topic.append_many(batch)
            topic.rotate()

    name = f"{times} × {len(values)} of {len(values[0])} B in files of {file_bytes}"
    return plan.shared(name, make) / "data"


@contextlib.contextmanager
def s3_server(plan: Plan) -> Iterator[str | None]:
    """The endpoint of an S3 server on loopback; `None` if it is not wanted or not installed."""
    if not plan.servers or not servers.is_installed("weed"):
        yield None
        return
    with servers.seaweed(plan.shared("s3 server", lambda path: None), volumes_max=VOLUMES) as server:
        yield server.endpoint


def settings_of(kind: str, place: str, folder: str = "bench") -> StoreSettings:
    """A store as it comes: in a folder of a directory, or of the bucket of the S3 server at an endpoint."""
    if kind == "directory":
        return StoreSettings(root=f"{place}/{folder}")
    usual = StoreSettings()
    return servers.s3_settings(place, folder, part_bytes=usual.part_bytes, retries_max=usual.retries_max)


@contextlib.contextmanager
def opened_store(kind: str, place: str) -> Iterator[BlobStore]:
    """The store, closed at the end."""
    store = open_store(settings_of(kind, place), disk=SystemDisk())
    try:
        yield store
    finally:
        store.close()


@contextlib.contextmanager
def opened_catalog(path: Path, topic_id: str) -> Iterator[ShardCatalog]:
    """A catalog in a metadata store of its own in a directory, owned in epoch 1."""
    metadata = SqliteMetadata(str(path / "metadata.sqlite"), disk=SystemDisk(), clock=SystemClock())
    try:
        state = ShardState(incarnation=topic_id, epoch=1, holder="bench", holder_since=1)
        metadata.transaction([], [Put(KEYS.state, encode_value(state))])
        yield ShardCatalog(metadata, KEYS, topic_id, clock=ManualClock())
    finally:
        metadata.close()


@contextlib.contextmanager
def opened_topic(log_path: Path) -> Iterator[Any]:
    """The topic of a log, recovered."""
    with forebay.open(str(log_path)) as log:
        topic = log.topic("bench/t")
        topic.offsets()
        yield topic


def export(topic: Any, catalog: ShardCatalog, store: BlobStore) -> Exporter:
    """Make all sealed files of the topic history; the exporter says how much that was."""
    origin = Origin(topic.spec.topic_id, 0, 1, "bench", store.name)
    exporter = Exporter(origin, catalog, store, disk=SystemDisk(), clock=SystemClock())
    exporter.export(inside(topic).wal().files)
    return exporter


def plain_upload(store: BlobStore, log: Path) -> tuple[float, int]:
    """The files of a log read and sent, neither checked nor catalogued; the seconds it took, and how many bytes."""
    paths = sorted(log.glob("shards/*/*.seg"))
    begun = time.perf_counter()
    size = sum(store.upload(f"plain/{path.name}", _chunks(path)).size for path in paths)
    elapsed = time.perf_counter() - begun
    payload.check_count("plain upload", sum(path.stat().st_size for path in paths), size)
    for path in paths:
        store.delete(f"plain/{path.name}")
    return elapsed, size


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(MIB):
            yield chunk


@contextlib.contextmanager
def opened_history(catalog: ShardCatalog, store: BlobStore) -> Iterator[History]:
    """A reader of history that knows nothing yet."""
    objects = Objects(store)
    history = History(catalog, objects.segment)
    try:
        yield history
    finally:
        history.close()
        objects.close()


def batches_of(history: History, offset: int = 0) -> Iterator[Any]:
    """Everything from an offset on, as batches that have been checked."""
    while (page := history.read(offset)).next > offset:
        if page.events:
            raise payload.Wrong(f"history has holes: {page.events}")
        yield from page.batches
        offset = page.next


def values_of(history: History) -> Iterator[bytes]:
    """The values of all records."""
    for batch in batches_of(history):
        for value in batch.values():
            yield value or b""
