"""The catalog of one shard: its state, its descriptors and the end of its history, in the metadata store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, TypeVar

import msgspec

from forebay.blobs import BlobChanged, BlobMissing
from forebay.catalog.rules import never_backwards, no_gap, no_overlap
from forebay.catalog.transact import Done, Write, transact
from forebay.clock import Clock
from forebay.errors import Conflict, Corrupt, Fenced, Indeterminate, Unavailable, UnsupportedFormat
from forebay.format.metadata.descriptor import (
    Cur,
    DescriptorKind,
    LoadStanding,
    LoadStatus,
    Phase,
    SegmentDescriptor,
    ShardState,
    Status,
)
from forebay.format.metadata.keys import (
    PREFIX,
    all_shards_prefix,
    compactor_key,
    cur_key,
    deletes_key,
    deletes_prefix,
    load_key,
    offers_prefix,
    segment_key,
    segments_prefix,
    state_key,
)
from forebay.format.metadata.value import Unknown, decode_value, encode_value
from forebay.metadata import Absent, Compare, Delete, Entry, MetadataStore, Operation, Put, RevisionIs

LOOKS = 4
"""So often the catalog is looked at again, if a manifest was replaced while it was being opened."""
SWEEP_KEYS = 90
"""Hidden descriptors removed per transaction."""
PAGE_KEYS = 1000
"""Keys read at once where the descriptors of all topics are looked at."""
STATES_PAGE = 100
"""Keys read at once where the states of all shards are looked for: of a long history that many are read in vain."""

T = TypeVar("T", bound=msgspec.Struct)

Manifest = Callable[[SegmentDescriptor], Sequence[SegmentDescriptor]]
"""Reads the descriptors that a manifest descriptor stands for."""


class ShardKeys(NamedTuple):
    """Where a shard's facts stand in the metadata store."""

    namespace: str
    topic: str
    partition: int
    prefix: str

    @property
    def state(self) -> str:
        return state_key(self.namespace, self.topic, self.partition, prefix=self.prefix)

    @property
    def cur(self) -> str:
        return cur_key(self.namespace, self.topic, self.partition, prefix=self.prefix)

    @property
    def segments(self) -> str:
        return segments_prefix(self.namespace, self.topic, self.partition, prefix=self.prefix)

    @classmethod
    def of_state(cls, key: str) -> ShardKeys:
        """The keys of the shard whose state stands under this one."""
        prefix, _, rest = key.rpartition("/storage/topics/")
        namespace, topic, partition, _ = rest.split("/")
        return cls(namespace, topic, int(partition), prefix)

    def segment(self, start: int) -> str:
        """The key of the descriptor that starts at this offset."""
        return segment_key(self.namespace, self.topic, self.partition, start, prefix=self.prefix)

    @property
    def deletes(self) -> str:
        return deletes_prefix(self.namespace, self.topic, self.partition, prefix=self.prefix)

    def vector(self, start: int) -> str:
        """The key of the deletion vector of the window that starts at this offset."""
        return deletes_key(self.namespace, self.topic, self.partition, start, prefix=self.prefix)

    @property
    def compactor(self) -> str:
        """The key of the lease that a compaction of the shard holds."""
        return compactor_key(self.namespace, self.topic, self.partition, prefix=self.prefix)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.topic}[{self.partition}]"


def is_descriptor_key(key: str) -> bool:
    """Whether a descriptor stands under the key."""
    return key.split("/")[-2:-1] == ["segments"] and not key.endswith("/cur")


class StoredState(NamedTuple):
    """A shard's state as found, with what is needed to change it."""

    state: ShardState
    unknown: Unknown
    revision: int


def read_state(store: MetadataStore, key: str) -> StoredState | None:
    """The recorded state of a shard; `None` only if the store says that there is none."""
    entry = store.get(key)
    return None if entry is None else decode_state(entry)


def decode_state(entry: Entry) -> StoredState:
    """The state of a shard as it is stored; `Corrupt` if it cannot be read."""
    state, unknown = _decoded(entry, ShardState)
    return StoredState(state, unknown, entry.mod_revision)


