"""Topics that are altered while they are used: the definition changes in one transaction, handles and shards follow."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator

from forebay.clock import Clock
from forebay.engines import OwnedShard
from forebay.engines.unowned import UnownedShard
from forebay.errors import Conflict
from forebay.locks import Rank, RankedLock
from forebay.shard import ShardRef, refs_of
from forebay.storage.definitions import Defined, Definitions
from forebay.storage.shards import Shards
from forebay.storage.topic import Topic
from forebay.topics import Cleanup, OnFull, TopicChanges, TopicName, TopicSpec


class Alterations:
    """Changes definitions, and has the handles and shards here go by each change, made here or elsewhere."""

    def __init__(
        self,
        definitions: Definitions,
        shards: Shards,
        clock: Clock,
        on_adopted: Callable[[TopicSpec], None],
    ) -> None:
        """`on_adopted` is called with each definition that handles here go by from now on."""
        self._on_adopted = on_adopted
        self._definitions = definitions
        self._shards = shards
        self._clock = clock
        self._lock = RankedLock(Rank.TOPIC, "storage.handles")
        self._newest: dict[str, Defined] = {}
        self._handles: dict[str, weakref.WeakSet[Topic]] = {}
        self._turns: dict[str, Iterator[int]] = {}

    def turns(self, topic_id: str) -> Iterator[int]:
        """What the handles of a topic count records without a key by, so that they continue one sequence."""
        with self._lock:
            return self._turns.setdefault(topic_id, itertools.count())

    def note(self, topic: Topic) -> None:
        """Have a handle follow changes from now on; it goes by the newest definition on return."""
        with self._lock:
            self._handles.setdefault(topic.spec.topic_id, weakref.WeakSet()).add(topic)
            newest = self._newest.get(topic.spec.topic_id)
            if newest is not None:
                topic.adopt(newest.spec)
        self._on_adopted(topic.spec)

    def follow(self, spec: TopicSpec) -> None:
        """Have the shards of a topic follow changes from now on, also while the topic has no handle."""
        with self._lock:
            self._handles.setdefault(spec.topic_id, weakref.WeakSet())
        self._on_adopted(spec)

    def bring_up_to_date(self, shard: OwnedShard) -> None:
        """A shard was opened: it goes by the newest definition on return."""
        with self._lock:
            newest = self._newest.get(shard.ref.spec.topic_id)
            if newest is not None:
                _tell(shard, newest.spec)

    def adopt(self, defined: Defined) -> None:
        """Have the handles and shards of the topic go by this definition, unless they know a newer one."""
        topic_id = defined.spec.topic_id
        with self._lock:
            known = self._newest.get(topic_id)
            if known is not None and known.revision >= defined.revision:
                return
            self._newest[topic_id] = defined
            for topic in self._handles.get(topic_id, ()):
                topic.adopt(defined.spec)
            for shard in self._open_shards(topic_id):
                _tell(shard, defined.spec)
        self._on_adopted(defined.spec)

    def adopt_changed(self, defined: Defined) -> None:
        """Adopt a definition, if anything here goes by it."""
        if defined.spec.topic_id in self._handles:
            self.adopt(defined)

    def forget(self, topic_id: str) -> None:
        """Drop what is known of a topic that was deleted."""
        with self._lock:
            self._handles.pop(topic_id, None)
            self._newest.pop(topic_id, None)
            self._turns.pop(topic_id, None)

    def alter(
        self,
        name: str | TopicName,
        changes: TopicChanges,
        *,
        allow_loss: bool,
        check: Callable[[TopicSpec], None],
    ) -> TopicSpec:
        """See `Storage.alter_topic`; `check` raises if a topic so defined cannot live here."""

        def altered(spec: TopicSpec) -> TopicSpec:
            changed = spec.altered(**changes)
            if changed != spec:
                check(changed)
                if not allow_loss:
                    self._check_loss(spec, changed)
            return changed

        defined = self._definitions.alter(TopicName.parse(name), altered)
        self.adopt(defined)
        return defined.spec

    def _open_shards(self, topic_id: str) -> list[OwnedShard]:
        return [shard for shard in self._shards.all() if shard.ref.spec.topic_id == topic_id]

    def _check_loss(self, old: TopicSpec, new: TopicSpec) -> None:
        """`Conflict` if a limit that is new would end records at once."""
        tightened = {
            what: getattr(new, what)
            for what in ("cap_records", "cap_bytes", "ttl_ms")
            if getattr(new, what) not in (None, getattr(old, what))
            or (what != "ttl_ms" and getattr(new, what) is not None and new.on_full != old.on_full)
        }
        if new.on_full is OnFull.REJECT_NEW:
            tightened.pop("cap_records", None)
            tightened.pop("cap_bytes", None)
        sooner = old.cleanup is not Cleanup.COMPACT or new.compact_lag_ms < old.compact_lag_ms
        if new.cleanup is Cleanup.COMPACT and sooner:
            tightened["compact_lag_ms"] = new.compact_lag_ms
        if tightened:
            for ref in refs_of(old):
                self._check_shard(ref, tightened)

    def _check_shard(self, ref: ShardRef, tightened: dict[str, int]) -> None:
        found = self._shards.read(ref)
        if isinstance(found, UnownedShard):
            if found.holder is not None:
                raise Conflict(
                    f"{ref} is held by directory {found.holder} and not owned here, so what a limit would end of it is "
                    "not known: alter the topic where it is owned, or allow it with allow_loss=True (--allow-loss)"
                )
            return
        shard = self._shards.ours(ref)
        held = shard.holding()
        count = held.head - held.earliest
        exceeded = {
            "cap_records": f"holds {count} offsets" if count > tightened.get("cap_records", count) else "",
            "cap_bytes": f"holds {held.bytes} bytes"
            if held.bytes > tightened.get("cap_bytes", held.bytes) and count > 1
            else "",
            "ttl_ms": "holds older records" if self._is_expired(shard, tightened.get("ttl_ms")) else "",
            "compact_lag_ms": "holds older records" if self._is_expired(shard, tightened.get("compact_lag_ms")) else "",
        }
        for what, said in exceeded.items():
            if said:
                ended = "what of them is superseded" if what == "compact_lag_ms" else "the oldest"
                raise Conflict(
                    f"{ref} {said}, and {what} {tightened[what]} would end {ended} at once: choose a higher limit, "
                    "or allow it with allow_loss=True (--allow-loss)"
                )

    def _is_expired(self, shard: OwnedShard, ttl_ms: int | None) -> bool:
        """Whether the oldest record is too old for this time to live."""
        at, end = shard.offsets().earliest, shard.published()
        while ttl_ms is not None and at < end:
            page = shard.read(at, 1)
            if page.batches:
                return page.batches[0].appended()[0].at + ttl_ms <= self._clock.now_ms()
            at = page.next
        return False


def _tell(shard: OwnedShard, spec: TopicSpec) -> None:
    if shard.ref.spec != spec:
        shard.adopt(spec)
