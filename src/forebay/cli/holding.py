"""What the metadata store says of a data directory, for commands that look without opening it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay.cli.invocation import Invocation
    from forebay.inspection import Inspected
    from forebay.topics import TopicSpec


def look_at(run: Invocation, path: str | None = None) -> Inspected:
    """What the metadata store says of the data directory, or of the one at `path`."""
    from forebay.clock import SystemClock
    from forebay.inspection.directory import look

    return look(run.directory if path is None else path, run.settings, run.disk, SystemClock())


def frontier_of(found: Inspected, spec: TopicSpec, partition: int) -> int:
    """The end of a partition's catalogued history."""
    from forebay.format.metadata.descriptor import Cur
    from forebay.format.metadata.keys import cur_key
    from forebay.format.metadata.value import decode_value

    key = cur_key(spec.namespace, spec.topic, partition, prefix=found.prefix)
    stored = found.entry(key)
    return decode_value(stored.value, Cur)[0].next if stored is not None else 0
