"""Where sealed segments are kept: a directory, or a bucket of an object store, behind one Protocol.

`open_store(settings.store, disk=…)` makes one from settings, in each process again. Knows keys and bytes; knows
nothing of logs, topics or the catalog.
"""

from forebay.blobs.directory import DirectoryStore
from forebay.blobs.opening import open_store
from forebay.blobs.seam import BlobChanged, BlobMissing, BlobStore, Capabilities, Denied, Put, Stat

__all__ = [
    "BlobChanged",
    "BlobMissing",
    "BlobStore",
    "Capabilities",
    "Denied",
    "DirectoryStore",
    "Put",
    "Stat",
    "open_store",
]
