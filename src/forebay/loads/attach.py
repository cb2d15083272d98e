"""Attaches prepared segments to the history of a shard, by its owner, while appends pause for a moment.

What the log holds becomes history up to its end, one transaction puts the segments behind it, and the log goes on
above them. A transaction whose outcome is not known keeps the pause up: an append now could get an offset that the
load has. The shard itself keeps that state, so it ends with the shard. A crash anywhere leaves either nothing, or a
history that ends above the log, which recovery knows. Knows one shard with its log and its history.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from forebay import manifests
from forebay.appends.queue import Paused
from forebay.blobs import BlobStore
from forebay.catalog import Frontier, StoredState
from forebay.catalog.transact import Done, Write, transact
from forebay.clock import Clock
from forebay.errors import Conflict, Corrupt, Fenced, Moved, Unavailable
from forebay.format.files.segment import index_name
from forebay.format.index.sections import FOOTER_BYTES, Footer, decode_footer
from forebay.format.metadata.descriptor import Cur, LoadStatus, Phase, SegmentDescriptor
from forebay.format.metadata.value import encode_value
from forebay.loads.book import AttachedPart, LoadBook, StoredLoad
from forebay.loads.prepare import LoadManifest, LoadPlace, Prepared, descriptors_of
from forebay.metadata import Absent, Compare, Operation, Put, RevisionIs
from forebay.shard.context import ShardContext
from forebay.shard.seal import bring_into_history
from forebay.shard.segment import SegmentShard

logger = logging.getLogger(__name__)

DESCRIPTORS_MAX = 90
"""More are listed in a manifest: a transaction takes no more."""
DESCRIPTORS_BYTES_MAX = 400 * 1024


class Attached(NamedTuple):
    """What a load got in one partition, and how long appends there waited for it, in seconds."""

    partition: int
    start: int
    end: int
    pause_s: float


class LoadOver(Unavailable):
    """The load was given up meanwhile: nothing was attached."""


class _Standing(NamedTuple):
    """All that a transaction compares, as found."""

    state: StoredState
    frontier: Frontier
    load: StoredLoad | None

    @property
    def revisions(self) -> tuple[int, int, int]:
        return self.state.revision, self.frontier.revision, self.load.revision if self.load is not None else 0


class Attaching:
    """Attaches loads to one open shard. One call at a time, by a thread that is alone with the shard."""

    def __init__(self, shard: SegmentShard, around: ShardContext, clock: Clock) -> None:
        self.shard = shard
        self._around = around
        self._book = LoadBook(around.metadata, around.settings.metadata.prefix, clock)
        self._catalog = shard.history.catalog
        self._clock = clock
        self._pausing = shard.load_pause

    def attach(self, load_id: str, manifest: LoadManifest) -> Attached | None:
        """Attach the load's part for this partition; `None` if it is attached already.

        Raises `LoadOver` if it was given up. After any other error it may be repeated; while it is not known whether
        the load was attached, appends go on waiting.
        """
        shard, partition = self.shard, self.shard.ref.partition
        self.resolve()
        if self._book.part(load_id, partition) is not None:
            return None
        load = self._book.get(load_id).load
        if load.status is LoadStatus.COMMITTED:
            # Attached everywhere: what was noted of its parts went when it was committed.
            return None
        if self._pausing.since is None:
            _check_objects(self._around.places.store_of(load.store), manifest, partition)
            # Beside appends, so that little is left to be done while they wait.
            bring_into_history(shard)
        self._pause(load_id)
        try:
            start = bring_into_history(shard)
            self._record(load_id, manifest, start)
            end = shard.history.exported
            self._go_on()
        except BaseException:
            self._resume()
            raise
        pause_s = self._resume()
        logger.info(
            "%s: load %s is [%d, %d); appends paused for %.1f ms", shard.ref, load_id, start, end, pause_s * 1000
        )
        return Attached(partition, start, end, pause_s)

    def resolve(self) -> None:
        """After an attempt that was cut short, let appends go on once it is known whether it attached anything."""
        if self._pausing.since is not None:
            self._look_again()
            self._go_on()
            self._resume()

    def _record(self, load_id: str, manifest: LoadManifest, start: int) -> None:
        """On return history has the load from `start` on, and the shard knows.

        While it is not known whether a transaction has landed, `at_risk` says which, and appends go on waiting.
        """
        history, before = self.shard.history, self._pausing.at_risk

        def read() -> _Standing:
            self._look_again()
            # Still in our epoch, so that no other owner has added to history.
            return self._standing(load_id)

        def attached(standing: _Standing) -> Write[int] | Done[int]:
            if history.exported > start:
                return Done(history.exported)
            load = self._checked(load_id, standing)
            if standing.frontier.next != start:
                raise Conflict(
                    f"{self.shard.ref}: history ends at {standing.frontier.next}, the log at {start}",
                    shard=self.shard.ref,
                )
            pieces = self._pieces(load_id, load, manifest, start)
            # Before it is sent: an answer that is lost, and an interrupt, leave it so.
            self._pausing.at_risk = (load_id, standing.revisions)
            # Before a reader can see that the partition goes on behind it.
            history.note_load(load_id, start)
            # Commit point: the log goes on behind these segments, here or wherever it is recovered.
            return Write(*self.transaction_for(load_id, standing, pieces), pieces[-1].end)

        what = f"{self.shard.ref}: load {load_id} is not attached"
        try:
            end = transact(self._around.metadata, read, attached, what=what, clock=self._clock)
        except Unavailable as error:
            if type(error) is Unavailable:
                # Nothing was done by any attempt; one that was sent by an earlier call may still land.
                self._pausing.at_risk = before
                history.forget_load(load_id)
            raise
        history.note_end(end)
        self._pausing.at_risk = None

    def _look_again(self) -> None:
        """See what has become of a transaction whose outcome was not known."""
        if self._pausing.at_risk is None:
            return
        load_id, revisions = self._pausing.at_risk
        if self._standing(load_id).revisions == revisions:
            # It may still land; if we try again, one of the two is refused.
            return
        # Looked at after that: what it compares has changed, so what has not landed by now never will.
        history, end = self.shard.history, self._catalog.frontier().next
        if history.loads().get(load_id, end) >= end:
            history.forget_load(load_id)
        history.note_end(end)
        self._pausing.at_risk = None

    def _standing(self, load_id: str) -> _Standing:
        shard = self.shard
        state = self._catalog.state()
        if state is None or (state.state.incarnation, state.state.epoch) != (shard.ref.spec.topic_id, shard.epoch):
            reason = f"epoch {shard.epoch} owns it no more"
            shard.wal.fence(reason)
            raise Fenced(f"{shard.ref}: {reason}: load {load_id} is not attached by it", shard=shard.ref)
        return _Standing(state, self._catalog.frontier(), self._book.find(load_id))

    def _checked(self, load_id: str, standing: _Standing) -> StoredLoad:
        if standing.load is None or standing.load.load.status is not LoadStatus.OFFERED:
            raise LoadOver(f"{self.shard.ref}: load {load_id} is over: it was not attached here, and never will be")
        if standing.state.state.phase is not Phase.OPEN:
            raise Moved(
                f"{self.shard.ref} is {standing.state.state.phase}: load {load_id} is attached by who has it next"
            )
        return standing.load

    def _pieces(self, load_id: str, load: StoredLoad, manifest: LoadManifest, start: int) -> list[SegmentDescriptor]:
        """The descriptors of the load's part; a single one of a manifest if they are many."""
        ref, store_name, created_at = self.shard.ref, load.load.store, self._clock.now_ms()
        pieces = descriptors_of(
            manifest,
            ref.partition,
            start,
            epoch=self.shard.epoch,
            store=store_name,
            leader=self._around.holder,
            created_at=created_at,
        )
        size = sum(len(encode_value(piece)) for piece in pieces)
        if len(pieces) <= DESCRIPTORS_MAX and size <= DESCRIPTORS_BYTES_MAX:
            return pieces
        prefix = LoadPlace(load_id, ref.spec.topic_id, ref.partition).prefix
        store = self._around.places.store_of(store_name)
        listed = manifests.write(store, prefix, pieces, store_name=store_name, created_at=created_at)
        return [msgspec.structs.replace(listed, load_id=load_id)]

    def transaction_for(
        self, load_id: str, standing: _Standing, pieces: Sequence[SegmentDescriptor]
    ) -> tuple[list[Compare], list[Operation]]:
        keys, (state, frontier, load) = self._catalog.keys, standing
        first, last = pieces[0], pieces[-1]
        raised = msgspec.structs.replace(
            state.state, next_offset=last.end, reserved_end=max(state.state.reserved_end, last.end)
        )
        cur = Cur(start=last.start, next=last.end, epoch=self.shard.epoch, generation=frontier.cur.generation)
        compares: list[Compare] = [
            RevisionIs(keys.state, state.revision),
            RevisionIs(keys.cur, frontier.revision),
            RevisionIs(self._book.key(load_id), load.revision if load is not None else 0),
            *(Absent(keys.segment(piece.start)) for piece in pieces),
        ]
        operations: list[Operation] = [
            *(Put(keys.segment(piece.start), encode_value(piece)) for piece in pieces),
            Put(keys.cur, encode_value(cur, unknown=frontier.unknown)),
            Put(keys.state, encode_value(raised, unknown=state.unknown)),
            self._book.note(load_id, self.shard.ref.partition, AttachedPart(first.start, last.end)),
        ]
        return compares, operations

    def _go_on(self) -> None:
        """Where history ends above the log, let the log go on there."""
        end = self.shard.history.exported
        if end > self.shard.wal.writer.next:
            self.shard.wal.skip_to_history(end)

    def _pause(self, load_id: str) -> None:
        self.shard.wal.queue.pause(Paused(f"{self.shard.ref}: load {load_id} is being attached; try again"))
        if self._pausing.since is None:
            self._pausing.since = self._clock.monotonic()

    def _resume(self) -> float:
        """End the pause, unless an append could get an offset that the load has or may get; how long it has been."""
        wal = self.shard.wal
        if self._pausing.since is None:
            return 0.0
        seconds = self._clock.monotonic() - self._pausing.since
        if self._pausing.at_risk is None and wal.writer.next >= self.shard.history.exported:
            wal.queue.resume()
            self._pausing.since = None
            wal.counters.pause_seconds.observe(seconds)
        return seconds


