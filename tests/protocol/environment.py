"""Data directories that share a metadata store and a store of history, each an engine stepped by hand.

The trace of their disk tells what callers heard, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Final

from forebay.blobs import BlobStore
from forebay.catalog import ShardCatalog, ShardKeys, read_state
from forebay.errors import ForebayError, Indeterminate
from forebay.format.metadata.descriptor import Phase, SegmentDescriptor, ShardState
from forebay.format.metadata.keys import topic_key
from forebay.format.metadata.value import encode_value
from forebay.metadata import MemoryMetadata, MetadataStore, Put
from forebay.places import LOCAL, is_local
from forebay.settings import Settings
from forebay.shard import RecoveryDecision, SegmentShard
from forebay.shard.seal import withdraw_target
from forebay.storage.background.cleanup import CleanupWorker
from forebay.testing.checks.catalogs import Fetch
from forebay.testing.checks.history import (
    NOTE,
    AppendAnswered,
    AppendOutcome,
    Begun,
    Event,
    Reading,
    ShardEvents,
    read_everything,
)
from forebay.testing.checks.invariants import Violation
from forebay.testing.checks.moves import Operations, commits_of, replayed
from forebay.testing.simulated.blobs import SimulatedBlobs
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.crashes import CrashState
from forebay.testing.simulated.disk import SimulatedDisk
from forebay.topics import Durability, OnOwnerLoss, ShardRef, TopicSpec
from tests.protocol.consuming import Consumer
from tests.support.environments.simulated import (
    GRACE_S,
    NAME,
    STORE,
    TOPIC_ID,
    SimulatedEnvironment,
    SimulatedOwner,
    at_once,
    committed_in,
)
from tests.wal.rig import history_of, stage, value_of

KEYS: Final = ShardKeys("shop", "orders", 0, "/forebay")
MODES: Final = ("shared_fs", "local")
RETRIES_MAX: Final = 12
OPERATOR: Final = "an operator"
"""Who accepts losses."""
_WAL: Final = {
    "free_bytes_min": 0,
    "rotate_bytes_max": 4096,
    "reserve_records_min": 8,
    "cache_bytes_max": 4096,
    "producer_appends_max": 4,
}
_ARCHIVE: Final = {
    "store": {"root": STORE},
    "export": {"orphan_grace_s": GRACE_S},
    "retention": {"time_s": 0, "grace_s": 0, "check_interval_s": 1},
}


def settings_of(mode: str) -> Settings:
    """Small limits, so that every step is reached soon."""
    if mode == "local":
        return Settings.load(overrides={"wal": _WAL, "storage": {"mode": mode, "handoff_root": STORE}})
    return Settings.load(overrides={"wal": _WAL, "storage": {"mode": mode}, **_ARCHIVE})


def spec_of(durability: Durability, on_owner_loss: OnOwnerLoss = OnOwnerLoss.TAKE_OVER) -> TopicSpec:
    """The topic that all this is about, of one partition. Unless it waits, any directory goes on for a dead one."""
    return TopicSpec.create(
        NAME, topic_id=TOPIC_ID, created_at=0, durability=durability, on_owner_loss=on_owner_loss.value
    )


class OwnersEnvironment(SimulatedEnvironment):
    """Everything that directories share whose owners take one shard over from each other."""

    def __init__(
        self,
        mode: str = "shared_fs",
        durability: Durability = Durability.FSYNC,
        *,
        disk: SimulatedDisk | None = None,
        metadata: MemoryMetadata | None = None,
        blobs: BlobStore | None = None,
        seed: int = 1,
        on_owner_loss: OnOwnerLoss = OnOwnerLoss.TAKE_OVER,
    ) -> None:
        disk = disk or SimulatedDisk(directories=["/a", "/b", "/c", STORE])
        super().__init__(settings_of(mode), disk=disk, metadata=metadata, blobs=blobs, seed=seed)
        self.durability = durability
        self.ref = ShardRef(spec_of(durability, on_owner_loss), 0)
        self.uncovered: list[Violation] = []
        """Seals that were recorded when the store lacked an object."""
        self.openings: dict[int, RecoveryDecision] = {}
        """How the shard was opened in each epoch."""
        self.on_commit: Callable[[Operations], None] = lambda _: None
        self._attempts = itertools.count(len(self.disk.trace.notes()) * 1000)
        if metadata is None:
            put = Put(topic_key(NAME.namespace, NAME.topic, prefix="/forebay"), encode_value(self.ref.spec))
            self.metadata.transaction([], [put])

    @classmethod
    def after(cls, state: CrashState, mode: str, durability: Durability) -> OwnersEnvironment:
        """What a crash left: the disk, and the metadata store as of that moment, every session ended."""
        metadata = replayed(committed_in(state.notes))
        return cls(mode, durability, disk=state.disk(), metadata=metadata, seed=len(state.notes) + 2)

    def node(self, name: str, *, metadata: MetadataStore | None = None, store: BlobStore | None = None) -> Node:
        """A process that has just started on the data directory of that name."""
        return Node(self, name, metadata or self.faulty, store or self.store())

    def note(self, event: Event) -> None:
        self.disk.note(NOTE, event)

    def next_attempt(self) -> int:
        return next(self._attempts)

    def _committed(self, operations: Operations) -> None:
        super()._committed(operations)
        for commit in commits_of(KEYS, [operations]):
            if commit.state is not None and commit.state.phase is Phase.SEALED and commit.state.owner is None:
                self.uncovered += self._seal_lacks()
        self.on_commit(operations)

    def _seal_lacks(self) -> Iterator[Violation]:
        """I17: a shard is given up when every object of its history is there, for its local files may go then."""
        for piece in self.catalog.descriptors():
            if piece.object_key and self.fetch(piece, piece.object_key) is None:
                yield Violation("I17", f"sealed while {piece.object_key} of [{piece.start}, {piece.end}) was missing")

    # Looking, without a call that could fail or count

    @property
    def catalog(self) -> ShardCatalog:
        return ShardCatalog(self.inner, KEYS, TOPIC_ID, clock=ManualClock())

    @property
    def state(self) -> ShardState | None:
        stored = read_state(self.inner, KEYS.state)
        return stored.state if stored is not None else None

    def history(self) -> ShardEvents:
        """What callers were told, earlier lives on this disk included."""
        return history_of(self.durability, self.disk.trace.notes())

    def objects(self) -> dict[str, bytes]:
        """What the store holds."""
        if isinstance(self.blobs, SimulatedBlobs):
            return self.blobs.contents
        return {path.removeprefix(f"{STORE}/"): c for path, c in self.files().items() if path.startswith(f"{STORE}/")}

    @property
    def fetch(self) -> Fetch:
        """What lies under the keys that descriptors name, wherever that is."""
        files, objects = self.files(), self.objects()

        def fetched(piece: SegmentDescriptor, key: str) -> bytes | None:
            if is_local(piece):
                return files.get(f"/{piece.store.removeprefix(LOCAL)}/shards/{key}")
            return objects.get(key)

        return fetched

    def log_files(self, name: str) -> dict[str, bytes]:
        """What lies in the shard's directory of that node, what is set aside included."""
        prefix = f"/{name}/shards/"
        return {path.removeprefix(prefix): c for path, c in self.files().items() if path.startswith(prefix)}


