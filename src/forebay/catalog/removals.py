"""What ended in a shard's history: deletion vectors and floors, in the metadata store, and pieces that leave it.

Every change compares the shard's state, so that only its owner makes one. Vectors may be there before the records
that they name are history: an offset is never given out twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from forebay.catalog.shard import SWEEP_KEYS, Front, Frontier, Piece, ShardCatalog, StoredState, unreadable
from forebay.catalog.transact import Done, Write, transact
from forebay.errors import Corrupt, UnsupportedFormat
from forebay.format.control.frames import NO_FLOOR, Floor, higher
from forebay.format.control.offsets import WINDOW, OffsetSet
from forebay.format.metadata.descriptor import DescriptorKind, SegmentDescriptor, ShardState
from forebay.format.metadata.value import Unknown, encode_value
from forebay.format.metadata.vectors import DeletionVector, decode_vector, deleted_by, encode_vector, merge
from forebay.metadata import Compare, Delete, Entry, Operation, Put, RevisionIs

VECTORS_MAX: Final = 2
"""Changed in one transaction: more might not fit."""


class _Stored(NamedTuple):
    vector: DeletionVector
    unknown: Unknown
    revision: int


class RecordedRemovals:
    """The deletes and floors of one shard's history. Stateless: every call asks the store."""

    def __init__(self, catalog: ShardCatalog) -> None:
        self._catalog = catalog
        self._store = catalog.store
        self._keys = catalog.keys

    def deleted(self) -> OffsetSet:
        """Every offset that a vector names."""
        return deleted_by(self._decoded(entry).vector for entry in self._store.range(self._keys.deletes))

    def record(self, epoch: int, deleted: OffsetSet, floor: Floor = NO_FLOOR) -> None:
        """On return these offsets are in vectors and the floors are at least so far; as the owner in `epoch`.

        Harmless when repeated. Raises `Fenced` once another epoch owns the shard. If it fails, some of it may hold.
        """
        windows = [start for start, _ in deleted.windows()]
        for first in range(0, max(1, len(windows)), VECTORS_MAX):
            self._record(epoch, windows[first : first + VECTORS_MAX], deleted, floor)

    def _record(self, epoch: int, windows: Sequence[int], deleted: OffsetSet, floor: Floor) -> None:
        def change(state: StoredState) -> Write[None] | Done[None]:
            compares: list[Compare] = [RevisionIs(self._keys.state, state.revision)]
            puts: list[Operation] = []
            for start in windows:
                key = self._keys.vector(start)
                entry = self._store.get(key)
                stored = self._decoded(entry) if entry is not None else None
                merged = merge(stored.vector if stored is not None else None, deleted, start)
                if merged is not None:
                    compares.append(RevisionIs(key, stored.revision if stored is not None else 0))
                    puts.append(Put(key, encode_vector(merged, stored.unknown if stored is not None else None)))
            changed = _moved(state, floor, counted=bool(puts))
            if changed == state.state:
                return Done(None)
            puts.append(Put(self._keys.state, encode_value(changed, unknown=state.unknown)))
            # Commit point: from here on the next owner knows that they are gone.
            return Write(compares, puts, None)

        what = f"{self._keys}: a delete is not recorded in full"
        transact(self._store, lambda: self._catalog.owned(epoch), change, what=what, clock=self._catalog.clock)

    def drop_below(self, epoch: int, offset: int) -> int:
        """Take pieces that lie wholly below `offset` out of the catalog, oldest first, and their vectors; how many.

        The newest piece that was born in the log stays: it says which appends the next owner recognises as repeats.
        Reads what is dropped and a page behind it; more only if history ends in what bulk loads brought.
        """
        self._catalog.sweep_hidden(offset)
        dropped = 0
        what = f"{self._keys}: not all of history below offset {offset} is dropped"
        while count := transact(
            self._store,
            lambda: self._droppable(offset),
            lambda found: self._drop(epoch, *found),
            what=what,
            clock=self._catalog.clock,
        ):
            dropped += count
        self._drop_vectors(epoch, offset)
        return dropped

    def _droppable(self, offset: int) -> tuple[Frontier, list[Piece]]:
        """What may be dropped next, and the end of history as it was before the look."""
        front = self._catalog.front(SWEEP_KEYS + 1)
        # What a dropped piece hides would come to light again.
        if any(hider.descriptor.end <= offset for hider, _ in front.hidden):
            return front.frontier, []
        # Of the last of them it is not known what it hides.
        pieces = front.pieces if front.is_whole else front.pieces[:-1]
        ended = [piece for piece in pieces[:SWEEP_KEYS] if piece.descriptor.end <= offset]
        return front.frontier, ended[: self._not_needed(front, len(ended))]

    def _not_needed(self, front: Front, wanted: int) -> int:
        """How many of the first `wanted` pieces lie before the newest that is needed; at least one piece stays."""
        if not wanted or front.is_whole:
            return min(wanted, _before_needed(front.pieces))
        last = self._catalog.last(front.frontier)
        if last is not None and _is_needed(last):
            return wanted
        before = _before_needed(front.pieces)
        return wanted if wanted <= before else min(wanted, _before_needed(self._catalog.pieces()))

    def _drop(self, epoch: int, frontier: Frontier, pieces: Sequence[Piece]) -> Write[int] | Done[int]:
        if not pieces:
            return Done(0)
        state = self._catalog.owned(epoch)
        cur = msgspec.structs.replace(frontier.cur, generation=frontier.cur.generation + 1)
        compares: list[Compare] = [
            RevisionIs(self._keys.state, state.revision),
            # Every change to the catalog writes `cur`: what was seen after it was read stands as it was.
            RevisionIs(self._keys.cur, frontier.revision),
            *(RevisionIs(self._keys.segment(piece.descriptor.start), piece.revision) for piece in pieces),
        ]
        operations: list[Operation] = [Delete(self._keys.segment(piece.descriptor.start)) for piece in pieces]
        operations.append(Put(self._keys.cur, encode_value(cur, unknown=frontier.unknown)))
        return Write(compares, operations, len(pieces))

    def _drop_vectors(self, epoch: int, offset: int) -> None:
        """Vectors of windows wholly below `offset` are of no use any more."""
        state = self._catalog.owned(epoch)
        if not state.state.deletes:
            return
        first = self._keys.vector(offset & -WINDOW)
        stale = [entry.key for entry in self._store.range(self._keys.deletes) if entry.key < first]
        for at in range(0, len(stale), SWEEP_KEYS):
            gone = [Delete(key) for key in stale[at : at + SWEEP_KEYS]]
            self._store.transaction([RevisionIs(self._keys.state, state.revision)], gone)

    def _decoded(self, entry: Entry) -> _Stored:
        try:
            return _Stored(*decode_vector(entry.value), entry.mod_revision)
        except (Corrupt, UnsupportedFormat) as error:
            raise unreadable(entry, error) from error


def _moved(stored: StoredState, floor: Floor, *, counted: bool) -> ShardState:
    state = stored.state
    moved = higher(state.floor, floor)
    return msgspec.structs.replace(
        state,
        earliest=moved.earliest,
        evict_floor=moved.evict_floor,
        floor_reason=int(moved.reason or 0),
        deletes=state.deletes + counted,
    )


def _before_needed(pieces: Sequence[Piece]) -> int:
    """How many pieces lie before the newest of these that is needed; before the last of them if none is."""
    kept = [place for place, piece in enumerate(pieces) if _is_needed(piece.descriptor)]
    return max(min(kept[-1] if kept else len(pieces), len(pieces) - 1), 0)


def _is_needed(found: SegmentDescriptor) -> bool:
    """Whether a take-over may have to look into it."""
    return found.load_id is None if found.kind is DescriptorKind.MANIFEST else found.is_born
