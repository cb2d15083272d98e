"""Where history lies: the one room that knows what the name of a store in a descriptor means here.

`local:<directory id>` stands for the shard directories of one data directory, anything else for the store
of the settings. Nothing is opened before it is asked for.
"""

from __future__ import annotations

import logging

from forebay.blobs import BlobStore
from forebay.catalog.shard import Manifest
from forebay.disk import Disk
from forebay.errors import Unavailable
from forebay.format.descriptor import SegmentDescriptor
from forebay.history import Objects
from forebay.manifests import ManifestReader
from forebay.sealed import ByteSource, SealedSegment
from forebay.wal.files import SealedFile

logger = logging.getLogger(__name__)

LOCAL = "local:"


def local_name(holder: str) -> str:
    """What descriptors call the files of a data directory."""
    return f"{LOCAL}{holder}"


def is_local(descriptor: SegmentDescriptor) -> bool:
    """Whether the segment lies in some data directory, where no other can be relied on to read it."""
    return descriptor.store.startswith(LOCAL)


class Places:
    """Opens the segments of history. One per process; safe for concurrent use."""

    def __init__(self, *, disk: Disk, shards: str, holder: str, store: BlobStore | None, store_name: str) -> None:
        self.store = store
        self.store_name = store_name
        self._disk = disk
        self._shards = shards
        self._local = local_name(holder)
        self._objects = Objects(store) if store is not None else None
        self._probed = store is None
        self.manifest: Manifest | None = ManifestReader(store) if store is not None else None
        """Opens manifests of the catalog."""

    def segment(self, descriptor: SegmentDescriptor) -> SealedSegment:
        """The segment that a descriptor names."""
        if descriptor.store == self._local:
            return self.file(descriptor)
        return self._known(descriptor).segment(descriptor)

    def file(self, descriptor: SegmentDescriptor) -> SealedFile:
        """The local file that a descriptor names."""
        if descriptor.store != self._local:
            raise Unavailable(
                f"offsets [{descriptor.start}, {descriptor.end}) lie in {descriptor.store}, another data directory: "
                "seal the topic there first"
            )
        return SealedFile(self._disk, self._path(descriptor), descriptor.start, descriptor.end)

    def source(self, descriptor: SegmentDescriptor) -> ByteSource:
        """Its bytes."""
        if descriptor.store == self._local:
            return self._disk.open(self._path(descriptor))
        return self._known(descriptor).source(descriptor)

    def probe(self) -> None:
        """See once, before anything is exported, that the store keeps its promises; `Unsupported` if it does not."""
        if not self._probed:
            assert self.store is not None
            for note in self.store.probe().notes:
                logger.warning("%s: %s", self.store.name, note)
            self._probed = True

    def close(self) -> None:
        """Give back what is held, the store too."""
        if self._objects is not None:
            self._objects.close()
        if self.store is not None:
            self.store.close()

    def _path(self, descriptor: SegmentDescriptor) -> str:
        return f"{self._shards}/{descriptor.object_key}"

    def _known(self, descriptor: SegmentDescriptor) -> Objects:
        if self._objects is None or descriptor.store != self.store_name:
            here = self.store_name if self._objects is not None else "none"
            raise Unavailable(
                f"offsets [{descriptor.start}, {descriptor.end}) lie in {descriptor.store} as {descriptor.object_key}, "
                f"and the store of these settings is {here}: open it with the settings that it was written with"
            )
        return self._objects
