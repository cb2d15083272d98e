"""Calls that concern some topics and hang, at the files of their shards, at their objects or at their metadata."""

from __future__ import annotations

import threading
from typing import Any, Final

import pytest

from forebay.blobs.directory import DirectoryStore
from forebay.catalog.metered import MeteredMetadata
from forebay.disk.descriptors import SystemFile
from tests.support.waiting import PATIENCE

PLACES: Final[dict[str, tuple[type, tuple[str, ...]]]] = {
    "files": (SystemFile, ("write_at", "sync", "read_at")),
    "store": (DirectoryStore, ("put_if_absent", "upload", "get_range", "get_ranges", "read", "list", "stat", "delete")),
    "metadata": (MeteredMetadata, ("get", "range", "transaction")),
}


class HungPlace:
    """Calls at one place that concern one of some topics hang from `hang` on until `answers` is set."""

    def __init__(self, patched: pytest.MonkeyPatch, place: str) -> None:
        self.name = place
        self.answers = threading.Event()
        self.held: set[str] = set()
        """The topics, by id, at which a call hangs or has hung."""
        self._hung: dict[str, str] = {}
        where, names = PLACES[place]
        for name in names:
            patched.setattr(where, name, self._hanging(getattr(where, name)))

    def hang(self, *topics: tuple[str, str]) -> None:
        """From now on, for topics of these ids and names."""
        self._hung = dict(topics)

    def _hanging(self, whole: Any) -> Any:
        def call(place: Any, *given: Any, **named: Any) -> Any:
            if self._hung and not self.answers.is_set():
                concerned = f"{getattr(place, 'path', '')} {given} {named}"
                for topic_id, name in self._hung.items():
                    if f"{topic_id}_" in concerned or f"/{name}/" in concerned or f"/{name}'" in concerned:
                        self.held.add(topic_id)
                        assert self.answers.wait(PATIENCE)
            return whole(place, *given, **named)

        return call
