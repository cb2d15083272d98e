"""Where a topic moves to: everything about it that can be known is checked before the topic is sealed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from forebay.cli.holding import look_at, states_of
from forebay.cli.invocation import Invocation
from forebay.clock import SystemClock
from forebay.errors import Conflict, Invalid, Moved, Unsupported
from forebay.format.descriptor import Phase, ShardState
from forebay.inspection import Inspected
from forebay.settings import Settings
from forebay.shard.handover import OnFile
from forebay.storage import Storage
from forebay.storage.directory import MARKER, METADATA, LogDirectory, is_owned
from forebay.topics import Engine, TopicSpec, shard_id


def check_settings(settings: Settings) -> None:
    """Refuse settings under which no topic can move."""
    metadata, storage = settings.metadata, settings.storage
    if metadata.backend == "sqlite" and metadata.path is None:
        raise Unsupported(
            "the two directories share no metadata store: name one file for both as metadata.path (moving the "
            f"source's {METADATA} there if it has one), or set metadata.backend to etcd"
        )
    if storage.mode == "local" and storage.handoff_root is None:
        raise Unsupported(
            'storage.mode is "local", where history lies in one directory alone: name a directory that both can read '
            "as storage.handoff_root"
        )


@dataclass(frozen=True, kw_only=True)
class Destination:
    """A data directory that a topic may move to."""

    run: Invocation
    spec: TopicSpec
    source: Inspected
    path: str
    id: str

    @classmethod
    def checked(cls, run: Invocation, spec: TopicSpec, path: str) -> Destination:
        """The directory, made if it is missing. Raises what speaks against it; the topic is untouched."""
        if spec.engine is not Engine.SEGMENT:
            where = "in the memory of its owner" if spec.engine is Engine.MEMORY else "in a RocksDB database"
            raise Unsupported(
                f'{spec.name} lives {where}: it has no history that could move; copy it to a topic on engine "segment"'
            )
        source = look_at(run)
        if os.path.realpath(path) == os.path.realpath(source.path):
            raise Invalid(f"{path} is the directory that {spec.name} is to leave: name another with --to")
        _check_metadata(run.settings, path)
        there = _look(run, path)
        if there is not None and there.id == source.id:
            raise Conflict(f"{path} is a copy of {source.path}: both have id {source.id}; name another with --to")
        _check_holders(source, spec, there.id if there is not None else None)
        # Only now: whoever is refused finds no new directory.
        directory = there or _made(run, path)
        _check_shards(run, source, directory)
        return cls(run=run, spec=spec, source=source, path=directory.path, id=directory.id)

    @contextmanager
    def opened(self) -> Iterator[Storage | None]:
        """The directory held open; `None` if another process has it."""
        if is_owned(self.path, self.run.disk):
            yield None
            return
        with Storage.open(self.path, _settings_there(self.run.settings), disk=self.run.disk) as there:
            yield there

    def move(
        self, log: Storage, there: Storage | None, on_file: OnFile, *, accept_damage: bool = False
    ) -> dict[str, Any]:
        """Seal the topic, go on with it there, and let go of what is left here; what happened."""
        clock, name = SystemClock(), str(self.spec.name)
        arrived = {n for n, state in enumerate(states_of(self.source, self.spec)) if self._has_arrived(state)}
        begun = clock.monotonic()
        states = log.seal_topic(name, target=self.id, on_file=on_file, accept_damage=accept_damage)
        if there is not None:
            # From then on the next epoch is recorded, and the topic takes appends there.
            there.topic(name).acquire()
        seconds = clock.monotonic() - begun
        log.clear_moved()
        found = look_at(self.run)
        # More than at the look before, if partitions were added meanwhile.
        spec = msgspec.structs.replace(self.spec, partitions=len(states))
        return {
            "topic": name,
            "from": found.path,
            "to": self.path,
            "target": self.id,
            "shards": [
                {"partition": partition, "next": None if partition in arrived else state.next_offset}
                for partition, state in enumerate(states)
            ],
            "taken": all(map(self._has_arrived, states_of(found, spec))),
            "seconds": None if there is None or len(arrived) == len(states) else seconds,
            "left": _left(found, spec),
        }

    def _has_arrived(self, state: ShardState | None) -> bool:
        return state is not None and state.phase is not Phase.SEALED and state.holder == self.id


def _left(found: Inspected, spec: TopicSpec) -> list[str]:
    paths = (f"{found.shards}/{shard_id(spec.topic_id, number)}" for number in range(spec.partitions))
    return [path for path in paths if os.path.exists(path)]


def _settings_there(settings: Settings) -> Settings:
    """The settings for the other directory, which keeps its log files in a place of its own."""
    return msgspec.structs.replace(settings, wal=msgspec.structs.replace(settings.wal, dir=None))


def _check_metadata(settings: Settings, path: str) -> None:
    own = os.path.join(path, METADATA)
    shared = settings.metadata.path if settings.metadata.backend == "sqlite" else None
    if os.path.exists(own) and (shared is None or os.path.realpath(own) != os.path.realpath(shared)):
        raise Conflict(
            f"{path} has a metadata store of its own, {METADATA}, and shares none with the source: name a new directory"
        )


def _look(run: Invocation, path: str) -> LogDirectory | None:
    return LogDirectory.look(path, run.disk) if os.path.exists(os.path.join(path, MARKER)) else None


def _made(run: Invocation, path: str) -> LogDirectory:
    made = LogDirectory.take(path, run.disk, SystemClock())
    made.release()
    return made


def _check_shards(run: Invocation, source: Inspected, directory: LogDirectory) -> None:
    if os.path.realpath(directory.shards) == os.path.realpath(source.shards):
        raise Conflict(f"{directory.path} and {source.path} keep their log files in the same {source.shards}")
    strangers = look_at(run, directory.path).strangers(run.disk)
    if strangers:
        raise Conflict(
            f"{directory.path} holds {strangers[0].directory}, which this metadata store does not know: the directory "
            "belongs to another one; name a new directory"
        )


def _check_holders(source: Inspected, spec: TopicSpec, target: str | None) -> None:
    """Nobody but these two may have any of it: sealing here would be a take-over."""
    for partition, state in enumerate(states_of(source, spec)):
        if state is None:
            continue
        if state.phase is Phase.SEALED:
            if state.target not in (None, source.id, target):
                raise Moved(
                    f"{spec.name}[{partition}] was sealed for {source.directory_name(state.target)}: finish that move, "
                    f'or take the topic back with "forebay topic unseal {spec.name}"'
                )
        elif state.holder not in (None, source.id, target):
            raise Moved(
                f"{spec.name}[{partition}] is in {source.directory_name(state.holder)}, and {source.path} is "
                f"{source.id}: name that one with --data"
            )
