"""Records by shard name: thirteen operations of a storage adapter, and two more, over any engine's open shards.

For callers that have a shard's name and no handle of a topic, as a protocol front-end has. Each call opens the shard it
names, if it is not open. `docs/by-name.md` lists the operations.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from forebay.appends.queue import QueuedRecord, record_bytes
from forebay.appends.ticket import Ticket
from forebay.engines.seam import PAGE_BYTES, PAGE_RECORDS, OwnedShard, StorageEngine
from forebay.errors import Invalid
from forebay.format.columns.rows import Columns, encode_columns
from forebay.pages import Page
from forebay.progress import Progress, ProgressStore, ReaderName
from forebay.records import Headers, Offsets, check_offset
from forebay.shard.deletes import DeleteBefore, DeleteKey, DeleteTag, RangeDelete
from forebay.topics import ShardRef

E_co = TypeVar("E_co", bound=StorageEngine, covariant=True)


class NewRecord(NamedTuple):
    """A record before it has an offset; types and sizes are checked. `timestamp` in milliseconds."""

    value: bytes | None
    timestamp: int
    key: bytes | None = None
    tag: str | None = None
    headers: Headers = ()


class ShardStatus(NamedTuple):
    """A shard that is open, with its watermarks."""

    ref: ShardRef
    offsets: Offsets


class ByName(Generic[E_co]):
    """The operations by shard name. Deleting or listing what is not there is fine. Safe for concurrent calls."""

    def __init__(self, engine: E_co, progress: ProgressStore) -> None:
        """`progress` keeps the offsets of groups."""
        self._engine = engine
        self._progress = progress

    @property
    def engine(self) -> E_co:
        """The engine below."""
        return self._engine

    def open_shard(self, ref: ShardRef) -> OwnedShard:
        """The shard itself, for what has no operation here, such as idempotent appends."""
        return self._engine.open_shard(ref)

    def close(self) -> None:
        """Close the engine: see `StorageEngine`."""
        self._engine.close()

    def create_shard(self, ref: ShardRef) -> None:
        """On return the shard exists and is empty, or exists as before."""
        self._engine.open_shard(ref)

    def delete_shard(self, ref: ShardRef) -> None:
        """On return the shard and its records are gone; nothing happens if they were."""
        self._engine.delete_shard(ref)

    def list_shard(self, shard_id: str | None = None) -> list[ShardStatus]:
        """One shard or all that are open here; an unknown one gives an empty list."""
        chosen = [shard for shard in self._engine.shards() if shard_id in (None, shard.ref.id)]
        return [ShardStatus(shard.ref, shard.offsets()) for shard in chosen]

    def write(self, ref: ShardRef, record: NewRecord) -> int:
        """Append one record; its offset, once the durability class of the topic holds."""
        shard = self._engine.open_shard(ref)
        value, timestamp, key, tag, headers = record
        entry = QueuedRecord(value, key, tag, headers, timestamp, None, Ticket())
        return shard.acknowledge(shard.stage_one(entry, record_bytes(value, key, tag, headers)))

    def batch_write(self, ref: ShardRef, records: list[NewRecord]) -> list[int]:
        """Append many, all or none, at consecutive offsets; an empty list appends nothing."""
        if not records:
            return []
        shard = self._engine.open_shard(ref)
        values, timestamps, keys, tags, headers = zip(*records, strict=True)
        columns = encode_columns(Columns(values=values, timestamps=timestamps, keys=keys, tags=tags, headers=headers))
        first = shard.acknowledge(shard.stage_many(columns, None, Ticket()))
        return list(range(first, first + len(records)))

    def read_by_offset(
        self, ref: ShardRef, offset: int, *, records_max: int = PAGE_RECORDS, bytes_max: int = PAGE_BYTES
    ) -> Page:
        """A page from `offset` on. The first record comes through even if it is larger than the limits.

        Past the end the page is empty; `next` is always where to ask again.
        """
        check_offset(offset)
        _check_limits(records_max, bytes_max)
        page = self._engine.open_shard(ref).read(offset, bytes_max)
        return _limited(page, records_max)

    def get_offset_by_timestamp(self, ref: ShardRef, timestamp: int) -> int | None:
        """The first offset whose record's timestamp is at or after the time; `None` if there is none."""
        return self._engine.open_shard(ref).offset_at_time(timestamp)

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
        """The newest record of the key, or all of them, page by page."""
        check_offset(start)
        _check_limits(records_max, bytes_max)
        shard = self._engine.open_shard(ref)
        return shard.read_by_key(_key(key), start, history=history, records_max=records_max, bytes_max=bytes_max)

    def read_by_tag(
        self, ref: ShardRef, tag: str, start: int = 0, *, records_max: int = PAGE_RECORDS, bytes_max: int = PAGE_BYTES
    ) -> Page:
        """The records of the tag, page by page."""
        check_offset(start)
        _check_limits(records_max, bytes_max)
        return self._engine.open_shard(ref).read_by_tag(_tag(tag), start, records_max=records_max, bytes_max=bytes_max)

    def delete_by_offset(self, ref: ShardRef, start: int, stop: int) -> int:
        """End the records of `[start, stop)`; how many there were."""
        check_offset(start)
        check_offset(stop)
        if stop < start:
            raise Invalid(f"the range [{start}, {stop}) ends before it begins")
        return self._engine.open_shard(ref).delete(RangeDelete(start, stop))

    def delete_by_key(self, ref: ShardRef, key: bytes) -> int:
        """End all records of the key; how many there were."""
        return self._engine.open_shard(ref).delete(DeleteKey(_key(key)))

    def delete_by_tag(self, ref: ShardRef, tag: str) -> int:
        """End all records of the tag; how many there were."""
        return self._engine.open_shard(ref).delete(DeleteTag(_tag(tag)))

    def delete_before(self, ref: ShardRef, offset: int) -> int:
        """End everything below `offset`; how many records there were. `earliest` is there on return, or at the head."""
        check_offset(offset)
        return self._engine.open_shard(ref).delete(DeleteBefore(offset))

    def commit_offset(self, ref: ShardRef, group: str, offset: int, note: str = "") -> int:
        """See `ByName`."""
        check_offset(offset)
        reader = ReaderName.of(ref.spec.namespace, ref.spec.topic, group)
        cursor = Progress(offset=offset, incarnation=ref.spec.topic_id, note=note)
        return self._progress.ack_up_to(reader, {ref.partition: cursor})[ref.partition]

    def get_offset_by_group(self, ref: ShardRef, group: str) -> Progress | None:
        """Where the group stands, with its note; `None` if it has committed nothing in this topic."""
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


def _limited(page: Page, records_max: int) -> Page:
    """The front of the page with at most so many records."""
    for batch in page.batches:
        if batch.count > records_max:
            return page.clipped(batch.base + records_max)
        records_max -= batch.count
        if records_max == 0:
            return page.clipped(batch.end)
    return page
