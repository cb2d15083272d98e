"""A record as JSON: the one shape that `forebay consume` writes, `forebay produce` reads, and HTTP carries.

    {"partition": 0, "offset": 7, "timestamp": 1935903600000, "key": "42", "value": "paid", "tag": "eu",
     "headers": {"trace": "a1", "raw": {"b64": "/w=="}}}
    {"gap": {"partition": 0, "start": 8, "stop": 12, "reason": "lost"}}

Bytes that are UTF-8 are written as text, others in base64 under `value_b64` or `key_b64`; readers take either. A value
of `null` is a record without a value, not an empty one. Headers of which a name stands twice are a list of pairs. Where
a name stands twice in an object, the last one counts. No field takes nested JSON, so depth has no limit to be named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from forebay.decoders import decoder
from forebay.errors import Invalid
from forebay.format.frame.batch import Batch
from forebay.records import COPIED_HEADERS_MAX, HEADERS_MAX, TAG_BYTES_MAX, TIMESTAMP_MAX, Gap, Headers, Reason, Record

Text: TypeAlias = str | UnsetType | None
Coded: TypeAlias = bytes | UnsetType | None
"""In JSON a text in base64."""


PARTITION_MAX: Final = 2**31 - 1


class CodedBytes(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """The value of a header that is not UTF-8."""

    b64: bytes


HeaderValue: TypeAlias = str | CodedBytes | None
HeaderItems: TypeAlias = (
    Annotated[dict[str, HeaderValue], Meta(max_length=COPIED_HEADERS_MAX)]
    | Annotated[list[tuple[str, HeaderValue]], Meta(max_length=COPIED_HEADERS_MAX)]
)


class GapItem(msgspec.Struct, frozen=True, gc=False):
    """Offsets `[start, stop)` of a partition that hold no readable record."""

    partition: int
    start: int
    stop: int
    reason: str

    @classmethod
    def of(cls, partition: int, gap: Gap) -> GapItem:
        """The gap as it is sent."""
        return cls(partition, gap.start, gap.stop, gap.reason.name.lower())

    def gap(self) -> Gap:
        """The gap that was sent; `Invalid` if its reason is not known here."""
        try:
            return Gap(self.start, self.stop, Reason[self.reason.upper()])
        except KeyError as error:
            raise Invalid(f"a gap has the reason {self.reason!r:.40}, which this version does not know") from error


class RecordItem(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """One record, or a gap in its place. What is unset is not written."""

    topic: str | UnsetType = UNSET
    partition: Annotated[int, Meta(ge=0, le=PARTITION_MAX)] | UnsetType | None = UNSET
    offset: int | UnsetType = UNSET
    timestamp: Annotated[int, Meta(ge=-TIMESTAMP_MAX, le=TIMESTAMP_MAX)] | UnsetType | None = UNSET
    key: Text = UNSET
    key_b64: Coded = UNSET
    value: Text = UNSET
    value_b64: Coded = UNSET
    tag: Text = UNSET
    headers: HeaderItems | UnsetType | None = UNSET
    gap: GapItem | UnsetType = UNSET


APPENDED_FIELDS: Final = ("value", "value_b64", "key", "key_b64", "tag", "headers", "timestamp", "partition")
"""What a record to be appended may have. `offset` and `topic` are accepted: a reader gets them, the log gives them."""
LINE_DECODER: Final = decoder(RecordItem)
_IS_GAP: Final = "is a gap and holds no record: leave it out"
_PLACE: Final = re.compile(r" - at `\$(?:\.records)?(?:\[(\d+)\])?\.?(\w*)")
_UNKNOWN: Final = re.compile(r"unknown field `(.*?)`")


class RecordColumns(NamedTuple):
    """Records to be appended, by column, as `append_many` takes them. A column that is `None` is absent."""

    values: list[bytes | None]
    keys: list[bytes | None] | None = None
    tags: list[str | None] | None = None
    headers: list[Headers] | None = None
    timestamps: list[int] | None = None
    partitions: list[int | None] | None = None
    """The partition that each record names itself, if any does."""


# Reading


def parse_item(line: bytes, where: str) -> RecordItem:
    """The record of one JSON text; `Invalid` says what is wrong with it, and `where` it stood."""
    try:
        item = LINE_DECODER.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise explained(error, where) from error
    _check(item, lambda: where)
    return item


def explained(error: Exception, where: str) -> Invalid:
    """What the decoder has found wrong with a record, in words of ours."""
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return Invalid(f"{where} is not JSON: {text}")
    place = _PLACE.search(text)
    field = place[2] if place is not None else ""
    unknown = _UNKNOWN.search(text)
    if field == "gap":
        return Invalid(f"{where} {_IS_GAP}")
    if unknown is not None and not field:
        return Invalid(f"{where} has an unknown field {unknown[1]!r:.80}; known: {', '.join(APPENDED_FIELDS)}")
    if not field:
        return Invalid(f'{where} is not a JSON object such as {{"value": "text"}}')
    return Invalid(f'{where}: "{field}" {_flaw(field, text.partition(" - at ")[0])}')


def item_place(error: Exception) -> int | None:
    """Which record of many the decoder speaks of, if it says."""
    place = _PLACE.search(str(error)) if isinstance(error, msgspec.ValidationError) else None
    return int(place[1]) if place is not None and place[1] is not None else None


def _flaw(field: str, text: str) -> str:
    if "base64" in text:
        return "is not base64"
    if field == "headers":
        return f'is an object, or a list of pairs of name and value, of texts; bytes as {{"b64": "…"}}: {text}'
    if field in ("timestamp", "partition", "offset"):
        return f"is a whole number: {text}"
    return f"is a text: {text}, not a text; write JSON as a text, bytes in base64"


def item_value(item: RecordItem) -> bytes | None:
    """The value, whichever way it is written."""
    return _content(item.value, item.value_b64)


def item_key(item: RecordItem) -> bytes | None:
    """The key, whichever way it is written."""
    return _content(item.key, item.key_b64)


def _content(text: Text, coded: Coded) -> bytes | None:
    if isinstance(text, str):
        return text.encode()
    return None if coded is UNSET else coded


def item_headers(item: RecordItem) -> Headers:
    """The headers in order."""
    found = item.headers
    if not found:
        return ()
    pairs = found.items() if isinstance(found, dict) else found
    return tuple([(name, _header_bytes(value)) for name, value in pairs])


def _header_bytes(value: HeaderValue) -> bytes | None:
    if isinstance(value, CodedBytes):
        return value.b64
    return None if value is None else value.encode()


def columns_of(items: Sequence[RecordItem], now_ms: int, where: Callable[[int], str]) -> RecordColumns:
    """The records by column; `where` names the one at a place. `now_ms` is the time of those that bring none."""
    # A list for each field: less work than a tuple for each record.
    odd = [item.value_b64 for item in items], [item.key_b64 for item in items], [item.gap for item in items]
    coded = any(column.count(UNSET) < len(items) for column in odd)
    values = [item.value for item in items]
    headers = [item.headers for item in items]
    plain = not coded and set(map(type, values)) == {str} and not any(headers)
    if not plain:
        for place, item in enumerate(items):
            _check(item, partial(where, place))
    return RecordColumns(
        values=_encoded(values) if plain else [item_value(item) for item in items],
        keys=_key_column(items, None if coded else [item.key for item in items]),
        tags=_tag_column([item.tag for item in items], where),
        headers=[item_headers(item) for item in items] if any(headers) else None,
        timestamps=_stamp_column([item.timestamp for item in items], now_ms),
        partitions=_partition_column([item.partition for item in items]),
    )


def _key_column(items: Sequence[RecordItem], texts: Sequence[Text] | None) -> list[bytes | None] | None:
    """`texts` are the keys if none is in base64."""
    kinds = set(map(type, texts)) if texts is not None else set()
    if texts is not None and kinds == {str}:
        return _encoded(texts)
    if texts is not None and str not in kinds:
        return None
    keys = [item_key(item) for item in items]
    return keys if any(key is not None for key in keys) else None


def _encoded(texts: Sequence[Text]) -> list[bytes | None]:
    """Texts, all of them there, as bytes."""
    return list(map(str.encode, texts))  # type: ignore[arg-type]


def _tag_column(tags: Sequence[Text], where: Callable[[int], str]) -> list[str | None] | None:
    known = set(tags)
    for tag in known:
        flaw = _tag_flaw(tag)
        if flaw is not None:
            raise Invalid(f"{where(tags.index(tag))}{flaw}")
    return None if known <= {None, UNSET} else [tag or None for tag in tags]


def _stamp_column(stamps: Sequence[int | UnsetType | None], now_ms: int) -> list[int] | None:
    kinds = set(map(type, stamps))
    if int not in kinds:
        return None
    return [stamp if isinstance(stamp, int) else now_ms for stamp in stamps] if len(kinds) > 1 else list(stamps)  # type: ignore[arg-type]


def _partition_column(partitions: Sequence[int | UnsetType | None]) -> list[int | None] | None:
    if int not in set(map(type, partitions)):
        return None
    return [number if isinstance(number, int) else None for number in partitions]


def _check(item: RecordItem, where: Callable[[], str]) -> None:
    flaw = _item_flaw(item)
    if flaw is not None:
        raise Invalid(f"{where()}{flaw}")


def _item_flaw(item: RecordItem) -> str | None:
    """What is wrong with a record whose fields have the right types, if anything."""
    if item.gap is not UNSET:
        return f" {_IS_GAP}"
    if item.headers and len(item.headers) > HEADERS_MAX:
        # Decoders take more: a copy that Forebay has made and is read has them.
        return f': "headers" has {len(item.headers)}; allowed: {HEADERS_MAX}'
    if item.value is item.value_b64 is UNSET:
        return ' has neither "value" nor "value_b64"'
    if item.value is not UNSET and item.value_b64 is not UNSET:
        return ' has both "value" and "value_b64": give one'
    if item.key is not UNSET and item.key_b64 is not UNSET:
        return ' has both "key" and "key_b64": give one'
    return _tag_flaw(item.tag)


def _tag_flaw(tag: Text) -> str | None:
    if not isinstance(tag, str) or 1 <= len(tag.encode()) <= TAG_BYTES_MAX:
        return None
    return f": tag has {len(tag.encode())} bytes; allowed: 1 to {TAG_BYTES_MAX}"


# Writing


def item_of(record: Record, topic: str | UnsetType = UNSET) -> RecordItem:
    """One record as it is written."""
    key, key_b64 = (UNSET, UNSET) if record.key is None else written(record.key)
    value, value_b64 = written(record.value)
    return RecordItem(
        topic,
        record.partition,
        record.offset,
        record.timestamp,
        key,
        key_b64,
        value,
        value_b64,
        UNSET if record.tag is None else record.tag,
        _header_items(record.headers),
    )


def plain_item(record: Record) -> dict[str, Any]:
    """The same as plain values by name."""
    found: dict[str, Any] = msgspec.to_builtins(item_of(record))
    return found


def items_of(batch: Batch, partition: int, topic: str | UnsetType = UNSET) -> list[RecordItem]:
    """The records of a batch as they are written."""
    keys, keys_b64 = _written_column(batch.keys(), UNSET)
    values, values_b64 = _written_column(batch.values(), None)
    tags, headers = batch.tags(), batch.headers()
    return list(
        map(
            RecordItem,
            repeat(topic),
            repeat(partition),
            range(batch.base, batch.end),
            batch.timestamps().tolist(),
            keys,
            keys_b64,
            values,
            values_b64,
            repeat(UNSET) if tags is None else [UNSET if tag is None else tag for tag in tags],
            repeat(UNSET) if headers is None else [_header_items(row) for row in headers],
        )
    )


def columns_items(columns: RecordColumns) -> list[RecordItem]:
    """Records to be appended as they are written."""
    keys, keys_b64 = _written_column(columns.keys, UNSET)
    values, values_b64 = _written_column(columns.values, None)
    tags, headers = columns.tags, columns.headers
    return [
        RecordItem(UNSET, partition, UNSET, stamp, key, key_b64, value, value_b64, tag, pairs)
        for partition, stamp, key, key_b64, value, value_b64, tag, pairs, _ in zip(
            repeat(UNSET) if columns.partitions is None else columns.partitions,
            columns.timestamps or repeat(UNSET),
            keys,
            keys_b64,
            values,
            values_b64,
            repeat(UNSET) if tags is None else [UNSET if tag is None else tag for tag in tags],
            repeat(UNSET) if headers is None else [_header_items(row) for row in headers],
            columns.values,
            strict=False,
        )
    ]


def record_of(item: RecordItem) -> Record:
    """The record that was written; `Invalid` if it lacks what every record has."""
    if not isinstance(item.partition, int) or not isinstance(item.offset, int) or not isinstance(item.timestamp, int):
        raise Invalid("a record has no partition, offset or timestamp")
    key, value = item_key(item), item_value(item)
    return Record(item.partition, item.offset, item.timestamp, key, value, item.tag or None, item_headers(item))


def written(content: bytes | None) -> tuple[Text, Coded]:
    """Bytes as a text, or as they are where they are no UTF-8, which JSON has in base64."""
    if content is None:
        return None, UNSET
    try:
        return content.decode(), UNSET
    except UnicodeDecodeError:
        return UNSET, content


def _written_column(
    column: Sequence[bytes | None] | None, absent: UnsetType | None
) -> tuple[Iterable[Text], Iterable[Coded]]:
    """A column as texts and, where those are no UTF-8, bytes; `absent` is written for none."""
    if column is None:
        return repeat(absent), repeat(UNSET)
    try:
        if None not in column:
            return list(map(bytes.decode, column)), repeat(UNSET)  # type: ignore[arg-type]
        return [absent if entry is None else entry.decode() for entry in column], repeat(UNSET)
    except UnicodeDecodeError:
        pairs = [(absent, UNSET) if entry is None else written(entry) for entry in column]
        return [text for text, _ in pairs], [coded for _, coded in pairs]


def _header_items(headers: Headers) -> HeaderItems | UnsetType:
    if not headers:
        return UNSET
    pairs = [(name, _header_value(value)) for name, value in headers]
    by_name = dict(pairs)
    return by_name if len(by_name) == len(pairs) else pairs


def _header_value(value: bytes | None) -> HeaderValue:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return CodedBytes(value)
