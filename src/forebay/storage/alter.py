"""Topics that are altered while they are used: the definition changes in one transaction, handles and shards follow."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence

from forebay.clock import Clock
from forebay.definitions import Defined, Definitions
from forebay.engines import OwnedShard
from forebay.engines.unowned import UnownedShard
from forebay.errors import Conflict
from forebay.locks import Rank, RankedLock
from forebay.metadata import RevisionIs
from forebay.storage.shards import Shards
from forebay.storage.topic import Topic
from forebay.subscriptions.definitions import SubscriptionStore
from forebay.topics import Cleanup, OnFull, ShardRef, TopicChanges, TopicName, TopicSpec, refs_of


class _UsedTopic:
    """What goes by the definition of one topic in this process. Protected by the lock of `Alterations`."""

    __slots__ = ("handles", "newest", "spec", "turns")

    def __init__(self, spec: TopicSpec) -> None:
        self.spec = spec
        """As it was defined when it was first used here, or the newest definition."""
        self.newest: Defined | None = None
        self.handles: weakref.WeakSet[Topic] = weakref.WeakSet()
        self.turns: Iterator[int] = itertools.count()


class Alterations:
    """Changes definitions, and has the handles and shards here go by each change, made here or elsewhere.

    Knows the topics that this process uses: those with a handle or an open shard, now or earlier.
    """

    def __init__(
        self,
        definitions: Definitions,
        shards: Shards,
        subscriptions: SubscriptionStore,
        clock: Clock,
        on_adopted: Callable[[TopicSpec], None],
    ) -> None:
        """`on_adopted` is called with each definition that handles here go by from now on."""
        self._subscriptions = subscriptions
        self._on_adopted = on_adopted
        self._definitions = definitions
        self._shards = shards
        self._clock = clock
        self._lock = RankedLock(Rank.TOPIC, "storage.handles")
        self._used: dict[TopicName, dict[str, _UsedTopic]] = {}
        """By name and id: of a name that was deleted and created again there may be two for a while."""

    def turns(self, spec: TopicSpec) -> Iterator[int]:
        """What the handles of a topic count records without a key by, so that they continue one sequence."""
        with self._lock:
            return self._of(spec).turns

    def note(self, topic: Topic) -> None:
        """Have a handle follow changes from now on; it goes by the newest definition on return."""
        with self._lock:
            used = self._of(topic.spec)
            used.handles.add(topic)
            if used.newest is not None:
                topic.adopt(used.newest.spec)
        self._on_adopted(topic.spec)

    def follow(self, spec: TopicSpec) -> None:
        """Have the shards of a topic follow changes from now on, also while the topic has no handle."""
        with self._lock:
            self._of(spec)
        self._on_adopted(spec)

    def bring_up_to_date(self, shard: OwnedShard) -> None:
        """A shard was opened: it goes by the newest definition on return, and follows changes from now on."""
        with self._lock:
            newest = self._of(shard.ref.spec).newest
            if newest is not None:
                _adopt(shard, newest.spec)

    def adopt(self, defined: Defined) -> None:
        """Have the handles and shards of the topic go by this definition, unless they know a newer one."""
        with self._lock:
            used = self._of(defined.spec)
            if used.newest is not None and used.newest.revision >= defined.revision:
                return
            used.newest, used.spec = defined, defined.spec
            for topic in used.handles:
                topic.adopt(defined.spec)
            for ref in refs_of(defined.spec):
                shard = self._shards.find(ref)
                if shard is not None:
                    _adopt(shard, defined.spec)
        self._on_adopted(defined.spec)

    def adopt_changed(self, defined: Defined) -> None:
        """Adopt a definition, if anything here goes by it."""
        if defined.spec.topic_id in self._used.get(defined.spec.name, ()):
            self.adopt(defined)

    def names(self) -> list[TopicName]:
        """The names of the topics that are used here."""
        return list(self._used.copy())

    def used(self, name: TopicName) -> list[TopicSpec]:
        """The topics of this name that are used here, as last defined."""
        return [used.spec for used in self._used.get(name, {}).copy().values()]

    def forget(self, spec: TopicSpec) -> None:
        """Drop what is known of a topic that was deleted."""
        with self._lock:
            used = self._used.get(spec.name, {})
            used.pop(spec.topic_id, None)
            if not used:
                self._used.pop(spec.name, None)

    def _of(self, spec: TopicSpec) -> _UsedTopic:
        """What goes by the definition of a topic, which is used from now on. The caller holds the lock."""
        of_name = self._used.setdefault(spec.name, {})
        used = of_name.get(spec.topic_id)
        if used is None:
            used = of_name[spec.topic_id] = _UsedTopic(spec)
        return used

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

        def guards(old: TopicSpec, new: TopicSpec) -> Sequence[RevisionIs]:
            return [] if new.dispatch is old.dispatch else self._subscriptions.none_of(old)

        defined = self._definitions.alter(TopicName.parse(name), altered, guards)
        self.adopt(defined)
        return defined.spec

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


def _adopt(shard: OwnedShard, spec: TopicSpec) -> None:
    if shard.ref.spec != spec:
        shard.adopt(spec)
