"""Looks at partitions: which offsets each holds now, where they lie, what of them ended.

Looks at the log of a partition, of its owner or beside it, and at what is recorded; changes nothing. A history may
name thousands of bulk loads, and almost all of them are over. The metadata store lists those that are not below
`offers/`, so a look reads that list once and asks for single loads only if they are on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from forebay.catalog import ShardCatalog
from forebay.catalog.removals import RecordedRemovals
from forebay.disk import Disk
from forebay.format.control.frames import NO_FLOOR, higher
from forebay.format.control.offsets import OffsetSet
from forebay.format.metadata.descriptor import DescriptorKind, LoadStatus, SegmentDescriptor, ShardState, gap_descriptor
from forebay.loads.book import LoadBook
from forebay.records import Gap, Reason
from forebay.topics import ShardRef
from forebay.views.snapshot import ScanPiece, ShardView
from forebay.wal.files import FileList, SealedFile
from forebay.wal.removals import Removals

T = TypeVar("T")


class ViewedLog(Protocol):
    """The log of a partition as far as it may be read: `forebay.wal.readonly.FollowedLog`, or its owner's own."""

    @property
    def head(self) -> int:
        """Readers see everything below, as of the last `refresh`."""

    @property
    def files(self) -> FileList:
        """The files that have it."""

    @property
    def removals(self) -> Removals:
        """Deletes that history does not know of, and the floors."""

    def refresh(self) -> None:
        """Look again."""

    def close(self) -> None:
        """Give back what is held."""


class ViewedShard:
    """One partition, looked at again and again."""

    def __init__(
        self, ref: ShardRef, catalog: ShardCatalog, log: ViewedLog | None, loads: LoadsSeen, *, holder: str, disk: Disk
    ) -> None:
        """`holder` is the data directory that `log` lies in; empty without one. Closes the log with itself."""
        self._ref = ref
        self._loads = loads
        self._holder = holder
        self._catalog = catalog
        self._log = log
        self._removals = RecordedRemovals(self._catalog)
        self._deleted = OffsetSet()
        self._deletes = 0
        self._history: FoundHistory | None = None
        self._descriptors: list[SegmentDescriptor] = []
        self._cover = Cover(disk)

    def look(self) -> ShardView:
        """The partition as it is now."""
        # The log first: what it no longer has is recorded by then. Deletes before the catalog, which a compaction
        # changes first; the floor behind it, which moves before the catalog loses its front.
        local = self._local()
        before = self._state()
        if before is not None and before.deletes != self._deletes:
            self._deleted, self._deletes = self._deleted | self._removals.deleted(), before.deletes
        history, loads = self._loads.history_and_loads(self._catalog, self._catalogued)
        state = self._state()
        floor = state.floor if state is not None else NO_FLOOR
        deleted = self._deleted
        end = self._descriptors[-1].end if self._descriptors else history.next
        if local is not None and state is not None and state.holder not in (None, self._holder):
            local = None  # files here are what the shard was before it moved
        if local is not None:
            floor, deleted = higher(floor, local.removals.floor), deleted | local.removals.deletes
            end = max(end, local.head)
        given_up = {load for load, status in loads.items() if status is LoadStatus.ABANDONED}
        waits = {load for load, status in loads.items() if status is LoadStatus.OFFERED}
        first = next((each.start for each in self._descriptors if each.load_id in waits), end)
        end = max(floor.earliest, min(end, first))
        return ShardView(
            topic=str(self._ref.spec.name),
            topic_id=self._ref.spec.topic_id,
            partition=self._ref.partition,
            is_durable=self._ref.spec.durability.policy.writes_before_ack,
            epoch=state.epoch if state is not None else 0,
            earliest=floor.earliest,
            next=end,
            pieces=self._cover.pieces(floor.earliest, end, self._descriptors, given_up, local),
            deleted=deleted.clipped(floor.earliest, end),
            generation=history.generation,
            floor=floor,
        )

    def close(self) -> None:
        """Give back what is held."""
        if self._log is not None:
            self._log.close()

    def _local(self) -> ViewedLog | None:
        if self._log is not None:
            self._log.refresh()
        return self._log

    def _state(self) -> ShardState | None:
        stored = self._catalog.state()
        return stored.state if stored is not None and stored.state.incarnation == self._ref.spec.topic_id else None

    def _catalogued(self) -> FoundHistory:
        """Bring the descriptors up to date."""
        cur = self._catalog.frontier().cur
        if self._history is None or (cur.generation, cur.next) != (self._history.generation, self._history.next):
            self._descriptors = self._catalog.descriptors()
            named = frozenset(each.load_id for each in self._descriptors if each.load_id is not None)
            self._history = FoundHistory(cur.generation, cur.next, named)
        return self._history


