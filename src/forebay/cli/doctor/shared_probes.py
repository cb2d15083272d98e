"""What `forebay doctor` asks of places that are shared: the metadata store and the store of history."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

from forebay.blobs import BlobStore, DirectoryStore, open_store
from forebay.cli.doctor.answers import Answer, AnswerKind
from forebay.cli.invocation import Invocation
from forebay.clock import SystemClock
from forebay.directory import METADATA
from forebay.errors import ForebayError
from forebay.metadata.open_store import open_metadata
from forebay.places import PROBE_SECONDS_MAX


class _Place(NamedTuple):
    """A store as the settings name it."""

    setting: str
    root: str
    is_directory: bool


def examine_metadata(run: Invocation) -> Iterator[Answer]:
    """Whether the metadata store answers, if it is one that others share. Nothing is made."""
    metadata = run.settings.metadata
    shared = ", ".join(metadata.endpoints) if metadata.is_served else metadata.path
    if shared is None:
        return
    if metadata.is_file and not os.path.exists(shared):
        yield Answer("metadata", AnswerKind.NOTE, f"{shared} does not exist yet: the first use makes it")
        return
    clock = SystemClock()
    path = metadata.path or os.path.join(run.directory, METADATA)
    try:
        begun = clock.monotonic()
        with contextlib.closing(open_metadata(metadata, path, disk=run.disk, clock=clock, read_only=True)) as store:
            revision = store.revision()
        took = (clock.monotonic() - begun) * 1000
    except ForebayError as error:
        yield Answer("metadata", AnswerKind.PROBLEM, f"{shared} does not answer: {error}")
    else:
        yield Answer(
            "metadata", AnswerKind.OK, f"{metadata.backend} at {shared}: revision {revision}, in {took:.0f} ms"
        )


def examine_store(run: Invocation) -> Iterator[Answer]:
    """Try what history rests on: an object is created once and only once; on a file system links, renames, locks."""
    place = _place(run)
    if place is None:
        return
    if place.is_directory and not os.path.isdir(place.root):
        text = f"{place.root} ({place.setting}) does not exist: mount it, or let the first use make it"
        yield Answer("store", AnswerKind.WARNING, text)
        return
    clock = SystemClock()
    begun = clock.monotonic()
    try:
        with contextlib.closing(_store(run, place)) as store:
            able = store.probe(seconds_max=PROBE_SECONDS_MAX)
    except ForebayError as error:
        yield Answer("store", AnswerKind.PROBLEM, str(error))
        return
    for note in able.notes:
        yield Answer("store", AnswerKind.WARNING, f"{able.store}: {note}")
    tried = "creating twice was refused" + (", links, renames and syncs work" if place.is_directory else "")
    yield Answer("store", AnswerKind.OK, f"{able.store}: {tried}, in {(clock.monotonic() - begun) * 1000:.0f} ms")


def _place(run: Invocation) -> _Place | None:
    settings = run.settings
    if settings.is_shared:
        assert settings.store.root is not None
        return _Place("store.root", settings.store.root, settings.store.is_directory)
    handoff = settings.storage.handoff_root
    return None if handoff is None else _Place("storage.handoff_root", handoff, is_directory=True)


def _store(run: Invocation, place: _Place) -> BlobStore:
    clock = SystemClock()
    if place.is_directory:
        return DirectoryStore(place.root, disk=run.disk, clock=clock).open()
    return open_store(run.settings.store, disk=run.disk, clock=clock)
