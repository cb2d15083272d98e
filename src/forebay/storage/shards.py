"""The shards of a log for its topics: opened on the engine that the topic names, to be owned or to be read.

Every way in holds the lock of that one shard and reads the definition of its topic under it. A deletion first makes
the topic unknown and then takes the lock of each of its shards, so none is opened after a deletion has removed it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from forebay.appends.callbacks import deferred
from forebay.arguments import checked_partition
from forebay.catalog import read_state, state_entries
from forebay.definitions import Definitions
from forebay.disk.forks import FORKS
from forebay.engines import MemoryEngine, OwnedShard, ReadShard, UnownedShards
from forebay.engines.directory import Engines
from forebay.engines.readonly import FollowedShard
from forebay.errors import Closed, Corrupt, Moved, Unavailable, UnknownTopic, UnsupportedFormat
from forebay.format.metadata.keys import state_key
from forebay.metadata import MetadataStore
from forebay.partitioning import check_partition
from forebay.shard.ownership import MayOwn
from forebay.storage.lifetime import Lifetime
from forebay.storage.recovery import Progress, Recovered, Recovery
from forebay.topics import ShardRef, TopicSpec

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=ReadShard)
T = TypeVar("T")
S_co = TypeVar("S_co", covariant=True)


class Shards(Protocol):
    """The shards that a log can come by, with one of two intents: to own them, or to read without owning them."""

    def find(self, ref: ShardRef) -> OwnedShard | None:
        """The shard, if this process owns it and has it open. Takes no lock."""

    def all(self) -> list[OwnedShard]:
        """Every open shard that this process owns. Takes no lock."""

    def was_here(self, ref: ShardRef) -> bool:
        """Whether this directory had the shard last, so that opening it here takes it from no other."""

    def own(self, ref: ShardRef) -> OwnedShard:
        """The shard, owned by this process and opened by the definition that its topic has now.

        Acquires the shard if this process does not own it: for appends, other writes, and callers who ask for it by
        name. Takes it over from an owner that is gone, unless that one may have records that history lacks:
        `Unavailable` then, but where the topic allows the loss. `Unsupported` on a log that is opened read-only.
        """

    def take_over(self, ref: ShardRef, accepted_by: str) -> OwnedShard:
        """As `own`, for an operator who accepts that what the last holder has not exported is lost."""

    def ours(self, ref: ShardRef) -> OwnedShard:
        """As `own`, for background work: `Unavailable` if another directory holds the shard."""

    def read(self, ref: ShardRef) -> ReadShard:
        """The shard for a caller who only looks. Acquires nothing that another directory may own."""

    def of_topic(self, spec: TopicSpec) -> TopicShards:
        """The shards of one topic, for its handles; `Unsupported` if this process cannot come by its records."""


class OpenShards(Protocol[S_co]):
    """Where the open shards of an engine are found, without a lock."""

    def find(self, topic_id: str, partition: int) -> S_co | None:
        """The shard, if it is open."""


class TopicShards:
    """The shards of one topic for its handles: those that are open, else opened with the intent that is named.

    In a forked child every call raises `Closed`, before it takes a lock.
    """

    __slots__ = ("_guard", "_owned", "_readable", "_shards", "_topic_id", "check_open", "spec")

    def __init__(
        self,
        spec: TopicSpec,
        shards: Shards,
        *,
        owned: OpenShards[OwnedShard],
        readable: OpenShards[ReadShard],
        lifetime: Lifetime,
    ) -> None:
        self.spec = spec
        """The definition that shards are opened by."""
        self._topic_id = spec.topic_id
        self._shards = shards
        self._owned = owned
        self._readable = readable
        self._guard = lifetime.guard
        self.check_open = lifetime.check
        """`Closed` once the log is closed, and in a forked child."""

    def own(self, partition: int) -> OwnedShard:
        """The shard of a partition, owned by this process; see `Shards.own`."""
        if self._guard.generation != FORKS.generation:
            self._guard.check("this log")
        found = self._owned.find(self._topic_id, partition)
        return found if found is not None else self._shards.own(ShardRef(self.spec, partition))

    def read(self, partition: int) -> ReadShard:
        """The shard of a partition for a caller who only looks; see `Shards.read`."""
        self._guard.check("this log")
        found = self._readable.find(self._topic_id, partition)
        return found if found is not None else self._shards.read(ShardRef(self.spec, partition))

    def find(self, partition: int) -> OwnedShard | None:
        """The shard of a partition, if this process owns it and has it open. Takes no lock."""
        self._guard.check("this log")
        return self._owned.find(self._topic_id, partition)

    def serves(self, partition: int, shard: ReadShard) -> bool:
        """Whether this shard answers for the partition now, and no other does, nor none. Takes no lock."""
        owned = self._owned.find(self._topic_id, partition)
        if isinstance(shard, FollowedShard):
            return owned is None and not shard.is_over
        return owned is shard

    def ask(self, partition: int, call: Callable[[ReadShard], T]) -> T:
        """What the shard of a partition answers to a caller who only looks; `Invalid` if there is no such partition."""
        return _answer(self.read, self.partition(partition), call)

    def ask_owned(self, partition: int, call: Callable[[OwnedShard], T]) -> T:
        """As `ask`, of the shard that this process owns, or acquires for it."""
        return _answer(self.own, self.partition(partition), call)

    def partition(self, number: int) -> int:
        """The number, if the topic has that partition; else `Invalid`."""
        check_partition(checked_partition(number), self.spec.partitions)
        return number


def _answer(find: Callable[[int], S], partition: int, call: Callable[[S], T]) -> T:
    shard = find(partition)
    try:
        return call(shard)
    except Closed:
        # Moved, deleted, lost, or owned here since: asking for it again says why, or gives the one to use now.
        found = find(partition)
        if found is shard:
            raise
        return call(found)
    except OSError as error:
        raise Unavailable(f"{shard.ref} cannot be searched: {error}; try again") from error


class OwnerShards:
    """The `Shards` of a data directory that this process owns."""

    def __init__(
        self,
        engines: Engines,
        unowned: UnownedShards,
        definitions: Definitions,
        lifetime: Lifetime,
        metadata: MetadataStore,
        *,
        prefix: str,
        may_own: MayOwn,
        on_opened: Callable[[OwnedShard], None],
    ) -> None:
        """`may_own` is asked before a shard is acquired, without a lock, in the thread that would acquire it.

        `on_opened` is called with each shard that was opened here, with its lock held.
        """
        self._may_own = may_own
        self._engines = engines
        self._metadata = metadata
        self._prefix = prefix
        self._unowned = unowned
        self._definitions = definitions
        self._lifetime = lifetime
        self._on_opened = on_opened

    def find(self, ref: ShardRef) -> OwnedShard | None:
        """See `Shards`."""
        return self._engines.of(ref.spec).find(ref)

    def all(self) -> list[OwnedShard]:
        """See `Shards`."""
        return self._engines.shards()

    def was_here(self, ref: ShardRef) -> bool:
        """See `Shards`. Of a shard in memory nothing is here once it is closed."""
        engine = self._engines.of(ref.spec)
        return not isinstance(engine, MemoryEngine) and self._may_own(ref) and engine.was_here(ref)

    def of_topic(self, spec: TopicSpec) -> TopicShards:
        """See `Shards`."""
        registry: OpenShards[OwnedShard] = self._engines.of(spec).registry
        return TopicShards(spec, self, owned=registry, readable=registry, lifetime=self._lifetime)

    def own(self, ref: ShardRef) -> OwnedShard:
        """See `Shards`; `Moved` if it is not open and `may_own` refuses it."""
        found = self._found_or_allowed(ref)
        if found is not None:
            return found
        engine = self._engines.of(ref.spec)
        with deferred(), engine.registry.lock(ref.spec.topic_id, ref.partition):
            return self._opened(engine.open_shard, self._current(ref))

    def take_over(self, ref: ShardRef, accepted_by: str) -> OwnedShard:
        """See `Shards`; `Moved` if it is not open and `may_own` refuses it. Topics of the segment engine alone."""
        found = self._found_or_allowed(ref)
        if found is not None:
            return found
        engine = self._engines.segment
        with deferred(), engine.registry.lock(ref.spec.topic_id, ref.partition):
            return self._opened(partial(engine.open_accepting_loss, by=accepted_by), self._current(ref))

    def ours(self, ref: ShardRef) -> OwnedShard:
        """See `Shards`; `Moved` if it is not open and `may_own` refuses it."""
        found = self._found_or_allowed(ref)
        if found is not None:
            return found
        engine = self._engines.of(ref.spec)
        with deferred(), engine.registry.lock(ref.spec.topic_id, ref.partition):
            return self._opened(engine.open_here, self._current(ref))

    def read(self, ref: ShardRef) -> ReadShard:
        """The shard for a caller who only looks: opened if it is this directory's, else as it is recorded.

        Acquires nothing that another directory holds, that was sealed, that was never used or that `may_own` refuses.
        A shard that is recorded as this directory's is acquired and recovered: only its log says where it ends.
        """
        self._lifetime.check()
        found = self._unowned.found(ref)
        if found is not None:
            return found
        engine, may_own = self._engines.of(ref.spec), self._may_own(ref)
        with deferred(), engine.registry.lock(ref.spec.topic_id, ref.partition):
            owned = engine.find(ref)
            if owned is not None:
                return owned
            ref = self._current(ref)
            if not engine.may_own(ref):
                return self._unowned.open(ref)
            if may_own:
                return self._opened(engine.open_here, ref)
            if engine is not self._engines.segment:
                raise _refusal(ref)  # Without an owner nothing shows the records of such a shard.
            return self._unowned.open(ref)

    def recover(self, refs: Sequence[ShardRef], openers: int, on_progress: Progress) -> Recovered:
        """Open those of these shards that are here now, with so many threads; see `Storage.recover`."""
        refs = [ref for ref in refs if self._may_own(ref)]
        recovery = Recovery(self._engines, self._opened_as_listed, self._is_elsewhere, on_progress)
        recovered = recovery.run(refs, state_entries(self._metadata, prefix=self._prefix), openers)
        # Closed meanwhile: that is no trouble of a shard.
        self._lifetime.check()
        for one in recovered.failed:
            logger.error("%s cannot be opened: %s", one.ref, one.error)
        return recovered

    def _is_elsewhere(self, ref: ShardRef) -> bool:
        """Whether a shard that was this directory's is no more: its topic was deleted, or it was sealed or moved.

        Reads the metadata store. What cannot be read there is not known to be elsewhere.
        """
        try:
            if not self._definitions.is_current(ref.spec):
                return True
            key = state_key(ref.spec.namespace, ref.spec.topic, ref.partition, prefix=self._prefix)
            stored = read_state(self._metadata, key)
        except (Corrupt, UnsupportedFormat):
            return False
        if stored is None or stored.state.holder is None:
            return False
        return not self._engines.segment.is_ours(stored.state)

    def _found_or_allowed(self, ref: ShardRef) -> OwnedShard | None:
        """The shard, if it is open; else `Moved` if this process may not own it.

        One that is open was allowed, and may be sealed here once the gate refuses it. The gate is asked before the
        lock: it is a function of the user's and may take long.
        """
        self._lifetime.check()
        found = self.find(ref)
        if found is None and not self._may_own(ref):
            raise _refusal(ref)
        return found

    def _current(self, ref: ShardRef) -> ShardRef:
        return current(ref, self._definitions, self._lifetime)

    def _opened(self, opening: Callable[[ShardRef], OwnedShard], ref: ShardRef) -> OwnedShard:
        """Open the shard. Called with its lock held, so that readers of what was recorded find it."""
        shard = opened(opening, ref)
        self._introduce(shard)
        return shard

    def _opened_as_listed(self, opening: Callable[[ShardRef], OwnedShard], ref: ShardRef) -> OwnedShard:
        """As `_opened`, for a shard of a list; `UnknownTopic` if its topic was deleted since, as far as is known here.

        By the definition as this process remembers it. One that another process alters now is followed; of a topic that
        another process deletes now, the recorded state of the shard says so, which `opening` reads.
        """
        self._lifetime.check()
        spec = self._definitions.find(ref.spec.name).spec
        if spec.topic_id != ref.spec.topic_id:
            raise UnknownTopic(f"{ref}: the topic was deleted, and there is another of its name", shard=ref)
        return self._opened(opening, ShardRef(spec, ref.partition))

    def _introduce(self, shard: OwnedShard) -> None:
        """Have the shard go by the newest definition, and readers of what is recorded of it ask for it again."""
        self._on_opened(shard)
        self._unowned.leave(shard.ref, shard)


def current(ref: ShardRef, definitions: Definitions, lifetime: Lifetime) -> ShardRef:
    """The shard by the present definition of its topic. Called with the shard's lock held."""
    lifetime.check()
    # A handle may outlive its topic: what it names must not come to life again by being used.
    spec = definitions.current(ref.spec)
    if spec is None:
        raise UnknownTopic(f"topic {ref.spec.name} was deleted: this handle has ended", topic=ref.spec.name)
    return ShardRef(spec, ref.partition)


def opened(opening: Callable[[ShardRef], S], ref: ShardRef) -> S:
    """What `opening` gives for the shard; `Unavailable` if the disk refuses it."""
    try:
        return opening(ref)
    except OSError as error:
        raise Unavailable(f"{ref} cannot be opened: {error}; once the disk works, try again") from error


def _refusal(ref: ShardRef) -> Moved:
    return Moved(
        f"{ref} may not be owned here: the may_own of this log refuses it; use it in the process that may own it",
        shard=ref,
    )