class Node(SimulatedOwner):
    """One process with one data directory."""

    def __init__(self, environment: OwnersEnvironment, name: str, metadata: MetadataStore, store: BlobStore) -> None:
        super().__init__(environment, name, metadata, store, on_open=self._opened)
        self.environment = environment
        self.deletions = self.deletions_by(self._drop)
        self._consumer = Consumer(environment.disk, metadata)

    def _opened(self, shard: SegmentShard) -> None:
        state = self.environment.state
        # One that was overtaken while it recovered finds what the next owner did; it will write nothing.
        if state is not None and state.epoch == shard.epoch:
            self.environment.openings[shard.epoch] = shard.decision

    def _drop(self, ref: ShardRef) -> bool:
        """Nothing runs in the background."""
        return True

    @property
    def shard(self) -> SegmentShard:
        """The shard, acquired and recovered if it is not open yet."""
        return self.engine.open_shard(self.environment.ref)

    def take_over(self) -> None:
        """Go on with the shard, whatever its last holder has not exported: an operator says so."""
        self.engine.open_accepting_loss(self.environment.ref, OPERATOR)

    def append(self, count: int = 1, *, producing: tuple[int, int] | None = None) -> AppendOutcome:
        """Append and wait; what the caller heard is noted."""
        environment = self.environment
        attempt = environment.next_attempt()
        values = tuple(value_of(attempt, place, producing, 0) for place in range(count))
        environment.note(Begun(attempt, values, caller=self.name, producing=producing))
        told = AppendAnswered(attempt, AppendOutcome.REFUSED)
        try:
            wal = self.shard.wal
            offset = wal.acknowledge(stage(wal, values, producing, environment.clock.now_ms()))
            told = AppendAnswered(attempt, AppendOutcome.ACKED, offset)
        except Indeterminate:
            told = AppendAnswered(attempt, AppendOutcome.INDETERMINATE)
        except ForebayError:
            pass
        environment.note(told)
        return told.outcome

    def rotate(self) -> None:
        """Begin a new file and seal the last."""
        self.shard.rotate()
        self.shard.upkeep.seal_rotated()

    def export(self) -> None:
        """Make everything appended so far history."""
        self.rotate()
        self.shard.history.catch_up()

    def seal(self, target: str | None = None) -> ShardState:
        """Seal the shard, unless an earlier attempt has."""
        stored = read_state(self.metadata, KEYS.state)
        if stored is not None and stored.state.phase is Phase.SEALED and stored.state.target == target:
            return stored.state
        return self.engine.seal_shard(self.engine.open_shard(self.environment.ref), target=target, quiesce=lambda: None)

    def take_back(self) -> None:
        """A shard that was sealed here may be opened here."""
        withdraw_target(self.metadata, KEYS.state, clock=ManualClock())
        self.engine.take_back(self.environment.ref)

    def delete(self) -> None:
        """Delete the topic, or go on with that."""
        if any(spec.topic_id == TOPIC_ID for spec in self.definitions.all()):
            self.definitions.begin_deletion(NAME)
        self.deletions.finish()

    def clear_moved(self) -> None:
        """See to what is left here of a shard that another directory has, and of one that was deleted."""
        environment = self.environment
        loads = self.loads_by()
        chores = CleanupWorker(
            self.engines,
            self.cleanup,
            self.definitions,
            self.deletions,
            loads,
            environment.settings,
            holder=self.name,
            disk=environment.disk,
            clock=environment.clock,
            was_here=self.engine.was_here,
            open_shard=self.engine.open_shard,
            alone_with=at_once,
            relieve=lambda: None,
        )
        chores.step()
        self.let_go()
        chores.clear_moved()

    def let_go(self) -> None:
        """A shard that was lost is closed; its next use acquires it anew."""
        for shard in self.engine.shards():
            if shard.wal.fenced is not None:
                self.engine.retire(shard.ref)

    def consume(self, most: int | None = None) -> None:
        """A consumer here goes on from its cursor, at most so many offsets."""
        self._consumer.consume(self.shard, most)

    def acknowledge_late(self) -> None:
        """A consumer here acknowledges once more what it was handed last."""
        self._consumer.acknowledge(self.shard)

    def reading(self) -> Reading:
        """The whole stream, over all tiers."""
        shard = self.shard
        return read_everything(shard.read, shard.offsets().next)

    def die(self) -> None:
        """End the session as if the process had died."""
        self.environment.inner.end_session(self.owner_session.session.id)
