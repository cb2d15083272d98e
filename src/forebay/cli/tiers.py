"""Where the bytes of topics lie: local log files, sealed ones, what was set aside, objects, the database."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from forebay.disk import Disk
    from forebay.inspection import ExpectedShard, Inspected


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


def pieces_of(found: Inspected, place: ExpectedShard, disk: Disk) -> Iterator[TierPiece]:
    """Everything that a shard has, as far as this directory and the catalog know."""
    if disk.exists(place.directory):
        yield from _files(place.directory, disk)
    yield from _objects(found, place)


def database_bytes(found: Inspected, disk: Disk) -> TierPiece | None:
    """The database, if there is one."""
    from forebay.storage.owner import ROCKSDB

    path = f"{found.path}/{ROCKSDB}"
    return TierPiece(Tier.DATABASE, path, _below(path, disk)) if disk.exists(path) else None


def _files(directory: str, disk: Disk) -> Iterator[TierPiece]:
    from forebay.format.files.segment import parse_segment_name
    from forebay.records import OFFSET_MAX
    from forebay.wal.recovery.resume import ASIDE
    from forebay.wal.recovery.survey import indexed_files

    names = disk.list_directory(directory)
    starts = {name: parsed[0] for name in names if (parsed := parse_segment_name(name)) is not None}
    ordered = sorted(starts, key=lambda name: starts[name])
    stops = {name: starts[after] for name, after in pairwise(ordered)}
    sealed = indexed_files(disk, directory, ordered)
    for name in names:
        path = f"{directory}/{name}"
        if name == ASIDE:
            yield TierPiece(Tier.ASIDE, path, _below(path, disk))
            continue
        segment = name.removesuffix(".idx") + ".seg" if name.endswith(".idx") else name
        tier = Tier.SEALED if segment in sealed else Tier.LOG
        start = starts.get(name)
        if start is None:
            yield TierPiece(tier, path, _size(path, disk))
        else:
            yield TierPiece(tier, path, _size(path, disk), start, stops.get(name, OFFSET_MAX))


def _objects(found: Inspected, place: ExpectedShard) -> Iterator[TierPiece]:
    from forebay.catalog import ShardKeys
    from forebay.inspection.recorded import recorded
    from forebay.shard.context import is_local

    assert place.spec is not None
    keys = ShardKeys(place.spec.namespace, place.spec.topic, place.partition, found.prefix)
    said = recorded(list(found.below(keys.segments)), keys)
    for descriptor in [piece.descriptor for piece in [*said.pieces, *(hidden for _, hidden in said.hidden)]]:
        if descriptor.gap is None and not is_local(descriptor):
            where = f"{descriptor.store}:{descriptor.object_key}"
            size = descriptor.bytes + descriptor.index_bytes
            yield TierPiece(Tier.HISTORY, where, size, descriptor.start, descriptor.end)


def _below(path: str, disk: Disk) -> int:
    """The bytes of all files in a directory, which has none below it."""
    return sum(_size(f"{path}/{name}", disk) for name in disk.list_directory(path))


def _size(path: str, disk: Disk) -> int:
    # Beside an owner a file may go between the list and the look; what is no file has no bytes of its own.
    with contextlib.suppress(FileNotFoundError, IsADirectoryError), contextlib.closing(disk.open(path)) as file:
        return file.size()
    return 0
