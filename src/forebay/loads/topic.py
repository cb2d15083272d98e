"""Bulk loads into one topic, as its callers use them: staged, offered, watched, attached and given up.

A caller may be a process that is not trusted with the store: what it offers names segments of its own load alone. Knows
the loads of a data directory; for any thread, and every call waits for the metadata store or the store of history.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import msgspec

from forebay.arguments import checked_arrow, checked_seconds
from forebay.bulk import BackfillPlan, BackfillState, BulkLoad, LoadBatch, LoadPart, LoadSegment, LoadTarget
from forebay.clock import Clock
from forebay.errors import Conflict, Invalid, UnknownLoad, Unsupported
from forebay.format.files.segment import SEGMENT_SUFFIX
from forebay.format.frame.batch import encode_arrow, partition_column
from forebay.format.metadata.descriptor import LoadStatus
from forebay.loads.attach import LoadOver
from forebay.loads.book import AttachedPart
from forebay.loads.prepare import (
    Load,
    LoadManifest,
    LoadPlace,
    Sink,
    manifest_of,
    prepared_of,
    ready_to_offer,
    segment_of,
    write_segment,
)
from forebay.loads.service import Loads
from forebay.partitioning import check_partition, resolve_named
from forebay.topics import Engine, TopicName, TopicSpec, parse_compression

if TYPE_CHECKING:
    import pyarrow as pa

LOAD_ID: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")
LISTED: Final = 1_000
"""Loads of one page of a list."""
LOOK_SECONDS: Final = 0.02
LOOK_SECONDS_MAX: Final = 1.0
"""How long between two looks at a load that is waited for: longer each time."""
_OBJECT: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,200}")
_HASH: Final = re.compile(r"[0-9a-f]{32}")
_QUERY_ID: Final = re.compile(r"[0-9A-Za-z._-]{1,100}")
_BACKFILL_ID: Final = re.compile(r"[0-9A-Za-z._-]{1,64}")
_STAGED: Final = "staged"
"""What the names of segments begin with that were written here, and not by a task of the caller's own."""


