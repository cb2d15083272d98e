"""Records on their way to a broker: JSON, JSON lines, Arrow or a single value, as columns that can be appended.

Every decoder takes limits and says in an `Invalid` which line, record or column is wrong. None makes more of a body
than the limits and its size allow: about 13 bytes of memory for a byte of JSON, the stated output for Arrow.
"""

from __future__ import annotations

import base64
import binascii
import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from forebay.decoders import decoder, lenient
from forebay.errors import Invalid, Unsupported
from forebay.format.columns.rows import ColumnBytes
from forebay.records import HEADERS_MAX, TAG_BYTES_MAX, TIMESTAMP_MAX, Headers
from forebay.wire.items import (
    LINE_DECODER,
    RecordColumns,
    RecordItem,
    columns_items,
    columns_of,
    explained,
    item_place,
    parse_item,
)
from forebay.wire.limits import BodyLimits

if TYPE_CHECKING:
    import pyarrow as pa


class MediaType(enum.StrEnum):
    """What a body is."""

    JSON = "application/json"
    NDJSON = "application/x-ndjson"
    ARROW = "application/vnd.apache.arrow.stream"
    FRAMES = "application/vnd.forebay.frames"
    """Stored frames as they are, for the client of this version: see `answers`."""
    RAW = "application/octet-stream"
    """The value of one record."""

    @classmethod
    def parse(cls, text: str) -> MediaType:
        """The type that `Content-Type` or one entry of `Accept` names; parameters do not matter."""
        found = _BY_NAME.get(text)
        if found is None:
            name = text.partition(";")[0].strip().lower()
            found = _BY_NAME.get(name)
            if found is None:
                raise Unsupported(f"media type {name!r:.80} is not offered; offered: {', '.join(cls)}")
        return found


_BY_NAME: Final[dict[str, MediaType]] = {
    **{str(media): media for media in MediaType},
    "application/ndjson": MediaType.NDJSON,
    "application/jsonl": MediaType.NDJSON,
    "application/x-jsonlines": MediaType.NDJSON,
    "text/plain": MediaType.RAW,
    "application/x-www-form-urlencoded": MediaType.JSON,  # what curl says of every body, unless it is given a type
}


class RecordsBody(msgspec.Struct, forbid_unknown_fields=True):
    """Records in one JSON object."""

    records: list[RecordItem]


_JSON_DECODER: Final = decoder(RecordsBody | list[RecordItem])
_ENCODER: Final = msgspec.json.Encoder()


def decode_json(body: bytes, limits: BodyLimits, now_ms: int) -> RecordColumns:
    """The records of `{"records": […]}`, or of a list; `now_ms` is the time of those that bring none."""
    limits.check_bytes(len(body))
    try:
        found = lenient(body, _JSON_DECODER.decode)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _wrong_json(error) from error
    items = found if isinstance(found, list) else found.records
    limits.check_records(len(items))
    return columns_of(items, now_ms, _named)


def encode_json(columns: RecordColumns) -> bytes:
    """The body that `decode_json` reads."""
    return _ENCODER.encode(RecordsBody(columns_items(columns)))