def state_entries(store: MetadataStore, *, prefix: str) -> dict[str, Entry]:
    """The recorded states of all shards of all topics, by their keys, read a page at a time and not one by one.

    What else is stored of a shard sorts before its state. A page that ends there is followed by one that begins
    behind it, so a long history costs at most one page.
    """
    below, found, after = all_shards_prefix(prefix=prefix), dict[str, Entry](), None
    while True:
        page = store.range(below, start_after=after, limit=STATES_PAGE)
        found.update((entry.key, entry) for entry in page if entry.key.endswith("/state"))
        if len(page) < STATES_PAGE:
            return found
        after = page[-1].key
        if not after.endswith("/state"):
            shard = "/".join(after.removeprefix(below).split("/")[:3])
            after = max(after, f"{below}{shard}/segments/~")


class Frontier(NamedTuple):
    """The end of history as found: `next` is the first offset it does not cover. Revision 0: none yet."""

    cur: Cur
    unknown: Unknown | None
    revision: int

    @property
    def next(self) -> int:
        return self.cur.next


class Piece(NamedTuple):
    """A descriptor as found."""

    descriptor: SegmentDescriptor
    revision: int


class Standing(NamedTuple):
    """A shard's catalog at one moment: its end, its pieces in order, and what is left of those they replaced."""

    frontier: Frontier
    pieces: list[Piece]
    hidden: list[tuple[Piece, Piece]]
    """Each with the piece that hides it."""


class Front(NamedTuple):
    """The oldest pieces of a shard's catalog, and what is left of those that they replaced."""

    frontier: Frontier
    """Read first: what follows is as of one moment if `cur` has not changed since."""
    pieces: list[Piece]
    hidden: list[tuple[Piece, Piece]]
    is_whole: bool
    """Whether there is nothing behind them. Else the last of them may hide more than is listed here."""


def arranged(found: Iterable[Piece]) -> tuple[list[Piece], list[tuple[Piece, Piece]]]:
    """The pieces of history, from descriptors in the order of their keys; and those replaced, each after its hider.

    A descriptor hides those that start below its end: they were replaced by it and not removed yet.
    """
    pieces: list[Piece] = []
    hidden: list[tuple[Piece, Piece]] = []
    for piece in found:
        if pieces and piece.descriptor.start < pieces[-1].descriptor.end:
            hidden.append((pieces[-1], piece))
        else:
            pieces.append(piece)
    return pieces, hidden


