"""What the next opening of a shard will find and decide, worked out beforehand and without changing anything."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from forebay.catalog import ShardKeys
from forebay.disk import Disk
from forebay.errors import ForebayError
from forebay.inspection.directory import ExpectedShard, Inspected
from forebay.inspection.history.catalog import recorded
from forebay.places import is_local
from forebay.settings import WalSettings
from forebay.shard import RecoveryDecision, Situation, decide
from forebay.shard.recovery import refuse_lost_directory, with_undone
from forebay.topics import TopicSpec
from forebay.wal.recovery.resume import ASIDE
from forebay.wal.recovery.survey import survey


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """A shard at rest: how it would be recovered, or why it would be refused; and what its files take."""

    decision: RecoveryDecision | None
    refusal: str | None
    files: int
    bytes: int


def outlook(found: Inspected, place: ExpectedShard, settings: WalSettings, disk: Disk) -> Outlook:
    """The decision for a shard. If a process owns the directory there is none to take: both are `None`."""
    files, size = footprint(disk, place.directory)
    if found.owned or place.spec is None:
        return Outlook(decision=None, refusal=None, files=files, bytes=size)
    try:
        if not disk.exists(place.directory):
            state = found.state(place.spec, place.partition)
            refuse_lost_directory(state, found.id, place.name, place.directory)
        facts = survey(disk, place.directory, settings, writable=False)
        for scan in facts.logs:
            scan.file.close()
        identity = disk.identity(place.directory) if facts.last is not None else ""
        here = Situation(place.name, place.spec.durability, identity, found.id)
        here = _beside_history(here, found, place.spec, place.partition)
        decision = with_undone(decide(facts, found.state(place.spec, place.partition), here), facts.undone)
    except ForebayError as error:
        return Outlook(decision=None, refusal=str(error), files=files, bytes=size)
    return Outlook(decision=decision, refusal=None, files=files, bytes=size)


def _beside_history(here: Situation, found: Inspected, spec: TopicSpec, partition: int) -> Situation:
    """The same, with what the catalog says."""
    keys = ShardKeys(spec.namespace, spec.topic, partition, found.prefix)
    said = recorded(list(found.below(keys.segments)), keys)
    inner = next((piece.descriptor.start for piece in said.pieces if is_local(piece.descriptor)), said.frontier)
    covered = said.frontier if found.shared else min(inner, said.frontier)
    return here._replace(frontier=said.frontier, shared=found.shared, covered=covered)


def footprint(disk: Disk, directory: str) -> tuple[int, int]:
    """How many files a shard has and their bytes; what was set aside is not counted."""
    files = size = 0
    for name in disk.list_directory(directory) if disk.exists(directory) else []:
        if name == ASIDE:
            continue
        # Beside an owner a file may go between the list and the look.
        with contextlib.suppress(FileNotFoundError), contextlib.closing(disk.open(f"{directory}/{name}")) as file:
            size += file.size()
            files += 1
    return files, size