def _check_objects(store: BlobStore, manifest: LoadManifest, partition: int) -> None:
    """Every object that the load brings for this partition is there, as it was written."""
    segments = [segment for shard in manifest.shards if shard.partition == partition for segment in shard.segments]
    for segment in segments:
        found, index = store.stat(segment.object_key), store.stat(index_name(segment.object_key))
        if found is None or (found.size, found.etag) != (segment.bytes, segment.etag):
            raise Corrupt(f"{segment.object_key} of load {manifest.load_id} is not there as it was prepared")
        if index is None or index.size != segment.index_bytes or not _is_indexed(store, segment):
            raise Corrupt(
                f"the index of {segment.object_key} of load {manifest.load_id} is not there as it was prepared"
            )


def _is_indexed(store: BlobStore, segment: Prepared) -> bool:
    """Whether the index of the segment says what the manifest says: a reader counts on both."""
    if segment.index_bytes < FOOTER_BYTES:
        return False
    stop = segment.index_bytes
    footer = decode_footer(store.get_range(segment.index_key, stop - FOOTER_BYTES, stop))
    return isinstance(footer, Footer) and (
        (footer.start, footer.end, footer.records, footer.segment_bytes, footer.content_hash.hex())
        == (0, segment.records, segment.records, segment.bytes, segment.content_hash)
        and (footer.time_min, footer.time_max, footer.appended_max)
        == (segment.time_min, segment.time_max, segment.appended_max)
    )