class ShardCatalog:
    """History of one shard. Stateless: every call asks the store. Safe for concurrent use."""

    def __init__(
        self,
        store: MetadataStore,
        keys: ShardKeys,
        topic_id: str,
        manifest: Manifest | None = None,
        *,
        clock: Clock,
    ) -> None:
        self.keys = keys
        self.store = store
        self.clock = clock
        self._topic_id = topic_id
        self._manifest = manifest

    def state(self) -> StoredState | None:
        """The shard's state; `None` only if the store says that there is none."""
        return read_state(self.store, self.keys.state)

    def frontier(self) -> Frontier:
        """The end of catalogued history."""
        return self._frontier_of(self.store.get(self.keys.cur))

    def descriptors(self) -> list[SegmentDescriptor]:
        """The whole history in order, manifests opened.

        Raises `Corrupt` if it has a gap or an overlap, or if a manifest that it names is damaged or not there.
        """
        for _ in range(LOOKS):
            standing = self.standing()
            try:
                return self._checked(standing)
            except Corrupt:
                # A manifest that was replaced meanwhile may be gone. Every change to the catalog writes `cur`.
                if self.frontier().revision == standing.frontier.revision:
                    raise
        raise Unavailable(f"{self.keys}: its catalog changed {LOOKS} times while its manifests were opened; try again")

    def _checked(self, standing: Standing) -> list[SegmentDescriptor]:
        frontier = standing.frontier
        found = [piece.descriptor for piece in standing.pieces if piece.descriptor.start < frontier.next]
        opened = [inner for descriptor in found for inner in self._opened(descriptor)]
        start = opened[0].start if opened else frontier.next
        flaw = no_overlap(opened) or no_gap(start, opened, frontier.next)
        if flaw is not None:
            raise Corrupt(f'the catalog of {self.keys} contradicts itself: {flaw}; run "forebay verify"')
        return opened

    def descriptors_behind(self, end: int, generation: int) -> list[SegmentDescriptor] | None:
        """What was added to history behind `end` since it ended there; `None` where other pieces were changed, too.

        `generation` is that of the history up to `end`: while it is the same, pieces were added at the end alone.
        Reads only what was added.
        """
        entries = self.store.range(self.keys.segments, start_after=self.keys.segment(end - 1) if end else None)
        cur = entries.pop() if entries and entries[-1].key == self.keys.cur else None
        frontier = self._frontier_of(cur)
        if frontier.cur.generation != generation or frontier.next < end:
            return None
        pieces, hidden = arranged(Piece(_decoded(entry, SegmentDescriptor)[0], entry.mod_revision) for entry in entries)
        try:
            added = self._checked(Standing(frontier, pieces, hidden))
        except Corrupt:
            # By all of it is said what is wrong, unless it was replaced meanwhile.
            return None
        return added if (added[0].start if added else frontier.next) == end else None

    def load_status(self, load_id: str) -> LoadStatus:
        """How far a bulk load that the history names has come; `Corrupt` if no record of it is left."""
        entry = self.store.get(load_key(load_id, prefix=self.keys.prefix))
        standing = _decoded(entry, LoadStanding)[0] if entry is not None else None
        if standing is None or standing.topic_id != self._topic_id:
            raise Corrupt(
                f"the catalog of {self.keys} names load {load_id}, of which the metadata store knows nothing: restore "
                'the metadata store, and run "forebay verify"'
            )
        return standing.status

    def committed_loads(self, named: Collection[str], seen: Frontier) -> set[str]:
        """Which of the bulk loads that history names are committed, by one look at the list of those not over.

        `seen` was read before the names; where history has moved since, no answer is given for any. A load that is
        given up leaves gaps in history first and that list last: one that history names and the list does not, is
        committed.
        """
        below = offers_prefix(prefix=self.keys.prefix)
        pending = {entry.key.removeprefix(below).partition("/")[0] for entry in self.store.range(below)}
        now = self.frontier()
        has_moved = (now.next, now.cur.generation) != (seen.next, seen.cur.generation)
        return set() if has_moved else set(named) - pending

    def pieces(self) -> list[Piece]:
        """What stands in the store, in order; a replacement hides what it replaced, and no manifest is opened."""
        return self.standing().pieces

    def page(self, start: int, limit: int) -> tuple[list[SegmentDescriptor], int | None]:
        """The pieces that begin at `start` or behind it, at most `limit`, and where to go on if there are more.

        For a look at a long history: each page is of its own moment, and no manifest is opened.
        """
        behind = self.keys.segment(start - 1) if start else None
        entries = self.store.range(self.keys.segments, start_after=behind, limit=limit + 1)
        is_more = len(entries) > limit and entries[-1].key != self.keys.cur
        stored = [entry for entry in entries[:limit] if entry.key != self.keys.cur]
        found = arranged(Piece(_decoded(entry, SegmentDescriptor)[0], entry.mod_revision) for entry in stored)[0]
        pieces = [piece.descriptor for piece in found if piece.descriptor.topic_id == self._topic_id]
        return pieces, found[-1].descriptor.end if is_more else None

    def stored(self) -> list[SegmentDescriptor]:
        """Every descriptor that stands in the store: those too that were replaced, and not removed yet."""
        entries = self.store.range(self.keys.segments)
        return [_decoded(entry, SegmentDescriptor)[0] for entry in entries if entry.key != self.keys.cur]

    def extend(
        self,
        epoch: int,
        additions: Sequence[SegmentDescriptor],
        is_unused: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Add to the end of history, all or nothing, as the owner in `epoch`.

        Harmless when repeated: additions that are there already, with the same content, are left as they are.
        Raises `Fenced` once another epoch owns the shard. Where `is_unused` says, at each look, that no offset behind
        the additions is in use, the same transaction gives back what is reserved there; true if it has.
        """

        def change(found: tuple[StoredState, Frontier]) -> Write[bool] | Done[bool]:
            state, frontier = found
            if self._recorded(frontier, additions):
                return Done(False)
            flaw = (
                never_backwards(frontier.next, additions)
                or no_overlap(additions)
                or no_gap(frontier.next, additions, additions[-1].end)
            )
            if flaw is not None:
                raise Conflict(f"{self.keys}: these segments do not continue the history: {flaw}", shard=self.keys)
            cur = Cur(
                start=additions[-1].start, next=additions[-1].end, epoch=epoch, generation=frontier.cur.generation
            )
            compares: list[Compare] = [
                RevisionIs(self.keys.state, state.revision),
                RevisionIs(self.keys.cur, frontier.revision),
                *(Absent(self.keys.segment(piece.start)) for piece in additions),
            ]
            puts: list[Operation] = [Put(self.keys.segment(p.start), encode_value(p)) for p in additions]
            puts.append(Put(self.keys.cur, encode_value(cur, unknown=frontier.unknown)))
            # Asked after the state was read: a reservation that begins later writes the state, and this is refused.
            gives_back = is_unused()
            if gives_back:
                puts += self._given_back(state, cur.next)
            # Commit point: before it the objects are orphans, after it they are history.
            return Write(compares, puts, gives_back)

        what = f"{self.keys}: history is not extended to offset {additions[-1].end}"
        return transact(self.store, lambda: (self.owned(epoch), self.frontier()), change, what=what, clock=self.clock)

    def give_back(self, epoch: int, end: int, is_unused: Callable[[], bool]) -> bool:
        """Say that nothing is reserved beyond `end`, where the log of the owner in `epoch` ends; true if that is so.

        As in `extend`, for an owner that has nothing to export.
        """

        def change(state: StoredState) -> Write[bool] | Done[bool]:
            if not is_unused():
                return Done(False)
            puts = self._given_back(state, end)
            return Write([RevisionIs(self.keys.state, state.revision)], puts, True) if puts else Done(True)

        what = f"{self.keys}: what is reserved beyond offset {end} stays so"
        return transact(self.store, lambda: self.owned(epoch), change, what=what, clock=self.clock)

    def _given_back(self, stored: StoredState, end: int) -> list[Operation]:
        """What is written so that nothing is reserved beyond `end`; nothing if that is so, or it is not known."""
        state = stored.state
        if state.phase is Phase.SEALED or state.reserved_in_log or state.reserved_end <= end:
            return []
        given = msgspec.structs.replace(state, reserved_end=end)
        return [Put(self.keys.state, encode_value(given, unknown=stored.unknown))]

    def replace(self, old: Sequence[Piece], new: SegmentDescriptor, *, also: Sequence[Compare] = ()) -> bool:
        """Put one descriptor (a segment or a manifest) in the place of consecutive ones; false if they changed.

        Only the first is overwritten in the transaction, which compares `also` too; the others are hidden by it from
        then on and removed afterwards, so the size of the change does not matter. Harmless when repeated.
        """
        self._check_replacement(old, new)

        def change(found: Standing) -> Write[bool] | Done[bool]:
            there = [piece for piece in found.pieces if new.start <= piece.descriptor.start < new.end]
            if [piece.descriptor for piece in there] == [new]:
                return Done(True)
            return self._replaced(old[0], new, found.frontier, also) if there == list(old) else Done(False)

        what = f"{self.keys}: the segments of [{new.start}, {new.end}) are not replaced"
        is_done = transact(self.store, self.standing, change, what=what, clock=self.clock)
        if is_done:
            self._sweep_soon()
        return is_done

    def take_out(self, load_id: str, gap: Callable[[SegmentDescriptor, SegmentDescriptor], SegmentDescriptor]) -> None:
        """Put a gap in the place of everything that a bulk load brought. Harmless when repeated.

        `gap` makes the descriptor from the first and the last one of the load.
        """

        def change(found: Standing) -> Write[bool] | Done[bool]:
            named = [piece for piece in found.pieces if piece.descriptor.load_id == load_id]
            if not named:
                return Done(False)
            new = gap(named[0].descriptor, named[-1].descriptor)
            self._check_replacement(named, new)
            return self._replaced(named[0], new, found.frontier, ())

        what = f"{self.keys}: load {load_id} is not taken out of history"
        if transact(self.store, self.standing, change, what=what, clock=self.clock):
            self._sweep_soon()

    def _check_replacement(self, old: Sequence[Piece], new: SegmentDescriptor) -> None:
        """`Conflict` unless the descriptor covers exactly what these consecutive ones cover."""
        first, last = old[0].descriptor, old[-1].descriptor
        flaw = no_gap(first.start, [piece.descriptor for piece in old], last.end)
        if flaw is not None or (new.start, new.end) != (first.start, last.end):
            raise Conflict(
                f"{self.keys}: [{new.start}, {new.end}) does not replace what stands there: {flaw}", shard=self.keys
            )

    def _sweep_soon(self) -> None:
        """Remove what a replacement hides. Readers pass over what is left of it for the next sweep."""
        with contextlib.suppress(Unavailable, Indeterminate):
            self.sweep_hidden()

    def sweep_hidden(self, below: int | None = None) -> int:
        """Remove descriptors that a replacement hides; how many. May be repeated and interrupted at will.

        With `below` only those that begin below this offset are looked for, and no others are read.
        """
        removed = 0
        pairs = self.standing().hidden if below is None else arranged(self._begun_below(below))[1]
        for hider, hidden in groupby(pairs, key=lambda pair: pair[0]):
            stale = [piece for _, piece in hidden]
            for first in range(0, len(stale), SWEEP_KEYS):
                part = stale[first : first + SWEEP_KEYS]
                removed += len(part) if self._swept(hider, part) else 0
        return removed

    def _begun_below(self, offset: int) -> Iterator[Piece]:
        """The descriptors that begin below this offset, in order, read a page at a time."""
        after: str | None = None
        while True:
            page = self.store.range(self.keys.segments, start_after=after, limit=SWEEP_KEYS)
            for entry in page:
                if entry.key >= self.keys.segment(offset) or entry.key == self.keys.cur:
                    return
                yield Piece(_decoded(entry, SegmentDescriptor)[0], entry.mod_revision)
            if len(page) < SWEEP_KEYS:
                return
            after = page[-1].key

    def front(self, count: int) -> Front:
        """The oldest `count` descriptors; those behind them are not read."""
        frontier = self.frontier()
        entries = self.store.range(self.keys.segments, limit=count + 1)
        is_whole = len(entries) <= count
        stored = [entry for entry in entries[:count] if entry.key != self.keys.cur]
        found = arranged(Piece(_decoded(entry, SegmentDescriptor)[0], entry.mod_revision) for entry in stored)
        return Front(frontier, *found, is_whole)

    def last(self, frontier: Frontier) -> SegmentDescriptor | None:
        """The newest piece of a history that ends so; `None` if there is none, or it has changed since."""
        entry = self.store.get(self.keys.segment(frontier.cur.start)) if frontier.revision else None
        return None if entry is None else _decoded(entry, SegmentDescriptor)[0]

    def standing(self) -> Standing:
        """All of it as of one revision: pages read one by one would miss what is replaced and swept between them."""
        entries = self.store.range(self.keys.segments)
        cur = entries.pop() if entries and entries[-1].key == self.keys.cur else None
        pieces, hidden = arranged(Piece(_decoded(entry, SegmentDescriptor)[0], entry.mod_revision) for entry in entries)
        return Standing(self._frontier_of(cur), pieces, hidden)

    def _frontier_of(self, entry: Entry | None) -> Frontier:
        if entry is None:
            return Frontier(Cur(start=0, next=0, epoch=0), None, 0)
        cur, unknown = _decoded(entry, Cur)
        return Frontier(cur, unknown, entry.mod_revision)

    def _replaced(
        self, first: Piece, new: SegmentDescriptor, frontier: Frontier, also: Sequence[Compare]
    ) -> Write[bool]:
        cur = msgspec.structs.replace(
            frontier.cur,
            start=new.start if new.end == frontier.next else frontier.cur.start,
            generation=frontier.cur.generation + 1,
        )
        # Every change to the catalog writes `cur`: the others have not changed either while it has not.
        compares: list[Compare] = [self._unchanged(first), RevisionIs(self.keys.cur, frontier.revision), *also]
        puts: list[Operation] = [
            Put(self.keys.segment(new.start), encode_value(new)),
            Put(self.keys.cur, encode_value(cur, unknown=frontier.unknown)),
        ]
        # Commit point: one descriptor now answers for the whole range.
        return Write(compares, puts, True)

    def _swept(self, hider: Piece, hidden: Sequence[Piece]) -> bool:
        # While it stands, whatever lies under it is hidden.
        deletes = [Delete(self.keys.segment(piece.descriptor.start)) for piece in hidden]
        return self.store.transaction([self._unchanged(hider)], deletes).succeeded

    def _unchanged(self, piece: Piece) -> RevisionIs:
        return RevisionIs(self.keys.segment(piece.descriptor.start), piece.revision)

    def _opened(self, descriptor: SegmentDescriptor) -> Sequence[SegmentDescriptor]:
        if descriptor.kind is not DescriptorKind.MANIFEST:
            return [descriptor]
        if self._manifest is None:
            raise Unavailable(f"{self.keys}: its catalog names a manifest object and no store is given to read it")
        try:
            return self._manifest(descriptor)
        except (BlobMissing, BlobChanged, Corrupt) as error:
            # The store names them conflicts; for a history that names the object it is damage.
            raise Corrupt(
                f"the history of {self.keys} in [{descriptor.start}, {descriptor.end}) is not known: its manifest "
                f'{descriptor.object_key} cannot be read ({error}); restore that object, and run "forebay verify"'
            ) from error

    def owned(self, epoch: int) -> StoredState:
        """The shard's state, which `epoch` owns; else `Fenced`."""
        stored = self.state()
        if stored is None or stored.state.epoch != epoch or stored.state.incarnation != self._topic_id:
            now = "gone" if stored is None else f"in epoch {stored.state.epoch}"
            is_deleted = (
                stored is None or stored.state.incarnation != self._topic_id or stored.state.phase is Phase.DELETING
            )
            raise Fenced(
                f"{self.keys} is {now}: the owner of epoch {epoch} may not change its history any more",
                shard=self.keys,
                deleted=is_deleted or None,
            )
        return stored

    def _recorded(self, frontier: Frontier, additions: Sequence[SegmentDescriptor]) -> bool:
        """Whether all of this is in the catalog already, by an attempt whose answer was lost."""
        if frontier.next < additions[-1].end:
            return False
        there = [piece.descriptor for piece in self.pieces()]
        return all(any(_same(found, piece) or _stands_for(found, piece) for found in there) for piece in additions)


def names_store(metadata: MetadataStore, store: str, *, prefix: str = PREFIX) -> bool:
    """Whether a segment of any topic lies in the store of this name. Reads every descriptor if none does."""
    last: str | None = None
    while page := metadata.range(all_shards_prefix(prefix=prefix), start_after=last, limit=PAGE_KEYS):
        for entry in page:
            if "/segments/" in entry.key and not entry.key.endswith("/segments/cur"):
                # What cannot be read here fails at the call that needs it.
                with contextlib.suppress(Corrupt, UnsupportedFormat):
                    if decode_value(entry.value, SegmentDescriptor)[0].store == store:
                        return True
        last = page[-1].key
    return False


def _decoded(entry: Entry, kind: type[T]) -> tuple[T, Unknown]:
    try:
        return decode_value(entry.value, kind)
    except (Corrupt, UnsupportedFormat) as error:
        raise unreadable(entry, error) from error


def unreadable(entry: Entry, error: Corrupt | UnsupportedFormat) -> Corrupt | UnsupportedFormat:
    """The error about a value of the catalog that cannot be read, with what to do."""
    if isinstance(error, UnsupportedFormat):
        return UnsupportedFormat(f"{entry.key}: {error}")
    return Corrupt(f'{entry.key}: {error}; restore the metadata store from a backup, then run "forebay verify"')


def _stands_for(found: SegmentDescriptor, wanted: SegmentDescriptor) -> bool:
    """Whether a piece took the place of what was wanted: no other process adds to history in one epoch."""
    replaced = found.status is Status.COMPACTED or found.kind is DescriptorKind.MANIFEST
    return replaced and found.start <= wanted.start and wanted.end <= found.end


def _same(found: SegmentDescriptor, wanted: SegmentDescriptor) -> bool:
    return (found.start, found.end, found.kind, found.content_hash, found.reason) == (
        wanted.start,
        wanted.end,
        wanted.kind,
        wanted.content_hash,
        wanted.reason,
    )
