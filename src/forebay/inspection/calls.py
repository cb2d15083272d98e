"""What an operator asks of a data directory from Python: verify, repair, and salvage records that were set aside.

The command line asks the same of the modules below this one. Here the disk and the clock are the machine's, and
settings are given as to `forebay.open`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import PurePath

from forebay.clock import SystemClock
from forebay.directory import checked_path
from forebay.disk import SystemDisk
from forebay.errors import UnknownTopic
from forebay.inspection.directory import look
from forebay.inspection.findings import Report
from forebay.inspection.repair import repair as repair_directory
from forebay.inspection.salvage import Listed, salvages, target_of
from forebay.inspection.steps import Step
from forebay.inspection.verify import verify as verify_directory
from forebay.settings import Settings
from forebay.storage import Storage
from forebay.topics import TopicName

Progress = Callable[[int], None]


def verify(
    path: str | PurePath,
    settings: Settings | Mapping[str, object] | None = None,
    *,
    topic: str | TopicName | None = None,
    quick: bool = False,
    on_total: Progress | None = None,
    on_bytes: Progress | None = None,
) -> Report:
    """Check every checksum, frame, index, checkpoint, catalog entry and object of a data directory, or of one topic.

    Changes nothing, and may run while a process has the directory open. `report.is_clean` says whether all is sound;
    each of `report.findings` says where, what, and what to do next. With `quick` the objects of the history are looked
    for and not read. The caller gets the number of bytes to be read once by `on_total`, then by `on_bytes` as they
    are read.
    """
    with _at_hand(path, settings, topic) as (directory, used, disk, wanted):
        return verify_directory(
            directory,
            used,
            disk=disk,
            clock=SystemClock(),
            topic=wanted,
            quick=quick,
            on_total=on_total,
            on_bytes=on_bytes,
        )


def repair(
    path: str | PurePath,
    settings: Settings | Mapping[str, object] | None = None,
    *,
    topic: str | TopicName | None = None,
    apply: bool = False,
    on_total: Progress | None = None,
    on_bytes: Progress | None = None,
) -> list[Step]:
    """Plan how to mend files from the store, objects from files, indexes and checkpoints; with `apply`, do it.

    Copies only bytes with the catalogued hash, and keeps what it replaces in the shard's `aside/`. A step whose action
    is `cannot repair` names what stays damaged. `Unavailable` while a process has the directory open: close it first.
    """
    with _at_hand(path, settings, topic) as (directory, used, disk, wanted):
        return repair_directory(
            directory,
            used,
            disk=disk,
            clock=SystemClock(),
            topic=wanted,
            apply=apply,
            on_total=on_total,
            on_bytes=on_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSalvage:
    """What was brought back of one partition, or with `dry_run` would be."""

    partition: int
    into: str | None
    """The topic that the records are in now; `None` if there was nothing to make one for."""
    files: tuple[Listed, ...]
    """The files that were set aside, each with its offsets, its lost records and the places that are damaged."""
    copied: int
    present: int
    """Records that an earlier run had copied."""


def salvage(
    log: Storage,
    topic: str | TopicName,
    *,
    source: str | PurePath | None = None,
    into: str | TopicName | None = None,
    partition: int | None = None,
    dry_run: bool = False,
    on_records: Progress | None = None,
) -> list[PartitionSalvage]:
    """Bring back records that a shard set aside: torn tails, and what a take-over left behind in another directory.

    `log` is open on the directory that has the topic now, `source` is the data directory with the files (default: the
    log's own). Only records whose offsets the topic reports as lost are copied, each once however often this is called,
    to the end of the topic or of the topic `into`, which is made if it is missing; their headers say where they come
    from. Nothing is removed. With `dry_run` the answer says what would be copied, and nothing changes. Salvage a topic
    in one thread at a time: two that run at once do not see each other's copies.
    """
    report = on_records if on_records is not None else _ignored
    with salvages(log, topic, partition=partition, source=source) as found:
        target = target_of(log, found, into, create=not dry_run)
        done = []
        for one in found:
            counted = one.copy_to(target, apply=not dry_run, on_records=report)
            done.append(
                PartitionSalvage(
                    partition=one.partition,
                    into=target.name if target is not None else None,
                    files=tuple(one.listed),
                    copied=counted.copied,
                    present=counted.present,
                )
            )
        return done


def _ignored(count: int) -> None:
    """For a caller that wants no progress."""


@contextmanager
def _at_hand(
    path: str | PurePath, settings: Settings | Mapping[str, object] | None, topic: str | TopicName | None
) -> Iterator[tuple[str, Settings, SystemDisk, TopicName | None]]:
    """The caller's arguments, checked, and a disk for as long as they are used."""
    used = settings if isinstance(settings, Settings) else Settings.load(overrides=settings)
    directory = checked_path(path)
    wanted = TopicName.parse(topic) if topic is not None else None
    with closing(SystemDisk(used.runtime.descriptors_max)) as disk:
        if wanted is not None:
            known = look(directory, used, disk, SystemClock()).topics
            if all(spec.name != wanted for spec in known):
                raise UnknownTopic(f"{directory} has no topic {wanted}: log.topics() lists what it has", topic=wanted)
        yield directory, used, disk, wanted
