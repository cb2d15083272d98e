"""Who changed a shard's recorded facts, in which epoch, and whether a new owner went on where it had to.

`RecordingMetadata` keeps every transaction that succeeded, those that landed late included if it lies below
the faults; the functions yield `Violation`s, as those of `invariants` do.

I19 one epoch at a time can commit · I20 nothing of an older epoch enters after a take-over · I21 a clean move goes
on exactly, an unclean one at the reserved end with a gap · I41 a take-over gives nothing up that was not accepted
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from forebay.catalog import ShardKeys
from forebay.format.metadata.descriptor import Cur, DescriptorKind, Phase, SegmentDescriptor, ShardState
from forebay.format.metadata.value import decode_value
from forebay.metadata import Compare, Entry, MemoryMetadata, MetadataStore, Operation, Outcome, Put, Session, Watch
from forebay.records import Gap
from forebay.testing.checks.invariants import Violation

Operations = tuple[Operation, ...]


class RecordingMetadata:
    """A `MetadataStore` that does what the inner one does and remembers what succeeded, in order.

    `on_commit` is called with each, before any other caller can act on it.
    """

    def __init__(self, inner: MetadataStore, on_commit: Callable[[Operations], None] | None = None) -> None:
        self.inner = inner
        self.committed: list[Operations] = []
        self._on_commit = on_commit
        self._lock = threading.RLock()

    def transaction(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        with self._lock:
            outcome = self.inner.transaction(compares, operations)
            if outcome.succeeded:
                self.committed.append(tuple(operations))
                if self._on_commit is not None:
                    self._on_commit(tuple(operations))
            return outcome

    def get(self, key: str) -> Entry | None:
        return self.inner.get(key)

    def range(self, prefix: str, *, start_after: str | None = None, limit: int | None = None) -> list[Entry]:
        return self.inner.range(prefix, start_after=start_after, limit=limit)

    def watch(self, prefix: str, from_revision: int | None = None) -> Watch:
        return self.inner.watch(prefix, from_revision)

    def session(self, ttl_s: float) -> Session:
        return self.inner.session(ttl_s)

    def session_alive(self, session: str) -> bool:
        return self.inner.session_alive(session)

    def end_session(self, session: str) -> None:
        self.inner.end_session(session)

    def revision(self) -> int:
        return self.inner.revision()

    def close(self) -> None:
        self.inner.close()

    def abandon(self) -> None:
        self.inner.abandon()


def replayed(committed: Iterable[Operations]) -> MemoryMetadata:
    """A store that holds what these transactions left; sessions, and the keys that were theirs, have ended."""
    store = MemoryMetadata()
    for operations in committed:
        store.transaction([], [op for op in operations if not (isinstance(op, Put) and op.session is not None)])
    return store


class Commit(NamedTuple):
    """What one transaction wrote of one shard."""

    state: ShardState | None = None
    cur: Cur | None = None
    pieces: tuple[SegmentDescriptor, ...] = ()


def commits_of(keys: ShardKeys, committed: Iterable[Operations]) -> list[Commit]:
    """The transactions that wrote anything of this shard, in order."""
    commits = [_commit_of(keys, operations) for operations in committed]
    return [commit for commit in commits if commit != Commit()]


def _commit_of(keys: ShardKeys, operations: Operations) -> Commit:
    puts = [operation for operation in operations if isinstance(operation, Put)]
    state = next((decode_value(put.value, ShardState)[0] for put in puts if put.key == keys.state), None)
    cur = next((decode_value(put.value, Cur)[0] for put in puts if put.key == keys.cur), None)
    listed = [put for put in puts if put.key.startswith(keys.segments) and put.key != keys.cur]
    return Commit(state, cur, tuple(decode_value(put.value, SegmentDescriptor)[0] for put in listed))


def one_epoch_at_a_time(commits: Iterable[Commit]) -> Iterator[Violation]:
    """I19: epochs only rise, in the state and in the catalog, and no two sessions ever own one of them."""
    state, cur = ShardState(incarnation=""), Cur(start=0, next=0, epoch=0)
    for commit in commits:
        if commit.state is not None:
            if commit.state.incarnation != state.incarnation:
                state, cur = ShardState(incarnation=commit.state.incarnation), Cur(start=0, next=0, epoch=0)
            if commit.state.epoch < state.epoch:
                yield Violation("I19", f"epoch {commit.state.epoch} changed the state after epoch {state.epoch}")
            owners = {commit.state.owner, state.owner} - {None}
            if commit.state.epoch == state.epoch and len(owners) > 1:
                yield Violation("I19", f"epoch {state.epoch} was owned by {sorted(map(str, owners))}")
            state = commit.state
        if commit.cur is not None:
            if commit.cur.epoch < cur.epoch:
                yield Violation("I19", f"epoch {commit.cur.epoch} changed the catalog after epoch {cur.epoch}")
            cur = commit.cur


def nothing_of_older_epochs(commits: Iterable[Commit]) -> Iterator[Violation]:
    """I20: only the present epoch adds to history, and nothing that another directory wrote before it was taken over.

    A replacement (a new generation of the catalog) adds nothing and keeps the epoch that stands there.
    """
    state, cur, taken_at = ShardState(incarnation=""), Cur(start=0, next=0, epoch=0), 0
    for commit in commits:
        if commit.state is not None:
            if commit.state.incarnation != state.incarnation:
                cur, taken_at = Cur(start=0, next=0, epoch=0), 0
            if commit.state.holder_since > state.holder_since:
                taken_at = cur.next
            state = commit.state
        if commit.cur is not None:
            if commit.cur.generation == cur.generation and commit.cur.epoch < state.epoch:
                yield Violation("I20", f"epoch {commit.cur.epoch} added to the history of epoch {state.epoch}")
            cur = commit.cur
        for piece in commit.pieces:
            is_own = piece.kind is DescriptorKind.FRAMES and piece.load_id is None
            if is_own and piece.start >= taken_at and piece.epoch < state.holder_since:
                yield Violation(
                    "I20",
                    f"[{piece.start}, {piece.end}) of epoch {piece.epoch} entered after epoch {state.holder_since} "
                    f"had taken over at {taken_at}",
                )


def losses_are_accepted(commits: Iterable[Commit]) -> Iterator[Violation]:
    """I41: what a directory had not exported when another took the shard over is recorded as given up, by whom.

    Offsets are reserved in the state before they are used, so nothing acknowledged lies beyond the reserved end.
    """
    state, frontier = ShardState(incarnation=""), 0
    for commit in commits:
        taken = commit.state
        if taken is not None:
            if taken.incarnation != state.incarnation:
                state, frontier = ShardState(incarnation=taken.incarnation), 0
            is_passed = state.phase is not Phase.SEALED and state.holder not in (None, taken.holder)
            if taken.epoch > state.epoch and is_passed and state.reserved_end > frontier:
                yield from _unaccepted(state, taken, frontier)
            state = taken
        if commit.cur is not None:
            frontier = commit.cur.next


def _unaccepted(left: ShardState, taken: ShardState, frontier: int) -> Iterator[Violation]:
    lost = f"[{frontier}, {left.reserved_end}) of {left.holder}, epoch {left.epoch}"
    found = [loss for loss in taken.losses if loss.epoch == left.epoch and loss.holder == left.holder]
    if not found:
        yield Violation("I41", f"{lost} was given up by {taken.holder}, and it is not recorded who accepted that")
    elif not (found[-1].by and found[-1].start <= frontier and left.reserved_end <= found[-1].stop):
        yield Violation("I41", f"{lost} was given up by {taken.holder}, and {found[-1]} was accepted")


class Handover(NamedTuple):
    """How a shard passed from one owner to another."""

    left: ShardState
    """The recorded state when the new owner came."""
    last: int
    """The old owner's next offset when it stopped."""
    frontier: int
    """The end of history when the new owner came."""
    began: int
    """The new owner's first next offset."""
    gaps: tuple[Gap, ...] = ()
    """The gaps that a reader of the new owner finds from the frontier on."""


def move_goes_on(handover: Handover) -> Iterator[Violation]:
    """I21: after a seal exactly where the old owner stopped, else behind all it may have given out, with a gap."""
    left, last, frontier, began, gaps = handover
    if left.phase is Phase.SEALED:
        if not last == left.next_offset == began:
            yield Violation("I21", f"stopped at {last}, sealed at {left.next_offset}, went on at {began}")
        if gaps or frontier < left.next_offset:
            yield Violation("I21", f"sealed at {left.next_offset} with history up to {frontier} and gaps {gaps}")
        return
    if began != max(frontier, left.reserved_end) or began < last:
        yield Violation(
            "I21", f"stopped at {last} with {left.reserved_end} reserved and history to {frontier}, went on at {began}"
        )
    expected = frontier
    for gap in gaps:
        expected = gap.stop if gap.start == expected else -1
    if expected != began:
        yield Violation("I21", f"[{frontier}, {began}) is not named as a gap: {gaps}")