def decode_ndjson(body: bytes, limits: BodyLimits, now_ms: int) -> RecordColumns:
    """The records of JSON lines, one in each; empty lines are skipped, but count as records for the limit."""
    limits.check_bytes(len(body))
    limits.check_records(body.count(b"\n") + (not body.endswith(b"\n") if body else 0))
    try:
        items = _decode_lines(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _wrong_line(body, error) from error
    limits.check_records(len(items))
    return columns_of(items, now_ms, lambda place: f"line {_line_of(body, place)}")


def _decode_lines(body: bytes) -> list[RecordItem]:
    try:
        return LINE_DECODER.decode_lines(body)
    except msgspec.ValidationError:
        # Line by line: integers may be written as `7.0`. The line that is wrong, if one is, is found by the caller.
        return [lenient(line, LINE_DECODER.decode) for line in body.split(b"\n") if line.strip()]


def encode_ndjson(columns: RecordColumns) -> bytes:
    """The body that `decode_ndjson` reads."""
    return _ENCODER.encode_lines(columns_items(columns))


def load_arrow() -> None:
    """Load the libraries that Arrow bodies need, which takes a while: a server does so before the first one comes."""
    from forebay.format.columns import arrow  # noqa: F401, PLC0415 - loaded only where it is used
    from forebay.wire import arrow_streams  # noqa: F401, PLC0415


def decode_arrow(body: bytes, limits: BodyLimits) -> pa.RecordBatch:
    """The rows of an Arrow IPC stream as one batch, whole and sound, for `append_arrow`."""
    from forebay.wire import arrow_streams  # noqa: PLC0415 - loaded only where it is used

    limits.check_bytes(len(body))
    return arrow_streams.read_batch(body, limits)


def decode_plain_arrow(body: bytes, limits: BodyLimits, now_ms: int) -> ColumnBytes | None:
    """The columns of the commonest kind of Arrow IPC stream, as they are stored; `None` for `decode_arrow` to read.

    `now_ms` is the time of rows that bring none.
    """
    from forebay.wire import arrow_streams  # noqa: PLC0415 - loaded only where it is used

    limits.check_bytes(len(body))
    return arrow_streams.read_plain(body, limits, now_ms)


def encode_arrow(batches: Sequence[pa.RecordBatch]) -> bytes:
    """The body that `decode_arrow` reads: batches of one schema, at least one."""
    from forebay.wire import arrow_streams  # noqa: PLC0415 - loaded only where it is used

    return arrow_streams.write_stream([(batch, None) for batch in batches], batches[0].schema)


def decode_raw(
    body: bytes,
    limits: BodyLimits,
    *,
    key: str | None = None,
    key_b64: str | None = None,
    tag: str | None = None,
    timestamp: str | None = None,
    headers: Sequence[str] = (),
) -> RecordColumns:
    """One record whose value is the body. The rest comes as texts of the request: each header as `name=value`, or as
    `name` for one without a value.
    """
    limits.check_bytes(len(body))
    if tag is not None and not 1 <= len(tag.encode()) <= TAG_BYTES_MAX:
        raise Invalid(f"tag has {len(tag.encode())} bytes; allowed: 1 to {TAG_BYTES_MAX}")
    found = key_bytes(key, key_b64)
    return RecordColumns(
        values=[body],
        keys=None if found is None else [found],
        tags=None if tag is None else [tag],
        headers=[_headers(headers)] if headers else None,
        timestamps=None if timestamp is None else [_milliseconds(timestamp)],
    )


def key_bytes(key: str | None, key_b64: str | None) -> bytes | None:
    """The key that a request names, as text or in base64; `None` if it names none."""
    if key is not None and key_b64 is not None:
        raise Invalid("key and key_b64 both name a key: give one")
    if key_b64 is None:
        return None if key is None else key.encode()
    try:
        return base64.b64decode(key_b64, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Invalid(f"key_b64 is not base64: {error}") from error


def _headers(texts: Sequence[str]) -> Headers:
    if len(texts) > HEADERS_MAX:
        raise Invalid(f"{len(texts)} headers; allowed: {HEADERS_MAX}")
    pairs = [text.partition("=") for text in texts]
    return tuple([(name, value.encode() if equals else None) for name, equals, value in pairs])


def _milliseconds(text: str) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 19 or abs(int(text)) > TIMESTAMP_MAX:
        raise Invalid(f"timestamp is {text!r:.40}; give milliseconds since 1970, within ±{TIMESTAMP_MAX}")
    return int(text)


def _named(place: int) -> str:
    return f"records[{place}]"


def _wrong_json(error: Exception) -> Invalid:
    place = item_place(error)
    if place is not None:
        return explained(error, _named(place))
    shape = 'a body is {"records": [{"value": "text"}, …]}, or that list alone'
    if isinstance(error, msgspec.ValidationError):
        return Invalid(f"{shape}: {error}")
    return Invalid(f"the body is not JSON: {error}")


def _wrong_line(body: bytes, error: Exception) -> Invalid:
    """Which line is wrong: looked for only now, as all lines are read at once where none is."""
    for number, line in enumerate(body.split(b"\n"), start=1):
        if line.strip():
            try:
                parse_item(line, f"line {number}")
            except Invalid as found:
                return found
    return explained(error, "the body")


def _line_of(body: bytes, place: int) -> int:
    """The number of the line that the record at this place stands in."""
    written = [number for number, line in enumerate(body.split(b"\n"), start=1) if line.strip()]
    return written[place] if place < len(written) else len(written)
