"""Which directory has a topic now, and refusing to act where another has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.errors import Moved

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


def check_held_here(found: Inspected, spec: TopicSpec) -> None:
    """Raise `Moved` if another directory has some of the topic: acting on it here would be a take-over."""
    from forebay.format.metadata.descriptor import Phase

    for partition, state in enumerate(found.states(spec)):
        if state is None:
            continue
        if state.phase is Phase.SEALED:
            if state.target not in (None, found.id):
                raise Moved(
                    f"{spec.name}[{partition}] was sealed for {found.directory_name(state.target)}: go on there, or "
                    f'take it back with "forebay topic unseal {spec.name}"'
                )
        elif state.holder not in (None, found.id):
            raise Moved(
                f"{spec.name}[{partition}] is in {found.directory_name(state.holder)}, and {found.path} is {found.id}: "
                "name that one with --data"
            )
