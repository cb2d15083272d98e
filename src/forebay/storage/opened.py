"""The open shards of a log, shared by all handles of a topic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from forebay.engines import FollowingEngine, MemoryEngine, OpenShard, RocksEngine, SegmentEngine
from forebay.errors import Unavailable, UnknownTopic
from forebay.locks import Rank, RankedRLock
from forebay.shard import ShardRef
from forebay.storage.building import Parts
from forebay.storage.definitions import Definitions
from forebay.topics import Engine

Progress = Callable[[float], None]
_Engine: TypeAlias = MemoryEngine | RocksEngine | SegmentEngine | FollowingEngine


class OpenShards:
    """Opens each shard once, on the engine that its topic names."""

    def __init__(self, parts: Parts, definitions: Definitions, check_open: Callable[[], None]) -> None:
        self.changing = RankedRLock(Rank.REGISTRY, "storage.shards")
        """Held while a topic is deleted and while a shard is opened: none is opened behind a deletion's back."""
        self.on_opened: Callable[[OpenShard], None] = lambda shard: None
        """Hears of each shard before its first use."""
        self._parts = parts
        self._definitions = definitions
        self._check_open = check_open
        self._opened: dict[tuple[str, int], OpenShard] = {}
        """By topic id and partition. Changed in single steps, without a lock."""

    def find(self, topic_id: str, partition: int) -> OpenShard | None:
        """The shard, if it is open. Takes no lock."""
        return self._opened.get((topic_id, partition))

    def of(self, topic_id: str) -> list[OpenShard]:
        """The open shards of a topic."""
        return [shard for (of_topic, _), shard in self._opened.copy().items() if of_topic == topic_id]

    def all(self) -> list[OpenShard]:
        """Every open shard."""
        return list(self._opened.copy().values())

    def open(self, ref: ShardRef) -> OpenShard:
        """The shard, owned by this process and opened by the definition that its topic has now.

        Acquires the shard if this process does not own it, which takes it over from an owner that is gone: for
        appends, other writes, and callers who ask for it by name.
        """
        with self.changing:
            ref, engine = self._current(ref)
            return self._opened_in(ref, engine, engine.open_shard)

    def open_here(self, ref: ShardRef) -> OpenShard:
        """As `open`, for background work: `Unavailable` if another directory holds the shard."""
        with self.changing:
            ref, engine = self._current(ref)
            return self._opened_in(ref, engine, engine.open_here)

    def look(self, ref: ShardRef) -> OpenShard:
        """The shard for a caller who only looks: opened if it is this directory's, else as it is recorded.

        Acquires nothing that another directory holds, that was sealed or that was never used. A shard that is
        recorded as this directory's is acquired and recovered: only its log says where it ends.
        """
        unowned = self._parts.unowned
        if unowned is None:
            return self.open(ref)
        found = unowned.found(ref)
        if found is not None:
            return found
        with self.changing:
            ref, engine = self._current(ref)
            if unowned.found(ref) is None:
                unowned.leave(ref, None)
            if engine.is_unowned(ref):
                return unowned.open_shard(ref)
            return self._opened_in(ref, engine, engine.open_here)

    def _current(self, ref: ShardRef) -> tuple[ShardRef, _Engine]:
        """The shard by the present definition of its topic, and the engine that has it."""
        self._check_open()
        # A handle may outlive its topic: what it names must not come to life again by being used.
        spec = self._definitions.current(ref.spec)
        if spec is None:
            raise UnknownTopic(f"topic {ref.spec.name} was deleted: this handle has ended")
        return ShardRef(spec, ref.partition), self._parts.engine_of(spec)

    def _opened_in(self, ref: ShardRef, engine: _Engine, opening: Callable[[ShardRef], OpenShard]) -> OpenShard:
        place = _place(ref)
        while True:
            try:
                shard = opening(ref)
            except OSError as error:
                raise Unavailable(f"{ref} cannot be opened: {error}; once the disk works, try again") from error
            self.on_opened(shard)
            self._opened[place] = shard
            # A thread that gives a shard up removes it from the engine first: then it is seen here, or taken out there.
            if engine.has(ref, shard):
                self._leave_unowned(ref, shard)
                return shard
            self._opened.pop(place, None)

    def _leave_unowned(self, ref: ShardRef, owned: OpenShard | None) -> None:
        if self._parts.unowned is not None:
            self._parts.unowned.leave(ref, owned)

    def take_in(self, engine: SegmentEngine | RocksEngine) -> None:
        """Count the shards that are open in an engine as used: their limits are applied from now on."""
        for shard in engine.shards():
            place = _place(shard.ref)
            if self._opened.get(place) is not shard:
                self.on_opened(shard)
                self._opened[place] = shard
                if engine.has(shard.ref, shard):
                    self._leave_unowned(shard.ref, shard)
                else:
                    self._opened.pop(place, None)

    def let_go(self, ref: ShardRef) -> None:
        """The next use of the shard opens it anew."""
        self._opened.pop(_place(ref), None)
        self._leave_unowned(ref, None)

    def drop_closed(self, ref: ShardRef) -> None:
        """Take out a shard that was closed, where somebody was quick enough to find it before that.

        One that was opened anew since stays, and whoever works on it goes on.
        """
        shard = self._opened.get(_place(ref))
        if shard is not None and self._parts.owned is not None and not self._parts.owned.has(ref, shard):
            self._opened.pop(_place(ref), None)

    def abandon(self) -> None:
        """In a forked child: whoever held the lock does not exist, and every use must ask anew."""
        self.changing = RankedRLock(Rank.REGISTRY, "storage.shards")
        self._opened.clear()


def _place(ref: ShardRef) -> tuple[str, int]:
    return ref.spec.topic_id, ref.partition


def open_all(
    segment: SegmentEngine, rocksdb: RocksEngine | None, refs: Sequence[ShardRef], on_progress: Progress
) -> None:
    """Open those of these shards that are here now; `on_progress` hears 0.0 to 1.0, by bytes walked."""
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
    on_progress(1.0)
