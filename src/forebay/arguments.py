"""What a caller hands in, checked and brought into shape before an offset is taken.

Raises `Invalid` that says what is wrong with which argument. Knows records, nothing of topics or disks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from forebay.appends.producer_window import KEY_IDS, NONE_BEFORE, ReservedProducer
from forebay.appends.queue import Producing
from forebay.errors import Invalid
from forebay.format.columns.rows import ROWS_SMALL, Timestamps
from forebay.records import (
    HEADERS_MAX,
    OFFSET_MAX,
    TAG_BYTES_MAX,
    TIMESTAMP_MAX,
    Headers,
    HeadersLike,
    Position,
    check_offset,
)

if TYPE_CHECKING:
    import pyarrow as pa

S = TypeVar("S")


PRODUCER_MAX = KEY_IDS - 1
"""The highest id that a caller may use: those above are Forebay's own."""
POSITIONS = frozenset({"earliest", "latest", "offset", "time"})
SESSION_TIMEOUT_MS = 30_000
"""How long a broker keeps a consumer of a subscription without a request of it, if the consumer does not say."""
SESSION_TIMEOUT_MS_MIN = 100
SESSION_TIMEOUT_MS_MAX = 3_600_000


def checked_bytes(what: str, value: object) -> bytes | None:
    """`bytes`, or `None`; other buffers are copied."""
    if value is None or type(value) is bytes:
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    hint = "; encode it first" if isinstance(value, str) else ""
    raise Invalid(f"{what} is {type(value).__name__}, not bytes or None{hint}")


def checked_tag(tag: object) -> str | None:
    """A tag: a text of 1 to 1024 bytes, or `None`."""
    if tag is None:
        return None
    if not isinstance(tag, str):
        raise Invalid(f"tag is {type(tag).__name__}, not str or None")
    try:
        size = len(tag.encode())
    except UnicodeEncodeError as error:
        raise Invalid(f"tag {tag!a:.80} cannot be written as UTF-8") from error
    if not 1 <= size <= TAG_BYTES_MAX:
        raise Invalid(f"tag has {size} bytes; allowed: 1 to {TAG_BYTES_MAX}")
    return tag


def checked_headers(headers: HeadersLike | None, most: int = HEADERS_MAX) -> Headers:
    """Pairs of name and value, `most` of them at most; names may repeat."""
    if headers is None:
        return ()
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    try:
        found = tuple((name, checked_bytes(f"header {name!r}", value)) for name, value in pairs)
    except (TypeError, ValueError) as error:
        raise Invalid(f"headers are a mapping or pairs of name and value: {error}") from error
    if len(found) > most:
        raise Invalid(f"{len(found)} headers; allowed: {most}")
    for name, _ in found:
        if not isinstance(name, str):
            raise Invalid(f"a header's name is {type(name).__name__}, not str")
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise Invalid(f"header name {name!a:.80} cannot be written as UTF-8") from error
    return found


def checked_timestamp(timestamp: object) -> int:
    """Milliseconds since 1970."""
    if not isinstance(timestamp, int) or isinstance(timestamp, bool):
        raise Invalid(f"timestamp is {type(timestamp).__name__}; give milliseconds since 1970 as int")
    if not -TIMESTAMP_MAX <= timestamp <= TIMESTAMP_MAX:
        raise Invalid(f"timestamp is {timestamp}; allowed: ±{TIMESTAMP_MAX} milliseconds")
    return timestamp


def checked_producing(producer: int | None, sequence: int | None, previous: int | None) -> Producing | None:
    """Both of producer id and sequence, perhaps with the sequence before it, or none of them.

    `Invalid` for an id from 2^63 on that is not a `ReservedProducer`: a caller that used it would push the memory of
    routers and dead letters out, or pass for one of them.
    """
    if producer is None and sequence is None and previous is None:
        return None
    if producer is None or sequence is None:
        raise Invalid("producer and sequence go together: give both or neither; previous needs both")
    is_reserved = isinstance(producer, ReservedProducer)
    if not is_reserved and (not isinstance(producer, int) or not 1 <= producer <= PRODUCER_MAX):
        raise Invalid(
            f"producer is {producer!r}; allowed: 1 to {PRODUCER_MAX}. Ids above are those of idempotency keys, routers "
            "and dead letters"
        )
    if not isinstance(sequence, int) or not 0 <= sequence <= OFFSET_MAX:
        raise Invalid(f"sequence is {sequence!r}; allowed: 0 to {OFFSET_MAX}")
    if previous is not None and (not isinstance(previous, int) or not NONE_BEFORE <= previous < sequence):
        raise Invalid(f"previous is {previous!r}; allowed: {NONE_BEFORE} for none, to below sequence {sequence}")
    return Producing(int(producer), sequence, previous)


def checked_column(what: str, column: Iterable[object] | None, count: int | None) -> list[bytes | None] | None:
    """A column of keys or values, each `bytes` or `None`."""
    if column is None:
        return None
    if isinstance(column, bytes | str):
        raise Invalid(f"{what} is {type(column).__name__}: give a sequence with one entry for each record")
    try:
        values = column if type(column) is list else list(column)
    except TypeError as error:
        raise Invalid(f"{what} is {type(column).__name__}: give a sequence with one entry for each record") from error
    if count is not None and len(values) != count:
        raise Invalid(f"{len(values)} {what} for {count} records: give one for each")
    # By count first: half the cost of a set, and most columns are bytes alone.
    if list(map(type, values)).count(bytes) == len(values) or set(map(type, values)) <= {bytes, type(None)}:
        return values  # type: ignore[return-value]
    return [checked_bytes(f"{what}[{place}]", value) for place, value in enumerate(values)]