class Cover:
    """The pieces of one partition. For one thread."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._sizes: dict[str, int] = {}
        self._history: Sequence[SegmentDescriptor] | None = None
        self._kept: tuple[object, tuple[ScanPiece, ...]] = None, ()

    def pieces(
        self, start: int, stop: int, history: Sequence[SegmentDescriptor], given_up: Set[str], log: ViewedLog | None
    ) -> tuple[ScanPiece, ...]:
        """Pieces for all of `[start, stop)`: history first, without the loads that were given up, then the log.

        `history` is another list when it has changed.
        """
        middle = min(stop, max(start, history[-1].end)) if history else start
        key = start, middle, frozenset(given_up)
        if self._history is not history or self._kept[0] != key:
            self._history = history
            self._kept = key, tuple(covering(start, middle, (_piece(found, given_up) for found in history)))
        return self._kept[1] + tuple(covering(middle, stop, self._files(log, middle)))

    def _files(self, log: ViewedLog | None, start: int) -> Iterator[ScanPiece]:
        files = log.files.all if log is not None else ()
        # A viewer may live as long as its process: sizes of files that went are not kept.
        self._sizes = {file.path: self._sizes[file.path] for file in files if file.path in self._sizes}
        for file in files:
            if file.end <= start:
                continue
            if isinstance(file, SealedFile):
                yield ScanPiece(file.start, file.end, self._bytes(file.path), file=file.path)
            else:
                yield ScanPiece(file.start, file.end, file.limit)

    def _bytes(self, path: str) -> int:
        if path not in self._sizes:
            try:
                with contextlib.closing(self._disk.open(path)) as file:
                    self._sizes[path] = file.size()
            except FileNotFoundError:
                return 0  # replaced meanwhile: only how equal the tasks are depends on it
        return self._sizes[path]


def _piece(found: SegmentDescriptor, given_up: Set[str]) -> ScanPiece:
    is_given_up = found.load_id is not None and found.load_id in given_up
    descriptor = skipped(found) if is_given_up else msgspec.structs.replace(found, sparse=())
    return ScanPiece(found.start, found.end, descriptor.bytes, descriptor)


def covering(start: int, stop: int, pieces: Iterable[ScanPiece]) -> Iterator[ScanPiece]:
    """Pieces for all of `[start, stop)` without overlap: of those given the earlier ones first, else the log itself."""
    at = start
    for piece in pieces:
        if piece.stop <= at or max(at, piece.start) >= stop:
            continue
        if piece.start > at:
            yield ScanPiece(at, piece.start, 0)
        low, high = max(at, piece.start), min(stop, piece.stop)
        yield piece._replace(start=low, stop=high, bytes=piece.bytes * (high - low) // (piece.stop - piece.start))
        at = high
    if at < stop:
        yield ScanPiece(at, stop, 0)


def skipped(descriptor: SegmentDescriptor) -> SegmentDescriptor:
    """The gap that a segment of a load that was given up stands for."""
    return SegmentDescriptor(
        kind=DescriptorKind.GAP,
        topic_id=descriptor.topic_id,
        start=descriptor.start,
        end=descriptor.end,
        epoch=descriptor.epoch,
        reason=int(Reason.SKIPPED),
    )


class FoundHistory(NamedTuple):
    """The history of a partition as found: where it stands, and the loads that it names."""

    generation: int
    next: int
    loads: frozenset[str]


class _Looked(NamedTuple):
    """A partition that this look has passed."""

    catalog: ShardCatalog
    history: FoundHistory


class LoadsSeen:
    """How far loads are, for one look after the other. For one thread."""

    def __init__(self) -> None:
        self._over: dict[str, LoadStatus] = {}
        """How a load ended never changes."""
        self._looked: list[_Looked] = []
        self._waiting: set[str] = set()
        """Loads before which this look ends a partition."""
        self._is_closed = False
        self._is_torn = False
        self._is_doubtful = False

    def whole(self, look: Callable[[], T]) -> T:
        """What a look at partition after partition sees.

        A load that is committed on the way may be missing in partitions that were looked at before: then the look is
        repeated, and what is committed only by then waits for the next time.
        """
        self._begin(is_closed=False)
        seen = look()
        if self._is_torn or (self._is_doubtful and self._has_moved()):
            self._begin(is_closed=True)
            seen = look()
        return seen

    def history_and_loads(
        self, catalog: ShardCatalog, history: Callable[[], FoundHistory]
    ) -> tuple[FoundHistory, Mapping[str, LoadStatus]]:
        """The history of a partition, and how far each load is that it names.

        `history` reads it, or finds it unchanged at the cost of one look at its end.
        """
        found = history()
        unknown = frozenset[str]() if self._is_closed else found.loads - self._over.keys()
        over = frozenset[str]()
        if unknown:
            over = unknown - LoadBook(catalog.store, catalog.keys.prefix, catalog.clock).pending().keys()
            # Read again: a load that was given up leaves gaps in the history first and that list last. What is named
            # now, and was not on the list before, is therefore committed.
            found = history()
        statuses = {load: self._status(catalog, load, is_committed=load in over) for load in found.loads}
        self._looked.append(_Looked(catalog, found))
        return found, statuses

    def _begin(self, *, is_closed: bool) -> None:
        self._looked, self._waiting = [], set()
        self._is_closed, self._is_torn, self._is_doubtful = is_closed, False, False

    def _status(self, catalog: ShardCatalog, load_id: str, *, is_committed: bool) -> LoadStatus:
        known = self._over.get(load_id)
        if known is not None or self._is_closed:
            return known or LoadStatus.OFFERED
        status = LoadStatus.COMMITTED if is_committed else catalog.load_status(load_id)
        if status is LoadStatus.OFFERED:
            self._waiting.add(load_id)
            return status
        self._over[load_id] = status
        self._is_torn |= load_id in self._waiting
        self._is_doubtful |= bool(self._looked)
        return status

    def _has_moved(self) -> bool:
        """Whether the history of a partition went on since this look passed it, by a load perhaps."""
        now = ((catalog.frontier(), history) for catalog, history in self._looked)
        return any((front.cur.generation, front.next) != (before.generation, before.next) for front, before in now)


def fallen(view: ShardView) -> Iterator[ScanPiece]:
    """What lies below the floors, as gaps."""
    evicted = min(view.floor.evict_floor, view.earliest)
    for gap in (Gap(0, evicted, view.floor.reason or Reason.CAP), Gap(evicted, view.earliest, Reason.DELETED)):
        if gap.start < gap.stop:
            ended = gap_descriptor(gap, topic_id=view.topic_id, epoch=view.epoch, created_at=0)
            yield ScanPiece(gap.start, gap.stop, 0, ended)
