"""A log of this process alone, without files: everything ends with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from forebay.cleanup.deleted_topics import Deletions
from forebay.clock import Clock
from forebay.definitions import Definitions
from forebay.directory import IN_MEMORY
from forebay.engines import MemoryEngine, OwnedShard, ReadShard
from forebay.errors import Unsupported
from forebay.loads.service import Loads
from forebay.metadata import MemoryMetadata, MetadataStore
from forebay.meter import LogMeter
from forebay.progress import ProgressStore
from forebay.settings import Settings
from forebay.shard.ownership import OwnerSession
from forebay.storage.alter import Alterations
from forebay.storage.background.commit import Committers
from forebay.storage.background.definitions import DefinitionsWorker
from forebay.storage.background.limits import LimitsWorker
from forebay.storage.create import Creations
from forebay.storage.cursors import Cursors
from forebay.storage.erasure.answer import NothingLeft, ShardErasure
from forebay.storage.lifetime import Lifetime
from forebay.storage.moves import Moves, refusal_of_moves
from forebay.storage.recovery import Progress, Recovered
from forebay.storage.shards import TopicShards, current
from forebay.storage.status import watch_shard
from forebay.storage.usage import TierUsage
from forebay.storage.views import TopicViews
from forebay.subscriptions.definitions import SubscriptionStore
from forebay.topics import Engine, ShardRef, TopicSpec
from forebay.workers import Background


class MemoryShards:
    """The `Shards` of a log in memory: no other process can own one, so reading one opens it."""

    def __init__(
        self,
        engine: MemoryEngine,
        definitions: Definitions,
        lifetime: Lifetime,
        on_opened: Callable[[OwnedShard], None],
    ) -> None:
        """`on_opened` is called with each shard that was opened here, with its lock held."""
        self._engine = engine
        self._definitions = definitions
        self._lifetime = lifetime
        self._on_opened = on_opened

    def find(self, ref: ShardRef) -> OwnedShard | None:
        """See `Shards`."""
        return self._engine.find(ref)

    def all(self) -> list[OwnedShard]:
        """See `Shards`."""
        return [*self._engine.shards()]

    def was_here(self, ref: ShardRef) -> bool:
        """See `Shards`: nothing is left of a shard that is not open."""
        return False

    def own(self, ref: ShardRef) -> OwnedShard:
        """See `Shards`."""
        self._lifetime.check()
        with self._engine.registry.lock(ref.spec.topic_id, ref.partition):
            shard = self._engine.open_shard(current(ref, self._definitions, self._lifetime))
            self._on_opened(shard)
            return shard

    def take_over(self, ref: ShardRef, accepted_by: str) -> OwnedShard:
        """See `Shards`."""
        return self.own(ref)

    def ours(self, ref: ShardRef) -> OwnedShard:
        """See `Shards`."""
        return self.own(ref)

    def read(self, ref: ShardRef) -> ReadShard:
        """See `Shards`."""
        return self.own(ref)

    def of_topic(self, spec: TopicSpec) -> TopicShards:
        """See `Shards`."""
        registry = self._engine.registry
        return TopicShards(spec, self, owned=registry, readable=registry, lifetime=self._lifetime)


class InMemoryBackend:
    """The backend of a log in memory; see `WritableBackend`."""

    is_read_only = False
    path = None
    directory_id = None
    default_durability: str | None = "ephemeral"

    def __init__(
        self, settings: Settings, metadata: MetadataStore, engine: MemoryEngine, *, clock: Clock, lifetime: Lifetime
    ) -> None:
        self.metadata = metadata
        self.meter = LogMeter(clock, settings.metrics.topics)
        self._engine = engine
        self.definitions = Definitions(metadata, settings.metadata.prefix, clock, is_alone=True)
        self.cursors = Cursors(ProgressStore(metadata, settings.metadata.prefix, clock), settings.progress, clock)
        self.subscriptions = SubscriptionStore(metadata, settings.metadata.prefix, clock)
        self.committers = Committers(clock, settings.runtime)
        self.shards = MemoryShards(engine, self.definitions, lifetime, self._adopt_definition)
        self.alterations = Alterations(self.definitions, self.shards, self.subscriptions, clock, self._apply_limits)
        self.following = DefinitionsWorker(
            self.definitions,
            self.alterations,
            clock=clock,
            on_changes=lambda changes: None,
            on_deleted=lambda spec: True,
        )
        """Never started: no other process can change anything here."""
        evict_s = settings.retention.evict_interval_s
        self.limits = LimitsWorker(self.shards, clock=clock, interval_s=evict_s, follow_changes=self.following.step)
        self.deletions = Deletions(
            metadata,
            settings,
            clock,
            holder=IN_MEMORY,
            objects=None,
            drop=self.limits.drop,
            delete_shard=engine.delete_shard,
            forget_topic=self._forget_topic,
        )
        self.creations = Creations(metadata, self.definitions, self.deletions, settings, clock, prepare=engine.prepare)
        self.background = Background()
        self.background.add(*self.committers.workers, self.limits.worker, self.cursors.worker)

    @classmethod
    def open(cls, settings: Settings, *, clock: Clock, lifetime: Lifetime) -> InMemoryBackend:
        """A new log, without topics."""
        metadata = MemoryMetadata()
        session = OwnerSession(metadata, settings.metadata.lease_ttl_s, IN_MEMORY)
        engine = MemoryEngine(settings, clock=clock, metadata=metadata, owner_session=session)
        return cls(settings, metadata, engine, clock=clock, lifetime=lifetime)

    @property
    def loads(self) -> Loads:
        """Refused: only topics with files take a load."""
        raise Unsupported("this log keeps everything in memory: only topics with files take a load")

    @property
    def views(self) -> TopicViews:
        """Refused: there is nothing that another process could read."""
        raise Unsupported("this log keeps everything in memory: no other process, and so no Spark, reads it")

    def writable(self) -> InMemoryBackend:
        """See `Backend`."""
        return self

    def free_bytes(self) -> dict[str, int]:
        """See `Backend`: it writes to none."""
        return {}

    def check_creation(self, spec: TopicSpec) -> None:
        """See `WritableBackend`."""
        if spec.engine is not Engine.MEMORY:
            raise Unsupported(f'this log keeps everything in memory: create {spec.name} with durability "ephemeral"')

    def usage(self, specs: Sequence[TopicSpec]) -> list[TierUsage]:
        """See `WritableBackend`: there are no files."""
        return []

    def moves_of(self, spec: TopicSpec) -> Moves:
        """Refused: topics in memory are not exported, sealed and moved."""
        raise refusal_of_moves(spec)

    def forget(self, ref: ShardRef) -> None:
        """See `WritableBackend`."""
        self.limits.forget(ref)

    def retain(self, shard: OwnedShard) -> int:
        """See `WritableBackend`: there are no files."""
        return 0

    def clear_moved(self) -> None:
        """Nothing: no shard moves from here."""

    def erasure_of(self, shard: OwnedShard) -> ShardErasure:
        """See `WritableBackend`: what is deleted is gone."""
        return NothingLeft()

    def recover(self, on_progress: Progress) -> Recovered:
        """Nothing: what is not open is gone."""
        return Recovered(opened=0, failed=())

    def close(self) -> None:
        """See `Backend`."""
        with ExitStack() as last_first:
            last_first.callback(self.metadata.close)
            last_first.callback(self._engine.close)
            last_first.callback(self.cursors.end)
            last_first.callback(self.following.end)
            last_first.callback(self.background.stop)

    def _adopt_definition(self, shard: OwnedShard) -> None:
        """Bring a shard that was just opened to the topic's present definition. Its lock is held."""
        self.alterations.bring_up_to_date(shard)
        watch_shard(self.meter, shard)

    def _apply_limits(self, spec: TopicSpec) -> None:
        """A handle or shard here goes by this definition now."""
        if spec.ends_records:
            self.limits.worker.start()

    def _forget_topic(self, spec: TopicSpec) -> None:
        """A topic was deleted: nothing that is kept by its id or name stays."""
        self.alterations.forget(spec)
        self.cursors.forget_topic(spec)
