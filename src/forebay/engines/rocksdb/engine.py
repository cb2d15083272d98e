"""The RocksDB engine: acquires shards, decides where they go on, and keeps their one database in sync with the disk."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from functools import partial

from forebay.appends.budget import QueueBudget
from forebay.catalog import decode_state, read_state
from forebay.clock import Clock
from forebay.disk import Disk
from forebay.engines.registry import ShardedEngine
from forebay.engines.rocksdb.database import RocksDatabase, check_installed
from forebay.engines.rocksdb.layout import Bounds, Keys, ShardCounters
from forebay.engines.rocksdb.rows import RowsState, ShardRows, stored_window
from forebay.engines.rocksdb.shard import RocksShard
from forebay.engines.rocksdb.times import edges_at
from forebay.errors import Conflict, ForebayError
from forebay.metadata import Entry, MetadataStore
from forebay.records import Gap
from forebay.settings import Settings
from forebay.shard import RecoveryDecision, Situation, acquire, decide
from forebay.shard.owner_loss import TakeOver
from forebay.shard.ownership import OwnerSession, wanted
from forebay.shard.recovery import refuse_contradiction
from forebay.topics import ShardRef, TopicSpec, parse_compression
from forebay.workers import Worker

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseFacts:
    """What the database knows of a shard, for the decision where it goes on."""

    is_empty: bool
    end: int
    epoch: int
    reserved_end: int
    identity: str
    clean: bool
    begins: int = 0
    torn_bytes: int = 0
    is_short: bool = False
    damage: list[Gap] = dataclasses.field(default_factory=list)


class RocksEngine(ShardedEngine[RocksShard]):
    """Shards in one database below the directory `path`, which is opened when the first of them is."""

    def __init__(
        self,
        path: str,
        settings: Settings,
        *,
        disk: Disk,
        clock: Clock,
        metadata: MetadataStore,
        owner_session: OwnerSession,
        queues: QueueBudget | None = None,
    ) -> None:
        """`queues` bounds what waits here and in other engines together, if given."""
        super().__init__()
        self._database = RocksDatabase(path, disk)
        self._settings = settings
        self._disk = disk
        self._clock = clock
        self._metadata = metadata
        self._owner_session = owner_session
        self._queues = queues or QueueBudget(settings.runtime.queue_bytes_max)
        seconds = settings.wal.sync_interval_ms / 1000
        self.worker = Worker("forebay-rocksdb", self._sync, clock=clock, delay_s=seconds)
        """Makes appends durable in the background."""

    def check_installed(self) -> None:
        """`Unsupported` if the package that this engine needs is not there."""
        check_installed()

    def prepare(self, spec: TopicSpec) -> None:
        """See `StorageEngine`. The database is open on return."""
        super().prepare(spec)
        self._database.open()

    def was_here(self, ref: ShardRef) -> bool:
        """Whether the shard was open in this directory before."""
        if not self._database.is_made:
            return False
        stored = read_state(self._metadata, wanted(ref, self._settings).key)
        return stored is not None and stored.state.holder == self._owner_session.holder

    def may_own(self, ref: ShardRef) -> bool:
        """See `ShardedEngine`. What another directory holds is opened: that refuses it by name."""
        if read_state(self._metadata, wanted(ref, self._settings).key) is not None:
            return True
        return self._database.is_made and self._bounds(Keys(ref.spec.topic_id, ref.partition)) is not None

    def is_here(self, ref: ShardRef, states: Mapping[str, Entry]) -> bool:
        """Whether the closed shard is this directory's, and was used; `states` are recorded ones, as just read."""
        if self.find(ref) is not None:
            return False
        entry = states.get(wanted(ref, self._settings).key)
        if entry is not None:
            return decode_state(entry).state.holder in (None, self._owner_session.holder)
        return self._database.is_made and self._bounds(Keys(ref.spec.topic_id, ref.partition)) is not None

    def remove_topic(self, topic_id: str, partitions: int) -> None:
        """On return nothing of a topic that another directory has deleted is left; what is open of it has ended."""
        for partition in range(partitions):
            self.registry.check_open()
            removing = partial(self._end, Keys(topic_id, partition), "was deleted from another directory")
            self.registry.give_up(topic_id, partition, removing)

    def purge(self, ref: ShardRef) -> None:
        """On return no data file of the database holds what was deleted from this shard."""
        keys = Keys(ref.spec.topic_id, ref.partition)
        self._database.purge(keys.start, keys.stop)

    def close(self) -> None:
        """See `StorageEngine`. `Unavailable` inside a write of this thread, which a signal handler has interrupted."""
        for shard in self.shards():
            shard.refuse_inside()
        self.worker.stop()
        super().close()
        self._database.close()

    def _close(self, shard: RocksShard) -> None:
        try:
            shard.end("is closed", clean=True)
        except ForebayError as error:
            # The others must still be closed; what is missing here is found when it is opened next.
            logger.warning("%s: not closed in order: %s", shard.ref, error)

    def _remove(self, ref: ShardRef, shard: RocksShard | None) -> None:
        self._end(Keys(ref.spec.topic_id, ref.partition), "was deleted", shard)

    def _end(self, keys: Keys, why: str, shard: RocksShard | None) -> None:
        """Remove all rows of a shard, which was open if `shard` is given."""
        if shard is not None:
            shard.end(why, clean=False)
        if not self._database.is_made:
            return
        batch = self._database.batch()
        batch.delete_range(keys.start, keys.stop)
        self._database.write(batch, sync=True)

    def _open(self, ref: ShardRef) -> RocksShard:
        keys, shard = Keys(ref.spec.topic_id, ref.partition), wanted(ref, self._settings)
        self._make_room(ref, keys)
        bounds = self._bounds(keys) or Bounds()
        stored = self._database.get(keys.counters)
        counters = ShardCounters() if stored is None else ShardCounters.decode(stored)
        facts = DatabaseFacts(
            is_empty=bounds.epoch == 0,
            end=counters.next,
            epoch=bounds.epoch,
            reserved_end=bounds.reserved_end,
            identity=bounds.identity,
            clean=bounds.clean,
        )
        owner = self._owner_session.owner
        # Whatever the mode, the records are here alone: no other directory takes the shard over.
        before, epoch = acquire(
            self._metadata,
            [shard],
            owner,
            clock=self._clock,
            take_over=TakeOver.NEVER,
            check=lambda _, state: refuse_contradiction(facts, state, str(ref)),
        )[0]
        identity = self._disk.identity(self._database.path)
        decision = decide(facts, before, Situation(str(ref), ref.spec.durability, identity, owner.holder))
        logger.log(logging.INFO if decision.exact else logging.WARNING, "%s: epoch %d, %s", ref, epoch, decision)
        return self._recovered(ref, keys, decision, epoch, bounds, counters, identity)

    def _recovered(
        self,
        ref: ShardRef,
        keys: Keys,
        decision: RecoveryDecision,
        epoch: int,
        bounds: Bounds,
        counters: ShardCounters,
        identity: str,
    ) -> RocksShard:
        rows = ShardRows(keys, epoch, parse_compression(ref.spec.compression))
        with self._database.view() as view:
            edges = edges_at(view, keys, counters.next, lambda start, stop: rows.newest_time(view, start, stop))
            window = stored_window(view, keys, self._settings.wal)
            gap = decision.gap or rows.gap_before(view, counters.next)
        state = RowsState(counters, edges)
        if decision.gap is not None:
            batch = self._database.batch()
            state = rows.skip(batch, state, decision.gap)
            batch.put(keys.counters, state.counters.encode())
            self._database.write(batch, sync=True)
        return RocksShard(
            ref,
            self._settings.wal,
            self._settings.retention,
            database=self._database,
            rows=rows,
            clock=self._clock,
            decision=decision,
            epoch=epoch,
            bounds=bounds,
            identity=identity,
            state=state,
            gap=gap,
            window=window,
            on_dirty=self.worker.wake,
            queues=self._queues,
        )

    def _make_room(self, ref: ShardRef, keys: Keys) -> None:
        """Note a shard that is new here before we own it: from then on, one that is missing was lost."""
        if self._bounds(keys) is not None:
            return
        stored = read_state(self._metadata, wanted(ref, self._settings).key)
        if stored is not None and stored.state.holder == self._owner_session.holder:
            raise Conflict(
                f"{ref} is not in the database {self._database.path}, which was lost, and with it how far its "
                "offsets went: restore it from a backup, or delete the topic and create it again"
            )
        batch = self._database.batch()
        batch.put(keys.bounds, Bounds().encode())
        self._database.write(batch, sync=True)

    def _bounds(self, keys: Keys) -> Bounds | None:
        stored = self._database.get(keys.bounds)
        return None if stored is None else Bounds.decode(stored)

    def _sync(self) -> None:
        heads = [(shard, shard.published()) for shard in self.shards()]
        self._database.sync()
        for shard, head in heads:
            shard.synced_to(head)
