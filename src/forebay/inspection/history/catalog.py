"""What the metadata store says of one shard's history, as far as it can be read, and whether it holds together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from forebay.catalog import ShardCatalog, ShardKeys, no_gap, no_overlap
from forebay.catalog.entries import UnreadableValue
from forebay.catalog.shard import Piece, arranged
from forebay.errors import Corrupt, UnsupportedFormat
from forebay.format.metadata.descriptor import Cur, Phase, SegmentDescriptor, ShardState
from forebay.format.metadata.keys import shard_prefix
from forebay.format.metadata.value import decode_value
from forebay.format.metadata.vectors import decode_vector
from forebay.inspection.directory import ExpectedShard
from forebay.inspection.findings import UPGRADE, HistorySummary, Report, Severity
from forebay.metadata import Entry, MetadataStore
from forebay.places import Stores

METADATA = "restore the metadata store from a backup"

Wrong = Callable[[str, tuple[int, int] | None], None]


@dataclass(slots=True)
class StoredHistory:
    """A shard's state and catalog at one moment. `pieces` are in order, without those that another has replaced."""

    state: ShardState | None = None
    cur: Cur | None = None
    pieces: list[Piece] = field(default_factory=list)
    hidden: list[tuple[Piece, Piece]] = field(default_factory=list)
    """Those, each after the piece that has replaced it."""
    bad: list[UnreadableValue] = field(default_factory=list)

    @property
    def frontier(self) -> int:
        """The end of catalogued history."""
        return self.cur.next if self.cur is not None else 0

    @property
    def is_empty(self) -> bool:
        """Nothing is catalogued and nothing is wrong."""
        return self.cur is None and not self.pieces and not self.bad


class HistoryPlaces(NamedTuple):
    """Where the history of one shard can be asked for: the catalog, and the stores that have its objects."""

    metadata: MetadataStore
    stores: Stores
    keys: ShardKeys
    topic_id: str

    @classmethod
    def of(cls, place: ExpectedShard, metadata: MetadataStore, stores: Stores, prefix: str) -> HistoryPlaces | None:
        """The history of a shard; `None` where no topic has it."""
        if place.spec is None:
            return None
        keys = ShardKeys(place.spec.namespace, place.spec.topic, place.partition, prefix)
        return cls(metadata, stores, keys, place.spec.topic_id)

    @property
    def catalog(self) -> ShardCatalog:
        return ShardCatalog(self.metadata, self.keys, self.topic_id, clock=self.stores.clock)

    def read(self) -> StoredHistory:
        """What is recorded now, in one consistent state."""
        return recorded(self.entries(), self.keys)

    def entries(self) -> list[Entry]:
        """The same as it is stored."""
        keys = self.keys
        return self.metadata.range(shard_prefix(keys.namespace, keys.topic, keys.partition, prefix=keys.prefix))


def summary(found: StoredHistory, place: ExpectedShard, history: HistoryPlaces) -> HistorySummary:
    """How the shard stands."""
    state = found.state or ShardState(incarnation="")
    is_owned = state.owner is not None and history.metadata.session_alive(state.owner)
    pieces = [piece.descriptor for piece in found.pieces]
    gaps = sum(piece.gap is not None for piece in pieces)
    return HistorySummary(
        shard=place.name,
        phase=str(state.phase) if found.state is not None else "without state",
        epoch=state.epoch,
        owner=state.owner if is_owned else None,
        holder=state.holder,
        next_offset=state.next_offset,
        reserved_end=state.reserved_end,
        history=(pieces[0].start if pieces else found.frontier, found.frontier),
        segments=len(pieces) - gaps,
        gaps=gaps,
        bytes=sum(piece.bytes for piece in pieces),
    )


def recorded(entries: list[Entry], keys: ShardKeys) -> StoredHistory:
    """What the entries of a shard say; those that cannot be used are kept apart."""
    found, pieces = StoredHistory(), list[Piece]()
    for entry in entries:
        try:
            if entry.key == keys.state:
                found.state = decode_value(entry.value, ShardState)[0]
            elif entry.key == keys.cur:
                found.cur = decode_value(entry.value, Cur)[0]
            elif entry.key.startswith(keys.segments):
                descriptor = decode_value(entry.value, SegmentDescriptor)[0]
                if entry.key != keys.segment(descriptor.start):
                    raise Corrupt(f"a descriptor of [{descriptor.start}, {descriptor.end}) stands under this key")
                pieces.append(Piece(descriptor, entry.mod_revision))
            elif entry.key.startswith(keys.deletes):
                vector, _ = decode_vector(entry.value)
                if entry.key != keys.vector(vector.start):
                    raise Corrupt(f"the deletes from {vector.start} on stand under this key")
        except (Corrupt, UnsupportedFormat) as error:
            found.bad.append(UnreadableValue(entry.key, error))
    found.pieces, found.hidden = arranged(pieces)
    return found


def judge(found: StoredHistory, place: ExpectedShard, report: Report, *, floor: int) -> None:
    """Hold what is recorded against the rules of a history. Nothing below `floor` is missed."""

    def wrong(what: str, offsets: tuple[int, int] | None) -> None:
        report.add(Severity.ERROR, f"the catalog: {what}", METADATA, shard=place.name, offsets=offsets)

    for bad in found.bad:
        if not bad.key.endswith("/state"):
            step = UPGRADE if isinstance(bad.error, UnsupportedFormat) else METADATA
            report.add(Severity.ERROR, f"{bad.key}: {bad.error}", step, shard=place.name)
    pieces = [piece.descriptor for piece in found.pieces]
    start = min(floor, pieces[0].start if pieces else found.frontier)
    flaw = no_overlap(pieces) or no_gap(start, pieces, found.frontier)
    if flaw is not None:
        wrong(flaw, None)
    for piece in pieces:
        if piece.topic_id != place.id.partition("_")[0]:
            wrong(f"the piece is of another topic, {piece.topic_id}", (piece.start, piece.end))
    for hider, hidden in found.hidden:
        start, end = hidden.descriptor.start, hider.descriptor.end
        if hidden.descriptor.end > end:
            wrong(f"[{start}, {end}) is covered twice", (start, end))
    if pieces:
        _judge_end(found, pieces[-1], wrong)
    _judge_state(found, wrong)


def _judge_end(found: StoredHistory, last: SegmentDescriptor, wrong: Wrong) -> None:
    cur = found.cur
    if cur is None:
        if not any(bad.key.endswith("/cur") for bad in found.bad):
            wrong(f"has pieces up to {last.end}, but no end is recorded", None)
    elif last.end > cur.next:
        wrong(f"the piece lies behind the recorded end {cur.next}", (last.start, last.end))
    elif not last.start <= cur.start < cur.next and last.end == cur.next:
        wrong(f"says that its last piece starts at {cur.start}, but it starts at {last.start}", None)


def _judge_state(found: StoredHistory, wrong: Wrong) -> None:
    state, end = found.state, found.frontier
    if state is None:
        if found.pieces and not any(bad.key.endswith("/state") for bad in found.bad):
            wrong("the shard has history, but no state", None)
        return
    epoch = max((piece.descriptor.epoch for piece in found.pieces), default=0)
    if epoch > state.epoch:
        wrong(f"names epoch {epoch}, the shard's state only {state.epoch}", None)
    if state.phase is Phase.SEALED and state.next_offset != end:
        first, last = sorted((end, state.next_offset))
        wrong(f"ends at {end}, but the shard was sealed at {state.next_offset}", (first, last))
