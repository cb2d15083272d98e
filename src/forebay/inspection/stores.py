"""Where catalogued bytes lie: from the name that a descriptor gives to the store that has the object."""

from __future__ import annotations

from typing import Protocol

from forebay.blobs import BlobStore, DirectoryStore, open_store
from forebay.clock import Clock
from forebay.disk import Disk
from forebay.errors import ForebayError, Unavailable
from forebay.settings import Settings
from forebay.shard.context import LOADS, LOCAL, loads_name, local_name
from forebay.storage.directory import LOADS as LOADS_NAME


class Home(Protocol):
    """Which data directory it is, and where it lies."""

    @property
    def path(self) -> str: ...

    @property
    def id(self) -> str: ...


class Stores:
    """The stores that descriptors name, each opened when it is first asked for. Creates none."""

    def __init__(self, directory: Home, settings: Settings, *, disk: Disk, clock: Clock) -> None:
        self._directory = directory
        self._here = local_name(directory.id)
        self._settings = settings
        self._disk = disk
        self.clock = clock
        self._opened: dict[str, BlobStore | ForebayError] = {}

    def is_here(self, name: str) -> bool:
        """Whether what lies in this store lies in the data directory itself."""
        return name == self._here

    def is_elsewhere(self, name: str) -> bool:
        """Whether it lies in another data directory, which only its owner can look into."""
        return name.startswith((LOCAL, LOADS)) and name not in (self._here, loads_name(self._directory.id))

    def holds_elsewhere(self, holder: str) -> bool:
        """Whether this holder of a log is another data directory."""
        return holder != self._directory.id

    def of(self, name: str) -> BlobStore:
        """The store. Raises the same each time if it cannot be opened: no caller waits for it twice."""
        if name not in self._opened:
            try:
                self._opened[name] = self._open(name)
            except ForebayError as error:
                self._opened[name] = error
        found = self._opened[name]
        if isinstance(found, ForebayError):
            raise found
        return found

    def give_up(self, name: str, error: ForebayError) -> None:
        """The store does not answer: every caller gets that error from now on."""
        self._opened[name] = error

    def close(self) -> None:
        """Give back what is held."""
        for store in self._opened.values():
            if not isinstance(store, ForebayError):
                store.close()

    def _open(self, name: str) -> BlobStore:
        settings = self._settings
        if name == loads_name(self._directory.id):
            return DirectoryStore(f"{self._directory.path}/{LOADS_NAME}", disk=self._disk, clock=self.clock)
        known = settings.store.name if settings.is_shared else "directory"
        root = settings.store.root if settings.is_shared else settings.storage.handoff_root
        if name != known or not root:
            raise Unavailable(f"{name} is not the store of these settings: give those with which it was written")
        if name != "directory":
            return open_store(settings.store, disk=self._disk, clock=self.clock)
        # Not opened, which would make what is missing.
        store = DirectoryStore(root, disk=self._disk, clock=self.clock)
        if not store.is_begun():
            raise Unavailable(f"{root} is no store: mount it, or correct the settings that name it")
        return store