class TopicLoads:
    """Bulk loads into one topic. Made by `Storage.loads_of`."""

    def __init__(self, loads: Loads, name: TopicName, clock: Clock) -> None:
        self._loads = loads
        self._name = name
        self._clock = clock

    def target(self, load_id: str) -> LoadTarget:
        """Where the segments of a load with this id have to lie. Nothing is recorded."""
        spec = self._spec(load_id)
        place = self._loads.store()
        return LoadTarget(
            topic_id=spec.topic_id,
            partitions=spec.partitions,
            generation=spec.generation,
            compression=spec.compression,
            store=place.name,
            shared=self._loads.is_shared,
            prefixes=tuple(LoadPlace(load_id, spec.topic_id, number).prefix for number in range(spec.partitions)),
            place=self._loads.place,
        )

    def stage(self, load_id: str, batch: pa.RecordBatch, partition: int = 0) -> Sequence[LoadSegment]:
        """Write rows as a segment of the load, for callers that do not reach the store; what to offer then.

        Readers see nothing of it before the load is committed. What is never offered is removed after a while.
        """
        spec = self._spec(load_id)
        check_partition(partition, spec.partitions)
        if not checked_arrow(batch).num_rows:
            return ()
        resolve_named(partition, partition_column(batch), spec.partitions)
        made = write_segment(
            self._loads.store().store,
            LoadPlace(load_id, spec.topic_id, partition),
            _STAGED,
            [encode_arrow(batch, self._clock.now_ms())],
            clock=self._clock,
            zstd_level=parse_compression(spec.compression),
        )
        assert made is not None, "there are rows"
        return (segment_of(partition, made),)

    def offer(
        self,
        load_id: str,
        segments: Iterable[LoadSegment],
        *,
        timeout: float | None = None,
        generation: int | None = None,
        batch: LoadBatch | None = None,
    ) -> BulkLoad | None:
        """Have the owners of the partitions attach these segments, all of them or none; how far the load is.

        It is given up if it is not attached everywhere within `timeout` seconds. `Conflict` if the topic has other
        partitions than at `generation`. With `batch`, the load that brings the batch: an earlier one that is not over
        goes first; `None` if the topic has the batch already. Harmless when repeated.
        """
        spec = self._spec(load_id)
        manifest = checked_manifest(load_id, spec, list(segments))
        if generation not in (None, spec.generation):
            raise Conflict(
                f"{spec.name} has got {spec.partitions} partitions since the load was planned, and keys belong "
                "elsewhere: nothing was offered; stage the rows again",
                topic=spec.name,
            )
        now_ms = self._clock.now_ms()
        load = ready_to_offer(
            self._loads.store(),
            spec,
            manifest,
            created_at=now_ms,
            expires_at=None if timeout is None else now_ms + round(checked_seconds("timeout", timeout) * 1000),
            sink=None if batch is None else _sink(batch),
            directory=self._loads.holder,
        )
        if batch is None:
            return self._seen(load_id, self._loads.book.offer(load_id, load))
        standing = self._loads.book.offer_batch(load_id, load)
        return None if standing is None else self.get(standing)

    def get(self, load_id: str) -> BulkLoad:
        """How far a load has come; `UnknownLoad` if it was never offered to this topic."""
        return self._seen(load_id, self._found(load_id))

    def page(self, *, after: str | None = None, limit: int = LISTED) -> tuple[list[BulkLoad], str | None]:
        """Loads by id, those that are over too until they are forgotten; and the id to go on after, if there are more.

        Of a load that is not over no offsets are said: ask for it alone.
        """
        spec = self._loads.spec(self._name)
        found, more = self._loads.book.page(spec.topic_id, after=after, limit=limit)
        return [_view(load_id, load, {}) for load_id, load in found], more

    def attach(self, load_id: str) -> BulkLoad:
        """Attach a load now where this process owns the topic or may own it; how far it is then.

        Appends to a partition wait for a moment. Owners elsewhere attach theirs by themselves.
        """
        self._found(load_id)
        try:
            progress = self._loads.attach(load_id)
        except LoadOver:
            return self.get(load_id)
        found = self._seen(load_id, progress.load)
        return msgspec.structs.replace(found, waiting=progress.elsewhere)

    def wait(self, load_id: str, timeout: float) -> BulkLoad:
        """How far a load is, once it is over or so many seconds have passed."""
        deadline = self._clock.monotonic() + checked_seconds("timeout", timeout)
        pause = LOOK_SECONDS
        while True:
            found = self.get(load_id)
            left = deadline - self._clock.monotonic()
            if found.is_over or left <= 0:
                return found
            self._clock.sleep(min(pause, left))
            pause = min(2 * pause, LOOK_SECONDS_MAX)

    def abandon(self, load_id: str) -> BulkLoad:
        """Give a load up: no reader ever sees any of it. `Conflict` if it is committed; harmless when repeated.

        A load that was not offered is given up too: an offer that is still on its way is refused then.
        """
        spec = self._spec(load_id)
        return _view(load_id, self._loads.abandon(load_id, spec), {})

    def backfill(self, backfill_id: str) -> BackfillState:
        """How far a backfill has come, also one that has not begun. `Invalid` for what cannot be the id of one."""
        return self._loads.book.backfill(self._backfilled(backfill_id), backfill_id)

    def begin_backfill(self, backfill_id: str, plan: BackfillPlan) -> BackfillState:
        """Have the id stand for these rows for ever; how far it is. `Conflict` if it stands for others.

        Then offer its loads one after the other, each as the batch of its number. Harmless when repeated.
        """
        return self._loads.book.begin_backfill(self._backfilled(backfill_id), backfill_id, plan)

    def _backfilled(self, backfill_id: str) -> TopicSpec:
        """The topic, which takes loads. Its id becomes part of that of a query: see `LoadBatch`."""
        if not isinstance(backfill_id, str) or not _BACKFILL_ID.fullmatch(backfill_id):
            raise Invalid(
                f"backfill_id is {backfill_id!a:.80}; give 1 to 64 letters, digits, dots, dashes and underscores"
            )
        return self._taking()

    def _spec(self, load_id: str) -> TopicSpec:
        """The topic, which takes loads; `Invalid` for what cannot be the id of one."""
        check_load_id(load_id)
        return self._taking()

    def _taking(self) -> TopicSpec:
        spec = self._loads.spec(self._name)
        if spec.engine is not Engine.SEGMENT:
            raise Unsupported(f"{spec.name} lives on the {spec.engine} engine: only topics with files take a load")
        return spec

    def _found(self, load_id: str) -> Load:
        spec = self._spec(load_id)
        stored = self._loads.book.find(load_id)
        if stored is None or stored.load.topic_id != spec.topic_id:
            raise UnknownLoad(f"there is no load {load_id} into {spec.name}: offer it first", topic=spec.name)
        return stored.load

    def _seen(self, load_id: str, load: Load) -> BulkLoad:
        parts = self._loads.book.attached(load_id) if load.status is LoadStatus.OFFERED else {}
        return _view(load_id, load, parts)


