"""Removes the local files of a shard that another data directory has now, or that was deleted.

Every step may be repeated and interrupted. A missing record is never a reason to remove a file: only a recorded state
that names the shard's new holder, with all of the shard in history, or a recorded deletion is one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Protocol

from forebay.catalog import ShardCatalog
from forebay.disk import Disk
from forebay.errors import UnknownTopic
from forebay.format.files.segment import parse_segment_name
from forebay.places import is_private
from forebay.settings import WalSettings
from forebay.shard import SegmentShard
from forebay.shard.history import compacted_into
from forebay.topics import ShardRef
from forebay.wal.recovery.resume import ASIDE, set_aside
from forebay.wal.recovery.survey import Survey, survey

logger = logging.getLogger(__name__)


class LocalShards(Protocol):
    """What keeps shards in files of this directory."""

    @property
    def directory(self) -> str:
        """Where each shard has a directory of its own."""

    def shards(self) -> Sequence[SegmentShard]:
        """The shards that this process owns and has open."""

    def clear_moved(self, ref: ShardRef, *, wait: bool = True) -> None:
        """Remove the files of a shard that another directory has now; see `clear_away`."""


def clearing_of_moved(
    local: LocalShards, disk: Disk, refs: Callable[[], Sequence[ShardRef]], deleted: Collection[str], *, wait: bool
) -> Iterator[Callable[[], None]]:
    """What is to be done for the files of shards that moved or were deleted, one piece of work at a time.

    `refs` gives every shard that a topic defines, and is asked only if there are files; `deleted` are the ids of shards
    whose deletion is recorded. One that is still open here stops appending at once. The caller does each piece as it
    comes: one that fails keeps no other from being done. Without `wait`, a shard that another thread opens or gives up
    is left for the next time. Called by a thread that holds no lock.
    """
    for shard in local.shards():
        if shard.ref.id in deleted:
            shard.leave(
                UnknownTopic(f"topic {shard.ref.spec.name} was deleted: this handle has ended", shard=shard.ref)
            )
    present = set(disk.list_directory(local.directory)) - {shard.ref.id for shard in local.shards()}
    if not present:
        return
    known = {ref.id: ref for ref in refs()}
    for name in present & known.keys():
        yield partial(local.clear_moved, known[name], wait=wait)
    for name in present & set(deleted):
        yield partial(remove_files, disk, local.directory, name)


def remove_files(disk: Disk, shards: str, shard_id: str) -> None:
    """On return the directory of the shard, with what was set aside in it, is gone."""
    directory = f"{shards}/{shard_id}"
    for below in (f"{directory}/{ASIDE}", directory):
        with contextlib.suppress(FileNotFoundError):
            for name in disk.list_directory(below):
                if name != ASIDE:
                    # Another thread may be at the same: what it has removed must not end this before the rest is gone.
                    with contextlib.suppress(FileNotFoundError):
                        disk.unlink(f"{below}/{name}")
            disk.remove_directory(below)
    with contextlib.suppress(FileNotFoundError):
        disk.sync_directory(shards)


def clear_away(disk: Disk, directory: str, catalog: ShardCatalog, settings: WalSettings) -> bool:
    """The shard is another directory's now: remove local files if history has them all, else set them aside.

    True if nothing is left.
    """
    if not drop_history(disk, directory, catalog, settings):
        set_aside(disk, directory)
        logger.warning("%s has another owner: local files that history does not have are set aside", catalog.keys)
        return False
    if ASIDE in disk.list_directory(directory):
        return False
    disk.remove_directory(directory)
    return True


def drop_history(disk: Disk, directory: str, catalog: ShardCatalog, settings: WalSettings) -> bool:
    """Remove the files of a log that is not the shard's present one, if history has every record of it; else false."""
    facts = survey(disk, directory, settings, writable=False)
    for scan in facts.logs:
        scan.file.close()
    if not facts.is_empty and not _is_history(facts, catalog):
        return False
    names = disk.list_directory(directory)
    segments = sorted(name for name in names if parse_segment_name(name) is not None)
    beside = [name for name in names if name != ASIDE and name not in segments]
    # The newest after the others, indexes last: what a crash leaves still shows that history has it.
    for step in (segments[:-1], segments[-1:], beside):
        for name in step:
            disk.unlink(f"{directory}/{name}")
        if step:
            disk.sync_directory(directory)
    if segments:
        logger.info("%s: local files of an earlier time here, all of them in history, are removed", catalog.keys)
    return True


def _is_history(facts: Survey, catalog: ShardCatalog) -> bool:
    """Whether all of these files is in history, byte for byte or compacted, and not only here; or has ended there."""
    stored = catalog.state()
    earliest = stored.state.earliest if stored is not None else 0
    pieces = catalog.descriptors()
    known = {(piece.start, piece.end): piece for piece in pieces}
    for file in facts.sealed:
        if file.end <= earliest:
            continue
        instead = compacted_into(pieces, file.start, file.end)
        if instead is not None and not is_private(instead):
            continue
        piece = known.get((file.start, file.end))
        if piece is None or is_private(piece) or piece.content_hash != file.footer.content_hash.hex():
            return False
    return all(scan.is_bare for scan in facts.logs)