def checked_values(values: Iterable[object]) -> list[bytes | None]:
    """The column that every append of many has."""
    found = checked_column("values", values, None)
    if found is None:
        raise Invalid("values is None: give a sequence with one entry for each record")
    return found


def checked_tags(tags: Sequence[str | None] | str | None, count: int) -> list[str | None] | None:
    """A column of tags; one text stands for all records."""
    if tags is None:
        return None
    if isinstance(tags, str):
        return [checked_tag(tags)] * count
    tags = _sequence("tags", tags, count)
    if not set(map(type, tags)) <= {str, type(None)}:
        return [checked_tag(tag) for tag in tags]
    for tag in set(tags):
        checked_tag(tag)
    return list(tags)


def checked_timestamps(timestamps: Sequence[int] | int | None, count: int, now: int) -> Timestamps:
    """A column of timestamps; one number, or now, stands for all records."""
    if timestamps is None or isinstance(timestamps, int):
        stamp = now if timestamps is None else checked_timestamp(timestamps)
        return [stamp] * count if count <= ROWS_SMALL else np.full(count, stamp, np.int64)
    timestamps = _sequence("timestamps", timestamps, count)
    try:
        # `index` also takes numpy's integers, and refuses what only looks like a number.
        return [checked_timestamp(operator.index(timestamp)) for timestamp in timestamps]
    except TypeError as error:
        raise Invalid(f"timestamps are milliseconds since 1970 as int: {error}") from error


def checked_header_column(
    headers: Sequence[HeadersLike | None] | None, count: int, most: int = HEADERS_MAX
) -> list[Headers] | None:
    """A column of headers, one entry for each record, each with `most` headers at most."""
    if headers is None:
        return None
    return [checked_headers(entry, most) for entry in _sequence("headers", headers, count)]


def checked_partition(partition: object) -> int:
    """A number that may name a partition; whether there is one, the topic says."""
    if not isinstance(partition, int) or isinstance(partition, bool):
        raise Invalid(f"partition is {type(partition).__name__}, not int")
    return partition


class StoredOffset(int):
    """An offset as a reader has stored it. Unlike a caller's number it may lie behind the end, and waits there."""

    __slots__ = ()


def checked_position(start: object) -> Position:
    """Where to start: an offset stands for its position."""
    if isinstance(start, int) and not isinstance(start, bool):
        start = Position.at_offset(start)
    if not isinstance(start, Position) or start.kind not in POSITIONS:
        raise Invalid(f"start is {start!r:.80}: give EARLIEST, LATEST, an offset, or a Position")
    if start.kind == "time":
        checked_timestamp(start.value)
    elif not isinstance(start.value, int) or isinstance(start.value, bool) or not 0 <= start.value <= OFFSET_MAX:
        raise Invalid(f"offset is {start.value!r:.80}; allowed: 0 to {OFFSET_MAX}")
    return start


def checked_lookup_key(key: object) -> bytes:
    """A key that records are looked up by: every record with one has bytes."""
    found = checked_bytes("key", key)
    if found is None:
        raise Invalid("key is None: records without a key cannot be looked up by it")
    return found


def checked_lookup_tag(tag: object) -> str:
    """A tag that records are looked up by."""
    found = checked_tag(tag)
    if found is None:
        raise Invalid("tag is None: records without a tag cannot be looked up by it")
    return found


def check_page(offset: int, records_max: int, bytes_max: int) -> None:
    """Where a page begins and how large it may be."""
    check_offset(offset)
    if records_max < 1 or bytes_max < 1:
        raise Invalid(f"records_max is {records_max} and bytes_max is {bytes_max}: both are at least 1")


def checked_limit(limit: object) -> int | None:
    """How many records are wanted at the most; `None` for all of them."""
    if limit is None:
        return None
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
        raise Invalid(f"limit is {limit!r:.80}; give a number of records, not below 0")
    return limit


def checked_seconds(what: str, seconds: object) -> float:
    """A span of time that is not negative."""
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not seconds >= 0:
        raise Invalid(f"{what} is {seconds!r:.80}; give seconds, not below 0")
    return seconds


def checked_session_timeout_ms(timeout_ms: object) -> int:
    """How long a broker keeps a consumer without a request of it."""
    if type(timeout_ms) is int and SESSION_TIMEOUT_MS_MIN <= timeout_ms <= SESSION_TIMEOUT_MS_MAX:
        return timeout_ms
    raise Invalid(
        f"session_timeout_ms is {timeout_ms!r:.80}; allowed: whole milliseconds, {SESSION_TIMEOUT_MS_MIN} to "
        f"{SESSION_TIMEOUT_MS_MAX}"
    )


def checked_stop(stop: object) -> None:
    """An event that ends a stream, or `None`."""
    if stop is not None and not callable(getattr(stop, "is_set", None)):
        raise Invalid(f"stop is {stop!r:.80}; give a threading.Event")


def checked_arrow(batch: object) -> pa.RecordBatch:
    """A record batch of Arrow; a table is cut into batches by its owner, who knows how large they may be."""
    import pyarrow as pa  # noqa: PLC0415 - loaded only where it is used

    if not isinstance(batch, pa.RecordBatch):
        raise Invalid(f"batch is {type(batch).__name__}, not a pyarrow.RecordBatch; a table gives its to_batches()")
    return batch


def _sequence(what: str, column: Sequence[S], count: int) -> Sequence[S]:
    """A column of the right length."""
    try:
        length = len(column)
    except TypeError as error:
        raise Invalid(f"{what} is {type(column).__name__}: give a sequence with one entry for each record") from error
    if length != count or isinstance(column, str | bytes | Mapping):
        raise Invalid(f"{length} {what} for {count} records: give a sequence with one entry for each")
    return column
