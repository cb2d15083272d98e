"""Stored metadata values: JSON that says which version wrote it and checks itself. Knows no store.

    {"version": 1, "min_reader": 1, "crc": 305419896, "data": {…}}

`crc` is over "version,min_reader," in digits and the bytes of `data` as they stand. A reader older
than `min_reader` refuses; any other reads what it knows and, when it writes the value back, keeps
the fields it does not know.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from forebay.decoders import decoder
from forebay.errors import Corrupt, UnsupportedFormat
from forebay.format.checksum import crc32
from forebay.records import Bytes

READER_VERSION: Final = 1

T = TypeVar("T", bound=msgspec.Struct)


class Unknown(NamedTuple):
    """What a value held beyond what this version knows; given back to `encode_value` when it is rewritten."""

    version: int = 1
    min_reader: int = 1
    fields: dict[str, Any] = {}  # noqa: RUF012 - never changed in place


class _Envelope(msgspec.Struct):
    version: int
    min_reader: int
    crc: int
    data: msgspec.Raw


class _Claim(msgspec.Struct):
    """All that an older reader can know of a newer envelope."""

    min_reader: int


_ENVELOPES: Final = decoder(_Envelope)
_CLAIMS: Final = decoder(_Claim)
_FIELDS: Final = decoder(dict[str, Any])
_ENCODER: Final = msgspec.json.Encoder(order="deterministic")


def encode_value(value: msgspec.Struct, version: int = 1, min_reader: int = 1, unknown: Unknown | None = None) -> bytes:
    """The stored bytes of a value, with the unknown fields of the one it replaces."""
    if unknown is not None:
        version, min_reader = max(version, unknown.version), max(min_reader, unknown.min_reader)
    if unknown is not None and unknown.fields:
        inner = _ENCODER.encode({**unknown.fields, **_FIELDS.decode(_ENCODER.encode(value))})
    else:
        inner = _ENCODER.encode(value)
    crc = _crc(version, min_reader, inner)
    head = b'{"version":%d,"min_reader":%d,"crc":%d,"data":' % (version, min_reader, crc)
    return head + inner + b"}"


def decode_value(buffer: Bytes, kind: type[T]) -> tuple[T, Unknown]:
    """The value and what this version does not know of it.

    Raises `UnsupportedFormat` if only newer readers may use it, `Corrupt` if it does not check.
    """
    try:
        envelope = _ENVELOPES.decode(buffer)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        _refuse_newer(_claimed(buffer), kind)
        raise Corrupt(f"a stored {kind.__name__} is not readable: {error}") from error
    inner = bytes(envelope.data)
    crc = _crc(envelope.version, envelope.min_reader, inner)
    if crc != envelope.crc:
        raise Corrupt(f"a stored {kind.__name__} is damaged: crc {crc}, expected {envelope.crc}")
    _refuse_newer(envelope.min_reader, kind)
    try:
        known = decoder(kind).decode(inner)
        fields = _FIELDS.decode(inner)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupt(f"a stored {kind.__name__} is not readable: {error}") from error
    names = _names(kind)
    extra = {name: entry for name, entry in fields.items() if name not in names}
    return known, Unknown(envelope.version, envelope.min_reader, extra)


def _crc(version: int, min_reader: int, inner: bytes) -> int:
    return crc32(inner, crc32(b"%d,%d," % (version, min_reader)))


def _claimed(buffer: Bytes) -> int:
    try:
        return _CLAIMS.decode(buffer).min_reader
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return 0


def _refuse_newer(min_reader: int, kind: type[msgspec.Struct]) -> None:
    if min_reader > READER_VERSION:
        raise UnsupportedFormat(
            f"a stored {kind.__name__} needs a reader of version {min_reader}, this is {READER_VERSION}: upgrade"
        )


@lru_cache(maxsize=64)
def _names(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))
