"""The interface by shard name, done once for every engine in terms of its open shards."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Generic, TypeVar

from forebay.appends.queue import Entry, record_bytes
from forebay.appends.ticket import Ticket
from forebay.engines.registry import Registry
from forebay.engines.seam import PAGE_BYTES, PAGE_RECORDS, NewRecord, OwnedShard, ReadShard, ShardStatus
from forebay.errors import Invalid
from forebay.format.batch import Columns, encode_columns
from forebay.format.descriptor import state_key
from forebay.format.keys import deleted_key, late_key
from forebay.pages import Page
from forebay.progress import Progress, ProgressStore, ReaderName
from forebay.records import OFFSET_MAX, Gap, Reason
from forebay.settings import Settings
from forebay.shard import ShardRef, Wanted
from forebay.shard.deletion import DeleteBefore, DeleteKey, DeleteRange, DeleteTag
from forebay.topics import TopicSpec

S = TypeVar("S", bound=ReadShard)
L = TypeVar("L", bound=OwnedShard)


class ShardedEngine(Generic[S]):
    """Keeps shards open and answers by name. An engine adds how a shard is opened and removed."""

    def __init__(self) -> None:
        self.registry: Registry[S] = Registry()

    @abstractmethod
    def _open(self, ref: ShardRef) -> S:
        """Open a shard that is not open yet."""

    @abstractmethod
    def _close(self, shard: S) -> None:
        """Close a shard in order."""

    @abstractmethod
    def _abandon(self, shard: S) -> None:
        """End a shard in a forked child, without touching what the parent shares."""

    @abstractmethod
    def _remove(self, ref: ShardRef, shard: S | None) -> None:
        """Remove a shard, which was open if `shard` is given."""

    def open_shard(self, ref: ShardRef) -> S:
        """The shard, opened once."""
        return self.registry.open(ref, self._open)

    def open_here(self, ref: ShardRef) -> S:
        """As `open_shard`, for a caller who only looks: nothing that another directory holds is taken over."""
        return self.registry.open(ref, self._open)

    def may_own(self, ref: ShardRef) -> bool:
        """Whether a caller who only looks may open the shard as its owner: it is recorded as this directory's.

        If not, a look goes by what is recorded of the shard.
        """
        return True

    def find(self, ref: ShardRef) -> S | None:
        """The shard, if it is open. Takes no lock."""
        return self.registry.find(ref.spec.topic_id, ref.partition)

    def shards(self) -> list[S]:
        """Every open shard."""
        return self.registry.shards()

    def close(self) -> None:
        """See `StorageEngine`."""
        self.registry.close(self._close)

    def abandon(self) -> None:
        """See `StorageEngine`."""
        self.registry.abandon(self._abandon)

    def prepare(self, spec: TopicSpec) -> None:
        """See `StorageEngine`."""
        self.registry.check_open()

    def create_shard(self, ref: ShardRef) -> None:
        """See `StorageEngine`."""
        self.open_shard(ref)

    def delete_shard(self, ref: ShardRef) -> None:
        """See `StorageEngine`."""
        self.registry.check_open()
        self.registry.give_up(ref.spec.topic_id, ref.partition, partial(self._remove, ref))

    def list_shard(self, shard_id: str | None = None) -> list[ShardStatus]:
        """See `StorageEngine`."""
        chosen = [shard for shard in self.shards() if shard_id in (None, shard.ref.id)]
        return [ShardStatus(shard.ref, shard.offsets()) for shard in chosen]

    def read_by_offset(
        self, ref: ShardRef, offset: int, *, records_max: int = PAGE_RECORDS, bytes_max: int = PAGE_BYTES
    ) -> Page:
        """See `StorageEngine`."""
        check_offset(offset)
        _check_limits(records_max, bytes_max)
        page = self.open_shard(ref).read(offset, bytes_max)
        return limited(page, records_max)

    def get_offset_by_timestamp(self, ref: ShardRef, timestamp: int) -> int | None:
        """See `StorageEngine`."""
        return self.open_shard(ref).offset_at_time(timestamp)


class LookupEngine(ShardedEngine[L]):
    """The same for shards that this process owns; groups keep their offsets in the progress store."""

    def __init__(self, progress: ProgressStore) -> None:
        super().__init__()
        self._progress = progress

    def write(self, ref: ShardRef, record: NewRecord) -> int:
        """See `StorageEngine`."""
        shard = self.open_shard(ref)
        value, timestamp, key, tag, headers = record
        entry = Entry(value, key, tag, headers, timestamp, None, Ticket())
        return shard.settle(shard.stage_one(entry, record_bytes(value, key, tag, headers)))

    def batch_write(self, ref: ShardRef, records: list[NewRecord]) -> list[int]:
        """See `StorageEngine`."""
        if not records:
            return []
        shard = self.open_shard(ref)
        values, timestamps, keys, tags, headers = zip(*records, strict=True)
        columns = encode_columns(Columns(values=values, timestamps=timestamps, keys=keys, tags=tags, headers=headers))
        first = shard.settle(shard.stage_many(columns, None, Ticket()))
        return list(range(first, first + len(records)))

    def read_by_key(
        self,
        ref: ShardRef,
        key: bytes,
        start: int = 0,
        *,
        history: bool = False,
        records_max: int = PAGE_RECORDS,
        bytes_max: int = PAGE_BYTES,
    ) -> Page:
        """See `LookedUpEngine`."""
        check_offset(start)
        _check_limits(records_max, bytes_max)
        shard = self.open_shard(ref)
        return shard.read_by_key(_key(key), start, history=history, records_max=records_max, bytes_max=bytes_max)

    def read_by_tag(
        self, ref: ShardRef, tag: str, start: int = 0, *, records_max: int = PAGE_RECORDS, bytes_max: int = PAGE_BYTES
    ) -> Page:
        """See `LookedUpEngine`."""
        check_offset(start)
        _check_limits(records_max, bytes_max)
        return self.open_shard(ref).read_by_tag(_tag(tag), start, records_max=records_max, bytes_max=bytes_max)

    def delete_by_offset(self, ref: ShardRef, start: int, stop: int) -> int:
        """See `LookedUpEngine`."""
        check_offset(start)
        check_offset(stop)
        if stop < start:
            raise Invalid(f"the range [{start}, {stop}) ends before it begins")
        return self.open_shard(ref).delete(DeleteRange(start, stop))

    def delete_by_key(self, ref: ShardRef, key: bytes) -> int:
        """See `LookedUpEngine`."""
        return self.open_shard(ref).delete(DeleteKey(_key(key)))

    def delete_by_tag(self, ref: ShardRef, tag: str) -> int:
        """See `LookedUpEngine`."""
        return self.open_shard(ref).delete(DeleteTag(_tag(tag)))

    def delete_before(self, ref: ShardRef, offset: int) -> int:
        """See `LookedUpEngine`."""
        check_offset(offset)
        return self.open_shard(ref).delete(DeleteBefore(offset))

    def commit_offset(self, ref: ShardRef, group: str, offset: int, note: str = "") -> int:
        """See `LookedUpEngine`."""
        check_offset(offset)
        reader = ReaderName.of(ref.spec.namespace, ref.spec.topic, group)
        cursor = Progress(offset=offset, incarnation=ref.spec.topic_id, note=note)
        return self._progress.ack_up_to(reader, {ref.partition: cursor})[ref.partition]

    def get_offset_by_group(self, ref: ShardRef, group: str) -> Progress | None:
        """See `LookedUpEngine`."""
        reader = ReaderName.of(ref.spec.namespace, ref.spec.topic, group)
        return self._progress.get(reader, ref.partition, ref.spec.topic_id)


def _key(key: object) -> bytes:
    if not isinstance(key, bytes):
        raise Invalid(f"key is {type(key).__name__}, not bytes: records without a key cannot be looked up by it")
    return key


def _tag(tag: object) -> str:
    if not isinstance(tag, str):
        raise Invalid(f"tag is {type(tag).__name__}, not str: records without a tag cannot be looked up by it")
    return tag


def _check_limits(records_max: int, bytes_max: int) -> None:
    if records_max < 1 or bytes_max < 1:
        raise Invalid(f"a page takes at least 1 record and 1 byte, not {records_max} and {bytes_max}")


def wanted(ref: ShardRef, settings: Settings) -> Wanted:
    """What is to be acquired for this shard."""
    spec = ref.spec
    key = state_key(spec.namespace, spec.topic, ref.partition, prefix=settings.metadata.prefix)
    notes = (kind(spec.topic_id, prefix=settings.metadata.prefix) for kind in (deleted_key, late_key))
    return Wanted(key, spec.topic_id, tuple(notes))


def check_offset(offset: int) -> None:
    """Raise `Invalid` unless this is a number an offset can be."""
    if not isinstance(offset, int) or isinstance(offset, bool) or not 0 <= offset <= OFFSET_MAX:
        raise Invalid(f"offset is {offset!r}; allowed: 0 to {OFFSET_MAX}")


def limited(page: Page, records_max: int) -> Page:
    """The front of the page with at most so many records."""
    for batch in page.batches:
        if batch.count > records_max:
            return page.clipped(batch.base + records_max)
        records_max -= batch.count
        if records_max == 0:
            return page.clipped(batch.end)
    return page


def tombstone(offset: int, floor: int, reason: Reason) -> list[Gap]:
    """What a reader at `offset` is told of eviction up to `floor`."""
    return [Gap(offset, floor, reason)] if offset < floor else []


def joined(gaps: list[Gap]) -> list[Gap]:
    """Holes in offset order, those of one reason that touch made one."""
    found: list[Gap] = []
    for gap in gaps:
        if found and found[-1].stop == gap.start and found[-1].reason is gap.reason:
            found[-1] = found[-1]._replace(stop=gap.stop)
        else:
            found.append(gap)
    return found
