"""The partitions of a topic as the metadata store knows them, whichever process owns them. Opens nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from forebay.catalog import ShardCatalog, ShardKeys
from forebay.clock import Clock
from forebay.errors import Moved
from forebay.format.metadata.descriptor import Phase, ShardState
from forebay.metadata import MetadataStore
from forebay.topics import TopicSpec

NEVER_USED = "new"
NameOf: TypeAlias = Callable[[str | None], str]
"""Gives a data directory, known by its id, the name that messages have for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedShard:
    """Who has one partition, and how far its history goes."""

    partition: int
    state: ShardState | None
    """`None` for one that was never used."""
    exported: int
    """The end of its history."""

    @property
    def phase(self) -> str:
        """`open`, `sealed`, …, or `new` for one that was never used."""
        return NEVER_USED if self.state is None else str(self.state.phase)

    @property
    def is_sealed(self) -> bool:
        """Whether it was ended in order, and not opened since."""
        return self.state is not None and self.state.phase is Phase.SEALED


def recorded_shards(metadata: MetadataStore, prefix: str, spec: TopicSpec, clock: Clock) -> list[RecordedShard]:
    """Every partition of a topic, two reads of the metadata store each."""
    found = []
    for partition in range(spec.partitions):
        keys = ShardKeys(spec.namespace, spec.topic, partition, prefix)
        catalog = ShardCatalog(metadata, keys, spec.topic_id, clock=clock)
        stored = catalog.state()
        state = stored.state if stored is not None and stored.state.incarnation == spec.topic_id else None
        found.append(RecordedShard(partition=partition, state=state, exported=catalog.frontier().next))
    return found


def check_not_arrived(spec: TopicSpec, shards: Sequence[RecordedShard], here: str | None, name_of: NameOf) -> None:
    """`Moved` if another directory has opened some of the topic since it was sealed: it cannot be taken back."""
    for shard in shards:
        state, ref = shard.state, f"{spec.name}[{shard.partition}]"
        if state is not None and state.phase is not Phase.SEALED and state.holder not in (None, here):
            raise Moved(
                f"{ref} has arrived in {name_of(state.holder)}: seal it there, or move it back from there",
                shard=ref,
                holder=state.holder,
            )


def check_held_here(
    spec: TopicSpec, shards: Sequence[RecordedShard], here: str | None, name_of: NameOf, *, target: str | None = None
) -> None:
    """`Moved` if another directory has some of the topic: to seal or export it in `here` would be a take-over.

    The directory `target` may have it: the topic is on its way there.
    """
    for shard in shards:
        state, ref = shard.state, f"{spec.name}[{shard.partition}]"
        if state is None:
            continue
        if state.phase is Phase.SEALED:
            if state.target not in (None, here, target):
                raise Moved(
                    f"{ref} was sealed for {name_of(state.target)}: go on there, or take it back with "
                    f'"forebay topic unseal {spec.name}"',
                    shard=ref,
                    holder=state.target,
                )
        elif state.holder not in (None, here, target):
            raise Moved(
                f"{ref} is in {name_of(state.holder)}, and this is {name_of(here)}: do it there",
                shard=ref,
                holder=state.holder,
            )
