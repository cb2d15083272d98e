"""Move a topic to another data directory that shares its metadata store.

Everything that can be known of the destination is checked before the topic is sealed, so that a move that cannot
end well changes nothing. Knows both directories, the recorded states and the log that has the topic open.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import PurePath

import msgspec

from forebay.clock import SystemClock
from forebay.directory import IN_MEMORY, MARKER, METADATA, LogDirectory, checked_path, is_owned
from forebay.disk import Disk, SystemDisk
from forebay.errors import Conflict, Invalid, Moved, Unsupported
from forebay.format.metadata.descriptor import Phase, ShardState
from forebay.inspection.directory import Inspected, look
from forebay.settings import Settings
from forebay.shard.seal import OnFile
from forebay.storage import Storage
from forebay.topics import Engine, TopicName, TopicSpec, shard_id


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicMove:
    """What a move did."""

    topic: str
    source: str
    """The path of the directory that the topic has left."""
    target: str
    """The path of the directory that it is in now, or is promised to."""
    target_id: str
    next_offsets: tuple[int | None, ...]
    """By partition, where it was sealed and goes on; `None` for one that was there already."""
    is_taken: bool
    """The target has every partition. If a process has it open, that process takes them with its next append."""
    seconds: float | None
    """From the seal to the moment when appends were taken there; `None` if another process takes them."""
    left: tuple[str, ...]
    """Shard directories that are still in the source, with records that history does not have."""


def move_topic(
    log: Storage,
    topic: str | TopicName,
    to: str | PurePath,
    *,
    on_file: OnFile | None = None,
    accept_damage: bool = False,
) -> TopicMove:
    """Move a topic from the directory that `log` is open on to the directory `to`, made if it is missing.

    Both share the metadata store and, in mode `local`, `storage.handoff_root`. What speaks against the move is raised
    before anything is sealed. A move that was interrupted is finished by the same call. If another process has `to`
    open, the topic is promised to it and goes on there with its next append. The caller learns by `on_file` what is
    left to export; `accept_damage` is that of `Storage.seal_topic`.
    """
    settings = log.settings
    if log.read_only:
        raise Unsupported("this log is opened read-only: move topics in the process that owns the directory")
    if to == IN_MEMORY:
        raise Invalid(f'"{IN_MEMORY}" is a log of one process, and no directory that a topic could move to: name one')
    spec = log.topic(topic).spec
    _check_settings(settings)
    with closing(SystemDisk(settings.runtime.descriptors_max)) as disk:
        destination = _Destination.checked(log, spec, checked_path(to), disk)
        with destination.opened() as there:
            return destination.move(log, there, on_file, accept_damage=accept_damage)


def _check_settings(settings: Settings) -> None:
    """Refuse settings under which no topic can move."""
    metadata, storage = settings.metadata, settings.storage
    if metadata.is_file and metadata.path is None:
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
class _Destination:
    """A data directory that a topic may move to."""

    settings: Settings
    disk: Disk
    spec: TopicSpec
    source: Inspected
    path: str
    id: str

    @classmethod
    def checked(cls, log: Storage, spec: TopicSpec, path: str, disk: Disk) -> _Destination:
        """The directory, made if it is missing. Raises what speaks against it; the topic is untouched."""
        if log.path is None or spec.engine is not Engine.SEGMENT:
            where = "in a RocksDB database" if spec.engine is Engine.ROCKSDB else "in the memory of its owner"
            raise Unsupported(
                f'{spec.name} lives {where}: it has no history that could move; copy it to a topic on engine "segment"'
            )
        settings = log.settings
        source = look(log.path, settings, disk, SystemClock())
        if posixpath.realpath(path) == posixpath.realpath(source.path):
            raise Invalid(f"{path} is the directory that {spec.name} is to leave: name another (--to)")
        _check_metadata(settings, path, disk)
        there = LogDirectory.look(path, disk) if disk.exists(posixpath.join(path, MARKER)) else None
        if there is not None and there.id == source.id:
            raise Conflict(f"{path} is a copy of {source.path}: both have id {source.id}; name another (--to)")
        _check_holders(source, spec, there.id if there is not None else None)
        # Only now: a caller that is refused finds no new directory.
        directory = there or _made(path, disk)
        _check_shards(settings, source, directory, disk)
        return cls(settings=settings, disk=disk, spec=spec, source=source, path=directory.path, id=directory.id)

    @contextmanager
    def opened(self) -> Iterator[Storage | None]:
        """The directory held open; `None` if another process has it."""
        if is_owned(self.path, self.disk):
            yield None
            return
        with Storage.open(self.path, _settings_there(self.settings), disk=self.disk) as there:
            yield there

    def move(self, log: Storage, there: Storage | None, on_file: OnFile | None, *, accept_damage: bool) -> TopicMove:
        """Seal the topic, go on with it there, and remove what is left here; what happened."""
        clock, name = SystemClock(), str(self.spec.name)
        arrived = {n for n, state in enumerate(self.source.states(self.spec)) if self._has_arrived(state)}
        begun = clock.monotonic()
        states = log.seal_topic(name, target=self.id, on_file=on_file, accept_damage=accept_damage)
        if there is not None:
            # From then on the next epoch is recorded, and the topic takes appends there.
            there.topic(name).acquire()
        seconds = clock.monotonic() - begun
        log.clear_moved()
        found = look(self.source.path, self.settings, self.disk, clock)
        # More than at the look before, if partitions were added meanwhile.
        spec = msgspec.structs.replace(self.spec, partitions=len(states))
        return TopicMove(
            topic=name,
            source=found.path,
            target=self.path,
            target_id=self.id,
            next_offsets=tuple(None if n in arrived else state.next_offset for n, state in enumerate(states)),
            is_taken=all(map(self._has_arrived, found.states(spec))),
            seconds=None if there is None or len(arrived) == len(states) else seconds,
            left=_left(found, spec, self.disk),
        )

    def _has_arrived(self, state: ShardState | None) -> bool:
        return state is not None and state.phase is not Phase.SEALED and state.holder == self.id


def _left(found: Inspected, spec: TopicSpec, disk: Disk) -> tuple[str, ...]:
    paths = (f"{found.shards}/{shard_id(spec.topic_id, number)}" for number in range(spec.partitions))
    return tuple(path for path in paths if disk.exists(path))


def _settings_there(settings: Settings) -> Settings:
    """The settings for the other directory, which keeps its log files in a place of its own."""
    return msgspec.structs.replace(settings, wal=msgspec.structs.replace(settings.wal, dir=None))


def _check_metadata(settings: Settings, path: str, disk: Disk) -> None:
    own = posixpath.join(path, METADATA)
    shared = settings.metadata.path if settings.metadata.is_file else None
    if disk.exists(own) and (shared is None or posixpath.realpath(own) != posixpath.realpath(shared)):
        raise Conflict(
            f"{path} has a metadata store of its own, {METADATA}, and shares none with the source: name a new directory"
        )


def _made(path: str, disk: Disk) -> LogDirectory:
    made = LogDirectory.take(path, disk, SystemClock())
    made.release()
    return made


def _check_shards(settings: Settings, source: Inspected, directory: LogDirectory, disk: Disk) -> None:
    if posixpath.realpath(directory.shards) == posixpath.realpath(source.shards):
        raise Conflict(f"{directory.path} and {source.path} keep their log files in the same {source.shards}")
    strangers = look(directory.path, settings, disk, SystemClock()).strangers(disk)
    if strangers:
        raise Conflict(
            f"{directory.path} holds {strangers[0].directory}, which this metadata store does not know: the directory "
            "belongs to another one; name a new directory"
        )


def _check_holders(source: Inspected, spec: TopicSpec, target: str | None) -> None:
    """Only these two directories may have any of the topic: sealing here would be a take-over from a third."""
    for partition, state in enumerate(source.states(spec)):
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
                f"{source.id}: open that one (--data)"
            )
