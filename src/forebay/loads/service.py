"""The bulk loads that concern one data directory: offered, attached to the shards that it owns, committed or given up.

A load that another process offered is found by `step`, which the background worker calls. What was begun is finished by
the next step, here or in any other process with the same metadata store. Knows loads and single shards; how shards are
opened, and what keeps other work away from one, comes in as functions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from forebay.bulk import SharedStore
from forebay.catalog import ShardCatalog, ShardKeys
from forebay.clock import Clock
from forebay.errors import Conflict, Corrupt, ForebayError, Indeterminate, Unavailable, UnsupportedFormat
from forebay.format.metadata.descriptor import LoadStatus, Phase
from forebay.loads.attach import Attached, Attaching
from forebay.loads.book import AttachedPart, LoadBook, never_offered
from forebay.loads.forget import finish_given_up, named_in
from forebay.loads.prepare import Load, LoadManifest, LoadStore, read_manifest, ready_to_offer
from forebay.places import home_of_loads, shared_place
from forebay.shard import SegmentShard, ShardContext
from forebay.shard.directories import directory_name
from forebay.topics import ShardRef, TopicName, TopicSpec
from forebay.workers import AtWork

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_SECONDS = 5.0
"""How long a load is left alone after an attempt that failed."""


class LoadProgress(NamedTuple):
    """How far a load has come: what was attached now, and which partitions wait for their owners elsewhere."""

    load: Load
    attached: list[Attached]
    elsewhere: dict[int, str]
    """Why each of them was not attached here."""


def _wanted(load: Load) -> set[int]:
    return {shard.partition for shard in load.shards}


class AloneWith(Protocol):
    """Does work on a shard while no export, retention or other load works on it, and gives the result."""

    def __call__(self, shard: SegmentShard, work: Callable[[SegmentShard], T]) -> T: ...


class Loads:
    """The loads that concern one data directory. For callers and for the background worker, in any thread."""

    def __init__(
        self,
        context: ShardContext,
        clock: Clock,
        *,
        topic: Callable[[TopicName], TopicSpec],
        shards: Callable[[], Sequence[SegmentShard]],
        own: Callable[[ShardRef], object],
        alone_with: AloneWith,
    ) -> None:
        """`topic` finds a definition, `shards` gives the shards that are open here, and `own` opens one more."""
        self._context = context
        self._clock = clock
        self._topic = topic
        self._shards = shards
        self._own = own
        self._alone_with = alone_with
        self.book = LoadBook(context.metadata, context.settings.metadata.prefix, clock)
        self._at_work = AtWork()
        """The loads and shards that a thread is at, for `step`, which may run in two threads."""
        self._retry_at: dict[str, float] = {}
        self._pending: dict[str, str] = {}
        """The loads that were not over at the last look, each with the id of its topic."""

    def store(self) -> LoadStore:
        """Where the segments of a new load are to be put: see `forebay.loads.prepare`."""
        places = self._context.places
        if self.is_shared:
            assert places.store is not None, "is_shared says so"
            places.probe()
            return LoadStore(places.store, places.store_name)
        return LoadStore(places.loads.open(), places.loads_name)

    @property
    def is_shared(self) -> bool:
        """Whether segments of new loads go into a store that others reach too."""
        return self._context.places.store is not None and self._context.settings.is_shared

    @property
    def place(self) -> SharedStore | None:
        """Where that store is, for others."""
        return shared_place(self._context.settings, self._context.places.store_name)

    @property
    def holder(self) -> str:
        """The id of the data directory."""
        return self._context.holder

    def spec(self, name: TopicName) -> TopicSpec:
        """The definition of a topic; `UnknownTopic` if there is none."""
        return self._topic(name)

    def offer(self, name: str | TopicName, manifest: LoadManifest, expires_at: int | None) -> Load:
        """Let the owners of the topic's partitions attach what was prepared, all of it or nothing.

        If it is not attached everywhere by `expires_at` (ms) it is given up. Harmless when repeated.
        """
        spec = self._topic(TopicName.parse(name))
        load = ready_to_offer(self.store(), spec, manifest, created_at=self._clock.now_ms(), expires_at=expires_at)
        return self.book.offer(manifest.load_id, load)

    def attach(self, load_id: str) -> LoadProgress:
        """Attach a load now to every partition that this process owns or may own; other owners attach it to theirs.

        The load that is returned says how far it is, whichever process attached it; `LoadOver` if it was given up
        meanwhile. It is committed, and readers see it, once it is attached everywhere. Appends to a partition wait
        meanwhile. A partition whose owner is gone, with records that are not in the history, is left to that owner.
        """
        load = self.book.get(load_id).load
        parts = self.book.attached(load_id)
        elsewhere: dict[int, str] = {}
        if load.status is LoadStatus.OFFERED:
            elsewhere = self._open_for(load, _wanted(load) - parts.keys(), is_asked=True)
        attached = self._advance(load_id, load, parts)
        load = self.book.get(load_id).load
        return LoadProgress(load, attached, elsewhere if load.status is LoadStatus.OFFERED else {})

    def abandon(self, load_id: str, spec: TopicSpec | None = None) -> Load:
        """Give a load up: no reader ever sees any of it. `Conflict` if it is committed.

        With `spec`, `UnknownLoad` if it is a load into another topic. One whose record cannot be read can be given up
        while it is not over; what is attached of it must be in that topic.
        """
        unknown_as = never_offered(spec, created_at=self._clock.now_ms())
        try:
            load = self.book.give_up(load_id, unknown_as=unknown_as)
        except (Corrupt, UnsupportedFormat):
            if spec is None or not self._is_attached_to(load_id, unknown_as):
                raise
            load = self.book.give_up_unreadable(load_id, unknown_as)
        self.finish(load_id, load)
        self._wake(load.topic_id)
        return load

    def step(self) -> None:
        """Attach what other processes offered, finish what was begun, and wake readers that waited for a load."""
        for shard in self._shards():
            if shard.load_pause.since is not None:
                with self._at_work.at(shard.ref.id) as is_free:
                    if is_free:
                        self._safely(
                            "", partial(self._alone_with, shard, lambda shard: self._attaching(shard).resolve())
                        )
        pending = self.book.pending()
        # Copies: a thread that was stuck may add to them meanwhile.
        known = self._pending.copy()
        for topic_id in {topic for load_id, topic in known.items() if load_id not in pending}:
            self._wake(topic_id)
        self._pending = {load_id: topic for load_id, topic in known.items() if load_id in pending}
        self._retry_at = {load_id: at for load_id, at in self._retry_at.copy().items() if load_id in pending}
        for load_id, parts in pending.items():
            if self._retry_at.get(load_id, 0.0) <= self._clock.monotonic():
                # Another thread may be stuck at it.
                with self._at_work.at(load_id) as is_free:
                    if is_free:
                        self._safely(load_id, partial(self._look, load_id, parts))

    def _look(self, load_id: str, parts: dict[int, AttachedPart]) -> None:
        try:
            stored = self.book.find(load_id)
        except (Corrupt, UnsupportedFormat):
            # The list of what cannot be read names it. It stays as it is until it can be read, or is abandoned.
            return
        if stored is None:
            self.book.end_unknown(load_id)
            return
        self._pending[load_id] = stored.load.topic_id
        self._advance(load_id, stored.load, parts)

    def _advance(self, load_id: str, load: Load, parts: dict[int, AttachedPart]) -> list[Attached]:
        """Do what is due for a load here: attach it, commit it, or give it up."""
        if load.status is LoadStatus.ABANDONED:
            self.finish(load_id, load)
        if load.status is not LoadStatus.OFFERED:
            return []
        attached: list[Attached] = []
        missing = _wanted(load) - parts.keys()
        hopeless = None
        if load.expires_at is not None and self._clock.now_ms() >= load.expires_at:
            hopeless = "was not attached everywhere in time"
        elif parts and self._is_left_behind(load, missing):
            # Readers behind the parts that it has must not wait for ever.
            hopeless = f"lies in {load.store}, and partitions that lack it have moved elsewhere"
        else:
            self._open_for(load, missing, is_asked=load.directory == self._context.holder)
            here = [s for s in self._shards_of(load) if s.ref.partition in missing]
            attached = self._attach(load_id, load, here)
        ended = self.book.commit(load_id)
        if hopeless is not None and ended.status is LoadStatus.OFFERED:
            logger.warning("load %s %s", load_id, hopeless)
            ended = self.abandon(load_id)
        if ended.status is LoadStatus.COMMITTED:
            self._wake(load.topic_id)
        return attached

    def _is_attached_to(self, load_id: str, load: Load) -> bool:
        """Whether all that is attached of the load with this id is in the topic that `load` names."""
        return all(load_id in named_in(self._catalog(load, partition)) for partition in self.book.attached(load_id))

    def _is_left_behind(self, load: Load, missing: set[int]) -> bool:
        """Whether what it brings lies in a data directory that a partition which lacks it has left."""
        home = home_of_loads(load.store)
        states = [self._catalog(load, partition).state() for partition in missing if home is not None]
        return any(stored is not None and stored.state.holder not in (None, home) for stored in states)

    def _open_for(self, load: Load, partitions: set[int], *, is_asked: bool) -> dict[int, str]:
        """Open those of the partitions that are this directory's, and if asked those without a holder; why not others.

        Nothing of another directory is lost by it: see `_refusal`.
        """
        closed = partitions - {shard.ref.partition for shard in self._shards_of(load)}
        elsewhere: dict[int, str] = {}
        spec = self._topic(TopicName(load.namespace, load.topic)) if closed else None
        for partition in sorted(closed):
            assert spec is not None
            refusal = self._refusal(load, partition, is_asked=is_asked)
            if refusal is None:
                try:
                    self._own(ShardRef(spec, partition))
                except (Unavailable, Indeterminate, Conflict) as error:
                    refusal = str(error)
            if refusal is not None:
                elsewhere[partition] = refusal
        return elsewhere

    def _refusal(self, load: Load, partition: int, *, is_asked: bool) -> str | None:
        """Why the partition is not to be opened here; `None` if it is."""
        catalog = self._catalog(load, partition)
        stored = catalog.state()
        state = stored.state if stored is not None else None
        if state is not None and state.holder == self._context.holder and state.phase is not Phase.SEALED:
            return None
        if not is_asked:
            return f"{self._directory_name(load.directory)} is asked for it"
        if state is None or state.holder is None or state.phase is Phase.SEALED:
            return None
        frontier = catalog.frontier().next
        if state.reserved_in_log or state.reserved_end > frontier:
            return (
                f"{self._directory_name(state.holder)} has it and offsets [{frontier}, {state.reserved_end}) of it, "
                "which are not in the history: open that directory"
            )
        return None

    def _directory_name(self, directory_id: str | None) -> str:
        return directory_name(self._context.metadata, self._context.settings.metadata.prefix, directory_id)

    def _attach(self, load_id: str, load: Load, shards: list[SegmentShard]) -> list[Attached]:
        if not shards:
            return []
        manifest = read_manifest(self._context.places.store_of(load.store), load.manifest)
        brought = {shard.partition: shard.records for shard in manifest.shards}
        if brought != {shard.partition: shard.records for shard in load.shards} or manifest.load_id != load_id:
            raise Corrupt(f"{load.manifest.object_key} does not list what load {load_id} says it brings")
        done = [
            self._alone_with(shard, lambda shard: self._attaching(shard).attach(load_id, manifest)) for shard in shards
        ]
        return [attached for attached in done if attached is not None]

    def finish(self, load_id: str, load: Load) -> None:
        """Where a load that was given up is attached, leave gaps."""
        finish_given_up(self.book, load_id, partial(self._catalog, load), created_at=self._clock.now_ms())

    def _attaching(self, shard: SegmentShard) -> Attaching:
        return Attaching(shard, self._context, self._clock)

    def _shards_of(self, load: Load) -> list[SegmentShard]:
        return [shard for shard in self._shards() if shard.ref.spec.topic_id == load.topic_id]

    def _catalog(self, load: Load, partition: int) -> ShardCatalog:
        keys = ShardKeys(load.namespace, load.topic, partition, self._context.settings.metadata.prefix)
        return ShardCatalog(
            self._context.metadata, keys, load.topic_id, self._context.places.manifest, clock=self._clock
        )

    def _wake(self, topic_id: str) -> None:
        for shard in self._shards():
            if shard.ref.spec.topic_id == topic_id:
                shard.wal.wake()
                shard.wal.group.call_back()

    def _safely(self, load_id: str, work: Callable[[], object]) -> None:
        try:
            work()
        except (ForebayError, OSError) as error:
            self._retry_at[load_id] = self._clock.monotonic() + RETRY_SECONDS
            logger.warning("%s will be tried again: %s", f"load {load_id}" if load_id else "a load", error)
        else:
            self._retry_at.pop(load_id, None)
