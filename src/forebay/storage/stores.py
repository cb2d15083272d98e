"""Opens the store of history that the settings name, for a log and for Spark."""

from __future__ import annotations

import logging

from forebay.blobs import BlobStore, Denied, DirectoryStore, open_store
from forebay.catalog.shard import names_store
from forebay.clock import Clock
from forebay.disk import Disk
from forebay.errors import Unavailable
from forebay.metadata import MetadataStore
from forebay.meter import LogMeter
from forebay.settings import Settings
from forebay.shard.context import Places
from forebay.storage.directory import LogDirectory, NoDirectory

logger = logging.getLogger(__name__)

PROBE_SECONDS_MAX = 5.0
"""How long opening waits for each answer of the store of history. Before the first export it is tried with patience."""


def open_places(
    directory: LogDirectory | NoDirectory,
    settings: Settings,
    disk: Disk,
    clock: Clock,
    meter: LogMeter,
    *,
    probed_for: MetadataStore | None = None,
) -> Places:
    """Where history lies. With `probed_for`, which has the catalog, the store is tried, and `Denied` comes out."""
    store, name = history_store(settings, disk, clock)
    places = Places(
        disk=disk,
        clock=clock,
        directory=directory,
        holder=directory.id,
        store=store,
        store_name=name,
        read_ahead_bytes=settings.store.read_ahead_bytes,
        meter=meter,
        is_named=lambda: probed_for is not None and names_store(probed_for, name, prefix=settings.metadata.prefix),
    )
    if probed_for is not None:
        try:
            places.probe(seconds_max=PROBE_SECONDS_MAX)
        except Unavailable as error:
            if isinstance(error, Denied):
                places.close()
                raise
            logger.warning("history is not exported for now, appends go on: %s", error)
        except BaseException:
            places.close()
            raise
    return places


def history_store(settings: Settings, disk: Disk, clock: Clock) -> tuple[BlobStore | None, str]:
    """The store of history and what the catalog calls it. It is asked nothing, and no directory is made yet."""
    if settings.is_shared and not settings.store.is_directory:
        return open_store(settings.store, disk=disk, clock=clock), settings.store.name
    root = settings.store.root if settings.is_shared else settings.storage.handoff_root
    return (None, "") if root is None else (DirectoryStore(root, disk=disk, clock=clock), "directory")
