"""What a data directory holds, for commands that look without opening it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from forebay.errors import UnknownTopic

if TYPE_CHECKING:
    from forebay.cli.invocation import Invocation
    from forebay.disk import Disk
    from forebay.inspection import ExpectedShard, Inspected
    from forebay.storage.usage import TierPiece
    from forebay.topics import TopicName


def look_at(run: Invocation, path: str | None = None) -> Inspected:
    """What the metadata store says of the data directory, or of the one at `path`."""
    from forebay.clock import SystemClock
    from forebay.inspection.directory import look

    return look(run.directory if path is None else path, run.settings, run.disk, SystemClock())


def known_topic(run: Invocation, name: str | None) -> TopicName | None:
    """The topic asked for, which must exist."""
    if name is None:
        return None
    from forebay.topics import TopicName

    parsed = TopicName.parse(name)
    with run.reader() as log:
        if all(spec.name != parsed for spec in log.topics()):
            raise UnknownTopic(f'there is no topic {parsed}: see "forebay topic list" for what there is', topic=parsed)
    return parsed


def pieces_of(found: Inspected, place: ExpectedShard, disk: Disk) -> Iterator[TierPiece]:
    """Everything that a shard has, as far as this directory and the catalog know."""
    from forebay.catalog import ShardKeys
    from forebay.inspection.history.catalog import recorded
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
