"""Sealing a topic and moving it to another data directory: exactly where it stops here, it goes on there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from forebay.catalog import read_state
from forebay.clock import Clock
from forebay.engines.segment import SegmentEngine
from forebay.errors import Moved, Unavailable, UnknownTopic, Unsupported
from forebay.format.metadata.descriptor import Phase, ShardState
from forebay.metadata import MetadataStore
from forebay.settings import Settings
from forebay.shard import SegmentShard
from forebay.shard.directories import directory_name
from forebay.shard.ownership import wanted
from forebay.shard.seal import OnFile, withdraw_target
from forebay.storage.shards import Shards
from forebay.storage.topic import Topic
from forebay.topics import ShardRef, TopicSpec, refs_of


class Moves:
    """Gives topics up and takes them back."""

    def __init__(
        self,
        engine: SegmentEngine,
        metadata: MetadataStore,
        shards: Shards,
        settings: Settings,
        *,
        clock: Clock,
        holder: str,
        forget: Callable[[ShardRef], None],
        on_moved: Callable[[], None],
    ) -> None:
        """`holder` is this data directory. `forget` stops the background work on a shard and waits for it.

        `on_moved` is called when local files may have become those of a shard that another directory has.
        """
        self._engine = engine
        self._metadata = metadata
        self._shards = shards
        self._settings = settings
        self._clock = clock
        self._holder = holder
        self._forget = forget
        self._on_moved = on_moved

    def seal(
        self,
        spec: TopicSpec,
        *,
        target: str | None = None,
        on_file: OnFile | None = None,
        accept_damage: bool = False,
    ) -> list[ShardState]:
        """Seal every partition; see `Storage.seal_topic`."""
        states = []
        for ref in refs_of(spec):
            stored = read_state(self._metadata, wanted(ref, self._settings).key)
            if stored is not None and self._is_done(stored.state, target):
                # By an earlier attempt that did not get through all partitions.
                states.append(stored.state)
                continue
            shard, quiesce = self._shards.own(ref), partial(self._forget, ref)
            assert isinstance(shard, SegmentShard)
            states.append(
                self._engine.seal_shard(
                    shard, target=target, quiesce=quiesce, on_file=on_file, accept_damage=accept_damage
                )
            )
        self._on_moved()
        return states

    def take_back(self, spec: TopicSpec) -> None:
        """Every partition may be opened here again; see `Storage.unseal_topic`."""
        for ref in refs_of(spec):
            withdraw_target(self._metadata, wanted(ref, self._settings).key, clock=self._clock)
            self._engine.take_back(ref)

    def take_over(self, ref: ShardRef, accepted_by: str | None) -> ShardState:
        """Own a partition here; see `Storage.take_over`. Its state on return."""
        if accepted_by is None:
            self._shards.own(ref)
        else:
            self._shards.take_over(ref, accepted_by)
        stored = read_state(self._metadata, wanted(ref, self._settings).key)
        if stored is None or stored.state.incarnation != ref.spec.topic_id:
            raise UnknownTopic(f"{ref}: the topic was deleted meanwhile", shard=ref)
        return stored.state

    def export(self, topic: Topic, on_file: OnFile | None, *, accept_damage: bool = False) -> None:
        """Make everything appended so far history; see `Storage.export_topic`."""
        engine = self._engine
        topic.rotate()
        for ref in refs_of(topic.spec):
            if engine.find(ref) is None and not engine.may_own(ref):
                self._refuse_held_elsewhere(ref)
                continue
            shard = self._shards.ours(ref)
            assert isinstance(shard, SegmentShard)
            if accept_damage:
                engine.accept_unknown_producers(shard)
            export_rotated(shard, on_file, accept_damage=accept_damage)

    def _refuse_held_elsewhere(self, ref: ShardRef) -> None:
        """A partition that was sealed or never used has nothing to export; what another directory holds it has."""
        stored = read_state(self._metadata, wanted(ref, self._settings).key)
        if stored is not None and stored.state.phase is not Phase.SEALED:
            holder = directory_name(self._metadata, self._settings.metadata.prefix, stored.state.holder)
            raise Moved(
                f"{ref} is held by {holder}, which alone can export it: export it there",
                shard=ref,
                holder=stored.state.holder,
            )

    def _is_done(self, state: ShardState, target: str | None) -> bool:
        """Whether the shard is sealed for the target already, or has arrived there."""
        here = self._holder
        if state.phase is Phase.SEALED:
            return state.target in ((None, here) if target is None else (target,))
        return target not in (None, here) and state.holder == target


def export_rotated(shard: SegmentShard, on_file: OnFile | None = None, *, accept_damage: bool = False) -> None:
    """Make every log file of an owned shard history, but for the active one; `Unavailable` if one cannot be sealed."""
    rotated = shard.upkeep.rotated()
    if accept_damage:
        shard.upkeep.unseal_damaged(shard.history.exported)
    shard.upkeep.seal_rotated(accept_damage=accept_damage)
    stopped = shard.upkeep.stopped
    try:
        shard.history.catch_up(on_file, accept_damage=accept_damage)
    except Unavailable as error:
        raise stopped or error from error
    left = [file.path for file in rotated if file.start >= shard.history.exported]
    if left:
        why = f"{shard.ref}: {left[0]} could not be sealed yet; see the log for why, and try again"
        raise stopped or Unavailable(why)


def refusal_of_moves(spec: TopicSpec) -> Unsupported:
    """The error for a topic that cannot be exported, sealed and moved."""
    return Unsupported(
        f'{spec.name} lives on the {spec.engine} engine: only topics on engine "segment" are exported, sealed '
        "and moved; copy the records to one"
    )
