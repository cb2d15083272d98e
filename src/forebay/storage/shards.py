"""The shards of a log for its topics: opened on the engine that the topic names, to be owned or to be looked at.

Every way in holds the lock of that one shard and reads the definition of its topic under it. A deletion first makes
the topic unknown and then takes the lock of each of its shards, so none is opened after a deletion has removed it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from forebay.disk.forks import FORKS, ForkGuard
from forebay.engines import FollowingEngine, MemoryEngine, OwnedShard, ReadShard, RocksEngine, SegmentEngine
from forebay.errors import Unavailable, UnknownTopic, Unsupported
from forebay.shard import ShardRef
from forebay.storage.building import Parts
from forebay.storage.definitions import Definitions
from forebay.topics import Engine, TopicSpec

S = TypeVar("S")
Progress = Callable[[float], None]
_Owner: TypeAlias = MemoryEngine | RocksEngine | SegmentEngine


class TopicShards:
    """The shards of one topic for its handles: those that are open, else opened with the intent that is named.

    In a forked child every call raises `Closed`, before it takes a lock.
    """

    __slots__ = ("_find", "_find_owned", "_guard", "_shards", "_topic_id", "spec")

    def __init__(self, spec: TopicSpec, shards: Shards, engine: _Owner | FollowingEngine, guard: ForkGuard) -> None:
        self.spec = spec
        """The definition that shards are opened by."""
        self._topic_id = spec.topic_id
        self._shards = shards
        self._find: Callable[[str, int], ReadShard | None] = engine.registry.find
        self._find_owned: Callable[[str, int], OwnedShard | None] = (
            engine.registry.find if not isinstance(engine, FollowingEngine) else lambda topic_id, partition: None
        )
        self._guard = guard

    def own(self, partition: int) -> OwnedShard:
        """The shard of a partition, owned by this process; see `Shards.own`."""
        if self._guard.generation != FORKS.generation:
            self._guard.check("this log")
        found = self._find_owned(self._topic_id, partition)
        return found if found is not None else self._shards.own(ShardRef(self.spec, partition))

    def read(self, partition: int) -> ReadShard:
        """The shard of a partition for a caller who only looks; see `Shards.read`."""
        self._guard.check("this log")
        found = self._find(self._topic_id, partition)
        return found if found is not None else self._shards.read(ShardRef(self.spec, partition))

    def find(self, partition: int) -> OwnedShard | None:
        """The shard of a partition, if this process owns it and has it open. Takes no lock."""
        self._guard.check("this log")
        return self._find_owned(self._topic_id, partition)


class Shards:
    """Opens shards with one of two intents: to own them, or to read what can be read without owning them."""

    def __init__(
        self,
        parts: Parts,
        definitions: Definitions,
        check_open: Callable[[], None],
        on_opened: Callable[[OwnedShard], None],
    ) -> None:
        """`on_opened` is called with each shard that was opened here, with its lock held."""
        self._on_opened = on_opened
        self._parts = parts
        self._definitions = definitions
        self._check_open = check_open

    def find(self, ref: ShardRef) -> OwnedShard | None:
        """The shard, if this process owns it and has it open. Takes no lock."""
        engine = self._parts.engine_of(ref.spec)
        return None if isinstance(engine, FollowingEngine) else engine.find(ref)

    def of(self, topic_id: str) -> list[OwnedShard]:
        """The open shards of a topic that this process owns."""
        return [shard for shard in self.all() if shard.ref.spec.topic_id == topic_id]

    def all(self) -> list[OwnedShard]:
        """Every open shard that this process owns."""
        engines: tuple[_Owner | None, ...] = (self._parts.owned, self._parts.rocksdb, self._parts.memory)
        return [shard for engine in engines if engine is not None for shard in engine.shards()]

    def own(self, ref: ShardRef) -> OwnedShard:
        """The shard, owned by this process and opened by the definition that its topic has now.

        Acquires the shard if this process does not own it, which takes it over from an owner that is gone: for
        appends, other writes, and callers who ask for it by name. `Unsupported` on a log that is opened read-only.
        """
        self._check_open()
        engine = self._owner(ref)
        with engine.registry.lock(ref.spec.topic_id, ref.partition):
            return self._owned(engine.open_shard, self._current(ref))

    def ours(self, ref: ShardRef) -> OwnedShard:
        """As `own`, for background work: `Unavailable` if another directory holds the shard."""
        self._check_open()
        engine = self._owner(ref)
        with engine.registry.lock(ref.spec.topic_id, ref.partition):
            return self._owned(engine.open_here, self._current(ref))

    def read(self, ref: ShardRef) -> ReadShard:
        """The shard for a caller who only looks: opened if it is this directory's, else as it is recorded.

        Acquires nothing that another directory holds, that was sealed or that was never used. A shard that is
        recorded as this directory's is acquired and recovered: only its log says where it ends.
        """
        self._check_open()
        engine, unowned = self._parts.engine_of(ref.spec), self._parts.unowned
        if isinstance(engine, FollowingEngine):
            with engine.registry.lock(ref.spec.topic_id, ref.partition):
                return _opened(engine.open_shard, self._current(ref))
        if unowned is None:
            return self.own(ref)
        found = unowned.found(ref)
        if found is not None:
            return found
        with engine.registry.lock(ref.spec.topic_id, ref.partition):
            owned = engine.find(ref)
            if owned is not None:
                return owned
            ref = self._current(ref)
            if not engine.may_own(ref):
                return unowned.open(ref)
            return self._owned(engine.open_here, ref)

    def recover(self, refs: Sequence[ShardRef], on_progress: Progress) -> None:
        """Open those of these shards that are here now; `on_progress` is called with 0.0 to 1.0, by bytes walked."""
        segment, rocksdb = self._parts.owned, self._parts.rocksdb
        if segment is None:
            return
        logs = [ref for ref in refs if ref.spec.engine is Engine.SEGMENT]
        done, total = 0, sum(segment.tail_bytes(ref) for ref in logs) or 1

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            on_progress(min(0.999, done / total))

        try:
            try:
                segment.open_many(logs, on_bytes)
            finally:
                if rocksdb is not None:
                    rocksdb.open_many([ref for ref in refs if ref.spec.engine is Engine.ROCKSDB])
        except OSError as error:
            raise Unavailable(f"not every shard could be opened: {error}; once the disk works, try again") from error
        finally:
            for shard in self.all():
                self._introduce(shard)
        on_progress(1.0)

    def leave_unowned(self, ref: ShardRef) -> None:
        """Readers of this shard that go by what is recorded ask for it again from now on."""
        if self._parts.unowned is not None:
            self._parts.unowned.leave(ref, None)

    def _current(self, ref: ShardRef) -> ShardRef:
        """The shard by the present definition of its topic. Called with the shard's lock held."""
        self._check_open()
        # A handle may outlive its topic: what it names must not come to life again by being used.
        spec = self._definitions.current(ref.spec)
        if spec is None:
            raise UnknownTopic(f"topic {ref.spec.name} was deleted: this handle has ended")
        return ShardRef(spec, ref.partition)

    def _owner(self, ref: ShardRef) -> _Owner:
        engine = self._parts.engine_of(ref.spec)
        if isinstance(engine, FollowingEngine):
            raise Unsupported(
                f"{ref} is opened read-only: write in the process that owns the directory, or open the log for writing"
            )
        return engine

    def _owned(self, opening: Callable[[ShardRef], OwnedShard], ref: ShardRef) -> OwnedShard:
        shard = _opened(opening, ref)
        self._introduce(shard)
        return shard

    def _introduce(self, shard: OwnedShard) -> None:
        """Have the shard go by the newest definition, and readers of what is recorded of it ask for it again."""
        self._on_opened(shard)
        if self._parts.unowned is not None:
            self._parts.unowned.leave(shard.ref, shard)


def _opened(opening: Callable[[ShardRef], S], ref: ShardRef) -> S:
    try:
        return opening(ref)
    except OSError as error:
        raise Unavailable(f"{ref} cannot be opened: {error}; once the disk works, try again") from error
