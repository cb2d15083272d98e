"""From settings to a store. Each process makes its own: no store is carried through a fork or a pickle."""

from __future__ import annotations

from forebay.blobs.directory import DirectoryStore
from forebay.blobs.seam import BlobStore
from forebay.clock import Clock, SystemClock
from forebay.disk import Disk
from forebay.errors import Invalid, Unsupported
from forebay.settings import StoreSettings


def open_store(settings: StoreSettings, *, disk: Disk, clock: Clock | None = None) -> BlobStore:
    """The store that `settings` describe. It has been asked nothing yet; `probe` shows whether it can be used."""
    clock = clock or SystemClock()
    if settings.backend == "directory":
        if not settings.root:
            raise Invalid('store.backend is "directory" without store.root: name the directory')
        return DirectoryStore(settings.root, disk=disk, clock=clock).open()
    try:
        # Here and not above: the library is an extra, and a directory needs none of it.
        from forebay.blobs.objects.store import open_objects  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        raise Unsupported(
            f'store.backend is "{settings.backend}", which needs obstore: pip install "forebay[object-store]"'
        ) from error
    return open_objects(settings, clock=clock)
