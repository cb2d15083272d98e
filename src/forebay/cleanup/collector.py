"""Decides which objects of a shard may be removed from a store, and removes them.

`judge` is pure: from what the store lists and from what is known of the shard it gives, for every object, the reasons
to keep it. An object without a reason may go. `Collector` gathers the facts in an order that keeps the judgement true
until the object is gone, and is the only one that removes objects of topics. Knows stores and the catalog; what else
is known of a shard comes in as a `Scope`.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from forebay.blobs import BlobMissing, BlobStore, Stat
from forebay.catalog import ShardCatalog
from forebay.clock import Clock
from forebay.format.files.segment import (
    COMPACTED,
    HEADER_BYTES,
    INDEX_SUFFIX,
    SEGMENT_SUFFIX,
    SegmentHeader,
    decode_header,
    index_name,
    is_segment,
)
from forebay.format.metadata.descriptor import SegmentDescriptor, Status
from forebay.places import is_private

logger = logging.getLogger(__name__)

LOADS: Final = "/loads/"
"""Objects of bulk loads have this in their keys, and behind it the id of the load."""
EPOCH_MAX: Final = 2**63 - 1
"""Later than every epoch: an owner that is still to come may claim whatever is there."""


class Kept(enum.StrEnum):
    """Why an object is kept, in words for the operator."""

    YOUNG = "it is younger than the grace"
    NAMED = "history names it"
    TABLED = "a table names it"
    UNEXPORTED = "a local file with its content is still to be exported"
    COMPACTING = "a compaction is under way and may name it"
    LOADING = "its bulk load is not known to be over"
    CLAIMABLE = "another owner may name it yet"
    ELSEWHERE = "history lies in a store that is not known here, and this may be a copy of it"
    READ = "history named it within the grace: a reader may still use it"


Judgement: TypeAlias = dict[str, tuple[Kept, ...]]
"""For each key why it is kept; an empty tuple means that the object may go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a shard when its objects are judged."""

    old_before_ms: int | None
    """Objects that were modified later are young. `None` if age is no reason."""
    grace_s: float
    is_given_up: bool = False
    """Whether the topic was deleted, or has left this store as a whole: then age alone is a reason."""
    named: Collection[str] = ()
    """What the catalog names, indexes and manifests included."""
    tabled: Collection[str] = ()
    """What snapshots of open tables name."""
    unexported: Collection[str] = ()
    """What sealed local files would be stored as: a transaction whose answer was lost may name it yet."""
    is_compacting: bool = False
    loads_over: Collection[str] = ()
    """The ids of bulk loads that are committed or given up."""
    epoch: int | None = None
    """The epoch of the owner that collects. `None` if the collector owns nothing."""
    outdated: Collection[str] = ()
    """Without an owner: objects whose offsets history has by other objects, so that no owner will ever name them."""
    is_elsewhere: bool = False
    is_rewritten: bool = False
    """Whether a part of history took the place of another within the grace."""
    unneeded_s: Mapping[str, float] = field(default_factory=dict)
    """For how many seconds each object has been found without another reason."""


def judge(listed: Iterable[Stat], facts: Facts) -> Judgement:
    """Give for each object all reasons to keep it; one without a reason may go.

    When exactly history stopped naming an object is not recorded. While nothing was rewritten within the grace it was
    before that. Otherwise the grace begins when the object is first found without another reason.
    """
    judged: Judgement = {}
    for stat in listed:
        rules = (Kept.YOUNG,) if facts.is_given_up else tuple(RULES)
        reasons = tuple(kept for kept in rules if RULES[kept](stat, facts))
        judged[stat.key] = reasons or ((Kept.READ,) if _may_be_read(stat.key, facts) else ())
    return judged


def _may_be_read(key: str, facts: Facts) -> bool:
    return facts.is_rewritten and facts.unneeded_s.get(key, 0.0) < facts.grace_s


def _is_claimable(key: str, facts: Facts) -> bool:
    """Whether an owner other than the collector may name it. Compactors and loads name the objects of their own."""
    if _is_compacted(key) or LOADS in key:
        return False
    if facts.epoch is None:
        return key not in facts.outdated
    epoch = key.partition("/")[2].partition("-")[0]
    return epoch.isdecimal() and int(epoch) > facts.epoch


def _is_compacted(key: str) -> bool:
    return f"/{COMPACTED}" in key


def _load_of(key: str) -> str:
    """The id of the load that brought the object; empty if its key names none."""
    load_id, _, name = key.partition(LOADS)[2].partition("/")
    return load_id if name else ""


RULES: Final[dict[Kept, Callable[[Stat, Facts], bool]]] = {
    Kept.YOUNG: lambda stat, facts: facts.old_before_ms is not None and stat.modified_ms >= facts.old_before_ms,
    Kept.NAMED: lambda stat, facts: stat.key in facts.named,
    Kept.TABLED: lambda stat, facts: stat.key in facts.tabled,
    Kept.UNEXPORTED: lambda stat, facts: stat.key in facts.unexported,
    Kept.COMPACTING: lambda stat, facts: facts.is_compacting and _is_compacted(stat.key),
    Kept.LOADING: lambda stat, facts: LOADS in stat.key and _load_of(stat.key) not in facts.loads_over,
    Kept.CLAIMABLE: lambda stat, facts: _is_claimable(stat.key, facts),
    Kept.ELSEWHERE: lambda stat, facts: facts.is_elsewhere,
}
"""When each reason holds; `READ` alone depends on the others, see `judge`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Which objects are to be judged, and where the facts about them come from.

    The functions are called in the order in which they stand here, each at most once, after the objects are listed.
    """

    store: BlobStore
    prefix: str
    catalog: ShardCatalog
    is_compacting: Callable[[], bool]
    """Whether a process holds the lease to compact the shard."""
    loads_over: Callable[[Collection[str]], Collection[str]] = lambda load_ids: ()
    """Of these loads, those that are over."""
    unexported: Callable[[], Collection[str]] = lambda: ()
    """See `Facts`. Nothing may be exported while the owner collects."""
    tabled: Callable[[], Collection[str]] = lambda: ()
    """See `Facts`; with each segment its index is kept."""
    epoch: int | None = None
    is_there: Callable[[SegmentDescriptor], bool] = lambda piece: True
    """Whether a segment of history lies in this store: copies in two stores have the same key."""
    is_elsewhere: Callable[[SegmentDescriptor], bool] = lambda piece: False
    """Whether a segment of history lies in a store that the collector does not know."""


class Collector:
    """Removes objects that have no reason to be kept, and remembers since when an object has had none.

    One per process. It holds no lock while it asks stores and metadata; two threads must not collect the same prefix
    of a store at once.
    """

    def __init__(self, clock: Clock, grace_s: float) -> None:
        self._clock = clock
        self._grace_s = grace_s
        self._unneeded: dict[tuple[str, str], dict[str, float]] = {}
        """By store and prefix: since when each object has been kept for its readers alone."""

    def collect(self, scope: Scope) -> list[str]:
        """Remove what may go; the keys of what was removed."""
        judged = self.look(scope)
        logger.debug("%s: objects in %s: %s", scope.catalog.keys, scope.store.name, summary(judged))
        place, now = (scope.store.name, scope.prefix), self._clock.monotonic()
        before = self._unneeded.pop(place, {})
        unneeded = {key: before.get(key, now) for key, why in judged.items() if why in ((), (Kept.READ,))}
        if unneeded:
            # Kept up while objects are removed: if the store fails now, what is left does not begin its grace again.
            self._unneeded[place] = unneeded
        removed = [key for key, why in judged.items() if not why]
        for key in removed:
            scope.store.delete(key)
            del unneeded[key]
            logger.info("%s: removed the object %s, which nothing needs any more", scope.catalog.keys, key)
        if not unneeded:
            self._unneeded.pop(place, None)
        return removed

    def look(self, scope: Scope) -> Judgement:
        """Judge every object of the scope, and remove nothing.

        The order of the questions matters. The list comes first: what is written later is not in it. Compactors and
        loads come before the catalog: one that has ended by then has named its objects there, or never will. Tables
        come last: who makes a snapshot first writes down what it names, and then sees that history still names it.
        """
        old_before_ms = self._old_before_ms()
        listed = list(scope.store.list(scope.prefix))
        old = [stat.key for stat in listed if stat.modified_ms < old_before_ms]
        if not old:
            return {stat.key: (Kept.YOUNG,) for stat in listed}
        is_compacting = scope.is_compacting()
        load_ids = {_load_of(key) for key in old} - {""}
        loads_over = scope.loads_over(load_ids) if load_ids else ()
        standing = [piece.descriptor for piece in scope.catalog.pieces()]
        # After what stands: a manifest that came in between is read here, with all that it lists.
        pieces = scope.catalog.descriptors()
        named = keys_of([*standing, *pieces], scope.is_there)
        unexported = _with_indexes(scope.unexported())
        tabled = _with_indexes(scope.tabled())
        unneeded = [key for key in old if key not in named and key not in tabled]
        since, now = self._unneeded.get((scope.store.name, scope.prefix), {}), self._clock.monotonic()
        facts = Facts(
            old_before_ms=old_before_ms,
            grace_s=self._grace_s,
            named=named,
            tabled=tabled,
            unexported=unexported,
            is_compacting=is_compacting,
            loads_over=loads_over,
            epoch=scope.epoch,
            outdated=_outdated(scope, unneeded, pieces) if scope.epoch is None else (),
            is_elsewhere=any(map(scope.is_elsewhere, pieces)),
            is_rewritten=any(_is_rewritten(piece, old_before_ms) for piece in pieces),
            unneeded_s={key: now - at for key, at in since.items()},
        )
        return judge(listed, facts)

    def look_at(self, scope: Scope, keys: Collection[str]) -> Judgement:
        """Judge these objects alone, and those that belong to them, as if every grace were over; remove nothing.

        For objects that hold erased records: neither their age nor a reader that may have begun keeps them.
        """
        listed = [stat for stat in scope.store.list(scope.prefix) if _belongs_to(stat.key, keys)]
        is_compacting = scope.is_compacting()
        load_ids = {_load_of(stat.key) for stat in listed} - {""}
        loads_over = scope.loads_over(load_ids) if load_ids else ()
        standing = [piece.descriptor for piece in scope.catalog.pieces()]
        pieces = scope.catalog.descriptors()
        facts = Facts(
            old_before_ms=None,
            grace_s=0.0,
            named=keys_of([*standing, *pieces], scope.is_there),
            tabled=_with_indexes(scope.tabled()),
            unexported=_with_indexes(scope.unexported()),
            is_compacting=is_compacting,
            loads_over=loads_over,
            epoch=scope.epoch,
            is_elsewhere=any(map(scope.is_elsewhere, pieces)),
        )
        return judge(listed, facts)

    def remove_at_once(self, scope: Scope, keys: Collection[str]) -> list[str]:
        """Remove those of these objects that nothing but a grace keeps; the keys of what was removed.

        An index goes before its segment: what is left by a crash in between is found again by the segment.
        """
        judged = self.look_at(scope, keys)
        removed = sorted((key for key, why in judged.items() if not why), key=is_segment)
        for key in removed:
            scope.store.delete(key)
            logger.info("%s: removed the object %s, which held erased records", scope.catalog.keys, key)
        return removed

    def may_go(self, listed: Iterable[Stat], named: Collection[str] = ()) -> list[Stat]:
        """Those of the objects that their shard's owner may find unneeded: a first look before the shard is opened.

        They are older than the grace and no bulk load's, and are not among `named`, which history names.
        """
        facts = Facts(old_before_ms=self._old_before_ms(), grace_s=self._grace_s, named=named, epoch=EPOCH_MAX)
        by_key = {stat.key: stat for stat in listed}
        return [by_key[key] for key, why in judge(by_key.values(), facts).items() if not why]

    def clear(self, store: BlobStore, prefix: str, *, at_once: bool) -> int:
        """Remove every object below a prefix whose topic was deleted, or has left the store; how many there were.

        The caller has recorded that nothing names them any more. Unless `at_once`, young objects stay.
        """
        old_before_ms = None if at_once else self._old_before_ms()
        facts = Facts(old_before_ms=old_before_ms, grace_s=self._grace_s, is_given_up=True)
        removed = [key for key, why in judge(store.list(prefix), facts).items() if not why]
        for key in removed:
            store.delete(key)
        for place in [
            place for place in self._unneeded.copy() if place[0] == store.name and place[1].startswith(prefix)
        ]:
            self._unneeded.pop(place, None)
        return len(removed)

    def _old_before_ms(self) -> int:
        return self._clock.now_ms() - int(self._grace_s * 1000)


def summary(judged: Judgement) -> str:
    """How many objects are kept for each reason, and how many may go, for the log. Two reasons count twice."""
    counts = Counter(kept for why in judged.values() for kept in why)
    parts = [f"{counts[kept]} kept because {kept}" for kept in Kept if counts[kept]]
    free = sum(1 for why in judged.values() if not why)
    return "; ".join([*parts, f"{free} may go"])


def keys_of(pieces: Sequence[SegmentDescriptor], is_there: Callable[[SegmentDescriptor], bool]) -> set[str]:
    """The objects that these descriptors name, with indexes, of the segments that are where it is asked about."""
    named = [piece for piece in pieces if piece.object_key and is_there(piece)]
    indexes = {piece.index_object for piece in named if is_segment(piece.object_key)}
    return {piece.object_key for piece in named} | indexes


def named_by(catalog: ShardCatalog, is_there: Callable[[SegmentDescriptor], bool] = lambda piece: True) -> set[str]:
    """Every object that a history names, of the segments that are where it is asked about."""
    return keys_of([*(piece.descriptor for piece in catalog.pieces()), *catalog.descriptors()], is_there)


def _with_indexes(keys: Collection[str]) -> set[str]:
    return {*keys, *(index_name(key) for key in keys if is_segment(key))}


def _belongs_to(key: str, keys: Collection[str]) -> bool:
    """Whether it is one of these objects, or an index of one of them."""
    if key in keys or not key.endswith(INDEX_SUFFIX):
        return key in keys
    stem = key.removesuffix(INDEX_SUFFIX)
    return any(stem.startswith(segment.rpartition(".")[0]) for segment in keys if is_segment(segment))


def _is_rewritten(piece: SegmentDescriptor, since_ms: int) -> bool:
    return (piece.status is Status.COMPACTED or piece.index_key is not None) and piece.created_at > since_ms


def _outdated(scope: Scope, keys: Iterable[str], pieces: Sequence[SegmentDescriptor]) -> set[str]:
    """Those of the keys that were exported, and whose offsets history has: their headers say so.

    None while history lies in a data directory: when its topic moves, its files get the names of exports here.
    """
    if not pieces or any(scope.is_elsewhere(piece) or is_private(piece) for piece in pieces):
        return set()
    return {key for key in keys if _is_outdated(scope, key, pieces[-1])}


def _is_outdated(scope: Scope, key: str, last: SegmentDescriptor) -> bool:
    shard_id, _, name = key.partition("/")
    if "/" in name:
        return False
    segment = key.removesuffix(INDEX_SUFFIX) + SEGMENT_SUFFIX if name.endswith(INDEX_SUFFIX) else key
    if not segment.endswith(SEGMENT_SUFFIX):
        return False
    try:
        header = decode_header(scope.store.get_range(segment, 0, HEADER_BYTES))
    except BlobMissing:
        return False
    return (
        isinstance(header, SegmentHeader)
        and header.shard_id == shard_id
        and header.topic_id == last.topic_id
        and header.start < last.end
    )
