"""The tiers of a data directory that commands look at without opening it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay.disk import Disk
    from forebay.inspection import ExpectedShard, Inspected
    from forebay.storage.usage import TierPiece


def pieces_of(found: Inspected, place: ExpectedShard, disk: Disk) -> Iterator[TierPiece]:
    """Everything that a shard has, as far as this directory and the catalog know."""
    from forebay.catalog import ShardKeys
    from forebay.inspection.recorded import recorded
    from forebay.storage.usage import files_of, objects_of

    yield from files_of(disk, place.directory)
    assert place.spec is not None
    keys = ShardKeys(place.spec.namespace, place.spec.topic, place.partition, found.prefix)
    said = recorded(list(found.below(keys.segments)), keys)
    yield from objects_of(piece.descriptor for piece in [*said.pieces, *(hidden for _, hidden in said.hidden)])


def database_of(found: Inspected) -> str:
    """Where the database of engine `rocksdb` lies, if there is one."""
    from forebay.storage.owner import ROCKSDB

    return f"{found.path}/{ROCKSDB}"
