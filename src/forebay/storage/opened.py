"""The open shards of a log, shared by all handles of a topic."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from forebay.engines import OpenShard, RocksEngine, SegmentEngine
from forebay.errors import Unavailable, UnknownTopic
from forebay.shard import ShardRef
from forebay.storage.building import Parts
from forebay.storage.definitions import Definitions
from forebay.topics import Engine

Progress = Callable[[float], None]


class OpenShards:
    """Opens each shard once, on the engine that its topic names."""

    def __init__(self, parts: Parts, definitions: Definitions, check_open: Callable[[], None]) -> None:
        self.changing = threading.RLock()
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
        """The shard, opened by the definition that its topic has now."""
        place = _place(ref)
        with self.changing:
            self._check_open()
            # A handle may outlive its topic: what it names must not come to life again by being used.
            spec = self._definitions.current(ref.spec)
            if spec is None:
                raise UnknownTopic(f"topic {ref.spec.name} was deleted: this handle has ended")
            ref = ShardRef(spec, ref.partition)
            engine = self._parts.engine_of(spec)
            while True:
                try:
                    shard = engine.open_shard(ref)
                except OSError as error:
                    raise Unavailable(f"{ref} cannot be opened: {error}; once the disk works, try again") from error
                self.on_opened(shard)
                self._opened[place] = shard
                # Whoever gives a shard up lets go of it in the engine first: then it is seen here, or taken out there.
                if engine.has(ref, shard):
                    return shard
                self._opened.pop(place, None)

    def take_in(self, engine: SegmentEngine | RocksEngine) -> None:
        """Count the shards that are open in an engine as used: their limits are applied from now on."""
        for shard in engine.shards():
            place = _place(shard.ref)
            if self._opened.get(place) is not shard:
                self.on_opened(shard)
                self._opened[place] = shard
                if not engine.has(shard.ref, shard):
                    self._opened.pop(place, None)

    def let_go(self, ref: ShardRef) -> None:
        """The next use of the shard opens it anew."""
        self._opened.pop(_place(ref), None)

    def drop_closed(self, ref: ShardRef) -> None:
        """Take out a shard that was closed, where somebody was quick enough to find it before that.

        One that was opened anew since stays, and whoever works on it goes on.
        """
        shard = self._opened.get(_place(ref))
        if shard is not None and self._parts.owned is not None and not self._parts.owned.has(ref, shard):
            self._opened.pop(_place(ref), None)

    def abandon(self) -> None:
        """In a forked child: whoever held the lock does not exist, and every use must ask anew."""
        self.changing = threading.RLock()
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
