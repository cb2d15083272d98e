"""Where an object of history lies, as an address that engines other than Forebay understand.

Knows what the names of stores in descriptors mean for a location; opens nothing.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Final

from forebay.format.descriptor import SegmentDescriptor
from forebay.spark.opening import Opened

FILE: Final = "file://"
_SCHEMES: Final = {"s3": "s3", "gcs": "gs", "azure": "abfs"}


def address_of(found: Opened, descriptor: SegmentDescriptor) -> str | None:
    """The address of the object; `None` if it lies where only its owner finds it."""
    settings = found.settings
    if found.directory is not None and descriptor.store == found.places.loads_name:
        return _file(found.directory.loads, descriptor.object_key)
    if descriptor.store != found.places.store_name or found.places.store is None:
        return None
    root = settings.store.root if settings.is_shared else settings.storage.handoff_root
    assert root is not None, "a store has a root"
    scheme = _SCHEMES.get(settings.store.backend)
    return _file(root, descriptor.object_key) if scheme is None else f"{scheme}://{root}/{descriptor.object_key}"


def _file(directory: str, key: str) -> str:
    return PurePosixPath(directory, key).as_uri()
