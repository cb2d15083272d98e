"""Which store the settings name. The one place that knows all of them."""

from __future__ import annotations

from forebay.clock import Clock
from forebay.disk import Disk
from forebay.metadata.seam import MetadataStore
from forebay.metadata.sqlite import SqliteMetadata
from forebay.settings import MetadataSettings


def open_metadata(
    settings: MetadataSettings, path: str, *, disk: Disk, clock: Clock, read_only: bool = False
) -> MetadataStore:
    """The metadata store of a data directory: etcd, or else the SQLite file `path`."""
    if settings.backend == "etcd":
        from forebay.metadata.etcd import EtcdMetadata  # noqa: PLC0415 - loaded only where it is used

        return EtcdMetadata.open(settings, clock=clock)
    return SqliteMetadata(path, disk=disk, clock=clock, busy_timeout_ms=settings.busy_timeout_ms, read_only=read_only)