def check_load_id(load_id: str) -> None:
    """`Invalid` for what cannot be the id of a load: it is part of the names of objects."""
    if not isinstance(load_id, str) or not LOAD_ID.fullmatch(load_id):
        raise Invalid(f"load_id is {load_id!a:.80}; give 1 to 128 letters, digits, dots, dashes and underscores")


def checked_manifest(load_id: str, spec: TopicSpec, segments: Sequence[LoadSegment]) -> LoadManifest:
    """The manifest of segments that a caller names; `Invalid` unless each is one of this load, and named once.

    What they hold is looked at when they are attached.
    """
    seen: set[str] = set()
    for segment in segments:
        check_partition(segment.partition, spec.partitions)
        prefix = LoadPlace(load_id, spec.topic_id, segment.partition).prefix
        key = segment.object_key
        if not key.startswith(prefix) or not _OBJECT.fullmatch(key, len(prefix)) or not key.endswith(SEGMENT_SUFFIX):
            raise Invalid(
                f"{key!a:.200} is no segment of load {load_id} for partition {segment.partition}: those are called "
                f"{prefix}NAME{SEGMENT_SUFFIX}"
            )
        if key in seen:
            raise Invalid(f"{key} is named twice: a segment is brought in once")
        seen.add(key)
        _check_counts(segment)
    return manifest_of(load_id, spec.topic_id, [(segment.partition, prepared_of(segment)) for segment in segments])


def _check_counts(segment: LoadSegment) -> None:
    places = [(0, 0), *segment.sparse, (segment.records, segment.bytes)]
    if (
        min(segment.records, segment.bytes, segment.index_bytes) < 1
        or segment.time_min > segment.time_max
        or not _HASH.fullmatch(segment.content_hash)
        or any(later[0] < place[0] or later[1] < place[1] for place, later in pairwise(places))
    ):
        raise Invalid(f"what is said of {segment.object_key} cannot be: give what staging it has given")


def _sink(batch: LoadBatch) -> Sink:
    if not _QUERY_ID.fullmatch(batch.query_id) or batch.batch_id < 0:
        raise Invalid(f"{batch.query_id!a:.80} is no id of a query, or {batch.batch_id} no number of a batch")
    return Sink(query_id=batch.query_id, batch_id=batch.batch_id)


def _view(load_id: str, load: Load, attached: dict[int, AttachedPart]) -> BulkLoad:
    starts = {number: part.start for number, part in attached.items()}
    return BulkLoad(
        load_id=load_id,
        topic=f"{load.namespace}/{load.topic}",
        status=load.status.value,
        parts=tuple(
            LoadPart(partition=shard.partition, records=shard.records, start=starts.get(shard.partition, shard.start))
            for shard in load.shards
        ),
        created_at=load.created_at,
        expires_at=load.expires_at,
        batch=None if load.sink is None else LoadBatch(query_id=load.sink.query_id, batch_id=load.sink.batch_id),
    )
