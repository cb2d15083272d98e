"""Look-ups and deletes of a topic, over its partitions; the rest of a topic is in `topic`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar, cast

from forebay.engines import OpenShard
from forebay.engines.operations import check_offset
from forebay.engines.seam import LookedUpShard
from forebay.errors import Closed, Indeterminate, Invalid, Unavailable, Unsupported
from forebay.format.batch import Batch
from forebay.pages import Page
from forebay.partitioning import Partitioner, partition_of_key
from forebay.reading import OnGap, in_order, report_gap
from forebay.records import EARLIEST, Gap, Record
from forebay.shard.deletion import DeleteBefore, DeleteKey, DeleteRange, DeleteTag, Deletion
from forebay.storage.checks import Start, checked_bytes, checked_limit, checked_partition, checked_tag
from forebay.storage.streams import Stream
from forebay.topics import TopicSpec

T = TypeVar("T")


def offers(shard: object, ability: str) -> bool:
    """Whether a shard has this ability of a `LookedUpShard`."""
    return hasattr(shard, ability)


def offering(shard: OpenShard, ability: str) -> LookedUpShard:
    """The shard, if it has that ability; else `Unsupported`: beside its owner a shard has fewer."""
    if not offers(shard, ability):
        raise Unsupported(
            f"{shard.ref} is opened read-only and has no {ability} here: ask the process that owns the directory"
        )
    return cast(LookedUpShard, shard)


def partitions_of(spec: TopicSpec, key: bytes) -> list[int]:
    """Where the records of a key are that went by its hash: today's partition first, then those of generations before.

    Every generation only added partitions, so what a key has in an older place was appended earlier.
    """
    counts = (spec.partitions, *reversed(spec.earlier))
    return list(dict.fromkeys(partition_of_key(key, count) for count in counts))


class Lookups:
    """Finds and deletes records by key, tag and offset."""

    spec: TopicSpec
    _shard: Callable[[int], OpenShard]
    """The shard of a partition, owned by this process."""
    _look: Callable[[int], OpenShard]
    """The shard of a partition for a caller who only looks: nothing is acquired that another directory holds."""
    _partitioner: Partitioner
    _chosen: Callable[[Start, int | None], Sequence[int]]
    """The partitions that `start` and `partition` mean."""
    _first: Callable[[int, Start], int]
    """The offset in a partition that a caller means by `start`."""

    def read_by_key(
        self,
        key: bytes,
        *,
        history: bool = False,
        start: Start = EARLIEST,
        limit: int | None = None,
        partition: int | None = None,
        on_gap: OnGap | None = None,
    ) -> Stream[Record]:
        """The newest live record with exactly this key, or nothing; with `history` all of them, oldest first.

        Records before `start`, which is given as to `Topic.read`, are left out; `limit` ends the stream after so many.

        They are looked for where the hash of the key puts them, today and before partitions were added: partition
        after partition, today's last. Records that were appended to a partition of the caller's choice are found by
        naming it.

        A damaged range that may hold a record of the key, for the newest one above what is found, raises `DataLoss`
        at its place, unless `on_gap(partition, gap)` takes it; the next step goes on behind it.
        """
        wanted = _checked_key(key)
        chosen = self._chosen(start, partition)
        places = (
            [place for place in partitions_of(self.spec, wanted) if place in chosen] if partition is None else chosen
        )
        return Stream(
            _Found(
                self._spans("read_by_key", reversed(places) if history else places, start),
                lambda place, start: self._found_in(
                    place, "read_by_key", lambda shard: shard.read_by_key(wanted, start, history=history)
                ),
                partial(report_gap, str(self.spec.name), on_gap),
                limit=checked_limit(limit),
                one=not history,
            )
        )

    def read_by_tag(
        self,
        tag: str,
        *,
        start: Start = EARLIEST,
        limit: int | None = None,
        partition: int | None = None,
        on_gap: OnGap | None = None,
    ) -> Stream[Record]:
        """The live records with exactly this tag, up to the end as it is now; partition after partition.

        For `start`, `limit`, damaged ranges and `on_gap` see `read_by_key`.
        """
        wanted = _checked_tag(tag)
        return Stream(
            _Found(
                self._spans("read_by_tag", self._chosen(start, partition), start),
                lambda place, start: self._found_in(
                    place, "read_by_tag", lambda shard: shard.read_by_tag(wanted, start)
                ),
                partial(report_gap, str(self.spec.name), on_gap),
                limit=checked_limit(limit),
            )
        )

    def _spans(self, ability: str, places: Iterable[int], start: Start) -> list[_Span]:
        """In which partitions to look, from where to where each reaches now."""
        whole = not isinstance(start, Mapping) and start == EARLIEST
        return [
            _Span(place, 0 if whole else self._first(place, start), self._found_in(place, ability, _published))
            for place in places
        ]

    def delete_by_key(self, key: bytes, *, partition: int | None = None) -> int:
        """Delete every record with exactly this key that is there now, in all partitions; how many there were.

        On return it holds by the durability class of the topic. If it fails, some may be deleted: repeat it. It is
        refused with `DataLoss` where a damaged range may hold such a record.
        """
        return self._delete(self._places(partition), DeleteKey(_checked_key(key)))

    def delete_by_tag(self, tag: str, *, partition: int | None = None) -> int:
        """Delete every record with exactly this tag, as `delete_by_key`."""
        return self._delete(self._places(partition), DeleteTag(_checked_tag(tag)))

    def delete_by_offset(self, start: int, stop: int, partition: int | None = None) -> int:
        """Delete the records of `[start, stop)` in a partition; how many there were."""
        check_offset(start)
        check_offset(stop)
        if stop < start:
            raise Invalid(f"the range [{start}, {stop}) ends before it begins")
        return self._delete([self._only(partition)], DeleteRange(start, stop))

    def delete_before(self, offset: int, partition: int | None = None) -> int:
        """Delete everything below `offset` in a partition, which then begins there; how many records there were."""
        check_offset(offset)
        return self._delete([self._only(partition)], DeleteBefore(offset))

    def _delete(self, places: Sequence[int], what: Deletion) -> int:
        # Asked of all before the first deletes: one that cannot must not leave the others half done.
        for place in places:
            offering(self._shard(place), "delete")
        try:
            return sum(
                self._tried(self._shard, place, lambda shard: offering(shard, "delete").delete(what))
                for place in places
            )
        except Unavailable as error:
            if isinstance(error.__cause__, OSError):
                raise Indeterminate(f"{error}: what was deleted stays so; repeat it") from error
            raise

    def _found_in(self, partition: int, ability: str, call: Callable[[LookedUpShard], T]) -> T:
        return self._tried(self._look, partition, lambda shard: call(offering(shard, ability)))

    def _tried(self, find: Callable[[int], OpenShard], partition: int, call: Callable[[OpenShard], T]) -> T:
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

    def _place(self, partition: int) -> int:
        return self._partitioner.choose(None, partition=checked_partition(partition))

    def _places(self, partition: int | None) -> Sequence[int]:
        return range(self.spec.partitions) if partition is None else [self._place(partition)]

    def _only(self, partition: int | None) -> int:
        if partition is None and self.spec.partitions > 1:
            raise Invalid(
                f"{self.spec.name} has {self.spec.partitions} partitions and an offset is a place in one of them: "
                "name the partition"
            )
        return self._place(partition or 0)


class _Span(NamedTuple):
    """The offsets of a partition that a look-up goes through. From 0 on, it also reports what was evicted."""

    partition: int
    start: int
    stop: int


class _Found:
    """The pages of a look-up, partition after partition; each up to where the partition ended at first."""

    def __init__(
        self,
        spans: Sequence[_Span],
        look_up: Callable[[int, int], Page],
        report: Callable[[int, Gap], None],
        *,
        limit: int | None,
        one: bool = False,
    ) -> None:
        self._spans = list(spans)
        self._look_up = look_up
        self._report = report
        self._left = limit
        self._one = one
        self._found: deque[tuple[int, Gap | Batch]] = deque()
        """What was found and not given yet, with its partition."""

    def next_page(self) -> list[Record]:
        """See `Source`."""
        while (self._found or self._spans) and self._left != 0:
            if not self._found:
                self._look()
            records: list[Record] = []
            while self._found and (not records or isinstance(self._found[0][1], Batch)):
                place, piece = self._found.popleft()
                if isinstance(piece, Gap):
                    self._report(place, piece)
                else:
                    records += piece.records(place)
            if records:
                if self._left is not None:
                    records = records[: self._left]
                    self._left -= len(records)
                return records
        return []

    def _look(self) -> None:
        """Ask for the next page."""
        place, start, stop = self._spans[0]
        page = self._look_up(place, start)
        if not self._one:
            # The newest record may have been appended meanwhile, and is the answer all the same; others are not.
            page = page.clipped(stop)
        self._found.extend((place, piece) for piece in _in_order(page, newest=self._one))
        if page.next >= stop or page.next <= start:
            # The end of the partition, or a bulk load that is not committed yet: `read` ends there, too.
            self._spans.pop(0)
        else:
            self._spans[0] = _Span(place, page.next, stop)
        if self._one and page.batches:
            self._spans.clear()

    def close(self) -> None:
        """See `Source`."""
        self._spans.clear()
        self._found.clear()


def _in_order(page: Page, *, newest: bool) -> Iterator[Gap | Batch]:
    """What was found; of a look-up for the newest record, first the ranges above it that cannot be read."""
    return iter([*page.events, *page.batches]) if newest else in_order(page)


def _published(shard: OpenShard) -> int:
    return shard.published()


def _checked_key(key: object) -> bytes:
    found = checked_bytes("key", key)
    if found is None:
        raise Invalid("key is None: records without a key cannot be looked up by it")
    return found


def _checked_tag(tag: object) -> str:
    found = checked_tag(tag)
    if found is None:
        raise Invalid("tag is None: records without a tag cannot be looked up by it")
    return found
