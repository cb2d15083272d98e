"""How many bytes topics take, tier by tier: local log files, sealed ones, what was set aside, objects, the database.

Looks at files and metadata as they are, also beside an owner; asks no store.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from forebay.disk import Disk
from forebay.format.files.segment import parse_segment_name
from forebay.format.metadata.descriptor import SegmentDescriptor
from forebay.places import is_local
from forebay.records import OFFSET_MAX
from forebay.wal.recovery.resume import ASIDE
from forebay.wal.recovery.survey import indexed_files


class Tier(enum.StrEnum):
    """A kind of place."""

    LOG = "log"
    """Files that are written, or wait to be sealed."""
    SEALED = "sealed"
    """Sealed files in this directory."""
    ASIDE = "aside"
    """What was set aside."""
    HISTORY = "history"
    """Objects that the catalog names, in a store."""
    DATABASE = "database"
    """The database of engine `rocksdb`, of all its topics."""


class TierPiece(NamedTuple):
    """Bytes in one place. Without offsets it is not known which records they are."""

    tier: Tier
    place: str
    bytes: int
    start: int = 0
    stop: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUsage:
    """What a topic takes in one tier. The database belongs to no single topic."""

    topic: str | None
    tier: Tier
    files: int
    bytes: int


class UsageSum:
    """Adds up pieces by topic and tier."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str | None, Tier], list[int]] = {}

    def add(self, topic: str | None, pieces: Iterable[TierPiece]) -> None:
        """Count the pieces of a topic."""
        for piece in pieces:
            count = self._sums.setdefault((topic, piece.tier), [0, 0])
            count[0], count[1] = count[0] + 1, count[1] + piece.bytes

    def add_database(self, disk: Disk, path: str) -> None:
        """Count the database in this directory, if there is one."""
        if disk.exists(path):
            files = len(disk.list_directory(path))
            self._sums[None, Tier.DATABASE] = [files, bytes_below(disk, path)]

    def sums(self) -> list[TierUsage]:
        """The sums in order; the database comes last."""
        return [
            TierUsage(topic=topic, tier=tier, files=files, bytes=size)
            for (topic, tier), (files, size) in sorted(
                self._sums.items(), key=lambda entry: (entry[0][0] is None, *map(str, entry[0]))
            )
        ]


def files_of(disk: Disk, directory: str) -> Iterator[TierPiece]:
    """What lies in the directory of a shard, if there is one."""
    if not disk.exists(directory):
        return
    names = disk.list_directory(directory)
    starts = {name: parsed[0] for name in names if (parsed := parse_segment_name(name)) is not None}
    ordered = sorted(starts, key=lambda name: starts[name])
    stops = {name: starts[after] for name, after in pairwise(ordered)}
    sealed = indexed_files(disk, directory, ordered)
    for name in names:
        path = f"{directory}/{name}"
        if name == ASIDE:
            yield TierPiece(Tier.ASIDE, path, bytes_below(disk, path))
            continue
        segment = name.removesuffix(".idx") + ".seg" if name.endswith(".idx") else name
        tier = Tier.SEALED if segment in sealed else Tier.LOG
        start = starts.get(name)
        if start is None:
            yield TierPiece(tier, path, _size(path, disk))
        else:
            yield TierPiece(tier, path, _size(path, disk), start, stops.get(name, OFFSET_MAX))


def objects_of(descriptors: Iterable[SegmentDescriptor]) -> Iterator[TierPiece]:
    """What these descriptors name in a store."""
    for descriptor in descriptors:
        if descriptor.gap is None and not is_local(descriptor):
            where = f"{descriptor.store}:{descriptor.object_key}"
            size = descriptor.bytes + descriptor.index_bytes
            yield TierPiece(Tier.HISTORY, where, size, descriptor.start, descriptor.end)


def bytes_below(disk: Disk, path: str) -> int:
    """The bytes of all files in a directory, which has none below it."""
    return sum(_size(f"{path}/{name}", disk) for name in disk.list_directory(path))


def _size(path: str, disk: Disk) -> int:
    # Beside an owner a file may go between the list and the look; what is no file has no bytes of its own.
    with contextlib.suppress(FileNotFoundError, IsADirectoryError), contextlib.closing(disk.open(path)) as file:
        return file.size()
    return 0
